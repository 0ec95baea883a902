"""The autograd Function of the fused head: which tokens count, which are worth a gradient, and how it is made."""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.head.engines.block_sparse import block_sparse_gradients
from liger_rl.head.engines.invariant import fold_invariant
from liger_rl.head.engines.two_pass import (
    ProjectionGradients,
    ProjectionOptions,
    fold_projection,
    gathered,
    grad_projection,
    rows_with_gradient,
    whole_head,
)
from liger_rl.head.low_rank import LowRankRows
from liger_rl.head.tokens import TokenSelection
from liger_rl.kernels import gemm
from liger_rl.kernels.statistics import TileBounds, TokenGradients, TokenStatistics
from liger_rl.once import differentiable_once


class LinearLogProbs(torch.autograd.Function):
    """(hidden, weight, bias, targets, live) -> (logps, entropy, *EXTRAS) of the live tokens, None where not asked for.

    If `live` keeps places, outputs cover all N tokens; entries of tokens that do not count are undefined.
    Gradients of logps and entropy, for hidden, weight and bias, and for the two factors of a low-rank term where there
    is one: the logits are hidden @ weight.T + low_inputs @ low_weight.T + bias. A sharded head must be whole around the
    forward, whose caller has read its shape before; the backward enters `options.gather` by itself, once, whatever its
    rows are.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, live, options, low_inputs, low_weight):
        # hidden (N, H), targets (N,), low_inputs (N, r), low_weight (V, r), or None for both
        ctx.set_materialize_grads(False)
        head = HeadInputs(hidden, weight, bias, targets, live, low_inputs, low_weight)
        bounded = options.tolerance != 0.0 and any(ctx.needs_input_grad)
        statistics, known = fold_tokens(head, options, bounded=bounded)
        ctx.options, ctx.live = options, live
        # The extras have no gradient, and a gradient does not need them.
        tensors = hidden, weight, bias, targets, low_inputs, low_weight
        ctx.save_for_backward(*tensors, statistics.logps, statistics.lse, statistics.entropy, *(known or ()))
        logps, entropy, *extras = _values(statistics, head, options)
        ctx.mark_non_differentiable(*(values for values in extras if values is not None))
        return logps.clone(), None if entropy is None else entropy.clone(), *extras

    @staticmethod
    @differentiable_once
    def backward(ctx, saved, grad_logps, grad_entropy, *_):
        hidden, weight, bias, targets, low_inputs, low_weight, *kept = saved
        head = HeadInputs(hidden, weight, bias, targets, ctx.live, low_inputs, low_weight)
        statistics, known = TokenStatistics(*kept[:3]), TileBounds(*kept[3:]) if kept[3:] else None
        needs = ctx.needs_input_grad[:3] + ctx.needs_input_grad[6:]
        gradients = ProjectionGradients(None, None, None, None, None)
        if grad_logps is not None or grad_entropy is not None:
            gradients = token_gradients(head, statistics, known, grad_logps, grad_entropy, ctx.options, needs)
        return *gradients[:3], None, None, None, *gradients[3:]


Values = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def linear_values(head: "HeadInputs", options: ProjectionOptions) -> Values:
    """What `LinearLogProbs` gives, by way of it only where a gradient is wanted: that takes the host some launches."""
    if wants_gradient(head):
        return LinearLogProbs.apply(*head[:5], options, *head[5:])
    statistics, _ = fold_tokens(head, options, bounded=False)
    return _values(statistics, head, options)


def wants_gradient(head: "HeadInputs") -> bool:
    parts = (head.hidden, head.weight, head.bias, head.low_inputs, head.low_weight)
    return torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in parts)


def _values(statistics: TokenStatistics, head: "HeadInputs", options: ProjectionOptions) -> Values:
    vocab = head.weight.shape[0] if options.shard is None else options.shard.vocab
    mean_logits = statistics.mean_logits(vocab)
    return statistics.logps, statistics.entropy, statistics.log_sum_sq_probs, mean_logits, statistics.is_top1


class HeadInputs(NamedTuple):
    """The tensors that logits are made of, and what is asked of them."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    targets: Tensor  # (N,)
    live: TokenSelection
    low_inputs: Tensor | None  # (N, r)
    low_weight: Tensor | None  # (V, r)


def fold_tokens(
    head: HeadInputs, options: ProjectionOptions, *, bounded: bool
) -> tuple[TokenStatistics, TileBounds | None]:
    """Statistics of the live tokens, and bounds as `fold_projection` gives them."""
    hidden, weight, bias, targets, live, low_inputs, low_weight = head
    with gemm.without_autocast(hidden.device):
        rows = gathered(hidden, live, options.compute_dtype)
        live_targets = live.gather(targets)
        if options.batch_invariant:
            return fold_invariant(rows, weight, bias, live_targets, options), None
        low_rank = _low_rank_rows(low_inputs, low_weight, live)
        return fold_projection(rows, weight, bias, live_targets, options, low_rank, bounded=bounded)


def token_gradients(
    head: HeadInputs,
    statistics: TokenStatistics,  # (n,) each, as `fold_tokens` gave them
    known: TileBounds | None,
    grad_logps: Tensor | None,  # (n,)
    grad_entropy: Tensor | None,  # (n,), one of the two at least
    options: ProjectionOptions,
    needs: tuple[bool, bool, bool, bool, bool],  # for hidden, weight, bias, low_inputs and low_weight
) -> ProjectionGradients:
    """Gradients shaped like the inputs and of their dtypes."""
    hidden, weight, bias, targets, live, low_inputs, low_weight = head
    with gemm.without_autocast(hidden.device), whole_head(options.gather, weight, bias):
        if grad_logps is None:
            assert grad_entropy is not None
            grad_logps = torch.zeros_like(grad_entropy)
        tokens = TokenGradients.of(statistics, grad_logps.float(), grad_entropy)
        if known is None:
            rows, gradients = rows_with_gradient(hidden, targets, live, tokens, options), None
        else:
            rows, gradients = block_sparse_gradients(
                hidden, weight, bias, targets, live, known, statistics, tokens, options, needs[:3]
            )
        if gradients is None:
            low_rank = _low_rank_rows(low_inputs, low_weight, rows.live)
            gradients = grad_projection(rows.hidden, weight, bias, rows.targets, rows.tokens, options, needs, low_rank)
            del low_rank
        live = rows.live
        del rows  # their hidden states are a copy, which the gradient of all of them need not lie beside
        if gradients.hidden is not None:
            gradients = gradients._replace(hidden=live.scatter(gradients.hidden, hidden))
        if gradients.low_rank_inputs is not None and low_inputs is not None:
            gradients = gradients._replace(low_rank_inputs=live.scatter(gradients.low_rank_inputs, low_inputs))
    return gradients


def _low_rank_rows(inputs: Tensor | None, weight: Tensor | None, live: TokenSelection) -> LowRankRows | None:
    if inputs is None or weight is None:
        return None
    return LowRankRows(gathered(inputs, live, inputs.dtype), weight)
