"""Statistics of vocabulary tiles into those of whole tokens, and into bounds of a gradient's blocks, as Triton kernels.

With g = dL/dlogp, e = dL/dentropy and p the softmax,

    dL/dz_v = g (1[v=y] - p_v) - e p_v (log p_v + entropy),    dL/dx_v = dL/dz_v dz/dx

The constant part of dz/dx, scale / temperature, is left out on both sides of every comparison; the rest is at most 1.
Each (tiles, tokens) matrix is read once, tiles in a fixed order.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.kernels.devices import on
from liger_rl.kernels.launches import Launched, cdiv
from liger_rl.kernels.softmax import (
    LOWEST,
    LOWEST_LOG_PROBABILITY,
    gradient_at_target,
    moment_around,
    tanh_square,
    token_terms,
)
from liger_rl.kernels.statistics import (
    BLOCK_TOKENS,
    BLOCK_VOCAB,
    MASS_SCALE,
    MOMENT_SCALE,
    Fold,
    TileBounds,
    TileStatistics,
    TokenGradients,
    TokenStatistics,
)
from liger_rl.kernels.transform import LogitSteps, LogitTransform

# Of a program, and of one step of its loop. Few tokens leave it to a step's width to keep an H200 busy: 3564 tokens of
# 501 tiles take 8, 16 and 10 us to merge, bound and rank, and 17, 30 and 24 with 32 tokens, 32 tiles and 4 warps.
MERGE_TOKENS, MERGE_TILES, MERGE_WARPS = 16, 128, 8
CODE_TILES = 32
ADDED = 256  # sums that a program adds up at a time
STEPS_PER_OCTAVE = 4
LARGEST_CODE = 255
ENTROPY_OCTAVES = 8  # entropy codes start at 2^8, above (log V)^2, the largest (p (log p + entropy))^2
BUDGET_ROUNDING = 1.0 - 1e-4  # float32 sums over a block, taken off the budget
UNDERFLOW = 2.0**-125  # of the bound of one token and tile, a sum of two squares: off the budget, for each of them
# A tile is large for a token above this many times its even share of the budget. A tenth of it, or ten times as much,
# changes the kept share by less than a tenth. docs/notes/kernels.md compares the order with others.
LARGE = 20.0
# A key is a class of tokens, counted down from the one with most large tiles, and the target within it. The last target
# stands for all larger ones. That makes 32 bits, which sort in two thirds of the time of 64.
LAST_CLASS, TARGETS = 63, 2**24
NOT_WANTED = 2**31 - 1

CODE_PER_NAT = tl.constexpr(-STEPS_PER_OCTAVE / math.log(2.0))
OCTAVE_PER_CODE = tl.constexpr(-1.0 / STEPS_PER_OCTAVE)
TOP_CODE = tl.constexpr(float(LARGEST_CODE))
# What float32 loses on the way to a bound, added to it: in nats, absolute and relative to the size of the logits.
SLACK, SLACK_OF_LSE = tl.constexpr(2e-3), tl.constexpr(2e-6)
SLACK_OF_SUM = tl.constexpr(2.0**-16)  # BLOCK_VOCAB terms of relative rounding 2^-24 each
SLACK_OF_TERM = tl.constexpr(2.0**-23)  # of one of them that is made again from lse, relative to it and times |lse|
SLACK_OF_SHARES = tl.constexpr(1.0 + 2.0**-6)  # of sums and shares to the products' dtype, squared
SLACK_OF_DERIVATIVE = tl.constexpr(1e-5)
ENTROPY_NATS = tl.constexpr(ENTROPY_OCTAVES * math.log(2.0))
ENTROPY_AMPLITUDE = tl.constexpr(2.0 ** (ENTROPY_OCTAVES / 2))
LAST_KEY, KEY_TARGETS, LAST_OF_ALL = tl.constexpr(LAST_CLASS), tl.constexpr(TARGETS), tl.constexpr(NOT_WANTED)
SCALE_OF_MASS, SCALE_OF_MOMENT = tl.constexpr(MASS_SCALE), tl.constexpr(MOMENT_SCALE)
PER_MASS, PER_MOMENT = tl.constexpr(1.0 / MASS_SCALE), tl.constexpr(1.0 / MOMENT_SCALE)
LOG_4 = tl.constexpr(math.log(4.0))


@Launched
@triton.jit
def _merge_kernel(
    parts,  # `Fold` of each tile, (tiles, tokens); its target is not read
    state,  # what they become, (tokens,) each; its target stays
    tiles,
    tokens,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token < tokens
    peak = tl.full((TOKENS,), LOWEST, tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    moment = tl.zeros((TOKENS,), tl.float32)
    total_sq = tl.zeros((TOKENS,), tl.float32)
    logit_sum = tl.zeros((TOKENS,), tl.float32)
    rival = tl.full((TOKENS,), float("-inf"), tl.float32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        inside = (tile < tiles)[:, None] & live[None, :]
        place = tile.to(tl.int64)[:, None] * tokens + token[None, :]
        tile_peak = tl.load(parts.peak + place, mask=inside, other=LOWEST)
        tile_sum = tl.load(parts.sum_exp + place, mask=inside, other=0.0)
        new_peak = tl.maximum(peak, tl.max(tile_peak, 0))
        kept = tl.exp(peak - new_peak)
        distance = tile_peak - new_peak[None, :]
        weight = tl.exp(distance)
        if parts.moment is not None:
            tile_moment = tl.load(parts.moment + place, mask=inside, other=0.0)
            moment = moment_around(new_peak, peak, kept, total, moment)
            moment += tl.sum(moment_around(new_peak[None, :], tile_peak, weight, tile_sum, tile_moment), 0)
        if parts.sum_sq_exp is not None:
            tile_sq = tl.load(parts.sum_sq_exp + place, mask=inside, other=0.0)
            total_sq = total_sq * kept * kept + tl.sum(weight * weight * tile_sq, 0)
        if parts.sum_logits is not None:
            logit_sum += tl.sum(tl.load(parts.sum_logits + place, mask=inside, other=0.0), 0)
        if parts.rival is not None:
            rival = tl.maximum(rival, tl.max(tl.load(parts.rival + place, mask=inside, other=float("-inf")), 0))
        total = total * kept + tl.sum(weight * tile_sum, 0)
        peak = new_peak
    tl.store(state.peak + token, peak, mask=live)
    tl.store(state.sum_exp + token, total, mask=live)
    if parts.moment is not None:
        tl.store(state.moment + token, moment, mask=live)
    if parts.sum_sq_exp is not None:
        tl.store(state.sum_sq_exp + token, total_sq, mask=live)
    if parts.sum_logits is not None:
        tl.store(state.sum_logits + token, logit_sum, mask=live)
    if parts.rival is not None:
        tl.store(state.rival + token, rival, mask=live)


def merge(parts: Fold, state: Fold) -> None:
    """Write the fold of n tokens from (tiles, n) folds of every tile; `target` has no parts and stays."""
    tiles, n = parts.peak.shape
    with on(state.peak.device):
        _merge_kernel[(cdiv(n, MERGE_TOKENS),)](
            parts, state, tiles, n, MERGE_TOKENS, MERGE_TILES, num_warps=MERGE_WARPS
        )


@triton.jit
def _log_supremum(log_p, entropy):
    """log of the supremum of p (log p + entropy)^2 over 0 < p <= exp(log_p)."""
    log_p = tl.maximum(log_p, LOWEST)  # of banned ids alone: -inf plus inf is NaN
    value = log_p + 2.0 * tl.log(tl.abs(log_p + entropy))
    # Its one local maximum, 4 exp(-entropy - 2), is at log p = -entropy - 2.
    hill = LOG_4 - 2.0 - entropy
    return tl.where(log_p >= -entropy - 2.0, tl.maximum(value, hill), value)


@triton.jit
def _encoded(log_energy, slack):
    return tl.minimum(tl.maximum(tl.floor((log_energy + slack) * CODE_PER_NAT), 0.0), TOP_CODE).to(tl.uint8)


@triton.jit
def slope_at(z, steps):
    """-> dz/dx under a softcap without its constant part, rounded down."""
    return tl.maximum(1.0 - tanh_square(z, steps) - SLACK_OF_DERIVATIVE, 0.0)


@Launched
@triton.jit
def _bounds_kernel(
    known,  # `TileStatistics`
    statistics,  # `TokenStatistics`
    targets,
    out,  # `TileBounds`; (tiles, all tokens) where the tokens are some of all
    tiles,
    tokens,
    stride,  # between two tiles of what is written
    steps,
    TILE_VOCAB: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token < tokens
    lse = tl.load(statistics.lse + token, mask=live, other=0.0)
    target_tile = tl.load(targets + token, mask=live, other=0) // TILE_VOCAB
    slack = SLACK + SLACK_OF_LSE * tl.abs(lse)
    logps = tl.load(statistics.logps + token, mask=live, other=0.0)
    entropy = tl.zeros((TOKENS,), tl.float32)
    if out.entropy_codes is not None:
        entropy = tl.load(statistics.entropy + token, mask=live, other=0.0)
    elsewhere = tl.zeros((TOKENS,), tl.float32)
    peak_there = tl.zeros((TOKENS,), tl.float32)
    sum_there = tl.zeros((TOKENS,), tl.float32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        inside = (tile < tiles)[:, None] & live[None, :]
        place = tile.to(tl.int64)[:, None] * tokens + token[None, :]
        peak = tl.load(known.peaks + place, mask=inside, other=LOWEST)
        total = tl.load(known.sums + place, mask=inside, other=0.0)
        log_peak = peak - lse[None, :]
        log_mass = log_peak + tl.log(total)
        out_place = tile.to(tl.int64)[:, None] * stride + token[None, :]
        tl.store(out.codes + out_place, _encoded(log_peak + log_mass, slack[None, :]), mask=inside)
        if out.entropy_codes is not None:
            log_energy = log_mass + _log_supremum(log_peak, entropy[None, :])
            tl.store(out.entropy_codes + out_place, _encoded(log_energy - ENTROPY_NATS, slack[None, :]), mask=inside)
        here = inside & (tile[:, None] == target_tile[None, :])
        peak_there += tl.sum(tl.where(here, peak, 0.0), 0)
        sum_there += tl.sum(tl.where(here, total, 0.0), 0)
        largest = tl.exp(log_peak)
        if steps.cap is not None:
            largest *= slope_at(peak, steps)
        target_term = tl.where(here, tl.exp((logps + lse)[None, :] - peak), 0.0)
        mass = largest * tl.maximum(total - target_term, 0.0)
        tl.store(out.masses + out_place, (mass * SCALE_OF_MASS).to(tl.float16), mask=inside)
        if out.entropy_codes is not None:
            moment = tl.load(known.moments + place, mask=inside, other=0.0) + (log_peak + entropy[None, :]) * total
            # Of a banned target 0 times -inf is NaN, in every tile.
            moment -= target_term * (tl.maximum(logps, LOWEST_LOG_PROBABILITY) + entropy)[None, :]
            tl.store(out.moments + out_place, (largest * moment * SCALE_OF_MOMENT).to(tl.float16), mask=inside)
        elsewhere += tl.sum(tl.where(inside & (tile[:, None] != target_tile[None, :]), largest * largest, 0.0), 0)
    target_there = tl.exp(logps + lse - peak_there)
    rounding = SLACK_OF_SUM + SLACK_OF_TERM * tl.abs(lse)
    others = (tl.maximum(sum_there - target_there, 0.0) + rounding * sum_there) * (1.0 + slack)
    log_others = peak_there - lse + tl.log(others)
    log_largest = tl.minimum(peak_there - lse, log_others)
    tl.store(out.beside_target + token, tl.exp(log_largest + log_others + slack), mask=live)
    tl.store(out.elsewhere + token, elsewhere * (1.0 - slack), mask=live)
    if out.entropy_codes is not None:
        beside = tl.exp(log_others + _log_supremum(log_largest, entropy) + slack)
        tl.store(out.entropy_beside_target + token, beside, mask=live)


def tile_bounds(
    tiles: TileStatistics,
    statistics: TokenStatistics,  # (n,) each
    targets: Tensor,  # (n,)
    transform: LogitTransform,
    out: TileBounds,
) -> None:
    """Write the bounds of n tokens; `out` may be some columns of all."""
    count, n = tiles.peaks.shape
    with on(targets.device):
        _bounds_kernel[(cdiv(n, MERGE_TOKENS),)](
            tiles,
            statistics,
            targets.contiguous(),
            out,
            count,
            n,
            out.codes.stride(0),
            LogitSteps.of(transform),
            TILE_VOCAB=BLOCK_VOCAB,
            TOKENS=MERGE_TOKENS,
            TILES=MERGE_TILES,
            num_warps=MERGE_WARPS,
        )


@triton.jit
def sum_beside_target(known, tokens, token, place, live, inside):
    """Sums of dL/dx over a tile but the target; `token` is in the last dimension of `place`."""
    g = tl.load(tokens.grad_logps + token, mask=live, other=0.0)
    mass = tl.load(known.masses + place, mask=inside, other=0.0).to(tl.float32)
    # Zero times what a token without a gradient holds may be NaN.
    total = tl.where(g != 0, mass * (-PER_MASS * g), 0.0)
    if tokens.grad_entropy is not None:
        e = tl.load(tokens.grad_entropy + token, mask=live, other=0.0)
        moment = tl.load(known.moments + place, mask=inside, other=0.0).to(tl.float32)
        total -= tl.where(e != 0, moment * (PER_MOMENT * e), 0.0)
    return total


@triton.jit
def has_gradient(tokens, token, live):
    """-> whether tokens have a gradient; true for NaN, which must reach the gradients."""
    wanted = tl.load(tokens.grad_logps + token, mask=live, other=0.0) != 0
    if tokens.grad_entropy is not None:
        wanted |= tl.load(tokens.grad_entropy + token, mask=live, other=0.0) != 0
    return wanted


@triton.jit
def slope_at_target(logps, statistics, token, live, steps):
    """-> `slope_at` the target's z under a softcap."""
    return slope_at(logps + tl.load(statistics.lse + token, mask=live, other=0.0), steps)


@triton.jit
def _amplitudes(codes, grad, token, place, live, inside):
    """-> square roots of what codes stand for, times the size of a gradient."""
    amplitude = tl.exp2(tl.load(codes + place, mask=inside, other=0).to(tl.float32) * (0.5 * OCTAVE_PER_CODE))
    return amplitude, tl.abs(tl.load(grad + token, mask=live, other=0.0))[None, :]


@triton.jit
def _energies(
    known, tokens, own_of, targets, token, live, tile, inside, count, tiles, TILE_VOCAB: tl.constexpr,
):  # fmt: skip
    """-> (TILES, TOKENS) upper bounds of the sum of squares of dL/dx minus what takes its place where it is left out.

    The place is taken by its sum S times shares u >= 0 that add up to 1. If all numbers have one sign, as dL/dlogp has
    beside the target, |G - S u|^2 <= |G|^2 + |S u|^2. Otherwise |G - S u| <= |G| + |S u|.
    """
    place = tile.to(tl.int64)[:, None] * count + token[None, :]
    amplitude, size = _amplitudes(known.codes, tokens.grad_logps, token, place, live, inside)
    amplitude *= size
    replaced = sum_beside_target(known, tokens, token[None, :], place, live[None, :], inside)
    squares = SLACK_OF_SHARES * tl.load(known.share_squares + tile, mask=tile < tiles, other=0.0)
    if tokens.grad_entropy is not None:
        other, size = _amplitudes(known.entropy_codes, tokens.grad_entropy, token, place, live, inside)
        amplitude += ENTROPY_AMPLITUDE * other * size
        amplitude += tl.abs(replaced) * tl.sqrt(squares)[:, None]
        beside = amplitude * amplitude
    else:
        beside = amplitude * amplitude + replaced * replaced * squares[:, None]
    own = tl.load(own_of + token, mask=live, other=0.0)
    target_tile = tl.load(targets + token, mask=live, other=-1) // TILE_VOCAB
    energy = tl.where(tile[:, None] == target_tile[None, :], own[None, :], beside)
    return tl.where(inside, energy, 0.0)


@Launched
@triton.jit
def _weigh_kernel(
    statistics,  # `TokenStatistics`, (count,) each
    tokens,  # `TokenGradients`, (count,) each
    known,  # `TileBounds` with the squares of the shares
    targets,
    own,
    energies,  # (programs,) float64, lower bounds of the sum of squares of dL/dx
    count,
    steps,
    TILE_VOCAB: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token < count
    g, e, _entropy = token_terms(tokens, token, live)
    logps = tl.load(statistics.logps + token, mask=live, other=0.0)
    at_target = gradient_at_target(tokens, token, live, logps)
    amplitude = tl.sqrt(tl.load(known.beside_target + token, mask=live, other=0.0)) * tl.abs(g)
    if tokens.grad_entropy is not None:
        amplitude += tl.sqrt(tl.load(known.entropy_beside_target + token, mask=live, other=0.0)) * tl.abs(e)
    largest = tl.sqrt(amplitude * amplitude + at_target * at_target)
    if steps.cap is not None:
        at_target *= slope_at_target(logps, statistics, token, live, steps)
    target_tile = tl.load(targets + token, mask=live, other=0) // TILE_VOCAB
    place = target_tile.to(tl.int64) * count + token
    replaced = at_target + sum_beside_target(known, tokens, token, place, live, live)
    squares = SLACK_OF_SHARES * tl.load(known.share_squares + target_tile, mask=live, other=0.0)
    largest += tl.abs(replaced) * tl.sqrt(squares)
    # Zero times what a token without a gradient holds may be NaN.
    wanted = has_gradient(tokens, token, live)
    tl.store(own + token, tl.where(wanted, largest * largest, 0.0), mask=live)
    energy = at_target.to(tl.float64) * at_target
    if tokens.grad_entropy is None:
        energy += tl.load(known.elsewhere + token, mask=live, other=0.0).to(tl.float64) * g * g
    tl.store(energies + tl.program_id(0), tl.sum(tl.where(wanted, energy, 0.0)))


@Launched
@triton.jit
def _rank_kernel(
    known, tokens, own, targets,
    energies,  # as `_weigh_kernel` wrote them, of WEIGHED tokens each
    budget_at,  # () float64, written
    key,  # (count,) int32, written
    wanted_at,  # (count,) bool, written
    tiles, count, factor, underflow, share,
    TILE_VOCAB: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr,
    WEIGHED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token < count
    # Every program adds them up for itself, in one order.
    parts = tl.cdiv(count, WEIGHED)
    energy = tl.zeros((), tl.float64)
    for first in range(0, parts, STEP):
        part = first + tl.arange(0, STEP)
        energy += tl.sum(tl.load(energies + part, mask=part < parts, other=0.0))
    budget = energy * factor - underflow
    if tl.program_id(0) == 0:
        tl.store(budget_at, budget)
    threshold = (budget * share).to(tl.float32)
    large = tl.zeros((TOKENS,), tl.int32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        inside = (tile < tiles)[:, None] & live[None, :]
        bound = _energies(known, tokens, own, targets, token, live, tile, inside, count, tiles, TILE_VOCAB)
        large += tl.sum((inside & (bound > threshold)).to(tl.int32), 0)
    half_octave = tl.floor(tl.log2((large + 1).to(tl.float32)) * 2.0 + 0.5).to(tl.int32)
    target = tl.minimum(tl.load(targets + token, mask=live, other=0), KEY_TARGETS - 1).to(tl.int32)
    ranked = (LAST_KEY - half_octave) * KEY_TARGETS + target
    wanted = has_gradient(tokens, token, live)
    tl.store(key + token, tl.where(wanted, ranked, LAST_OF_ALL), mask=live)
    tl.store(wanted_at + token, wanted, mask=live)


@Launched
@triton.jit
def _block_bounds_kernel(
    known, tokens, own, targets, order, out, tiles, count,
    TILE_VOCAB: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    position = row * TOKENS + tl.arange(0, TOKENS)
    live = position < count
    token = tl.load(order + position, mask=live, other=0)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    inside = (tile < tiles)[:, None] & live[None, :]
    energy = _energies(known, tokens, own, targets, token, live, tile, inside, count, tiles, TILE_VOCAB)
    tl.store(out + row.to(tl.int64) * tiles + tile, tl.sum(energy, 1), mask=tile < tiles)


class Ranking(NamedTuple):
    """What is chosen by: how much may be left out, and in which order tokens make rows of blocks."""

    budget: Tensor  # () float64, what the bounds of left-out blocks may add up to, negative for none at all
    own: Tensor  # (n,) float32, upper bounds of the sum of squares of dL/dx in the target's tile, 0 without a gradient
    key: Tensor  # (n,) int32, rising; NOT_WANTED for a token without a gradient
    wanted: Tensor  # (n,) bool: the others


def rank_tokens(
    known: TileBounds,
    statistics: TokenStatistics,  # (n,) each
    tokens: TokenGradients,  # (n,) each
    targets: Tensor,  # (n,)
    transform: LogitTransform,
    relative: float,  # of the Frobenius norm of dL/dx
) -> Ranking:
    """Tokens with about as many large tiles side by side, by target among them; those without a gradient last.

    The budget is relative^2 times a lower bound of the sum of squares of dL/dx: each token's target is known and, for
    dL/dlogp, the largest entry of every other tile.
    """
    tiles, n = known.codes.shape
    device = targets.device
    own = torch.empty(n, dtype=torch.float32, device=device)
    key = torch.empty(n, dtype=torch.int32, device=device)
    wanted = torch.empty(n, dtype=torch.bool, device=device)
    energies = torch.empty(cdiv(n, BLOCK_TOKENS), dtype=torch.float64, device=device)
    budget = torch.empty((), dtype=torch.float64, device=device)
    given, targets = tokens.contiguous(), targets.contiguous()
    with on(device):
        _weigh_kernel[(energies.numel(),)](
            statistics,
            given,
            known,
            targets,
            own,
            energies,
            n,
            LogitSteps.of(transform),
            TILE_VOCAB=BLOCK_VOCAB,
            TOKENS=BLOCK_TOKENS,
        )
        _rank_kernel[(cdiv(n, MERGE_TOKENS),)](
            known,
            given,
            own,
            targets,
            energies,
            budget,
            key,
            wanted,
            tiles,
            n,
            relative**2 * BUDGET_ROUNDING,
            known.codes.numel() * UNDERFLOW,
            LARGE / max(known.codes.numel(), 1),
            BLOCK_VOCAB,
            MERGE_TOKENS,
            MERGE_TILES,
            BLOCK_TOKENS,
            ADDED,
            num_warps=MERGE_WARPS,
        )
    return Ranking(budget, own, key, wanted)


def block_bounds(known: TileBounds, tokens: TokenGradients, own: Tensor, targets: Tensor, order: Tensor) -> Tensor:
    """(row blocks, tiles) float32, upper bounds of the sum of squares of dL/dx in each block.

    `order` (n,) is a permutation of the tokens, BLOCK_TOKENS of which at a time make a row of blocks.
    """
    tiles, n = known.codes.shape
    rows = cdiv(n, BLOCK_TOKENS)
    out = torch.empty(rows, tiles, dtype=torch.float32, device=targets.device)
    with on(targets.device):
        _block_bounds_kernel[(rows, cdiv(tiles, CODE_TILES))](
            known, tokens.contiguous(), own, targets.contiguous(), order, out, tiles, n,
            BLOCK_VOCAB, BLOCK_TOKENS, CODE_TILES,
        )  # fmt: skip
    return out
