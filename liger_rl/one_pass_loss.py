"""A policy loss whose gradients are made in the forward: when that is possible, and how it is done."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_rl.call.dtensors import is_dtensor
from liger_rl.call.head_call import HeadCall
from liger_rl.call.options import EngineOptions
from liger_rl.call.tokens import LiveTokens, TokenSelection, counted_tokens, live_tokens
from liger_rl.engines.dense.one_pass import WithGradients, one_pass
from liger_rl.engines.dense.totals import OnePassPlan
from liger_rl.engines.interface import Head
from liger_rl.losses.batch import AlignedBatch
from liger_rl.losses.fused import evaluate, evaluate_with_slopes, slopes
from liger_rl.losses.loss import Locality, PolicyLoss, PolicyTerms, PreparedLoss
from liger_rl.losses.segments import Segments

# If more than this share of the tokens cannot have a gradient, each chunk picks its rows with one. That is a host sync.
SELECTED_SHARE = 0.05


def tokens_together(call: HeadCall, locality: Locality) -> int:
    """The most tokens that the gradient of one of them depends on."""
    if locality == "token":
        return 1
    return call.targets.shape[1] if locality == "sequence" and call.targets.dim() == 2 else call.targets.numel()


def loss_obstacle(call: HeadCall, terms: PolicyTerms, segments: Segments | None) -> str | None:
    """A need of one pass that the call or the loss does not meet; None if it meets all.

    `liger_rl.engines.dense.one_pass.lacks` checks the shapes.
    """
    if torch.compiler.is_compiling():
        return "a call outside torch.compile, which traces gradients in the backward"
    if call.support is not None:
        return "support = None: tokens that list their ids have no chunk of the vocabulary"
    if call.vocab_parallel is not None:
        return "vocab_parallel = None: no rank has the logits of the whole vocabulary"
    if any(map(is_dtensor, (call.hidden, call.weight, call.bias, call.targets))):
        return "tensors that are whole on this rank, got a DTensor"
    lacking = parts_obstacle(terms)
    if lacking is None and terms.locality != "token" and segments is not None and segments.all_reduce is not None:
        return "whole sequences on each rank; segments.all_reduce says that they are split"
    return lacking


def parts_obstacle(terms: PolicyTerms) -> str | None:
    """A need of one pass that the objective or a correction does not meet; None if all do."""
    for part in (terms.objective, *terms.corrections):
        if not (hasattr(part, "token_local") or hasattr(part, "sequence_local")):
            return f"a token_local or sequence_local attribute that says what the gradient of {_name(part)} depends on"
        if isinstance(part, nn.Module) and any(parameter.requires_grad for parameter in part.parameters()):
            return f"no parameters that want a gradient of their own in {_name(part)}"
    return None


def _name(part: Any) -> str:
    return getattr(part, "__name__", type(part).__name__)


class CountedTokens(NamedTuple):
    """The tokens that count, and the numbers that decide how chunks are made."""

    live: LiveTokens
    rows: list[int]  # live tokens of each padded sequence, if no chunk may split one; else empty
    together: int  # most live tokens that must be in one chunk
    selected: bool  # whether it pays to leave out rows without a gradient

    @property
    def number(self) -> int:
        return self.live.positions.numel()


def count_tokens(call: HeadCall, terms: PolicyTerms, aligned: AlignedBatch) -> CountedTokens:
    """Counts the tokens in the forward's one host sync. Raises ValueError for an id outside the vocabulary.

    Args:
        aligned: the result of `terms.check`.
    """
    shape = call.targets.shape
    in_rows = terms.locality == "sequence" and len(shape) == 2
    # With a needed_mask every needed token may have a gradient.
    may_have_gradient = terms.may_have_gradient(aligned) if call.needed_mask is None else None
    counts = []
    if in_rows:
        counts.append(counted_tokens(call.targets, call.mask).sum(1))
    if may_have_gradient is not None:
        counts.append(counted_tokens(call.targets, call.mask, may_have_gradient).sum()[None])
    live = live_tokens(
        call.targets, call.mask, call.weight.shape[0], "weight", wanted=call.needed_mask, counts=counts,
        targets_name=call.targets_name,
    )()  # fmt: skip
    n, rows = live.positions.numel(), live.counts[: shape[0]] if in_rows else []
    selected = may_have_gradient is not None and live.counts[-1] < (1 - SELECTED_SHARE) * n
    together = max([1, *rows]) if in_rows else min(n, tokens_together(call, terms.locality))
    return CountedTokens(live, rows, together, selected)


def loss_in_one_pass(
    call: HeadCall,
    counted: CountedTokens,
    prepare: Callable[[], PreparedLoss],  # called only after the first product is launched
    options: EngineOptions,
    plan: OnePassPlan,  # for the number of tokens that were counted
) -> PolicyLoss:
    """The loss of the tokens' log-probabilities, with its gradients already made.

    If many tokens cannot have a gradient, one host sync for each chunk picks the rest.
    """
    shape, n, live = call.targets.shape, counted.number, counted.live.selection
    if n <= plan.chunk_tokens:
        chunks = [slice(0, n)] if n else []
    elif counted.rows:
        chunks = _whole_rows(counted.rows, plan.chunk_tokens)
    else:
        chunks = [slice(first, min(first + plan.chunk_tokens, n)) for first in range(0, n, plan.chunk_tokens)]
    prepare = cache(prepare)
    whole_loss = WholeLoss(prepare, live, shape)
    chunk_losses = _ChunkLosses(prepare, live)
    hidden, ids = call.hidden.reshape(-1, call.hidden.shape[-1]), call.targets.reshape(-1)
    head = Head(hidden, call.weight, call.bias, None, None, ids, live, call.weight_grad)
    gradients_of = whole_loss if len(chunks) == 1 else chunk_losses
    result = one_pass(head, options, plan, chunks, gradients_of, call.needs, select=counted.selected)
    loss, metrics = whole_loss.result or whole_loss.evaluate(result.logps, result.entropy)
    inputs = call.hidden, call.weight, call.bias
    loss, _ = WithGradients.apply(loss.detach(), *inputs, result.gradients, result.deferred, call.weight_grad)
    return PolicyLoss(loss, metrics)


def _whole_rows(counts: Sequence[int], chunk_tokens: int) -> list[slice]:
    """Spans of live tokens, each of at most `chunk_tokens`, that do not split a row. counts[r] are the tokens of row r.

    Each row must fit a chunk.
    """
    chunks, first, last = [], 0, 0
    for count in counts:
        if last + count - first > chunk_tokens:
            chunks.append(slice(first, last))
            first = last
        last += count
    return [*chunks, slice(first, last)]


class WholeLoss:
    """The loss of all tokens: `evaluate` returns it. If one chunk holds all tokens, this is its `GradientsOf`."""

    def __init__(self, prepare: Callable[[], PreparedLoss], live: TokenSelection, shape: torch.Size) -> None:
        self.prepare, self.live, self.shape = prepare, live, shape
        self.result: PolicyLoss | None = None

    def evaluate(self, logps: Tensor, entropy: Tensor | None) -> PolicyLoss:
        entropy = None if entropy is None else self.live.spread(entropy, self.shape)
        return evaluate(self.prepare(), self.live.spread(logps, self.shape), entropy)

    def __call__(self, _chunk: slice, logps: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
        kernel_result = evaluate_with_slopes(self.prepare(), self.live.spread(logps, self.shape))
        if kernel_result is not None:
            self.result, all_slopes = kernel_result
            return self.live.gather(all_slopes.flatten()), None

        def loss(logps: Tensor, entropy: Tensor | None) -> Tensor:
            self.result = self.evaluate(logps, entropy)
            return self.result.loss

        return gradients_by_autograd(loss, logps, entropy)


class _ChunkLosses:
    """A `GradientsOf` for several chunks: the loss is the sum of the losses of the chunks."""

    def __init__(self, prepare: Callable[[], PreparedLoss], live: TokenSelection) -> None:
        self.prepare, self.live = prepare, live

    def __call__(self, chunk: slice, logps: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
        positions = chunk if self.live.index is None else self.live.index[chunk]
        grad_logps = slopes(self.prepare(), positions, logps)
        if grad_logps is not None:
            return grad_logps, None
        chunk_loss = self.prepare().take(positions)
        return gradients_by_autograd(lambda *values: chunk_loss.evaluate(*values).loss, logps, entropy)


@torch.enable_grad()
def gradients_by_autograd(
    loss: Callable[[Tensor, Tensor | None], Tensor], logps: Tensor, entropy: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """d loss / d logps and d loss / d entropy; None for the entropy if the loss does not depend on it."""
    leaves = [values.detach().requires_grad_() for values in (logps, entropy) if values is not None]
    value = loss(leaves[0], leaves[1] if len(leaves) > 1 else None)
    if not value.requires_grad:
        return torch.zeros_like(logps), None
    grad_logps, *grad_entropies = torch.autograd.grad(value, leaves, allow_unused=True)
    return torch.zeros_like(logps) if grad_logps is None else grad_logps, grad_entropies[0] if grad_entropies else None
