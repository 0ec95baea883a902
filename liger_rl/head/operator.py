"""The engines as operators of torch's own: a graph of torch.compile holds each as one node and does not look inside.

They have no derivative of their own. `LinearLogProbs` differentiates them as it does the engines themselves: a graph
first gets one composite operator, which AOTAutograd takes apart by running the Function in it.

How many tokens count is known only while an operator runs, so its inputs and outputs all keep the shape (N,), and
tokens are dropped and put back within.

torch.compile traces all that leads here. Torch 2.8 traces no `X | Y` in `isinstance` or in the annotations of a nested
function, no slice, `_replace` or call of a NamedTuple, no `vars` of a module, and no `if` on a tensor's bare integer.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_rl.head.engines import several, sparse, two_pass
from liger_rl.head.engines.interface import Head
from liger_rl.head.function import Way, linear_values, token_gradients
from liger_rl.head.low_rank import inputs_backward, inputs_forward, low_rank_inputs
from liger_rl.head.options import OP_OPTIONS, EngineOptions, OpOptions, flat_options
from liger_rl.head.schema import (
    DIFFERENTIABLE,
    TENSORS,
    contiguous_like,
    gradients_by,
    registered,
    taken_apart,
    tensors_of,
)
from liger_rl.head.tokens import WAITING_OPERATOR, TokenSelection, live_tokens
from liger_rl.kernels import gemm
from liger_rl.kernels.statistics import BLOCK_VOCAB, EXTRAS, TileStatistics, TokenStatistics


class Outputs(NamedTuple):
    """(N,) each, (N, K) log-probabilities of several targets; zero or meaningless at tokens that do not count.

    What is None does not leave the operator.
    """

    statistics: TokenStatistics
    known: TileStatistics | None  # what a backward with a tolerance needs
    has_bounds: Tensor | None  # (1,) bool on the host: whether `known` was made; the backward is exact where it was not

    def flat(self) -> list[Tensor]:
        parts = (*self.statistics, *(self.known or ()), self.has_bounds)
        return [part for part in parts if part is not None]

    @classmethod
    def named(cls, flat: Sequence[Tensor], options: OpOptions, *, bounded: bool) -> "Outputs":
        parts = iter(flat)
        extras = [name in options.extras.split(",") for name in EXTRAS]
        statistics = TokenStatistics(*_wanted(parts, True, True, options.entropy, *extras))  # type: ignore[arg-type]
        known = None
        if bounded:
            known = TileStatistics(*_wanted(parts, True, True, options.entropy))  # type: ignore[arg-type]
        return cls(statistics, known, *_wanted(parts, bounded))

    @classmethod
    def empty(cls, head: Head, options: OpOptions, *, bounded: bool) -> "Outputs":
        tokens, vocab, device = head.hidden.shape[0], head.weight.shape[0], head.hidden.device

        def made(dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(tokens, dtype=dtype, device=device)

        extras = [
            made(torch.bool if name == "is_top1" else torch.float32) if name in options.extras.split(",") else None
            for name in EXTRAS
        ]
        logps = torch.empty(head.targets.shape, dtype=torch.float32, device=device)
        statistics = TokenStatistics(logps, made(), made() if options.entropy else None, *extras)
        if not bounded:
            return cls(statistics, None, None)
        tiles = [torch.empty(-(-vocab // BLOCK_VOCAB), tokens, device=device) for _ in range(2 + options.entropy)]
        known = TileStatistics(*tiles, *[None] * (3 - len(tiles)))
        return cls(statistics, known, torch.empty(1, dtype=torch.bool, device="cpu"))


def _wanted(parts: Iterator[Tensor], *there: bool) -> list[Tensor | None]:
    return [next(parts) if is_there else None for is_there in there]


def _engine(head: Head, bounded: bool) -> ModuleType:
    if head.targets.dim() == 2:
        return several
    return sparse if bounded else two_pass


def _fold(*arguments: Any) -> list[Tensor]:
    *given, bounded = arguments
    head, options = taken_apart(given)
    if not options.fixed_shape:
        vocab, name = head.weight.shape[0], options.targets_name
        targets = head.targets.amax(1) if head.targets.dim() == 2 else head.targets
        live = live_tokens(targets, head.live.mask, vocab, "weight", targets_name=name)().selection
        head = head._replace(live=live)
    index = head.live.index
    with gemm.without_autocast(head.hidden.device):
        statistics, known = _engine(head, bounded).forward(head, options.resolved())
    out = Outputs.empty(head, options, bounded=bounded)
    for whole, part in zip(out.statistics, statistics, strict=True):
        _place(whole, part, index, 0)
    if out.known is not None and out.has_bounds is not None:
        out.has_bounds.fill_(known is not None)
        for whole, part in zip(out.known, known or [None] * len(out.known), strict=True):
            _place(whole, part, index, -1)
    return out.flat()


def _place(whole: Tensor | None, part: Tensor | None, index: Tensor | None, dim: int) -> None:
    """Values of n tokens along `dim` -> theirs of N, zero elsewhere; zero everywhere for None."""
    if whole is None:
        return
    if part is None:
        whole.zero_()
    elif index is None:
        whole.copy_(part)
    else:
        whole.zero_().index_copy_(dim, index, part)


def _fake_fold(*arguments: Any) -> list[Tensor]:
    *given, bounded = arguments
    head, options = taken_apart(given)
    return Outputs.empty(head, options, bounded=bounded).flat()


def _grad(
    grad_logps: Tensor | None, grad_entropy: Tensor | None, grad_lse: Tensor | None,
    outputs: list[Tensor], needs: list[bool], *arguments: Any,
) -> list[Tensor]:  # fmt: skip
    *given, bounded = arguments
    head, options = taken_apart(given)
    out = Outputs.named(outputs, options, bounded=bounded)
    # Zero where no token counts: those are then dropped with the other tokens that have no gradient, by one sync.
    grads = [None if grad is None else head.live.gather(grad) for grad in (grad_logps, grad_entropy, grad_lse)]
    if not options.fixed_shape:
        everything = TokenSelection(head.targets.numel())
        head = head._replace(targets=head.live.gather(head.targets), live=everything)
    known = out.known if out.has_bounds is not None and bool(out.has_bounds) else None
    engine = _engine(head, bounded)
    found = token_gradients(engine, head, options.resolved(), out.statistics, known, grads, tuple(needs))
    return [part.contiguous() for part in found if part is not None]


def _fake_grad(
    grad_logps: Tensor | None, grad_entropy: Tensor | None, grad_lse: Tensor | None,
    outputs: list[Tensor], needs: list[bool], *arguments: Any,
) -> list[Tensor]:  # fmt: skip
    return contiguous_like(arguments[:DIFFERENTIABLE], needs)


SCHEMA = f"{TENSORS}, {OP_OPTIONS}, bool bounded"
GRADS = "Tensor? grad_logps, Tensor? grad_entropy, Tensor? grad_lse, Tensor[] outputs, bool[] needs"
_registered = partial(registered, fold=(_fold, _fake_fold), grad=(_grad, _fake_grad), schema=SCHEMA, grads=GRADS)
# Two operators that compute the same, because an operator either has a tag or has it not.
waiting, waiting_backward = _registered("linear_logprobs", **WAITING_OPERATOR)
never_waiting, never_waiting_backward = _registered("linear_logprobs_fixed_shape")


def _way(flat: OpOptions, *, bounded: bool) -> Way:
    """The operators in place of an engine."""
    forward, backward = (never_waiting, never_waiting_backward) if flat.fixed_shape else (waiting, waiting_backward)

    def fold(head: Head, options: EngineOptions) -> tuple[TokenStatistics, tuple[Tensor | None, ...] | None]:
        out = Outputs.named(forward(*tensors_of(head), *flat, bounded), flat, bounded=bounded)
        return out.statistics, (*out.known, out.has_bounds) if out.known is not None else None

    return Way(fold, gradients_by(backward, *flat._replace(extras=""), bounded))


def _in_graph(*arguments: Any) -> list[Tensor]:
    head, flat = taken_apart(arguments)
    options = flat.resolved()
    way = _way(flat, bounded=head.may_leave_out(options))
    return [part for part in linear_values(head, options, way) if part is not None]


_LIBRARY = torch.library.Library("liger_rl", "FRAGMENT")
_LIBRARY.define(f"linear_values({TENSORS}, {OP_OPTIONS}) -> Tensor[]")
_LIBRARY.impl("linear_values", _in_graph, "CompositeImplicitAutograd")


def linear_op(head: Head, options: EngineOptions, *, targets_name: str) -> dict[str, Tensor | None]:
    """What `linear_values` gives, of all N tokens, by name; `head.live` has the mask of those that count.

    The others get 0, or with `fixed_shape` what means nothing.

    Raises:
        ValueError: when it runs, a target outside of the vocabulary, unless `fixed_shape`.
    """
    flat = flat_options(options, targets_name)
    found = iter(torch.ops.liger_rl.linear_values(*tensors_of(head), *flat))
    asked = {"logps": True, "entropy": options.entropy, "lse": options.lse}
    for name in EXTRAS:
        asked[name] = name in options.extras
    return {name: next(found) if wanted else None for name, wanted in asked.items()}


@torch.library.custom_op("liger_rl::low_rank_inputs_forward", mutates_args=())
def _inputs(hidden: Tensor, a: Tensor, live: Tensor, dtype: torch.dtype) -> Tensor:
    return inputs_forward(hidden, a, TokenSelection(live.numel(), mask=live), dtype)


@_inputs.register_fake
def _(hidden, a, live, dtype):
    return torch.empty(hidden.shape[0], a.shape[0], dtype=torch.float32, device=hidden.device)


@torch.library.custom_op("liger_rl::low_rank_inputs_backward", mutates_args=())
def _inputs_backward(
    grad: Tensor, hidden: Tensor, a: Tensor, live: Tensor, dtype: torch.dtype, needs: list[bool]
) -> list[Tensor]:
    found = inputs_backward(grad, hidden, a, TokenSelection(live.numel(), mask=live), dtype, needs)
    return [part.contiguous() for part in found if part is not None]


@_inputs_backward.register_fake
def _(grad, hidden, a, live, dtype, needs):
    return contiguous_like((hidden, a), needs)


def _inputs_in_graph(hidden: Tensor, a: Tensor, live: Tensor, dtype: torch.dtype) -> Tensor:
    def forward(hidden: Tensor, a: Tensor, live: TokenSelection, dtype: torch.dtype) -> Tensor:
        return _inputs(hidden, a, live.mask, dtype)

    def backward(
        grad: Tensor, hidden: Tensor, a: Tensor, live: TokenSelection, dtype: torch.dtype, needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        found = iter(_inputs_backward(grad, hidden, a, live.mask, dtype, list(needs)))
        return (next(found) if needs[0] else None), (next(found) if needs[1] else None)

    return low_rank_inputs(hidden, a, TokenSelection(live.numel(), mask=live), dtype, (forward, backward))


_LIBRARY.define("low_rank_inputs(Tensor hidden, Tensor a, Tensor live, ScalarType dtype) -> Tensor")
_LIBRARY.impl("low_rank_inputs", _inputs_in_graph, "CompositeImplicitAutograd")


def low_rank_inputs_op(hidden: Tensor, a: Tensor, live: TokenSelection, dtype: torch.dtype) -> Tensor:
    """`low_rank_inputs` in a graph, where `live` is a mask."""
    return torch.ops.liger_rl.low_rank_inputs(hidden, a, live.mask, dtype)
