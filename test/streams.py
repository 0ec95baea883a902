"""Streams of a CPU in place of a GPU's, for a device "cpu" that tests take for one."""

from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import torch


class CpuStream:
    """A stream on which all has run already."""

    def __init__(self, device: torch.device) -> None: ...

    def wait_stream(self, other) -> None: ...

    def wait_event(self, event) -> None: ...

    def record_event(self) -> None: ...


def on_device(device: torch.device) -> AbstractContextManager:
    """torch.cuda's streams in the context, or the CPU's for a CPU."""
    if device.type == "cuda":
        return nullcontext()
    return mock.patch.multiple(
        torch.cuda, Stream=CpuStream, current_stream=CpuStream, stream=lambda stream: nullcontext()
    )
