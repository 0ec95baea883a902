"""logits_logprobs, in PyTorch and in Triton: its corners. Values are the fuzzer's, properties test_properties.py's."""

import math

import pytest
import torch

from devices import NEEDS_GPU
from head_calls import functional, run_triton
from liger_rl.head import logits_logprobs

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU compiles what the interpreter would run")


@pytest.fixture(params=["cpu", pytest.param("interpreter", marks=WITHOUT_GPU), pytest.param("cuda", marks=NEEDS_GPU)])
def device(request, monkeypatch) -> torch.device:
    if request.param == "interpreter":
        run_triton(monkeypatch)
    return torch.device("cuda" if request.param == "cuda" else "cpu")


def test_rows_without_gradient_may_hold_anything(device):
    logits, targets = torch.randn(5, 130, device=device), torch.arange(5, device=device)
    logits[1], logits[2, 5], logits[3] = math.nan, math.inf, math.nan
    mask = torch.tensor([True, True, True, False, True], device=device)
    factors = torch.tensor([1.0, 0.0, 0.0, 3.0, -2.0], device=device)
    leaf = logits.requires_grad_()
    found = logits_logprobs(leaf, targets, mask=mask, entropy=True)
    assert found.logps[1].isnan()
    assert found.logps[3] == 0.0
    torch.autograd.backward([found.logps, found.entropy], [factors, factors])
    assert leaf.grad.isfinite().all()
    assert leaf.grad.any(1).tolist() == [True, False, False, False, True]


def solve(logits, targets):
    leaf = logits.detach().requires_grad_()
    found = logits_logprobs(leaf, targets, entropy=True)
    functional(*found[:2]).backward()
    return found.logps.detach(), found.entropy.detach(), leaf.grad


def test_a_nan_in_a_row_that_counts_stays(device):
    logits, targets = torch.randn(2, 130, device=device), torch.tensor([3, 4], device=device)
    logits[1, 100] = math.nan
    logps, entropy, grad = solve(logits, targets)
    assert logps.isnan().tolist() == entropy.isnan().tolist() == [False, True]
    assert grad[0].isfinite().all()
    assert grad[1].isnan().any()


def test_a_sure_token_keeps_its_digits(device):
    """The target's own gradient is 1 - p as the log-probability has it, from 1/2 to 1e-6, and no difference of sums."""
    logits = torch.zeros(40, 2, device=device)
    logits[:, 0] = torch.linspace(0.1, 14.0, 40, device=device)
    leaf = logits.requires_grad_()
    logps = logits_logprobs(leaf, torch.zeros(40, dtype=torch.long, device=device)).logps
    logps.sum().backward()
    torch.testing.assert_close(leaf.grad[:, 0].double(), -logps.detach().double().expm1(), rtol=1e-6, atol=0.0)


def test_large_logits_stay_finite_and_at_most_zero(device):
    logits, targets = 3e4 * torch.randn(40, 129, device=device), torch.arange(40, device=device)
    logps, entropy, grad = solve(logits, targets)
    assert all(values.isfinite().all() for values in (logps, entropy, grad))
    assert (logps <= 0).all()
    assert (entropy >= 0).all()
