"""Divergence of a trained model from what it was before, beside TRL's op: `python -m benchmark.divergence_policy`.

What a tolerance saves depends on how sure a student is, and on where it differs from its teacher. The model of
`benchmark.real_policy` is trained for `--minutes`. It is the teacher, and the student is itself after EARLIER of that
time, both on held-out text and at each of TEMPERATURES, by which their hidden states are divided. Reading the text and
learning the vocabulary take a minute more.

With `--pretrained FOLDER FILE.gguf` the teacher is that model, and the student the same without every second layer,
trained for `--minutes` on windows of the text that the contexts are taken from.
"""

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmark import exact_kl, pretrained, real_policy
from benchmark.command import parser_of, write
from benchmark.divergence import COLUMNS, WAYS, Gold, Way, in_float64, measure
from benchmark.environment import describe
from benchmark.pairs import GOLD_TOKENS, Heads
from benchmark.table import Columns, environment_line, markdown_table, number
from liger_rl import linear_divergence
from liger_rl.engines.sparse import lists

PREFIX = "divergence-policy-"
TEMPERATURES = (1.0, 0.6)
EARLIER = 0.75
TRAINING_WINDOWS = 64  # for each that is compared
KINDS = ("forward_kl", "reverse_kl", "jsd")


def make_pair(minutes: float, device: str) -> Heads:
    """With float32 hidden states."""
    recipe = real_policy.FULL if device == "cuda" else real_policy.TOY
    model, _, _, tokens, contexts = real_policy.prepare(recipe, device)
    heads: list[Tensor] = []
    for share in (EARLIER, 1.0 - EARLIER):
        model.train()
        real_policy.train(model, tokens, recipe, 60 * minutes * share, device)
        heads += real_policy.head_of(model, contexts, device)
    del model
    gc.collect()  # an optimizer and its parameters refer to each other
    return Heads(*heads)


def pretrained_pair(folder: Path, name: str, minutes: float, device: str) -> Heads:
    """With float32 hidden states."""
    recipe = real_policy.FULL if device == "cuda" else real_policy.TOY
    model, tokenizer = pretrained.load(folder, name, device)
    windows = pretrained.contexts(tokenizer, TRAINING_WINDOWS * recipe.sequences, recipe.length)
    contexts = windows[::TRAINING_WINDOWS].to(device)
    teacher = real_policy.head_of(model, contexts, device)
    model.model.layers = model.model.layers[::2]
    model.config.num_hidden_layers = len(model.model.layers)
    model.train()
    real_policy.train(model, windows.flatten(), recipe, 60 * minutes, device)
    student = real_policy.head_of(model, contexts, device)
    del model
    gc.collect()
    return Heads(*student, *teacher)


def _tolerance(grad_tolerance: float) -> Way:
    def way(heads: Heads, kind: str, factors: Tensor) -> tuple[Tensor, Tensor]:
        found = linear_divergence(*heads, kind=kind, grad_tolerance=grad_tolerance).divergence
        return found, (found * factors).sum()

    return way


def kept_share(way: Way, heads: Heads, kind: str) -> float | None:
    """Of the parts of the gradient of a mean; None where nothing was chosen."""
    found, plan_parts = [], lists.plan_parts

    def recorded(*given: Any) -> lists.Kept:
        found.append(plan_parts(*given))
        return found[-1]

    lists.plan_parts = recorded
    try:
        hidden = heads.hidden.detach().requires_grad_()
        way(heads._replace(hidden=hidden), kind, torch.ones_like(hidden[:, 0], dtype=torch.float32))[1].backward()
    finally:
        lists.plan_parts = plan_parts
    return found[0].share if found else None


def gold_of_all(heads: Heads, kind: str) -> Gold:
    """Errors of all tokens: how much of the gradient may be left out differs from token to token."""
    rows = torch.arange(heads.hidden.shape[0], device=heads.hidden.device)
    values, grads_hidden, grad_weight = [], [], torch.zeros((), dtype=torch.float64, device=rows.device)
    for part in rows.split(GOLD_TOKENS):
        value, grad_hidden, of_weight = in_float64(heads, kind, part)
        values.append(value)
        grads_hidden.append(grad_hidden)
        grad_weight = grad_weight + of_weight
    return Gold(rows, (torch.cat(values), torch.cat(grads_hidden), grad_weight))


def _at(pair: Heads, temperature: float) -> Heads:
    hidden, teacher_hidden = ((part / temperature).to(pair.weight.dtype) for part in pair[::2])
    return pair._replace(hidden=hidden, teacher_hidden=teacher_hidden)


def _about(heads: Heads, temperature: float) -> dict[str, Any]:
    with torch.no_grad():
        values = linear_divergence(*heads, entropy=True)
    assert values.entropy is not None
    return {
        "tokens": heads.hidden.shape[0],
        "vocab": heads.weight.shape[0],
        "hidden_size": heads.hidden.shape[1],
        "dtype": str(heads.weight.dtype).split(".")[1],
        "temperature": temperature,
        "entropy": values.entropy.mean().item(),
        "divergence": values.divergence.mean().item(),
    }


def rows_of(pair: Heads, device: str) -> Iterator[dict[str, Any]]:
    ways = WAYS | {f"liger_rl, {name}": partial(_tolerance, float(name)) for name in ("3e-4", "1e-3")}
    for temperature in TEMPERATURES:
        heads = _at(pair, temperature)
        about = _about(heads, temperature)
        for kind in KINDS:
            gold, floor = gold_of_all(heads, kind), None
            for name, make in ways.items():
                row = measure(make, heads, kind, device, gold)
                if row["status"] == "ok":
                    floor = floor or (row["step_ms"] if name == "TRL" else None)
                    row["x_trl"] = floor and row["step_ms"] / floor
                    row["kept_share"] = kept_share(make(), heads, kind)
                yield {**about, "kind": kind, "variant": name, **row}


def penalty_rows(pair: Heads, device: str) -> Iterator[dict[str, Any]]:
    for temperature in TEMPERATURES:
        heads = _at(pair, temperature)
        about = _about(heads, temperature)
        for row in exact_kl.rows_of(heads, device):
            yield {**about, **row}


WITH_KEPT: Columns = COLUMNS | {"kept": number("kept_share", ".1%")}


def markdown(results: dict[str, Any]) -> str:
    def of(row: dict[str, Any], what: str) -> str:
        return what.format(f"entropy {row['entropy']:.1f} nats, KL {row['divergence']:.2f}")

    lines = [(of(row, f"{row['kind']}, {{}}: {row['variant']}"), row) for row in results["rows"]]
    losses = [(of(row, f"{exact_kl.label(row)}, {{}}"), row) for row in results.get("penalties", ())]
    parts = [environment_line(results["environment"], ("trl",)), markdown_table(WITH_KEPT, lines)]
    return "\n\n".join([*parts, *([markdown_table(exact_kl.COLUMNS, losses)] if losses else [])]) + "\n"


def main() -> None:
    parser = parser_of("divergence_policy", __doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="of training")
    parser.add_argument("--pretrained", nargs=2, metavar=("FOLDER", "FILE"), help="a GGUF file, in place of training")
    arguments = parser.parse_args()
    environment, prefix = describe("auto"), PREFIX
    device = environment["device"]
    if arguments.pretrained is None:
        pair = make_pair(arguments.minutes, device)
    else:
        folder, name = arguments.pretrained
        prefix += "pretrained-"
        pair = pretrained_pair(Path(folder), name, arguments.minutes, device)
    rows, penalties = (list(of_pair(pair, device)) for of_pair in (rows_of, penalty_rows))
    write(prefix, {"environment": environment, "rows": rows, "penalties": penalties}, arguments, markdown)


if __name__ == "__main__":
    main()
