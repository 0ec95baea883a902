"""Integers that the host needs from the device, asked for before it waits for them."""

import torch
from torch import Tensor


class HostAnswer:
    """Integers (k,) on their way to the host. Work that is launched before `wait` hides the wait."""

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
