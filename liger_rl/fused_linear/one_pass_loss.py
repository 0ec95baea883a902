"""A policy loss whose gradients are made in the forward: when that is possible, and how it is done."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_rl.head.checks import Passes
from liger_rl.head.dense.one_pass import OnePass, WithGradients, chunks_of, run_one_pass
from liger_rl.head.live_tokens import find_counted, scatter_rows, start_selection, take_rows
from liger_rl.head.plan import choose_engine
from liger_rl.head.record import Head, LogProbs
from liger_rl.head.workload import Workload
from liger_rl.kernels.statistics import map_fields
from liger_rl.losses.batch import AlignedBatch
from liger_rl.losses.fused import evaluate, with_gradients
from liger_rl.losses.loss import PolicyLoss, PolicyTerms, PreparedLoss
from liger_rl.losses.segments import Segments

# If more than this share of the tokens cannot have a gradient, each chunk picks its rows with one. That is a host sync.
SELECTED_SHARE = 0.05


def one_pass_work(head: Head, terms: PolicyTerms, aligned: AlignedBatch, passes: Passes) -> Workload | None:
    """The workload of the call if one pass makes its gradients in the forward; None if another engine runs."""
    tokens_per_gradient = 1  # the most tokens that the gradient of one of them depends on
    if terms.locality == "sequence":
        tokens_per_gradient = 2 * head.shape[-1] if aligned.pairs else head.shape[-1]
    elif terms.locality == "batch":
        tokens_per_gradient = head.shape.numel()
    work = Workload.of(head)._replace(
        passes=passes,
        tokens_per_gradient=tokens_per_gradient,
        reason_against_loss=_reason_against_call(head, terms, aligned.segments),
    )
    return work if choose_engine(work) is OnePass else None


def _reason_against_call(head: Head, terms: PolicyTerms, segments: Segments | None) -> str | None:
    """A need of one pass that the call or the loss does not meet; None if it meets all. `OnePass` checks the shapes."""
    if head.support is not None:
        return "support = None: tokens that list their ids have no chunk of the vocabulary"
    if head.vocab_parallel is not None:
        return "vocab_parallel = None: no rank has the logits of the whole vocabulary"
    for term in (terms.objective, *terms.corrections):
        if not (hasattr(term, "token_local") or hasattr(term, "sequence_local")):
            return f"a token_local or sequence_local attribute that says what the gradient of {_name(term)} depends on"
        if isinstance(term, nn.Module) and any(parameter.requires_grad for parameter in term.parameters()):
            return f"no parameters that want a gradient of their own in {_name(term)}"
    if terms.locality != "token" and segments is not None and segments.all_reduce is not None:
        return "whole sequences on each rank; segments.all_reduce says that they are split"
    return None


def _name(term: Any) -> str:
    return getattr(term, "__name__", type(term).__name__)


def prepare_loss(terms: PolicyTerms, aligned: AlignedBatch, head: Head) -> PreparedLoss:
    """The loss of the tokens that count."""
    return terms.prepare(aligned, torch.float32, find_counted(head.ids, head.mask))


def loss_in_one_pass(
    head: Head,
    work: Workload,  # from `one_pass_work`
    terms: PolicyTerms,
    aligned: AlignedBatch,  # from `terms.check`
) -> PolicyLoss:
    """The loss of the tokens' log-probabilities, with its gradients already values.

    The forward's one host sync counts the tokens, and raises for an id outside the vocabulary. If many tokens cannot
    have a gradient, another sync for each chunk picks the rest.
    """
    shape, ids = head.shape, head.ids
    by_row = terms.locality == "sequence" and len(shape) == 2
    # If only needed tokens are projected, every one of them may have a gradient.
    may_have_gradient = terms.may_have_gradient(aligned) if head.needed is None else None
    counts = [find_counted(ids, head.mask).sum(1)] if by_row else []
    if may_have_gradient is not None:
        counts.append(find_counted(ids, head.mask, may_have_gradient).sum()[None])
    live, counted = start_selection(
        ids, head.mask, work.vocab, needed=head.needed, counts=counts, targets_name=head.targets_name
    )()
    rows = counted[: shape[0]] if by_row else []
    if aligned.pairs and by_row:
        # The two rows of a pair come one after the other.
        pairs = shape[0] // 2
        index = torch.arange(ids.numel(), device=ids.device) if live is None else live
        order = torch.argsort(index // max(shape[1], 1) % max(pairs, 1), stable=True)
        live, rows = index[order], [a + b for a, b in zip(rows, rows[pairs:], strict=False)]
    n = work.tokens if live is None else live.numel()
    selects = may_have_gradient is not None and counted[-1] < (1 - SELECTED_SHARE) * n
    tokens_per_gradient = max([1, *rows]) if by_row else min(n, work.tokens_per_gradient)
    plan = chunks_of(work._replace(tokens=n, tokens_per_gradient=tokens_per_gradient))
    chunks = [slice(0, n)] if 0 < n <= plan.tokens else _make_chunks(n, rows, plan.tokens)
    prepared: PreparedLoss | None = None
    result: PolicyLoss | None = None

    def gradients_of(chunk: slice, values: LogProbs) -> LogProbs:
        nonlocal prepared, result
        if prepared is None:  # only now, because the first product has been launched
            prepared = prepare_loss(terms, aligned, head)
        if len(chunks) > 1:
            tokens = prepared.take(chunk if live is None else live[chunk])
            return LogProbs(**with_gradients(tokens, values.logps, values.entropy, other_values(terms, values))[1])
        values = map_fields(values, lambda value: scatter_rows(value, live, shape))
        result, grads = with_gradients(prepared, values.logps, values.entropy, other_values(terms, values))
        for name, grad in grads.items():
            grads[name] = take_rows(grad.flatten(), live)
        return LogProbs(**grads)

    head = head._replace(live=live)
    values, gradients = run_one_pass(head, chunks, plan.sum_dtype, gradients_of, work.needs, select=selects)
    if result is None:
        prepared = prepared or prepare_loss(terms, aligned, head)
        values = map_fields(values, lambda value: scatter_rows(value, live, shape))
        result = evaluate(prepared, values.logps, values.entropy, other_values(terms, values))
    loss, _ = WithGradients.apply(result.loss.detach(), head.hidden, head.weight, head.bias, gradients)
    return PolicyLoss(loss, result.metrics)


def other_values(terms: PolicyTerms, values: LogProbs) -> Mapping[str, Tensor]:
    """The values that the loss reads besides log-probabilities and entropies, by name."""
    return {name: getattr(values, name) for name in terms.reads}


def _make_chunks(tokens: int, rows: Sequence[int], chunk_tokens: int) -> list[slice]:
    """Spans of live tokens, each of at most `chunk_tokens`. If row r has rows[r] live tokens, no span splits a row."""
    if tokens == 0:
        return []
    if not rows:
        return [slice(first, min(first + chunk_tokens, tokens)) for first in range(0, tokens, chunk_tokens)]
    chunks, first, last = [], 0, 0
    for count in rows:
        if last + count - first > chunk_tokens:
            chunks.append(slice(first, last))
            first = last
        last += count
    return [*chunks, slice(first, last)]
