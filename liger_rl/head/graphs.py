"""Calls that a graph of torch.compile does not hold: the graph breaks around them."""

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def check_not_compiling(feature: str) -> None:
    """Raise ValueError while torch.compile traces the call.

    Dynamo then breaks the graph around the call, which runs in eager mode with the same results. With fullgraph=True it
    raises this error.
    """
    if torch.compiler.is_compiling():
        raise ValueError(
            f"{feature} does not run in a graph under torch.compile: leave out fullgraph=True, and the graph breaks "
            "there, or make the call outside of the compiled function"
        )


def outside_of_graphs(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`function`, hidden from Dynamo. Dynamo would compile its frames one by one, and fails on some with torch 2.11."""
    # Dynamo takes seconds to load. Where it is not loaded, nothing is compiled.
    return _disabled(function) if "torch._dynamo" in sys.modules else function


@cache
def _disabled(function: Callable) -> Callable:
    return torch.compiler.disable(function)


def never_in_a_graph(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A public function that no graph holds: `check_not_compiling`, then `outside_of_graphs`."""

    @wraps(function)
    def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        check_not_compiling(function.__name__)
        return outside_of_graphs(function)(*args, **kwargs)

    return wrapper
