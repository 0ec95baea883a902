"""Layers of no known package. They may keep values of each call: running statistics, losses."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

KNOWN_PACKAGES = {
    "accelerate", "aqlm", "awq", "bitsandbytes", "deepspeed", "eetq", "gptqmodel", "hqq", "liger_kernel", "liger_rl",
    "peft", "torch", "transformers", "trl", "wandb",
}  # fmt: skip
MAX_KEPT_VALUES = 1 << 20  # larger tensors of a layer are weights or tables, not statistics


def list_unknown_layers(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those of a model's modules that are of no known package."""
    kinds: Any = {type(module) for module in modules}
    unknown = {kind for kind in kinds if not _is_known_kind(kind)}
    return [module for module in modules if type(module) in unknown] if unknown else []


@functools.cache
def _is_known_kind(kind: Any) -> bool:
    return is_known(find_owner(kind).__module__)


def is_known(origin: str) -> bool:
    return origin.partition(".")[0] in KNOWN_PACKAGES


def find_owner(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that defines the forward. FSDP2 and parametrizations make subclasses of a layer's class."""
    return next(base for base in kind.__mro__ if "forward" in vars(base))


@contextmanager
def keeping_values(layers: Sequence[nn.Module]) -> Iterator[None]:
    """What the layers keep is as before at the end."""
    before = [copy_values(layer) for layer in layers]
    try:
        yield
    finally:
        for layer, values in zip(layers, before, strict=True):
            for name, (value, content) in values.items():
                get_places(layer, name)[name] = value
                if isinstance(value, Tensor):
                    value.data.copy_(content)
                else:
                    value[:] = content


def get_places(layer: nn.Module, name: str) -> dict[str, Any]:
    return layer._buffers if name in layer._buffers else vars(layer)


def copy_values(layer: nn.Module) -> dict[str, tuple[Any, Any]]:
    """By name: (a tensor or list of the layer, a copy of its values)."""
    values = {**vars(layer), **layer._buffers}
    tensors = {n: x for n, x in values.items() if isinstance(x, Tensor) and x.numel() <= MAX_KEPT_VALUES}
    lists = {name: value for name, value in values.items() if isinstance(value, list)}
    return {n: (x, x.detach().clone()) for n, x in tensors.items()} | {n: (x, list(x)) for n, x in lists.items()}
