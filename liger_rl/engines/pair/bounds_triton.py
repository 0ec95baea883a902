"""Two heads with a tolerance, as Triton kernels: bounds of a gradient's parts, and the kept parts computed again.

A part is one token's dL/dlogits in one tile of TILE_VOCAB entries. With the x and y of `reference.TileSums`, w = dL/d
divergence and g = dL/dlogp of the token, and three factors a, b and s of the token and tile, every measure has

    dL/dz_v = w (b y_v - a x_v) - g s x_v + g 1[v = target]

    forward   p_v - q_v                      a = -exp(peak - lse)           b = -exp(teacher_peak - teacher_lse)
    reverse   p_v (log p_v - log q_v - K)    a = s (K - h)                  b = s
    mixture   (1 - beta) p_v (log p_v - log m_v - S)    a = (1 - beta) S    b = 1 - beta

Here s = exp(peak - lse), and 1 for a mixture. K is the reverse divergence, S the student's divergence from the mixture.
h = (peak - lse) - (teacher_peak - teacher_lse) is the difference between log p - log q and the log-ratio relative to
the peaks. So the forward's five sums give a part's exact sum of squares, without the target's term. The bound
p + q of |p - q| is weaker: it is large wherever both heads find the same entries likely. With A = w a + g s, B = w b,

    sum_v (B y_v - A x_v)^2 = B^2 yy - 2 A B xy + A^2 xx,    sum_v (B y_v - A x_v) = B y - A x

The bound adds float32's rounding to the sum of squares, so heads that differ only by rounding keep all parts. The norm
of the part with the target is at least the difference of |g| and the norm without the target's term, and at most their
sum.

`sparse.bounds_triton` chooses parts by these bounds. The bounds leave out a softcap's derivative. Under a softcap, and
if entropies have a gradient, the gradient is exact.
"""

import triton
import triton.language as tl
from torch import Tensor

from liger_rl.engines.pair.reference import FORWARD, MIXTURE, TILE_VOCAB, Measure, PairGradients, TileSums
from liger_rl.engines.pair.tile_epilogues import pair_gradient, per_token
from liger_rl.engines.sparse.bounds_triton import (
    BOUND_TILES,
    BOUND_TOKENS,
    BOUND_WARPS,
    CUTS,
    ChosenParts,
    padded_tiles,
    store_shares,
)
from liger_rl.engines.sparse.listing_triton import Parts, store_parts
from liger_rl.kernels.devices import family_of, on
from liger_rl.kernels.picked_triton import Span, TileLists, picked_head, picked_logits, rows_of_tile
from liger_rl.kernels.softmax import flushed_exp
from liger_rl.kernels.statistics import PartBounds, Tail
from liger_rl.kernels.transform import HeadFactors

# Tokens and entries of a program's two products, which are in registers together. One H200, H = 2048, 9.6% kept, in
# TFLOPS: 428 with four stages, 383 with three, 413 in steps of 128. A student's product of 256 entries that read the
# teacher's logits from memory reached 436.
ROWS, ENTRIES, WARPS = 128, 128, 8

# Rounding of float32: SLACK_OF_SUM of sums of squares, relative to their terms; SLACK of probabilities, relative to
# them; SLACK_OF_LSE of probabilities for each nat of the normalisers.
SLACK_OF_SUM, SLACK, SLACK_OF_LSE = tl.constexpr(2.0**-17), tl.constexpr(2.0**-17), tl.constexpr(2.0**-22)
LOST = tl.constexpr(2.0**-58)  # absolute error of a part's norm: squares that underflow, with factors up to 1
OF_FORWARD, OF_MIXTURE = tl.constexpr(FORWARD), tl.constexpr(MIXTURE)


@triton.jit
def _positive(x):
    """max(x, 0). NaN stays NaN."""
    return tl.where(x < 0.0, 0.0, x)


@triton.jit
def _bounds_kernel(
    sums,  # `TileSums`
    tokens,  # `PairGradients`, (n,) each
    targets,  # (n,)
    out,  # `PartBounds`
    tiles,
    count,
    beta,
    KIND: tl.constexpr,
    TILE_VOCAB: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token < count
    grad = tl.load(tokens.grad + token, mask=live, other=0.0)
    has_gradient = grad != 0.0
    unit = tl.abs(grad)
    if tokens.grad_logps is not None:
        grad_logps = tl.load(tokens.grad_logps + token, mask=live, other=0.0)
        has_gradient |= grad_logps != 0.0
        unit += tl.abs(grad_logps)
    unit = tl.where(has_gradient, unit, 1.0)
    w = (grad / unit)[:, None]
    g = 0.0
    if tokens.grad_logps is not None:
        g = (grad_logps / unit)[:, None]
        target_tile = (tl.load(targets + token, mask=live, other=0) // TILE_VOCAB)[:, None]
    lse = tl.load(tokens.lse + token, mask=live, other=0.0)[:, None]
    teacher_lse = tl.load(tokens.teacher_lse + token, mask=live, other=0.0)[:, None]
    known = SLACK + SLACK_OF_LSE * (tl.abs(lse) + tl.abs(teacher_lse))
    value = 0.0
    if KIND != OF_FORWARD:
        value = tl.load(tokens.value + token, mask=live, other=0.0)[:, None]
    least = tl.zeros((TOKENS,), tl.float32)
    size = tl.zeros((TOKENS,), tl.float64)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        inside = live[:, None] & (tile < tiles)[None, :]
        place = token.to(tl.int64)[:, None] * tiles + tile[None, :]
        if KIND == OF_MIXTURE:
            s = 1.0
            of_p = 1.0 - beta
            a = of_p * value
            b = of_p
        else:
            log_s = tl.load(sums.peak + place, mask=inside, other=0.0) - lse
            log_t = tl.load(sums.teacher_peak + place, mask=inside, other=0.0) - teacher_lse
            s = tl.exp(log_s)
            of_p = s
            if KIND == OF_FORWARD:
                a = -s
                b = -tl.exp(log_t)
            else:
                a = s * (value - (log_s - log_t))
                b = s
        xx = tl.load(sums.xx + place, mask=inside, other=0.0)
        of_s = g * s
        of_b = w * b
        of_a = w * a + of_s
        largest = tl.abs(w * a) + tl.abs(of_s)
        of_x = largest * largest * xx
        of_y = of_b * of_b * tl.load(sums.yy + place, mask=inside, other=0.0)
        cross = 2.0 * of_a * of_b * tl.load(sums.xy + place, mask=inside, other=0.0)
        energy = of_a * of_a * xx + of_y - cross
        rough = SLACK_OF_SUM * (of_x + of_y)
        amplitude = known * (tl.sqrt(of_x) + tl.abs(w * of_p) * tl.sqrt(xx) + tl.sqrt(of_y))
        most = tl.sqrt(_positive(energy) + rough) + amplitude + LOST
        lower = _positive(tl.sqrt(_positive(energy - rough)) - amplitude)
        rest = of_b * tl.load(sums.y + place, mask=inside, other=0.0)
        rest -= of_a * tl.load(sums.x + place, mask=inside, other=0.0)
        if tokens.grad_logps is not None:
            here = tile[None, :] == target_tile
            over = tl.abs(g) - most
            under = lower - tl.abs(g)
            # Comparisons with NaN are false, so NaN stays NaN.
            apart = _positive(tl.where(over < under, under, over))
            lower = tl.where(here, apart, lower)
            most += tl.where(here, tl.abs(g), 0.0)
            rest += tl.where(here, g, 0.0)
        tl.store(out.most + tile.to(tl.int64)[None, :] * count + token[:, None], most, mask=inside)
        tl.store(out.rest + tile.to(tl.int64)[None, :] * count + token[:, None], rest, mask=inside)
        lower = tl.where(inside, lower, 0.0)
        least += tl.sum(lower * lower, 1)
        size += tl.sum(tl.where(inside, tl.abs(rest), 0.0), 1).to(tl.float64)
    size *= unit
    tl.store(out.least + token, least, mask=live)
    tl.store(out.unit + token, tl.where(has_gradient, unit, 0.0), mask=live)
    tl.store(out.size + token, tl.where(has_gradient & (size < float("inf")), size, 0.0), mask=live)


def part_bounds(sums: TileSums, measure: Measure, tokens: PairGradients, targets: Tensor) -> PartBounds:
    """Bounds from the forward's sums over tiles; `targets` (n,) are read if log-probabilities have a gradient."""
    (n, tiles), device = sums.x.shape, sums.x.device
    assert all(part is None or part.is_contiguous() for part in sums)
    bounds = PartBounds.empty(n, tiles, device, targets=False)
    with on(device):
        _bounds_kernel[(triton.cdiv(n, BOUND_TOKENS),)](
            sums, tokens.contiguous(), targets.contiguous(), bounds, tiles, n, measure.beta,
            KIND=measure.kind, TILE_VOCAB=TILE_VOCAB, TOKENS=BOUND_TOKENS, TILES=BOUND_TILES, num_warps=BOUND_WARPS,
        )  # fmt: skip
    return bounds


@triton.jit
def _tail_kernel(
    grads, stride, scales, tail, vocab, TILE_VOCAB: tl.constexpr, SAMPLES: tl.constexpr, CUTS: tl.constexpr
):
    tile = tl.program_id(0)
    entry = tile * TILE_VOCAB + tl.arange(0, TILE_VOCAB)
    place = grads + entry
    total = tl.zeros((TILE_VOCAB,), tl.float32)
    for sample in range(SAMPLES):
        size = tl.abs(tl.load(place, mask=entry < vocab, other=0.0)) * tl.load(scales + sample)
        total += tl.where(size < float("inf"), size, 0.0)  # one token's NaN must not reach the gradients of others
        place += stride
    store_shares(tail, total, tile, vocab, TILE_VOCAB, CUTS)


def tail_of(grads: Tensor, scales: Tensor) -> Tail:
    """An entry's share of a rest is its sum of |dL/dx| times scale over drawn tokens, relative to its tile's sum.

    `grads` is (SAMPLES, V), `scales` (SAMPLES,).
    Sums are cut to about twice their mean. Tokens list the few large entries of a tile. A share of a rest on a listed
    entry would replace nothing, and such a rest would be left out (`sparse.listing_triton.write_lists`).
    """
    assert grads.stride(1) == 1
    samples, vocab = grads.shape
    tail = Tail.empty(padded_tiles(vocab, TILE_VOCAB), TILE_VOCAB, grads.device)
    with on(grads.device):
        _tail_kernel[(tail.squares.numel(),)](
            grads, grads.stride(0), scales, tail, vocab, TILE_VOCAB=TILE_VOCAB, SAMPLES=samples, CUTS=CUTS
        )
    return tail


@triton.jit(do_not_specialize=["base", "width"])
def _parts_kernel(
    out,  # `Parts`
    hidden, weight, bias, size, steps,  # of `picked_head`
    teacher_hidden, teacher_weight, teacher_bias, teacher_size, teacher_steps,
    targets,
    tokens,  # `PairGradients`, (n,) each
    chosen,  # `ChosenParts`
    lists,  # `TileLists`
    base,
    width,  # tokens of the span
    tiles,
    count,
    vocab,
    beta,
    KIND: tl.constexpr,
    TILE_VOCAB: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    STEP: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs read the same gathered rows.
    slices: tl.constexpr = TILE_VOCAB // ENTRIES
    entry = tl.program_id(0) % slices * ENTRIES
    tile, row, part, inside = rows_of_tile(
        tl.program_id(0) // slices, chosen, lists, tiles, count, base, width, ROWS, TILES
    )  # fmt: skip
    if tile < tiles:
        first = tile * TILE_VOCAB + entry
        z, _square = picked_logits(hidden, weight, bias, size, steps, row, first, vocab, ENTRIES, STEP)
        t, _square = picked_logits(
            teacher_hidden, teacher_weight, teacher_bias, teacher_size, teacher_steps, row, first, vocab, ENTRIES, STEP
        )
        log_p = z - per_token(tokens.lse, row, True)
        log_q = t - per_token(tokens.teacher_lse, row, True)
        column = first + tl.arange(0, ENTRIES)
        hit = column[None, :] == per_token(targets, row, True)
        grad = pair_gradient(
            flushed_exp(log_p), flushed_exp(log_q), log_p, log_p, log_q, row, True, hit, tokens, beta, KIND
        )
        grad *= 1.0 / tl.load(chosen.scale + row)[:, None]
        place = part[:, None] * TILE_VOCAB + entry + tl.arange(0, ENTRIES)[None, :]
        store_parts(out, place, tl.where((column < vocab)[None, :], grad, 0.0), inside[:, None])


def make_parts(
    student: HeadFactors,  # of the whole vocabulary
    teacher: HeadFactors,
    targets: Tensor,  # (n,), read if log-probabilities have a gradient
    measure: Measure,
    tokens: PairGradients,  # (n,) each; entropies have no gradient
    chosen: ChosenParts,
    lists: TileLists,
    span: Span,
    out: Parts,
) -> None:
    """Write the span's kept parts of dL/dz, with the targets' entries, in units of each token's scale."""
    (tiles, n), family = chosen.rank.shape, family_of(chosen.rank.device)
    with on(chosen.rank.device):
        _parts_kernel[((span.room // ROWS + tiles) * (TILE_VOCAB // ENTRIES),)](
            out, *picked_head(student, ENTRIES, family), *picked_head(teacher, ENTRIES, family),
            targets.contiguous(), tokens.contiguous(), chosen, lists, span.base, span.last - span.first,
            tiles, n, teacher.weight.shape[0], measure.beta,
            KIND=measure.kind, TILE_VOCAB=TILE_VOCAB, ROWS=ROWS, ENTRIES=ENTRIES, STEP=family.step,
            TILES=triton.next_power_of_2(tiles), num_stages=family.stages, num_warps=WARPS,
        )  # fmt: skip
