"""Measure every variant on every case of a device, print a table, write results and plot: `python -m benchmark.run`."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmark.cases import Case, preset
from benchmark.environment import ROOT, slug
from benchmark.peers import BASELINE, LABELS, OURS
from benchmark.plot import RESULTS, plot_directory
from benchmark.table import COLUMNS, by_case, cells, title

PROCESS_TIMEOUT_S = 240

# For the environment of a process that measures host memory: with these, freed blocks go back to the system at once
# and the high-water mark is what was in use together. They cost page faults, so times are taken without them.
HOST_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(64 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 10),
}


# Of an environment, what may change while its numbers stay comparable.
PASSING = ("date", "load_average")


@dataclass(frozen=True)
class Job:
    """What one process measures."""

    case: Case
    variant: str
    device: str
    quantities: tuple[str, ...]

    def run(self) -> dict[str, Any]:
        """-> the process's result, or why it has none."""
        request = {
            "case": self.case.to_dict(),
            "variant": self.variant,
            "device": self.device,
            "quantities": self.quantities,
        }
        environment = dict(os.environ)
        if self.device == "cpu" and "memory" in self.quantities:
            environment |= HOST_ENVIRONMENT
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmark.measure"],
                input=json.dumps(request),
                capture_output=True,
                text=True,
                cwd=ROOT,
                env=environment,
                timeout=PROCESS_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return {"status": "failed", "reason": f"took longer than {PROCESS_TIMEOUT_S} s"}
        if done.returncode < 0:
            return {
                "status": "failed",
                "reason": f"killed by signal {-done.returncode} (9 is what lack of memory does)",
            }
        try:
            result = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, json.JSONDecodeError):
            sys.stderr.write(done.stderr)
            return {"status": "failed", "reason": f"exit status {done.returncode} without a result"}
        if result["status"] == "failed":
            sys.stderr.write(done.stderr)
        return result


def plan(cases: list[Case], variants: list[str], device: str, *, quick: bool) -> list[Job]:
    """On CPU memory has a process to itself, for the allocator's settings; --quick puts up with theirs."""
    jobs = []
    for case in cases:
        together = device == "cuda" or quick
        parts = [case.quantities] if together else [("memory",), tuple(q for q in case.quantities if q != "memory")]
        jobs += [Job(case, variant, device, part) for variant in variants for part in parts if part]
    return jobs


def collect(jobs: list[Job], console: Console, save: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """-> one row per (case, variant), in the jobs' order; `save` is given the rows so far after every process."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(jobs))
        for job in jobs:
            what = f"{job.case.name}: {LABELS[job.variant]}, {' and '.join(job.quantities)}"
            progress.update(task, description=what)
            begun = time.perf_counter()
            row = rows.setdefault((job.case.name, job.variant), _new_row(job))
            # A reason found by one process stands, whatever the next one finds.
            if row["status"] == "ok":
                row |= job.run()
            _compare_with_baseline(rows)
            save(list(rows.values()))
            progress.advance(task)
            if not console.is_terminal:
                # A log shows no bar, so it gets a line as each process ends.
                print(f"{what}: {row['status']}, {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    return list(rows.values())


def _compare_with_baseline(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    for row in rows.values():
        baseline = rows.get((row["case"], BASELINE), {}).get("peak_extra_mib")
        if baseline and row.get("peak_extra_mib") is not None:
            row["peak_extra_of_eager"] = row["peak_extra_mib"] / baseline


def _new_row(job: Job) -> dict[str, Any]:
    case = job.case
    fields = {key: value for key, value in case.to_dict().items() if key != "name"}
    return {
        "case": case.name,
        "variant": job.variant,
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
        table = Table(title=title(group[0]), title_justify="left", title_style="bold")
        table.add_column("variant", no_wrap=True)
        for name in COLUMNS:
            table.add_column(name, justify="right")
        notes = []
        for row in group:
            label = LABELS[row["variant"]]
            if row["status"] == "ok":
                table.add_row(label, *cells(row))
            else:
                table.add_row(label, f"{row['status']}")
                notes.append(f"{label}: {row['reason']}")
        if notes:
            table.caption = "; ".join(notes)
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
    differs = [k for k, v in environment.items() if k not in PASSING and before["environment"].get(k) != v]
    if differs:
        raise SystemExit(f"--append: {target} was measured with another {', '.join(differs)}")
    return before["rows"]


def merged(before: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Earlier rows and new ones, which win; variants in their usual order within a case."""
    both = {(row["case"], row["variant"]): row for row in before + rows}
    cases = list(dict.fromkeys(case for case, _variant in both))
    return sorted(both.values(), key=lambda row: (cases.index(row["case"]), list(LABELS).index(row["variant"])))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmark.run", description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that everything runs")
    parser.add_argument("--cases", default="*", metavar="GLOB", help="only cases whose names match")
    parser.add_argument("--variants", nargs="+", choices=tuple(LABELS), default=list(LABELS))
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
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    # A log has no width of its own, and 80 columns cut the numbers.
    console = Console() if sys.stdout.isatty() else Console(width=120)
    environment = detect(arguments.device)
    device = environment["device"]
    cases = preset(device, quick=arguments.quick, pattern=arguments.cases)
    if not cases:
        raise SystemExit(
            f"--cases {arguments.cases}: none of {[c.name for c in preset(device, quick=arguments.quick)]}"
        )
    whole = not arguments.quick and arguments.cases == "*" and set(arguments.variants) == set(LABELS)
    output = arguments.output or (RESULTS if whole else Path(tempfile.mkdtemp(prefix="liger-rl-benchmark-")))
    output.mkdir(parents=True, exist_ok=True)
    target = output / f"{slug(environment)}.json"
    before = rows_to_keep(target, environment) if arguments.append else []

    def save(rows: list[dict[str, Any]]) -> None:
        content = {"environment": environment, "rows": merged(before, rows)}
        target.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    rows = collect(plan(cases, arguments.variants, device, quick=arguments.quick), console, save)
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
