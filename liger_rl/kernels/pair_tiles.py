"""What is made of a tile of a student's logits beside the teacher's while a product still has it in registers, as
Triton functions.

The formulas are those of `liger_rl.kernels.divergence`. The student's tile is in registers, and the teacher's is read
from memory, a part of the columns at a time, so that there are registers for both. Kernels of Triton and of Gluon call
these functions: what they are given says which thread has which number, and nothing else does.

    ROWS(vector, tile)      a number of each row, laid out for the tile's rows
    LIKE(vector, other)     the same, laid out as another vector is
    COLUMNS(tile)           0, 1, ... of each column
    READ, FINISH            as `read_teacher` and `of_teacher`: a part is read while the one before is worked on
    STORE, AT_COLUMN        as `store_part` and `tile_epilogues.at_column`
"""

import triton
import triton.language as tl

from liger_rl.kernels import divergence
from liger_rl.kernels.matrix_triton import GROUP, store
from liger_rl.kernels.softmax import (
    LOWEST,
    flushed_exp,
    gradient,
    one_minus_exp,
    times_derivative,
    transformed,
)
from liger_rl.kernels.tile_epilogues import part_of

FORWARD, REVERSE = tl.constexpr(divergence.FORWARD), tl.constexpr(divergence.REVERSE)


@triton.jit
def rows_of(vector, tile):
    return vector


@triton.jit
def like(vector, other):
    return vector


@triton.jit
def columns_of(tile):
    return tl.arange(0, tile.shape[1])


@triton.jit
def over_mixture(gap, beta):
    """As `divergence._over_mixture`."""
    lesser = gap <= 0.0
    y = -tl.where(lesser, beta, 1.0 - beta) * one_minus_exp(-tl.abs(gap))
    # log(1 + y) to float32's precision also near 0: the quotient takes out what rounding 1 + y has changed.
    w = 1.0 + y
    rounded = w - 1.0
    larger = -tl.where(rounded == 0.0, y, tl.log(w) * (y / tl.where(rounded == 0.0, 1.0, rounded)))
    return tl.where(lesser, larger, larger - gap), tl.where(lesser, larger + gap, larger)


@triton.jit
def divergence_gradient(log_p, log_q, p, q, value, beta, KIND: tl.constexpr):
    """-> d divergence / dz of the student; `q` is read by FORWARD alone, `value` and the logarithms by the others."""
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
    """-> which columns rows have, which end with a GROUP: as many alike as one instruction reads or writes."""
    return column // GROUP < tl.cdiv(vocab, GROUP)


@triton.jit
def read_teacher(
    teacher, tile, token, live, first, vocab, PART: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """-> the teacher's numbers in memory beside one part of a tile of the student's, which begins at `first`."""
    numbers, stride, _bias, _steps = teacher
    own = part_of(tile, PART, PARTS)
    column = first + PART * own.shape[1] + COLUMNS(own)
    row, inside = ROWS(token, own), ROWS(live, own)[:, None]
    if not WHOLE:
        inside = inside & _readable(column, vocab)[None, :]
    return tl.load(numbers + row.to(tl.int64)[:, None] * stride * GROUP + column[None, :], mask=inside, other=0.0)


@triton.jit
def of_teacher(raw, teacher, column, vocab, WHOLE: tl.constexpr):
    """-> transformed logits of a product's numbers; -inf past the last entry."""
    _numbers, _stride, bias, steps = teacher
    known = column < vocab
    if bias is not None:
        raw += tl.load(bias + column, mask=known, other=0.0).to(tl.float32)[None, :]
    t, _ = transformed(raw, steps)
    return t if WHOLE else tl.where(known[None, :], t, float("-inf"))


@triton.jit
def store_part(out, row, first, PART: tl.constexpr, values):
    """One part of a tile whose first column is `first`."""
    store(out, row, first + PART * values.shape[1], values)


@triton.jit
def _target_is_here(target, live, first, vocab, TILE_VOCAB: tl.constexpr, WHOLE: tl.constexpr):
    hit = live & (target >= 0) & (target < TILE_VOCAB)
    return hit if WHOLE else hit & (first + target < vocab)


@triton.jit
def store_at_target(logits, out, token, live, target, first, vocab, TILE_VOCAB: tl.constexpr, WHOLE: tl.constexpr):
    """Each token's logit at its target, where the tile that begins at `first` has it."""
    tl.store(out + token, logits, mask=_target_is_here(target, live, first, vocab, TILE_VOCAB, WHOLE))


@triton.jit
def read_at_target(teacher, token, live, target, first, vocab, TILE_VOCAB: tl.constexpr, WHOLE: tl.constexpr):
    """-> the teacher's there, from memory."""
    numbers, stride, bias, steps = teacher
    hit = _target_is_here(target, live, first, vocab, TILE_VOCAB, WHOLE)
    raw = tl.load(numbers + token.to(tl.int64) * stride * GROUP + first + target, mask=hit, other=0.0)
    if bias is not None:
        raw += tl.load(bias + first + target, mask=hit, other=0.0).to(tl.float32)
    t, _ = transformed(raw, steps)
    return t


@triton.jit
def _weighted(weight, values, BANS: tl.constexpr):
    """As `divergence._weighted`, not added up."""
    product = weight * values
    return tl.where(weight > 0.0, product, 0.0) if BANS else product


@triton.jit
def fold_pair_tile(
    logits,  # (TILE_TOKENS, TILE_VOCAB) float32 of the student
    token,  # (TILE_TOKENS,) of these
    target,  # (TILE_TOKENS,) column of each token's target, see `tile_epilogues.column_of`
    vocab_tile, tokens, vocab,
    teacher,  # as READ takes it: numbers in memory, the stride of their rows in groups of GROUP, bias and steps
    teacher_peak,  # (TILE_TOKENS,) of its tile, or None
    tiles,  # `PairFold` of each vocabulary tile, (vocabulary tiles, tokens), but the targets' logits (tokens,)
    sums,  # `pair_epilogue.Squares` of each vocabulary tile, (vocabulary tiles, tokens), or of Nones
    kept,  # the two (tokens, vocab) of a `KeptPair` as STORE takes them, both heads' peaks and the stride of these
    steps, first_token,
    KIND: tl.constexpr, WHOLE: tl.constexpr, BANS: tl.constexpr, PARTS: tl.constexpr, READ: tl.constexpr,
    FINISH: tl.constexpr, ROWS: tl.constexpr, LIKE: tl.constexpr, COLUMNS: tl.constexpr, AT_COLUMN: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    """Write what the fold leaves of one pair of tiles but the teacher's targets; `vocab` counts the entries at hand.

    The student's peak is that of the tile. The teacher's rises from part to part where it is not known. BANS is false
    where no logit is -inf.
    """
    TILE_VOCAB: tl.constexpr = logits.shape[1]
    RISING: tl.constexpr = teacher_peak is None
    larger_out, gaps, own_tops, tops, tops_stride = kept
    live = token < tokens
    place = vocab_tile.to(tl.int64) * tokens + token
    first = vocab_tile * TILE_VOCAB
    ahead = READ(teacher, logits, token, live, first, vocab, 0, PARTS, WHOLE, ROWS, COLUMNS)
    z, _ = transformed(logits, steps)
    if not WHOLE:
        z = tl.where((first + COLUMNS(z) < vocab)[None, :], z, float("-inf"))
    # The lowest finite number where every id is banned: -inf minus -inf is NaN.
    peak = tl.maximum(tl.max(z, 1), LOWEST)
    tl.store(tiles.peak + place, peak, mask=live)
    if tiles.target is not None:
        store_at_target(AT_COLUMN(z, target, 3), tiles.target, token, live, target, first, vocab, TILE_VOCAB, WHOLE)
    own_top, top, total, teacher_total, gap, moment = LOWEST, LOWEST, 0.0, 0.0, 0.0, 0.0
    sum_xx, sum_xy, sum_yy = 0.0, 0.0, 0.0
    for part in tl.static_range(PARTS):
        own, raw = part_of(z, part, PARTS), ahead
        if part + 1 < PARTS:
            ahead = READ(teacher, z, token, live, first, vocab, part + 1, PARTS, WHOLE, ROWS, COLUMNS)
        t = FINISH(raw, teacher, first + part * own.shape[1] + COLUMNS(own), vocab, WHOLE)
        higher = tl.maximum(top, tl.max(t, 1)) if RISING else ROWS(teacher_peak, own)
        a = own - ROWS(peak, own)[:, None]
        b = t - higher[:, None]
        x = flushed_exp(a)
        y = flushed_exp(b)
        if RISING and part > 0:
            # To the new peak. From the lowest number the difference may be infinite, and 0 * inf is NaN.
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
            # Around the peaks of the same columns of both heads, which are as near as the heads are.
            if RISING:
                own_top = tl.maximum(own_top, tl.max(own, 1))
                a = own - own_top[:, None]
                x = flushed_exp(a)
            else:
                own_top = ROWS(peak, own)
            row, inside = ROWS(token, own), ROWS(live, own)
            at = row.to(tl.int64) * tops_stride + (vocab_tile * PARTS + part)
            tl.store(own_tops + at, LIKE(own_top, row), mask=inside)
            tl.store(tops + at, LIKE(top, row), mask=inside)
            STORE(larger_out, first_token, first, part, tl.maximum(x, y))
            STORE(gaps, first_token, first, part, a - b)
    tl.store(tiles.teacher_peak + place, LIKE(top, token), mask=live)
    tl.store(tiles.sum_exp + place, LIKE(total, token), mask=live)
    tl.store(tiles.teacher_sum_exp + place, LIKE(teacher_total, token), mask=live)
    if tiles.moment is not None:
        tl.store(tiles.moment + place, LIKE(moment, token), mask=live)
    if tiles.gap is not None:
        tl.store(tiles.gap + place, LIKE(gap, token), mask=live)
    if sums.xx is not None:
        tl.store(sums.xx + place, LIKE(sum_xx, token), mask=live)
        tl.store(sums.xy + place, LIKE(sum_xy, token), mask=live)
        tl.store(sums.yy + place, LIKE(sum_yy, token), mask=live)


@triton.jit
def grad_pair_tile(
    logits,  # (TILE_TOKENS, TILE_VOCAB) float32 of the student
    token, target, vocab_tile, n, vocab, teacher,  # as for `fold_pair_tile`, of n tokens
    tokens,  # `PairGradients`
    out,  # (n, vocab) as STORE takes it
    steps, first_token, beta,
    KIND: tl.constexpr, WHOLE: tl.constexpr, PARTS: tl.constexpr, READ: tl.constexpr, FINISH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Write dL/dlogits of one tile."""
    first, live = vocab_tile * logits.shape[1], token < n
    ahead = READ(teacher, logits, token, live, first, vocab, 0, PARTS, WHOLE, ROWS, COLUMNS)
    for part in tl.static_range(PARTS):
        own, raw = part_of(logits, part, PARTS), ahead
        if part + 1 < PARTS:
            ahead = READ(teacher, logits, token, live, first, vocab, part + 1, PARTS, WHOLE, ROWS, COLUMNS)
        column = part * own.shape[1] + COLUMNS(own)
        t = FINISH(raw, teacher, first + column, vocab, WHOLE)
        grad = _part_gradient(
            own, t, ROWS(token, own), ROWS(live, own), ROWS(target, own), column, tokens, steps, beta, KIND
        )
        STORE(out, first_token, first, part, grad)


@triton.jit
def _part_gradient(
    own,  # (TILE_TOKENS, WIDTH) float32 of the student
    t,  # the teacher's logits beside them
    token, live,  # (TILE_TOKENS,)
    target,  # (TILE_TOKENS,) column of each token's target in the tile
    column,  # (WIDTH,) in the tile
    tokens,  # `PairGradients`
    steps, beta,
    KIND: tl.constexpr,
):  # fmt: skip
    """-> dL/dlogits of one part of a tile in float32; rows that are not live and columns past the last id are noise."""
    z, square = transformed(own, steps)
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
    """dL/dz of the divergence -> the same with that of log-probabilities and entropies, where they have one."""
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
