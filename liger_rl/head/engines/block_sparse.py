"""The backward of the blocks that matter: which of the gradient's blocks are computed, and their products.

A block is BLOCK_TOKENS tokens times BLOCK_VOCAB vocabulary entries of dL/dlogits. The forward's statistics bound each
block's sum of squares. The smallest are left out while their bounds add up to at most tolerance^2 times a lower bound
of the whole gradient's, so that dL/dlogits is within `tolerance` of the exact one in the Frobenius norm, whatever the
loss.

What is left out of a token's row of a block is replaced by its sum, which the forward knows too. The tile's entries
share it as they share the tile's mass in a sample of the tokens (`left_out_blocks_triton.tile_shares`). The bounds are
of what that leaves. It keeps what the products need most. dL/dlogits adds up to zero over the vocabulary, and the rows
of a trained weight have much in common, so a sum that is a thousandth off is a large error of dL/dhidden. And ids that
are rarely sampled are rare at all tokens, in much the same proportions. Sums cost a 256th of the dense products.

Bounds are made where the product with the fold in its epilogue runs. All kernels here are Triton's, imported when
there are bounds. Everywhere else the backward is exact.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from liger_rl.head.engines import kept_share, two_pass
from liger_rl.head.engines.interface import Gradients, Head, Needs
from liger_rl.head.host_answer import HostAnswer
from liger_rl.head.options import EngineOptions
from liger_rl.kernels import gemm
from liger_rl.kernels.statistics import BlockPlan, LeftOut, TileBounds, TileShares, TokenGradients, TokenStatistics

# From this share of kept blocks on, the dense products are no slower than those of the blocks.
DENSE_SHARE = 0.85

Saved = TileBounds


@dataclass(frozen=True)
class ChosenBlocks:
    """Blocks chosen on the device. The host knows nothing of them yet."""

    order: Tensor  # (n,) permutation of the tokens, BLOCK_TOKENS to a row of blocks; those without a gradient last
    lists: Any  # `BlockLists` of those that are computed
    numbers: HostAnswer  # its `tile_count`
    left_out: LeftOut


def choose_blocks(
    known: TileBounds,
    statistics: TokenStatistics,  # (n,) each
    tokens: TokenGradients,  # (n,) each
    targets: Tensor,  # (n,)
    shares: TileShares,
    options: EngineOptions,  # with a tolerance > 0
    *,
    needs_hidden: bool,  # its gradient
) -> ChosenBlocks:
    """Choose on the device alone. Work that is launched before `plan_blocks` hides that call's wait."""
    from liger_rl.kernels import bounds_triton, left_out_blocks_triton
    from liger_rl.kernels.block_lists import BlockLists

    known, transform = known._replace(share_squares=shares.squares), options.transform
    ranking = bounds_triton.rank_tokens(known, statistics, tokens, targets, transform, options.grad_tolerance)
    order = ranking.key.argsort(stable=True)
    energies = bounds_triton.block_bounds(known, tokens, ranking.own, targets, order)
    keep = left_out_blocks_triton.choose(energies, ranking.budget)
    lists = BlockLists.of(keep, ranking.wanted)
    numbers = HostAnswer(lists.tile_count)
    sums = left_out_blocks_triton.left_out_sums(
        known, statistics, tokens, targets, order, keep, transform, options.compute_dtype
    )
    left_out = LeftOut(sums, shares.entries, gemm.matmul(sums, shares.rows) if needs_hidden else None)
    return ChosenBlocks(order, lists, numbers, left_out)


def plan_blocks(chosen: ChosenBlocks) -> BlockPlan:
    """Tell the host how much there is to do: the backward's one host sync."""
    numbers = chosen.numbers.wait()
    counts = numbers[:-1]
    return BlockPlan(counts, int(counts.sum()), int(numbers[-1]))


# No bounds where the product with the fold in its epilogue does not apply.
forward = partial(two_pass.forward, bounded=True)


def backward(
    head: Head,
    options: EngineOptions,
    statistics: TokenStatistics,
    known: TileBounds | None,
    tokens: TokenGradients,  # (n,) each, of the tokens that count
    needs: Needs,
) -> Gradients:
    """From the kept blocks; exact if so many are kept that the dense products are no slower. One host sync."""
    if known is None:
        return two_pass.backward(head, options, statistics, None, tokens, needs)
    from liger_rl.kernels import blocks_triton, left_out_blocks_triton

    transform, dtype, own_weight = options.transform, options.compute_dtype, head.weight
    head = head.with_weight_in(dtype)
    weight, bias = head.weight, head.bias
    live_targets = head.live.gather(head.targets)
    drawn = left_out_blocks_triton.draw(head.live.index, live_targets, statistics, tokens)
    shares = left_out_blocks_triton.tile_shares(drawn, head.hidden, weight, bias, transform, dtype)
    chosen = choose_blocks(known, statistics, tokens, live_targets, shares, options, needs_hidden=needs[0])
    # The tokens with a gradient in the order of their blocks, then the others.
    tokens, live = tokens.take(chosen.order), head.live.among(chosen.order)
    rows = head.gathered(dtype, live)
    inputs = blocks_triton.BlockInputs(rows.hidden, weight, bias, rows.targets, tokens, transform)
    room, most_of_row = options.blocks_bytes(*rows.hidden.shape), int(DENSE_SHARE * known.codes.shape[0])
    begun = blocks_triton.begin(inputs, chosen.lists, room, most_of_row)
    plan = plan_blocks(chosen)
    kept_share.record(own_weight, plan.share)
    live = live.first(plan.wanted)
    if not plan.wanted or plan.share > DENSE_SHARE:
        del rows, inputs, begun
        found = two_pass.gradients(head.gathered(dtype, live), options, tokens.take(slice(plan.wanted)), needs)
        return found.of_all_tokens(live, head)
    kept = blocks_triton.grad_blocks(begun, inputs, plan, chosen.left_out, (needs[1], needs[2]), own_weight.dtype)
    del rows, inputs, begun, chosen, shares  # what the gradient of all hidden states need not lie beside
    return Gradients(*kept).of_all_tokens(live, head)
