"""A whole step of TRL's GRPOTrainer with its generation: `python -m benchmark.whole_step`.

    python -m benchmark.whole_step --model FILE.gguf        # SmolLM2-135M-Instruct; or a folder of transformers
    python -m benchmark.whole_step --shape smollm2-135m     # random weights, and completions of the full length

Prompts are sums, and the reward is how close the last number of a completion is to the right one. A random model's
reward is drawn from its token ids. TRL generates the completions of `--at-once` optimizer steps together. With more
than one, the default, it needs the old policy's log-probabilities; that is `scoring`, to which we count the rewards.
`training` is the rest: forwards, backwards, the optimizer and the log. All are milliseconds of one optimizer step.

`--rows` are those of `benchmark.step`, each with generation by transformers' `generate` and by its continuous batching,
`--generation`; `none` draws completions and their reward instead, so that scoring and training meet new lengths in each
step. The learning rate is 0, so that all rows train on completions of the same policy.
"""

import argparse
import copy
import math
import random
import re
import sys
import tempfile
import time
import traceback
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from benchmark.environment import add_output_options, describe, first_line, output_directory, slug, write_results
from benchmark.step import NAMES, list_commits
from benchmark.table import Columns, Row, environment_line, markdown_table, number

PREFIX = "whole-step-"
ROWS = (
    "trl", "trl-no-checkpointing", "trl-liger", "trl-liger-no-checkpointing", "memory-0", "patch", "memory-0-liger",
    "patch-liger",
)  # fmt: skip
DEFAULT_ROWS = {"cuda": ("trl-liger", "patch-liger"), "cpu": ("trl", "patch")}
# A way to generate -> options of GRPOConfig.
GENERATIONS: dict[str, dict[str, Any]] = {
    "generate": {},
    "continuous batching": {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {"seed": 0},
    },
    "none": {},
}
MEDIAN, SPREAD = 0.33, 0.8  # of drawn lengths in shares of the longest, log-normal, as the windows of benchmark.step
MEMBERS = 8  # completions of a prompt, TRL's default
SETTLING = 6  # steps, or more up to a whole generation: the patch keeps layers from the third one
SEED = 0
Tokenizer = Any


def make_prompts(count: int) -> dict[str, list[Any]]:
    """Columns of a data set."""
    numbers = random.Random(SEED)
    sums = [[numbers.randrange(1, 50) for _ in range(3)] for _ in range(count)]
    ask = "<|im_start|>user\nWhat is {} + {} + {}? Think step by step.<|im_end|>\n<|im_start|>assistant\n"
    return {"prompt": [ask.format(*parts) for parts in sums], "answer": [sum(parts) for parts in sums]}


def reward_answers(completions: list[str], answer: list[int], **_columns: Any) -> list[float]:
    """1 for the right number at the end, less for others, 0 without a number."""
    last = [re.findall(r"\d{1,9}", text)[-1:] for text in completions]
    return [1 / (1 + abs(int(found[0]) - right)) if found else 0.0 for found, right in zip(last, answer, strict=True)]


def reward_tokens(completion_ids: list[list[int]], **_columns: Any) -> list[float]:
    """Random completions have no number at their end, and groups of one reward have no gradient."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


def make_byte_tokenizer(entries: int) -> Tokenizer:
    """Of a random model with as many entries. The end has an id that the model cannot write."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, end = "<|pad|>", "<|end|>"
    names = [pad, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)} | {end: entries}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=pad)


def load(arguments: argparse.Namespace, device: str) -> tuple[Any, Tokenizer, Callable[..., list[float]]]:
    """-> the model, in bfloat16 on a GPU, its tokenizer and its reward."""
    import torch

    from benchmark.step_policy import SHAPES, random_model

    dtype = "bfloat16" if device == "cuda" else "float32"
    if arguments.model is None:
        model = random_model(SHAPES[arguments.shape], dtype, device)
        return model, make_byte_tokenizer(model.config.vocab_size), reward_tokens
    from benchmark.train_real_runs import example

    model, tokenizer = example().load(arguments.model)
    tokenizer.padding_side = "left"
    return model.to(device, getattr(torch, dtype)), tokenizer, reward_answers


def draw_completions(trainer: Any, entries: int) -> None:
    """In place of the trainer's generation. Ids are those of a random model, which has as many entries."""
    numbers, longest = random.Random(SEED), trainer.args.max_completion_length

    def draw(prompt_ids: list[list[int]], *_arguments: Any, **_options: Any) -> tuple[list[list[int]], None]:
        shares = [MEDIAN * math.exp(SPREAD * numbers.gauss(0, 1)) for _ in prompt_ids]
        return [[numbers.randrange(1, entries) for _ in range(math.ceil(min(x, 1) * longest))] for x in shares], None

    trainer._generate_single_turn = draw


class Phases:
    """Milliseconds of the parts of all steps since `begin`."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.begin()

    def begin(self) -> None:
        self.ms: Counter[str] = Counter()
        self.tokens = 0  # of completions
        self._begun = self.now()

    def now(self) -> float:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() * 1e3

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        begun = self.now()
        yield
        self.ms[name] += self.now() - begun

    def put_around(self, trainer: Any) -> None:
        generate, make_batch = trainer._generate, trainer._generate_and_score_completions

        def timed_generate(*arguments: Any, **options: Any) -> Any:
            with self.timed("generation"):
                return generate(*arguments, **options)

        def timed_batch(*arguments: Any, **options: Any) -> Any:
            with self.timed("batch"):
                batch = make_batch(*arguments, **options)
            self.tokens += int(batch["completion_mask"].sum())
            return batch

        trainer._generate, trainer._generate_and_score_completions = timed_generate, timed_batch

    def read(self, steps: int) -> Row:
        """Of one of the steps."""
        total, generation, batch = self.now() - self._begun, self.ms["generation"], self.ms["batch"]
        parts = {"generation": generation, "scoring": batch - generation, "training": total - batch}
        row: Row = {"step_ms": total / steps, "tokens": self.tokens / steps}
        return row | {f"{name}_ms": ms / steps for name, ms in parts.items()} | {
            f"{name}_share": ms / total for name, ms in parts.items()
        }  # fmt: skip


def run(
    key: str, generation: str, model: Any, tokenizer: Tokenizer, reward: Callable[..., list[float]], device: str,
    arguments: argparse.Namespace,
) -> Row:  # fmt: skip
    """`train()` of a copy of the model."""
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from benchmark.step_runs import OPTIMIZER, QUIET, WAYS, on_one_gpu, restored_module

    settling = math.ceil(SETTLING / arguments.at_once) * arguments.at_once
    steps = arguments.generations * arguments.at_once
    phases, way, model = Phases(device), WAYS[key], copy.deepcopy(model)
    measured: Row = {}

    class Measure(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_options: Any) -> None:
            if state.global_step == settling:
                phases.begin()
            elif state.global_step == settling + steps:
                measured.update(phases.read(steps))

    with tempfile.TemporaryDirectory() as folder, restored_module(model), way.patched():
        options: dict[str, Any] = {
            "output_dir": folder,
            **QUIET,
            "use_cpu": device == "cpu",
            "bf16": device == "cuda",
            "max_steps": settling + steps,
            "seed": SEED,
            "num_generations": MEMBERS,
            "max_completion_length": arguments.tokens,
            "per_device_train_batch_size": arguments.completions // arguments.micro_batches,
            "gradient_accumulation_steps": arguments.micro_batches,
            "steps_per_generation": arguments.micro_batches * arguments.at_once,
        }
        prompts = arguments.completions // MEMBERS * (settling + steps)
        trainer = GRPOTrainer(
            model=model,
            args=on_one_gpu(GRPOConfig(**options | OPTIMIZER | way.options | GENERATIONS[generation])),
            train_dataset=Dataset.from_dict(make_prompts(prompts)),
            processing_class=tokenizer,
            reward_funcs=reward_tokens if generation == "none" else reward,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Measure())
        if generation == "none":
            draw_completions(trainer, model.config.vocab_size)
        phases.put_around(trainer)
        torch.manual_seed(SEED)
        trainer.train()
    logs = dict(ChainMap(*reversed(trainer.state.log_history)))  # the last of each
    names = {"reward": "reward", "grad_norm": "grad_norm", "idle_share": "frac_reward_zero_std"}
    return measured | {name: logs[logged] for name, logged in names.items()}


def measure(key: str, generation: str, *arguments: Any) -> Row:
    """`run` -> {"status": "ok", ...} or {"status", "reason"}."""
    try:
        return {"status": "ok", "reason": None} | run(key, generation, *arguments)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return {"status": "failed", "reason": f"{type(error).__name__}: {first_line(error)}"}


COLUMNS: Columns = {
    "step ms": number("step_ms", ",.0f"),
    "generation ms": number("generation_ms", ",.0f"),
    "generation": number("generation_share", ".0%"),
    "scoring ms": number("scoring_ms", ",.0f"),
    "scoring": number("scoring_share", ".0%"),
    "training ms": number("training_ms", ",.0f"),
    "training": number("training_share", ".0%"),
    "tokens": number("tokens", ",.0f"),
    "reward": number("reward", ".2f"),
    "idle groups": number("idle_share", ".0%"),
    "gradient norm": number("grad_norm", ".4f"),
}


def markdown(results: dict[str, Any]) -> str:
    about = results["about"]
    title = (
        f"**{about['model']}: {about['completions']} completions a step, {MEMBERS} of each prompt, up to "
        f"{about['tokens']} tokens, {about['micro_batches']} micro-batches, {about['at_once']} x as many generated**"
    )
    table = markdown_table(COLUMNS, [(f"{row['variant']}, {row['generation']}", row) for row in results["rows"]])
    environment = environment_line(results["environment"], ("trl", "transformers"), has_commit=False)
    return f"{environment} Commits {', '.join(list_commits(results['rows']))}.\n\n{title}\n\n{table}\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.whole_step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="a GGUF file or a folder of transformers")
    source.add_argument("--shape", choices=NAMES, help="random weights")
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--generation", nargs="+", choices=GENERATIONS, default=("generate", "continuous batching"))
    numbers = {
        "completions": (64, f"of an optimizer step, {MEMBERS} of each prompt"),
        "micro-batches": (4, "of an optimizer step"),
        "tokens": (512, "of a completion, at most"),
        "at-once": (2, "optimizer steps of a generation"),
        "generations": (2, f"that are measured, after {SETTLING} steps or more"),
    }
    for name, (default, meaning) in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning}; default {default}")
    add_output_options(parser)
    arguments = parser.parse_args()
    if min(getattr(arguments, name.replace("-", "_")) for name in numbers) < 1:
        parser.error(f"--{', --'.join(numbers)} must be at least 1")
    if arguments.completions % MEMBERS or arguments.completions % arguments.micro_batches:
        parser.error(f"--completions must be a multiple of {MEMBERS} and of --micro-batches")
    return arguments


def main() -> None:
    from benchmark.step_runs import WAYS

    arguments, environment = parse_arguments(), describe("auto")
    device = environment["device"]
    target = output_directory(arguments.out, record=arguments.record) / f"{PREFIX}{slug(environment)}.json"
    sizes = {name: getattr(arguments, name) for name in ("completions", "micro_batches", "tokens", "at_once")}
    name = arguments.shape or arguments.model.name
    results: dict[str, Any] = {"environment": environment, "about": {"model": name, **sizes}, "rows": []}
    model, tokenizer, reward = load(arguments, device)
    for generation, key in product(arguments.generation, arguments.rows or DEFAULT_ROWS[device]):
        row = {"variant": WAYS[key].label, "generation": generation, "commit": environment["commit"][:10]}
        results["rows"].append(row | measure(key, generation, model, tokenizer, reward, device, arguments))
        write_results(target, results)
    print(markdown(results))
    print(f"written: {target}")


if __name__ == "__main__":
    main()
