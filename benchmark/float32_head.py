"""A float32 head beside bfloat16 hidden states: `python -m benchmark.float32_head`.

One target of each token and one gradient for each. Ways:

bfloat16 head           the weight rounded to bfloat16; its errors are against that weight
bf16x2, bf16x3          the float32 weight as two or three bfloat16 matrices
float32 products        `compute_dtype=torch.float32` alone
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmark.environment import describe, output_directory, slug, write_results
from benchmark.table import Columns, environment_line, markdown_table, number
from benchmark.targets import COLUMNS, Problem, Values, Way, make_problem, measure
from liger_rl import linear_logprobs

PREFIX = "float32_head-"
SHAPES = {  # N, V, H
    "cuda": ((8192, 151936, 1024), (8192, 151936, 2048), (8192, 128256, 4096)),
    "cpu": ((64, 500, 16),),  # to see that everything runs
}
BASE = "liger_rl, bfloat16 head"
FLOAT32 = torch.float32


def _way(**options: Any) -> Way:
    def logps(problem: Problem) -> Values:
        return Values(linear_logprobs(problem.hidden, problem.weight, problem.ids[:, 0], **options).logps[:, None])

    return logps


WAYS: dict[str, Way] = {
    BASE: _way(),
    "liger_rl, bf16x2": _way(compute_dtype=FLOAT32, precision="bf16x2"),
    "liger_rl, bf16x3": _way(compute_dtype=FLOAT32, precision="bf16x3"),
    "liger_rl, float32 products": _way(compute_dtype=FLOAT32),
}
TABLE: Columns = {"x bfloat16" if name == "x one target" else name: column for name, column in COLUMNS.items()}
TABLE |= {"x bfloat16": number("x_base", ".2f"), "RMS error, nats": number("rms_error", ".1e")}


def rows_of(shape: tuple[int, int, int], device: str) -> list[dict[str, Any]]:
    sizes = dict(zip(("tokens", "vocab", "hidden_size"), shape, strict=True))
    rows = []
    for name, way in WAYS.items():
        dtype = torch.bfloat16 if name == BASE else FLOAT32
        row = measure(way, make_problem(*shape, device, dtype).of(1), device)
        base = rows[0]["step_ms"] if rows else row["step_ms"]
        rows.append(sizes | {"variant": name, **row, "x_base": row["step_ms"] / base})
    return rows


def markdown(results: dict[str, Any]) -> str:
    lines = [(f"H = {row['hidden_size']}: {row['variant']}", row) for row in results["rows"]]
    return f"{environment_line(results['environment'], ())}\n\n{markdown_table(TABLE, lines)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.float32_head", description=__doc__)
    parser.add_argument("--output", type=Path, metavar="DIR", help="where to write; default: benchmark/results on CUDA")
    arguments = parser.parse_args()
    environment = describe("auto")
    device = environment["device"]
    results = {"environment": environment, "rows": [row for shape in SHAPES[device] for row in rows_of(shape, device)]}
    target = output_directory(arguments.output, whole=device == "cuda") / f"{PREFIX}{slug(environment)}.json"
    write_results(target, results)
    print(markdown(results))
    print(f"written: {target}")


if __name__ == "__main__":
    main()
