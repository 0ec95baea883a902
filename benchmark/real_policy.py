"""Train a language model on this machine's Python sources and keep what it samples: `python -m benchmark.real_policy`.

What a tolerance saves depends on which token ids occur together and on which never matter, and random hidden states
have neither. So a model of the shape of a published one is trained for a few minutes with this library's head as its
loss: hidden size 2048, 128,256 token ids, 1.24 billion parameters. Its contexts are held-out sources. At each of their
positions one token is drawn from the model's own distribution at each temperature. Whole completions are not sampled:
after minutes of training they run into loops, which no policy in use does.

The folder it writes is what `benchmark.run --policy` reads:

    policy.json       the recipe, losses, and per temperature the mean entropy, the share of sure tokens, and the lists
                      of ids that tolerances keep (`benchmark.certificate`)
    weight.pt         (V, H), the head
    sample-TAU.pt     {"hidden": (N, H), "ids": (N,)}, hidden states divided by TAU, so that every reader's
                      plain softmax is the distribution that the tokens were drawn from

`benchmark.pretrained` writes the same folder from a published model.
"""

import argparse
import math
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmark.certificate import measure_lists
from benchmark.environment import write_results
from liger_rl.integrations.transformers import swap_lm_head

SEED = 0
END_OF_TEXT = "<|endoftext|>"
SURE = 0.99
LONGEST_FILE = 1 << 20  # characters; longer ones are tables
DOCUMENTS_AT_ONCE = 512
LOGITS_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained, and on how much."""

    vocab: int
    hidden_size: int
    layers: int
    intermediate_size: int
    heads: int
    kv_heads: int
    length: int  # tokens of a sequence
    batch: int  # sequences of a step
    learning_rate: float
    warmup_steps: int
    text_bytes: int  # of sources that are read
    tokenizer_bytes: int  # of them, what the vocabulary is learnt from
    held_out: float  # share of the tokens that is not trained on
    temperatures: tuple[float, ...]
    sequences: int  # of the sample

    def config(self, vocab: int) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=vocab,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.length,
            tie_word_embeddings=True,
        )


# The shape of Llama 3.2 1B. A step is 8,192 tokens, 0.06 PFLOP: in minutes, many small ones learn more.
FULL = Recipe(
    vocab=128256,
    hidden_size=2048,
    layers=16,
    intermediate_size=8192,
    heads=32,
    kv_heads=8,
    length=1024,
    batch=8,
    learning_rate=4e-4,
    warmup_steps=50,
    text_bytes=64 << 20,
    tokenizer_bytes=40 << 20,
    held_out=0.02,
    temperatures=(0.6, 1.0, 0.4),
    sequences=8,
)
# Everything once, in seconds on a CPU.
TOY = replace(
    FULL,
    vocab=300,
    hidden_size=64,
    layers=2,
    intermediate_size=128,
    heads=4,
    kv_heads=2,
    length=32,
    batch=8,
    learning_rate=1e-2,
    warmup_steps=5,
    text_bytes=200 << 10,
    tokenizer_bytes=50 << 10,
    held_out=0.1,
    sequences=4,
)


def sources(limit: int) -> list[str]:
    """Python sources of the standard library and of what is installed beside it, shuffled, up to `limit` characters."""
    folders = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    folders |= {Path(entry) for entry in sys.path if entry and Path(entry).name in ("site-packages", "dist-packages")}
    paths = sorted({path for folder in folders for path in folder.rglob("*.py")})
    random.Random(SEED).shuffle(paths)
    texts, total = [], 0
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if not 0 < len(text) <= LONGEST_FILE:
            continue
        texts.append(text)
        total += len(text)
        if total >= limit:
            break
    if total < limit // 10:
        raise SystemExit(f"only {total:,} characters of Python sources are installed here, {limit:,} were asked for")
    return texts


def train_tokenizer(texts: list[str], recipe: Recipe) -> Tokenizer:
    """Byte-level BPE of `recipe.vocab` token ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def part() -> Iterator[str]:
        total = 0
        for text in texts:
            yield text
            total += len(text)
            if total >= recipe.tokenizer_bytes:
                return

    tokenizer.train_from_iterator(part(), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """-> (n,) int32 ids of all the texts, each with an end."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    parts = []
    for start in range(0, len(texts), DOCUMENTS_AT_ONCE):
        for document in tokenizer.encode_batch_fast(texts[start : start + DOCUMENTS_AT_ONCE]):
            parts.append(torch.tensor([*document.ids, end], dtype=torch.int32))
    return torch.cat(parts)


def windows(tokens: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """-> (count, length) int64 at random places."""
    starts = torch.randint(tokens.numel() - length + 1, (count, 1), generator=generator)
    return tokens[starts + torch.arange(length)].long()


def train(model: LlamaForCausalLM, tokens: Tensor, recipe: Recipe, seconds: float, device: str) -> dict[str, Any]:
    """AdamW in float32 under bfloat16 autocast, its rate falling to a tenth by the time that is given."""
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda"
    )
    losses: list[float] = []
    begun = time.monotonic()
    while (spent := time.monotonic() - begun) < seconds or not losses:
        warm = min(1.0, (len(losses) + 1) / recipe.warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * warm * (1.0 - 0.9 * min(spent / seconds, 1.0))
        ids = windows(tokens, recipe.batch, recipe.length, generator).to(device)
        loss = fused_loss(model, ids, device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise SystemExit(f"the loss of step {len(losses)} is {losses[-1]}")
        if len(losses) % 50 == 0:
            print(f"step {len(losses)}, {spent:.0f} s, loss {losses[-1]:.3f}", file=sys.stderr, flush=True)
    last = losses[-20:]
    return {
        "steps": len(losses),
        "tokens_trained": len(losses) * recipe.batch * recipe.length,
        "seconds": round(time.monotonic() - begun, 1),
        "first_loss": losses[0],
        "training_loss": sum(last) / len(last),
    }


def fused_loss(model: LlamaForCausalLM, ids: Tensor, device: str) -> Tensor:
    """Mean negative log-likelihood of ids[:, 1:] in nats, by the fused head."""
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        return model(input_ids=ids, labels=ids, fused=True, use_cache=False).loss


@torch.no_grad()
def hidden_states(model: LlamaForCausalLM, ids: Tensor, device: str) -> Tensor:
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


class Untrained(NamedTuple):
    model: LlamaForCausalLM
    tokenizer: Tokenizer
    held_out: Tensor  # (m,) int32
    tokens: Tensor  # (n,) int32
    contexts: Tensor  # (B, T) int64 of held-out tokens


def prepare(recipe: Recipe, device: str) -> Untrained:
    torch.manual_seed(SEED)
    begun = time.monotonic()
    texts = sources(recipe.text_bytes)
    tokenizer = train_tokenizer(texts, recipe)
    tokens = encode(tokenizer, texts)
    vocab = tokenizer.get_vocab_size()
    print(f"{tokens.numel():,} tokens of {vocab:,} ids, {time.monotonic() - begun:.0f} s", file=sys.stderr)
    held_out = tokens[: max(int(recipe.held_out * tokens.numel()), recipe.length)]
    tokens = tokens[held_out.numel() :]

    with torch.device(device):
        model = swap_lm_head(LlamaForCausalLM(recipe.config(vocab)))
    contexts = windows(held_out, recipe.sequences, recipe.length, torch.Generator().manual_seed(SEED)).to(device)
    return Untrained(model, tokenizer, held_out, tokens, contexts)


def head_of(model: LlamaForCausalLM, contexts: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """(B T, H) float32 hidden states and a copy of the head's weight (V, H), in its dtype of products."""
    model.eval()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return hidden_states(model, contexts, device), model.lm_head.weight.detach().to(dtype, copy=True)


def make_policy(recipe: Recipe, seconds: float, device: str, folder: Path) -> dict[str, Any]:
    """Train, sample, write `folder`; -> the content of its policy.json."""
    model, _, _, tokens, contexts = prepare(recipe, device)
    trained = train(model, tokens, recipe, seconds, device)
    hidden, weight = head_of(model, contexts, device)
    with torch.no_grad():
        held_out_loss = fused_loss(model, contexts, device).item()
    del model
    return write_policy(
        folder, hidden, weight, recipe, {"held_out_loss": held_out_loss, **trained, "recipe": asdict(recipe)}
    )


def write_policy(folder: Path, hidden: Tensor, weight: Tensor, recipe: Recipe, about: dict[str, Any]) -> dict[str, Any]:
    """Sample at each temperature, write `folder`; -> the content of its policy.json, with what is known `about` it."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(weight, folder / "weight.pt")
    generator = torch.Generator(hidden.device).manual_seed(SEED)
    samples = []
    for temperature in recipe.temperatures:
        drawn, of_drawn = draw(hidden, weight, temperature, generator)
        torch.save(drawn, folder / f"sample-{temperature:g}.pt")
        samples.append(of_drawn | measure_lists(drawn["hidden"], weight, drawn["ids"]))
    about = {
        "batch": recipe.sequences,
        "tokens": recipe.length,
        "hidden_size": weight.shape[1],
        "vocab": weight.shape[0],
        "dtype": str(weight.dtype).removeprefix("torch."),
        "samples": samples,
        **about,
    }
    write_results(folder / "policy.json", about)
    return about


def arguments_of(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, str, Recipe]:
    """With the options that every maker of a policy has: -> arguments, device, recipe."""
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="about 650 MiB; 1.3 GiB enlarged")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--toy", action="store_true", help="a tiny model or sample, to see that everything runs")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return arguments, device, TOY if arguments.toy else FULL


def print_samples(about: dict[str, Any]) -> None:
    for sample in about["samples"]:
        print(
            f"temperature {sample['temperature']:g}: entropy {sample['entropy']:.2f} nats, "
            f"p > {SURE} at {sample['sure_share']:.0%} of the tokens"
        )
        for tolerance, lists in sample["lists"].items():
            off = ", ".join(
                f"{group}: {of_hidden:.1e}, {of_weight:.1e}"
                for group, (of_hidden, of_weight) in lists["errors"].items()
            )
            print(
                f"  {tolerance} of each token's gradient: {lists['kept_parts']:.1%} of the parts kept, "
                f"{lists['ids']:.0f} ids a token; errors of dH, dW: {off}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.real_policy", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--minutes", type=float, default=4.0, help="of training; reading, the vocabulary and samples take 1 more"
    )
    arguments, device, recipe = arguments_of(parser)
    if device == "cpu" and not arguments.toy:
        raise SystemExit("a billion parameters are for a GPU; --toy shows on a CPU that everything runs")
    about = make_policy(recipe, arguments.minutes * 60, device, arguments.output)
    print(
        f"{about['steps']} steps, {about['tokens_trained']:,} tokens: {about['training_loss']:.3f} nats, "
        f"held out {about['held_out_loss']:.3f}"
    )
    print_samples(about)


if __name__ == "__main__":
    main()
