"""Work that the device does beside what it is given next."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


class SideWork:
    """A tensor made on a stream of its own, where there are streams, after all that was given to the device before.

    It pays where what comes next is many small kernels, which leave most of the device idle.
    """

    def __init__(self, device: torch.device, work: Callable[[], Tensor]) -> None:
        self._ready: torch.cuda.Event | None = None
        if device.type != "cuda":
            self._made = work()
            return
        stream = _side_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._made = work()
            self._ready = stream.record_event()

    def wait(self) -> Tensor:
        """The tensor, for what the device is given from now on; the host does not wait."""
        if self._ready is not None:
            current = torch.cuda.current_stream(self._made.device)
            current.wait_event(self._ready)
            self._made.record_stream(current)
        return self._made


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
