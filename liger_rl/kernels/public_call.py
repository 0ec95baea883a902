"""What public functions share: two errors, and the break in a graph of torch.compile."""

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar, get_args

import torch

from liger_rl.hints import hint, translate

NO_MODEL = "; it takes no model and no trainer: call it before they are built"  # of patches, whose options have names
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def public(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorator: the TypeError for an unknown keyword names the right one or lists all; graphs break around a call."""
    return _boundary(function, {name: p for name, p in signature(function).parameters.items() if name != "self"})


def outside_of_graphs(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorator: under torch.compile the graph breaks around a call, which runs in eager mode."""
    return _boundary(function, None)


class NamedOptions:
    """Base of dataclasses: the TypeError for an unknown option names the right one or lists all."""

    def __new__(cls, *_: object, **options: object) -> Any:
        if not options.keys() <= getattr(cls, "__dataclass_fields__", options).keys():
            known = {name: p for name, p in signature(cls.__init__).parameters.items() if name != "self"}
            unknown = not options.keys() <= known.keys()
            if unknown and all(p.kind is not p.VAR_KEYWORD for p in known.values()):
                raise TypeError(_unknown_keyword(cls.__name__, options, known))
        return super().__new__(cls)


def _boundary(
    function: Callable[Arguments, Result], known: Mapping[str, Parameter] | None
) -> Callable[Arguments, Result]:
    """`known`: the parameters by name; None does not check the keywords."""
    known_names = None if known is None else frozenset(known)
    by_keyword = known is not None and all(p.kind is p.KEYWORD_ONLY for p in known.values())

    @wraps(function)
    def checked(*args: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        if known_names is not None and not known_names.issuperset(keywords):
            raise TypeError(_unknown_keyword(function.__qualname__, keywords, known or {}))
        if by_keyword and args:
            found = type(args[0]).__name__
            raise TypeError(f"{function.__qualname__} takes options by name alone, got a {found} without one{NO_MODEL}")
        # Dynamo of torch 2.8 runs a frame without operations as it is, and compiles what it calls.
        if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
            from liger_rl.kernels.graph_break import run_in_eager_mode

            result: Result = run_in_eager_mode(function, *args, **keywords)
            return result
        return function(*args, **keywords)

    return checked


def _unknown_keyword(called: str, keywords: Mapping[str, object], known: Mapping[str, Parameter]) -> str:
    name = next(name for name in keywords if name not in known)
    text, value, meant = f"{called} got an unexpected argument {name!r}", keywords[name], translate(name)
    shown = value if isinstance(value, (int, float)) and len(meant) == 1 else "..."
    for parameter, kind in ((p.name, kind) for p in known.values() for kind in (p.annotation, *get_args(p.annotation))):
        # The option of an argument, such as temperature of transform=LogitTransform(...).
        options = getattr(kind, "__dataclass_fields__", {}).keys()
        if set(meant) <= options and not set(meant) & known.keys():
            return f"{text}; write {parameter}={kind.__name__}({', '.join(f'{option}={shown}' for option in meant)})"
    return f"{text}{hint(name, known)}. Its arguments are {', '.join(known)}"


def refuse_second_derivative() -> None:
    """Raise in a backward whose gradients shall have a graph.

    `torch.autograd.function.once_differentiable` raises only if the gradient from above has a graph, too. A gradient
    penalty of log-probabilities would silently do nothing.
    """
    if torch.is_grad_enabled():  # only create_graph=True enables it in a backward
        raise RuntimeError(
            "create_graph must be False, got True: log-probabilities and losses of liger_rl can be differentiated "
            "once. Give another part of the graph its own torch.autograd.grad(..., create_graph=True)"
        )
