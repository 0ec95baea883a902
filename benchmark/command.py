"""What the commands of benchmarks with a table of their own have in common."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmark.environment import add_output_options, describe, output_directory, slug, write_results


def parser_of(name: str, doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m benchmark.{name}", description=doc.splitlines()[0])
    add_output_options(parser)
    return parser


def write(
    prefix: str,
    results: dict[str, Any],
    arguments: argparse.Namespace,  # of a `parser_of`
    markdown: Callable[[dict[str, Any]], str],
) -> Path:
    """Write and print; -> the file of the results."""
    folder = output_directory(arguments.out, record=arguments.record)
    target = folder / f"{prefix}{slug(results['environment'])}.json"
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
    write(prefix, {"environment": environment} | measure(environment["device"]), arguments, markdown)
