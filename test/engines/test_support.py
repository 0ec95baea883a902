"""Log-probabilities over the ids that each token lists: corners, the host, constructors. Values are the fuzzer's."""

import math
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import oracles
from devices import NEEDS_GPU, skip_without_interpreter
from head_calls import EXTRAS, Problem, assert_same, call, functional, in_short_pieces, problem, run_triton
from host_reads import host_reads
from liger_rl import FusedLinearGRPOLoss, LogitTransform, PolicyBatch, Support, ppo_loss_fn
from liger_rl.losses.objectives import PPOClip
from liger_rl.losses.reductions import GlobalTokenMean

CUDA = torch.cuda.is_available()
ONLY_WITHOUT_GPU = pytest.mark.skipif(CUDA, reason="the GPU compiles the kernels that the interpreter would run")
V, H = 60, 16


@contextmanager
def interpreted():
    """Triton's kernels on CPU."""
    with pytest.MonkeyPatch.context() as patch:
        run_triton(patch)
        in_short_pieces(patch)
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
    x = problem(shape or (len(rows),), H, V, device=place, **given)
    targets = [row[-1] if row else token % 5 for token, row in enumerate(rows)]
    for token in missing:
        targets[token] = min(set(range(V)) - set(rows[token]))
    x = x._replace(targets=torch.tensor(targets, dtype=torch.int64, device=place).view(x.targets.shape))
    return Case(x, rows, None if mask is None else mask.to(place), rules)


def rows_of(sizes: list[int]) -> list[list[int]]:
    return [torch.randperm(V)[:size].tolist() for size in sizes]


def solve(case: Case, **options) -> Result:
    leaves = case.x.leaves()
    found = call(leaves, mask=case.mask, support=case.support, entropy=True, extras=EXTRAS, **options)
    functional(found.logps, found.entropy).backward()
    return Result({name: v.detach() for name, v in found._asdict().items() if v is not None}, leaves.grads())


def close(name: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    bound = tolerance * max(expected.abs().max().item(), 0.5)
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=tolerance, atol=bound, msg=lambda m: f"{name}: {m}"
    )


# --- values and gradients ---------------------------------------------------------------------------------------------


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
    assert_same(solve(case._replace(rules={"distinct": True})), solve(case))
    case = case_of([[7, 3, 7, 5], [4, 8, 4]], place, rules={"distinct": True})
    z = oracles.linear_logits(case.x.hidden, case.x.weight)
    twice = torch.stack([z[0, [7, 3, 7, 5]].log_softmax(0)[-1], z[1, [8, 4]].log_softmax(0)[-1]])
    close("logps", solve(case).values["logps"], twice, 1e-5)


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
    close("weight_grad", total, solve(case).grads["weight"], max(torch.finfo(dtype).eps, 1e-5))


# --- missing targets, the loss ----------------------------------------------------------------------------------------


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


# --- constructors -----------------------------------------------------------------------------------------------------


def lists(support: Support) -> tuple[list, list]:
    return support.token_ids.tolist(), support.offsets.tolist()


def test_constructors(device):
    ids = [[[3, -1, 5], [-1, -1, -1]], [[1, 2, 0], [-1, 4, -1]]]
    for padded in (torch.tensor(ids), torch.tensor(ids, dtype=torch.int32).view(4, 3)):
        found = Support.from_padded(padded.to(device), may_be_empty=False)
        assert lists(found) == ([3, 5, 1, 2, 0, 4], [0, 2, 2, 5, 6])
        assert (found.tokens, found.may_be_empty) == (4, False)
        assert found.token_ids.device.type == device.type
        assert not found.distinct
        assert Support.from_padded(padded, distinct=True).distinct
    mask = SimpleNamespace(token_ids=[3, 5, 1], offsets=[0, 2, 3])
    as_tensors = SimpleNamespace(token_ids=torch.tensor(mask.token_ids), offsets=torch.tensor(mask.offsets))
    for one in (mask, as_tensors):
        found = Support.from_vllm(one, device=device, may_be_empty=False)
        assert (lists(found), found.may_be_empty) == (([3, 5, 1], [0, 2, 3]), False)
        found = Support.from_vllm([one, mask], length=3, device=device, may_be_empty=False)
        assert lists(found) == ([3, 5, 1] * 2, [0, 2, 3, 3, 5, 6, 6])
        assert not found.may_be_empty
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
    listed = Unchecked(torch.tensor(ids, device=place), torch.tensor(offsets, device=place), False)
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
