"""Softmax and its gradient over each token's listed ids, as Triton kernels, with the formulas of `slots`.

Atomics add integers only, so two runs give the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.kernels.devices import launch_context
from liger_rl.kernels.limits import LIMITS
from liger_rl.kernels.softmax_triton import (
    LOWEST,
    fold_block,
    gradient,
    log_probabilities,
    one_minus_exp,
    tanh_square,
    times_derivative,
    token_terms,
)
from liger_rl.kernels.statistics import TokenStatistics, map_fields
from liger_rl.kernels.transform import LogitSteps, LogitTransform
from liger_rl.support.segment_sums import (
    BAD_ENDS,
    BAD_IDS,
    BAD_MASKS,
    BAD_ORDERS,
    BAD_STARTS,
    BAD_TARGETS,
    COUNTERS,
    FULL,
    FULL_ROWS,
    IGNORED,
    LONG_ROWS,
    SEVERAL,
    SINGLE,
    Slots,
)
from liger_rl.support.segment_sums_triton import dots as dots
from liger_rl.support.segment_sums_triton import order_by_id as order_by_id
from liger_rl.support.segment_sums_triton import segment_sums as segment_sums
from liger_rl.support.slots import SlotGradients, find_rows, make_empty_slots, mark_repeated_ids

ROW_WARPS, LONG_ROW_WARPS = 1, 8  # the latter if the mean row is a long one
FOLD_BLOCK, FOLD_WARPS = 128, 1
GRAD_BLOCK, GRAD_WARPS = 512, 4


@triton.jit
def _count(number, amount):
    """Add `amount` to `number`. Most programs have 0 to add, and write nothing."""
    amount = amount.to(tl.int64)
    tl.atomic_add(number, amount, mask=amount > 0, sem="relaxed")


@triton.jit(do_not_specialize=["tokens", "pairs", "long_row"])
def _slots_kernel(
    token_ids,  # (pairs,)
    offsets,  # (tokens + 1,)
    targets,  # (tokens,)
    mask,  # (tokens,)
    repeated,  # (pairs,) bool: an equal id stands earlier in the row; None if no row repeats an id
    slots,  # `Slots`, written; its numbers are zeros
    tokens,
    pairs,
    long_row,
    BLOCK: tl.constexpr,
    # Defaults instead of globals, because Triton compares each global that a kernel reads at each launch.
    SINGLE: tl.constexpr = SINGLE,
    SEVERAL: tl.constexpr = SEVERAL,
    FULL: tl.constexpr = FULL,
    IGNORED: tl.constexpr = IGNORED,
    START: tl.constexpr = BAD_STARTS,
    ORDER: tl.constexpr = BAD_ORDERS,
    END: tl.constexpr = BAD_ENDS,
    ID: tl.constexpr = BAD_IDS,
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
            _count(slots.numbers + MASK, (value != 0) & (value != 1))
    _count(slots.numbers + TARGET, counts & (target >= slots.vocab))
    _count(slots.numbers + LONG, end - begin + 1 > long_row)
    counts = counts & (target < slots.vocab)
    _count(slots.numbers + START, (token == 0) & (raw_begin != 0))
    _count(slots.numbers + ORDER, raw_end < raw_begin)
    _count(slots.numbers + END, (token == tokens - 1) & (raw_end != pairs))
    # Position of the first id that is the target; `pairs` if the row does not list it.
    target_position = begin * 0 + pairs
    others = 0
    invalid = 0
    for start in range(begin, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        listed = tl.load(token_ids + place, mask=place < end, other=-1).to(tl.int64)
        valid = (listed >= 0) & (listed < slots.vocab)
        hits = tl.where(valid & (listed == target), place, target_position)
        target_position = tl.minimum(target_position, tl.min(hits))
        others = tl.maximum(others, tl.max((valid & (listed != target)).to(tl.int32)))
        invalid += tl.sum(((place < end) & (valid == 0)).to(tl.int32))
    kind = tl.where(others > 0, SEVERAL, SINGLE)
    kind = tl.where(counts, tl.where(end > begin, kind, FULL), IGNORED)
    for start in range(begin, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < end
        listed = tl.load(token_ids + place, mask=inside, other=-1).to(tl.int64)
        has_slot = (listed >= 0) & (listed < slots.vocab) & (listed != target) & (kind == SEVERAL)
        if repeated is not None:
            has_slot = has_slot & (tl.load(repeated + place, mask=inside, other=0) == 0)
        # The target has the token's first slot, so ids that precede it in the row come one slot later.
        slot = place + token + (place < target_position).to(tl.int64)
        stored = inside & (place != target_position)
        tl.store(slots.ids + slot, tl.where(has_slot, listed, slots.vocab).to(tl.int32), mask=stored)
        tl.store(slots.tokens + slot, token.to(tl.int32), mask=stored)
    first_slot = begin + token
    tl.store(slots.ids + first_slot, tl.where(kind == SEVERAL, target, slots.vocab).to(tl.int32))
    tl.store(slots.tokens + first_slot, token.to(tl.int32))
    tl.store(slots.tokens + end + token, token.to(tl.int32), mask=target_position < pairs)  # the slot left over
    tl.store(slots.starts + token, first_slot)
    tl.store(slots.starts + tokens, end + tokens, mask=token == tokens - 1)
    tl.store(slots.kinds + token, kind.to(tl.uint8))
    tl.store(slots.missing + token, counts & (end > begin) & (target_position == pairs))
    _count(slots.numbers + ID, invalid)
    _count(slots.numbers + EMPTY, counts & (end == begin))


def make_slots(
    token_ids: Tensor,
    offsets: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    *,
    vocab: int,
    distinct: bool,
) -> Slots:
    """As `slots.make_slots`."""
    n, pairs, device = targets.numel(), token_ids.numel(), targets.device
    if n == 0:
        return make_empty_slots(pairs, vocab, device)
    # Separate tensors: views of one tensor may have addresses that are no multiples of 16 bytes, for which Triton
    # compiles another kernel.
    slots = Slots(
        # Offsets that are no CSR leave slots unwritten by the kernels.
        ids=torch.full((n + pairs,), vocab, dtype=torch.int32, device=device),
        tokens=torch.empty(n + pairs, dtype=torch.int32, device=device),
        starts=torch.empty(n + 1, dtype=torch.int64, device=device),
        kinds=torch.empty(n, dtype=torch.uint8, device=device),
        missing=torch.empty(n, dtype=torch.bool, device=device),
        numbers=torch.zeros(COUNTERS, dtype=torch.int64, device=device),
        vocab=vocab,
    )
    token_ids, offsets = token_ids.contiguous(), offsets.contiguous()
    warps = LONG_ROW_WARPS if pairs > LIMITS.by_token.piece * n else ROW_WARPS
    with launch_context(device):
        _slots_kernel[(n,)](
            token_ids, offsets, targets.contiguous(),
            None if mask is None else mask.contiguous(),
            None if distinct or pairs == 0 else mark_repeated_ids(token_ids, find_rows(offsets, pairs)),
            slots, n, pairs, LIMITS.by_token.piece,
            BLOCK=LIMITS.row_ids * warps, num_warps=warps,
        )  # fmt: skip
    return slots


@triton.jit
def _fold_slots_kernel(
    logits,  # (slots,)
    slots,  # `Slots`
    out,  # `TokenStatistics` (tokens,), written
    BLOCK: tl.constexpr,
    SINGLE: tl.constexpr = SINGLE,
    SEVERAL: tl.constexpr = SEVERAL,
):
    ENTROPY: tl.constexpr = out.entropy is not None
    token = tl.program_id(0).to(tl.int64)
    begin = tl.load(slots.starts + token)
    end = tl.load(slots.starts + token + 1)
    kind = tl.load(slots.kinds + token)
    at_target = tl.load(logits + begin, mask=kind == SEVERAL, other=0.0)
    peak = LOWEST
    total = 0.0
    moment = 0.0
    total_sq = 0.0
    for start in range(begin, end, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        has_id = tl.load(slots.ids + slot, mask=slot < end, other=slots.vocab) < slots.vocab
        z = tl.load(logits + slot, mask=has_id, other=float("-inf"))
        peak, total, moment, total_sq = fold_block(z, peak, total, moment, total_sq, ENTROPY, False)
    # A row with a single id needs no logit.
    peak = tl.where(kind == SINGLE, 0.0, peak)
    total = tl.where(kind == SEVERAL, total, 1.0)
    has_ids = kind >= SINGLE
    log_sum = tl.log(total)
    # Relative to the peak, not to lse: see `Fold.finish`.
    logp = (at_target - peak) - log_sum
    tl.store(out.logps + token, tl.where(has_ids, tl.where(logp > 0.0, 0.0, logp), 0.0))
    tl.store(out.lse + token, tl.where(has_ids, peak.to(tl.float64) + log_sum, float("inf")))
    if ENTROPY:
        entropy = log_sum - moment / total
        tl.store(out.entropy + token, tl.where(has_ids, tl.where(entropy < 0.0, 0.0, entropy), 0.0))


def fold_slots(z: Tensor, slots: Slots, *, entropy: bool) -> TokenStatistics:
    """As `slots.fold_slots`, in one launch."""
    n = slots.kinds.numel()

    def empty(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(n, dtype=dtype, device=z.device)

    out = TokenStatistics(empty(), empty(torch.float64), empty() if entropy else None)
    if n > 0:
        with launch_context(z.device):
            _fold_slots_kernel[(n,)](z, slots, out, BLOCK=FOLD_BLOCK, num_warps=FOLD_WARPS)
    return out


@triton.jit(do_not_specialize=["positions"])
def _grad_slots_kernel(
    logits,  # (positions,)
    slots,  # `Slots`
    gradients,  # `SlotGradients`, (tokens,) each
    out,  # (positions,)
    positions,
    steps,  # LogitSteps
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < positions
    needed = tl.load(slots.ids + slot, mask=inside, other=slots.vocab) < slots.vocab
    token = tl.load(slots.tokens + slot, mask=needed, other=0).to(tl.int64)
    g, e, entropy = token_terms(gradients, token, needed)
    has_gradient = g != 0.0
    ENTROPY: tl.constexpr = gradients.grad_entropy is not None
    if ENTROPY:
        has_gradient = has_gradient | (e != 0.0)
    # A token without a gradient may have NaN in its logits, and 0 * NaN is NaN.
    needed = needed & has_gradient
    z = tl.load(logits + slot, mask=needed, other=0.0)
    log_p = log_probabilities(z, tl.load(gradients.lse + token, mask=needed, other=0.0))
    is_target = slot == tl.load(slots.starts + token, mask=needed, other=-1)
    # 1 - p from the forward's logp, as in `TokenGradients.of`.
    at_target = g * one_minus_exp(tl.load(gradients.logps + token, mask=needed, other=0.0))
    grad = gradient(tl.exp(log_p), log_p, is_target, at_target, g, e, entropy, ENTROPY)
    square = 0.0
    if steps.cap is not None:
        square = tanh_square(z, steps)
    tl.store(out + slot, tl.where(needed, times_derivative(grad, square, steps), 0.0), mask=inside)


def grad_slots(
    z: Tensor,
    slots: Slots,
    tokens: SlotGradients,
    transform: LogitTransform,
) -> Tensor:
    """As `slots.grad_slots`, in one launch."""
    positions = z.numel()
    out = torch.empty_like(z)
    if positions == 0:
        return out
    with launch_context(z.device):
        _grad_slots_kernel[(triton.cdiv(positions, GRAD_BLOCK),)](
            z, slots, map_fields(tokens, Tensor.contiguous), out, positions, LogitSteps.of(transform),
            BLOCK=GRAD_BLOCK, num_warps=GRAD_WARPS,
        )  # fmt: skip
    return out
