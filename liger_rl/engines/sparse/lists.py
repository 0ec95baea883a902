"""From bounds of a gradient's parts to sums over each token's own ids: what the sparse backwards of one head and of two
share.

The kernels are Triton's, imported when there are bounds: where the forward's product has an epilogue.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_rl.call.host_answer import HostAnswer
from liger_rl.call.tokens import TokenSelection
from liger_rl.engines.dense.two_pass import unwritten
from liger_rl.engines.interface import Gradients, Needs
from liger_rl.kernels import gemm
from liger_rl.kernels.segments import Base, Segments
from liger_rl.kernels.statistics import BLOCK_TOKENS, PartBounds, Tail
from liger_rl.kernels.transform import LogitTransform

PARTS_BYTES = 192 << 20  # of kept parts at a time, but at least those of BLOCK_TOKENS tokens
BYTES_PER_ID = 52  # of a list, with what sorts it
ROOM_FOR_IDS = 1 / 64  # of the entries of kept parts; a 250th are listed at 0.5 nats, a 50th at 2


def dense_share(hidden_size: int) -> float:
    """Of a token's tiles, in the mean: from this share on the exact backward is no slower.

    That takes 2.7 ns for a token's tile at H = 1024 and 9.1 at 4096. A kept part takes 1.9 to be read and listed,
    whatever H is, and its products 2.7 and 7.9. (One H200, 0.9 nats; lists grow with entropy.)
    """
    return 0.5 * hidden_size / (hidden_size + 1024)


def most_ids(vocab: int) -> int:
    """In the mean, of lists that are summed. Longer ones, which are rare, give way to the exact backward."""
    return max(vocab // 128, 256)


class Choice(NamedTuple):
    """Parts that are kept, chosen on the device. The host knows nothing of them yet."""

    chosen: Any  # `bounds_triton.ChosenParts`
    counted: HostAnswer
    most: float  # `Kept.most`


class Kept(NamedTuple):
    """How many parts tokens keep, on the host."""

    wanted: int  # tokens with a gradient
    ends: list[int]  # parts of the first BLOCK_TOKENS tokens, of twice as many, ..., of all
    n: int  # tokens, with those without a gradient, which keep no part
    tiles: int
    most: float  # share of the tiles with which lists of ids are still faster than the exact backward

    @property
    def share(self) -> float:
        return self.ends[-1] / max(self.wanted * self.tiles, 1)

    @property
    def pays(self) -> bool:
        """Whether lists of ids are faster than the exact backward."""
        return self.wanted > 0 and self.share <= self.most

    def spans(self, most: int) -> list[tuple[int, int, int, int]]:
        """(first token, last, first part, parts) of runs with at most so many parts, one block of tokens at least."""
        spans, first, base = [], 0, 0
        for block, end in enumerate(self.ends):
            last = min((block + 1) * BLOCK_TOKENS, self.n)
            following = self.ends[min(block + 1, len(self.ends) - 1)]
            if last == self.n or following - base > most:
                spans.append((first, last, base, end - base))
                first, base = last, end
        return spans


def choose_parts(
    bounds: PartBounds,
    tail: Tail,
    tolerance: float,
    transform: LogitTransform,
    dtype: torch.dtype,  # of products
    hidden_size: int,
    *,
    signed: bool,  # a part's entries may have both signs
) -> Choice:
    """Choose on the device alone."""
    from liger_rl.engines.sparse import bounds_triton

    chosen, counted = bounds_triton.choose_parts(bounds, tail, tolerance, transform, dtype, signed=signed)
    return Choice(chosen, HostAnswer(counted), dense_share(hidden_size))


def plan_parts(choice: Choice) -> Kept:
    """Tell the host how many parts there are: the backward's first host sync."""
    wanted, *ends = choice.counted.wait().tolist()
    tiles, n = choice.chosen.rank.shape
    return Kept(wanted, ends, n, tiles, choice.most)


class ListedHead(NamedTuple):
    """What lists of ids are sums of, and where their sums go."""

    hidden: Tensor  # (n, H) in the dtype of products
    # (n,) the rows of hidden whose tokens have a gradient; another's, which may hold NaN, is replaced by one of these.
    # None where it has been.
    finite: Tensor | None
    weight: Tensor  # (V or more, H) in it, too; the gradient of rows from `vocab` on is 0
    bias: Tensor | None
    vocab: int
    transform: LogitTransform
    dtypes: tuple[torch.dtype, torch.dtype]  # of the gradients of hidden and weight


def readable(live: TokenSelection, drawn: Any) -> tuple[TokenSelection, Tensor | None]:
    """-> which hidden states to gather, and `ListedHead.finite` of them; `drawn` is `bounds_triton.Drawn`."""
    if live.index is None:
        return live, drawn.sources
    return TokenSelection(live.total, index=drawn.sources), None


def list_gradients(
    head: ListedHead,
    choice: Choice,
    tail: Tail,
    make_parts: Callable[..., None],  # (chosen, lists of tiles, span, out): writes the kept parts of a span of tokens
    targets: tuple[Tensor, Tensor] | None,  # (n,) ids and dL/dx that are listed in any case; None where parts have them
    needs: Needs,
) -> tuple[Gradients | None, Kept]:
    """-> gradients of all n tokens, rows (n, H), and of weight and bias; None where the exact backward is faster.

    The lists are written before the host knows how long they are, as far as there is room. Two host syncs.
    """
    from liger_rl.engines.sparse import bounds_triton, listing_triton
    from liger_rl.kernels import segments_triton

    hidden, finite, weight, bias, vocab, transform, (hidden_dtype, weight_dtype) = head
    chosen, device, width = choice.chosen, weight.device, tail.entries.numel() // tail.squares.numel()
    (tiles, n), of_targets = chosen.rank.shape, int(targets is not None)
    starts = torch.empty(n + 1, dtype=torch.int64, device=device)

    def write(spans: list[tuple[int, int, int, int]], kept: int) -> tuple[Any, HostAnswer]:
        room = min(int(ROOM_FOR_IDS * width * kept), most_ids(vocab) * n) + n
        limits, found = listing_triton.Limits.empty(n, kept, device), listing_triton.Lists.empty(room, device)
        parts = torch.empty(max(span[-1] for span in spans), width, dtype=torch.float16, device=device)
        for span in (listing_triton.Span(*span) for span in spans):
            of_tiles = listing_triton.list_tiles(chosen, span)
            make_parts(chosen, of_tiles, span, parts)
            listing_triton.find_limits(parts, chosen, span, limits)
            listing_triton.write_lists(parts, chosen, of_tiles, tail, limits, targets, span, transform, found, starts)
        return found, HostAnswer(limits.before[-1:])

    most = PARTS_BYTES // (2 * width)
    room = max(min(most, int(choice.most * n * tiles)), 1)
    found, counted = write([(0, n, 0, room)], room)
    kept = plan_parts(choice)
    if not kept.pays:
        return None, kept
    if kept.ends[-1] > room:
        del found
        found, counted = write(kept.spans(most), kept.ends[-1])
    rest = chosen.rest
    # Work for the device while the host waits.
    of_hidden = of_weight = None
    if needs[0]:
        of_hidden = Base(gemm.matmul(rest, bounds_triton.tail_rows(tail, weight[:vocab], hidden.dtype)))
    if needs[1]:
        of_finite = hidden if finite is None or kept.wanted == n else hidden[finite]
        of_weight = Base(gemm.matmul(rest.T, of_finite), tail.entries, width)
        del of_finite
    listed = int(counted.wait()) + of_targets * n
    if listed > found.ids.numel():
        return None, kept
    found = listing_triton.Lists._make(part[:listed] for part in found)

    grad_hidden = grad_weight = grad_bias = None
    if needs[1] or (bias is not None and needs[2]):
        by_id, coefficients, tokens = listing_triton.order_by_id(found, vocab)
    if needs[0]:
        grad_hidden = torch.empty(hidden.shape, dtype=hidden_dtype, device=device)
        by_token = Segments(starts, found.tokens)
        segments_triton.segment_sums(by_token, found.coefficients, found.ids, weight, grad_hidden, base=of_hidden)
    if needs[1]:
        grad_weight = unwritten(weight, vocab, weight_dtype)
        segments_triton.segment_sums(by_id, coefficients, tokens, hidden, grad_weight[:vocab], base=of_weight)
    if bias is not None and needs[2]:
        grad_bias = unwritten(bias, vocab)
        ones = torch.ones(1, 1, device=device).expand(n, 1)
        base = Base(gemm.column_sums(rest)[:, None], tail.entries, width)
        segments_triton.segment_sums(by_id, coefficients, tokens, ones, grad_bias[:vocab, None], base=base)
    return Gradients(grad_hidden, grad_weight, grad_bias), kept
