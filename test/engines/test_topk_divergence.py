"""Distillation from a teacher's lists, against full logits in float64 and against TRL's and verl's formulas."""

import math

import pytest
import torch
from torch import Tensor

import oracles
from head_calls import Products, functional, problem
from liger_rl import LogitTransform, linear_logprobs, topk_divergence

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
    """One token after the other, from log-probabilities (..., V) in float64."""
    rows = []
    flat = zip(log_p.flatten(0, -2), ids.flatten(0, -2), teacher.double().flatten(0, -2), mask.flatten(), strict=True)
    for row, own, log_q, counts in flat:
        here = own >= 0
        if not counts or not here.any():
            rows.append(row.new_zeros(()))
            continue
        p, q = row[own[here]].exp(), log_q[here].exp()
        if tail == "bucket":
            p, q = torch.cat([p, 1 - p.sum()[None]]), torch.cat([q, 1 - q.sum()[None]])
        elif tail == "renormalized":
            p, q = p / p.sum(), q / q.sum()
        rows.append((q * (q / p).log()).sum())
    return torch.stack(rows).view(mask.shape)


@pytest.mark.parametrize("tail", TAILS)
def test_nan_of_a_token_without_a_gradient(tail, device):
    """It stays out of all gradients. With a gradient it reaches them."""
    x = problem((4,), device=device, bias=True)
    ids, teacher = (part.to(device) for part in lists((4,), 3, 129, share=1.0))

    def gradients(value: float, slope: float) -> tuple[Tensor, ...]:
        leaves = x.leaves()
        leaves.hidden.data[1] = value
        found = topk_divergence(leaves.hidden, leaves.weight, ids, teacher, tail=tail, bias=leaves.bias).divergence
        assert found[1].isnan() == math.isnan(value)
        slopes = torch.ones(4, device=device)
        slopes[1] = slope
        return torch.autograd.grad(found, (leaves.hidden, leaves.weight, leaves.bias), slopes)

    assert all(map(torch.equal, gradients(math.nan, 0.0), gradients(0.0, 0.0)))
    assert gradients(math.nan, 1.0)[1].isnan().any()


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


def test_a_bucket_is_a_lower_bound_that_grows_with_the_list():
    x = problem((40,))
    log_q = (2 * torch.randn(40, 129)).log_softmax(-1)
    log_p = (x.hidden @ x.weight.T).log_softmax(-1)
    whole = (log_q.exp() * (log_q - log_p)).sum(-1)
    before = torch.zeros(40)
    for count in (1, 4, 16, 64, 128):
        top = log_q.topk(count)
        value = topk_divergence(x.hidden, x.weight, top.indices, top.values).divergence
        assert (value > before - 1e-5).all()
        before = value
    torch.testing.assert_close(before, whole, rtol=1e-4, atol=1e-4)


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


def test_a_teachers_lists_from_this_library():
    """The lists of one call are what the next one takes; from itself, a model is at 0."""
    x = problem((3, 5), bias=True)
    mask = torch.rand(3, 5) < 0.7
    top = linear_logprobs(x.hidden, x.weight, x.targets, bias=x.bias, mask=mask, topk=9)
    leaves = x.leaves()
    found = topk_divergence(leaves.hidden, leaves.weight, top.topk_ids, top.topk_logps, mask=mask, bias=leaves.bias)
    assert found.divergence.abs().max() < 1e-5
    found.divergence.sum().backward()
    assert leaves.weight.grad.abs().max() < 1e-5


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"tail": "sum"}, ValueError, "tail must be one of .*bucket.*got 'sum'"),
    ({"teacher_ids": torch.zeros(6).long()}, ValueError, r"teacher_ids must be a tensor \(N, K\) or \(B, T, K\)"),
    ({"teacher_ids": [[1]]}, ValueError, "teacher_ids must be a tensor .*got list"),
    ({"teacher_ids": torch.full((6, 2), 129)}, ValueError, r"teacher_ids must be token ids in \[0, 129\)"),
    ({"teacher_ids": torch.zeros(6, 2)}, TypeError, "teacher_ids must be integers"),
    ({"teacher_logps": torch.zeros(6, 3)}, ValueError, r"teacher_logps must be \(6, 2\) from.*got \(6, 3\)"),
    ({"teacher_logps": torch.zeros(6, 2).long()}, TypeError, "teacher_logps must be float32, bfloat16 or float16"),
    ({"teacher_logps": torch.zeros(6, 2, requires_grad=True)}, ValueError, "teacher_logps must require no gradient"),
    ({"teacher_logps": torch.zeros(6, 2, device="meta")}, ValueError, "teacher_logps must be on cpu from teacher_ids"),
    ({"support": None}, TypeError, "topk_divergence got an unexpected argument 'support'"),
])  # fmt: skip
def test_what_does_not_fit_is_named(change, error, message):
    x = problem((6,))
    given = {"teacher_ids": torch.zeros(6, 2).long(), "teacher_logps": torch.zeros(6, 2), **change}
    with Products() as products, pytest.raises(error, match=message):
        topk_divergence(x.hidden, x.weight, **given)
    assert products.flops == 0
