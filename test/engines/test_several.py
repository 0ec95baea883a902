"""Several targets a token, the K largest log-probabilities, and lse: corners of them. Values are the fuzzer's."""

import math

import pytest
import torch
from torch import Tensor

import oracles
from devices import skip_without_interpreter
from head_calls import Problem, Products, functional, problem, run_triton
from liger_rl import FusedLinearGRPOLoss, LogitTransform, LogProbs, Support, linear_logprobs

ALL = {"temperature": 0.7, "softcap": 4.0, "scale": 1.3}


def solve(x: Problem, **options) -> tuple[LogProbs, dict[str, Tensor | None]]:
    """Values, and gradients of a linear functional of all that is differentiable."""
    x = x.leaves()
    found = linear_logprobs(x.hidden, x.weight, x.targets, bias=x.bias, **{"entropy": True, "lse": True, **options})
    functional(found.logps, found.entropy, found.lse).backward()
    return found, x.grads()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_small_difference_of_two_terms_is_rounded_once(dtype):
    """A student whose probabilities are nearly its teacher's: dL/dz = p - q, where p and q are 100 times larger."""
    logits = torch.randn(16, 40).to(dtype)
    logits[:, :8] += 8  # the listed ids have nearly all of the mass
    weight = logits.T.contiguous().requires_grad_()  # under one-hot hidden states dL/dweight is dL/dlogits
    ids = torch.arange(8).expand(16, 8)
    log_p = logits.double().log_softmax(-1)
    q = (log_p + 0.01 * torch.randn(16, 40)).softmax(-1)[:, :8]
    found = linear_logprobs(torch.eye(16).to(dtype), weight, ids)
    (-q.float() * found.logps).sum().backward()
    truth = q.float().double().sum(1, keepdim=True) * log_p.exp()
    truth[:, :8] -= q.float().double()
    error = (weight.grad.double() - truth.T).norm() / truth.norm()
    assert error < torch.finfo(dtype).eps
    rounded_apart = (q.sum(1, keepdim=True) * log_p.exp()).to(dtype).double()[:, :8] - q
    assert (rounded_apart - truth[:, :8]).norm() / truth.norm() > 10 * torch.finfo(dtype).eps


def test_one_target_in_a_list_is_that_target():
    x = problem((6,), bias=True)
    sure = x._replace(weight=x.weight * 12)  # some log-probabilities are 0 but for their last digits
    targets = (sure.hidden @ sure.weight.T + sure.bias).argmax(-1)
    alone, listed = solve(sure._replace(targets=targets)), solve(sure._replace(targets=targets[:, None]))
    assert torch.equal(listed[0].logps[:, 0], alone[0].logps)
    assert (alone[0].logps > -1e-3).any()
    leaves = [sure._replace(targets=ids).leaves() for ids in (targets, targets[:, None])]
    for leaf in leaves:
        linear_logprobs(leaf.hidden, leaf.weight, leaf.targets, bias=leaf.bias).logps.sum().backward()
    for name, expected in leaves[0].grads().items():
        torch.testing.assert_close(leaves[1].grads()[name], expected, rtol=1e-5, atol=1e-9)


def test_tokens_without_a_gradient_leave_the_backward():
    """Also where the gradients of a token's ids add up to 0, and it has one all the same."""
    x = problem((4,), 8, 50).leaves()
    logps = linear_logprobs(x.hidden, x.weight, torch.tensor([[1, 2]] * 4)).logps
    upstream = torch.tensor([[1.0, -1.0], [0.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    with Products() as backward:
        (logps * upstream).sum().backward()
    assert backward.flops == 3 * 2 * 2 * 8 * 50
    torch.testing.assert_close(x.hidden.grad[0], (x.weight[1] - x.weight[2]).detach())
    assert not x.hidden.grad[1::2].any()


# --- the largest ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("triton", "chunk_vocab"), [(False, 1), (False, 7), (False, 400), (True, 150)])
def test_equal_logits_are_in_the_order_of_their_ids(triton, chunk_vocab, monkeypatch):
    """Many of few values, -0 among them, and whole rows of banned ids."""
    if triton:
        skip_without_interpreter()
        run_triton(monkeypatch)
    values = torch.tensor([-1.0, -0.0, 0.0, 2.0, -math.inf])
    logits = values[torch.randint(5, (4, 400 if chunk_vocab > 1 else 40))]
    logits[1] = 2.0
    logits[3, 2:] = -1e30
    bias = torch.zeros_like(logits[0])
    bias[3:6] = -math.inf
    found = linear_logprobs(
        torch.eye(4), logits.nan_to_num(neginf=-3e38).T, torch.zeros(4, dtype=torch.long), bias=bias, topk=30,
        chunk_vocab=chunk_vocab,
    )  # fmt: skip
    logits = logits.nan_to_num(neginf=-3e38) + bias
    order = logits.sort(dim=1, descending=True, stable=True).indices[:, :30]
    assert torch.equal(found.topk_ids, order)
    torch.testing.assert_close(found.topk_logps, logits.log_softmax(-1).gather(1, order))


# --- lse --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"fixed_shape": True}, {"chunk_vocab": 30}])
def test_lse_of_one_target(options, device):
    x = problem(device=device, bias=True)
    found, wide = solve(x, transform=LogitTransform(**ALL), **options), x.to(torch.float64).leaves()
    z = oracles.linear_logits(wide.hidden, wide.weight, wide.bias, **ALL)
    values = *oracles.logits_logprobs(z, wide.targets), z.logsumexp(-1)
    functional(*values).backward()
    for mine, other in zip((found[0].logps, found[0].entropy, found[0].lse), values, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=2e-5, atol=2e-5)
    for name, grad in wide.grads().items():
        assert oracles.norm_error(found[1][name], grad) < 2e-5 * grad.norm(), name


def test_lse_alone_and_against_the_log_probability():
    """Where dL/dlse is dL/dlogp, the target alone has a gradient: it is the target's logit that is differentiated."""
    x = problem((4,), 8, 50).leaves()
    found = linear_logprobs(x.hidden, x.weight, x.targets, lse=True)
    (grad,) = torch.autograd.grad((found.logps + found.lse).sum(), x.hidden, retain_graph=True)
    torch.testing.assert_close(grad, x.weight[x.targets].detach())
    (grad,) = torch.autograd.grad(found.lse.sum(), x.hidden)
    torch.testing.assert_close(grad, ((x.hidden @ x.weight.T).softmax(-1) @ x.weight).detach())


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"targets": torch.zeros(15, 0).long()}, ValueError, r"targets must be \(N,\) = \(15,\).*K from 1 to 1024"),
        ({"targets": torch.zeros(14, 3, dtype=torch.long)}, ValueError, r"targets must be .*got \(14, 3\)"),
        ({"targets": torch.zeros(15, 3)}, TypeError, "targets must be integers, got torch.float32"),
        ({"targets": torch.full((15, 3), 129)}, ValueError, r"token ids in \[0, 129\).*15 of them.*largest is 129"),
        ({"mask": torch.ones(15, 3)}, ValueError, r"mask must be \(N,\) = \(15,\)"),
        ({"extras": ["is_top1"]}, ValueError, "is_top1"),
        ({"support": Support(torch.zeros(0).long(), torch.zeros(16).long())}, ValueError, "support must be None with"),
        ({"targets": torch.zeros(15, 1025).long()}, ValueError, r"K from 1 to 1024.*\(15, 1025\)"),
        ({"topk": 130}, ValueError, "topk must be at most 1024, and at most the 129 vocabulary entries.*got 130"),
        ({"topk": 1025, "weight": torch.zeros(2000, 16)}, ValueError, "topk must be at most 1024.*got 1025"),
        ({"topk": 0}, ValueError, "topk must be at least 1, got 0"),
        ({"topk": 2.0}, TypeError, "topk must be an int or None, got float"),
        ({"topk": True}, TypeError, "topk must be an int or None, got bool"),
        ({"lse": 1}, TypeError, "lse must be a bool, got int"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(change, error, message):
    x = problem((15,))._replace(targets=torch.randint(129, (15, 3)))
    with Products() as products, pytest.raises(error, match=message):
        linear_logprobs(**{"hidden": x.hidden, "weight": x.weight, "targets": x.targets, **change})
    assert products.flops == 0


def test_a_policy_loss_takes_one_id_for_each_token():
    x = problem()._replace(targets=torch.randint(129, (3, 5, 3)))
    with pytest.raises(ValueError, match=r"selected_token_ids must be \(B, T\) = \(3, 5\)"):
        FusedLinearGRPOLoss("grpo")(x.hidden, x.weight, x.targets, torch.ones(3))
