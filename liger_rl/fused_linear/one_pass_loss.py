"""A policy loss whose gradients are made in the forward: when that is possible, and how it is done."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from liger_rl.head.autograd import HeadGradients, HeadValues
from liger_rl.head.checks import Passes
from liger_rl.head.dense.one_pass import WithGradients, chunks_of, one_pass
from liger_rl.head.head_call import HeadCall
from liger_rl.head.head_options import resolved
from liger_rl.head.head_shape import HeadShape
from liger_rl.head.interface import Head
from liger_rl.head.live_tokens import counted_tokens, live_tokens
from liger_rl.head.plan import path_for
from liger_rl.kernels.statistics import map_fields
from liger_rl.losses.batch import AlignedBatch
from liger_rl.losses.fused import evaluate, with_gradients
from liger_rl.losses.loss import PolicyLoss, PolicyTerms, PreparedLoss
from liger_rl.losses.segments import Segments

# If more than this share of the tokens cannot have a gradient, each chunk picks its rows with one. That is a host sync.
SELECTED_SHARE = 0.05


def one_pass_shape(
    call: HeadCall, terms: PolicyTerms, aligned: AlignedBatch, passes: Passes, compute_dtype: torch.dtype
) -> HeadShape | None:
    """The shape of the call if one pass makes its gradients in the forward; None if another engine runs."""
    lacking = None if passes == "two" else loss_obstacle(call, terms, aligned.segments)
    if passes == "two" or (passes == "auto" and (lacking is not None or not any(call.needs))):
        return None
    options = resolved(call.options, compute_dtype, grad_tolerance=0.0 if call.exact else None)
    tokens = call.targets.shape
    # The most tokens that the gradient of one of them depends on.
    row = 2 * tokens[-1] if aligned.pairs else tokens[-1]
    together = {"token": 1, "sequence": row, "batch": tokens.numel()}[terms.locality]
    shape = HeadShape.of(call, options, passes=passes, together=together, loss_lacks=lacking)
    return shape if path_for(shape)[0] == "one pass" else None


def loss_obstacle(call: HeadCall, terms: PolicyTerms, segments: Segments | None) -> str | None:
    """A need of one pass that the call or the loss does not meet; None if it meets all.

    `liger_rl.head.dense.one_pass.lacks` checks the shapes.
    """
    if call.support is not None:
        return "support = None: tokens that list their ids have no chunk of the vocabulary"
    if call.vocab_parallel is not None:
        return "vocab_parallel = None: no rank has the logits of the whole vocabulary"
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


def prepared_loss(terms: PolicyTerms, aligned: AlignedBatch, call: HeadCall) -> PreparedLoss:
    """The loss of the tokens that count."""
    counted = counted_tokens(call.targets, call.mask)
    return terms.prepare(aligned, torch.float32, counted)


def loss_in_one_pass(
    call: HeadCall,
    shape: HeadShape,  # from `one_pass_shape`
    terms: PolicyTerms,
    aligned: AlignedBatch,  # from `terms.check`
) -> PolicyLoss:
    """The loss of the tokens' log-probabilities, with its gradients already values.

    The forward's one host sync counts the tokens, and raises for an id outside the vocabulary. If many tokens cannot
    have a gradient, another sync for each chunk picks the rest.
    """
    token_shape = call.targets.shape
    by_row = terms.locality == "sequence" and len(token_shape) == 2
    # With a needed_mask every needed token may have a gradient.
    may_have_gradient = terms.may_have_gradient(aligned) if call.needed_mask is None else None
    counts = [counted_tokens(call.targets, call.mask).sum(1)] if by_row else []
    if may_have_gradient is not None:
        counts.append(counted_tokens(call.targets, call.mask, may_have_gradient).sum()[None])
    live, counted = live_tokens(
        call.targets, call.mask, call.weight.shape[0], "weight", wanted=call.needed_mask, counts=counts,
        targets_name=call.targets_name,
    )()  # fmt: skip
    n, rows = live.count, counted[: token_shape[0]] if by_row else []
    if aligned.pairs and by_row:
        # The two rows of a pair come one after the other.
        pairs = token_shape[0] // 2
        index = torch.arange(n, device=call.targets.device) if live.index is None else live.index
        order = torch.argsort(index // max(token_shape[1], 1) % max(pairs, 1), stable=True)
        live, rows = replace(live, index=index[order]), [a + b for a, b in zip(rows, rows[pairs:], strict=False)]
    selected = may_have_gradient is not None and counted[-1] < (1 - SELECTED_SHARE) * n
    together = max([1, *rows]) if by_row else min(n, shape.together)
    plan = chunks_of(replace(shape, tokens=n, together=together))
    chunks = _chunks(n, rows, plan.chunk_tokens)

    prepare = cache(partial(prepared_loss, terms, aligned, call))  # called only after the first product is launched
    results: list[PolicyLoss] = []

    def spread(values: HeadValues) -> HeadValues:
        return map_fields(values, lambda value: live.spread(value, token_shape))

    def gradients_of_all(_chunk: slice, values: HeadValues) -> HeadGradients:
        result, grads = with_gradients(prepare(), **_arguments(spread(values)))
        results.append(result)
        return HeadGradients(**{name: live.gather(grad.flatten()) for name, grad in grads.items()})

    def gradients_of_chunk(chunk: slice, values: HeadValues) -> HeadGradients:
        positions = chunk if live.index is None else live.index[chunk]
        return HeadGradients(**with_gradients(prepare().take(positions), **_arguments(values))[1])

    hidden, ids = call.hidden.reshape(-1, call.hidden.shape[-1]), call.targets.reshape(-1)
    head = Head(hidden, call.weight, call.bias, ids, live)
    gradients_of = gradients_of_all if len(chunks) == 1 else gradients_of_chunk
    values, gradients = one_pass(head, shape.options, plan, chunks, gradients_of, call.needs, select=selected)
    loss, metrics = results[0] if results else evaluate(prepare(), **_arguments(spread(values)))
    loss, _ = WithGradients.apply(loss.detach(), call.hidden, call.weight, call.bias, gradients)
    return PolicyLoss(loss, metrics)


def _arguments(values: HeadValues) -> dict[str, Any]:
    """The arguments of `evaluate`."""
    present = {name: value for name, value in values._asdict().items() if value is not None}
    return {"logps": present.pop("logps"), "entropy": present.pop("entropy", None), "others": present}


def _chunks(tokens: int, rows: Sequence[int], chunk_tokens: int) -> list[slice]:
    """Spans of live tokens, each of at most `chunk_tokens`. If row r has rows[r] live tokens, no span splits a row."""
    if tokens <= chunk_tokens:
        return [slice(0, tokens)] if tokens else []
    if not rows:
        return [slice(first, min(first + chunk_tokens, tokens)) for first in range(0, tokens, chunk_tokens)]
    chunks, first, last = [], 0, 0
    for count in rows:
        if last + count - first > chunk_tokens:
            chunks.append(slice(first, last))
            first = last
        last += count
    return [*chunks, slice(first, last)]
