"""Sequences that begin with the same tokens, laid out in one row in which these tokens stand once.

The row is a tree of runs of tokens in preorder: a run stands before the runs that continue it. Token q sees token k if

    k <= q < ends[k]

where ends[k] is the place behind the last run that continues k's. For a prompt and its completions:

    place   0 1 2 3   4 5 6   7 8        the prompt is p q r s t, the completions are t a b and t c
    token   p q r s   t a b   t c
    ends    9 9 9 9   7 7 7   9 9

The last token of a shared run moves into each run that continues it. So the token before t is s for the first
completion alone, and every place predicts at most one token: no place has several targets.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

LEAST_SHARED = 16  # first tokens in common; with fewer, sequences share none


class PrefixTree(NamedTuple):
    """The layout of some sequences in one row of n places, in CPU memory."""

    sequences: Tensor  # (n,) int64, a sequence that has the token
    offsets: Tensor  # (n,) int64, its place in that sequence
    ends: Tensor  # (n,) int64, as above
    follows: Tensor  # (n,) bool, the token at the place before is the one before it in its sequence
    places: list[Tensor]  # of each sequence, (length,) int64: where each of its tokens is predicted

    @property
    def tokens(self) -> int:
        return self.ends.numel()


class Ordered(NamedTuple):
    """Sequences in lexicographic order."""

    order: list[int]  # their numbers
    shared: list[int]  # number of first tokens that each has in common with the one before it; 0 for the first

    def sizes(self, lengths: Sequence[int]) -> list[int]:
        """Places that each sequence adds to a row with the one before it."""
        pairs = zip(self.order, self.shared, strict=True)
        return [lengths[s] - (common - 1 if common > LEAST_SHARED else 0) for s, common in pairs]


def ordered(sequences: Sequence[Tensor], starts: Sequence[int]) -> Ordered:
    """The order in which sequences (CPU, int64) with equal first tokens are neighbours.

    `starts`: position of each one's first token. Sequences with different ones share no token.
    """
    lists = [tokens.tolist() for tokens in sequences]
    order = sorted(range(len(lists)), key=lambda s: (starts[s], lists[s]))
    shared = [0] * min(len(order), 1)
    for before, after in pairwise(order):
        length = min(len(lists[before]), len(lists[after]))
        differ = sequences[before][:length] != sequences[after][:length]
        equal = int(differ.byte().argmax()) if bool(differ.any()) else length
        shared.append(equal if starts[before] == starts[after] else 0)
    return Ordered(order, shared)


def prefix_tree(lengths: Sequence[int], known: Ordered) -> PrefixTree:
    """The tree of all sequences, by their order."""
    runs: list[tuple[int, int, int, int]] = []  # sequence, first offset, offset behind the last, end
    firsts: list[bool] = []  # whether the run's first token follows the place before
    places: list[list[Tensor]] = [[] for _ in lengths]
    size = 0

    def add(members: list[int], first: int, stop: int, *, follows: bool, entry: int | None) -> int:
        """A run of the first member's tokens, which all have. -> where the members' token `first` is predicted."""
        nonlocal size
        at = torch.arange(size, size + stop - first)
        entry = size if entry is None else entry
        at[0] = entry
        for member in members:
            places[member].append(at)
        runs.append((members[0], first, stop, 0))
        firsts.append(follows)
        size += stop - first
        return entry

    def lay(low: int, high: int, base: int, follows: bool, entry: int | None) -> int:
        """The subtree of the sequences order[low:high], which agree up to `base`, without its first `base` tokens.

        -> where the token `base` is predicted: at `entry`, or by the first run.
        """
        run = len(runs)
        if high - low == 1:
            sequence = known.order[low]
            entry = add([sequence], base, lengths[sequence], follows=follows, entry=entry)
            runs[run] = (*runs[run][:3], size)
            return entry
        common = min(known.shared[low + 1 : high])
        shares = common > LEAST_SHARED and common - 1 > base
        inner: int | None = None
        if shares:
            entry = add(known.order[low:high], base, common - 1, follows=follows, entry=entry)
            base, follows = common - 1, True
        else:
            inner = entry
        starts = [low, *(n for n in range(low + 1, high) if known.shared[n] == common), high]
        for first, stop in pairwise(starts):
            inner = lay(first, stop, base, follows, inner if base else None)
            follows = False
        if shares:
            runs[run] = (*runs[run][:3], size)
            assert entry is not None
            return entry
        assert inner is not None
        return inner

    if lengths:
        lay(0, len(known.order), 0, False, None)
    counts = torch.tensor([stop - first for _, first, stop, _ in runs], dtype=torch.int64)
    behind = counts.cumsum(0)

    def spread(values: list[int]) -> Tensor:
        return torch.repeat_interleave(torch.tensor(values, dtype=torch.int64), counts)

    place = torch.arange(size)
    offsets = place - torch.repeat_interleave(behind - counts, counts) + spread([first for _, first, _, _ in runs])
    follows = torch.ones(size, dtype=torch.bool)
    follows[behind - counts] = torch.tensor(firsts, dtype=torch.bool)
    return PrefixTree(
        spread([sequence for sequence, _, _, _ in runs]),
        offsets,
        spread([end for _, _, _, end in runs]),
        follows,
        [torch.cat(parts) for parts in places],
    )
