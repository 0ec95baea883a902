"""How a head gets into an operator of torch's own and out of it: as tensors and types that a schema has."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_rl.head.engines.interface import Gradients, Head, Needs
from liger_rl.head.options import EngineOptions, OpOptions
from liger_rl.head.tokens import TokenSelection
from liger_rl.kernels.statistics import TokenStatistics

# In the order of Head, with the mask of the tokens that count for `live`.
TENSORS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor? low_inputs, Tensor? low_weight, Tensor targets, Tensor live"
)
DIFFERENTIABLE, TENSOR_COUNT = 5, 7


def taken_apart(arguments: Sequence[Any]) -> tuple[Head, OpOptions]:
    hidden, weight, bias, low_inputs, low_weight, targets, live = arguments[:TENSOR_COUNT]
    selection = TokenSelection(live.numel(), mask=live)
    head = Head(hidden, weight, bias, low_inputs, low_weight, targets, selection)
    return head, OpOptions(*arguments[TENSOR_COUNT:])


def contiguous_like(inputs: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor]:
    return [
        torch.empty(part.shape, dtype=part.dtype, device=part.device)
        for part, needed in zip(inputs, needs, strict=True)
        if part is not None and needed
    ]


Pair = tuple[Callable[..., list[Tensor]], Callable[..., list[Tensor]]]


def registered(name: str, *, fold: Pair, grad: Pair, schema: str, grads: str, **options: Any) -> Pair:
    """The operator of that name, and that of its gradients, which takes `grads` before what the schema says.

    Both are given with the function that makes their outputs of no values.
    """
    found = []
    for full_name, (function, fake), first in ((name, fold, ""), (f"{name}_backward", grad, f"{grads}, ")):
        operator = torch.library.custom_op(
            f"liger_rl::{full_name}", function, mutates_args=(), schema=f"({first}{schema}) -> Tensor[]", **options
        )
        operator.register_fake(fake)
        found.append(operator)
    return found[0], found[1]


def gradients_by(backward: Callable[..., list[Tensor]], *rest: Any, outputs: int = 3) -> Callable[..., Gradients]:
    """`token_gradients` of an engine from the operator of its gradients; `rest` is what follows the head's tensors.

    The operator takes the gradients of so many outputs.
    """

    def gradients(
        head: Head,
        options: EngineOptions,
        statistics: TokenStatistics,
        saved: tuple[Tensor | None, ...] | None,
        grads: Sequence[Tensor | None],
        needs: Needs,
    ) -> Gradients:
        if all(grad is None for grad in grads):
            return Gradients()
        # What has no part in a gradient was not saved.
        known = [part for part in (*statistics[:3], *(saved or ())) if part is not None]
        found = iter(backward(*grads[:outputs], known, list(needs), *tensors_of(head), *rest))
        wanted = zip(head.differentiable, needs, strict=True)
        return Gradients(*(next(found) if part is not None and needed else None for part, needed in wanted))

    return gradients


def tensors_of(head: Head) -> tuple[Tensor | None, ...]:
    """In the order of TENSORS."""
    # Field by field: torch.compile of 2.8 knows no property of a NamedTuple.
    return head.hidden, head.weight, head.bias, head.low_inputs, head.low_weight, head.targets, head.live.mask
