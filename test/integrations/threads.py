"""Calls in threads that take turns as often as Python lets them."""

import sys
import threading
from collections.abc import Callable


def in_threads(*calls: Callable, times: int) -> list[list]:
    """What each of `calls` gives, `times` over, while the others run in threads of their own; raises as one does."""
    results, failures, start = [[] for _ in calls], [], threading.Barrier(len(calls))

    def run(call: Callable, values: list) -> None:
        start.wait()
        try:
            for _ in range(times):
                values.append(call())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(calls, results, strict=True)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if failures:
        raise failures[0]
    return results
