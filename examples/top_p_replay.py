"""What top-p sampling does to training, and what replaying its support changes; under two minutes on two CPU cores.

    python examples/top_p_replay.py                             # train with and without replay
    python examples/top_p_replay.py --draw docs/top_p_replay.json   # only draw what a run has measured

A small policy learns to add with GRPO, as in train_grpo.py. Its completions are sampled with top-p, by transformers.
One run computes log-probabilities over the whole vocabulary, the other over the ids that the sampler could have drawn.
Before each update, both compare the log-probabilities of the sampled tokens with the sampler's own.
"""

import argparse
import copy
import json
import random
from pathlib import Path

import matplotlib
import torch
from tqdm import trange
from train_grpo import hidden_states, sample, save_picture, small_policy, warm_start

from liger_rl import linear_logprobs, ppo_loss_fn, support_logprobs, swap_lm_head
from liger_rl.head import LogitTransform
from liger_rl.losses import GlobalTokenMean, PolicyBatch, PPOClip
from liger_rl.support import Support

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RUNS = {"full": "without replay", "replayed": "with replay"}


def rollout(model, tokenizer, options: argparse.Namespace) -> tuple[dict[str, torch.Tensor], Support, float]:
    """-> a batch with the sampler's own log-probabilities, the ids that each token but the first of a row could have
    been, and the mean reward."""
    sampling = {"temperature": options.temperature, "top_p": options.top_p, "output_scores": True}
    sizes = (options.prompts, options.group, options.max_new_tokens)
    batch, reward, scores = sample(model, tokenizer, *sizes, **sampling)
    mask = batch["mask"] = batch["mask"] != 0
    # Scores are the logits that were drawn from: divided by the temperature, and -inf outside the support.
    drawn_from = torch.stack(scores, dim=1)[mask[:, -len(scores) :]]
    drawn = drawn_from.log_softmax(-1).gather(-1, batch["input_ids"][mask][:, None]).squeeze(-1)
    batch["old_per_token_logps"] = torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, drawn)
    return batch, Support.from_logits(drawn_from).place_at(mask[:, 1:]), reward


def score(model, batch: dict[str, torch.Tensor], temperature: float, support: Support | None):
    """(B, T - 1) log-probabilities of every token but the first of a row; over the support, if there is one."""
    tensors = hidden_states(model, batch), model.lm_head.weight, batch["input_ids"][:, 1:]
    options = {"mask": batch["mask"][:, 1:], "transform": LogitTransform(temperature=temperature), "entropy": True}
    return linear_logprobs(*tensors, **options) if support is None else support_logprobs(*tensors, support, **options)


@torch.no_grad()
def measure(model, batch: dict[str, torch.Tensor], support: Support, temperature: float, *, replays: bool):
    """How far the trainer is from the sampler, in nats, and the entropy of the policy over its whole vocabulary."""
    mask = batch["mask"][:, 1:]
    full = score(model, batch, temperature, None)
    trainer = score(model, batch, temperature, support) if replays else full
    gap = (batch["old_per_token_logps"][:, 1:] - trainer.logps)[mask]
    sizes = support.offsets.diff().view(mask.shape)[mask].float()
    return {
        "mean_gap": gap.abs().mean().item(),
        "largest_gap": gap.abs().max().item(),
        # KL(sampler || trainer). Of one position, every id that can be drawn has the same gap, so this is no estimate.
        "kl": gap.mean().item(),
        "sequence_kl": (gap.sum() / mask.shape[0]).item(),
        "entropy": full.entropy[mask].mean().item(),
        "ids": sizes.mean().item(),
        "single": (sizes == 1).float().mean().item(),
    }


def train(model, tokenizer, options: argparse.Namespace, *, replays: bool) -> list[dict[str, float]]:
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    history = []
    progress = trange(options.steps, desc=RUNS["replayed" if replays else "full"])
    for _ in progress:
        batch, support, reward = rollout(model, tokenizer, options)
        model.train()
        step = {"reward": reward, **measure(model, batch, support, options.temperature, replays=replays)}
        columns = PolicyBatch(
            advantages=batch["advantages"],
            mask=batch["mask"][:, 1:],
            old_per_token_logps=batch["old_per_token_logps"][:, 1:],
        )
        for _ in range(options.updates):
            logps = score(model, batch, options.temperature, support if replays else None).logps
            ppo_loss_fn(logps, columns, PPOClip(epsilon_high=0.28), GlobalTokenMean()).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        history.append(step)
        progress.set_postfix({name: f"{step[name]:.3g}" for name in ("reward", "mean_gap", "entropy", "ids")})
    return history


def table(record: dict) -> str:
    """Means over the steps of each run, the largest gap of all, and the reward and entropy of the last tenth."""
    rows = [
        "| | mean gap | largest gap | KL a token | KL a sequence | reward at the end | entropy at the end |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, title in RUNS.items():
        steps = record[name]
        last = steps[-max(1, len(steps) // 10) :]

        def mean(key: str, of: list[dict[str, float]]) -> float:
            return sum(step[key] for step in of) / len(of)

        gaps = [mean("mean_gap", steps), max(step["largest_gap"] for step in steps)]
        gaps += [mean("kl", steps), mean("sequence_kl", steps)]
        cells = [title, *(f"{gap:.1e}" if gap > 1e-6 else "< 1e-6" for gap in gaps)]
        cells += [f"{mean('reward', last):.2f}", f"{mean('entropy', last):.2f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def plot(record: dict, path: Path) -> None:
    panels = {
        "mean_gap": "mean |log p trainer - log p sampler| (nats)",
        "reward": "mean reward",
        "entropy": "entropy of the policy (nats)",
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(12, 3.6), constrained_layout=True)
    for axis, (key, label) in zip(axes, panels.items(), strict=True):
        for name, title in RUNS.items():
            axis.plot([step[key] for step in record[name]], linewidth=1.5, label=title)
        axis.set_xlabel("step")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        if key == "mean_gap":
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
    axes[0].legend()
    save_picture(figure, path, record)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=Path, help="a record of a run, to draw beside it instead of training")
    parser.add_argument("--warm-start-steps", type=int, default=150, help="supervised steps, shared by both runs")
    parser.add_argument("--steps", type=int, default=40, help="GRPO steps of each run")
    parser.add_argument("--prompts", type=int, default=32, help="prompts a step")
    parser.add_argument("--group", type=int, default=8, help="completions a prompt")
    parser.add_argument("--updates", type=int, default=2, help="optimiser steps on each batch of completions")
    parser.add_argument("--max-new-tokens", type=int, default=4)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder of the record and the picture")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    if options.draw is not None:
        record = json.loads(options.draw.read_text())
        plot(record, options.draw.with_suffix(".png"))
        print(table(record))
        return
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    model, tokenizer = small_policy()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    swap_lm_head(model)
    warm_start(model, tokenizer, options.warm_start_steps, options.prompts * options.group)
    kept = {name: value for name, value in vars(options).items() if name not in ("draw", "output")}
    record = {"options": kept}
    for name in RUNS:
        record[name] = train(copy.deepcopy(model), tokenizer, options, replays=name == "replayed")
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "top_p_replay.json").write_text(json.dumps(record, indent=1))
    plot(record, options.output / "top_p_replay.png")
    print(table(record))
    print(f"curves in {options.output / 'top_p_replay.png'}")


if __name__ == "__main__":
    main()
