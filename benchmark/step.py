"""A whole training step beside TRL's: `python -m benchmark.step`.

Forward, loss, backward, clipping, AdamW and TRL's log, inside TRL's own trainers with their defaults, with SDPA
attention and gradient checkpointing. Batches, `--batches`:

"short prompts", "long prompts"        GRPO, 32 completions of 4 prompts; the policy has learnt a text
                                       (`benchmark.step_policy`)
window, "window 8k"                    GRPO, 4 micro-batches of 8, prompts up to 512 tokens and completions up to 2,048
                                       or 8,192, more than half padding; random weights
"window 32k"                           GRPO, 4 micro-batches of 2 completions of one prompt, up to 32,768 tokens
"default group"                        GRPO with the group, the micro-batch and the lengths that are GRPOConfig's
                                       defaults: 8 completions of one prompt, up to 512 tokens
"window LoRA", "window LoRA dropout"   the window with LoRA of rank 16 on all linear layers, with dropout 0 and 0.05
distillation                           as the window, with one completion of each prompt, and a teacher of the same size
sft, dpo                               8 micro-batches of 2 sequences or pairs, up to 2,048 tokens; random weights
"sft LoRA", "dpo LoRA"                 the same with LoRA
"sft packed"                           64 sequences that begin with one system prompt, a third of their mean length; TRL
                                       packs them in 8 micro-batches of 2 rows of 2,048 tokens
"sft packed apart"                     as many tokens without a system prompt

A quarter of GRPO's groups has no advantage. Random weights make a flat distribution, the head's hardest case. Rows,
`--rows`:

trl                   TRL as it is
trl-no-checkpointing  without gradient checkpointing
trl-liger             with Liger's kernels for norms, MLPs and rotary embeddings, also without checkpointing
                      (trl-liger-no-checkpointing)
trl-liger-flash       the same with attention of flash-attn-4, also without checkpointing
                      (trl-liger-flash-no-checkpointing)
head                  patch_trl(whole_step=False): this library's head alone
memory-0, patch       patch_trl(memory=0), patch_trl(): this library's step
*-liger               the same with Liger's kernels
loss-steps            one's own loop: `loss_steps` of the whole batch, with TRL's metrics
uneven-liger          patch_trl(even_ranks=False) with Liger's kernels
full-logits           TRL with all completions' logits, in float32, as accelerate returns them
unsloth               Unsloth's GRPOTrainer, in a process of its own (`benchmark.peers.unsloth_step`)
*-packing             SFT of the packed batches in TRL's packed rows
*-padding_free        SFT in micro-batches that are one row each, not packed

The default of GRPO is all up to loss-steps; of others trl-liger and patch-liger, for the packed batches both
with flash-attn-4 and packing too. On a CPU it is the rows without Liger. Rows with flash-attn-4 need its package.
The learning rate is 0, so losses and gradients' norms must agree.

`--float32-weights` is how TRL loads a model by its name: products are in bfloat16 all the same, by autocast. Else
weights are in bfloat16.

`--score` also computes the old policy's log-probabilities in each step of GRPO, as TRL does with vLLM. All columns
count them. `scoring ms` is their own time, with a graph if the training takes their forward, and `share` its share.

Several ranks train one model with `--sharding`, each on as many groups, dealt out by chance:
`torchrun --nproc-per-node 2 -m benchmark.step --sharding FSDP2 --batches window`. Memory and forwards are those of the
first rank.

Milliseconds are medians of whole steps. The file's `other_ms` is what is outside of forwards, backwards and clipping.
`forwards` counts those of the model's body in a step, a reference's too. `MFU` is the FLOP that the step needs (the
formula is in `benchmark.step_batches`; a recurrence is not counted) over its time and the card's dense bfloat16 peak.
Results are written after each row, and a later run in the same environment adds its rows to them.
"""

import argparse
import gc
import math
import os
import re
import statistics
import sys
import tempfile
import traceback
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmark.environment import (
    RESULTS,
    add_output_options,
    describe,
    first_line,
    output_directory,
    read_results,
    slug,
    write_results,
)
from benchmark.merge import differences
from benchmark.step_batches import Task, peak_flop_per_second, tasks
from benchmark.table import Columns, Row, environment_line, markdown_table, number
from liger_rl.step import flash

if TYPE_CHECKING:  # it imports TRL, which the tables do not need
    from benchmark.step_runs import Data, Runner, Way

PREFIX = "step-"
NAMES = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3.5-1.7b", "llama-3-8b", "smollm2-135m", "toy")
SHARDINGS = ("DDP", "FSDP2", "ZeRO-3", "ZeRO-3 offload")
RANKS, RANK = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
DEFAULT = {"cuda": NAMES[:2], "cpu": NAMES[-1:]}
_GRPO_ROWS = (
    "trl", "trl-no-checkpointing", "trl-liger", "trl-liger-no-checkpointing", "trl-liger-flash",
    "trl-liger-flash-no-checkpointing", "head", "memory-0", "patch", "memory-0-liger", "patch-liger", "loss-steps",
)  # fmt: skip
_PACKED_ROWS = (
    "trl-packing", "trl-liger-packing", "trl-liger-no-checkpointing-packing", "trl-liger-flash-packing",
    "trl-liger-flash-no-checkpointing-packing", "memory-0-packing", "patch-packing", "memory-0-liger-packing",
    "patch-liger-packing",
)  # fmt: skip
ROWS = (
    *_GRPO_ROWS, "uneven-liger", "full-logits", "unsloth", *_PACKED_ROWS,
    "trl-padding_free", "trl-liger-flash-padding_free", "trl-liger-flash-no-checkpointing-padding_free",
    "patch-padding_free", "patch-liger-padding_free",
)  # fmt: skip
DEFAULT_ROWS = {"GRPO": _GRPO_ROWS} | dict.fromkeys(("Distillation", "SFT", "DPO"), ("trl-liger", "patch-liger"))
# The first that a batch has is what others are compared with.
BASELINES = ("TRL", "TRL, use_liger_kernel", "TRL, packing")
OURS_FLASH = "flash-attn-4"  # in the name of a row of ours
UNSLOTH, LIGER, FLASH, PACKINGS = "Unsloth", "use_liger_kernel", "flash_attention_4", ("packing", "padding_free")
MOST_NATS = 1.5  # of a learnt policy's entropy
# A margin of DPO sums the rounding of the log-probabilities of a thousand tokens. At 1.7B on an H200 TRL's own loss in
# bfloat16 is 0.048 off that of the same weights in float32 (0.058 with Liger's kernels).
DPO_LOSS_SCALE = {"float32": 10.0, "bfloat16": 50.0}
# Of the loss in shares of its scale (the mean |advantage|, of SFT the loss itself), and of the norm in shares of TRL's.
TOLERANCE = {"float32": (1e-5, 1e-3), "bfloat16": (1e-3, 5e-2)}
# Logits and hidden states in bfloat16 move a token's log-probability by some hundredths. Over 1,696 tokens on an H200
# TRL's own loss with Liger's kernels is 1.4e-3 of the scale off its loss without. The bound is 2.4e-3 there.
TOKEN_ERROR = {"float32": 0.0, "bfloat16": 0.1}


def batch_label(
    name: str, task: Task, sharding: str | None = None, *, scores: bool = False, float32_weights: bool = False
) -> str:
    """The batch's name, with its micro-batches if they are not its own, its weights, its scores, and its ranks."""
    count = task.micro_batches
    name += "" if count == tasks()[name].micro_batches else f", {count} micro-batch{'es' if count > 1 else ''}"
    name += ", float32 weights" if float32_weights else ""
    name += ", scored in each step" if scores and task.trainer == "GRPO" else ""
    return name if sharding is None else f"{name}, {sharding} on {task.ranks} GPUs"


def measure(
    runner: "Runner", key: str, task: Task, data: "Data", arguments: argparse.Namespace, peak: float | None
) -> Row:
    """One run of `train()` -> {"status": "ok", ...} or {"status", "reason"}."""
    try:
        run = runner.train(
            key,
            task,
            data.inputs,
            settling=arguments.settling,
            steps=arguments.steps,
            scores=arguments.score and task.trainer == "GRPO",
        )
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return {"status": "failed", "reason": f"{type(error).__name__}: {first_line(error)}"}
    step_ms = statistics.median(run.step_ms)
    return {
        "status": "ok",
        "reason": None,
        "loss": run.loss,
        "grad_norm": run.grad_norm,
        "peak_mib": run.peak_mib,
        "forwards": run.forwards,
        "saved_share": run.saved_share,
        "step_ms": step_ms,
        "other_ms": statistics.median(run.other_ms),
        "scoring_ms": statistics.median(run.scoring_ms) or None,
        "steps": len(run.step_ms),
        "tokens_per_s": data.about["counted_tokens"] / step_ms * 1e3,
        "mfu": data.about["flop"] / step_ms * 1e3 / (peak * task.ranks) if peak else None,
    }


def compare(rows: list[Row]) -> list[Row]:
    """Rows of one batch with each one's tokens per second and gradient norm over TRL's, and its loss less TRL's."""
    baselines = [row for name in BASELINES for row in rows if row["variant"] == name and row["status"] == "ok"]
    if not baselines:
        return rows

    def relative(row: Row, trl: Row) -> Row:
        return {
            "tokens_x_trl": row["tokens_per_s"] / trl["tokens_per_s"],
            "loss_difference": row["loss"] - trl["loss"],
            "grad_norm_x_trl": row["grad_norm"] / trl["grad_norm"],
        }

    return [row | relative(row, baselines[0]) if row["status"] == "ok" else row for row in rows]


def objections(about: dict[str, Any], rows: list[Row]) -> list[str]:
    """Why the numbers of a batch of a shape must not be used; `about` is as of `about_batch`."""
    of_loss, of_norm = TOLERANCE[about["dtype"]]
    of_loss = max(of_loss, TOKEN_ERROR[about["dtype"]] / math.sqrt(about["counted_tokens"]))
    found = []
    if about["policy"] == "learnt" and not about["entropy"] < MOST_NATS:
        found.append(f"the policy's entropy is {about['entropy']:.2f} nats, not under {MOST_NATS}")
    for row in rows:
        if "loss_difference" not in row or about["lora_dropout"]:  # dropout differs from row to row
            continue
        name, trl = f"{label(row)}, {row['variant']}", row["loss"] - row["loss_difference"]
        scale = about.get("mean_advantage", abs(trl))
        if about.get("trainer") == "DPO":
            scale = DPO_LOSS_SCALE[about["dtype"]]
        if not abs(row["loss_difference"]) <= of_loss * scale:
            found.append(f"{name}: the loss is {row['loss']:.6f}, TRL's is {trl:.6f}")
        if not abs(row["grad_norm_x_trl"] - 1) <= of_norm:
            found.append(f"{name}: the gradient's norm is {row['grad_norm_x_trl']:.4f} x TRL's")
    return found


COLUMNS: Columns = {
    "ms": number("step_ms", ",.1f"),
    "scoring ms": number("scoring_ms", ",.1f"),
    "share": lambda row: f"{row['scoring_ms'] / row['step_ms']:.0%}" if row.get("scoring_ms") else "",
    "tokens/s": number("tokens_per_s", ",.0f"),
    "x TRL": number("tokens_x_trl", ".2f"),
    "MFU": number("mfu", ".1%"),
    "forwards": number("forwards", ",.0f"),
    "saved": number("saved_share", ".0%"),
    "peak MiB": number("peak_mib", ",.0f"),
    "loss": number("loss", ".5f"),
    "norm": number("grad_norm", ".4f"),
    "/ TRL's": number("grad_norm_x_trl", ".3f"),
}


def label(row: Row) -> str:
    """The shape and the batch."""
    return f"{row['shape']}, {row['batch']}"


def about_batch(results: dict[str, Any], row: Row) -> dict[str, Any]:
    """What is known of the row's policy and batch."""
    about = results["shapes"][row["shape"]]
    return about | about["batches"][row["batch"]]


def title(name: str, about: dict[str, Any]) -> str:
    of_prompts = f" completions of {about['groups']} prompt{'s' if about['groups'] > 1 else ''}"
    sequences = " sequences" if about["groups"] == about["sequences"] else of_prompts
    parts = [
        f"{name}: {about['sequences']}{sequences}, {about['row_tokens']} tokens a row",
        f"{about['padding_share']:.0%} padding",
        f"{about['counted_tokens']:,} tokens count",
        f"{about['idle_share']:.0%} of sequences without advantage" if about["idle_share"] else "",
        about["dtype"],
        f"{about.get('policy', 'learnt')} policy",
        f"entropy {about['entropy']:.2f} nats" if "entropy" in about else "",
        f"{about['micro_batches']} micro-batches of TRL" if about["micro_batches"] > 1 else "",
    ]
    if about.get("lora_dropout") is not None:
        parts.append(f"LoRA with dropout {about['lora_dropout']:g}")
    return ", ".join(filter(None, parts))


def summary(results: dict[str, Any], *patterns: str) -> str:
    """A row for each peer of each shape and batch, beside the patch with the peer's kernels (`pairs`).

    Of the batches whose label matches a pattern (`fnmatch`), or of all. TRL without Liger's kernels is left out where
    it ran with them.
    """
    rows: list[tuple[str, Row]] = []
    for name, group in groupby(results["rows"], key=label):
        if any(fnmatchcase(name, pattern) for pattern in patterns or ("*",)):
            found = pairs([row for row in group if row["status"] == "ok"])
            has_liger = any("both with Liger" in pair["beside"] for pair in found)
            found = [pair for pair in found if not (has_liger and "both without Liger" in pair["beside"])]
            rows += [(name, pair | {"status": "ok"}) for pair in found]
    columns: Columns = {
        "beside": lambda pair: pair["beside"],
        "its ms": lambda pair: f"{pair['peer']['step_ms']:,.0f}",
        "patch, ms": lambda pair: f"{pair['patch']['step_ms']:,.0f}",
        "speed": lambda pair: _times_as_fast(pair, "patch"),
        "its GiB": lambda pair: _gibibytes(pair, "peer"),
        "patch, GiB": lambda pair: _gibibytes(pair, "patch"),
        "`memory=0`, speed": lambda pair: _times_as_fast(pair, "recomputed"),
        "`memory=0`, GiB": lambda pair: _gibibytes(pair, "recomputed"),
    }
    line = environment_line(results["environment"], ("trl", "liger_kernel", "transformers"), has_commit=False)
    measured = [row for _, pair in rows for row in pair.values() if isinstance(row, dict)]
    return f"{line} Commits {', '.join(list_commits(measured))}.\n\n{markdown_table(columns, rows)}\n"


def pairs(rows: list[Row]) -> list[Row]:
    """Of one batch: {"beside": the peer's name, "peer", "patch", "recomputed": their rows; the last one or None}.

    The patch has Liger's kernels and flash-attn-4 if its peer has them, the former also beside Unsloth, which has
    kernels of its own. Beside plain TRL it has them only if the batch has neither TRL with them nor the patch without;
    the name says so. `memory=0` may have run without flash-attn-4, and has no entry then.
    """
    by_way = {row["variant"]: row for row in rows}
    peers = [way for way in by_way if way.startswith(("TRL", UNSLOTH)) and "patch_trl" not in way]
    found = []
    for way in sorted(peers, key=lambda way: LIGER not in way):
        peer, *options = way.split(", ")
        kernels, both = [LIGER] if LIGER in options else [], f"both with{'' if LIGER in options else 'out'} Liger"
        if peer == UNSLOTH or (way == "TRL" and not by_way.keys() & {"TRL, patch_trl()", f"TRL, {LIGER}"}):
            kernels, both = [LIGER], "patch with Liger"
        tail = [*kernels, *(option for option in options if option in PACKINGS)]
        if FLASH in options:
            tail, both = [*tail, OURS_FLASH], f"{both}, {OURS_FLASH}"
        patch, recomputed = (by_way.get(", ".join(["TRL", f"patch_trl({given})", *tail])) for given in ("", "memory=0"))
        if patch:
            beside = ", ".join([peer, *(option for option in options if option not in (LIGER, FLASH)), both])
            found.append({"beside": beside, "peer": by_way[way], "patch": patch, "recomputed": recomputed})
    return found


def list_commits(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["commit"] for row in rows))


def rows_beside_trl(results: dict[str, Any]) -> list[tuple[str, Row]]:
    """(shape and batch, its rows by variant) where TRL alone ran."""
    rows = []
    for name, group in groupby(results["rows"], key=label):
        by_way = {row["variant"]: row for row in group if row["status"] == "ok"}
        if "TRL" in by_way:
            rows.append((name, by_way | {"status": "ok"}))
    return rows


def _times_as_fast(pair: Row, way: str) -> str:
    return f"{pair[way]['tokens_per_s'] / pair['peer']['tokens_per_s']:.1f} x" if pair[way] else ""


def _gibibytes(pair: Row, way: str) -> str:
    return number("peak_mib", ".1f", 1 / 1024)(pair[way] or {})


ADDED = re.compile(r", patch_trl\((.*?)\)|, flash-attn-4")  # to the label of TRL's own way


def brief(results: dict[str, Any], *patterns: str) -> str:
    """One table: a row for each way other than TRL's own, beside TRL's with as many of Liger's kernels where that ran.

    Else beside TRL as it is, or alone. Of the batches whose label matches a pattern (`fnmatch`), or of all.
    """
    lines: list[tuple[str, Row]] = []
    for name, group in groupby(results["rows"], key=label):
        ways = {row["variant"]: row for row in group if row["status"] == "ok"}
        if not any(fnmatchcase(name, pattern) for pattern in patterns or ("*",)):
            continue
        for way, row in ways.items():
            if way.startswith("TRL") and not ADDED.search(way):
                continue
            as_trl = ADDED.sub("", way)
            with_flash = as_trl.replace(LIGER, f"{LIGER}, {FLASH}") if OURS_FLASH in way else as_trl
            same = next((ways[one] for one in (with_flash, as_trl) if one != way and one in ways), None)
            peer = same or ways.get("TRL") or {}
            with_liger = [LIGER in one for one in (way, peer.get("variant", way))]
            line = {"status": "ok", "liger": "both" if all(with_liger) else "this" if any(with_liger) else "neither"}
            numbers = {"ms": "step_ms", "mib": "peak_mib"}
            line |= {f"trl_{key}": peer.get(field) for key, field in numbers.items()}
            line |= {key: row[field] for key, field in numbers.items()}
            line["faster"] = peer["step_ms"] / row["step_ms"] if peer else None
            lines.append((", ".join(filter(None, [name, *_name_options(way, peer.get("variant", ""))])), line))
    environment = environment_line(results["environment"], ("trl", "transformers"), has_commit=False)
    return f"{environment}\n\n{markdown_table(BRIEF, lines)}\n"


BRIEF: Columns = {
    "Liger's kernels": lambda line: line["liger"],
    "TRL, ms": number("trl_ms", ",.0f"),
    "this, ms": number("ms", ",.0f"),
    "x": number("faster", ".1f"),
    "TRL, GiB": number("trl_mib", ".1f", 1 / 1024),
    "this, GiB": number("mib", ".1f", 1 / 1024),
}


def _name_options(way: str, peer: str) -> list[str]:
    """What a way has that `patch_trl()` with Liger's kernels has not."""
    found = re.search(r"patch_trl\((.*?)\)", way)
    flash = f"{OURS_FLASH} on {'both sides' if FLASH in peer else 'one side'}" if OURS_FLASH in way else ""
    return [found[1] if found else way, "padding_free" if "padding_free" in way else "", flash]


def markdown(results: dict[str, Any], kind: str = "whole", *patterns: str) -> str:
    """What `main` writes -> a line on where it was measured and a table per shape and batch; or `SHORTER` ones."""
    if kind in SHORTER:
        return SHORTER[kind](results, *patterns)
    blocks = [environment_line(results["environment"], ("trl", "transformers"), has_commit=False)]
    for name, group in groupby(results["rows"], key=label):
        rows = list(group)
        columns = {column: cell for column, cell in COLUMNS.items() if any(cell(row) for row in rows)}
        table = markdown_table(columns or COLUMNS, [(row["variant"], row) for row in rows])
        of_commit = f"commit {' and '.join(list_commits(rows))}"
        blocks.append(f"**{title(name, about_batch(results, rows[0]))}**, {of_commit}\n\n{table}")
    return "\n\n".join(blocks) + "\n"


SHORTER = {"summary": summary, "brief": brief}


def add_row(results: dict[str, Any], about: dict[str, Any], row: Row) -> dict[str, Any]:
    """`results` with one more row, which replaces an earlier one of its name, compared with the rows of its batch."""
    shapes = dict(results["shapes"])
    batches = shapes.get(row["shape"], {"batches": {}})["batches"]
    shapes[row["shape"]] = {"batches": batches | {row["batch"]: about}}
    by_name = {(label(other), other["variant"]): other for other in [*results["rows"], row]}
    compared = compare([other for (name, _variant), other in by_name.items() if name == label(row)])
    by_name |= {(label(row), other["variant"]): other for other in compared}
    labels = list(dict.fromkeys(name for name, _variant in by_name))
    rows = sorted(by_name.values(), key=lambda row: (NAMES.index(row["shape"]), labels.index(label(row))))
    return {**results, "shapes": shapes, "rows": rows}


def read_earlier(environment: dict[str, Any], target: Path) -> dict[str, Any]:
    """Results of the same environment, to which rows are added; each row names its commit."""
    before = read_results(target) if target.exists() else {"environment": {}}
    if set(differences(before["environment"], environment)) - {"commit", "dirty"}:
        return {"environment": environment, "shapes": {}, "rows": []}
    return before | {"environment": environment}


def choose_task(shape: str, batch: str, arguments: argparse.Namespace) -> Task:
    from benchmark.step_policy import SHAPES

    task = SHAPES[shape].tasks[batch]
    return replace(
        task,
        micro_batches=arguments.micro_batches or task.micro_batches,
        learns=task.learns and not arguments.random_policy,
        ranks=RANKS,
        rank=RANK,
    )


def name_variant(way: "Way") -> str:
    """The way's label, with the kernels of shared prefixes if they are not this library's usual ones."""
    runs_trees = "loss_steps" in way.label or (way.patch is not None and way.patch.get("whole_step", True))
    return way.label + (f", {OURS_FLASH}" if runs_trees and flash.is_installed() else "")


def choose_rows(task: Task, device: str) -> list[str]:
    from transformers.utils.import_utils import is_flash_attn_4_available

    rows: Iterable[str] = DEFAULT_ROWS[task.trainer]
    if task.lengths.packed_row:
        rows = (*rows, *_PACKED_ROWS)
    if device == "cpu" or not is_flash_attn_4_available():
        rows = (row for row in rows if "flash" not in row)
    # Liger's kernels need a GPU.
    named = (row.replace("-liger", "") if device == "cpu" else row for row in rows)
    return [row for row in dict.fromkeys(named) if row in ROWS]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    batches = tuple(tasks())
    parser.add_argument("--shapes", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--batches", nargs="+", choices=batches, default=batches, metavar="NAME", help="default: all")
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="NAME", help=", ".join(ROWS))
    parser.add_argument(
        "--micro-batches", type=int, choices=(1, 2, 4, 8), help="of a trainer's step; default: the batch's own"
    )
    parser.add_argument("--steps", type=int, default=3, help="that are measured in a run; default 3")
    parser.add_argument("--settling", type=int, default=3, help="steps before those, at least 3, the default")
    parser.add_argument("--random-policy", action="store_true", help="do not let the policy learn a text first")
    parser.add_argument("--float32-weights", action="store_true", help="of models whose products are in bfloat16")
    parser.add_argument("--score", action="store_true", help="also compute the old policy's log-probabilities")
    add_output_options(parser)
    parser.add_argument("--sharding", choices=SHARDINGS, help="how the ranks of torchrun train one model")
    arguments = parser.parse_args()
    if (RANKS > 1) != (arguments.sharding is not None):
        parser.error("--sharding is for several ranks, and several ranks need one; run it by torchrun")
    if (arguments.sharding or "").startswith("ZeRO-3") and len(arguments.rows or ()) != 1:
        parser.error("with ZeRO-3 name one row of --rows: the weights of a process's second model would be others")
    # The last of these measures memory, and the third is the first in which layers are kept.
    if arguments.steps < 1 or arguments.settling < 3:
        parser.error("--steps must be at least 1 and --settling at least 3")
    return arguments


def main() -> None:
    from benchmark.step_policy import SHAPES
    from benchmark.step_runs import WAYS, Runner

    arguments, environment = parse_arguments(), describe("auto")
    if RANKS > 1 and environment["device"] == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device, peak = environment["device"], peak_flop_per_second(environment["device_name"])
    file = f"{PREFIX}{slug(environment)}.json"
    target = output_directory(arguments.out, record=False) / file
    results = read_earlier(environment, RESULTS / file if arguments.record else target)
    commit = environment["commit"][:10] + (" with local changes" if environment["dirty"] else "")
    gc.collect()
    gc.freeze()  # each run collects garbage several times, and so passes over what is there already
    for shape in arguments.shapes or DEFAULT[device]:
        made = replace(SHAPES[shape], weights="float32") if arguments.float32_weights else SHAPES[shape]
        with tempfile.TemporaryDirectory() as folder:
            runner = Runner(made, device, folder, arguments.sharding)
            for batch in arguments.batches:
                task = choose_task(shape, batch, arguments)
                options = {"scores": arguments.score, "float32_weights": arguments.float32_weights}
                data, name = runner.data(task), batch_label(batch, task, arguments.sharding, **options)
                for key in arguments.rows or choose_rows(task, device):
                    row = {"shape": shape, "batch": name, "variant": name_variant(WAYS[key]), "commit": commit}
                    row |= measure(runner, key, task, data, arguments, peak)
                    if RANK:
                        continue
                    results = add_row(results, data.about, row)
                    write_results(target, results)
                    outcome = row["reason"] or f"{row['step_ms']:,.1f} ms"
                    print(f"{label(row)}, {row['variant']}: {outcome}", flush=True)
    if RANKS > 1:
        torch.distributed.destroy_process_group()
    if RANK:
        return
    batches = [list(rows) for _, rows in groupby(results["rows"], key=label)]
    wrong = [objection for rows in batches for objection in objections(about_batch(results, rows[0]), rows)]
    print(markdown(results))
    if arguments.record and not wrong:
        target = output_directory(None, record=True) / file
        write_results(target, results)
    print(f"written: {target}")
    if wrong:
        raise SystemExit("not to be used:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
