"""Packed tokens with segments: losses per sequence equal those of padded rows. Their values are the fuzzer's.

Over ranks that share sequences: test/distributed/test_sequences.py.
"""

import math
from dataclasses import replace

import pytest
import torch

from liger_rl import (
    GMPO,
    KLPenalty,
    PolicyBatch,
    PPOClip,
    SamplerCorrection,
    Segments,
    SequenceMean,
    SequenceSum,
    ppo_loss_fn,
)
from liger_rl.losses.segments import segment_sum

GSPO = PPOClip(importance_sampling_level="sequence", mean_advantages=True, epsilon_low=0.05, epsilon_high=0.06)
ROWS, LENGTH = 12, 9
LENGTHS = torch.tensor([9, 4, 7, 1, 9, 5, 0, 8, 6, 2, 9, 3])


def columns():
    """-> logps and a PolicyBatch's columns, (B, T) in float64, with holes in the mask and a sequence without tokens."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    logps = -normal(ROWS, LENGTH).abs() - 0.1
    drift = 0.1 * normal(ROWS, 1)  # so that means over many tokens leave the bounds
    mask = (torch.arange(LENGTH) < LENGTHS[:, None]) & (torch.rand(ROWS, LENGTH, generator=g) < 0.8)
    return logps, {
        "advantages": normal(ROWS, 1) + 0.3 * normal(ROWS, LENGTH),
        "completion_mask": mask,
        "old_per_token_logps": logps + 0.2 * normal(ROWS, LENGTH) + drift,
        "ref_per_token_logps": logps + 0.2 * normal(ROWS, LENGTH),
        "sampling_per_token_logps": logps + 0.3 * normal(ROWS, LENGTH),
    }


def packed(logps, parts, keep, *, first=0, count=ROWS):
    """The tokens at `keep` in one line, in the segments from the first on."""
    index = torch.arange(ROWS).repeat_interleave(LENGTH).view(ROWS, LENGTH)[keep] - first
    return logps[keep], {name: column[keep] for name, column in parts.items()} | {
        "segments": Segments(index=index, count=count)
    }


def solve(logps, parts, objective=GSPO, reduction=None, **options):
    """-> loss and metrics."""
    return ppo_loss_fn(logps, PolicyBatch(**parts), objective, reduction or SequenceMean(), metrics="basic", **options)


def assert_same(found, expected, leaf):
    """Value, gradient and metrics."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-11, atol=1e-14)
    grads = [torch.autograd.grad(loss, leaf)[0] for loss, _ in (found, expected)]
    assert grads[1].any()
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-14)
    mine, truth = ({name: metric.item() for name, metric in metrics.items()} for _, metrics in (found, expected))
    assert mine == pytest.approx(truth, rel=1e-11, abs=1e-14)


@pytest.mark.parametrize("divisor", [None, 40, torch.tensor(40)], ids=str)
@pytest.mark.parametrize(
    "objective", [GSPO, GMPO(epsilon_low=0.1, epsilon_high=0.1, mean_importance_ratio=True)], ids=str
)
def test_packed_in_any_order_equals_padded(objective, divisor):
    logps, parts = columns()
    leaf, order = logps.requires_grad_(), torch.randperm(ROWS * LENGTH)
    line, given = packed(leaf, parts, torch.ones(ROWS, LENGTH, dtype=torch.bool))
    segments = Segments(index=given.pop("segments").index[order], count=ROWS)
    given = {name: column[order] for name, column in given.items()} | {"segments": segments, "num_sequences": divisor}
    options = {"kl": KLPenalty(beta=0.1), "sampler_correction": SamplerCorrection(level="token")}
    found = solve(line[order], given, objective, **options)
    expected = solve(leaf, parts | {"num_sequences": divisor}, objective, **options)
    assert 0 < expected.metrics["num_sequences"].item() < ROWS
    assert 0 < expected.metrics["clip_ratio"].item() < 1
    assert_same(found, expected, leaf)


@pytest.mark.parametrize("reduction", [SequenceMean(), SequenceSum()], ids=str)
@pytest.mark.parametrize("boundaries", [(1,), (2, 5, 11), tuple(range(1, 12))])
@pytest.mark.parametrize("renumbered", [False, True])
def test_micro_batches_at_segment_boundaries(reduction, boundaries, renumbered):
    """With the same divisor they sum to the whole, whether a part counts its own segments or those of all."""
    logps, parts = columns()
    leaf = logps.requires_grad_()
    total = 0.0
    for low, high in zip((0, *boundaries), (*boundaries, ROWS), strict=True):
        keep = ((torch.arange(ROWS) >= low) & (torch.arange(ROWS) < high))[:, None].expand(ROWS, LENGTH)
        of_part = {"first": low, "count": high - low} if renumbered else {}
        line, given = packed(leaf, parts, keep, **of_part)
        total = total + solve(line, given | {"num_sequences": 13}, GSPO, reduction).loss
    assert_same((total, {}), (solve(leaf, parts | {"num_sequences": 13}, GSPO, reduction).loss, {}), leaf)


@pytest.mark.parametrize("outside", [ROWS, 1000, -1])
def test_garbage_under_the_mask_stays_there(outside):
    """With a masked token's index that is of no segment."""
    logps, parts = columns()
    line, given = packed(logps, parts, torch.ones(ROWS, LENGTH, dtype=torch.bool))
    masked = ~given["completion_mask"]
    index = given["segments"].index
    dirty = {
        name: value if name in ("completion_mask", "segments") else value.masked_fill(masked, math.nan)
        for name, value in given.items()
    }
    dirty["segments"] = Segments(index=index.masked_fill(masked, outside), count=ROWS)
    leaves = line.clone().requires_grad_(), line.masked_fill(masked, math.inf).requires_grad_()
    clean, found = (solve(leaf, x).loss for leaf, x in zip(leaves, (given, dirty), strict=True))
    grads = [torch.autograd.grad(loss, leaf)[0] for loss, leaf in zip((clean, found), leaves, strict=True)]
    assert grads[0].any()
    assert torch.equal(found, clean)
    assert torch.equal(*grads)


def test_twice_differentiable():
    line, given = packed(*columns(), torch.arange(ROWS)[:, None].expand(ROWS, LENGTH) < 4)
    wide = PPOClip(importance_sampling_level="sequence", mean_advantages=True, epsilon_low=0.9, epsilon_high=9.0)
    leaf = line.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda logps: solve(logps, given, wide).loss, leaf)
    assert torch.autograd.gradgradcheck(lambda logps: solve(logps, given, wide).loss, leaf)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [[3, 0, 5, 1], [9], [0, 0, 4], [2, 2, 0]])
def test_from_cu_seqlens(lengths, dtype):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
    total = sum(lengths)
    segments = Segments.from_cu_seqlens(cu_seqlens, total + 2)
    expected = [s for s, length in enumerate(lengths) for _ in range(length)]
    assert segments.count == len(lengths)
    assert segments.index[:total].tolist() == expected
    assert (segments.index[total:] >= segments.count).all()
    assert not segments.index.is_floating_point()


def test_fast_llms_recipe():
    """Its GSPO at 7d61a1ba: a segment counts by its tokens, and the divisor is the number of documents."""
    logps = torch.tensor([-1.0, -0.4, -2.2, -0.7, -1.5, -0.2, -3.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.1, -0.5, -2.0, -0.9, -1.2, -0.5, -2.8], dtype=torch.float64)
    # Of either sign within a segment: their mean is clipped, or is not, where some of them are.
    advantages = torch.tensor([1.5, -0.5, 1.5, -2.5, -1.5, 0.7, -0.9], dtype=torch.float64)
    expected = 0.0
    for ours, theirs, a in zip(*(x.split([5, 2]) for x in (logps, old, advantages)), strict=True):
        ratio = (ours - theirs).mean().exp()
        per_token = -torch.minimum(ratio * a.mean(), ratio.clamp(0.99, 1.01) * a.mean())
        expected = expected + len(a) * per_token / 2
    segments = Segments.from_cu_seqlens(torch.tensor([0, 5, 7]), 7)
    parts = {"advantages": advantages, "old_per_token_logps": old, "segments": segments}
    objective = replace(GSPO, epsilon_low=0.01, epsilon_high=0.01)
    assert_same((solve(logps, parts, objective, SequenceSum()).loss, {}), (expected, {}), logps)


# --- sums over segments -----------------------------------------------------------------------------------------------


def test_segment_sum_is_exact_and_repeats():
    """Thousands of tokens in one sum, in float32: to one rounding, and the same to the last bit each time."""
    g = torch.Generator().manual_seed(0)
    values = torch.randn(20_000, generator=g) * 10 ** torch.empty(20_000).uniform_(-3, 3, generator=g)
    segments = Segments(index=torch.randint(5, (20_000,), generator=g), count=5)
    found = segment_sum(values, segments)
    for s in range(5):
        mine = segments.index == s
        assert found[mine].unique().numel() == 1
        assert found[mine][0].item() == pytest.approx(math.fsum(values[mine].tolist()), rel=1.2e-7)
    assert all(torch.equal(found, segment_sum(values, segments)) for _ in range(3))


# --- bad input --------------------------------------------------------------------------------------------------------


def of(index, **more):
    return lambda: Segments(index=index, **{"count": 1} | more)


def cumulative(cu_seqlens, num_tokens=3):
    return lambda: Segments.from_cu_seqlens(cu_seqlens, num_tokens)


ZEROS = torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize(
    ("name", "error", "make"),
    [
        *(("index", TypeError, of(x)) for x in (ZEROS.double(), ZEROS[:, None], [0, 1], ZEROS.bool(), ZEROS.cfloat())),
        *(("count", ValueError, of(ZEROS, count=x)) for x in (-1, 1.0, True)),
        ("all_reduce", TypeError, of(ZEROS, all_reduce=1)),
        *(("cu_seqlens", ValueError, cumulative(x)) for x in (ZEROS[:0], ZEROS[:, None])),
        *(("cu_seqlens", TypeError, cumulative(x)) for x in ([0, 3], torch.tensor([0.0, 3.0]))),
        *(("cu_seqlens must start at 0", ValueError, cumulative(torch.tensor([x, 3]))) for x in (1, -1)),
        ("cu_seqlens must never", ValueError, cumulative(torch.tensor([0, 3, 2]))),
        *(("num_tokens", ValueError, cumulative(torch.tensor([0, 3]), x)) for x in (-1, 3.0)),
    ],
)
def test_bad_segments_are_named(name, error, make):
    with pytest.raises(error, match=name):
        make()


@pytest.mark.parametrize(
    ("shape", "segments", "error"),
    [
        ((4, 2), Segments(index=torch.zeros(8, dtype=torch.long), count=1), ValueError),
        ((8,), Segments(index=torch.zeros(7, dtype=torch.long), count=1), ValueError),
        ((8,), torch.zeros(8, dtype=torch.long), TypeError),
        ((8,), None, ValueError),
    ],
)
def test_segments_that_do_not_fit(shape, segments, error):
    parts = {"advantages": torch.ones(shape), "segments": segments, "num_sequences": 1}
    with pytest.raises(error, match="segments"):
        solve(torch.zeros(shape, requires_grad=True), parts, reduction=SequenceSum())
