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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_rl.head.engines import divergence as exact
from liger_rl.head.engines.divergence import Pair, PairOptions
from liger_rl.head.engines.interface import Gradients, Needs
from liger_rl.head.engines.pair_products import Side
from liger_rl.head.engines.tiles import WORKSPACE_BYTES, kind_of
from liger_rl.head.engines.two_pass import unwritten
from liger_rl.head.host_answer import HostAnswer
from liger_rl.kernels import devices, for_device, gemm, kept_parts
from liger_rl.kernels.divergence import PairGradients, TileSums
from liger_rl.kernels.kept_parts import HeadRows, LeftOutParts, PartInputs, PartSums
from liger_rl.kernels.transform import LogitSteps

DENSE_SHARE = 0.5  # of kept parts, from which on the exact products are no slower
WORKSPACE_SHARE = 0.8  # for parts; what is known of all of them takes the rest


def kernels_for(inputs: PartInputs) -> ModuleType:
    """The module whose kernels of parts take these inputs."""
    if devices.compiles(inputs.student.hidden.device):
        kernels = import_module("liger_rl.kernels.kept_parts_triton")
        if kernels.applies(inputs):
            return kernels
    return kept_parts


class Chosen(NamedTuple):
    """The parts that are computed, and what stands for the others."""

    keep: Tensor  # (n, tiles) bool
    wanted: Tensor  # (n,) bool: tokens with a gradient
    numbers: HostAnswer  # of the tokens that keep each tile, and of these
    kernels: ModuleType  # of these parts
    begun: Any  # as they began
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
    chosen = choose(pair, options, tile_sums, tokens, needs)
    *counts, count = chosen.numbers.wait().tolist()
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
    chosen.kernels.add_parts(chosen.begun, counts, left_out, sums, workspace)
    return Gradients(*sums).of_all_tokens(live, head)


def choose(pair: Pair, options: PairOptions, tile_sums: TileSums, tokens: PairGradients, needs: Needs) -> Chosen:
    """On the device alone; the caller asks how much there is to do."""
    student, teacher = exact.sides(pair, options, pair.student.live)
    targets, hidden, measure = student.rows.targets, student.factor, options.measure
    inputs = PartInputs(_head_rows(student, pair.vocab), _head_rows(teacher, pair.vocab), measure, targets, tokens)
    kernels, of_parts = for_device(hidden.device), kernels_for(inputs)
    bounds = kernels.bound_parts(tile_sums, measure, tokens, targets)
    shares = kernels.share_entries(of_parts.entry_sizes(inputs, kernels.draw_tokens(bounds)))
    slope, dtype = LogitSteps.of(options.student.transform).slope, options.student.compute_dtype
    slope = 1.0 if slope is None else slope
    keep, left_out = kernels.choose_parts(bounds, shares.squares, options.student.grad_tolerance, slope, dtype)
    begun = of_parts.begin(inputs, keep, bounds.wanted)
    numbers = HostAnswer(begun.numbers)
    # What the host has the device do while it waits.
    grad_hidden = by_tile = total = None
    if needs[0]:
        grad_hidden = gemm.matmul(left_out, kernels.shared_rows(shares.entries, inputs.student.weight, dtype))
    if needs[1]:
        # What the rest hold must meet no product, not even with zeros.
        by_tile = gemm.matmul(left_out.T, torch.where(bounds.wanted[:, None], hidden, 0.0))
    if pair.student.bias is not None and needs[2]:
        total = gemm.column_sums(left_out)
    rest = LeftOutParts(shares.entries, by_tile, total)
    return Chosen(keep, bounds.wanted, numbers, of_parts, begun, rest, grad_hidden)


def _head_rows(side: Side, vocab: int) -> HeadRows:
    weight, bias = side.rows.weight[:vocab], side.rows.bias
    return HeadRows(side.factor, weight, None if bias is None else bias[:vocab], side.options.transform)
