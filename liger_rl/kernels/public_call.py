"""What public functions share: two errors, and the break in a graph of torch.compile."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

import torch

from liger_rl.hints import hint
from liger_rl.kernels.transform import LogitTransform

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def public(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorator: the TypeError for an unknown keyword names the right one or lists all; graphs break around a call."""
    return _boundary(function, [name for name in signature(function).parameters if name != "self"])


def outside_of_graphs(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorator: under torch.compile the graph breaks around a call, which runs in eager mode."""
    return _boundary(function, None)


def _boundary(function: Callable[Arguments, Result], known: Sequence[str] | None) -> Callable[Arguments, Result]:
    """`known`: the names of the keywords; None does not check them."""
    known_names = None if known is None else frozenset(known)

    @wraps(function)
    def checked(*args: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        if known_names is not None and not known_names.issuperset(keywords):
            raise TypeError(_unknown_keyword(function.__qualname__, keywords, known or ()))
        # Dynamo of torch 2.8 runs a frame without operations as it is, and compiles what it calls.
        if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
            from liger_rl.kernels.graph_break import run_in_eager_mode

            result: Result = run_in_eager_mode(function, *args, **keywords)
            return result
        return function(*args, **keywords)

    return checked


def _unknown_keyword(called: str, keywords: Mapping[str, object], known: Sequence[str]) -> str:
    name = next(name for name in keywords if name not in known)
    text, value = f"{called} got an unexpected argument {name!r}", keywords[name]
    if "transform" in known and name in LogitTransform.__dataclass_fields__:
        return f"{text}; write transform=LogitTransform({name}={value if isinstance(value, (int, float)) else '...'})"
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
