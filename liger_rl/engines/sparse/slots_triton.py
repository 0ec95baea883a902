"""Softmax and its gradient over each token's listed ids, as Triton kernels, with the formulas of `slots`.

Atomics add integers only, so two runs give the same bits.
"""

from collections.abc import Collection

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.engines.sparse.slots import finished as finished
from liger_rl.engines.sparse.slots import no_slots, repeated_ids, tokens_of
from liger_rl.kernels.devices import on
from liger_rl.kernels.segments import (
    BAD_ENDS,
    BAD_IDS,
    BAD_MASKS,
    BAD_ORDERS,
    BAD_STARTS,
    BAD_TARGETS,
    COUNTED,
    FULL,
    FULL_ROWS,
    IGNORED,
    LONG_ROWS,
    MISSING_TARGETS,
    SEVERAL,
    SINGLE,
    Ordered,
    Pairs,
    Rows,
    Segments,
    Slots,
)
from liger_rl.kernels.segments_triton import BY_TOKEN
from liger_rl.kernels.segments_triton import dots as dots
from liger_rl.kernels.segments_triton import segment_sums as segment_sums
from liger_rl.kernels.softmax import LOWEST_LOG_PROBABILITY, one_minus_exp, tanh_square, times_derivative
from liger_rl.kernels.statistics import Fold, TokenStatistics
from liger_rl.kernels.transform import LogitSteps, LogitTransform

ROW_BLOCK, SLOT_BLOCK = 256, 512  # ids of a step of `_rows_kernel`, and of a program of `_slots_kernel`
FOLD_BLOCK, FOLD_WARPS = 128, 1
GRAD_BLOCK, GRAD_WARPS = 512, 4
LOWEST = torch.finfo(torch.float32).min


@triton.jit
def _count(number, amount):
    """Add `amount` to `number`. Most programs have 0 to add, and write nothing."""
    amount = amount.to(tl.int64)
    tl.atomic_add(number, amount, mask=amount > 0, sem="relaxed")


@triton.jit(do_not_specialize=["tokens", "pairs", "each", "vocab", "first_id", "rows", "long_row"])
def _rows_kernel(
    token_ids,  # (pairs,)
    offsets,  # (tokens + 1,)
    targets,  # (tokens,)
    mask,  # (tokens,)
    wanted_tokens,  # (tokens / each,)
    slot_ids,  # (pairs + tokens,)
    slot_tokens,
    starts,  # (tokens + 1,)
    kinds,  # (tokens,)
    missing,
    first_hits,  # (tokens,) position of the first id that is the target, or `pairs` if the row does not list it
    numbers,  # (COUNTED,) zeros
    tokens,
    pairs,
    each,
    vocab,
    first_id,
    rows,
    long_row,
    KEEP_SINGLE: tl.constexpr,
    BLOCK: tl.constexpr,
    # Defaults instead of globals, because Triton compares each global that a kernel reads at each launch.
    SINGLE: tl.constexpr = SINGLE,
    SEVERAL: tl.constexpr = SEVERAL,
    FULL: tl.constexpr = FULL,
    IGNORED: tl.constexpr = IGNORED,
    START: tl.constexpr = BAD_STARTS,
    ORDER: tl.constexpr = BAD_ORDERS,
    END: tl.constexpr = BAD_ENDS,
    MISSING: tl.constexpr = MISSING_TARGETS,
    EMPTY: tl.constexpr = FULL_ROWS,
    TARGET: tl.constexpr = BAD_TARGETS,
    MASK: tl.constexpr = BAD_MASKS,
    LONG: tl.constexpr = LONG_ROWS,
):
    token = tl.program_id(0).to(tl.int64)
    raw_begin = tl.load(offsets + token).to(tl.int64)
    raw_end = tl.load(offsets + token + 1).to(tl.int64)
    begin = tl.minimum(tl.maximum(raw_begin, 0), pairs)
    end = tl.minimum(tl.maximum(raw_end, begin), pairs)
    target = tl.load(targets + token).to(tl.int64)
    counts = target >= 0
    if mask is not None:
        value = tl.load(mask + token)
        counts = counts & (value != 0)
        if mask.dtype.element_ty != tl.int1:
            _count(numbers + MASK, (value != 0) & (value != 1))
    _count(numbers + TARGET, counts & (target >= vocab))
    _count(numbers + LONG, end - begin + 1 > long_row)
    counts = counts & (target < vocab)
    if wanted_tokens is not None:
        counts = counts & (tl.load(wanted_tokens + token // each) != 0)
    _count(numbers + START, (token == 0) & (raw_begin != 0))
    _count(numbers + ORDER, raw_end < raw_begin)
    _count(numbers + END, (token == tokens - 1) & (raw_end != pairs))
    first_hit = begin * 0 + pairs
    others = 0
    for start in range(begin, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        listed = tl.load(token_ids + place, mask=place < end, other=-1).to(tl.int64)
        known = (listed >= 0) & (listed < vocab)
        first_hit = tl.minimum(first_hit, tl.min(tl.where(known & (listed == target), place, first_hit)))
        others = tl.maximum(others, tl.max((known & (listed != target)).to(tl.int32)))
    kind = tl.where(others > 0, SEVERAL, SINGLE)
    kind = tl.where(counts, tl.where(end > begin, kind, FULL), IGNORED)
    needed = kind == SEVERAL
    if KEEP_SINGLE:
        needed = needed | (kind == SINGLE)
    row = target - first_id
    row = tl.where((row >= 0) & (row < rows), row, rows)
    slot = begin + token
    tl.store(slot_ids + slot, tl.where(needed, row, rows + 1).to(tl.int32))
    tl.store(slot_tokens + slot, token.to(tl.int32))
    tl.store(slot_tokens + end + token, token.to(tl.int32), mask=first_hit < pairs)  # the slot to spare
    tl.store(starts + token, slot)
    tl.store(starts + tokens, end + tokens, mask=token == tokens - 1)
    tl.store(kinds + token, kind.to(tl.uint8))
    tl.store(first_hits + token, first_hit)
    lacks = counts & (end > begin) & (first_hit == pairs)
    tl.store(missing + token, lacks)
    _count(numbers + MISSING, lacks)
    _count(numbers + EMPTY, counts & (end == begin))


@triton.jit
def first_of(row, ids, positions, steps):
    """-> for each row, position of the first of the ascending ids that is at least `row`; `positions` without one."""
    low = row * 0
    high = low + positions
    for _ in range(steps):
        middle = (low + high) // 2
        under = (low < high) & (tl.load(ids + middle, mask=low < high, other=0).to(tl.int64) < row)
        low = tl.where(under, middle + 1, low)
        high = tl.where(under, high, middle)
    return low


@triton.jit(do_not_specialize=["tokens", "pairs", "vocab", "first_id", "rows", "searches"])
def _slots_kernel(
    token_ids,  # (pairs,)
    offsets,  # (tokens + 1,)
    targets,  # (tokens,)
    kinds,
    first_hits,
    repeated,  # (pairs,) bool: an equal id stands earlier in the row; None if no row repeats an id
    slot_ids,  # (pairs + tokens,)
    slot_tokens,
    numbers,  # (COUNTED,)
    tokens,
    pairs,
    vocab,
    first_id,
    rows,
    searches,  # steps of a binary search for a token
    BLOCK: tl.constexpr,
    SEVERAL: tl.constexpr = SEVERAL,
    ID: tl.constexpr = BAD_IDS,
):
    lane = tl.arange(0, BLOCK)
    position = tl.program_id(0).to(tl.int64) * BLOCK
    place = position + lane
    # Offsets may be wrong, so the search ends after `searches` steps, and `inside` checks the token that it finds.
    token = tl.minimum(first_of(place + 1, offsets + 1, tokens, searches), tokens - 1)
    begin = tl.maximum(tl.load(offsets + token).to(tl.int64), 0)
    end = tl.load(offsets + token + 1).to(tl.int64)
    inside = (place >= begin) & (place < end) & (place < pairs)
    listed = tl.load(token_ids + place, mask=inside, other=-1).to(tl.int64)
    known = (listed >= 0) & (listed < vocab)
    first_hit = tl.load(first_hits + token)
    needed = known & (listed != tl.load(targets + token).to(tl.int64)) & (tl.load(kinds + token) == SEVERAL)
    if repeated is not None:
        needed = needed & (tl.load(repeated + place, mask=inside, other=0) == 0)
    row = listed - first_id
    row = tl.where((row >= 0) & (row < rows), row, rows)
    # The target has the token's first slot, so ids that precede it in the row come one slot later.
    slot = place + token + (place < first_hit).to(tl.int64)
    stored = inside & (place != first_hit)
    tl.store(slot_ids + slot, tl.where(needed, row, rows + 1).to(tl.int32), mask=stored)
    tl.store(slot_tokens + slot, token.to(tl.int32), mask=stored)
    _count(numbers + ID, tl.sum((inside & (known == 0)).to(tl.int32)))


def make_slots(
    token_ids: Tensor,
    offsets: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    wanted: Tensor | None = None,
    *,
    part: Rows,
    keep_single: bool,
    distinct: bool,
) -> Slots:
    """As `slots.make_slots`."""
    (rows, first, vocab), n, pairs, device = part, targets.numel(), token_ids.numel(), targets.device
    if n == 0:
        return no_slots(pairs, part, device)
    # Offsets that are no CSR leave slots unwritten by the kernels.
    ids = torch.full((n + pairs,), rows + 1, dtype=torch.int32, device=device)
    # Separate tensors: views of one tensor may have addresses that are no multiples of 16 bytes, for which Triton
    # compiles another kernel.
    tokens = torch.empty(n + pairs, dtype=torch.int32, device=device)
    starts = torch.empty(n + 1, dtype=torch.int64, device=device)
    kinds = torch.empty(n, dtype=torch.uint8, device=device)
    missing = torch.empty(n, dtype=torch.bool, device=device)
    first_hits = torch.empty(n, dtype=torch.int64, device=device)
    numbers = torch.zeros(COUNTED, dtype=torch.int64, device=device)
    token_ids, offsets, targets = token_ids.contiguous(), offsets.contiguous(), targets.contiguous()
    with on(device):
        _rows_kernel[(n,)](
            token_ids,
            offsets,
            targets,
            None if mask is None else mask.contiguous(),
            None if wanted is None else wanted.contiguous(),
            ids,
            tokens,
            starts,
            kinds,
            missing,
            first_hits,
            numbers,
            n,
            pairs,
            1 if wanted is None else n // wanted.numel(),
            vocab,
            first,
            rows,
            BY_TOKEN.piece,
            KEEP_SINGLE=keep_single,
            BLOCK=ROW_BLOCK,
            num_warps=1,
        )
        if pairs > 0:
            _slots_kernel[(triton.cdiv(pairs, SLOT_BLOCK),)](
                token_ids,
                offsets,
                targets,
                kinds,
                first_hits,
                None if distinct else repeated_ids(token_ids, tokens_of(offsets, pairs)),
                ids,
                tokens,
                numbers,
                n,
                pairs,
                vocab,
                first,
                rows,
                n.bit_length(),
                BLOCK=SLOT_BLOCK,
                num_warps=4,
            )
    return Slots(ids, tokens, starts, kinds, missing, numbers, rows, first)


@triton.jit(do_not_specialize=["rows", "first_id"])
def _fold_kernel(
    logits,  # (slots,)
    slot_ids,
    starts,  # (tokens + 1,)
    kinds,  # (tokens,)
    targets,
    peaks,  # (tokens,) each from here on; lse if FINISH
    sums,  # log-probabilities if FINISH
    at_targets,  # None if FINISH
    moments,  # entropies if FINISH
    sums_sq,  # log sum p^2 if FINISH
    logit_sums,
    rivals,
    is_top1,
    counts,
    rows,
    first_id,
    FINISH: tl.constexpr,
    BLOCK: tl.constexpr,
    SINGLE: tl.constexpr = SINGLE,
    LOWEST: tl.constexpr = LOWEST,
):
    token = tl.program_id(0).to(tl.int64)
    begin = tl.load(starts + token)
    end = tl.load(starts + token + 1)
    kind = tl.load(kinds + token)
    target = tl.load(targets + token).to(tl.int64)
    target_row = tl.load(slot_ids + begin)
    at_target = tl.load(logits + begin, mask=target_row < rows, other=0.0)
    peak = LOWEST
    total = 0.0
    moment = 0.0
    total_sq = 0.0
    logit_sum = 0.0
    rival = float("-inf")
    count = 0.0
    for start in range(begin, end, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        row = tl.load(slot_ids + slot, mask=slot < end, other=rows + 1)
        has_row = row < rows
        z = tl.load(logits + slot, mask=has_row, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(z))
        kept = tl.exp(peak - new_peak)
        shifted = z - new_peak
        exp = tl.exp(shifted)
        if moments is not None:
            moment = kept * (moment + (peak - new_peak) * total)
            moment += tl.sum(exp * tl.maximum(shifted, LOWEST_LOG_PROBABILITY))
        total = total * kept + tl.sum(exp)
        if sums_sq is not None:
            total_sq = total_sq * kept * kept + tl.sum(exp * exp)
        if logit_sums is not None:
            logit_sum += tl.sum(tl.where(has_row, z, 0.0))
            count += tl.sum(tl.where(row <= rows, 1.0, 0.0))
        if rivals is not None or is_top1 is not None:
            before = row.to(tl.int64) + first_id < target
            rival = tl.maximum(rival, tl.max(tl.where(before, z, float("-inf"))))
        peak = new_peak
    # A row with a single id needs no logit. With several shards, only the one that has the id writes its sums.
    local = target - first_id
    nothing = (kind == SINGLE) & (target_row > rows) & (local >= 0) & (local < rows)
    peak = tl.where(nothing, 0.0, peak)
    total = tl.where(nothing, 1.0, total)
    total_sq = tl.where(nothing, 1.0, total_sq)
    if FINISH:
        known = kind >= SINGLE
        total = tl.where(known, total, 1.0)
        log_sum = tl.log(total)
        # Relative to the peak, not to lse: see `Fold.finish`.
        logp = (at_target - peak) - log_sum
        tl.store(sums + token, tl.where(known, tl.where(logp > 0.0, 0.0, logp), 0.0))
        tl.store(peaks + token, tl.where(known, peak + log_sum, float("inf")))
        if moments is not None:
            entropy = log_sum - moment / total
            tl.store(moments + token, tl.where(known, tl.where(entropy < 0.0, 0.0, entropy), 0.0))
        if sums_sq is not None:
            log_sum_sq = tl.log(tl.where(known, total_sq, 1.0)) - 2.0 * log_sum
            tl.store(sums_sq + token, tl.where(known, tl.where(log_sum_sq > 0.0, 0.0, log_sum_sq), 0.0))
        if is_top1 is not None:
            tl.store(is_top1 + token, (known & (at_target >= peak) & (at_target > rival)).to(tl.uint8))
    else:
        tl.store(peaks + token, peak)
        tl.store(sums + token, total)
        tl.store(at_targets + token, at_target)
        if moments is not None:
            tl.store(moments + token, moment)
        if sums_sq is not None:
            tl.store(sums_sq + token, total_sq)
        if rivals is not None:
            tl.store(rivals + token, rival)
    if logit_sums is not None:
        tl.store(logit_sums + token, logit_sum)
        tl.store(counts + token, count)


def fold(
    z: Tensor, slots: Slots, targets: Tensor, *, entropy: bool, extras: Collection[str]
) -> tuple[Fold, Tensor | None]:
    """As `slots.fold`."""
    n = targets.numel()
    target = torch.empty(n, dtype=torch.float32, device=z.device)
    state = Fold.unwritten((n,), target, entropy=entropy, extras=extras)
    counts = torch.empty_like(target) if state.sum_logits is not None else None
    _launch_fold(z, slots, targets, state, None, counts, finish=False)
    return state, counts


def statistics(
    z: Tensor, slots: Slots, targets: Tensor, *, entropy: bool, extras: Collection[str]
) -> tuple[TokenStatistics, Tensor | None]:
    """As `slots.statistics`, in one launch."""
    n = targets.numel()

    def empty(needed: bool) -> Tensor | None:
        return torch.empty(n, dtype=torch.float32, device=z.device) if needed else None

    lse, logps = (torch.empty(n, dtype=torch.float32, device=z.device) for _ in range(2))
    moments, sums_sq = empty(entropy), empty("log_sum_sq_probs" in extras)
    sum_logits, counts = empty("mean_logits" in extras), empty("mean_logits" in extras)
    top1 = torch.empty(n, dtype=torch.uint8, device=z.device) if "is_top1" in extras else None
    state = Fold(lse, logps, logps, moments, sums_sq, sum_logits, None)
    _launch_fold(z, slots, targets, state, top1, counts, finish=True)
    is_top1 = None if top1 is None else top1.view(torch.bool)
    return TokenStatistics(logps, lse, moments, sums_sq, sum_logits, is_top1), counts


def _launch_fold(
    z: Tensor, slots: Slots, targets: Tensor, out: Fold, is_top1: Tensor | None, counts: Tensor | None, *, finish: bool
) -> None:
    n = targets.numel()
    if n == 0:
        return
    with on(z.device):
        _fold_kernel[(n,)](
            z,
            slots.ids,
            slots.starts,
            slots.kinds,
            targets.contiguous(),
            out.peak,
            out.sum_exp,
            None if finish else out.target,
            out.moment,
            out.sum_sq_exp,
            out.sum_logits,
            out.rival,
            is_top1,
            counts,
            slots.rows,
            slots.first,
            FINISH=finish,
            BLOCK=FOLD_BLOCK,
            num_warps=FOLD_WARPS,
        )


@triton.jit(do_not_specialize=["positions", "rows", "searches"])
def _slot_gradients_kernel(
    logits,  # (positions,)
    slot_ids,
    slot_tokens,
    starts,  # (tokens + 1,)
    kinds,  # (tokens,) each from here on
    lse_of,
    logps,
    grad_logps,
    entropies,
    grad_entropies,
    temperatures,
    ids,  # (positions,) ascending; None without an order by id, and so are `order` and the outputs by id
    order,  # (positions,) slot of each position by id
    out,  # (positions,)
    ordered,  # (positions,) gradients sorted by id, written
    ordered_tokens,  # (positions,) tokens sorted by id, written
    row_starts,  # (rows + 1,) first position by id of each row of the weight, written
    positions,
    rows,
    searches,  # steps of a binary search for a position
    steps,  # LogitSteps
    BLOCK: tl.constexpr,
    SEVERAL: tl.constexpr = SEVERAL,
):
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < positions
    # With an order by id, the first ceil(positions / BLOCK) programs go by slots, as many by ids, the rest by rows.
    if order is not None:
        step = tl.cdiv(positions, BLOCK).to(tl.int64)
        place = slot - step * BLOCK
        again = (place >= 0) & (place < positions)
        if tl.program_id(0) >= 2 * step:
            row = place - step * BLOCK
            tl.store(row_starts + row, first_of(row, ids, positions, searches), mask=row <= rows)
        slot = tl.load(order + place, mask=again, other=slot)
        inside = inside | again
    needed = tl.load(slot_ids + slot, mask=inside, other=rows) < rows
    token = tl.load(slot_tokens + slot, mask=needed, other=0).to(tl.int64)
    needed = needed & (tl.load(kinds + token, mask=needed, other=0) == SEVERAL)
    g = tl.load(grad_logps + token, mask=needed, other=0.0)
    e = 0.0
    has_gradient = g != 0.0
    if entropies is not None:
        e = tl.load(grad_entropies + token, mask=needed, other=0.0)
        has_gradient = has_gradient | (e != 0.0)
    # A token without a gradient may have NaN in its logits, and 0 * NaN is NaN.
    needed = needed & has_gradient
    z = tl.load(logits + slot, mask=needed, other=0.0)
    log_p = z - tl.load(lse_of + token, mask=needed, other=0.0)
    p = tl.exp(log_p)
    is_target = slot == tl.load(starts + token, mask=needed, other=-1)
    # 1 - p from the forward's logp, as in `TokenGradients.of`.
    grad = tl.where(is_target, g * one_minus_exp(tl.load(logps + token, mask=needed, other=0.0)), -g * p)
    if entropies is not None:
        log_p = tl.maximum(log_p, LOWEST_LOG_PROBABILITY)
        moment = p * (log_p + tl.load(entropies + token, mask=needed, other=0.0))
        grad -= e * moment
    if temperatures is not None:
        temperature = tl.load(temperatures + token, mask=needed, other=1.0)
        grad = grad / temperature
        z *= temperature
    square = 0.0
    if steps.cap is not None:
        square = tanh_square(z, steps)
    grad = times_derivative(grad, square, steps)
    grad = tl.where(needed, grad, 0.0)
    if order is None:
        tl.store(out + slot, grad, mask=inside)
    else:
        tl.store(out + slot, grad, mask=inside & (again == 0))
        tl.store(ordered + place, grad, mask=again)
        tl.store(ordered_tokens + place, tl.load(slot_tokens + slot, mask=again, other=0), mask=again)


def slot_gradients(
    z: Tensor,
    slots: Slots,
    statistics: TokenStatistics,
    grads: tuple[Tensor, Tensor | None],
    transform: LogitTransform,
    temperatures: Tensor | None,
    by_id: Ordered | None = None,
) -> tuple[Tensor, Pairs | None]:
    """As `slots.slot_gradients`, in one launch."""
    positions, (grad_logps, grad_entropy) = z.numel(), grads
    out, blocks = torch.empty_like(z), triton.cdiv(positions, GRAD_BLOCK)
    pairs, (ids, order), ordered, tokens, starts = None, by_id or (None, None), None, None, None
    if ids is not None:
        ordered, tokens = torch.empty_like(z), torch.empty_like(slots.tokens)
        starts = torch.empty(slots.rows + 1, dtype=torch.int64, device=z.device)
        pairs = Pairs(Segments(starts, ids, by_id=True), ordered, tokens)
        blocks = 2 * blocks + triton.cdiv(slots.rows + 1, GRAD_BLOCK)
    if blocks == 0:
        return out, pairs
    entropy = None if grad_entropy is None else statistics.entropy
    with on(z.device):
        _slot_gradients_kernel[(blocks,)](
            z,
            slots.ids,
            slots.tokens,
            slots.starts,
            slots.kinds,
            statistics.lse.contiguous(),
            statistics.logps.contiguous(),
            grad_logps.contiguous(),
            None if entropy is None else entropy.contiguous(),
            None if grad_entropy is None else grad_entropy.contiguous(),
            temperatures,
            ids,
            order,
            out,
            ordered,
            tokens,
            starts,
            positions,
            slots.rows,
            positions.bit_length(),
            LogitSteps.of(transform),
            BLOCK=GRAD_BLOCK,
            num_warps=GRAD_WARPS,
        )
    return out, pairs
