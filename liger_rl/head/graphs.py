"""What torch.compile is to leave alone after it has broken a graph."""

import sys
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable)


def outside_of_graphs(function: Function) -> Function:
    """`function` as it is. Dynamo would make a graph of each frame in it, and that of torch 2.11 fails on some."""
    # Where it is not loaded, which takes seconds, there is no graph.
    return _left_alone(function) if "torch._dynamo" in sys.modules else function


@cache
def _left_alone(function: Function) -> Function:
    return torch.compiler.disable(function)
