"""What `benchmark.step` measures: a policy, rollouts as reinforcement learning makes them, and ways of a training step.

A random policy is flat, and its head is another problem than a trained one's. So the model learns a few thousand tokens
of this machine's Python sources by heart until its entropy on them is under a nat, which takes about a hundred short
steps. Prompts and completions are pieces of that text. They are not sampled: after so little training, the model would
run into loops.

Every way trains in TRL's own loop, `GRPOTrainer.train()`: its sampler, shuffle, micro-batches, clipping, optimizer and
log. Only `_generate_and_score_completions` is replaced, and it returns the rollouts.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import selective_log_softmax_and_entropy

from benchmark import texts
from benchmark.memory import PeakMemory
from liger_rl import FusedLinearGRPOLoss
from liger_rl.head.sparse import lists
from liger_rl.integrations.trl import patched_trl
from liger_rl.models.swap import swap_lm_head
from liger_rl.step.loss_step import policy_steps

SEED = 0
GROUP = 8  # completions of a prompt
# Of completions, in shares of the longest: the median, and the standard deviation of the logarithm.
MEDIAN, SPREAD = 0.55, 0.7
DRIFT_NATS = 0.1  # of the old policy from the current one, standard deviation per token
LEARNT_NATS, LAST, MOST_STEPS = 1.0, 5, 600
RATE, WARM_UP = 1e-2, 20
DOCUMENTS = 64  # of which the text is the beginning
TRL = "TRL"  # the way that others are compared with
CLIP = 0.2  # TRL's default, on both sides
# Steps of a run before those that count. The first ones compile, also for new lengths.
SETTLING = 3
# A run has no more steps than its shape's repeats, and after LEAST of them ends once they have taken so many seconds.
LEAST, SECONDS = 3, 3.0


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """How long the sequences of a batch are, in tokens."""

    prompt: int  # the longest
    completion: int  # the longest
    shortest_prompt: float = 1.0  # in shares of the longest
    groups: int = 4  # of GROUP completions, the fourth without advantage


# Of the second batch's completions, 41% is padding as in the first's, and the mean is 512 tokens.
BATCHES = {
    "short prompts": Lengths(prompt=256, completion=1024, shortest_prompt=0.25),
    "long prompts": Lengths(prompt=1024, completion=865),
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, its batches, and the text that it learns."""

    config: Callable[[], Any]
    dtype: str = "bfloat16"
    batches: dict[str, Lengths] = field(default_factory=lambda: BATCHES)
    text: int = 8192  # tokens that are learnt
    learnt_at_once: int = 4  # sequences of a training step, a prompt and a completion each, both as long as any
    source_bytes: int = 24 << 20  # what the vocabulary is learnt from
    max_tokens: int = 16384  # of a micro-batch, where there are several
    repeats: int = 8


def _qwen3(hidden_size: int, **sizes: Any) -> Qwen3Config:
    return Qwen3Config(
        **{
            "vocab_size": 151936,
            "hidden_size": hidden_size,
            "intermediate_size": 3 * hidden_size,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
            **sizes,
        }
    )


def _llama_3_8b() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )


SHAPES = {
    "qwen3-0.6b": Shape(config=lambda: _qwen3(1024)),
    "qwen3-1.7b": Shape(config=lambda: _qwen3(2048)),
    "llama-3-8b": Shape(config=_llama_3_8b, learnt_at_once=2, repeats=3),
    # Everything once, in seconds on a CPU.
    "toy": Shape(
        config=lambda: _qwen3(64, vocab_size=400, num_hidden_layers=1, head_dim=8),
        dtype="float32",
        batches={
            "short prompts": Lengths(prompt=8, completion=24, shortest_prompt=0.25),
            "long prompts": Lengths(prompt=24, completion=12),
        },
        text=64,
        source_bytes=200 << 10,
        max_tokens=256,
        repeats=2,
    ),
}


class Policy(NamedTuple):
    weights: dict[str, Tensor]  # on the CPU, in the shape's dtype
    parameters: int
    tokenizer: Tokenizer
    text: Tensor  # (n,) int64, on the CPU
    entropies: list[float]  # in nats, of each training step


@cache
def _vocabulary(size: int, source_bytes: int) -> tuple[Tokenizer, Tensor]:
    """Learnt from much more text than the policy learns, so that its ids are spread as those of a published one."""
    sources = texts.sources(source_bytes)
    tokenizer = texts.train_tokenizer(sources, size, source_bytes)
    return tokenizer, texts.encode(tokenizer, sources[:DOCUMENTS])


def random_model(shape: Shape, dtype: str, device: str) -> nn.Module:
    with torch.device(device):
        return AutoModelForCausalLM.from_config(shape.config(), attn_implementation="sdpa", dtype=getattr(torch, dtype))


def learnt_policy(shape: Shape, device: str) -> Policy:
    """Once its mean entropy in training is under LEARNT_NATS."""
    tokenizer, tokens = _vocabulary(shape.config().vocab_size, shape.source_bytes)
    text = tokens[: shape.text].long()
    torch.manual_seed(SEED)
    model = random_model(shape, "float32", device)
    entropies = learn(model, text, shape, device)
    weights = {name: weight.to("cpu", getattr(torch, shape.dtype)) for name, weight in model.state_dict().items()}
    return Policy(weights, sum(p.numel() for p in model.parameters()), tokenizer, text, entropies)


def learn(model: nn.Module, text: Tensor, shape: Shape, device: str) -> list[float]:
    """-> the entropy in nats at each training step. In float32 under bfloat16 autocast, with Adafactor, whose state
    leaves room for 8 billion parameters.

    Raises:
        SystemExit: the mean entropy of the last steps is not under LEARNT_NATS after MOST_STEPS.
    """
    optimizer = torch.optim.Adafactor(model.parameters(), lr=RATE, foreach=False)
    generator = torch.Generator().manual_seed(SEED)
    entropies: list[float] = []
    batches = cycle(shape.batches.values())
    while len(entropies) < LAST or statistics.mean(entropies[-LAST:]) > LEARNT_NATS:
        if len(entropies) == MOST_STEPS:
            raise SystemExit(f"the policy's entropy is {entropies[-1]:.2f} nats after {MOST_STEPS} training steps")
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (len(entropies) + 1) / WARM_UP)
        lengths = next(batches)
        pieces = [
            texts.windows(text, shape.learnt_at_once, length, generator)
            for length in (lengths.prompt, lengths.completion)
        ]
        ids = torch.cat(pieces, 1).to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            output = model(input_ids=ids, labels=ids, use_cache=False)
        output.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        log_p = output.logits[0].detach().float().log_softmax(-1)
        entropies.append(-(log_p.exp() * log_p).sum(-1).mean().item())
    return entropies


Batch = dict[str, Tensor]
"""What TRL's GRPOTrainer makes of rollouts, by its names: prompts padded on the left, completions on the right."""


def rollouts(lengths: Lengths, text: Tensor, device: str) -> Batch:
    """Groups of completions; advantages have mean 0 and deviation 1 in a group and are 0 in every fourth one."""
    generator = torch.Generator().manual_seed(SEED)
    groups, sequences = lengths.groups, lengths.groups * GROUP
    prompts = torch.linspace(lengths.shortest_prompt, 1.0, groups).mul(lengths.prompt).round().long()
    starts = torch.randint(len(text) - lengths.prompt, (groups,), generator=generator)
    normal = statistics.NormalDist()
    shares = [MEDIAN * math.exp(SPREAD * normal.inv_cdf((i + 0.5) / sequences)) for i in range(sequences)]
    completions = torch.tensor(shares).clamp(max=1.0).mul(lengths.completion).ceil().long()
    completions = completions[torch.randperm(sequences, generator=generator)]
    rewards = torch.randn(groups, GROUP, generator=generator)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
    advantages[3::4] = 0.0

    from_right = torch.arange(lengths.prompt - 1, -1, -1)
    prompt_mask = (from_right < prompts[:, None]).repeat_interleave(GROUP, 0)
    prompt_ids = text[starts[:, None] + lengths.prompt - 1 - from_right].repeat_interleave(GROUP, 0)
    completion_mask = torch.arange(lengths.completion) < completions[:, None]
    completion_ids = texts.windows(text, sequences, lengths.completion, generator)
    batch = {
        "prompt_ids": prompt_ids * prompt_mask,
        "prompt_mask": prompt_mask.long(),
        "completion_ids": completion_ids * completion_mask,
        "completion_mask": completion_mask.long(),
        "advantages": advantages.flatten(),
        "num_items_in_batch": completion_mask.sum(),
    }
    return {name: column.to(device) for name, column in batch.items()}


def columns_of(batch: Batch) -> dict[str, Tensor]:
    """The batch as `policy_steps` takes it: prompt and completion in one row."""
    prompt, completion = batch["prompt_mask"], batch["completion_mask"]
    columns = {
        "input_ids": torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
        "attention_mask": torch.cat([prompt, completion], 1),
        "mask": torch.cat([torch.zeros_like(prompt), completion], 1),
        "advantages": batch["advantages"],
        "num_items_in_batch": batch["num_items_in_batch"],
    }
    if "old_per_token_logps" in batch:
        columns["old_per_token_logps"] = nn.functional.pad(batch["old_per_token_logps"], (prompt.shape[1], 0))
    return columns


def loss_of(**options: Any) -> FusedLinearGRPOLoss:
    """TRL's default."""
    return FusedLinearGRPOLoss("dapo", epsilon_low=CLIP, epsilon_high=CLIP, **options)


@contextmanager
def kept_shares() -> Iterator[list[float]]:
    """-> a list that grows by the share of parts that each backward with a tolerance keeps."""
    shares: list[float] = []
    wait_for_counts = lists.wait_for_counts

    def recorded(*given: Any, **options: Any) -> Any:
        plan = wait_for_counts(*given, **options)
        shares.append(plan.share)
        return plan

    lists.wait_for_counts = recorded
    try:
        yield shares
    finally:
        lists.wait_for_counts = wait_for_counts


class Clock(TrainerCallback):
    """Times the steps of a `train()`, each from the end of the step before, and ends the run after enough of them.

    Memory and kept parts are those of the last step that settles, because looking at them takes time.
    """

    def __init__(self, device: str) -> None:
        self.device, self.memory, self.looking = device, PeakMemory(device), ExitStack()
        self.shares: list[float] = []
        self.step_ms: list[float] = []
        self.other_ms: list[float] = []  # of each step, neither in a forward nor in a backward
        self._passes: list[tuple[Any, Any]] = []  # beginnings and ends
        self._passing = False
        self._begun = math.nan

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, which is a forward or a backward. A GPU's events note its times, so that the host never waits."""

        def run(*given: Any, **options: Any) -> Any:
            if self._passing:  # a backward inside of a forward is timed already
                return call(*given, **options)
            begun, self._passing = self._now(), True
            result = call(*given, **options)
            self._passes.append((begun, self._now()))
            self._passing = False
            return result

        return run

    def _now(self) -> Any:
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_options: Any) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        taken = (time.perf_counter() - self._begun) * 1e3
        on_gpu = self.device == "cuda"
        passes = [begun.elapsed_time(end) if on_gpu else (end - begun) * 1e3 for begun, end in self._passes]
        self._passes.clear()
        if state.global_step > SETTLING:
            self.step_ms.append(taken)
            self.other_ms.append(taken - sum(passes))
        elif state.global_step == SETTLING - 1:
            self.shares = self.looking.enter_context(kept_shares())
            self.looking.enter_context(self.memory)
        else:
            self.looking.close()
        if len(self.step_ms) >= LEAST and sum(self.step_ms) >= SECONDS * 1e3:
            control.should_training_stop = True
        self._begun = time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way of training: what its trainer and its model have in place of TRL's own."""

    patch: dict[str, Any] | None = None  # options of `patch_trl`; None without it
    prepare: Callable[[nn.Module], object] = lambda model: None  # before TRL puts its head around the forward
    change: Callable[[GRPOTrainer, Clock], None] = lambda trainer, clock: None  # before the trainer trains
    micro_batches: int | None = None  # of the trainer; None for what the benchmark is asked for

    def patched(self) -> AbstractContextManager[None]:
        if self.patch is None:
            return nullcontext()
        return patched_trl(**self.patch)


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


def with_policy_steps(trainer: GRPOTrainer, clock: Clock, *, max_tokens: int, **options: Any) -> None:
    """Forwards and backwards by this library, the rest by the trainer."""
    loss = loss_of(**options)

    def forwards_and_backwards(batch: Batch) -> Tensor:
        steps = policy_steps(trainer.model, columns_of(batch), loss, max_tokens=max_tokens)
        for step in steps:
            step.loss.backward()
        return steps.total.loss

    def training_step(_model: nn.Module, inputs: Any, _num_items_in_batch: Any) -> Tensor:
        return clock.timed(forwards_and_backwards)(trainer._prepare_inputs(inputs))

    trainer.training_step = training_step


class Runner:
    """One policy, its batches, and the ways of training that start from it."""

    def __init__(self, shape: Shape, device: str, folder: str, *, micro_batches: int) -> None:
        self.shape, self.device, self.folder, self.micro_batches = shape, device, folder, micro_batches
        self.policy = learnt_policy(shape, device)
        label, level = f"policy_steps, max_tokens={shape.max_tokens}", "with_entropy"
        ours = partial(Way, prepare=swap_lm_head, micro_batches=1)
        steps = partial(with_policy_steps, max_tokens=shape.max_tokens)
        self.ways = {
            "full logits": Way(change=with_full_logits),
            TRL: Way(),
            "TRL, patch_trl(whole_step=False)": Way(patch={"whole_step": False}),
            "TRL, patch_trl()": Way(patch={}),
            label: ours(change=steps),
            f'{label}, metrics="{level}"': ours(change=partial(steps, metrics=level)),
        }

    def model(self) -> nn.Module:
        model = random_model(self.shape, self.shape.dtype, self.device)
        model.load_state_dict(self.policy.weights)
        return model

    def batch(self, lengths: Lengths) -> tuple[Batch, dict[str, Any]]:
        """The rollouts of an old policy, and what the batch and the current policy on it are."""
        batch, model = rollouts(lengths, self.policy.text, self.device), self.model()
        model.gradient_checkpointing_enable()
        loss = loss_of(metrics="with_entropy", grad_tolerance=3e-4)
        steps = policy_steps(model, columns_of(batch), loss, max_tokens=self.shape.max_tokens)
        with kept_shares() as shares:
            for step in steps:
                step.loss.backward()
        current, counted = steps.total.per_token_logps[:, lengths.prompt :], batch["completion_mask"] != 0
        generator = torch.Generator(self.device).manual_seed(SEED)
        noise = torch.randn(current.shape, generator=generator, device=self.device)
        batch["old_per_token_logps"] = current + DRIFT_NATS * noise * counted
        sequences, length = counted.shape[0], lengths.prompt + lengths.completion
        return batch, {
            "sequences": sequences,
            "groups": lengths.groups,
            "row_tokens": length,
            "padding_share": 1 - (batch["prompt_mask"].sum() + counted.sum()).item() / (sequences * length),
            "counted_tokens": counted.sum().item(),
            "idle_share": (batch["advantages"] == 0).double().mean().item(),
            "mean_advantage": batch["advantages"].abs().mean().item(),
            "entropy": steps.total.metrics["entropy"].item(),
            "kept_share_3e-4": statistics.mean(shares) if shares else None,
            "surprise": -current[counted].mean().item(),
        }

    def train(self, way: Way, batch: Batch, *, steps: int | None = None) -> tuple[Clock, dict[str, float]]:
        """A run from the policy's weights -> its clock and TRL's log of the last step.

        TRL has its defaults, but it logs every step, and its learning rate is 0. So the weights stay and each step is
        the same work. AdamW still computes all of it. TRL shuffles the sequences of each step, in all ways alike.
        """
        gc.collect()  # what the run before or its error held
        if self.device == "cuda":
            torch.cuda.empty_cache()
        steps = SETTLING + self.shape.repeats if steps is None else steps
        sequences, clock = batch["advantages"].shape[0], Clock(self.device)
        micro_batches, end = way.micro_batches or self.micro_batches, texts.END_OF_TEXT
        arguments = GRPOConfig(
            output_dir=self.folder,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            log_level="error",
            logging_steps=1,
            use_cpu=self.device == "cpu",
            bf16=self.shape.dtype == "bfloat16",
            learning_rate=0.0,
            max_steps=steps,
            max_completion_length=batch["completion_ids"].shape[1],
            per_device_train_batch_size=sequences // micro_batches,
            gradient_accumulation_steps=micro_batches,
            num_generations=GROUP,
        )
        model = self.model()
        way.prepare(model)
        arguments._n_gpu = min(arguments.n_gpu, 1)  # else all GPUs of the host take part
        with way.patched(), clock.looking:
            trainer = GRPOTrainer(
                model=model,
                args=arguments,
                train_dataset=Dataset.from_dict({"prompt": ["def"] * (sequences // GROUP * steps)}),
                processing_class=PreTrainedTokenizerFast(
                    tokenizer_object=self.policy.tokenizer, eos_token=end, pad_token=end
                ),
                reward_funcs=lambda completions, **_columns: [0.0] * len(completions),
                callbacks=[clock],
            )
            trainer.remove_callback(PrinterCallback)
            trainer._generate_and_score_completions = lambda _prompts: dict(batch)
            trainer.compute_loss = clock.timed(trainer.compute_loss)
            trainer.accelerator.backward = clock.timed(trainer.accelerator.backward)
            way.change(trainer, clock)
            torch.manual_seed(SEED)
            trainer.train()
        return clock, next(entry for entry in reversed(trainer.state.log_history) if "loss" in entry)
