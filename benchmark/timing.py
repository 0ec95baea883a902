"""Median milliseconds of a callable, and of a floor beside it."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """How often to repeat: `most` times, no more than `least` once `seconds` are spent, once if that took `long`.

    A floor has its turn after every `floor_every` repeats, at least once; its time counts too.
    """

    most: int
    least: int
    seconds: float
    long_seconds: float
    floor_every: int


REPEATS = {
    "cuda": Repeats(most=9, least=3, seconds=0.7, long_seconds=3.0, floor_every=3),
    # Few repeats on a processor that others may use: one floor for three would be no median.
    "cpu": Repeats(most=5, least=3, seconds=5.0, long_seconds=60.0, floor_every=1),
}


class Timing(NamedTuple):
    median_ms: float
    repeats: int
    floor_ms: float | None = None  # median; None where no floor was asked for


def measure_ms(
    run: Callable[[], object],
    device: str,
    before: Callable[[], object] = lambda: None,
    *,
    prepare_floor: Callable[[], Callable[[], object]] | None = None,
    warm: bool = False,
) -> Timing:
    """Median over repeats, after one that does not count unless `run` is `warm`; `before` runs ahead, untimed.

    `prepare_floor` returns a callable that is timed in turn with `run`: a GPU lowers its clock as it warms up, and only
    what takes turns has had the same. Preparing is not timed, and what it returned is dropped before `run` has its turn
    again, with all the memory there was.
    """
    repeats, once = REPEATS[device], _once_cuda if device == "cuda" else _once_cpu
    if not warm:
        before()
        run()
    times: list[float] = []
    floors: list[float] = []

    def time_floor() -> None:
        if prepare_floor is not None:
            before()
            floors.append(once(prepare_floor()))

    begun = time.perf_counter()
    while len(times) < repeats.most:
        spent = time.perf_counter() - begun
        if (times and spent >= repeats.long_seconds) or (len(times) >= repeats.least and spent >= repeats.seconds):
            break
        before()
        times.append(once(run))
        if len(times) % repeats.floor_every == 0:
            time_floor()
    if not floors:
        time_floor()
    return Timing(statistics.median(times), len(times), statistics.median(floors) if floors else None)


def median_ms(run: Callable[[], object], device: str, before: Callable[[], object] = lambda: None) -> float:
    return measure_ms(run, device, before).median_ms


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
