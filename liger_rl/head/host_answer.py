"""Integers that the host reads from the device: copied early, waited for late."""

import torch
from torch import Tensor


class HostAnswer:
    """Integers (k,) that a kernel has counted. Work that is launched before `wait` hides their copy to the host."""

    def __init__(self, numbers: Tensor | list[int]) -> None:
        self._numbers = numbers
        self._ready: torch.cuda.Event | None = None
        if isinstance(numbers, Tensor) and numbers.is_cuda:
            self._numbers, self._ready = numbers.to("cpu", non_blocking=True), torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(numbers.device.index))

    def wait(self) -> list[int]:
        if self._ready is not None:
            self._ready.synchronize()
        return self._numbers.tolist() if isinstance(self._numbers, Tensor) else self._numbers
