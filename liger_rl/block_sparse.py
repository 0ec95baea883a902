"""The backward of the blocks that matter: which of the gradient's blocks are computed, and their products.

A block is BLOCK_TOKENS tokens times BLOCK_VOCAB words of dL/dlogits. The forward's statistics bound each block's sum of
squares. The smallest are left out while their bounds add up to at most tolerance^2 times a lower bound of the whole
gradient's, so that dL/dlogits is within `tolerance` of the exact one in the Frobenius norm, whatever the loss.

What is left out of a token's row of a block is replaced by its sum, which the forward knows too, shared among the words
as they share the tile's mass in a sample of the tokens (`choice.tile_shares`). The bounds are of what that leaves.
It keeps what the products need most: dL/dlogits adds up to zero over the vocabulary, and the rows of a trained weight
have much in common, so that a sum which is a thousandth off is a large error of dL/dhidden; and words that a policy
rarely says are rare for all of its tokens, in much the same proportions. Sums cost a 256th of the dense products.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from liger_rl.host_answer import HostAnswer
from liger_rl.kernels import bounds_for, choice_for, gemm
from liger_rl.kernels.block_plan import BlockPlan
from liger_rl.kernels.statistics import TileBounds, TileShares, TokenGradients, TokenStatistics
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
    counted: Tensor  # see `choice.count`
    numbers: HostAnswer  # the same
    left_out: Tensor  # (n, padded tiles) sums of what is left out of dL/dx, in the dtype of products
    shares: Tensor  # (V,) of these, of a tile's words
    from_left_out: Tensor | None  # (n, H) float32, their product with the weight, where hidden's gradient is needed


def choose_blocks(
    known: TileBounds,
    statistics: TokenStatistics,  # (n,) each
    tokens: TokenGradients,  # (n,) each
    targets: Tensor,  # (n,)
    shares: TileShares,
    transform: LogitTransform,
    tolerance: Tolerance,
    compute_dtype: torch.dtype,
    *,
    needs_hidden: bool,  # its gradient
) -> ChosenBlocks:
    """Choose on the device alone; what it is given to do before `plan_blocks` hides that call's wait."""
    kernels, chooser = bounds_for(targets.device), choice_for(targets.device)
    known = known._replace(share_squares=shares.squares)
    ranking = kernels.rank_tokens(known, statistics, tokens, targets, transform, tolerance.relative)
    order = ranking.key.argsort(stable=True)
    energies = kernels.block_bounds(known, tokens, ranking.own, targets, order)
    scales = chooser.choose(energies, ranking.budget)
    if tolerance.seed is not None:
        scales = _sampled(energies, scales != 0, tolerance.seed)
    counted = chooser.count(scales, ranking.key)
    numbers = HostAnswer(counted)
    left_out = chooser.left_out_sums(
        known, statistics, tokens, targets, order, scales, transform, shares.words.numel(), compute_dtype
    )
    from_left_out = gemm.matmul(left_out, shares.rows) if needs_hidden else None
    return ChosenBlocks(order, scales, counted, numbers, left_out, shares.words, from_left_out)


def plan_blocks(chosen: ChosenBlocks) -> BlockPlan:
    """Tell the host how much there is to do: the backward's one host sync."""
    numbers = chosen.numbers.wait()
    _, counts, certain = numbers.split([1, *2 * [chosen.scales.shape[1]]])
    return BlockPlan(chosen.scales, chosen.counted, counts, int(counts.sum()), int(certain.sum()), int(numbers[0]))


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
