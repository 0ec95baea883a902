"""Products of kept parts: Triton's beside those of plain PyTorch.

`test/head/test_divergence_tolerance.py` holds the latter to the exact gradients."""

import pytest
import torch

from devices import skip_without_interpreter
from head_calls import run_triton
from liger_rl import LogitTransform
from liger_rl.head.engines.divergence_parts import kernels_for
from liger_rl.kernels import devices, kept_parts, kept_parts_triton
from liger_rl.kernels.devices import PORTABLE, TMA
from liger_rl.kernels.divergence import FORWARD, MIXTURE, REVERSE, Measure, PairGradients
from liger_rl.kernels.divergence_tiles import Drawn
from liger_rl.kernels.kept_parts import HeadRows, LeftOutParts, PartInputs, PartSums

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOW = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter makes no bfloat16 products
MEASURES = [Measure(FORWARD), Measure(REVERSE), Measure(MIXTURE, 0.25)]
N, WIDTH = 150, 128  # more tokens than a program takes
V = 3 * WIDTH + 40  # the last tile is not whole
SIZES = (80, 144)  # no multiples of a step; of 16, which the interpreter of Triton 3.4 wants


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    if DEVICE.type == "cpu":
        skip_without_interpreter()
        run_triton(monkeypatch, epilogue=True)


def inputs(measure: Measure, *, more: bool, dtype: torch.dtype = LOW) -> PartInputs:
    """Of heads that agree in part; with `more` biases, transforms of both, and gradients of log-probabilities."""

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=DEVICE)

    heads, logits = [], []
    for size, transform in zip(SIZES, (LogitTransform(temperature=0.8), LogitTransform(softcap=9.0)), strict=True):
        hidden, weight = random(N, size).to(dtype), (random(V, size) / size**0.5).to(dtype)
        bias = random(V).to(dtype) if more else None
        heads.append(HeadRows(hidden, weight, bias, transform if more else LogitTransform()))
        logits.append(2 * random(N, V))
    lse, teacher_lse = (part.logsumexp(-1) for part in logits)
    targets = torch.randint(-1, V, (N,), device=DEVICE)
    of_logps = (random(N), random(N)) if more else (None, None)
    tokens = PairGradients(lse, teacher_lse, random(N), random(N), *of_logps, None, None)
    return PartInputs(*heads, measure, targets, tokens)


def chosen() -> tuple[torch.Tensor, list[int]]:
    """Tiles that all tokens keep, that some do, and that none does."""
    keep = torch.rand(N, 4, device=DEVICE) < torch.tensor([1.1, 0.3, -1.0, 0.6], device=DEVICE)
    keep[5] = False
    return keep, keep.sum(0).tolist()


def sums_of(kernels, given: PartInputs, keep, counts, workspace: int, left_out: LeftOutParts, needs) -> PartSums:
    size = given.student.hidden.shape[1]
    dtype = given.student.weight.dtype
    start = torch.linspace(-1, 1, size, device=DEVICE).repeat(N, 1)
    nan = torch.full((V, size), torch.nan, dtype=dtype, device=DEVICE)
    sums = PartSums(*(x if need else None for x, need in zip((start, nan, nan[:, 0].clone()), needs, strict=True)))
    begun = kernels.begin(given, keep, keep.any(1))
    assert begun.numbers.tolist() == [*counts, int(keep.any(1).sum())]
    kernels.add_parts(begun, counts, left_out, sums, workspace)
    return sums


def left_out_of(given: PartInputs, tiles: int = 4) -> LeftOutParts:
    shares = torch.rand(tiles, WIDTH, device=DEVICE)
    shares[-1, V % WIDTH :] = 0.0
    size = given.student.hidden.shape[1]
    return LeftOutParts(shares, torch.randn(tiles + 4, size, device=DEVICE), torch.randn(tiles, device=DEVICE))


@pytest.mark.parametrize(
    ("room", "family"),
    [(1, TMA), (1 << 30, TMA), (1 << 30, PORTABLE[0]), (1, PORTABLE[2])],
    ids=["a tile at a time", "all at once", "with pointers", "with pointers in small steps"],
)
@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("more", [False, True])
def test_sums_of_parts(measure, more, room, family, monkeypatch):
    if DEVICE.type == "cpu" or not family.tma:
        monkeypatch.setattr(kept_parts_triton, "family_of", lambda device: family)
    given, (keep, counts) = inputs(measure, more=more), chosen()
    left_out, needs = left_out_of(given), (True, True, more)
    assert kernels_for(given) is kept_parts_triton
    mine, again, plain = (
        sums_of(kernels, given, keep, counts, room, left_out, needs)
        for kernels in (kept_parts_triton, kept_parts_triton, kept_parts)
    )
    for found, same, other in zip(mine, again, plain, strict=True):
        if other is None:
            assert found is None
            continue
        assert torch.equal(found, same)
        # Parts are rounded to 16 bits by both, some of them to its other neighbour.
        torch.testing.assert_close(found.float(), other.float(), rtol=0.02, atol=0.01 * other.float().std().item())


@pytest.mark.parametrize("needed", [0, 1])
def test_one_gradient_alone(needed):
    given, (keep, counts) = inputs(MEASURES[0], more=False), chosen()
    left_out, needs = left_out_of(given), tuple(place == needed for place in range(3))
    given_all = sums_of(kept_parts_triton, given, keep, counts, 1 << 30, left_out, (True, True, False))
    found = sums_of(kept_parts_triton, given, keep, counts, 1 << 30, left_out, needs)
    assert torch.equal(found[needed], given_all[needed])


def test_no_part():
    given = inputs(MEASURES[0], more=True)
    keep, left_out = torch.zeros(N, 4, dtype=torch.bool, device=DEVICE), left_out_of(given)
    for kernels in (kept_parts_triton, kept_parts):
        found = sums_of(kernels, given, keep, [0] * 4, 1 << 30, left_out, (True, True, True))
        size = given.student.hidden.shape[1]
        assert torch.equal(found.hidden, torch.linspace(-1, 1, size, device=DEVICE).repeat(N, 1))
        spread = (left_out.shares[:, :, None] * left_out.hidden[:4, None]).flatten(0, 1)[:V]
        torch.testing.assert_close(found.weight, spread.to(LOW))


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("more", [False, True])
def test_sizes_of_entries(measure, more):
    given = inputs(measure, more=more)
    drawn = Drawn(torch.tensor([3, 3, 20, 149] * 4, device=DEVICE), torch.linspace(0, 2, 16, device=DEVICE))
    given.tokens.grad[20] = torch.nan
    found, plain = (kernels.entry_sizes(given, drawn) for kernels in (kept_parts_triton, kept_parts))
    assert plain.isfinite().all()
    assert plain.amin() > 0
    torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-4 * plain.mean().item())


def test_where_they_apply(monkeypatch):
    given = inputs(MEASURES[0], more=False)
    assert kernels_for(given.take(torch.arange(3, device=DEVICE))) is kept_parts_triton  # any number of tokens
    assert kernels_for(inputs(MEASURES[0], more=False, dtype=torch.float32)) is kept_parts
    teacher = given.teacher._replace(weight=given.teacher.weight.float())
    assert kernels_for(given._replace(teacher=teacher)) is kept_parts
    monkeypatch.setattr(devices, "compiles", lambda device: False)
    assert kernels_for(given) is kept_parts
