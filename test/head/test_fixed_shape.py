"""How often the host waits for the device, and `fixed_shape`, which never does: same results, garbage kept out, CUDA
graphs."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from devices import NEEDS_GPU
from host_reads import host_reads
from liger_rl import (
    PRESETS,
    FusedLinearGRPOLoss,
    LogitTransform,
    LowRank,
    Segments,
    TopEntropyMask,
    grpo_loss_from_logits,
    linear_logprobs,
    logits_logprobs,
)

VOCAB, HIDDEN, SHAPE = 133, 16, (3, 7)
LOSSES = [name for name in PRESETS if name not in ("dr_grpo", "dro")]  # these need an option


class Inputs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    a: Tensor
    b: Tensor
    logits: Tensor
    targets: Tensor
    mask: Tensor

    def leaves(self) -> "Inputs":
        return Inputs(*(t.detach().clone().requires_grad_() for t in self[:6]), self.targets, self.mask)

    def grads(self) -> list[Tensor | None]:
        return [t.grad for t in self[:6]]

    @property
    def low_rank(self) -> list[LowRank]:
        return [LowRank(a=self.a, b=self.b, scaling=0.5)]


def inputs(device: torch.device, dtype=torch.float32, *, shape=SHAPE, vocab=VOCAB, hidden=HIDDEN, seed=0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    sizes = [(*shape, hidden), (vocab, hidden), (vocab,), (4, hidden), (vocab, 4), (*shape, vocab)]
    floats = [torch.randn(size, generator=generator) for size in sizes]
    targets = torch.randint(vocab, shape, generator=generator)
    mask = torch.rand(shape, generator=generator) < 0.6
    targets[0, 2], targets[1, 1] = -100, -1
    return Inputs(*(t.to(device, dtype) for t in floats), targets.to(device), mask.to(device))


def functional(outputs) -> Tensor:
    """A fixed functional with a gradient of exactly zero at every third token."""
    total = 0.0
    for place, values in enumerate(outputs[:2]):
        if values is not None:
            steps = torch.arange(values.numel(), device=values.device).view(values.shape)
            total = total + (values * torch.where(steps % 3 == 0, 0.0, torch.cos(steps + place))).sum()
    return total


def linear(x: Inputs, **options):
    return linear_logprobs(x.hidden, x.weight, x.targets, mask=x.mask, **options)


CALLS: dict[str, Callable] = {
    "linear": linear,
    "entropy, bias, softcap": lambda x, **o: linear(
        x, bias=x.bias, entropy=True, transform=LogitTransform(temperature=0.7, softcap=5.0), **o
    ),
    "low rank": lambda x, **o: linear(x, low_rank=x.low_rank, **o),
    "chunks": lambda x, **o: linear(x, chunk_tokens=4, chunk_vocab=32, entropy=True, **o),
    "logits": lambda x, **o: logits_logprobs(x.logits, x.targets, mask=x.mask, entropy=True, **o),
}


def solve(call: Callable, x: Inputs, **options) -> tuple[list[Tensor | None], list[Tensor | None]]:
    leaves = x.leaves()
    outputs = call(leaves, **options)
    functional(outputs).backward()
    return [None if t is None else t.detach() for t in outputs[:2]], leaves.grads()


def assert_each(compare: Callable, found: tuple, expected: tuple) -> None:
    for mine, other in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            compare(mine, other)


def close(mine: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(mine, other)


def identical(mine: Tensor, other: Tensor) -> None:
    assert torch.equal(mine, other)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_results(call, dtype, device):
    x = inputs(device, dtype)
    assert_each(close, solve(call, x, fixed_shape=True), solve(call, x))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_target_outside_the_vocabulary_is_masked(call, device):
    x = inputs(device)
    x.mask[0, :2] = True
    outside = x._replace(targets=x.targets.clone())
    outside.targets[0, 0], outside.targets[0, 1] = VOCAB, 2**31
    x.mask[0, :2] = False
    unmasked = outside._replace(mask=x.mask.clone())
    unmasked.mask[0, :2] = True
    found = solve(call, unmasked, fixed_shape=True)
    assert (found[0][0][0, :2] == 0).all()
    assert_each(identical, found, solve(call, x, fixed_shape=True))


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_nothing_under_the_mask_matters(call, garbage, device):
    clean = inputs(device)
    counted = clean.mask & (clean.targets >= 0)
    hidden, logits = clean.hidden.clone(), clean.logits.clone()
    hidden[~counted], logits[~counted] = garbage, garbage
    targets = torch.where(counted, clean.targets, 2**40)
    dirty = clean._replace(hidden=hidden, logits=logits, targets=targets, mask=counted)
    expected = solve(call, clean, fixed_shape=True)
    assert all(t is None or t.isfinite().all() for t in (*expected[0], *expected[1]))
    assert_each(identical, solve(call, dirty, fixed_shape=True), expected)


def test_a_row_without_gradient_may_hold_anything(device):
    """As where it is dropped: NaN in its hidden state times its gradient of 0 stays out of the weight's gradient."""
    clean = inputs(device)
    dirty = clean._replace(hidden=clean.hidden.clone())
    dirty.hidden[0, 0] = float("nan")
    grads = []
    for x in (clean, dirty):
        leaves = x.leaves()
        linear_logprobs(leaves.hidden, leaves.weight, x.targets, fixed_shape=True).logps.flatten()[5:].sum().backward()
        grads.append(leaves.weight.grad)
    assert grads[0].isfinite().all()
    assert torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("options", [{"in_place": True}, {"grad_buffer": None}], ids=["in place", "buffer"])
def test_places_of_the_logits_gradient(options, device):
    x = inputs(device)
    grads = []
    for fixed in (False, True):
        leaves = x.leaves()
        logits = leaves.logits.clone()
        keywords = dict(options)
        if "grad_buffer" in keywords:
            keywords["grad_buffer"] = torch.ones_like(logits)
        out = logits_logprobs(logits, x.targets, mask=x.mask, entropy=True, fixed_shape=fixed, **keywords)
        functional(out).backward()
        grads.append(keywords.get("grad_buffer", leaves.logits.grad))
    torch.testing.assert_close(grads[1], grads[0])


def columns(device: torch.device, shape=SHAPE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    old, ref = (torch.randn(shape, generator=generator).sub(4.0).to(device) for _ in range(2))
    return {"old_per_token_logps": old, "ref_per_token_logps": ref}


def advantages_of(rows: int, device: torch.device) -> Tensor:
    return torch.linspace(-1, 1, rows).to(device)


def head_loss(loss: FusedLinearGRPOLoss, x: Inputs) -> Tensor:
    rows = x.targets.shape[0]
    return loss(
        x.hidden, x.weight, x.targets, advantages_of(rows, x.targets.device), x.mask, **columns(x.mask.device)
    ).loss


LOSS_OPTIONS = {name: {"loss_type": name, "beta": 0.1} for name in LOSSES}
LOSS_OPTIONS["metrics, entropy"] = {
    "loss_type": "dapo",
    "metrics": "with_entropy",
    "entropy_coef": 0.1,
    "corrections": [TopEntropyMask(top_entropy_quantile=0.5)],
}


@pytest.mark.parametrize("options", LOSS_OPTIONS.values(), ids=LOSS_OPTIONS)
def test_losses_never_wait(options, device):
    x = inputs(device).leaves()
    loss = FusedLinearGRPOLoss(**options, fixed_shape=True)
    extra = columns(device)
    advantages = advantages_of(SHAPE[0], device)

    def step() -> Tensor:
        return loss(x.hidden, x.weight, x.targets, advantages, x.mask, **extra).loss

    step().backward()  # compiles what there is to compile
    with host_reads(device) as reads:
        value = step()
        value.backward()
    assert reads.names == []
    assert value.isfinite()


@pytest.mark.parametrize("loss_type", ["grpo", "gspo"])
def test_fixed_loss_is_the_loss(loss_type, device):
    results = []
    for fixed in (False, True):
        x = inputs(device).leaves()
        value = head_loss(FusedLinearGRPOLoss(loss_type, fixed_shape=fixed), x)
        value.backward()
        results.append((value.detach(), x.hidden.grad, x.weight.grad))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other)


def test_a_loss_leaves_a_target_outside_the_vocabulary_out(device):
    """Of its reduction, too."""
    x = inputs(device)
    outside = x._replace(targets=x.targets.clone(), mask=x.mask.clone())
    outside.targets[2, 3] = VOCAB
    outside.mask[2, 3], x.mask[2, 3] = True, False
    loss = FusedLinearGRPOLoss("bnpo", fixed_shape=True)
    assert torch.equal(head_loss(loss, outside), head_loss(loss, x))
    found, expected = (
        grpo_loss_from_logits(i.logits, i.targets, advantages_of(3, device), i.mask, fixed_shape=True).loss
        for i in (outside, x)
    )
    assert torch.equal(found, expected)


def test_packed_segments_never_wait(device):
    x = inputs(device, shape=(2, 12)).leaves()
    index = torch.arange(24, device=device) // 6
    flat = [t.flatten(0, 1) for t in (x.hidden, x.targets, x.mask)]
    loss = FusedLinearGRPOLoss("gspo", metrics="basic", fixed_shape=True)
    advantages = torch.ones(24, device=device)
    old = torch.full((24,), -4.0, device=device)

    def step() -> Tensor:
        segments = Segments(index=index, count=4)
        result = loss(flat[0], x.weight, flat[1], advantages, flat[2], old_per_token_logps=old, segments=segments)
        return result.loss

    step().backward(retain_graph=True)
    with host_reads(device) as reads:
        step().backward()
    assert reads.names == []


@pytest.mark.parametrize(("fixed", "allowed"), [(True, 0), (False, 1)], ids=["fixed shape", "default"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_host_reads_in_each_direction(call, fixed, allowed, device):
    x = inputs(device).leaves()
    functional(call(x, fixed_shape=fixed)).backward()
    with host_reads(device) as forward:
        total = functional(call(x, fixed_shape=fixed))
    with host_reads(device) as backward:
        total.backward()
    assert len(forward.names) == allowed, forward.names
    assert len(backward.names) <= allowed, backward.names
    assert allowed == 0 or call is CALLS["logits"] or backward.names, "the count would miss a read"


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


def test_from_logits_never_waits(device):
    x = inputs(device).leaves()
    extra = columns(device)
    advantages = advantages_of(3, device)

    def step() -> Tensor:
        result = grpo_loss_from_logits(x.logits, x.targets, advantages, x.mask, beta=0.1, fixed_shape=True, **extra)
        return result.loss.sum()

    step().backward()
    with host_reads(device) as reads:
        step().backward()
    assert reads.names == []


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
    advantages = advantages_of(size["shape"][0], device)
    loss = FusedLinearGRPOLoss("gspo", metrics="with_entropy", entropy_coef=0.1, fixed_shape=True)

    def step() -> list[Tensor]:
        if kind == "logits":
            value, leaves = functional(CALLS["logits"](x, fixed_shape=True)), [x.logits]
        elif kind == "loss":
            value, leaves = loss(x.hidden, x.weight, x.targets, advantages, x.mask).loss, [x.hidden, x.weight]
        else:
            value, leaves = functional(linear(x, low_rank=x.low_rank, fixed_shape=True)), [x.hidden, x.weight, x.a, x.b]
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
        for place, values in zip(x, other, strict=True):
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
    for call in (linear, CALLS["logits"]):
        with pytest.raises(TypeError, match="fixed_shape must be a bool, got int"):
            call(x, fixed_shape=1)
