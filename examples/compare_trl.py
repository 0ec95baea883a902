"""TRL's GRPOTrainer with and without `patch_trl()`: time of a step, tokens that run, losses. About a minute on a CPU.

    python examples/compare_trl.py

Both runs train the same Qwen3, which has random weights, on the same sums: one prompt a step with a group of eight
completions. Sampling would take the same time in both, so the script writes the completions: steps of a calculation, of
uneven length, and a result that is right or wrong. Everything else is TRL's.
"""

import argparse
import json
import os
import random
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "TQDM_DISABLE": "1"}

import matplotlib
import torch
import transformers
from datasets import Dataset
from text import python_text, train_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from liger_rl import patched_trl

matplotlib.use("Agg")
import matplotlib.pyplot as plt

GROUP, WARM_UP = 8, 1  # the first step of a run is not measured: the patch tries the model
RUNS = {"TRL": nullcontext, "TRL, patch_trl()": patched_trl}


def draw_sum() -> tuple[str, int]:
    a, b = random.randrange(100), random.randrange(100)
    return f"{a}+{b}=", a + b


def draw_prompt(examples: int) -> str:
    solved = "; ".join(f"{question}{result}" for question, result in (draw_sum() for _ in range(examples)))
    return f"Add the numbers, as in these examples: {solved}; {draw_sum()[0]}"


def draw_completion(prompt: str, most: int) -> str:
    """Steps of a calculation, as many as chance says, and a result that is right in half of the cases."""
    a, b = map(int, prompt.split("; ")[-1].rstrip("=").split("+"))
    working = "; ".join(f"{n}+{b}={n + b}" for n in random.choices(range(100), k=int(most * random.random() / 11)))
    return f"{working} so {a + b if random.random() < 0.5 else a}"


def is_right(prompts: list[str], completions: list[str], **columns) -> list[float]:
    questions = [prompt.split("; ")[-1].rstrip("=") for prompt in prompts]
    results = [sum(map(int, question.split("+"))) for question in questions]
    return [float(text.endswith(f"so {result}")) for text, result in zip(completions, results, strict=True)]


class Clock(TrainerCallback):
    """Measures each optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args, **kwargs) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *args, **kwargs) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def train(model, tokenizer, options: argparse.Namespace) -> dict:
    """One run -> milliseconds a step, losses, norms of the gradient; with the patch also tokens a step."""
    random.seed(options.seed)

    def write_completions(prompts: list[str], trainer: GRPOTrainer) -> dict:
        texts = [draw_completion(prompt, options.completion) + tokenizer.eos_token for prompt in prompts]
        ids = [tokenizer(text).input_ids[-options.completion :] for text in texts]
        return {"prompt_ids": tokenizer(prompts).input_ids, "completion_ids": ids, "logprobs": None}

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model,
            reward_funcs=is_right,
            args=GRPOConfig(
                output_dir=folder,
                max_steps=WARM_UP + options.steps,
                num_generations=GROUP,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=GROUP // 2,
                max_completion_length=options.completion,
                learning_rate=1e-4,
                lr_scheduler_type="constant",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                seed=options.seed,
            ),
            train_dataset=Dataset.from_dict({"prompt": [draw_prompt(options.examples) for _ in range(64)]}),
            processing_class=tokenizer,
            rollout_func=write_completions,
            callbacks=[clock],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    run = {name: [entry[name] for entry in log] for name in ("loss", "grad_norm")}
    run["ms"] = [1000 * seconds for seconds in clock.seconds]
    if "liger_rl/body_tokens" in log[0]:
        run["tokens"] = [entry["liger_rl/body_tokens"] for entry in log]
        run["tokens of TRL"] = [
            entry["liger_rl/body_tokens"] / (1 - entry["liger_rl/body_tokens_saved"]) for entry in log
        ]
    return run


def compare(options: argparse.Namespace) -> dict[str, dict]:
    """Both runs, from the same weights."""
    tokenizer = train_tokenizer(python_text(), vocab_size=options.vocab)
    tokenizer.padding_side = "left"
    sizes = {
        "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden,
        "num_hidden_layers": options.layers,
        "head_dim": 64,
        "num_attention_heads": options.hidden // 64,
        "num_key_value_heads": options.hidden // 64,
    }
    tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    runs = {}
    for name, context in RUNS.items():
        torch.manual_seed(options.seed)
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes, **tokens))
        with context():
            runs[name] = train(model, tokenizer, options)
    trl, patched = runs.values()
    trl["tokens"] = patched.pop("tokens of TRL")
    return runs


def summary(runs: dict[str, dict]) -> str:
    """A table of the runs and a sentence."""
    lines = [f"{'':<18}{'ms a step':>10}{'tokens a step':>15}   loss of each step"]
    for name, run in runs.items():
        losses = " ".join(f"{loss:+.5f}" for loss in run["loss"])
        lines.append(f"{name:<18}{_typical(run, 'ms'):>10,.0f}{_typical(run, 'tokens'):>15,.0f}   {losses}")
    trl, patched = runs.values()
    difference = max(abs(a - b) for a, b in zip(trl["loss"], patched["loss"], strict=True))
    gain, tokens = (_typical(trl, name) / _typical(patched, name) for name in ("ms", "tokens"))
    lines.append(f"{gain:.1f} times as fast with {1 / tokens:.0%} of the tokens; losses differ by {difference:.1g}")
    return "\n".join(lines)


def _typical(run: dict, name: str) -> float:
    return median(run[name][WARM_UP:])


def plot(runs: dict[str, dict], path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), constrained_layout=True)
    for axis, name, title in zip(axes, ("ms", "tokens"), ("ms a step", "tokens a step"), strict=False):
        bars = axis.bar(list(runs), [_typical(run, name) for run in runs.values()], color=["grey", "teal"])
        axis.bar_label(bars, fmt="{:,.0f}")
        axis.set_title(title)
        axis.margins(y=0.15)
    for (name, run), style in zip(runs.items(), ("-", "--"), strict=True):
        axes[2].plot(range(1, len(run["loss"]) + 1), run["loss"], style, label=name)
    axes[2].set_title("loss of each step")
    axes[2].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="steps of each run that are measured")
    parser.add_argument("--completion", type=int, default=320, help="most tokens of a completion")
    parser.add_argument("--examples", type=int, default=24, help="solved sums in a prompt")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder of the record and the picture")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)  # threads that wait for each other on busy cores take many times as long
    runs = compare(options)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "compare_trl.json").write_text(json.dumps(runs, indent=1))
    plot(runs, options.output / "compare_trl.png")
    print(summary(runs))
    print(f"picture: {options.output / 'compare_trl.png'}")


if __name__ == "__main__":
    main()
