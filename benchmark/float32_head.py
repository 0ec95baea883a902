"""A float32 head beside bfloat16 hidden states: `python -m benchmark.float32_head`.

One target of each token and one gradient for each. Errors are against float64 with the weight that is given. Ways:

bfloat16 head        the weight rounded to bfloat16 before
under autocast       the float32 weight in bfloat16 products
bf16x2, bf16x3       the float32 weight as two or three bfloat16 matrices
TF32, IEEE           float32 products
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmark.command import run
from benchmark.table import Columns, environment_line, markdown_table, number
from benchmark.targets import COLUMNS, Problem, Values, Way, make_problem, measure
from benchmark.timing import measure_ms
from liger_rl import linear_logprobs

PREFIX = "float32_head-"
SHAPES = {  # N, V, H
    "cuda": ((8192, 128256, 4096), (8192, 128256, 1024)),
    "cpu": ((64, 500, 16),),  # to see that everything runs
}
ROUNDED, TF32, FLOAT32 = "liger_rl, bfloat16 head", "liger_rl, TF32", torch.float32
EXACT = {"grad_tolerance": 0.0}
WAYS: dict[str, dict[str, Any]] = {  # options of `linear_logprobs`
    ROUNDED: EXACT,
    "liger_rl, under autocast": EXACT | {"compute_dtype": torch.bfloat16},
    "liger_rl, under autocast, 3e-4": {"compute_dtype": torch.bfloat16, "grad_tolerance": 3e-4},
    "liger_rl, bf16x2": {"compute_dtype": FLOAT32, "precision": "bf16x2"},
    "liger_rl, bf16x3": {"compute_dtype": FLOAT32, "precision": "bf16x3"},
    TF32: {"compute_dtype": FLOAT32},
    "liger_rl, IEEE": {"compute_dtype": FLOAT32},
}
TABLE: Columns = {"forward ms": number("forward_ms", ".1f")}
TABLE |= {"x bfloat16" if name == "x one target" else name: column for name, column in COLUMNS.items()}
TABLE |= {"x bfloat16": number("x_base", ".2f"), "RMS error, nats": number("rms_error", ".1e")}


def _way(options: dict[str, Any]) -> Way:
    def logps(problem: Problem) -> Values:
        return Values(linear_logprobs(problem.hidden, problem.weight, problem.ids[:, 0], **options).logps[:, None])

    return logps


@contextmanager
def _products(name: str) -> Iterator[None]:
    """In which torch rounds float32 factors to TF32, or does not."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == TF32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def rows_of(shape: tuple[int, int, int], device: str) -> list[dict[str, Any]]:
    sizes = dict(zip(("tokens", "vocab", "hidden_size"), shape, strict=True))
    rows: list[dict[str, Any]] = []
    for name, options in WAYS.items():
        problem = make_problem(*shape, device, torch.bfloat16 if name == ROUNDED else FLOAT32).of(1)
        way = _way(options)
        with _products(name):
            row = measure(way, problem, device)
            forward_ms, _ = measure_ms(lambda way=way, problem=problem: way(problem), device)
        base = rows[0]["step_ms"] if rows else row["step_ms"]
        rows.append(sizes | {"variant": name, **row, "forward_ms": forward_ms, "x_base": row["step_ms"] / base})
    return rows


def markdown(results: dict[str, Any]) -> str:
    lines = [(f"H = {row['hidden_size']}: {row['variant']}", row) for row in results["rows"]]
    return f"{environment_line(results['environment'], ())}\n\n{markdown_table(TABLE, lines)}\n"


def measure_all(device: str) -> dict[str, Any]:
    return {"rows": [row for shape in SHAPES[device] for row in rows_of(shape, device)]}


if __name__ == "__main__":
    run("float32_head", __doc__, PREFIX, measure_all, markdown)
