"""Losses with `fixed_shape` never wait for the device; CUDA graphs. Other properties of it: test_properties.py."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import head_calls
from devices import NEEDS_GPU
from head_calls import Problem, problem
from host_reads import host_reads
from liger_rl import (
    PRESETS,
    FusedLinearGRPOLoss,
    Segments,
    TopEntropyMask,
    grpo_loss_from_logits,
    logits_logprobs,
)

VOCAB, HIDDEN, SHAPE = 133, 16, (3, 7)
LOSSES = [name for name in PRESETS if name not in ("dr_grpo", "dro")]  # these need an option


class Inputs(NamedTuple):
    x: Problem
    logits: Tensor  # (B, T, V)
    mask: Tensor

    def leaves(self) -> "Inputs":
        copies = {name: t.detach().clone().requires_grad_() for name, t in self.x.floats().items()}
        return Inputs(self.x._replace(**copies), self.logits.detach().clone().requires_grad_(), self.mask)

    def tensors(self) -> list[Tensor]:
        return [*self.x.floats().values(), self.logits, self.x.targets, self.mask]


def inputs(device, dtype=torch.float32, *, shape=SHAPE, vocab=VOCAB, hidden=HIDDEN, seed=0) -> Inputs:
    x = problem(shape, hidden, vocab, dtype, device, bias=True, rank=4, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((*shape, vocab), generator=generator).to(device, dtype)
    mask = torch.rand(shape, generator=generator) < 0.6
    x.targets[0, 2], x.targets[1, 1] = -100, -1
    return Inputs(x, logits, mask.to(device))


def functional(outputs) -> Tensor:
    """A fixed functional with a gradient of exactly zero at every third token."""
    total = 0.0
    for place, values in enumerate(outputs[:2]):
        if values is not None:
            steps = torch.arange(values.numel(), device=values.device).view(values.shape)
            total = total + (values * torch.where(steps % 3 == 0, 0.0, torch.cos(steps + place))).sum()
    return total


def linear(inputs: Inputs, *, bias=False, rank=False, **options):
    x = inputs.x._replace(**({} if bias else {"bias": None}), **({} if rank else {"a": None, "b": None}))
    return head_calls.call(x, mask=inputs.mask, **options)


def from_logits(inputs: Inputs, **options):
    return logits_logprobs(inputs.logits, inputs.x.targets, mask=inputs.mask, entropy=True, **options)


def columns(device: torch.device, shape=SHAPE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    old, ref = (torch.randn(shape, generator=generator).sub(4.0).to(device) for _ in range(2))
    return {"old_per_token_logps": old, "ref_per_token_logps": ref}


def advantages_of(rows: int, device: torch.device) -> Tensor:
    return torch.linspace(-1, 1, rows, device=device)  # a copy to the device would wait


def head_loss(loss: FusedLinearGRPOLoss, inputs: Inputs, **more) -> Tensor:
    x = inputs.x
    advantages = advantages_of(x.targets.shape[0], x.targets.device)
    return loss(x.hidden, x.weight, x.targets, advantages, inputs.mask, **more).loss


def logits_loss(x: Inputs, **options) -> Tensor:
    advantages = advantages_of(x.mask.shape[0], x.mask.device)
    return grpo_loss_from_logits(x.logits, x.x.targets, advantages, x.mask, fixed_shape=True, **options).loss.sum()


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
    x, extra = inputs(device).leaves(), columns(device)
    loss = FusedLinearGRPOLoss(**options, fixed_shape=True)
    assert_never_waits(lambda: head_loss(loss, x, **extra), device)


def test_from_logits_never_waits(device):
    x, extra = inputs(device).leaves(), columns(device)
    assert_never_waits(lambda: logits_loss(x, beta=0.1, **extra), device)


def test_packed_segments_never_wait(device):
    x = inputs(device, shape=(2, 12)).leaves()
    hidden, targets, mask = (t.flatten(0, 1) for t in (x.x.hidden.detach(), x.x.targets, x.mask))
    packed = x._replace(x=x.x._replace(hidden=hidden.requires_grad_(), targets=targets), mask=mask)
    segments = Segments(index=torch.arange(24, device=device) // 6, count=4)
    old = torch.full((24,), -4.0, device=device)
    loss = FusedLinearGRPOLoss("gspo", metrics="basic", fixed_shape=True)
    assert_never_waits(lambda: head_loss(loss, packed, old_per_token_logps=old, segments=segments), device)


@NEEDS_GPU
@pytest.mark.parametrize("tolerance", [0.0, 1e-2])
def test_host_reads_at_the_size_of_a_training_step(tolerance):
    device = torch.device("cuda")
    x = inputs(device, torch.bfloat16, shape=(4, 512), vocab=5000, hidden=256).leaves()
    functional(linear(x, grad_tolerance=tolerance)).backward()
    with host_reads(device) as forward:
        total = functional(linear(x, grad_tolerance=tolerance))
    with host_reads(device) as backward:
        total.backward()
    assert len(forward.names) == 1
    assert len(backward.names) == 1


GRAPHED = {
    "kernel of our own": {"shape": (4, 256), "vocab": 2000, "hidden": 128, "dtype": torch.bfloat16},
    "float32 tiles": {"shape": (2, 40), "vocab": 1000, "hidden": 64, "dtype": torch.float32},
}


@NEEDS_GPU
@pytest.mark.parametrize("size", GRAPHED.values(), ids=GRAPHED)
@pytest.mark.parametrize("kind", ["linear", "loss", "logits"])
def test_a_cuda_graph_replays_forward_and_backward(kind, size):
    device = torch.device("cuda")
    x = inputs(device, **size).leaves()
    loss = FusedLinearGRPOLoss("gspo", metrics="with_entropy", entropy_coef=0.1, fixed_shape=True)

    def step() -> list[Tensor]:
        if kind == "logits":
            value, leaves = functional(from_logits(x, fixed_shape=True)), [x.logits]
        elif kind == "loss":
            value, leaves = head_loss(loss, x), [x.x.hidden, x.x.weight]
        else:
            leaves = [x.x.hidden, x.x.weight, x.x.a, x.x.b]
            value = functional(linear(x, rank=True, fixed_shape=True))
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
    other = inputs(device, **size, seed=1)
    with torch.no_grad():
        for place, values in zip(x.tensors(), other.tensors(), strict=True):
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
    x = inputs(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"grad_tolerance must be 0\.0 with fixed_shape.*got 0\.01"):
        linear(x, grad_tolerance=0.01, fixed_shape=True)
    with pytest.raises(ValueError, match=r"grad_tolerance must be 0\.0 with fixed_shape"):
        FusedLinearGRPOLoss(grad_tolerance=0.01, fixed_shape=True)
    for call in (linear, from_logits):
        with pytest.raises(TypeError, match="fixed_shape must be a bool, got int"):
            call(x, fixed_shape=1)
