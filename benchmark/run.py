"""Measure every variant on every case of a device, print a table, write results and plot: `python -m benchmark.run`."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmark.cases import GROUPS, Case, preset
from benchmark.environment import ROOT, output_directory, read_results, slug, write_results
from benchmark.merge import differences, merged
from benchmark.plot import plot_directory
from benchmark.table import markdown
from benchmark.variants import EVERYWHERE, LABELS, OURS
from benchmark.worker import Job, OutOfTime, Workers


def plan(
    cases: list[Case], variants: list[str] | None, device: str, *, quick: bool, done: Set[tuple[str, str]] = frozenset()
) -> list[Job]:
    """One job per case on CUDA. On CPU a process per variant, and memory has one to itself for its allocator's
    settings; --quick puts up with one for all. `variants` None is every case's own; `done` is left out."""
    jobs = []
    for case in cases:
        wanted = variants or case.variants or EVERYWHERE
        names = tuple(name for name in wanted if (case.name, name) not in done)
        if device == "cuda" or quick:
            jobs += [Job(case, names, device, case.quantities)] if names else []
            continue
        parts = [("memory",), tuple(q for q in case.quantities if q != "memory")]
        jobs += [Job(case, (name,), device, part, alone=True) for name in names for part in parts if part]
    return jobs


def collect(
    jobs: list[Job], save: Callable[[list[dict[str, Any]]], None], budget_seconds: float | None = None
) -> list[dict[str, Any]]:
    """-> one row per (case, variant), in the jobs' order; `save` is given the rows so far after every result.

    What `budget_seconds` leaves no time for has no row.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    with Workers(None if budget_seconds is None else time.monotonic() + budget_seconds) as workers:
        try:
            for job in jobs:
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
                    print(f"{what}: {row['status']}, {seconds:.0f} s", file=sys.stderr, flush=True)
                    begun = time.perf_counter()
        except OutOfTime:
            print(f"stopped: the budget of {budget_seconds:.0f} s is spent", file=sys.stderr, flush=True)
    return list(rows.values())


def _new_row(case: Case, variant: str) -> dict[str, Any]:
    # Not the folder of a policy, which is the machine's.
    fields = {key: value for key, value in case.to_dict().items() if key not in ("name", "policy", "variants")}
    return {
        "case": case.name,
        "variant": variant,
        "status": "ok",
        "reason": None,
        **fields,
        "rows": case.rows,
        "live_rows": case.live_rows,
    }


def detect(device: str) -> dict[str, Any]:
    """The environment, asked of another process: this one must not hold the device."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmark.environment", device], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


def rows_to_keep(target: Path, environment: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of an earlier run, refused if it was not of the same environment: a file holds one."""
    if not target.exists():
        return []
    before = read_results(target)
    differs = differences(before["environment"], environment)
    if differs:
        raise SystemExit(f"--append: {target} was measured with another {', '.join(differs)}")
    return before["rows"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmark.run", description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that everything runs")
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["*"],
        metavar="GLOB",
        help=f"only cases whose names or groups ({', '.join(GROUPS)}) match",
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=tuple(LABELS),
        metavar="NAME",
        help=f"of {', '.join(LABELS)}; default: the case's",
    )
    parser.add_argument("--policy", type=Path, metavar="DIR", help="what benchmark.real_policy wrote, for its cases")
    parser.add_argument(
        "--budget-seconds", type=float, metavar="S", help="begin nothing after S seconds; what is left has no rows"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="where to write; default: benchmark/results for a whole run, a temporary folder for a part of one",
    )
    parser.add_argument(
        "--append",
        action="store_true",
        help="keep the rows that --output already has of other cases, if device, versions and commit are the same",
    )
    parser.add_argument(
        "--resume", action="store_true", help="as --append, and leave out what --output has numbers or a reason for"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    environment = detect(arguments.device)
    device = environment["device"]
    policy = None if arguments.policy is None else str(arguments.policy.resolve())
    everything = preset(device, quick=arguments.quick, policy=policy)
    cases = preset(device, quick=arguments.quick, patterns=tuple(arguments.cases), policy=policy)
    if not cases:
        raise SystemExit(f"--cases {' '.join(arguments.cases)}: none of {[case.name for case in everything]}")
    whole = not arguments.quick and len(cases) == len(everything) and arguments.variants is None
    output = output_directory(arguments.output, whole=whole)
    target = output / f"{slug(environment)}.json"
    before = rows_to_keep(target, environment) if arguments.append or arguments.resume else []
    done = {(row["case"], row["variant"]) for row in before if row["status"] != "failed"} if arguments.resume else set()

    def save(rows: list[dict[str, Any]]) -> None:
        write_results(target, {"environment": environment, "rows": merged(before, rows)})

    jobs = plan(cases, arguments.variants, device, quick=arguments.quick, done=done)
    rows = collect(jobs, save, arguments.budget_seconds)
    print(markdown({"environment": environment, "rows": rows}))
    print(f"written: {target}")
    try:
        print(*plot_directory(output))
    except ImportError as error:
        print(f"no picture: {error}")
    # A peer that fails is a finding, and its row says so.
    if any(row["variant"] == OURS and row["status"] in ("failed", "wrong") for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
