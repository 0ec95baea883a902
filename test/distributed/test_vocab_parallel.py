"""A head sharded over its vocabulary is the whole head: the same numbers, the same gradients, the same errors."""

import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import oracles
from devices import skip_without_interpreter
from head_calls import CALLS, Batch, Products, PublicCall, batch, run_triton
from liger_rl import FusedLinearCrossEntropyLoss, FusedLinearGRPOLoss, FusedLinearPreferenceLoss, linear_logprobs
from liger_rl.distributed import VocabParallel
from liger_rl.fused_linear import ReferenceHead
from liger_rl.kernels.statistics import EXTRAS
from liger_rl.models.tensors import localize
from ranks import assert_whole, message_of, sent

SHAPE, HIDDEN, VOCAB = (4, 9), 12, 601
# Rows of each rank, by the number of ranks.
SHARDS = {
    "even": {2: (301, 300), 4: (151, 150, 150, 150)},
    "uneven": {2: (513, 88), 4: (7, 380, 1, 213)},
}
TIED = torch.tensor([3, 40, 400, 590])  # in one shard and in two

# --- the calls: those of the table, and losses of more kinds ----------------------------------------------------------


def every_value(x: Batch, **options) -> list[Tensor]:
    """Tokens without a gradient are left out of the backward."""
    found = linear_logprobs(
        x.hidden, x.weight, x.targets, mask=x.mask, bias=x.bias, entropy=True, lse=True, extras=EXTRAS, **options
    )
    has_gradient = torch.arange(x.mask.shape[1], device=x.mask.device) % 3 > 0
    return [torch.where(has_gradient, values, values.detach()) for values in found if values is not None]


def policy_loss(x: Batch, *, loss_type: str, vocab_parallel=None):
    loss = FusedLinearGRPOLoss(loss_type, beta=0.05, temperature=0.9, entropy_coef=0.01, metrics="with_entropy")
    teacher = x.hidden.detach() + 0.1, x.weight.detach()
    ref = loss.reference_logps(*teacher, x.targets, x.mask, vocab_parallel=vocab_parallel)
    return _loss_and_metrics(
        loss(
            x.hidden, x.weight, x.targets, x.advantages[:, 0], x.mask, vocab_parallel=vocab_parallel,
            old_per_token_logps=ref + 0.3 * x.advantages, ref_per_token_logps=ref,
        )
    )  # fmt: skip


def cross_entropy(x: Batch, **options):
    loss = FusedLinearCrossEntropyLoss(label_smoothing=0.1, z_loss=1e-3, metrics="with_entropy")
    return _loss_and_metrics(loss(x.hidden, x.weight, x.targets.masked_fill(~x.mask, -100), bias=x.bias, **options))


def dpo(x: Batch, **options):
    loss, targets = FusedLinearPreferenceLoss("dpo", nll_coef=0.2), x.targets.masked_fill(~x.mask, -100)
    reference = ReferenceHead(hidden=x.teacher_hidden, weight=x.teacher_weight)
    return _loss_and_metrics(loss(x.hidden, x.weight, targets, bias=x.bias, reference=reference, **options))


def _loss_and_metrics(result) -> list[Tensor]:
    return [result.loss, *(metric.value.detach() for metric in result.metrics.values())]


ROWS = {name: call for name, call in CALLS.items() if "vocab_parallel" in call.takes} | {
    "every value": PublicCall(every_value),
    "GRPO": PublicCall(partial(policy_loss, loss_type="grpo"), ("hidden", "weight")),
    "GSPO": PublicCall(partial(policy_loss, loss_type="gspo"), ("hidden", "weight")),
    "cross entropy": PublicCall(cross_entropy),
    "DPO": PublicCall(dpo),
}
LOSSES = {"loss", "GRPO", "GSPO", "cross entropy", "DPO"}


class Case(NamedTuple):
    call: str = "every value"
    shards: str = "even"  # a key of SHARDS, or which arguments are DTensors
    change: Callable[[Batch], Batch] | None = None  # of the batch
    options: dict | None = None  # of the call
    frozen: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32


def with_ties(x: Batch) -> Batch:
    """Several entries have the largest logit, to the last bit; the smallest of the ids is the first."""
    weight, bias, targets = x.weight.clone(), x.bias.clone(), x.targets.clone()
    weight[TIED], bias[TIED], targets[1, :4] = 0.0, 30.0, TIED.to(targets.device)
    return x._replace(weight=weight, bias=bias, targets=targets, mask=torch.ones_like(x.mask))


def with_banned_entries(x: Batch) -> Batch:
    """The bias of a whole shard and more is -inf."""
    bias = x.bias.masked_fill(torch.arange(VOCAB, device=x.bias.device) < 520, -torch.inf)
    return x._replace(bias=bias, targets=520 + x.targets.clamp(min=0) % (VOCAB - 520))


EDGES = {
    "even shards": Case(),
    "hidden states that are no DTensor": Case(shards="weights"),
    "chunks": Case("dense", options={"chunk_tokens": 10, "chunk_vocab": 64, "entropy": False}),
    "chunks of several targets": Case("several targets", "uneven", options={"chunk_tokens": 4, "chunk_vocab": 8}),
    "a frozen head": Case(frozen=("weight", "bias"), options={"chunk_tokens": 16, "chunk_vocab": 50}),
    "frozen hidden states": Case(frozen=("hidden",)),
    "targets of the first rank alone": Case(change=lambda x: x._replace(targets=x.targets % 5)),
    "no token that counts": Case(change=lambda x: x._replace(mask=torch.zeros_like(x.mask))),
    "no token": Case(change=lambda x: x.tokens(slice(0))),
    "bfloat16": Case("a temperature and a softcap", "uneven", dtype=torch.bfloat16),
    "ties": Case(shards="uneven", change=with_ties),
    "banned entries": Case("dense", "uneven", with_banned_entries),
}
CASES = EDGES | {f"{call}, {shards}": Case(call, shards) for call in ROWS for shards in ("uneven", "DTensors")}


def make_batch(case: Case, device="cpu") -> Batch:
    """The same on every rank. Some targets are the most probable ids, one is left out, and some ids of lists are."""
    x = batch(SHAPE, HIDDEN, VOCAB, case.dtype, device)
    x.targets[:, ::4] = oracles.linear_logits(x.hidden, x.weight, x.bias).argmax(-1)[:, ::4]
    x.targets[0, 1], x.mask[0, 1] = -100, case.call not in LOSSES
    x.ids[0, 2, 1], x.ids[0, 3] = -100, -1
    return x if case.change is None else case.change(x)


def cut(rank, x: Batch, shards: str) -> tuple[Batch, VocabParallel | None]:
    """This rank's part of the batch, and its place; DTensors say by themselves where their rows are."""
    if shards in SHARDS:
        sizes = SHARDS[shards][rank.world]
        rows = slice(sum(sizes[: rank.index]), sum(sizes[: rank.index + 1]))
        parts = {name: getattr(x, name)[rows].clone() for name in ("weight", "bias", "teacher_weight")}
        return x._replace(**parts), VocabParallel(rank.group, rows.start)
    placements = dict.fromkeys(("weight", "bias", "teacher_weight"), Shard(0))
    if shards == "DTensors":
        placements |= dict.fromkeys(("hidden", "teacher_hidden"), Replicate())
    mesh = rank.mesh("tp")
    return x._replace(**{n: distribute_tensor(getattr(x, n), mesh, [p]) for n, p in placements.items()}), None


def call_locally(function, place: VocabParallel | None, x: Batch, **options):
    """The call, with the plain tensors of this rank."""
    local = localize(x.hidden, x.weight, bias=x.bias, vocab_parallel=place)
    teacher = localize(x.teacher_hidden, x.teacher_weight, vocab_parallel=place)
    x = x._replace(**dict(zip(("hidden", "weight", "bias"), local[:3], strict=True)))
    x = x._replace(teacher_hidden=teacher.hidden, teacher_weight=teacher.weight)
    return function(x, vocab_parallel=local.vocab_parallel, **options)


def solve(rank, case: Case, x: Batch) -> dict[str, Tensor]:
    """Results and gradients by name; a sharded gradient is this rank's. Without a rank, of the whole head."""
    call = ROWS[case.call]
    if rank is not None:
        x, place = cut(rank, x, case.shards)
        call = call._replace(function=partial(call_locally, call.function, place))
    values, grads = call.solve(x, frozen=case.frozen, **(case.options or {}))
    results = {f"value {i}": value for i, value in enumerate(values)}
    for name, grad in grads.items():
        if grad is not None:
            assert getattr(grad, "placements", None) == getattr(getattr(x, name), "placements", None)
            results[f"grad_{name}"] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return {name: part.cpu() for name, part in results.items()}


def solve_case(rank, name: str, device="cpu"):
    case = CASES[name]
    return solve(rank, case, make_batch(case, device if rank is None else rank.device))


@pytest.mark.parametrize("name", CASES)
def test_equals_the_whole_head(ranks, world, name):
    case = CASES[name]
    results, expected = ranks.run(solve_case, name, **world), solve_case(None, name, world["device"])
    if case.call in LOSSES:
        tolerance, grad_tolerance = 1e-5, 3e-6
        assert oracles.relative_error(results[0]["value 0"], expected["value 0"]) <= 1e-6
    elif case.dtype == torch.bfloat16:  # gradients are rounded once more, to another neighbour here and there
        tolerance, grad_tolerance = 1e-6, 4e-3
    else:
        # With ties the largest logits are the probable ones, and the last bit of 35 is 4e-6 of a probability.
        tolerance = 1e-5 if name == "ties" else 1e-6
        grad_tolerance = 1e-5 if name in ("ties", "banned entries") else 1e-6
    assert_whole(results, expected, tolerance, grad_tolerance)
    if name not in EDGES:
        assert all(truth.any() for name, truth in expected.items() if name == "value 0" or "grad" in name)


def solve_in_triton(rank, case):
    with pytest.MonkeyPatch.context() as patch:
        run_triton(patch, epilogue=case.dtype == torch.float16)
        return solve(rank, case, make_batch(case))


@pytest.mark.parametrize("call", ["every value", "a temperature and a softcap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_on_a_part_of_the_vocabulary(ranks, dtype, call):
    """In the interpreter: targets of other ranks are before the part and after it, also within a kernel's last tile."""
    skip_without_interpreter()
    case = Case(call, "uneven", dtype=dtype)
    expected = solve(None, case, make_batch(case))
    assert_whole(ranks.run(solve_in_triton, case), expected, 1e-5, 1e-5 if dtype == torch.float32 else 4e-3)


# --- errors -----------------------------------------------------------------------------------------------------------


def provoked(rank, on_all, on_last):
    """The error of a call that does not fit, and whether the ranks still work together after it."""
    given = {"start": 0, "columns": HIDDEN, "target": 0}
    given |= on_all | (on_last if rank.index == rank.world - 1 else {})
    targets = torch.tensor([0, 0, given["target"]])
    place = VocabParallel(rank.group, 5 * rank.index + given["start"])
    call = partial(linear_logprobs, torch.randn(3, HIDDEN), torch.randn(5, given["columns"]), targets)
    message, again = message_of(partial(call, vocab_parallel=place)), torch.ones(1)
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


# What a policy loss is given otherwise, and the error on the rank that gives it.
LOSS_MISTAKES = [
    ({"hidden": torch.randn(2, 3, HIDDEN + 1)}, r"ValueError: weight must be \(V, H\)"),
    ({"advantages": torch.ones(3)}, r"ValueError: advantages must be \(B, T\) = \(2, 3\)"),
    ({"num_items_in_batch": "6"}, "TypeError: num_items_in_batch must be a number"),
    ({"ratio": 1.0}, "TypeError: FusedLinearGRPOLoss.forward got an unexpected argument"),
]


def refused(rank):
    """-> errors of places; of this rank's own mistakes in a loss, which the other rank does not call; of an id."""
    weight, ids, place = torch.randn(5, HIDDEN), torch.ones(2, 3).long(), VocabParallel(rank.group, 5 * rank.index)
    head = {"hidden": torch.zeros(2, 3, HIDDEN), "weight": weight, "selected_token_ids": ids}
    call = partial(FusedLinearGRPOLoss("grpo"), **head, advantages=torch.ones(2), vocab_parallel=place)
    places = ("group", 0), (rank.group, -1), (rank.group, 1.0)
    of_places = [message_of(partial(VocabParallel, *arguments)) for arguments in places]
    of_places.append(message_of(partial(linear_logprobs, weight[:2], weight, ids[0, :2], vocab_parallel=rank.group)))
    of_loss = [message_of(partial(call, **mistake)) for mistake, _ in LOSS_MISTAKES] if rank.index else []
    ids[0, 0] = 1000  # of a token with an advantage, and of one without
    without = call(advantages=torch.tensor([0.0, 1.0])).loss.item()
    return of_places, of_loss, message_of(call), without


def test_what_a_rank_refuses_by_itself(ranks):
    places = ("TypeError: .*group", *["ValueError: .*vocab_start"] * 2, "TypeError: vocab_parallel")
    for index, (of_places, of_loss, of_id, without) in enumerate(ranks.run(refused)):
        assert all(re.match(f"{name} must ", text) for name, text in zip(places, of_places, strict=True))
        expected = [text for _, text in LOSS_MISTAKES] if index else []
        assert all(re.match(text, found) for text, found in zip(expected, of_loss, strict=True))
        assert "1 of them are not, the largest is 1000" in of_id
        assert without == -0.5


# --- what is sent -----------------------------------------------------------------------------------------------------


def rows_told(rank):
    """-> how many times ranks have told their rows after each call: once per weight and place, and per DTensor, whose
    local tensor is another in each call."""
    counts, weight, other = [], torch.randn(5, HIDDEN), torch.randn(5, HIDDEN)
    dtensor = distribute_tensor(torch.randn(10, HIDDEN), rank.mesh("tp"), [Shard(0)])
    with sent() as calls:
        for used, tokens in ((weight, 4), (weight, 9), (other, 4), (weight, 4), (dtensor, 4), (dtensor, 4)):
            place = VocabParallel(rank.group, 5 * rank.index) if used is not dtensor else None
            local = localize(torch.randn(tokens, HIDDEN), used, vocab_parallel=place)
            linear_logprobs(*local[:2], torch.zeros(tokens).long(), vocab_parallel=local.vocab_parallel)
            counts.append(sum(name == "all_gather_object" for name, _ in calls))
    return counts


def test_rows_are_told_once(ranks):
    assert ranks.run(rows_told) == [[1, 1, 2, 2, 3, 3]] * 2


def calls_seen(rank, case, masked):
    """-> tokens that count, shapes that are summed or merged, and products after the last of them has begun."""
    x, place = cut(rank, make_batch(case), case.shards)
    x = x._replace(mask=x.mask & (masked == "some") | (masked == "none"))
    call = ROWS[case.call]._replace(function=partial(call_locally, ROWS[case.call].function, place))
    leaves, marks = x.leaves(call.inputs), []

    def solve() -> None:
        sum(values.sum() for values in call.function(leaves, **(case.options or {}))).backward()

    solve()  # ranks tell their rows
    with sent() as calls, Products() as products:
        reduce = dist.all_reduce

        def marked(*args, **options):
            marks.append(len(products.factors))
            return reduce(*args, **options)

        with mock.patch.object(dist, "all_reduce", marked):
            solve()
    return int((x.mask & (x.targets >= 0)).sum()), [shape for _, shape in calls], len(products.factors) - marks[-1]


@pytest.mark.parametrize("masked", ["none", "some", "all"])
@pytest.mark.parametrize("options", [None, {"chunk_tokens": 8, "chunk_vocab": 32}], ids=str)
def test_what_a_call_sends_and_waits_for(ranks, masked, options):
    first, other = ranks.run(calls_seen, Case(options=options), masked)
    assert first == other
    n, shapes, after = first
    *merged, (live, columns) = shapes
    assert merged == [(2, n), (5, n)]  # peak and peak_before; sums, target, moment, squares, logits
    assert columns == HIDDEN
    assert live < max(n, 1)  # tokens without a gradient are not sent
    assert after == (live > 0)  # the sum runs beneath the last product, of a whole tile


def test_what_a_call_with_several_targets_sends(ranks):
    """Beside a maximum and three sums, the third for the mean logit, one collective more of (n, K) for the targets,
    which is not in a loop over tiles."""
    case = Case("several targets", options={"entropy": False, "extras": ("mean_logits",)})
    for _, shapes, _ in ranks.run(calls_seen, case, "none"):
        n = shapes[0][1]
        assert shapes == [(1, n), (3, n), (n, 4), (n, HIDDEN)]


# --- ranks that hang: in the last file, for the ranks must be started again after it ---------------------------------


def left_alone(rank):
    if rank.index == 0:
        dist.all_reduce(torch.ones(1), group=rank.group)


def test_a_rank_left_alone_fails_the_test(ranks, monkeypatch):
    """The check that all these tests rest on."""
    monkeypatch.setattr("ranks.RUN_SECONDS", 2)
    with pytest.raises(TimeoutError, match="rank 0 of 2 gave no answer"):
        ranks.run(left_alone)
