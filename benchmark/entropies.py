"""The default beside the exact gradient, at entropies that are given: `python -m benchmark.entropies FOLDER FILE.gguf`.

The policy is a published model. `benchmark.pretrained` says how its head is enlarged. For each entropy we look for the
temperature that gives it in the mean over all tokens. One more batch of each hidden size is flat. Each batch is
measured twice: all 8,192 tokens count, or 5,570 of them do and a quarter of the sequences has no advantage. Steps of
the exact gradient and of the default are timed in turns.
"""

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmark.cases import FLAT, Case, policy_cases
from benchmark.command import parser_of, write
from benchmark.environment import describe
from benchmark.errors import measure_errors
from benchmark.measure import Bench
from benchmark.memory import PeakMemory
from benchmark.peers import peer
from benchmark.pretrained import contexts, enlarge, load
from benchmark.real_policy import FULL, SURE, Recipe, hidden_states, write_policy
from benchmark.table import Columns, environment_line, markdown_table, number
from benchmark.timing import once_ms
from benchmark.variants import DEFAULT, OURS

PREFIX = "entropies-"
ENTROPIES = (0.6, 1.1, 2.8)
SHAPES = ((4096, 128256), (1024, 128256))  # H, V
MASK_SHARE = 0.32  # of an RL batch
TURNS, WARM_TURNS = {"cpu": 1, "cuda": 15}, {"cpu": 0, "cuda": 3}
MOST_TOKENS = 1024  # that a temperature is sought with
HALVINGS = 24


@torch.no_grad()
def temperature_of(hidden: Tensor, weight: Tensor, nats: float) -> float:
    """The temperature that gives this mean entropy, which grows with it."""
    rows = hidden[:: -(-hidden.shape[0] // MOST_TOKENS)].float()
    head = weight.float()
    low, high = 1e-2, 1e2
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        total = 0.0
        for part in (rows / middle).split(128):
            log_p = (part @ head.T).log_softmax(-1)
            total -= torch.where(log_p > -1e3, log_p.exp() * log_p, 0.0).sum().item()
        low, high = (middle, high) if total < nats * rows.shape[0] else (low, middle)
    return round(low, 5)


def batches(case: Case) -> list[Case]:
    """Every token counts, or a batch as RL makes it."""
    rl = replace(case, name=f"{case.name}, RL", mask_share=MASK_SHARE, idle_share=0.25, beta=0.0)
    return [replace(case, beta=0.0), rl]


class Policy(NamedTuple):
    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)


def cases_of(policy: Policy, recipe: Recipe, folder: Path, entropies: Sequence[float]) -> list[Case]:
    """Write the policy's folder; -> its batches, and flat ones of its shape."""
    temperatures = tuple(temperature_of(*policy, nats) for nats in entropies)
    about = write_policy(folder, *policy, replace(recipe, temperatures=temperatures), {})
    like = Case(
        name="",
        batch=about["batch"],
        tokens=about["tokens"],
        hidden_size=about["hidden_size"],
        vocab=about["vocab"],
        dtype=about["dtype"],
    )
    named = [case for case in policy_cases(like, str(folder)) if not case.mask_share]
    named = [replace(case, name=f"{nats:g} nats") for case, nats in zip(named, entropies, strict=True)]
    return [batch for case in (*named, replace(like, name="flat", peaks=FLAT)) for batch in batches(case)]


def measure_case(case: Case, device: str) -> dict[str, Any]:
    bench = Bench(case, device)
    inputs, small = bench.inputs, bench.small
    counted = inputs.mask
    row: dict[str, Any] = {
        "status": "ok",
        "case": case.name,
        "hidden_size": case.hidden_size,
        "vocab": case.vocab,
        "dtype": case.dtype,
        "temperature": case.temperature,
        "tokens": case.rows,
        "live_tokens": case.live_rows,
        "mean_entropy": inputs.current_entropy[counted].mean().item(),
        "sure_share": (inputs.current_logps[counted].exp() > SURE).float().mean().item(),
    }
    heads = {name: peer.load(name) for name in (OURS, DEFAULT)}
    steps = {name: head.make(case, inputs) for name, head in heads.items()}
    times: dict[str, list[float]] = {f"{name} {what}": [] for name in heads for what in ("forward", "step")}
    for turn in range(WARM_TURNS[device] + TURNS[device]):
        for name, head in heads.items():
            head.clear(inputs)
            with torch.no_grad():
                forward = once_ms(steps[name], device)
            step = once_ms(lambda name=name: steps[name]().backward(), device)
            if turn >= WARM_TURNS[device]:
                times[f"{name} forward"].append(forward)
                times[f"{name} step"].append(step)
    row |= {f"{name}_ms": statistics.median(values) for name, values in times.items()}
    row["ratio"] = row[f"{DEFAULT} step_ms"] / row[f"{OURS} step_ms"]
    for name, head in heads.items():
        head.clear(inputs)
        with PeakMemory(device) as memory:
            steps[name]().backward()
        row[f"{name}_extra_mib"] = max(0, memory.peak_bytes - head.gradient_bytes(case)) / 2**20
        row[f"{name}_kept_share"] = head.kept_share()
        head.clear(inputs)
        errors = measure_errors(head, head.make(small.case, small.inputs), small.case, small.inputs, small.gold)
        row |= {f"{name}_{key}": value for key, value in errors.items()}
        head.clear(small.inputs)
    return row


def measure(
    model: Any, tokenizer: Any, recipe: Recipe, shapes: Sequence[tuple[int, int]], device: str
) -> Iterator[dict[str, Any]]:
    """A row for each batch."""
    ids = contexts(tokenizer, recipe.sequences, recipe.length).to(device)
    states, head = hidden_states(model, ids, device), model.lm_head.weight.detach()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for shape in shapes:
        hidden, weight, _ = enlarge(states, head, *shape, in_order=False)
        with tempfile.TemporaryDirectory() as folder:
            policy = Policy(hidden, weight.to(dtype))
            del hidden, weight
            for case in cases_of(policy, recipe, Path(folder), ENTROPIES):
                yield measure_case(case, device)


COLUMNS: Columns = {
    "entropy": number("mean_entropy", ".2f"),
    "tokens": number("live_tokens", ",.0f"),
    "exact fwd ms": number(f"{OURS} forward_ms", ".1f"),
    "exact step ms": number(f"{OURS} step_ms", ".1f"),
    "default step ms": number(f"{DEFAULT} step_ms", ".1f"),
    "x exact": number("ratio", ".2f"),
    "kept": number(f"{DEFAULT}_kept_share", ".1%"),
    "exact MiB": number(f"{OURS}_extra_mib", ",.0f"),
    "default MiB": number(f"{DEFAULT}_extra_mib", ",.0f"),
    "exact dH err": number(f"{OURS}_grad_hidden_error", ".1e"),
    "default dH err": number(f"{DEFAULT}_grad_hidden_error", ".1e"),
    "exact dW err": number(f"{OURS}_grad_weight_error", ".1e"),
    "default dW err": number(f"{DEFAULT}_grad_weight_error", ".1e"),
}


def markdown(results: dict[str, Any]) -> str:
    rows = [(f"H = {row['hidden_size']:,}, V = {row['vocab']:,}: {row['case']}", row) for row in results["rows"]]
    line = environment_line(results["environment"], ("transformers",))
    return "\n\n".join([line, f"{results['model']}.", markdown_table(COLUMNS, rows)]) + "\n"


def main() -> None:
    parser = parser_of("entropies", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", help="a GGUF file in the folder")
    arguments = parser.parse_args()
    environment = describe("cuda")
    model, tokenizer = load(arguments.folder, arguments.file, "cuda")
    results: dict[str, Any] = {"environment": environment, "model": arguments.file, "rows": []}
    for row in measure(model, tokenizer, FULL, SHAPES, "cuda"):
        results["rows"].append(row)
        write(PREFIX, results, arguments, markdown)


if __name__ == "__main__":
    main()
