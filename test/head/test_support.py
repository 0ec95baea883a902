"""Log-probabilities over the ids that each token lists: corners, the host, constructors. Values are the fuzzer's."""

import math
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from devices import NEEDS_GPU, skip_without_interpreter
from head_calls import Problem, call, in_short_pieces, problem, run_triton
from host_reads import host_reads
from liger_rl.support import Support

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
    rules: dict | None = None

    @property
    def support(self) -> Support:
        return Support.from_vllm(self.rows, device=self.x.hidden.device, **(self.rules or {}))


def case_of(rows: list[list[int]], place="cpu", *, missing=(), rules=None, **given) -> Case:
    """Each target is the last of its row, but at the tokens in `missing`, where it is not listed."""
    x = problem((len(rows),), H, V, device=place, **given)
    targets = [row[-1] if row else token % 5 for token, row in enumerate(rows)]
    for token in missing:
        targets[token] = min(set(range(V)) - set(rows[token]))
    return Case(x._replace(targets=torch.tensor(targets, dtype=torch.int64, device=place)), rows, rules)


def rows_of(sizes: list[int]) -> list[list[int]]:
    return [torch.randperm(V)[:size].tolist() for size in sizes]


# --- values and gradients ---------------------------------------------------------------------------------------------


def test_a_single_id_leaves_nothing(place):
    """Whatever its row of the weight and the gradient from above hold; a missing target is no single id."""
    case = case_of([[4], [5, 5], [6], [7, 8]], place)
    leaves = case.x.leaves()
    leaves.hidden.data[:3] = math.nan
    leaves.weight.data[4:7] = math.nan
    found = call(leaves, support=case.support, entropy=True)
    for values in (found.logps, found.entropy):
        assert (values[:3] == 0).all()
    g = torch.tensor([1.0, math.inf, math.nan, 1.0], device=place)
    torch.autograd.backward([found.logps, found.entropy], [g, g])
    assert (leaves.hidden.grad[:3] == 0).all()
    assert leaves.hidden.grad[3].any()
    others = torch.ones(V, dtype=torch.bool, device=place)
    others[7:9] = False
    assert (leaves.weight.grad[others] == 0).all()


def test_a_row_of_many_ids_is_not_compared_pair_by_pair(device):
    """2^18 ids, most of them repeated: their 7e10 pairs would take 64 GB, or minutes."""
    x = problem((1,), H, V, device=device)
    ids = torch.arange(1 << 18, device=device).remainder(V - 1)
    supports = [Support.from_padded(row[None]) for row in (ids, ids[: V - 1])]
    for many, once in zip(*(call(x, support=support, entropy=True)[:2] for support in supports), strict=True):
        torch.testing.assert_close(many, once)


# --- the host ---------------------------------------------------------------------------------------------------------


def reads_of(step, device: torch.device) -> list[str]:
    with host_reads(device) as reads:
        step()
    # Triton's interpreter reads every scalar that it loads.
    return [name for name in reads.names if device.type == "cuda" or name != "_local_scalar_dense"]


@pytest.mark.parametrize("rows", [[2, 1, 9, 4], [2, 0, 9, 0]], ids=["listed", "with empty rows"])
def test_reads_of_the_host(rows, device):
    """One in the forward, which also says what is wrong with the support; of empty rows two passes have theirs."""
    skip_without_interpreter(device)
    case = case_of(rows_of(rows), device, bias=True)
    leaves, given, out = case.x.leaves(), case.support, []
    options = {"support": given, "entropy": True}

    def forward() -> None:
        out.append(call(leaves, **options))

    def backward() -> None:
        torch.autograd.backward([out[0].logps, out[0].entropy], [torch.ones(4, device=device)] * 2)

    with interpreted() if device.type == "cpu" else nullcontext():
        read, in_backward = reads_of(forward, device), reads_of(backward, device)
    assert len(read) == 1, read
    assert len(in_backward) == (0 in rows), in_backward


# --- constructors -----------------------------------------------------------------------------------------------------


def lists(support: Support) -> tuple[list, list]:
    return support.token_ids.tolist(), support.offsets.tolist()


def test_constructors(device):
    ids = [[[3, -1, 5], [-1, -1, -1]], [[1, 2, 0], [-1, 4, -1]]]
    for padded in (torch.tensor(ids), torch.tensor(ids, dtype=torch.int32).view(4, 3)):
        found = Support.from_padded(padded.to(device))
        assert lists(found) == ([3, 5, 1, 2, 0, 4], [0, 2, 2, 5, 6])
        assert found.tokens == 4
        assert found.token_ids.device.type == device.type
        assert not found.distinct
    mask = SimpleNamespace(token_ids=[3, 5, 1], offsets=[0, 2, 3])
    as_tensors = SimpleNamespace(token_ids=torch.tensor(mask.token_ids), offsets=torch.tensor(mask.offsets))
    for one in (mask, as_tensors):
        found = Support.from_vllm(one, device=device)
        assert lists(found) == ([3, 5, 1], [0, 2, 3])
        found = Support.from_vllm([one, mask], length=3, device=device)
        assert lists(found) == ([3, 5, 1] * 2, [0, 2, 3, 3, 5, 6, 6])
    assert lists(Support.from_vllm([mask, mask])) == ([3, 5, 1] * 2, [0, 2, 3, 5, 6])
    assert lists(Support.from_vllm([[3, 5], None, (1,)])) == ([3, 5, 1], [0, 2, 2, 3])
    assert lists(Support.from_vllm([])) == ([], [0])
    rows = Support.from_vllm([[3, 3]])
    for made_of, distinct in ((mask, True), ([mask] * 2, True), (rows, False), ([rows, mask], False), ([[3]], False)):
        assert Support.from_vllm(made_of).distinct is distinct


@pytest.mark.parametrize(
    "given",
    [{"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.8, "top_k": 20, "min_p": 0.05}]
    + [{"top_p": share} for share in (1e-6, 1, 1.0)],  # 1 is no filter: the sum of the likelier ids may round to 1
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
    listed = Unchecked(torch.tensor(ids, device=place), torch.tensor(offsets, device=place))
    case = case_of([[1], [2]], place)
    with pytest.raises(ValueError, match=message):
        call(case.x, support=listed)
