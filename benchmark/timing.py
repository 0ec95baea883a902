"""Median milliseconds of a callable."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """How often to repeat: `most` times, but no more than `least` once `seconds` are spent."""

    most: int
    least: int
    seconds: float


REPEATS = {
    "cuda": Repeats(most=9, least=3, seconds=3.0),
    "cpu": Repeats(most=5, least=3, seconds=5.0),
}


def median_ms(run: Callable[[], object], device: str, before: Callable[[], object] = lambda: None) -> float:
    """Median over repeats, after one that does not count; `before` runs ahead of each, untimed."""
    repeats = REPEATS[device]
    before()
    run()
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < repeats.most and (len(times) < repeats.least or time.perf_counter() - begun < repeats.seconds):
        before()
        times.append(_once_cuda(run) if device == "cuda" else _once_cpu(run))
    return statistics.median(times)


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
