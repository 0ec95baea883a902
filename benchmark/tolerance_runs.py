"""Whole runs of GRPO with and without a tolerance: `python -m benchmark.tolerance_runs`.

A model of 177 million parameters with 65,536 token ids learns Python sources for a minute. Then it is trained with a
reward that Python's own parser verifies: the share of the lines of a completion that are statements. For each seed
there are up to five runs from the same weights, with the same prompts and random numbers:

exact         grad_tolerance=0
reordered     exact too, with the sequences of each training batch in another order; two of them
1e-4, 1e-3    with a tolerance

A reordered batch has the same gradient up to rounding, so what its runs differ by from the exact one is what a run of
bfloat16 differs by from itself: after some steps one token is drawn differently, and from there on the batches differ.
A tolerance is harmless if its runs differ by no more.
"""

import argparse
import ast
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import combinations, product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmark.environment import (
    ROOT,
    add_output_options,
    describe,
    output_directory,
    read_results,
    slug,
    write_results,
)
from benchmark.replay_mismatch import advantages_of
from benchmark.table import Columns, environment_line, markdown_table, number
from liger_rl import FusedLinearGRPOLoss
from liger_rl.engines.sparse import lists

PREFIX = "tolerance-runs-"


@dataclass(frozen=True)
class Way:
    """How one of the runs differs from the exact one."""

    title: str
    tolerance: float = 0.0
    order: int = 0  # of the sequences of a batch; 0 leaves them as they are


WAYS = {
    "exact": Way("exact"),
    "reordered": Way("exact, reordered", order=1),
    "reordered again": Way("exact, reordered again", order=2),
    "1e-4": Way("1e-4", tolerance=1e-4),
    "1e-3": Way("1e-3", tolerance=1e-3),
}
CURVES = ("reward", "kl", "entropy")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is sampled and trained."""

    seconds: float = 45.0  # of training on sources
    prompts: int = 16
    group: int = 8  # completions of a prompt
    prompt_length: int = 32
    completion_length: int = 32
    steps: int = 200
    temperature: float = 0.7
    learning_rate: float = 1e-5
    beta: float = 0.02
    last: int = 50  # steps whose mean is a run's result


TOY = Plan(seconds=3.0, prompts=2, group=4, prompt_length=8, completion_length=12, steps=3, learning_rate=1e-3, last=2)


def recipe_of(toy: bool) -> Any:
    """The policy's, for `benchmark.real_policy`."""
    from benchmark import real_policy

    if toy:
        return real_policy.TOY
    sizes = {"vocab": 65536, "hidden_size": 1280, "layers": 5, "intermediate_size": 3840, "heads": 20, "kv_heads": 4}
    texts = {"text_bytes": 40 << 20, "tokenizer_bytes": 16 << 20}
    return replace(real_policy.FULL, **sizes, **texts, length=512, batch=32)


def parsed_share(text: str) -> float:
    """Of a completion's whole lines that are not empty: those that are statements, with a body where they need one."""
    lines = [line.strip() for line in text.split("\n")[1:-1]]
    lines = [line for line in lines if line]
    return mean(map(_parses, lines)) if lines else 0.0


def _parses(line: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(f"{line} pass" if line.endswith(":") else line)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return False
    return True


@torch.no_grad()
def sample(model: Any, prompts: Tensor, plan: Plan, generator: torch.Generator) -> Tensor:
    """(B, prompt_length) ids -> with completions, (B, prompt_length + completion_length)."""
    from transformers import DynamicCache

    cache, given, drawn = DynamicCache(), prompts, [prompts]
    for _ in range(plan.completion_length):
        hidden = model.model(input_ids=given, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
        p = (model.lm_head(hidden).float() / plan.temperature).softmax(-1)
        given = torch.multinomial(p, 1, generator=generator)
        drawn.append(given)
    return torch.cat(drawn, dim=1)


@contextmanager
def kept_shares() -> Iterator[list[float]]:
    """Shares of parts that the backwards inside keep. An exact backward adds none."""
    found: list[float] = []
    plan_parts = lists.plan_parts

    def recorded(chosen: Any) -> Any:
        plan = plan_parts(chosen)
        found.append(plan.share)
        return plan

    lists.plan_parts = recorded
    try:
        yield found
    finally:
        lists.plan_parts = plan_parts


class Trainer:
    """A policy in the dtype of products, AdamW on float32 weights."""

    def __init__(self, model: Any, plan: Plan) -> None:
        self.model, self.device = model, model.device
        self.parameters = list(model.parameters())
        self.masters = [parameter.detach().float() for parameter in self.parameters]
        self.start = torch.cat([master.flatten() for master in self.masters])
        self.optimizer = torch.optim.AdamW(self.masters, lr=plan.learning_rate, weight_decay=0.0)

    def update(self) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                parameter.copy_(master)

    def moved(self) -> Tensor:
        """What has been added to all weights."""
        return torch.cat([master.flatten() for master in self.masters]) - self.start


class Start(NamedTuple):
    """What every run begins with."""

    model: Any
    tokenizer: Any
    held_out: Tensor
    plan: Plan
    reward: Callable[[str], float] = parsed_share


def run(start: Start, seed: int, way: Way) -> tuple[dict[str, Any], Tensor]:
    """-> the curves, and what was added to the weights."""
    base, tokenizer, held_out, plan, reward = start
    from benchmark.real_policy import windows
    from liger_rl.integrations.transformers import swap_lm_head
    from liger_rl.step.policy_step import completion_logps, policy_step

    model = swap_lm_head(copy.deepcopy(base))
    trainer, device = Trainer(model, plan), model.device
    generator = torch.Generator(device).manual_seed(seed)
    places, orders = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(way.order)
    loss = FusedLinearGRPOLoss(
        "dapo", epsilon_high=0.28, beta=plan.beta, temperature=plan.temperature, metrics="with_entropy",
        grad_tolerance=way.tolerance, passes="two",
    )  # fmt: skip
    curves: dict[str, list[Tensor | float]] = {name: [] for name in (*CURVES, "loss")}
    begun = time.monotonic()
    with kept_shares() as shares:
        for _ in range(plan.steps):
            prompts = windows(held_out, plan.prompts, plan.prompt_length, places).repeat_interleave(plan.group, 0)
            ids = sample(model, prompts.to(device), plan, generator)
            texts = tokenizer.decode_batch(ids[:, plan.prompt_length :].tolist())
            rewards = torch.tensor([float(reward(text)) for text in texts], device=device)
            rows = torch.arange(ids.shape[0], device=device)
            if way.order:
                rows = torch.randperm(ids.shape[0], generator=orders).to(device)
            batch = {
                "input_ids": ids[rows],
                "mask": (torch.arange(ids.shape[1], device=device) >= plan.prompt_length).expand(ids.shape),
                "advantages": advantages_of(rewards, plan.group)[rows],
            }
            batch["ref_per_token_logps"] = completion_logps(base, batch, loss)
            step = policy_step(model, batch, loss)
            step.loss.backward()
            trainer.update()
            values = rewards.mean(), step.metrics["kl_ref"].value, step.metrics["entropy"].value, step.loss.detach()
            for name, value in zip(curves, values, strict=True):
                curves[name].append(value)
    found = {name: [round(float(value), 6) for value in values] for name, values in curves.items()}
    about = {"kept_share": mean(shares) if shares else None, "seconds": round(time.monotonic() - begun, 1)}
    return {**found, **about}, trainer.moved()


def runs_of(seed: int, start: Start, ways: Sequence[str] = tuple(WAYS)) -> dict[str, Any]:
    """Those of a seed, by name, the exact one first; each with how far its weights ended from that one's."""
    found: dict[str, Any] = {}
    exact = None
    for name in ways:
        found[name], moved = run(start, seed, WAYS[name])
        exact = moved if exact is None else exact
        found[name]["distance"] = ((moved - exact).norm() / exact.norm().clamp(min=1e-30)).item()
        ends = {curve: round(mean(found[name][curve][-start.plan.last :]), 4) for curve in CURVES}
        print(f"seed {seed}, {name}: {ends}, kept {found[name]['kept_share']}, {found[name]['seconds']} s", flush=True)
    return found


def prepare(plan: Plan, recipe: Any, device: str) -> tuple[Any, Any, Tensor, dict[str, Any]]:
    """-> the policy that every run starts from, its tokenizer, the held-out text, and what is worth knowing of it."""
    from benchmark import real_policy

    model, tokenizer, held_out, tokens, _ = real_policy.prepare(recipe, device)
    trained = real_policy.train(model, tokens, recipe, plan.seconds, device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return model, tokenizer, held_out, {"parameters": parameters, "vocab": model.config.vocab_size, **trained}


def measure(
    plan: Plan, recipe: Any, seeds: int, device: str, reward: Callable[[str], float] = parsed_share
) -> dict[str, Any]:
    """In this process, one seed after the other."""
    model, tokenizer, held_out, about = prepare(plan, recipe, device)
    start = Start(frozen(model, device), tokenizer, held_out, plan, reward)
    return {"policies": [about], "seeds": [runs_of(seed, start) for seed in range(seeds)]}


def frozen(model: Any, device: str) -> Any:
    """In the dtype of products; rotary frequencies are no numbers to round."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16 if device == "cuda" else torch.float32)
    return model.eval()


def measure_beside(plan: Plan, recipe: Any, seeds: Sequence[int], ways: Sequence[str], folder: Path) -> dict[str, Any]:
    """The seeds in processes beside each other, spread over the GPUs there are; the host is what they wait for."""
    model, tokenizer, held_out, about = prepare(plan, recipe, "cuda")
    start = {"state": model.state_dict(), "config": model.config.to_dict(), "held_out": held_out, "plan": asdict(plan)}
    torch.save(start | {"ways": list(ways)}, folder / "start.pt")
    tokenizer.save(str(folder / "tokenizer.json"))
    del model
    torch.cuda.empty_cache()
    workers = []
    for seed in seeds:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(seed % torch.cuda.device_count())}
        command = [sys.executable, "-m", "benchmark.tolerance_runs", "--seed", str(seed), "--out", str(folder)]
        workers.append(subprocess.Popen(command, cwd=ROOT, env=environment))
    codes = [worker.wait() for worker in workers]
    if any(codes):
        raise SystemExit("a worker failed")
    return {"policies": [about], "seeds": [read_results(folder / f"seed-{seed}.json") for seed in seeds]}


def worker(seed: int, folder: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    start = torch.load(folder / "start.pt", map_location="cpu")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**start["config"]))
    model.load_state_dict(start["state"])
    begin = Start(frozen(model, "cuda"), tokenizer, start["held_out"], Plan(**start["plan"]))
    found = runs_of(seed, begin, start["ways"])
    write_results(folder / f"seed-{seed}.json", found)


# --- what is shown ----------------------------------------------------------------------------------------------------

GROUPS = {"exact": ("exact", "reordered", "reordered again"), "1e-4": ("1e-4",), "1e-3": ("1e-3",)}


def end(run: dict[str, Any], curve: str, last: int) -> float:
    return mean(run[curve][-last:])


def differences(results: dict[str, Any], group: str, curve: str) -> list[float]:
    """Of the ends of two runs of a seed, one of this group and the other an exact one: all pairs, of all seeds."""
    found = []
    for runs in results["seeds"]:
        exact = [name for name in GROUPS["exact"] if name in runs]
        mine = [name for name in GROUPS[group] if name in runs]
        pairs = combinations(exact, 2) if group == "exact" else product(mine, exact)
        ends = {name: end(run, curve, results["plan"]["last"]) for name, run in runs.items()}
        found += [ends[one] - ends[other] for one, other in pairs]
    return found


COLUMNS: Columns = {
    "runs": number("runs", ".0f"),
    "reward": number("reward", ".3f"),
    "apart": number("reward_apart", ".4f"),
    "KL": number("kl", ".3f"),
    "apart ": number("kl_apart", ".3f"),
    "entropy": number("entropy", ".3f"),
    "apart  ": number("entropy_apart", ".3f"),
    "weights apart": number("distance", ".0%"),
    "kept": number("kept", ".0%"),
}


def markdown(results: dict[str, Any]) -> str:
    """A row for each tolerance: means over runs, and how far these end from exact runs of the same seed."""
    plan, seeds, policies = results["plan"], results["seeds"], results["policies"]
    first = policies[0]
    about = (
        f"{first['parameters'] / 1e6:.0f} million parameters, {first['vocab']:,} token ids, {len(seeds)} seeds, "
        f"{plan['steps']} steps of {plan['prompts'] * plan['group']} completions. Reward, KL to the first policy and "
        f"entropy are means of the last {plan['last']} steps. Apart: the root mean square of the difference to an "
        "exact run of the same seed; in the first row, of two exact runs. Weights apart: of the final weights, "
        "relative to how far training moved them."
    )
    rows = []
    for group, names in GROUPS.items():
        runs = [runs[name] for runs in seeds for name in names if name in runs]
        row: dict[str, Any] = {"status": "ok", "runs": len(runs)}
        for curve in CURVES:
            row[curve] = mean(end(run, curve, plan["last"]) for run in runs)
            row[f"{curve}_apart"] = mean(value**2 for value in differences(results, group, curve)) ** 0.5
        row["distance"] = mean(run["distance"] for run in runs if run["distance"] or group != "exact")
        kept = [run["kept_share"] for run in runs]
        row["kept"] = None if None in kept else mean(kept)
        rows.append((group, row))
    return "\n\n".join([environment_line(results["environment"], ()), about, markdown_table(COLUMNS, rows)]) + "\n"


def plot(results: dict[str, Any], path: Path) -> None:
    """Mean over the seeds of each curve, over steps; of the seeds that have all runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(CURVES), figsize=(13, 4), layout="constrained")
    width = max(1, results["plan"]["steps"] // 20)
    seeds = results["seeds"]
    whole = [runs for runs in seeds if runs.keys() == WAYS.keys()]
    for panel, curve in zip(panels, CURVES, strict=True):
        for name, way in WAYS.items():
            by_step = zip(*(runs[name][curve] for runs in whole), strict=True)
            values = [mean(values) for values in by_step]
            smooth = [mean(values[max(0, k - width + 1) : k + 1]) for k in range(len(values))]
            panel.plot(smooth, label=way.title, linewidth=2.2 if way.tolerance else 1.4)
        panel.set_title(curve)
        panel.set_xlabel("step")
        panel.grid(True, color="#dddddd")
    panels[0].legend(frameon=False)
    name = results["environment"]["device_name"]
    which = f"{len(seeds)} seeds" if whole == seeds else f"the {len(whole)} of {len(seeds)} seeds with every run"
    figure.suptitle(f"GRPO, {which}, mean of {width} steps, {name}", fontsize=11)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.tolerance_runs", description=__doc__.splitlines()[0])
    add_output_options(parser)
    parser.add_argument("--seconds", type=float, help="of the policy's training")
    parser.add_argument("--steps", type=int, help="of each run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS), help="by name, with commas between; exact is the first")
    parser.add_argument(
        "--add", type=Path, metavar="FILE", help="results to which more seeds are added, of a new policy"
    )
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)  # of a worker
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return worker(arguments.seed, arguments.out)
    ways = arguments.ways.split(",")
    if ways[0] != "exact" or not set(ways) <= WAYS.keys():
        parser.error(f"--ways must begin with exact and be among {', '.join(WAYS)}; got {arguments.ways}")
    environment = describe("auto")
    toy = environment["device"] == "cpu"  # to see that everything runs
    plan = TOY if toy else Plan()
    plan = replace(plan, **{name: value for name in ("seconds", "steps") if (value := getattr(arguments, name))})
    before: dict[str, Any] = read_results(arguments.add) if arguments.add else {"policies": [], "seeds": []}
    folder = output_directory(arguments.out, record=arguments.record)
    if toy:
        found = measure(plan, recipe_of(toy), arguments.seeds, "cpu")
    else:
        first, work = len(before["seeds"]), Path(tempfile.mkdtemp(prefix="tolerance-runs-"))
        found = measure_beside(plan, recipe_of(toy), range(first, first + arguments.seeds), ways, work)
    results = {"environment": environment, "plan": asdict(plan)}
    results |= {name: before[name] + found[name] for name in ("policies", "seeds")}
    target = folder / f"{PREFIX}{slug(environment)}.json"
    target.write_text(json.dumps(results) + "\n", encoding="utf-8")  # curves, which no line each makes readable
    plot(results, target.with_suffix(".png"))
    print(markdown(results))
    print(f"written: {target}")


if __name__ == "__main__":
    main()
