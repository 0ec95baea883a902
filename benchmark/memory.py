"""Peak memory of a stretch of code, above what was held when it began, in bytes."""

import contextlib
import ctypes
import gc
import resource
import sys
from pathlib import Path
from types import TracebackType

import torch

PROCESS = Path("/proc/self")


class PeakMemory:
    """Context manager; afterwards `.peak_bytes` is the peak above the level at entry."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.peak_bytes = 0

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.base = torch.cuda.memory_allocated()
        else:
            _trim_heap()
            _reset_high_water()
            self.base = _resident("VmRSS")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.cuda:
            torch.cuda.synchronize()
            self.peak_bytes = torch.cuda.max_memory_allocated() - self.base
        else:
            self.peak_bytes = _resident("VmHWM") - self.base


def _trim_heap() -> None:
    """Give freed blocks of the inputs' making back, so that the measured code cannot reuse them unseen."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _reset_high_water() -> None:
    """Where the system does not allow it, the mark of making the inputs stands, which is kept low for that reason."""
    with contextlib.suppress(OSError):
        (PROCESS / "clear_refs").write_text("5")


def _resident(field: str) -> int:
    """Bytes resident now ("VmRSS") or at most since the reset ("VmHWM").

    From /proc where there is one, since ru_maxrss would begin at the size of the process that started this one;
    elsewhere the high-water mark has to do for both.
    """
    if (PROCESS / "status").exists():
        for line in (PROCESS / "status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10
    unit = 1 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
