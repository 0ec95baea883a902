"""The modules and parameters of a model, looked up once for each of its calls.

A call asks a dozen questions about them. A model with adapters has thousands of modules, and a walk over them takes
milliseconds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn

_walks: ContextVar[dict[int, list[nn.Module]] | None] = ContextVar("liger_rl_walks", default=None)


@contextmanager
def walked_once() -> Iterator[None]:
    """In this context `list_modules` walks over a model once. The model's modules must not change in it."""
    token = _walks.set({} if _walks.get() is None else _walks.get())
    try:
        yield
    finally:
        _walks.reset(token)


def list_modules(model: nn.Module) -> list[nn.Module]:
    """`list(model.modules())`"""
    walks = _walks.get()
    if walks is None:
        return list(model.modules())
    if id(model) not in walks:
        walks[id(model)] = list(model.modules())
    return walks[id(model)]


def list_parameters(model: nn.Module) -> list[nn.Parameter]:
    """`list(model.parameters())`"""
    found = {id(p): p for module in list_modules(model) for p in module._parameters.values() if p is not None}
    return list(found.values())
