"""Logits at listed ids, and sums over segments of slots, in PyTorch: the CPU path and the specification.

A token lists some ids, and each of these (token, id) pairs has a slot. Both gradients are sums over segments of slots.
For the hidden states a segment is the slots of one token. For the weight it is the slots of one id, after a stable sort
by id.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.kernels.reference import transform_logits
from liger_rl.kernels.transform import LogitTransform

# The kinds of rows. IGNORED: the token does not count. FULL: the row is empty, which stands for the whole vocabulary.
# SINGLE: it has one id, whose probability is 1, so nothing is computed. SEVERAL: it has more ids.
IGNORED, FULL, SINGLE, SEVERAL = range(4)
# The counts in `Slots.numbers`, in this order. BAD_TARGETS counts unmasked tokens with a target outside the vocabulary,
# BAD_MASKS values of the mask other than 0 and 1, LONG_ROWS tokens with more slots than `LIMITS.by_token.piece`.
COUNTERS = 8
(
    BAD_STARTS, BAD_ORDERS, BAD_ENDS, BAD_IDS, FULL_ROWS, BAD_TARGETS, BAD_MASKS, LONG_ROWS,
) = range(COUNTERS)  # fmt: skip
PARTIAL_BYTES = 32 << 20  # most memory of the sums of pieces in `segment_sums_triton`
PIECE_NUMBERS = 1 << 21  # numbers in the rows that are multiplied at a time, 8 MiB in float32


class Slots(NamedTuple):
    """The slots of N tokens. Token t has slots starts[t] to starts[t + 1]: its target, then the other ids of its row.

    A slot's id is V if nothing is computed: for a repeated id, for the slot left over if the row lists the target, and
    in rows other than SEVERAL.
    """

    ids: Tensor  # (S,) int32 in [0, V], with S = P + N for P listed ids
    tokens: Tensor  # (S,) int32
    starts: Tensor  # (N + 1,) int64
    kinds: Tensor  # (N,) uint8: IGNORED, FULL, SINGLE or SEVERAL
    missing: Tensor  # (N,) bool: the token's row lists ids, but not the target
    numbers: Tensor  # (COUNTERS,) int64: BAD_STARTS, BAD_ORDERS, ...
    vocab: int  # V

    @property
    def full(self) -> Tensor:
        """(N,) bool: tokens that count and whose row is empty. Their slots hold no id."""
        return self.kinds == FULL

    @property
    def by_token(self) -> "Segments":
        return Segments(self.starts, self.tokens)


class Factors(NamedTuple):
    """The factors of logits: hidden @ weight.T + bias, in float32."""

    hidden: Tensor  # (N, H) any float dtype
    weight: Tensor  # (V, H) any float dtype
    bias: Tensor | None = None  # (V,)


class Segments(NamedTuple):
    """M segments of S consecutive positions. The positions of a segment are added up."""

    starts: Tensor  # (M + 1,) int64
    of_position: Tensor  # (S,) integers: each position's segment; M or more for a position in no segment
    by_id: bool = False  # a segment is the slots of an id, not of a token; most are empty
    all_short: bool = False  # no segment is longer than `LIMITS.by_token.piece`; set only for tokens' segments

    @property
    def number(self) -> int:
        return self.starts.numel() - 1


class Entries(NamedTuple):
    """Entries of dL/dx at (token, id) pairs, token after token."""

    ids: Tensor  # (S,) int32; V or more for an entry without an id
    coefficients: Tensor  # (S,) float32, dL/dx
    tokens: Tensor  # (S,) int32


def order_by_id(entries: Entries, rows: int) -> tuple[Segments, Tensor, Tensor]:
    """The segments of ids in [0, rows), and coefficients and tokens of the entries in a stable order by id."""
    ids, order = torch.sort(entries.ids, stable=True)
    starts = torch.searchsorted(ids, torch.arange(rows + 1, dtype=ids.dtype, device=ids.device))
    return Segments(starts, ids, by_id=True), entries.coefficients[order], entries.tokens[order]


def dots(factors: Factors, slots: Slots, transform: LogitTransform) -> Tensor:
    """-> transformed logits z (S,) float32; undefined in slots without an id."""
    row, token = torch.where(slots.ids < slots.vocab, slots.ids, 0).long(), slots.tokens.long()
    x = torch.zeros(row.numel(), dtype=torch.float32, device=row.device)
    for piece in _pieces(row.numel(), factors.hidden.shape[1]):
        x[piece] += (factors.hidden[token[piece]].float() * factors.weight[row[piece]].float()).sum(1)
    bias = None if factors.bias is None else factors.bias[row, None]
    return transform_logits(x[:, None], bias, transform).squeeze(1)


def ones_of(hidden: Tensor) -> Tensor:
    """(N, 1) float32 ones: the table of a bias's gradient."""
    return torch.ones(1, 1, device=hidden.device).expand(hidden.shape[0], 1)


def _pieces(positions: int, columns: int) -> list[slice]:
    step = max(1, PIECE_NUMBERS // max(columns, 1))
    return [slice(start, start + step) for start in range(0, positions, step)]


def segment_sums(
    segments: Segments,
    coefficients: Tensor,  # (S,) float32
    indices: Tensor,  # (S,) integers: rows of the table, read where the coefficient is not 0
    table: Tensor,  # (T, K) any float dtype
    out: Tensor,  # (M, K) any float dtype
) -> None:
    """out[s] = sum of coefficients[i] table[indices[i]] over the positions i of segment s, in float32.

    The rows of empty segments become 0. On CPU, PyTorch adds in the order of positions. On CUDA, where this function
    runs only without Triton, the order is undefined.
    """
    wide = out.dtype == torch.float32
    total = out.zero_() if wide else torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    picked = ((coefficients != 0) & (segments.of_position < segments.number)).nonzero().squeeze(1)
    for piece in _pieces(picked.numel(), table.shape[1]):
        positions = picked[piece]
        rows = table[indices[positions].long()].float() * coefficients[positions, None]
        total.index_add_(0, segments.of_position[positions].long(), rows)
    if not wide:
        out.copy_(total)
