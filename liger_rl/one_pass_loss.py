"""A policy loss whose gradients are made in the forward: when that is possible, and how it is done."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_rl.call.dtensors import is_dtensor
from liger_rl.call.head_call import HeadCall
from liger_rl.call.options import EngineOptions
from liger_rl.call.tokens import LiveTokens, counted_tokens, live_tokens
from liger_rl.engines.dense.one_pass import WithGradients, one_pass
from liger_rl.engines.dense.totals import OnePassPlan
from liger_rl.engines.interface import Head
from liger_rl.losses.batch import AlignedBatch
from liger_rl.losses.fused import chunk_gradients, evaluate, with_gradients
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
    lacking = terms_obstacle(terms)
    if lacking is None and terms.locality != "token" and segments is not None and segments.all_reduce is not None:
        return "whole sequences on each rank; segments.all_reduce says that they are split"
    return lacking


def terms_obstacle(terms: PolicyTerms) -> str | None:
    """A need of one pass that the objective or a correction does not meet; None if all do."""
    for term in (terms.objective, *terms.corrections):
        if not (hasattr(term, "token_local") or hasattr(term, "sequence_local")):
            return f"a token_local or sequence_local attribute that says what the gradient of {_name(term)} depends on"
        if isinstance(term, nn.Module) and any(parameter.requires_grad for parameter in term.parameters()):
            return f"no parameters that want a gradient of their own in {_name(term)}"
    return None


def _name(term: Any) -> str:
    return getattr(term, "__name__", type(term).__name__)


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
    results: list[PolicyLoss] = []

    def spread(*columns: Tensor | None) -> list[Any]:
        return [None if column is None else live.spread(column, shape) for column in columns]

    def gradients_of_all(_chunk: slice, logps: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
        result, grad_logps, grad_entropy = with_gradients(prepare(), *spread(logps, entropy))
        results.append(result)
        grad_entropy = None if grad_entropy is None else live.gather(grad_entropy.flatten())
        return live.gather(grad_logps.flatten()), grad_entropy

    def gradients_of_chunk(chunk: slice, logps: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
        positions = chunk if live.index is None else live.index[chunk]
        return chunk_gradients(prepare(), positions, logps, entropy)

    hidden, ids = call.hidden.reshape(-1, call.hidden.shape[-1]), call.targets.reshape(-1)
    head = Head(hidden, call.weight, call.bias, None, None, ids, live, call.weight_grad)
    gradients_of = gradients_of_all if len(chunks) == 1 else gradients_of_chunk
    made = one_pass(head, options, plan, chunks, gradients_of, call.needs, select=counted.selected)
    loss, metrics = results[0] if results else evaluate(prepare(), *spread(made.logps, made.entropy))
    inputs = call.hidden, call.weight, call.bias
    loss, _ = WithGradients.apply(loss.detach(), *inputs, made.gradients, made.deferred, call.weight_grad)
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
