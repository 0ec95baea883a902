"""Softmax and its gradient over each token's listed ids, in PyTorch: the CPU path and the specification.

With z the transformed logits of a token's slots and p = exp(z - lse), the formulas are those of
`liger_rl.kernels.reference`, with sums over the token's slots in place of the vocabulary.
"""

import math
from collections.abc import Collection

import torch
from torch import Tensor

from liger_rl.head.interface import has_gradient
from liger_rl.kernels.reference import LOWEST_LOG_PROBABILITY, entropy_term, times_derivative
from liger_rl.kernels.segment_sums import (
    BAD_ENDS,
    COUNTED,
    FULL,
    IGNORED,
    LONG_ROW,
    SEVERAL,
    SINGLE,
    Rows,
    Slots,
)
from liger_rl.kernels.segment_sums import dots as dots
from liger_rl.kernels.segment_sums import order_by_id as order_by_id
from liger_rl.kernels.segment_sums import segment_sums as segment_sums
from liger_rl.kernels.statistics import Fold, TokenGradients, TokenStatistics
from liger_rl.kernels.transform import LogitTransform


def make_slots(
    token_ids: Tensor,  # (P,) int32 or int64
    offsets: Tensor,  # (N + 1,) the same dtype
    targets: Tensor,  # (N,) token ids of the whole vocabulary; a token with a target outside [0, vocab) does not count
    mask: Tensor | None,  # (N,) bool or 0/1: tokens that count; None for all
    wanted: Tensor | None = None,  # (N,) or (B,) bool or 0/1: tokens whose logits are needed; None for all that count
    *,
    part: Rows,
    keep_single: bool,  # compute the one logit of a SINGLE row, too
    distinct: bool,  # no row lists an id twice, so repeated ids need no search
) -> Slots:
    """The slots of a support with any values. `Slots.numbers` counts the values that are wrong."""
    (rows, first, vocab), n, pairs, device = part, targets.numel(), token_ids.numel(), targets.device
    if n == 0:
        return no_slots(pairs, part, device)
    ids = torch.full((n + pairs,), rows + 1, dtype=torch.int32, device=device)
    raw, positions, all_tokens = offsets.long(), torch.arange(pairs, device=device), torch.arange(n, device=device)
    begin = raw[:-1].clamp(0, pairs)
    end = torch.maximum(raw[1:], begin).clamp(max=pairs)
    starts = torch.cat([begin + all_tokens, end[-1:] + n])
    slots = torch.arange(n + pairs, device=device)
    tokens = torch.searchsorted(starts[1:].contiguous(), slots, right=True).clamp(max=n - 1).to(torch.int32)
    token = tokens_of(offsets, pairs)
    targets, listed = targets.long(), token_ids.long()
    marked = targets >= 0 if mask is None else (targets >= 0) & (mask != 0)
    counts = marked & (targets < vocab)
    if wanted is not None:
        counts = counts & (wanted.reshape(-1, 1) != 0).expand(-1, n // wanted.numel()).reshape(-1)
    improper = torch.zeros_like(counts) if mask is None else (mask != 0) & (mask != 1)
    inside = (positions >= begin[token]) & (positions < end[token])
    known = inside & (listed >= 0) & (listed < vocab)
    hit = known & (listed == targets[token])
    first_hit = torch.full((n,), pairs, device=device).scatter_reduce(
        0, token, torch.where(hit, positions, pairs), "amin"
    )
    others = torch.zeros(n, dtype=torch.int64, device=device).index_add_(0, token, (known & ~hit).long())
    kinds = torch.where(others > 0, SEVERAL, SINGLE)
    kinds = torch.where(counts, torch.where(end > begin, kinds, FULL), IGNORED).to(torch.uint8)
    missing = counts & (end > begin) & (first_hit == pairs)
    member = known & ~hit & (kinds == SEVERAL)[token]
    if not distinct:
        member &= ~repeated_ids(token_ids, token)

    def local(global_ids: Tensor, needed: Tensor) -> Tensor:
        row = global_ids - first
        row = torch.where((row >= 0) & (row < rows), row, rows)
        return torch.where(needed, row, rows + 1).to(torch.int32)

    # The target has the token's first slot, so ids that precede it in the row come one slot later.
    place = positions + token + (positions <= first_hit[token]).long()
    stored = inside & (positions != first_hit[token])
    ids[place[stored]] = local(listed, member)[stored]
    alone = (kinds == SINGLE) if keep_single else torch.zeros_like(missing)
    ids[starts[:-1]] = local(targets, (kinds == SEVERAL) | alone)
    numbers = [raw[:1] != 0, raw[1:] < raw[:-1], raw[-1:] != pairs, inside & ~known, kinds == FULL]
    numbers += [marked & (targets >= vocab), improper, end - begin + 1 > LONG_ROW]
    return Slots(ids, tokens, starts, kinds, missing, torch.stack([each.sum() for each in numbers]), rows, first)


def no_slots(pairs: int, part: Rows, device: torch.device) -> Slots:
    """The slots of no tokens. `numbers` says that `pairs` ids have no row."""

    def empty(dtype: torch.dtype) -> Tensor:
        return torch.empty(0, dtype=dtype, device=device)

    numbers = torch.zeros(COUNTED, dtype=torch.int64)
    numbers[BAD_ENDS] = pairs
    starts = torch.zeros(1, dtype=torch.int64, device=device)
    ids, kinds = empty(torch.int32), empty(torch.uint8)
    return Slots(ids, ids, starts, kinds, empty(torch.bool), numbers.to(device), part.number, part.first)


def repeated_ids(token_ids: Tensor, token: Tensor) -> Tensor:
    """(P,) bool: whether the same token lists an equal id earlier. `token` (P,) is ascending."""
    # The sort is stable: equal ids stay in the order of their tokens, so equal ids of one token are neighbours.
    ordered, order = torch.sort(token_ids, stable=True)
    token = token[order]
    again = torch.zeros_like(order, dtype=torch.bool)
    again[order[1:]] = (ordered[1:] == ordered[:-1]) & (token[1:] == token[:-1])
    return again


def tokens_of(offsets: Tensor, pairs: int) -> Tensor:
    """(P,) int64: the row of each of `pairs` ids, in [0, N) for any values of the offsets (N + 1,)."""
    positions = torch.arange(pairs, device=offsets.device)
    return torch.searchsorted(offsets.long()[1:].contiguous(), positions, right=True).clamp(max=offsets.numel() - 2)


def fold(
    z: Tensor, slots: Slots, targets: Tensor, *, entropy: bool, extras: Collection[str]
) -> tuple[Fold, Tensor | None]:
    """-> the fold of this shard's slots, and the number of ids of each row (N,) float32 if mean logits are wanted.

    A token with a SINGLE row gets log-probability 0 and entropy 0, from the shard that has its target.
    """
    n = slots.kinds.numel()
    state = Fold.start(n, z.device, entropy=entropy, extras=extras)
    token = slots.tokens.long()
    has_row = slots.ids < slots.rows
    z = torch.where(has_row, z, -math.inf)
    peak = state.peak.scatter_reduce(0, token, z, "amax")
    shifted = z - peak[token]
    exp = torch.where(has_row, shifted.exp(), 0.0)

    def total(of_slot: Tensor) -> Tensor:
        return torch.zeros(n, dtype=torch.float32, device=z.device).index_add_(0, token, of_slot)

    target_row = slots.ids[slots.starts[:-1]]
    has_target = target_row < slots.rows
    at_target = torch.where(has_target, z[slots.starts[:-1]], 0.0)
    local = targets - slots.first
    nothing = ((slots.kinds == SINGLE) & (target_row > slots.rows) & (local >= 0) & (local < slots.rows)).float()
    parts: dict[str, Tensor] = {
        "peak": torch.where(nothing != 0, 0.0, peak),
        "sum_exp": total(exp) + nothing,
        "target": at_target,
    }
    if state.moment is not None:
        parts["moment"] = total(exp * shifted.clamp(min=LOWEST_LOG_PROBABILITY))
    if state.sum_sq_exp is not None:
        parts["sum_sq_exp"] = total(exp.square()) + nothing
    if state.sum_logits is not None:
        parts["sum_logits"] = total(torch.where(has_row, z, 0.0))
    if state.rival is not None:
        before = has_row & (slots.ids + slots.first < targets[token])
        parts["rival"] = state.rival.scatter_reduce(0, token, torch.where(before, z, -math.inf), "amax")
    counts = total((slots.ids <= slots.rows).float()) if "mean_logits" in extras else None
    return state._replace(**parts), counts


def finished(state: Fold, slots: Slots) -> TokenStatistics:
    """The statistics of a fold over all shards. IGNORED and FULL rows get 0, is_top1 False and lse inf."""
    unmasked = state.finish()
    known = slots.kinds >= SINGLE
    parts = (None if values is None else values.masked_fill(~known, 0) for values in unmasked)
    return TokenStatistics._make(parts)._replace(lse=torch.where(known, unmasked.lse, math.inf))


def statistics(
    z: Tensor, slots: Slots, targets: Tensor, *, entropy: bool, extras: Collection[str]
) -> tuple[TokenStatistics, Tensor | None]:
    """`finished(fold(...))` of a vocabulary on one rank, and the number of ids of each row, as from `fold`."""
    state, counts = fold(z, slots, targets, entropy=entropy, extras=extras)
    return finished(state, slots), counts


def slot_gradients(
    z: Tensor,
    slots: Slots,
    statistics: TokenStatistics,
    tokens: TokenGradients,  # of `support.tokens_of`; `uniform` is dL/dmean_logits over the number of ids of the row
    transform: LogitTransform,
) -> Tensor:
    """-> dL/dx (S,) float32 of the logits before the transform.

    It is exactly 0 in slots without a row of the weight, and for tokens without a gradient. The logit of a SINGLE row
    has a gradient of mean_logits alone.
    """
    token, uniform = slots.tokens.long(), tokens.uniform
    tokens = TokenGradients.of(statistics, tokens.grad_logps, tokens.grad_entropy)
    tokens = tokens._replace(uniform=uniform).with_float32_lse()
    with_gradient = (slots.kinds == SEVERAL) if uniform is None else (slots.kinds >= SINGLE)
    # A token without a gradient may have NaN in its logits, and 0 * NaN is NaN.
    needed = (slots.ids < slots.rows) & (with_gradient & has_gradient(tokens))[token]
    z = torch.where(needed, z, 0.0)
    log_p = torch.where(needed, z - tokens.lse[token], 0.0)
    is_target = torch.arange(z.numel(), device=z.device) == slots.starts[token]
    grad_z = torch.where(is_target, tokens.at_target[token], -tokens.grad_logps[token] * log_p.exp())
    if tokens.grad_entropy is not None and tokens.entropy is not None:
        grad_z = grad_z - tokens.grad_entropy[token] * entropy_term(log_p, tokens.entropy[token])
    grad_z = grad_z if uniform is None else grad_z + uniform[token]
    grad = times_derivative(grad_z[:, None], z[:, None], transform).squeeze(1)
    return torch.where(needed, grad, 0.0)
