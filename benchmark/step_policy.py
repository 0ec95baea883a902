"""Policies of `benchmark.step`: models of published shapes, with random weights or after they have learnt a text.

A random policy is flat, and its head is another problem than a trained one's. So for some batches the model first
learns a few thousand tokens of this machine's Python sources by heart, until its entropy on them is under a nat, which
takes about a hundred short steps. Prompts and completions are pieces of that text. They are not sampled: after so
little training, the model would run into loops. For the other batches weights and token ids are random, because
learning takes longer than a row.
"""

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3_5TextConfig, Qwen3Config

from benchmark import texts
from benchmark.step_batches import SEED, Batch, Task, tasks

LEARNT_NATS, LAST, MOST_STEPS = 1.0, 5, 600
RATE, WARM_UP = 1e-2, 20
DOCUMENTS = 64  # of which the text is the beginning
PAD = "<|pad|>"
RANDOM_TOKENS = 1 << 16  # of the text of a random policy
LORA_RANK, LORA_SCALE = 16, 0.02  # the scale is that of B, with which PEFT begins at 0
REFERENCE_SCALE = 1.1  # of the reference's logits over the policy's
DRIFT_NATS = 0.1  # of the old policy from the current one, standard deviation per token


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, its batches, and the text that it learns."""

    config: Callable[[], Any]
    dtype: str = "bfloat16"  # of the products
    weights: str = "bfloat16"  # their dtype; TRL loads a model by its name in float32, and runs it under autocast
    scale: int = 1  # of the batches' lengths
    text: int = 8192  # tokens that are learnt
    learnt_at_once: int = 4  # sequences of a training step, a prompt and a completion each, both as long as any
    source_bytes: int = 24 << 20  # what the vocabulary is learnt from

    @property
    def tasks(self) -> dict[str, Task]:
        return tasks(self.scale)


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


def _qwen3_5() -> Qwen3_5TextConfig:
    """18 of 24 layers are linear attention."""
    return Qwen3_5TextConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        tie_word_embeddings=True,
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


def _smollm2_135m() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )


SHAPES = {
    "qwen3-0.6b": Shape(config=lambda: _qwen3(1024)),
    "qwen3-1.7b": Shape(config=lambda: _qwen3(2048)),
    "qwen3-4b": Shape(
        config=lambda: _qwen3(2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32)
    ),
    "qwen3.5-1.7b": Shape(config=_qwen3_5),
    "llama-3-8b": Shape(config=_llama_3_8b, learnt_at_once=2),
    "smollm2-135m": Shape(config=_smollm2_135m),
    # Everything once, in seconds on a CPU.
    "toy": Shape(
        config=lambda: _qwen3(64, vocab_size=400, num_hidden_layers=1, head_dim=8),
        dtype="float32",
        weights="float32",
        scale=32,
        text=64,
        source_bytes=200 << 10,
    ),
}


class Policy(NamedTuple):
    """What a model begins with, and the text that its batches are taken from."""

    weights: dict[str, Tensor] | None  # on the CPU, in the shape's dtype of weights; None for random ones
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
    """The same weights at each call."""
    torch.manual_seed(SEED)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(shape.config(), attn_implementation="sdpa", dtype=getattr(torch, dtype))


def random_policy(shape: Shape) -> Policy:
    """Random weights, and token ids other than 0, which pads."""
    generator = torch.Generator().manual_seed(SEED)
    text = torch.randint(1, shape.config().vocab_size, (RANDOM_TOKENS,), generator=generator)
    # Unsloth adds another pad token to a tokenizer that has one token for padding and the end.
    vocabulary = {PAD: 0, texts.END_OF_TEXT: 1}
    return Policy(None, Tokenizer(models.WordLevel(vocabulary, unk_token=texts.END_OF_TEXT)), text, [])


def learnt_policy(shape: Shape, device: str) -> Policy:
    """Once its mean entropy in training is under LEARNT_NATS."""
    tokenizer, tokens = _vocabulary(shape.config().vocab_size, shape.source_bytes)
    text = tokens[: shape.text].long()
    model = random_model(shape, "float32", device)
    entropies = learn(model, text, shape, device)
    weights = {name: weight.to("cpu", getattr(torch, shape.weights)) for name, weight in model.state_dict().items()}
    return Policy(weights, tokenizer, text, entropies)


def learn(model: nn.Module, text: Tensor, shape: Shape, device: str) -> list[float]:
    """-> the entropy in nats at each training step. In float32 under bfloat16 autocast, with Adafactor, whose state
    leaves room for 8 billion parameters.

    Raises:
        SystemExit: the mean entropy of the last steps is not under LEARNT_NATS after MOST_STEPS.
    """
    optimizer = torch.optim.Adafactor(model.parameters(), lr=RATE, foreach=False)
    generator = torch.Generator().manual_seed(SEED)
    entropies: list[float] = []
    batches = cycle(task.lengths for task in shape.tasks.values() if task.learns)
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


def make_model(shape: Shape, policy: Policy, task: Task, device: str) -> nn.Module:
    """The policy's model for a run, with LoRA adapters if the task trains them; the same at each call."""
    model = random_model(shape, shape.weights, device)
    if policy.weights is not None:
        model.load_state_dict(policy.weights)
    return model if task.lora_dropout is None else add_adapters(model, task.lora_dropout)


def add_adapters(model: nn.Module, dropout: float) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=LORA_RANK, lora_alpha=LORA_RANK, lora_dropout=dropout, target_modules="all-linear")
    adapted = get_peft_model(model, config)  # type: ignore[arg-type]
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=LORA_SCALE)
    return adapted


def make_reference(model: nn.Module, scale: float = REFERENCE_SCALE) -> nn.Module:
    """DPO's: the model with its logits times `scale`, so that the loss is not that of two equal models."""
    reference: Any = copy.deepcopy(model)
    with torch.no_grad():
        reference.base_model.norm.weight *= scale
    return reference


@torch.no_grad()
def score_rollouts(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """-> log-probabilities and entropies, (B, T) float32 in nats, 0 outside of completions; sequence by sequence."""
    model.eval()
    logps, entropies = (torch.zeros(batch["completion_ids"].shape, device=model.device) for _ in range(2))
    for row, prompt in enumerate(batch["prompt_mask"].bool()):
        mask = batch["completion_mask"][row].bool()
        targets = batch["completion_ids"][row, mask]
        ids = torch.cat([batch["prompt_ids"][row, prompt], targets])
        logits = model(input_ids=ids[None], logits_to_keep=len(targets) + 1, use_cache=False).logits[0, :-1]
        log_p = logits.float().log_softmax(-1)
        logps[row, mask] = log_p.gather(1, targets[:, None])[:, 0]
        entropies[row, mask] = -log_p.exp().mul_(log_p).sum(-1)
    return logps, entropies


def add_old_policy(model: nn.Module, batch: Batch) -> dict[str, float]:
    """Adds the old policy's log-probabilities to the batch -> what the current policy is on it, in nats."""
    counted = batch["completion_mask"].bool()
    logps, entropies = score_rollouts(model, batch)
    noise = torch.randn(logps.shape, generator=torch.Generator().manual_seed(SEED)).to(logps.device)
    batch["old_per_token_logps"] = logps + DRIFT_NATS * noise * counted
    return {"entropy": entropies[counted].mean().item(), "surprise": -logps[counted].mean().item()}
