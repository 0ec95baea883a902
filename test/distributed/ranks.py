"""Processes that stay, as ranks of one world, and run functions together: starting them costs seconds, a run does not.

A run has a time limit: a collective that some rank does not enter is a failed test and not one that hangs.
"""

import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from forks import start

WORLD = 4
START_SECONDS, RUN_SECONDS, COLLECTIVE_SECONDS = 150, 120, 100


@dataclass(frozen=True)
class Rank:
    """What a function that runs on every rank is told."""

    index: int
    world: int
    group: "dist.ProcessGroup"
    device: torch.device

    def mesh(self, *names: str, shape: tuple[int, ...] | None = None) -> DeviceMesh:
        """One dimension over the ranks of the run, or `shape` over the whole world.

        A run of fewer ranks must not make process groups: their names are counted, and the others would count behind.
        """
        if shape is None:
            return DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=names or None)
        assert self.world == WORLD
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)


def message_of(call: Callable[[], Any]) -> str | None:
    """Kind and text of what a call refuses; None where it takes it."""
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def assert_whole(results: list[dict], expected: dict, tolerance: float = 1e-6, grad_tolerance: float = 1e-6) -> None:
    """Results and gradients of ranks, by name, are those of whole heads: rows of a rank, or the same bits on each.

    Errors are relative to the norm, those of results to 1 at least: they are differences of logits.
    """
    assert results[0].keys() == expected.keys()
    for name, truth in expected.items():
        sharded = results[0][name].shape != truth.shape
        found = torch.cat([result[name] for result in results]) if sharded else results[0][name]
        assert (found.shape, found.dtype) == (truth.shape, truth.dtype), name
        if truth.is_floating_point():
            error, norm = (found.double() - truth.double()).norm(), truth.double().norm()
            allowed = grad_tolerance * norm if "grad" in name else tolerance * max(norm, truth.numel() ** 0.5)
            assert error <= allowed, (name, error, norm)
        else:
            assert torch.equal(found, truth), name
        if not sharded:
            assert all(torch.equal(result[name], found) for result in results), f"{name} differs between ranks"


@contextmanager
def sent() -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Name and shape of every collective that is entered meanwhile; objects have no shape."""
    calls: list[tuple[str, tuple[int, ...]]] = []

    def counted(name: str, place: int):
        function = getattr(dist, name)

        def collective(*args, **options):
            calls.append((name, tuple(args[place].shape) if isinstance(args[place], torch.Tensor) else ()))
            return function(*args, **options)

        return mock.patch.object(dist, name, collective)

    with counted("all_reduce", 0), counted("all_gather", 1), counted("all_gather_object", 1):
        yield calls


class Ranks:
    """WORLD processes; a run takes the first so many of them."""

    def __init__(self) -> None:
        self.store = Path(tempfile.mkdtemp()) / "store"
        self.pipes, self.processes = [], []
        for index in range(WORLD):
            here, there = Pipe()
            process = start(_serve, index, str(self.store), there)
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        try:
            self._answers(range(WORLD), START_SECONDS)
        except BaseException:
            self.stop()
            raise

    def run(self, function: Callable, *args: Any, world: int = 2, device: str = "cpu") -> list:
        """function(rank, *args) on each of `world` ranks -> what they return; the first error if one raises."""
        for index in range(world):
            self.pipes[index].send_bytes(pickle.dumps((function, args, world, device)))
        answers = self._answers(range(world), RUN_SECONDS)
        failed = [text for good, text in answers if not good]
        assert not failed, "\n".join(failed)
        return [value for _, value in answers]

    def _answers(self, ranks: range, seconds: float) -> list:
        deadline, answers = time.monotonic() + seconds, []
        for index in ranks:
            if not self.pipes[index].poll(max(deadline - time.monotonic(), 0)):
                self.stop()
                raise TimeoutError(f"rank {index} of {len(ranks)} gave no answer within {seconds} s")
            answers.append(pickle.loads(self.pipes[index].recv_bytes()))
        return answers

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _serve(index: int, store: str, pipe) -> None:
    os.environ["LOCAL_RANK"] = str(index)
    torch.set_num_threads(1)
    on_gpus = torch.cuda.device_count() >= 2
    if on_gpus:
        torch.cuda.set_device(index % torch.cuda.device_count())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
        init_method=f"file://{store}",
        rank=index,
        world_size=WORLD,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )
    groups = {world: dist.new_group(list(range(world))) for world in range(1, WORLD)} | {WORLD: dist.group.WORLD}
    pipe.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            function, args, world, device = pickle.loads(pipe.recv_bytes())
        except EOFError:
            sys.exit()
        place = torch.device(device, index if device == "cuda" else None)
        torch.manual_seed(0)
        try:
            answer = (True, function(Rank(index, world, groups[world], place), *args))
        except Exception:
            answer = (False, f"rank {index}: {traceback.format_exc()}")
        pipe.send_bytes(pickle.dumps(answer))
