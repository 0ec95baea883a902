"""Layers that keep their activations: the same bits for every number of layers, and the memory that was foreseen."""

import gc
import logging
import threading
import weakref
from functools import partial

import pytest
import streams
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

import step_calls
from hf_models import build, state_of
from liger_rl import FusedLinearGRPOLoss, loss_step, patch_trl
from liger_rl.models.swap import CACHE
from liger_rl.step import memory
from liger_rl.step.memory import (
    DeviceMemory,
    Measurement,
    choose_kept_layers,
    count_fitting_tokens,
    count_kept_layers,
    find_layers,
    run_with_kept_layers,
)

LAYERS, ROWS, LENGTH = 4, 2, 24
TOKENS = ROWS * LENGTH
PLENTY = 1 << 50
CHECKPOINTS = [("Qwen3", False), ("Qwen3", True), ("Llama", False), ("Llama", True), ("Qwen3Moe", False)]
MEASURED = "0 of 4 layers kept: this run is measured"
ON_HOST = "4 layers recomputed, their inputs in CPU memory"


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operations have made and that are alive, and their peak: the statistics of a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self.storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        return outputs

    def count(self, storage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def forget(_) -> None:
            del self.storages[key]
            self.current -= size

        if key not in self.storages:
            self.storages[key] = weakref.ref(storage, forget)
            self.current += size
            self.peak = max(self.peak, self.current)


class Memory:
    """A device's memory in place of `read_memory`: a GPU's own or `LiveBytes`, with `spare` as a test sets it."""

    def __init__(self, device) -> None:
        self.spare, self.device, self.live = PLENTY, device, LiveBytes()

    def read(self, device, *, restart_peak=False) -> DeviceMemory:
        assert device.type == self.device.type
        if device.type == "cuda":
            return self.real_read(device, restart_peak=restart_peak)._replace(spare=self.spare)
        result = DeviceMemory(self.spare, self.live.current, self.live.peak)
        if restart_peak:
            self.live.peak = self.live.current
        return result

    real_read = staticmethod(memory.read_memory)


@pytest.fixture
def device_memory(request, monkeypatch):
    """Replaces the reading of memory: of the CPU's, except in a test that takes a device. Copies are there then."""
    device = request.getfixturevalue("device") if "device" in request.fixturenames else torch.device("cpu")
    fake = Memory(device)
    monkeypatch.setattr(memory, "read_memory", fake.read)
    if device.type == "cuda":
        yield fake
        return
    with fake.live, streams.on_device(device):
        yield fake


def checkpointed(name="Qwen3", device="cpu", *, use_reentrant=False, adapter=False, **options) -> nn.Module:
    # Eager attention has the same bits each time on GPUs too.
    model = build(name, device, "eager", **{"num_hidden_layers": LAYERS, **options})
    if adapter:
        peft = pytest.importorskip("peft", reason="PEFT is not installed")
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model.enable_input_require_grads()  # as Trainer does; transformers 4.57 does not
        model = peft.get_peft_model(model, config)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return model.train()


def tokens_of(device="cpu", rows=ROWS):
    return torch.randint(3, 200, (rows, LENGTH), generator=torch.Generator().manual_seed(1)).to(device)


def step(model, *, rows=ROWS, **options):
    """-> loss, gradients (summed over steps), clause"""
    ids = tokens_of(next(model.parameters()).device, rows)
    loss, clause = run_with_kept_layers(model, lambda: model(input_ids=ids, labels=ids).loss, ids.numel(), **options)
    if loss.requires_grad:
        loss.backward()
    return loss.detach(), gradients_of(model), clause


def gradients_of(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def measurement_of(model) -> Measurement:
    return memory._measurements[find_layers(model)[-1]]


def set_spare(fake: Memory, model, kept: float, *, share=0.8, gradients=False) -> None:
    """Memory for so many layers beside the peak, and for the gradients if the model has none."""
    measured = measurement_of(model)
    needed = TOKENS * (measured.peak_bytes + kept * measured.layer_bytes) / share
    if gradients:
        needed += sum(p.nbytes for p in model.parameters() if p.requires_grad)
    fake.spare = round(needed)


class LayerRuns(dict):
    """Number of forwards of each layer, by its number. A layer that is recomputed runs twice."""

    def __init__(self, model) -> None:
        for number, layer in enumerate(find_layers(model)):
            self[number] = 0
            self._count_calls(layer.mlp, number)

    def _count_calls(self, module, number) -> None:
        # A hook on a layer, or a class of no known package, would keep the batch as it is.
        kind = type(module)

        def call(*args, **inputs):
            self[number] += 1
            return kind.__call__(*args, **inputs)

        module.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})

    def take(self) -> list[int]:
        runs = list(self.values())
        self.update(dict.fromkeys(self, 0))
        return runs


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(("name", "use_reentrant"), CHECKPOINTS)
def test_every_number_of_layers_gives_the_same_bits(name, use_reentrant, adapter, device, device_memory):
    options = {"attention_dropout": 0.1} if name == "Llama" else {}
    model = checkpointed(name, device, use_reentrant=use_reentrant, adapter=adapter, **options)
    torch.manual_seed(3)
    ids = tokens_of(device)
    expected_loss = model(input_ids=ids, labels=ids).loss
    expected_loss.backward()
    expected = gradients_of(model)
    runs, before = LayerRuns(model), state_of(model)
    cases = [({"share": 0}, 0, ON_HOST), ({}, 0, MEASURED)]
    cases += [({}, kept, f"{kept} of {LAYERS} layers kept") for kept in range(LAYERS + 1)]
    for options, kept, expected_clause in cases:
        model.zero_grad()
        torch.manual_seed(3)
        loss, grads, clause = step(model, agreed=kept, **options)
        assert torch.equal(loss, expected_loss)
        assert grads.keys() == expected.keys()
        assert all(torch.equal(grads[name], expected[name]) for name in grads)
        assert runs.take() == [2] * (LAYERS - kept) + [1] * kept
        assert clause == expected_clause
        assert state_of(model) == before


def test_a_kept_layer_fills_no_cache(device_memory):
    """Its arguments are those of a recomputed layer."""
    model, caches = checkpointed(use_cache=True), []
    for layer in find_layers(model):
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: caches.append(kwargs[CACHE]), with_kwargs=True
        )
    step(model)
    assert step(model)[2] == "4 of 4 layers kept"
    assert caches == [None] * (2 * LAYERS + LAYERS)


def test_gradients_accumulate(device_memory):
    model = checkpointed()
    step(model, share=0)
    expected = step(model, share=0)[1]
    model.zero_grad()
    step(model)
    _, grads, clause = step(model)
    assert clause == "4 of 4 layers kept"
    assert all(torch.equal(grads[name], expected[name]) for name in expected)


def test_inputs_on_the_host_take_no_memory_of_the_device(device, device_memory):
    """Of four layers' inputs the device holds those of two: of one that runs, and of one that is copied."""
    model, ids = checkpointed(device=device, hidden_size=256), tokens_of(device, rows=16)
    step(model, rows=16, share=0)  # gradients

    def forward() -> torch.Tensor:
        return model(input_ids=ids, labels=ids).loss

    def run(forward) -> tuple[int, int]:
        start = device_memory.read(device, restart_peak=True).allocated
        loss = forward()
        held = device_memory.read(device).allocated - start
        loss.backward()
        return held, device_memory.read(device).peak - start

    held, peak = run(lambda: run_with_kept_layers(model, forward, ids.numel(), share=0)[0])
    all_held, highest = run(forward)
    size = ids.numel() * 256 * 4
    if device.type == "cuda":  # on a CPU the copies are in the same memory
        assert all_held - held == pytest.approx(LAYERS * size, rel=0.05)
        assert highest - peak >= 1.8 * size
    else:
        assert all_held == pytest.approx(held, rel=0.05)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_two_forwards_with_inputs_on_the_host_and_two_backwards(use_reentrant, device, device_memory):
    """Backwards may come in the forwards' order, and may run twice."""
    model = checkpointed(device=device, use_reentrant=use_reentrant)
    ids = tokens_of(device, rows=4).split(1)
    for part in (0, 3, 1, 0):
        model(input_ids=ids[part], labels=ids[part]).loss.backward()
    expected = gradients_of(model)
    model.zero_grad()
    losses, _ = run_with_kept_layers(
        model, lambda: [model(input_ids=part, labels=part).loss for part in ids], TOKENS, share=0
    )
    for part in (0, 3, 1):
        losses[part].backward(retain_graph=not part)
    losses[0].backward()
    grads = gradients_of(model)
    assert all(torch.equal(grads[name], expected[name]) for name in expected)


@pytest.mark.parametrize("backwards", [0, 1, 2])
def test_memory_of_a_copy_that_nobody_reads_waits_for_its_end(backwards, device_memory, monkeypatch):
    """The first backward begins a copy for the second, which may not come."""
    waits = []
    monkeypatch.setattr(streams.CpuStream, "wait_event", lambda stream, event: waits.append(event))
    model, ids = checkpointed(), tokens_of().split(1)
    losses, _ = run_with_kept_layers(
        model, lambda: [model(input_ids=part, labels=part).loss for part in ids], TOKENS, share=0
    )
    assert len(waits) == 2 * LAYERS  # each input has been copied to the host
    for _ in range(backwards):
        losses.pop().backward()
    del losses
    gc.collect()
    assert len(waits) == (2 * LAYERS, 3 * LAYERS + 1, 4 * LAYERS)[backwards]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_forward_that_fails_leaves_no_input_behind(use_reentrant, device_memory, monkeypatch):
    """The last layer's input is free too, after its copy."""
    waits = []
    monkeypatch.setattr(streams.CpuStream, "wait_event", lambda stream, event: waits.append(event))
    model, ids = checkpointed(use_reentrant=use_reentrant), tokens_of()

    def forward() -> None:
        model(input_ids=ids)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        run_with_kept_layers(model, forward, TOKENS, share=0)
    gc.collect()
    assert len(waits) == LAYERS


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_each_input_is_copied_once_in_each_direction(use_reentrant, device_memory, monkeypatch):
    """Layers with several inputs too, which the backward asks for in the order of the forward."""

    class Layer(GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, hidden, gate):
            return hidden + gate * self.linear(hidden).tanh()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gates = nn.Linear(8, 8 * LAYERS)
            self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
            for layer in self.layers:
                layer.gradient_checkpointing = True
                layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=use_reentrant)

        def forward(self, hidden):
            gates = self.gates(hidden).unflatten(-1, (8, LAYERS))
            for number, layer in enumerate(self.layers):
                hidden = layer(hidden, gates[..., number])
            return hidden.sum()

    copies = []
    monkeypatch.setattr(streams.CpuStream, "record_event", lambda stream: copies.append(stream))
    model, hidden = Model(), torch.randn(TOKENS, 8, requires_grad=True)
    model(hidden).backward()
    expected = gradients_of(model)
    model.zero_grad()
    loss, clause = run_with_kept_layers(model, lambda: model(hidden), TOKENS, share=0)
    assert clause == ON_HOST
    assert len(copies) == 2 * LAYERS
    loss.backward()
    assert len(copies) == 4 * LAYERS
    grads = gradients_of(model)
    assert all(torch.equal(grads[name], expected[name]) for name in expected)


def test_inputs_of_layers_inside_another_checkpoint_are_its_own(device_memory, monkeypatch):
    """It runs the layers again without the hooks, and checks that as many tensors are saved."""
    copies = []
    monkeypatch.setattr(streams.CpuStream, "record_event", lambda stream: copies.append(stream))
    model, ids = checkpointed(), tokens_of()
    model(input_ids=ids, labels=ids).loss.backward()
    expected = gradients_of(model)
    model.zero_grad()

    def forward() -> torch.Tensor:
        return checkpoint(lambda: model(input_ids=ids, labels=ids).loss, use_reentrant=False)

    loss, clause = run_with_kept_layers(model, forward, TOKENS, share=0)
    loss.backward()
    grads = gradients_of(model)
    assert all(torch.equal(grads[name], expected[name]) for name in expected)
    assert copies == []
    assert clause == f"{LAYERS} layers recomputed"


# --- the number of layers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spare", "tokens", "layers", "share", "kept"),
    [
        (10_000, 10, 28, 1.0, 16),  # (10,000 - 2,000) / 500
        (10_000, 10, 28, 0.8, 12),
        (10_000, 10, 8, 0.8, 8),
        (10_000, 20, 28, 0.8, 4),
        (10_000, 50, 28, 0.8, 0),
        (2_499, 10, 28, 1.0, 0),
        (2_500, 10, 28, 1.0, 1),
        (-5_000, 10, 28, 0.8, 0),
        (10_000, 10, 0, 0.8, 0),
    ],
)
def test_choice(spare, tokens, layers, share, kept):
    measurement = Measurement(tokens=10, peak_bytes=200.0, layer_bytes=50.0)
    assert choose_kept_layers(spare, tokens, measurement, layers, share) == kept


@pytest.mark.parametrize(("name", "use_reentrant"), CHECKPOINTS)
def test_memory_is_as_foreseen(name, use_reentrant, device, device_memory):
    # Wide enough on a GPU for activations to be larger than an allocator's rounding.
    options = {"hidden_size": 256, "intermediate_size": 512} if device.type == "cuda" else {}
    model = checkpointed(name, device, use_reentrant=use_reentrant, **options)
    ids, held = tokens_of(device), []
    step(model, share=0)  # workspaces and gradients
    step(model)
    measured = measurement_of(model)
    for kept in range(LAYERS + 1):
        set_spare(device_memory, model, kept + 0.01)
        start = device_memory.read(device, restart_peak=True).allocated
        loss, clause = run_with_kept_layers(model, lambda: model(input_ids=ids, labels=ids).loss, TOKENS)
        assert clause == f"{kept} of {LAYERS} layers kept"
        held.append(device_memory.read(device).allocated - start)
        loss.backward()
        del loss
        assert device_memory.read(device).peak - start <= 0.8 * device_memory.spare
    layer = (held[-1] - held[0]) / LAYERS / TOKENS
    assert measured.layer_bytes == pytest.approx(layer, rel=0.3 if device.type == "cuda" else 0.02)


def test_memory_for_missing_gradients_is_left_free(device_memory):
    model = checkpointed()
    step(model)
    set_spare(device_memory, model, 2.5)
    assert step(model)[2] == "2 of 4 layers kept"
    model.zero_grad()
    missing = 0.8 * sum(p.nbytes for p in model.parameters()) / (TOKENS * measurement_of(model).layer_bytes)
    assert 0.5 < missing < 2.5
    assert step(model)[2] == f"{int(2.5 - missing)} of 4 layers kept"
    model.zero_grad()
    set_spare(device_memory, model, 2.5, gradients=True)
    assert step(model)[2] == "2 of 4 layers kept"


def test_gradients_are_no_part_of_the_measured_peak(device_memory):
    model = checkpointed()
    step(model)
    first = measurement_of(model)
    memory._measurements.clear()
    step(model)  # has gradients already
    assert first.peak_bytes == pytest.approx(measurement_of(model).peak_bytes, rel=0.2)
    assert first.layer_bytes == measurement_of(model).layer_bytes


def test_a_much_larger_run_is_measured_again(device_memory):
    model = checkpointed()
    assert step(model, rows=4)[2] == MEASURED
    assert step(model, rows=2)[2] == step(model, rows=5)[2] == "4 of 4 layers kept"
    assert step(model, rows=6)[2] == MEASURED
    assert measurement_of(model).tokens == 6 * LENGTH
    assert step(model, rows=6)[2] == "4 of 4 layers kept"


def merge(model):
    return model.merge_and_unload().requires_grad_()


CHANGES = {
    "dtype": (False, lambda model: model.float()),
    "attention": (False, lambda model: model.set_attn_implementation("sdpa")),
    "what is trained": (True, merge),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_takes_other_memory_is_measured_again(change, device_memory):
    adapter, apply = CHANGES[change]
    model = checkpointed(adapter=adapter).to(torch.bfloat16)
    assert [step(model)[2] for _ in range(2)] == [MEASURED, "4 of 4 layers kept"]
    model = apply(model) or model
    assert count_fitting_tokens(model) is None
    assert [step(model)[2] for _ in range(2)] == [MEASURED, "4 of 4 layers kept"]


def test_a_run_without_a_backward_is_no_measurement(device_memory):
    model, ids = checkpointed(), tokens_of()
    before = state_of(model)
    lost = [run_with_kept_layers(model, lambda: model(input_ids=ids, labels=ids).loss, TOKENS)[0] for _ in range(2)]
    assert state_of(model) == before
    assert count_fitting_tokens(model) is None
    assert step(model)[2] == MEASURED
    assert state_of(model) == before
    assert step(model)[2] == "4 of 4 layers kept"
    lost[0].backward()


def test_another_forward_before_the_backward_is_not_measured(device_memory):
    model, ids = checkpointed(), tokens_of()
    step(model)
    expected = measurement_of(model)
    memory._measurements.clear()
    loss, _ = run_with_kept_layers(model, lambda: model(input_ids=ids, labels=ids).loss, TOKENS)
    with torch.no_grad():
        model(input_ids=ids)
    loss.backward()
    assert measurement_of(model).layer_bytes == expected.layer_bytes


def test_the_backward_of_the_first_layer_is_measured(device_memory):
    """Its memory is the peak of a model with one wide layer."""
    model = checkpointed(num_hidden_layers=1, intermediate_size=2048)
    step(model, share=0)
    start = device_memory.read(torch.device("cpu"), restart_peak=True).allocated
    step(model, share=0)
    peak = device_memory.read(torch.device("cpu")).peak - start
    step(model)
    assert measurement_of(model).peak_bytes * TOKENS >= 0.99 * peak


def test_micro_batches_of_one_backward_are_one_run(device_memory):
    model, ids = checkpointed(), tokens_of(rows=4)
    step(model, rows=4)
    expected = measurement_of(model)
    memory._measurements.clear()
    loss, _ = run_with_kept_layers(
        model, lambda: sum(model(input_ids=part, labels=part).loss for part in ids.split(1)), ids.numel()
    )
    loss.backward()
    assert measurement_of(model).layer_bytes == pytest.approx(expected.layer_bytes, rel=0.01)


def test_fitting_tokens(device_memory):
    model = checkpointed()
    assert count_fitting_tokens(model) is None
    step(model)
    device_memory.spare = 100_000
    expected = int(0.5 * 100_000 / measurement_of(model).peak_bytes)
    assert count_fitting_tokens(model, 0.5) == count_fitting_tokens(model.eval(), 0.5) == expected
    model.zero_grad()
    assert count_fitting_tokens(model, 0.5) == 0  # the gradients take more


# --- whole steps ------------------------------------------------------------------------------------------------------


def test_loss_steps_keep_layers(device_memory):
    model, batch, loss = checkpointed("Llama"), step_calls.make_batch(), FusedLinearGRPOLoss("dapo")
    model.gradient_checkpointing_disable()
    plain, expected = step_calls.run(model, batch, loss, max_tokens=30)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for clause, options in ((ON_HOST, {"memory": 0}), (MEASURED, {}), ("4 of 4 layers kept", {})):
        # The micro-batches have different sizes, the largest comes first.
        steps, grads = step_calls.run(model, batch, loss, max_tokens=30, **options)
        assert len(steps) > 1
        assert steps.total.layout == f"{plain.total.layout}; {clause}"
        assert torch.equal(steps.total.loss, plain.total.loss)
        logps = (found.total.per_token_logps for found in (steps, plain))
        torch.testing.assert_close(*logps, rtol=0, atol=0, equal_nan=True)
        assert all(torch.equal(grads[name], expected[name]) for name in expected)
    with pytest.raises(ValueError, match="memory must be a number from 0 to 1, got 2"):
        loss_step(model, batch, loss, memory=2)


def test_trls_forward_keeps_layers(device_memory, caplog):
    trl_utils = pytest.importorskip("trl.trainer.utils", reason="TRL is not installed")
    from liger_rl.integrations.trl import patched_trl

    caplog.set_level(logging.INFO, "liger_rl")
    batch = {name: value for name, value in step_calls.make_batch().items() if name in step_calls.INPUTS}
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    model, results = checkpointed(), []
    runs = LayerRuns(model)
    with patched_trl():
        trl_utils.add_fused_lm_head(model)
        with torch.no_grad():
            model(**batch, fused_lm_head=True)  # compares it with the plain forward
        runs.take()
        for _ in range(2):
            model.zero_grad()
            output = model(**batch, fused_lm_head=True)
            output.log_probs.exp().sum().backward()
            results.append([output.log_probs, *[p.grad for p in model.parameters()]])
            assert runs.take() == [3 - len(results)] * LAYERS
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert caplog.messages[-1].endswith("; 4 of 4 layers kept")


# --- errors, ranks and other models -----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_layers_are_put_back(error, device_memory):
    model, seen = checkpointed(), []
    step(model)

    def functions():
        return [layer._gradient_checkpointing_func for layer in find_layers(model)]

    def forward():
        seen.append(functions())
        if error is not None:
            raise error

    before = functions()
    if error is None:
        run_with_kept_layers(model, forward, TOKENS)
    else:
        with pytest.raises(error):
            run_with_kept_layers(model, forward, TOKENS, agreed=LAYERS)
    assert functions() == before
    assert len(seen) == 1
    assert not set(seen[0]) & set(before)


def test_a_forward_that_runs_out_of_memory_runs_again(device_memory):
    model, ids, graphs, runs = checkpointed(), tokens_of(), [], []
    expected_loss, expected, _ = step(model)
    model.zero_grad()

    def forward():
        assert not any(graph() is not None for graph in graphs), "the graph of the failed forward is free"
        loss = model(input_ids=ids, labels=ids).loss
        runs.append(counts.take())
        if len(runs) == 1:
            graphs.append(weakref.ref(loss))
            loss.cycle = loss
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    counts = LayerRuns(model)
    set_spare(device_memory, model, LAYERS + 0.5)
    half = device_memory.spare
    set_spare(device_memory, model, LAYERS + 0.5, gradients=True)
    loss, clause = run_with_kept_layers(model, forward, TOKENS)
    assert clause == "0 of 4 layers kept: memory ran out with 4"
    loss.backward()
    assert torch.equal(loss, expected_loss)
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())
    assert runs == [[1] * LAYERS] * 2
    assert counts.take() == [1] * LAYERS  # recomputed
    device_memory.spare = half
    assert step(model)[2] == "2 of 4 layers kept"


def test_the_number_that_ranks_agree_on(device_memory):
    """Each says what it could keep. Another rank may have less memory."""
    model = checkpointed()
    assert count_kept_layers(model, TOKENS, 0.8) == 0  # not yet measured
    assert step(model, agreed=0)[2] == MEASURED
    assert count_kept_layers(model, TOKENS, 0.8) == count_kept_layers(model, 0, 0.8) == LAYERS
    assert step(model, agreed=1)[2] == "1 of 4 layers kept"
    device_memory.spare = 0
    assert count_kept_layers(model, TOKENS, 0.8) == 0
    assert count_kept_layers(model, TOKENS, 0) is None


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_threads_put_the_checkpoints_back(first_ends_first):
    """Whichever thread ends first. Each one sees its own functions alone."""
    layers = find_layers(checkpointed())
    before = [layer._gradient_checkpointing_func for layer in layers]
    entered, may_end, seen = threading.Event(), threading.Event(), []

    def keep_elsewhere():
        with memory.keep_activations(layers):
            entered.set()
            may_end.wait()
            seen.append(layers[0]._gradient_checkpointing_func(lambda: "kept in the thread"))

    with memory.keep_activations(layers):
        thread = threading.Thread(target=keep_elsewhere)
        thread.start()
        entered.wait()
        if not first_ends_first:
            may_end.set()
            thread.join()
    may_end.set()
    thread.join()
    assert seen == ["kept in the thread"]
    assert [layer._gradient_checkpointing_func for layer in layers] == before


@pytest.mark.parametrize("case", ["eval", "no_grad", "no checkpointing", "compiled", "ZeRO-3"])
def test_nothing_changes(case, device_memory):
    model = checkpointed()
    step(model)
    layers = find_layers(model)
    before = [layer._gradient_checkpointing_func for layer in layers]
    if case == "eval":
        model.eval()
    elif case == "no checkpointing":
        for layer in layers:
            layer.gradient_checkpointing = False
    elif case == "compiled":
        model = torch.compile(model)
    elif case == "ZeRO-3":
        for number, parameter in enumerate(model.parameters()):
            parameter.ds_id = number

    def forward():
        assert [layer._gradient_checkpointing_func for layer in layers] == before
        return "output"

    with torch.set_grad_enabled(case != "no_grad"):
        assert count_kept_layers(model, TOKENS, 0.8) is None
        result = run_with_kept_layers(model, forward, TOKENS, agreed=LAYERS)
    assert result == ("output", None)


def test_memory_of_a_cpu_is_not_read():
    model = checkpointed()
    assert step(model)[2] is count_kept_layers(model, TOKENS, 0.8) is None
    assert count_fitting_tokens(model) is None


@pytest.mark.parametrize("memory", [-0.1, 1.1, True, "0.8", float("nan")])
def test_a_share_is_a_number_from_0_to_1(memory):
    with pytest.raises(ValueError, match=r"memory must be a number from 0 to 1, got "):
        loss_step(checkpointed(), {}, FusedLinearGRPOLoss(), memory=memory)
    with pytest.raises(ValueError, match=r"memory must be a number from 0 to 1, got "):
        patch_trl(memory=memory)


def test_layers_of_other_stacks_are_left_alone():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.images = checkpointed(hidden_size=16)
            self.text = checkpointed()
            self.later = checkpointed("Llama", hidden_size=16)

    model = Both()
    assert find_layers(model) == list(model.text.model.layers)
    assert find_layers(nn.ModuleList([nn.Linear(2, 2)])) == []


def test_no_layer_is_kept_where_activations_are_offloaded(device_memory):
    """Kept ones would be copied to the host."""
    model = checkpointed()
    step(model)
    runs = LayerRuns(model)
    with torch.autograd.graph.save_on_cpu():
        assert step(model)[2] is None
    assert runs.take() == [2] * LAYERS
    assert step(model)[2] == "4 of 4 layers kept"


def test_reentrant_layers_with_a_router_loss_are_not_kept(device_memory):
    """transformers gives their router loss no gradient; a kept layer would give it one."""
    model = checkpointed("Qwen3Moe", use_reentrant=True)
    assert find_layers(model) == []
    assert step(model)[2] is step(model)[2] is None
    assert step(model, share=0)[2] == ON_HOST


class HandsOn(nn.Module):
    """A layer of somebody's own may leave values for later layers."""

    def __init__(self, layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args):
        self.handed = self.layer(*args)
        return self.handed


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("shared", ["keys and values", "in a layer of one's own", ""])
def test_reentrant_layers_that_hand_on_values_are_not_kept(shared, use_reentrant, device_memory):
    """A kept layer would give these a gradient, a recomputed one gives none."""
    model = checkpointed(use_reentrant=use_reentrant)
    if shared == "keys and values":
        model.config.num_kv_shared_layers = 2  # as Gemma 3n and Gemma 4 have it
    elif shared:
        model.model.layers[1].mlp = HandsOn(model.model.layers[1].mlp)
    assert find_layers(model) == ([] if use_reentrant and shared else list(model.model.layers))
    assert (step(model)[2] is None) == (use_reentrant and bool(shared))
    assert step(model, share=0)[2] == ON_HOST


def test_layers_that_the_user_keeps_are_no_candidates(device_memory):
    model = checkpointed()
    model.model.layers[1].gradient_checkpointing = False
    layers = model.model.layers
    assert find_layers(model) == [layers[0], layers[2], layers[3]]
    step(model)
    assert step(model)[2] == "3 of 3 layers kept"


@pytest.mark.usefixtures("lone_rank")
def test_layers_inside_a_wrapper(device_memory):
    inner = checkpointed()
    model = DistributedDataParallel(inner)
    assert find_layers(model) == list(inner.model.layers)
    assert step(model)[2] == MEASURED
    assert step(inner)[2] == "4 of 4 layers kept", "a wrapper has the measurement of its model"
