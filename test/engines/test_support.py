"""Log-probabilities over the ids that each token lists, beside full logits in float64 that are -1e30 elsewhere."""

import copy
import math
import pickle
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import oracles
from devices import NEEDS_GPU, skip_without_interpreter
from head_calls import EXTRAS, SCALING, Problem, call, functional, problem
from host_reads import host_reads
from liger_rl import FusedLinearGRPOLoss, LogitTransform, PolicyBatch, Support, ppo_loss_fn
from liger_rl.engines.sparse import slots_triton
from liger_rl.engines.sparse import support as engine
from liger_rl.kernels import segments_triton
from liger_rl.losses.objectives import PPOClip
from liger_rl.losses.reductions import GlobalTokenMean

CUDA = torch.cuda.is_available()
ONLY_WITHOUT_GPU = pytest.mark.skipif(CUDA, reason="the GPU compiles the kernels that the interpreter would run")
V, H = 60, 16
CAPPED = {"temperature": 0.7, "softcap": 6.0, "scale": 0.8}


@contextmanager
def interpreted():
    """Triton's kernels on CPU, with segments in pieces that are short enough for a test to have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "kernels_for", lambda device: slots_triton)
        for name in ("BY_TOKEN", "BY_ID", "ADDED_BY_ID"):
            short = getattr(segments_triton, name)._replace(piece=8)
            for module in (segments_triton, slots_triton):
                patch.setattr(module, name, short, raising=module is segments_triton)
        yield


@pytest.fixture(params=["cpu", pytest.param("triton", marks=ONLY_WITHOUT_GPU), pytest.param("cuda", marks=NEEDS_GPU)])
def place(request):
    """A device, with the kernels that run there: "triton" is Triton's interpreter."""
    if request.param != "triton":
        yield torch.device(request.param)
        return
    with interpreted():
        yield torch.device("cpu")


class Case(NamedTuple):
    x: Problem
    rows: list[list[int]]  # of the flattened tokens
    mask: Tensor | None = None
    rules: dict | None = None

    @property
    def support(self) -> Support:
        return Support.from_vllm(self.rows, device=self.x.hidden.device, **(self.rules or {}))


class Result(NamedTuple):
    values: dict[str, Tensor]
    grads: dict[str, Tensor | None]


def case_of(rows: list[list[int]], place="cpu", *, missing=(), mask=None, rules=None, shape=None, **given) -> Case:
    """Each target is the last of its row, but at the tokens in `missing`, where it is not listed."""
    x = problem(shape or (len(rows),), H, given.pop("vocab", V), device=place, **given)
    targets = [row[-1] if row else token % 5 for token, row in enumerate(rows)]
    for token in missing:
        targets[token] = min(set(range(x.weight.shape[0])) - set(rows[token]))
    x = x._replace(targets=torch.tensor(targets, dtype=torch.int64, device=place).view(x.targets.shape))
    return Case(x, rows, None if mask is None else mask.to(place), rules)


def rows_of(sizes: list[int], vocab: int = V) -> list[list[int]]:
    return [torch.randperm(vocab)[:size].tolist() for size in sizes]


def solve(case: Case, *, frozen=(), transform=None, **options) -> Result:
    leaves = case.x.leaves(frozen)
    given = {"entropy": True, "extras": EXTRAS, "transform": LogitTransform(**(transform or {})), **options}
    found = call(leaves, mask=case.mask, support=case.support, **given)
    functional(found.logps, found.entropy).backward()
    return Result({name: v.detach() for name, v in found._asdict().items() if v is not None}, leaves.grads())


def truth(case: Case, transform: dict | None = None) -> Result:
    live = case.x.targets >= 0
    live = live if case.mask is None else live & (case.mask != 0)
    leaves = case.x._replace(hidden=case.x.hidden.masked_fill(~live[..., None], 0.0)).to(torch.float64).leaves()
    weight = leaves.weight if leaves.a is None else leaves.weight + SCALING * leaves.b @ leaves.a
    z = oracles.linear_logits(leaves.hidden, weight, leaves.bias, **(transform or {})).flatten(0, -2)
    targets, vocab = case.x.targets.clamp(min=0).flatten(), z.shape[-1]
    listed, missing = torch.zeros_like(z, dtype=torch.bool), torch.zeros_like(targets, dtype=torch.bool)
    for token, row in enumerate(case.rows):
        listed[token, row or list(range(vocab))] = True
        missing[token] = not listed[token, targets[token]]
        listed[token, targets[token]] = True
    log_p = z.masked_fill(~listed, -1e30).log_softmax(-1)
    p = log_p.exp()
    values = {
        "logps": log_p.gather(-1, targets[:, None]).squeeze(-1),
        "entropy": -torch.where(p > 0, p * log_p, 0.0).sum(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
        "mean_logits": torch.where(listed, z, 0.0).sum(-1) / listed.sum(-1),
        "is_top1": z.masked_fill(~listed, -1e30).argmax(-1) == targets,
        "missing_target": missing,
    }
    values = {name: part.view(live.shape).masked_fill(~live, 0) for name, part in values.items()}
    functional(values["logps"], values["entropy"]).backward()
    return Result({name: part.detach() for name, part in values.items()}, leaves.grads())


def check(found: Result, expected: Result, dtype: torch.dtype = torch.float32) -> None:
    assert found.values.keys() == expected.values.keys()
    for name, other in expected.values.items():
        close(name, found.values[name], other, 1e-5)
    for name, other in expected.grads.items():
        if found.grads[name] is not None:
            assert found.grads[name].dtype == dtype
            close(f"gradient of {name}", found.grads[name], other, max(2 * torch.finfo(dtype).eps, 1e-5))


def close(name: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    size = expected.double().abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=tolerance, atol=tolerance * max(size, 0.5), msg=lambda m: f"{name}: {m}"
    )


def same(found: Result, expected: Result) -> None:
    for mine, other in zip(found, expected, strict=True):
        for name, part in other.items():
            assert (part is None and mine[name] is None) or torch.equal(mine[name], part), name


# --- values and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transform", "dtype", "more"),
    [
        ({}, torch.float32, {}),
        ({"temperature": 0.7}, torch.bfloat16, {}),
        (CAPPED, torch.float32, {"bias": True, "rank": 3}),
        ({"scale": 1.5}, torch.float16, {"bias": True}),
    ],
    ids=["plain", "bfloat16", "all terms", "float16"],
)
def test_rows_of_every_kind(transform, dtype, more, place):
    """Sizes, repeated ids, missing targets, empty rows; masked tokens whose hidden states and rows are garbage."""
    large, vocab = (300, 320) if engine.kernels_for(place) is not slots_triton or CUDA else (18, 40)
    rows = [*rows_of([1, 2, 7, large, vocab, 0, 5, 4], vocab), [7, 9, 7, 9, 9, 3], [8] * 9, [5, 5, 6], [], [2, 4]]
    rows += rows_of([large, 3], vocab)
    mask = torch.ones(3, 5)
    mask[0, 2] = mask[2, 1] = 0
    case = case_of(rows, place, missing=[9, 10, 13], mask=mask, shape=(3, 5), vocab=vocab, dtype=dtype, **more)
    case.x.targets[1, 2] = -100
    case.x.hidden[case.mask == 0] = case.x.hidden[1, 2] = math.nan
    found, expected = solve(case, transform=transform), truth(case, transform)
    check(found, expected, dtype)
    assert found.values["missing_target"].flatten().nonzero().flatten().tolist() == [9, 10, 13]
    short = solve(case, transform=transform, entropy=False, extras=())
    assert short.values.keys() == {"logps", "missing_target"}
    assert torch.equal(short.values["logps"], found.values["logps"])


@pytest.mark.parametrize("entropy", [False, True])
def test_nan_of_a_token_without_a_gradient(entropy, place):
    """It stays out of all gradients. With a gradient it reaches them."""
    case = case_of(rows_of([3, 5, 4, 9]), place, bias=True)

    def gradients(value: float, slope: float) -> dict[str, Tensor]:
        leaves = case.x.leaves()
        leaves.hidden.data[1] = value
        found, slopes = call(leaves, support=case.support, entropy=entropy), torch.ones(4, device=place)
        slopes[1] = slope
        outputs = [found.logps, found.entropy] if entropy else [found.logps]
        torch.autograd.backward(outputs, [slopes] * len(outputs))
        return leaves.grads()

    expected, found = gradients(0.0, 0.0), gradients(math.nan, 0.0)
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())
    assert gradients(math.nan, 1.0)["weight"].isnan().any()


@pytest.mark.parametrize("size", [1, 2, 7, 300, V, 0])
def test_rows_of_one_size(size, place):
    if size == 300 and engine.kernels_for(place) is slots_triton and not CUDA:
        pytest.skip("too large for Triton's interpreter")
    case = case_of(rows_of([size] * 6, max(V, size)), place, vocab=max(V, size), bias=True)
    found = solve(case)
    check(found, truth(case))
    leaves = case.x.leaves()
    dense = call(leaves, entropy=True)
    functional(*dense[:2]).backward()
    if size == 0:  # it is the dense call
        assert torch.equal(found.values["logps"], dense.logps)
        assert torch.equal(found.grads["weight"], leaves.weight.grad)
    if size == V:
        close("logps", found.values["logps"], dense.logps.detach(), 1e-5)


def test_a_single_id_leaves_nothing(place):
    """Whatever its row of the weight and the gradient from above hold; a missing target is no single id."""
    case = case_of([[4], [5, 5], [6], [7, 8]], place)
    leaves = case.x.leaves()
    leaves.hidden.data[:3] = math.nan
    leaves.weight.data[4:7] = math.nan
    found = call(leaves, support=case.support, entropy=True, extras=("log_sum_sq_probs", "is_top1"))
    for values in (found.logps, found.entropy, found.log_sum_sq_probs):
        assert (values[:3] == 0).all()
    assert found.is_top1[:3].all()
    g = torch.tensor([1.0, math.inf, math.nan, 1.0], device=place)
    torch.autograd.backward([found.logps, found.entropy], [g, g])
    assert (leaves.hidden.grad[:3] == 0).all()
    assert leaves.hidden.grad[3].any()
    others = torch.ones(V, dtype=torch.bool, device=place)
    others[7:9] = False
    assert (leaves.weight.grad[others] == 0).all()


def test_rows_that_are_promised_to_be_distinct(place):
    """The same bits if they are; otherwise a repeated id counts twice, but a target once."""
    case = case_of(rows_of([2, 9, 1, 0, 30]), place, bias=True)
    same(solve(case._replace(rules={"distinct": True})), solve(case))
    case = case_of([[7, 3, 7, 5], [4, 8, 4]], place, rules={"distinct": True})
    z = oracles.linear_logits(case.x.hidden, case.x.weight)
    twice = torch.stack([z[0, [7, 3, 7, 5]].log_softmax(0)[-1], z[1, [8, 4]].log_softmax(0)[-1]])
    close("logps", solve(case).values["logps"], twice, 1e-5)


def test_the_same_bits_twice_with_popular_ids(place):
    """Ids that all tokens share are split over programs, in an order of its own each time."""
    case = case_of([[*row, 17, 3] for row in rows_of([2] * 20)], place, bias=True)
    first = solve(case)
    check(first, truth(case))
    same(solve(case), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_grad_is_touched_in_listed_rows_alone(dtype, place):
    case = case_of([[7, 2, 9], [3], [11, 12, 13, 14], [7, 20]], place, missing=[3], dtype=dtype)
    whole = solve(case).grads
    listed = torch.zeros(V, dtype=torch.bool, device=place)
    listed[[7, 2, 9, 11, 12, 13, 14, 20, int(case.x.targets[3])]] = True
    assert not whole["weight"][~listed].any()
    listed[3] = True  # alone in its row: a 0 may be added
    before = torch.randn(V, H).to(place)
    before[~listed] = math.nan  # what is added to it would not show
    total = before.clone()
    bits = total[~listed].view(torch.int32).clone()
    found = solve(case, weight_grad=total)
    assert found.grads["weight"] is None
    assert torch.equal(found.grads["hidden"], whole["hidden"])
    assert torch.equal(total[~listed].view(torch.int32), bits)
    close("weight_grad", (total - before)[listed], whole["weight"][listed], max(torch.finfo(dtype).eps, 1e-6))
    case = case._replace(rows=[[], *case.rows[1:]])  # now every row has its part
    total = torch.zeros(V, H, device=place)
    solve(case, weight_grad=total)
    close("weight_grad", total, truth(case).grads["weight"], max(torch.finfo(dtype).eps, 1e-5))


# --- missing targets, the loss ----------------------------------------------------------------------------------------


def test_missing_targets_are_an_error_where_asked_for(place):
    case = case_of([[1, 2], [3, 4], [5], []], place, missing=[1, 2], rules={"missing_target": "error"})
    with pytest.raises(ValueError, match="targets must be among their row's ids with missing_target='error'; 2 of"):
        solve(case)
    masked = torch.tensor([1, 0, 0, 1], device=place)
    assert not solve(case._replace(mask=masked)).values["missing_target"].any()


def test_the_loss_and_its_metric(place):
    case = case_of(rows_of([2, 9, 0, 1, 4, 5]), place, missing=[1, 4], shape=(2, 3), mask=torch.ones(2, 3))
    case.mask[0, 0] = 0
    columns = {"advantages": torch.tensor([[1.0, -2.0, 0.5], [1.0, 0.0, 2.0]], device=place)}
    columns["old_per_token_logps"] = -torch.rand(2, 3).to(place)
    found, expected = case.x.leaves(), case.x.leaves()
    module = FusedLinearGRPOLoss("dapo", temperature=0.7)
    given = {"support": case.support}
    result = module(found.hidden, found.weight, found.targets, mask=case.mask, **columns, **given)
    result.loss.backward()
    logps = call(expected, mask=case.mask, transform=LogitTransform(temperature=0.7), **given).logps
    batch = PolicyBatch(completion_mask=case.mask, **columns)
    loss = ppo_loss_fn(logps, batch, PPOClip(), GlobalTokenMean()).loss
    loss.backward()
    torch.testing.assert_close(result.loss, loss, rtol=1e-6, atol=1e-6)
    for name in ("hidden", "weight"):
        close(name, found.grads()[name], expected.grads()[name], 1e-6)
    reference = module.reference_logps(found.hidden, found.weight, found.targets, case.mask, **given)
    assert torch.equal(reference, logps.detach())
    # Token 4 has no advantage, so it is not looked at, and neither in the sum nor in the count.
    metric = result.metrics["missing_target"]
    assert (float(metric.value), float(metric.count)) == (0.25, 4.0)
    module = FusedLinearGRPOLoss("dapo", metrics="none")
    assert not module(found.hidden, found.weight, found.targets, mask=case.mask, **columns, **given).metrics


# --- the host ---------------------------------------------------------------------------------------------------------


def reads_of(step, device: torch.device) -> list[str]:
    with host_reads(device) as reads:
        step()
    # Triton's interpreter reads every scalar that it loads.
    return [name for name in reads.names if device.type == "cuda" or name != "_local_scalar_dense"]


@pytest.mark.parametrize("fixed_shape", [False, True])
@pytest.mark.parametrize("rows", [[2, 1, 9, 4], [2, 0, 9, 0]], ids=["listed", "with empty rows"])
def test_reads_of_the_host(rows, fixed_shape, device):
    """One in the forward, which also says what is wrong with the support; of empty rows two passes have theirs."""
    if fixed_shape and 0 in rows:
        pytest.skip("fixed_shape takes no empty row")
    skip_without_interpreter(device)
    case = case_of(rows_of(rows), device, bias=True, rank=2, rules={"may_be_empty": 0 in rows})
    leaves, given, out = case.x.leaves(), case.support, []
    options = {"support": given, "entropy": True, "extras": EXTRAS, "fixed_shape": fixed_shape}

    def forward() -> None:
        out.append(call(leaves, **options))

    def backward() -> None:
        torch.autograd.backward([out[0].logps, out[0].entropy], [torch.ones(4, device=device)] * 2)

    with interpreted() if device.type == "cpu" else nullcontext():
        read, in_backward = reads_of(forward, device), reads_of(backward, device)
    assert len(read) == (not fixed_shape), read
    assert len(in_backward) == (0 in rows), in_backward


def test_a_support_keeps_what_its_last_call_made(place):
    """For the same tokens, whatever wants a gradient, which spares the wait; never what was made of other values."""
    case = case_of(rows_of([2, 9, 0, 4]), place)
    support, targets, mask = case.support, case.x.targets, torch.ones(4, device=place)

    def fresh() -> Support:
        return Support(support.token_ids.clone(), support.offsets.clone())

    def waits(x: Problem = case.x, support: Support = support, **options) -> bool:
        """Whether the call asks the device; its results are those of a support that has seen no call."""
        leaves, others = x.leaves(), x.leaves()
        given = {"mask": mask, "entropy": True} | options
        expected = call(others, support=fresh(), **given)
        with host_reads(place) as reads:
            found = call(leaves, support=support, **given)
        for mine, truth in zip(found, expected, strict=True):
            assert (mine is None and truth is None) or torch.equal(mine, truth)
        assert leaves.hidden.requires_grad
        if found.logps.requires_grad:
            for result in (found, expected):
                functional(result.logps, result.entropy).backward()
            assert torch.equal(leaves.weight.grad, others.weight.grad)
        found.missing_target.fill_(True)  # is the caller's
        return any(name == "tolist" or place.type == "cuda" for name in reads.names)

    assert waits()
    assert not waits()
    with torch.no_grad():
        assert not waits()  # old log-probabilities, of which no gradient is wanted
    assert not waits(case.x._replace(targets=targets[:].view(4)))  # another view of the same values
    assert waits(case.x._replace(targets=targets.clone()))
    assert waits()  # the last call's alone are kept
    assert waits(mask=mask.bool())
    assert waits(extras=["mean_logits"])
    waits()
    for tensor in (support.token_ids, targets, mask):
        tensor[0] = 0
        assert waits()
    assert not waits()
    for other in (copy.deepcopy(support), pickle.loads(pickle.dumps(support))):
        assert vars(other).keys() == {field.name for field in fields(Support)}
        assert torch.equal(other.token_ids, support.token_ids)
    with torch.inference_mode():
        other = fresh()
        assert [waits(support=other) for _ in range(2)] == [True, True]
    support.token_ids[1] = V
    for _ in range(2):  # what raises is never kept
        with pytest.raises(ValueError, match="token_ids must be token ids in"):
            call(case.x, mask=mask, support=support)


@NEEDS_GPU
def test_a_cuda_graph_replays_forward_and_backward():
    case = case_of(rows_of([2, 9, 1, 4]), "cuda", rules={"may_be_empty": False})
    leaves, support = case.x.leaves(), case.support

    def step() -> list[Tensor]:
        found = call(leaves, support=support, entropy=True, fixed_shape=True)
        value = (found.logps + found.entropy).sum()
        return [value.detach(), *torch.autograd.grad(value, [leaves.hidden, leaves.weight])]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        leaves.hidden.copy_(torch.randn_like(leaves.hidden))
        support.token_ids.copy_(support.token_ids.flip(0))
    graph.replay()
    for mine, expected in zip(captured, step(), strict=True):
        assert torch.equal(mine, expected)


# --- constructors -----------------------------------------------------------------------------------------------------


def lists(support: Support) -> tuple[list, list]:
    return support.token_ids.tolist(), support.offsets.tolist()


def test_constructors(device):
    ids = [[[3, -1, 5], [-1, -1, -1]], [[1, 2, 0], [-1, 4, -1]]]
    for padded in (torch.tensor(ids), torch.tensor(ids, dtype=torch.int32).view(4, 3)):
        found = Support.from_padded(padded.to(device), missing_target="error")
        assert lists(found) == ([3, 5, 1, 2, 0, 4], [0, 2, 2, 5, 6])
        assert (found.tokens, found.missing_target, found.may_be_empty) == (4, "error", True)
        assert found.token_ids.device.type == device.type
        assert not found.distinct
        assert Support.from_padded(padded, distinct=True).distinct
    mask = SimpleNamespace(token_ids=[3, 5, 1], offsets=[0, 2, 3])
    as_tensors = SimpleNamespace(token_ids=torch.tensor(mask.token_ids), offsets=torch.tensor(mask.offsets))
    for one in (mask, as_tensors):
        found = Support.from_vllm(one, device=device, may_be_empty=False)
        assert (lists(found), found.may_be_empty) == (([3, 5, 1], [0, 2, 3]), False)
        found = Support.from_vllm([one, mask], length=3, device=device, missing_target="error")
        assert lists(found) == ([3, 5, 1] * 2, [0, 2, 3, 3, 5, 6, 6])
        assert found.missing_target == "error"
    assert lists(Support.from_vllm([mask, mask])) == ([3, 5, 1] * 2, [0, 2, 3, 5, 6])
    assert lists(Support.from_vllm([[3, 5], None, (1,)])) == ([3, 5, 1], [0, 2, 2, 3])
    assert lists(Support.from_vllm([])) == ([], [0])
    rows = Support.from_vllm([[3, 3]])
    for made_of, distinct in ((mask, True), ([mask] * 2, True), (rows, False), ([rows, mask], False), ([[3]], False)):
        assert Support.from_vllm(made_of).distinct is distinct
    assert not Support.from_vllm(mask, distinct=False).distinct
    assert Support.from_vllm([[3, 5]], distinct=True).distinct


@pytest.mark.parametrize(
    "given", [{"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.8, "top_k": 20, "min_p": 0.05}, {"top_p": 1e-6}]
)
def test_from_logits_is_hugging_faces(given, device):
    warpers = pytest.importorskip("transformers").generation.logits_process
    logits = (3 * torch.randn(2, 3, 50)).to(device)
    scores = warpers.TemperatureLogitsWarper(0.8)(None, logits.view(6, 50))
    names = {"top_k": warpers.TopKLogitsWarper, "top_p": warpers.TopPLogitsWarper, "min_p": warpers.MinPLogitsWarper}
    for name, warper in names.items():
        scores = warper(given[name])(None, scores) if name in given else scores
    found = Support.from_logits(logits, temperature=0.8, **given)
    assert found.distinct
    rows = [set(row.tolist()) for row in found.token_ids.cpu().tensor_split(found.offsets[1:-1].cpu())]
    assert rows == [set(row.isfinite().nonzero().squeeze(1).tolist()) for row in scores]


# --- bad input --------------------------------------------------------------------------------------------------------


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
        (lambda: Support(ints(), ints(0), missing_target="drop"), r"missing_target must be one of \['add', 'error'\]"),
        (lambda: Support(ints(), ints(0), may_be_empty=1), "may_be_empty must be a bool, got int"),
        (lambda: Support(ints(), ints(0), distinct=1), "distinct must be a bool, got int"),
        (lambda: Support.from_padded(ints(1, 2)), r"ids must be \(N, K\) or \(B, T, K\), got \(2,\)"),
        (lambda: Support.from_padded(torch.ones(1, 2)), "ids must be int32 or int64, got torch.float32"),
        (lambda: Support.from_vllm(3), "mask must have token_ids and offsets, or be a list"),
        (lambda: Support.from_vllm([[0.5]]), "token_ids must be int32 or int64"),
        (lambda: Support.from_vllm([["a"]]), "mask must be integers"),
        (lambda: Support.from_vllm([[1]], length=2), "length must be None for rows of ids, got 2"),
        (
            lambda: Support.from_vllm([Support(ints(1, 2), ints(0, 1, 2))], length=1),
            r"length must be at least 2 from mask\[0\], got 1",
        ),
        (lambda: Support.from_logits(torch.ones(2)), r"logits must be \(N, V\) or \(B, T, V\)"),
        (lambda: Support.from_logits(torch.ones(1, 2), top_p=1.5), "top_p must be above 0 and at most 1, got 1.5"),
        (lambda: Support.from_logits(torch.ones(1, 2), temperature=0.0), "temperature must be above 0, got 0.0"),
        (lambda: Support.from_logits(torch.ones(1, 2), top_k=0), "top_k must be at least 1, got 0"),
    ],
)
def test_what_a_support_is_not_made_of(make, message):
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
        ([1, 2, 3], [0, 3], "support must have a row for each of the 2 tokens of targets, got 1 rows"),
    ],
)
def test_bad_values_are_named_and_do_no_harm(ids, offsets, message, place):
    listed = Unchecked(torch.tensor(ids, device=place), torch.tensor(offsets, device=place), "add", False)
    case = case_of([[1], [2]], place)
    with pytest.raises(ValueError, match=message):
        call(case.x, support=listed)
    if "row for each" not in message:  # nobody looks, but nothing is read outside of the tensors
        leaves = case.x.leaves()
        call(leaves, support=listed, fixed_shape=True, entropy=True).logps.sum().backward()
        assert leaves.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grad_tolerance": 0.1}, r"grad_tolerance must be 0\.0 with a support, got 0\.1"),
        ({"batch_invariant": True}, "batch_invariant must be False with a support"),
        ({"fixed_shape": True}, "support must be made with may_be_empty=False for fixed_shape"),
        ({"passes": "one"}, r'passes="one" needs support = None'),
        ({"support": [[1]]}, "support must be a Support or None, got list"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_go_with_a_support(options, message):
    case = case_of(rows_of([2, 3]))
    given = {"support": options.pop("support", case.support)}
    module = FusedLinearGRPOLoss(**options)
    with pytest.raises((TypeError, ValueError), match=message):
        module(case.x.hidden, case.x.weight, case.x.targets, torch.ones(2), **given)
    if "passes" not in options:
        with pytest.raises((TypeError, ValueError), match=message):
            call(case.x, **given, **options)


@pytest.mark.parametrize("fixed", [False, True], ids=["default", "fixed shape"])
@pytest.mark.parametrize("rank", [0, 3], ids=["plain", "low rank"])
def test_in_a_graph_of_the_compiler(fixed, rank, place):
    """With the values and gradients of eager mode; what is wrong with a support raises when the graph runs."""
    rows = rows_of([1, 2, 7, 30, V, 5 if fixed else 0])
    case = case_of(rows, place, rank=rank)._replace(rules={"may_be_empty": not fixed})
    support, options = case.support, {"entropy": True, "extras": ("mean_logits", "is_top1"), "fixed_shape": fixed}

    def solved(function) -> list[Tensor]:
        leaves = case.x.leaves()
        loss, *others = function(leaves)
        loss.backward()
        return [loss.detach(), *others, *(grad for grad in leaves.grads().values() if grad is not None)]

    def head(leaves):
        found = call(leaves, support=support, **options)
        loss = (found.logps * slopes).sum() + found.entropy.square().sum()
        return loss, found.missing_target, found.mean_logits, found.is_top1

    slopes = torch.randn(len(rows), device=place)
    torch._dynamo.reset()
    for mine, other in zip(solved(torch.compile(head, backend="aot_eager")), solved(head), strict=True):
        torch.testing.assert_close(mine, other)
    if not fixed:
        support = Support(support.token_ids + 1, support.offsets)
        with pytest.raises(ValueError, match=r"token_ids must be token ids in \[0, 60\)"):
            solved(torch.compile(head, backend="aot_eager"))
