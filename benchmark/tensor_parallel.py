"""The head with its vocabulary over the GPUs of one host, against the whole head on one of them.

    python -m benchmark.tensor_parallel --ranks 2 --out out/tensor-parallel.json
    torchrun --nproc-per-node 2 -m benchmark.tensor_parallel --out ...

First the numbers are compared with those of the whole head, then both are timed on the same tensors, medians of a fixed
number of runs; of the ranks the slowest counts. Bytes are counted, not measured: a ring of T ranks sends 2 (T - 1) / T
times what a rank puts into an all-reduce. On a machine without GPUs it runs small shapes with gloo, to try the script.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmark.environment import describe
from benchmark.memory import PeakMemory
from benchmark.timing import once_ms
from liger_rl import linear_logprobs
from liger_rl.distributed import VocabParallel

WARM_UP, REPEATS = 3, 11
# Of the sharded results beside the whole head's, Frobenius. A gradient in bfloat16 is rounded on both sides.
TOLERANCE = {"logps": 1e-5, "entropy": 1e-5, "hidden": 4e-3, "weight": 4e-3}
VERL_SPLIT = 1024  # vocabulary entries; verl reduces one maximum for each token and split
SECONDS = 170


@dataclass(frozen=True)
class Shape:
    tokens: int
    hidden_size: int
    vocab: int


CHECKED = {"cuda": Shape(1500, 1024, 32003), "cpu": Shape(40, 32, 403)}
TIMED = {"cuda": [Shape(8192, 4096, 128256), Shape(2048, 4096, 128256)], "cpu": [Shape(64, 32, 2048)]}


@dataclass(frozen=True)
class Place:
    rank: int
    ranks: int
    device: torch.device

    def shard(self, weight: Tensor) -> tuple[Tensor, VocabParallel]:
        rows = -(-weight.shape[0] // self.ranks)
        start = self.rank * rows
        return weight[start : start + rows].clone(), VocabParallel(dist.group.WORLD, start)


def problem(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, targets and dL/dlogp, the same on every rank."""
    generator = torch.Generator(device).manual_seed(0)

    def made(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=torch.bfloat16)

    hidden, weight = made(shape.tokens, shape.hidden_size), made(shape.vocab, shape.hidden_size) * 0.02
    targets = torch.randint(shape.vocab, (shape.tokens,), generator=generator, device=device)
    return hidden, weight, targets, torch.randn(shape.tokens, generator=generator, device=device)


def check(shape: Shape, place: Place) -> dict[str, float]:
    """Relative errors of the sharded head beside the whole one on this rank, the larger with and without an entropy,
    whose gradient takes other kernels."""
    hidden, weight, targets, upstream = problem(shape, place.device)
    shard, where = place.shard(weight)
    rows = slice(where.vocab_start, where.vocab_start + shard.shape[0])

    def solve(weight: Tensor, vocab_parallel: VocabParallel | None, entropy: bool) -> dict[str, Tensor]:
        leaves = hidden.clone().requires_grad_(), weight.requires_grad_()
        found = linear_logprobs(leaves[0], weight, targets, entropy=entropy, vocab_parallel=vocab_parallel)
        loss = (found.logps * upstream).sum()
        results = {"logps": found.logps}
        if found.entropy is not None:
            results["entropy"] = found.entropy
            loss = loss + 0.1 * (found.entropy * upstream).sum()
        return results | dict(zip(("hidden", "weight"), torch.autograd.grad(loss, leaves), strict=True))

    errors = dict.fromkeys(TOLERANCE, 0.0)
    for entropy in (True, False):
        found, expected = solve(shard, where, entropy), solve(weight, None, entropy)
        expected["weight"] = expected["weight"][rows]
        for name, truth in expected.items():
            error = ((found[name].double() - truth.double()).norm() / truth.double().norm()).item()
            # `not <=`, so that NaN is an error too.
            if not error <= TOLERANCE[name]:
                raise SystemExit(f"{name} of {shape}, rank {place.rank}: off by {error:.1e} > {TOLERANCE[name]}")
            errors[name] = max(errors[name], error)
    return errors


def median_ms(run: Callable[[], object], place: Place) -> float:
    """The slowest rank's median. The same number of runs on every rank, because there are collectives in them."""
    times = []
    for repeat in range(WARM_UP + REPEATS):
        dist.barrier()
        elapsed = once_ms(run, place.device.type)
        if repeat >= WARM_UP:
            times.append(elapsed)
    slowest = torch.tensor([statistics.median(times)], device=place.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def measure(shape: Shape, place: Place) -> list[dict[str, Any]]:
    """Rows for TP=1, which every rank runs beside the others on its own GPU, and for all ranks together."""
    hidden, weight, targets, upstream = problem(shape, place.device)
    shard, where = place.shard(weight)
    rows = []
    for ranks, rows_here, vocab_parallel in ((1, weight, None), (place.ranks, shard, where)):
        leaf, head = hidden.clone().requires_grad_(), rows_here.clone().requires_grad_()

        def forward(leaf=leaf, head=head, vocab_parallel=vocab_parallel) -> Tensor:
            # Shards are exact, so the whole head is, too.
            return linear_logprobs(leaf, head, targets, vocab_parallel=vocab_parallel).logps

        def forward_without_gradient(forward=forward) -> None:
            with torch.no_grad():
                forward()

        def step(forward=forward, leaf=leaf, head=head) -> None:
            leaf.grad = head.grad = None
            (forward() * upstream).sum().backward()

        timed = {"forward_ms": median_ms(forward_without_gradient, place), "step_ms": median_ms(step, place)}
        with PeakMemory(place.device.type) as memory:
            step()
        # Gradients included. Beside other ranks, the memory of a host says nothing.
        peak_mib = memory.peak_bytes / 2**20 if memory.cuda else None
        rows.append({"ranks": ranks, **vars(shape), **timed, "peak_extra_mib": peak_mib})
        del leaf, head
    for name in ("forward_ms", "step_ms"):
        rows[1][name.replace("_ms", "_speedup")] = rows[0][name] / rows[1][name]
    return [rows[0], rows[1] | {"bytes": wire_bytes(shape, place.ranks), **collectives_ms(shape, place)}]


def wire_bytes(shape: Shape, ranks: int) -> dict[str, float]:
    """What each rank sends: the statistics of log-probabilities alone, verl's (which always has the entropy), dH."""
    ring = 2 * (ranks - 1) / ranks
    splits = math.ceil(math.ceil(shape.vocab / ranks) / VERL_SPLIT)
    return {
        "forward": ring * 4 * shape.tokens * (1 + 2),
        "forward_with_entropy": ring * 4 * shape.tokens * (1 + 3),
        "forward_verl": ring * 4 * shape.tokens * (splits + 1 + 2),
        "backward": ring * 4 * shape.tokens * shape.hidden_size,
    }


def collectives_ms(shape: Shape, place: Place) -> dict[str, float]:
    """The same collectives with nothing beside them."""
    statistics_, gradient = (torch.zeros(shape.tokens * width, device=place.device) for width in (3, shape.hidden_size))
    return {
        "statistics_alone_ms": median_ms(lambda: dist.all_reduce(statistics_), place),
        "hidden_grad_alone_ms": median_ms(lambda: dist.all_reduce(gradient), place),
    }


def run_rank(out: Path | None) -> None:
    """One rank, in torchrun's environment."""
    cuda = torch.cuda.is_available()
    rank, ranks, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if cuda and torch.cuda.device_count() < ranks:
        raise SystemExit(f"{ranks} ranks need as many GPUs, there are {torch.cuda.device_count()}")
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    named = {"device_id": device} if cuda else {}
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=60), **named)
    place = Place(rank, ranks, device)
    errors = check(CHECKED[device.type], place)
    rows = [row for shape in TIMED[device.type] for row in measure(shape, place)]
    if rank == 0:
        environment = describe(device.type)
        text = json.dumps({"environment": environment, "ranks": ranks, "errors": errors, "rows": rows}, indent=2)
        print(text)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text + "\n", encoding="utf-8")
    dist.destroy_process_group()


def spawn(ranks: int, out: Path | None) -> int:
    """torchrun's part: so many processes of this script, all ended when one fails or time is up."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "benchmark.tensor_parallel", *([] if out is None else [f"--out={out}"])]
    with subprocess.Popen(command) as launcher:
        try:
            return launcher.wait(SECONDS)
        except subprocess.TimeoutExpired:
            print(f"no result after {SECONDS} s: a rank hangs", file=sys.stderr)
            launcher.terminate()  # it ends its ranks
            return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="GPUs, where torchrun has not set them")
    parser.add_argument("--out", type=Path, help="JSON file to write, beside printing it")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        return spawn(arguments.ranks, arguments.out)
    run_rank(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
