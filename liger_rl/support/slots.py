"""Softmax and its gradient over each token's listed ids, in PyTorch: the CPU path and the specification.

With z the transformed logits of a token's slots and p = exp(z - lse), the formulas are those of
`liger_rl.kernels.reference`, with sums over the token's slots in place of the vocabulary.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.kernels.limits import LIMITS
from liger_rl.kernels.reference import LOWEST_LOG_PROBABILITY, entropy_term, times_derivative
from liger_rl.kernels.statistics import Fold, TokenGradients, TokenStatistics
from liger_rl.kernels.transform import LogitTransform
from liger_rl.support.segment_sums import (
    BAD_ENDS,
    COUNTERS,
    FULL,
    IGNORED,
    SEVERAL,
    SINGLE,
    Slots,
)
from liger_rl.support.segment_sums import dots as dots
from liger_rl.support.segment_sums import order_by_id as order_by_id
from liger_rl.support.segment_sums import segment_sums as segment_sums


class SlotGradients(NamedTuple):
    """What dL/dlogits of a token's slots is made of, (n,) each: results of the forward, and gradients of them."""

    logps: Tensor
    lse: Tensor  # float64
    grad_logps: Tensor
    entropy: Tensor | None  # None if grad_entropy is None
    grad_entropy: Tensor | None

    def of_whole_rows(self) -> TokenGradients:
        """The same for tokens whose logits are of the whole vocabulary."""
        statistics = TokenStatistics(self.logps, self.lse, self.entropy)
        return TokenGradients.of(statistics, self.grad_logps, self.grad_entropy)


def make_slots(
    token_ids: Tensor,  # (P,) int32 or int64
    offsets: Tensor,  # (N + 1,) the same dtype
    targets: Tensor,  # (N,) token ids; a token with a target outside [0, vocab) does not count
    mask: Tensor | None,  # (N,) bool or 0/1: tokens that count; None for all
    *,
    vocab: int,
    distinct: bool,  # no row lists an id twice, so repeated ids need no search
) -> Slots:
    """The slots of a support with any values. `Slots.numbers` counts the values that are wrong."""
    n, pairs, device = targets.numel(), token_ids.numel(), targets.device
    if n == 0:
        return make_empty_slots(pairs, vocab, device)
    ids = torch.full((n + pairs,), vocab, dtype=torch.int32, device=device)
    row_ends, positions, all_tokens = offsets.long(), torch.arange(pairs, device=device), torch.arange(n, device=device)
    begin = row_ends[:-1].clamp(0, pairs)
    end = torch.maximum(row_ends[1:], begin).clamp(max=pairs)
    starts = torch.cat([begin + all_tokens, end[-1:] + n])
    slots = torch.arange(n + pairs, device=device)
    tokens = torch.searchsorted(starts[1:].contiguous(), slots, right=True).clamp(max=n - 1).to(torch.int32)
    token = find_rows(offsets, pairs)
    targets, listed = targets.long(), token_ids.long()
    unmasked = targets >= 0 if mask is None else (targets >= 0) & (mask != 0)
    counts = unmasked & (targets < vocab)
    improper = torch.zeros_like(counts) if mask is None else (mask != 0) & (mask != 1)
    inside = (positions >= begin[token]) & (positions < end[token])
    valid = inside & (listed >= 0) & (listed < vocab)
    is_target = valid & (listed == targets[token])
    target_position = torch.full((n,), pairs, device=device).scatter_reduce(
        0, token, torch.where(is_target, positions, pairs), "amin"
    )
    others = torch.zeros(n, dtype=torch.int64, device=device).index_add_(0, token, (valid & ~is_target).long())
    kinds = torch.where(others > 0, SEVERAL, SINGLE)
    kinds = torch.where(counts, torch.where(end > begin, kinds, FULL), IGNORED).to(torch.uint8)
    missing = counts & (end > begin) & (target_position == pairs)
    has_slot = valid & ~is_target & (kinds == SEVERAL)[token]
    if not distinct:
        has_slot &= ~mark_repeated_ids(token_ids, token)
    # The target has the token's first slot, so ids that precede it in the row come one slot later.
    place = positions + token + (positions <= target_position[token]).long()
    stored = inside & (positions != target_position[token])
    ids[place[stored]] = torch.where(has_slot, listed, vocab).to(torch.int32)[stored]
    ids[starts[:-1]] = torch.where(kinds == SEVERAL, targets, vocab).to(torch.int32)
    faults = [row_ends[:1] != 0, row_ends[1:] < row_ends[:-1], row_ends[-1:] != pairs, inside & ~valid, kinds == FULL]
    faults += [unmasked & (targets >= vocab), improper, end - begin + 1 > LIMITS.by_token.piece]
    return Slots(ids, tokens, starts, kinds, missing, torch.stack([fault.sum() for fault in faults]), vocab)


def make_empty_slots(pairs: int, vocab: int, device: torch.device) -> Slots:
    """The slots of no tokens. `numbers` says that `pairs` ids have no row."""

    def empty(dtype: torch.dtype) -> Tensor:
        return torch.empty(0, dtype=dtype, device=device)

    numbers = torch.zeros(COUNTERS, dtype=torch.int64)
    numbers[BAD_ENDS] = pairs
    starts = torch.zeros(1, dtype=torch.int64, device=device)
    ids, kinds = empty(torch.int32), empty(torch.uint8)
    return Slots(ids, ids, starts, kinds, empty(torch.bool), numbers.to(device), vocab)


def mark_repeated_ids(token_ids: Tensor, token: Tensor) -> Tensor:
    """(P,) bool: whether the same token lists an equal id earlier. `token` (P,) is ascending."""
    # The sort is stable: equal ids stay in the order of their tokens, so equal ids of one token are neighbours.
    ordered, order = torch.sort(token_ids, stable=True)
    token = token[order]
    repeated = torch.zeros_like(order, dtype=torch.bool)
    repeated[order[1:]] = (ordered[1:] == ordered[:-1]) & (token[1:] == token[:-1])
    return repeated


def find_rows(offsets: Tensor, pairs: int) -> Tensor:
    """(P,) int64: the row of each of `pairs` ids, in [0, N) for any values of the offsets (N + 1,)."""
    positions = torch.arange(pairs, device=offsets.device)
    return torch.searchsorted(offsets.long()[1:].contiguous(), positions, right=True).clamp(max=offsets.numel() - 2)


def fold_slots(z: Tensor, slots: Slots, *, entropy: bool) -> TokenStatistics:
    """Statistics of all N tokens over their slots.

    A SINGLE row has log-probability 0 and entropy 0. IGNORED and FULL rows get 0, and an lse of inf.
    """
    n, token = slots.kinds.numel(), slots.tokens.long()
    has_id = slots.ids < slots.vocab
    z = torch.where(has_id, z, -math.inf)
    # The first peak is that of `Fold.start`.
    lowest = torch.full((n,), torch.finfo(torch.float32).min, dtype=torch.float32, device=z.device)
    peak = lowest.scatter_reduce(0, token, z, "amax")
    shifted = z - peak[token]
    exp = torch.where(has_id, shifted.exp(), 0.0)

    def sum_by_token(values: Tensor) -> Tensor:
        return torch.zeros(n, dtype=torch.float32, device=z.device).index_add_(0, token, values)

    single, has_ids = slots.kinds == SINGLE, slots.kinds >= SINGLE
    at_target = torch.where(slots.kinds == SEVERAL, z[slots.starts[:-1]], 0.0)
    moment = sum_by_token(exp * shifted.clamp(min=LOWEST_LOG_PROBABILITY)) if entropy else None
    state = Fold(torch.where(single, 0.0, peak), sum_by_token(exp) + single, at_target, moment, None, None, None)
    unmasked = state.finish()
    fields = (None if values is None else values.masked_fill(~has_ids, 0) for values in unmasked)
    return TokenStatistics._make(fields)._replace(lse=torch.where(has_ids, unmasked.lse, math.inf))


def grad_slots(
    z: Tensor,
    slots: Slots,
    tokens: SlotGradients,
    transform: LogitTransform,
) -> Tensor:
    """-> dL/dx (S,) float32 of the logits before the transform.

    It is exactly 0 in slots without an id, and for tokens without a gradient.
    """
    token = slots.tokens.long()
    gradients = tokens.of_whole_rows().with_float32_lse()
    assert gradients.at_target is not None
    # A token without a gradient may have NaN in its logits, and 0 * NaN is NaN.
    needed = (slots.ids < slots.vocab) & gradients.nonzero()[token]
    z = torch.where(needed, z, 0.0)
    log_p = torch.where(needed, z - gradients.lse[token], 0.0)
    is_target = torch.arange(z.numel(), device=z.device) == slots.starts[token]
    grad_z = torch.where(is_target, gradients.at_target[token], -gradients.grad_logps[token] * log_p.exp())
    if gradients.grad_entropy is not None and gradients.entropy is not None:
        grad_z = grad_z - gradients.grad_entropy[token] * entropy_term(log_p, gradients.entropy[token])
    grad = times_derivative(grad_z[:, None], z[:, None], transform).squeeze(1)
    return torch.where(needed, grad, 0.0)
