"""On-policy distillation: a small student learns to add from a larger teacher, in about two minutes on a CPU.

    python examples/distill.py                             # train a teacher, then distill it
    python examples/distill.py --draw docs/distill.json    # only draw what a run has measured

The teacher learns from right answers. The student, half as wide, has only seen a careless teacher's. From then on it
answers by itself, and at every token of its answers it is moved towards the teacher's whole distribution, by the
divergence of the two heads. No reward is used, and no logits are ever stored.
"""

import argparse
import json
import random
from pathlib import Path

import matplotlib
import torch
from tqdm import trange
from train_grpo import Problem, hidden_states, sample, save_picture, small_policy, warm_start

from liger_rl import linear_divergence, swap_lm_head

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLUMNS = {
    "divergence": "divergence from the teacher (nats)",
    "reward": "share of right answers",
    "entropy": "entropy (nats)",
}


def sampled(model, tokenizer, options: argparse.Namespace) -> tuple[dict[str, torch.Tensor], float]:
    """-> a batch of the model's own answers, two to each prompt, and the share of right ones."""
    batch, reward, _ = sample(model, tokenizer, options.prompts, 2, options.max_new_tokens, top_p=1.0, temperature=1.0)
    return batch, reward


def distill(student, teacher, tokenizer, options: argparse.Namespace) -> list[dict[str, float]]:
    optimizer = torch.optim.AdamW(student.parameters(), lr=options.learning_rate, weight_decay=0.0)
    history = []
    progress = trange(options.steps, desc="distillation")
    for _ in progress:
        batch, reward = sampled(student, tokenizer, options)
        mask = batch["mask"][:, 1:] != 0
        student.train()
        with torch.no_grad():
            of_teacher = hidden_states(teacher, batch)
        found = linear_divergence(
            hidden_states(student, batch),
            student.lm_head.weight,
            of_teacher,
            teacher.lm_head.weight,
            kind=options.kind,
            mask=mask,
        )
        loss = found.divergence.sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step = {"divergence": loss.item(), "reward": reward, "entropy": found.entropy[mask].mean().item()}
        history.append(step)
        progress.set_postfix({name: f"{value:.3f}" for name, value in step.items()})
    return history


def means(steps: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(step[name] for step in steps) / len(steps) for name in COLUMNS}


def table(record: dict) -> str:
    """Means over the first and the last tenth of the steps, and what the teacher is."""
    steps = record["steps"]
    tenth = max(1, len(steps) // 10)
    rows = [f"| | {' | '.join(COLUMNS.values())} |", f"|---|{'---:|' * len(COLUMNS)}"]
    for label, values in (
        ("student, first tenth", means(steps[:tenth])),
        ("student, last tenth", means(steps[-tenth:])),
        ("teacher", record["teacher"]),
    ):
        cells = [f"{values[name]:.3f}" if name in values else "" for name in COLUMNS]
        rows.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(rows)


def plot(record: dict, path: Path) -> None:
    figure, axes = plt.subplots(1, len(COLUMNS), figsize=(12, 3.6), constrained_layout=True)
    for axis, (name, label) in zip(axes, COLUMNS.items(), strict=True):
        axis.plot([step[name] for step in record["steps"]], linewidth=1.5, label="student")
        if name in record["teacher"]:
            axis.axhline(record["teacher"][name], color="gray", linestyle="--", label="teacher")
            axis.legend()
        axis.set_xlabel("step")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    save_picture(figure, path, record)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=Path, help="a record of a run, to draw beside it instead of training")
    parser.add_argument("--kind", choices=["reverse_kl", "forward_kl", "jsd"], default="reverse_kl")
    parser.add_argument("--teacher-steps", type=int, default=250, help="supervised steps of the teacher")
    parser.add_argument("--student-steps", type=int, default=100, help="supervised steps of the student")
    parser.add_argument("--steps", type=int, default=200, help="steps of distillation")
    parser.add_argument("--prompts", type=int, default=64, help="prompts a step, of two answers each")
    parser.add_argument("--max-new-tokens", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
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
    teacher, tokenizer = small_policy()
    student, _ = small_policy(tokenizer, hidden_size=64, layers=2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for model, steps, answer in (
        (teacher, options.teacher_steps, lambda problem: problem.answer),
        (student, options.student_steps, Problem.careless_answer),
    ):
        model.to(device)
        swap_lm_head(model)
        warm_start(model, tokenizer, steps, 4 * options.prompts, answer)
    teacher.eval().requires_grad_(False)
    reward = sampled(teacher, tokenizer, options)[1]
    history = distill(student, teacher, tokenizer, options)
    kept = {name: value for name, value in vars(options).items() if name not in ("draw", "output")}
    record = {"options": kept, "teacher": {"reward": reward}, "steps": history}
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "distill.json").write_text(json.dumps(record, indent=1))
    plot(record, options.output / "distill.png")
    print(table(record))
    print(f"curves in {options.output / 'distill.png'}")


if __name__ == "__main__":
    main()
