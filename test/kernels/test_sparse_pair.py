"""Bounds, tails and kept parts of two heads' gradient, beside the gradient itself.

`test/engines/test_divergence_tolerance.py` has the whole backward.
"""

import math

import pytest
import torch

from liger_rl import LogitTransform
from liger_rl.engines.pair import reference as divergence
from liger_rl.engines.pair import tiles_triton as divergence_triton
from liger_rl.engines.pair.reference import (
    FORWARD,
    MIXTURE,
    REVERSE,
    TILE_VOCAB,
    Measure,
    MixtureSums,
    PairFold,
    PairGradients,
    PairStatistics,
    PairTile,
    Tile,
    TileSums,
)
from liger_rl.kernels.devices import PORTABLE, TMA, family_of
from liger_rl.kernels.reference import transformed
from liger_rl.kernels.transform import HeadFactors
from tolerances import stored

pytest.importorskip("triton", reason="Triton is not installed")
from liger_rl.engines.pair import bounds_triton as sparse_pair_triton
from liger_rl.engines.sparse import listing_triton
from liger_rl.engines.sparse.bounds_triton import ChosenParts
from liger_rl.engines.sparse.listing_triton import Span

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOW = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter misreads bfloat16 descriptors
MEASURES = [Measure(FORWARD), Measure(REVERSE), Measure(MIXTURE, 0.25)]
TILE, TILES = 256, 4
N, V = 150, 3 * TILE + 40  # more tokens than a program takes; the last tile is not whole
SIZES = (80, 144)  # no multiples of a step
SILENT, DEAD = 3, 7  # tokens: without a gradient; of NaN, without a gradient
TRANSFORMS = LogitTransform(temperature=0.8), LogitTransform(softcap=9.0)
CAPPED = LogitTransform(softcap=3.0, scale=1.4), LogitTransform(temperature=0.6)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    for module in (divergence, sparse_pair_triton):
        monkeypatch.setattr(module, "TILE_VOCAB", TILE)


class Case:
    """Two heads, sums over tiles of their logits, and gradients of the divergence and of log-probabilities."""

    def __init__(self, measure: Measure, *, more: bool) -> None:
        self.measure, logits = measure, []
        self.heads: list[HeadFactors] = []
        for size, transform in zip(SIZES, TRANSFORMS, strict=True):
            hidden, weight = torch.randn(N, size), 2.0 * torch.randn(V, size) / size**0.5
            bias = torch.randn(V).to(DEVICE, LOW) if more else None
            hidden, weight = hidden.to(DEVICE, LOW), weight.to(DEVICE, LOW)
            self.heads.append(HeadFactors(hidden, weight, bias, transform if more else LogitTransform()))
            logits.append(hidden.float() @ weight.float().T)
        logits[0][DEAD] = torch.nan
        self.tiles = [Tile(x, *head[2:]) for x, head in zip(logits, self.heads, strict=True)]
        self.targets = torch.randint(V, (N,), device=DEVICE)
        state = PairFold.start(N, DEVICE, measure, entropy=False, targets=True)
        self.sums = TileSums.unwritten(N, V, DEVICE, measure)
        self.pair = PairTile(*self.tiles, self.targets, 0, measure)
        divergence.fold_pair(self.pair, state, self.sums)
        known, mixed = PairStatistics.of(state, measure), MixtureSums.start(state.peak)
        if measure.kind == MIXTURE:
            divergence.mix_pair(self.pair, known.lse, known.teacher_lse, mixed, self.sums)
        grad, of_logps = torch.randn(N, device=DEVICE), torch.randn(N, device=DEVICE) if more else None
        grad[[SILENT, DEAD]] = 0.0
        if of_logps is not None:
            of_logps[[SILENT, DEAD, 20]] = grad[21] = 0.0
        value = mixed.student if measure.kind == MIXTURE else known.divergence
        self.tokens = PairGradients.of(known._replace(value=value), grad, of_logps, None)

    def parts(self) -> torch.Tensor:
        """dL/dz (TILES, N, TILE)."""
        out = torch.empty(N, V, device=DEVICE)
        divergence.grad_pair(self.pair, self.tokens, out)
        out *= self.heads[0].transform.temperature
        return torch.nn.functional.pad(out, (0, -V % TILE)).unflatten(1, (TILES, TILE)).transpose(0, 1)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("more", [False, True])
def test_bounds(measure, more):
    """Of all but a token's slope; without a gradient there is no unit, whatever the token holds."""
    case = Case(measure, more=more)
    bounds, parts = sparse_pair_triton.part_bounds(case.sums, measure, case.tokens, case.targets), case.parts()
    alive = torch.ones(N, dtype=torch.bool, device=DEVICE)
    alive[[SILENT, DEAD]] = False
    assert torch.equal(bounds.unit != 0, alive)
    assert bounds.at_target is None
    unit, size = bounds.unit[alive], parts.norm(dim=2)[:, alive]
    most, least, rest = bounds.most[:, alive] * unit, bounds.least[alive].sqrt() * unit, bounds.rest[:, alive] * unit
    assert (most >= size * (1 - 1e-6)).all()
    assert (least <= size.norm(dim=0) * (1 + 1e-6)).all()
    torch.testing.assert_close(rest, parts.sum(2)[:, alive], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bounds.size[alive], rest.abs().sum(0).double(), rtol=1e-4, atol=1e-5)
    assert not bounds.size[~alive].any()
    own = torch.arange(TILES, device=DEVICE)[:, None] == (case.targets // TILE)[alive]
    others = ~own if more else torch.ones_like(own)
    assert (most <= 1.05 * size + 1e-4)[others].all()
    assert (least >= 0.5 * size.norm(dim=0) - 1e-3).double().mean() > 0.9


def test_nan_is_bounded_by_nothing():
    case = Case(MEASURES[1], more=True)
    case.tokens.grad[5] = torch.nan
    bounds = sparse_pair_triton.part_bounds(case.sums, case.measure, case.tokens, case.targets)
    assert bounds.unit[5].isnan()
    assert bounds.most[:, 5].isnan().all()
    assert bounds.size[5] == 0


def test_tails():
    grads, scales = torch.randn(16, V, device=DEVICE), torch.linspace(0, 2, 16, device=DEVICE)
    grads[3], grads[5, 1] = torch.nan, 1e6
    grads[:, TILE : 2 * TILE] = 0.0
    grads[4, 2 * TILE : 3 * TILE] = 1e38  # whose sum is not finite
    tail = sparse_pair_triton.tail_of(grads, scales)
    shares = tail.entries.view(-1, TILE)
    assert shares.shape[0] == tail.squares.numel() == 8
    torch.testing.assert_close(shares.sum(1)[[0, 3]], torch.ones(2, device=DEVICE))
    assert not shares[1:3].any()
    assert not tail.entries[V:].any()
    torch.testing.assert_close(tail.squares, shares.square().sum(1))
    assert (shares[0] < 0.1).all()
    sizes = (grads.nan_to_num(0.0).abs() * scales[:, None]).sum(0)[3 * TILE :]
    torch.testing.assert_close(shares[3, :40], sizes / sizes.sum())  # none is twice the mean


@pytest.mark.parametrize(
    "family", [TMA, PORTABLE[0], PORTABLE[2]], ids=["descriptors", "pointers", "pointers in small steps"]
)
@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("more", [False, True])
def test_parts(measure, more, family, monkeypatch):
    """Of tiles that all tokens keep, that some do, and that none does, a run of tokens at a time."""
    if family.tma and DEVICE.type == "cuda" and not family_of(DEVICE).tma:
        pytest.skip("no tensor memory accelerator")
    monkeypatch.setattr(sparse_pair_triton, "family_of", lambda device: family)
    case = Case(measure, more=more)
    keep = torch.rand(TILES, N, device=DEVICE) < torch.tensor([1.1, 0.3, -1.0, 0.6], device=DEVICE)[:, None]
    keep[:, [5, DEAD]] = False
    rank = torch.where(keep, keep.cumsum(0) - 1, -1).to(torch.int16)
    starts = torch.nn.functional.pad(keep.sum(0).cumsum(0), (1, 0))
    expected = case.parts()
    scale = expected.abs().amax((0, 2)).nan_to_num(1.0).clamp(min=1e-3)
    chosen = ChosenParts(rank, starts, scale, scale, scale)
    cut, targets = 130, case.targets
    out = listing_triton.Parts.empty(int(starts[-1]), TILE, DEVICE)
    out.high.fill_(-1)  # NaN
    for first, last in ((0, cut), (cut, N)):
        base, end = int(starts[first]), int(starts[last])
        span = Span(first, last, base, end - base)
        lists = listing_triton.list_tiles(chosen, span)
        made = listing_triton.Parts._make(values[base:end] for values in out)
        sparse_pair_triton.make_parts(*case.heads, targets, measure, case.tokens, chosen, lists, span, made)
    kept = (expected / scale[:, None]).transpose(0, 1)[keep.T]
    torch.testing.assert_close(stored(out), kept, rtol=2e-3, atol=2e-5)


def split(tile: Tile, at: slice) -> Tile:
    return tile._replace(logits=tile.logits[:, at])


@pytest.mark.parametrize("kernels", [divergence_triton, divergence])
@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("transforms", [(LogitTransform(),) * 2, CAPPED])
def test_sums_and_bounds_of_tiles(kernels, measure, transforms, monkeypatch):
    """Against float64; the last token's heads are so near that what is known of their difference is a bound alone."""
    monkeypatch.undo()  # tiles of their own size: the room that bounds leave depends on it
    n, first, vocab = 5, 2 * TILE_VOCAB, 3 * TILE_VOCAB + 100
    heads = [4 * torch.randn(n, vocab, device=DEVICE) for _ in transforms]
    heads[1][4] = heads[0][4] + 1e-4 * torch.randn(vocab, device=DEVICE)
    student, teacher = (Tile(x, None, transform) for x, transform in zip(heads, transforms, strict=True))
    log_p, log_q = (
        transformed(tile.logits, None, tile.transform).double().log_softmax(-1) for tile in (student, teacher)
    )
    state, tiles = (
        PairFold.start(n, DEVICE, measure, entropy=False, targets=False),
        TileSums.unwritten(n, vocab, DEVICE, measure),
    )
    tiles.x.fill_(torch.nan)
    sums, targets = MixtureSums(*torch.zeros(2, n, device=DEVICE)), torch.zeros(n, device=DEVICE)
    parts = [(at.start, split(student, at), split(teacher, at)) for at in (slice(0, first), slice(first, vocab))]
    for start, own, other in parts:
        kernels.fold_pair(PairTile(own, other, targets, start, measure), state, tiles.part(slice(n), start))
    found = PairStatistics.of(state, measure)
    over, value = log_p - log_q, found.divergence
    if measure.kind == MIXTURE:
        for start, own, other in parts:
            tile = PairTile(own, other, targets, start, measure)
            kernels.mix_pair(tile, *found[:2], sums, tiles.part(slice(n), start))
        value, beta = sums.student, measure.beta
        over = log_p - torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    p = log_p.exp()
    grad = p - log_q.exp()
    if measure.kind != FORWARD:
        share = 1 - measure.beta if measure.kind == MIXTURE else 1.0
        grad = share * p * (over - (p * over).sum(-1, keepdim=True))
    grad = torch.nn.functional.pad(grad, (0, -vocab % TILE_VOCAB)).unflatten(1, (-1, TILE_VOCAB))
    tokens = PairGradients(*found[:2], torch.ones(n, device=DEVICE), value, None, None, None, None)
    bounds, norm = sparse_pair_triton.part_bounds(tiles, measure, tokens, targets), grad.norm(dim=2).T
    assert (bounds.most >= norm).all()
    assert (bounds.least <= norm.square().sum(0)).all()
    assert (bounds.most[:, :4] <= 1.1 * norm[:, :4] + 1e-6).all()
    assert (bounds.least[:4].sqrt() >= 0.94 * norm[:, :4].square().sum(0).sqrt() - 3e-4).all()
    torch.testing.assert_close(bounds.rest.double(), grad.sum(2).T, rtol=1e-4, atol=1e-5)
