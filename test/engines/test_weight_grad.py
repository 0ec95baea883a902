"""The weight's gradient added to a float32 tensor in place: which tensors it takes. Sums: test_properties.py."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from head_calls import Products, call, functional, problem, solve
from liger_rl import FusedLinearGRPOLoss, linear_logprobs

SHAPE = (129, 16)


@pytest.mark.parametrize("rank", [0, 2])
def test_it_may_be_the_weights_own_gradient(rank, device):
    inputs = problem(rank=rank, device=device)
    leaves = inputs.leaves()
    place = leaves.weight.grad = torch.ones(SHAPE, device=device)
    functional(*call(leaves, entropy=True, weight_grad=place)[:2]).backward()
    assert leaves.weight.grad is place
    torch.testing.assert_close(place, solve(inputs).grads["weight"] + 1, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("total", "error", "message"),
    [
        ([0.0], TypeError, "must be a tensor"),
        (torch.zeros(SHAPE, dtype=torch.bfloat16), TypeError, "must be float32.*bfloat16"),
        (torch.zeros(16, 129), ValueError, r"\(V, H\) = \(129, 16\) from weight, got \(16, 129\)"),
        (torch.zeros(SHAPE, device="meta"), ValueError, "must be on cpu from weight, got meta"),
        (torch.zeros(16, 129).T, ValueError, "contiguous"),
        (torch.zeros(SHAPE, requires_grad=True), ValueError, "must require no gradient"),
    ],
    ids=["type", "dtype", "shape", "device", "strides", "leaf"],
)
def test_a_tensor_that_does_not_fit_is_named(total, error, message):
    inputs = problem().leaves()
    with Products() as products, pytest.raises(error, match=f"weight_grad .*{message}"):
        call(inputs, weight_grad=total)
    assert products.flops == 0


def test_a_frozen_weight_has_none():
    inputs, total = problem().leaves(), torch.zeros(SHAPE)
    with pytest.raises(ValueError, match="weight must require a gradient"):
        call(inputs.leaves(["weight"]), weight_grad=total)


@pytest.mark.parametrize("of", ["weight", "hidden", "bias"])
@pytest.mark.parametrize("through", ["log-probabilities", "loss"])
def test_memory_of_an_input_is_refused(of, through):
    memory = torch.randn(200, 16)
    parts = {"weight": memory[:129], "hidden": memory[:15], "bias": memory.flatten()[:129]}
    inputs = {"weight": torch.randn(SHAPE), "hidden": torch.randn(15, 16), "bias": torch.randn(129), of: parts[of]}
    inputs = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    before, targets = memory.clone(), torch.arange(15)
    call: Callable = linear_logprobs
    if through == "loss":
        call = partial(FusedLinearGRPOLoss("gpg"), advantages=torch.ones(3))
        inputs["hidden"] = inputs["hidden"].view(3, 5, 16)
        targets = targets.view(3, 5)
    ids = {"targets" if through == "log-probabilities" else "selected_token_ids": targets}
    with pytest.raises(ValueError, match=rf"weight_grad must have memory of its own.*overlaps {of}"):
        call(**inputs, **ids, weight_grad=memory[:129])
    assert torch.equal(memory, before)
