"""Recompute no more than memory demands: layers keep their activations as far as a GPU's free memory allows.

`gradient_checkpointing_enable` recomputes every layer in the backward. A step that runs only live tokens often has
memory for most layers' activations. So `run_with_kept_layers` recomputes only some layers:

1. The first run recomputes every layer, and measures its peak and what a layer would keep.
2. Each later run compares these numbers with the memory that is free at its start. The last k of L layers keep their
   activations, the others are recomputed. The backward visits the last layers first, so their memory is free again
   before most gradients exist.

With a share of 0 no layer keeps activations, and the layers' inputs are in CPU memory. Values and gradients have the
same bits in each case.
"""

import gc
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_rl.distributed import has_ranks
from liger_rl.models.tensors import is_dtensor, is_zero_3
from liger_rl.models.unknown_layers import list_unknown_layers
from liger_rl.step.host_inputs import HostInputs, are_saved_tensors_hooked

Result = TypeVar("Result")
Checkpoint = Callable[..., Any]  # (a function, its arguments) -> the function's result

DEFAULT_SHARE = 0.8
# A run of more than this many times the tokens of the measured one is measured again: attention with a mask of all
# pairs of tokens takes more bytes for each token of a longer row.
MAX_GROWTH = 1.25


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Memory of one forward and backward in which every layer was recomputed."""

    tokens: int  # that the model ran, padding included
    peak_bytes: float  # for each token: the peak above the start, without gradients of parameters
    layer_bytes: float  # for each token: what one layer keeps if it is not recomputed; the maximum over the layers
    kind: tuple[Any, ...] = ()  # of the last layer then, see `_read_kind`


# For each model, by the last layer of its body: wrappers around a model change, its layers do not.
_measurements: WeakKeyDictionary[nn.Module, Measurement] = WeakKeyDictionary()
_recorders: WeakKeyDictionary[nn.Module, "_Recorder"] = WeakKeyDictionary()


def run_with_kept_layers(
    model: nn.Module,
    forward: Callable[[], Result],
    tokens: int,
    *,
    share: float = DEFAULT_SHARE,
    agreed: int | None = None,
) -> tuple[Result, str | None]:
    """The result of `forward()`, and a clause such as "24 of 28 layers kept".

    As many layers keep their activations as fit. With share 0 none does, and their inputs are kept in CPU memory. The
    clause is None, and the forward runs as it is, without a graph, without checkpointed layers, on other devices than
    CUDA, for a compiled model, with DeepSpeed's ZeRO-3 and a share above 0, and inside a context that keeps activations
    elsewhere (TRL's `activation_offloading`). If the forward runs out of memory and nothing was agreed, it runs once
    more with every layer recomputed, and later runs keep fewer layers.

    Args:
        model: a model of transformers, or a wrapper of one (PEFT, DDP, FSDP).
        forward: runs the model, on `tokens` tokens in all, padding included. One backward is through all of them.
        share: the share of the free memory that a run may take, 0 to 1.
        agreed: the smallest number of layers that a rank could keep, if ranks run the model together.
    """
    layers, memory = _find_candidates(model, share)
    if memory is None:
        return forward(), None
    device = _find_device(layers)
    assert device is not None
    if not share:
        inputs = HostInputs(device)
        with _replaced_checkpoints(layers, inputs.wrap_checkpoint):
            output = forward()
        inputs.finish_forward()
        return output, f"{len(layers)} layers recomputed" + (", their inputs in CPU memory" if inputs.runs else "")
    if _is_zero_3(layers):
        return forward(), None
    measurement = _get_measurement(layers, tokens)
    kept = _choose(model, layers, memory, tokens, share) if agreed is None else min(agreed, len(layers))
    clause = f"{kept} of {len(layers)} layers kept"
    if measurement is None:
        return _measure(model, forward, max(tokens, 1), layers, device), f"{clause}: this run is measured"
    if kept:
        try:
            with keep_activations(layers[-kept:]):
                return forward(), clause
        except torch.OutOfMemoryError:
            if agreed is not None:  # the other ranks do not run again
                raise
        # The graph of the failed forward is free only behind the except clause.
        gc.collect()
        torch.cuda.empty_cache()
        _measurements[layers[-1]] = replace(measurement, layer_bytes=2 * measurement.layer_bytes)
        clause = f"0 of {len(layers)} layers kept: memory ran out with {kept}"
    return forward(), clause


def count_kept_layers(model: nn.Module, tokens: int, share: float) -> int | None:
    """The number of layers that a run of so many tokens could keep, to be agreed on; None if it chooses none."""
    layers, memory = _find_candidates(model, share)
    if memory is None or not share or _is_zero_3(layers):
        return None
    return _choose(model, layers, memory, tokens, share)


def _find_candidates(model: nn.Module, share: float) -> tuple[list[nn.Module], "DeviceMemory | None"]:
    """Layers that may keep activations (with share 0: inputs), and the memory of their device; None if none may."""
    layers = find_layers(model, keeps=share > 0) if torch.is_grad_enabled() and not are_saved_tensors_hooked() else []
    device = _find_device(layers)
    return layers, None if device is None else read_memory(device)


def _is_zero_3(layers: list[nn.Module]) -> bool:
    """A run is measured with whole recomputations. At the end of one ZeRO-3 releases the layer's parameters, which the
    backward reads next."""
    return is_zero_3(next(layers[-1].parameters(), None))


def _get_measurement(layers: list[nn.Module], tokens: int) -> Measurement | None:
    """The measurement of a run of about so many tokens."""
    measurement = _find_measurement(layers)
    return None if measurement is None or tokens > MAX_GROWTH * measurement.tokens else measurement


def _find_measurement(layers: list[nn.Module]) -> Measurement | None:
    """That of the layers as they are."""
    measurement = _measurements.get(layers[-1])
    return measurement if measurement is not None and measurement.kind == _read_kind(layers[-1]) else None


def _read_kind(layer: nn.Module) -> tuple[Any, ...]:
    """What decides how much memory a layer takes: its weights' dtypes, which of them are trained, and its attention."""
    configs = (vars(module).get("config") for module in layer.modules())
    kinds = (getattr(config, "_attn_implementation", None) for config in configs)
    # FSDP has weights of another dtype within a forward.
    weights = ((None if has_ranks() else weight.dtype, weight.requires_grad) for weight in layer.parameters())
    return (*weights, *kinds)


def _choose(model: nn.Module, layers: list[nn.Module], memory: "DeviceMemory", tokens: int, share: float) -> int:
    measurement = _get_measurement(layers, tokens)
    if measurement is None:
        return 0
    spare = memory.spare - count_missing_gradients(model)
    return choose_kept_layers(spare, max(tokens, 1), measurement, len(layers), share)


def choose_kept_layers(spare: int, tokens: int, measurement: Measurement, layers: int, share: float) -> int:
    """The number of layers, 0 to `layers`, whose activations and the run's peak fit into `share` of `spare` bytes."""
    room = share * spare - tokens * measurement.peak_bytes
    return max(0, min(layers, math.floor(room / (tokens * measurement.layer_bytes))))


def count_fitting_tokens(model: nn.Module, share: float = DEFAULT_SHARE) -> int | None:
    """The number of tokens of one run that take `share` of the free memory if every layer is recomputed.

    None if no run of the model has been measured.
    """
    stack = _find_body(model)
    measurement = _find_measurement(stack) if stack else None
    device = _find_device(stack)
    memory = None if device is None else read_memory(device)
    if measurement is None or memory is None:
        return None
    spare = memory.spare - count_missing_gradients(model)
    return max(0, math.floor(share * spare / measurement.peak_bytes))


def check_memory(memory: Any) -> None:
    """ValueError unless the argument `memory` is a share."""
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not 0 <= memory <= 1:
        raise ValueError(f"memory must be a number from 0 to 1, got {memory!r}")


# --- layers -----------------------------------------------------------------------------------------------------------


def find_layers(model: nn.Module, *, keeps: bool = True) -> list[nn.Module]:
    """The layers of the model's body with transformers' checkpoints, in order; with `keeps` those that may be kept.

    Reentrant checkpoints run a layer's forward without a graph, so what it hands on beside its output has no gradient:
    a router loss, keys and values for later layers. It would get one from each layer that is kept. So no layer of a
    model that may hand on something may be kept with reentrant checkpoints.
    """
    layers = [
        layer
        for layer in _find_body(model)
        if layer.training and layer.gradient_checkpointing and hasattr(layer, "_gradient_checkpointing_func")
    ]
    reentrant = [layer for layer in layers if _is_reentrant(layer._gradient_checkpointing_func)]
    if not (keeps and reentrant) or not _may_hand_on(model, reentrant):
        return layers
    return [layer for layer in layers if layer not in reentrant]


def has_reentrant_checkpoints(modules: Iterable[nn.Module]) -> bool:
    """Whether a layer is recomputed by a backward of its own, after which DDP takes its gradients as complete."""
    checkpointed = [module for module in modules if vars(module).get("gradient_checkpointing")]
    return any(_is_reentrant(getattr(module, "_gradient_checkpointing_func", None)) for module in checkpointed)


def _may_hand_on(model: nn.Module, layers: list[nn.Module]) -> bool:
    """Whether layers may give more than their output: those of no known package may."""
    transformer = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    config = None if transformer is None else transformer.config.get_text_config()
    if hasattr(config, "output_router_logits") or getattr(config, "num_kv_shared_layers", None):
        return True
    return bool(list_unknown_layers([module for layer in layers for module in layer.modules()]))


def _is_reentrant(checkpoint: Any) -> bool:
    """Whether a layer's checkpoint function is reentrant, or may be."""
    return getattr(checkpoint, "keywords", {}).get("use_reentrant") is not False


def _find_body(model: nn.Module) -> list[nn.Module]:
    """All layers of the stack with the most parameters. A model of images has another stack for these."""
    stacks = _list_stacks(model)
    if len(stacks) == 1:
        return stacks[0]
    return max(stacks, key=lambda stack: sum(p.numel() for layer in stack for p in layer.parameters()), default=[])


def _list_stacks(module: nn.Module) -> list[list[nn.Module]]:
    if isinstance(module, GradientCheckpointingLayer):
        return [[module]]
    # A model that is compiled as a whole would be compiled again for each number of layers.
    if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
        return []
    stacks = [stack for child in module.children() for stack in _list_stacks(child)]
    return [list(itertools.chain(*stacks))] if stacks and isinstance(module, nn.ModuleList) else stacks


def _find_device(layers: list[nn.Module]) -> torch.device | None:
    """The device of the layers, by the first parameter of each; None if there are several devices or no parameter."""
    devices = {parameter.device for layer in layers for parameter in itertools.islice(layer.parameters(), 1)}
    return devices.pop() if len(devices) == 1 else None


def keep_activations(layers: list[nn.Module]) -> AbstractContextManager[None]:
    """Forwards inside the context do not recompute these layers."""
    return _replaced_checkpoints(layers, lambda number, checkpoint: _call)


@contextmanager
def _replaced_checkpoints(layers: list[nn.Module], make: Callable[[int, Checkpoint], Checkpoint]) -> Iterator[None]:
    """In this context each layer has the checkpoint function that `make` gives for its number and its own.

    The layer's switch `gradient_checkpointing` stays on: with it off, the layer would also fill a cache of keys and
    values.
    """
    functions: dict[nn.Module, Any] = {layer: layer._gradient_checkpointing_func for layer in layers}
    functions = {layer: _get_own(function) for layer, function in functions.items()}
    try:
        for number, (layer, function) in enumerate(functions.items()):
            layer._gradient_checkpointing_func = _InThread(make(number, function), function)  # type: ignore[assignment]
        yield
    finally:
        for layer, function in functions.items():
            layer._gradient_checkpointing_func = function


class _InThread:
    """A checkpoint function of this thread. Other threads that run the layer call the one before it."""

    def __init__(self, function: Checkpoint, before: Checkpoint) -> None:
        self._function, self.before, self.thread = function, before, threading.get_ident()

    def _pick(self) -> Checkpoint:
        return self._function if self.thread == threading.get_ident() else self.before

    @property
    def keywords(self) -> dict[str, Any]:
        return getattr(self._pick(), "keywords", {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._pick()(*args, **kwargs)


def _get_own(function: Checkpoint) -> Checkpoint:
    """What stays when all other threads have put back what they found."""
    while isinstance(function, _InThread) and function.thread != threading.get_ident():
        function = function.before
    return function


def without_idle_checkpoints(model: nn.Module) -> AbstractContextManager[None]:
    """Layers are not checkpointed in this context if no graph is recorded: a reentrant checkpoint would warn."""
    return nullcontext() if torch.is_grad_enabled() else keep_activations(find_layers(model, keeps=False))


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


# --- memory -----------------------------------------------------------------------------------------------------------


class DeviceMemory(NamedTuple):
    """Bytes of a device's memory."""

    spare: int  # that this process could still allocate
    allocated: int  # in tensors
    peak: int  # the most that was allocated since the peak was restarted


def read_memory(device: torch.device, *, restart_peak: bool = False) -> DeviceMemory | None:
    """The memory of a CUDA device, None for other devices. Other processes on it are seen.

    `restart_peak` resets torch's statistics of peaks after they are read.
    """
    if device.type != "cuda":
        return None
    statistics = torch.cuda.memory_stats(device)
    allocated, peak = (statistics.get(f"allocated_bytes.all.{kind}", 0) for kind in ("current", "peak"))
    free, total = torch.cuda.mem_get_info(device)
    usable = free + statistics.get("reserved_bytes.all.current", 0)
    fraction = torch.cuda.memory.get_per_process_memory_fraction(torch.cuda._utils._get_device_index(device, True))
    if fraction < 1:
        usable = min(usable, int(fraction * total))
    if restart_peak:
        torch.cuda.reset_peak_memory_stats(device)
    return DeviceMemory(usable - allocated, allocated, peak)


def count_missing_gradients(model: nn.Module) -> int:
    """Bytes of the gradients of parameters that have none yet: the backward allocates them."""
    return _count_bytes(p for p in model.parameters() if p.requires_grad and p.grad is None)


@torch.no_grad()
def _count_bytes(tensors: Iterator[Tensor]) -> int:
    return sum(_get_local(tensor).nbytes for tensor in tensors)


def _get_local(tensor: Any) -> Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor


# --- the measured run -------------------------------------------------------------------------------------------------


def _measure(
    model: nn.Module, forward: Callable[[], Result], tokens: int, layers: list[nn.Module], device: torch.device
) -> Result:
    """The result of `forward()`. Its backward, if one follows, stores a measurement of the model."""
    recorder = _Recorder(model, layers[-1], tokens, device)
    # Otherwise a layer's recomputation may stop before its end.
    with set_checkpoint_early_stop(False), _replaced_checkpoints(layers, recorder.watch):
        output = forward()
    recorder._record_peak()  # before anything runs between forward and backward
    _recorders[layers[-1]] = recorder
    return output


def resume_measurement(model: nn.Module, tokens: int) -> None:
    """A run's backward follows, of so many of its tokens, which something else ran in front of."""
    layers = _find_body(model)
    recorder = _recorders.get(layers[-1]) if layers else None
    if recorder is not None:
        recorder._read()
        recorder.tokens = tokens


class _Recorder:
    """Records the memory of one forward and backward, at the start and the end of each layer's recomputation.

    A gradient of a parameter stays until the optimizer's step, and its size does not depend on the number of tokens. So
    gradients are not part of the measured peak: `count_missing_gradients` counts them for each run.
    """

    def __init__(self, model: nn.Module, key: nn.Module, tokens: int, device: torch.device) -> None:
        self.key, self.kind, self.tokens, self.device = ref(key), _read_kind(key), tokens, device
        self.without_gradient = [p for p in model.parameters() if p.requires_grad and p.grad is None]
        self.peak = self.entered = self.gradients = 0  # bytes
        # Bytes that each layer keeps, by its number. A layer runs once for each micro-batch.
        self.kept: Counter[int] = Counter()
        self.start = self._read().allocated
        self.waits_for_end = False

    def watch(self, number: int, checkpoint: Checkpoint) -> Checkpoint:
        """A layer's checkpoint function, whose recomputation is recorded.

        transformers 5.24 recomputes a layer without its hooks, and earlier versions with them. So no hook can record.
        """

        def run_checkpoint(run: Callable[..., Any], *args: Any) -> Any:
            def run_layer(*args: Any) -> Any:
                if not (_is_in_backward() and self._is_current()):
                    return run(*args)
                self._enter()
                output = run(*args)
                self._leave(number, output)
                return output

            return checkpoint(run_layer, *args)

        return run_checkpoint

    def _is_current(self) -> bool:
        """Whether no later forward of the model is measured."""
        key = self.key()
        return key is not None and _recorders.get(key) is self

    def _read(self) -> DeviceMemory:
        memory = read_memory(self.device, restart_peak=True)
        assert memory is not None
        return memory

    def _enter(self) -> None:
        if not self.waits_for_end:
            self.waits_for_end = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self.entered = self._record_peak()

    def _leave(self, number: int, output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        # A recomputed layer's output is kept too, as the next layer's input.
        self.kept[number] += self._record_peak() - self.entered - hidden.nbytes

    def _record_peak(self) -> int:
        """Adds the peak since the last call. -> bytes in tensors"""
        memory = self._read()
        self.peak = max(self.peak, memory.peak - self.start - self.gradients)
        # Gradients that are views of a bucket existed before.
        grads = (_get_local(p.grad) for p in self.without_gradient if p.grad is not None)
        self.gradients = _count_bytes(grad for grad in grads if grad.untyped_storage().nbytes() == grad.nbytes)
        return memory.allocated

    def _finish(self) -> None:
        self._record_peak()
        key, layer = self.key(), max(self.kept.values(), default=0)
        if key is None:
            return
        _recorders.pop(key, None)
        if layer > 0 and self.peak > 0:
            _measurements[key] = Measurement(
                tokens=self.tokens,
                peak_bytes=self.peak / self.tokens,
                layer_bytes=layer / self.tokens,
                kind=self.kind,
            )


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
