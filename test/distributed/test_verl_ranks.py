"""verl's linear_cross_entropy, alone and over ranks: full logits in float64 are the truth; and what is refused."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

import oracles
from liger_rl.integrations.verl import linear_cross_entropy
from ranks import message_of

HIDDEN, VOCAB, BATCH, LENGTH = 12, 40, 2, 8
# (temperature, whether some labels are masked)
CASES = [(1.0, True), (0.7, False)]


def problem(temperature=1.0, masked=False, device="cpu") -> SimpleNamespace:
    torch.manual_seed(3)
    x = SimpleNamespace(hidden=torch.randn(BATCH, LENGTH, HIDDEN), weight=torch.randn(VOCAB, HIDDEN))
    x.labels, x.upstream = torch.randint(VOCAB, (BATCH, LENGTH)), torch.randn(2, BATCH, LENGTH)
    x.temperature = temperature
    if masked:
        x.labels[torch.rand(BATCH, LENGTH) >= 0.7] = -100
    moved = {name: value.to(device) for name, value in vars(x).items() if isinstance(value, torch.Tensor)}
    return SimpleNamespace(**vars(x) | moved)


def solve(rank, *case):
    """Outputs, this rank's part of the gradient of hidden, and the gradient of this rank's rows of the weight."""
    x = problem(*case, device=rank.device)
    leaves = x.hidden.requires_grad_(), x.weight.chunk(rank.world)[rank.index].clone().requires_grad_()
    outputs = linear_cross_entropy(*leaves, x.labels, x.temperature, "none", rank.group)
    outputs = [values.view(BATCH, LENGTH) for values in outputs]
    grads = torch.autograd.grad(sum((v * u).sum() for v, u in zip(outputs, x.upstream, strict=True)), leaves)
    return [values.detach().cpu() for values in (*outputs, *grads)]


def assert_full_logits(results, *case):
    x = problem(*case)
    leaves = [tensor.double().requires_grad_() for tensor in (x.hidden, x.weight)]
    z = leaves[0] @ leaves[1].T / x.temperature
    truths = [torch.where(x.labels >= 0, v, 0.0) for v in oracles.logits_logprobs(z, x.labels.clamp(min=0))]
    truth_grads = torch.autograd.grad(sum((v * u).sum() for v, u in zip(truths, x.upstream, strict=True)), leaves)
    for *outputs, _, _ in results:
        assert all(values.dtype == torch.float32 for values in outputs)
        torch.testing.assert_close([values.double() for values in outputs], truths, rtol=1e-5, atol=1e-5)
    grads = [sum(result[2].double() for result in results), torch.cat([result[3].double() for result in results])]
    torch.testing.assert_close(grads, list(truth_grads), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_process_has_the_numbers_of_full_logits(case, device):
    alone = SimpleNamespace(index=0, world=1, group=None, device=device)
    assert_full_logits([solve(alone, *case)], *case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_have_the_numbers_of_full_logits(ranks, case, world):
    assert_full_logits(ranks.run(solve, *case, **world), *case)


def test_one_rank(ranks):
    assert_full_logits(ranks.run(solve, 1.0, False, world=1), 1.0, False)


# --- what is refused --------------------------------------------------------------------------------------------------

LABELS = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
# What a right call is given otherwise, and how the error begins.
REFUSALS = [
    ({"hidden": [0.0]}, "TypeError: hidden must be a tensor"),
    ({"hidden": torch.zeros(HIDDEN)}, "ValueError: hidden must be (..., H)"),
    ({"weight": torch.zeros(VOCAB, HIDDEN + 1)}, "ValueError: weight must be (V, H)"),
    ({"weight": torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16)}, "TypeError: weight must be"),
    ({"labels": [0]}, "TypeError: labels must be a tensor"),
    ({"labels": LABELS[:, 1:]}, "ValueError: labels must have 16 elements"),
    ({"labels": torch.zeros(16, 0, dtype=torch.int64)}, "ValueError: labels must have 16 elements"),
    ({"labels": LABELS.repeat(2, 1)}, "ValueError: labels must have 16 elements"),
    ({"labels": LABELS + VOCAB}, "ValueError: targets must be token ids"),
    ({"temperature": 0.0}, "ValueError: temperature must be"),
    ({"temperature": torch.ones(16)}, "TypeError: temperature must be a number, got Tensor"),
    ({"reduction": "batchmean"}, "ValueError: reduction must be one of"),
    ({"reduction": None}, "ValueError: reduction must be one of"),
]


def right_call(rank):
    x = problem()
    weight = x.weight.chunk(rank.world)[rank.index].clone()
    return {"hidden": x.hidden, "weight": weight, "labels": x.labels, "dist_process_group": rank.group}


def refusals(rank):
    given = right_call(rank)
    found = [message_of(partial(linear_cross_entropy, **given | changed)) for changed, _ in REFUSALS]
    return message_of(partial(linear_cross_entropy, **given)), found


def test_what_does_not_fit_is_refused_by_name(ranks):
    ((right, found),) = ranks.run(refusals, world=1)
    assert right is None
    for message, (_, beginning) in zip(found, REFUSALS, strict=True):
        assert message.startswith(beginning)


def uneven(rank):
    weight = torch.ones(5 + rank.index, 4)
    return message_of(lambda: linear_cross_entropy(torch.ones(3, 4), weight, LABELS[0, :3], 1.0, "none", rank.group))


def test_parts_of_different_size_raise_everywhere(ranks):
    for message in ranks.run(uneven):
        assert message.startswith("ValueError: the shards of weight must cover")
