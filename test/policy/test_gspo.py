"""Ratios per sequence on packed tokens: logits to loss and gradients, against a float64 loop over segments."""

import math
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import oracles
import oracles_segments
from liger_rl import (
    PolicyBatch,
    PPOClip,
    Segments,
    SequenceMean,
    SequenceSum,
    logits_logprobs,
    ppo_loss_fn,
    reduce_metrics,
)
from liger_rl.policy.segments import segment_sum

BOUNDS = {"epsilon_low": 0.05, "epsilon_high": 0.06}
GSPO = PPOClip(importance_sampling_level="sequence", mean_advantages=True, **BOUNDS)
WEIGHTS = {"uniform": SequenceMean(), "length": SequenceSum()}


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    segments: int
    scale: float
    masked: bool
    dtype: torch.dtype = torch.float32
    weight: str = "uniform"
    divisor: int | None = None

    def __str__(self):
        name = f"{'x'.join(map(str, self.shape))}-{self.segments}seg-scale{self.scale:g}"
        name += f"-{str(self.dtype).removeprefix('torch.')}-{self.weight}"
        return name + "-masked" * self.masked + f"-over{self.divisor}" * (self.divisor is not None)


FLAT, ROWS = (64,), (16, 8)
HALF, BRAIN = torch.float16, torch.bfloat16
CASES = [
    Case(FLAT, 1, 1.0, False),
    Case(FLAT, 1, 4.0, True),
    Case(FLAT, 4, 1.0, True),
    Case(FLAT, 4, 4.0, False),
    Case(FLAT, 16, 1.0, True),
    Case(FLAT, 16, 4.0, False),
    Case(FLAT, 4, 1.0, True, divisor=9),
    Case(FLAT, 16, 4.0, True, divisor=40),
    Case(FLAT, 4, 1.0, True, weight="length"),
    Case(FLAT, 16, 4.0, True, weight="length", divisor=23),
    Case(FLAT, 4, 1.0, True, HALF),
    Case(FLAT, 16, 4.0, False, HALF),
    Case(FLAT, 4, 4.0, True, BRAIN),
    Case(FLAT, 16, 1.0, True, BRAIN, weight="length"),
    Case(ROWS, 16, 1.0, True),
    Case(ROWS, 16, 4.0, False),
    Case(ROWS, 16, 1.0, True, divisor=50),
    Case(ROWS, 16, 4.0, True, weight="length"),
    Case(ROWS, 16, 4.0, True, HALF),
    Case(ROWS, 16, 1.0, False, BRAIN),
]


@dataclass(frozen=True)
class Packed:
    """Tokens in one line; a padded batch is the same with rows as segments."""

    logits: Tensor  # (N, V)
    targets: Tensor  # (N,)
    old: Tensor  # (N,)
    advantages: Tensor  # (N,) per token: their mean over the segment counts
    mask: Tensor  # (N,) bool
    index: Tensor  # (N,) contiguous runs
    count: int

    def where(self, keep: Tensor, *, dense: bool = False) -> "Packed":
        """The tokens at `keep`; dense numbers the segments anew."""
        index = self.index[keep]
        if dense:
            values, index = index.unique(return_inverse=True)
            return Packed(*(x[keep] for x in self.tokens()), index, len(values))
        return Packed(*(x[keep] for x in self.tokens()), index, self.count)

    def tokens(self):
        return self.logits, self.targets, self.old, self.advantages, self.mask


def packed(case: Case, seed: int = 0) -> Packed:
    g = torch.Generator().manual_seed(seed)
    tokens, vocab = (64, 500) if case.shape == FLAT else (128, 256)
    if case.shape == ROWS:
        index = torch.arange(16).repeat_interleave(8)
    else:  # uneven; of 16 segments some are empty
        index = torch.randint(case.segments, (tokens,), generator=g).sort().values
        if case.segments == 16:
            index = torch.where((index == 3) | (index == 9), index + 1, index)
    logits = (case.scale * torch.randn(tokens, vocab, generator=g)).to(case.dtype)
    targets = torch.randint(vocab, (tokens,), generator=g)
    mask = torch.rand(tokens, generator=g) < (0.7 if case.masked else 1.1)
    if case.masked and case.segments == 16:
        mask &= index != 5
    logps = oracles.logits_logprobs(logits.double(), targets)[0]
    per_segment = torch.randn(case.segments, generator=g)
    drift = 0.15 * torch.randn(case.segments, generator=g)  # so that means over many tokens leave the bounds
    old = logps + 0.2 * torch.randn(tokens, generator=g) + drift[index]
    advantages = per_segment[index] + 0.3 * torch.randn(tokens, generator=g)
    return Packed(logits, targets, old.float(), advantages, mask, index, case.segments)


def batch_of(p: Packed, divisor=None, *, all_reduce=None, shape=None) -> PolicyBatch:
    view = (lambda x: x) if shape is None else (lambda x: x.reshape(shape))
    return PolicyBatch(
        advantages=view(p.advantages),
        completion_mask=view(p.mask),
        old_per_token_logps=view(p.old),
        segments=Segments(index=p.index, count=p.count, all_reduce=all_reduce) if shape is None else None,
        num_sequences=divisor,
    )


def ours(p: Packed, weight="uniform", divisor=None, *, shape=None, all_reduce=None):
    """-> loss, gradient of the logits (N, V), metrics."""
    logits = p.logits.clone().requires_grad_()
    view = logits if shape is None else logits.reshape(*shape, -1)
    logps = logits_logprobs(view, p.targets.reshape(view.shape[:-1])).logps
    found = ppo_loss_fn(logps, batch_of(p, divisor, all_reduce=all_reduce, shape=shape), GSPO, WEIGHTS[weight])
    return found.loss.detach(), torch.autograd.grad(found.loss, logits)[0], found.metrics


def loop(p: Packed, weight="uniform", divisor=None, *, eager=False):
    """-> loss, gradient of the logits and ratios; float64 unless eager, which rounds as PyTorch does on the way."""
    logits = p.logits.clone().requires_grad_() if eager else p.logits.double().requires_grad_()
    logps = oracles.logits_logprobs(logits.float() if eager else logits, p.targets)[0]
    loss, ratios = oracles_segments.gspo(
        logps, p.old, p.advantages, p.mask, p.index, p.count, divisor=divisor or p.count, weight=weight, **BOUNDS
    )
    return loss.detach(), torch.autograd.grad(loss, logits)[0], ratios


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def assert_same(found, expected, *, floor=1e-12):
    """The same computation in another order: float32's rounding apart."""
    torch.testing.assert_close(found[0].double(), expected[0].double(), rtol=1e-5, atol=1e-7)
    assert rms(found[1] - expected[1]) <= 1e-5 * rms(expected[1]) + floor


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_loop(case, layout):
    if layout == "padded" and case.shape == FLAT:
        p = packed(case)
        shape, keep = (1, 64), p.index == p.index[0]
        p = p.where(keep, dense=True)  # one segment alone is one row
        shape = (1, len(p.index))
    else:
        p, shape = packed(case), case.shape if layout == "padded" else None
    loss, grad, metrics = ours(p, case.weight, case.divisor, shape=shape)
    expected, truth, ratios = loop(p, case.weight, case.divisor)
    assert loss.dtype == torch.float32
    assert grad.dtype == case.dtype
    assert abs(loss.item() - expected.item()) <= 1e-5 * abs(expected.item())
    assert (grad[~p.mask] == 0).all()
    assert truth.any() or not any(1 - BOUNDS["epsilon_low"] < r < 1 + BOUNDS["epsilon_high"] for r in ratios)
    if case.dtype == torch.float32:
        assert rms(grad - truth) <= max(1e-5 * rms(truth), 1e-7)
    else:
        eager = loop(p, case.weight, case.divisor, eager=True)[1]
        assert rms(grad - truth) <= 2 * rms(eager - truth) + 1e-7
    if case.segments == 16 and layout == "packed":
        assert 0 < metrics["clip_ratio"].item() < 1


def test_the_cases_are_not_trivial():
    """Most have gradient, some segments of most are clipped, and where a case is masked something is."""
    with_gradient = clipped = 0
    for case in CASES:
        p = packed(case)
        _, truth, ratios = loop(p)
        with_gradient += truth.any().item()
        clipped += any(not 1 - BOUNDS["epsilon_low"] <= r <= 1 + BOUNDS["epsilon_high"] for r in ratios)
        assert case.masked == (not p.mask.all())
    assert with_gradient >= len(CASES) - 2
    assert clipped >= len(CASES) - 4


MANY = Case(FLAT, 16, 1.0, True)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("boundaries", [(1,), (2, 5, 11), tuple(range(1, 16))])
@pytest.mark.parametrize("renumbered", [False, True])
def test_micro_batches_at_segment_boundaries(weight, boundaries, renumbered):
    """With the same divisor they sum to the whole, whether a part counts its own segments or those of all."""
    p = packed(MANY)
    expected = ours(p, weight, 13)
    total, grads = 0.0, torch.zeros_like(p.logits)
    for low, high in zip((0, *boundaries), (*boundaries, 16), strict=True):
        keep = (p.index >= low) & (p.index < high)
        loss, grad, _ = ours(p.where(keep, dense=renumbered), weight, 13)
        total += loss
        grads[keep] = grad
    assert_same((total, grads), expected)
    assert expected[1].any()


@pytest.mark.parametrize("weight", WEIGHTS)
def test_padded_and_packed_agree(weight):
    p = packed(Case(ROWS, 16, 1.0, True))
    padded = ours(p, weight, 11, shape=ROWS)
    assert_same(ours(p, weight, 11), padded)
    kept = ours(p.where(p.mask), weight, 11)  # without the tokens that do not count
    assert_same((kept[0], kept[1]), (padded[0], padded[1][p.mask]))
    for name, metric in padded[2].items():
        assert kept[2][name].item() == pytest.approx(metric.item(), rel=1e-6), name


def test_order_of_tokens_does_not_matter():
    p = packed(MANY)
    expected = ours(p)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    loss, grad, _ = ours(p.where(order))
    assert_same((loss, grad), (expected[0], expected[1][order]))


def test_the_divisor_is_the_number_of_segments_unless_given():
    p = packed(MANY)
    default, given, twice = ours(p), ours(p, divisor=16), ours(p, divisor=torch.tensor(32))
    assert torch.equal(default[0], given[0])
    torch.testing.assert_close(2 * twice[0], default[0])
    torch.testing.assert_close(2 * twice[1], default[1])


def test_weights_differ_by_the_lengths():
    p = packed(MANY)
    uniform, length = ours(p, "uniform")[1], ours(p, "length")[1]
    sizes = oracles_segments.segment_sums(p.mask.float(), p.index, p.count)[:, None]
    assert sizes[p.mask].unique().numel() > 3
    torch.testing.assert_close(uniform * sizes, length, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_garbage_under_the_mask_stays_there(garbage, layout):
    p = packed(Case(ROWS, 16, 1.0, True))
    logps = oracles.logits_logprobs(p.logits, p.targets)[0]
    shape = ROWS if layout == "padded" else (128,)

    def solve(logps, p):
        leaf = logps.reshape(shape).clone().requires_grad_()
        batch = batch_of(p, shape=None if layout == "packed" else shape)
        loss = ppo_loss_fn(leaf, batch, GSPO, SequenceMean()).loss
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    clean = solve(logps, p)
    assert clean[1].any()
    dirty = [x.masked_fill(~p.mask, garbage) for x in (logps, p.old, p.advantages)]
    found = solve(dirty[0], Packed(p.logits, p.targets, dirty[1], dirty[2], p.mask, p.index, p.count))
    assert torch.equal(found[0], clean[0])
    assert torch.equal(found[1], clean[1])


def test_an_index_past_the_last_segment_belongs_to_none():
    p = packed(MANY)
    expected = ours(p)
    extra = torch.full((5,), p.count)
    longer = Packed(
        torch.cat([p.logits, torch.randn(5, 500)]), torch.cat([p.targets, torch.zeros(5, dtype=torch.long)]),
        torch.cat([p.old, torch.zeros(5)]), torch.cat([p.advantages, torch.ones(5)]),
        torch.cat([p.mask, torch.zeros(5, dtype=torch.bool)]), torch.cat([p.index, extra]), p.count,
    )  # fmt: skip
    loss, grad, _ = ours(longer)
    assert torch.equal(loss, expected[0])
    assert torch.equal(grad[:64], expected[1])
    assert not grad[64:].any()


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


# --- sequences over several ranks -------------------------------------------------------------------------------------


class Group:
    """Ranks as threads: each hands in its tensor, each gets the sum."""

    def __init__(self, ranks):
        self.barrier = threading.Barrier(ranks, timeout=30)
        self.slots = [None] * ranks
        self.calls = [0] * ranks

    def all_reduce(self, rank):
        def reduce(values):
            self.calls[rank] += 1
            self.slots[rank] = values.clone()
            self.barrier.wait()
            total = torch.stack(self.slots).sum(0)
            self.barrier.wait()
            return total

        return reduce

    def run(self, work):
        results, errors = [None] * len(self.slots), []

        def target(rank):
            try:
                results[rank] = work(rank, self.all_reduce(rank))
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=target, args=(rank,)) for rank in range(len(self.slots))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


def halves(p):
    """Each segment's first half to rank 0, its second to rank 1, as sequence parallelism cuts them."""
    place = torch.zeros(len(p.index), dtype=torch.long)
    sizes = torch.bincount(p.index, minlength=p.count)
    for s in range(p.count):
        place[p.index == s] = torch.arange(sizes[s])
    return (2 * place < sizes[p.index]).logical_not().long()


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("ranks_of", ["halves", "thirds", "one rank has nothing"])
@pytest.mark.parametrize("case", [MANY, Case(FLAT, 4, 4.0, True)], ids=str)
def test_ranks_that_share_sequences(case, ranks_of, weight):
    p = packed(case)
    ranks = 3 if ranks_of == "thirds" else 2
    owner = {"halves": halves(p), "thirds": torch.arange(64) % 3, "one rank has nothing": torch.zeros(64)}[ranks_of]
    expected = ours(p, weight, 12)
    group = Group(ranks)

    def work(rank, all_reduce):
        # Another order of tokens and another number of them on each rank.
        return ours(p.where((owner == rank).nonzero()[:, 0].flip(0)), weight, 12, all_reduce=all_reduce)

    results = group.run(work)
    loss, grad = sum(r[0] for r in results), torch.zeros_like(p.logits)
    for rank, result in enumerate(results):
        grad[(owner == rank).nonzero()[:, 0].flip(0)] = result[1]
    assert_same((loss, grad), expected)
    assert expected[1].any()
    assert len(set(group.calls)) == 1  # a collective is entered by all or by none
    alone = torch.zeros_like(grad)  # without the others' sums
    for rank in range(ranks):
        alone[owner == rank] = ours(p.where(owner == rank), weight, 12)[1]
    assert (rms(alone - expected[1]) > 0.01 * rms(expected[1])) == (ranks_of != "one rank has nothing")


def test_metrics_per_sequence_over_ranks_that_share_sequences():
    p = packed(MANY)
    owner, group = halves(p), Group(2)

    def metrics(p, all_reduce=None):
        logps = oracles.logits_logprobs(p.logits.double(), p.targets)[0]
        return ppo_loss_fn(logps, batch_of(p, 12, all_reduce=all_reduce), GSPO, SequenceSum(), metrics="basic").metrics

    parts = group.run(lambda rank, all_reduce: metrics(p.where(owner == rank), all_reduce))
    merged, whole = reduce_metrics(parts), metrics(p)
    assert merged.keys() == whole.keys()
    assert whole["num_sequences"].item() == len(set(p.index[p.mask].tolist())) < p.count
    for name, metric in whole.items():
        assert merged[name].item() == pytest.approx(metric.item(), rel=1e-12), name


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


@pytest.mark.parametrize("count", [1, 3, 7])
def test_segment_sum(count):
    index = torch.randint(count, (23,), generator=torch.Generator().manual_seed(count))
    values = torch.randn(23, dtype=torch.float64, requires_grad=True)
    segments = Segments(index=index, count=count)
    found, expected = segment_sum(values, segments), oracles_segments.segment_sums(values, index, count)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(23, dtype=torch.float64)
    mine, truth = (torch.autograd.grad(x, values, upstream)[0] for x in (found, expected))
    torch.testing.assert_close(mine, truth, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: segment_sum(x, segments), values)


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
    p = packed(Case(FLAT, 4, 1.0, True))
    logps = oracles.logits_logprobs(p.logits.double(), p.targets)[0].requires_grad_()
    wide = PPOClip(importance_sampling_level="sequence", mean_advantages=True, epsilon_low=0.9, epsilon_high=9.0)

    def loss(logps):
        return ppo_loss_fn(logps, batch_of(p), wide, SequenceMean()).loss

    assert torch.autograd.gradcheck(loss, logps)
    assert torch.autograd.gradgradcheck(loss, logps)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "error", "make"),
    [
        ("index", TypeError, lambda: Segments(index=torch.zeros(3), count=1)),
        ("index", TypeError, lambda: Segments(index=torch.zeros(3, 1, dtype=torch.long), count=1)),
        ("index", TypeError, lambda: Segments(index=[0, 1], count=2)),
        ("count", ValueError, lambda: Segments(index=torch.zeros(3, dtype=torch.long), count=-1)),
        ("count", ValueError, lambda: Segments(index=torch.zeros(3, dtype=torch.long), count=1.0)),
        ("cu_seqlens", ValueError, lambda: Segments.from_cu_seqlens(torch.zeros(0, dtype=torch.long), 3)),
        ("cu_seqlens", ValueError, lambda: Segments.from_cu_seqlens(torch.zeros(2, 2, dtype=torch.long), 3)),
        ("index", TypeError, lambda: Segments(index=torch.zeros(3, dtype=torch.bool), count=1)),
        ("index", TypeError, lambda: Segments(index=torch.zeros(3, dtype=torch.complex64), count=1)),
        ("all_reduce", TypeError, lambda: Segments(index=torch.zeros(3, dtype=torch.long), count=1, all_reduce=1)),
        ("cu_seqlens", TypeError, lambda: Segments.from_cu_seqlens([0, 3], 3)),
        ("cu_seqlens", TypeError, lambda: Segments.from_cu_seqlens(torch.tensor([0.0, 3.0]), 3)),
        ("cu_seqlens must start at 0", ValueError, lambda: Segments.from_cu_seqlens(torch.tensor([1, 3]), 3)),
        ("cu_seqlens must start at 0", ValueError, lambda: Segments.from_cu_seqlens(torch.tensor([-1, 3]), 3)),
        ("cu_seqlens must never", ValueError, lambda: Segments.from_cu_seqlens(torch.tensor([0, 3, 2]), 3)),
        ("num_tokens", ValueError, lambda: Segments.from_cu_seqlens(torch.tensor([0, 3]), -1)),
        ("num_tokens", ValueError, lambda: Segments.from_cu_seqlens(torch.tensor([0, 3]), 3.0)),
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
