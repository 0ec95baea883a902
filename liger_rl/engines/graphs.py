"""Functions that no graph of torch.compile can hold: the graph breaks around their calls."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_HIDDEN: dict[Callable, Callable] = {}


def break_graph(feature: str) -> None:
    """Break the graph of torch.compile at this call. With fullgraph=True Dynamo raises the message instead.

    In eager mode the function does nothing. After the break the rest of the caller runs in eager mode, so its code must
    be right there too.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(
            f"{feature} does not run under torch.compile with fullgraph=True, because no graph holds it: leave "
            "fullgraph out, and the graph breaks around the call"
        )


def outside_of_graphs(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`function` wrapped so that Dynamo skips it.

    Otherwise Dynamo compiles its frames one by one, and torch 2.11 fails on some of them.
    """
    # Loading Dynamo takes seconds. While Dynamo is not loaded, nothing is compiled.
    if "torch._dynamo" not in sys.modules:
        return function
    if function not in _HIDDEN:
        _HIDDEN[function] = torch.compiler.disable(function)
    return _HIDDEN[function]


def never_in_a_graph(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorator of a public function that no graph can hold: `break_graph`, then `outside_of_graphs`."""

    @wraps(function)
    def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        break_graph(function.__name__)
        return outside_of_graphs(function)(*args, **kwargs)

    return wrapper
