"""A whole training step beside TRL's: `python -m benchmark.step`.

Forward, loss, backward, clipping and AdamW, of rollouts that are there already: eight completions of each of four
prompts. About 40% of the padded batch is padding, and a quarter of the groups has no advantage. All ways share one
model, its optimizer, gradient checkpointing, SDPA attention, autocast and the old policy's log-probabilities. They take
turns. Losses and gradients' norms must agree. The head's cost depends on the policy, so the model learns a text first
(`benchmark.step_runs`); its entropy is among the results.

full logits         TRL's trainer with the logits of all completion positions, in float32, as accelerate returns them
TRL                 its GRPOTrainer with its defaults
TRL, patch_trl()    the same with this library's head, with its defaults
policy_step         the step by this library; with trim=False and idle="backward", all of the padded batch
policy_steps        the same in micro-batches; with metrics="with_entropy", it logs the entropy as TRL always does

On a GPU two shapes take about four minutes. `--shapes llama-3-8b` needs most of 139 GiB, and minutes more, as
`--longest` does.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmark.environment import (
    add_output_options,
    describe,
    first_line,
    output_directory,
    read_results,
    slug,
    write_results,
)
from benchmark.memory import PeakMemory
from benchmark.merge import differences
from benchmark.table import Columns, Row, environment_line, markdown_table, number
from benchmark.timing import once_ms
from liger_rl.engines.sparse import lists

if TYPE_CHECKING:  # it imports TRL, which the tables do not need
    from benchmark.step_runs import Batch, Runner

PREFIX = "step-"
NAMES = ("qwen3-0.6b", "qwen3-1.7b", "llama-3-8b", "toy")
DEFAULT = {"cuda": NAMES[:2], "cpu": NAMES[-1:]}
MOST_NATS = 1.5  # of the policy's entropy
# Of the loss in shares of its scale, the mean |advantage|, and of the gradient's norm in shares of TRL's. Logits and
# hidden states in bfloat16 move a token's log-probability by some hundredths.
TOLERANCE = {"float32": (1e-5, 1e-3), "bfloat16": (1e-2, 5e-2)}


def measure(name: str, device: str, *, longest: float | None) -> tuple[dict[str, Any], list[Row]]:
    """One shape: what its batch and its policy are, and a row of each way."""
    from benchmark.step_runs import SHAPES, Runner

    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(SHAPES[name], device, folder)
        rows = [{"shape": name, "variant": way, **first_steps(runner, way, device)} for way in runner.ways]
        about = description(runner)
        timed = [row for row in rows if row["status"] == "ok"]
        for row, times in zip(timed, in_turns(runner, [row["variant"] for row in timed], device), strict=True):
            row["step_ms"] = statistics.median(times)
            row["tokens_per_s"] = about["counted_tokens"] / row["step_ms"] * 1e3
        compare(rows)
        for row in timed if longest is not None else ():
            with runner.around(row["variant"]):
                row |= longest_batch(runner, runner.ways[row["variant"]], longest)
    return about, rows


def first_steps(runner: "Runner", way: str, device: str) -> Row:
    """One step that may compile, one whose memory is measured -> {"status": "ok", ...} or {"status", "reason"}."""
    try:
        with runner.around(way):
            runner.step(runner.ways[way], runner.batch)
            with kept_shares() as shares, PeakMemory(device) as memory:
                loss, norm = runner.step(runner.ways[way], runner.batch)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        runner.optimizer.zero_grad()
        return {"status": "failed", "reason": f"{type(error).__name__}: {first_line(error)}"}
    return {
        "status": "ok",
        "reason": None,
        "loss": loss.item(),
        "grad_norm": norm.item(),
        # Weights and the optimizer's state included, which is what has to fit.
        "peak_mib": (memory.base + memory.peak_bytes) / 2**20,
        "kept_share": statistics.mean(shares) if shares else None,
    }


@contextmanager
def kept_shares() -> Iterator[list[float]]:
    """-> a list that grows by the share of parts that each backward with a tolerance keeps."""
    shares: list[float] = []
    plan_parts = lists.plan_parts

    def recorded(*given: Any, **options: Any) -> Any:
        plan = plan_parts(*given, **options)
        shares.append(plan.share)
        return plan

    lists.plan_parts = recorded
    try:
        yield shares
    finally:
        lists.plan_parts = plan_parts


def in_turns(runner: "Runner", ways: list[str], device: str) -> list[list[float]]:
    """Milliseconds of each way's steps; a GPU's clock depends on what ran before, so that none runs in a row."""

    def timed(way: str) -> float:
        with runner.around(way):
            return once_ms(lambda: runner.step(runner.ways[way], runner.batch), device)

    rounds = [[timed(way) for way in ways] for _ in range(runner.shape.repeats)]
    return [list(times) for times in zip(*rounds, strict=True)]


def description(runner: "Runner") -> dict[str, Any]:
    """Of the batch and the policy, whose entropy is what TRL logs."""
    from benchmark.step_runs import TRL

    batch, shape = runner.batch, runner.shape
    sequences, length = batch["completion_mask"].shape[0], shape.prompt + shape.completion
    attended = (batch["prompt_mask"].sum() + batch["completion_mask"].sum()).item()
    runner.step(runner.ways[TRL], batch)
    with kept_shares() as shares:
        runner.step(lambda batch: runner.ours(batch, runner.loss(grad_tolerance=3e-4)), batch)
    return {
        "dtype": shape.dtype,
        "sequences": sequences,
        "groups": shape.groups,
        "row_tokens": length,
        "padding_share": 1 - attended / (sequences * length),
        "counted_tokens": batch["completion_mask"].sum().item(),
        "idle_share": (batch["advantages"] == 0).double().mean().item(),
        "mean_advantage": batch["advantages"].abs().mean().item(),
        "parameters": sum(p.numel() for p in runner.model.parameters()),
        "entropy": runner.entropy,
        "kept_share_3e-4": statistics.mean(shares) if shares else None,
        "surprise": runner.surprise,
        "training_steps": len(runner.policy.entropies),
        "text_tokens": runner.policy.text.numel(),
        "text_ids": runner.policy.text.unique().numel(),
    }


def compare(rows: list[Row]) -> None:
    """Adds each row's tokens per second over TRL's, and its loss less TRL's."""
    from benchmark.step_runs import TRL

    (trl,) = (row for row in rows if row["variant"] == TRL)
    for row in rows:
        if row["status"] == trl["status"] == "ok":
            row["tokens_x_trl"] = row["tokens_per_s"] / trl["tokens_per_s"]
            row["loss_difference"] = row["loss"] - trl["loss"]
            row["grad_norm_x_trl"] = row["grad_norm"] / trl["grad_norm"]


def objections(about: dict[str, Any], rows: list[Row]) -> list[str]:
    """Why a shape's numbers must not be used."""
    of_loss, of_norm = TOLERANCE[about["dtype"]]
    found = []
    if not about["entropy"] < MOST_NATS:
        found.append(f"the policy's entropy is {about['entropy']:.2f} nats, not under {MOST_NATS}")
    for row in rows:
        name = f"{row['shape']}, {row['variant']}"
        if row["status"] != "ok":
            continue
        if not abs(row["loss_difference"]) <= of_loss * about["mean_advantage"]:
            found.append(f"{name}: the loss is {row['loss']:.6f}, TRL's is {row['loss'] - row['loss_difference']:.6f}")
        if not abs(row["grad_norm_x_trl"] - 1) <= of_norm:
            found.append(f"{name}: the gradient's norm is {row['grad_norm_x_trl']:.4f} x TRL's")
    return found


def longest_batch(runner: "Runner", way: "Callable[[Batch], Tensor]", seconds: float) -> Row:
    """The most sequences whose step fits: the batch twice, four times, ..., until a step takes `seconds`."""
    from benchmark.step_runs import repeated

    times, fits, spent = 1, 0, 0.0
    while spent < seconds:
        batch = repeated(runner.batch, times)
        begun = time.monotonic()
        try:
            runner.step(way, batch)[0].item()
        except torch.OutOfMemoryError:
            break
        spent = time.monotonic() - begun
        fits, times = batch["advantages"].shape[0], 2 * times
    else:
        return {"longest_sequences": fits, "longest_limit": "time"}
    # Only here, where the error and its traceback are gone, does what it held go.
    runner.optimizer.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    return {"longest_sequences": fits, "longest_limit": "memory"}


def _longest(row: Row) -> str:
    count = row.get("longest_sequences")
    return "" if count is None else f"{'' if row['longest_limit'] == 'memory' else '>= '}{count:,}"


COLUMNS: Columns = {
    "ms": number("step_ms", ",.1f"),
    "tokens/s": number("tokens_per_s", ",.0f"),
    "x TRL": number("tokens_x_trl", ".2f"),
    "peak MiB": number("peak_mib", ",.0f"),
    "kept": number("kept_share", ".1%"),
    "loss": number("loss", ".5f"),
    "sequences that fit": _longest,
}


def title(name: str, about: dict[str, Any]) -> str:
    parts = [
        f"{name}: {about['sequences']} completions of {about['groups']} prompts, {about['row_tokens']} tokens a row",
        f"{about['padding_share']:.0%} padding",
        f"{about['counted_tokens']:,} tokens count",
        f"{about['idle_share']:.0%} of sequences without advantage",
        about["dtype"],
        f"entropy {about['entropy']:.2f} nats",
    ]
    if about.get("kept_share_3e-4") is not None:  # not in results of earlier engines
        parts.append(f"{about['kept_share_3e-4']:.1%} of the head's parts kept at 3e-4")
    return ", ".join(parts)


def markdown(results: dict[str, Any]) -> str:
    """What `main` writes -> a line on where it was measured and a table per shape."""
    blocks = [environment_line(results["environment"], ("trl", "transformers"))]
    for name, group in groupby(results["rows"], key=lambda row: row["shape"]):
        rows = list(group)
        columns = {column: cell for column, cell in COLUMNS.items() if any(cell(row) for row in rows)}
        table = markdown_table(columns or COLUMNS, [(row["variant"], row) for row in rows])
        blocks.append(f"**{title(name, results['shapes'][name])}**\n\n{table}")
    return "\n\n".join(blocks) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument(
        "--longest",
        type=float,
        metavar="SECONDS",
        help="also search for the most sequences that fit, by doubling them until a step takes so long",
    )
    add_output_options(parser)
    arguments = parser.parse_args()
    environment = describe("auto")
    device = environment["device"]
    names = arguments.shapes or DEFAULT[device]
    results: dict[str, Any] = {"environment": environment, "shapes": {}, "rows": []}
    wrong = []
    for name in names:
        about, rows = measure(name, device, longest=arguments.longest)
        results["shapes"][name] = about
        results["rows"] += rows
        wrong += objections(about, rows)
        gc.collect()
    print(markdown(results))
    folder = output_directory(arguments.out, record=arguments.record and not wrong)
    target = folder / f"{PREFIX}{slug(environment)}.json"
    write_results(target, with_earlier(results, target))
    print(f"written: {target}")
    if wrong:
        raise SystemExit("not to be used:\n" + "\n".join(wrong))


def with_earlier(results: dict[str, Any], target: Path) -> dict[str, Any]:
    """And the other shapes of an earlier run in the same environment."""
    before = read_results(target) if target.exists() else {"environment": {}}
    if differences(before["environment"], results["environment"]):
        return results
    rows = [row for row in before["rows"] if row["shape"] not in results["shapes"]] + results["rows"]
    shapes = before["shapes"] | results["shapes"]
    return {**results, "shapes": shapes, "rows": sorted(rows, key=lambda row: NAMES.index(row["shape"]))}


if __name__ == "__main__":
    main()
