"""A process that measures, and what is done when it dies, hangs or comes back with an error."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.cases import Case
from benchmark.environment import CPU_THREADS, ROOT

LIMIT_SECONDS = 150.0  # for one variant's numbers of one case
MEASURE = (sys.executable, "-m", "benchmark.measure")

# For the environment of a process that measures host memory: with these, freed blocks go back to the system at once
# and the high-water mark is what was in use together. They cost page faults, so times are taken without them.
HOST_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(64 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 10),
}


@dataclass(frozen=True)
class Job:
    """What is measured of one case together."""

    case: Case
    variants: tuple[str, ...]
    device: str
    quantities: tuple[str, ...]
    alone: bool = False  # in a process of its own, as host memory has to be measured

    def request(self, variants: list[str]) -> str:
        case, quantities = self.case.to_dict(), self.quantities
        return json.dumps({"case": case, "variants": variants, "device": self.device, "quantities": quantities})


class OutOfTime(Exception):
    """The whole run's time is spent."""


class Workers:
    """Runs jobs one after the other; one process does them all for as long as nothing goes wrong in it.

    After any failure the process is replaced, because a GPU's errors outlive the call that made them. A variant that
    fails in a process that others have used is tried once more in a fresh one, because an earlier variant may be at
    fault. After a failure in a fresh process it gets no second chance any more, and none after the limit.
    """

    def __init__(
        self,
        deadline: float | None = None,
        command: Sequence[str] = MEASURE,
        limit_seconds: float = LIMIT_SECONDS,
    ) -> None:
        self.deadline = deadline  # of time.monotonic(); None for no limit
        self.command = command
        self.limit_seconds = limit_seconds  # from a request to its first result, and from each result to the next
        self.hopeless: set[str] = set()  # variants that failed in a fresh process
        self.process: _Process | None = None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def run(self, job: Job) -> Iterator[tuple[str, dict[str, Any]]]:
        """One (variant, result) per variant, in their order.

        Raises:
            OutOfTime: the deadline passed; the variant in progress and those after it have no result.
        """
        waiting = list(job.variants)
        if job.alone:
            self._stop()
        while waiting:
            self._check_deadline()
            process = self._ready(job)
            process.ask(job.request(waiting))
            for result in process.results(self._patience):
                used = process.used
                process.used = True
                if result["status"] == "stopped":
                    self._stop()
                elif result["status"] == "failed":
                    self._stop()
                    if used and waiting[0] not in self.hopeless:
                        break  # asks again, from this variant on, in a fresh process
                    self.hopeless.add(waiting[0])
                yield waiting.pop(0), result
                if self.process is None or not waiting:
                    break
                self._check_deadline()
            if job.alone:
                self._stop()

    def _ready(self, job: Job) -> "_Process":
        if self.process is None:
            environment = {"OMP_NUM_THREADS": str(CPU_THREADS)} if job.device == "cpu" else {}
            if job.alone and "memory" in job.quantities:
                environment |= HOST_ENVIRONMENT
            self.process = _Process(self.command, environment)
        return self.process

    def _patience(self) -> float:
        left = float("inf") if self.deadline is None else self.deadline - time.monotonic()
        if left <= 0:
            self._check_deadline()
        return min(self.limit_seconds, left)

    def _check_deadline(self) -> None:
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self._stop()
            raise OutOfTime

    def _stop(self) -> None:
        if self.process is not None:
            self.process.stop()
            self.process = None


class _Process:
    """The process, its results read by a thread so that waiting for one can end."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.used = False
        # It lives as long as the process.
        self.log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=ROOT,
            env=dict(os.environ) | environment,
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.put(line)
        self.lines.put(None)

    def ask(self, request: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # then the results end at once, which says why
            assert self.process.stdin is not None
            self.process.stdin.write(request + "\n")
            self.process.stdin.flush()

    def results(self, patience: Callable[[], float]) -> Iterator[dict[str, Any]]:
        """Results as they come, without an end of their own; one that cannot come is a failure."""
        while True:
            seconds = patience()
            try:
                line = self.lines.get(timeout=seconds)
            except queue.Empty:
                patience()  # raises if it was the run's time that ended
                reason = f"after {seconds:.0f} s, the benchmark's own limit; --limit-seconds raises it"
                result: dict[str, Any] = {"status": "stopped", "reason": reason}
            else:
                result = self._died() if line is None else json.loads(line)
            if result["status"] == "failed":
                self._show_log()
            yield result

    def _died(self) -> dict[str, Any]:
        code = self.process.wait()
        if code < 0:
            reason = f"killed by signal {-code} (9 is what lack of memory does)"
        else:
            reason = f"exit status {code} without a result"
        return {"status": "failed", "reason": reason}

    def _show_log(self) -> None:
        self.log.seek(0)
        sys.stderr.write(self.log.read()[-4000:])

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()
