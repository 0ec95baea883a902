"""Processes that fork from a server of this one, which has imported TRL: to import it again takes each ten seconds."""

import gc
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch

# The server leaves out what is not installed.
PRELOADED = ["torch.distributed.tensor", "liger_rl", "transformers.models.llama", "transformers.models.qwen3"]
PRELOADED += [f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "kto", "grpo")] + ["trl_run_on_rank"]
IDLE_SECONDS = 120  # without any processor time, after which ranks hang


def make_context() -> BaseContext:
    """Of new processes where there is a GPU: CUDA, once a module has asked for it, does not survive a fork."""
    if torch.cuda.is_available():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        ensure_running()
    return context


def start(
    function: Callable, *args: Any, log: Path | None = None, environment: dict[str, str] | None = None
) -> BaseProcess:
    """function(*args) in a process, which is returned. What it prints goes into the file `log`."""
    known = environment or {}
    process = make_context().Process(target=_run, args=(function, args, log, known), daemon=True)
    with mock.patch.dict(os.environ, known):  # read by the imports of a new process
        process.start()
    return process


def _run(function: Callable, args: tuple, log: Path | None, environment: dict[str, str]) -> None:
    gc.freeze()  # no collection of garbage walks through all of torch again
    os.environ.update(environment)
    if log is not None:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
    function(*args)


def run(function: Callable, *args: Any, log: Path) -> str:
    """function(*args) in a process -> what it has printed."""
    return _finish([start(function, *args, log=log)], [log])[0]


def run_ranks(directory: Path, function: Callable, *args: Any) -> list[str]:
    """function(*args) on two ranks, with torchrun's variables -> what each has printed. Ranks that hang are ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    # A machine's GPUs have no part in these runs.
    world |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    logs = [directory / f"log-{rank}" for rank in range(2)]
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    processes = [
        start(function, *args, log=log, environment=world | rank) for log, rank in zip(logs, ranks, strict=True)
    ]
    return _finish(processes, logs)


def _finish(processes: list[BaseProcess], logs: list[Path]) -> list[str]:
    try:
        _wait_while_they_work(processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    texts = [log.read_text() for log in logs]
    assert not any(process.exitcode for process in processes), "\n".join(text[-3000:] for text in texts)
    return texts


def _wait_while_they_work(processes: list[BaseProcess]) -> None:
    """Until all have ended, one has failed, or none has used the processor for a while. A loaded machine is no hang."""
    import psutil  # accelerate brings it

    known, since = 0.0, time.monotonic()
    while any(process.exitcode is None for process in processes) and not any(process.exitcode for process in processes):
        time.sleep(0.1)
        used = 0.0
        for process in processes:
            with suppress(psutil.Error):
                used += sum(psutil.Process(process.pid).cpu_times()[:2])
        # A rank that has ended has no time. One that waits in a collective wakes up for milliseconds.
        if abs(used - known) > 0.05:
            known, since = used, time.monotonic()
        assert time.monotonic() - since < IDLE_SECONDS, "the ranks wait for each other"
