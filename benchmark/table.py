"""Results as tables: `python -m benchmark.table FILE` prints markdown."""

import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmark.cases import MIXED, STEP
from benchmark.environment import PACKAGES, package_key, read_results
from benchmark.variants import LABELS

Row = dict[str, Any]
Columns = dict[str, Callable[[Row], str]]


def number(field: str, form: str, scale: float = 1.0) -> Callable[[Row], str]:
    """A column's cells: the field, formatted, or nothing."""

    def cell(row: Row) -> str:
        value = row.get(field)
        return "" if value is None else format(value * scale, form)

    return cell


def _milliseconds(field: str) -> Callable[[Row], str]:
    return lambda row: number(field, ",.0f" if (row.get(field) or 0.0) >= 100 else ".1f")(row)


COLUMNS: Columns = {
    "fwd ms": _milliseconds("forward_ms"),
    "x GEMM": number("forward_x_floor", ".2f"),
    "fwd+bwd ms": _milliseconds("step_ms"),
    "x floor": number("step_x_floor", ".2f"),
    "x TRL": number("step_x_trl", ".2f"),
    "extra MiB": number("peak_extra_mib", ",.0f"),
    "of eager": number("peak_extra_of_eager", ".1%"),
    "logp err": number("logp_max_error", ".1e"),
    "entropy err": number("entropy_max_error", ".1e"),
    "dH err": number("grad_hidden_error", ".1e"),
    "dW err": number("grad_weight_error", ".1e"),
}


def columns_of(rows: list[Row]) -> Columns:
    """The columns that any of the rows has something in."""
    found = {name: cell for name, cell in COLUMNS.items() if any(cell(row) for row in rows)}
    return found or {"fwd ms": COLUMNS["fwd ms"]}


def markdown_table(columns: Columns, rows: list[tuple[str, Row]]) -> str:
    """Of labelled rows; a row without numbers says why in the first cell."""
    lines = [["", *columns], ["---", *("---:" for _ in columns)]]
    for name, row in rows:
        texts = [cell(row) for cell in columns.values()]
        if row["status"] != "ok":
            texts[0] = f"{row['status']}: {row['reason']}".replace("|", "\\|")
        lines.append([name, *texts])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def title(row: Row) -> str:
    """Of a case's table."""
    parts = [f"{row['case']}: B={row['batch']}, T={row['tokens']}, H={row['hidden_size']}, V={row['vocab']}"]
    parts.append(row["dtype"])
    if row["mask_share"]:
        parts.append(f"{row['mask_share']:.0%} masked")
    if row["softcap"] is not None:
        parts.append(f"softcap {row['softcap']:g}")
    if row.get("peaks", MIXED) != MIXED:
        parts.append(f"{row['peaks']} policy")
    if row.get("idle_share"):
        parts.append(f"{row['idle_share']:.0%} of sequences without advantage")
    if row.get("task", STEP) != STEP:
        parts.append(f"{row['task']} without gradient")
    elif row.get("beta") == 0.0:
        parts.append("no KL")
    if row.get("frozen"):
        parts.append("frozen head")
    return ", ".join(parts)


def markdown(results: dict[str, Any], *, patterns: Sequence[str] = ("*",), timed: bool = False) -> str:
    """{"environment", "rows"} as written by `benchmark.run` -> a table per case.

    `patterns`: globs of the cases that are wanted. `timed`: only those whose time was measured. A variant that is not
    available for a case has no row in its table. One line above the tables says why.
    """
    blocks: list[str] = []
    reasons: dict[str, list[str]] = {}
    for case, group in groupby(results["rows"], key=lambda row: row["case"]):
        rows = list(group)
        if any(fnmatch(case, p) for p in patterns) and ("time" in rows[0]["quantities"] or not timed):
            for row in rows:
                if row["status"] == "unavailable":
                    reasons.setdefault(LABELS[row["variant"]], []).append(row["reason"])
            tried = [row for row in rows if row["status"] != "unavailable"]
            table = markdown_table(columns_of(tried), [(LABELS[row["variant"]], row) for row in tried])
            blocks.append(f"**{title(rows[0])}**\n\n{table}")
    missing = [f"{label} ({', '.join(dict.fromkeys(texts))})" for label, texts in reasons.items()]
    above = [f"Not in every table: {'; '.join(missing)}."] if missing else []
    return "\n\n".join([environment_line(results["environment"]), *above, *blocks]) + "\n"


def brief(results: dict[str, Any]) -> str:
    """One table of milliseconds: a row for each timed case, a column for each variant, forward alone without a step."""
    lines: dict[str, Row] = {}
    for row in results["rows"]:
        if "time" in row["quantities"]:
            name = f"{row['case']}: H = {row['hidden_size']}, V = {row['vocab']}"
            line = lines.setdefault(name, {"status": "ok"})
            line[row["variant"]] = row.get("step_ms") or row.get("forward_ms")
    measured = dict.fromkeys(name for line in lines.values() for name, ms in line.items() if ms and name != "status")
    columns = {LABELS[name]: _milliseconds(name) for name in measured}
    return f"{environment_line(results['environment'])}\n\n{markdown_table(columns, list(lines.items()))}\n"


def gradient_error(row: Row) -> float | None:
    """The larger of the two gradients'."""
    return max((row.get("grad_hidden_error") or 0.0, row.get("grad_weight_error") or 0.0)) or None


def format_percent(share: float | None) -> str:
    """Two digits, such as 15% and 0.24%."""
    return "" if share is None else f"{100 * share:.2g}%"


def environment_line(
    environment: dict[str, Any], packages: Sequence[str] = PACKAGES, *, has_commit: bool = True
) -> str:
    """`has_commit`: False where the rows name their own."""
    named = ("torch", "triton", *packages, "driver")
    versions = ", ".join(f"{name} {environment[key]}" for name in named if environment.get(key := package_key(name)))
    commit = environment["commit"][:10] + (" with local changes" if environment["dirty"] else "")
    device = environment["device_name"]
    if environment["device"] == "cpu":
        device = f"{device}, {environment['threads']} thread{'s' if environment['threads'] > 1 else ''}"
    return f"{device}; {versions}; {f'commit {commit}; ' if has_commit else ''}{environment['date']}."


if __name__ == "__main__":
    print(markdown(read_results(Path(sys.argv[1]))), end="")
