"""Kernels of a pair of tiles: Triton's beside those of plain PyTorch, which `test/engines/test_divergence.py` holds to
float64."""

import math

import pytest
import torch

from liger_rl import LogitTransform
from liger_rl.engines.pair import bounds_triton as sparse_pair_triton
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
    PairTile,
    Tile,
    TileSums,
)
from liger_rl.kernels.reference import transformed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MEASURES = [Measure(FORWARD), Measure(REVERSE), Measure(MIXTURE, 0.25)]
TRANSFORMS = [
    (LogitTransform(), LogitTransform()),
    (LogitTransform(softcap=3.0, scale=1.4), LogitTransform(temperature=0.6)),
]
N, V, FIRST = 5, 1300, 40  # more than a block of the kernels, and no whole number of them


def pair(transforms, *, bias=True):
    """A student's and a teacher's tile with strides of their own; ids that both or only one of them bans."""
    tiles = []
    for side, transform in enumerate(transforms):
        logits = 4 * torch.randn(N, V + 3 + side, device=DEVICE)[:, :V]
        biases = torch.randn(V, device=DEVICE)
        if transform.softcap is None and not side:
            logits[1, 3:700] = -torch.inf  # of the student alone: a forward KL divergence of infinity
        if transform.softcap is None:
            logits[2, 1000:] = -torch.inf
        tiles.append(Tile(logits, biases if bias else None, transform))
    return tiles


def split(tile: Tile, at: slice) -> Tile:
    return tile._replace(logits=tile.logits[:, at], bias=None if tile.bias is None else tile.bias[at])


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("transforms", TRANSFORMS)
@pytest.mark.parametrize("more", [False, True])
def test_fold_and_gradient(measure, transforms, more):
    """Over two tiles, the second of one block or less."""
    student, teacher = pair(transforms, bias=more)
    targets = torch.tensor([FIRST, FIRST + 17, 0, FIRST + V - 1, FIRST + 900], device=DEVICE)
    results = []
    for kernels in (divergence_triton, divergence):
        state = PairFold.start(N, DEVICE, measure, entropy=more, targets=more)
        parts = [slice(1060), slice(1060, V)]
        for at in parts:
            tile = PairTile(split(student, at), split(teacher, at), targets, FIRST + at.indices(V)[0], measure)
            kernels.fold_pair(tile, state)
        found = divergence.PairStatistics.of(state, measure)
        sums = MixtureSums(*torch.zeros(2, N, device=DEVICE))
        if measure.kind == MIXTURE:
            for at in parts:
                tile = PairTile(split(student, at), split(teacher, at), targets, FIRST, measure)
                kernels.mix_pair(tile, *found[:2], sums)
        results.append((found, sums))
    (found, sums), (truth, expected) = results
    for mine, other in zip((*found, *sums), (*truth, *expected), strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=2e-6)
    g, w, e = torch.randn(3, N, device=DEVICE)
    tokens = PairGradients(
        *truth[:2], w, expected.student if measure.kind == MIXTURE else truth.divergence,
        *((g, -torch.expm1(truth.logps) * g, e, truth.entropy) if more else (None,) * 4),
    )  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        mine, other = (torch.empty(N, V, dtype=dtype, device=DEVICE) for _ in range(2))
        for kernels, out in ((divergence_triton, mine), (divergence, other)):
            kernels.grad_pair(PairTile(student, teacher, targets, FIRST, measure), tokens, out)
        fine = torch.isfinite(tokens.value)
        assert fine.sum() >= N - 1
        torch.testing.assert_close(mine[fine], other[fine], rtol=2e-5 if dtype == torch.float32 else 0.01, atol=1e-6)


def test_nearly_equal_distributions_of_a_mixture():
    """log p - log m of a gap that is much smaller than 1, and of one beyond any exponential, to float32's precision."""
    gap = torch.tensor([0.0, 1e-7, -1e-5, 3e-3, -0.2, 5.0, -80.0, 200.0, -500.0], dtype=torch.float64)
    for beta in (0.001, 0.5, 0.97):
        found = divergence._over_mixture(gap.float(), beta)
        log_m = torch.logaddexp(torch.full_like(gap, math.log1p(-beta)), gap + math.log(beta))
        for mine, exact in zip(found, (-log_m, gap - log_m), strict=True):
            assert ((mine - exact).abs() <= 3e-7 * gap.abs().clamp(min=1e-3)).all()


@pytest.mark.parametrize("kernels", [divergence_triton, divergence])
@pytest.mark.parametrize("measure", MEASURES)
def test_nearly_equal_distributions(kernels, measure):
    """Divergences of about 1e-5 nats of logits around 10, which are a difference of large numbers in one formula."""
    logits = 10 + 2 * torch.randn(N, V, device=DEVICE)
    student, teacher = (Tile(x, None, LogitTransform()) for x in (logits, logits + 1e-2 * torch.randn_like(logits)))
    log_p, log_q = (tile.logits.double().log_softmax(-1) for tile in (student, teacher))
    state = PairFold.start(N, DEVICE, measure, entropy=False, targets=False)
    tile = PairTile(student, teacher, torch.zeros(N, device=DEVICE), 0, measure)
    kernels.fold_pair(tile, state)
    found = divergence.PairStatistics.of(state, measure)
    value = found.divergence
    if measure.kind == FORWARD:
        truth = (log_q.exp() * (log_q - log_p)).sum(-1)
    elif measure.kind == REVERSE:
        truth = (log_p.exp() * (log_p - log_q)).sum(-1)
    else:
        sums = MixtureSums(*torch.zeros(2, N, device=DEVICE))
        kernels.mix_pair(tile, *found[:2], sums)
        value, beta = measure.beta * sums.teacher + (1 - measure.beta) * sums.student, measure.beta
        log_m = torch.log((1 - beta) * log_p.exp() + beta * log_q.exp())
        truth = (beta * log_q.exp() * (log_q - log_m) + (1 - beta) * log_p.exp() * (log_p - log_m)).sum(-1)
    torch.testing.assert_close(value.double(), truth, rtol=0.0, atol=3e-7)
    assert (truth > 1e-6).all()


@pytest.mark.parametrize("kernels", [divergence_triton, divergence])
@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("transforms", TRANSFORMS)
def test_sums_and_bounds_of_tiles(kernels, measure, transforms):
    """Against float64; the last token's heads are so near that what is known of their difference is a bound alone."""
    first, vocab = 2 * TILE_VOCAB, 3 * TILE_VOCAB + 100
    heads = [4 * torch.randn(N, vocab, device=DEVICE) for _ in transforms]
    heads[1][4] = heads[0][4] + 1e-4 * torch.randn(vocab, device=DEVICE)
    student, teacher = (Tile(x, None, transform) for x, transform in zip(heads, transforms, strict=True))
    log_p, log_q = (
        transformed(tile.logits, None, tile.transform).double().log_softmax(-1) for tile in (student, teacher)
    )
    state, tiles = (
        PairFold.start(N, DEVICE, measure, entropy=False, targets=False),
        TileSums.unwritten(N, vocab, DEVICE, measure),
    )
    tiles.x.fill_(torch.nan)
    sums, targets = MixtureSums(*torch.zeros(2, N, device=DEVICE)), torch.zeros(N, device=DEVICE)
    parts = [(at.start, split(student, at), split(teacher, at)) for at in (slice(0, first), slice(first, vocab))]
    for start, own, other in parts:
        kernels.fold_pair(PairTile(own, other, targets, start, measure), state, tiles.part(slice(N), start))
    found = divergence.PairStatistics.of(state, measure)
    over, value = log_p - log_q, found.divergence
    if measure.kind == MIXTURE:
        for start, own, other in parts:
            tile = PairTile(own, other, targets, start, measure)
            kernels.mix_pair(tile, *found[:2], sums, tiles.part(slice(N), start))
        value, beta = sums.student, measure.beta
        over = log_p - torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    p = log_p.exp()
    grad = p - log_q.exp()
    if measure.kind != FORWARD:
        share = 1 - measure.beta if measure.kind == MIXTURE else 1.0
        grad = share * p * (over - (p * over).sum(-1, keepdim=True))
    grad = torch.nn.functional.pad(grad, (0, -vocab % TILE_VOCAB)).unflatten(1, (-1, TILE_VOCAB))
    tokens = PairGradients(*found[:2], torch.ones(N, device=DEVICE), value, None, None, None, None)
    bounds, norm = sparse_pair_triton.part_bounds(tiles, measure, tokens, targets), grad.norm(dim=2).T
    assert (bounds.most >= norm).all()
    assert (bounds.least <= norm.square().sum(0)).all()
    assert (bounds.most[:, :4] <= 1.1 * norm[:, :4] + 1e-6).all()
    assert (bounds.least[:4].sqrt() >= 0.94 * norm[:, :4].square().sum(0).sqrt() - 3e-4).all()
    torch.testing.assert_close(bounds.rest.double(), grad.sum(2).T, rtol=1e-4, atol=1e-5)
