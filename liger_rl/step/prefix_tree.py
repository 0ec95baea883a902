"""Sequences that begin with the same tokens, laid out in one row that has these tokens once.

The row is a tree of runs of tokens in preorder: a run comes before the runs that continue it. Token q sees token k if

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

import numpy as np
import torch
from torch import Tensor

LEAST_SHARED = 16  # sequences with at most this many first tokens in common share none


class PrefixTree(NamedTuple):
    """The layout of some sequences in one row of n places, in CPU memory."""

    sequences: Tensor  # (n,) int64, the number of a sequence that has the token
    offsets: Tensor  # (n,) int64, the token's index in that sequence
    ends: Tensor  # (n,) int64, as above
    before: Tensor  # (n,) int64, the place of the token before in its sequence; -1: it is the first one
    follows: Tensor  # (n,) bool, whether the place before has the preceding token of the sequence
    places: list[Tensor]  # for each sequence, (length,) int64: the place at which each token is predicted

    @property
    def tokens(self) -> int:
        return self.ends.numel()


class SortedSequences(NamedTuple):
    """Sequences in lexicographic order."""

    order: list[int]  # numbers of the sequences
    shared: list[int]  # number of first tokens in common with the sequence before; 0 for the first

    def sizes(self, lengths: Sequence[int]) -> list[int]:
        """Number of places that each sequence adds to the row."""
        pairs = zip(self.order, self.shared, strict=True)
        return [lengths[s] - (common - 1 if common > LEAST_SHARED else 0) for s, common in pairs]


def sort_sequences(sequences: Sequence[Tensor], starts: Sequence[int]) -> SortedSequences:
    """An order in which sequences (CPU, int64) with equal first tokens are neighbours.

    `starts`: position of the first token of each. Sequences with different starts share no token.
    """
    tokens = [sequence.numpy() for sequence in sequences]
    # By the bytes of the tokens: any total order will do.
    keys = [(start, array.tobytes()) for start, array in zip(starts, tokens, strict=True)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    shared = [0] * min(len(order), 1)
    for before, after in pairwise(order):
        length = min(len(tokens[before]), len(tokens[after]))
        differ = tokens[before][:length] != tokens[after][:length]
        equal = int(differ.argmax()) if differ.any() else length
        shared.append(equal if starts[before] == starts[after] else 0)
    return SortedSequences(order, shared)


def build_prefix_tree(lengths: Sequence[int], ordered: SortedSequences, multiple: int = 1) -> PrefixTree:
    """The tree of all sequences. Each adds its tokens from the last one that it shares with the sequence before.

    The last token is repeated until `multiple` divides the number of places. A repeated token sees itself alone.
    """
    sizes = ordered.sizes(lengths)
    total = sum(sizes)
    ends, follows = np.full(total, total), np.ones(total, dtype=bool)
    empty = np.empty(0, dtype=np.int64)
    offsets, places, before = [empty], [empty] * len(lengths), np.arange(total) - 1
    path = predicted = empty  # of the sequence before: the places of its tokens, and where they are predicted
    start = 0
    for sequence, size in zip(ordered.order, sizes, strict=True):
        first = lengths[sequence] - size
        added = np.arange(start, start + size)
        offsets.append(np.arange(first, first + size))
        follows[start] = False
        before[start] = path[first - 1] if first else -1
        ends[path[first:]] = start
        path = np.concatenate([path[:first], added])
        # The last shared token is predicted at its place in the sequence before.
        places[sequence] = predicted = added if first == 0 else np.concatenate([predicted[: first + 1], added[1:]])
        start += size
    sequences, offset = np.repeat(np.array(ordered.order, dtype=np.int64), sizes), np.concatenate(offsets)
    padding = -total % multiple
    if padding:
        sequences, offset = (np.pad(x, (0, padding), mode="edge") for x in (sequences, offset))
        ends = np.concatenate([ends, np.arange(total, total + padding) + 1])
        before = np.concatenate([before, np.arange(total, total + padding) - 1])
        follows = np.pad(follows, (0, padding))
    return PrefixTree(
        torch.from_numpy(sequences),
        torch.from_numpy(offset),
        torch.from_numpy(ends),
        torch.from_numpy(before),
        torch.from_numpy(follows),
        [torch.from_numpy(array) for array in places],
    )
