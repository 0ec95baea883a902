"""The rows and micro-batches in which a model runs the sequences of a batch.

`lay_out` is pure: it reads no device and no model, and gives the same layout on every rank for the same sequences.
Sequences that begin with the same tokens become a tree in one row (`prefix_tree`) if that saves a tenth of the tokens.
Otherwise they are padded. Micro-batches have sequences with a common prefix, or of similar length.
"""

import itertools
import math
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from liger_rl.step.attention import BLOCK
from liger_rl.step.facts import Facts
from liger_rl.step.prefix_tree import LEAST_SHARED, PrefixTree, SortedSequences, build_prefix_tree, sort_sequences
from liger_rl.step.reason import Reason
from liger_rl.step.sequences import Sequences

MAX_TREE_FRACTION = 0.9  # trees run if they have at most this fraction of the tokens of padded rows
# Trees of fewer tokens, and rows of more, do not run: a small step on a GPU takes as long as its launches, and a dense
# mask has all pairs of tokens.
MIN_TREE_TOKENS, MAX_DENSE_TOKENS = {"cuda": 1024}, {"cpu": 2048}
AS_IT_IS = "the batch as it is"


class MicroBatch(NamedTuple):
    """Sequences that run together."""

    # (b, w), or (1, n) of a tree, int64 in CPU memory: flat indices into the (B, T) batch, -1 for padding.
    flat_index: Tensor | None  # None: the batch as it is
    lengths: tuple[int, ...]  # number of tokens of each sequence, in order
    keeps_mask: bool = True  # the attention mask must be passed on
    rows: tuple[int, ...] = ()  # the rows of the batch whose loss this micro-batch computes
    tree: "TreeRow | None" = None  # of the one row of `flat_index`

    @property
    def tokens(self) -> int:
        """Number of tokens that the model runs, padding included."""
        return sum(self.lengths) if self.flat_index is None else self.flat_index.numel()


class TreeRow(NamedTuple):
    """A micro-batch's tree, in CPU memory. Tokens of several sequences may share a place in the row."""

    tree: PrefixTree
    position_ids: Tensor  # (n,) int64
    flat_index: Tensor  # (m,) int64: flat indices into the (B, T) batch, of all sequences' tokens
    places: Tensor  # (m,) int64: the place in the row at which each of these tokens is predicted


class Layout(NamedTuple):
    """The micro-batches of a batch."""

    live: list[MicroBatch]  # with a backward; their losses add up to the loss of the batch
    idle: list[MicroBatch]  # without a backward; the loss of the first live one includes their rows
    left_out: tuple[int, ...]  # rows with completion tokens that do not run
    # The shortest live sequence. A rank with fewer micro-batches runs it again and masks its loss, so that all ranks
    # make the same number of collective calls.
    repeated: MicroBatch
    text: str  # how the tokens are laid out
    reason: Reason | None  # why the batch stays as it is, or why no prefix is shared
    facts: Facts

    def describe(self) -> str:
        return self.text if self.reason is None else f"{self.text}: {self.reason}"

    @property
    def live_tokens(self) -> int:
        return sum(micro.tokens for micro in self.live)

    @property
    def has_trees(self) -> bool:
        return any(micro.tree is not None for micro in (*self.live, *self.idle))

    def take(self, number: int) -> "Layout":
        """The layout of one micro-batch. The first has the idle ones, and one behind the last the repeated one."""
        live = self.live[number] if number < len(self.live) else self.repeated
        return self._replace(live=[live], idle=self.idle if number == 0 else [])


Groups = list[tuple[int, list[int]]]  # (number of tokens, rows) of each micro-batch


def lay_out(
    sequences: Sequences,
    facts: Facts,
    *,
    max_tokens: int | None = None,  # of a micro-batch, padding included
    runs_idle: bool = True,  # rows without a gradient run too, without a graph
    one_micro_batch: Reason | None = None,  # why all sequences must be in one micro-batch; None if they need not
    pairs: bool = False,  # rows r and B / 2 + r run together, and both if one has a gradient
    padded_groups: int = 1,  # number of micro-batches of padded rows, if there are as many rows; not with pairs
    enough_tokens: float = math.inf,  # trees run in as many micro-batches as have so many tokens on average
) -> Layout:
    """The micro-batches of a batch. ValueError if one cannot have as few as `max_tokens`.

    With `padded_groups` the rows of each micro-batch have similar lengths, and no other split of the rows into as many
    groups has fewer tokens, padding included.
    """
    assert padded_groups == 1 or not pairs
    if sequences.obstacle is not None:
        return keep_batch(sequences, facts, sequences.obstacle, max_tokens)
    batch = len(sequences.spans)
    half = batch // 2 if pairs else batch
    if pairs:
        spans = [
            span._replace(has_gradient=span.has_gradient or sequences.spans[row - half].has_gradient)
            for row, span in enumerate(sequences.spans)
        ]
        sequences = sequences._replace(spans=spans)
    live, no_gradient = _select_rows(sequences, half, every_row=facts.has_router_loss)
    idle, left_out = (no_gradient, []) if runs_idle else ([], no_gradient)
    rows, joined = _Rows(sequences, facts, half, padded_groups), sorted([*live, *idle])
    fits = max_tokens is None or rows.count_tokens(joined) <= max_tokens
    if fits and sum(sequences.lengths(joined)) <= facts.host_tokens:
        # A forward of their own would cost the host more than their backward, whose gradients are 0, costs the device.
        live, idle = joined, []
    _check_longest(sequences, [*live, *idle], max_tokens)
    planner, groups, text, reason = _choose_planner(rows, live, idle, max_tokens, enough_tokens)
    if facts.packed is not None and reason is not None:
        return keep_batch(sequences, facts, reason)
    most, group = max((entry for part in groups for entry in part), key=lambda entry: entry[0])
    if max_tokens is not None and most > max_tokens:
        raise ValueError(
            f"max_tokens must be at least {most}, the tokens of the pair in rows {group} of input_ids, got {max_tokens}"
        )
    live_micros, idle_micros = ([planner.make_micro_batch(group) for _, group in part] for part in groups)
    if len(live_micros) > 1 and one_micro_batch is not None:
        raise ValueError(
            f"max_tokens must be None or at least {_sum_tokens([planner.make_groups(live, None)])} here, got "
            f"{max_tokens}: {one_micro_batch}"
        )
    without_backward = set(range(batch)) - set(live)
    live_micros[0] = live_micros[0]._replace(rows=tuple(sorted(without_backward.union(live_micros[0].rows))))
    repeated = rows.make_micro_batch([min(live, key=lambda row: sequences.spans[row].length)])
    return Layout(live_micros, idle_micros, tuple(left_out), repeated, text, reason, facts)


def _check_longest(sequences: Sequences, selected: list[int], max_tokens: int | None) -> None:
    longest = max(sorted(selected), key=lambda row: sequences.spans[row].length)
    length = sequences.spans[longest].length
    if max_tokens is not None and max_tokens < length:
        raise ValueError(
            f"max_tokens must be at least {length}, the longest sequence (row {longest} of input_ids, without its "
            f"padding), got {max_tokens}"
        )


def keep_batch(sequences: Sequences, facts: Facts, reason: Reason, max_tokens: int | None = None) -> Layout:
    """The batch as it is, in one micro-batch."""
    batch, width = sequences.ids.shape
    if max_tokens is not None and max_tokens < batch * width:
        raise ValueError(
            f"max_tokens must be None or at least B T = {batch * width} for a batch that stays as it is, got "
            f"{max_tokens}: {reason}"
        )
    whole = MicroBatch(None, (width,) * batch, rows=tuple(range(batch)))
    return Layout([whole], [], (), whole, AS_IT_IS, reason, facts)


def _select_rows(sequences: Sequences, half: int, *, every_row: bool) -> tuple[list[int], list[int]]:
    """-> the rows that run with a graph, those with a gradient or every row; the other rows with completion tokens."""
    live, others = [], []
    for row, span in enumerate(sequences.spans):
        if span.has_gradient or every_row:
            live.append(row)
        elif span.has_targets:
            others.append(row)
    if live:
        return live, others
    # A loss needs a graph to call backward on.
    shortest = min(others or range(len(sequences.spans)), key=lambda row: sequences.spans[row].length)
    live = sorted({shortest, (shortest + half) % len(sequences.spans)})
    return live, [row for row in others if row not in live]


def _choose_planner(
    rows: "_Rows", live: list[int], idle: list[int], max_tokens: int | None, enough: float
) -> tuple["_Rows | _Trees", list[Groups], str, Reason | None]:
    """-> `rows` or trees, the groups of the live and of the idle rows, their description, why no prefix is shared."""
    sequences = rows.sequences
    groups = [rows.make_groups(selection, max_tokens) for selection in (live, idle)]
    count, forwards, is_packed = _sum_tokens(groups), len(groups[0]), rows.facts.packed is not None
    if is_packed:  # in place of trees the batch runs as it is
        count, forwards = sequences.packed_tokens, rows.padded_groups
    text = f"{count:,} tokens in padded rows; no prefix is shared"
    selected = sorted([*live, *idle])
    reason = _find_tree_obstacle(sequences, selected, rows.facts)
    if reason is not None:
        return rows, groups, text, reason
    trees = _Trees(sequences, rows.facts, rows.half, enough)
    tree_groups = [trees.make_groups(selection, max_tokens) for selection in (live, idle)]
    tree_count, most = _sum_tokens(tree_groups), max(tokens for part in tree_groups for tokens, _ in part)
    # With a dense mask, padding is no worse than the other sequences of a row.
    other_count = count if sequences.device == "cuda" or is_packed else sum(sequences.lengths(selected))
    # On a GPU one row in place of several groups of rows saves the launches of their layers, too.
    saves_runs = sequences.device == "cuda" and len(tree_groups[0]) < forwards and tree_count <= other_count
    pays = saves_runs or tree_count <= MAX_TREE_FRACTION * other_count
    pays = pays and tree_count >= MIN_TREE_TOKENS.get(sequences.device, 0)
    if pays and most <= MAX_DENSE_TOKENS.get(sequences.device, most):
        return trees, tree_groups, f"{tree_count:,} tokens in trees of shared prefixes, of {count:,}", None
    return rows, groups, text, _describe_small_gain(sequences.device, tree_count, other_count, most)


def _describe_small_gain(device: str, tree_count: int, other_count: int, most: int) -> Reason:
    """Why trees of `tree_count` tokens, up to `most` in a row, do not run in place of `other_count` tokens."""
    if tree_count >= other_count:
        return Reason(f"no two sequences have more than their first {LEAST_SHARED} tokens in common")
    if tree_count > MAX_TREE_FRACTION * other_count:
        return Reason(f"with prefixes once, {tree_count:,} of {other_count:,} tokens would remain, more than 90%")
    least, longest = MIN_TREE_TOKENS.get(device, 0), MAX_DENSE_TOKENS.get(device, most)
    if tree_count < least:
        return Reason(f"with prefixes once, {tree_count:,} tokens would remain, which gain time from {least:,} on")
    return Reason(f"a row would have {most:,} tokens, and attention on a {device} takes {longest:,} at most")


def _sum_tokens(groups: list[Groups]) -> int:
    return sum(tokens for part in groups for tokens, _ in part)


# --- padded rows ------------------------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """Sequences in padded rows."""

    sequences: Sequences
    facts: Facts
    half: int  # rows r and r + half stay together
    padded_groups: int

    def make_groups(self, selected: list[int], max_tokens: int | None) -> Groups:
        """(number of tokens, rows) of each micro-batch, rows in the batch's order. The longest rows come first."""
        groups: list[list[int]] = []
        for part in self._split_by_length(selected):
            groups.append([])
            units = sorted(_group_pairs(part, self.half), key=lambda unit: -max(self.sequences.lengths(unit)))
            for unit in units:
                # In an earlier micro-batch a short row would be padded to the length of a long one.
                if groups[-1] and max_tokens is not None and self.count_tokens([*groups[-1], *unit]) > max_tokens:
                    groups.append([])
                groups[-1] += unit
        return [(self.count_tokens(group), sorted(group)) for group in groups]

    def make_micro_batch(self, group: list[int]) -> MicroBatch:
        batch, width = self.sequences.ids.shape
        lengths = tuple(self.sequences.lengths(group))
        if len(group) == batch and min(lengths) == width:
            return MicroBatch(None, lengths, rows=tuple(group))
        starts, sizes = torch.tensor(self.sequences.starts(group)), torch.tensor(lengths)
        column = torch.arange(max(lengths))
        index = torch.where(column < sizes[:, None], starts[:, None] + column, -1)
        plain = self.facts.drops_left_padding and self.facts.causal and not self.facts.has_router_loss
        plain = plain and all(self.sequences.spans[r].is_run for r in group)
        return MicroBatch(index, lengths, keeps_mask=not plain, rows=tuple(group))

    def count_tokens(self, group: list[int]) -> int:
        lengths = self.sequences.lengths(group)
        return max(lengths) * len(lengths)

    def _split_by_length(self, selected: list[int]) -> list[list[int]]:
        """Rows in `padded_groups` groups, or one for each row, with the fewest padded tokens."""
        number = 1 if self.facts.packed is not None else min(self.padded_groups, len(selected))
        if number <= 1:
            return [selected] if selected else []
        ordered = sorted(selected, key=lambda r: -self.sequences.spans[r].length)
        _, cuts = _split_lengths(self.sequences.lengths(ordered), number)
        stops = [len(ordered)]
        for cut in reversed(cuts):
            stops.append(cut[stops[-1]])
        return [ordered[start:stop] for start, stop in zip([0, *stops[:0:-1]], stops[::-1], strict=True)]


def _split_lengths(lengths: list[int], number: int) -> tuple[list[float], list[list[int]]]:
    """The best splits of lengths, the longest first, into 1, 2, ..., `number` groups that are padded.

    -> (padded tokens of each of these splits, for each group but the last: where it begins if it ends at j).
    """
    # The best groups are runs. costs[i, j]: tokens of the lengths i <= r < j.
    place = np.arange(len(lengths) + 1)
    longest = np.array([*lengths, 0], dtype=np.float64)[:, None]
    costs = np.where(place > place[:, None], (place - place[:, None]) * longest, np.inf)
    least, cuts = costs[0], []
    tokens = [float(least[-1])]
    for _ in range(number - 1):
        totals = least[:, None] + costs
        least = totals.min(0)
        tokens.append(float(least[-1]))
        cuts.append(totals.argmin(0).tolist())
    return tokens, cuts


def count_padded_groups(sequences: Sequences, sizes: Sequence[int]) -> int:
    """The least number of groups in which padded rows have no more tokens than in micro-batches of so many rows."""
    lengths, stops = [span.length for span in sequences.spans], list(itertools.accumulate(sizes))
    if len(sizes) <= 1 or not lengths:
        return 1
    parts = [lengths[stop - size : stop] for stop, size in zip(stops, sizes, strict=True)]
    alone = sum(max(part, default=0) * len(part) for part in parts)
    tokens, _ = _split_lengths(sorted(lengths, reverse=True), min(len(sizes), len(lengths)))
    return next(number for number, count in enumerate(tokens, 1) if count <= alone)


def _group_pairs(sequences: list[int], half: int) -> list[list[int]]:
    """Rows that must run together, r and r + half, in order."""
    units: dict[int, list[int]] = {}
    for row in sorted(sequences):
        units.setdefault(row % max(half, 1), []).append(row)
    return list(units.values())


# --- trees of shared prefixes -----------------------------------------------------------------------------------------


def _find_tree_obstacle(sequences: Sequences, selected: list[int], facts: Facts) -> Reason | None:
    """Why the selected rows cannot be trees."""
    if facts.no_tree is not None:
        return facts.no_tree
    gaps = (r for r in selected if not sequences.spans[r].is_run)
    row = next(gaps, None)
    return None if row is None else Reason(f"row {row} of input_ids has padding between tokens, or positions that jump")


class _Trees(NamedTuple):
    """Sequences in trees, each in one row."""

    sequences: Sequences
    facts: Facts
    half: int  # rows r and r + half stay together
    enough: float  # tokens of a micro-batch, on average

    def make_groups(self, selected: list[int], max_tokens: int | None) -> Groups:
        """(number of tokens, rows) of each micro-batch. Rows with a common prefix stay together if they fit."""
        if max_tokens is not None and self.half < len(self.sequences.spans):
            # A pair has one prompt. Pairs fill the micro-batches in order.
            pair_groups: list[tuple[int, list[int]]] = []
            for pair in _group_pairs(selected, self.half):
                size = sum(tokens for tokens, _ in self.make_groups(pair, None))
                if pair_groups and pair_groups[-1][0] + size <= max_tokens:
                    pair_groups[-1] = (pair_groups[-1][0] + size, sorted([*pair_groups[-1][1], *pair]))
                else:
                    pair_groups.append((size, pair))
            return pair_groups
        ordered = self._sort(selected)
        sizes = ordered.sizes(self.sequences.lengths(selected))
        clusters: list[tuple[int, list[int]]] = []
        for number, shared, size in zip(ordered.order, ordered.shared, sizes, strict=True):
            row = selected[number]
            tokens, cluster = clusters[-1] if clusters else (0, [])
            if shared <= LEAST_SHARED or (max_tokens is not None and tokens + size > max_tokens):
                clusters.append((self.sequences.spans[row].length, [row]))
            else:
                clusters[-1] = (tokens + size, [*cluster, row])
        total = sum(map(itemgetter(0), clusters))
        enough = total / max(total // max(self.enough, 1), 1)
        groups: list[tuple[int, list[int]]] = []
        for tokens, cluster in sorted(clusters, key=lambda pair: -pair[0]):
            for place, (filled, group) in enumerate(groups):
                if filled < enough if max_tokens is None else filled + tokens <= max_tokens:
                    groups[place] = (filled + tokens, sorted([*group, *cluster]))
                    break
            else:
                groups.append((tokens, sorted(cluster)))
        return groups

    def make_micro_batch(self, group: list[int]) -> MicroBatch:
        lengths, starts = tuple(self.sequences.lengths(group)), self.sequences.starts(group)
        multiple = BLOCK if self.sequences.device == "cuda" else 1
        tree = build_prefix_tree(lengths, self._sort(group), multiple)
        first = np.array(self._list_first_positions(group))
        sequences, offsets = tree.sequences.numpy(), tree.offsets.numpy()
        tokens = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])
        places = np.concatenate([places.numpy() for places in tree.places])
        arrays = (first[sequences] + offsets, tokens, places)
        row = TreeRow(tree, *map(torch.from_numpy, arrays))
        index = torch.from_numpy(np.array(starts)[sequences] + offsets)[None]
        return MicroBatch(index, lengths, rows=tuple(group), tree=row)

    def _sort(self, selected: list[int]) -> SortedSequences:
        spans, ids = self.sequences.spans, self.sequences.ids.reshape(-1)
        tokens = [ids[spans[r].start : spans[r].stop] for r in selected]
        return sort_sequences(tokens, self._list_first_positions(selected))

    def _list_first_positions(self, rows: list[int]) -> list[int]:
        if self.facts.rotary or self.facts.counts_attended or self.facts.has_no_positions:
            return [0] * len(rows)
        return [self.sequences.spans[row].first_position for row in rows]
