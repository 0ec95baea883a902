"""Gradients from chosen blocks alone, in plain PyTorch, on any device: the kept rows of one tile at a time."""

import torch
from torch import Tensor

from liger_rl.kernels import eager, gemm
from liger_rl.kernels.block_plan import BlockPlan, LeftOutGradients
from liger_rl.kernels.statistics import BLOCK_TOKENS, BLOCK_VOCAB, TokenGradients
from liger_rl.kernels.transform import LogitTransform


def begin(
    hidden: Tensor,  # (n, H) in the compute dtype
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (n,)
    tokens: TokenGradients,  # (n,) each
    keep: Tensor,  # (row blocks, tiles) bool, see `BlockPlan`
    counted: Tensor,  # as `choice.count` gives it
    transform: LogitTransform,
    workspace: int,  # bytes of blocks at a time, where they are not made tile by tile
    most_of_row: int,  # nothing need be done if the rows of blocks with a gradient keep more on average
) -> Tensor:
    """Whatever can be done before the host knows of any block, for `grad_blocks` with the same inputs.

    Here whether each row is kept in each tile.
    """
    return keep.repeat_interleave(BLOCK_TOKENS, 0)


def grad_blocks(
    begun: Tensor,  # as `begin` gave it
    hidden: Tensor,  # (n, H) in the compute dtype
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (n,)
    tokens: TokenGradients,  # (n,) each
    plan: BlockPlan,
    left_out: Tensor,  # (n, tiles or more) sums of what is left out of dL/dlogits, in the compute dtype
    shares: Tensor,  # (V,) float32, of these, of a tile's words
    from_left_out: Tensor | None,  # (n, H) float32, overwritten: their product with the weight; None if not needed
    transform: LogitTransform,
    needs: tuple[bool, bool],  # for weight and bias
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(wanted, H) float32, (V, H) like the weight and (V,) like the bias, of the plan's blocks and all else."""
    wanted = slice(plan.wanted)
    hidden, targets, tokens = hidden[wanted], targets[wanted], tokens.take(wanted)
    compute_dtype = hidden.dtype
    grad_hidden = None if from_left_out is None else from_left_out[wanted]
    start = LeftOutGradients.of(left_out[wanted], hidden, grad_hidden, (needs[0], needs[1] and bias is not None))
    grad_weight = None if start.weight is None else torch.empty_like(weight)
    grad_bias = None if start.bias is None or bias is None else torch.empty_like(bias)
    kept_rows = begun[wanted]
    for tile in range(plan.counts.numel()):
        span = slice(tile * BLOCK_VOCAB, (tile + 1) * BLOCK_VOCAB)
        rows = kept_rows[:, tile].nonzero().squeeze(1)
        weight_tile, bias_tile = weight[span].to(compute_dtype), None if bias is None else bias[span]
        logits = gemm.matmul(hidden[rows], weight_tile.T)
        block = torch.empty_like(logits, dtype=compute_dtype)
        eager.grad(logits, targets[rows], span.start, bias_tile, transform, tokens.take(rows), block)
        if start.hidden is not None:
            start.hidden.index_add_(0, rows, gemm.matmul(block, weight_tile))
        if grad_weight is not None and start.weight is not None:
            grad_weight[span] = gemm.matmul(block.T, hidden[rows]) + shares[span, None] * start.weight[tile]
        if grad_bias is not None and start.bias is not None:
            grad_bias[span] = gemm.column_sums(block) + shares[span] * start.bias[tile]
    return start.hidden, grad_weight, grad_bias
