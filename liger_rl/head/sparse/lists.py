"""From bounds of a gradient's parts to sums over each token's ids, for the sparse backward.

The Triton kernels are imported only when a backward has bounds, that is, if the forward's product has an epilogue.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_rl.head.dense.two_pass import unwritten
from liger_rl.head.host_answer import HostAnswer
from liger_rl.head.record import Gradients, Needs
from liger_rl.kernels import gemm
from liger_rl.kernels.limits import LIMITS
from liger_rl.kernels.segment_sums import Base, Entries, Segments, ones_of
from liger_rl.kernels.statistics import BLOCK_TOKENS, Tail
from liger_rl.kernels.transform import HeadFactors

BYTES_PER_ENTRY = 3  # of a chosen part


def dense_share(hidden_size: int) -> float:
    """Mean share of chosen parts from which on the exact backward is no slower than lists: 0.55 H / (H + 768).

    One H200, N = 8192, V = 128256, between 0.6 and 1.2 nats: lists take 1.3 ms and 23 ms times the share at H = 1024,
    where the exact backward takes 9.6 ms; 1 ms and 70 ms times the share at H = 4096, where it takes 38 ms.
    """
    return LIMITS.dense_share * hidden_size / (hidden_size + 768)


class Choice(NamedTuple):
    """The chosen parts, as the device has them. The host does not know their number yet."""

    chosen: Any  # `bounds_triton.ChosenParts`
    counted: HostAnswer
    most: float  # `PartCounts.most`

    @classmethod
    def of(cls, parts: tuple[Any, Tensor], hidden_size: int) -> "Choice":
        """From the result of `bounds_triton.choose_parts`, without a host sync."""
        chosen, counted = parts
        return cls(chosen, HostAnswer(counted), dense_share(hidden_size))


class PartCounts(NamedTuple):
    """Numbers of chosen parts, on the host."""

    selected: int  # number of tokens with a gradient
    ends: list[int]  # number of parts of the first BLOCK_TOKENS tokens, of the first 2 BLOCK_TOKENS, ..., of all
    n: int  # number of tokens; a token without a gradient keeps no part
    tiles: int
    most: float  # largest share of chosen tiles with which lists of ids are faster than the exact backward

    @property
    def share(self) -> float:
        return self.ends[-1] / max(self.selected * self.tiles, 1)

    @property
    def pays(self) -> bool:
        """Whether lists of ids are faster than the exact backward."""
        return self.selected > 0 and self.share <= self.most

    def spans(self, most: int) -> list[tuple[int, int, int, int]]:
        """(first token, last token + 1, first part, number of parts) of runs of token blocks.

        A run has at most `most` parts, or is one block of BLOCK_TOKENS tokens.
        """
        spans, first, base = [], 0, 0
        for block, end in enumerate(self.ends):
            last = min((block + 1) * BLOCK_TOKENS, self.n)
            following = self.ends[min(block + 1, len(self.ends) - 1)]
            if last == self.n or following - base > most:
                spans.append((first, last, base, end - base))
                first, base = last, end
        return spans


def plan_parts(choice: Choice) -> PartCounts:
    """Wait for the number of chosen parts: the backward's first host sync."""
    selected, *ends = choice.counted.wait().tolist()
    tiles, n = choice.chosen.rank.shape
    return PartCounts(selected, ends, n, tiles, choice.most)


class ListedHead(NamedTuple):
    """The rows that sums over lists of ids read, and the dtypes of the sums."""

    # Of (n, H) and (V or more, H) in the dtype of products. The gradient of rows of the weight from `vocab` on is 0.
    factors: HeadFactors
    # (n,) int64, the row of hidden that products read for each token. A token without a gradient may have NaN in its
    # row, so products read the row of a token with one. None if `hidden` has been gathered that way already.
    finite: Tensor | None
    vocab: int
    dtypes: tuple[torch.dtype, torch.dtype]  # of the gradients of hidden and weight


def list_gradients(
    head: ListedHead,
    choice: Choice,
    tail: Tail,
    make_parts: Callable[..., None],  # (chosen, lists of tiles, span, out): writes the chosen parts of a span of tokens
    targets: tuple[Tensor, Tensor],  # (n,) ids and dL/dx, always listed
    needs: Needs,
) -> tuple[Gradients | None, PartCounts]:
    """-> gradients of hidden (n, H), weight and bias; None if the exact backward is faster. And the numbers of parts.

    The lists are written before the host knows their length. Entries past the end of their memory are not written, and
    then the exact backward runs. Two host syncs.
    """
    from liger_rl.head.sparse import bounds_triton, listing_triton
    from liger_rl.kernels import segment_sums_triton, tile_lists_triton

    (hidden, weight, bias, transform), finite, vocab, (hidden_dtype, weight_dtype) = head
    chosen, device, width = choice.chosen, weight.device, tail.entries.numel() // tail.squares.numel()
    tiles, n = chosen.rank.shape
    most_ids = max(vocab // 128, LIMITS.mean_ids)
    starts = torch.empty(n + 1, dtype=torch.int64, device=device)

    def write(spans: list[tuple[int, int, int, int]], counts: int) -> tuple[Entries, HostAnswer]:
        entries = Entries.empty(min(int(LIMITS.listed_share * width * counts), most_ids * n) + n, device)
        parts = listing_triton.Parts.empty(max(span[-1] for span in spans), width, device)
        before = torch.zeros(counts + 1, dtype=torch.int64, device=device)
        for span in (tile_lists_triton.Span(*span) for span in spans):
            tile_lists = tile_lists_triton.list_tiles(chosen, span)
            make_parts(chosen, tile_lists, span, parts)
            listing_triton.write_lists(
                parts, chosen, tile_lists, tail, targets, span, transform, before, entries, starts
            )
        return entries, HostAnswer(before[-1:])

    most = LIMITS.parts_bytes // (BYTES_PER_ENTRY * width)
    room = max(min(most, int(choice.most * n * tiles)), 1)
    entries, counted = write([(0, n, 0, room)], room)
    counts = plan_parts(choice)
    if not counts.pays:
        return None, counts
    if counts.ends[-1] > room:
        del entries
        entries, counted = write(counts.spans(most), counts.ends[-1])
    # The device runs these products while the host waits for the length of the lists.
    hidden_base = weight_base = None
    if needs[0]:
        hidden_base = Base(gemm.matmul(chosen.rest, bounds_triton.tail_rows(tail, weight[:vocab], hidden.dtype)))
    if needs[1]:
        finite_hidden = hidden if finite is None or counts.selected == n else hidden[finite]
        weight_base = Base(gemm.matmul(chosen.rest.T, finite_hidden), tail.entries, width)
        del finite_hidden
    listed = int(counted.wait()) + n
    if listed > entries.ids.numel():
        return None, counts
    entries = Entries._make(values[:listed] for values in entries)

    grad_hidden = grad_weight = grad_bias = None
    if needs[0]:
        grad_hidden = torch.empty(hidden.shape, dtype=hidden_dtype, device=device)
        by_token = Segments(starts, entries.tokens)
        segment_sums_triton.segment_sums(
            by_token, entries.coefficients, entries.ids, weight, grad_hidden, base=hidden_base
        )
        del hidden_base  # before dW is allocated
    if needs[1] or (bias is not None and needs[2]):
        by_id = segment_sums_triton.order_by_id(entries, vocab)
        if needs[1]:
            grad_weight = unwritten(weight, vocab, weight_dtype)
            segment_sums_triton.segment_sums(*by_id, hidden, grad_weight[:vocab], base=weight_base)
        if bias is not None and needs[2]:
            grad_bias = unwritten(bias, vocab)
            base = Base(gemm.column_sums(chosen.rest)[:, None], tail.entries, width)
            segment_sums_triton.segment_sums(*by_id, ones_of(hidden), grad_bias[:vocab, None], base=base)
    return Gradients(grad_hidden, grad_weight, grad_bias), counts
