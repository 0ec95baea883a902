"""Measure memory, time and error of every variant, print a table, write results and plot: `python -m benchmark.run`.

Two cases by default: a batch of which every token counts, and a batch as RL makes it. --tokens, --vocab and --hidden
set their shape. Others have a name. Nothing that git tracks is written without --record.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmark.cases import GROUPS, STEP, Case, default_cases, preset
from benchmark.environment import ROOT, add_output_options, output_directory, read_results, slug, write_results
from benchmark.merge import differences, merged
from benchmark.plot import plot_directory
from benchmark.table import markdown
from benchmark.variants import EVERYWHERE, LABELS, OURS
from benchmark.worker import LIMIT_SECONDS, Job, OutOfTime, Workers

# What a variant does with a case, in units of the matmul of its logits: median counts of repeats, and a softmax that
# takes as long as its matmul on a CPU. The coefficients are fitted to whole runs.
MATMULS = {"memory": 6, "time": 60, "error": 20}
COMPILE_SECONDS = {"cpu": 0.0, "cuda": 8.0}  # of a variant's kernels, once a case


def plan(
    cases: list[Case], variants: list[str] | None, device: str, *, quick: bool, done: Set[tuple[str, str]] = frozenset()
) -> list[Job]:
    """One job per case; on CPU one more per variant, whose memory is measured in a process of its own with the
    allocator's settings for it. --quick puts up with one for all. `variants` None is every case's own; `done` is left
    out."""
    jobs = []
    for case in cases:
        wanted = variants or case.variants or EVERYWHERE
        names = tuple(name for name in wanted if (case.name, name) not in done)
        together = case.quantities
        if device == "cpu" and not quick and "memory" in together:
            jobs += [Job(case, (name,), device, ("memory",), alone=True) for name in names]
            together = tuple(quantity for quantity in together if quantity != "memory")
        if names and together:
            jobs.append(Job(case, names, device, together))
    return jobs


def estimated_seconds(jobs: list[Job], flop_per_second: float, start_seconds: float) -> float:
    """`start_seconds`: of a process that imports torch; importing a peer takes about as long again."""
    total = 2 * start_seconds * (1 + sum(job.alone for job in jobs))
    for job in jobs:
        case = job.case
        matmul = 2 * case.live_rows * case.hidden_size * case.vocab / flop_per_second
        matmuls = sum(MATMULS[quantity] for quantity in job.quantities) / (1 if case.task == STEP else 3)
        total += len(job.variants) * (matmuls * matmul + COMPILE_SECONDS[job.device])
    return total


def collect(
    jobs: list[Job],
    save: Callable[[list[dict[str, Any]]], None],
    budget_seconds: float | None = None,
    limit_seconds: float = LIMIT_SECONDS,
) -> list[dict[str, Any]]:
    """-> one row per (case, variant), in the jobs' order; `save` is given the rows so far after every result.

    What `budget_seconds` leaves no time for has no row.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    deadline = None if budget_seconds is None else time.monotonic() + budget_seconds
    with Workers(deadline, limit_seconds=limit_seconds) as workers:
        try:
            for number, job in enumerate(jobs, 1):
                # A reason found by one process stands, whatever the next one finds.
                kept = tuple(
                    v for v in job.variants if rows.get((job.case.name, v), {"status": "ok"})["status"] == "ok"
                )
                begun = time.perf_counter()
                for variant, result in workers.run(replace(job, variants=kept)):
                    row = rows.setdefault((job.case.name, variant), _new_row(job.case, variant))
                    row |= result
                    save(list(rows.values()))
                    what = f"{job.case.name}: {LABELS[variant]}, {' and '.join(job.quantities)}"
                    seconds = time.perf_counter() - begun
                    found = row["status"] + (f" {row['reason']}" if row["status"] != "ok" else f", {seconds:.0f} s")
                    print(f"[{number}/{len(jobs)}] {what}: {found}", file=sys.stderr, flush=True)
                    begun = time.perf_counter()
        except OutOfTime:
            print(f"stopped: --budget-seconds {budget_seconds:.0f} are spent", file=sys.stderr, flush=True)
    return list(rows.values())


def _new_row(case: Case, variant: str) -> dict[str, Any]:
    fields = {key: value for key, value in case.to_dict().items() if key not in ("name", "variants")}
    return {
        "case": case.name,
        "variant": variant,
        "status": "ok",
        "reason": None,
        **fields,
        "rows": case.rows,
        "live_rows": case.live_rows,
    }


def detect(device: str) -> tuple[dict[str, Any], float]:
    """The environment and the speed of a matmul, asked of another process: this one must not hold the device."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmark.environment", device], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(done.returncode)
    found = json.loads(done.stdout.splitlines()[-1])
    return found["environment"], found["flop_per_second"]


def rows_to_keep(target: Path, environment: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of an earlier run, refused if it was not of the same environment: a file holds one."""
    if not target.exists():
        return []
    before = read_results(target)
    differs = differences(before["environment"], environment)
    if differs:
        raise SystemExit(f"--resume: {target} was measured with another {', '.join(differs)}")
    return before["rows"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens of the batch, padding included")
    parser.add_argument("--vocab", type=int, metavar="V", help="vocabulary entries")
    parser.add_argument("--hidden", type=int, metavar="H", help="hidden size")
    parser.add_argument(
        "--cases",
        nargs="+",
        metavar="GLOB",
        help=f"cases whose names or groups ({', '.join(GROUPS)}) match; '*' is all of them",
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=tuple(LABELS),
        metavar="NAME",
        help=f"of {', '.join(LABELS)}; default: the case's",
    )
    parser.add_argument("--quick", action="store_true", help="all cases in tiny shapes, to see that everything runs")
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=LIMIT_SECONDS,
        metavar="S",
        help="stop a variant that takes longer on a case; default: %(default).0f",
    )
    parser.add_argument(
        "--budget-seconds", type=float, metavar="S", help="begin nothing after S seconds; what is left has no rows"
    )
    add_output_options(parser)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the rows of an earlier run in the same place, if device, versions and commit are the same, and "
        "measure only what it has neither numbers nor a reason for",
    )
    arguments = parser.parse_args()
    sized = not arguments.tokens is arguments.vocab is arguments.hidden is None
    if sized and (arguments.cases or arguments.quick or arguments.record):
        parser.error("--tokens, --vocab and --hidden are of the default cases: not with --cases, --quick or --record")
    if arguments.record and (arguments.cases or arguments.variants or arguments.quick) and not arguments.resume:
        parser.error("--record of a part would drop the other rows: --resume keeps them")
    return arguments


def select(arguments: argparse.Namespace, device: str) -> list[Case]:
    """The default cases, unless others are named or all are wanted."""
    named = arguments.cases or (["*"] if arguments.quick or arguments.record else None)
    if named is None:
        return default_cases(device, tokens=arguments.tokens, vocab=arguments.vocab, hidden=arguments.hidden)
    cases = preset(device, quick=arguments.quick, patterns=tuple(named))
    if not cases:
        everything = preset(device, quick=arguments.quick)
        raise SystemExit(f"--cases {' '.join(named)}: none of {[case.name for case in everything]}")
    return cases


def main() -> None:
    arguments = parse_arguments()
    begun = time.perf_counter()
    environment, speed = detect(arguments.device)
    start_seconds = time.perf_counter() - begun
    device = environment["device"]
    cases = select(arguments, device)
    output = output_directory(arguments.out, record=arguments.record)
    target = output / f"{slug(environment)}.json"
    before = rows_to_keep(target, environment) if arguments.resume else []
    done = {(row["case"], row["variant"]) for row in before if row["status"] not in ("failed", "stopped")}

    def save(rows: list[dict[str, Any]]) -> None:
        write_results(target, {"environment": environment, "rows": merged(before, rows)})

    jobs = plan(cases, arguments.variants, device, quick=arguments.quick, done=done)
    seconds = estimated_seconds(jobs, speed, start_seconds)
    print(
        f"{', '.join(case.name for case in cases)}: about {seconds:.0f} s, by a first matmul of {speed / 1e9:,.0f} "
        f"GFLOP/s and a start of {start_seconds:.1f} s",
        file=sys.stderr,
        flush=True,
    )
    rows = collect(jobs, save, arguments.budget_seconds, arguments.limit_seconds)
    print(markdown({"environment": environment, "rows": rows}))
    print(f"written: {target}")
    try:
        print(*plot_directory(output))
    except ImportError as error:
        print(f"no picture: {error}")
    # A peer that fails is a finding, and its row says so.
    if any(row["variant"] == OURS and row["status"] in ("failed", "stopped", "wrong") for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
