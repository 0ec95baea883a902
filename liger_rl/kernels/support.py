"""Logits, softmax and gradients of listed vocabulary entries alone, in plain PyTorch: the CPU path and specification.

A token's logits are wanted at its target and at the ids of its row. Each of them has a slot. With z the transformed
logits of a token's slots and p = exp(z - lse), the formulas are those of `liger_rl.kernels.eager`, with the sums over
the slots of the token in place of the vocabulary.

Both gradients are sums over segments of slots: a token's slots for the hidden states, and the slots of one id, after a
stable sort by id, for the weight.
"""

import math
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.kernels.eager import LOWEST_LOG_PROBABILITY, times_derivative, transformed
from liger_rl.kernels.statistics import Fold, TokenGradients, TokenStatistics
from liger_rl.kernels.transform import LogitTransform

# What a row is. IGNORED: its token does not count. FULL: it lists nothing, which stands for the whole vocabulary.
# SINGLE: it has one id, so nothing is to be computed. SEVERAL: it has more.
IGNORED, FULL, SINGLE, SEVERAL = range(4)
# What `Slots.numbers` counts, in this order. Of the rest of the call: targets of tokens that the mask has, outside the
# vocabulary, and values of the mask that are neither 0 nor 1.
COUNTED = 9
(
    BAD_STARTS, BAD_ORDERS, BAD_ENDS, BAD_IDS, MISSING_TARGETS, FULL_ROWS, BAD_TARGETS, BAD_MASKS, LONG_ROWS,
) = range(COUNTED)  # fmt: skip
LONG_ROW = 512  # a token with more slots is LONG_ROWS: its sums may be split
PARTIAL_BYTES = 32 << 20  # of the sums of pieces, in `support_triton`
GATHERED = 1 << 21  # numbers of gathered rows at a time: 8 MiB in float32


class Rows(NamedTuple):
    """Which part of the vocabulary a weight's rows are."""

    number: int  # V'
    first: int  # vocabulary id of the first row
    vocab: int  # V of all shards together


class Slots(NamedTuple):
    """Where logits are wanted. Token t has the slots starts[t] to starts[t + 1]: its target, then its row's other ids.

    A slot's id is a row of the weight. It is V' = rows of the weight where the id belongs to another shard, and V' + 1
    where nothing is to be computed: a repeated id, a slot to spare because the row lists the target, a row that is not
    SEVERAL.
    """

    ids: Tensor  # (S,) int32 with S = P + N
    tokens: Tensor  # (S,) int32
    starts: Tensor  # (N + 1,) int64
    kinds: Tensor  # (N,) uint8, as listed above
    missing: Tensor  # (N,) bool: the token's row lists ids, but not its target
    numbers: Tensor  # (COUNTED,) int64, in the order above
    rows: int  # V' of the weight
    first: int  # vocabulary id of the weight's first row

    @property
    def full(self) -> Tensor:
        """(N,) bool: tokens that count and whose row is empty. The slots hold nothing for them."""
        return self.kinds == FULL

    @property
    def by_token(self) -> "Segments":
        return Segments(self.starts, self.tokens)


class Factors(NamedTuple):
    """What logits are made of: hidden @ weight.T + low_inputs @ low_weight.T + bias, in float32."""

    hidden: Tensor  # (N, H) any float dtype
    weight: Tensor  # (V', H) any float dtype
    bias: Tensor | None = None  # (V',)
    low_inputs: Tensor | None = None  # (N, r)
    low_weight: Tensor | None = None  # (V', r)


class Segments(NamedTuple):
    """Consecutive positions that are added up."""

    starts: Tensor  # (M + 1,) int64
    of_position: Tensor  # (S,) integers: the segment of each position; M or more belongs to none
    by_id: bool = False  # those of ids, in place of tokens'; most are empty
    all_short: bool = False  # none is longer than LONG_ROW; of tokens' segments alone

    @property
    def number(self) -> int:
        return self.starts.numel() - 1


class Pairs(NamedTuple):
    """The slots of each row of the weight side by side, in a stable order, and what each adds to the row's gradient."""

    segments: Segments
    coefficients: Tensor  # (S,) float32
    tokens: Tensor  # (S,) int32


class Base(NamedTuple):
    """What segment s begins with in place of 0: shares[s] rows[s // width]."""

    rows: Tensor  # (ceil(M / width) or more, K) float32
    shares: Tensor | None = None  # (M or more,) float32; None: 1 each
    width: int = 1

    def of(self, segments: int) -> Tensor:
        """(M, K) float32."""
        rows = self.rows.repeat_interleave(self.width, 0)[:segments]
        return rows if self.shares is None else rows * self.shares[:segments, None]


Ordered = tuple[Tensor, Tensor]  # `Slots.ids` from a stable sort, and their places before it, (S,) int32 and int64


def make_slots(
    token_ids: Tensor,  # (P,) int32 or int64
    offsets: Tensor,  # (N + 1,) the same dtype
    targets: Tensor,  # (N,) token ids of the whole vocabulary; one outside [0, vocab) counts nowhere
    mask: Tensor | None,  # (N,) bool or 0/1: tokens that count, None for all
    wanted: Tensor | None = None,  # (N,) or (B,), as the mask: which of them are wanted
    *,
    part: Rows,
    keep_single: bool,  # the one logit of a SINGLE row is wanted, too
    distinct: bool,  # no row lists an id twice, so nothing looks for repeated ids
) -> Slots:
    """Nothing here trusts the values of the support: what is wrong with them is in `numbers`."""
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

    def local(global_ids: Tensor, wanted: Tensor) -> Tensor:
        row = global_ids - first
        row = torch.where((row >= 0) & (row < rows), row, rows)
        return torch.where(wanted, row, rows + 1).to(torch.int32)

    # The target is first, and what stands after it in the row moves up.
    place = positions + token + (positions <= first_hit[token]).long()
    stored = inside & (positions != first_hit[token])
    ids[place[stored]] = local(listed, member)[stored]
    alone = (kinds == SINGLE) if keep_single else torch.zeros_like(missing)
    ids[starts[:-1]] = local(targets, (kinds == SEVERAL) | alone)
    numbers = [raw[:1] != 0, raw[1:] < raw[:-1], raw[-1:] != pairs, inside & ~known, missing, kinds == FULL]
    numbers += [marked & (targets >= vocab), improper, end - begin + 1 > LONG_ROW]
    return Slots(ids, tokens, starts, kinds, missing, torch.stack([each.sum() for each in numbers]), rows, first)


def no_slots(pairs: int, part: Rows, device: torch.device) -> Slots:
    """Those of no token."""

    def empty(dtype: torch.dtype) -> Tensor:
        return torch.empty(0, dtype=dtype, device=device)

    numbers = torch.zeros(COUNTED, dtype=torch.int64)
    numbers[BAD_ENDS] = pairs
    starts = torch.zeros(1, dtype=torch.int64, device=device)
    ids, kinds = empty(torch.int32), empty(torch.uint8)
    return Slots(ids, ids, starts, kinds, empty(torch.bool), numbers.to(device), part.number, part.first)


def repeated_ids(token_ids: Tensor, token: Tensor) -> Tensor:
    """(P,) bool: the same token lists an equal id earlier. `token` (P,) is ascending."""
    # Stable, so equal ids stay in the order of their tokens, and those of one token are neighbours.
    ordered, order = torch.sort(token_ids, stable=True)
    token = token[order]
    again = torch.zeros_like(order, dtype=torch.bool)
    again[order[1:]] = (ordered[1:] == ordered[:-1]) & (token[1:] == token[:-1])
    return again


def tokens_of(offsets: Tensor, pairs: int) -> Tensor:
    """(P,) int64, the row of each of so many ids, whatever the offsets (N + 1,) are."""
    positions = torch.arange(pairs, device=offsets.device)
    return torch.searchsorted(offsets.long()[1:].contiguous(), positions, right=True).clamp(max=offsets.numel() - 2)


def dots(factors: Factors, slots: Slots, transform: LogitTransform, temperatures: Tensor | None) -> Tensor:
    """-> z (S,) float32; undefined in slots without a row of the weight.

    Args:
        temperatures: (N,) float32, in place of the transform's, which is 1.
    """
    wanted = slots.ids < slots.rows
    row, token = torch.where(wanted, slots.ids, 0).long(), slots.tokens.long()
    x = torch.zeros(row.numel(), dtype=torch.float32, device=row.device)
    for left, right in ((factors.hidden, factors.weight), (factors.low_inputs, factors.low_weight)):
        if left is None or right is None or slots.rows == 0:
            continue
        for part in _parts(row.numel(), left.shape[1]):
            x[part] += (left[token[part]].float() * right[row[part]].float()).sum(1)
    bias = None if factors.bias is None or slots.rows == 0 else factors.bias[row]
    z = transformed(x, bias, transform)
    if temperatures is not None:
        z = z / temperatures[token]
    return z


def _parts(positions: int, columns: int) -> list[slice]:
    step = max(1, GATHERED // max(columns, 1))
    return [slice(start, start + step) for start in range(0, positions, step)]


def fold(
    z: Tensor, slots: Slots, targets: Tensor, *, entropy: bool, extras: Collection[str]
) -> tuple[Fold, Tensor | None]:
    """-> the fold of this shard's slots, and the ids of each row (N,) float32 where mean logits are wanted.

    A token whose row is not SEVERAL has log-probability 0 and entropy 0, from the shard that has its target.
    """
    n = slots.kinds.numel()
    state = Fold.start(n, z.device, entropy=entropy, extras=extras)
    token = slots.tokens.long()
    wanted = slots.ids < slots.rows
    z = torch.where(wanted, z, -math.inf)
    peak = state.peak.scatter_reduce(0, token, z, "amax")
    shifted = z - peak[token]
    exp = torch.where(wanted, shifted.exp(), 0.0)

    def total(of_slot: Tensor) -> Tensor:
        return torch.zeros(n, dtype=torch.float32, device=z.device).index_add_(0, token, of_slot)

    own = slots.ids[slots.starts[:-1]]
    here = own < slots.rows
    at_target = torch.where(here, z[slots.starts[:-1]], 0.0)
    local = targets - slots.first
    nothing = ((slots.kinds == SINGLE) & (own > slots.rows) & (local >= 0) & (local < slots.rows)).float()
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
        parts["sum_logits"] = total(torch.where(wanted, z, 0.0))
    if state.rival is not None:
        before = wanted & (slots.ids + slots.first < targets[token])
        parts["rival"] = state.rival.scatter_reduce(0, token, torch.where(before, z, -math.inf), "amax")
    counts = total((slots.ids <= slots.rows).float()) if "mean_logits" in extras else None
    return state._replace(**parts), counts


def finished(state: Fold, slots: Slots) -> TokenStatistics:
    """The statistics of a fold over all shards; logp, entropy and extras 0, and is_top1 False, for IGNORED and FULL."""
    found = state.finish()
    known = slots.kinds >= SINGLE
    parts = (None if part is None else part.masked_fill(~known, 0) for part in found)
    return TokenStatistics._make(parts)._replace(lse=torch.where(known, found.lse, math.inf))


def statistics(
    z: Tensor, slots: Slots, targets: Tensor, *, entropy: bool, extras: Collection[str]
) -> tuple[TokenStatistics, Tensor | None]:
    """`finished(fold(...))` of a vocabulary on one rank, and the ids of each row as `fold` gives them."""
    state, counts = fold(z, slots, targets, entropy=entropy, extras=extras)
    return finished(state, slots), counts


def slot_gradients(
    z: Tensor,
    slots: Slots,
    statistics: TokenStatistics,
    grads: tuple[Tensor, Tensor | None],  # (N,) float32, of log-probabilities and entropies
    transform: LogitTransform,
    temperatures: Tensor | None,
    by_id: Ordered | None = None,
) -> tuple[Tensor, Pairs | None]:
    """-> dL/dx (S,) float32 of the logits before the transform, and the same by id, where that order is given.

    Exactly 0 in slots without a row and of SINGLE rows.
    """
    tokens, token = TokenGradients.of(statistics, *grads), slots.tokens.long()
    wanted = slots.ids < slots.rows
    wanted = wanted & (slots.kinds == SEVERAL)[token]
    z = torch.where(wanted, z, 0.0)
    log_p = torch.where(wanted, z - tokens.lse[token], 0.0)
    p = log_p.exp()
    position = torch.arange(z.numel(), device=z.device)
    own = position == slots.starts[token]
    grad_z = torch.where(own, tokens.at_target[token], -tokens.grad_logps[token] * p)
    if tokens.grad_entropy is not None and tokens.entropy is not None:
        log_p = log_p.clamp(min=LOWEST_LOG_PROBABILITY)
        grad_z = grad_z - tokens.grad_entropy[token] * p * (log_p + tokens.entropy[token])
    if temperatures is not None:
        grad_z, z = grad_z / temperatures[token], z * temperatures[token]
    grad = torch.where(wanted, times_derivative(grad_z, z, transform), 0.0)
    if by_id is None:
        return grad, None
    ids, order = by_id
    starts = torch.searchsorted(ids, torch.arange(slots.rows + 1, dtype=ids.dtype, device=ids.device))
    return grad, Pairs(Segments(starts, ids, by_id=True), grad[order], slots.tokens[order])


def segment_sums(
    segments: Segments,
    coefficients: Tensor,  # (S,) float32
    indices: Tensor,  # (S,) integers: rows of the table, read where the coefficient is not 0
    table: Tensor,  # (T, K) any float dtype
    out: Tensor,  # (M, K) any float dtype
    *,
    add: bool = False,
    base: Base | None = None,
) -> None:
    """out[s] = sum of coefficients[i] table[indices[i]] over the positions i of segment s, in float32; with `add`, +=.

    A `base`, which does not go with `add`, is added to the sum before it is rounded.

    Without `add` 0 is written where a segment is empty; with it nothing is touched there.

    PyTorch adds in the order of positions on CPU. On CUDA, where this runs without Triton alone, its order is free.
    """
    in_place = out.dtype == torch.float32
    total = out if in_place else torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    if in_place and not add:
        total.zero_()
    if base is not None:
        total += base.of(segments.number)
    picked = ((coefficients != 0) & (segments.of_position < segments.number)).nonzero().squeeze(1)
    for part in _parts(picked.numel(), table.shape[1]):
        at = picked[part]
        rows = table[indices[at].long()].float() * coefficients[at, None]
        total.index_add_(0, segments.of_position[at].long(), rows)
    if not in_place:
        out.copy_(total + out if add else total)
