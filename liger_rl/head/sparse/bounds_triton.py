"""Bounds of each token's gradient in each tile, and the choice of kept parts: Triton kernels of README steps 2, 3, 7.

A part is one token's dL/dlogits in one tile of the vocabulary. `choose_parts` reads bounds of every part's norm. It
keeps, for each token, the parts without which the token's error could exceed its share of the tolerance.
`listing_triton` makes lists of entries from the kept parts.

A rest is the sum of the entries that a token drops in a tile. The tile's entries share the rest by `Tail.entries`, so
that dL/dlogits still adds up to zero over the vocabulary. The rows of a trained weight have much in common, so a sum
that is off by a thousandth would be a large error of dL/dhidden.

Each result is written by one program, in a fixed order: no atomics, the same bits on every run.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.kernels.devices import launch_context
from liger_rl.kernels.softmax_triton import (
    LOWEST,
    LOWEST_LOG_PROBABILITY,
    flushed_exp,
    gradient,
    gradient_at_target,
    tanh_square,
    times_derivative,
    times_slope,
    token_terms,
    transform_logits,
)
from liger_rl.kernels.statistics import (
    BLOCK_TOKENS,
    PART_VOCAB,
    SAMPLES,
    PartBounds,
    Tail,
    TileStatistics,
    TokenGradients,
)
from liger_rl.kernels.transform import LogitSteps, LogitTransform

BOUND_TOKENS, BOUND_TILES, BOUND_WARPS = 16, 64, 8
CHOSEN, CHOOSING_WARPS = 8192, 8  # parts of a program of `_choose_kernel`; one token's parts may be more
HALVINGS = 10  # of the range that contains a token's threshold between dropped and kept parts
DRAWN, DRAWING_WARPS = 1024, 8  # tokens of a step, in the kernels with one program
SHARING_WARPS = 8
CUTS = 6  # times that a tile's entries are cut to twice their mean; each cut lowers the mean
# Rows and columns of the weight that a program reads at a time. One H200, H = 2048 and 4096: 1.2 to 1.3 x the time of
# one read of the weight; 16 x 256 took 1.6 to 2.4 x.
WEIGHED_ENTRIES, WEIGHED_COLUMNS = 32, 512
TILE_MULTIPLE = 8  # a row of rests has a multiple of 8 tiles, so that products read it 16 bytes at a time
# Dropped parts may take this share of a token's tolerated energy. Dropped entries of kept parts may take what remains.
# One H100, H = 4096, 1.22 nats: 0.8 took 31.7 ms a step, 0.5 took 32.9, 0.95 the same.
TILE_SHARE = 0.8

# Bounds include the rounding of float32. SLACK is in nats, SLACK_OF_LSE in nats for each nat of |lse|.
SLACK, SLACK_OF_LSE = tl.constexpr(2e-3), tl.constexpr(2e-6)
SLACK_OF_SUM = tl.constexpr(2.0**-16)  # a sum of PART_VOCAB terms, each with a relative rounding of 2^-24
SLACK_OF_TERM = tl.constexpr(2.0**-23)  # a term that is computed again from lse: relative to the term, times |lse|
SLACK_OF_SHARES = tl.constexpr(1.0 + 2.0**-6)  # squared rounding of rests and shares to the products' dtype
SLACK_OF_DERIVATIVE = tl.constexpr(1e-5)
# Rounding in a token's tolerated energy: of float32 sums, relative to it; of listed entries, relative to the gradient.
BUDGET_ROUNDING, ENTRY_ROUNDING = 1.0 - 1e-3, 2.0**-16
LOG_4 = tl.constexpr(1.3862943611198906)


class ChosenParts(NamedTuple):
    """The kept parts of n tokens. A token's kept parts are consecutive, in the order of their tiles."""

    # (tiles, n) int16, or int32 for more than 2^15 tiles: number of a kept part among its token's kept parts; -1 for a
    # dropped part
    rank: Tensor
    starts: Tensor  # (n + 1,) int64: number of each token's first part among all kept parts
    room: Tensor  # (n,) float32: energy of the entries that a token may still drop, in units of its scale squared
    scale: Tensor  # (n,) float32: upper bound of an entry's size; 0 for a token without a gradient, which keeps no part
    rest: Tensor  # (n, padded tiles): sums of dropped parts, 0 elsewhere


# --- bounds -----------------------------------------------------------------------------------------------------------


@triton.jit
def _log_supremum(log_p, entropy):
    """log of the supremum of p (log p + entropy)^2 over 0 < p <= exp(log_p)."""
    log_p = tl.maximum(log_p, LOWEST)  # log_p is -inf if all ids are banned, and -inf plus inf is NaN
    value = log_p + 2.0 * tl.log(tl.abs(log_p + entropy))
    # The function has one local maximum, 4 exp(-entropy - 2), at log p = -entropy - 2.
    hill = LOG_4 - 2.0 - entropy
    return tl.where(log_p >= -entropy - 2.0, tl.maximum(value, hill), value)


@triton.jit
def _least_derivative(z, steps):
    """-> lower bound of dz/dx under a softcap, without the constant part."""
    return tl.maximum(1.0 - tanh_square(z, steps) - SLACK_OF_DERIVATIVE, 0.0)


@triton.jit
def _has_gradient(tokens, token, live):
    """-> whether each token has a gradient. A NaN counts as a gradient, so that it reaches the result."""
    if tokens.has_gradient is None:
        has_gradient = tl.load(tokens.grad_logps + token, mask=live, other=0.0) != 0
    else:
        has_gradient = tl.load(tokens.has_gradient + token, mask=live, other=0) != 0
    if tokens.grad_entropy is not None:
        has_gradient |= tl.load(tokens.grad_entropy + token, mask=live, other=0.0) != 0
    return has_gradient


@triton.jit
def _bounds_kernel(
    known,  # `TileStatistics`
    log_probabilities,  # (n,) of the targets: z - `tokens.lse`
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
    has_gradient = live & _has_gradient(tokens, token, live)
    lse = tl.load(tokens.lse + token, mask=live, other=0.0)
    logps = tl.load(log_probabilities + token, mask=live, other=0.0)
    target_tile = tl.load(targets + token, mask=live, other=0) // TILE_VOCAB
    slack = SLACK + SLACK_OF_LSE * tl.abs(lse)
    rounding = SLACK_OF_SUM + SLACK_OF_TERM * tl.abs(lse)
    g, e, entropy = token_terms(tokens, token, live)
    unit = tl.abs(g) + tl.abs(e)
    unit = tl.where(has_gradient & (unit != 0.0), unit, 1.0)
    # Division by the unit keeps squares of small gradients from underflow. A token without a gradient may hold NaN, and
    # 0 * NaN is NaN.
    g = tl.where(has_gradient, g / unit, 0.0)
    at_target = gradient_at_target(tokens, token, live, logps)
    known_gradient = at_target
    if steps.cap is not None:
        known_gradient *= 1.0 - tanh_square(logps + lse, steps)
    # Logits of a token without a gradient may be NaN or infinite, and zero times these is NaN.
    known_gradient = tl.where(has_gradient, times_slope(known_gradient, steps), 0.0)
    tl.store(out.at_target + token, known_gradient, mask=live)
    at_target = at_target / unit
    if tokens.grad_entropy is not None:
        e = tl.where(has_gradient, e / unit, 0.0)
    if steps.cap is not None:
        at_target *= _least_derivative(logps + lse, steps)
    least = at_target * at_target
    size = tl.zeros((TOKENS,), tl.float64)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        inside = (tile < tiles)[:, None] & live[None, :]
        place = tile.to(tl.int64)[:, None] * count + token[None, :]
        here = tile[:, None] == target_tile[None, :]
        peak = tl.load(known.peaks + place, mask=inside, other=LOWEST)
        # The sums are relative to the larger peak of a pair of parts.
        neighbour = (tile ^ 1).to(tl.int64)[:, None] * count + token[None, :]
        top = tl.maximum(peak, tl.load(known.peaks + neighbour, mask=inside, other=LOWEST))
        total = tl.load(known.sums + place, mask=inside, other=0.0)
        log_peak, log_top = peak - lse[None, :], top - lse[None, :]
        target_term = tl.where(here, tl.exp(tl.minimum((logps + lse)[None, :] - top, 0.0)), 0.0)
        others = tl.maximum(total - target_term, 0.0)
        log_mass = log_top + tl.log(tl.where(here, others + rounding[None, :] * total, total))
        log_largest = tl.minimum(log_peak, log_mass)
        most = tl.abs(g)[None, :] * tl.exp(0.5 * (log_largest + log_mass) + slack[None, :])
        largest, unit_mass = tl.exp(log_peak), tl.exp(log_top)
        if steps.cap is not None:
            slope = _least_derivative(peak, steps)
            largest *= slope
            unit_mass *= slope
        rest = -g[None, :] * unit_mass * others
        if tokens.grad_entropy is not None:
            supremum = _log_supremum(log_largest, entropy[None, :])
            most += tl.abs(e)[None, :] * tl.exp(0.5 * (log_mass + supremum) + slack[None, :])
            moment = tl.load(known.moments + place, mask=inside, other=0.0) + (log_top + entropy[None, :]) * total
            # A banned target has logp = -inf, and 0 * -inf is NaN in every tile.
            moment -= target_term * (tl.maximum(logps, LOWEST_LOG_PROBABILITY) + entropy)[None, :]
            rest -= e[None, :] * unit_mass * moment
        else:
            # A tile without the target contributes the square of its largest entry.
            lower = tl.where(inside & (here == 0), g[None, :] * largest, 0.0)
            least += tl.sum(lower * lower, 0) * (1.0 - 2.0 * slack)
        tl.store(out.most + place, most, mask=inside)
        tl.store(out.rest + place, rest, mask=inside)
        size += tl.sum(tl.where(inside, tl.abs(rest), 0.0), 0).to(tl.float64)
    size *= unit
    tl.store(out.least + token, least, mask=live)
    tl.store(out.unit + token, tl.where(has_gradient, unit, 0.0), mask=live)
    tl.store(out.size + token, tl.where(has_gradient & (size < float("inf")), size, 0.0), mask=live)


def part_bounds(
    known: TileStatistics,
    log_probabilities: Tensor,  # (n,) of the targets: z - `tokens.lse`
    tokens: TokenGradients,  # (n,) each
    targets: Tensor,  # (n,)
    transform: LogitTransform,
) -> PartBounds:
    """Bounds of the gradient, without the targets' entries. With P a tile's largest probability and Q its mass,

    sum_v p_v^2 <= P Q,    sum_v (p_v (log p_v + H))^2 <= Q sup_{p <= P} p (log p + H)^2
    """
    tiles, n = known.peaks.shape
    bounds = PartBounds.empty(n, tiles, targets.device)
    with launch_context(targets.device):
        _bounds_kernel[(triton.cdiv(n, BOUND_TOKENS),)](
            known, log_probabilities, tokens.contiguous(), targets.contiguous(), bounds, tiles, n,
            LogitSteps.of(transform),
            TILE_VOCAB=PART_VOCAB, TOKENS=BOUND_TOKENS, TILES=BOUND_TILES, num_warps=BOUND_WARPS,
        )  # fmt: skip
    return bounds


# --- the tail: how a tile's entries share the sum that is dropped there -----------------------------------------------


class Drawn(NamedTuple):
    """The sampled tokens, (SAMPLES,) each, whose gradients give the shares, and where hidden states are read."""

    rows: Tensor  # int64, positions among the n tokens
    positions: Tensor  # int64, the same tokens' positions among all N
    scales: Tensor  # float32, 1 / `PartBounds.size`, so that all samples' gradients are alike in size; 0 for size 0
    # (n,) int64, among all N: the position whose hidden state is read for each token. It is the token's own position,
    # or, if the token has no gradient, that of a token with one: zero times a NaN in the own hidden state is NaN.
    sources: Tensor


@triton.jit(do_not_specialize=["count"])
def _draw_kernel(
    bounds,  # `PartBounds`
    index,  # (count,) int64: positions of the tokens among all N; None if they are all tokens
    drawn,  # `Drawn`
    count,
    SAMPLES: tl.constexpr,
    STEP: tl.constexpr,
):
    # One program, because a token's place depends on all tokens before it. Float sums have one order, so one result.
    total = tl.zeros((), tl.float64)
    first_place = tl.zeros((), tl.int32) + (count - 1)
    for first in range(0, count, STEP):
        token = first + tl.arange(0, STEP)
        live = token < count
        total += tl.sum(tl.load(bounds.size + token, mask=live, other=0.0))
        has_gradient = tl.load(bounds.unit + token, mask=live, other=0.0) != 0.0
        first_place = tl.minimum(first_place, tl.min(tl.where(has_gradient, token, count - 1)))
    source = first_place.to(tl.int64)
    if index is not None:
        source = tl.load(index + first_place)
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
        has_gradient = tl.load(bounds.unit + token, mask=live, other=0.0) != 0.0
        position = token.to(tl.int64)
        if index is not None:
            position = tl.load(index + token, mask=live, other=0)
        tl.store(drawn.sources + token, tl.where(has_gradient, position, source), mask=live)
    place = tl.minimum(place, count - 1)
    size = tl.load(bounds.size + place)
    position = place.to(tl.int64)
    if index is not None:
        position = tl.load(index + place)
    tl.store(drawn.rows + sample, place.to(tl.int64))
    tl.store(drawn.positions + sample, position)
    tl.store(drawn.scales + sample, tl.where(size > 0.0, 1.0 / size, 0.0).to(tl.float32))


def draw_tokens(bounds: PartBounds, index: Tensor | None) -> Drawn:
    """Sample tokens in proportion to `PartBounds.size`; `index` (n,) are positions among all N, None for all tokens."""
    n, device = bounds.size.numel(), bounds.size.device
    rows, positions = torch.empty(2, SAMPLES, dtype=torch.int64, device=device).unbind()
    scales, sources = (
        torch.empty(SAMPLES, dtype=torch.float32, device=device),
        torch.empty(n, dtype=torch.int64, device=device),
    )
    drawn = Drawn(rows, positions, scales, sources)
    with launch_context(device):
        _draw_kernel[(1,)](bounds, index, drawn, n, SAMPLES=SAMPLES, STEP=DRAWN, num_warps=DRAWING_WARPS)
    return drawn


@triton.jit
def _store_shares(tail, size, tile, vocab, TILE_VOCAB: tl.constexpr, CUTS: tl.constexpr):
    """Write the shares of a tile's entries, from sums (TILE_VOCAB,) of their gradients' sizes."""
    known = tl.maximum(tl.minimum(vocab - tile * TILE_VOCAB, TILE_VOCAB), 1)
    # Tokens list the few large entries of a tile. A share of a rest on a listed entry would replace nothing.
    for _ in range(CUTS):
        size = tl.minimum(size, 2.0 * tl.sum(size) / known)
    total = tl.sum(size)
    # A sum of finite numbers may overflow to inf.
    share = tl.where((total > 0.0) & (total < float("inf")), size / total, 0.0)
    tl.store(tail.entries + tile * TILE_VOCAB + tl.arange(0, TILE_VOCAB), share)
    tl.store(tail.squares + tile, tl.sum(share * share))


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
    z, square = transform_logits(x, steps)
    log_p = z - tl.load(tokens.lse + row)[None, :]
    p = flushed_exp(log_p)
    g, e, entropy = token_terms(tokens, row, sample >= 0)
    ENTROPY: tl.constexpr = tokens.grad_entropy is not None
    if ENTROPY:
        e = e[None, :]
        entropy = entropy[None, :]
    grad = gradient(p, log_p, None, 0.0, g[None, :], e, entropy, ENTROPY)
    grad = tl.abs(times_derivative(grad, square, steps)) * scale[None, :]
    not_target = known[:, None] & (tl.load(targets + row)[None, :] != entry[:, None])
    # One token's NaN must not reach other tokens' gradients.
    size = tl.sum(tl.where(not_target & (grad < float("inf")), grad, 0.0), 1)
    _store_shares(tail, size, tile, vocab, TILE_VOCAB, CUTS)


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
        values = tl.load(weight + place, mask=known[:, None] & inside[None, :], other=0.0)
        values = values.to(rows.dtype.element_ty).to(tl.float32)
        total += values * tl.load(shares + entry, mask=known, other=0.0)[:, None]
    place = tile.to(tl.int64) * hidden_size + column
    tl.store(rows + place, tl.sum(total, 0).to(rows.dtype.element_ty), mask=inside)


def padded_tiles(vocab: int, width: int) -> int:
    """Tiles of the vocabulary, rounded up to a multiple of TILE_MULTIPLE."""
    return triton.cdiv(vocab, width * TILE_MULTIPLE) * TILE_MULTIPLE


def tail_of_logits(
    logits: Tensor,  # (V, SAMPLES) float32 of the drawn tokens
    bias: Tensor | None,  # (V,)
    drawn: Drawn,
    targets: Tensor,  # (n,)
    tokens: TokenGradients,  # (n,) each
    transform: LogitTransform,
) -> Tail:
    """An entry's share of a rest is its sum of |dL/dx| over the drawn tokens, relative to its tile's sum.

    A drawn token's target is left out of the sums.
    Among entries that are improbable for most tokens, the proportions are much the same for all tokens.
    """
    tail = Tail.empty(padded_tiles(logits.shape[0], PART_VOCAB), PART_VOCAB, logits.device)
    with launch_context(logits.device):
        _shares_kernel[(tail.squares.numel(),)](
            logits, None if bias is None else bias.contiguous(), drawn, targets, tokens.contiguous(), tail,
            logits.shape[0], LogitSteps.of(transform),
            TILE_VOCAB=PART_VOCAB, SAMPLES=SAMPLES, CUTS=CUTS, num_warps=SHARING_WARPS,
        )  # fmt: skip
    return tail


def tail_rows(tail: Tail, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(padded tiles, H): the sum of each tile's rows of the weight, times their shares; zeros past the vocabulary."""
    assert weight.stride(1) == 1
    (vocab, size), tiles = weight.shape, tail.squares.numel()
    rows = torch.empty(tiles, size, dtype=dtype, device=weight.device)
    with launch_context(weight.device):
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
    chosen,  # `ChosenParts`, written except for the starts
    numbers,  # (count,) int32: kept parts of each token, written
    tiles,
    count,
    width,  # padded tiles
    factor,  # tolerance^2, less the rounding
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
    has_gradient = live & (unit != 0.0)
    tile = tl.arange(0, TILES)
    inside = (tile < tiles)[:, None] & has_gradient[None, :]
    place = tile.to(tl.int64)[:, None] * count + token[None, :]
    most = tl.load(bounds.most + place, mask=inside, other=0.0)
    rest = tl.load(bounds.rest + place, mask=inside, other=0.0)
    square = SLACK_OF_SHARES * tl.load(squares + tile, mask=tile < tiles, other=0.0)[:, None]
    # The energy of G - S u, with G a part, S its sum and u >= 0 the shares. If G has one sign, the energy is at most
    # |G|^2 + |S u|^2.
    if SIGNED:
        energy = most + tl.abs(rest) * tl.sqrt(square)
        energy = energy * energy
    else:
        energy = most * most + rest * rest * square
    scale = tl.max(most, 0)
    tolerated = factor * tl.load(bounds.least + token, mask=live, other=0.0)
    ceiling = SHARE * tolerated
    # At most TILES parts are under the lowest threshold, so their sum is under the ceiling.
    low = tl.full((TOKENS,), 1.0 / TILES, tl.float32)
    high = tl.full((TOKENS,), 1.0, tl.float32)
    for _ in range(HALVINGS):
        middle = tl.sqrt(low * high)
        under = tl.sum(tl.where(energy < (middle * ceiling)[None, :], energy, 0.0), 0)
        fits = under <= ceiling
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle)
    # Comparisons with NaN are false, so a part whose energy is NaN is kept.
    dropped = inside & ((energy < (low * ceiling)[None, :]) | (energy == 0.0))
    spent = tl.sum(tl.where(dropped, energy, 0.0), 0)
    kept = inside & (dropped == 0)
    number = kept.to(tl.int32)
    among = tl.cumsum(number, 0) - number
    rank = tl.where(kept, among, -1)
    written = (tile < tiles)[:, None] & live[None, :]
    tl.store(chosen.rank + place, rank.to(chosen.rank.dtype.element_ty), mask=written)
    tl.store(numbers + token, tl.sum(number, 0), mask=live)
    room = tl.where(has_gradient, (tolerated - spent) / (scale * scale), 0.0)
    tl.store(chosen.room + token, room, mask=live)
    tl.store(chosen.scale + token, scale * unit, mask=live)
    rest = tl.where(dropped, times_slope(rest * unit[None, :], steps), 0.0).to(chosen.rest.dtype.element_ty)
    written = (tile < width)[:, None] & live[None, :]
    tl.store(chosen.rest + token.to(tl.int64)[None, :] * width + tile[:, None], rest, mask=written)


@triton.jit(do_not_specialize=["count"])
def _starts_kernel(numbers, units, starts, counted, count, TOKENS: tl.constexpr, STEP: tl.constexpr):
    # One program, because a token's start depends on all tokens before it.
    before = tl.zeros((), tl.int64)
    with_gradient = tl.zeros((), tl.int32)
    for first in range(0, count, STEP):
        token = first + tl.arange(0, STEP)
        live = token < count
        number = tl.load(numbers + token, mask=live, other=0).to(tl.int64)
        until = before + tl.cumsum(number, 0)
        tl.store(starts + token, until - number, mask=live)
        last = live & ((token % TOKENS == TOKENS - 1) | (token == count - 1))
        tl.store(counted + 1 + token // TOKENS, until, mask=last)
        before += tl.sum(number)
        with_gradient += tl.sum((tl.load(units + token, mask=live, other=0.0) != 0.0).to(tl.int32))
    tl.store(starts + count, before)
    tl.store(counted, with_gradient.to(tl.int64))


def choose_parts(
    bounds: PartBounds,
    tail: Tail,
    tolerance: float,
    transform: LogitTransform,
    dtype: torch.dtype,  # of products
    *,
    signed: bool,  # a part's entries may have both signs
) -> tuple[ChosenParts, Tensor]:
    """Keep, for each token, the parts without which its squared error could exceed TILE_SHARE of the tolerated energy.

    Returns:
        The parts, and (1 + ceil(n / BLOCK_TOKENS),) int64: the number of tokens with a gradient, and the number of kept
            parts of the first BLOCK_TOKENS tokens, of the first 2 BLOCK_TOKENS, ..., of all tokens.
    """
    tiles, n = bounds.most.shape
    device, width = bounds.most.device, tail.squares.numel()
    scale, room = torch.empty(2, n, dtype=torch.float32, device=device).unbind()
    numbers = torch.empty(n, dtype=torch.int32, device=device)
    starts, counted = torch.empty(n + 2 + triton.cdiv(n, BLOCK_TOKENS), dtype=torch.int64, device=device).tensor_split(
        [n + 1]
    )
    chosen = ChosenParts(
        torch.empty(tiles, n, dtype=torch.int16 if tiles <= 1 << 15 else torch.int32, device=device),
        starts,
        room,
        scale,
        torch.empty(n, width, dtype=dtype, device=device),
    )
    tiles_per_program = triton.next_power_of_2(width)
    tokens_per_program = max(CHOSEN // tiles_per_program, 1)
    with launch_context(device):
        _choose_kernel[(triton.cdiv(n, tokens_per_program),)](
            bounds, tail.squares, chosen, numbers, tiles, n, width, tolerance**2 * BUDGET_ROUNDING - ENTRY_ROUNDING**2,
            LogitSteps.of(transform),
            SHARE=TILE_SHARE, SIGNED=signed, HALVINGS=HALVINGS, TOKENS=tokens_per_program, TILES=tiles_per_program,
            num_warps=CHOOSING_WARPS,
        )  # fmt: skip
        _starts_kernel[(1,)](
            numbers, bounds.unit, starts, counted, n, TOKENS=BLOCK_TOKENS, STEP=DRAWN, num_warps=DRAWING_WARPS
        )
    return chosen, counted
