"""A temperature for each token. Its values are the fuzzer's, properties test_properties.py's."""

import math
from functools import partial

import pytest
import torch

from head_calls import assert_close, call, finish, problem
from liger_rl import (
    FusedLinearGRPOLoss,
    LogitTransform,
    Support,
    linear_logprobs,
    logits_logprobs,
    plan_linear_logprobs,
)

TOKENS, VOCAB = 23, 129


def test_rows_of_sequences_and_one_number(device):
    """(B, T) temperatures that are all alike are one temperature."""
    x, alike = problem((2, 11), device=device), torch.full((2, 11), 0.7, device=device)
    mine, one = (call(x, transform=LogitTransform(temperature=temperature)).logps for temperature in (alike, 0.7))
    torch.testing.assert_close(mine, one, rtol=1e-6, atol=1e-6)


def test_a_tolerance_computes_exactly(device):
    """And the plan says why."""
    transform = LogitTransform(temperature=0.5 + torch.rand(TOKENS, device=device))
    leaves = [problem((TOKENS,), device=device).leaves() for _ in range(2)]
    options = {"transform": transform, "entropy": True}
    found, exact = (finish(call(x, **options, grad_tolerance=t), x) for x, t in zip(leaves, (0.1, 0.0), strict=True))
    assert_close(found, exact, 1e-6)
    plan = plan_linear_logprobs(4096, VOCAB, 16, transform=transform, grad_tolerance=0.1)
    assert plan.path == "two passes"
    assert "one temperature for all tokens" in plan.reason


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_bad_values(bad, device):
    x, temperature = problem((TOKENS,), device=device), torch.ones(TOKENS, device=device)
    temperature[3] = bad
    support = Support.from_vllm([[1]] * TOKENS, device=device)
    for function in (
        partial(call, x),
        partial(call, x, support=support),
        partial(logits_logprobs, torch.zeros(TOKENS, VOCAB, device=device), x.targets),
    ):
        with pytest.raises(ValueError, match="temperature must be positive and finite at each token; 1 are not"):
            function(transform=LogitTransform(temperature=temperature))


def test_bad_temperatures():
    x = problem((TOKENS,))
    for function in (
        partial(linear_logprobs, x.hidden, x.weight, x.targets),
        partial(logits_logprobs, torch.zeros(TOKENS, VOCAB), x.targets),
    ):
        with pytest.raises(ValueError, match=r"temperature must be a number or \(23,\) from targets, got \(22,\)"):
            function(transform=LogitTransform(temperature=torch.ones(22)))
    for temperature, error, message in (
        (torch.ones(23).long(), TypeError, "a number or a float tensor"),
        (torch.ones(23, requires_grad=True), ValueError, "require no gradient"),
        (torch.ones(()), ValueError, r"a number, \(B, T\) or \(N,\)"),
    ):
        with pytest.raises(error, match=f"temperature must (be )?{message}"):
            LogitTransform(temperature=temperature)
    loss = FusedLinearGRPOLoss("dapo", passes="one", temperature=torch.ones(TOKENS))
    with pytest.raises(ValueError, match='passes="one" needs one temperature for all tokens'):
        loss(x.hidden, x.weight, x.targets, torch.ones(TOKENS))
