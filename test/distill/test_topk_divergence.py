"""Distillation from a teacher's lists: corners, refusals, and TRL's own. Values in float64 are the fuzzer's."""

import math

import pytest
import torch
from torch import Tensor

from head_calls import problem
from liger_rl import linear_logprobs, topk_divergence


def test_a_teacher_that_lists_everything_likely():
    """No mass is left of the teacher, nor of the student: the bucket stays finite, and so do its gradients."""
    hidden, weight = torch.ones(1, 1, requires_grad=True), torch.tensor([[30.0], [29.0], [-80.0]], requires_grad=True)
    teacher = torch.tensor([[0.5, 0.5]]).log()
    values = topk_divergence(hidden, weight, torch.tensor([[0, 1]]), teacher, entropy=True)
    assert values.student.entropy is not None
    found = values.divergence
    found.sum().backward()
    p = torch.tensor([30.0, 29.0]).softmax(0)
    torch.testing.assert_close(found, (0.5 * (0.5 / p).log()).sum()[None], rtol=1e-5, atol=1e-5)
    assert weight.grad.isfinite().all()
    torch.testing.assert_close(weight.grad[:2, 0], p - 0.5, rtol=1e-5, atol=1e-5)


def test_probabilities_of_0():
    """The teacher's have no part; one of the student's under a likely id is infinitely far."""
    hidden, weight = torch.ones(2, 1), torch.zeros(4, 1)
    bias = torch.tensor([0.0, -math.inf, 0.0, 0.0])
    teacher = torch.tensor([[0.5, 0.0], [0.25, 0.25]]).log()
    found = topk_divergence(hidden, weight, torch.tensor([[0, 1], [0, 1]]), teacher, bias=bias, tail="none").divergence
    torch.testing.assert_close(found, torch.tensor([0.5 * math.log(1.5), math.inf]))


def of_logits(logits: Tensor, teacher: Tensor, ids: Tensor, **options) -> Tensor:
    """Each token's logits (n, V) are a row of the weight's own."""
    return topk_divergence(torch.eye(len(logits)), logits.T, ids, teacher, **options).divergence


@pytest.mark.parametrize("level", [-100.0, -190.0, -200.0, -300.0])
def test_an_id_that_is_not_listed_has_no_part_in_the_normaliser(level):
    logits = torch.tensor([[level, level - 1.0, 0.0, 0.0]], requires_grad=True)
    teacher, ids = torch.tensor([[-0.5, -1.0, 0.0, 0.0]]), torch.tensor([[0, 1, -1, -1]])
    p, q = logits[:, :2].log_softmax(-1), teacher[:, :2].log_softmax(-1)
    found, expected = of_logits(logits, teacher, ids, tail="renormalized"), (q.exp() * (q - p)).sum(-1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    grads = [torch.autograd.grad(value, logits)[0] for value in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    nothing = of_logits(logits, teacher, -1 - ids.abs(), kind="jsd", beta=0.1, tail="renormalized")
    assert nothing == 0
    assert not torch.autograd.grad(nothing, logits)[0].any()


@pytest.mark.parametrize(("kind", "beta", "expected"), [
    ("forward_kl", 0.5, [math.log(2), math.inf]),
    ("reverse_kl", 0.5, [math.inf, math.log(2)]),
])  # fmt: skip
def test_banned_ids_in_both_directions(kind, beta, expected):
    """An id that one of the two gives probability 0 is infinitely far in one direction, and nothing in the other."""
    both, ids = [torch.tensor([0.5, 0.5, 0.0]).log(), torch.tensor([1.0, 0.0, 0.0]).log()], torch.arange(3)[None]
    for p, q, value in zip(both, both[::-1], expected, strict=True):
        bias = p.clone().requires_grad_()
        found = topk_divergence(
            torch.ones(1, 1), torch.zeros(3, 1), ids, q[None], bias=bias, kind=kind, beta=beta, tail="none"
        ).divergence
        torch.testing.assert_close(found, torch.tensor([value]))
        assert value == math.inf or torch.autograd.grad(found.sum(), bias)[0].isfinite().all()


@pytest.mark.parametrize(("alpha", "tail"), [(0.0, "bucket"), (0.3, "renormalized"), (1.0, "bucket")])
def test_trls_self_distillation_has_the_same(tail, alpha, monkeypatch):
    """SDFT's and SDPO's, over the student's own list."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trl = pytest.importorskip("trl.experimental.sdft.loss_utils", reason="TRL's self-distillation is not installed")
    x, teacher = problem((30,)), problem((30,), hidden_size=9)
    logits = x.hidden @ x.weight.T, teacher.hidden @ teacher.weight.T
    ids = logits[0].topk(8).indices
    teacher_logps = linear_logprobs(teacher.hidden, teacher.weight, ids).logps
    found = topk_divergence(x.hidden, x.weight, ids, teacher_logps, kind="jsd", beta=alpha, tail=tail)
    expected = trl.compute_topk_self_distillation_loss(
        *logits, distillation_topk=8, distillation_alpha=alpha, distillation_add_tail=tail == "bucket"
    )
    torch.testing.assert_close(found.divergence, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("options", "message"), [
    ({"teacher_ids": None}, "teacher_ids must be a tensor, got NoneType"),
    ({"teacher_logps": lambda ids: torch.zeros(3)}, "teacher_logps must be a tensor, got function"),
    ({"lists": "student"}, "unexpected argument 'lists'"),
    ({"kind": "hellinger"}, "kind must be one of"),
    ({"beta": 0.3}, "beta is an option of"),
])  # fmt: skip
def test_refusals_of_lists(options, message):
    x = problem()
    arguments = {"teacher_ids": torch.ones(3, 5, 4).long(), "teacher_logps": torch.zeros(3, 5, 4)} | options
    with pytest.raises((TypeError, ValueError), match=message):
        topk_divergence(x.hidden, x.weight, **arguments)
