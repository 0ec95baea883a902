"""Logits at listed ids, and sums over segments of them, in PyTorch: the CPU path and the specification.

A token's logits are wanted at some ids. Each of them has a slot. Both gradients are sums over segments of slots: the
slots of a token for the hidden states, and the slots of one id, after a stable sort by id, for the weight.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.kernels.reference import transformed
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
PARTIAL_BYTES = 32 << 20  # of the sums of pieces, in `segments_triton`
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
