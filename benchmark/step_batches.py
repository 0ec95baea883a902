"""Batches of a training step: lengths of sequences, token ids, and the FLOP that a model needs for them.

`tasks` has the batches of GRPO, SFT and DPO by name. Lengths of completions follow a log-normal distribution, cut at
the longest. Every fourth group of GRPO has no advantage. No way of training can leave out these FLOP of a step:

    forward(group)  = 2 P tokens + 4 L W pairs + 2 H V counted
    backward(group) = 2 x forward(group); with frozen weights (LoRA) the terms of P and V once, without dL/dW

P is the number of parameters without embedding and lm_head, L the layers, W = heads x head_dim, and (V, H) the head. A
group's prompt is among `tokens` once, padding never. `pairs` are the (query, key) pairs of causal attention. `counted`
are the tokens in the loss, those of a prompt once. So a token of a full training costs 6 P, attention and the head
apart. A group without advantage has a forward, because TRL logs its entropy, and no backward. DPO's reference has a
forward. LoRA's own matrices and recomputation are left out.
"""

import math
import statistics
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from benchmark.texts import windows

SEED = 0
IDLE_EVERY = 4  # every fourth group of GRPO has no advantage
# Dense bfloat16 FLOP/s of cards by a part of their names, without sparsity.
PEAK_FLOP_PER_SECOND = {"H100": 989e12, "H200": 989e12}


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """How long the sequences of a batch are, in tokens."""

    prompt: int  # the longest
    completion: int  # the longest
    shortest_prompt: float = 1.0  # in shares of the longest
    median: float = 0.55  # of completions, in shares of the longest
    spread: float = 0.7  # standard deviation of the logarithm of completions
    groups: int = 4
    members: int = 8  # completions of a prompt
    packed_row: int | None = None  # tokens of a row that TRL packs the sequences in; None if they fill no whole rows


@dataclass(frozen=True, kw_only=True)
class Task:
    """A batch, the trainer that it is for, and the policy that trains on it."""

    lengths: Lengths
    trainer: Literal["GRPO", "Distillation", "SFT", "DPO"] = "GRPO"
    micro_batches: int = 1
    learns: bool = False  # whether the policy learns a text first; random weights otherwise
    lora_dropout: float | None = None  # of a LoRA of rank 16 on all linear layers; None trains all weights
    ranks: int = 1  # that train one model, each on as many groups
    rank: int = 0

    @property
    def has_rollouts(self) -> bool:
        """Whether the trainer generates, and pads prompts and completions apart before the split into micro-batches."""
        return self.trainer in ("GRPO", "Distillation")


_WINDOW = Lengths(prompt=512, completion=2048, shortest_prompt=0.25, median=0.33, spread=0.8)
_PAIRS = Lengths(prompt=512, completion=1536, shortest_prompt=0.25, median=0.4, spread=0.8, groups=16, members=2)
_SEQUENCES = Lengths(prompt=0, completion=2048, median=0.4, spread=0.8, groups=16, members=1)
# 64 sequences that fill 16 rows, in whole 8 micro-batches of 2. The system prompt is a third of their mean length.
_PACKED = Lengths(prompt=160, completion=1536, median=0.155, spread=0.8, groups=1, members=64, packed_row=2048)
_PACKED_APART = replace(_PACKED, prompt=0, completion=1696, median=0.215, groups=64, members=1)


def tasks(scale: int = 1) -> dict[str, Task]:
    """The batches by name, with sequences shorter by `scale`."""

    def scaled(lengths: Lengths) -> Lengths:
        return replace(
            lengths,
            prompt=lengths.prompt // scale,
            completion=lengths.completion // scale,
            packed_row=lengths.packed_row and lengths.packed_row // scale,
        )

    window = Task(lengths=scaled(_WINDOW), micro_batches=4)
    sft = Task(lengths=scaled(_SEQUENCES), trainer="SFT", micro_batches=8)
    dpo = Task(lengths=scaled(_PAIRS), trainer="DPO", micro_batches=8)
    one_prompt = replace(_WINDOW, shortest_prompt=1.0, groups=1)
    return {
        # Of both batches' completions 41% is padding. The second one's mean is 512 tokens.
        "short prompts": Task(lengths=scaled(Lengths(prompt=256, completion=1024, shortest_prompt=0.25)), learns=True),
        "long prompts": Task(lengths=scaled(Lengths(prompt=1024, completion=865)), learns=True),
        "window": window,
        "window 8k": replace(window, lengths=scaled(replace(_WINDOW, completion=8192))),
        "window 32k": replace(window, lengths=scaled(replace(one_prompt, completion=32768))),
        "default group": Task(lengths=scaled(replace(one_prompt, prompt=256, completion=512))),
        "window LoRA": replace(window, lora_dropout=0.0),
        "window LoRA dropout": replace(window, lora_dropout=0.05),
        "sft": sft,
        "sft packed": replace(sft, lengths=scaled(_PACKED)),
        "sft packed apart": replace(sft, lengths=scaled(_PACKED_APART)),
        "dpo": dpo,
        # TRL generates one completion of each prompt.
        "distillation": replace(window, trainer="Distillation", lengths=scaled(replace(_WINDOW, groups=32, members=1))),
        "sft LoRA": replace(sft, lora_dropout=0.0),
        "dpo LoRA": replace(dpo, lora_dropout=0.0),
    }


class Group(NamedTuple):
    """Sequences that begin with one prompt; numbers of tokens."""

    prompt: int
    completions: tuple[int, ...]
    idle: bool  # without advantage


def draw_groups(task: Task) -> list[Group]:
    """The groups of all ranks. Several ranks have them by chance, so that one has more tokens than another."""
    lengths, normal = task.lengths, statistics.NormalDist()
    groups = lengths.groups * task.ranks
    prompts = torch.linspace(lengths.shortest_prompt, 1.0, groups).mul(lengths.prompt).round().long().tolist()
    count = groups * lengths.members
    quantiles = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    shares = [min(1.0, lengths.median * math.exp(lengths.spread * quantile)) for quantile in quantiles]
    generator = torch.Generator().manual_seed(SEED)
    order = torch.randperm(count, generator=generator).tolist()
    completions = [math.ceil(shares[i] * lengths.completion) for i in order]
    drawn = [
        Group(
            prompt,
            tuple(completions[number * lengths.members : (number + 1) * lengths.members]),
            idle=task.trainer == "GRPO" and number % IDLE_EVERY == IDLE_EVERY - 1,
        )
        for number, prompt in enumerate(prompts)
    ]
    return drawn if task.ranks == 1 else [drawn[i] for i in torch.randperm(groups, generator=generator).tolist()]


def take_own(task: Task, columns: Any) -> Any:
    """Of something for each group, or for each sequence, of all ranks: what the task's rank has."""
    size = len(columns) // task.ranks
    return columns[task.rank * size : (task.rank + 1) * size]


def count_counted(task: Task, group: Group) -> int:
    """Tokens in the loss. SFT predicts all of a sequence but its first token."""
    if task.trainer == "SFT":
        return sum(group.prompt + length - 1 for length in group.completions)
    return sum(group.completions)


def widest_row(task: Task, groups: list[Group]) -> int:
    """Tokens of a padded row."""
    if task.has_rollouts:
        return max(group.prompt for group in groups) + max(max(group.completions) for group in groups)
    return max(group.prompt + max(group.completions) for group in groups)


def count_padded(task: Task, groups: list[Group]) -> int:
    """Tokens of all micro-batches with their padding."""
    if task.has_rollouts:
        by_rank = [take_own(replace(task, rank=rank), groups) for rank in range(task.ranks)]
        return sum(sum(len(group.completions) for group in own) * widest_row(task, own) for own in by_rank)
    rows = [group.prompt + length for group in groups for length in group.completions]
    size = task.lengths.groups * task.lengths.members // task.micro_batches
    return sum(size * max(rows[start : start + size]) for start in range(0, len(rows), size))


def describe_batch(task: Task) -> dict[str, Any]:
    groups = draw_groups(task)
    rows = [group.prompt + length for group in groups for length in group.completions]
    return {
        "trainer": task.trainer,
        "policy": "learnt" if task.learns else "random",
        "lora_dropout": task.lora_dropout,
        "ranks": task.ranks,
        "micro_batches": task.micro_batches,
        "sequences": len(rows),
        "groups": len(groups),
        "row_tokens": widest_row(task, groups),
        "padding_share": 1 - sum(rows) / count_padded(task, groups),
        "counted_tokens": sum(count_counted(task, group) for group in groups),
        "idle_share": sum(group.idle for group in groups) / len(groups),
    }


class ModelSize(NamedTuple):
    body_parameters: int  # without embedding and lm_head
    layers: int  # with attention
    attention_width: int  # heads x head_dim
    hidden_size: int
    vocab: int

    @classmethod
    def of(cls, model: nn.Module) -> "ModelSize":
        config: Any = model.config
        tables = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}  # type: ignore[operator]
        parameters = sum(p.numel() for p in model.parameters()) - sum(table.numel() for table in tables)
        width = config.num_attention_heads * getattr(
            config, "head_dim", config.hidden_size // config.num_attention_heads
        )
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        return cls(
            parameters, len(kinds) - kinds.count("linear_attention"), width, config.hidden_size, config.vocab_size
        )


def count_flop(task: Task, size: ModelSize) -> int:
    """FLOP of a step; the module's docstring has the formula."""
    total = 0
    for group in draw_groups(task):
        tokens = group.prompt + sum(group.completions)
        pairs = group.prompt * (group.prompt + 1) // 2
        pairs += sum(n * group.prompt + n * (n + 1) // 2 for n in group.completions)
        counted = count_counted(task, group)
        if task.trainer == "SFT":  # whose loss is of the prompt too
            counted -= group.prompt * (len(group.completions) - 1)
        head = 2 * size.hidden_size * size.vocab * counted
        matmuls = 2 * size.body_parameters * tokens + head
        attention = 4 * size.layers * size.attention_width * pairs
        total += matmuls + attention
        if not group.idle:
            total += (2 if task.lora_dropout is None else 1) * matmuls + 2 * attention
        if task.trainer in ("DPO", "Distillation"):  # the reference, the teacher
            total += matmuls + attention
    return total


def peak_flop_per_second(device_name: str) -> float | None:
    """Of a card; None if it is not known."""
    return next((peak for part, peak in PEAK_FLOP_PER_SECOND.items() if part in device_name), None)


Batch = dict[str, Tensor]
"""What TRL's GRPOTrainer makes of rollouts, by its names: prompts padded on the left, completions on the right."""


def make_rollouts(task: Task, text: Tensor, device: str) -> Batch:
    """Groups of completions. Advantages have mean 0 and deviation 1 in a group, and are 0 in an idle one."""
    generator, lengths, groups = torch.Generator().manual_seed(SEED), task.lengths, draw_groups(task)
    count = len(groups)
    prompts = torch.tensor([group.prompt for group in groups]).repeat_interleave(lengths.members)
    completions = torch.tensor([length for group in groups for length in group.completions])
    rewards = torch.randn(count, lengths.members, generator=generator)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
    advantages[[group.idle for group in groups]] = 0.0

    prompt_mask = torch.arange(lengths.prompt - 1, -1, -1) < prompts[:, None]
    prompt_ids = windows(text, count, lengths.prompt, generator).repeat_interleave(lengths.members, 0)
    completion_mask = torch.arange(lengths.completion) < completions[:, None]
    completion_ids = windows(text, len(completions), lengths.completion, generator)
    batch = {
        "prompt_ids": prompt_ids * prompt_mask,
        "prompt_mask": prompt_mask.long(),
        "completion_ids": completion_ids * completion_mask,
        "completion_mask": completion_mask.long(),
        "advantages": advantages.flatten(),
    }
    own = {name: take_own(task, column).to(device) for name, column in batch.items()}
    return own | {"num_items_in_batch": completion_mask.sum().to(device)}


def make_examples(task: Task, text: Tensor) -> list[dict[str, list[int]]]:
    """Rows of a data set of token ids, as SFTTrainer and DPOTrainer prepare them."""
    generator = torch.Generator().manual_seed(SEED)

    def draw(length: int) -> list[int]:
        return windows(text, 1, length, generator)[0].tolist()

    groups = draw_groups(task)  # of all ranks: a trainer's sampler deals them out
    if task.trainer == "SFT":
        prompts = [draw(group.prompt) if group.prompt else [] for group in groups]
        sequences = [prompt + draw(n) for prompt, group in zip(prompts, groups, strict=True) for n in group.completions]
        return [{"input_ids": ids, "labels": ids} for ids in sequences]
    return [
        {"prompt_ids": draw(group.prompt), "chosen_ids": draw(chosen), "rejected_ids": draw(rejected)}
        for group in groups
        for chosen, rejected in [group.completions]
    ]


def join_columns(batch: Batch) -> dict[str, Tensor]:
    """The batch as `loss_steps` takes it: prompt and completion in one row."""
    prompt, completion = batch["prompt_mask"], batch["completion_mask"]
    return {
        "input_ids": torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
        "attention_mask": torch.cat([prompt, completion], 1),
        "mask": torch.cat([torch.zeros_like(prompt), completion], 1),
        "advantages": batch["advantages"],
        "num_items_in_batch": batch["num_items_in_batch"],
        "old_per_token_logps": nn.functional.pad(batch["old_per_token_logps"], (prompt.shape[1], 0)),
    }
