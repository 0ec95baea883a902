"""The autograd Function of the fused head: which tokens count, which are worth a gradient, and how it is made."""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.head.engines.block_sparse import choose_blocks, plan_blocks
from liger_rl.head.engines.invariant import fold_invariant
from liger_rl.head.engines.two_pass import (
    ProjectionGradients,
    ProjectionOptions,
    fold_projection,
    grad_projection,
    whole_head,
)
from liger_rl.head.low_rank import LowRankRows
from liger_rl.head.tokens import TokenSelection
from liger_rl.kernels import gemm
from liger_rl.kernels.devices import realigned
from liger_rl.kernels.statistics import TileBounds, TokenGradients, TokenStatistics
from liger_rl.once import differentiable_once

# From this share of kept blocks on, the dense products are no slower than those of the blocks. On an H200 (N = 8192,
# H = 4096, V = 128256) a step of these takes 36.2, 41.5 and 52.7 ms at 51%, 63% and 86%, a dense one 53 to 55.
DENSE_SHARE = 0.85


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
        rows = _gather(hidden, live, options.compute_dtype)
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
        chosen = plan = begun = picked = None
        if live.mask is not None:
            live = live.restricted(has_gradient(tokens))
            assert live.mask is not None
            tokens = tokens.silenced(live.mask)
        elif known is None:
            picked = select_rows(tokens)
        else:
            from liger_rl.kernels import blocks_triton, left_out_blocks_triton

            live_targets = live.gather(targets)
            shares = left_out_blocks_triton.tile_shares(
                hidden, live.index, live_targets, statistics, tokens, weight, bias, options.transform,
                options.compute_dtype,
            )  # fmt: skip
            chosen = choose_blocks(
                known, statistics, tokens, live_targets, shares, options.transform, options.tolerance,
                options.compute_dtype, needs_hidden=needs[0],
            )  # fmt: skip
            picked = chosen.order
        if picked is not None:
            tokens = tokens.take(picked)
            live = live.among(picked)
        rows, row_targets = _gather(hidden, live, options.compute_dtype), live.gather(targets)
        if chosen is not None:
            begun = blocks_triton.begin(
                rows, weight, bias, row_targets, tokens, chosen.keep, chosen.counted, options.transform,
                options.blocks_bytes, int(DENSE_SHARE * chosen.keep.shape[1]),
            )  # fmt: skip
            plan = plan_blocks(chosen)
            wanted = slice(plan.wanted)
            live = live.first(plan.wanted)
            if not plan.wanted or plan.share > DENSE_SHARE:
                tokens, rows, row_targets = tokens.take(wanted), rows[wanted], row_targets[wanted]
                chosen = plan = begun = None
        if chosen is None or plan is None or begun is None:
            low_rank = _low_rank_rows(low_inputs, low_weight, live)
            gradients = grad_projection(rows, weight, bias, row_targets, tokens, options, needs, low_rank)
            del low_rank
        else:
            of_hidden, of_weight, of_bias = blocks_triton.grad_blocks(
                begun, rows, weight, bias, row_targets, tokens, plan, chosen.left_out, chosen.shares,
                chosen.from_left_out,
                options.transform, needs[1:3],
            )  # fmt: skip
            gradients = ProjectionGradients(of_hidden, of_weight, of_bias, None, None)
        del rows, begun
        if gradients.hidden is not None:
            gradients = gradients._replace(hidden=live.scatter(gradients.hidden, hidden))
        if gradients.low_rank_inputs is not None and low_inputs is not None:
            gradients = gradients._replace(low_rank_inputs=live.scatter(gradients.low_rank_inputs, low_inputs))
    return gradients


def _low_rank_rows(inputs: Tensor | None, weight: Tensor | None, live: TokenSelection) -> LowRankRows | None:
    if inputs is None or weight is None:
        return None
    return LowRankRows(_gather(inputs, live, inputs.dtype), weight)


def has_gradient(tokens: TokenGradients) -> Tensor:
    """(n,) bool: the gradient is not exactly zero; true for NaN, which must reach the gradients and not be dropped."""
    wanted = tokens.grad_logps != 0
    return wanted if tokens.grad_entropy is None else wanted | (tokens.grad_entropy != 0)


def select_rows(tokens: TokenGradients) -> Tensor | None:
    """Index of the tokens whose gradient is not exactly zero, None for all of them. The backward's one host sync."""
    wanted = has_gradient(tokens)
    index = wanted.nonzero().squeeze(1)
    return None if index.numel() == wanted.numel() else index


def _gather(hidden: Tensor, live: TokenSelection, dtype: torch.dtype) -> Tensor:
    return realigned(live.gather(hidden).to(dtype).contiguous())
