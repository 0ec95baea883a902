"""A published model trained by TRL's GRPOTrainer, with and without the patch: `python -m benchmark.train_real_runs`.

    python -m benchmark.train_real_runs --model FILE.gguf     # SmolLM2-135M-Instruct; or a folder of transformers

The task is that of `examples/train_real.py`: a sum, and a reward that a program checks. For each seed there are two
runs from the same weights, with the same prompts and random numbers:

trl        TRL as it is
patch      patch_trl()

All runs are processes beside each other on one GPU.

The test was planned before any run. A run's result is its mean reward over the last fifth of its steps. If some runs
were stopped by --seconds, all are cut to the shortest. The quantity is the difference of the two runs of one
seed, `patch` minus `trl`. We report its mean over the seeds, its standard error, and the two-sided p-value of the
permutation test that flips the signs of the differences, over all 2^seeds flips. Five seeds give no p-value below 1/16,
so it alone gives no verdict. The mean and its standard error say how large an effect of the patch could have been
missed. KL to the first policy and entropy are reported in the same way, as secondary.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmark.environment import ROOT, add_output_options, describe, output_directory, slug
from benchmark.picture import make_panels, save, write_out
from benchmark.table import environment_line

PREFIX = "train-real-runs-"
VARIANTS: dict[str, dict[str, Any] | None] = {"trl": None, "patch": {}}
CURVES = ("reward", "kl", "entropy")
TITLES = {"reward": "reward", "kl": "KL to the first policy (k3, nats)", "entropy": "entropy (nats)"}
LAST = 0.2  # of the steps, whose mean is a run's result
SEEDS, STEPS, SECONDS = 5, 80, 400.0
LABELS = {"trl": "TRL", "patch": "TRL, patch_trl()"}
COLORS = {"trl": "#7d3c98", "patch": "#0b2f55"}
SMOOTHED = 5
PLAN: dict[str, Any] = {
    "learning_rate": 1e-5,
    "beta": 0.01,
    # An answer takes 4 tokens. Our own product runs in backwards of at least 512 tokens.
    "per_device_train_batch_size": 256,
    "num_generations": 8,
    "max_completion_length": 32,
    "temperature": 1.0,
    "lr_scheduler_type": "constant",
    "loss_type": "dapo",
}
TOY: dict[str, Any] = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 8}
PROBLEMS = 4096


def example() -> Any:
    """examples/train_real.py, whose task and loading these runs have."""
    folder = str(ROOT / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    import train_real

    return train_real


def run(model: Path, variant: str, seed: int, steps: int, seconds: float, options: dict[str, Any], path: Path) -> None:
    """One run in this process; `path` has its curves after every step."""
    import random

    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from liger_rl import patch_trl

    if (patch := VARIANTS[variant]) is not None:
        patch_trl(**patch)
    task = example()
    random.seed(seed)
    problems = [task.Sum.draw() for _ in range(PROBLEMS)]
    columns = {name: [getattr(problem, name) for problem in problems] for name in ("prompt", "a", "b")}

    def reward(completions: list[str], a: list[int], b: list[int], **others: Any) -> list[float]:
        return [task.Sum(*sides).reward(text) for *sides, text in zip(a, b, completions, strict=True)]

    class Record(TrainerCallback):
        """Curves, and the limit of time."""

        def __init__(self) -> None:
            self.curves: dict[str, Any] = {"variant": variant, "seed": seed, **{name: [] for name in CURVES}}
            self.begun = time.monotonic()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **others: Any) -> None:
            if "reward" not in logs:
                return
            for name in CURVES:
                self.curves[name].append(float(logs[name]))
            self.curves["seconds"] = round(time.monotonic() - self.begun, 1)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(self.curves), encoding="utf-8")
            part.replace(path)  # its reader never sees half of it

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            control.should_training_stop |= time.monotonic() - self.begun > seconds

    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as output:
        arguments = GRPOConfig(
            output_dir=output,
            max_steps=steps,
            seed=seed,
            bf16=cuda,  # autocast; the weights are float32
            use_cpu=not cuda,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            **options,
        )
        trainer = GRPOTrainer(
            model=str(model),
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_dict(columns),
            processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
            callbacks=[Record()],
        )
        trainer.train()


def prepare(path: Path, folder: Path) -> None:
    """A folder of dense weights, which every run loads faster than a GGUF file."""
    model, tokenizer = example().load(path)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measure(arguments: argparse.Namespace, environment: dict[str, Any], target: Path) -> dict[str, Any]:
    """The runs, as many beside each other as --beside says; `target` has what there is of them every few seconds."""
    work = Path(tempfile.mkdtemp(prefix="train-real-runs-"))
    prepare(arguments.model, work / "model")
    options = PLAN | (TOY if environment["device"] == "cpu" else {})
    about = {"environment": environment, "model": arguments.model.name, "steps": arguments.steps, "plan": options}
    # A seed's runs start together, so that a run that was never started leaves whole seeds.
    waiting = list(product(range(arguments.seeds), VARIANTS))
    running: list[tuple[subprocess.Popen, str]] = []
    failed = []
    while waiting or running:
        while waiting and len(running) < arguments.beside:
            seed, variant = waiting.pop(0)
            name = f"{variant}-{seed}"
            command = [sys.executable, "-m", "benchmark.train_real_runs", "--model", str(work / "model")]
            command += ["--worker", variant, str(seed), "--steps", str(arguments.steps)]
            command += ["--seconds", str(arguments.seconds), "--out", str(work)]
            settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
            with (target.parent / f"{PREFIX}{name}.log").open("w") as log:
                process = subprocess.Popen(command, cwd=ROOT, env=os.environ | settings, stdout=log, stderr=log)
            running.append((process, name))
        time.sleep(2.0)
        for process, name in [pair for pair in running if pair[0].poll() is not None]:
            running.remove((process, name))
            if process.returncode:
                failed.append(name)
                print(f"{name} failed, see its log beside {target}", file=sys.stderr, flush=True)
        runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(work.glob("*.json"))]
        results = {**about, "failed": failed, "runs": runs}
        target.write_text(json.dumps(results) + "\n", encoding="utf-8")
    return results


# --- what is shown ----------------------------------------------------------------------------------------------------


def sign_flip_p(differences: list[float]) -> float:
    """Two-sided: the share of all flips of signs whose mean is at least as far from 0."""
    found = abs(sum(differences))
    flips = [abs(sum(sign * d for sign, d in zip(signs, differences, strict=True)))
             for signs in product((1, -1), repeat=len(differences))]  # fmt: skip
    return sum(value >= found * (1 - 1e-9) for value in flips) / len(flips)


def ends(results: dict[str, Any]) -> dict[tuple[str, int], dict[str, float]]:
    """(variant, seed) -> mean of each curve over the last of the steps that all runs have, of whole seeds."""
    runs = {(run["variant"], run["seed"]): run for run in results["runs"]}
    whole = {seed for _, seed in runs if all((variant, seed) in runs for variant in VARIANTS)}
    runs = {key: run for key, run in runs.items() if key[1] in whole}
    length = min((len(run["reward"]) for run in runs.values()), default=0)
    last = max(1, round(LAST * length))
    return {key: {curve: mean(run[curve][:length][-last:]) for curve in CURVES} for key, run in runs.items()}


def markdown(results: dict[str, Any]) -> str:
    """The planned test."""
    found = ends(results)
    seeds = sorted({seed for _, seed in found})
    if len(seeds) < 2:
        return "fewer than two whole seeds: no test\n"
    plan = results["plan"]
    batch = f"{plan['per_device_train_batch_size']} completions, {plan['num_generations']} of each problem"
    about = f"{results['model']}, {len(seeds)} seeds, {results['steps']} steps of {batch}."
    lines = [environment_line(results["environment"], ()), "", about, ""]
    lines += ["| mean ± standard error | reward | KL | entropy |", "|---|---:|---:|---:|"]

    def row(label: str, values: dict[str, list[float]], *, test: bool) -> str:
        cells = []
        for curve in CURVES:
            error = stdev(values[curve]) / len(seeds) ** 0.5
            p = f" (p {sign_flip_p(values[curve]):.2f})" if test else ""
            cells.append(f"{mean(values[curve]):.4f} ± {error:.4f}{p}")
        return f"| {label} | {' | '.join(cells)} |"

    for variant in VARIANTS:
        lines.append(row(variant, {c: [found[variant, s][c] for s in seeds] for c in CURVES}, test=False))
    apart = {c: [found["patch", s][c] - found["trl", s][c] for s in seeds] for c in CURVES}
    lines.append(row("patch - trl", apart, test=True))
    return "\n".join(lines) + "\n"


def plot(results: dict[str, Any], path: Path) -> bool:
    """Draw `path`: each curve's mean over the seeds, and the range of its runs, smoothed over SMOOTHED steps."""
    figure, panels = make_panels(1, len(CURVES), figsize=(13, 4))
    for curve, panel in zip(CURVES, panels[0], strict=True):
        for variant, color in COLORS.items():
            runs = [run[curve] for run in results["runs"] if run["variant"] == variant]
            length = min(len(run) for run in runs)
            smooth = [[mean(run[max(0, i - SMOOTHED + 1) : i + 1]) for i in range(length)] for run in runs]
            steps, values = range(1, length + 1), list(zip(*smooth, strict=True))
            panel.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.12)
            panel.plot(steps, [mean(v) for v in values], color=color, label=LABELS[variant])
        panel.set(title=TITLES[curve], xlabel="step")
        if curve == "kl":  # its peaks are single tokens of one seed, and would leave the means no room
            panel.set_yscale("log", nonpositive="mask")
            write_out(panel.yaxis)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0, 0].legend(frameon=False)
    save(figure, path, results)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.train_real_runs", description=__doc__.splitlines()[0])
    add_output_options(parser)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file or a folder of transformers")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which a run stops")
    parser.add_argument("--beside", type=int, help="runs at a time; default: all on CUDA, one on a CPU")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        import torch

        variant, seed = arguments.worker
        options = PLAN | ({} if torch.cuda.is_available() else TOY)
        path = arguments.out / f"{variant}-{seed}.json"
        return run(arguments.model, variant, int(seed), arguments.steps, arguments.seconds, options, path)
    environment = describe("auto")
    if arguments.beside is None:
        arguments.beside = 1 if environment["device"] == "cpu" else len(VARIANTS) * arguments.seeds
    target = output_directory(arguments.out, record=arguments.record) / f"{PREFIX}{slug(environment)}.json"
    results = measure(arguments, environment, target)
    print(markdown(results))
    if results["runs"]:
        plot(results, target.with_suffix(".png"))
    print(f"written: {target}")
    if results["failed"]:
        raise SystemExit(f"failed: {', '.join(results['failed'])}")


if __name__ == "__main__":
    main()
