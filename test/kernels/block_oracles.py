"""The block-sparse backward in plain PyTorch: bounds, choice, shares and products that Triton's kernels must equal.

It imports none of the kernels under test: only the plain data types of `liger_rl.kernels.statistics`,
and the dense formulas and products of `eager` and `gemm`, which have tests of their own. Its constants are its own.

With g = dL/dlogp, e = dL/dentropy and p the softmax,

    dL/dz_v = g (1[v=y] - p_v) - e p_v (log p_v + entropy),    dL/dx_v = dL/dz_v dz/dx

The constant part of dz/dx, scale / temperature, is left out on both sides of every comparison; the rest is at most 1.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_rl.kernels import eager, gemm
from liger_rl.kernels.eager import entropy_term, target_gradient, transformed
from liger_rl.kernels.statistics import (
    BLOCK_TOKENS,
    BLOCK_VOCAB,
    MASS_SCALE,
    MOMENT_SCALE,
    SAMPLES,
    BlockPlan,
    LeftOut,
    TileBounds,
    TileShares,
    TileStatistics,
    TokenGradients,
    TokenStatistics,
)
from liger_rl.kernels.transform import LogitTransform

STEPS_PER_OCTAVE = 4
LARGEST_CODE = 255
ENTROPY_OCTAVES = 8  # entropy codes start at 2^8, above (log V)^2, the largest (p (log p + entropy))^2
# What float32 loses on the way to a bound, added to it: in nats, absolute and relative to the size of the logits.
ROUNDING_NATS, ROUNDING_OF_LSE = 2e-3, 2e-6
ROUNDING_OF_SUM = 2.0**-16  # BLOCK_VOCAB terms of relative rounding 2^-24 each
ROUNDING_OF_TERM = 2.0**-23  # of one of them that is made again from lse, relative to it and times |lse|
ROUNDING_OF_DERIVATIVE = 1e-5
BUDGET_ROUNDING = 1.0 - 1e-4  # float32 sums over a block, taken off the budget
SHARE_ROUNDING = 1.0 + 2.0**-6  # of sums and shares to the products' dtype, squared
UNDERFLOW = 2.0**-125  # of the bound of one token and tile, a sum of two squares: off the budget, for each of them

LARGE = 20.0  # times its even share of the budget, from which on a tile is large for a token
LAST_CLASS, TARGETS = 63, 2**24
NOT_WANTED = 2**31 - 1
BUDGET_UNITS = 2**36
TILE_MULTIPLE = 8


def tile_statistics(logits: Tensor, transform: LogitTransform, *, entropy: bool) -> TileStatistics:
    """The softmax sums of logits (n, v) over every BLOCK_VOCAB ids."""
    z = transformed(logits, None, transform)
    z = torch.nn.functional.pad(z, (0, -z.shape[1] % BLOCK_VOCAB), value=-torch.inf)
    z = z.view(z.shape[0], -1, BLOCK_VOCAB)
    peaks = z.amax(-1).clamp_(min=torch.finfo(torch.float32).min)
    shifted = z - peaks[..., None]
    exp = shifted.exp()
    moments = (exp * shifted.clamp(min=eager.LOWEST_LOG_PROBABILITY)).sum(-1).T.contiguous() if entropy else None
    return TileStatistics(peaks.T.contiguous(), exp.sum(-1).T.contiguous(), moments)


def tile_bounds(
    tiles: TileStatistics,
    statistics: TokenStatistics,  # (n,) each
    targets: Tensor,  # (n,)
    transform: LogitTransform,
    out: TileBounds,
) -> None:
    """Write the bounds of n tokens."""
    lse, entropy = statistics.lse, statistics.entropy
    log_peak = tiles.peaks - lse
    log_mass = log_peak + tiles.sums.log()
    slack = ROUNDING_NATS + ROUNDING_OF_LSE * lse.abs()
    out.codes.copy_(_encoded(log_peak + log_mass, slack))

    target_tile = (targets // BLOCK_VOCAB)[None]
    peak_there, sum_there = (part.gather(0, target_tile).squeeze(0) for part in tiles[:2])
    target_term = (statistics.logps + lse - peak_there).exp()
    beside = (sum_there - target_term).clamp_(min=0.0)
    rounding = ROUNDING_OF_SUM + ROUNDING_OF_TERM * lse.abs()
    others = (beside + rounding * sum_there) * (1.0 + slack)
    log_others = (peak_there - lse) + others.log()
    log_largest = torch.minimum(peak_there - lse, log_others)
    out.beside_target.copy_((log_largest + log_others + slack).exp())

    slope = torch.ones_like(log_peak) if transform.softcap is None else derivative(tiles.peaks, transform)
    energy = (log_peak.exp() * slope).square()
    out.elsewhere.copy_(energy.scatter(0, target_tile, 0.0).sum(0).mul_(1.0 - slack))

    # Under a softcap a mass is weighted by dz/dx at the tile's largest id, which no other id with a say is below.
    scale = slope * MASS_SCALE
    mass = log_mass.exp().scatter(0, target_tile, ((peak_there - lse).exp() * beside)[None])
    out.masses.copy_(mass * scale)

    if out.entropy_codes is not None and out.entropy_beside_target is not None and entropy is not None:
        assert tiles.moments is not None
        assert out.moments is not None
        # sum_v p_v (log p_v + H) = P (sum_v exp(z_v - peak) (z_v - peak) + (log P + H) sum_v exp(z_v - peak))
        moment = log_peak.exp() * (tiles.moments + (log_peak + entropy) * tiles.sums)
        at_target = entropy_term(statistics.logps, entropy)
        moment = moment.scatter(0, target_tile, moment.gather(0, target_tile) - at_target)
        out.moments.copy_(moment * (slope * MOMENT_SCALE))
        log_energy = log_mass + _log_supremum(log_peak, entropy)
        out.entropy_codes.copy_(_encoded(log_energy - ENTROPY_OCTAVES * math.log(2.0), slack))
        out.entropy_beside_target.copy_((log_others + _log_supremum(log_largest, entropy) + slack).exp())


def _encoded(log_energy: Tensor, slack: Tensor) -> Tensor:
    steps = (log_energy + slack) * (-STEPS_PER_OCTAVE / math.log(2.0))
    return steps.floor_().clamp_(0, LARGEST_CODE).to(torch.uint8)


def _decoded(codes: Tensor) -> Tensor:
    return torch.exp2(codes.float() * (-1.0 / STEPS_PER_OCTAVE))


def _log_supremum(log_p: Tensor, entropy: Tensor) -> Tensor:
    """log of the supremum of p (log p + entropy)^2 over 0 < p <= exp(log_p)."""
    log_p = log_p.clamp(min=torch.finfo(torch.float32).min)  # of banned ids alone: -inf plus inf is NaN
    value = log_p + 2.0 * (log_p + entropy).abs().log()
    # Its one local maximum, 4 exp(-entropy - 2), is at log p = -entropy - 2.
    hill = math.log(4.0) - 2.0 - entropy
    return torch.where(log_p >= -entropy - 2.0, torch.maximum(value, hill), value)


def derivative(z: Tensor, transform: LogitTransform) -> Tensor:
    """dz/dx without its constant scale / temperature, rounded down, of transformed logits under a softcap."""
    assert transform.softcap is not None
    tanh = z * (transform.temperature / transform.softcap)
    return (1.0 - tanh.square() - ROUNDING_OF_DERIVATIVE).clamp_(min=0.0)


class Ranking(NamedTuple):
    """What is chosen by: how much may be left out, and in which order tokens make rows of blocks."""

    budget: Tensor  # () float64, what the bounds of left-out blocks may add up to, negative for none at all
    own: Tensor  # (n,) float32, upper bounds of the sum of squares of dL/dx in the target's tile, 0 without a gradient
    key: Tensor  # (n,) int32, rising; NOT_WANTED for a token without a gradient
    wanted: Tensor  # (n,) bool: the others


def rank_tokens(
    known: TileBounds,
    statistics: TokenStatistics,
    tokens: TokenGradients,
    targets: Tensor,
    transform: LogitTransform,
    relative: float,  # of the Frobenius norm of dL/dx
) -> Ranking:
    """Tokens with about as many large tiles side by side, by target among them; those without a gradient last.

    The budget is relative^2 times no more than the sum of squares of dL/dx, of which each token's target is known and,
    for dL/dlogp, the largest id of every other tile.
    """
    wanted = tokens.grad_logps != 0  # true for NaN, which must reach the gradients
    if tokens.grad_entropy is not None:
        wanted = wanted | (tokens.grad_entropy != 0)
    at_target = target_gradient(tokens, statistics.logps)
    amplitude = known.beside_target.sqrt() * tokens.grad_logps.abs()
    if tokens.grad_entropy is not None and known.entropy_beside_target is not None:
        amplitude = amplitude + known.entropy_beside_target.sqrt() * tokens.grad_entropy.abs()
    own = (amplitude.square() + at_target.square()).sqrt()
    if transform.softcap is not None:
        at_target = at_target * derivative(statistics.logps + statistics.lse, transform)
    target_tile = targets // BLOCK_VOCAB
    beside = sums_beside_target(known, tokens).gather(0, target_tile[None])[0]
    own = own + (beside + at_target).abs() * _share_amplitudes(known)[target_tile]
    # Zero times what a token without a gradient holds may be NaN.
    own = own.square().where(wanted, 0.0)
    energy = at_target.double().square()
    if tokens.grad_entropy is None:
        energy = energy + known.elsewhere.double() * tokens.grad_logps.double().square()
    energy = energy.where(wanted, 0.0)
    budget = energy.sum() * (relative**2 * BUDGET_ROUNDING) - known.codes.numel() * UNDERFLOW
    threshold = (budget * (LARGE / max(known.codes.numel(), 1))).float()
    large = (_energies(known, tokens, own, targets) > threshold).sum(0)
    half_octave = ((large + 1).float().log2() * 2.0).round().long()
    key = (LAST_CLASS - half_octave) * TARGETS + targets.clamp(max=TARGETS - 1)
    return Ranking(budget, own, torch.where(wanted, key, NOT_WANTED).int(), wanted)


def block_bounds(known: TileBounds, tokens: TokenGradients, own: Tensor, targets: Tensor, order: Tensor) -> Tensor:
    """(row blocks, tiles) float32, upper bounds of the sum of squares of dL/dx in each block.

    `order` (n,) is a permutation of the tokens, BLOCK_TOKENS of which at a time make a row of blocks.
    """
    energy = _energies(known, tokens, own, targets)[:, order]
    rows = -(-order.numel() // BLOCK_TOKENS)
    energy = torch.nn.functional.pad(energy, (0, rows * BLOCK_TOKENS - order.numel()))
    return energy.view(energy.shape[0], rows, BLOCK_TOKENS).sum(-1).T.contiguous()


def sums_beside_target(known: TileBounds, tokens: TokenGradients) -> Tensor:
    """(tiles, n) sums of dL/dx over each tile's ids but the target, 0 for tokens without a gradient."""
    sums = known.masses.float().mul_(tokens.grad_logps * (-1.0 / MASS_SCALE))
    sums.masked_fill_(tokens.grad_logps == 0, 0.0)
    if tokens.grad_entropy is not None and known.moments is not None:
        moments = known.moments.float().mul_(tokens.grad_entropy * (1.0 / MOMENT_SCALE))
        sums -= moments.masked_fill_(tokens.grad_entropy == 0, 0.0)
    return sums


def _share_amplitudes(known: TileBounds) -> Tensor:
    """(tiles,) norms of the shares that take a sum's place."""
    assert known.share_squares is not None
    return (known.share_squares * SHARE_ROUNDING).sqrt()


def _energies(known: TileBounds, tokens: TokenGradients, own: Tensor, targets: Tensor) -> Tensor:
    """(tiles, n) upper bounds of the sum of squares of dL/dx minus what takes its place where it is left out.

    That is its sum S times shares u >= 0 that add up to 1. Of numbers of one sign, such as those that dL/dlogp makes of
    all ids but the target, |G - S u|^2 <= |G|^2 + |S u|^2; of others, |G - S u| <= |G| + |S u|.
    """
    amplitude = _decoded(known.codes).sqrt_().mul_(tokens.grad_logps.abs())
    replaced = sums_beside_target(known, tokens).abs_().mul_(_share_amplitudes(known)[:, None])
    if tokens.grad_entropy is not None and known.entropy_codes is not None:
        # The triangle inequality, of two parts of one gradient.
        other = _decoded(known.entropy_codes).mul_(2.0**ENTROPY_OCTAVES).sqrt_()
        amplitude += other.mul_(tokens.grad_entropy.abs())
        energy = (amplitude + replaced).square_()
    else:
        energy = amplitude.square_() + replaced.square_()
    return energy.scatter_(0, (targets // BLOCK_VOCAB)[None], own[None])


def padded_tiles(vocab: int) -> int:
    """Columns of `left_out_sums`: the tiles of the vocabulary, and as many of zeros as fill up a multiple."""
    return -(-vocab // (BLOCK_VOCAB * TILE_MULTIPLE)) * TILE_MULTIPLE


def choose(energies: Tensor, budget: Tensor) -> Tensor:
    """Upper bounds (row blocks, tiles) -> bool, False for the smallest, as many as `budget` () has room for.

    Of equal ones the first are left out. None that is NaN is, and none at all where the budget is NaN, inf or not
    positive.
    """
    ascending, place = energies.flatten().sort(stable=True)
    units = (ascending.double() * (BUDGET_UNITS / budget)).ceil_()
    usable = (budget > 0.0) & budget.isfinite()
    units = torch.where((units <= BUDGET_UNITS) & usable, units, BUDGET_UNITS + 1).long()
    kept = units.cumsum(0) > BUDGET_UNITS
    return torch.empty_like(kept).scatter_(0, place, kept).view_as(energies)


def keep_of(lists: Any) -> Tensor:
    """(row blocks, tiles) bool, what `BlockLists` were made of."""
    kept = lists.tile_end[-1]
    keep = torch.zeros(lists.row_end.numel(), lists.tile_end.numel(), dtype=torch.bool, device=kept.device)
    keep[lists.row[:kept].long(), lists.tile[:kept].long()] = True
    return keep


def left_out_sums(
    known: TileBounds,
    statistics: TokenStatistics,  # (n,) each
    tokens: TokenGradients,  # (n,) each
    targets: Tensor,  # (n,)
    order: Tensor,  # (n,) permutation of the tokens
    keep: Tensor,  # (row blocks, tiles) bool, of blocks of BLOCK_TOKENS of these
    transform: LogitTransform,
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
    return torch.nn.functional.pad(sums.T.to(dtype), (0, -sums.shape[0] % TILE_MULTIPLE))


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
    """How a tile's ids share what is left out of it: as they share its mass where SAMPLES of the tokens are.

    Ids that few tokens are likely to say are rare for all of them, in much the same proportions. A token is drawn by
    the gradient that it has beside its target, of which the left-out sums are parts, and counts by its probabilities
    beside its target. Ids of a tile in which none of these has any, have no share.
    """
    vocab, size = weight.shape
    drawn = drawn_tokens(tokens)
    rows = hidden[drawn if index is None else index[drawn]].to(dtype).float()
    lse, own, counts = statistics.lse[drawn], targets[drawn], (-1.0 / torch.expm1(statistics.logps[drawn]))
    entries = torch.empty(vocab, dtype=torch.float32, device=weight.device)
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
        entries[span], squares[tile], sums[tile] = share, share.square().sum(), share @ part
    return TileShares(entries, squares, sums)


def drawn_tokens(tokens: TokenGradients) -> Tensor:
    """(SAMPLES,) tokens, some of them more than once, at even steps of what they have beside their targets."""
    beside = tokens.at_target.abs()
    if tokens.grad_entropy is not None and tokens.entropy is not None:
        beside = beside + (tokens.grad_entropy * tokens.entropy).abs()
    n = beside.numel()
    if n == 0:
        return torch.empty(0, dtype=torch.long, device=beside.device)
    so_far = beside.double().nan_to_num(0.0, 0.0, 0.0).cumsum(0)
    steps = torch.arange(SAMPLES, dtype=so_far.dtype, device=beside.device) + 0.5
    return torch.searchsorted(so_far, steps * (so_far[-1] / SAMPLES), right=True).clamp_(max=n - 1)


def grad_blocks(
    begun: Any,  # `blocks_triton.Begun`, of which the lists are looked at
    inputs: tuple,  # `blocks_triton.BlockInputs`
    plan: BlockPlan,
    given: LeftOut,
    needs: tuple[bool, bool],
    weight_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """As `blocks_triton.grad_blocks`, from the kept rows of one tile at a time."""
    hidden, weight, bias, targets, tokens, transform = inputs
    left_out, shares, from_left_out = given
    wanted = slice(plan.wanted)
    hidden, targets, tokens, left_out = hidden[wanted], targets[wanted], tokens.take(wanted), left_out[wanted]
    grad_hidden = None if from_left_out is None else from_left_out[wanted]
    grad_weight = torch.empty_like(weight, dtype=weight_dtype) if needs[0] else None
    grad_bias = torch.empty_like(bias) if needs[1] and bias is not None else None
    dropped = gemm.matmul(left_out.T, hidden)
    kept_rows = keep_of(begun.lists).repeat_interleave(BLOCK_TOKENS, 0)[wanted]
    for tile in range(plan.counts.numel()):
        span = slice(tile * BLOCK_VOCAB, (tile + 1) * BLOCK_VOCAB)
        rows = kept_rows[:, tile].nonzero().squeeze(1)
        logits = gemm.matmul(hidden[rows], weight[span].T)
        block = torch.empty_like(logits, dtype=hidden.dtype)
        eager.grad(
            logits, targets[rows], span.start, None if bias is None else bias[span], transform, tokens.take(rows), block
        )
        if grad_hidden is not None:
            grad_hidden.index_add_(0, rows, gemm.matmul(block, weight[span]))
        if grad_weight is not None:
            grad_weight[span] = gemm.matmul(block.T, hidden[rows]) + shares[span, None] * dropped[tile]
        if grad_bias is not None:
            grad_bias[span] = gemm.column_sums(block) + shares[span] * left_out[:, tile].sum(dtype=torch.float32)
    return grad_hidden, grad_weight, grad_bias
