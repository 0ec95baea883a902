"""Log-probabilities over listed ids, beside full logits in float64 that are -inf elsewhere."""

import math
from collections.abc import Callable
from threading import Barrier, Lock, Thread
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import oracles
from host_reads import host_reads
from liger_rl import LogitTransform
from liger_rl.head.engines import support as engine
from liger_rl.head.engines.two_pass import ProjectionOptions
from liger_rl.head.support import Support, check_missing_target
from liger_rl.kernels import support, support_triton
from liger_rl.kernels.statistics import EXTRAS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
V, H, RANK = 60, 24, 3
PLAIN = LogitTransform()
CAPPED = LogitTransform(softcap=6.0, scale=0.7)


@pytest.fixture(params=[support, support_triton], ids=["eager", "triton"])
def kernels(request, monkeypatch):
    monkeypatch.setattr(engine, "kernels_for", lambda device: request.param)
    if DEVICE.type == "cpu":  # so that Triton's interpreter splits what is short
        for name in ("FEW_SEGMENTS", "MANY_SEGMENTS"):
            monkeypatch.setattr(support_triton, name, getattr(support_triton, name)._replace(piece=8))
    return request.param


class Problem(NamedTuple):
    factors: engine.Factors
    targets: Tensor
    support: Support
    live: Tensor | None
    temperatures: Tensor | None


def options(transform: LogitTransform = PLAIN, **changed) -> ProjectionOptions:
    given = {"entropy": True, "extras": frozenset(EXTRAS), "compute_dtype": torch.float32}
    return ProjectionOptions(transform=transform, chunk_tokens=None, chunk_vocab=None, **{**given, **changed})


def rows_of(sizes: list[int], vocab: int = V) -> list[list[int]]:
    return [torch.randperm(vocab)[:size].tolist() for size in sizes]


def problem(
    rows: list[list[int]],
    targets: list[int] | None = None,
    *,
    dtype=torch.float32,
    more: bool = False,
    live=None,
    vocab: int = V,
) -> Problem:
    """Targets are the last of their rows where they are not given; with `more`, everything that logits are made of."""
    n = len(rows)

    def random(*size: int, std: float, dtype: torch.dtype = dtype) -> Tensor:
        return (torch.randn(*size) * std).to(DEVICE, dtype)

    factors = [random(n, H, std=1.0), random(vocab, H, std=2 / math.sqrt(H))]
    if more:
        factors += [random(vocab, std=1.0), random(n, RANK, std=1.0, dtype=torch.float32), random(vocab, RANK, std=1.0)]
    found = torch.tensor([row[-1] if row else 3 for row in rows] if targets is None else targets)
    temperatures = (0.5 + torch.rand(n)).to(DEVICE) if more else None
    live = None if live is None else torch.tensor(live, device=DEVICE)
    given = Support.from_vllm(rows, device=DEVICE)
    return Problem(engine.Factors(*factors), found.to(DEVICE), given, live, temperatures)


class Result(NamedTuple):
    values: dict[str, Tensor]
    gradients: dict[str, Tensor]


def run(given: Problem, how: ProjectionOptions, g: Tensor, e: Tensor | None, **backward) -> Result:
    factors, targets, listed, live, temperatures = given
    slots = engine.support_slots(listed, targets, live, factors.weight, how)
    assert slots.numbers[:4].tolist() == [0] * 4
    statistics, saved = engine.fold_support(factors, targets, slots, how, temperatures)
    values = statistics._asdict() | {"mean_logits": engine.mean_logits(statistics, saved)}
    needs = tuple(part is not None for part in factors)
    gradients = engine.support_gradients(factors, slots, saved, statistics, g, e, how, needs, temperatures, **backward)
    return Result(values | slots._asdict() | {"full": slots.full}, gradients._asdict())


def expected(given: Problem, transform: LogitTransform, g: Tensor, e: Tensor) -> Result:
    factors, targets, listed, live, temperatures = given
    n, vocab = targets.numel(), factors.weight.shape[0]
    offsets = listed.offsets.tolist()
    mask = torch.zeros(n, vocab, dtype=torch.bool, device=DEVICE)
    for t in range(n):
        mask[t, listed.token_ids[offsets[t] : offsets[t + 1]].long()] = True
        mask[t, targets[t]] = True
    known = listed.offsets.diff() > 0
    known = known if live is None else known & live
    leaves = [None if part is None else part.double().requires_grad_() for part in factors]
    hidden, weight, bias, low_inputs, low_weight = leaves
    x = hidden @ weight.T
    x = x if bias is None else x + bias + low_inputs @ low_weight.T
    z = oracles.transformed(x, temperature=transform.temperature, softcap=transform.softcap, scale=transform.scale)
    z = z if temperatures is None else z / temperatures.double()[:, None]
    log_p = z.masked_fill(~mask, -1e30).log_softmax(-1)
    logps = log_p.gather(1, targets.long()[:, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e3)).sum(1)
    loss = torch.where(known, logps * g + entropy * e, 0.0).sum()
    gradients = torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None])
    values = {
        "logps": logps,
        "entropy": entropy,
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
        "mean_logits": torch.where(mask, z, 0.0).sum(1) / mask.sum(1),
        "is_top1": z.masked_fill(~mask, -1e30).argmax(1) == targets,
    }
    names = ("hidden", "weight", "bias", "low_rank_inputs", "low_rank_weight")
    values = {name: torch.where(known, part, 0).detach() for name, part in values.items()}
    return Result(values, dict(zip(names, gradients, strict=False)))


def check(found: Result, truth: Result, dtype: torch.dtype = torch.float32) -> None:
    for name, value in truth.values.items():
        close(name, found.values[name], value, 1e-5)
    for name, value in truth.gradients.items():
        close(name, found.gradients[name], value, 1e-5 if name == "low_rank_inputs" else torch.finfo(dtype).eps)


def close(name: str, found: Tensor, truth: Tensor, rtol: float) -> None:
    given = {"rtol": max(rtol, 1e-5), "atol": 5e-6, "msg": lambda message: f"{name}: {message}"}
    torch.testing.assert_close(found.double(), truth.double(), **given)


@pytest.mark.parametrize(
    ("transform", "dtype", "more"),
    [
        (PLAIN, torch.float32, False),
        (LogitTransform(temperature=0.7), torch.bfloat16, False),
        (CAPPED, torch.float32, True),
        (LogitTransform(scale=1.5), torch.float16, True),
    ],
)
def test_values_and_gradients(kernels, transform, dtype, more):
    large, vocab = (30, V) if kernels is support_triton and DEVICE.type == "cpu" else (300, 700)
    rows = rows_of([1, 2, 7, large, vocab, 0, 5], vocab)
    rows += [[7, 9, 7, 9, 9, 3], [8] * 20, [11, 12], [5, 5, 6], *rows_of([large], vocab)]
    targets = [row[-1] if row else 3 for row in rows[:-3]] + [13, 5, min(set(range(vocab)) - set(rows[-1]))]
    live = [True] * len(rows)
    live[2] = False
    given = problem(rows, targets, dtype=dtype, more=more, live=live, vocab=vocab)
    g, e = torch.randn(2, len(rows), device=DEVICE)
    found, truth = run(given, options(transform), g, e), expected(given, transform, g, e)
    check(found, truth, dtype)
    assert found.gradients["hidden"].dtype == found.gradients["weight"].dtype == dtype
    assert found.values["full"].nonzero().squeeze(1).tolist() == [5]
    assert found.values["missing"].nonzero().squeeze(1).tolist() == [len(rows) - 3, len(rows) - 1]
    assert found.values["numbers"].tolist() == [0, 0, 0, 0, 2, 1]
    none = options(transform, entropy=False, extras=frozenset())
    found, truth = run(given, none, g, None), expected(given, transform, g, torch.zeros_like(e))
    check(found, truth._replace(values={"logps": truth.values["logps"]}), dtype)


def test_a_single_id_leaves_nothing(kernels):
    """Whatever the row of the weight and the gradient from above hold."""
    given = problem([[4], [5, 5], [6], [7]])
    given.factors.weight[4:8] = math.nan
    g = torch.tensor([1.0, math.inf, 3.0, math.nan], device=DEVICE)
    how = options(extras=frozenset({"log_sum_sq_probs", "is_top1"}))
    found = run(given, how, g, g)
    for name in ("logps", "entropy", "log_sum_sq_probs", "lse"):
        assert (found.values[name] == 0).all()
    assert found.values["is_top1"].all()
    assert (found.gradients["hidden"] == 0).all()
    assert (found.gradients["weight"] == 0).all()
    assert (found.values["kinds"] == support.SINGLE).all()
    assert (found.values["ids"] == V + 1).all()


def test_no_token_and_no_pair(kernels):
    for rows in ([], [[], []]):
        given = problem(rows)
        g = torch.ones(len(rows), device=DEVICE)
        found = run(given, options(), g, g)
        assert found.values["logps"].tolist() == [0.0] * len(rows)
        assert found.values["full"].tolist() == [True] * len(rows)
        assert not found.gradients["weight"].any()
        assert found.gradients["hidden"].shape == (len(rows), H)


def test_popular_ids_and_the_same_bits_twice(kernels):
    """Two ids that all tokens share are split over programs."""
    tokens = 20
    rows = [[17, 3, *row] for row in rows_of([2] * tokens)]
    given = problem(rows, [17] * tokens)
    g, e = torch.randn(2, tokens, device=DEVICE)
    found = run(given, options(), g, e)
    check(found, expected(given, PLAIN, g, e))
    again = run(given, options(), g, e)
    if kernels is support_triton or DEVICE.type == "cpu":
        for name in ("hidden", "weight"):
            assert torch.equal(found.gradients[name], again.gradients[name])


def test_where_the_gradient_of_the_weight_goes(kernels):
    given = problem([[7, 2, 9], [3], [11, 12, 13, 14], [7, 20], list(range(30, 50))], dtype=torch.bfloat16)
    g = torch.randn(5, device=DEVICE)
    how = options(extras=frozenset())
    dense = run(given, how, g, None).gradients["weight"]
    listed = torch.zeros(V, dtype=torch.bool, device=DEVICE)
    listed[given.support.token_ids] = True
    listed[given.targets[1]] = False  # a row of one id
    assert not dense[~listed].any()
    total = torch.randn(V, H, device=DEVICE)
    kept = total.clone()
    assert run(given, options(extras=frozenset(), weight_grad=total), g, None).gradients["weight"] is None
    torch.testing.assert_close((total - kept).bfloat16(), dense, rtol=0.01, atol=1e-6)
    assert torch.equal(total[~listed], kept[~listed])
    out = torch.zeros_like(dense)
    run(given, how, g, None, weight_out=out)
    assert torch.equal(out, dense)
    sparse = run(given, how, g, None, sparse=True).gradients["weight"]
    assert sparse.is_coalesced()
    assert torch.equal(sparse.to_dense(), dense)
    assert sparse.indices().squeeze(0).tolist() == listed.nonzero().squeeze(1).tolist()


def test_a_frozen_head(kernels):
    given = problem(rows_of([3, 9]), more=True)
    g = torch.randn(2, device=DEVICE)
    slots = engine.support_slots(given.support, given.targets, None, given.factors.weight, options())
    statistics, saved = engine.fold_support(given.factors, given.targets, slots, options(), given.temperatures)
    whole = engine.support_gradients(
        given.factors, slots, saved, statistics, None, g, options(), (True,) * 5, given.temperatures
    )
    for place in range(5):
        needs = tuple(place == other for other in range(5))
        one = engine.support_gradients(
            given.factors, slots, saved, statistics, None, g, options(), needs, given.temperatures
        )
        assert [part is not None for part in one] == list(needs)
        assert torch.equal(one[place], whole[place])


class Ranks:
    """Threads that stand for ranks and take turns, because Triton's interpreter serves one at a time."""

    def __init__(self, count: int) -> None:
        self.parts: list = [None] * count
        self.barrier, self.turn = Barrier(count), Lock()

    def reduced(self, rank: int, values: Tensor, how: Callable) -> Tensor:
        self.parts[rank] = values.clone()
        self.turn.release()
        self.barrier.wait(60)
        total = how(torch.stack(self.parts), 0)
        self.barrier.wait(60)
        self.turn.acquire()
        return values.copy_(total)


class Shard:
    def __init__(self, ranks: Ranks, rank: int, start: int, rows: int) -> None:
        self.ranks, self.rank, self.rows, self.vocab = ranks, rank, rows, V
        self.place = SimpleNamespace(vocab_start=start)

    def maximum(self, values: Tensor) -> Tensor:
        return self.ranks.reduced(self.rank, values, torch.amax)

    def total(self, values: Tensor) -> Tensor:
        return self.ranks.reduced(self.rank, values, torch.sum)

    def pending_sum(self, *tensors: Tensor | None):
        wait = lambda: [self.total(t) for t in tensors if t is not None]  # noqa: E731
        return SimpleNamespace(start=lambda: None, wait=wait)


def test_shards_of_the_vocabulary(kernels):
    rows = [*rows_of([1, 2, 9, V, 0]), [7, 9, 7]]
    given = problem(rows, [row[0] if row else 3 for row in rows[:-1]] + [55], more=True)
    g, e = torch.randn(2, len(rows), device=DEVICE)
    bounds, found = [0, 40, 41, V], {}
    ranks = Ranks(3)

    def of_rank(rank: int) -> None:
        part = slice(bounds[rank], bounds[rank + 1])
        shard = Shard(ranks, rank, part.start, part.stop - part.start)
        hidden, weight, bias, low_inputs, low_weight = given.factors
        factors = engine.Factors(hidden, weight[part], bias[part], low_inputs, low_weight[part])
        with ranks.turn:
            found[rank] = run(given._replace(factors=factors), options(CAPPED, shard=shard), g, e)

    threads = [Thread(target=of_rank, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gradients = dict(found[0].gradients)
    for name in ("weight", "bias", "low_rank_weight"):
        gradients[name] = torch.cat([found[rank].gradients[name] for rank in range(3)])
    for rank in range(3):
        own = gradients | {name: found[rank].gradients[name] for name in ("hidden", "low_rank_inputs")}
        check(Result(found[rank].values, own), expected(given, CAPPED, g, e))


def test_the_host_waits_for_nothing(monkeypatch):
    monkeypatch.setattr(engine, "kernels_for", lambda device: support_triton)
    given = problem(rows_of([3, 9, 1]), more=True)
    with host_reads(DEVICE) as reads:
        slots = engine.support_slots(given.support, given.targets, None, given.factors.weight, options())
        statistics, saved = engine.fold_support(given.factors, given.targets, slots, options(), given.temperatures)
        upstream = torch.ones(3, device=DEVICE)
        needs = (True,) * 5
        engine.support_gradients(
            given.factors, slots, saved, statistics, upstream, None, options(), needs, given.temperatures
        )
    # The interpreter reads every scalar that it loads.
    assert not [name for name in reads.names if DEVICE.type == "cuda" or name != "_local_scalar_dense"]


def test_makers():
    listed = Support.from_padded(torch.tensor([[[3, -1, 5], [-1, -1, -1]], [[1, 2, 0], [-1, 4, -1]]]))
    assert (listed.token_ids.tolist(), listed.offsets.tolist()) == ([3, 5, 1, 2, 0, 4], [0, 2, 2, 5, 6])
    assert listed.tokens == 4
    mask = SimpleNamespace(token_ids=[3, 5, 1], offsets=[0, 2, 3])
    assert Support.from_vllm(mask).token_ids.tolist() == [3, 5, 1]
    assert Support.from_vllm([[3, 5], None, [1]]).offsets.tolist() == [0, 2, 2, 3]
    assert Support.from_vllm([mask, mask], length=3).offsets.tolist() == [0, 2, 3, 3, 5, 6, 6]
    with pytest.raises(ValueError, match=r"length must be at least 2 from mask\[0\], got 1"):
        Support.from_vllm([mask, mask], length=1)


@pytest.mark.parametrize(
    "given", [{"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.8, "top_k": 20, "min_p": 0.05}, {"top_p": 1e-6}]
)
def test_from_logits_is_hugging_faces(given):
    warpers = pytest.importorskip("transformers").generation.logits_process
    logits = 3 * torch.randn(6, 50)
    scores = warpers.TemperatureLogitsWarper(0.8)(None, logits)
    names = {"top_k": warpers.TopKLogitsWarper, "top_p": warpers.TopPLogitsWarper, "min_p": warpers.MinPLogitsWarper}
    for name, warper in names.items():
        scores = warper(given[name])(None, scores) if name in given else scores
    listed = Support.from_logits(logits, temperature=0.8, **given)
    rows = [set(row.tolist()) for row in listed.token_ids.tensor_split(listed.offsets[1:-1])]
    assert rows == [set(row.isfinite().nonzero().squeeze(1).tolist()) for row in scores]


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Support([1], ints(0, 1)), "token_ids must be a tensor, got list"),
        (lambda: Support(ints(1).float(), ints(0, 1)), "token_ids must be int32 or int64, got torch.float32"),
        (lambda: Support(ints(1)[None], ints(0, 1)), r"token_ids must be \(P,\), got \(1, 1\)"),
        (lambda: Support(ints(1), ints(0, 1)[:0]), r"offsets must be \(N \+ 1,\) with at least the 0"),
        (lambda: Support(ints(1, 2), ints(1, 2)), "offsets must start at 0, got 1"),
        (lambda: Support(ints(1, 2), ints(0, 2, 1)), "offsets must never decrease, got 2 and then 1 at row 1"),
        (lambda: Support(ints(1, 2), ints(0, 1)), "offsets must end at the number of token_ids, 2, got 1"),
        (lambda: Support(ints(1, -2), ints(0, 2)), "token_ids must be token ids at least 0, got -2"),
        (lambda: Support(ints(1, 2), ints(0, 2)).check_together(ints(1, 2)), "a row for each of the 2 tokens"),
        (lambda: Support.from_padded(ints(1, 2)), r"ids must be \(N, K\) or \(B, T, K\), got \(2,\)"),
        (lambda: Support.from_vllm(3), "mask must have token_ids and offsets, or be a list"),
        (lambda: Support.from_vllm([[0.5]]), "token_ids must be int32 or int64"),
        (lambda: Support.from_logits(torch.ones(1, 2), top_p=1.5), "top_p must be above 0 and at most 1, got 1.5"),
        (lambda: Support.from_logits(torch.ones(1, 2), temperature=0.0), "temperature must be above 0, got 0.0"),
        (lambda: Support.from_logits(torch.ones(1, 2), top_k=0), "top_k must be at least 1, got 0"),
        (lambda: check_missing_target("drop"), r"missing_target must be one of \['add', 'error'\], got 'drop'"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


class Unchecked(Support):
    """As on a GPU, where a Support is made without a look at its values."""

    def __post_init__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        ([1, 2, 3], [1, 2, 3], "offsets must start at 0, got 1"),
        ([1, 2, 3], [0, 3, 1], "offsets must never decrease, got 3 and then 1 at row 1"),
        ([1, 2, 3], [0, -5, 3], "offsets must never decrease, got 0 and then -5 at row 0"),
        ([1, 2, 3], [0, 1, 900], "offsets must end at the number of token_ids, 3, got 900"),
        ([1, 2, V], [0, 1, 3], rf"token_ids must be token ids in \[0, {V}\) from weight, got {V}"),
        ([1, -7, 2], [0, 1, 3], rf"token_ids must be token ids in \[0, {V}\) from weight, got -7"),
        ([1, 2, 3], [0, 1, 3], "targets must be among their row's ids with missing_target='error'; 1 of them are not"),
    ],
)
def test_bad_values_do_no_harm_and_are_named(kernels, ids, offsets, message):
    listed = Unchecked(torch.tensor(ids, device=DEVICE), torch.tensor(offsets, device=DEVICE))
    given = problem([[1], [2]], [1, 9])
    slots = engine.support_slots(listed, given.targets, None, given.factors.weight, options())
    statistics, saved = engine.fold_support(given.factors, given.targets, slots, options())
    g = torch.ones(2, device=DEVICE)
    engine.support_gradients(given.factors, slots, saved, statistics, g, g, options(), (True,) * 5)
    with pytest.raises(ValueError, match=message):
        listed.check_values(slots.numbers.tolist(), vocab=V, missing_target="error")
