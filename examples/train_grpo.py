"""GRPO from nothing to a policy that adds, in about three minutes on two CPU cores.

    python examples/train_grpo.py                        # a small Qwen3 with random weights, warm start, then GRPO
    python examples/train_grpo.py --model Qwen/Qwen3-0.6B --steps 50      # a real checkpoint, straight to GRPO
    python examples/train_grpo.py --draw docs/train_grpo.json             # only draw what a run has measured

The policy sees "7+5=" and should write "12". First it imitates a careless teacher who is right about one time in
three, then GRPO rewards right answers until it no longer errs. Completions come from transformers' `generate`. Every
log-probability of the training, supervised or not, comes from the fused head, so no logits of a batch are stored. The
penalty is k3, which estimates the KL to the reference from the sampled tokens.
"""

import argparse
import copy
import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
from text import python_text, train_tokenizer
from tqdm import trange
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from liger_rl import FusedLinearGRPOLoss, completion_logps, loss_step, swap_lm_head

matplotlib.use("Agg")
import matplotlib.pyplot as plt

IGNORE = -100


@dataclass
class Problem:
    prompt: str
    answer: int

    @classmethod
    def draw(cls) -> "Problem":
        a, b = random.randrange(10), random.randrange(10)
        return cls(f"{a}+{b}=", a + b)

    def reward(self, completion: str) -> float:
        """Verifiable: 1 when the completion is the right number and nothing else, 0 otherwise."""
        return float(completion.strip() == str(self.answer))

    def careless_answer(self) -> int:
        return max(0, self.answer + random.choice([-2, -1, 0, 1, 2, 0]))


def small_policy(tokenizer=None, hidden_size: int = 128, layers: int = 3) -> tuple[Qwen3ForCausalLM, object]:
    tokenizer = tokenizer or train_tokenizer(python_text(), vocab_size=4096)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config), tokenizer


def encode(tokenizer, prompts: list[str], device) -> dict[str, torch.Tensor]:
    """Left-padded, so that every completion starts at the same column."""
    tokenizer.padding_side = "left"
    return tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False).to(device)


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def warm_start(
    model, tokenizer, steps: int, batch_size: int, answer: Callable[[Problem], int] = Problem.careless_answer
) -> None:
    """Supervised: imitate the careless teacher, or another. The loss comes from the same fused head."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    model.train()
    progress = trange(steps, desc="supervised")
    for _ in progress:
        problems = [Problem.draw() for _ in range(batch_size)]
        texts = [f"{p.prompt}{answer(p)}{tokenizer.eos_token}" for p in problems]
        tokenizer.padding_side = "right"
        batch = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False).to(model.device)
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, IGNORE)
        loss = model(**batch, position_ids=positions(batch.attention_mask), labels=labels, fused=True).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.3f}")


@torch.no_grad()
def sample(
    model,
    tokenizer,
    prompts: int,
    group: int,
    max_new_tokens: int,
    draw: Callable[[], Problem] = Problem.draw,  # or another with a prompt and a reward
    **sampling,
):
    """-> a batch of prompts with a group of completions each, one sequence a row; the mean reward; generate's scores.

    `sampling` goes to generate. The scores are None unless it says output_scores.
    """
    model.eval()
    problems = [problem for problem in (draw() for _ in range(prompts)) for _ in range(group)]
    batch = encode(tokenizer, [p.prompt for p in problems], model.device)
    output = model.generate(
        **batch,
        max_new_tokens=max_new_tokens,
        do_sample=True,
        top_k=0,
        pad_token_id=tokenizer.pad_token_id,
        return_dict_in_generate=True,
        **sampling,
    )
    ids = output.sequences
    completions = ids[:, batch.input_ids.shape[1] :]
    # The first end-of-sequence token counts, what generate pads behind it does not.
    ended = (completions == tokenizer.eos_token_id).cumsum(-1)
    counted = (ended == 0) | ((ended == 1) & (completions == tokenizer.eos_token_id))
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    rewards = torch.tensor([p.reward(t) for p, t in zip(problems, texts, strict=True)], device=model.device)
    by_group = rewards.view(prompts, group)
    # GRPO: an answer is as good as it is better than the others to the same prompt.
    advantages = (by_group - by_group.mean(1, keepdim=True)) / (by_group.std(1, keepdim=True) + 1e-4)
    attention_mask = torch.cat([batch.attention_mask, counted.to(batch.attention_mask.dtype)], dim=1)
    rollout = {
        "input_ids": ids,
        "attention_mask": attention_mask,
        "position_ids": positions(attention_mask),
        "mask": torch.cat([torch.zeros_like(batch.input_ids), counted], dim=1),
        "advantages": advantages.flatten(),
    }
    return rollout, rewards.mean().item(), output.scores


def hidden_states(model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """(B, T - 1, H): position t predicts token t + 1."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    return model.model(**inputs).last_hidden_state[:, :-1]


def k3(logps: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the penalty takes the KL to be, of each completion token."""
    mask = batch["mask"] != 0
    difference = (batch["ref_per_token_logps"] - logps)[mask]
    return torch.expm1(difference) - difference


def train(model, tokenizer, options: argparse.Namespace) -> list[dict[str, float]]:
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    loss = FusedLinearGRPOLoss(
        "dapo", epsilon_high=0.28, beta=0.005, temperature=options.temperature, metrics="with_entropy"
    )
    history = []
    progress = trange(options.steps, desc="GRPO")
    for _ in progress:
        sizes = (options.prompts, options.group, options.max_new_tokens)
        batch, reward, _ = sample(model, tokenizer, *sizes, temperature=options.temperature, top_p=1.0)
        model.train()
        batch["old_per_token_logps"] = completion_logps(model, batch, loss)
        batch["ref_per_token_logps"] = completion_logps(reference, batch, loss)
        for _ in range(options.updates):
            result = loss_step(model, batch, loss)
            result.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        metrics = {"kl": "kl_ref", "clip_ratio": "clip_ratio", "entropy": "entropy"}
        step = {"reward": reward, "loss": result.loss.item()}
        step |= {name: result.metrics[metric].item() for name, metric in metrics.items()}
        estimates = k3(result.per_token_logps, batch)
        step |= {"largest_k3": estimates.max().item()}
        history.append(step)
        progress.set_postfix({name: f"{step[name]:.3f}" for name in ("reward", "kl", "clip_ratio", "entropy")})
    return history


def save_picture(figure, path: Path, record: dict) -> None:
    """A PNG with a hash of the record, which tells whether it shows a later one."""
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    figure.savefig(path, dpi=120, metadata={"Software": None, "Data": digest})
    plt.close(figure)


def plot(record: dict, path: Path) -> None:
    panels = {
        "mean reward": "reward",
        "k3, mean (nats)": "kl",
        "k3, largest token (nats)": "largest_k3",
        "entropy (nats)": "entropy",
    }
    figure, axes = plt.subplots(2, 2, figsize=(9, 5.5), constrained_layout=True)
    for axis, (label, name) in zip(axes.flat, panels.items(), strict=True):
        values = [step[name] for step in record["steps"]]
        axis.plot(values, linewidth=1.5)
        axis.set_ylabel(label)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if "k3" in label and max(values) > 0:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
    save_picture(figure, path, record)


def summary(history: list[dict[str, float]]) -> str:
    """The largest k3 of a single token and of a step's mean."""
    rows = ["| KL to the reference by k3 (nats) | |", "|---|---:|"]
    for label, name in {"largest single token of the run": "largest_k3", "largest mean of a step": "kl"}.items():
        rows.append(f"| {label} | {max(step[name] for step in history):.2g} |")
    return "\n".join(rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=Path, help="a record of a run, to draw beside it instead of training")
    parser.add_argument("--model", help="a causal LM's path or hub id; without it a small one with random weights")
    parser.add_argument("--warm-start-steps", type=int, help="supervised steps; 300, or 0 with --model")
    parser.add_argument("--steps", type=int, default=150, help="GRPO steps")
    parser.add_argument("--prompts", type=int, default=32, help="prompts a step")
    parser.add_argument("--group", type=int, default=8, help="completions a prompt")
    parser.add_argument("--updates", type=int, default=2, help="optimiser steps on each batch of completions")
    parser.add_argument("--max-new-tokens", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float, help="of GRPO; 3e-4, or 1e-6 with --model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder of the metrics and the picture")
    options = parser.parse_args()
    if options.warm_start_steps is None:
        options.warm_start_steps = 0 if options.model else 300
    if options.learning_rate is None:
        options.learning_rate = 1e-6 if options.model else 3e-4
    return options


def main() -> None:
    options = parse_arguments()
    if options.draw is not None:
        record = json.loads(options.draw.read_text())
        plot(record, options.draw.with_suffix(".png"))
        print(summary(record["steps"]))
        return
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    else:
        model, tokenizer = small_policy()
    model.to("cuda" if torch.cuda.is_available() else "cpu")

    swap_lm_head(model)
    warm_start(model, tokenizer, options.warm_start_steps, options.prompts * options.group)
    history = train(model, tokenizer, options)

    options.output.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in vars(options).items() if name not in ("draw", "output")}
    record = {"options": kept, "steps": history}
    (options.output / "train_grpo.json").write_text(json.dumps(record, indent=1))
    plot(record, options.output / "train_grpo.png")
    first, last = history[: len(history) // 10 + 1], history[-len(history) // 10 :]
    before, after = (sum(step["reward"] for step in steps) / len(steps) for steps in (first, last))
    print(f"reward {before:.2f} -> {after:.2f}; curves in {options.output / 'train_grpo.png'}")


if __name__ == "__main__":
    main()
