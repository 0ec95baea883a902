"""What the commands of benchmarks with a table of their own have in common."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmark.environment import describe, output_directory, slug, write_results


def parser_of(name: str, doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m benchmark.{name}", description=doc.splitlines()[0])
    parser.add_argument("--output", type=Path, metavar="DIR", help="where to write; default: benchmark/results on CUDA")
    return parser


def write(prefix: str, results: dict[str, Any], output: Path | None, markdown: Callable[[dict[str, Any]], str]) -> Path:
    """Write and print; -> the file of the results."""
    environment = results["environment"]
    target = output_directory(output, whole=environment["device"] == "cuda") / f"{prefix}{slug(environment)}.json"
    write_results(target, results)
    print(markdown(results))
    print(f"written: {target}")
    return target


def run(
    name: str,
    doc: str,
    prefix: str,
    measure: Callable[[str], dict[str, Any]],  # device -> results without their environment
    markdown: Callable[[dict[str, Any]], str],
) -> None:
    arguments = parser_of(name, doc).parse_args()
    environment = describe("auto")
    write(prefix, {"environment": environment} | measure(environment["device"]), arguments.output, markdown)
