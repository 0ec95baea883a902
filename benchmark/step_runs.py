"""What `benchmark.step` measures: a policy, rollouts as reinforcement learning makes them, and ways of a training step.

A random policy is flat, and its head is another problem than a trained one's. So the model learns a few thousand tokens
of this machine's Python sources by heart until its entropy on them is under a nat, which takes about a hundred short
steps. Prompts and completions are pieces of that text. They are not sampled: after so little training, the model would
run into loops.
"""

import math
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import selective_log_softmax_and_entropy

from benchmark import real_policy
from liger_rl import FusedLinearGRPOLoss
from liger_rl.integrations.transformers import swap_lm_head
from liger_rl.integrations.trl import patched_trl
from liger_rl.step.policy_step import PolicyStep, completion_logps, policy_step, policy_steps

SEED = 0
GROUP = 8  # completions of a prompt
# Of completions, in shares of the longest: the median, and the standard deviation of the logarithm.
MEDIAN, SPREAD = 0.55, 0.7
SHORTEST_PROMPT = 0.25  # in shares of the longest
DRIFT_NATS = 0.1  # of the old policy from the current one, standard deviation per token
LEARNT_NATS, LAST, MOST_STEPS = 1.0, 5, 600
RATE, WARM_UP = 1e-2, 20
DOCUMENTS = 64  # of which the text is the beginning
TRL = "TRL"  # the way that others are compared with
PATCHED = "TRL, patch_trl()"
CLIP = 0.2  # TRL's default, on both sides


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, its batch, and the text that it learns."""

    config: Callable[[], Any]
    dtype: str = "bfloat16"
    groups: int = 4  # of GROUP completions
    prompt: int = 256  # tokens of the longest
    completion: int = 1024  # tokens of the longest
    text: int = 8192  # tokens that are learnt
    learnt_at_once: int = 4  # sequences of a training step, a prompt and a completion each, both as long as any
    source_bytes: int = 24 << 20  # what the vocabulary is learnt from
    max_tokens: int = 16384  # of a micro-batch, where there are several
    repeats: int = 5


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
        config=lambda: _qwen3(64, vocab_size=400, num_hidden_layers=2, head_dim=8),
        dtype="float32",
        prompt=8,
        completion=24,
        text=64,
        source_bytes=200 << 10,
        max_tokens=128,
        repeats=2,
    ),
}


class Policy(NamedTuple):
    model: nn.Module
    tokenizer: Tokenizer
    text: Tensor  # (n,) int64, on the CPU
    entropies: list[float]  # in nats, of each training step


@cache
def _vocabulary(size: int, source_bytes: int) -> tuple[Tokenizer, Tensor]:
    """Learnt from much more text than the policy learns, so that its ids are spread as those of a published one."""
    texts = real_policy.sources(source_bytes)
    recipe = replace(real_policy.FULL, vocab=size, tokenizer_bytes=source_bytes)
    tokenizer = real_policy.train_tokenizer(texts, recipe)
    return tokenizer, real_policy.encode(tokenizer, texts[:DOCUMENTS])


def learnt_policy(shape: Shape, device: str) -> Policy:
    """The model in the shape's dtype, once its mean entropy in training is under LEARNT_NATS."""
    config = shape.config()
    tokenizer, tokens = _vocabulary(config.vocab_size, shape.source_bytes)
    text = tokens[: shape.text].long()
    torch.manual_seed(SEED)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    entropies = learn(model, text, shape, device)
    return Policy(model.to(getattr(torch, shape.dtype)), tokenizer, text, entropies)


def learn(model: nn.Module, text: Tensor, shape: Shape, device: str) -> list[float]:
    """-> the entropy in nats at each training step. In float32 under bfloat16 autocast, with Adafactor, whose state
    leaves room for 8 billion parameters.

    Raises:
        SystemExit: the mean entropy of the last steps is not under LEARNT_NATS after MOST_STEPS.
    """
    optimizer = torch.optim.Adafactor(model.parameters(), lr=RATE, foreach=False)
    generator = torch.Generator().manual_seed(SEED)
    entropies: list[float] = []
    while len(entropies) < LAST or statistics.mean(entropies[-LAST:]) > LEARNT_NATS:
        if len(entropies) == MOST_STEPS:
            raise SystemExit(f"the policy's entropy is {entropies[-1]:.2f} nats after {MOST_STEPS} training steps")
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (len(entropies) + 1) / WARM_UP)
        lengths = (shape.prompt, shape.completion)
        pieces = [real_policy.windows(text, shape.learnt_at_once, length, generator) for length in lengths]
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


def rollouts(shape: Shape, text: Tensor, device: str) -> Batch:
    """Groups of completions; advantages have mean 0 and deviation 1 in a group and are 0 in every fourth one."""
    generator = torch.Generator().manual_seed(SEED)
    sequences = shape.groups * GROUP
    prompts = torch.linspace(SHORTEST_PROMPT, 1.0, shape.groups).mul(shape.prompt).round().long()
    starts = torch.randint(len(text) - shape.prompt, (shape.groups,), generator=generator)
    normal = statistics.NormalDist()
    shares = [MEDIAN * math.exp(SPREAD * normal.inv_cdf((i + 0.5) / sequences)) for i in range(sequences)]
    lengths = torch.tensor(shares).clamp(max=1.0).mul(shape.completion).ceil().long()
    lengths = lengths[torch.randperm(sequences, generator=generator)]
    rewards = torch.randn(shape.groups, GROUP, generator=generator)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
    advantages[3::4] = 0.0

    from_right = torch.arange(shape.prompt - 1, -1, -1)
    prompt_mask = (from_right < prompts[:, None]).repeat_interleave(GROUP, 0)
    prompt_ids = text[starts[:, None] + shape.prompt - 1 - from_right].repeat_interleave(GROUP, 0)
    completion_mask = torch.arange(shape.completion) < lengths[:, None]
    completion_ids = real_policy.windows(text, sequences, shape.completion, generator)
    batch = {
        "prompt_ids": prompt_ids * prompt_mask,
        "prompt_mask": prompt_mask.long(),
        "completion_ids": completion_ids * completion_mask,
        "completion_mask": completion_mask.long(),
        "advantages": advantages.flatten(),
        "num_items_in_batch": completion_mask.sum(),
    }
    return {name: column.to(device) for name, column in batch.items()}


def repeated(batch: Batch, times: int) -> Batch:
    """The same sequences several times."""
    columns = {name: c.repeat(times, *(1,) * (c.dim() - 1)) for name, c in batch.items() if c.dim() > 0}
    return columns | {"num_items_in_batch": batch["num_items_in_batch"] * times}


def columns_of(batch: Batch) -> dict[str, Tensor]:
    """The batch as `policy_step` takes it: prompt and completion in one row."""
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


class Trainer(GRPOTrainer):
    """TRL's, which is given the rollouts that it would generate; with `full_logits`, also the logits that it avoids."""

    full_logits = False

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return generation_batch

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if not self.full_logits:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, **options
            )
        with self.accelerator.autocast():
            logits = model(
                input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=logits_to_keep + 1, use_cache=False
            ).logits[:, :-1]
        completion_ids = input_ids[:, -logits_to_keep:]
        return *selective_log_softmax_and_entropy(logits, completion_ids, entropy_requires_grad=False), None


def make_trainer(policy: Policy, shape: Shape, device: str, folder: str) -> Trainer:
    """With TRL's defaults. Its learning rate is 0: every step computes all of it, and the weights stay as they are."""
    end = real_policy.END_OF_TEXT
    arguments = GRPOConfig(
        output_dir=folder,
        report_to=[],
        use_cpu=device == "cpu",
        bf16=shape.dtype == "bfloat16",
        learning_rate=0.0,
        max_completion_length=shape.completion,
        per_device_train_batch_size=shape.groups * GROUP,
        num_generations=GROUP,
    )
    trainer = Trainer(
        model=policy.model,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["def"] * arguments.per_device_train_batch_size}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=policy.tokenizer, eos_token=end, pad_token=end),
        reward_funcs=lambda completions, **_columns: [0.0] * len(completions),
    )
    # What `train` does before its first step.
    trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    trainer.create_optimizer()
    trainer.model_wrapped, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


class Runner:
    """One model with its optimizer, and the ways of a training step on it."""

    def __init__(self, shape: Shape, device: str, folder: str) -> None:
        policy = learnt_policy(shape, device)
        # Before accelerate puts autocast around the forward of the instance.
        swap_lm_head(policy.model)
        self.shape, self.policy, self.trainer = shape, policy, make_trainer(policy, shape, device, folder)
        self.model, self.optimizer = self.trainer.model, self.trainer.optimizer
        self.batch = rollouts(shape, policy.text, device)
        current = completion_logps(self.model, columns_of(self.batch), self.loss())[:, shape.prompt :]
        counted = self.batch["completion_mask"] != 0
        self.surprise = -current[counted].mean().item()
        generator = torch.Generator(device).manual_seed(SEED)
        noise = torch.randn(current.shape, generator=generator, device=device)
        self.batch["old_per_token_logps"] = current + DRIFT_NATS * noise * counted
        loss, several = self.loss(), {"max_tokens": shape.max_tokens}
        label, level = f"policy_steps, max_tokens={shape.max_tokens}", "with_entropy"
        self.ways: dict[str, Callable[[Batch], Tensor]] = {
            "full logits": lambda batch: self.trl(batch, full_logits=True),
            TRL: self.trl,
            PATCHED: self.trl,
            'policy_step, trim=False, idle="backward"': lambda batch: self.ours(
                batch, loss, trim=False, idle="backward"
            ),
            "policy_step": lambda batch: self.ours(batch, loss),
            label: lambda batch: self.ours(batch, loss, **several),
            f'{label}, metrics="{level}"': lambda batch: self.ours(batch, self.loss(metrics=level), **several),
        }

    @staticmethod
    def loss(**options: Any) -> FusedLinearGRPOLoss:
        """TRL's default."""
        return FusedLinearGRPOLoss("dapo", epsilon_low=CLIP, epsilon_high=CLIP, **options)

    def step(self, way: Callable[[Batch], Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """-> the loss and the norm of its gradient."""
        loss = way(batch)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.trainer.args.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm

    @property
    def entropy(self) -> float:
        """Mean of the tokens that count in nats, as TRL has logged it last."""
        return self.trainer._metrics["train"]["entropy"][-1]

    def around(self, way: str) -> AbstractContextManager[None]:
        """What holds for all of a run that trains in this way, and is no part of a step."""
        return patched_trl() if way == PATCHED else nullcontext()

    def trl(self, batch: Batch, *, full_logits: bool = False) -> Tensor:
        """-> the loss, after its backward."""
        self.trainer.full_logits = full_logits
        return self.trainer.training_step(self.trainer.model_wrapped, batch, batch["num_items_in_batch"])

    def ours(self, batch: Batch, loss: FusedLinearGRPOLoss, **options: Any) -> Tensor:
        """-> the loss, after its backward: in one micro-batch, or in several where the options have max_tokens."""
        call = policy_steps if "max_tokens" in options else policy_step
        found = call(self.model, columns_of(batch), loss, **options)
        total = torch.zeros((), device=batch["advantages"].device)
        for step in [found] if isinstance(found, PolicyStep) else found:
            step.loss.backward()
            total += step.loss.detach()
        return total
