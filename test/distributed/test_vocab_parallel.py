"""Heads sharded over their vocabulary are the whole heads: the same numbers, the same gradients, the same errors."""

import re
from dataclasses import dataclass
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import oracles
from devices import skip_without_interpreter
from head_calls import Products, run_triton
from liger_rl import FusedLinearGRPOLoss, linear_logprobs, topk_divergence
from liger_rl.distributed import VocabParallel
from liger_rl.head import LogitTransform
from liger_rl.kernels.statistics import EXTRAS
from liger_rl.models.tensors import localize
from ranks import assert_whole, message_of, sent

HIDDEN, VOCAB = 12, 601
# Rows of each rank, by the number of ranks, cut evenly or not.
SHARDS = {2: [(301, 300), (513, 88)], 4: [(151, 150, 150, 150), (7, 380, 1, 213)]}


@dataclass(frozen=True)
class Case:
    tokens: int = 37
    masked: str = "some"  # "none", "some", "all"
    temperature: float = 1.0
    softcap: float | None = None
    bias: bool = False
    entropy: bool = True
    dtype: torch.dtype = torch.float32
    frozen: str = ""  # "hidden" or "weight"
    chunk_tokens: int | None = None
    chunk_vocab: int | None = None
    ids_below: int = VOCAB  # targets are under it, so that some ranks may hold none of them
    shards: int = 0  # which of SHARDS
    several: int = 0  # ids of each token, 0 for its target alone
    tied: bool = False  # several entries have the largest logit
    banned: int = 0  # the first entries, whose bias is -inf: a whole shard and more
    dtensors: bool = False
    placement: Replicate | None = None  # of hidden states that are DTensors

    def __str__(self):
        return ",".join(f"{k}={v}" for k, v in vars(self).items() if v != getattr(Case(), k)) or "plain"


CASES = [
    Case(),
    Case(shards=1),
    Case(entropy=False, masked="none", chunk_tokens=10, chunk_vocab=64),
    Case(temperature=0.7, softcap=3.0, bias=True, shards=1, chunk_vocab=100),
    Case(temperature=1.3, frozen="weight", chunk_tokens=16, chunk_vocab=50),
    Case(ids_below=5),  # the first rank alone has targets
    Case(masked="all"),
    Case(tokens=0, masked="none"),
    Case(frozen="hidden"),
    Case(tokens=48, dtype=torch.bfloat16, temperature=0.8, shards=1),
    Case(bias=True, banned=520, shards=1),
    Case(several=7, bias=True, softcap=9.0, temperature=0.8),
    Case(several=7, bias=True, shards=1, chunk_tokens=4, chunk_vocab=8),
    Case(tied=True, bias=True, shards=1, masked="none"),
    *(Case(dtensors=True, placement=placement, bias=True) for placement in (None, Replicate())),
    Case(dtensors=True, placement=Replicate(), bias=True, several=7),
]


def count_parts(case: Case, device="cpu") -> dict[str, Tensor]:
    """A whole head with its tokens, the same on every rank."""
    torch.manual_seed(1)

    def made(*shape):
        return torch.randn(*shape).to(case.dtype)

    parts = {"hidden": made(case.tokens, HIDDEN) * 2, "weight": made(VOCAB, HIDDEN)}
    parts |= {"bias": made(VOCAB)} if case.bias else {}
    if case.masked != "none":
        parts["mask"] = (torch.rand(case.tokens) < 0.6) & (case.masked == "some")
    parts["upstream"] = torch.randn(2, case.tokens)
    parts["upstream"][:, ::3] = 0.0  # tokens without a gradient are left out of the backward
    tied = torch.tensor([3, 40, 400, 590])
    if case.tied:  # in one shard and in two, to the last bit: the smallest id is the first
        parts["weight"][tied], parts["bias"][tied] = 0.0, 30.0
    if case.banned:
        parts["bias"][: case.banned] = -torch.inf
    targets = torch.randint(case.banned, case.ids_below, (case.tokens,))
    if case.ids_below == VOCAB:
        targets[::5] = oracles.linear_logits(parts["hidden"], parts["weight"], parts.get("bias")).argmax(-1)[::5]
    if case.tied:
        targets[6:10] = tied
    if case.tokens:
        targets[1] = -100
    if case.several:
        targets = torch.randint(VOCAB, (case.tokens, case.several))
        targets[:, 3], targets[3, 5], targets[4] = targets[:, 1], -100, -1
    return {name: part.to(device) for name, part in (parts | {"targets": targets}).items()}


def solve(case: Case, parts: dict[str, Tensor], place=None) -> dict[str, Tensor]:
    """Results and gradients by name; a sharded gradient is this rank's."""
    own = {name: parts[name] for name in ("hidden", "weight", "bias") if name in parts}
    leaves = {name: part.requires_grad_() for name, part in own.items() if name != case.frozen}
    local = localize(**{name: parts.get(name) for name in ("hidden", "weight", "bias")}, vocab_parallel=place)
    options = {
        "mask": parts.get("mask"), "bias": local.bias, "entropy": case.entropy,
        "transform": LogitTransform(temperature=case.temperature, softcap=case.softcap),
        "vocab_parallel": local.vocab_parallel, "chunk_tokens": case.chunk_tokens, "chunk_vocab": case.chunk_vocab,
    }  # fmt: skip
    of_logps, of_others = parts["upstream"]
    found = linear_logprobs(
        local.hidden, local.weight, parts["targets"], **options,
        extras=("mean_logits",) if case.several else () if case.banned else EXTRAS, lse=case.several > 0,
    )  # fmt: skip
    loss = ((found.logps.mT if case.several else found.logps) * of_logps).sum()
    for part in (found.entropy, found.lse, found.mean_logits):
        loss = loss if part is None else loss + (part * of_others).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    results = {name: part for name, part in found._asdict().items() if part is not None}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        assert getattr(grad, "placements", None) == getattr(leaf, "placements", None)
        results[f"grad_{name}"] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return {name: part.detach().cpu() for name, part in results.items()}


def shard_of(rank, case: Case):
    """Arguments of `solve`."""
    sizes = SHARDS[rank.world][case.shards]
    rows = slice(sum(sizes[: rank.index]), sum(sizes[: rank.index + 1]))
    parts = count_parts(case, rank.device)
    if case.dtensors:
        sharded = {"weight": Shard(0), "bias": Shard(0), "hidden": case.placement}
        for name, placement in sharded.items():  # in one order on all ranks: each is a collective
            if name in parts and placement is not None:
                parts[name] = distribute_tensor(parts[name], rank.mesh("tp"), [placement])
        return case, parts, None
    parts |= {name: parts[name][rows].clone() for name in ("weight", "bias") if name in parts}
    return case, parts, VocabParallel(rank.group, rows.start)


def solve_sharded(rank, case):
    return solve(*shard_of(rank, case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_whole_head(ranks, world, case):
    results, expected = ranks.run(solve_sharded, case, **world), solve(case, count_parts(case, world["device"]))
    # In bfloat16 the gradients are rounded once more, to another neighbour here and there.
    # With ties the largest logits are the probable ones, and the last bit of 35 is 4e-6 of a probability.
    grad_tolerance = 4e-3 if case.dtype == torch.bfloat16 else 1e-5 if case.banned or case.tied else 1e-6
    assert_whole(results, expected, 1e-5 if case.tied else 1e-6, grad_tolerance)
    for name, truth in expected.items():
        if case.tokens and case.masked != "all":
            assert truth.any() or (name == "is_top1" and case.ids_below < VOCAB), name


def solve_in_triton(rank, case):
    with pytest.MonkeyPatch.context() as patch:
        run_triton(patch, epilogue=case.dtype == torch.float16)
        return solve_sharded(rank, case)


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_on_a_part_of_the_vocabulary(ranks, dtype, softcap):
    """In the interpreter: targets of other ranks are before the part and after it, also within a kernel's last tile."""
    skip_without_interpreter()
    case = Case(tokens=33, dtype=dtype, softcap=softcap, shards=1, temperature=0.7)
    assert_whole(
        ranks.run(solve_in_triton, case), solve(case, count_parts(case)), 1e-5, 1e-5 if dtype == torch.float32 else 4e-3
    )


def distilled(rank):
    """From a teacher's lists."""
    case = Case(bias=True)
    parts, place = count_parts(case), None
    ids, teacher = torch.randint(VOCAB, (37, 7)), torch.randn(37, 7).log_softmax(-1)
    if rank is not None:
        _, parts, place = shard_of(rank, case)
    hidden = parts["hidden"].requires_grad_()
    found = topk_divergence(
        hidden, parts["weight"], ids, teacher, tail="none", bias=parts["bias"], vocab_parallel=place
    ).divergence
    return {"divergence": found.detach(), "grad_hidden": torch.autograd.grad(found.sum(), hidden)[0]}


def test_distillation_from_lists(ranks):
    torch.manual_seed(0)
    assert_whole(ranks.run(distilled), distilled(None), 1e-5, 1e-5)


# --- errors -----------------------------------------------------------------------------------------------------------


def provoked(rank, on_all, on_last):
    """The error of a call that does not fit, and whether the ranks still work together after it."""
    given = {"start": 0, "columns": HIDDEN, "target": 0, "options": {}}
    given |= on_all | (on_last if rank.index == rank.world - 1 else {})
    hidden, weight, targets = torch.randn(6, HIDDEN), torch.randn(5, given["columns"]), torch.zeros(6).long()
    targets[2] = given["target"]
    place = VocabParallel(rank.group, 5 * rank.index + given["start"])
    call = partial(linear_logprobs, hidden, weight, targets)
    message = message_of(partial(call, vocab_parallel=place, **given["options"]))
    again = torch.ones(1)
    dist.all_reduce(again, group=rank.group)
    return message, again.item()


COVER = "ValueError: the shards of weight must cover"
# What every rank does otherwise, what the last one alone does, and the error on all of them.
MISTAKES = {
    "a gap": ({}, {"start": 1}, rf"{COVER} .*\[0, 5\) on rank 0"),
    "an overlap": ({}, {"start": -1}, COVER),
    "a missing start": ({"start": 1}, {}, rf"{COVER} .*\[1, 6\) on rank 0"),
    "H": ({"columns": HIDDEN + 1}, {}, r"ValueError: weight must be \(V, H\) with H = 12 "),
    "beyond": ({"target": 10}, {}, r"ValueError: targets must be token ids in \[0, 10\)"),
}  # fmt: skip


@pytest.mark.parametrize(("on_all", "on_last", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_ranks_that_do_not_fit_raise_the_same_everywhere(ranks, on_all, on_last, expected):
    results = ranks.run(provoked, on_all, on_last)
    (message,) = {message for message, _ in results}
    assert re.match(expected, message or "")
    assert [count for _, count in results] == [2, 2]


def bad_places(rank):
    places = ("group", 0), (rank.group, -1), (rank.group, 1.0)
    messages = [message_of(lambda place=place: VocabParallel(*place)) for place in places]
    weight, ids = torch.randn(5, HIDDEN), torch.zeros(2).long()
    return [*messages, message_of(lambda: linear_logprobs(weight[:2], weight, ids, vocab_parallel=rank.group))]


def test_bad_places_are_named(ranks):
    names = (
        "TypeError: .*group",
        "ValueError: .*vocab_start",
        "ValueError: .*vocab_start",
        "TypeError: vocab_parallel",
    )
    for messages in ranks.run(bad_places):
        assert all(re.match(f"{name} must ", message) for name, message in zip(names, messages, strict=True))


def loss_with_an_id_outside(rank):
    weight, ids, place = torch.randn(5, HIDDEN), torch.ones(2, 3).long(), VocabParallel(rank.group, 5 * rank.index)
    ids[0, 0] = 1000

    def loss(advantage):
        columns = torch.zeros(2, 3, HIDDEN), weight, ids, torch.tensor([advantage, 1.0])
        return FusedLinearGRPOLoss("grpo")(*columns, vocab_parallel=place).loss.item()

    return message_of(lambda: loss(1.0)), loss(0.0)


def test_ids_of_tokens_without_a_say_are_not_looked_at(ranks):
    for message, loss in ranks.run(loss_with_an_id_outside):
        assert "1 of them are not, the largest is 1000" in message
        assert loss == -0.5


def calls_seen(rank, case):
    """Ranks tell their rows once per weight and place; a call whose weight is known has three collectives.

    -> the number of comparisons after each call, shapes that are summed or merged, products after the last of them has
    begun.
    """
    counts = []
    with sent() as calls:
        weight, other = torch.randn(5, HIDDEN), torch.randn(5, HIDDEN)
        for used, tokens in ((weight, 4), (weight, 9), (other, 4), (weight, 4), (other, 2)):
            place = VocabParallel(rank.group, 5 * rank.index)
            linear_logprobs(torch.randn(tokens, HIDDEN), used, torch.zeros(tokens).long(), vocab_parallel=place)
            counts.append(sum(name == "all_gather_object" for name, _ in calls))
    given = shard_of(rank, case)
    solve(*given)
    marks: list[int] = []
    with sent() as calls, Products() as products:
        reduce = dist.all_reduce

        def marked(*args, **options):
            marks.append(len(products.factors))
            return reduce(*args, **options)

        with mock.patch.object(dist, "all_reduce", marked):
            solve(*given)
    return counts, [shape for _, shape in calls], len(products.factors) - marks[-1]


@pytest.mark.parametrize("masked", ["none", "some", "all"])
def test_what_a_call_sends_and_waits_for(ranks, masked):
    for chunks in ({}, {"chunk_tokens": 8, "chunk_vocab": 32}):
        (first, other) = ranks.run(calls_seen, Case(masked=masked, **chunks))
        assert first == other
        counts, shapes, after = first
        assert counts == [1, 1, 2, 2, 2]
        n = shapes[0][1]
        assert n == {"none": 36, "all": 0}.get(masked, n)
        assert shapes[:2] == [(2, n), (5, n)]  # peak and peak_before; sums, target, moment, squares, logits
        assert len(shapes) == 3
        assert shapes[2][1] == HIDDEN
        assert shapes[2][0] < max(n, 1)  # tokens without a gradient are not sent
        assert after == (shapes[2][0] > 0)  # the sum runs beneath the last product, of a whole tile


def test_what_a_call_with_several_targets_sends(ranks):
    """Beside a maximum and three sums, the third for the mean logit, one collective more of (n, K) for the targets,
    which is not in a loop over tiles."""
    case = Case(several=7, bias=True, entropy=False, tokens=13)
    for _, shapes, _ in ranks.run(calls_seen, case):
        n = shapes[0][1]
        assert shapes[:-1] == [(1, n), (3, n), (n, 7)]
        assert shapes[-1][1] == HIDDEN


# --- ranks that hang: in the last file, for the ranks must be started again after it ---------------------------------


def left_alone(rank):
    if rank.index == 0:
        dist.all_reduce(torch.ones(1), group=rank.group)


def test_a_rank_left_alone_fails_the_test(ranks, monkeypatch):
    """The check that all these tests rest on."""
    monkeypatch.setattr("ranks.RUN_SECONDS", 2)
    with pytest.raises(TimeoutError, match="rank 0 of 2 gave no answer"):
        ranks.run(left_alone)
