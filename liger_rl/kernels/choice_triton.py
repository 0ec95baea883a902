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
    MASS_SCALE,
    MOMENT_SCALE,
    TileBounds,
    TokenGradients,
    TokenStatistics,
)
from liger_rl.kernels.tiles import gradient_at_target, slope_at
from liger_rl.kernels.transform import LogitTransform
from liger_rl.kernels.triton import heat_of, on

CHOSEN, CHOOSING_WARPS = 4096, 8  # bounds that a step of the one program adds up
COUNTED = 1024  # rows of blocks, or tokens, that a program counts at a time
MEAN_TOKENS, MEAN_TILES = 32, 32  # of a program
UNITS, MOST = tl.constexpr(float(BUDGET_UNITS)), tl.constexpr(BUDGET_UNITS)
LAST_OF_ALL = tl.constexpr(NOT_WANTED)
PER_MASS, PER_MOMENT = tl.constexpr(1.0 / MASS_SCALE), tl.constexpr(1.0 / MOMENT_SCALE)


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
def _means_kernel(
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
    vocab,
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
    g = tl.load(grad_logps + token, mask=live, other=0.0)
    total = tl.load(masses + place, mask=inside, other=0.0).to(tl.float32) * (g * -PER_MASS)[:, None]
    if grad_entropies is not None:
        e = tl.load(grad_entropies + token, mask=live, other=0.0)
        total -= tl.load(moments + place, mask=inside, other=0.0).to(tl.float32) * (e * PER_MOMENT)[:, None]
    logps = tl.load(logps_of + token, mask=live, other=0.0)
    at_target = gradient_at_target(token, live, logps, at_target_of, entropies, grad_entropies)
    if CAPPED:
        at_target *= slope_at(logps + tl.load(lse_of + token, mask=live, other=0.0), heat)
    target_tile = tl.load(targets + token, mask=live, other=-1) // TILE_VOCAB
    total += tl.where(tile[None, :] == target_tile[:, None], at_target[:, None], 0.0)
    scale = tl.load(scales + first // BLOCK_TOKENS * tiles + tile, mask=tile < tiles, other=1.0)
    words = tl.maximum(tl.minimum(vocab - tile * TILE_VOCAB, TILE_VOCAB), 1).to(tl.float32)
    mean = total * ((1.0 - scale) * slope / words)[None, :]
    written = live[:, None] & (tile < width)[None, :]
    tl.store(out + position[:, None] * width + tile[None, :], mean.to(out.dtype.element_ty), mask=written)


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


def tile_means(
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
    """As `choice.tile_means`; `scales` must be contiguous."""
    tiles, n = known.codes.shape
    width = padded_tiles(vocab)
    out = torch.empty(n, width, dtype=dtype, device=targets.device)
    grad_entropy = tokens.grad_entropy
    with on(targets.device):
        _means_kernel[(triton.cdiv(n, MEAN_TOKENS), triton.cdiv(width, MEAN_TILES))](
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
            vocab,
            float(transform.scale / transform.temperature),
            heat_of(transform),
            CAPPED=transform.softcap is not None,
            BLOCK_TOKENS=BLOCK_TOKENS,
            TILE_VOCAB=BLOCK_VOCAB,
            TOKENS=MEAN_TOKENS,
            TILES=MEAN_TILES,
        )
    return out
