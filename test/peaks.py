"""Peak of the memory that tensors take, measured on any device."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Peak:
    """Bytes that tensors take above those at entry: at most, and at the end."""

    bytes = held = 0


@contextmanager
def tensor_peak(device: torch.device) -> Iterator[Peak]:
    peak = Peak()
    # On CPU many small operations would each wait for all threads, of which a host may have more than cores.
    threads = torch.get_num_threads()
    gc.disable()  # old garbage would be freed while new memory is counted
    torch.set_num_threads(1)
    try:
        with _cuda_peak(peak) if device.type == "cuda" else _cpu_peak(peak):
            yield peak
    finally:
        torch.set_num_threads(threads)
        gc.enable()


@contextmanager
def _cuda_peak(peak: Peak) -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    torch.cuda.synchronize()
    peak.bytes, peak.held = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before


@contextmanager
def _cpu_peak(peak: Peak) -> Iterator[None]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield
    assert profile.profiler is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        peak.held += event.nbytes()
        peak.bytes = max(peak.bytes, peak.held)
