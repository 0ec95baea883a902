"""Measure every variant on every case of a device, print a table, write results and plot: `python -m benchmark.run`."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmark.cases import GROUPS, Case, preset
from benchmark.environment import ROOT, slug
from benchmark.merge import differences, merged
from benchmark.plot import RESULTS, plot_directory
from benchmark.table import by_case, cells, columns_of, notes, title
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
    jobs: list[Job],
    console: Console,
    save: Callable[[list[dict[str, Any]]], None],
    budget_seconds: float | None = None,
) -> list[dict[str, Any]]:
    """-> one row per (case, variant), in the jobs' order; `save` is given the rows so far after every result.

    What `budget_seconds` leaves no time for has no row.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    deadline = None if budget_seconds is None else time.monotonic() + budget_seconds
    with Progress(*columns, console=console) as progress, Workers(deadline) as workers:
        task = progress.add_task("", total=sum(len(job.variants) for job in jobs))
        try:
            for job in jobs:
                _collect_job(job, rows, workers, progress, task, save)
        except OutOfTime:
            print(f"stopped: the budget of {budget_seconds:.0f} s is spent", file=sys.stderr, flush=True)
    return list(rows.values())


def _collect_job(
    job: Job,
    rows: dict[tuple[str, str], dict[str, Any]],
    workers: Workers,
    progress: Progress,
    task: TaskID,
    save: Callable[[list[dict[str, Any]]], None],
) -> None:
    # A reason found by one process stands, whatever the next one finds.
    kept = [name for name in job.variants if rows.get((job.case.name, name), {"status": "ok"})["status"] == "ok"]
    progress.update(task, description=job.case.name, advance=len(job.variants) - len(kept))
    begun = time.perf_counter()
    for variant, result in workers.run(replace(job, variants=tuple(kept))):
        row = rows.setdefault((job.case.name, variant), _new_row(job.case, variant))
        row |= result
        save(list(rows.values()))
        what = f"{job.case.name}: {LABELS[variant]}, {' and '.join(job.quantities)}"
        progress.update(task, description=what, advance=1)
        if not progress.console.is_terminal:
            # A log shows no bar, so it gets a line for each result.
            print(f"{what}: {row['status']}, {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
        begun = time.perf_counter()


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
        "floor_flops": case.floor_flops,
        "recompute_flops": case.recompute_flops,
        "logits_mib": case.logits_bytes / 2**20,
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    for _case, group in by_case(rows):
        columns = columns_of(group)
        table = Table(title=title(group[0]), title_justify="left", title_style="bold")
        table.add_column("variant", no_wrap=True)
        for name in columns:
            table.add_column(name, justify="right")
        captions = []
        for row in group:
            label = LABELS[row["variant"]]
            if row["status"] == "ok":
                table.add_row(label, *cells(row, columns))
            else:
                table.add_row(label, f"{row['status']}")
                captions.append(f"{label}: {row['reason']}")
        captions += notes(group)
        if captions:
            table.caption = "; ".join(captions)
        console.print(table)


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
    before = json.loads(target.read_text(encoding="utf-8"))
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
        "--only",
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
    # A log has no width of its own, and 80 columns cut the numbers.
    console = Console() if sys.stdout.isatty() else Console(width=140)
    environment = detect(arguments.device)
    device = environment["device"]
    policy = None if arguments.policy is None else str(arguments.policy.resolve())
    everything = preset(device, quick=arguments.quick, policy=policy)
    cases = preset(device, quick=arguments.quick, patterns=tuple(arguments.cases), policy=policy)
    if not cases:
        raise SystemExit(f"--cases {' '.join(arguments.cases)}: none of {[case.name for case in everything]}")
    whole = not arguments.quick and len(cases) == len(everything) and arguments.variants is None
    output = arguments.output or (RESULTS if whole else Path(tempfile.mkdtemp(prefix="liger-rl-benchmark-")))
    output.mkdir(parents=True, exist_ok=True)
    target = output / f"{slug(environment)}.json"
    before = rows_to_keep(target, environment) if arguments.append or arguments.resume else []
    done = {(row["case"], row["variant"]) for row in before if row["status"] != "failed"} if arguments.resume else set()

    def save(rows: list[dict[str, Any]]) -> None:
        content = {"environment": environment, "rows": merged(before, rows)}
        target.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    jobs = plan(cases, arguments.variants, device, quick=arguments.quick, done=done)
    rows = collect(jobs, console, save, arguments.budget_seconds)
    show(rows, console)
    console.print(f"written: {target}", soft_wrap=True)
    try:
        console.print(*plot_directory(output), soft_wrap=True)
    except ImportError as error:
        console.print(f"no picture: {error}")
    # A peer that fails is a finding, and its row says so.
    if any(row["variant"] == OURS and row["status"] in ("failed", "wrong") for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
