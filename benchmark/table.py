"""Results as tables: `python -m benchmark.table FILE` prints markdown."""

import json
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmark.cases import MIXED, STEP, TOKENS, VOCABULARY
from benchmark.environment import PACKAGES, package_key
from benchmark.variants import LABELS, VARIANTS

Row = dict[str, Any]


def _number(field: str, form: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = row.get(field)
        return "" if value is None else format(value, form)

    return cell


def _milliseconds(field: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = row.get(field)
        return "" if value is None else format(value, ",.0f" if value >= 100 else ".1f")

    return cell


COLUMNS: dict[str, Callable[[Row], str]] = {
    "fwd ms": _milliseconds("forward_ms"),
    "x GEMM": _number("forward_x_floor", ".2f"),
    "fwd+bwd ms": _milliseconds("step_ms"),
    "x floor": _number("step_x_floor", ".2f"),
    "x TRL": _number("step_x_trl", ".2f"),
    "extra MiB": _number("peak_extra_mib", ",.0f"),
    "of eager": _number("peak_extra_of_eager", ".1%"),
    "kept": _number("kept_share", ".0%"),
    "logp err": _number("logp_max_error", ".1e"),
    "entropy err": _number("entropy_max_error", ".1e"),
    "dH err": _number("grad_hidden_error", ".1e"),
    "dW err": _number("grad_weight_error", ".1e"),
}


def columns_of(rows: list[Row]) -> list[str]:
    """The columns that any of the rows has something in."""
    return [name for name, cell in COLUMNS.items() if any(cell(row) for row in rows)] or list(COLUMNS)[:1]


def cells(row: Row, columns: list[str]) -> list[str]:
    """One row's text, after its label; a row without numbers says why in the first cell."""
    texts = [COLUMNS[name](row) for name in columns]
    if row["status"] != "ok":
        texts[0] = f"{row['status']}: {row['reason']}"
    return texts


def notes(rows: list[Row]) -> list[str]:
    """What belongs beneath a table of the rows."""
    found = [VARIANTS[row["variant"]] for row in rows if row["status"] == "ok"]
    return [f"{variant.label}: {variant.note}." for variant in found if variant.note]


def title(row: Row) -> str:
    """A case in words."""
    parts = [f"{row['case']}: B={row['batch']}, T={row['tokens']}, H={row['hidden_size']}, V={row['vocab']}"]
    parts.append(row["dtype"])
    if row["mask_share"]:
        parts.append(f"{row['mask_share']:.0%} masked")
    if row["softcap"] is not None:
        parts.append(f"softcap {row['softcap']:g}")
    if row.get("temperature") is not None:
        parts.append(f"temperature {row['temperature']:g}")
    elif row.get("peaks", MIXED) != MIXED:
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


def by_case(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    return [(case, list(group)) for case, group in groupby(rows, key=lambda row: row["case"])]


def markdown(results: dict[str, Any], *, patterns: Sequence[str] = ("*",), sweeps: bool = True) -> str:
    """{"environment", "rows"} as written by `benchmark.run` -> a table per timed case, then one of each sweep.

    `patterns`: globs of the cases that are wanted.
    """
    cases = [rows for case, rows in by_case(results["rows"]) if any(fnmatch(case, p) for p in patterns)]
    blocks = [_environment(results["environment"])]
    for rows in (rows for rows in cases if "time" in rows[0]["quantities"]):
        columns = columns_of(rows)
        table = [[_label(row), *cells(row, columns)] for row in rows]
        blocks.append(f"**{title(rows[0])}**\n\n{_table(['', *columns], table)}")
        blocks += notes(rows)
    for axis, field in ((TOKENS, "N"), (VOCABULARY, "V")) if sweeps else ():
        sweep = [rows for rows in cases if axis in rows[0]["groups"]]
        if len(sweep) > 1:
            blocks.append(_sweep(sweep, axis, field))
    return "\n\n".join(blocks) + "\n"


SUMMARY = {
    "step ms": COLUMNS["fwd+bwd ms"],
    "x TRL": COLUMNS["x TRL"],
    "extra MiB": COLUMNS["extra MiB"],
    "logp error": COLUMNS["logp err"],
    "gradient error": COLUMNS["dW err"],
}


def summary(results: dict[str, Any], case: str, variants: Sequence[str]) -> str:
    """One table of the variants on a case, in a few columns."""
    rows = {row["variant"]: row for row in results["rows"] if row["case"] == case}
    lines = [[_label(rows[name]), *(cell(rows[name]) for cell in SUMMARY.values())] for name in variants]
    return f"{_environment(results['environment'])}\n\n{_table(['', *SUMMARY], lines)}\n"


def _sweep(sweep: list[list[Row]], axis: str, field: str) -> str:
    size = (lambda row: row["vocab"]) if axis == VOCABULARY else (lambda row: row["rows"])
    sweep = sorted(sweep, key=lambda rows: size(rows[0]))
    first = sweep[0][0]
    fixed = f"N={first['rows']}" if axis == VOCABULARY else f"V={first['vocab']}"
    variants = list(dict.fromkeys(row["variant"] for rows in sweep for row in rows))
    lines = []
    for rows in sweep:
        found = {row["variant"]: _extra(row) for row in rows}
        lines.append([f"{size(rows[0]):,}", *(found.get(variant, "") for variant in variants)])
    heading = f"**Peak extra MiB against {axis}, {fixed}, H={first['hidden_size']}, {first['dtype']}**"
    return f"{heading}\n\n{_table([field, *(LABELS[v] for v in variants)], lines)}"


def _extra(row: Row) -> str:
    return COLUMNS["extra MiB"](row) if row["status"] == "ok" else row["status"]


def _label(row: Row) -> str:
    return LABELS[row["variant"]]


def _environment(environment: dict[str, Any]) -> str:
    def versions() -> str:
        named = ("torch", "triton", *PACKAGES, "driver")
        return ", ".join(f"{name} {environment[key]}" for name in named if environment.get(key := package_key(name)))

    commit = environment["commit"][:10] + (" with local changes" if environment["dirty"] else "")
    device = environment["device_name"]
    if environment["device"] == "cpu":
        device = f"{device}, {environment['threads']} threads"
    return f"{device}; {versions()}; commit {commit}; {environment['date']}."


def _table(header: list[str], lines: list[list[str]]) -> str:
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), end="")
