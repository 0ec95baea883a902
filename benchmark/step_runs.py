"""The ways of a training step that `benchmark.step` measures.

Every way trains in TRL's own loop, `train()` of a trainer: its sampler, shuffle, micro-batches, clipping, optimizer and
log. `_generate_and_score_completions` of GRPO and distillation is replaced, and returns the rollouts. The data sets of
SFT and DPO hold token ids. The learning rate is 0, so the weights stay and each step is the
same work. AdamW still computes all of it.
"""

import gc
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from datasets import Dataset, concatenate_datasets
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback, TrainerControl, TrainerState
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer, pack_dataset
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import selective_log_softmax_and_entropy

from benchmark import texts
from benchmark.environment import ROOT
from benchmark.memory import PeakMemory
from benchmark.step_batches import (
    SEED,
    Batch,
    ModelSize,
    Task,
    count_flop,
    describe_batch,
    join_columns,
    make_examples,
    make_rollouts,
)
from benchmark.step_policy import (
    Policy,
    Shape,
    add_old_policy,
    learnt_policy,
    make_model,
    make_reference,
    random_model,
    random_policy,
)
from liger_rl import FusedLinearGRPOLoss, loss_steps, swap_lm_head
from liger_rl.integrations.trl import patched_trl

CLIP = 0.2  # TRL's default, on both sides
# TRL's defaults, written out because Unsloth has others.
GRPO = {"loss_type": "dapo", "epsilon": CLIP, "epsilon_high": CLIP, "beta": 0.0, "mask_truncated_completions": False}
# A trainer that logs each step, says nothing, and does not learn.
QUIET = {
    "report_to": [], "save_strategy": "no", "disable_tqdm": True, "log_level": "error", "logging_steps": 1,
    "learning_rate": 0.0,
}  # fmt: skip
OPTIMIZER = {"optim": "adamw_torch_fused", "weight_decay": 0.0, "max_grad_norm": 1.0}
UNSLOTH = "UNSLOTH_PACKAGES"  # environment variable: the folder of Unsloth and the packages that it needs
UNSLOTH_SECONDS = 420


class Clock(TrainerCallback):
    """Times the steps of a `train()` after the settling ones, each from the end of the step before.

    Memory is that of the last step that settles, because looking at it takes time.
    """

    def __init__(self, device: str, settling: int) -> None:
        self.device, self.settling, self.memory, self.looking = device, settling, PeakMemory(device), ExitStack()
        self.step_ms: list[float] = []
        self.other_ms: list[float] = []  # of each step, outside of forwards, backwards and clipping
        self.scoring_ms: list[float] = []  # of each step, and a part of it
        self.forwards = 0  # of models, in the steps that count
        self._passes: list[Any] = []  # beginning and end of the step's forwards and backwards
        self._forwards = 0  # of the current step
        self._scoring = 0.0  # milliseconds of the current step
        self._begun = math.nan

    @contextmanager
    def counted_forwards(self, *models: Any) -> Iterator[None]:
        """Of their bodies. A recomputed layer does not read the embedding again.

        Not by a hook, and not by a class of layers that is changed: the step keeps batches that these may read.
        """
        tables: Any = [model.get_input_embeddings() for model in models]
        shapes = {(table.num_embeddings, table.embedding_dim) for table in tables}
        embed = nn.functional.embedding

        def counted(ids: Tensor, weight: Tensor, *given: Any, **options: Any) -> Tensor:
            self._forwards += tuple(weight.shape) in shapes
            return embed(ids, weight, *given, **options)

        with mock.patch.object(nn.functional, "embedding", counted):
            yield

    @contextmanager
    def timed_scoring(self) -> Iterator[None]:
        begun = self._wait()
        yield
        self._scoring = (self._wait() - begun) * 1e3

    def _wait(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _now(self) -> Any:
        """A GPU's events note its times, so that the host never waits."""
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def on_step_begin(self, *_arguments: Any, **_options: Any) -> None:
        self._passes = [self._now()]

    def on_pre_optimizer_step(self, *_arguments: Any, **_options: Any) -> None:
        self._passes.append(self._now())

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_options: Any) -> None:
        taken = (self._wait() - self._begun) * 1e3
        begun, ended = self._passes
        passes = begun.elapsed_time(ended) if self.device == "cuda" else (ended - begun) * 1e3
        if state.global_step > self.settling:
            self.step_ms.append(taken)
            self.other_ms.append(taken - passes)
            self.scoring_ms.append(self._scoring)
            self.forwards += self._forwards
        elif state.global_step == self.settling - 1:
            self.looking.enter_context(self.memory)
        else:
            self.looking.close()
        self._forwards = 0
        self._begun = time.perf_counter()


class Measured(NamedTuple):
    """A run of `train()`."""

    step_ms: list[float]
    other_ms: list[float]
    scoring_ms: list[float]  # 0 without scoring
    peak_mib: float  # weights and the optimizer's state included, which is what has to fit
    forwards: float  # of bodies in a step
    saved_share: float | None  # of the tokens, which the body has not run; None without the patch
    loss: float
    grad_norm: float


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way of training: what its trainer and its model have in place of TRL's own."""

    label: str
    patch: dict[str, Any] | None = None  # options of `patch_trl`; None without it
    options: dict[str, Any] = field(default_factory=dict)  # of the trainer's config
    prepare: Callable[[nn.Module], object] = lambda model: None  # before TRL puts its head around the forward
    change: Callable[[Any, Clock], None] = lambda trainer, clock: None  # before the trainer trains
    micro_batches: int | None = None  # of the trainer; None for the task's

    def patched(self) -> AbstractContextManager[None]:
        return nullcontext() if self.patch is None else patched_trl(**self.patch)


def with_full_logits(trainer: GRPOTrainer, _clock: Clock) -> None:
    """The logits that TRL avoids, in float32, as accelerate returns them."""

    def logps_and_entropies(
        model: nn.Module, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **_options: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        with trainer.accelerator.autocast():
            logits = model(
                input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=logits_to_keep + 1, use_cache=False
            ).logits[:, :-1]
        completion_ids = input_ids[:, -logits_to_keep:]
        return *selective_log_softmax_and_entropy(logits, completion_ids, entropy_requires_grad=False), None

    trainer._get_per_token_logps_and_entropies = logps_and_entropies


def with_scoring(trainer: GRPOTrainer, clock: Clock) -> None:
    """The old policy's log-probabilities, as TRL computes them before a step that needs them; they are not used."""
    make_batch = trainer._generate_and_score_completions

    def make_and_score(prompts: Any) -> Batch:
        batch = make_batch(prompts)
        columns = join_columns(batch)
        checkpoints = trainer.args.gradient_checkpointing_kwargs
        with clock.timed_scoring(), torch.no_grad(), disable_gradient_checkpointing(trainer.model, checkpoints):
            trainer._get_per_token_logps_and_entropies(
                trainer.model,
                columns["input_ids"],
                columns["attention_mask"],
                batch["completion_ids"].shape[1],
                batch_size=trainer.args.per_device_train_batch_size,
            )
        return batch

    trainer._generate_and_score_completions = make_and_score


def with_loss_steps(trainer: GRPOTrainer, _clock: Clock) -> None:
    """Forward and backward of the whole batch by this library, with TRL's metrics; the rest by the trainer."""
    loss = FusedLinearGRPOLoss("dapo", epsilon_low=CLIP, epsilon_high=CLIP, metrics="with_entropy")

    def forward_and_backward(batch: Batch) -> Tensor:
        steps = loss_steps(trainer.model, join_columns(batch), loss)
        for step in steps:
            step.loss.backward()
        return steps.total.loss

    def training_step(_model: nn.Module, inputs: Any, _num_items_in_batch: Any) -> Tensor:
        return forward_and_backward(trainer._prepare_inputs(inputs))

    trainer.training_step = training_step


def use_flash_attention(model: Any) -> None:
    """Of the package flash-attn-4."""
    model.set_attn_implementation("flash_attention_4")


LIGER = {"use_liger_kernel": True}
NO_CHECKPOINTING = {"gradient_checkpointing": False}
PACKED, PADDING_FREE = {"packing": True}, {"padding_free": True}
ON_THE_HOST = {"device": "cpu", "pin_memory": True}


def _make_zero3(**options: Any) -> dict[str, Any]:
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    # torch's optimizer, because DeepSpeed would have to compile its own.
    deepspeed = {"zero_optimization": {"stage": 3, **options}, "zero_force_ds_cpu_optimizer": False}
    return {"deepspeed": deepspeed | {"bf16": {"enabled": "auto"}} | dict.fromkeys(sizes, "auto")}


# How ranks share a model -> options of a trainer's config.
SHARDINGS: dict[str, dict[str, Any]] = {
    "DDP": {"ddp_find_unused_parameters": False},
    "FSDP2": {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
    },
    "ZeRO-3": _make_zero3(),
    "ZeRO-3 offload": _make_zero3(offload_param=ON_THE_HOST, offload_optimizer=ON_THE_HOST),
}
TRL, TRL_LIGER, UNSLOTH_STEP = "trl", "trl-liger", "unsloth"
WAYS = {
    TRL: Way(label="TRL"),
    "trl-no-checkpointing": Way(label="TRL, no checkpointing", options=NO_CHECKPOINTING),
    TRL_LIGER: Way(label="TRL, use_liger_kernel", options=LIGER),
    "trl-liger-no-checkpointing": Way(
        label="TRL, use_liger_kernel, no checkpointing", options=LIGER | NO_CHECKPOINTING
    ),
    "trl-liger-flash": Way(
        label="TRL, use_liger_kernel, flash_attention_4", options=LIGER, prepare=use_flash_attention
    ),
    "trl-liger-flash-no-checkpointing": Way(
        label="TRL, use_liger_kernel, flash_attention_4, no checkpointing",
        options=LIGER | NO_CHECKPOINTING,
        prepare=use_flash_attention,
    ),
    "head": Way(label="TRL, patch_trl(whole_step=False)", patch={"whole_step": False}),
    "memory-0": Way(label="TRL, patch_trl(memory=0)", patch={"memory": 0}),
    "patch": Way(label="TRL, patch_trl()", patch={}),
    "memory-0-liger": Way(label="TRL, patch_trl(memory=0), use_liger_kernel", patch={"memory": 0}, options=LIGER),
    "patch-liger": Way(label="TRL, patch_trl(), use_liger_kernel", patch={}, options=LIGER),
    "uneven-liger": Way(
        label="TRL, patch_trl(even_ranks=False), use_liger_kernel", patch={"even_ranks": False}, options=LIGER
    ),
    "loss-steps": Way(label="loss_steps", prepare=swap_lm_head, change=with_loss_steps, micro_batches=1),
    "full-logits": Way(label="full logits", change=with_full_logits),
    UNSLOTH_STEP: Way(label="Unsloth"),
}


def without_padding(name: str, options: dict[str, Any], *keys: str) -> dict[str, Way]:
    """Ways of SFT with other options of its batches."""
    return {
        f"{key}-{name}": replace(WAYS[key], label=f"{WAYS[key].label}, {name}", options=WAYS[key].options | options)
        for key in keys
    }


FLASH = "trl-liger-flash"
WAYS |= without_padding("packing", PACKED, TRL, FLASH, f"{FLASH}-no-checkpointing", "memory-0", "patch")
WAYS |= without_padding("packing", PACKED, TRL_LIGER, f"{TRL_LIGER}-no-checkpointing", "memory-0-liger", "patch-liger")
WAYS |= without_padding("padding_free", PADDING_FREE, TRL, FLASH, f"{FLASH}-no-checkpointing", "patch", "patch-liger")


def make_tokenizer(policy: Policy) -> PreTrainedTokenizerFast:
    """Padding has the id 0."""
    pad = policy.tokenizer.id_to_token(0)
    return PreTrainedTokenizerFast(tokenizer_object=policy.tokenizer, eos_token=texts.END_OF_TEXT, pad_token=pad)


def make_arguments(
    task: Task, dtype: str, device: str, folder: str, steps: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Of a trainer's config. Logs every step."""
    per_step = task.lengths.groups * (1 if task.trainer == "DPO" else task.lengths.members)
    arguments = {
        "output_dir": folder,
        **QUIET,
        "use_cpu": device == "cpu",
        "bf16": dtype == "bfloat16",
        "max_steps": steps,
        "per_device_train_batch_size": per_step // task.micro_batches,
        "gradient_accumulation_steps": task.micro_batches,
        "gradient_checkpointing": True,
        **OPTIMIZER,
    }
    if task.trainer == "GRPO":
        lengths = {"max_completion_length": task.lengths.completion, "num_generations": task.lengths.members}
        arguments |= GRPO | lengths
    elif task.trainer == "Distillation":
        arguments["max_completion_length"] = task.lengths.completion
    else:
        arguments["max_length"] = task.lengths.packed_row if options.get("packing") else None
    return arguments | options


def on_one_gpu(config: Any) -> Any:
    config._n_gpu = min(config.n_gpu, 1)  # else all GPUs of the host take part
    return config


def grpo_trainer(model: nn.Module, tokenizer: Any, batch: Batch, arguments: dict[str, Any]) -> GRPOTrainer:
    """TRL shuffles the sequences of each step, in all ways alike."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    prompts = ranks * len(batch["advantages"]) // arguments["num_generations"] * arguments["max_steps"]
    trainer = GRPOTrainer(
        model=model,
        args=on_one_gpu(GRPOConfig(**arguments)),
        train_dataset=Dataset.from_dict({"prompt": ["def"] * prompts}),
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_columns: [0.0] * len(completions),
    )
    trainer._generate_and_score_completions = lambda _prompts: dict(batch)
    return trainer


def distillation_trainer(model: nn.Module, tokenizer: Any, batch: Batch, arguments: dict[str, Any]) -> Any:
    """The teacher likes most what the model likes least; random models are too close to each other for a loss."""
    from trl import DistillationConfig, DistillationTrainer  # since TRL 1.16

    count = len(batch["prompt_ids"]) * arguments["max_steps"]
    trainer = DistillationTrainer(
        model=model,
        teacher_model=make_reference(model, scale=-1.0),
        args=on_one_gpu(DistillationConfig(**arguments)),
        train_dataset=Dataset.from_dict({"prompt": ["def"] * count}),
        processing_class=tokenizer,
    )
    trainer._generate_and_score_completions = lambda _prompts: dict(batch)
    return trainer


def sft_trainer(model: nn.Module, tokenizer: Any, examples: list[Any], arguments: dict[str, Any]) -> SFTTrainer:
    """TRL packs the examples of a step, so that all steps are the same.

    Raises:
        ValueError: the batch's sequences are not for packing, or do not fill as many rows in each micro-batch.
    """
    data, micro_batches = Dataset.from_list(examples), arguments["gradient_accumulation_steps"]
    if arguments.get("packing"):
        if arguments["max_length"] is None:
            raise ValueError("packing needs a batch with packed_row, such as 'sft packed'")
        data = pack_dataset(data, arguments["max_length"])
        if len(data) % micro_batches:
            raise ValueError(f"packed rows must be a multiple of the {micro_batches} micro-batches, got {len(data)}")
        arguments = arguments | {"per_device_train_batch_size": len(data) // micro_batches}
    return SFTTrainer(
        model=model,
        args=on_one_gpu(SFTConfig(**arguments, dataset_kwargs={"skip_prepare_dataset": True})),
        train_dataset=concatenate_datasets([data] * arguments["max_steps"]),
        processing_class=tokenizer,
    )


def dpo_trainer(model: nn.Module, tokenizer: Any, examples: list[Any], arguments: dict[str, Any]) -> DPOTrainer:
    with mock.patch.object(DPOTrainer, "_prepare_dataset", lambda _self, dataset, *_options: dataset):
        return DPOTrainer(
            model=model,
            ref_model=None if hasattr(model, "peft_config") else make_reference(model),
            args=on_one_gpu(DPOConfig(**arguments)),
            train_dataset=Dataset.from_list(examples * arguments["max_steps"]),
            processing_class=tokenizer,
        )


TRAINERS: dict[str, Callable[..., Any]] = {
    "GRPO": grpo_trainer, "Distillation": distillation_trainer, "SFT": sft_trainer, "DPO": dpo_trainer,
}  # fmt: skip


def run_trainer(trainer: Any, clock: Clock) -> Measured:
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(clock)
    if isinstance(trainer, (SFTTrainer, DPOTrainer)):  # examples in their order: each step has the same
        trainer._get_train_sampler = SequentialSampler
    others = (getattr(trainer, name, None) for name in ("ref_model", "teacher_model"))
    models = [trainer.model, *(model for model in others if model is not None)]
    torch.manual_seed(SEED)
    with clock.counted_forwards(*models), clock.looking:
        trainer.train()
    log = next(entry for entry in reversed(trainer.state.log_history) if "loss" in entry)
    return Measured(
        step_ms=clock.step_ms,
        other_ms=clock.other_ms,
        scoring_ms=clock.scoring_ms,
        peak_mib=(clock.memory.base + clock.memory.peak_bytes) / 2**20,
        forwards=clock.forwards / max(len(clock.step_ms), 1),
        saved_share=log.get("liger_rl/body_tokens_saved"),
        loss=log["loss"],
        grad_norm=log["grad_norm"],
    )


@contextmanager
def restored_module(model: Any) -> Iterator[None]:
    """Puts back the functions and classes that Liger replaces in the module of the model's class."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    module: ModuleType = sys.modules[type(base).__module__]
    before = dict(vars(module))
    try:
        yield
    finally:
        vars(module).update(before)


class Data(NamedTuple):
    """A task's batch."""

    inputs: Any  # rollouts, or examples of a data set
    about: dict[str, Any]  # what the batch is, and what the policy is on it


class Runner:
    """A shape's policies, its batches, and runs that start from them."""

    def __init__(self, shape: Shape, device: str, folder: str, sharding: str | None = None) -> None:
        self.shape, self.device, self.folder, self.sharding = shape, device, folder, sharding

    @cached_property
    def random(self) -> Policy:
        return random_policy(self.shape)

    @cached_property
    def learnt(self) -> Policy:
        return learnt_policy(self.shape, self.device)

    def policy(self, task: Task) -> Policy:
        return self.learnt if task.learns else self.random

    def model(self, task: Task) -> nn.Module:
        return make_model(self.shape, self.policy(task), task, self.device)

    def data(self, task: Task) -> Data:
        text, about = self.policy(task).text, describe_batch(task)
        about |= {
            "dtype": self.shape.dtype,
            "weights": self.shape.weights,
            "training_steps": len(self.policy(task).entropies),
        }
        about["flop"] = count_flop(task, ModelSize.of(random_model(self.shape, self.shape.dtype, "meta")))
        if not task.has_rollouts:
            return Data(make_examples(task, text), about)
        batch = make_rollouts(task, text, self.device)
        if task.trainer == "Distillation":
            return Data(batch, about)
        about |= add_old_policy(self.model(task), batch)
        return Data(batch, about | {"mean_advantage": batch["advantages"].abs().mean().item()})

    def train(self, key: str, task: Task, inputs: Any, *, settling: int, steps: int, scores: bool = False) -> Measured:
        """A run from the policy's weights. Kernels compile in the settling steps; the last of them measures memory."""
        gc.collect()  # what the run before or its error held
        if self.device == "cuda":
            torch.cuda.empty_cache()
        way, policy, clock = WAYS[key], self.policy(task), Clock(self.device, settling)
        if way.micro_batches is not None:
            task = replace(task, micro_batches=way.micro_batches)
        arguments = make_arguments(task, self.shape.dtype, self.device, self.folder, settling + steps, way.options)
        arguments |= SHARDINGS[self.sharding] if self.sharding else {}
        if key == UNSLOTH_STEP:
            return self._train_in_process(task, inputs, arguments, settling)
        model = self.model(task)
        way.prepare(model)
        with restored_module(model), way.patched():
            trainer = TRAINERS[task.trainer](model, make_tokenizer(policy), inputs, arguments)
            way.change(trainer, clock)
            if scores:
                with_scoring(trainer, clock)
            return run_trainer(trainer, clock)

    def _train_in_process(self, task: Task, batch: Batch, arguments: dict[str, Any], settling: int) -> Measured:
        """Unsloth has to be imported before transformers, and needs other versions of TRL and datasets."""
        if task.trainer != "GRPO" or task.learns:
            raise ValueError("Unsloth runs batches of GRPO without the pad id among their tokens")
        if UNSLOTH not in os.environ:
            raise RuntimeError(f"{UNSLOTH} must be the folder of Unsloth's packages")
        folder = Path(self.folder, "unsloth")
        self._save_inputs(folder, task, batch)
        options = {
            "arguments": arguments,
            "dropout": task.lora_dropout,
            "dtype": self.shape.weights,
            "settling": settling,
        }
        (folder / "options.json").write_text(json.dumps(options))
        gc.collect()
        torch.cuda.empty_cache()
        paths = os.pathsep.join(filter(None, [os.environ[UNSLOTH], os.environ.get("PYTHONPATH")]))
        subprocess.run(
            [sys.executable, "-m", "benchmark.peers.unsloth_step", str(folder)],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": paths,
                "UNSLOTH_COMPILE_LOCATION": str(folder / "compiled"),
                "UNSLOTH_DISABLE_STATISTICS": "1",
                "HF_HUB_OFFLINE": "1",
            },
            timeout=UNSLOTH_SECONDS,
            check=True,
        )
        return Measured(**json.loads((folder / "measured.json").read_text()))

    def _save_inputs(self, folder: Path, task: Task, batch: Batch) -> None:
        model: Any = self.model(task)
        adapters = {name: value.cpu() for name, value in model.state_dict().items() if "lora_" in name}
        base = model if task.lora_dropout is None else model.unload()
        base.save_pretrained(folder)
        make_tokenizer(self.policy(task)).save_pretrained(folder)
        torch.save({"batch": {name: x.cpu() for name, x in batch.items()}, "adapters": adapters}, folder / "inputs.pt")
