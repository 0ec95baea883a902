"""Triton kernels that bound each part of a gradient and select the parts to compute: steps 2, 3 and 7 of README.md.

`select_parts` selects, for each token, the parts without which the token's error could exceed its share of the
tolerance. `listing_triton` makes lists of entries from the selected parts.

The sum of the entries that a token drops in a tile is spread over the tile by `EntryShares`, so that dL/dlogits still
adds up to zero over the vocabulary. The rows of a trained weight have much in common, so a sum that is off by a
thousandth would be a large error of dL/dhidden.

Each result is written by one program, in a fixed order: no atomics, the same bits on every run.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.head.sparse.parts import EntryShares, PartBounds, SelectedParts
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
    TileStatistics,
    TokenGradients,
)
from liger_rl.kernels.transform import LogitSteps, LogitTransform

BOUND_TOKENS, BOUND_TILES, BOUND_WARPS = 16, 64, 8
SELECT_PARTS, SELECT_WARPS = 8192, 8  # parts of a program of `_select_parts_kernel`; one token's parts may be more
HALVINGS = 10  # of the range that contains a token's threshold between dropped and selected parts
STEP_TOKENS, STEP_WARPS = 1024, 8  # tokens of a step, in the kernels with one program
SHARE_WARPS = 8
CUTS = 6  # times that a tile's entries are cut to twice their mean; each cut lowers the mean
# Rows and columns of the weight that a program reads at a time. One H200, H = 2048 and 4096: 1.2 to 1.3 x the time of
# one read of the weight; 16 x 256 took 1.6 to 2.4 x.
SUM_ENTRIES, SUM_COLUMNS = 32, 512
TILE_MULTIPLE = 8  # a row of dropped sums has a multiple of 8 tiles, so that products read it 16 bytes at a time
# Split of a token's squared error budget: 80% for parts that are dropped whole, 20% for single entries of other parts.
# One H100, H = 4096, 1.22 nats: 0.8 took 31.7 ms a step, 0.5 took 32.9, 0.95 the same.
TILE_SHARE = 0.8

# Bounds include the rounding of float32. SLACK is in nats, SLACK_OF_LSE in nats for each nat of |lse|.
SLACK, SLACK_OF_LSE = tl.constexpr(2e-3), tl.constexpr(2e-6)
SLACK_OF_SUM = tl.constexpr(2.0**-16)  # a sum of PART_VOCAB terms, each with a relative rounding of 2^-24
SLACK_OF_TERM = tl.constexpr(2.0**-23)  # a term that is computed again from lse: relative to the term, times |lse|
SLACK_OF_SHARES = tl.constexpr(1.0 + 2.0**-6)  # squared rounding of dropped sums and shares to the products' dtype
SLACK_OF_DERIVATIVE = tl.constexpr(1e-5)
# Rounding in a token's squared error budget: of float32 sums, relative to it; of listed entries, relative to the
# gradient.
BUDGET_ROUNDING, ENTRY_ROUNDING = 1.0 - 1e-3, 2.0**-16
LOG_4 = tl.constexpr(1.3862943611198906)


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
def _has_gradient(gradients, token, live):
    """-> whether each token has a gradient. A NaN counts as a gradient, so that it reaches the result."""
    if gradients.has_gradient is None:
        has_gradient = tl.load(gradients.grad_logps + token, mask=live, other=0.0) != 0
    else:
        has_gradient = tl.load(gradients.has_gradient + token, mask=live, other=0) != 0
    if gradients.grad_entropy is not None:
        has_gradient |= tl.load(gradients.grad_entropy + token, mask=live, other=0.0) != 0
    return has_gradient


@triton.jit
def _bounds_kernel(
    statistics,  # `TileStatistics`
    log_probabilities,  # (n,) of the targets: z - `gradients.lse`
    gradients,  # `TokenGradients`
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
    has_gradient = live & _has_gradient(gradients, token, live)
    lse = tl.load(gradients.lse + token, mask=live, other=0.0)
    logps = tl.load(log_probabilities + token, mask=live, other=0.0)
    target_tile = tl.load(targets + token, mask=live, other=0) // TILE_VOCAB
    slack = SLACK + SLACK_OF_LSE * tl.abs(lse)
    rounding = SLACK_OF_SUM + SLACK_OF_TERM * tl.abs(lse)
    g, e, entropy = token_terms(gradients, token, live)
    unit = tl.abs(g) + tl.abs(e)
    unit = tl.where(has_gradient & (unit != 0.0), unit, 1.0)
    # Division by the unit keeps squares of small gradients from underflow. A token without a gradient may hold NaN, and
    # 0 * NaN is NaN.
    g = tl.where(has_gradient, g / unit, 0.0)
    at_target = gradient_at_target(gradients, token, live, logps)
    target_gradient = at_target
    if steps.cap is not None:
        target_gradient *= 1.0 - tanh_square(logps + lse, steps)
    # Logits of a token without a gradient may be NaN or infinite, and zero times these is NaN.
    target_gradient = tl.where(has_gradient, times_slope(target_gradient, steps), 0.0)
    tl.store(out.at_target + token, target_gradient, mask=live)
    at_target = at_target / unit
    if gradients.grad_entropy is not None:
        e = tl.where(has_gradient, e / unit, 0.0)
    if steps.cap is not None:
        at_target *= _least_derivative(logps + lse, steps)
    min_square = at_target * at_target
    total_size = tl.zeros((TOKENS,), tl.float64)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        inside = (tile < tiles)[:, None] & live[None, :]
        place = tile.to(tl.int64)[:, None] * count + token[None, :]
        has_target = tile[:, None] == target_tile[None, :]
        peak = tl.load(statistics.peaks + place, mask=inside, other=LOWEST)
        # The sums are relative to the larger peak of a pair of parts.
        neighbour = (tile ^ 1).to(tl.int64)[:, None] * count + token[None, :]
        top = tl.maximum(peak, tl.load(statistics.peaks + neighbour, mask=inside, other=LOWEST))
        total = tl.load(statistics.sums + place, mask=inside, other=0.0)
        log_peak, log_top = peak - lse[None, :], top - lse[None, :]
        target_term = tl.where(has_target, tl.exp(tl.minimum((logps + lse)[None, :] - top, 0.0)), 0.0)
        others = tl.maximum(total - target_term, 0.0)
        log_mass = log_top + tl.log(tl.where(has_target, others + rounding[None, :] * total, total))
        log_largest = tl.minimum(log_peak, log_mass)
        max_norm = tl.abs(g)[None, :] * tl.exp(0.5 * (log_largest + log_mass) + slack[None, :])
        largest, unit_mass = tl.exp(log_peak), tl.exp(log_top)
        if steps.cap is not None:
            slope = _least_derivative(peak, steps)
            largest *= slope
            unit_mass *= slope
        sums = -g[None, :] * unit_mass * others
        if gradients.grad_entropy is not None:
            supremum = _log_supremum(log_largest, entropy[None, :])
            max_norm += tl.abs(e)[None, :] * tl.exp(0.5 * (log_mass + supremum) + slack[None, :])
            moment = tl.load(statistics.moments + place, mask=inside, other=0.0) + (log_top + entropy[None, :]) * total
            # A banned target has logp = -inf, and 0 * -inf is NaN in every tile.
            moment -= target_term * (tl.maximum(logps, LOWEST_LOG_PROBABILITY) + entropy)[None, :]
            sums -= e[None, :] * unit_mass * moment
        else:
            # A tile without the target contributes the square of its largest entry.
            lower = tl.where(inside & (has_target == 0), g[None, :] * largest, 0.0)
            min_square += tl.sum(lower * lower, 0) * (1.0 - 2.0 * slack)
        tl.store(out.max_norm + place, max_norm, mask=inside)
        tl.store(out.sums + place, sums, mask=inside)
        total_size += tl.sum(tl.where(inside, tl.abs(sums), 0.0), 0).to(tl.float64)
    total_size *= unit
    tl.store(out.min_square + token, min_square, mask=live)
    tl.store(out.unit + token, tl.where(has_gradient, unit, 0.0), mask=live)
    tl.store(out.total_size + token, tl.where(has_gradient & (total_size < float("inf")), total_size, 0.0), mask=live)


def bound_parts(
    statistics: TileStatistics,
    log_probabilities: Tensor,  # (n,) of the targets: z - `gradients.lse`
    gradients: TokenGradients,  # (n,) each
    targets: Tensor,  # (n,)
    transform: LogitTransform,
) -> PartBounds:
    """Bounds of the gradient, without the targets' entries. With P a tile's largest probability and Q its mass,

    sum_v p_v^2 <= P Q,    sum_v (p_v (log p_v + H))^2 <= Q sup_{p <= P} p (log p + H)^2
    """
    tiles, n = statistics.peaks.shape
    bounds = PartBounds.empty(n, tiles, targets.device)
    with launch_context(targets.device):
        _bounds_kernel[(triton.cdiv(n, BOUND_TOKENS),)](
            statistics, log_probabilities, gradients.contiguous(), targets.contiguous(), bounds, tiles, n,
            LogitSteps.of(transform),
            TILE_VOCAB=PART_VOCAB, TOKENS=BOUND_TOKENS, TILES=BOUND_TILES, num_warps=BOUND_WARPS,
        )  # fmt: skip
    return bounds


# --- shares of a tile's entries in the sum that is dropped in the tile ------------------------------------------------


class SampledTokens(NamedTuple):
    """The sampled tokens, whose gradients give the shares of entries."""

    rows: Tensor  # (SAMPLES,) int64, index among the n tokens
    positions: Tensor  # (SAMPLES,) int64, index of the same tokens among all N
    # (SAMPLES,) float32, 1 / `PartBounds.total_size`, which makes the samples' gradients alike in size; 0 for size 0
    scales: Tensor
    # (n,) int64 index into hidden, of all N. Tokens without a gradient point to the row of a token that has one,
    # because their own row may hold NaN.
    hidden_rows: Tensor


@triton.jit(do_not_specialize=["count"])
def _sample_kernel(
    bounds,  # `PartBounds`
    index,  # (count,) int64: positions of the tokens among all N; None if they are all tokens
    samples,  # `SampledTokens`
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
        total += tl.sum(tl.load(bounds.total_size + token, mask=live, other=0.0))
        has_gradient = tl.load(bounds.unit + token, mask=live, other=0.0) != 0.0
        first_place = tl.minimum(first_place, tl.min(tl.where(has_gradient, token, count - 1)))
    gradient_row = first_place.to(tl.int64)
    if index is not None:
        gradient_row = tl.load(index + first_place)
    sample = tl.arange(0, SAMPLES)
    step = (sample + 0.5) * (total / SAMPLES)
    so_far = tl.zeros((), tl.float64)
    place = tl.zeros((SAMPLES,), tl.int32)
    for first in range(0, count, STEP):
        token = first + tl.arange(0, STEP)
        live = token < count
        until = so_far + tl.cumsum(tl.load(bounds.total_size + token, mask=live, other=0.0), 0)
        place += tl.sum(((until[:, None] <= step[None, :]) & live[:, None]).to(tl.int32), 0)
        so_far = tl.max(until, 0)
        has_gradient = tl.load(bounds.unit + token, mask=live, other=0.0) != 0.0
        position = token.to(tl.int64)
        if index is not None:
            position = tl.load(index + token, mask=live, other=0)
        tl.store(samples.hidden_rows + token, tl.where(has_gradient, position, gradient_row), mask=live)
    place = tl.minimum(place, count - 1)
    size = tl.load(bounds.total_size + place)
    position = place.to(tl.int64)
    if index is not None:
        position = tl.load(index + place)
    tl.store(samples.rows + sample, place.to(tl.int64))
    tl.store(samples.positions + sample, position)
    tl.store(samples.scales + sample, tl.where(size > 0.0, 1.0 / size, 0.0).to(tl.float32))


def sample_tokens(bounds: PartBounds, index: Tensor | None) -> SampledTokens:
    """Sample tokens in proportion to `PartBounds.total_size`.

    `index` (n,) has the positions of the tokens among all N; None if n = N.
    """
    n, device = bounds.total_size.numel(), bounds.total_size.device
    rows, positions = torch.empty(2, SAMPLES, dtype=torch.int64, device=device).unbind()
    scales = torch.empty(SAMPLES, dtype=torch.float32, device=device)
    samples = SampledTokens(rows, positions, scales, torch.empty(n, dtype=torch.int64, device=device))
    with launch_context(device):
        _sample_kernel[(1,)](bounds, index, samples, n, SAMPLES=SAMPLES, STEP=STEP_TOKENS, num_warps=STEP_WARPS)
    return samples


@triton.jit
def _store_shares(entry_shares, size, tile, vocab, TILE_VOCAB: tl.constexpr, CUTS: tl.constexpr):
    """Write the shares of a tile's entries, from sums (TILE_VOCAB,) of their gradients' sizes."""
    entries = tl.maximum(tl.minimum(vocab - tile * TILE_VOCAB, TILE_VOCAB), 1)
    # Tokens list the few large entries of a tile, and a listed entry needs no share of the dropped sum.
    for _ in range(CUTS):
        size = tl.minimum(size, 2.0 * tl.sum(size) / entries)
    total = tl.sum(size)
    # A sum of finite numbers may overflow to inf.
    share = tl.where((total > 0.0) & (total < float("inf")), size / total, 0.0)
    tl.store(entry_shares.shares + tile * TILE_VOCAB + tl.arange(0, TILE_VOCAB), share)
    tl.store(entry_shares.squares + tile, tl.sum(share * share))


@triton.jit
def _share_entries_kernel(
    logits,  # (V, SAMPLES) float32
    bias,
    samples,  # `SampledTokens`
    targets,
    gradients,  # `TokenGradients`
    entry_shares,  # `EntryShares`
    vocab,
    steps,
    TILE_VOCAB: tl.constexpr,
    SAMPLES: tl.constexpr,
    CUTS: tl.constexpr,
):
    tile = tl.program_id(0)
    entry = tile * TILE_VOCAB + tl.arange(0, TILE_VOCAB)
    in_vocab = entry < vocab
    sample = tl.arange(0, SAMPLES)
    row, scale = tl.load(samples.rows + sample), tl.load(samples.scales + sample)
    x = tl.load(logits + entry.to(tl.int64)[:, None] * SAMPLES + sample[None, :], mask=in_vocab[:, None], other=0.0)
    if bias is not None:
        x += tl.load(bias + entry, mask=in_vocab, other=0.0).to(tl.float32)[:, None]
    z, square = transform_logits(x, steps)
    log_p = z - tl.load(gradients.lse + row)[None, :]
    p = flushed_exp(log_p)
    g, e, entropy = token_terms(gradients, row, sample >= 0)
    ENTROPY: tl.constexpr = gradients.grad_entropy is not None
    if ENTROPY:
        e = e[None, :]
        entropy = entropy[None, :]
    grad = gradient(p, log_p, None, 0.0, g[None, :], e, entropy, ENTROPY)
    grad = tl.abs(times_derivative(grad, square, steps)) * scale[None, :]
    not_target = in_vocab[:, None] & (tl.load(targets + row)[None, :] != entry[:, None])
    # One token's NaN must not reach other tokens' gradients.
    size = tl.sum(tl.where(not_target & (grad < float("inf")), grad, 0.0), 1)
    _store_shares(entry_shares, size, tile, vocab, TILE_VOCAB, CUTS)


@triton.jit
def _sum_tile_rows_kernel(
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
        in_vocab = entry < vocab
        place = entry.to(tl.int64)[:, None] * stride + column[None, :]
        values = tl.load(weight + place, mask=in_vocab[:, None] & inside[None, :], other=0.0)
        values = values.to(rows.dtype.element_ty).to(tl.float32)
        total += values * tl.load(shares + entry, mask=in_vocab, other=0.0)[:, None]
    place = tile.to(tl.int64) * hidden_size + column
    tl.store(rows + place, tl.sum(total, 0).to(rows.dtype.element_ty), mask=inside)


def count_padded_tiles(vocab: int, width: int) -> int:
    """Tiles of the vocabulary, rounded up to a multiple of TILE_MULTIPLE."""
    return triton.cdiv(vocab, width * TILE_MULTIPLE) * TILE_MULTIPLE


def estimate_shares(
    logits: Tensor,  # (V, SAMPLES) float32 of the sampled tokens
    bias: Tensor | None,  # (V,)
    samples: SampledTokens,
    targets: Tensor,  # (n,)
    gradients: TokenGradients,  # (n,) each
    transform: LogitTransform,
) -> EntryShares:
    """An entry's share is its sum of |dL/dx| over the sampled tokens, relative to its tile's sum.

    The sampled tokens' targets are left out.
    Among entries that are improbable for most tokens, the proportions are much the same for all tokens.
    """
    entry_shares = EntryShares.empty(count_padded_tiles(logits.shape[0], PART_VOCAB), PART_VOCAB, logits.device)
    with launch_context(logits.device):
        _share_entries_kernel[(entry_shares.squares.numel(),)](
            logits, None if bias is None else bias.contiguous(), samples, targets, gradients.contiguous(), entry_shares,
            logits.shape[0], LogitSteps.of(transform),
            TILE_VOCAB=PART_VOCAB, SAMPLES=SAMPLES, CUTS=CUTS, num_warps=SHARE_WARPS,
        )  # fmt: skip
    return entry_shares


def sum_tile_rows(entry_shares: EntryShares, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(padded tiles, H): the sum of each tile's rows of the weight times their shares; 0 past the vocabulary."""
    assert weight.stride(1) == 1
    (vocab, size), tiles = weight.shape, entry_shares.squares.numel()
    rows = torch.empty(tiles, size, dtype=dtype, device=weight.device)
    with launch_context(weight.device):
        _sum_tile_rows_kernel[(tiles, triton.cdiv(size, SUM_COLUMNS))](
            weight, weight.stride(0), entry_shares.shares, rows, vocab, size,
            TILE_VOCAB=entry_shares.width, ENTRIES=SUM_ENTRIES, COLUMNS=SUM_COLUMNS,
        )  # fmt: skip
    return rows


# --- selection of parts -----------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["count"])
def _select_parts_kernel(
    bounds,  # `PartBounds`
    squares,  # (padded tiles,) of `EntryShares`
    parts,  # `SelectedParts`, written except for the starts
    numbers,  # (count,) int32: selected parts of each token, written
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
    max_norm = tl.load(bounds.max_norm + place, mask=inside, other=0.0)
    sums = tl.load(bounds.sums + place, mask=inside, other=0.0)
    square = SLACK_OF_SHARES * tl.load(squares + tile, mask=tile < tiles, other=0.0)[:, None]
    # The energy of G - S u, with G a part, S its sum and u >= 0 the shares. If G has one sign, the energy is at most
    # |G|^2 + |S u|^2.
    if SIGNED:
        energy = max_norm + tl.abs(sums) * tl.sqrt(square)
        energy = energy * energy
    else:
        energy = max_norm * max_norm + sums * sums * square
    scale = tl.max(max_norm, 0)
    tolerated = factor * tl.load(bounds.min_square + token, mask=live, other=0.0)
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
    # Comparisons with NaN are false, so a part whose energy is NaN is selected.
    dropped = inside & ((energy < (low * ceiling)[None, :]) | (energy == 0.0))
    spent = tl.sum(tl.where(dropped, energy, 0.0), 0)
    selected = inside & (dropped == 0)
    number = selected.to(tl.int32)
    number_before = tl.cumsum(number, 0) - number
    rank = tl.where(selected, number_before, -1)
    written = (tile < tiles)[:, None] & live[None, :]
    tl.store(parts.rank + place, rank.to(parts.rank.dtype.element_ty), mask=written)
    tl.store(numbers + token, tl.sum(number, 0), mask=live)
    budget = tl.where(has_gradient, (tolerated - spent) / (scale * scale), 0.0)
    tl.store(parts.budget + token, budget, mask=live)
    tl.store(parts.scale + token, scale * unit, mask=live)
    sums = tl.where(dropped, times_slope(sums * unit[None, :], steps), 0.0).to(parts.dropped_sums.dtype.element_ty)
    written = (tile < width)[:, None] & live[None, :]
    tl.store(parts.dropped_sums + token.to(tl.int64)[None, :] * width + tile[:, None], sums, mask=written)


@triton.jit(do_not_specialize=["count"])
def _starts_kernel(numbers, units, starts, counts, count, TOKENS: tl.constexpr, STEP: tl.constexpr):
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
        tl.store(counts + 1 + token // TOKENS, until, mask=last)
        before += tl.sum(number)
        with_gradient += tl.sum((tl.load(units + token, mask=live, other=0.0) != 0.0).to(tl.int32))
    tl.store(starts + count, before)
    tl.store(counts, with_gradient.to(tl.int64))


def select_parts(
    bounds: PartBounds,
    entry_shares: EntryShares,
    tolerance: float,
    transform: LogitTransform,
    dtype: torch.dtype,  # of products
    *,
    signed: bool,  # a part's entries may have both signs
) -> tuple[SelectedParts, Tensor]:
    """Select, for each token, the parts without which its error could exceed TILE_SHARE of its squared error budget.

    Returns:
        The parts, and (1 + ceil(n / BLOCK_TOKENS),) int64: `PartCounts.gradient_tokens`, then
            `PartCounts.block_ends`.
    """
    tiles, n = bounds.max_norm.shape
    device, width = bounds.max_norm.device, entry_shares.squares.numel()
    scale, budget = torch.empty(2, n, dtype=torch.float32, device=device).unbind()
    numbers = torch.empty(n, dtype=torch.int32, device=device)
    starts, counts = torch.empty(n + 2 + triton.cdiv(n, BLOCK_TOKENS), dtype=torch.int64, device=device).tensor_split(
        [n + 1]
    )
    parts = SelectedParts(
        torch.empty(tiles, n, dtype=torch.int16 if tiles <= 1 << 15 else torch.int32, device=device),
        starts,
        budget,
        scale,
        torch.empty(n, width, dtype=dtype, device=device),
    )
    tiles_per_program = triton.next_power_of_2(width)
    tokens_per_program = max(SELECT_PARTS // tiles_per_program, 1)
    with launch_context(device):
        _select_parts_kernel[(triton.cdiv(n, tokens_per_program),)](
            bounds, entry_shares.squares, parts, numbers, tiles, n, width,
            tolerance**2 * BUDGET_ROUNDING - ENTRY_ROUNDING**2, LogitSteps.of(transform),
            SHARE=TILE_SHARE, SIGNED=signed, HALVINGS=HALVINGS, TOKENS=tokens_per_program, TILES=tiles_per_program,
            num_warps=SELECT_WARPS,
        )  # fmt: skip
        _starts_kernel[(1,)](
            numbers, bounds.unit, starts, counts, n, TOKENS=BLOCK_TOKENS, STEP=STEP_TOKENS, num_warps=STEP_WARPS
        )
    return parts, counts
