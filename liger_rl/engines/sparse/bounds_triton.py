"""Which parts of a gradient are kept: found by a certificate for each token, as Triton kernels.

A part is one token's dL/dlogits in one tile of the vocabulary. From bounds of every part's norm `choose_parts` keeps,
for each token, the parts without which its own error could exceed its share of the tolerance. `listing_triton` makes
lists of entries from them.

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

from liger_rl.kernels.devices import on
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
    BLOCK_TOKENS,
    BLOCK_VOCAB,
    SAMPLES,
    PartBounds,
    Tail,
    TileStatistics,
    TokenGradients,
    TokenStatistics,
)
from liger_rl.kernels.transform import LogitSteps, LogitTransform

BOUND_TOKENS, BOUND_TILES, BOUND_WARPS = 16, 128, 8
CHOSEN, CHOOSING_WARPS = 4096, 8  # parts of a program that chooses, at least a token's
HALVINGS = 10  # of the range in which a token's threshold of parts lies
DRAWN, DRAWING_WARPS = 1024, 8  # tokens that the one program draws from at a time
SHARING_WARPS = 8
CUTS = 6  # of a tile's entries to twice their mean, of which each changes the mean
# Of the weight, which a program reads at a time. One H200, H = 2048 and 4096: 1.2 to 1.3 x the time of reading it
# once; 16 x 256 took 1.6 to 2.4 x.
WEIGHED_ENTRIES, WEIGHED_COLUMNS = 32, 512
TILE_MULTIPLE = 8  # rests have rows of a multiple of so many tiles, for products that read them 16 bytes at a time
TILE_SHARE = 0.5  # of a token's tolerated energy, for parts that are left out whole

# What float32 loses on the way to a bound, added to it: in nats, absolute and relative to the size of the logits.
SLACK, SLACK_OF_LSE = tl.constexpr(2e-3), tl.constexpr(2e-6)
SLACK_OF_SUM = tl.constexpr(2.0**-16)  # BLOCK_VOCAB terms of relative rounding 2^-24 each
SLACK_OF_TERM = tl.constexpr(2.0**-23)  # of one of them that is made again from lse, relative to it and times |lse|
SLACK_OF_SHARES = tl.constexpr(1.0 + 2.0**-6)  # of rests and shares to the products' dtype, squared
SLACK_OF_DERIVATIVE = tl.constexpr(1e-5)
BUDGET_ROUNDING = 1.0 - 1e-3  # of float32 sums of squares and of entries in float16, taken off the tolerated energy
LOG_4 = tl.constexpr(1.3862943611198906)


class ChosenParts(NamedTuple):
    """Which parts are kept. A token's parts stand side by side, in the order of their tiles."""

    rank: Tensor  # (tiles, n) int16: of a kept part among its token's, -1 where it is left out
    starts: Tensor  # (n + 1,) int64: the first part of each token
    room: Tensor  # (n,) float32: energy that a token's entries may leave out, in units of its scale squared
    scale: Tensor  # (n,) float32: no entry is larger; 0 without a gradient, and then no part is kept
    rest: Tensor  # (n, padded tiles) sums of parts that are left out, 0 elsewhere


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
    if tokens.wanted is None:
        wanted = tl.load(tokens.grad_logps + token, mask=live, other=0.0) != 0
    else:
        wanted = tl.load(tokens.wanted + token, mask=live, other=0) != 0
    if tokens.grad_entropy is not None:
        wanted |= tl.load(tokens.grad_entropy + token, mask=live, other=0.0) != 0
    return wanted


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
    unit = tl.abs(g) + tl.abs(e)
    unit = tl.where(wanted & (unit != 0.0), unit, 1.0)
    # Relative to the unit, no square of a small gradient is lost. Zero times what an idle token holds may be NaN.
    g = tl.where(wanted, g / unit, 0.0)
    at_target = gradient_at_target(tokens, token, live, logps)
    known_gradient = at_target
    if steps.cap is not None:
        known_gradient *= 1.0 - tanh_square(logps + lse, steps)
    # Zero times what an idle token's logits are may be NaN.
    known_gradient = tl.where(wanted, times_slope(known_gradient, steps), 0.0)
    tl.store(out.at_target + token, known_gradient, mask=live)
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
        _bounds_kernel[(triton.cdiv(n, BOUND_TOKENS),)](
            known, statistics, tokens.contiguous(), targets.contiguous(), bounds, tiles, n, LogitSteps.of(transform),
            TILE_VOCAB=BLOCK_VOCAB, TOKENS=BOUND_TOKENS, TILES=BOUND_TILES, num_warps=BOUND_WARPS,
        )  # fmt: skip
    return bounds


# --- the tail: how a tile's entries share what is left out of it ------------------------------------------------------


class Drawn(NamedTuple):
    """Tokens that say how entries share a rest, (SAMPLES,) each, and where to read hidden states."""

    rows: Tensor  # int64, among n tokens
    positions: Tensor  # int64, the same among all N
    scales: Tensor  # float32, by what the gradients of all become alike in size
    # (n,) int64, among all N: a token's own position; a token without a gradient has that of one with, because zero
    # times what its own hidden state is may be NaN.
    sources: Tensor


@triton.jit(do_not_specialize=["count"])
def _draw_kernel(
    bounds,  # `PartBounds`
    index,  # (count,) int64: positions of the tokens, None where they are all tokens
    drawn,  # `Drawn`
    count,
    SAMPLES: tl.constexpr,
    STEP: tl.constexpr,
):
    # One program, because where a token comes depends on all before it; its order is fixed, so its sums may be floats.
    total = tl.zeros((), tl.float64)
    some = tl.zeros((), tl.int32) + (count - 1)
    for first in range(0, count, STEP):
        token = first + tl.arange(0, STEP)
        live = token < count
        total += tl.sum(tl.load(bounds.size + token, mask=live, other=0.0))
        wanted = tl.load(bounds.unit + token, mask=live, other=0.0) != 0.0
        some = tl.minimum(some, tl.min(tl.where(wanted, token, count - 1)))
    source = some.to(tl.int64)
    if index is not None:
        source = tl.load(index + some)
    sample = tl.arange(0, SAMPLES)
    step = (sample + 0.5) * (total / SAMPLES)
    so_far = tl.zeros((), tl.float64)
    place = tl.zeros((SAMPLES,), tl.int32)
    for first in range(0, count, STEP):
        token = first + tl.arange(0, STEP)
        live = token < count
        until = so_far + tl.cumsum(tl.load(bounds.size + token, mask=live, other=0.0), 0)
        place += tl.sum(((until[:, None] <= step[None, :]) & live[:, None]).to(tl.int32), 0)
        so_far = tl.max(until, 0)
        wanted = tl.load(bounds.unit + token, mask=live, other=0.0) != 0.0
        position = token.to(tl.int64)
        if index is not None:
            position = tl.load(index + token, mask=live, other=0)
        tl.store(drawn.sources + token, tl.where(wanted, position, source), mask=live)
    place = tl.minimum(place, count - 1)
    size = tl.load(bounds.size + place)
    position = place.to(tl.int64)
    if index is not None:
        position = tl.load(index + place)
    tl.store(drawn.rows + sample, place.to(tl.int64))
    tl.store(drawn.positions + sample, position)
    tl.store(drawn.scales + sample, tl.where(size > 0.0, 1.0 / size, 0.0).to(tl.float32))


def draw_tokens(bounds: PartBounds, index: Tensor | None) -> Drawn:
    """Each token as often as its size says; `index` (n,) has the tokens' positions, None where they are all tokens."""
    n, device = bounds.size.numel(), bounds.size.device
    rows, positions = torch.empty(2, SAMPLES, dtype=torch.int64, device=device).unbind()
    scales, sources = (
        torch.empty(SAMPLES, dtype=torch.float32, device=device),
        torch.empty(n, dtype=torch.int64, device=device),
    )
    drawn = Drawn(rows, positions, scales, sources)
    with on(device):
        _draw_kernel[(1,)](bounds, index, drawn, n, SAMPLES=SAMPLES, STEP=DRAWN, num_warps=DRAWING_WARPS)
    return drawn


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
    return triton.cdiv(vocab, width * TILE_MULTIPLE) * TILE_MULTIPLE


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
        _weigh_rows_kernel[(tiles, triton.cdiv(size, WEIGHED_COLUMNS))](
            weight, weight.stride(0), tail.entries, rows, vocab, size,
            TILE_VOCAB=tail.entries.numel() // tiles, ENTRIES=WEIGHED_ENTRIES, COLUMNS=WEIGHED_COLUMNS,
        )  # fmt: skip
    return rows


# --- which parts are kept ---------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["count"])
def _choose_kernel(
    bounds,  # `PartBounds`
    squares,  # (tiles,) of the tail's shares
    chosen,  # `ChosenParts`, all but the starts
    numbers,  # (count,) int32: parts of each token
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
    number = kept.to(tl.int32)
    among = tl.cumsum(number, 0) - number
    rank = tl.where(kept, among, -1)
    written = (tile < tiles)[:, None] & live[None, :]
    tl.store(chosen.rank + place, rank.to(tl.int16), mask=written)
    tl.store(numbers + token, tl.sum(number, 0), mask=live)
    room = tl.where(wanted, (tolerated - spent) / (scale * scale), 0.0)
    tl.store(chosen.room + token, room, mask=live)
    tl.store(chosen.scale + token, scale * unit, mask=live)
    rest = tl.where(dropped, times_slope(rest * unit[None, :], steps), 0.0).to(chosen.rest.dtype.element_ty)
    written = (tile < width)[:, None] & live[None, :]
    tl.store(chosen.rest + token.to(tl.int64)[None, :] * width + tile[:, None], rest, mask=written)


@triton.jit(do_not_specialize=["count"])
def _starts_kernel(numbers, units, starts, counted, count, TOKENS: tl.constexpr, STEP: tl.constexpr):
    # One program, because where a token starts depends on all before it.
    before = tl.zeros((), tl.int64)
    wanted = tl.zeros((), tl.int32)
    for first in range(0, count, STEP):
        token = first + tl.arange(0, STEP)
        live = token < count
        number = tl.load(numbers + token, mask=live, other=0).to(tl.int64)
        until = before + tl.cumsum(number, 0)
        tl.store(starts + token, until - number, mask=live)
        last = live & ((token % TOKENS == TOKENS - 1) | (token == count - 1))
        tl.store(counted + 1 + token // TOKENS, until, mask=last)
        before += tl.sum(number)
        wanted += tl.sum((tl.load(units + token, mask=live, other=0.0) != 0.0).to(tl.int32))
    tl.store(starts + count, before)
    tl.store(counted, wanted.to(tl.int64))


def choose_parts(
    bounds: PartBounds,
    tail: Tail,
    tolerance: float,
    transform: LogitTransform,
    dtype: torch.dtype,
    *,
    signed: bool,
) -> tuple[ChosenParts, Tensor]:
    """For each token the parts without which its own error could pass TILE_SHARE of what it may be.

    Returns:
        The parts, and (1 + ceil(n / BLOCK_TOKENS),) int64: the tokens with a gradient, and the parts of the first
        BLOCK_TOKENS tokens, of twice as many, ..., of all.
    """
    tiles, n = bounds.most.shape
    device, width = bounds.most.device, tail.squares.numel()
    scale, room = torch.empty(2, n, dtype=torch.float32, device=device).unbind()
    numbers = torch.empty(n, dtype=torch.int32, device=device)
    starts, counted = torch.empty(n + 2 + triton.cdiv(n, BLOCK_TOKENS), dtype=torch.int64, device=device).tensor_split(
        [n + 1]
    )
    chosen = ChosenParts(
        torch.empty(tiles, n, dtype=torch.int16, device=device),
        starts,
        room,
        scale,
        torch.empty(n, width, dtype=dtype, device=device),
    )
    side = triton.next_power_of_2(width)
    together = max(CHOSEN // side, 1)
    with on(device):
        _choose_kernel[(triton.cdiv(n, together),)](
            bounds, tail.squares, chosen, numbers, tiles, n, width, tolerance**2 * BUDGET_ROUNDING,
            LogitSteps.of(transform),
            SHARE=TILE_SHARE, SIGNED=signed, HALVINGS=HALVINGS, TOKENS=together, TILES=side, num_warps=CHOOSING_WARPS,
        )  # fmt: skip
        _starts_kernel[(1,)](
            numbers, bounds.unit, starts, counted, n, TOKENS=BLOCK_TOKENS, STEP=DRAWN, num_warps=DRAWING_WARPS
        )
    return chosen, counted
