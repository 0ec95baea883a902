"""Which blocks of a gradient are left out, and what takes their place, in plain PyTorch, on any device."""

import torch
from torch import Tensor

from liger_rl.kernels.bounds import NOT_WANTED, derivative, sums_beside_target, target_gradient, wide
from liger_rl.kernels.eager import transformed
from liger_rl.kernels.statistics import (
    BLOCK_TOKENS,
    BLOCK_VOCAB,
    TileBounds,
    TileShares,
    TokenGradients,
    TokenStatistics,
)
from liger_rl.kernels.transform import LogitTransform

# Bounds are added up in whole units of the budget, rounded up: a sum of integers is the same in any order, and PyTorch
# has no deterministic one of floats on CUDA. 2^27 blocks, each at most a unit above the budget, stay below 2^63.
BUDGET_UNITS = 2**36
# Sums of what is left out have rows of a multiple of so many tiles, for products that read them 16 bytes at a time.
TILE_MULTIPLE = 8
# Tokens that say how words share what is left out. Of a trained model's own tokens 64 say it as well as all of them.
SAMPLES = 64


def padded_tiles(vocab: int) -> int:
    """Columns of `left_out_sums`: the tiles of the vocabulary, and as many of zeros as fill up a multiple."""
    return -(-vocab // (BLOCK_VOCAB * TILE_MULTIPLE)) * TILE_MULTIPLE


def choose(energies: Tensor, budget: Tensor) -> Tensor:
    """Upper bounds (row blocks, tiles) -> bool, False for the smallest, as many as `budget` () has room for.

    Of equal ones the first are left out. None that is NaN is, and none at all where the budget is NaN, inf or not
    positive.
    """
    ascending, place = energies.flatten().sort(stable=True)
    units = (wide(ascending) * (BUDGET_UNITS / budget)).ceil_()
    usable = (budget > 0.0) & budget.isfinite()
    units = torch.where((units <= BUDGET_UNITS) & usable, units, BUDGET_UNITS + 1).long()
    kept = units.cumsum(0) > BUDGET_UNITS
    return torch.empty_like(kept).scatter_(0, place, kept).view_as(energies)


def count(keep: Tensor, key: Tensor) -> Tensor:
    """(1 + tiles,) int64: tokens with a gradient, by their `key` (n,); kept blocks of each tile."""
    wanted = (key != NOT_WANTED).sum(0, keepdim=True)
    return torch.cat([wanted, keep.sum(0)])


def left_out_sums(
    known: TileBounds,
    statistics: TokenStatistics,  # (n,) each
    tokens: TokenGradients,  # (n,) each
    targets: Tensor,  # (n,)
    order: Tensor,  # (n,) permutation of the tokens
    keep: Tensor,  # (row blocks, tiles) bool, of blocks of BLOCK_TOKENS of these
    transform: LogitTransform,
    vocab: int,
    dtype: torch.dtype,
) -> Tensor:
    """(n, padded tiles) sums of dL/dx over each tile of the vocabulary, 0 in blocks that are kept.

    Rows of tokens without a gradient mean nothing.
    """
    at_target = target_gradient(tokens, statistics.logps)
    if transform.softcap is not None:
        at_target = at_target * derivative(statistics.logps + statistics.lse, transform)
    sums = sums_beside_target(known, tokens)[:, order]
    target_tile = (targets[order] // BLOCK_VOCAB)[None]
    sums.scatter_(0, target_tile, sums.gather(0, target_tile) + at_target[order])
    kept_rows = keep.T.repeat_interleave(BLOCK_TOKENS, 1)[:, : order.numel()]
    sums.mul_(transform.scale / transform.temperature).masked_fill_(kept_rows, 0.0)
    return torch.nn.functional.pad(sums.T.to(dtype), (0, padded_tiles(vocab) - sums.shape[0]))


def tile_shares(
    hidden: Tensor,  # (N, H)
    index: Tensor | None,  # (n,) of the tokens in it, None for all
    targets: Tensor,  # (n,)
    statistics: TokenStatistics,  # (n,) each
    tokens: TokenGradients,  # (n,) each
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    transform: LogitTransform,
    dtype: torch.dtype,
) -> TileShares:
    """How a tile's words share what is left out of it: as they share its mass where SAMPLES of the tokens are.

    Words that few tokens are likely to say are rare for all of them, in much the same proportions. A token is drawn by
    the gradient that it has beside its target, of which the left-out sums are parts, and counts by its probabilities
    beside its target. Words of a tile in which none of these has any, have no share.
    """
    vocab, size = weight.shape
    drawn = _drawn(tokens)
    rows = hidden[drawn if index is None else index[drawn]].to(dtype).float()
    lse, own, counts = statistics.lse[drawn], targets[drawn], (-1.0 / torch.expm1(statistics.logps[drawn]))
    words = torch.empty(vocab, dtype=torch.float32, device=weight.device)
    sums = torch.zeros(padded_tiles(vocab), size, dtype=dtype, device=weight.device)
    squares = torch.empty(-(-vocab // BLOCK_VOCAB), dtype=torch.float32, device=weight.device)
    for tile, first in enumerate(range(0, vocab, BLOCK_VOCAB)):
        span = slice(first, first + BLOCK_VOCAB)
        part = weight[span].to(dtype).float()
        z = transformed(rows @ part.T, None if bias is None else bias[span], transform)
        p = counts[:, None] * (z - lse[:, None]).exp_()
        p.masked_fill_(own[:, None] == torch.arange(first, first + part.shape[0], device=own.device), 0.0)
        # One token's NaN must not reach the gradients of others.
        share = p.nan_to_num_(0.0, 0.0, 0.0).sum(0)
        share = (share / share.sum()).nan_to_num_(0.0, 0.0, 0.0)
        words[span], squares[tile], sums[tile] = share, share.square().sum(), share @ part
    return TileShares(words, squares, sums)


def _drawn(tokens: TokenGradients) -> Tensor:
    """(SAMPLES,) tokens, some of them more than once, at even steps of what they have beside their targets."""
    beside = tokens.at_target.abs()
    if tokens.grad_entropy is not None and tokens.entropy is not None:
        beside = beside + (tokens.grad_entropy * tokens.entropy).abs()
    n = beside.numel()
    if n == 0:
        return torch.empty(0, dtype=torch.long, device=beside.device)
    so_far = wide(beside).nan_to_num(0.0, 0.0, 0.0).cumsum(0)
    steps = torch.arange(SAMPLES, dtype=so_far.dtype, device=beside.device) + 0.5
    return torch.searchsorted(so_far, steps * (so_far[-1] / SAMPLES), right=True).clamp_(max=n - 1)
