"""The backward of the blocks that matter: which of the gradient's blocks are computed, and their products.

A block is BLOCK_TOKENS tokens times BLOCK_VOCAB words of dL/dlogits. The forward's statistics bound each block's sum of
squares. The smallest are left out while their bounds add up to at most tolerance^2 times a lower bound of the whole
gradient's, so that dL/dlogits is within `tolerance` of the exact one in the Frobenius norm, whatever the loss.

What is left out of a token's row of a block is replaced by its mean, which the forward knows too. That only lowers the
error, and it keeps what the products need most: dL/dlogits adds up to zero over the vocabulary, and the rows of a
trained weight have much in common, so that a sum which is a thousandth off is a large error of dL/dhidden. Means cost a
256th of the dense products.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from liger_rl.host_answer import HostAnswer
from liger_rl.kernels import blocks_for, bounds_for, choice_for, eager, gemm
from liger_rl.kernels.choice import padded_tiles
from liger_rl.kernels.statistics import (
    BLOCK_TOKENS,
    BLOCK_VOCAB,
    MeanGradients,
    TileBounds,
    TokenGradients,
    TokenStatistics,
)
from liger_rl.kernels.transform import LogitTransform

# With `unbiased`, the root mean square of what sampling adds, over that of what is left out. At most 1 / 3^2 of the
# blocks that are left out come back for it on average, far fewer where their sizes differ.
SAMPLING_NOISE = 3.0


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How much of the gradient may be left out."""

    relative: float  # Frobenius norm of the error of dL/dlogits over that of dL/dlogits, > 0
    seed: int | None  # of the blocks that `unbiased` samples, None without it


@dataclass(frozen=True)
class ChosenBlocks:
    """Blocks chosen on the device, of which the host knows nothing yet."""

    order: Tensor  # (n,) permutation of the tokens, BLOCK_TOKENS of which make a row of blocks; without a gradient last
    scales: Tensor  # (row blocks, tiles) float32: 0 leaves a block out, 1 keeps it, more makes up for others
    means: Tensor  # (n, padded tiles) of what is left out of dL/dx, by word, in the dtype of products
    numbers: HostAnswer  # see `choice.count`


@dataclass(frozen=True)
class BlockPlan:
    """The blocks to compute, known to the host as far as it must plan for them."""

    rows: Tensor  # (n,) tokens with a gradient, in their order
    scales: Tensor  # (row blocks, tiles) of these, see `ChosenBlocks`
    counts: list[int]  # blocks kept in each tile
    means: Tensor  # (n, padded tiles), see `ChosenBlocks`
    certain: int  # blocks of scale 1, the same for every seed

    @property
    def share(self) -> float:
        """Blocks kept whatever the seed, of all the blocks of the tokens with a gradient.

        What is decided by it must not depend on the blocks drawn, or the expected gradient would not be the exact one.
        """
        return self.certain / max(self.scales.numel(), 1)


def choose_blocks(
    known: TileBounds,
    statistics: TokenStatistics,
    tokens: TokenGradients,
    targets: Tensor,
    transform: LogitTransform,
    tolerance: Tolerance,
    vocab: int,
    compute_dtype: torch.dtype,
) -> ChosenBlocks:
    """Choose on the device alone; what it is given to do before `plan_blocks` hides that call's wait."""
    kernels, chooser = bounds_for(targets.device), choice_for(targets.device)
    ranking = kernels.rank_tokens(known, statistics, tokens, targets, transform, tolerance.relative)
    order = ranking.key.argsort(stable=True)
    energies = kernels.block_bounds(known, tokens, ranking.own, targets, order)
    scales = chooser.choose(energies, ranking.budget)
    if tolerance.seed is not None:
        scales = _sampled(energies, scales != 0, tolerance.seed)
    numbers = HostAnswer(chooser.count(scales, ranking.key))
    means = chooser.tile_means(known, statistics, tokens, targets, order, scales, transform, vocab, compute_dtype)
    return ChosenBlocks(order, scales, means, numbers)


def plan_blocks(chosen: ChosenBlocks) -> BlockPlan:
    """Tell the host how much there is to do: the backward's one host sync."""
    wanted, *counts = chosen.numbers.wait()
    tiles, row_blocks = chosen.scales.shape[1], -(-wanted // BLOCK_TOKENS)
    kept, certain = counts[:tiles], counts[tiles:]
    return BlockPlan(chosen.order[:wanted], chosen.scales[:row_blocks], kept, chosen.means[:wanted], sum(certain))


def _sampled(energies: Tensor, kept: Tensor, seed: int) -> Tensor:
    """Scales that bring left-out blocks back now and then, so that the expected gradient is the exact one; 1 if kept.

    A block of bound E comes back with probability q and scale 1 / q, which adds E (1 / q - 1) to the expected square of
    the error. Of all q with one sum of these, those in proportion to sqrt(E) bring back the fewest blocks.

    It is the sum of E / q that is set: where q is cut off at 1, that of E (1 / q - 1) over the others may only fall.
    And it is set from what is left out, not from what might have been: a block far below the budget would use it up by
    a scale that makes it larger than all of the gradient, once in a very long while.
    """
    energy = torch.where(kept, 0.0, energies).double()
    amplitude = energy.sqrt()
    largest = SAMPLING_NOISE**2 * energy.sum() / amplitude.sum()
    probability = (amplitude / largest).clamp(max=1.0)
    generator = torch.Generator(energies.device).manual_seed(seed)
    draw = torch.rand(energies.shape, generator=generator, device=energies.device, dtype=torch.float64)
    drawn = torch.where(draw < probability, 1.0 / probability, 0.0).float()
    return torch.where(kept, 1.0, drawn)


def hidden_from_means(means: Tensor, weight: Tensor) -> Tensor:
    """(n, padded tiles) -> (n, H) float32: what the means of left-out blocks give the hidden states."""
    return gemm.matmul(means, _tile_sums(weight, means.dtype))


def grad_blocks(
    hidden: Tensor,  # (n, H) the rows of the plan, in the compute dtype
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (n,)
    tokens: TokenGradients,  # (n,) each
    plan: BlockPlan,
    hidden_start: Tensor | None,  # (n, H) as `hidden_from_means` makes it, or None where hidden needs no gradient
    transform: LogitTransform,
    needs: tuple[bool, bool],  # for weight, bias
    workspace: int,  # bytes of blocks at a time, where they are not made tile by tile
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(n, H) float32, (V, H) like the weight and (V,) like the bias, from the blocks of the plan and the means."""
    start = MeanGradients(
        hidden_start,
        gemm.matmul(plan.means.T, hidden) if needs[0] else None,
        gemm.column_sums(plan.means) if bias is not None and needs[1] else None,
    )
    given = (hidden, weight, bias, targets, tokens, plan.scales, plan.counts, transform, start)
    by_block = blocks_for(hidden.device)
    return _add_blocks(*given) if by_block is None else by_block(*given, workspace)


def _tile_sums(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(padded tiles, H) sums of the weight's rows over each tile."""
    vocab, size = weight.shape
    whole = vocab // BLOCK_VOCAB
    sums = torch.zeros(padded_tiles(vocab), size, dtype=dtype, device=weight.device)
    sums[:whole] = weight[: whole * BLOCK_VOCAB].view(whole, BLOCK_VOCAB, size).sum(1, dtype=torch.float32)
    if vocab % BLOCK_VOCAB:
        sums[whole] = weight[whole * BLOCK_VOCAB :].sum(0, dtype=torch.float32)
    return sums


def _add_blocks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    tokens: TokenGradients,
    scales: Tensor,
    counts: list[int],
    transform: LogitTransform,
    start: MeanGradients,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Plain PyTorch: the kept rows of one tile at a time."""
    n, compute_dtype = hidden.shape[0], hidden.dtype
    grad_weight = None if start.weight is None else torch.empty_like(weight)
    grad_bias = None if start.bias is None or bias is None else torch.empty_like(bias)
    row_scales = scales.repeat_interleave(BLOCK_TOKENS, 0)[:n]
    for tile in range(len(counts)):
        span = slice(tile * BLOCK_VOCAB, (tile + 1) * BLOCK_VOCAB)
        rows = row_scales[:, tile].nonzero().squeeze(1)
        weight_tile, bias_tile = weight[span].to(compute_dtype), None if bias is None else bias[span]
        logits = gemm.matmul(hidden[rows], weight_tile.T)
        block = torch.empty_like(logits, dtype=compute_dtype)
        scaled = tokens.take(rows).times(row_scales[rows, tile])
        eager.grad(logits, targets[rows], span.start, bias_tile, transform, scaled, block)
        if start.hidden is not None:
            start.hidden.index_add_(0, rows, gemm.matmul(block, weight_tile))
        if grad_weight is not None and start.weight is not None:
            grad_weight[span] = gemm.matmul(block.T, hidden[rows]) + start.weight[tile]
        if grad_bias is not None and start.bias is not None:
            grad_bias[span] = gemm.column_sums(block) + start.bias[tile]
    return start.hidden, grad_weight, grad_bias
