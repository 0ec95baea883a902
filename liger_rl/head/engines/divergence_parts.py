"""Two heads with a tolerance: the backward of the parts of the gradient that matter, a part being a token and a tile.

`kernels.divergence_tiles` says which parts are kept, and why the rest is within the tolerance. A tile is TILE_VOCAB
entries. With s the kept share, recomputing both heads takes s (S + T), and the products at most 2 s S. Tokens are
chosen tile by tile, so their order does not matter. docs/notes/kernels.md says what tiles of other widths, and blocks
of tokens, would keep.

What is left out is replaced. In each tile's sum for the weight, the hidden states of the tokens that left the tile out,
weighted by what they left out, are spread by the tile's shares. For the hidden states the replacement is one product of
(n, tiles) with (tiles, H).

Every sum has a fixed order, so two runs give the same bits. One host sync, for the number of tokens of each tile.
"""

from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from liger_rl.head.engines import divergence as exact
from liger_rl.head.engines.divergence import Pair, PairOptions
from liger_rl.head.engines.interface import Gradients, Head, Needs
from liger_rl.head.engines.pair_products import Side
from liger_rl.head.engines.tiles import WORKSPACE_BYTES, kind_of, spans
from liger_rl.head.engines.two_pass import unwritten
from liger_rl.head.host_answer import HostAnswer
from liger_rl.kernels import devices, gemm, kept_parts
from liger_rl.kernels.divergence import TILE_VOCAB, PairGradients, TileSums
from liger_rl.kernels.divergence_tiles import TileBounds, choose, draw
from liger_rl.kernels.kept_parts import HeadRows, LeftOutParts, PartInputs, PartSums
from liger_rl.kernels.transform import LogitSteps

DENSE_SHARE = 0.5  # of kept parts, from which on the exact products are no slower
WORKSPACE_SHARE = 0.8  # for parts; what is known of all of them takes the rest
TILE_MULTIPLE = 8  # columns of (n, tiles), for products that read them 16 bytes at a time
SHARED_TILES = 32  # whose weights are added up by one product


class _Shares(NamedTuple):
    """How a tile's entries share what is left out of it."""

    entries: Tensor  # (tiles, TILE_VOCAB) float32, adding up to 1 over a tile; 0 past the last entry
    squares: Tensor  # (tiles,) float32, sums of their squares
    rows: Tensor | None  # (tiles, H) in the compute dtype, the weight's rows added up by them, where hidden needs it


def kernels_for(inputs: PartInputs) -> ModuleType:
    """The module whose kernels of parts take these inputs."""
    if devices.compiles(inputs.student.hidden.device):
        kernels = import_module("liger_rl.kernels.kept_parts_triton")
        if kernels.applies(inputs):
            return kernels
    return kept_parts


class _Chosen(NamedTuple):
    """The parts that are computed, and what stands for the others."""

    inputs: PartInputs
    keep: Tensor  # (n, tiles) bool
    wanted: Tensor  # (n,) bool: tokens with a gradient
    numbers: HostAnswer  # of these, and of the tokens that keep each tile
    left_out: LeftOutParts
    grad_hidden: Tensor | None  # (n, H) float32 of what is left out


def backward(
    pair: Pair, options: PairOptions, tile_sums: TileSums | None, tokens: PairGradients, needs: Needs
) -> Gradients:
    """As `divergence.backward`, from the kept parts alone. Exact without sums, where an entropy has a gradient, and if
    so many parts are kept that this is no slower."""
    if tile_sums is None or tokens.grad_entropy is not None or not tokens.grad.numel():
        return exact.backward(pair, options, tokens, needs)
    head, live = pair.student, pair.student.live
    chosen = _choose(pair, options, tile_sums, tokens, needs)
    count, *counts = chosen.numbers.wait().tolist()
    if sum(counts) > DENSE_SHARE * count * len(counts):
        if count < chosen.wanted.numel():
            picked = (~chosen.wanted).to(torch.uint8).sort(stable=True).indices[:count]
            live, tokens = live.among(picked), tokens.take(picked)
        del chosen  # which the exact backward's tiles need not lie beside
        return exact.gradients(pair, options, live, tokens, needs).of_all_tokens(live, head)
    left_out = chosen.left_out
    grad_weight = None if left_out.hidden is None else unwritten(head.weight, pair.vocab)
    grad_bias = None if left_out.total is None or head.bias is None else unwritten(head.bias, pair.vocab)
    sums = PartSums(chosen.grad_hidden, grad_weight, grad_bias)
    workspace = int(WORKSPACE_SHARE * WORKSPACE_BYTES[kind_of(head.hidden.device)])
    kernels_for(chosen.inputs).add_parts(chosen.inputs, chosen.keep, counts, left_out, sums, workspace)
    return Gradients(*sums).of_all_tokens(live, head)


def _choose(pair: Pair, options: PairOptions, tile_sums: TileSums, tokens: PairGradients, needs: Needs) -> _Chosen:
    """On the device alone; the caller asks how much there is to do."""
    student, teacher = exact.sides(pair, options, pair.student.live)
    heads, targets = (_head_rows(student, pair.vocab), _head_rows(teacher, pair.vocab)), student.rows.targets
    inputs, wanted, own, targeted = PartInputs(*heads, options.measure, targets, tokens), tokens.grad != 0, None, None
    if tokens.grad_logps is not None:
        own, wanted = targets // TILE_VOCAB, wanted | (tokens.grad_logps != 0)
        tiles = torch.arange(tile_sums.x.shape[1], device=targets.device)
        targeted = (tiles == own[:, None]) & (tokens.grad_logps != 0)[:, None]
    bounds = TileBounds.of(tile_sums, options.measure, tokens, own)
    shares = _shares(inputs, bounds, wanted, needs)
    keep = choose(bounds, wanted, shares.squares, options.student.grad_tolerance, targeted)
    numbers = HostAnswer(torch.cat([wanted.sum()[None], keep.sum(0)]))
    # What the host has the device do while it waits.
    sums = LogitSteps.of(options.student.transform).slope * bounds.unit * bounds.total
    sums = torch.where(keep | ~wanted[:, None], 0.0, sums)
    left_out, grad_hidden = _left_out(pair.student, inputs.student.hidden, sums, wanted, shares, needs)
    return _Chosen(inputs, keep, wanted, numbers, left_out, grad_hidden)


def _head_rows(side: Side, vocab: int) -> HeadRows:
    weight, bias = side.rows.weight[:vocab], side.rows.bias
    return HeadRows(side.factor, weight, None if bias is None else bias[:vocab], side.options.transform)


def _shares(inputs: PartInputs, bounds: TileBounds, wanted: Tensor, needs: Needs) -> _Shares:
    drawn, scales = draw(bounds, wanted)
    some = inputs.take(drawn)
    of_logps = None if some.tokens.grad_logps is None else some.tokens.grad_logps * scales
    tokens = some.tokens._replace(grad=some.tokens.grad * scales, grad_logps=of_logps)
    # The parts with targets are kept, so what is left out has none.
    entries = kernels_for(some).entry_sizes(some._replace(tokens=tokens, targets=torch.full_like(some.targets, -1)))
    entries = pad(entries, (0, -entries.numel() % TILE_VOCAB)).unflatten(0, (-1, TILE_VOCAB))
    total = entries.sum(1, keepdim=True)
    entries = torch.where((total > 0) & (total < torch.inf), entries / total, 0.0)
    rows = _weighed_rows(entries, inputs.student) if needs[0] else None
    return _Shares(entries, entries.square().sum(1), rows)


def _weighed_rows(entries: Tensor, student: HeadRows) -> Tensor:
    """(tiles, H): the weight's rows, added up by the entries of each tile."""
    rows, dtype = [], student.hidden.dtype
    for first, last in spans(student.weight.shape[0], SHARED_TILES * TILE_VOCAB):
        here = entries[first // TILE_VOCAB : -(-last // TILE_VOCAB)].to(dtype)
        # A row for each tile, 0 in the columns of the others.
        apart = torch.zeros(here.shape[0], *here.shape, dtype=dtype, device=here.device)
        apart.diagonal().copy_(here.T)
        rows.append(gemm.matmul(apart.flatten(1)[:, : last - first], student.weight[first:last].to(dtype)))
    return torch.cat(rows).to(dtype)


def _left_out(
    head: Head, hidden: Tensor, sums: Tensor, wanted: Tensor, shares: _Shares, needs: Needs
) -> tuple[LeftOutParts, Tensor | None]:
    """What stands for the parts that are left out, in the weight's sums and in (n, H) of the hidden states.

    `sums` (n, tiles) of dL/dlogits are 0 where they are kept; `wanted` (n,) are the tokens with a gradient.
    """
    tiles = sums.shape[1]
    rounded = pad(sums, (0, -tiles % TILE_MULTIPLE)).to(hidden.dtype)
    by_token = by_tile = total = None
    if shares.rows is not None:
        by_token = gemm.matmul(rounded, pad(shares.rows, (0, 0, 0, rounded.shape[1] - tiles)))
    if needs[1]:
        # What the rest hold must meet no product, not even with zeros.
        by_tile = gemm.matmul(rounded.T, torch.where(wanted[:, None], hidden, 0.0))
    if head.bias is not None and needs[2]:
        total = gemm.column_sums(sums)
    return LeftOutParts(shares.entries, by_tile, total), by_token
