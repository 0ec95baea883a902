"""Median milliseconds of a callable."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """How often to repeat: `most` times, no more than `least` once `seconds` are spent, once if that took `long`."""

    warm_seconds: float
    most: int
    least: int
    seconds: float
    long_seconds: float


REPEATS = {
    "cuda": Repeats(warm_seconds=0.1, most=7, least=3, seconds=0.25, long_seconds=0.8),
    "cpu": Repeats(warm_seconds=0.0, most=5, least=3, seconds=1.0, long_seconds=60.0),
}


class Timing(NamedTuple):
    median_ms: float
    repeats: int


def measure_ms(
    run: Callable[[], object], device: str, before: Callable[[], object] = lambda: None, *, warm: bool = False
) -> Timing:
    """Median over repeats, after one that does not count unless `run` is `warm`, and as many more as keep the device
    busy for `warm_seconds`: a GPU lowers its clock as it warms up. `before` runs ahead of each, untimed."""
    repeats = REPEATS[device]

    def repeat() -> float:
        before()
        return once_ms(run, device)

    if not warm:
        repeat()  # which may compile, and leave the device with nothing to do
    begun = time.perf_counter()
    while time.perf_counter() - begun < repeats.warm_seconds:
        repeat()
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < repeats.most:
        spent = time.perf_counter() - begun
        if (times and spent >= repeats.long_seconds) or (len(times) >= repeats.least and spent >= repeats.seconds):
            break
        times.append(repeat())
    return Timing(statistics.median(times), len(times))


def once_ms(run: Callable[[], object], device: str) -> float:
    return _once_cuda(run) if device == "cuda" else _once_cpu(run)


def _once_cuda(run: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def _once_cpu(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3
