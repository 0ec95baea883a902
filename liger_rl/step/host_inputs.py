"""Inputs of recomputed layers in CPU memory: copied there while the forward runs, and back while the backward runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class HostInputs:
    """Keeps the inputs of checkpointed layers, of forwards through which one backward runs.

    Copies run on a stream of their own. The device holds two inputs: that of the layer that runs, and its neighbour's,
    which is copied meanwhile. Before an input's memory is used again, the layers' stream waits for the copy's end.
    `record_stream` would do without these waits, but the memory of many inputs would be free only later: the host may
    be many layers ahead of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._inputs: list[_Input] = []
        self._device, self._stream = device, torch.cuda.Stream(device)

    def __del__(self) -> None:
        # Nobody has read these: a forward or a backward has failed, or one of two backwards never ran.
        for entry in self._inputs:
            if entry.tensor is not None:
                entry.owner.wait_event(entry.copied)

    def wrap_checkpoint(self, number: int, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's checkpoint function, whose input is kept on the host."""

        def run_checkpoint(run: Callable[..., Any], *args: Any) -> Any:
            # The hooks get tensors without `requires_grad`. Other arguments may be one tensor for all layers.
            own = [x for x in args if type(x) is Tensor and x.device == self._device and x.requires_grad]
            pointers = {x.data_ptr() for x in own}

            def pack(tensor: Tensor) -> Tensor | int:
                return self._push(tensor) if tensor.data_ptr() in pointers else tensor

            with saved_tensors_hooks(pack, self._unpack):
                return checkpoint(run, *args)

        return run_checkpoint

    def finish_forward(self) -> None:
        """Frees the last input's memory on the device."""
        if self._inputs:
            self._take(self._inputs[-1])

    def _push(self, tensor: Tensor) -> int:
        self.finish_forward()
        self._inputs.append(_Input(torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda), tensor))
        self._copy(self._inputs[-1], to_host=True)
        return len(self._inputs) - 1

    def _unpack(self, packed: Tensor | int) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        entry = self._inputs[packed]
        self._fetch(entry)
        tensor = self._take(entry)
        assert tensor is not None
        if packed:
            self._fetch(self._inputs[packed - 1])  # of the layer that the backward visits next
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


@dataclass
class _Input:
    host: Tensor
    tensor: Tensor | None  # on the device, while a copy may run
    owner: Any = None  # torch.cuda.Stream of the layers, in whose memory the tensor is
    copied: Any = None  # torch.cuda.Event at the end of the last copy
