"""Which blocks of a gradient are left out, and what takes their place, as Triton kernels; see `kernels.choice`.

The device has nothing else to do while these run, so what counts is that they are few.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.kernels.bounds import NOT_WANTED
from liger_rl.kernels.choice import BUDGET_UNITS, padded_tiles
from liger_rl.kernels.statistics import (
    BLOCK_TOKENS,
    BLOCK_VOCAB,
    TileBounds,
    TileShares,
    TokenGradients,
    TokenStatistics,
)
from liger_rl.kernels.tiles import gradient_at_target, slope_at, sum_beside_target
from liger_rl.kernels.transform import LogitTransform
from liger_rl.kernels.triton import heat_of, on, transform_constants, transformed

CHOSEN, CHOOSING_WARPS = 4096, 8  # bounds that a step of the one program adds up
COUNTED = 1024  # rows of blocks, or tokens, that a program counts at a time
LEFT_OUT_TOKENS, LEFT_OUT_TILES = 32, 32  # of a program
ADDED_TOKENS, ADDED_COLUMNS = 256, 64  # of a program, a step of ADDED_STEP tokens at a time
ADDED_STEP = 64
SHARED, SHARING_WARPS = 2**14, 4  # numbers of the weight that a program reads at a time
UNITS, MOST = tl.constexpr(float(BUDGET_UNITS)), tl.constexpr(BUDGET_UNITS)
LAST_OF_ALL = tl.constexpr(NOT_WANTED)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _choose_kernel(ascending, place, budget_at, scales, count, STEP: tl.constexpr):
    # One program, because what a bound finds left of the budget depends on all before it; 2^19 blocks are 128 steps.
    budget = tl.load(budget_at)
    # No comparison holds for NaN.
    per_energy = tl.where(budget > 0.0, UNITS / budget, float("nan"))
    spent = tl.zeros((), tl.int64)
    for first in range(0, count, STEP):
        index = first + tl.arange(0, STEP)
        inside = index < count
        units = tl.ceil(tl.load(ascending + index, mask=inside, other=0.0).to(tl.float64) * per_energy)
        units = tl.where(units <= UNITS, units, UNITS + 1.0).to(tl.int64)
        kept = spent + tl.cumsum(units, 0) > MOST
        tl.store(scales + tl.load(place + index, mask=inside, other=0), kept.to(tl.float32), mask=inside)
        spent += tl.sum(units)


@triton.jit
def _count_kernel(scales, key, numbers, rows, tiles, tokens, STEP: tl.constexpr):
    tile = tl.program_id(0)
    if tile == tiles:
        wanted = tl.zeros((STEP,), tl.int64)
        for first in range(0, tokens, STEP):
            token = first + tl.arange(0, STEP)
            wanted += (tl.load(key + token, mask=token < tokens, other=LAST_OF_ALL) != LAST_OF_ALL).to(tl.int64)
        tl.store(numbers, tl.sum(wanted))
    else:
        kept = tl.zeros((STEP,), tl.int64)
        certain = tl.zeros((STEP,), tl.int64)
        for first in range(0, rows, STEP):
            row = first + tl.arange(0, STEP)
            scale = tl.load(scales + row.to(tl.int64) * tiles + tile, mask=row < rows, other=0.0)
            kept += (scale != 0.0).to(tl.int64)
            certain += (scale == 1.0).to(tl.int64)
        tl.store(numbers + 1 + tile, tl.sum(kept))
        tl.store(numbers + 1 + tiles + tile, tl.sum(certain))


@triton.jit
def _left_out_kernel(
    masses,  # (tiles, tokens)
    moments,
    logps_of,  # (tokens,) each
    lse_of,
    entropies,
    grad_logps,
    at_target_of,
    grad_entropies,
    targets,
    order,
    scales,  # (row blocks, tiles)
    out,  # (tokens, width)
    tokens,
    tiles,
    width,
    slope,  # scale / temperature
    heat,  # temperature / softcap
    CAPPED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_VOCAB: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * TOKENS
    position = first + tl.arange(0, TOKENS)
    live = position < tokens
    token = tl.load(order + position, mask=live, other=0)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    inside = live[:, None] & (tile < tiles)[None, :]
    place = tile.to(tl.int64)[None, :] * tokens + token[:, None]
    total = sum_beside_target(masses, moments, grad_logps, grad_entropies, token[:, None], place, live[:, None], inside)
    logps = tl.load(logps_of + token, mask=live, other=0.0)
    at_target = gradient_at_target(token, live, logps, at_target_of, entropies, grad_entropies)
    if CAPPED:
        at_target *= slope_at(logps + tl.load(lse_of + token, mask=live, other=0.0), heat)
    target_tile = tl.load(targets + token, mask=live, other=-1) // TILE_VOCAB
    total += tl.where(tile[None, :] == target_tile[:, None], at_target[:, None], 0.0)
    scale = tl.load(scales + first // BLOCK_TOKENS * tiles + tile, mask=tile < tiles, other=1.0)
    total *= ((1.0 - scale) * slope)[None, :]
    written = live[:, None] & (tile < width)[None, :]
    tl.store(out + position[:, None] * width + tile[None, :], total.to(out.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["tokens"])
def _add_kernel(
    hidden,  # (N, H)
    stride,  # between two tokens
    index,  # (n,) of the tokens in it, or None
    at_target,  # (n,)
    entropies,
    grad_entropies,
    sums,  # (n / TOKENS rounded up, H + 1) float32
    tokens,
    hidden_size,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((STEP, COLUMNS), tl.float32)
    for step in tl.static_range(0, TOKENS, STEP):
        token = tl.program_id(0) * TOKENS + step + tl.arange(0, STEP)
        known = token < tokens
        count = tl.abs(tl.load(at_target + token, mask=known, other=0.0))
        if grad_entropies is not None:
            e = tl.load(grad_entropies + token, mask=known, other=0.0)
            count += tl.abs(e * tl.load(entropies + token, mask=known, other=0.0))
        # One token's NaN must not reach the gradients of others.
        count = tl.where(count < float("inf"), count, 0.0)
        row = token.to(tl.int64)
        if index is not None:
            row = tl.load(index + token, mask=known, other=0)
        inside = known[:, None] & (column < hidden_size)[None, :]
        part = tl.load(hidden + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        part = tl.where(tl.abs(part) < float("inf"), part, 0.0)
        # The column behind the last one counts the tokens.
        total += count[:, None] * tl.where((column == hidden_size)[None, :], 1.0, part)
    place = tl.program_id(0).to(tl.int64) * (hidden_size + 1) + column
    tl.store(sums + place, tl.sum(total, 0), mask=column <= hidden_size)


@triton.jit
def _shares_kernel(
    hidden_sums,  # (H + 1,) float32, of the tokens in the end
    weight,  # (V, H)
    stride,  # between two words
    bias,
    shares,  # (V,) float32
    squares,  # (padded tiles,) float32
    rows,  # (padded tiles, H)
    vocab,
    hidden_size,
    gain,
    cap,
    inverse,
    inverse_rest,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    HEATED: tl.constexpr,
    TILE_VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile, column = tl.program_id(0), tl.arange(0, COLUMNS)
    inside = column < hidden_size
    mean = tl.load(hidden_sums + column, mask=inside, other=0.0) / tl.load(hidden_sums + hidden_size)
    peak, total = LOWEST, 0.0
    row = tl.zeros((COLUMNS,), tl.float32)
    for step in range(0, TILE_VOCAB, WORDS):
        word = tile * TILE_VOCAB + step + tl.arange(0, WORDS)
        known = word < vocab
        place = word.to(tl.int64)[:, None] * stride + column[None, :]
        part = tl.load(weight + place, mask=known[:, None] & inside[None, :], other=0.0)
        part = part.to(rows.dtype.element_ty).to(tl.float32)
        x = tl.sum(part * mean[None, :], 1)
        if bias is not None:
            x += tl.load(bias + word, mask=known, other=0.0).to(tl.float32)
        z, _ = transformed(x, gain, cap, inverse, inverse_rest, SCALED, CAPPED, HEATED)
        z = tl.where(known, z, float("-inf"))
        tl.store(shares + word, z, mask=known)
        # As in a softmax of one pass: what was added up is relative to the largest number so far.
        higher = tl.maximum(peak, tl.max(z, 0))
        term, fade = tl.exp(z - higher), tl.exp(peak - higher)
        row = row * fade + tl.sum(term[:, None] * part, 0)
        total, peak = total * fade + tl.sum(term, 0), higher
    # Of a tile whose words are all banned nothing is left out. A sum is NaN where a logit is infinite.
    part_of = tl.where(total > 0.0, 1.0 / total, 0.0)
    row = tl.where(total > 0.0, row * part_of, 0.0)
    tl.store(rows + tile.to(tl.int64) * hidden_size + column, row.to(rows.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # other threads wrote the numbers
    word = tile * TILE_VOCAB + tl.arange(0, TILE_VOCAB)
    z = tl.load(shares + word, mask=word < vocab, other=float("-inf"))
    share = tl.where(total > 0.0, tl.exp(z - peak) * part_of, 0.0)
    tl.debug_barrier()
    tl.store(shares + word, share, mask=word < vocab)
    tl.store(squares + tile, tl.sum(share * share, 0))


def choose(energies: Tensor, budget: Tensor) -> Tensor:
    """As `choice.choose`; the budget in float64."""
    ascending, place = energies.flatten().sort(stable=True)
    scales = torch.empty_like(energies, memory_format=torch.contiguous_format)
    with on(energies.device):
        _choose_kernel[(1,)](ascending, place, budget, scales, ascending.numel(), CHOSEN, num_warps=CHOOSING_WARPS)
    return scales


def count(scales: Tensor, key: Tensor) -> Tensor:
    """As `choice.count`; `scales` must be contiguous."""
    rows, tiles = scales.shape
    numbers = torch.empty(1 + 2 * tiles, dtype=torch.int64, device=scales.device)
    with on(scales.device):
        _count_kernel[(tiles + 1,)](scales, key, numbers, rows, tiles, key.numel(), COUNTED)
    return numbers


def left_out_sums(
    known: TileBounds,
    statistics: TokenStatistics,
    tokens: TokenGradients,
    targets: Tensor,
    order: Tensor,
    scales: Tensor,
    transform: LogitTransform,
    vocab: int,
    dtype: torch.dtype,
) -> Tensor:
    """As `choice.left_out_sums`; `scales` must be contiguous."""
    tiles, n = known.codes.shape
    width = padded_tiles(vocab)
    out = torch.empty(n, width, dtype=dtype, device=targets.device)
    grad_entropy = tokens.grad_entropy
    with on(targets.device):
        _left_out_kernel[(triton.cdiv(n, LEFT_OUT_TOKENS), triton.cdiv(width, LEFT_OUT_TILES))](
            known.masses,
            None if grad_entropy is None else known.moments,
            statistics.logps,
            statistics.lse,
            None if grad_entropy is None else tokens.entropy,
            tokens.grad_logps.contiguous(),
            tokens.at_target,
            None if grad_entropy is None else grad_entropy.contiguous(),
            targets.contiguous(),
            order,
            scales,
            out,
            n,
            tiles,
            width,
            float(transform.scale / transform.temperature),
            heat_of(transform),
            CAPPED=transform.softcap is not None,
            BLOCK_TOKENS=BLOCK_TOKENS,
            TILE_VOCAB=BLOCK_VOCAB,
            TOKENS=LEFT_OUT_TOKENS,
            TILES=LEFT_OUT_TILES,
        )
    return out


def tile_shares(
    hidden: Tensor,
    index: Tensor | None,
    tokens: TokenGradients,
    weight: Tensor,
    bias: Tensor | None,
    transform: LogitTransform,
    dtype: torch.dtype,
) -> TileShares:
    """As `choice.tile_shares`, in one read of the weight, whose last dimension must be contiguous."""
    assert weight.stride(1) == 1
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    n, (vocab, size) = tokens.at_target.numel(), weight.shape
    tiles, columns = padded_tiles(vocab), triton.next_power_of_2(size)
    shares = torch.empty(vocab, dtype=torch.float32, device=weight.device)
    squares = torch.empty(tiles, dtype=torch.float32, device=weight.device)
    rows = torch.empty(tiles, size, dtype=dtype, device=weight.device)
    parts = torch.empty(triton.cdiv(n, ADDED_TOKENS), size + 1, dtype=torch.float32, device=weight.device)
    with on(weight.device):
        _add_kernel[(parts.shape[0], triton.cdiv(size + 1, ADDED_COLUMNS))](
            hidden,
            hidden.stride(0),
            index,
            tokens.at_target,
            tokens.entropy,
            tokens.grad_entropy,
            parts,
            n,
            size,
            ADDED_TOKENS,
            ADDED_STEP,
            ADDED_COLUMNS,
        )
        # Tiles that fill up a multiple have no words, and rows of zeros.
        _shares_kernel[(tiles,)](
            parts.sum(0),
            weight,
            weight.stride(0),
            None if bias is None else bias.contiguous(),
            shares,
            squares,
            rows,
            vocab,
            size,
            **transform_constants(transform),
            TILE_VOCAB=BLOCK_VOCAB,
            WORDS=max(1, min(BLOCK_VOCAB, SHARED // columns)),
            COLUMNS=columns,
            num_warps=SHARING_WARPS,
        )
    return TileShares(shares, squares[: triton.cdiv(vocab, BLOCK_VOCAB)], rows)
