"""Lists of the entries that each token's gradient needs, found by a certificate, as Triton kernels.

A part is one token's dL/dlogits in one tile of the vocabulary. From bounds of every part's norm

1. `choose_parts` keeps, for each token, the parts without which its own error could exceed its share of the tolerance;
2. a product with gathered tokens makes the kept parts again, in float16 relative to the token's largest entry;
3. `find_limits` finds, for each token, the largest size under which its entries may be left out together;
4. `write_lists` lists the larger entries, and writes the sum of the others as the part's rest.

A rest is the sum of what a token leaves out of a tile. The tile's entries share it by `Tail.entries`, so that
dL/dlogits still adds up to zero over the vocabulary. The rows of a trained weight have much in common, and a sum that
is a thousandth off would be a large error of dL/dhidden.

Every kernel writes what one program owns, in a fixed order: no atomics, the same bits on every run.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.kernels.devices import family_of, on
from liger_rl.kernels.launches import Launched, cdiv, next_power_of_2
from liger_rl.kernels.matrix_triton import load, load_picked, matrix
from liger_rl.kernels.softmax import (
    LOWEST,
    LOWEST_LOG_PROBABILITY,
    flushed_exp,
    gradient,
    gradient_at_target,
    tanh_square,
    times_derivative,
    times_slope,
    token_terms,
    transformed,
)
from liger_rl.kernels.statistics import (
    BLOCK_VOCAB,
    SAMPLES,
    PartBounds,
    Tail,
    TileStatistics,
    TokenGradients,
    TokenStatistics,
)
from liger_rl.kernels.tile_epilogues import part_of
from liger_rl.kernels.transform import LogitSteps, LogitTransform

BOUND_TOKENS, BOUND_TILES, BOUND_WARPS = 16, 128, 8
CHOSEN, CHOOSING_WARPS = 4096, 8  # parts of a program that chooses, at least a token's
HALVINGS = 10  # of the range in which a token's threshold of parts lies
LISTED_TOKENS = 1024  # that a program lists at a time
ROWS = 128  # tokens of a product
COUNTED, COUNTING_WARPS = 4096, 8  # entries that a program counts at a time
WRITTEN, WRITTEN_TOKENS = 2048, 1024  # entries, or tokens, of a program that writes
DRAWN, DRAWING_WARPS = 1024, 8  # tokens that the one program draws from at a time
SHARING_WARPS = 8
CUTS = 6  # of a tile's entries to twice their mean, of which each changes the mean
# Of the weight, which a program reads at a time. One H200, H = 2048 and 4096: 1.2 to 1.3 x the time of reading it
# once; 16 x 256 took 1.6 to 2.4 x.
WEIGHED_ENTRIES, WEIGHED_COLUMNS = 32, 512
TILE_MULTIPLE = 8  # rests have rows of a multiple of so many tiles, for products that read them 16 bytes at a time
UNIT = 2.0**15  # what a part stores for an entry as large as the bound of all; float16 ends at twice as much
LEVEL_BITS = 7  # of a float16 that a level leaves out: eight levels for each power of 2
TILE_SHARE = 0.5  # of a token's tolerated energy, for parts that are left out whole

# What float32 loses on the way to a bound, added to it: in nats, absolute and relative to the size of the logits.
SLACK, SLACK_OF_LSE = tl.constexpr(2e-3), tl.constexpr(2e-6)
SLACK_OF_SUM = tl.constexpr(2.0**-16)  # BLOCK_VOCAB terms of relative rounding 2^-24 each
SLACK_OF_TERM = tl.constexpr(2.0**-23)  # of one of them that is made again from lse, relative to it and times |lse|
SLACK_OF_SHARES = tl.constexpr(1.0 + 2.0**-6)  # of rests and shares to the products' dtype, squared
SLACK_OF_DERIVATIVE = tl.constexpr(1e-5)
BUDGET_ROUNDING = 1.0 - 1e-3  # of float32 sums of squares and of entries in float16, taken off the tolerated energy
LOG_4 = tl.constexpr(1.3862943611198906)
STORED_UNIT, BITS = tl.constexpr(UNIT), tl.constexpr(LEVEL_BITS)
LARGEST_HALF, ROUNDED_DOWN = tl.constexpr(65504.0), tl.constexpr(1.0 - 2.0**-10)


class ChosenParts(NamedTuple):
    """Which parts are kept. A token's parts stand side by side, in the order of their tiles."""

    rank: Tensor  # (tiles, n) int16: of a kept part among its token's, -1 where it is left out
    starts: Tensor  # (n + 1,) int64: the first part of each token
    room: Tensor  # (n,) float32: energy that a token's entries may leave out, in units of its scale squared
    scale: Tensor  # (n,) float32: no entry is larger, 0 without a gradient
    rest: Tensor  # (n, padded tiles) sums of parts that are left out, 0 elsewhere


class Lists(NamedTuple):
    """The listed entries of consecutive tokens: a token's target first, then its tiles and ids, ascending."""

    ids: Tensor  # (E,) int32
    coefficients: Tensor  # (E,) float32, dL/dx
    tokens: Tensor  # (E,) int32

    @classmethod
    def empty(cls, entries: int, device: torch.device) -> "Lists":
        dtypes = torch.int32, torch.float32, torch.int32
        return cls(*(torch.empty(entries, dtype=dtype, device=device) for dtype in dtypes))


# --- bounds -----------------------------------------------------------------------------------------------------------


@triton.jit
def _log_supremum(log_p, entropy):
    """log of the supremum of p (log p + entropy)^2 over 0 < p <= exp(log_p)."""
    log_p = tl.maximum(log_p, LOWEST)  # of banned ids alone: -inf plus inf is NaN
    value = log_p + 2.0 * tl.log(tl.abs(log_p + entropy))
    # Its one local maximum, 4 exp(-entropy - 2), is at log p = -entropy - 2.
    hill = LOG_4 - 2.0 - entropy
    return tl.where(log_p >= -entropy - 2.0, tl.maximum(value, hill), value)


@triton.jit
def _slope_at(z, steps):
    """-> dz/dx under a softcap without its constant part, rounded down."""
    return tl.maximum(1.0 - tanh_square(z, steps) - SLACK_OF_DERIVATIVE, 0.0)


@triton.jit
def _has_gradient(tokens, token, live):
    """-> whether tokens have a gradient; true for NaN, which must reach the gradients."""
    wanted = tl.load(tokens.grad_logps + token, mask=live, other=0.0) != 0
    if tokens.grad_entropy is not None:
        wanted |= tl.load(tokens.grad_entropy + token, mask=live, other=0.0) != 0
    return wanted


@Launched
@triton.jit
def _bounds_kernel(
    known,  # `TileStatistics`
    statistics,  # `TokenStatistics`
    tokens,  # `TokenGradients`
    targets,
    out,  # `PartBounds`
    tiles,
    count,
    steps,
    TILE_VOCAB: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token < count
    wanted = live & _has_gradient(tokens, token, live)
    lse = tl.load(statistics.lse + token, mask=live, other=0.0)
    logps = tl.load(statistics.logps + token, mask=live, other=0.0)
    target_tile = tl.load(targets + token, mask=live, other=0) // TILE_VOCAB
    slack = SLACK + SLACK_OF_LSE * tl.abs(lse)
    rounding = SLACK_OF_SUM + SLACK_OF_TERM * tl.abs(lse)
    g, e, entropy = token_terms(tokens, token, live)
    unit = tl.where(wanted, tl.abs(g) + tl.abs(e), 1.0)
    # Relative to the unit, no square of a small gradient is lost. Zero times what an idle token holds may be NaN.
    g = tl.where(wanted, g / unit, 0.0)
    at_target = gradient_at_target(tokens, token, live, logps)
    known_gradient = at_target
    if steps.cap is not None:
        known_gradient *= 1.0 - tanh_square(logps + lse, steps)
    tl.store(out.at_target + token, times_slope(known_gradient, steps), mask=live)
    at_target = at_target / unit
    if tokens.grad_entropy is not None:
        e = tl.where(wanted, e / unit, 0.0)
    if steps.cap is not None:
        at_target *= _slope_at(logps + lse, steps)
    least = at_target * at_target
    size = tl.zeros((TOKENS,), tl.float64)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        inside = (tile < tiles)[:, None] & live[None, :]
        place = tile.to(tl.int64)[:, None] * count + token[None, :]
        here = tile[:, None] == target_tile[None, :]
        peak = tl.load(known.peaks + place, mask=inside, other=LOWEST)
        total = tl.load(known.sums + place, mask=inside, other=0.0)
        log_peak = peak - lse[None, :]
        target_term = tl.where(here, tl.exp(tl.minimum((logps + lse)[None, :] - peak, 0.0)), 0.0)
        others = tl.maximum(total - target_term, 0.0)
        log_mass = log_peak + tl.log(tl.where(here, others + rounding[None, :] * total, total))
        log_largest = tl.minimum(log_peak, log_mass)
        most = tl.abs(g)[None, :] * tl.exp(0.5 * (log_largest + log_mass) + slack[None, :])
        largest = tl.exp(log_peak)
        if steps.cap is not None:
            largest *= _slope_at(peak, steps)
        rest = -g[None, :] * largest * others
        if tokens.grad_entropy is not None:
            supremum = _log_supremum(log_largest, entropy[None, :])
            most += tl.abs(e)[None, :] * tl.exp(0.5 * (log_mass + supremum) + slack[None, :])
            moment = tl.load(known.moments + place, mask=inside, other=0.0) + (log_peak + entropy[None, :]) * total
            # Of a banned target 0 times -inf is NaN, in every tile.
            moment -= target_term * (tl.maximum(logps, LOWEST_LOG_PROBABILITY) + entropy)[None, :]
            rest -= e[None, :] * largest * moment
        else:
            # The largest entry of every other tile.
            lower = tl.where(inside & (here == 0), g[None, :] * largest, 0.0)
            least += tl.sum(lower * lower, 0) * (1.0 - 2.0 * slack)
        tl.store(out.most + place, most, mask=inside)
        tl.store(out.rest + place, rest, mask=inside)
        size += tl.sum(tl.where(inside, tl.abs(rest), 0.0), 0).to(tl.float64)
    size *= unit
    tl.store(out.least + token, least, mask=live)
    tl.store(out.unit + token, tl.where(wanted, unit, 0.0), mask=live)
    tl.store(out.size + token, tl.where(wanted & (size < float("inf")), size, 0.0), mask=live)


def part_bounds(
    known: TileStatistics,
    statistics: TokenStatistics,  # (n,) each
    tokens: TokenGradients,  # (n,) each
    targets: Tensor,  # (n,)
    transform: LogitTransform,
) -> PartBounds:
    """Bounds of one head's gradient, targets aside. With P and Q a tile's largest probability and its mass,

    sum_v p_v^2 <= P Q,    sum_v (p_v (log p_v + H))^2 <= Q sup_{p <= P} p (log p + H)^2
    """
    tiles, n = known.peaks.shape
    bounds = PartBounds.empty(n, tiles, targets.device, targets=True)
    with on(targets.device):
        _bounds_kernel[(cdiv(n, BOUND_TOKENS),)](
            known, statistics, tokens.contiguous(), targets.contiguous(), bounds, tiles, n, LogitSteps.of(transform),
            TILE_VOCAB=BLOCK_VOCAB, TOKENS=BOUND_TOKENS, TILES=BOUND_TILES, num_warps=BOUND_WARPS,
        )  # fmt: skip
    return bounds


# --- the tail: how a tile's entries share what is left out of it ------------------------------------------------------


class Drawn(NamedTuple):
    """Tokens that say how entries share a rest, (SAMPLES,) each."""

    rows: Tensor  # int64, among n tokens
    scales: Tensor  # float32, by what the gradients of all become alike in size


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


def draw_tokens(bounds: PartBounds) -> Drawn:
    """Each token as often as its size says."""
    device = bounds.size.device
    drawn = Drawn(
        torch.empty(SAMPLES, dtype=torch.int64, device=device), torch.empty(SAMPLES, dtype=torch.float32, device=device)
    )
    with on(device):
        _draw_kernel[(1,)](
            bounds.size, drawn, bounds.size.numel(), SAMPLES=SAMPLES, STEP=DRAWN, num_warps=DRAWING_WARPS
        )
    return drawn


@Launched
@triton.jit
def _shares_kernel(
    logits,  # (V, SAMPLES) float32
    bias,
    drawn,  # `Drawn`
    targets,
    tokens,  # `TokenGradients`
    tail,  # `Tail`
    vocab,
    steps,
    TILE_VOCAB: tl.constexpr,
    SAMPLES: tl.constexpr,
    CUTS: tl.constexpr,
):
    tile = tl.program_id(0)
    entry = tile * TILE_VOCAB + tl.arange(0, TILE_VOCAB)
    known = entry < vocab
    sample = tl.arange(0, SAMPLES)
    row, scale = tl.load(drawn.rows + sample), tl.load(drawn.scales + sample)
    x = tl.load(logits + entry.to(tl.int64)[:, None] * SAMPLES + sample[None, :], mask=known[:, None], other=0.0)
    if bias is not None:
        x += tl.load(bias + entry, mask=known, other=0.0).to(tl.float32)[:, None]
    z, square = transformed(x, steps)
    log_p = z - tl.load(tokens.lse + row)[None, :]
    p = flushed_exp(log_p)
    g, e, entropy = token_terms(tokens, row, sample >= 0)
    ENTROPY: tl.constexpr = tokens.grad_entropy is not None
    if ENTROPY:
        e = e[None, :]
        entropy = entropy[None, :]
    grad = gradient(p, log_p, None, 0.0, g[None, :], e, entropy, ENTROPY)
    grad = tl.abs(times_derivative(grad, square, steps)) * scale[None, :]
    beside = known[:, None] & (tl.load(targets + row)[None, :] != entry[:, None])
    # One token's NaN must not reach the gradients of others.
    size = tl.sum(tl.where(beside & (grad < float("inf")), grad, 0.0), 1)
    # The few large entries of a tile are those that tokens list. A rest that went to them would stand in for nothing.
    for _ in range(CUTS):
        size = tl.minimum(size, 2.0 * tl.sum(size) / tl.maximum(tl.minimum(vocab - tile * TILE_VOCAB, TILE_VOCAB), 1))
    total = tl.sum(size, 0)
    # Finite numbers may add up to what is not.
    share = tl.where((total > 0.0) & (total < float("inf")), size / total, 0.0)
    tl.store(tail.entries + entry, share)
    tl.store(tail.squares + tile, tl.sum(share * share))


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


def padded_tiles(vocab: int, width: int) -> int:
    """Tiles of the vocabulary, made up to a multiple."""
    return cdiv(vocab, width * TILE_MULTIPLE) * TILE_MULTIPLE


def tail_of_logits(
    logits: Tensor,  # (V, SAMPLES) float32 of the drawn tokens
    bias: Tensor | None,  # (V,)
    drawn: Drawn,
    targets: Tensor,  # (n,)
    tokens: TokenGradients,  # (n,) each
    transform: LogitTransform,
) -> Tail:
    """A tile's entries share a rest as the drawn tokens' |dL/dx| add up, their targets aside.

    Entries that are improbable for most tokens are so in much the same proportions for all of them.
    """
    tail = Tail.empty(padded_tiles(logits.shape[0], BLOCK_VOCAB), BLOCK_VOCAB, logits.device)
    with on(logits.device):
        _shares_kernel[(tail.squares.numel(),)](
            logits, None if bias is None else bias.contiguous(), drawn, targets, tokens.contiguous(), tail,
            logits.shape[0], LogitSteps.of(transform),
            TILE_VOCAB=BLOCK_VOCAB, SAMPLES=SAMPLES, CUTS=CUTS, num_warps=SHARING_WARPS,
        )  # fmt: skip
    return tail


def tail_rows(tail: Tail, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(padded tiles, H): the weight's rows of each tile, added up by their shares; zeros past the vocabulary."""
    assert weight.stride(1) == 1
    (vocab, size), tiles = weight.shape, tail.squares.numel()
    rows = torch.empty(tiles, size, dtype=dtype, device=weight.device)
    with on(weight.device):
        _weigh_rows_kernel[(tiles, cdiv(size, WEIGHED_COLUMNS))](
            weight, weight.stride(0), tail.entries, rows, vocab, size,
            TILE_VOCAB=tail.entries.numel() // tiles, ENTRIES=WEIGHED_ENTRIES, COLUMNS=WEIGHED_COLUMNS,
        )  # fmt: skip
    return rows


# --- which parts are kept ---------------------------------------------------------------------------------------------


@Launched
@triton.jit(do_not_specialize=["count"])
def _choose_kernel(
    bounds,  # `PartBounds`
    squares,  # (tiles,) of the tail's shares
    place_of,  # (count,) int64: a token's place among those with a gradient
    chosen,  # `ChosenParts`; `starts` gets the number of each token's parts, one place on
    tiles,
    count,
    width,  # padded tiles
    factor,  # tolerance^2
    steps,
    SHARE: tl.constexpr,
    SIGNED: tl.constexpr,  # a part's entries may have both signs
    HALVINGS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token < count
    unit = tl.load(bounds.unit + token, mask=live, other=0.0)
    wanted = live & (unit != 0.0)
    tile = tl.arange(0, TILES)
    inside = (tile < tiles)[:, None] & wanted[None, :]
    place = tile.to(tl.int64)[:, None] * count + token[None, :]
    most = tl.load(bounds.most + place, mask=inside, other=0.0)
    rest = tl.load(bounds.rest + place, mask=inside, other=0.0)
    square = SLACK_OF_SHARES * tl.load(squares + tile, mask=tile < tiles, other=0.0)[:, None]
    # Of G - S u, with S the sum of G and u >= 0 the shares. If G has one sign, its square is at most |G|^2 + |S u|^2.
    if SIGNED:
        energy = most + tl.abs(rest) * tl.sqrt(square)
        energy = energy * energy
    else:
        energy = most * most + rest * rest * square
    scale = tl.max(most, 0)
    tolerated = factor * tl.load(bounds.least + token, mask=live, other=0.0)
    ceiling = SHARE * tolerated
    # Parts under the lowest threshold are at most TILES, and so together under the ceiling.
    low = tl.full((TOKENS,), 1.0 / TILES, tl.float32)
    high = tl.full((TOKENS,), 1.0, tl.float32)
    for _ in range(HALVINGS):
        middle = tl.sqrt(low * high)
        under = tl.sum(tl.where(energy < (middle * ceiling)[None, :], energy, 0.0), 0)
        fits = under <= ceiling
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle)
    # No comparison holds for NaN, whose parts are kept.
    dropped = inside & ((energy < (low * ceiling)[None, :]) | (energy == 0.0))
    spent = tl.sum(tl.where(dropped, energy, 0.0), 0)
    kept = inside & (dropped == 0)
    here = tl.load(place_of + token, mask=wanted, other=0)
    number = kept.to(tl.int32)
    among = tl.cumsum(number, 0) - number
    rank = tl.where(kept, among, -1)
    tl.store(chosen.rank + tile.to(tl.int64)[:, None] * count + here[None, :], rank.to(tl.int16), mask=inside)
    tl.store(chosen.starts + here + 1, tl.sum(number, 0).to(tl.int64), mask=wanted)
    tl.store(chosen.room + here, (tolerated - spent) / (scale * scale), mask=wanted)
    tl.store(chosen.scale + here, scale * unit, mask=wanted)
    rest = tl.where(dropped, times_slope(rest * unit[None, :], steps), 0.0).to(chosen.rest.dtype.element_ty)
    written = (tile < width)[:, None] & wanted[None, :]
    tl.store(chosen.rest + here[None, :] * width + tile[:, None], rest, mask=written)


def choose_parts(
    bounds: PartBounds,
    tail: Tail,
    place: Tensor,  # (n,) int64: a token's place among those with a gradient
    tolerance: float,
    transform: LogitTransform,
    dtype: torch.dtype,
    *,
    signed: bool,
) -> ChosenParts:
    """For each token the parts without which its own error could pass TILE_SHARE of what it may be.

    Tokens without a gradient have no place. What stands behind the last place is undefined.
    """
    tiles, n = bounds.most.shape
    device, width = bounds.most.device, tail.squares.numel()
    chosen = ChosenParts(
        torch.empty(tiles, n, dtype=torch.int16, device=device),
        torch.zeros(n + 1, dtype=torch.int64, device=device),
        torch.empty(n, dtype=torch.float32, device=device),
        torch.empty(n, dtype=torch.float32, device=device),
        torch.empty(n, width, dtype=dtype, device=device),
    )
    side = next_power_of_2(width)
    together = max(CHOSEN // side, 1)
    with on(device):
        _choose_kernel[(cdiv(n, together),)](
            bounds, tail.squares, place, chosen, tiles, n, width, tolerance**2 * BUDGET_ROUNDING,
            LogitSteps.of(transform),
            SHARE=TILE_SHARE, SIGNED=signed, HALVINGS=HALVINGS, TOKENS=together, TILES=side, num_warps=CHOOSING_WARPS,
        )  # fmt: skip
    return chosen._replace(starts=chosen.starts.cumsum(0))


# --- the kept parts ---------------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """Consecutive tokens, `first` to `last`, and their parts from number `base` on."""

    first: int
    last: int
    base: int
    parts: int


class TileLists(NamedTuple):
    """The tokens of a span that keep each tile, and the tile and the token of each of the span's parts."""

    tokens: Tensor  # (tiles, tokens of the span) int32
    counts: Tensor  # (tiles,) int32
    tile_of: Tensor  # (parts,) int32
    token_of: Tensor  # (parts,) int32


@Launched
@triton.jit(do_not_specialize=["first", "last", "base"])
def _list_tiles_kernel(chosen, lists, first, last, base, count, STEP: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    width = last - first
    at = 0
    for start in range(first, last, STEP):
        token = start + tl.arange(0, STEP)
        inside = token < last
        rank = tl.load(chosen.rank + tile * count + token, mask=inside, other=-1).to(tl.int32)
        kept = rank >= 0
        number = kept.to(tl.int32)
        tl.store(lists.tokens + tile * width + at + tl.cumsum(number, 0) - number, token, mask=kept)
        part = tl.load(chosen.starts + token, mask=kept, other=0) + rank - base
        tl.store(lists.tile_of + part, (tile + tl.zeros((STEP,), tl.int64)).to(tl.int32), mask=kept)
        tl.store(lists.token_of + part, token, mask=kept)
        at += tl.sum(number, 0)
    tl.store(lists.counts + tile, at)


def list_tiles(chosen: ChosenParts, span: Span) -> TileLists:
    tiles, n = chosen.rank.shape
    sizes = (tiles, span.last - span.first), (tiles,), (span.parts,), (span.parts,)
    lists = TileLists(*(torch.empty(size, dtype=torch.int32, device=chosen.rank.device) for size in sizes))
    with on(chosen.rank.device):
        _list_tiles_kernel[(tiles,)](chosen, lists, span.first, span.last, span.base, n, LISTED_TOKENS)
    return lists


@triton.jit
def rows_of_tile(chunk, lists, tiles, width, ROWS: tl.constexpr, TILES: tl.constexpr):
    """-> a tile, some of the tokens that keep it, and which of them there are; no tile past the last chunk."""
    tile = tl.arange(0, TILES)
    kept = tl.load(lists.counts + tile, mask=tile < tiles, other=0)
    chunks = tl.cdiv(kept, ROWS)
    here = tl.sum((tl.cumsum(chunks, 0) <= chunk).to(tl.int32), 0)
    before = tl.sum(tl.where(tile < here, chunks, 0), 0)
    place = (chunk - before) * ROWS + tl.arange(0, ROWS)
    inside = place < tl.sum(tl.where(tile == here, kept, 0), 0)
    return here, tl.load(lists.tokens + here.to(tl.int64) * width + place, mask=inside, other=0), inside


@Launched
@triton.jit(do_not_specialize=["base", "width"])
def _parts_kernel(
    out,  # (parts of the span, TILE_VOCAB) float16
    hidden,  # a `matrix` (n, H), for pointers
    weight,  # a `matrix` (V, H)
    bias,
    targets,
    gradients,  # `TokenGradients`, (n,) each
    chosen,  # `ChosenParts`
    lists,  # `TileLists`
    base,
    width,  # tokens of the span
    tiles,
    count,
    vocab,
    size,  # H
    steps,
    PARTS: tl.constexpr,  # of a tile, one after the other
    TILE_VOCAB: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    TILES: tl.constexpr,
):
    tile, row, inside = rows_of_tile(tl.program_id(0), lists, tiles, width, ROWS, TILES)
    if tile < tiles:
        first = tile * TILE_VOCAB
        part = tl.load(chosen.starts + row) - base
        part += tl.load(chosen.rank + tile.to(tl.int64) * count + row).to(tl.int64)
        logits = tl.zeros((ROWS, TILE_VOCAB), tl.float32)
        for step in range(tl.cdiv(size, STEP)):
            left = load_picked(hidden, row, step * STEP, STEP)
            logits = tl.dot(left, load(weight, first, step * STEP, TILE_VOCAB, STEP).T, logits)
        lse = tl.load(gradients.lse + row)[:, None]
        target = (tl.load(targets + row) - first)[:, None]
        per_scale = STORED_UNIT / tl.load(chosen.scale + row)[:, None]
        g, e, entropy = token_terms(gradients, row, inside)
        ENTROPY: tl.constexpr = gradients.grad_entropy is not None
        if ENTROPY:
            e = e[:, None]
            entropy = entropy[:, None]
        for half in tl.static_range(PARTS):
            x = part_of(logits, half, PARTS)
            column = half * x.shape[1] + tl.arange(0, x.shape[1])
            known = (column < vocab - first)[None, :]
            if bias is not None:
                x += tl.load(bias + first + column, mask=column < vocab - first, other=0.0).to(tl.float32)[None, :]
            z, square = transformed(x, steps)
            log_p = z - lse
            grad = gradient(flushed_exp(log_p), log_p, None, 0.0, g[:, None], e, entropy, ENTROPY)
            if steps.cap is not None:
                grad *= 1.0 - square
            grad = tl.where(known & (column[None, :] != target), grad * per_scale, 0.0)
            tl.store(out + part[:, None] * TILE_VOCAB + column[None, :], grad.to(tl.float16), mask=inside[:, None])


def make_parts(
    hidden: Tensor,  # (n, H) in the compute dtype
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (n,)
    tokens: TokenGradients,  # (n,) each
    transform: LogitTransform,
    chosen: ChosenParts,
    lists: TileLists,
    span: Span,
    out: Tensor,  # (span.parts or more, BLOCK_VOCAB) float16
) -> None:
    """The span's kept parts of dL/dz, in units of the tokens' scales over UNIT; 0 at targets."""
    tiles, n = chosen.rank.shape
    family = family_of(hidden.device)
    halved = transform.softcap is not None or tokens.grad_entropy is not None
    with on(hidden.device):
        _parts_kernel[(span.parts // ROWS + tiles,)](
            out, matrix(hidden, 1, family.step, tma=False), matrix(weight, BLOCK_VOCAB, family.step, tma=family.tma),
            None if bias is None else bias.contiguous(), targets.contiguous(), tokens.contiguous(), chosen, lists,
            span.base, span.last - span.first, tiles, n, weight.shape[0], hidden.shape[1], LogitSteps.of(transform),
            PARTS=max(family.parts, 2 if halved else 1), TILE_VOCAB=BLOCK_VOCAB, ROWS=ROWS, STEP=family.step,
            TILES=next_power_of_2(tiles), num_stages=family.stages, num_warps=8,
        )  # fmt: skip


# --- from parts to lists ----------------------------------------------------------------------------------------------


@triton.jit
def _level(value):
    """-> the largest level whose size is no larger than `value` >= 0."""
    return tl.minimum(value, LARGEST_HALF).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) >> BITS


@triton.jit
def _size(level):
    """-> of a level: a float16 whose last BITS are 0."""
    return (level << BITS).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _is_listed(value, limit):
    return (tl.abs(value.to(tl.float32)) <= limit) == 0  # no comparison holds for NaN, which is listed


@Launched
@triton.jit(do_not_specialize=["base", "first"])
def _limits_kernel(
    parts,  # (parts of the span, TILE_VOCAB) float16
    chosen,  # `ChosenParts`
    limits,  # (n,) float32: the largest size that is not listed
    counts,  # (parts of the span,) int32: entries that are listed
    base,
    first,
    TILE_VOCAB: tl.constexpr,
    COUNTED: tl.constexpr,
):
    token = first + tl.program_id(0)
    begin = (tl.load(chosen.starts + token) - base) * TILE_VOCAB
    end = (tl.load(chosen.starts + token + 1) - base) * TILE_VOCAB
    room = tl.load(chosen.room + token) * (STORED_UNIT * STORED_UNIT)
    room = tl.where(room > 0.0, room, 0.0)  # of NaN, too
    # All entries that are no larger than the lowest fit in any case, and one that is larger than the highest does not.
    low = _level(tl.sqrt(room / tl.maximum(end - begin, 1).to(tl.float32)) * ROUNDED_DOWN)
    high = _level(tl.sqrt(room)) + 1
    # Three levels at a time: the parts are read a third of the times that halving takes.
    while low + 1 < high:
        step = tl.maximum((high - low) // 4, 1)
        first_level = low + step
        second_level = tl.minimum(low + 2 * step, high)
        third_level = tl.minimum(low + 3 * step, high)
        under_first = tl.zeros((COUNTED,), tl.float32)
        under_second = tl.zeros((COUNTED,), tl.float32)
        under_third = tl.zeros((COUNTED,), tl.float32)
        for start in range(begin, end, COUNTED):
            place = start + tl.arange(0, COUNTED)
            value = tl.abs(tl.load(parts + place, mask=place < end, other=0.0).to(tl.float32))
            square = value * value
            under_first += tl.where(value <= _size(first_level), square, 0.0)
            under_second += tl.where(value <= _size(second_level), square, 0.0)
            under_third += tl.where(value <= _size(third_level), square, 0.0)
        first_fits = tl.sum(under_first) <= room
        second_fits = tl.sum(under_second) <= room
        third_fits = tl.sum(under_third) <= room
        most = high
        high = tl.where(
            first_fits, tl.where(second_fits, tl.where(third_fits, most, third_level), second_level), first_level
        )
        low = tl.where(
            first_fits, tl.where(second_fits, tl.where(third_fits, third_level, second_level), first_level), low
        )
        low = tl.minimum(low, most - 1)
    limit = _size(low)
    tl.store(limits + token, limit)
    PARTS: tl.constexpr = COUNTED // TILE_VOCAB
    column = tl.arange(0, TILE_VOCAB)[None, :]
    for start in range(begin // TILE_VOCAB, end // TILE_VOCAB, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = part < end // TILE_VOCAB
        value = tl.load(parts + part[:, None] * TILE_VOCAB + column, mask=inside[:, None], other=0.0)
        number = tl.sum(_is_listed(value, limit).to(tl.int32), 1)
        tl.store(counts + part, number, mask=inside)


@Launched
@triton.jit(do_not_specialize=["most", "base", "count", "tokens", "first"])
def _write_kernel(
    parts,  # (count, TILE_VOCAB) float16
    chosen,  # `ChosenParts`
    of,  # `TileLists`
    entries,  # (V,) shares of the tail
    targets,  # (n,) ids, or None where parts include them
    at_target,  # (n,) float32
    limits,  # (n,) float32
    before,  # (parts of all spans + 1,) int64: listed entries of all parts before each, but targets
    lists,  # `Lists` with room for `most`
    most,
    base,
    count,  # parts of the span
    tokens,  # of the span
    first,  # token
    width,  # padded tiles
    steps,
    TILE_VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    blocks = tl.cdiv(count, PARTS)
    if tl.program_id(0) >= blocks:
        # No name of the other branch: there it has another shape.
        row = first + (tl.program_id(0) - blocks) * TOKENS + tl.arange(0, TOKENS)
        live = row < first + tokens
        if targets is not None:
            start = tl.load(before + tl.load(chosen.starts + row, mask=live, other=0), mask=live, other=0) + row
            live = live & (start < most)
            tl.store(lists.ids + start, tl.load(targets + row, mask=live, other=0).to(tl.int32), mask=live)
            tl.store(lists.coefficients + start, tl.load(at_target + row, mask=live, other=0.0), mask=live)
            tl.store(lists.tokens + start, row, mask=live)
    else:
        part = tl.program_id(0).to(tl.int64) * PARTS + tl.arange(0, PARTS)
        inside = part < count
        column = tl.arange(0, TILE_VOCAB)[None, :]
        token, tile = (
            tl.load(of.token_of + part, mask=inside, other=first),
            tl.load(of.tile_of + part, mask=inside, other=0),
        )
        stored = tl.load(parts + part[:, None] * TILE_VOCAB + column, mask=inside[:, None], other=0.0)
        kept = _is_listed(stored, tl.load(limits + token)[:, None])
        grad = stored.to(tl.float32) * (tl.load(chosen.scale + token) / STORED_UNIT)[:, None]
        left = tl.where(kept, 0.0, grad)
        rest = tl.sum(left, 1)
        share = tl.load(entries + tile[:, None] * TILE_VOCAB + column, mask=inside[:, None], other=0.0)
        # The rest stands in for its entries where it is closer to them than nothing.
        away = left - rest[:, None] * share
        helps = tl.sum(away * away, 1) <= tl.sum(left * left, 1)
        rest = times_slope(tl.where(helps, rest, 0.0), steps).to(chosen.rest.dtype.element_ty)
        tl.store(chosen.rest + token.to(tl.int64) * width + tile, rest, mask=inside)
        at = tl.load(before + base + part, mask=inside, other=0)
        if targets is not None:
            at += token + 1
        number = kept.to(tl.int32)
        place = at[:, None] + (tl.cumsum(number, 1) - number)
        kept = kept & (place < most)
        tl.store(lists.ids + place, tile[:, None] * TILE_VOCAB + column, mask=kept)
        tl.store(lists.coefficients + place, times_slope(grad, steps), mask=kept)
        tl.store(lists.tokens + place, token[:, None] + tl.zeros((PARTS, TILE_VOCAB), tl.int32), mask=kept)


class Limits(NamedTuple):
    """What tokens list."""

    sizes: Tensor  # (n,) float32: the largest stored size that is not listed
    before: Tensor  # (parts + 1,) int64: listed entries of all parts before each, targets apart

    @classmethod
    def empty(cls, n: int, parts: int, device: torch.device) -> "Limits":
        before = torch.zeros(parts + 1, dtype=torch.int64, device=device)
        return cls(torch.empty(n, dtype=torch.float32, device=device), before)


def find_limits(parts: Tensor, chosen: ChosenParts, span: Span, out: Limits) -> None:
    """For each token of the span the largest size under which its entries may be left out together.

    `parts` is (span.parts or more, width). Earlier spans have written theirs.
    """
    counts = torch.empty(span.parts, dtype=torch.int32, device=parts.device)
    with on(parts.device):
        _limits_kernel[(span.last - span.first,)](
            parts, chosen, out.sizes, counts, span.base, span.first,
            TILE_VOCAB=parts.shape[1], COUNTED=COUNTED, num_warps=COUNTING_WARPS,
        )  # fmt: skip
    before = out.before[span.base + 1 : span.base + span.parts + 1]
    torch.cumsum(counts, 0, out=before)
    if span.base:
        before += out.before[span.base]


def write_lists(
    parts: Tensor,
    chosen: ChosenParts,  # whose rests get what is left out of the kept parts
    of_parts: TileLists,
    tail: Tail,
    limits: Limits,
    targets: tuple[Tensor, Tensor] | None,  # (n,) ids and dL/dx, where parts leave them out
    span: Span,
    transform: LogitTransform,
    out: Lists,  # of all spans; what there is no room for is left out
) -> None:
    tokens, width = span.last - span.first, max(WRITTEN // parts.shape[1], 1)
    with on(parts.device):
        _write_kernel[(cdiv(span.parts, width) + cdiv(tokens, WRITTEN_TOKENS),)](
            parts, chosen, of_parts, tail.entries, *(targets or (None, None)), limits.sizes, limits.before, out,
            out.ids.numel(), span.base, span.parts, tokens, span.first, chosen.rest.shape[1], LogitSteps.of(transform),
            TILE_VOCAB=parts.shape[1], PARTS=width, TOKENS=WRITTEN_TOKENS,
        )  # fmt: skip
