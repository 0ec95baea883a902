"""The choice of parts: Triton's beside that of plain PyTorch.

`test/head/test_divergence_tolerance.py` holds the latter's certificate to float64."""

import math

import pytest
import torch

from devices import skip_without_interpreter
from head_calls import run_triton
from liger_rl.kernels import divergence, divergence_tiles, divergence_tiles_triton
from liger_rl.kernels.divergence import (
    FORWARD,
    MIXTURE,
    REVERSE,
    TILE_VOCAB,
    Measure,
    MixtureSums,
    PairFold,
    PairGradients,
    PairStatistics,
    Tile,
    TileSums,
)
from liger_rl.kernels.divergence_tiles import TileBounds
from liger_rl.kernels.transform import LogitTransform

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MEASURES = [Measure(FORWARD), Measure(REVERSE), Measure(MIXTURE, 0.25)]
BOTH = (divergence_tiles_triton, divergence_tiles)
N, V = 45, 5 * TILE_VOCAB + 100
TILES = 6
SILENT, DEAD = 3, 7  # tokens: without a gradient; that are NaN, without a gradient


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    if DEVICE.type == "cpu":
        skip_without_interpreter()
        run_triton(monkeypatch)


def given(measure: Measure, *, with_logps: bool) -> tuple[TileSums, Measure, PairGradients, torch.Tensor]:
    """Of heads that are sure of an entry each, and differ in most tiles."""
    z = 2 * torch.randn(N, V, device=DEVICE)
    z[torch.arange(N), torch.randint(V, (N,))] += 14 * torch.rand(N, device=DEVICE)
    student, teacher = (Tile(x, None, LogitTransform()) for x in (z, z + 0.2 * torch.randn_like(z)))
    student.logits[DEAD] = torch.nan
    targets = torch.randint(V, (N,), device=DEVICE)
    state = PairFold.start(N, DEVICE, measure, entropy=False, targets=True)
    sums = TileSums.unwritten(N, V, DEVICE, measure)
    divergence.fold_pair(student, teacher, targets, 0, measure, state, sums)
    known = PairStatistics.of(state, measure)
    value = known.divergence
    if measure.kind == MIXTURE:
        mixed = MixtureSums.start(state.peak)
        divergence.mix_pair(student, teacher, measure, known.lse, known.teacher_lse, mixed, sums)
        value = mixed.student
    grad, of_logps = torch.randn(N, device=DEVICE) * 1e-6, None
    if with_logps:
        of_logps = torch.randn(N, device=DEVICE) * 1e-5
        of_logps[[SILENT, DEAD, 20]] = 0.0
    grad[[SILENT, DEAD]] = 0.0
    return sums, measure, PairGradients.of(known, value, grad, of_logps, None), targets


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("with_logps", [False, True])
def test_bounds(measure, with_logps):
    arguments = given(measure, with_logps=with_logps)
    found, plain = (kernels.bound_parts(*arguments) for kernels in BOTH)
    assert torch.equal(found.wanted, plain.wanted)
    assert found.wanted.sum() == N - 2
    assert found.unit == plain.unit
    assert torch.equal(found.most.isinf(), plain.most.isinf())
    assert found.most.isinf().sum() == (N - 3 if with_logps else 0)
    for mine, other in zip(found[:4], plain[:4], strict=True):
        assert mine.dtype == other.dtype
        mine, other = (torch.where(part.isinf(), 0.0, part)[found.wanted] for part in (mine, other))
        torch.testing.assert_close(mine, other, rtol=2e-3, atol=1e-6)
    for numbers in (found.least, found.size):
        assert (numbers[[SILENT, DEAD]] == 0).all()


def test_negative_targets_are_in_no_tile():
    *rest, targets = given(MEASURES[0], with_logps=True)
    targets[:10:2] = torch.tensor([-1, -2, -TILE_VOCAB + 1, -TILE_VOCAB, -100], device=DEVICE)
    targets[1] = V + TILE_VOCAB
    found, plain = (kernels.bound_parts(*rest, targets) for kernels in BOTH)
    assert torch.equal(found.most.isinf(), plain.most.isinf())
    assert not found.most[[0, 1, 2, 4, 6, 8]].isinf().any()
    torch.testing.assert_close(found.least, plain.least, rtol=2e-3, atol=1e-6)


def test_what_is_not_a_number_is_bounded_by_nothing():
    sums, measure, tokens, targets = given(MEASURES[1], with_logps=True)
    tokens.grad[5] = torch.nan
    for kernels in BOTH:
        bounds = kernels.bound_parts(sums, measure, tokens, targets)
        assert bounds.wanted[5]
        assert bounds.least[5].isnan()
        assert bounds.size[5] == 0
        finite = bounds.most[5].isfinite()
        assert not finite.any()
        chosen = kernels.choose_parts(bounds, torch.rand(TILES, device=DEVICE), 0.5, 1.0, torch.float32)
        assert torch.equal(chosen.keep, bounds.wanted[:, None].expand(N, TILES))
        assert not chosen.left_out.any()


@pytest.mark.parametrize("tokens", [1, 45, 600])
def test_draws(tokens):
    """As often as their sizes say; 600 are more than a step of the kernel."""
    size = torch.rand(tokens, dtype=torch.float64, device=DEVICE) ** 4 + 1e-3
    size[1:2], size[20:21] = 0.0, 30.0
    bounds = TileBounds(size, size, size, size, size > 0, torch.tensor(1e-6, device=DEVICE))
    found, plain = (kernels.draw_tokens(bounds) for kernels in BOTH)
    assert (found.rows != plain.rows).sum() <= 1  # where sums of floats and of units meet
    torch.testing.assert_close(found.scales, (1 / size[found.rows]).float())
    drawn = torch.bincount(found.rows, minlength=tokens)
    assert ((drawn - len(found.rows) * size / size.sum()).abs() <= 1).all()


def test_draws_where_nothing_has_a_size():
    zero = torch.zeros(5, dtype=torch.float64, device=DEVICE)
    bounds = TileBounds(zero, zero, zero, zero, zero > 0, torch.tensor(1.0, device=DEVICE))
    for kernels in BOTH:
        found = kernels.draw_tokens(bounds)
        assert ((found.rows >= 0) & (found.rows < 5)).all()
        assert not found.scales.any()


def test_shares():
    sizes = torch.rand(V, device=DEVICE)
    sizes[TILE_VOCAB : 2 * TILE_VOCAB] = 0.0
    sizes[2 * TILE_VOCAB : 3 * TILE_VOCAB] = 1e38  # whose sum is not finite
    found, plain = (kernels.share_entries(sizes) for kernels in BOTH)
    for mine, other in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, other)
    assert not found.entries[1:3].any()
    assert not found.entries[-1, V % TILE_VOCAB :].any()
    torch.testing.assert_close(found.entries[0].sum().item(), 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_of_shares(dtype, transposed):
    entries = divergence_tiles.share_entries(torch.rand(V, device=DEVICE)).entries
    weight = torch.randn(V, 40, device=DEVICE).to(dtype)
    if transposed:
        weight = weight.T.contiguous().T
    found, plain = (kernels.shared_rows(entries, weight, dtype) for kernels in BOTH)
    assert found.shape == (8, 40)
    assert found.dtype == dtype
    torch.testing.assert_close(found, plain, rtol=2e-3, atol=1e-4)
    assert not found[TILES:].any()


@pytest.mark.parametrize("tolerance", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize("measure", MEASURES)
def test_choices(measure, tolerance):
    bounds = divergence_tiles.bound_parts(*given(measure, with_logps=True))
    squares, slope = torch.rand(TILES, device=DEVICE) / 9, 1.3
    found, plain = (kernels.choose_parts(bounds, squares, tolerance, slope, torch.float32) for kernels in BOTH)
    assert torch.equal(found.keep, plain.keep)
    torch.testing.assert_close(found.left_out, plain.left_out)
    keep, wanted = found.keep, bounds.wanted[:, None]
    assert not (keep & ~wanted).any()
    assert (keep | ~bounds.most.isinf()).all()
    dropped = wanted & ~keep
    error = bounds.most.double() + bounds.total.double().abs() * squares.double().sqrt()
    assert error[dropped].square().sum() <= bounds.least.sum() * tolerance**2
    assert dropped.sum() > N // 2
    assert error[dropped].max() <= error[keep].min() * 1.01
    assert (found.left_out[:, :TILES] != 0).equal(dropped & (bounds.total != 0))
    assert not found.left_out[:, TILES:].any()
    torch.testing.assert_close(found.left_out[:, :TILES][dropped], (slope * bounds.unit * bounds.total)[dropped])


def test_choices_at_the_ends():
    most = torch.rand(N, TILES, device=DEVICE)
    numbers = torch.ones(N, dtype=torch.float64, device=DEVICE)
    wanted = torch.arange(N, device=DEVICE) != SILENT
    bounds = TileBounds(most, most, numbers, numbers, wanted, torch.tensor(1.0, device=DEVICE))
    squares = torch.ones(TILES, device=DEVICE)
    for kernels in BOTH:
        assert not kernels.choose_parts(bounds, squares, 1e3, 1.0, torch.float16).keep.any()
        everything = wanted[:, None].expand(N, TILES)
        # The last budget has room for none of them, and is neither 0 nor infinite.
        for least in (numbers * 0.0, numbers * math.inf, numbers * math.nan, numbers * 1e-18):
            chosen = kernels.choose_parts(bounds._replace(least=least), squares, 0.1, 1.0, torch.float16)
            assert torch.equal(chosen.keep, everything)
        # Alone, one that the budget has no room for has none to share it with.
        alone = TileBounds(most[:1, :1], most[:1, :1], numbers[:1] * 1e-18, numbers[:1], wanted[:1], bounds.unit)
        assert kernels.choose_parts(alone, squares[:1], 0.1, 1.0, torch.float16).keep.all()
