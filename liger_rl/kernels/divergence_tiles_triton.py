"""Which parts of a divergence's gradient are computed, as Triton kernels under the names of `divergence_tiles`.

In PyTorch the choice is some 170 launches. The host takes longer for them than the device for the forward's last tiles.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.kernels import divergence_tiles as plain
from liger_rl.kernels.devices import on
from liger_rl.kernels.divergence import FORWARD, MIXTURE, TILE_VOCAB, Measure, PairGradients, TileSums
from liger_rl.kernels.divergence_tiles import ChosenParts, Drawn, TileBounds, TileShares
from liger_rl.kernels.launches import Launched, cdiv, next_power_of_2

SLACK_OF_SUM, SLACK, SLACK_OF_LSE = (
    tl.constexpr(slack) for slack in (plain.SLACK_OF_SUM, plain.SLACK, plain.SLACK_OF_LSE)
)
LOST, SLACK_OF_SHARES = tl.constexpr(plain.LOST), tl.constexpr(plain.SLACK_OF_SHARES)
UNITS, MOST = tl.constexpr(float(plain.UNITS)), tl.constexpr(plain.UNITS)
OF_FORWARD, OF_MIXTURE = tl.constexpr(FORWARD), tl.constexpr(MIXTURE)
DRAWN, DRAWING_WARPS = 1024, 8  # tokens that the one program draws from at a time; 41 us for 61 with 256
COUNTED = 2048  # parts of a program
CHOSEN_TOKENS, CHOSEN_TILES = 32, 64  # of a program


@triton.jit
def _positive(x):
    """0 where x is less; what is not a number stays it."""
    return tl.where(x < 0.0, 0.0, x)


@Launched
@triton.jit
def _bounds_kernel(
    sums,  # `TileSums`
    tokens,  # `PairGradients`, (n,) each
    targets,  # (n,)
    bounds,  # `TileBounds`, whose unit is known
    tiles,
    beta,
    KIND: tl.constexpr,
    TILE_VOCAB: tl.constexpr,
    TILES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    inside = tile < tiles
    place = token * tiles + tile
    unit = tl.load(bounds.unit)
    grad = tl.load(tokens.grad + token)
    wanted = grad != 0.0
    w = grad / unit
    g = 0.0
    if tokens.grad_logps is not None:
        grad_logps = tl.load(tokens.grad_logps + token)
        wanted |= grad_logps != 0.0
        g = grad_logps / unit
    lse, teacher_lse = tl.load(tokens.lse + token), tl.load(tokens.teacher_lse + token)
    if KIND == OF_MIXTURE:
        b = 1.0 - beta
        a = b * tl.load(tokens.value + token)
        s = 1.0
        of_p = b
    else:
        log_s = tl.load(sums.peak + place, mask=inside, other=0.0) - lse
        log_t = tl.load(sums.teacher_peak + place, mask=inside, other=0.0) - teacher_lse
        s = tl.exp(log_s)
        of_p = s
        if KIND == OF_FORWARD:
            a = -s
            b = -tl.exp(log_t)
        else:
            a = s * (tl.load(tokens.value + token) - (log_s - log_t))
            b = s
    xx = tl.load(sums.xx + place, mask=inside, other=0.0)
    of_s, of_b = g * s, w * b
    of_a = w * a + of_s
    largest = tl.abs(w * a) + tl.abs(of_s)
    of_x, of_y = largest * largest * xx, of_b * of_b * tl.load(sums.yy + place, mask=inside, other=0.0)
    cross = 2.0 * of_a * of_b * tl.load(sums.xy + place, mask=inside, other=0.0)
    energy, rough = of_a * of_a * xx + of_y - cross, SLACK_OF_SUM * (of_x + of_y)
    known = SLACK + SLACK_OF_LSE * (tl.abs(lse) + tl.abs(teacher_lse))
    amplitude = known * (tl.sqrt(of_x) + tl.abs(w * of_p) * tl.sqrt(xx) + tl.sqrt(of_y))
    most = tl.sqrt(_positive(energy) + rough) + amplitude
    least = _positive(tl.sqrt(_positive(energy - rough)) - amplitude)
    if tokens.grad_logps is not None:
        target = tl.load(targets + token)
        own = tile == tl.where((g != 0.0) & (target >= 0), target // TILE_VOCAB, -1)
        over, under = tl.abs(g) - most, least - tl.abs(g)
        # No comparison holds for NaN, which is to stay it.
        apart = _positive(tl.where(over < under, under, over))
        least, most = tl.where(own, apart, least), tl.where(own, float("inf"), most)
    total = of_b * tl.load(sums.y + place, mask=inside, other=0.0)
    total -= of_a * tl.load(sums.x + place, mask=inside, other=0.0)
    tl.store(bounds.most + place, most, mask=inside)
    tl.store(bounds.total + place, total, mask=inside)
    least = tl.where(inside, least, 0.0).to(tl.float64)
    size = tl.sum(tl.where(inside, tl.abs(total), 0.0).to(tl.float64))
    tl.store(bounds.least + token, tl.where(wanted, tl.sum(least * least), 0.0))
    tl.store(bounds.size + token, tl.where(wanted & (size < float("inf")), size, 0.0))
    tl.store(bounds.wanted + token, wanted)


@Launched
@triton.jit(do_not_specialize=["count"])
def _draw_kernel(sizes, drawn, count, SAMPLES: tl.constexpr, STEP: tl.constexpr):
    # One program, because where a token comes depends on all before it; its order is fixed, so its sums may be floats.
    total = tl.zeros((), tl.float64)
    for first in range(0, count, STEP):
        token = first + tl.arange(0, STEP)
        total += tl.sum(tl.load(sizes + token, mask=token < count, other=0.0))
    sample = tl.arange(0, SAMPLES)
    step = (sample + 0.5) * (total / SAMPLES)
    so_far = tl.zeros((), tl.float64)
    place = tl.zeros((SAMPLES,), tl.int32)
    for first in range(0, count, STEP):
        token = first + tl.arange(0, STEP)
        live = token < count
        until = so_far + tl.cumsum(tl.load(sizes + token, mask=live, other=0.0), 0)
        place += tl.sum(((until[:, None] <= step[None, :]) & live[:, None]).to(tl.int32), 0)
        so_far = tl.max(until, 0)
    place = tl.minimum(place, count - 1)
    size = tl.load(sizes + place)
    tl.store(drawn.rows + sample, place.to(tl.int64))
    tl.store(drawn.scales + sample, tl.where(size > 0.0, 1.0 / size, 0.0).to(tl.float32))


@Launched
@triton.jit
def _share_kernel(sizes, shares, vocab, TILE_VOCAB: tl.constexpr):
    tile = tl.program_id(0)
    entry = tile * TILE_VOCAB + tl.arange(0, TILE_VOCAB)
    size = tl.load(sizes + entry, mask=entry < vocab, other=0.0)
    total = tl.sum(size)
    # Finite numbers may add up to what is not.
    share = tl.where((total > 0.0) & (total < float("inf")), size / total, 0.0)
    tl.store(shares.entries + entry, share)
    tl.store(shares.squares + tile, tl.sum(share * share))


@Launched
@triton.jit
def _units_kernel(
    bounds,  # `TileBounds`
    squares,  # (tiles,)
    budget_at,  # () float64
    units,  # (n, tiles) int32, written
    count,  # of parts
    tiles,
    STEP: tl.constexpr,
):
    part = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
    inside = part < count
    most = tl.load(bounds.most + part, mask=inside, other=0.0).to(tl.float64)
    total = tl.abs(tl.load(bounds.total + part, mask=inside, other=0.0)).to(tl.float64)
    square = tl.load(squares + part % tiles, mask=inside, other=0.0).to(tl.float64)
    error = LOST + most + total * tl.sqrt(square) * SLACK_OF_SHARES
    budget = tl.load(budget_at)
    # No comparison holds for NaN.
    found = tl.ceil(error * error * tl.where(budget < float("inf"), UNITS / budget, float("nan")))
    found = tl.where(found <= UNITS, found, UNITS + 1.0).to(tl.int32)
    wanted = tl.load(bounds.wanted + part // tiles, mask=inside, other=0) != 0
    tl.store(units + part, tl.where(wanted, found, 0), mask=inside)


@Launched
@triton.jit
def _choose_kernel(
    bounds,  # `TileBounds`
    units,  # (n, tiles) int32
    ascending,  # (n tiles,) the same
    spent,  # (n tiles,) int64, their running sum
    chosen,  # `ChosenParts`, written
    slope,
    count,  # n
    tiles,
    width,  # padded tiles
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
):
    # The first part, in ascending order, that the budget has no room for. Every program looks it up for itself.
    parts = (tl.zeros((), tl.int64) + count) * tiles
    low, high = tl.zeros((), tl.int64), parts
    while low < high:
        middle = (low + high) // 2
        fits = tl.load(spent + middle) <= MOST
        low, high = tl.where(fits, middle + 1, low), tl.where(fits, high, middle)
    smallest = tl.load(ascending + low, mask=low < parts, other=MOST + 1)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    live = token < count
    wanted = (tl.load(bounds.wanted + token, mask=live, other=0) != 0)[:, None]
    inside = live[:, None] & (tile < tiles)[None, :]
    place = token[:, None] * tiles + tile[None, :]
    keep = wanted & (tl.load(units + place, mask=inside, other=0) >= smallest)
    tl.store(chosen.keep + place, keep, mask=inside)
    total = slope * tl.load(bounds.unit) * tl.load(bounds.total + place, mask=inside, other=0.0)
    left_out = tl.where(inside & wanted & ~keep, total, 0.0).to(chosen.left_out.dtype.element_ty)
    written = live[:, None] & (tile < width)[None, :]
    tl.store(chosen.left_out + token[:, None] * width + tile[None, :], left_out, mask=written)


def bound_parts(sums: TileSums, measure: Measure, tokens: PairGradients, targets: Tensor) -> TileBounds:
    """As `divergence_tiles.bound_parts`."""
    (n, tiles), device = sums.x.shape, sums.x.device
    assert all(part is None or part.is_contiguous() for part in sums)
    unit = torch.linalg.vector_norm(tokens.grad, torch.inf)
    if tokens.grad_logps is not None:
        unit = torch.maximum(unit, torch.linalg.vector_norm(tokens.grad_logps, torch.inf))
    numbers = partial(torch.empty, device=device)
    most, total = numbers(n, tiles), numbers(n, tiles)
    least, size = (numbers(n, dtype=torch.float64) for _ in range(2))
    bounds = TileBounds(most, total, least, size, numbers(n, dtype=torch.bool), unit)
    with on(device):
        _bounds_kernel[(n,)](
            sums, tokens.contiguous(), targets.contiguous(), bounds, tiles, measure.beta,
            KIND=measure.kind, TILE_VOCAB=TILE_VOCAB, TILES=next_power_of_2(tiles),
        )  # fmt: skip
    return bounds


def draw_tokens(bounds: TileBounds) -> Drawn:
    """As `divergence_tiles.draw_tokens`."""
    count, device = bounds.size.numel(), bounds.size.device
    numbers = partial(torch.empty, plain.SAMPLES, device=device)
    drawn = Drawn(numbers(dtype=torch.int64), numbers())
    with on(device):
        _draw_kernel[(1,)](bounds.size, drawn, count, SAMPLES=plain.SAMPLES, STEP=DRAWN, num_warps=DRAWING_WARPS)
    return drawn


def share_entries(sizes: Tensor) -> TileShares:
    """As `divergence_tiles.share_entries`."""
    tiles, numbers = cdiv(sizes.numel(), TILE_VOCAB), partial(torch.empty, device=sizes.device)
    shares = TileShares(numbers(tiles, TILE_VOCAB), numbers(tiles))
    with on(sizes.device):
        _share_kernel[(tiles,)](sizes, shares, sizes.numel(), TILE_VOCAB=TILE_VOCAB)
    return shares


def shared_rows(entries: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """As `divergence_tiles.shared_rows`."""
    return plain.shared_rows(entries, weight, dtype)


def choose_parts(
    bounds: TileBounds, squares: Tensor, tolerance: float, slope: float, dtype: torch.dtype
) -> ChosenParts:
    """As `divergence_tiles.choose_parts`."""
    (n, tiles), device = bounds.most.shape, bounds.most.device
    width, budget = plain.padded(tiles), bounds.least.sum() * tolerance**2
    units = torch.empty(n * tiles, dtype=torch.int32, device=device)
    keep = torch.empty(n, tiles, dtype=torch.bool, device=device)
    chosen = ChosenParts(keep, torch.empty(n, width, dtype=dtype, device=device))
    with on(device):
        _units_kernel[(cdiv(n * tiles, COUNTED),)](bounds, squares, budget, units, n * tiles, tiles, COUNTED)
        ascending = units.sort().values
        _choose_kernel[(cdiv(n, CHOSEN_TOKENS), cdiv(width, CHOSEN_TILES))](
            bounds, units, ascending, ascending.cumsum(0), chosen, slope, n, tiles, width, CHOSEN_TOKENS, CHOSEN_TILES
        )
    return chosen
