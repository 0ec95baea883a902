"""Which blocks of a gradient are left out, and what takes their place, as Triton kernels.

The device has nothing else to do while these run, so what counts is that they are few.
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.kernels import gemm
from liger_rl.kernels.bounds_triton import slope_at_target, sum_beside_target
from liger_rl.kernels.devices import on
from liger_rl.kernels.launches import Launched, cdiv
from liger_rl.kernels.softmax import gradient_at_target, one_minus_exp, times_slope, transformed
from liger_rl.kernels.statistics import (
    BLOCK_TOKENS,
    BLOCK_VOCAB,
    SAMPLES,
    TileBounds,
    TileShares,
    TokenGradients,
    TokenStatistics,
)
from liger_rl.kernels.transform import LogitSteps, LogitTransform

CHOSEN, CHOOSING_WARPS = 4096, 8  # bounds that a step of the one program adds up
LEFT_OUT_TOKENS, LEFT_OUT_TILES = 32, 32  # of a program
DRAWN, DRAWING_WARPS = 256, 8  # tokens that the one program draws from at a time
SHARING_WARPS = 8
# Of the weight, which a program reads at a time. One H200, H = 2048 and 4096: 1.2 to 1.3 x the time of reading it
# once; 16 x 256 took 1.6 to 2.4 x.
WEIGHED_ENTRIES, WEIGHED_COLUMNS = 32, 512
# Sums of what is left out have rows of a multiple of so many tiles, for products that read them 16 bytes at a time.
TILE_MULTIPLE = 8
# Bounds are added up in whole units of the budget, rounded up: a sum of integers is the same in any order, and PyTorch
# has no deterministic one of floats on CUDA. 2^27 blocks, each at most a unit above the budget, stay below 2^63.
BUDGET_UNITS = 2**36
UNITS, MOST = tl.constexpr(float(BUDGET_UNITS)), tl.constexpr(BUDGET_UNITS)


@Launched
@triton.jit
def _choose_kernel(ascending, place, budget_at, keep, count, STEP: tl.constexpr):
    # One program, because what a bound finds left of the budget depends on all before it; 2^19 blocks are 128 steps.
    budget = tl.load(budget_at)
    # No comparison holds for NaN.
    per_energy = tl.where((budget > 0.0) & (budget < float("inf")), UNITS / budget, float("nan"))
    spent = tl.zeros((), tl.int64)
    for first in range(0, count, STEP):
        index = first + tl.arange(0, STEP)
        inside = index < count
        units = tl.ceil(tl.load(ascending + index, mask=inside, other=0.0).to(tl.float64) * per_energy)
        units = tl.where(units <= UNITS, units, UNITS + 1.0).to(tl.int64)
        kept = spent + tl.cumsum(units, 0) > MOST
        tl.store(keep + tl.load(place + index, mask=inside, other=0), kept, mask=inside)
        spent += tl.sum(units)


@Launched
@triton.jit
def _left_out_kernel(
    known,  # `TileBounds`
    statistics,  # `TokenStatistics`, (count,) each
    tokens,  # `TokenGradients`, (count,) each
    targets,
    order,
    keep,  # (row blocks, tiles) bool
    out,  # (count, width)
    count,
    tiles,
    width,
    steps,
    BLOCK_TOKENS: tl.constexpr,
    TILE_VOCAB: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * TOKENS
    position = first + tl.arange(0, TOKENS)
    live = position < count
    token = tl.load(order + position, mask=live, other=0)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    inside = live[:, None] & (tile < tiles)[None, :]
    place = tile.to(tl.int64)[None, :] * count + token[:, None]
    total = sum_beside_target(known, tokens, token[:, None], place, live[:, None], inside)
    logps = tl.load(statistics.logps + token, mask=live, other=0.0)
    at_target = gradient_at_target(tokens, token, live, logps)
    if steps.cap is not None:
        at_target *= slope_at_target(logps, statistics, token, live, steps)
    target_tile = tl.load(targets + token, mask=live, other=-1) // TILE_VOCAB
    total += tl.where(tile[None, :] == target_tile[:, None], at_target[:, None], 0.0)
    kept = tl.load(keep + first // BLOCK_TOKENS * tiles + tile, mask=tile < tiles, other=1) != 0
    total = tl.where(kept[None, :], 0.0, times_slope(total, steps))
    written = live[:, None] & (tile < width)[None, :]
    tl.store(out + position[:, None] * width + tile[None, :], total.to(out.dtype.element_ty), mask=written)


@Launched
@triton.jit(do_not_specialize=["count"])
def _draw_kernel(
    statistics,  # `TokenStatistics`, (count,) each
    tokens,  # `TokenGradients`, (count,) each
    targets,
    index,  # or None
    drawn,  # `Drawn`, (SAMPLES,) each
    count,
    SAMPLES: tl.constexpr,
    STEP: tl.constexpr,
):
    # One program, because where a token comes depends on all before it.
    total = tl.zeros((), tl.float64)
    for first in range(0, count, STEP):
        token = first + tl.arange(0, STEP)
        total += tl.sum(_beside_target(tokens, token, token < count))
    step = (tl.arange(0, SAMPLES) + 0.5) * (total / SAMPLES)
    so_far = tl.zeros((), tl.float64)
    place = tl.zeros((SAMPLES,), tl.int32)
    for first in range(0, count, STEP):
        token = first + tl.arange(0, STEP)
        live = token < count
        until = so_far + tl.cumsum(_beside_target(tokens, token, live), 0)
        place += tl.sum(((until[:, None] <= step[None, :]) & live[:, None]).to(tl.int32), 0)
        so_far = tl.max(until, 0)
    place = tl.minimum(place, count - 1)
    sample = tl.arange(0, SAMPLES)
    row = place.to(tl.int64)
    if index is not None:
        row = tl.load(index + place)
    tl.store(drawn.rows + sample, row)
    tl.store(drawn.lse + sample, tl.load(tokens.lse + place))
    tl.store(drawn.targets + sample, tl.load(targets + place).to(tl.int64))
    tl.store(drawn.counts + sample, 1.0 / one_minus_exp(tl.load(statistics.logps + place)))


@triton.jit
def _beside_target(tokens, token, live):
    """-> what a token counts in float64, 0 where that is not finite."""
    size = tl.abs(tl.load(tokens.at_target + token, mask=live, other=0.0))
    if tokens.grad_entropy is not None:
        e = tl.load(tokens.grad_entropy + token, mask=live, other=0.0)
        size += tl.abs(e * tl.load(tokens.entropy + token, mask=live, other=0.0))
    return tl.where(size < float("inf"), size, 0.0).to(tl.float64)


@Launched
@triton.jit
def _shares_kernel(
    logits,  # (V, SAMPLES) float32
    bias,
    drawn,  # `Drawn`, (SAMPLES,) each
    shares,  # (V,)
    squares,  # (tiles,)
    vocab,
    steps,
    TILE_VOCAB: tl.constexpr,
    SAMPLES: tl.constexpr,
):
    tile, sample = tl.program_id(0), tl.arange(0, SAMPLES)
    entry = tile * TILE_VOCAB + tl.arange(0, TILE_VOCAB)
    known = entry < vocab
    place = entry.to(tl.int64)[:, None] * SAMPLES + sample[None, :]
    x = tl.load(logits + place, mask=known[:, None], other=0.0)
    if bias is not None:
        x += tl.load(bias + entry, mask=known, other=0.0).to(tl.float32)[:, None]
    z, _ = transformed(x, steps)
    p = tl.load(drawn.counts + sample)[None, :] * tl.exp(z - tl.load(drawn.lse + sample)[None, :])
    beside = known[:, None] & (tl.load(drawn.targets + sample)[None, :] != entry[:, None])
    # One token's NaN must not reach the gradients of others.
    share = tl.sum(tl.where(beside & (tl.abs(p) < float("inf")), p, 0.0), 1)
    total = tl.sum(share, 0)
    # Finite numbers may add up to what is not.
    share = tl.where((total > 0.0) & (total < float("inf")), share / total, 0.0)
    tl.store(shares + entry, share, mask=known)
    tl.store(squares + tile, tl.sum(share * share, 0))


@Launched
@triton.jit
def _weigh_rows_kernel(
    weight,  # (V, H)
    stride,  # between two rows
    shares,
    rows,  # (padded tiles, H)
    vocab,
    hidden_size,
    TILE_VOCAB: tl.constexpr,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden_size
    total = tl.zeros((ENTRIES, COLUMNS), tl.float32)
    for step in range(0, TILE_VOCAB, ENTRIES):
        entry = tile * TILE_VOCAB + step + tl.arange(0, ENTRIES)
        known = entry < vocab
        place = entry.to(tl.int64)[:, None] * stride + column[None, :]
        part = tl.load(weight + place, mask=known[:, None] & inside[None, :], other=0.0)
        part = part.to(rows.dtype.element_ty).to(tl.float32)
        total += part * tl.load(shares + entry, mask=known, other=0.0)[:, None]
    place = tile.to(tl.int64) * hidden_size + column
    tl.store(rows + place, tl.sum(total, 0).to(rows.dtype.element_ty), mask=inside)


def padded_tiles(vocab: int) -> int:
    """Columns of `left_out_sums`: the tiles of the vocabulary, and as many of zeros as fill up a multiple."""
    return -(-vocab // (BLOCK_VOCAB * TILE_MULTIPLE)) * TILE_MULTIPLE


def choose(energies: Tensor, budget: Tensor) -> Tensor:
    """Upper bounds (row blocks, tiles) -> bool, False for the smallest, as many as `budget` () float64 has room for.

    Of equal ones the first are left out. None that is NaN is, and none at all where the budget is NaN, inf or not
    positive.
    """
    ascending, place = energies.flatten().sort(stable=True)
    keep = torch.empty_like(energies, dtype=torch.bool, memory_format=torch.contiguous_format)
    with on(energies.device):
        _choose_kernel[(1,)](ascending, place, budget, keep, ascending.numel(), CHOSEN, num_warps=CHOOSING_WARPS)
    return keep


def left_out_sums(
    known: TileBounds,
    statistics: TokenStatistics,  # (n,) each
    tokens: TokenGradients,  # (n,) each
    targets: Tensor,  # (n,)
    order: Tensor,  # (n,) permutation of the tokens
    keep: Tensor,  # (row blocks, tiles) bool, contiguous, of blocks of BLOCK_TOKENS of these
    transform: LogitTransform,
    dtype: torch.dtype,
) -> Tensor:
    """(n, padded tiles) sums of dL/dx over each tile of the vocabulary, 0 in blocks that are kept.

    Rows of tokens without a gradient mean nothing.
    """
    tiles, n = known.codes.shape
    width = padded_tiles(tiles * BLOCK_VOCAB)
    out = torch.empty(n, width, dtype=dtype, device=targets.device)
    with on(targets.device):
        _left_out_kernel[(cdiv(n, LEFT_OUT_TOKENS), cdiv(width, LEFT_OUT_TILES))](
            known,
            statistics,
            tokens.contiguous(),
            targets.contiguous(),
            order,
            keep,
            out,
            n,
            tiles,
            width,
            LogitSteps.of(transform),
            BLOCK_TOKENS=BLOCK_TOKENS,
            TILE_VOCAB=BLOCK_VOCAB,
            TOKENS=LEFT_OUT_TOKENS,
            TILES=LEFT_OUT_TILES,
        )
    return out


class Drawn(NamedTuple):
    """Tokens that say how vocabulary entries share what is left out, (SAMPLES,) each."""

    rows: Tensor  # int64, of all hidden states
    lse: Tensor  # float32
    targets: Tensor  # int64
    counts: Tensor  # float32, what a probability of theirs counts


def draw(
    index: Tensor | None,  # (n,) of the tokens among all hidden states, None for all
    targets: Tensor,  # (n,), of one token at least
    statistics: TokenStatistics,  # (n,) each
    tokens: TokenGradients,  # (n,) each
) -> Drawn:
    """As `tile_shares` says."""
    numbers = partial(torch.empty, SAMPLES, device=targets.device)
    drawn = Drawn(*(numbers(dtype=dtype) for dtype in (torch.int64, torch.float32, torch.int64, torch.float32)))
    with on(targets.device):
        _draw_kernel[(1,)](
            statistics,
            tokens.contiguous(),
            targets.contiguous(),
            index,
            drawn,
            targets.numel(),
            SAMPLES=SAMPLES,
            STEP=DRAWN,
            num_warps=DRAWING_WARPS,
        )
    return drawn


def tile_shares(
    drawn: Drawn,
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H), whose last dimension is contiguous; it is read twice
    bias: Tensor | None,  # (V,)
    transform: LogitTransform,
    dtype: torch.dtype,
) -> TileShares:
    """How a tile's vocabulary entries share what is left out of it: as they share its mass for SAMPLES of the tokens.

    Vocabulary entries that are improbable for most tokens are so in much the same proportions for all of them. A token
    is drawn by the gradient that it has beside its target, of which the left-out sums are parts, and counts by its
    probabilities beside its target. Where none of these has a probability in a tile, its entries have no share.
    """
    assert weight.stride(1) == 1
    vocab, size = weight.shape
    tiles = padded_tiles(vocab)
    numbers = partial(torch.empty, device=weight.device)
    entries, squares = numbers(vocab, dtype=torch.float32), numbers(tiles, dtype=torch.float32)
    rows = numbers(tiles, size, dtype=dtype)
    with on(weight.device):
        # Tiles that fill up a multiple have no vocabulary entries, and rows of zeros.
        _shares_kernel[(tiles,)](
            gemm.matmul(weight.to(dtype), hidden[drawn.rows].to(dtype).T),
            None if bias is None else bias.contiguous(),
            drawn,
            entries,
            squares,
            vocab,
            LogitSteps.of(transform),
            TILE_VOCAB=BLOCK_VOCAB,
            SAMPLES=SAMPLES,
            num_warps=SHARING_WARPS,
        )
    weigh_rows(weight, entries, rows)
    return TileShares(entries, squares[: cdiv(vocab, BLOCK_VOCAB)], rows)


def weigh_rows(weight: Tensor, entries: Tensor, rows: Tensor, width: int = BLOCK_VOCAB) -> None:
    """Write each of `rows` (tiles, H): the weight's rows of a tile, `width` of (V, H), added up by their `entries`.

    Tiles past the vocabulary get zeros.
    """
    vocab, size = weight.shape
    with on(weight.device):
        _weigh_rows_kernel[(rows.shape[0], cdiv(size, WEIGHED_COLUMNS))](
            weight,
            weight.stride(0),
            entries,
            rows,
            vocab,
            size,
            TILE_VOCAB=width,
            ENTRIES=WEIGHED_ENTRIES,
            COLUMNS=WEIGHED_COLUMNS,
        )
