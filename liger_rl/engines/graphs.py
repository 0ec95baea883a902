"""Calls that a graph of torch.compile does not hold: the graph breaks around them."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_HIDDEN: dict[Callable, Callable] = {}


def break_graph(feature: str) -> None:
    """Break the graph around the call that torch.compile traces; with fullgraph=True Dynamo raises this message.

    Nothing happens in eager mode. What follows in the caller must be right in eager mode, too: it runs there next.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(
            f"{feature} does not run under torch.compile with fullgraph=True, because no graph holds it: leave "
            "fullgraph out, and the graph breaks around the call"
        )


def outside_of_graphs(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`function`, hidden from Dynamo. Dynamo would compile its frames one by one, and fails on some with torch 2.11."""
    # Dynamo takes seconds to load. Where it is not loaded, nothing is compiled.
    if "torch._dynamo" not in sys.modules:
        return function
    if function not in _HIDDEN:
        _HIDDEN[function] = torch.compiler.disable(function)
    return _HIDDEN[function]


def never_in_a_graph(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A public function that no graph holds: `break_graph`, then `outside_of_graphs`."""

    @wraps(function)
    def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        break_graph(function.__name__)
        return outside_of_graphs(function)(*args, **kwargs)

    return wrapper
