"""Epilogues of two heads, as Triton functions: the fold and the gradient of one tile.

The formulas are those of `reference`. The student's tile is in registers. The teacher's tile is read from memory, a
part of the columns at a time, so that both fit the registers. A part is read while the part before it is computed.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from liger_rl.engines.pair import reference
from liger_rl.kernels.matrix_triton import GROUP, RaggedRows, Rows, load, matrix, store
from liger_rl.kernels.softmax import (
    LOWEST,
    flushed_exp,
    gradient,
    one_minus_exp,
    times_derivative,
    transformed,
)
from liger_rl.kernels.tile_epilogues import at_column, part_of
from liger_rl.kernels.transform import LogitSteps

FORWARD, REVERSE = tl.constexpr(reference.FORWARD), tl.constexpr(reference.REVERSE)


@triton.jit
def over_mixture(gap, beta):
    """As `reference._over_mixture`."""
    lesser = gap <= 0.0
    y = -tl.where(lesser, beta, 1.0 - beta) * one_minus_exp(-tl.abs(gap))
    # log(1 + y) to float32's precision also near 0: the quotient corrects the rounding of 1 + y.
    w = 1.0 + y
    rounded = w - 1.0
    larger = -tl.where(rounded == 0.0, y, tl.log(w) * (y / tl.where(rounded == 0.0, 1.0, rounded)))
    return tl.where(lesser, larger, larger - gap), tl.where(lesser, larger + gap, larger)


@triton.jit
def around(moment, kept, shift, total):
    """As `reference._around`."""
    return tl.where(kept > 0.0, kept * (moment + shift * total), 0.0)


@triton.jit
def per_token(values, token, live):
    """-> the number of one token (), or of several, to be broadcast over columns (n, 1)."""
    numbers = tl.load(values + token, mask=live, other=0.0)
    return numbers[:, None] if len(token.shape) > 0 else numbers


@triton.jit
def pair_gradient(p, q, log_p, above, below, token, live, hit, tokens, beta, KIND: tl.constexpr):
    """-> dL/dz of the student, from the gradients of the divergence, of log-probabilities and of entropies.

    `above` - `below` is log p - log q. FORWARD does not read it, and the other kinds do not read q. `token` is an index
    () or several (n,).
    """
    value = 0.0
    if KIND != FORWARD:
        value = per_token(tokens.value, token, live)
    if KIND == FORWARD:
        grad = p - q
    elif KIND == REVERSE:
        grad = tl.where(p > 0.0, p * ((above - below) - value), 0.0)
    else:
        over, _teacher_over = over_mixture(below - above, beta)
        grad = tl.where(p > 0.0, (1.0 - beta) * p * (over - value), 0.0)
    grad *= per_token(tokens.grad, token, live)
    ENTROPY: tl.constexpr = tokens.grad_entropy is not None
    if (tokens.grad_logps is not None) | ENTROPY:
        g, e, entropy, at_target = 0.0, 0.0, 0.0, 0.0
        if tokens.grad_logps is not None:
            g = per_token(tokens.grad_logps, token, live)
            at_target = per_token(tokens.at_target, token, live)
        else:
            hit = None
        if ENTROPY:
            e = per_token(tokens.grad_entropy, token, live)
            entropy = per_token(tokens.entropy, token, live)
        grad += gradient(p, log_p, hit, at_target, g, e, entropy, ENTROPY)
    return grad


class Teacher(NamedTuple):
    """The teacher's `reference.Tile` as an argument of an epilogue."""

    logits: Rows | RaggedRows  # float32
    bias: Tensor | None
    steps: LogitSteps

    @classmethod
    def of(cls, tile: reference.Tile, columns: int) -> "Teacher":
        """For reads of so many columns at a time."""
        assert tile.logits.stride(0) % GROUP.value == 0
        bias = None if tile.bias is None else tile.bias.contiguous()
        return cls(matrix(tile.logits, 1, columns, tma=False), bias, LogitSteps.of(tile.transform))


@triton.jit
def of_teacher(raw, teacher, column, vocab, WHOLE: tl.constexpr):
    """-> the teacher's transformed logits from the product `raw`; -inf past the last entry."""
    known = column < vocab
    if teacher.bias is not None:
        raw += tl.load(teacher.bias + column, mask=known, other=0.0).to(tl.float32)[None, :]
    t, _ = transformed(raw, teacher.steps)
    return t if WHOLE else tl.where(known[None, :], t, float("-inf"))


@triton.jit
def _store_targets(z, teacher, tiles, token, hit, target, first):
    """Store both heads' logits at the targets of the tokens with a `hit`: their targets are in the tile."""
    row = teacher.logits.start + token.to(tl.int64) * teacher.logits.stride * GROUP
    raw = tl.load(row + first + target, mask=hit, other=0.0)
    if teacher.bias is not None:
        raw += tl.load(teacher.bias + first + target, mask=hit, other=0.0).to(tl.float32)
    t, _ = transformed(raw, teacher.steps)
    tl.store(tiles.teacher_target + token, t, mask=hit)
    tl.store(tiles.target + token, at_column(z, target, 3), mask=hit)


@triton.jit
def _weighted(weight, values, BANS: tl.constexpr):
    """As `reference._weighted`, not added up."""
    product = weight * values
    return tl.where(weight > 0.0, product, 0.0) if BANS else product


@triton.jit
def fold_pair_tile(
    logits, token, target, first_token, vocab_tile, tokens, vocab,  # as in `fold_tile`
    arguments,  # of `epilogue.fold_pair`
    outs,  # `larger` and `gaps` of a `KeptPair`, as `store` takes them
    steps,
    KIND: tl.constexpr, WHOLE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write the fold of one pair of tiles; the product has `vocab` entries.

    The student's peak is that of the whole tile. The teacher's peak rises from part to part.
    """
    TILE_VOCAB: tl.constexpr = logits.shape[1]
    WIDTH: tl.constexpr = TILE_VOCAB // PARTS
    teacher, tiles, tops, bias = arguments
    BANS: tl.constexpr = (not WHOLE) or (bias is not None) or (teacher.bias is not None)  # logits may be -inf
    larger_out, gaps = outs
    live = token < tokens
    place = vocab_tile.to(tl.int64) * tokens + token
    first = vocab_tile * TILE_VOCAB
    ahead = load(teacher.logits, first_token, first, logits.shape[0], WIDTH)
    z, _ = transformed(logits, steps)
    if not WHOLE:
        z = tl.where((first + tl.arange(0, TILE_VOCAB) < vocab)[None, :], z, float("-inf"))
    # The lowest finite number if every id is banned, because -inf minus -inf is NaN.
    peak = tl.maximum(tl.max(z, 1), LOWEST)
    tl.store(tiles.peak + place, peak, mask=live)
    if tiles.target is not None:
        hit = live & (target >= 0) & (target < TILE_VOCAB)
        if not WHOLE:
            hit = hit & (first + target < vocab)
        _store_targets(z, teacher, tiles, token, hit, target, first)
    own_top, top, total, teacher_total, gap, moment = LOWEST, LOWEST, 0.0, 0.0, 0.0, 0.0
    sum_xx, sum_xy, sum_yy = 0.0, 0.0, 0.0
    for part in tl.static_range(PARTS):
        student_part, raw = part_of(z, part, PARTS), ahead
        if part + 1 < PARTS:
            ahead = load(teacher.logits, first_token, first + (part + 1) * WIDTH, logits.shape[0], WIDTH)
        t = of_teacher(raw, teacher, first + part * WIDTH + tl.arange(0, WIDTH), vocab, WHOLE)
        higher = tl.maximum(top, tl.max(t, 1))
        a = student_part - peak[:, None]
        b = t - higher[:, None]
        x = flushed_exp(a)
        y = flushed_exp(b)
        if part > 0:
            # Move the sums to the new peak. A difference from LOWEST may be infinite, and 0 * inf is NaN.
            lower = tl.maximum(top - higher, LOWEST)
            scale = flushed_exp(lower)
            if KIND == FORWARD:
                gap = tl.where(scale > 0.0, scale * (gap + lower * teacher_total), 0.0)
                sum_xy *= scale
                sum_yy *= scale * scale
            elif KIND == REVERSE:
                gap -= lower * total
                sum_yy += lower * (lower * sum_xx - 2.0 * sum_xy)
                sum_xy -= lower * sum_xx
            teacher_total *= scale
        top = higher
        total += tl.sum(x, 1)
        teacher_total += tl.sum(y, 1)
        if tiles.moment is not None:
            moment += tl.sum(_weighted(x, a, BANS), 1)
        if KIND == FORWARD:
            gap -= tl.sum(_weighted(y, a - b, BANS), 1)
        elif KIND == REVERSE:
            weighted = _weighted(x, a - b, BANS)
            gap += tl.sum(weighted, 1)
        if tiles.xx is not None:
            of_y = y if KIND == FORWARD else weighted
            sum_xx += tl.sum(x * x, 1)
            sum_xy += tl.sum(x * of_y, 1)
            sum_yy += tl.sum(of_y * of_y, 1)
        if tops.peaks is not None:
            # Relative to both heads' peaks over the same columns. The two peaks are as near as the heads are.
            own_top = tl.maximum(own_top, tl.max(student_part, 1))
            a = student_part - own_top[:, None]
            x = flushed_exp(a)
            at = token.to(tl.int64) * tops.stride + (vocab_tile * PARTS + part)
            tl.store(tops.peaks + at, own_top, mask=live)
            tl.store(tops.teacher_peaks + at, top, mask=live)
            store(larger_out, first_token, first + part * WIDTH, tl.maximum(x, y))
            store(gaps, first_token, first + part * WIDTH, a - b)
    tl.store(tiles.teacher_peak + place, top, mask=live)
    tl.store(tiles.sum_exp + place, total, mask=live)
    tl.store(tiles.teacher_sum_exp + place, teacher_total, mask=live)
    if tiles.moment is not None:
        tl.store(tiles.moment + place, moment, mask=live)
    if tiles.gap is not None:
        tl.store(tiles.gap + place, gap, mask=live)
    if tiles.xx is not None:
        tl.store(tiles.xx + place, sum_xx, mask=live)
        tl.store(tiles.xy + place, sum_xy, mask=live)
        tl.store(tiles.yy + place, sum_yy, mask=live)


@triton.jit
def grad_pair_tile(
    logits, token, target, first_token, vocab_tile, tokens, vocab,  # as in `fold_tile`
    arguments,  # of `epilogue.grad_pair`
    outs,  # a `matrix` (tokens, vocab), and None
    steps,
    KIND: tl.constexpr, WHOLE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write dL/dlogits of one tile of the student."""
    WIDTH: tl.constexpr = logits.shape[1] // PARTS
    teacher, gradients, beta = arguments
    out, _ = outs
    first, live = vocab_tile * logits.shape[1], token < tokens
    ahead = load(teacher.logits, first_token, first, logits.shape[0], WIDTH)
    for part in tl.static_range(PARTS):
        x, raw = part_of(logits, part, PARTS), ahead
        if part + 1 < PARTS:
            ahead = load(teacher.logits, first_token, first + (part + 1) * WIDTH, logits.shape[0], WIDTH)
        column = part * WIDTH + tl.arange(0, WIDTH)
        z, square = transformed(x, steps)
        log_p = z - per_token(gradients.lse, token, live)
        t = of_teacher(raw, teacher, first + column, vocab, WHOLE)
        log_q = t - per_token(gradients.teacher_lse, token, live)
        hit = column[None, :] == target[:, None]
        grad = pair_gradient(
            flushed_exp(log_p), flushed_exp(log_q), log_p, log_p, log_q, token, live, hit, gradients, beta, KIND
        )
        store(out, first_token, first + part * WIDTH, times_derivative(grad, square, steps))
