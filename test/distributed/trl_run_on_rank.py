"""One rank's runs of TRL's trainers.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are in the environment. `main` makes a file of
{wrapper: {name of a row: `Pair`}}, by the rank's name, in the directory.
"""

import itertools
import os
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import accelerate.state
import torch
from accelerate.utils import DistributedType
from peft import LoraConfig
from torch.distributed.tensor import DTensor

import trl_runs
from liger_rl.models.lora_linear import LoraLinear
from trl_runs import Row, Run


class Pair(NamedTuple):
    """A rank's runs without the patch and with it."""

    plain: Run
    patched: Run
    exchanges: list[int]  # of micro-batches, of either run
    lora_calls: list[int]


def take_advantages(trainer) -> None:
    """Of every other sequence on rank 0."""
    score = trainer._generate_and_score_completions

    def score_half(inputs):
        batch = score(inputs)
        rows = torch.arange(len(batch["advantages"]))
        idle = rows % 2 * (trainer.accelerator.process_index == 0)
        return {**batch, "advantages": (1 - idle) * (rows - 1.5)}

    trainer._generate_and_score_completions = score_half


def cut_completions(trainer) -> None:
    """To at most four tokens on rank 1."""
    generate, length = trainer._generate_single_turn, (None, 4)[trainer.accelerator.process_index]

    def cut_turn(*args):
        turn = generate(*args)
        if isinstance(turn, tuple):  # GRPO's, with log-probabilities of a server
            return [ids[:length] for ids in turn[0]], *turn[1:]
        return [ids[:length] for ids in turn]

    trainer._generate_single_turn = cut_turn


def cut_and_take_advantages(trainer) -> None:
    take_advantages(trainer)
    cut_completions(trainer)


def hook_first_rank(trainer) -> None:
    """A hook that nobody knows, as of a logger of activations."""
    if trainer.accelerator.process_index == 0:
        trainer.model.model.layers[0].mlp.register_forward_hook(lambda *_: None)


def give_positions(trainer) -> None:
    """To the calls of rank 1, which then join no others. Those of rank 0 could."""
    collate = trainer.data_collator

    def give(examples):
        inputs = collate(examples)
        if trainer.accelerator.process_index == 1:
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        return inputs

    trainer.data_collator = give


def give_some_positions(trainer) -> None:
    """To the second of every four calls of rank 1."""
    give_positions(trainer)
    give, numbers = trainer.data_collator, itertools.count()

    def give_some(examples):
        inputs = give(examples)
        if next(numbers) % 4 != 1:
            inputs.pop("position_ids", None)
        return inputs

    trainer.data_collator = give_some


def change_first_step(trainer) -> None:
    """No two sequences of rank 1 begin alike in the first optimizer step."""
    collate, numbers = trainer.data_collator, iter(range(99))

    def change(examples):
        inputs = collate(examples)
        number = next(numbers)
        if trainer.accelerator.process_index == 1 and number < 2:
            generator = torch.Generator().manual_seed(number)
            ids = torch.randint(3, 40, inputs["input_ids"].shape, generator=generator)
            inputs |= {"input_ids": ids, "labels": ids.where(inputs["labels"] >= 0, -100)}
        return inputs

    trainer.data_collator = change


OPTIONS = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_steps": 2}
LORA = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
# In bfloat16 PEFT's own gradient of q_proj alone is 4% off float32's.
SEVERAL = LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)


def row(kind, *, share=1.0, together=True, **options) -> Row:
    return Row(kind, OPTIONS | options, trees=None, share=share, is_logged=False, together=together)


def scored(**options) -> Row:
    """Each micro-batch has sequences of one prompt."""
    sizes = {"per_device_train_batch_size": 4, "max_completion_length": 6}
    fixed = {"num_iterations": 1, "learning_rate": 0.0, "prepare": take_advantages}
    return row("GRPO", share=0.7, **sizes | fixed | options)


# All rows are equally long but one.
ONE_LONG_ROW = {
    "prompt": [f"w{n} w1 w2" for n in range(8)],
    "completion": [f" w{n}" + " w5 w6" * (n == 3) for n in range(8)],
}
ONE_PROMPT = trl_runs.ANSWERS | {"prompt": trl_runs.PROMPTS[:1] * 8}
EIGHT_PROMPTS = {"data": {"prompt": [" ".join(f"w{i}" for i in range(20)) + f" w{20 + n} w1" for n in range(8)]}}
CHECKPOINTS = {"gradient_checkpointing": True}
REENTRANT = CHECKPOINTS | {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
ROWS = {
    "SFT": row("SFT", average_tokens_across_devices=True, max_grad_norm=0.5),
    "SFT, one long row": row("SFT", data=ONE_LONG_ROW),
    "SFT, reentrant checkpoints": row("SFT", **REENTRANT),
    "SFT, a hook on one rank": row("SFT", prepare=hook_first_rank, together=False),
    "SFT, padding-free": row("SFT", padding_free=True, max_length=None, data=ONE_PROMPT, prepare=change_first_step),
    # Each micro-batch has a forward and a backward of its own, and each backward all of its layers' gradients.
    "SFT, padding-free, reentrant checkpoints": row(
        "SFT",
        padding_free=True,
        max_length=None,
        data=ONE_PROMPT,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        together=False,
        **REENTRANT,
    ),
    "DPO, LoRA": row("DPO", per_device_train_batch_size=1, peft_config=LORA, share=0.7),
    "GRPO": scored(beta=0.0),
    # Old log-probabilities, a reference; DeepSpeed reuses the order of parameters that it has recorded.
    "GRPO, checkpoints": scored(beta=0.1, num_iterations=2, max_steps=4, **CHECKPOINTS),
}


def scored_twice(**options) -> Row:
    """The old policy's log-probabilities are computed in each step."""
    sizes = {"per_device_train_batch_size": 4, "max_completion_length": 6, "num_iterations": 1, "beta": 0.0}
    return row("RLOO", **sizes | {"data": {"prompt": trl_runs.PROMPTS * 2}, "learning_rate": 1e-3} | options)


def judge_on_first_rank(trainer) -> None:
    """By a model, so that this rank keeps nothing of its scores. The other one's completions are short."""
    reward, judge = trainer.reward_funcs[0], torch.nn.Linear(1, 1)
    if trainer.accelerator.process_index == 0:
        trainer.reward_funcs[0] = lambda **columns: [score + 0 * judge.in_features for score in reward(**columns)]
    cut_completions(trainer)


# One forward has the scores and the loss of a step.
KEPT = {
    "RLOO, kept": scored_twice(share=0.3),
    "RLOO, kept, checkpoints": scored_twice(share=0.3, **CHECKPOINTS),
    "RLOO, kept on one rank": scored_twice(
        prepare=judge_on_first_rank,
        gradient_accumulation_steps=4,
        max_completion_length=32,
        data={"prompt": trl_runs.PROMPTS * 8},
    ),
}

# Its ranks run as many forwards each.
SHARDED = {"SFT, positions on one rank": row("SFT", prepare=give_positions, share=float("inf"), together=False)}
FOURS = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1, "learning_rate": 1e-3}
NOT_EVEN = {"patch_options": {"even_ranks": False}}
MIXED = {
    "SFT, some positions": row("SFT", prepare=give_some_positions, **FOURS),
    "SFT, some positions, not exchanged": row("SFT", prepare=give_some_positions, **FOURS, **NOT_EVEN),
    "SFT, positions, not exchanged": row("SFT", prepare=give_positions, **FOURS, **NOT_EVEN),
    "SFT, positions, reentrant": row("SFT", prepare=give_positions, **FOURS, **REENTRANT),
}
DISTILLATION = {"Distillation": row("Distillation", share=0.8, **EIGHT_PROMPTS)}


def uneven(kind, **options) -> Row:
    """Ranks have micro-batches of different lengths, which change ranks."""
    sizes = {"gradient_accumulation_steps": 4, "max_steps": 3, "per_device_train_batch_size": 1}
    return row(kind, share=float("inf"), **sizes | {"learning_rate": 1e-3} | options)


def uneven_scored(**options) -> Row:
    sizes = {"data": {"prompt": trl_runs.PROMPTS * 8}, "per_device_train_batch_size": 4, "max_completion_length": 32}
    return uneven("GRPO", **sizes | options)


LENGTHS = [(7 * n % 23) ** 3 // 400 + 1 for n in range(30)]
TEXTS = [" w5 w6 w7 w8 w9 w10"[: 3 * (length % 6 + 1)] + " w11" * (length - 1) for length in LENGTHS]
SINGLES = {"prompt": [f"w{n} w1 w2" for n in range(24)], "completion": TEXTS[:24]}
PAIRS = {"prompt": SINGLES["prompt"], "chosen": TEXTS[:24], "rejected": TEXTS[6:]}
# The second half of an epoch does not fill the ranks, and TRL's metrics leave one out.
VERDICTS = {"prompt": [f"w{n} w1 w2" for n in range(30)], "completion": TEXTS, "label": [n % 3 > 0 for n in range(30)]}
IDLE_GROUPS = {
    "GRPO, uneven, idle groups": uneven_scored(
        loss_type="grpo", beta=0.0, num_iterations=1, prepare=cut_and_take_advantages
    )
}
UNEVEN_ROWS = IDLE_GROUPS | {
    "GRPO, uneven": uneven_scored(loss_type="dapo", beta=0.1, num_iterations=2, prepare=cut_completions),
    "SFT, uneven": uneven("SFT", data=SINGLES, average_tokens_across_devices=False),
    "SFT, uneven, averaged": uneven("SFT", data=SINGLES),
    # `train_loss` has the rank's own losses of the steps behind the last entry of the log.
    "SFT, uneven, not logged": uneven("SFT", data=SINGLES, logging_steps=2),
    "DPO, uneven": uneven("DPO", data=PAIRS),
    # The completions of the ranks have two widths.
    "Distillation, uneven": uneven("Distillation", max_completion_length=32, prepare=cut_completions, **EIGHT_PROMPTS),
    "KTO, uneven": uneven("KTO", data=VERDICTS, per_device_train_batch_size=2),
}
NOT_EXCHANGED = {"SFT, uneven, not exchanged": uneven("SFT", data=SINGLES, **NOT_EVEN)}
BFLOAT16_LORA = {"SFT, LoRA in bfloat16": row("SFT", bf16=True, learning_rate=0.0, peft_config=SEVERAL)}
# Parameters and the optimizer's state wait on the host, and fewer than one layer's are fetched ahead.
OFFLOAD = {
    "offload_param": {"device": "cpu"},
    "offload_optimizer": {"device": "cpu"},
    "stage3_prefetch_bucket_size": 64,
    "stage3_max_live_parameters": 2000,
    "stage3_max_reuse_distance": 1000,
}
OFFLOADED_ROWS = {name: ROWS[name] for name in ("SFT", "GRPO, checkpoints")}
FSDP = {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}


def find_options(wrapper: str) -> dict:
    if wrapper == "ddp":
        return {"ddp_find_unused_parameters": False}
    if wrapper == "fsdp2":
        return {"fsdp": "full_shard auto_wrap", "fsdp_config": dict(FSDP)}
    zero = {"stage": int(wrapper[len("zero")]), "stage3_param_persistence_threshold": 0}
    if wrapper.endswith("offload"):
        zero |= OFFLOAD
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    # torch's AdamW, because DeepSpeed would have to compile its own.
    options = {"zero_optimization": zero, "bf16": {"enabled": "auto"}, "zero_force_ds_cpu_optimizer": False}
    return {"deepspeed": options | dict.fromkeys(sizes, "auto")}


def prepare_process(wrapper: str) -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    if wrapper.startswith("zero"):
        import deepspeed

        deepspeed.init_distributed("gloo")
    if wrapper == "fsdp2":
        # accelerate takes its plugin of FSDP on several GPUs only.
        initialize = accelerate.state.PartialState.__init__

        def initialize_as_gpus(self, *args, **options):
            initialize(self, *args, **options)
            if self.distributed_type == DistributedType.MULTI_CPU:
                self.distributed_type = DistributedType.MULTI_GPU

        accelerate.state.PartialState.__init__ = initialize_as_gpus


def run_row(row: Row, wrapper: str, model: str, directory: str) -> Pair:
    runs, counts, script, trainers = [], ([], []), [], []

    def prepare(trainer):
        trainers.append(trainer)
        row.options.get("prepare", lambda trainer: None)(trainer)

    options = row.options | find_options(wrapper) | {"prepare": prepare}
    if row.kind in ("GRPO", "RLOO"):
        options["script"] = script
    if row.kind == "Distillation":
        options["teacher"] = str(Path(model).with_name("granite-1"))
    exchange = torch.distributed.all_to_all_single
    for patch in (False, True):
        with (
            mock.patch.object(torch.distributed, "all_to_all_single", wraps=exchange) as send,
            mock.patch.object(LoraLinear, "apply", wraps=LoraLinear.apply) as lora,
        ):
            run = trl_runs.train(row.kind, model, directory, patch=patch, **options)
        run.weights = {"all": gather_weights(trainers.pop().model)}
        runs.append(run)
        counts[0].append(send.call_count)
        counts[1].append(lora.call_count)
    return Pair(*runs, *counts)


@torch.no_grad()
def gather_weights(model: torch.nn.Module) -> torch.Tensor:
    """One flat tensor. A collective."""
    parameters, gathered = list(model.parameters()), nullcontext()
    if hasattr(parameters[0], "ds_id"):
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(parameters)
    with gathered:
        return torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).flatten() for p in parameters])


def run_rows(wrapper: str, model: str, directory: str) -> dict[str, Pair]:
    prepare_process(wrapper)
    own = {
        "ddp": ROWS | MIXED | DISTILLATION | UNEVEN_ROWS | NOT_EXCHANGED | KEPT,
        "fsdp2": ROWS | DISTILLATION | IDLE_GROUPS | SHARDED,
        "zero3": ROWS | IDLE_GROUPS | BFLOAT16_LORA | SHARDED,
        "zero3-offload": OFFLOADED_ROWS,
    }
    rows = own.get(wrapper, ROWS | IDLE_GROUPS)
    return {name: run_row(row, wrapper, model, directory) for name, row in rows.items()}


def main(model: str, directory: Path, *wrappers: str) -> None:
    result = directory / os.environ["RANK"]
    torch.save({wrapper: run_rows(wrapper, model, f"{result}-run") for wrapper in wrappers}, result)
    torch.distributed.destroy_process_group()
