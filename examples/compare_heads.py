"""The same model, the same text, with logits and without: how far apart, and how much memory?

    python examples/compare_heads.py

A Qwen3 with random weights and a vocabulary of 64,000 reads the Python language reference, once through its own head
and once through the fused one, each in a process of its own: log-probabilities of the text, then the gradient of
their mean. What is printed is measured while you wait.
"""

import argparse
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import torch
from text import python_text, train_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from liger_rl import swap_lm_head


class Measured(NamedTuple):
    logps: torch.Tensor  # (B, T - 1)
    grad: torch.Tensor  # (V, H), of the head's weight
    peak_mib: float  # above the model and its gradients


def build_model(vocab_size: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def peak_memory_mib(device: torch.device) -> float:
    """The most this process has held so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def with_logits(model, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids, use_cache=False).logits[:, :-1].float()
    return torch.log_softmax(logits, dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def without_logits(model, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, labels=ids, fused=True, use_cache=False).per_token_logps[:, 1:]


def measure(fused: bool, ids: torch.Tensor, vocab_size: int) -> Measured:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(vocab_size).to(device)
    if fused:
        swap_lm_head(model)
    run = without_logits if fused else with_logits
    run(model, ids[:1, :8].to(device)).mean().backward()  # libraries and gradients are in memory from here on
    before = peak_memory_mib(device)
    model.zero_grad(set_to_none=False)
    logps = run(model, ids.to(device))
    logps.mean().backward()
    return Measured(logps.detach().cpu(), model.lm_head.weight.grad.cpu(), peak_memory_mib(device) - before)


def in_a_process_of_its_own(*arguments) -> Measured:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, *arguments).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="tokens a sequence")
    parser.add_argument("--vocab", type=int, default=64_000)
    options = parser.parse_args()

    text = python_text()
    tokenizer = train_tokenizer(text, vocab_size=8000)
    ids = tokenizer(text, return_tensors="pt").input_ids[0, : options.batch * options.tokens]
    ids = ids.view(options.batch, options.tokens)

    full = in_a_process_of_its_own(False, ids, options.vocab)
    fused = in_a_process_of_its_own(True, ids, options.vocab)
    difference = (full.logps - fused.logps).abs().max().item()
    grad_difference = ((full.grad - fused.grad).norm() / full.grad.norm()).item()
    logits_mib = ids.numel() * options.vocab * 4 / 2**20
    print(f"{ids.numel()} tokens of the Python reference, vocabulary {options.vocab}: {logits_mib:.0f} MiB of logits")
    print(f"largest difference of a log-probability  {difference:.1e} nats")
    print(f"relative difference of the head's gradient  {grad_difference:.1e}")
    print(f"peak memory above model and gradients  full logits {full.peak_mib:.0f} MiB, fused {fused.peak_mib:.0f} MiB")
    if max(difference, grad_difference) > 1e-4:
        raise SystemExit("The two heads differ by more than float32 rounds.")
    share = fused.peak_mib / full.peak_mib
    print(f"So the fused head gives the same log-probabilities and gradients in {share:.0%} of the memory.")


if __name__ == "__main__":
    main()
