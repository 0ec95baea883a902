"""Epilogues of two heads, as Triton functions: the fold and the gradient of one tile.

The formulas are those of `reference`. The tiles of both heads are in registers. Their columns are computed a part at a
time, so that the temporaries fit, too.
"""

import triton
import triton.language as tl

from liger_rl.head.pair import pair_reference as reference
from liger_rl.kernels.matrix_triton import store
from liger_rl.kernels.softmax import (
    LOWEST,
    flushed_exp,
    gradient,
    one_minus_exp,
    times_derivative,
    transformed,
)
from liger_rl.kernels.tile_epilogues import at_column, part_of

FORWARD, REVERSE = tl.constexpr(reference.FORWARD), tl.constexpr(reference.REVERSE)
# Of a tile of 128 entries, in `at_column`: before Hopper a product spreads 32 of the columns over the threads.
HALVINGS = tl.constexpr(2)


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
def pair_gradient(p, q, log_p, gap, token, live, hit, tokens, beta, KIND: tl.constexpr):
    """-> dL/dz of the student, from the gradients of the divergence, of log-probabilities and of entropies.

    `gap` is log p - log q. FORWARD does not read it, and the other kinds do not read q. `token` is one or
    several.
    """
    factor = per_token(tokens.grad, token, live)
    value = 0.0
    if KIND != FORWARD:
        value = per_token(tokens.value, token, live)
    if KIND == FORWARD:
        grad = p - q
    elif KIND == REVERSE:
        # An infinite divergence may have no gradient, and 0 * inf is NaN.
        counts = tl.where(factor != 0.0, p, 0.0) > 0.0
        grad = tl.where(counts, p * (gap - value), 0.0)
    else:
        over, _teacher_over = over_mixture(-gap, beta)
        grad = tl.where(p > 0.0, (1.0 - beta) * p * (over - value), 0.0)
    grad *= factor
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


@triton.jit
def _weighted(weight, values, BANS: tl.constexpr):
    """As `reference._weighted`, not added up."""
    product = weight * values
    return tl.where(weight > 0.0, product, 0.0) if BANS else product


@triton.jit
def store_sums(out, place, total, teacher_total, gap, moment, live):
    """Write the sums of a `PairFold`. A sum that it does not have is not read."""
    tl.store(out.sum_exp + place, total, mask=live)
    tl.store(out.teacher_sum_exp + place, teacher_total, mask=live)
    if out.gap is not None:
        tl.store(out.gap + place, gap, mask=live)
    if out.moment is not None:
        tl.store(out.moment + place, moment, mask=live)


@triton.jit
def fold_pair_tile(
    logits,  # (TILE_TOKENS, TILE_VOCAB) float32 of the student, and of the teacher
    token, target, first_token, vocab_tile, tokens, vocab,  # as in `fold_tile`
    arguments,  # of `epilogue.fold_pair`
    outs,  # `larger` and `gaps` of a `KeptPair`, as `store` takes them
    steps,
    KIND: tl.constexpr, WHOLE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write the fold of one pair of tiles; the product has `vocab` entries.

    Exponentials are made of one part of the tiles after the other, so that they fit the registers.
    """
    student, teacher = logits
    TILE_VOCAB: tl.constexpr = student.shape[1]
    WIDTH: tl.constexpr = TILE_VOCAB // PARTS
    teacher_steps, tiles, tops, bias, teacher_bias = arguments
    BANS: tl.constexpr = (not WHOLE) or (bias is not None) or (teacher_bias is not None)  # logits may be -inf
    larger_out, gaps = outs
    live = token < tokens
    place = vocab_tile.to(tl.int64) * tokens + token
    first = vocab_tile * TILE_VOCAB
    z, _ = transformed(student, steps)
    t, _ = transformed(teacher, teacher_steps)
    if not WHOLE:
        known = (first + tl.arange(0, TILE_VOCAB) < vocab)[None, :]
        z = tl.where(known, z, float("-inf"))
        t = tl.where(known, t, float("-inf"))
    # The lowest finite number if every id is banned, because -inf minus -inf is NaN.
    peak = tl.maximum(tl.max(z, 1), LOWEST)
    top = tl.maximum(tl.max(t, 1), LOWEST)
    tl.store(tiles.peak + place, peak, mask=live)
    tl.store(tiles.teacher_peak + place, top, mask=live)
    if tiles.target is not None:
        hit = live & (target >= 0) & (target < TILE_VOCAB)
        if not WHOLE:
            hit = hit & (first + target < vocab)
        tl.store(tiles.target + token, at_column(z, target, HALVINGS), mask=hit)
        tl.store(tiles.teacher_target + token, at_column(t, target, HALVINGS), mask=hit)
    if tops.peaks is not None:
        at = token.to(tl.int64) * tops.stride + vocab_tile
        tl.store(tops.peaks + at, peak, mask=live)
        tl.store(tops.teacher_peaks + at, top, mask=live)
    total, teacher_total, gap, moment = 0.0, 0.0, 0.0, 0.0
    for part in tl.static_range(PARTS):
        a = part_of(z, part, PARTS) - peak[:, None]
        b = part_of(t, part, PARTS) - top[:, None]
        x = flushed_exp(a)
        y = flushed_exp(b)
        total += tl.sum(x, 1)
        teacher_total += tl.sum(y, 1)
        if tiles.moment is not None:
            moment += tl.sum(_weighted(x, a, BANS), 1)
        if KIND == FORWARD:
            gap -= tl.sum(_weighted(y, a - b, BANS), 1)
        elif KIND == REVERSE:
            gap += tl.sum(_weighted(x, a - b, BANS), 1)
        if tops.peaks is not None:
            store(larger_out, first_token, first + part * WIDTH, tl.maximum(x, y))
            store(gaps, first_token, first + part * WIDTH, a - b)
    store_sums(tiles, place, total, teacher_total, gap, moment, live)


@triton.jit
def grad_pair_tile(
    logits, token, target, first_token, vocab_tile, tokens, vocab,  # as in `fold_pair_tile`
    arguments,  # of `epilogue.grad_pair`
    outs,  # a `matrix` (tokens, vocab), and None
    steps,
    KIND: tl.constexpr, WHOLE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write dL/dlogits of one tile of the student. Rows past the last token and columns past the last id are noise."""
    student, teacher = logits
    WIDTH: tl.constexpr = student.shape[1] // PARTS
    teacher_steps, gradients, beta = arguments
    out, _ = outs
    live = token < tokens
    for part in tl.static_range(PARTS):
        z, square = transformed(part_of(student, part, PARTS), steps)
        t, _square = transformed(part_of(teacher, part, PARTS), teacher_steps)
        log_p = z - per_token(gradients.lse, token, live)
        log_q = t - per_token(gradients.teacher_lse, token, live)
        column = part * WIDTH + tl.arange(0, WIDTH)
        hit = column[None, :] == target[:, None]
        grad = pair_gradient(
            flushed_exp(log_p), flushed_exp(log_q), log_p, log_p - log_q, token, live, hit, gradients, beta, KIND
        )
        store(out, first_token, vocab_tile * student.shape[1] + part * WIDTH, times_derivative(grad, square, steps))
