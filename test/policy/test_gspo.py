"""Losses per sequence on packed tokens, against a float64 loop over segments, and the sums that they need.

Over ranks that share sequences: test/distributed/test_sequences.py.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import oracles_segments
from liger_rl import PolicyBatch, PPOClip, Segments, SequenceMean, SequenceSum, ppo_loss_fn
from liger_rl.policy.segments import segment_sum

BOUNDS = {"epsilon_low": 0.05, "epsilon_high": 0.06}
GSPO = PPOClip(importance_sampling_level="sequence", mean_advantages=True, **BOUNDS)
WEIGHTS = {"uniform": SequenceMean(), "length": SequenceSum()}
ROWS = (16, 8)  # the segments of `packed(rows=True)`, padded


@dataclass(frozen=True)
class Packed:
    """Tokens in one line, float64; a padded batch is the same with rows as segments."""

    logps: Tensor  # (N,)
    old: Tensor  # (N,)
    advantages: Tensor  # (N,) per token: their mean over the segment counts
    mask: Tensor  # (N,) bool
    index: Tensor  # (N,) contiguous runs
    count: int

    def where(self, keep: Tensor, *, dense: bool = False) -> "Packed":
        """The tokens at `keep`; dense numbers the segments anew."""
        kept = (x[keep] for x in (self.logps, self.old, self.advantages, self.mask))
        if not dense:
            return Packed(*kept, self.index[keep], self.count)
        values, index = self.index[keep].unique(return_inverse=True)
        return Packed(*kept, index, len(values))


def packed(segments=16, *, masked=True, rows=False) -> Packed:
    """64 tokens in uneven segments, of 16 some empty and one all masked; or 16 rows of 8."""
    g = torch.Generator().manual_seed(0)
    tokens = 128 if rows else 64

    def normal(n):
        return torch.randn(n, generator=g, dtype=torch.float64)

    index = torch.arange(16).repeat_interleave(8) if rows else torch.randint(segments, (64,), generator=g).sort().values
    if segments == 16 and not rows:
        index = torch.where((index == 3) | (index == 9), index + 1, index)
    mask = torch.rand(tokens, generator=g) < (0.7 if masked else 1.1)
    if masked and segments == 16:
        mask &= index != 5
    logps = -normal(tokens).abs() - 0.1
    drift = 0.15 * normal(segments)  # so that means over many tokens leave the bounds
    old = logps + 0.2 * normal(tokens) + drift[index]
    return Packed(logps, old, normal(segments)[index] + 0.3 * normal(tokens), mask, index, segments)


def loss_of(logps, p: Packed, weight="uniform", divisor=None, *, shape=None, objective=GSPO):
    """Packed; padded with a shape."""
    logps, advantages, mask, old = (x.reshape(shape or (-1,)) for x in (logps, p.advantages, p.mask, p.old))
    batch = PolicyBatch(
        advantages=advantages,
        completion_mask=mask,
        old_per_token_logps=old,
        segments=Segments(index=p.index, count=p.count) if shape is None else None,
        num_sequences=divisor,
    )
    return ppo_loss_fn(logps, batch, objective, WEIGHTS[weight], metrics="basic")


def ours(p: Packed, *arguments, **options):
    """-> loss, gradient (N,), metrics."""
    leaf = p.logps.clone().requires_grad_()
    found = loss_of(leaf, p, *arguments, **options)
    return found.loss.detach(), torch.autograd.grad(found.loss, leaf)[0], found.metrics


def assert_same(found, expected):
    for mine, truth in zip(found[:2], expected[:2], strict=True):
        assert truth.any()
        torch.testing.assert_close(mine, truth, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("divisor", [None, torch.tensor(40)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("segments", [1, 4, 16, "rows", "padded rows"])
def test_against_the_loop(segments, masked, divisor, weight):
    p = packed(segments, masked=masked) if isinstance(segments, int) else packed(masked=masked, rows=True)
    shape = ROWS if segments == "padded rows" else None
    leaf = p.logps.clone().requires_grad_()
    count = p.count if divisor is None else int(divisor)
    truth, ratios = oracles_segments.gspo(
        leaf, p.old, p.advantages, p.mask, p.index, p.count, divisor=count, weight=weight, **BOUNDS
    )
    clipped = sum(not 1 - BOUNDS["epsilon_low"] <= r <= 1 + BOUNDS["epsilon_high"] for r in ratios)
    assert clipped > 3 or p.count <= 4
    found = ours(p, weight, divisor, shape=shape)
    if truth.requires_grad:  # one segment alone may be clipped
        assert_same(found, (truth.detach(), torch.autograd.grad(truth, leaf)[0]))
    else:
        torch.testing.assert_close(found[0], truth)
        assert not found[1].any()


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("boundaries", [(1,), (2, 5, 11), tuple(range(1, 16))])
@pytest.mark.parametrize("renumbered", [False, True])
def test_micro_batches_at_segment_boundaries(weight, boundaries, renumbered):
    """With the same divisor they sum to the whole, whether a part counts its own segments or those of all."""
    p = packed()
    total, grads = torch.zeros((), dtype=torch.float64), torch.zeros_like(p.logps)
    for low, high in zip((0, *boundaries), (*boundaries, 16), strict=True):
        keep = (p.index >= low) & (p.index < high)
        loss, grad, _ = ours(p.where(keep, dense=renumbered), weight, 13)
        total += loss
        grads[keep] = grad
    assert_same((total, grads), ours(p, weight, 13))


@pytest.mark.parametrize("weight", WEIGHTS)
def test_tokens_that_do_not_count_may_be_left_out(weight):
    p = packed(rows=True)
    padded, kept = ours(p, weight, 11, shape=ROWS), ours(p.where(p.mask), weight, 11)
    assert_same(kept, (padded[0], padded[1][p.mask]))
    expected = {name: metric.item() for name, metric in padded[2].items()}
    assert {name: metric.item() for name, metric in kept[2].items()} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [None, ROWS], ids=["packed", "padded"])
def test_garbage_under_the_mask_stays_there(garbage, shape):
    p = packed(rows=True)
    dirty = replace(p, **{k: getattr(p, k).masked_fill(~p.mask, garbage) for k in ("logps", "old", "advantages")})
    clean, found = ours(p, shape=shape), ours(dirty, shape=shape)
    assert clean[1].any()
    assert torch.equal(found[0], clean[0])
    assert torch.equal(found[1], clean[1])


@pytest.mark.parametrize("outside", [16, 1000, -1])
def test_an_index_outside_belongs_to_no_segment(outside):
    p = packed()
    more = [torch.cat([x, x.new_ones(5)]) for x in (p.logps, p.old, p.advantages)]
    index = torch.cat([p.index, torch.full((5,), outside)])
    loss, grad, _ = ours(Packed(*more, torch.cat([p.mask, torch.zeros(5, dtype=torch.bool)]), index, p.count))
    expected = ours(p)
    assert torch.equal(loss, expected[0])
    assert torch.equal(grad, torch.cat([expected[1], torch.zeros(5)]))


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
    advantages = torch.tensor([1.5, 1.5, 1.5, 1.5, 1.5, -0.7, -0.7], dtype=torch.float64)
    lengths = [5, 2]
    segments = Segments.from_cu_seqlens(torch.tensor([0, 5, 7]), 7)
    batch = PolicyBatch(advantages=advantages, old_per_token_logps=old, segments=segments)
    objective = PPOClip(importance_sampling_level="sequence", mean_advantages=True)
    expected = 0.0
    for ours, theirs, a in zip(logps.split(lengths), old.split(lengths), advantages.split(lengths), strict=True):
        ratio = (ours - theirs).mean().exp()
        per_token = -torch.minimum(ratio * a.mean(), ratio.clamp(0.8, 1.2) * a.mean())
        expected = expected + len(a) * per_token / 2
    found = ppo_loss_fn(logps, batch, objective, SequenceSum(), metrics="basic")
    torch.testing.assert_close(found.loss, expected, rtol=1e-12, atol=0)
    grads = [torch.autograd.grad(x, logps, retain_graph=True)[0] for x in (found.loss, expected)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=0)
    assert ppo_loss_fn(logps, batch, objective, SequenceMean()).loss.item() != pytest.approx(expected.item(), rel=0.5)
    assert found.metrics["num_sequences"].item() == pytest.approx(2)


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


def test_gradcheck_of_the_loss():
    p = packed(4)
    wide = replace(GSPO, epsilon_low=0.9, epsilon_high=9.0)

    def loss(logps):
        return loss_of(logps, p, objective=wide).loss

    leaf = p.logps.clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, leaf)
    assert torch.autograd.gradgradcheck(loss, leaf)


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
    batch = PolicyBatch(advantages=torch.ones(shape), segments=segments, num_sequences=1)
    with pytest.raises(error, match="segments"):
        ppo_loss_fn(torch.zeros(shape, requires_grad=True), batch, GSPO, SequenceSum())
