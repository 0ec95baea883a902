"""Losses with `fixed_shape` never wait for the device; CUDA graphs. Other properties of it: test_properties.py."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from devices import NEEDS_GPU
from head_calls import SCALING, Batch, batch
from host_reads import host_reads
from liger_rl import (
    PRESETS,
    FusedLinearGRPOLoss,
    LowRank,
    Segments,
    TopEntropyMask,
    grpo_loss_from_logits,
    linear_logprobs,
    logits_logprobs,
)

LOSSES = [name for name in PRESETS if name not in ("dr_grpo", "dro")]  # these need an option
LEAVES = ("hidden", "weight", "a", "b", "logits")


def functional(*outputs: Tensor) -> Tensor:
    """A fixed functional with a gradient of exactly zero at every third token. It copies nothing to the device."""
    total = 0.0
    for place, values in enumerate(outputs):
        steps = torch.arange(values.numel(), device=values.device).view(values.shape)
        total = total + (values * torch.where(steps % 3 == 0, 0.0, torch.cos(steps + place))).sum()
    return total


def linear(x: Batch, **options) -> Tensor:
    return functional(linear_logprobs(x.hidden, x.weight, x.targets, mask=x.mask, **options).logps)


def columns(device: torch.device, shape=(3, 7)) -> dict[str, Tensor]:
    old, ref = torch.randn(2, *shape).sub(4.0).to(device)
    return {"old_per_token_logps": old, "ref_per_token_logps": ref}


def head_loss(loss: FusedLinearGRPOLoss, x: Batch, **more) -> Tensor:
    return loss(x.hidden, x.weight, x.targets, x.advantages, x.mask, **more).loss


def assert_never_waits(step: Callable[[], Tensor], device: torch.device) -> None:
    step().backward()  # compiles what there is to compile
    with host_reads(device) as reads:
        value = step()
        value.backward()
    assert reads.names == []
    assert value.isfinite()


LOSS_OPTIONS = {name: {"loss_type": name, "beta": 0.1} for name in LOSSES}
LOSS_OPTIONS["metrics, entropy"] = {
    "loss_type": "dapo",
    "metrics": "with_entropy",
    "entropy_coef": 0.1,
    "corrections": [TopEntropyMask(top_entropy_quantile=0.5)],
}


@pytest.mark.parametrize("options", LOSS_OPTIONS.values(), ids=LOSS_OPTIONS)
def test_losses_never_wait(options, device):
    x, extra = batch((3, 7), device=device).leaves(LEAVES), columns(device)
    loss = FusedLinearGRPOLoss(**options, fixed_shape=True)
    assert_never_waits(lambda: head_loss(loss, x, **extra), device)


def test_from_logits_never_waits(device):
    x, extra = batch((3, 7), device=device).leaves(LEAVES), columns(device)

    def loss() -> Tensor:
        columns = {"beta": 0.1, "fixed_shape": True, **extra}
        return grpo_loss_from_logits(x.logits, x.targets, x.advantages, x.mask, **columns).loss.sum()

    assert_never_waits(loss, device)


def test_packed_segments_never_wait(device):
    x = batch((24,), device=device).leaves(LEAVES)
    segments = Segments(index=torch.arange(24, device=device) // 6, count=4)
    old = torch.full((24,), -4.0, device=device)
    loss = FusedLinearGRPOLoss("gspo", metrics="basic", fixed_shape=True)
    assert_never_waits(lambda: head_loss(loss, x, old_per_token_logps=old, segments=segments), device)


@NEEDS_GPU
@pytest.mark.parametrize("tolerance", [0.0, 1e-2])
def test_host_reads_at_the_size_of_a_training_step(tolerance):
    device = torch.device("cuda")
    x = batch((4, 512), 256, 5000, torch.bfloat16, device).leaves(LEAVES)
    linear(x, grad_tolerance=tolerance).backward()
    with host_reads(device) as forward:
        total = linear(x, grad_tolerance=tolerance)
    with host_reads(device) as backward:
        total.backward()
    assert len(forward.names) == 1
    assert len(backward.names) == 1


GRAPHED = {
    "kernel of our own": {"shape": (4, 256), "vocab": 2000, "hidden_size": 128, "dtype": torch.bfloat16},
    "float32 tiles": {"shape": (2, 40), "vocab": 1000, "hidden_size": 64, "dtype": torch.float32},
}


@NEEDS_GPU
@pytest.mark.parametrize("size", GRAPHED.values(), ids=GRAPHED)
@pytest.mark.parametrize("kind", ["linear", "loss", "logits"])
def test_a_cuda_graph_replays_forward_and_backward(kind, size):
    device = torch.device("cuda")
    x = batch(**size, device=device).leaves(LEAVES)
    loss = FusedLinearGRPOLoss("gspo", metrics="with_entropy", entropy_coef=0.1, fixed_shape=True)

    def step() -> list[Tensor]:
        if kind == "logits":
            found = logits_logprobs(x.logits, x.targets, mask=x.mask, entropy=True, fixed_shape=True)
            value, leaves = functional(*found[:2]), [x.logits]
        elif kind == "loss":
            value, leaves = head_loss(loss, x), [x.hidden, x.weight]
        else:
            value = linear(x, low_rank=[LowRank(a=x.a, b=x.b, scaling=SCALING)], fixed_shape=True)
            leaves = [x.hidden, x.weight, x.a, x.b]
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    # Other inputs in the same places, another number of live tokens among them.
    with torch.no_grad():
        for place, values in zip(x, batch(**size, device=device, seed=1), strict=True):
            place.copy_(values)
        x.mask[1:] = False
    graph.replay()
    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for mine, reference in zip(captured, expected, strict=True):
        assert torch.equal(mine, reference)
        assert mine.isfinite().all()


def test_options_that_need_the_host_are_refused():
    x = batch()
    with pytest.raises(ValueError, match=r"grad_tolerance must be 0\.0 with fixed_shape.*got 0\.01"):
        linear(x, grad_tolerance=0.01, fixed_shape=True)
    with pytest.raises(ValueError, match=r"grad_tolerance must be 0\.0 with fixed_shape"):
        FusedLinearGRPOLoss(grad_tolerance=0.01, fixed_shape=True)
    with pytest.raises(TypeError, match="fixed_shape must be a bool, got int"):
        linear(x, fixed_shape=1)
