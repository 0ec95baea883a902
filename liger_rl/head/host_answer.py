"""Integers that the host reads from the device: copied early, waited for late."""

import torch
from torch import Tensor


class HostAnswer:
    """Integers (k,) on their way to the host. Work that the host launches before `wait` hides the copy."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._ready: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._numbers, self._ready = numbers.to("cpu", non_blocking=True), torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(numbers.device.index))

    def wait(self) -> Tensor:
        """(k,) on the host."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._numbers
