"""Layers of no known package. They may keep values of each call: running statistics, losses, counts.

They keep them in themselves or in what their code reaches: containers, objects, classes, globals, closures.
"""

import functools
import inspect
import itertools
import sys
import weakref
import zlib
from collections import UserDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

KNOWN_PACKAGES = {
    "accelerate", "aqlm", "awq", "bitsandbytes", "deepspeed", "eetq", "gptqmodel", "hqq", "liger_kernel", "liger_rl",
    "peft", "torch", "transformers", "trl", "wandb",
}  # fmt: skip
MAX_KEPT_VALUES = 1 << 20  # larger tensors and containers of a layer are weights or tables, not statistics
PLAIN = (int, float, complex, str, bytes)
TENSORS = (Tensor, nn.Parameter)
CONTAINERS = (tuple, list, set, deque, dict)
# What torch and DeepSpeed keep in a module.
MODULE_NAMES = vars(nn.Module()).keys() | {"applied_pre_backward_ref_cnt", "ds_grads_remaining"}


def list_unknown_layers(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those of a model's modules that run code of no known package."""
    kinds: Any = {type(module) for module in modules}
    unknown = {kind for kind in kinds if list_own_code(kind, kind.forward)}
    return [module for module in modules if type(module) in unknown] if unknown else []


def list_code(modules: Sequence[nn.Module]) -> frozenset[Any]:
    """What a model's modules run: weak references to classes, and code, which is equal if its source is."""
    kinds: Any = {type(module) for module in modules}
    # The model's own, the first, is wrapped anew by each trainer.
    functions = [vars(module)["forward"] for module in modules[1:] if "forward" in vars(module)]
    for kind in kinds:
        own = list_own_code(kind, kind.forward)
        functions += [kind.forward, *(list_variables(own).values() if own else ())]
    code = {_get_code(function) for function in functions if callable(function)}
    return frozenset(x if isinstance(x, CodeType) else weakref.ref(x) for x in kinds | code)


def _get_code(function: Any) -> Any:
    function = unwrap_call(function)
    return getattr(function, "__code__", type(function))


def unwrap_call(function: Any) -> Any:
    """The function that a partial or a bound method calls."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def list_own_code(kind: Any, forward: Any) -> tuple[Any, ...]:
    """Classes and functions of no known package that run in a layer of this class.

    FSDP2 and parametrizations make subclasses of a layer's class. `forward`: of the class, where others may put theirs.
    """
    return tuple(code for code in (*kind.__mro__, forward, inspect.unwrap(forward)) if is_own(code))


def is_known(origin: str) -> bool:
    return origin.partition(".")[0] in KNOWN_PACKAGES


def get_origin(value: Any) -> str:
    """The name of the Python module of a class, a function, a module or an object's class."""
    if isinstance(value, FunctionType):  # the __module__ of a wrapper is that of the function that it wraps
        return value.__globals__.get("__name__", "")
    return value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", type(value).__module__)


def is_own(value: Any, code: Sequence[Any] = ()) -> bool:
    """Whether it is of no known package and not Python's. With a layer's `code`: nor of another installed package."""
    origin = get_origin(value)
    packages, package = [get_origin(x).partition(".")[0] for x in code], origin.partition(".")[0]
    is_installed = "-packages" in (getattr(sys.modules.get(origin), "__file__", None) or "")
    is_other = bool(code) and is_installed and package not in packages
    return not (is_other or is_known(origin) or package in sys.stdlib_module_names)


def list_variables(code: Sequence[Any]) -> dict[str, Any]:
    """By name: attributes of classes, globals, closures and defaults of functions that the code reaches."""
    variables: dict[str, Any] = {}
    pending, seen = list(code), set(code)
    while pending:
        value = pending.pop()
        if isinstance(value, type):
            names = {name: x for name, x in vars(value).items() if not name.startswith("__")}
        else:
            read = inspect.getclosurevars(value)
            names = {"defaults": value.__defaults__, **read.globals, **read.nonlocals}
        for name, x in names.items():
            variables[f"{value.__qualname__}.{name}"] = x
            x = inspect.unwrap(getattr(x, "__func__", x))
            is_code = isinstance(x, FunctionType) or (isinstance(x, type) and not issubclass(x, nn.Module))
            if is_code and x not in seen and is_own(x, code):
                seen.add(x)
                pending.append(x)
    return variables


# --- what layers keep -------------------------------------------------------------------------------------------------


@contextmanager
def keeping_values(layers: Sequence[nn.Module]) -> Iterator[None]:
    """What the layers keep is as before at the end, except for variables of their code that are bound again."""
    copies: dict[int, tuple[Any, Any]] = {}
    read_values(layers, copies)
    try:
        yield
    finally:
        for value, content in copies.values():
            if isinstance(value, Tensor):
                if value.shape == content.shape:  # DeepSpeed gathers parameters
                    value.data.copy_(content)
            elif isinstance(value, dict):
                weights = {
                    key for key, x in value.items() if "_parameters" in value and isinstance(x, Tensor)
                }  # FSDP's
                for key in value.keys() - content.keys() - MODULE_NAMES - weights:
                    del value[key]
                value.update(content)
            elif not isinstance(value, tuple):
                value.clear()
                (value.update if isinstance(value, set) else value.extend)(content)


def read_values(layers: Sequence[nn.Module], copies: dict[int, tuple[Any, Any]]) -> dict[tuple[int, str], list[Any]]:
    """By (the layer's number, the name of an attribute or a variable): equal as long as the values are.

    `copies` gets what may change and a copy of its content, by id.
    """
    values: dict[tuple[int, str], list[Any]] = {}
    for number, layer in enumerate(layers):
        kind: Any = type(layer)
        code = list_own_code(kind, kind.forward)
        parameters = {name: x for name, x in layer._parameters.items() if type(x) is nn.Parameter}
        places = [list_variables(code), parameters]
        for place in (layer._buffers, vars(layer), *map(vars, layer.children())):
            places.append({name: x for name, x in place.items() if name not in MODULE_NAMES})
            copies[id(place)] = place, places[-1]
        for name, value in (item for place in places for item in place.items()):
            values.setdefault((number, name), []).append(_read(value, code, copies))
    return values


def _read(value: Any, code: Sequence[Any], copies: dict[int, tuple[Any, Any]]) -> Any:
    if isinstance(value, PLAIN):
        return value
    size = value.numel() if type(value) in TENSORS else len(value) if isinstance(value, CONTAINERS) else 0
    if id(value) in copies or size > MAX_KEPT_VALUES or isinstance(value, type | FunctionType | nn.Module):
        return None
    if type(value) in TENSORS:
        copies[id(value)] = value, value.detach().clone()
        return zlib.crc32(value.detach().flatten().view(torch.uint8).cpu().numpy())
    if isinstance(value, CONTAINERS):
        copies[id(value)] = value, dict(value) if isinstance(value, dict) else list(value)
        return [_read(x, code, copies) for x in (itertools.chain(*value.items()) if isinstance(value, dict) else value)]
    is_object = isinstance(value, SimpleNamespace | UserDict | PretrainedConfig) or is_own(value, code)
    return _read(getattr(value, "__dict__", None), code, copies) if is_object else None
