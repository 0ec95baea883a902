"""Distillation from a teacher's lists, against full logits in float64 and against TRL's and verl's formulas."""

import math

import pytest
import torch
from torch import Tensor

import oracles
from head_calls import functional, problem
from liger_rl import linear_logprobs, topk_divergence
from liger_rl.head import LogitTransform

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


@pytest.mark.parametrize(
    ("tail", "count", "transform"), [("bucket", 20, CAPPED), ("none", 1, {}), ("renormalized", 4, CAPPED)]
)
def test_oracle(tail, count, transform, device):
    x = problem(device=device, bias=True)
    ids, teacher = (part.to(device) for part in lists((3, 5), count, 129))
    mask = torch.rand(3, 5, device=device) < 0.8
    leaves, wide = x.leaves(), x.to(torch.float64).leaves()
    found = topk_divergence(
        leaves.hidden, leaves.weight, ids, teacher, tail=tail, mask=mask, bias=leaves.bias,
        transform=LogitTransform(**transform), entropy=True,
    )  # fmt: skip
    logps = oracles.values(oracles.linear_logits(wide.hidden, wide.weight, wide.bias, **transform), ids.clamp(min=0))[0]
    parts, counted = (logps.exp(), teacher.double().exp(), ids >= 0), (ids >= 0).any(-1) & mask
    expected = torch.zeros_like(logps[..., 0])
    expected[counted] = oracles.list_divergence(*(part[counted] for part in parts), "forward_kl", 0.5, tail)
    assert found.divergence.shape == (3, 5)
    assert found.divergence.dtype == torch.float32
    torch.testing.assert_close(found.divergence.double(), expected, rtol=2e-5, atol=2e-5)
    assert found.student.entropy is not None
    functional(found.divergence).backward()
    functional(expected).backward()
    for name, truth in wide.grads().items():
        # The log-probability of what is left of 1 has the rounding of 1.
        assert oracles.norm_error(leaves.grads()[name], truth) < 1e-4 * truth.norm(), name
    assert found.divergence[~mask].eq(0).all()


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


KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1), ("jsd", 0.0), ("jsd", 1.0)]


@pytest.mark.parametrize(("kind", "beta", "tail"), [(*kind, TAILS[place % 3]) for place, kind in enumerate(KINDS)])
@pytest.mark.parametrize("who", ["teacher", "student"])
def test_every_direction(who, kind, beta, tail, device):
    """Over the likeliest ids of either; the gradient is that of full logits."""
    x, teacher = problem(device=device, bias=True), problem(device=device).to(torch.float64)
    leaves, wide = x.leaves(), x.to(torch.float64).leaves()
    log_p = (wide.hidden @ wide.weight.T + wide.bias).log_softmax(-1)
    # A teacher near the student, so that their lists share ids.
    log_q = (log_p.detach() + teacher.hidden @ teacher.weight.T).log_softmax(-1)
    mask = torch.rand(3, 5, device=device) < 0.8
    ids = (log_p if who == "student" else log_q).topk(6, -1).indices
    found = topk_divergence(
        leaves.hidden, leaves.weight, ids, log_q.gather(-1, ids).float(), kind=kind, beta=beta, tail=tail, mask=mask,
        bias=leaves.bias,
    )  # fmt: skip
    parts = (x.gather(-1, ids).exp() for x in (log_p, log_q))
    expected = oracles.list_divergence(*parts, torch.ones_like(ids, dtype=torch.bool), kind, beta, tail) * mask
    torch.testing.assert_close(found.divergence.double(), expected, rtol=2e-5, atol=2e-5)
    functional(found.divergence).backward()
    functional(expected).backward()
    for name, truth in wide.grads().items():
        assert oracles.norm_error(leaves.grads()[name], truth) < 1e-4 * truth.norm(), name


def of_logits(logits: Tensor, teacher: Tensor, ids: Tensor, **options) -> Tensor:
    """Each token's logits (n, V) are a row of the weight's own."""
    return topk_divergence(torch.eye(len(logits)), logits.T, ids, teacher, **options).divergence


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_formulas_on_lists_of_different_lengths(kind, beta, tail):
    log_p, log_q = torch.randn(2, 6, 40).log_softmax(-1).unbind()
    log_p, teacher = log_p.requires_grad_(), log_q[:, :7].clone()
    ids = torch.arange(7).expand(6, 7).masked_fill(torch.arange(7) >= torch.tensor([7, 5, 3, 2, 1, 0])[:, None], -1)
    torch.nn.init.constant_(teacher[1, 5:], math.nan)
    found = of_logits(log_p, teacher, ids, kind=kind, beta=beta, tail=tail)
    assert found[5] == 0
    p, q = (x.double()[:5].log_softmax(-1)[:, :7].exp() for x in (log_p, log_q))
    expected = oracles.list_divergence(p, q, ids[:5] >= 0, kind, beta, tail)
    torch.testing.assert_close(found[:5].double(), expected, rtol=1e-5, atol=1e-6)
    grads = torch.autograd.grad(found[:5].sum(), log_p)[0], torch.autograd.grad(expected.sum(), log_p)[0]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


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
    x, (ids, teacher) = problem(), lists((3, 5), 4, 129, share=1.0)
    arguments = {"teacher_ids": ids, "teacher_logps": teacher} | options
    with pytest.raises((TypeError, ValueError), match=message):
        topk_divergence(x.hidden, x.weight, **arguments)
