"""Distillation from a teacher's lists, against full logits in float64 and against TRL's and verl's formulas."""

import math

import pytest
import torch
from torch import Tensor

import oracles
from head_calls import functional, problem
from liger_rl import LogitTransform, topk_divergence

TAILS = ["bucket", "none", "renormalized"]
CAPPED = {"temperature": 0.7, "softcap": 4.0, "scale": 1.3}


def lists(shape: tuple[int, ...], count: int, vocab: int, share: float = 0.8) -> tuple[Tensor, Tensor]:
    """A teacher's likeliest ids, most likely first; shorter lists are filled up with -1 and NaN, one is empty."""
    generator = torch.Generator().manual_seed(4)
    top = (2 * torch.randn(*shape, vocab, generator=generator)).log_softmax(-1).topk(count)
    sizes = torch.randint(1, count + 1, (*shape, 1), generator=generator)
    sizes.view(-1)[3] = 0
    here = torch.arange(count) < sizes if share < 1 else torch.ones(*shape, count, dtype=torch.bool)
    return torch.where(here, top.indices, -1), torch.where(here, top.values, math.nan)


def divergence_of(log_p: Tensor, ids: Tensor, teacher: Tensor, mask: Tensor, tail: str) -> Tensor:
    """From log-probabilities (..., V) in float64."""
    here = (ids >= 0) & mask[..., None]
    p = torch.where(here, log_p.gather(-1, ids.clamp(min=0)).exp(), 0.0)
    q = torch.where(here, teacher.double().exp(), 0.0)
    if tail == "bucket":
        p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
    elif tail == "renormalized":
        p, q = (x / x.sum(-1, keepdim=True).clamp(min=1e-300) for x in (p, q))
    terms = torch.where(q > 0, q * (q.where(q > 0, 1.0) / p.where(q > 0, 1.0)).log(), 0.0)
    return terms.sum(-1) * here.any(-1)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("count", [1, 4, 20])
@pytest.mark.parametrize("transform", [{}, CAPPED], ids=["plain", "all"])
def test_oracle(tail, count, transform, device):
    x = problem(device=device, bias=True, rank=2)
    ids, teacher = (part.to(device) for part in lists((3, 5), count, 129))
    mask = torch.rand(3, 5, device=device) < 0.8
    leaves, wide = x.leaves(), x.to(torch.float64).leaves()
    found = topk_divergence(
        leaves.hidden, leaves.weight, ids, teacher, tail=tail, mask=mask, bias=leaves.bias,
        low_rank=leaves.low_rank(), transform=LogitTransform(**transform), entropy=True, chunk_vocab=50,
    )  # fmt: skip
    weight = wide.weight + 1.5 * wide.b @ wide.a
    log_p = oracles.transformed(wide.hidden @ weight.T + wide.bias, **transform).log_softmax(-1)
    expected = divergence_of(log_p, ids, teacher, mask, tail)
    assert found.divergence.shape == (3, 5)
    assert found.divergence.dtype == torch.float32
    torch.testing.assert_close(found.divergence.double(), expected, rtol=2e-5, atol=2e-5)
    assert found.student.entropy is not None
    functional(found.divergence).backward()
    functional(expected).backward()
    for name, truth in wide.grads().items():
        # The log-probability of what is left of 1 has the rounding of 1.
        error = (leaves.grads()[name].double() - truth).norm() / truth.norm().clamp(min=1e-12)
        assert error < 1e-4 or truth.norm() < 1e-6, name
    assert found.divergence[~mask].eq(0).all()


@pytest.mark.parametrize("tail", ["bucket", "renormalized"])
def test_trl_has_the_same(tail, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    name = "trl.experimental.server_distillation.server_distillation_trainer"
    trl = pytest.importorskip(name, reason="TRL's server distillation is not installed")
    x, (ids, teacher) = problem((30,)), lists((30,), 8, 129, share=1.0)
    found = topk_divergence(x.hidden, x.weight, ids, teacher, tail=tail).divergence
    student, valid = (x.hidden @ x.weight.T).log_softmax(-1).gather(-1, ids), ids >= 0
    if tail == "bucket":
        (student, valid), (teacher, _) = (trl._add_tail_bucket(part, valid) for part in (student, teacher))
    else:
        student, teacher = (part - part.logsumexp(-1, keepdim=True) for part in (student, teacher))
    expected = trl._jsd_divergence(student, teacher, 0, valid).sum(-1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_teacher_that_lists_everything_likely():
    """No mass is left of the teacher, nor of the student: the bucket stays finite, and so do its gradients."""
    hidden, weight = torch.ones(1, 1, requires_grad=True), torch.tensor([[30.0], [29.0], [-80.0]], requires_grad=True)
    teacher = torch.tensor([[0.5, 0.5]]).log()
    found = topk_divergence(hidden, weight, torch.tensor([[0, 1]]), teacher).divergence
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
