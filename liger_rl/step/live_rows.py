"""The tokens of a padded batch that a model has to run, and its micro-batches.

1. `_read_sequences` reads where each sequence begins and ends, in one copy to the host.
2. `_lay_out` copies the token ids to the host. Sequences that begin with the same tokens become a tree in one row
   (`prefix_tree`) if that saves a tenth of the tokens. Otherwise they are packed into one row, or padded.
3. `plan_batch` makes micro-batches of sequences with a common prefix, or of similar length.
4. `make_inputs` makes the model's inputs of a micro-batch, and `index_outputs` finds each token among the outputs.

`Body` has what a model's config allows. `trials` runs the model to find out what the config does not say.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from liger_rl.head.checks import check_count
from liger_rl.losses.options import Options
from liger_rl.step import tree_attention
from liger_rl.step.model_body import Body
from liger_rl.step.prefix_tree import LEAST_SHARED, PrefixTree, SortedSequences, build_prefix_tree, sort_sequences
from liger_rl.step.reason import Reason

Idle = Literal["skip", "forward", "backward"]
MAX_TREE_SHARE = 0.9  # trees run if they have at most this share of the tokens of packed or padded rows
# Trees of fewer tokens, and rows of more, run only with share_prefixes=True: a small step on a GPU takes as long as its
# launches, and a dense mask has all pairs of tokens.
MIN_TREE_TOKENS, MAX_DENSE_TOKENS = {"cuda": 1024}, {"cpu": 2048}
NO_TRIM = Reason("trim=False keeps rows as they are", "leave trim out")


@dataclass(frozen=True, kw_only=True)
class LayoutOptions(Options):
    """The keywords of `policy_steps` that choose rows and micro-batches."""

    max_tokens: int | None = None
    trim: Annotated[bool, bool] = True
    packing: Annotated[bool | None, bool] = None
    share_prefixes: Annotated[bool | None, bool] = None
    idle: Annotated[Idle, get_args(Idle)] = "skip"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens is not None:
            check_count("max_tokens", self.max_tokens, least=1)


class MicroBatch(NamedTuple):
    """Sequences that run together."""

    # (b, w), or (1, n) packed, int64 in CPU memory: flat indices into the (B, T) batch, -1 for padding.
    cells: Tensor | None  # None: the batch as it is
    lengths: tuple[int, ...]  # number of tokens of each sequence, in order
    packed: bool = False  # all sequences are in one row
    keeps_mask: bool = True  # the attention mask must be passed on
    rows: tuple[int, ...] = ()  # the rows of the batch whose loss this micro-batch computes
    tree: "TreeRow | None" = None  # if the one row of `cells` is a tree


class TreeRow(NamedTuple):
    """A micro-batch's tree, in CPU memory. Tokens of several sequences may share a place."""

    tree: PrefixTree
    positions: Tensor  # (n,) int64, position_ids
    cells: Tensor  # (m,) int64: flat indices into the (B, T) batch, of all sequences' tokens
    places: Tensor  # (m,) int64: the place in the row at which each of these tokens is predicted


class BatchPlan(NamedTuple):
    """The micro-batches of a batch."""

    live: list[MicroBatch]  # with a backward; their losses add up to the loss of the batch
    idle: list[MicroBatch]  # without a backward; the loss of the first live one includes their rows
    left_out: tuple[int, ...]  # rows with completion tokens that do not run
    # The shortest live sequence. A rank with fewer micro-batches runs it again with weight zero, so that all ranks make
    # the same number of collective calls.
    carrier: MicroBatch
    layout: str  # how the tokens are laid out
    reason: Reason | None  # why the batch stays as it is, or why no prefix is shared

    def describe(self) -> str:
        return self.layout if self.reason is None else f"{self.layout}: {self.reason}"

    @property
    def has_trees(self) -> bool:
        return any(micro.tree is not None for micro in (*self.live, *self.idle))


def plan_batch(
    ids: Tensor,  # (B, T)
    mask: Tensor,  # (B, T) bool, completion tokens
    inputs: Mapping[str, Any],  # the model's other inputs
    body: Body,
    options: LayoutOptions,
    *,
    advantages: Tensor | None,  # (B, T) or (B, 1); rows of zeros have no gradient. None: all rows may have one
    runs_idle: bool,  # rows without a gradient run too, without a graph
    one_micro_batch: Reason | None,  # why all sequences must be in one micro-batch; None if they need not
    pairs: bool = False,  # rows r and B / 2 + r run together, and both if one has a gradient
) -> BatchPlan:
    """The micro-batches of a batch. ValueError for options that the model or the batch does not allow."""
    obstacle = body.obstacle or (None if options.trim else NO_TRIM)
    for name, reason in (("packing", body.no_packing), ("share_prefixes", body.no_tree)):
        if getattr(options, name) and (obstacle or reason):
            raise ValueError(f"{name} must not be True here: {obstacle or reason}")
    batch, budget = ids.shape[0], options.max_tokens
    if body.obstacle is not None or not ids.numel():
        if budget is not None and budget < ids.numel():
            raise ValueError(
                f"max_tokens must be None or at least B T = {ids.numel()} for a batch that stays as it is, got "
                f"{budget}: {body.obstacle}"
            )
        whole = MicroBatch(None, (), rows=tuple(range(batch)))
        return BatchPlan([whole], [], (), whole, "the batch as it is", body.obstacle or Reason("it has no token"))
    rows = _read_sequences(ids, mask, inputs, advantages, body, options.trim)
    half = batch // 2 if pairs else batch
    if pairs:
        rows = [
            row._replace(has_gradient=row.has_gradient or rows[(r + half) % batch].has_gradient)
            for r, row in enumerate(rows)
        ]
    every_row = body.has_router_loss or options.idle == "backward"
    live = [r for r, row in enumerate(rows) if row.has_gradient or every_row]
    no_gradient = [r for r, row in enumerate(rows) if row.has_targets and not (row.has_gradient or every_row)]
    if not live:  # a loss needs a graph to call backward on
        shortest = min(no_gradient or range(batch), key=lambda r: rows[r].length)
        live = sorted({shortest, (shortest + half) % batch})
        no_gradient = [r for r in no_gradient if r not in live]
    idle, left_out = (no_gradient, []) if runs_idle else ([], no_gradient)
    longest = max([*live, *idle], key=lambda r: rows[r].length)
    if budget is not None and budget < rows[longest].length:
        raise ValueError(
            f"max_tokens must be at least {rows[longest].length}, the longest sequence (row {longest} of input_ids, "
            f"without its padding), got {budget}"
        )
    layout = _lay_out(live, idle, rows, ids, body, options, half)
    if len(layout.live) > 1 and one_micro_batch is not None:
        raise ValueError(
            f"max_tokens must be None or at least {layout.count_tokens(live)} here, got {budget}: {one_micro_batch}"
        )
    steps = [layout.make_micro_batch(group)._replace(rows=tuple(group)) for group in layout.live]
    without_backward = set(range(batch)) - set(live)
    steps[0] = steps[0]._replace(rows=tuple(sorted(without_backward.union(layout.live[0]))))
    shortest = min(live, key=lambda r: rows[r].length)
    carrier = _make_micro_batch([(shortest, rows[shortest])], ids.shape, body, layout.packed)
    idle_micros = [layout.make_micro_batch(group) for group in layout.idle]
    return BatchPlan(steps, idle_micros, tuple(left_out), carrier, layout.text, layout.reason)


class _Layout(NamedTuple):
    """Rows of the batch in groups, one group for each micro-batch."""

    live: list[list[int]]
    idle: list[list[int]]
    text: str
    reason: Reason | None  # why no prefix is shared
    packed: bool
    trees: "_Trees | None"  # None: padded or packed rows
    rows: list["SequenceSpan"]
    shape: torch.Size  # (B, T)
    body: Body

    def make_micro_batch(self, group: list[int]) -> MicroBatch:
        if self.trees is not None:
            return self.trees.make_micro_batch(group)
        return _make_micro_batch([(r, self.rows[r]) for r in group], self.shape, self.body, self.packed)

    def count_tokens(self, live: list[int]) -> int:
        """The smallest max_tokens with which all live rows are one micro-batch."""
        if self.trees is not None:
            return sum(tokens for tokens, _ in self.trees.make_groups(live, None))
        return _count_tokens([self.rows[r].length for r in live], self.packed)


def _lay_out(
    live: list[int],
    idle: list[int],
    rows: list["SequenceSpan"],
    ids: Tensor,
    body: Body,
    options: LayoutOptions,
    half: int,  # B / 2 with pairs, else B
) -> _Layout:
    """Trees if the model allows them and they save enough tokens, otherwise packed or padded rows."""
    budget, device, selected = options.max_tokens, ids.device.type, sorted([*live, *idle])
    packed = _can_pack(rows, selected, body, options)
    live_groups, idle_groups = (_group_by_length(group, rows, budget, packed, half) for group in (live, idle))
    lengths = [[rows[r].length for r in group] for group in (*live_groups, *idle_groups)]
    count = sum(_count_tokens(group, packed) for group in lengths)
    reason = None if options.trim else NO_TRIM
    reason = reason or body.no_tree
    if reason is None and options.share_prefixes is False:
        reason = Reason("share_prefixes=False", "leave share_prefixes out")
    reason = reason or _find_gap(rows, selected, options)
    if reason is None:
        trees = _Trees.read(selected, rows, ids, body, half)
        tree_groups = [trees.make_groups(group, budget) for group in (live, idle)]
        sizes = [tokens for groups in tree_groups for tokens, _ in groups]
        # With a dense mask, padding is no worse than the other sequences of a row.
        other_count = count if device == "cuda" else sum(map(sum, lengths))
        pays = MIN_TREE_TOKENS.get(device, 0) <= sum(sizes) <= MAX_TREE_SHARE * other_count
        if options.share_prefixes or (pays and max(sizes) <= MAX_DENSE_TOKENS.get(device, max(sizes))):
            text = f"{sum(sizes):,} tokens in trees of shared prefixes, of {count:,}"
            live_groups, idle_groups = ([group for _, group in groups] for groups in tree_groups)
            return _Layout(live_groups, idle_groups, text, None, packed, trees, rows, ids.shape, body)
        reason = Reason(f"trees would have {sum(sizes):,} tokens, up to {max(sizes):,} in a row")
    text = f"{count:,} tokens in {'packed' if packed else 'padded'} rows; no prefix is shared"
    return _Layout(live_groups, idle_groups, text, reason, packed, None, rows, ids.shape, body)


# --- live rows --------------------------------------------------------------------------------------------------------


class SequenceSpan(NamedTuple):
    """The tokens start <= t < stop of a row of the batch, and what the host knows of them."""

    start: int
    stop: int
    has_targets: int  # whether it has a completion token
    has_gradient: int  # whether its log-probabilities may have a gradient
    is_attended: int  # whether the attention mask is set at each token
    is_consecutive: int  # whether each position is one more than the position before
    first_position: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def _read_sequences(
    ids: Tensor, mask: Tensor, inputs: Mapping[str, Any], advantages: Tensor | None, body: Body, trim: bool
) -> list[SequenceSpan]:
    """The span of each row. With advantages, only rows with a nonzero one have a gradient."""
    width = ids.shape[1]
    column = torch.arange(width, device=ids.device)
    attention, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    attended = torch.ones_like(mask) if attention is None else attention.to(mask.device) != 0
    counts = mask.any(1)
    lives = counts if advantages is None else ((advantages != 0) & mask).any(1)
    start, stop = torch.zeros_like(counts, dtype=torch.int64), torch.full_like(counts, width, dtype=torch.int64)
    if trim:
        stop = torch.where(mask, column + 1, 0).amax(1)
        if body.has_router_loss or not body.causal:
            stop = torch.maximum(stop, torch.where(attended, column + 1, 0).amax(1))
        if body.drops_left_padding or body.counts_attended:
            # The token before the first completion token predicts it, and may be padding.
            first = torch.where(mask, column - 1, width - 1).amin(1)
            start = torch.minimum(first, torch.where(attended, column, width - 1).amin(1))
        stop = torch.maximum(stop, start + 1)
    inside = (column >= start[:, None]) & (column < stop[:, None])
    whole = (attended | ~inside).all(1)
    steps, first = torch.ones_like(counts), start
    if positions is not None:
        positions = positions.to(ids.device).expand(ids.shape)
        jumps = positions[:, 1:] - positions[:, :-1] != 1
        steps = ~(jumps & inside[:, 1:] & inside[:, :-1]).any(1)
        first = positions.gather(1, start[:, None])[:, 0]
    table = torch.stack([start, stop, *(flag.long() for flag in (counts, lives, whole, steps)), first.long()], 1)
    return [SequenceSpan(*numbers) for numbers in table.tolist()]


# --- packing ----------------------------------------------------------------------------------------------------------


def wants_packing(body: Body, options: LayoutOptions) -> bool:
    packing = body.packs_by_default if options.packing is None else options.packing
    return packing and options.trim and body.obstacle is None and body.no_packing is None


def _can_pack(rows: list[SequenceSpan], selected: list[int], body: Body, options: LayoutOptions) -> bool:
    if not wants_packing(body, options):
        return False
    for r in selected:
        row = rows[r]
        if not (row.is_attended and row.is_consecutive and (row.first_position == 0 or body.rotary)):
            if not options.packing:
                return False
            raise ValueError(
                f"packing must not be True here: row {r} of input_ids is no run of tokens that are attended to, at "
                "positions 0, 1, 2, ..."
            )
    return True


# --- trees of shared prefixes ----------------------------------------------------------------------------------------


def _find_gap(rows: list[SequenceSpan], selected: list[int], options: LayoutOptions) -> Reason | None:
    """Why the selected rows cannot be a tree; ValueError with share_prefixes=True."""
    for r in selected:
        if not (rows[r].is_attended and rows[r].is_consecutive):
            reason = f"row {r} of input_ids is no run of tokens that are attended to, at consecutive positions"
            if options.share_prefixes:
                raise ValueError(f"share_prefixes must not be True here: {reason}")
            return Reason(reason)
    return None


class _Trees(NamedTuple):
    """Rows of a batch, to be grouped into trees."""

    sequences: dict[int, Tensor]  # by row, (length,) int64 in CPU memory
    rows: list[SequenceSpan]
    width: int  # T
    body: Body
    half: int  # rows r and r + half stay together

    @classmethod
    def read(cls, selected: list[int], rows: list[SequenceSpan], ids: Tensor, body: Body, half: int) -> "_Trees":
        host = ids.to("cpu", torch.int64)
        return cls({r: host[r, rows[r].start : rows[r].stop] for r in selected}, rows, ids.shape[1], body, half)

    def make_groups(self, selected: list[int], budget: int | None) -> list[tuple[int, list[int]]]:
        """(number of tokens, rows) of each micro-batch. Rows with a common prefix stay together if they fit."""
        if budget is not None and self.half < max(selected, default=0):
            # A pair has one prompt. Pairs fill the micro-batches in order.
            pair_groups: list[tuple[int, list[int]]] = []
            for pair in _group_pairs(selected, self.half):
                size = sum(tokens for tokens, _ in self.make_groups(pair, None))
                if pair_groups and pair_groups[-1][0] + size <= budget:
                    pair_groups[-1] = (pair_groups[-1][0] + size, sorted([*pair_groups[-1][1], *pair]))
                else:
                    pair_groups.append((size, pair))
            return pair_groups
        ordered = self._sort(selected)
        sizes = ordered.sizes([self.rows[r].length for r in selected])
        clusters: list[tuple[int, list[int]]] = []
        for number, shared, size in zip(ordered.order, ordered.shared, sizes, strict=True):
            row = selected[number]
            tokens, cluster = clusters[-1] if clusters else (0, [])
            if shared <= LEAST_SHARED or (budget is not None and tokens + size > budget):
                clusters.append((self.rows[row].length, [row]))
            else:
                clusters[-1] = (tokens + size, [*cluster, row])
        groups: list[tuple[int, list[int]]] = []
        for tokens, cluster in sorted(clusters, key=lambda pair: -pair[0]):
            for place, (filled, group) in enumerate(groups):
                if budget is None or filled + tokens <= budget:
                    groups[place] = (filled + tokens, sorted([*group, *cluster]))
                    break
            else:
                groups.append((tokens, sorted(cluster)))
        return groups

    def make_micro_batch(self, group: list[int]) -> MicroBatch:
        """The rows of one micro-batch."""
        rows = [self.rows[r] for r in group]
        lengths = tuple(row.length for row in rows)
        tree = build_prefix_tree(lengths, self._sort(group))
        starts = torch.tensor([r * self.width + row.start for r, row in zip(group, rows, strict=True)])
        first = torch.tensor([_first_position(row, self.body) for row in rows])
        cells = torch.cat([start + torch.arange(length) for start, length in zip(starts, lengths, strict=True)])
        row = TreeRow(tree, first[tree.sequences] + tree.offsets, cells, torch.cat(tree.places))
        return MicroBatch((starts[tree.sequences] + tree.offsets)[None], lengths, packed=True, tree=row)

    def _sort(self, selected: list[int]) -> SortedSequences:
        return sort_sequences(
            [self.sequences[r] for r in selected], [_first_position(self.rows[r], self.body) for r in selected]
        )


def _first_position(row: SequenceSpan, body: Body) -> int:
    return 0 if body.rotary or body.counts_attended else row.first_position


# --- micro-batches ----------------------------------------------------------------------------------------------------


def _count_tokens(lengths: list[int], packed: bool) -> int:
    return sum(lengths) if packed else max(lengths) * len(lengths)


def _group_pairs(sequences: list[int], half: int) -> list[list[int]]:
    """Rows that must run together, r and r + half, in order."""
    units: dict[int, list[int]] = {}
    for row in sorted(sequences):
        units.setdefault(row % max(half, 1), []).append(row)
    return list(units.values())


def _group_by_length(
    sequences: list[int], rows: list[SequenceSpan], budget: int | None, packed: bool, half: int
) -> list[list[int]]:
    """Rows of each micro-batch, in the batch's order. The longest rows come first."""
    groups: list[list[int]] = []
    for unit in sorted(_group_pairs(sequences, half), key=lambda unit: -max(rows[r].length for r in unit)):
        # Without packing, a short row would be padded to the length of a long one.
        for group in groups if packed else groups[-1:]:
            if budget is None or _count_tokens([rows[r].length for r in (*group, *unit)], packed) <= budget:
                group += unit
                break
        else:
            groups.append(unit)
    return [sorted(group) for group in groups]


def _make_micro_batch(
    sequences: list[tuple[int, SequenceSpan]], shape: torch.Size, body: Body, packed: bool
) -> MicroBatch:
    lengths = tuple(row.length for _, row in sequences)
    if not packed and len(sequences) == shape[0] and min(lengths) == shape[1]:
        return MicroBatch(None, lengths)
    starts, sizes = torch.tensor([r * shape[1] + row.start for r, row in sequences]), torch.tensor(lengths)
    if packed:
        offsets = torch.arange(sum(lengths)) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
        return MicroBatch((torch.repeat_interleave(starts, sizes) + offsets)[None], lengths, packed=True)
    column = torch.arange(max(lengths))
    plain = (
        body.drops_left_padding
        and body.causal
        and not body.has_router_loss
        and all(row.is_attended and row.is_consecutive for _, row in sequences)
    )
    return MicroBatch(torch.where(column < sizes[:, None], starts[:, None] + column, -1), lengths, keeps_mask=not plain)


def make_inputs(micro: MicroBatch, ids: Tensor, mask: Tensor, inputs: Mapping[str, Any], body: Body) -> dict[str, Any]:
    """The model's inputs of a micro-batch, by name. `counted` is the mask of completion tokens."""
    if micro.cells is None:
        return {"input_ids": ids, "counted": mask, **inputs}
    cells = micro.cells.to(ids.device, non_blocking=True)
    inside, places = cells >= 0, cells.clamp(min=0)
    tensors = dict(inputs)
    tensors["input_ids"] = ids.reshape(-1)[places]
    tensors["counted"] = mask.reshape(-1)[places] & inside
    attention, positions = tensors.pop("attention_mask", None), tensors.pop("position_ids", None)
    if micro.tree is not None:
        return tensors | _make_tree_inputs(micro.tree, mask, body)
    if attention is not None and not micro.packed and micro.keeps_mask:
        device = attention.device
        tensors["attention_mask"] = attention.reshape(-1)[places.to(device)].masked_fill(~inside.to(device), 0)
    if body.drops_left_padding or positions is not None or micro.packed:
        tensors["position_ids"] = _make_positions(micro, positions, places, inside, ids, body)
    if micro.packed and body.takes_sequence_ends:
        # Otherwise flash attention would search the positions for the sequences' ends in each layer.
        ends = nn.functional.pad(torch.tensor(micro.lengths).cumsum(0), (1, 0))
        ends, longest = ends.to(ids.device, torch.int32, non_blocking=True), max(micro.lengths)
        tensors |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    support = tensors.pop("support", None)
    if support is not None:
        tensors["support"] = support.take(places.reshape(-1), batch=support.tokens)
    return tensors


def _make_tree_inputs(row: TreeRow, mask: Tensor, body: Body) -> dict[str, Any]:
    device, tree = mask.device, row.tree
    cells, places, follows = (x.to(device, non_blocking=True) for x in (row.cells, row.places, tree.follows))
    # A place is predicted if it is a completion token of one of its sequences.
    counts = torch.zeros(tree.tokens, dtype=torch.int32, device=device)
    counts.index_add_(0, places, mask.reshape(-1)[cells].to(torch.int32))
    return {
        "counted": ((counts > 0) & follows)[None],
        "position_ids": row.positions[None].to(device, non_blocking=True),
        "attention_mask": tree_attention.make_masks(
            body.config, tree.ends, row.positions, device, body.dtype, dense=device.type == "cpu"
        ),
    }


def _make_positions(
    micro: MicroBatch, position_ids: Tensor | None, places: Tensor, inside: Tensor, ids: Tensor, body: Body
) -> Tensor:
    """The padded batch's positions; packed sequences begin at 0. Padding continues the positions before it, so that a
    row without a mask is recognized as one sequence."""
    batch, width = ids.shape
    if position_ids is None:
        positions = places % width
    else:
        positions = position_ids.to(ids.device).expand(batch, width).reshape(-1)[places]
    lengths = torch.tensor(micro.lengths).to(ids.device, non_blocking=True)
    if micro.packed:
        first = positions[0, lengths.cumsum(0) - lengths]
        return positions - torch.repeat_interleave(first, lengths, output_size=positions.shape[1])
    last = positions.gather(1, lengths[:, None] - 1)
    running = positions[:, :1] + torch.arange(positions.shape[1], device=ids.device, dtype=positions.dtype)
    # A table of positions may have no entry beyond the model's last position.
    return torch.where(inside, positions, torch.minimum(running, last.clamp(min=body.positions - 1)))


def index_outputs(micros: list[MicroBatch], shape: torch.Size, device: torch.device) -> Tensor | None:
    """(B, T) index of each token into the concatenated flat outputs of the micro-batches.

    Tokens that did not run get the index behind the last output. None if the batch ran as it is.
    """
    if len(micros) == 1 and micros[0].cells is None:
        return None
    source, base = torch.full((shape.numel(),), -1), 0
    for micro in micros:
        cells = torch.arange(shape.numel()) if micro.cells is None else micro.cells.reshape(-1)
        if micro.tree is not None:
            source[micro.tree.cells] = base + micro.tree.places
        else:
            source[cells[cells >= 0]] = base + (cells >= 0).nonzero()[:, 0]
        base += cells.numel()
    source[source < 0] = base
    return source.view(shape).to(device, non_blocking=True)
