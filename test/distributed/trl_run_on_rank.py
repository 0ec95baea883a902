"""One rank's runs of TRL's trainers: `python trl_run_on_rank.py MODEL RESULT WRAPPER ...`.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are in the environment. RESULT becomes a file of JSON:
{wrapper: {case: [{"log", "train_loss", "weights", "tokens", "calls", "backwards", "exchanges", "lora_calls"} without
the patch, with it]}}.
"""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

# Read when a kernel is decorated.
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent))

import accelerate.state
import torch
from accelerate.utils import DistributedType
from peft import LoraConfig
from torch.distributed.tensor import DTensor

import trl_runs
from liger_rl.integrations.trl import patched_trl
from liger_rl.models.lora_linear import LoraLinear

OPTIONS = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_steps": 2}
SCORED = {"per_device_train_batch_size": 4, "max_completion_length": 6, "num_iterations": 1, "learning_rate": 0.0}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
LORA = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
# All rows are equally long but one.
ONE_LONG_ROW = {
    "prompt": [f"w{n} w1 w2" for n in range(8)],
    "completion": [f" w{n}" + " w5 w6" * (n == 3) for n in range(8)],
}
CASES = {
    "SFT": ("SFT", {"average_tokens_across_devices": True, "max_grad_norm": 0.5}),
    "SFT, one long row": ("SFT", {"data": ONE_LONG_ROW}),
    "SFT, reentrant checkpoints": ("SFT", REENTRANT),
    "SFT, padding-free": ("SFT", {"padding_free": True, "max_length": None}),
    "DPO, LoRA": ("DPO", {"per_device_train_batch_size": 1, "peft_config": LORA}),
    "GRPO": ("GRPO", {"beta": 0.0, **SCORED}),
    # Old log-probabilities, a reference; DeepSpeed reuses the order of parameters that it has recorded.
    "GRPO, checkpoints": (
        "GRPO",
        {**SCORED, "beta": 0.1, "num_iterations": 2, "gradient_checkpointing": True, "max_steps": 4},
    ),
}
# Cases in which ranks have micro-batches of different lengths.
UNEVEN = {"gradient_accumulation_steps": 4, "max_steps": 3, "learning_rate": 1e-3}
UNEVEN_SCORED = {
    **UNEVEN,
    "data": {"prompt": trl_runs.PROMPTS * 8},
    "per_device_train_batch_size": 4,
    "max_completion_length": 32,
}
LENGTHS = [(7 * n % 23) ** 3 // 400 + 1 for n in range(30)]
TEXTS = [" w5 w6 w7 w8 w9 w10"[: 3 * (length % 6 + 1)] + " w11" * (length - 1) for length in LENGTHS]
UNEVEN_ROWS = {"prompt": [f"w{n} w1 w2" for n in range(24)], "completion": TEXTS[:24]}
UNEVEN_PAIRS = {"prompt": UNEVEN_ROWS["prompt"], "chosen": TEXTS[:24], "rejected": TEXTS[6:]}
# The second half of an epoch does not fill the ranks, and TRL's metrics leave one out.
VERDICTS = {"prompt": [f"w{n} w1 w2" for n in range(30)], "completion": TEXTS, "label": [n % 3 > 0 for n in range(30)]}
UNEVEN_CASES = {
    "GRPO, uneven": ("GRPO", {**UNEVEN_SCORED, "loss_type": "dapo", "beta": 0.1, "num_iterations": 2}),
    "GRPO, uneven, idle groups": ("GRPO", {**UNEVEN_SCORED, "loss_type": "grpo", "beta": 0.0, "num_iterations": 1}),
    "SFT, uneven": (
        "SFT",
        {**UNEVEN, "data": UNEVEN_ROWS, "per_device_train_batch_size": 1, "average_tokens_across_devices": False},
    ),
    "SFT, uneven, averaged": ("SFT", {**UNEVEN, "data": UNEVEN_ROWS, "per_device_train_batch_size": 1}),
    # `train_loss` has the rank's own losses of the steps behind the last entry of the log.
    "SFT, uneven, not logged": (
        "SFT",
        {**UNEVEN, "data": UNEVEN_ROWS, "per_device_train_batch_size": 1, "logging_steps": 2},
    ),
    "SFT, uneven, not exchanged": ("SFT", {**UNEVEN, "data": UNEVEN_ROWS, "per_device_train_batch_size": 1}),
    "DPO, uneven": ("DPO", {**UNEVEN, "data": UNEVEN_PAIRS, "per_device_train_batch_size": 1}),
    "KTO, uneven": ("KTO", {**UNEVEN, "data": VERDICTS, "per_device_train_batch_size": 2}),
}
SHARDED_CASES = CASES | {"GRPO, uneven, idle groups": UNEVEN_CASES["GRPO, uneven, idle groups"]}
# In bfloat16 PEFT's own gradient of q_proj alone is 4% off float32's.
SEVERAL = LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
BFLOAT16_LORA = {"SFT, LoRA in bfloat16": ("SFT", {"bf16": True, "learning_rate": 0.0, "peft_config": SEVERAL})}
# Parameters and the optimizer's state wait on the host, and fewer than one layer's are fetched ahead.
OFFLOAD = {
    "offload_param": {"device": "cpu"},
    "offload_optimizer": {"device": "cpu"},
    "stage3_prefetch_bucket_size": 64,
    "stage3_max_live_parameters": 2000,
    "stage3_max_reuse_distance": 1000,
}
OFFLOADED_CASES = {name: CASES[name] for name in ("SFT", "GRPO, checkpoints")}
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


def run_case(case: str, kind: str, options: dict, model: str, directory: str, patch: bool) -> dict:
    with patched_trl(even_ranks="not exchanged" not in case) if patch else nullcontext():
        trainer = trl_runs.build(kind, model, directory, **OPTIONS | options)
        if kind in ("GRPO", "RLOO"):
            if "idle" in case or "uneven" not in case:
                take_advantages(trainer)
            if "uneven" in case:
                cut_completions(trainer)
        calls, backwards, backward = [], [], trainer.accelerator.backward

        def count_backward(*args, **kwargs):
            backwards.append(1)
            return backward(*args, **kwargs)

        def count_call(module, args, inputs):
            if inputs.get("fused_lm_head") and torch.is_grad_enabled():
                calls.append(1)

        trainer.accelerator.backward = count_backward
        trainer.model.register_forward_pre_hook(count_call, with_kwargs=True)
        exchange = torch.distributed.all_to_all_single
        with (
            mock.patch.object(torch.distributed, "all_to_all_single", wraps=exchange) as send,
            mock.patch.object(LoraLinear, "apply", wraps=LoraLinear.apply) as lora,
        ):
            run = trl_runs.run(trainer)
    options = OPTIONS | options
    assert len(run.log["loss"]) == options["max_steps"] // options.get("logging_steps", 1)
    log = {name: values for name, values in run.log.items() if name not in trl_runs.CLOCKS}
    tokens = sum(forward.tokens for forward in run.forwards)
    weights = gather_weights(trainer.model).tolist()
    counts = {"calls": len(calls), "backwards": len(backwards), "exchanges": send.call_count}
    counts["lora_calls"] = lora.call_count
    train_loss = trainer.state.log_history[-1]["train_loss"]
    return {"log": log, "train_loss": train_loss, "weights": weights, "tokens": tokens, **counts}


@torch.no_grad()
def gather_weights(model: torch.nn.Module) -> torch.Tensor:
    """One flat tensor. A collective."""
    parameters, gathered = list(model.parameters()), nullcontext()
    if hasattr(parameters[0], "ds_id"):
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(parameters)
    with gathered:
        return torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).flatten() for p in parameters])


def run_cases(wrapper: str, model: str, directory: str) -> dict:
    prepare_process(wrapper)
    own = {"ddp": CASES | UNEVEN_CASES, "zero3": SHARDED_CASES | BFLOAT16_LORA, "zero3-offload": OFFLOADED_CASES}
    cases = own.get(wrapper, SHARDED_CASES)
    return {
        name: [
            run_case(name, kind, options | find_options(wrapper), model, directory, patch) for patch in (False, True)
        ]
        for name, (kind, options) in cases.items()
    }


def main(model: str, result: str, *wrappers: str) -> None:
    results = {wrapper: run_cases(wrapper, model, result + "-run") for wrapper in wrappers}
    Path(result).write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
