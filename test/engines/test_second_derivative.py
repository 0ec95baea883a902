"""Variants whose gradients have no derivative; that each public call says so is in test_properties.py."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from head_calls import Batch, batch
from liger_rl import FusedLinearGRPOLoss, LowRank, grpo_loss_from_logits, linear_logprobs, logits_logprobs
from liger_rl.losses import fused as policy_kernel


def linear(x: Batch, **options: Any) -> Tensor:
    return linear_logprobs(x.hidden, x.weight, x.targets, **options).logps.sum()


def given(x: Batch, **options: Any) -> Tensor:
    return logits_logprobs(x.logits * 1, x.targets, **options).logps.sum()


VALUES = {
    "entropy alone": lambda x: linear_logprobs(x.hidden, x.weight, x.targets, entropy=True).entropy.sum(),
    "tolerance": lambda x: linear(x, grad_tolerance=0.1),
    "fixed shape": lambda x: linear(x, fixed_shape=True),
    "frozen head": lambda x: linear_logprobs(x.hidden, x.weight.detach(), x.targets).logps.sum(),
    "logits in columns": lambda x: logits_logprobs((x.logits * 1).mT.contiguous().mT, x.targets).logps.sum(),
    "logits compiled": lambda x: torch.compile(given, backend="eager")(x),
    "loss of logits in one kernel": lambda x: grpo_loss_from_logits(x.logits * 1, x.targets, x.advantages).loss.sum(),
}


@pytest.fixture(autouse=True)
def policy_kernel_everywhere(monkeypatch):
    if not torch.cuda.is_available():  # Triton's interpreter takes CPU tensors
        monkeypatch.setattr(policy_kernel, "DEVICES", ("cpu",))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", VALUES)
def test_a_second_derivative_raises(name, device):
    leaf = "logits" if "logits" in name else "hidden"
    x = batch(device=device).leaves((leaf, "weight"))
    tensor = getattr(x, leaf)
    (found,) = torch.autograd.grad(VALUES[name](x), tensor, create_graph=True)
    assert torch.equal(found, torch.autograd.grad(VALUES[name](x), tensor)[0])
    for penalty in (found.sum(), found.square().sum() + tensor.sum()):
        with pytest.raises(RuntimeError, match="once"):
            torch.autograd.grad(penalty, tensor, retain_graph=True, allow_unused=True)


def test_gradients_with_a_graph_accumulate_and_are_scaled_in_place(device):
    """As gradient accumulation and clipping do."""
    x, plain = (batch(device=device).leaves(("hidden", "weight")) for _ in range(2))
    loss = FusedLinearGRPOLoss("gpg", passes="one")
    for _ in range(2):
        loss(x.hidden, x.weight, x.targets, x.advantages).loss.backward(create_graph=True)
    with torch.no_grad():
        x.weight.grad.mul_(0.5)
    loss(plain.hidden, plain.weight, plain.targets, plain.advantages).loss.backward()
    torch.testing.assert_close(x.weight.grad, plain.weight.grad)
    x.weight.grad = None  # it refers to the graph, which refers to the weight


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("place", ["hidden states of a term", "a graph"])
def test_a_forward_mode_derivative_raises(place, frozen, device):
    x = batch(device=device).leaves(() if frozen else ("hidden", "weight", "a", "b"))

    def of_term(hidden: Tensor) -> Tensor:
        terms = [LowRank(a=x.a, b=x.b, hidden=hidden)]
        return linear_logprobs(torch.ones_like(x.hidden), x.weight, x.targets, low_rank=terms).logps.sum()

    def head(hidden: Tensor) -> Tensor:
        return linear_logprobs(hidden, x.weight, x.targets).logps.sum()

    value = of_term if "term" in place else torch.compile(head, backend="eager")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.hidden, torch.ones_like(x.hidden))
        # Dynamo wraps what is raised while it traces.
        with pytest.raises((NotImplementedError, torch._dynamo.exc.TorchDynamoException), match="tangent"):
            value(dual)


def test_functional_forward_mode_raises(device):
    x = batch(device=device)

    def value(hidden: Tensor) -> Tensor:
        return linear_logprobs(hidden, x.weight, x.targets).logps

    with pytest.raises(NotImplementedError, match="hidden must have no tangent"):
        torch.func.jvp(value, (x.hidden,), (torch.ones_like(x.hidden),))
