"""Epilogues of two heads, as Triton functions: the fold and the gradient of one tile.

The formulas are those of `reference`. The student's tile is in registers. The teacher's tile is read from memory, a
part of the columns at a time, so that both fit the registers. A part is read while the part before it is computed.
"""

import triton
import triton.language as tl

from liger_rl.engines.pair import reference
from liger_rl.kernels.matrix_triton import GROUP, store
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
def divergence_gradient(log_p, log_q, p, q, value, beta, KIND: tl.constexpr):
    """-> d divergence / dz of the student. FORWARD reads p and q, the other kinds p, `value` and the logarithms."""
    if KIND == FORWARD:
        grad = p - q
    elif KIND == REVERSE:
        grad = tl.where(p > 0.0, p * ((log_p - log_q) - value), 0.0)
    else:
        over, _teacher_over = over_mixture(log_q - log_p, beta)
        grad = tl.where(p > 0.0, (1.0 - beta) * p * (over - value), 0.0)
    return grad


@triton.jit
def _readable(column, vocab):
    """-> whether a column is in memory. Rows end with a whole GROUP, the numbers of one load or store instruction."""
    return column // GROUP < tl.cdiv(vocab, GROUP)


@triton.jit
def read_teacher(teacher, token, live, first, vocab, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """-> (tokens, WIDTH): columns `first` to `first` + WIDTH - 1 of the teacher's product, from memory."""
    numbers, stride, _bias, _steps = teacher
    column = first + tl.arange(0, WIDTH)
    inside = live[:, None]
    if not WHOLE:
        inside = inside & _readable(column, vocab)[None, :]
    return tl.load(numbers + token.to(tl.int64)[:, None] * stride * GROUP + column[None, :], mask=inside, other=0.0)


@triton.jit
def of_teacher(raw, teacher, column, vocab, WHOLE: tl.constexpr):
    """-> the teacher's transformed logits from the product `raw`; -inf past the last entry."""
    _numbers, _stride, bias, steps = teacher
    known = column < vocab
    if bias is not None:
        raw += tl.load(bias + column, mask=known, other=0.0).to(tl.float32)[None, :]
    t, _ = transformed(raw, steps)
    return t if WHOLE else tl.where(known[None, :], t, float("-inf"))


@triton.jit
def _target_is_here(target, live, first, vocab, TILE_VOCAB: tl.constexpr, WHOLE: tl.constexpr):
    hit = live & (target >= 0) & (target < TILE_VOCAB)
    return hit if WHOLE else hit & (first + target < vocab)


@triton.jit
def store_at_target(logits, out, token, live, target, first, vocab, TILE_VOCAB: tl.constexpr, WHOLE: tl.constexpr):
    """Store each token's logit at its target, if the tile that begins at `first` has the target."""
    tl.store(out + token, logits, mask=_target_is_here(target, live, first, vocab, TILE_VOCAB, WHOLE))


@triton.jit
def read_at_target(teacher, token, live, target, first, vocab, TILE_VOCAB: tl.constexpr, WHOLE: tl.constexpr):
    """-> the teacher's logit at each token's target, from memory."""
    numbers, stride, bias, steps = teacher
    hit = _target_is_here(target, live, first, vocab, TILE_VOCAB, WHOLE)
    raw = tl.load(numbers + token.to(tl.int64) * stride * GROUP + first + target, mask=hit, other=0.0)
    if bias is not None:
        raw += tl.load(bias + first + target, mask=hit, other=0.0).to(tl.float32)
    t, _ = transformed(raw, steps)
    return t


@triton.jit
def _weighted(weight, values, BANS: tl.constexpr):
    """As `reference._weighted`, not added up."""
    product = weight * values
    return tl.where(weight > 0.0, product, 0.0) if BANS else product


@triton.jit
def fold_pair_tile(
    logits,  # (TILE_TOKENS, TILE_VOCAB) float32 of the student
    token,  # (TILE_TOKENS,) their tokens
    target,  # (TILE_TOKENS,) column of each token's target, see `tile_epilogues.column_of`
    vocab_tile, tokens, vocab,
    teacher,  # its product in memory, the stride of the rows in groups of GROUP, its bias and steps
    tiles,  # `PairFold` of each vocabulary tile, (vocabulary tiles, tokens); the targets' logits are (tokens,)
    sums,  # `epilogue.Squares` of each vocabulary tile, (vocabulary tiles, tokens), or of Nones
    kept,  # `larger` and `gaps` of a `KeptPair` as `store` takes them, both heads' peaks and the stride of the peaks
    steps, first_token,
    KIND: tl.constexpr, WHOLE: tl.constexpr, BANS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write the fold of one pair of tiles, without the teacher's logits at targets; the product has `vocab` entries.

    The student's peak is that of the whole tile. The teacher's peak rises from part to part. BANS is false if no logit
    is -inf.
    """
    TILE_VOCAB: tl.constexpr = logits.shape[1]
    WIDTH: tl.constexpr = TILE_VOCAB // PARTS
    larger_out, gaps, own_tops, tops, tops_stride = kept
    live = token < tokens
    place = vocab_tile.to(tl.int64) * tokens + token
    first = vocab_tile * TILE_VOCAB
    ahead = read_teacher(teacher, token, live, first, vocab, WIDTH, WHOLE)
    z, _ = transformed(logits, steps)
    if not WHOLE:
        z = tl.where((first + tl.arange(0, TILE_VOCAB) < vocab)[None, :], z, float("-inf"))
    # The lowest finite number if every id is banned, because -inf minus -inf is NaN.
    peak = tl.maximum(tl.max(z, 1), LOWEST)
    tl.store(tiles.peak + place, peak, mask=live)
    if tiles.target is not None:
        store_at_target(at_column(z, target, 3), tiles.target, token, live, target, first, vocab, TILE_VOCAB, WHOLE)
    own_top, top, total, teacher_total, gap, moment = LOWEST, LOWEST, 0.0, 0.0, 0.0, 0.0
    sum_xx, sum_xy, sum_yy = 0.0, 0.0, 0.0
    for part in tl.static_range(PARTS):
        student_part, raw = part_of(z, part, PARTS), ahead
        if part + 1 < PARTS:
            ahead = read_teacher(teacher, token, live, first + (part + 1) * WIDTH, vocab, WIDTH, WHOLE)
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
        if sums.xx is not None:
            of_y = y if KIND == FORWARD else weighted
            sum_xx += tl.sum(x * x, 1)
            sum_xy += tl.sum(x * of_y, 1)
            sum_yy += tl.sum(of_y * of_y, 1)
        if tops is not None:
            # Relative to both heads' peaks over the same columns. The two peaks are as near as the heads are.
            own_top = tl.maximum(own_top, tl.max(student_part, 1))
            a = student_part - own_top[:, None]
            x = flushed_exp(a)
            at = token.to(tl.int64) * tops_stride + (vocab_tile * PARTS + part)
            tl.store(own_tops + at, own_top, mask=live)
            tl.store(tops + at, top, mask=live)
            store(larger_out, first_token, first + part * WIDTH, tl.maximum(x, y))
            store(gaps, first_token, first + part * WIDTH, a - b)
    tl.store(tiles.teacher_peak + place, top, mask=live)
    tl.store(tiles.sum_exp + place, total, mask=live)
    tl.store(tiles.teacher_sum_exp + place, teacher_total, mask=live)
    if tiles.moment is not None:
        tl.store(tiles.moment + place, moment, mask=live)
    if tiles.gap is not None:
        tl.store(tiles.gap + place, gap, mask=live)
    if sums.xx is not None:
        tl.store(sums.xx + place, sum_xx, mask=live)
        tl.store(sums.xy + place, sum_xy, mask=live)
        tl.store(sums.yy + place, sum_yy, mask=live)


@triton.jit
def grad_pair_tile(
    logits,  # (TILE_TOKENS, TILE_VOCAB) float32 of the student
    token, target, vocab_tile, n, vocab, teacher,  # as for `fold_pair_tile`, with n tokens
    tokens,  # `PairGradients`
    out,  # (n, vocab) as `store` takes it
    steps, first_token, beta,
    KIND: tl.constexpr, WHOLE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write dL/dlogits of one tile of the student."""
    WIDTH: tl.constexpr = logits.shape[1] // PARTS
    first, live = vocab_tile * logits.shape[1], token < n
    ahead = read_teacher(teacher, token, live, first, vocab, WIDTH, WHOLE)
    for part in tl.static_range(PARTS):
        student_part, raw = part_of(logits, part, PARTS), ahead
        if part + 1 < PARTS:
            ahead = read_teacher(teacher, token, live, first + (part + 1) * WIDTH, vocab, WIDTH, WHOLE)
        column = part * WIDTH + tl.arange(0, WIDTH)
        t = of_teacher(raw, teacher, first + column, vocab, WHOLE)
        grad = _part_gradient(student_part, t, token, live, target, column, tokens, steps, beta, KIND)
        store(out, first_token, first + part * WIDTH, grad)


@triton.jit
def _part_gradient(
    student_part,  # (TILE_TOKENS, WIDTH) float32 of the student
    t,  # (TILE_TOKENS, WIDTH) the teacher's logits at the same places
    token, live,  # (TILE_TOKENS,)
    target,  # (TILE_TOKENS,) column of each token's target in the tile
    column,  # (WIDTH,) in the tile
    tokens,  # `PairGradients`
    steps, beta,
    KIND: tl.constexpr,
):  # fmt: skip
    """-> float32 dL/dlogits of one part of a tile; undefined in rows that are not live and columns past the last id."""
    z, square = transformed(student_part, steps)
    log_p = z - tl.load(tokens.lse + token, mask=live, other=0.0)[:, None]
    log_q = t - tl.load(tokens.teacher_lse + token, mask=live, other=0.0)[:, None]
    p = flushed_exp(log_p)
    value = 0.0
    if KIND != FORWARD:
        value = tl.load(tokens.value + token, mask=live, other=0.0)[:, None]
    grad = divergence_gradient(log_p, log_q, p, flushed_exp(log_q), value, beta, KIND)
    grad *= tl.load(tokens.grad + token, mask=live, other=0.0)[:, None]
    grad = with_other_gradients(grad, p, log_p, token, live, target, column, tokens)
    return times_derivative(grad, square, steps)


@triton.jit
def with_other_gradients(grad, p, log_p, token, live, target, column, tokens):
    """-> dL/dz of the divergence, plus dL/dz of log-probabilities and of entropies if these have a gradient."""
    ENTROPY: tl.constexpr = tokens.grad_entropy is not None
    if (tokens.grad_logps is not None) | ENTROPY:
        g, e, entropy = 0.0, 0.0, 0.0
        hit = None
        at_target = None
        if tokens.grad_logps is not None:
            g = tl.load(tokens.grad_logps + token, mask=live, other=0.0)[:, None]
            at_target = tl.load(tokens.at_target + token, mask=live, other=0.0)[:, None]
            hit = column[None, :] == target[:, None]
        if ENTROPY:
            e = tl.load(tokens.grad_entropy + token, mask=live, other=0.0)[:, None]
            entropy = tl.load(tokens.entropy + token, mask=live, other=0.0)[:, None]
        grad += gradient(p, log_p, hit, at_target, g, e, entropy, ENTROPY)
    return grad
