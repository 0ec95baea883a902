"""Gradients of two heads from chosen parts alone, in PyTorch: the path of CPU, and the specification of
`kept_parts_triton`.

A part is one token's dL/dlogits in one tile of the vocabulary. Tokens choose by themselves, so the kept tokens of a
tile lie anywhere, and their rows are gathered.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.kernels import for_device, gemm
from liger_rl.kernels.divergence import Measure, PairGradients, Tile
from liger_rl.kernels.divergence_tiles import Drawn
from liger_rl.kernels.transform import LogitTransform

COLUMNS = 1 << 14  # of the vocabulary at a time, where all of it is looked at


class HeadRows(NamedTuple):
    """What logits of one head are made of."""

    hidden: Tensor  # (n, H) in the dtype of the products
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    transform: LogitTransform

    def tile(self, at: slice) -> Tile:
        """Logits of some columns."""
        logits = gemm.matmul(self.hidden, self.weight[at].to(self.hidden.dtype).T)
        return Tile(logits, None if self.bias is None else self.bias[at], self.transform)


class PartInputs(NamedTuple):
    """What parts of a gradient are computed from."""

    student: HeadRows
    teacher: HeadRows
    measure: Measure
    targets: Tensor  # (n,) ids, read where log-probabilities have a gradient; a negative one is in no tile
    tokens: PairGradients  # (n,) each; entropies have no gradient

    def take(self, picked: Tensor) -> "PartInputs":
        """Of some of the tokens."""
        student, teacher = (head._replace(hidden=head.hidden[picked]) for head in (self.student, self.teacher))
        targets, tokens = self.targets[picked], self.tokens.take(picked)
        return self._replace(student=student, teacher=teacher, targets=targets, tokens=tokens)

    def gradient(self, at: slice) -> Tensor:
        """dL/dlogits (n, v) float32 of all tokens in some columns."""
        own, other = (head.tile(at) for head in (self.student, self.teacher))
        kernels = for_device(own.logits.device)
        kernels.grad_pair(own, other, self.targets, at.start, self.measure, self.tokens, own.logits)
        return own.logits


class LeftOutParts(NamedTuple):
    """What stands for the other parts in the sums of a tile's own: its entries share what is left out of it."""

    shares: Tensor  # (tiles, entries of a tile) float32, 0 past the last entry
    # (tiles or more, H) float32, hidden states added up by what is left out; where weight needs it
    hidden: Tensor | None
    total: Tensor | None  # (tiles or more,) float32, what is left out added up; where bias needs it


class PartSums(NamedTuple):
    """Where gradients go; None where they are not asked for."""

    hidden: Tensor | None  # (n, H) float32, added to
    weight: Tensor | None  # (V, H), written, as the next one
    bias: Tensor | None  # (V,)


def entry_sizes(inputs: PartInputs, drawn: Drawn) -> Tensor:
    """(V,) float32 sums of |dL/dlogits| over drawn tokens, their targets aside. What is not finite is 0 there."""
    vocab, some = inputs.student.weight.shape[0], inputs.take(drawn.rows)
    some = some._replace(targets=torch.full_like(some.targets, -1))
    sizes = [some.gradient(at).abs_().mul_(drawn.scales[:, None]) for at in _columns(vocab, COLUMNS)]
    # One token's NaN must not reach the gradients of others.
    return torch.cat([torch.where(size < torch.inf, size, 0.0).sum(0) for size in sizes])


class Begun(NamedTuple):
    """What is known of the kept parts before the host knows how many there are."""

    inputs: PartInputs
    order: Tensor  # (tiles, n) int64: a tile's kept tokens first, in their order
    numbers: Tensor  # (tiles + 1,) integers: tokens that keep each tile, and tokens with a gradient


def begin(inputs: PartInputs, keep: Tensor, wanted: Tensor) -> Begun:
    """Of (n, tiles) and (n,) bool, on the device alone. The host may wait for the numbers once more is launched."""
    order = keep.T.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
    return Begun(inputs, order, torch.cat([keep.sum(0), wanted.sum()[None]]))


def add_parts(
    begun: Begun,
    counts: list[int],  # of the tokens that keep each tile
    left_out: LeftOutParts,
    sums: PartSums,
    workspace: int,  # bytes of parts at a time, but at least those of a tile, which is what it takes here
) -> None:
    """Add the products of the kept parts up, tile by tile and token by token. No number here waits for the device."""
    inputs, order, _ = begun
    student = inputs.student
    tiles = _columns(student.weight.shape[0], left_out.shares.shape[1])
    for tile, (at, count) in enumerate(zip(tiles, counts, strict=True)):
        picked, shares = order[tile, :count], left_out.shares[tile, : at.stop - at.start]
        chosen = inputs.take(picked)
        hidden, weight = chosen.student.hidden, student.weight[at]
        grad = chosen.gradient(at).to(hidden.dtype)
        if sums.hidden is not None:
            sums.hidden.index_add_(0, picked, gemm.matmul(grad, weight.to(hidden.dtype)))  # each token once
        if sums.weight is not None and left_out.hidden is not None:
            sums.weight[at] = torch.addr(gemm.matmul(grad.T, hidden), shares, left_out.hidden[tile])
        if sums.bias is not None and left_out.total is not None:
            sums.bias[at] = grad.sum(0, dtype=torch.float32) + shares * left_out.total[tile]


def _columns(vocab: int, step: int) -> Iterator[slice]:
    return (slice(first, min(first + step, vocab)) for first in range(0, vocab, step))
