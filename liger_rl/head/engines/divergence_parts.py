"""Two heads with a tolerance: the backward of the parts of the gradient that matter, a part being a token and a tile.

`kernels.divergence_tiles` says which parts are kept, and why the rest is within the tolerance. A tile is TILE_VOCAB
entries. For each tile, the tokens that keep it are gathered. A few tiles at a time go through batched products, which
are those of the exact backward. With s the kept share, this takes s (S + T) to recompute both heads, and at
most 2 s S. Tokens are chosen tile by tile, so their order does not matter. docs/notes/kernels.md says what tiles of
other widths, and blocks of tokens, would keep.

What is left out is replaced. In each tile's product for the weight, the replacement is one more row: the hidden states
of the tokens that left the tile out, weighted by what they left out, and spread by the tile's shares. For the hidden
states it is one product of (n, tiles) with (tiles, H).

Every sum has a fixed order, so two runs give the same bits. One host sync, for the number of tokens of each tile.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from liger_rl.head.engines import divergence as exact
from liger_rl.head.engines.divergence import Pair, PairOptions
from liger_rl.head.engines.interface import Gradients, Head, Needs
from liger_rl.head.engines.tiles import WORKSPACE_BYTES, kind_of, spans
from liger_rl.head.engines.two_pass import unwritten
from liger_rl.head.host_answer import HostAnswer
from liger_rl.kernels import for_device, gemm
from liger_rl.kernels.divergence import TILE_VOCAB, PairGradients, Tile
from liger_rl.kernels.divergence_tiles import TileBounds, choose, draw
from liger_rl.kernels.transform import LogitSteps

DENSE_SHARE = 0.5  # of kept parts, from which on the exact products are no slower
MOST_PADDING = 4096  # rows of a group: so many take about as long as the launches of one more
TILE_MULTIPLE = 8  # columns of (n, tiles), for products that read them 16 bytes at a time


class _Shares(NamedTuple):
    """How a tile's entries share what is left out of it."""

    entries: Tensor  # (tiles, TILE_VOCAB) float32, adding up to 1 over a tile; 0 past the last entry
    squares: Tensor  # (tiles,) float32, sums of their squares
    rows: Tensor | None  # (tiles, H) in the compute dtype, the weight's rows added up by them, where hidden needs it


class _Chosen(NamedTuple):
    """Which tokens keep a tile."""

    keep: Tensor  # (n, tiles) bool
    place: Tensor  # (n, tiles), of a kept token among those of its tile
    order: Tensor  # (tiles, n) tokens, the kept ones first and in their order
    counted: Tensor  # (tiles,), how many these are

    @classmethod
    def of(cls, keep: Tensor, counted: Tensor) -> "_Chosen":
        order = keep.T.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
        return cls(keep, keep.cumsum(0) - 1, order, counted)


class _Group(NamedTuple):
    """Tiles side by side whose tokens are few or many alike."""

    first: int  # tile
    counts: list[int]  # of each tile's tokens
    width: int  # entries of each tile

    @property
    def entries(self) -> slice:
        start = self.first * TILE_VOCAB
        return slice(start, start + len(self.counts) * self.width)

    @property
    def tiles(self) -> slice:
        return slice(self.first, self.first + len(self.counts))


def backward(
    pair: Pair, options: PairOptions, bounds: TileBounds | None, tokens: PairGradients, needs: Needs
) -> Gradients:
    """As `divergence.backward`, from the kept parts alone. Exact without bounds, and if so many parts are kept that
    this is no slower."""
    if bounds is None or tokens.grad_logps is not None or tokens.grad_entropy is not None or not tokens.grad.numel():
        return exact.backward(pair, options, tokens, needs)
    shares = _shares(pair, options, bounds, tokens, needs)
    keep = choose(bounds, tokens.grad, shares.squares, options.student.grad_tolerance)
    wanted = tokens.grad != 0
    counted = keep.sum(0)
    numbers = HostAnswer(torch.cat([wanted.sum()[None], counted]))
    # What the host has the device do while it waits.
    chosen = _Chosen.of(keep, counted)
    sums = LogitSteps.of(options.student.transform).slope * tokens.grad[:, None] * bounds.total
    sums = torch.where(keep | ~wanted[:, None], 0.0, sums)
    count, *counts = numbers.wait().tolist()
    if sum(counts) > DENSE_SHARE * count * len(counts):
        live = pair.student.live
        if count < wanted.numel():
            picked = (~wanted).to(torch.uint8).sort(stable=True).indices[:count]
            live, tokens = live.among(picked), tokens.take(picked)
        return exact.gradients(pair, options, live, tokens, needs).of_all_tokens(live, pair.student)
    parts = _Parts(pair, options, tokens, needs)
    parts.add_left_out(sums, wanted, shares)
    for group in _groups(counts, pair, options):
        parts.add(group, chosen, shares)
    found = Gradients(parts.grad_hidden, parts.grad_weight, parts.grad_bias)
    return found.of_all_tokens(pair.student.live, pair.student)


def _shares(pair: Pair, options: PairOptions, bounds: TileBounds, tokens: PairGradients, needs: Needs) -> _Shares:
    drawn, counts = draw(bounds, tokens.grad)
    some = tokens.take(drawn)._replace(grad=counts)
    dtype = options.student.compute_dtype
    x, y = (
        _rows(head, drawn).to(part.compute_dtype)
        for head, part in ((pair.student, options.student), (pair.teacher, options.teacher))
    )
    weight, vocab, kernels = pair.student.weight, pair.vocab, for_device(drawn.device)
    tiles = -(-vocab // TILE_VOCAB)
    entries = torch.zeros(tiles * TILE_VOCAB, dtype=torch.float32, device=drawn.device)
    for first, last in spans(vocab, 16 * TILE_VOCAB):
        at = slice(first, last)
        own = Tile(gemm.matmul(x, weight[at].to(dtype).T), _part(pair.student.bias, at), options.student.transform)
        other_weight = pair.teacher.weight[at].to(options.teacher.compute_dtype)
        other = Tile(gemm.matmul(y, other_weight.T), _part(pair.teacher.bias, at), options.teacher.transform)
        kernels.grad_pair(own, other, drawn, first, options.measure, some, own.logits)
        size = own.logits.abs_()
        # One token's NaN must not reach the gradients of others.
        entries[at] = torch.where(size < torch.inf, size, 0.0).sum(0)
    entries = entries.unflatten(0, (tiles, TILE_VOCAB))
    total = entries.sum(1, keepdim=True)
    entries = torch.where((total > 0) & (total < torch.inf), entries / total, 0.0)
    rows = None
    if needs[0]:
        rows = torch.cat([
            gemm.batched(entries[group.tiles, None, : group.width].to(dtype), _tiles(weight, group, dtype))[:, 0]
            for group in _groups([0] * tiles, pair, options)
        ]).to(dtype)  # fmt: skip
    return _Shares(entries, entries.square().sum(1), rows)


def _rows(head: Head, picked: Tensor) -> Tensor:
    """Of some of the tokens that count."""
    return head.hidden[picked if head.live.index is None else head.live.index[picked]]


def _part(values: Tensor | None, at: slice) -> Tensor | None:
    return None if values is None else values[at]


def _tiles(weight: Tensor, group: _Group, dtype: torch.dtype) -> Tensor:
    """(tiles, width, H)."""
    return weight[group.entries].to(dtype).unflatten(0, (len(group.counts), group.width))


def _groups(counts: list[int], pair: Pair, options: PairOptions) -> list[_Group]:
    """Runs of tiles with little padding among their tokens, whose rows, logits and weights fit the workspace."""
    itemsize = options.student.compute_dtype.itemsize
    size = pair.student.hidden.shape[1] + pair.teacher.hidden.shape[1]
    per_row = TILE_VOCAB * (8 + itemsize) + size * itemsize + 4 * pair.student.hidden.shape[1]
    weights = (pair.student.weight, options.student), (pair.teacher.weight, options.teacher)
    converts = any(not weight.is_cuda or weight.dtype != part.compute_dtype for weight, part in weights)
    per_tile = 4 * TILE_VOCAB * size if converts else 0
    workspace = WORKSPACE_BYTES[kind_of(pair.student.hidden.device)]
    last = pair.vocab // TILE_VOCAB  # from here on a tile is not whole
    groups, first = [], 0
    for end in range(1, len(counts) + 1):
        here = counts[first : end + 1]
        most, kept = max(here) + 1, sum(here) + len(here)
        full = len(here) * (most * per_row + per_tile) > workspace or len(here) * most - kept > MOST_PADDING
        if end in (last, len(counts)) or full:
            width = TILE_VOCAB if first < last else pair.vocab - last * TILE_VOCAB
            groups.append(_Group(first, counts[first:end], width))
            first = end
    return groups


class _Parts:
    """The gradients, as they are added up."""

    def __init__(self, pair: Pair, options: PairOptions, tokens: PairGradients, needs: Needs) -> None:
        self.pair, self.options, self.tokens = pair, options, tokens
        self.dtype = options.student.compute_dtype
        head = pair.student
        self.grad_hidden: Tensor | None = None
        self.needs_hidden = needs[0]
        self.grad_weight = unwritten(head.weight, pair.vocab) if needs[1] else None
        self.grad_bias = unwritten(head.bias, pair.vocab) if head.bias is not None and needs[2] else None
        self.left_rows: Tensor | None = None  # (tiles, H): hidden states added up by what is left out
        self.left_sums: Tensor | None = None  # (tiles,) float32, what is left out added up

    def add_left_out(self, sums: Tensor, wanted: Tensor, shares: _Shares) -> None:
        """`sums` (n, tiles) of dL/dlogits, 0 where they are kept; `wanted` (n,) are the tokens with a gradient."""
        tiles = sums.shape[1]
        rounded = pad(sums, (0, -tiles % TILE_MULTIPLE)).to(self.dtype)
        if self.needs_hidden and shares.rows is not None:
            self.grad_hidden = gemm.matmul(rounded, pad(shares.rows, (0, 0, 0, rounded.shape[1] - tiles)))
        if self.grad_weight is not None:
            # What the rest hold must meet no product, not even with zeros.
            hidden = torch.where(wanted[:, None], self.pair.student.live.gather(self.pair.student.hidden), 0.0)
            self.left_rows = gemm.matmul(rounded.T, hidden.to(self.dtype)).to(self.dtype)
        if self.grad_bias is not None:
            self.left_sums = gemm.column_sums(sums)

    def add(self, group: _Group, chosen: _Chosen, shares: _Shares) -> None:
        tiles, most = len(group.counts), max(group.counts)
        weight = _tiles(self.pair.student.weight, group, self.dtype)
        order = chosen.order[group.tiles]
        # The last row is what is left out.
        grad = torch.empty(tiles, most + 1, group.width, dtype=self.dtype, device=order.device)
        rows = torch.empty(tiles, most + 1, weight.shape[2], dtype=self.dtype, device=order.device)
        if most:
            inside = torch.arange(most, device=order.device) < chosen.counted[group.tiles, None]
            # Past a tile's own tokens any kept one will do: nothing of it is added.
            picked = torch.where(inside, order[:, :most], order[group.counts.index(most), 0])
            rows[:, :most] = _rows(self.pair.student, picked)
            grad[:, :most] = self._gradient(group, picked, inside, rows[:, :most], weight)
            if self.grad_hidden is not None:
                # Each token adds up its rows in the order of the tiles. The last row of a tile stands for no row.
                start = torch.arange(tiles, device=order.device) * (most + 1)
                place = torch.where(chosen.keep[:, group.tiles], start + chosen.place[:, group.tiles], most)
                found = gemm.batched(grad, weight).flatten(0, 1)
                self.grad_hidden += embedding_bag(place, found, mode="sum", padding_idx=most)
        entries = shares.entries[group.tiles, : group.width]
        if self.grad_weight is not None and self.left_rows is not None:
            rows[:, most], grad[:, most] = self.left_rows[group.tiles], entries
            out = self.grad_weight[group.entries].unflatten(0, (tiles, group.width))
            if out.is_cuda and out.dtype == self.dtype:
                torch.bmm(grad.mT, rows, out=out)
            else:
                out.copy_(gemm.batched(grad.mT, rows))
        if self.grad_bias is not None and self.left_sums is not None:
            total = grad[:, :most].sum(1, dtype=torch.float32) + entries * self.left_sums[group.tiles, None]
            self.grad_bias[group.entries] = total.flatten().to(self.grad_bias.dtype)

    def _gradient(self, group: _Group, picked: Tensor, inside: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        """dL/dlogits (tiles, rows, width) of gathered tokens, 0 where they are not `inside` a tile's own."""
        teacher, other_dtype = self.pair.teacher, self.options.teacher.compute_dtype
        other_rows, other_weight = _rows(teacher, picked).to(other_dtype), _tiles(teacher.weight, group, other_dtype)
        shape = (len(group.counts), group.width)
        tiles = []
        for logits, bias, options in (
            (gemm.batched(rows, weight.mT), self.pair.student.bias, self.options.student),
            (gemm.batched(other_rows, other_weight.mT), teacher.bias, self.options.teacher),
        ):
            if bias is not None:
                logits += bias[group.entries].float().view(shape)[:, None]
            tiles.append(Tile(logits.flatten(0, 1), None, options.transform))
        flat = picked.flatten()
        tokens = self.tokens.take(flat)
        tokens = tokens._replace(grad=torch.where(inside.flatten(), tokens.grad, 0.0))
        own = tiles[0].logits
        out = own if self.dtype == torch.float32 else torch.empty_like(own, dtype=self.dtype)
        for_device(flat.device).grad_pair(*tiles, flat, 0, self.options.measure, tokens, out)
        return out.view(*picked.shape, group.width)
