"""A whole training step beside TRL's: `python -m benchmark.step`.

Forward, loss, backward, clipping, AdamW and TRL's log, of rollouts that are there already: eight completions of each of
four prompts. A quarter of the groups has no advantage. One batch has short prompts, and 40% of it is padding. The other
has prompts of 1,024 tokens, and completions of 512 on average. All ways run inside TRL's `GRPOTrainer.train()` with its
defaults, from the same weights, with gradient checkpointing, SDPA attention, autocast and the old policy's
log-probabilities. The learning rate is 0, so that each step is the same work. Losses and gradients' norms must agree.
The head's cost depends on the policy, so the model learns a text first (`benchmark.step_runs`); its entropy is among
the results.

full logits                       TRL with all completions' logits, in float32, as accelerate returns them
TRL                               TRL as it is
TRL, patch_trl(whole_step=False)  with this library's head alone
TRL, patch_trl()                  with this library's step
policy_steps                      this library's forwards and backwards, in micro-batches of so many tokens; with
                                  metrics="with_entropy", it computes the entropy as TRL always does

Milliseconds are medians of whole steps. `other ms` is what is neither forward nor backward. On a GPU two shapes take
about five minutes. `--shapes llama-3-8b` needs most of 139 GiB, and minutes more, as `--longest` does.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmark.environment import (
    add_output_options,
    describe,
    first_line,
    output_directory,
    read_results,
    slug,
    write_results,
)
from benchmark.merge import differences
from benchmark.table import Columns, Row, environment_line, markdown_table, number

if TYPE_CHECKING:  # it imports TRL, which the tables do not need
    from benchmark.step_runs import Batch, Lengths, Runner, Way

PREFIX = "step-"
NAMES = ("qwen3-0.6b", "qwen3-1.7b", "llama-3-8b", "toy")
DEFAULT = {"cuda": NAMES[:2], "cpu": NAMES[-1:]}
MOST_NATS = 1.5  # of the policy's entropy
# Of the loss in shares of its scale, the mean |advantage|, and of the gradient's norm in shares of TRL's. Logits and
# hidden states in bfloat16 move a token's log-probability by some hundredths.
TOLERANCE = {"float32": (1e-5, 1e-3), "bfloat16": (1e-3, 5e-2)}


def measure(name: str, device: str, *, longest: float | None, micro_batches: int) -> tuple[dict[str, Any], list[Row]]:
    """One shape: what its policy and its batches are, and a row of each way on each batch."""
    from benchmark.step_runs import SHAPES, Runner

    shape, rows = SHAPES[name], []
    gc.freeze()  # each run collects garbage several times, and so passes over what is there already
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(shape, device, folder, micro_batches=micro_batches)
        policy = runner.policy
        about: dict[str, Any] = {
            "dtype": shape.dtype,
            "micro_batches": micro_batches,  # of the trainer
            "parameters": policy.parameters,
            "training_steps": len(policy.entropies),
            "text_tokens": policy.text.numel(),
            "text_ids": policy.text.unique().numel(),
            "batches": {},
        }
        for label, lengths in shape.batches.items():
            batch, about["batches"][label] = runner.batch(lengths)
            of_batch = []
            for variant, way in runner.ways.items():
                row = {"shape": name, "batch": label, "variant": variant, **measured(runner, way, batch)}
                if row["status"] == "ok" and longest is not None:
                    row |= longest_batch(runner, way, lengths, longest)
                of_batch.append(row)
            compare(of_batch)
            rows += of_batch
    gc.unfreeze()
    return about, rows


def measured(runner: "Runner", way: "Way", batch: "Batch") -> Row:
    """One run of `train()` -> {"status": "ok", ...} or {"status", "reason"}."""
    try:
        clock, log = runner.train(way, batch)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return {"status": "failed", "reason": f"{type(error).__name__}: {first_line(error)}"}
    step_ms = statistics.median(clock.step_ms)
    return {
        "status": "ok",
        "reason": None,
        "loss": log["loss"],
        "grad_norm": log["grad_norm"],
        # Weights and the optimizer's state included, which is what has to fit.
        "peak_mib": (clock.memory.base + clock.memory.peak_bytes) / 2**20,
        "kept_share": statistics.mean(clock.shares) if clock.shares else None,
        "step_ms": step_ms,
        "other_ms": statistics.median(clock.other_ms),
        "steps": len(clock.step_ms),
        "tokens_per_s": batch["completion_mask"].sum().item() / step_ms * 1e3,
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
    """Why the numbers of a batch of a shape must not be used; `about` is as of `about_batch`."""
    of_loss, of_norm = TOLERANCE[about["dtype"]]
    found = []
    if not about["entropy"] < MOST_NATS:
        found.append(f"the policy's entropy is {about['entropy']:.2f} nats, not under {MOST_NATS}")
    for row in rows:
        name = f"{label(row)}, {row['variant']}"
        if "loss_difference" not in row:
            continue
        if not abs(row["loss_difference"]) <= of_loss * about["mean_advantage"]:
            found.append(f"{name}: the loss is {row['loss']:.6f}, TRL's is {row['loss'] - row['loss_difference']:.6f}")
        if not abs(row["grad_norm_x_trl"] - 1) <= of_norm:
            found.append(f"{name}: the gradient's norm is {row['grad_norm_x_trl']:.4f} x TRL's")
    return found


def longest_batch(runner: "Runner", way: "Way", lengths: "Lengths", seconds: float) -> Row:
    """The most sequences whose step fits: twice the groups, four times, ..., until a run of a step takes `seconds`."""
    from benchmark.step_runs import rollouts

    times, fits, spent, limit = 1, 0, 0.0, "time"
    while limit == "time" and spent < seconds:
        batch = rollouts(replace(lengths, groups=lengths.groups * times), runner.policy.text, runner.device)
        begun = time.monotonic()
        try:
            runner.train(way, batch, steps=1)
            fits, times = batch["advantages"].shape[0], 2 * times
        except torch.OutOfMemoryError:
            limit = "memory"
        spent = time.monotonic() - begun
    return {"longest_sequences": fits, "longest_limit": limit}


def _longest(row: Row) -> str:
    count = row.get("longest_sequences")
    return "" if count is None else f"{'' if row['longest_limit'] == 'memory' else '>= '}{count:,}"


COLUMNS: Columns = {
    "ms": number("step_ms", ",.1f"),
    "other ms": number("other_ms", ",.1f"),
    "tokens/s": number("tokens_per_s", ",.0f"),
    "x TRL": number("tokens_x_trl", ".2f"),
    "peak MiB": number("peak_mib", ",.0f"),
    "kept": number("kept_share", ".1%"),
    "loss": number("loss", ".5f"),
    "gradient norm": number("grad_norm", ".4f"),
    "sequences that fit": _longest,
}


def label(row: Row) -> str:
    """The shape and the batch; earlier results have one batch without a name."""
    return ", ".join(row[name] for name in ("shape", "batch") if name in row)


def about_batch(results: dict[str, Any], row: Row) -> dict[str, Any]:
    """What is known of the row's policy and batch."""
    about = results["shapes"][row["shape"]]
    return about | about["batches"][row["batch"]] if "batch" in row else about


def title(name: str, about: dict[str, Any]) -> str:
    parts = [
        f"{name}: {about['sequences']} completions of {about['groups']} prompts, {about['row_tokens']} tokens a row",
        f"{about['padding_share']:.0%} padding",
        f"{about['counted_tokens']:,} tokens count",
        f"{about['idle_share']:.0%} of sequences without advantage",
        about["dtype"],
        f"entropy {about['entropy']:.2f} nats",
    ]
    if about.get("micro_batches", 1) > 1:
        parts.append(f"{about['micro_batches']} micro-batches of TRL")
    if about.get("kept_share_3e-4") is not None:  # not in results of earlier engines
        parts.append(f"{about['kept_share_3e-4']:.1%} of the head's parts kept at 3e-4")
    return ", ".join(parts)


def summary(results: dict[str, Any]) -> str:
    """A row per shape and batch: TRL, and what two ways have of its tokens per second and of its memory."""
    from_trl: Columns = {"TRL, tokens/s": lambda row: f"{row['trl']['tokens_per_s']:,.0f}"}
    for way, name in {"TRL, patch_trl()": "patch_trl()", "policy_steps": "policy_steps"}.items():
        from_trl[f"`{name}`"] = lambda row, way=way: f"**{row[way]['tokens_x_trl']:.2f} x**"
        from_trl[f"`{name}`, memory"] = lambda row, way=way: f"{row[way]['peak_mib'] / row['trl']['peak_mib']:.2f} x"
    rows = []
    for name, group in groupby(results["rows"], key=label):
        by_way = {row["variant"].partition(", max_tokens")[0]: row for row in reversed(list(group))}
        rows.append((name, by_way | {"trl": by_way["TRL"], "status": "ok"}))
    line = environment_line(results["environment"], ("trl", "transformers"))
    return f"{line}\n\n{markdown_table(from_trl, rows)}\n"


def markdown(results: dict[str, Any], kind: str = "whole") -> str:
    """What `main` writes -> a line on where it was measured and a table per shape and batch; or "summary"."""
    if kind == "summary":
        return summary(results)
    blocks = [environment_line(results["environment"], ("trl", "transformers"))]
    for name, group in groupby(results["rows"], key=label):
        rows = list(group)
        columns = {column: cell for column, cell in COLUMNS.items() if any(cell(row) for row in rows)}
        table = markdown_table(columns or COLUMNS, [(row["variant"], row) for row in rows])
        blocks.append(f"**{title(name, about_batch(results, rows[0]))}**\n\n{table}")
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
        help="also search for the most sequences that fit, by doubling them until a run of a step takes so long",
    )
    parser.add_argument(
        "--micro-batches", type=int, choices=(1, 2, 4, 8), default=1, help="of TRL's trainer in a step; default 1"
    )
    add_output_options(parser)
    arguments = parser.parse_args()
    environment = describe("auto")
    device = environment["device"]
    names = arguments.shapes or DEFAULT[device]
    results: dict[str, Any] = {"environment": environment, "shapes": {}, "rows": []}
    for name in names:
        options = {"longest": arguments.longest, "micro_batches": arguments.micro_batches}
        results["shapes"][name], rows = measure(name, device, **options)
        results["rows"] += rows
    batches = [list(rows) for _, rows in groupby(results["rows"], key=label)]
    wrong = [objection for rows in batches for objection in objections(about_batch(results, rows[0]), rows)]
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
