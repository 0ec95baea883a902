"""No gradient of ours has a derivative: whoever asks for one is told, and whoever does not is left alone."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from liger_rl import FusedLinearGRPOLoss, LowRank, grpo_loss_from_logits, linear_logprobs, logits_logprobs
from liger_rl.policy import fused as policy_kernel

TOKENS, VOCAB, HIDDEN = 12, 40, 8
ADVANTAGES = torch.linspace(-1.0, 1.0, TOKENS)


class Inputs:
    """Two of these share no tensor."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)

        def made(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device).requires_grad_()

        self.hidden, self.weight, self.logits = made(TOKENS, HIDDEN), made(VOCAB, HIDDEN), made(TOKENS, VOCAB)
        self.a, self.b = made(2, HIDDEN), made(VOCAB, 2)
        self.targets = torch.randint(VOCAB, (TOKENS,), generator=generator).to(device)
        self.advantages = ADVANTAGES.to(device)


def linear(x: Inputs, **options: Any) -> Tensor:
    return linear_logprobs(x.hidden, x.weight, x.targets, **options).logps.sum()


def low_rank(x: Inputs) -> Tensor:
    return linear(x, low_rank=[LowRank(a=x.a, b=x.b)])


def given(x: Inputs, **options: Any) -> Tensor:
    return logits_logprobs(x.logits * 1, x.targets, **options).logps.sum()


def fused(x: Inputs, **options: Any) -> Tensor:
    loss = FusedLinearGRPOLoss("dapo", **options)
    return loss(x.hidden, x.weight, x.targets, x.advantages).loss


def from_logits(x: Inputs, **options: Any) -> Tensor:
    return grpo_loss_from_logits(x.logits * 1, x.targets, x.advantages, **options).loss.sum()


LINEAR = {
    "two passes": linear,
    "entropy alone": lambda x: linear_logprobs(x.hidden, x.weight, x.targets, entropy=True).entropy.sum(),
    "tolerance": lambda x: linear(x, grad_tolerance=0.1),
    "fixed shape": lambda x: linear(x, fixed_shape=True),
    "low-rank term": low_rank,
    "frozen head": lambda x: linear_logprobs(x.hidden, x.weight.detach(), x.targets).logps.sum(),
    "compiled": lambda x: torch.compile(low_rank, backend="eager", fullgraph=True)(x),
    "loss in one pass": lambda x: fused(x, passes="one"),
    "loss in two passes": lambda x: fused(x, passes="two"),
}
LOGITS = {
    "logits": given,
    "logits in columns": lambda x: logits_logprobs((x.logits * 1).T.contiguous().T, x.targets).logps.sum(),
    "logits compiled": lambda x: torch.compile(given, backend="eager")(x),
    "loss of logits": lambda x: from_logits(x, loss_type="dppo_kl"),
    "loss of logits in one kernel": from_logits,
}
CASES = [*((value, "hidden") for value in LINEAR.values()), *((value, "logits") for value in LOGITS.values())]


@pytest.fixture(autouse=True)
def policy_kernel_everywhere(monkeypatch):
    if not torch.cuda.is_available():  # Triton's interpreter takes CPU tensors
        monkeypatch.setattr(policy_kernel, "DEVICES", ("cpu",))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("value", "name"), CASES, ids=[*LINEAR, *LOGITS])
def test_a_second_derivative_raises(value, name, device):
    x, plain = Inputs(device), Inputs(device)
    tensor = getattr(x, name)
    (found,) = torch.autograd.grad(value(x), tensor, create_graph=True)
    assert torch.equal(found, torch.autograd.grad(value(plain), getattr(plain, name))[0])
    for penalty in (found.sum(), found.square().sum() + tensor.sum()):
        with pytest.raises(RuntimeError, match="once"):
            torch.autograd.grad(penalty, tensor, retain_graph=True, allow_unused=True)
        with pytest.raises(RuntimeError, match="once"):
            penalty.backward(retain_graph=True)
    # Another part of the graph may be differentiated twice.
    factor = torch.ones((), device=device, requires_grad=True)
    of_other, of_ours = torch.autograd.grad(value(x) + factor**3, (factor, tensor), create_graph=True)
    assert of_ours.requires_grad
    of_ours.detach().mul_(2)
    assert torch.autograd.grad(of_other, factor)[0].item() == 6.0


def test_the_factor_from_above_has_no_derivative_either(device):
    x = Inputs(device)
    factor = torch.ones((), device=device, requires_grad=True)
    (found,) = torch.autograd.grad(linear(x) * factor, x.hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        torch.autograd.grad(found.sum(), factor)


def test_under_a_checkpoint(device):
    x = Inputs(device)
    (found,) = torch.autograd.grad(checkpoint(linear, x, use_reentrant=False), x.hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        torch.autograd.grad(found.sum() + x.hidden.sum(), x.hidden)


def test_gradients_with_a_graph_accumulate_and_are_scaled_in_place(device):
    """As gradient accumulation and clipping do."""
    x = Inputs(device)
    for _ in range(2):
        fused(x, passes="one").backward(create_graph=True)
    assert x.weight.grad is not None
    with torch.no_grad():
        x.weight.grad.mul_(0.5)
    plain = Inputs(device)
    fused(plain, passes="one").backward()
    torch.testing.assert_close(x.weight.grad, plain.weight.grad)
    x.weight.grad = None  # it refers to the graph, which refers to the weight


FORWARD = {
    "linear_logprobs": lambda x: linear(x),
    "logits_logprobs": lambda x: logits_logprobs(x.hidden @ x.weight.T, x.targets).logps.sum(),
    "one pass": lambda x: fused(x, passes="one"),
    "two passes": lambda x: fused(x, passes="two"),
    "loss of logits": lambda x: grpo_loss_from_logits(x.hidden @ x.weight.T, x.targets, x.advantages).loss.sum(),
    "low-rank term": lambda x: linear_logprobs(
        x.weight.new_ones(TOKENS, HIDDEN), x.weight, x.targets, low_rank=[LowRank(a=x.a, b=x.b, hidden=x.hidden)]
    ).logps.sum(),
    "compiled": lambda x: torch.compile(linear, backend="eager")(x),
}


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("value", FORWARD.values(), ids=FORWARD)
def test_a_forward_mode_derivative_raises(value, frozen, device):
    x = Inputs(device)
    for name in ("hidden", "weight", "a", "b"):
        getattr(x, name).requires_grad_(not frozen)
    hidden, tangent = x.hidden, torch.ones_like(x.hidden)
    assert value(x).isfinite()
    with forward_ad.dual_level():
        if value is not FORWARD["compiled"]:
            assert value(x).isfinite()  # a level without tangents of ours is no mistake
        x.hidden = forward_ad.make_dual(hidden, tangent)
        # Dynamo wraps what is raised while it traces.
        with pytest.raises((NotImplementedError, torch._dynamo.exc.TorchDynamoException), match="tangent"):
            value(x)


def test_functional_forward_mode_raises(device):
    x = Inputs(device)

    def value(hidden: Tensor) -> Tensor:
        return linear_logprobs(hidden, x.weight.detach(), x.targets).logps

    with pytest.raises(NotImplementedError, match="hidden must have no tangent"):
        torch.func.jvp(value, (x.hidden.detach(),), (torch.ones_like(x.hidden),))
