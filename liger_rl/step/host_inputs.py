"""Inputs of recomputed layers in CPU memory: copied there while the forward runs, and back while the backward runs."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class HostInputs:
    """Keeps the inputs of checkpointed layers, of forwards through which one backward runs.

    Copies run on a stream of their own. The device holds the inputs of two layers: of the layer that runs, and of its
    neighbour, whose inputs are copied meanwhile. Before an input's memory is used again, the layers' stream waits for
    the copy's end. `record_stream` would do without these waits, but the memory of many inputs would be free only
    later: the host may be many layers ahead of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.runs: list[list[_Input]] = []  # of each layer's forward
        self._device, self._stream = device, torch.cuda.Stream(device)

    def __del__(self) -> None:
        # Nobody has read these: a forward or a backward has failed, or one of two backwards never ran.
        for entry in itertools.chain(*self.runs):
            if entry.tensor is not None:
                entry.owner.wait_event(entry.copied)

    def wrap_checkpoint(self, number: int, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's checkpoint function, whose inputs are kept on the host."""

        def run_checkpoint(run: Callable[..., Any], *args: Any) -> Any:
            # A checkpoint around the layer counts the tensors that it saves, and runs it again without these hooks.
            if are_saved_tensors_hooked():
                return checkpoint(run, *args)
            # Arguments without a gradient may be one tensor for all layers. The hooks may get other objects.
            tensors = [x for x in args if type(x) is Tensor and x.requires_grad]
            pointers = {x.data_ptr() for x in tensors if x.device == self._device}
            inputs: list[_Input] = []

            def pack(tensor: Tensor) -> Tensor | tuple[int, int]:
                if tensor.data_ptr() not in pointers:
                    return tensor
                if not inputs:
                    self.finish_forward()
                    self.runs.append(inputs)
                # The graph holds these hooks: an input with its graph would be a cycle that nobody collects.
                host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
                inputs.append(_Input(host, tensor.detach()))
                self._copy(inputs[-1], to_host=True)
                return len(self.runs) - 1, len(inputs) - 1

            with saved_tensors_hooks(pack, self._unpack):
                return checkpoint(run, *args)

        return run_checkpoint

    def finish_forward(self) -> None:
        """Frees the last layer's inputs on the device."""
        for entry in self.runs[-1] if self.runs else ():
            self._take(entry)

    def _unpack(self, packed: Tensor | tuple[int, int]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        number, index = packed
        entry = self.runs[number][index]
        self._fetch(entry)
        tensor = self._take(entry)
        assert tensor is not None
        for neighbour in self.runs[number - 1] if number else ():  # the layer that the backward visits next
            self._fetch(neighbour)
        return tensor

    def _fetch(self, entry: "_Input") -> None:
        if entry.tensor is None:
            entry.tensor = torch.empty_like(entry.host, device=self._device)
            self._copy(entry, to_host=False)

    def _copy(self, entry: "_Input", *, to_host: bool) -> None:
        assert entry.tensor is not None
        # Until now the layers' stream writes the input, or uses what had this memory before.
        entry.owner = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(entry.owner)
        target, source = (entry.host, entry.tensor) if to_host else (entry.tensor, entry.host)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        entry.copied = self._stream.record_event()

    def _take(self, entry: "_Input") -> Tensor | None:
        """The input on the device, which is held no longer."""
        tensor, entry.tensor = entry.tensor, None
        if tensor is not None:
            torch.cuda.current_stream(self._device).wait_event(entry.copied)
        return tensor


def are_saved_tensors_hooked() -> bool:
    """Whether a context keeps the tensors that a forward saves elsewhere, as `save_on_cpu` does."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@dataclass
class _Input:
    host: Tensor
    tensor: Tensor | None  # on the device, while a copy may run
    owner: Any = None  # torch.cuda.Stream of the layers, in whose memory the tensor is
    copied: Any = None  # torch.cuda.Event at the end of the last copy
