"""Median milliseconds of a callable."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """How often to repeat: `most` times, no more than `least` once `seconds` are spent, once if that took `long`."""

    most: int
    least: int
    seconds: float
    long_seconds: float


REPEATS = {
    "cuda": Repeats(most=7, least=3, seconds=0.35, long_seconds=0.8),
    "cpu": Repeats(most=5, least=3, seconds=5.0, long_seconds=60.0),
}


class Timing(NamedTuple):
    median_ms: float
    repeats: int


def measure_ms(
    run: Callable[[], object], device: str, before: Callable[[], object] = lambda: None, *, warm: bool = False
) -> Timing:
    """Median over repeats, after one that does not count unless `run` is `warm`; `before` runs ahead, untimed."""
    turn = _turn(run, device, before)
    if not warm:
        turn()
    return _medians([turn], device)[0]


def measure_in_turns(
    run: Callable[[], object],
    other: Callable[[], object],
    device: str,
    before: Callable[[], object] = lambda: None,
    *,
    warm: bool = False,
) -> tuple[Timing, Timing]:
    """Medians of both, run in turns: a GPU lowers its clock as it warms up, and a ratio says what it should where both
    had the same. Nothing runs on the device between two turns, or it would cool down before one of them alone.

    `before` runs ahead of `run`; the rest is as above.
    """
    turn, other_turn = _turn(run, device, before), _turn(other, device)
    if not warm:
        turn()
    other_turn()
    first, second = _medians([turn, other_turn], device)
    return first, second


def _turn(run: Callable[[], object], device: str, before: Callable[[], object] = lambda: None) -> Callable[[], float]:
    """-> what runs once and returns milliseconds."""
    once = _once_cuda if device == "cuda" else _once_cpu

    def turn() -> float:
        before()
        return once(run)

    return turn


def _medians(turns: Sequence[Callable[[], float]], device: str) -> list[Timing]:
    repeats = REPEATS[device]
    times: list[list[float]] = [[] for _ in turns]
    begun = time.perf_counter()
    while len(times[0]) < repeats.most:
        spent = (time.perf_counter() - begun) / len(turns)
        enough = len(times[0]) >= repeats.least and spent >= repeats.seconds
        if enough or (times[0] and spent >= repeats.long_seconds):
            break
        for turn, of_turn in zip(turns, times, strict=True):
            of_turn.append(turn())
    return [Timing(statistics.median(of_turn), len(of_turn)) for of_turn in times]


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
