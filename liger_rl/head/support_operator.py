"""The support engine as operators in a graph of torch.compile, as `liger_rl.head.operator` has the other engines.

What is wrong with the values of a support raises when the operator runs.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_rl.head.engines import support as engine
from liger_rl.head.engines.interface import Head
from liger_rl.head.function import Way, linear_values, token_gradients
from liger_rl.head.options import OP_OPTIONS, EngineOptions, OpOptions, flat_options
from liger_rl.head.schema import (
    TENSOR_COUNT,
    TENSORS,
    contiguous_like,
    gradients_by,
    registered,
    taken_apart,
    tensors_of,
)
from liger_rl.head.support import Support
from liger_rl.head.support_slots import ListedIds
from liger_rl.head.tokens import WAITING_OPERATOR, live_tokens
from liger_rl.kernels import gemm
from liger_rl.kernels.statistics import EXTRAS, TokenStatistics
from liger_rl.kernels.support import COUNTED, FULL_ROWS, Slots

LISTED = "Tensor token_ids, Tensor offsets, str missing_target, bool may_be_empty, bool distinct"
LISTED_COUNT = 5


def _apart(arguments: tuple[Any, ...]) -> tuple[Head, OpOptions]:
    return taken_apart(arguments[:-LISTED_COUNT])


def _listed(arguments: tuple[Any, ...]) -> Support:
    """Only where the operator runs: making one looks at values."""
    return Support(*arguments[-LISTED_COUNT:])


def _parts(options: OpOptions) -> list[bool]:
    """Which parts of TokenStatistics leave the operator."""
    return [True, True, options.entropy, *(name in options.extras.split(",") for name in EXTRAS)]


def _fold(*arguments: Any) -> list[Tensor]:
    (head, flat), listed = _apart(arguments), _listed(arguments)
    options, vocab, name = flat.resolved(), head.weight.shape[0], flat.targets_name
    with gemm.without_autocast(head.hidden.device):
        slots = engine.support_slots(listed, head.targets, head.live.mask, None, head.weight, options)

        def check() -> tuple[list[int], int]:
            wait = live_tokens(head.targets, head.live.mask, vocab, "weight", counts=[slots.numbers], targets_name=name)
            numbers = wait().counts
            return numbers, listed.check_values(numbers, vocab=vocab, targets_name=name)

        head = head._replace(listed=ListedIds(slots, None if options.fixed_shape else check))
        statistics, saved = engine.forward(head, options)
    return [part for part in (*statistics[:6], *slots[:6], *saved) if part is not None]


def _fake_fold(*arguments: Any) -> list[Tensor]:
    head, flat = _apart(arguments)
    n, device = head.targets.shape[0], head.hidden.device
    slots = arguments[-LISTED_COUNT].shape[0] + n

    def made(size: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    dtypes = (*[torch.float32] * 5, torch.bool)
    statistics = [made(n, dtype) for dtype, wanted in zip(dtypes, _parts(flat), strict=True) if wanted]
    counted = (made(slots, torch.int32), made(slots, torch.int32), made(n + 1, torch.int64), made(n, torch.uint8))
    return [*statistics, *counted, made(n, torch.bool), made(COUNTED, torch.int64), made(slots)]


def _grad(
    grad_logps: Tensor | None, grad_entropy: Tensor | None, outputs: list[Tensor], needs: list[bool], *arguments: Any
) -> list[Tensor]:
    head, flat = _apart(arguments)
    found = iter(outputs)
    statistics = TokenStatistics(next(found), next(found), next(found) if flat.entropy else None)
    slots = Slots(*(next(found) for _ in range(6)), head.weight.shape[0], 0)  # type: ignore[call-arg, arg-type]
    saved, grads = engine.Saved(*found), (grad_logps, grad_entropy, None)

    def check() -> tuple[list[int], int]:
        numbers = slots.numbers.tolist()
        return numbers, numbers[FULL_ROWS]

    *_, may_be_empty, _distinct = arguments
    head = head._replace(listed=ListedIds(slots, check if may_be_empty else None))
    gradients = token_gradients(engine, head, flat.resolved(), statistics, saved, grads, tuple(needs))
    return [part.contiguous() for part in gradients if part is not None]


def _fake_grad(
    grad_logps: Tensor | None, grad_entropy: Tensor | None, outputs: list[Tensor], needs: list[bool], *arguments: Any
) -> list[Tensor]:
    return contiguous_like(arguments[: len(needs)], needs)


SCHEMA = f"{TENSORS}, {OP_OPTIONS}, {LISTED}"
GRADS = "Tensor? grad_logps, Tensor? grad_entropy, Tensor[] outputs, bool[] needs"
_registered = partial(registered, fold=(_fold, _fake_fold), grad=(_grad, _fake_grad), schema=SCHEMA, grads=GRADS)
waiting, waiting_backward = _registered("support_logprobs", **WAITING_OPERATOR)
never_waiting, never_waiting_backward = _registered("support_logprobs_fixed_shape")


def _in_graph(*arguments: Any) -> list[Tensor]:
    head, flat = _apart(arguments)
    rest = arguments[TENSOR_COUNT:]
    forward, backward = (never_waiting, never_waiting_backward) if flat.fixed_shape else (waiting, waiting_backward)
    missing: list[Tensor] = []

    def fold(head: Head, options: EngineOptions) -> tuple[TokenStatistics, tuple[Tensor, ...]]:
        found = iter(forward(*tensors_of(head), *rest))
        parts = [next(found) if wanted else None for wanted in _parts(flat)]
        saved = tuple(found)
        missing.append(saved[4])
        return TokenStatistics(*parts), saved  # type: ignore[arg-type]

    values = linear_values(head, flat.resolved(), Way(fold, gradients_by(backward, *rest, outputs=2)))
    return [part for part in (*values, missing[0].clone()) if part is not None]


_LIBRARY = torch.library.Library("liger_rl", "FRAGMENT")
_LIBRARY.define(f"support_values({TENSORS}, {OP_OPTIONS}, {LISTED}) -> Tensor[]")
_LIBRARY.impl("support_values", _in_graph, "CompositeImplicitAutograd")


def support_op(head: Head, options: EngineOptions, listed: Support, *, targets_name: str) -> tuple[Any, ...]:
    """(logps, entropy, *EXTRAS, missing_target) of all N tokens; `head.live` has the mask of those that count."""
    flat = flat_options(options, targets_name)
    rest = listed.token_ids, listed.offsets, listed.missing_target, listed.may_be_empty, listed.distinct
    found = iter(torch.ops.liger_rl.support_values(*tensors_of(head), *flat, *rest))
    logps, entropy = next(found), next(found) if options.entropy else None
    return logps, entropy, *(next(found) if name in options.extras else None for name in EXTRAS), next(found)
