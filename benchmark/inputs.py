"""Batches that look like RL: sampled tokens with probabilities from 0 to 1, policies that have drifted apart."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmark import oracle
from benchmark.cases import FLAT, SURE, SURE_SHARE, Case

SEED = 0
DRIFT_NATS = 0.1  # of the old and the reference policy from the current one, standard deviation per token

# Log-probabilities are taken a few rows at a time: on CPU, so that making the inputs does not raise the
# process's high-water mark of memory; on CUDA, so that float32 logits of 256k ids fit beside everything else.
REFERENCE_LOGITS_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}


@dataclass(frozen=True)
class Inputs:
    """What a loss is given."""

    hidden: Tensor  # (B, T, H), leaf that requires a gradient
    weight: Tensor  # (V, H), leaf that requires a gradient unless the case's head is frozen
    ids: Tensor  # (B, T) int64
    mask: Tensor  # (B, T) bool, True at the tokens that count
    advantages: Tensor  # (B,) float32
    current_logps: Tensor  # (B, T) float32, from float32 logits of the same rounded hidden and weight
    current_entropy: Tensor  # (B, T) float32, likewise
    old_logps: Tensor  # (B, T) float32
    ref_logps: Tensor | None  # (B, T) float32, None without a penalty
    beta: float  # of the penalty
    dense: bool  # every token counts


def make_inputs(case: Case, device: str) -> Inputs:
    generator = torch.Generator(device).manual_seed(SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    if case.policy is None:
        hidden, weight, ids = _synthetic(case, device, generator)
    else:
        hidden, weight, ids = _of_policy(case, device)
    shape = (case.batch, case.tokens)
    current, entropy = (values.view(shape) for values in _current(case, hidden, weight, ids))
    advantages = normal(case.batch)
    advantages[case.idle_sequences] = 0.0
    lengths = torch.tensor(case.lengths, device=device)
    mask = torch.arange(case.tokens, device=device) < lengths[:, None]
    return Inputs(
        hidden=hidden.view(*shape, case.hidden_size).requires_grad_(),
        weight=weight.requires_grad_(not case.frozen),
        ids=ids.view(shape),
        mask=mask,
        advantages=advantages,
        current_logps=current,
        current_entropy=entropy,
        old_logps=current + DRIFT_NATS * normal(*shape),
        ref_logps=current + DRIFT_NATS * normal(*shape) if case.beta else None,
        beta=case.beta,
        dense=case.live_rows == case.rows,
    )


def _synthetic(case: Case, device: str, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """-> hidden (N, H), weight (V, H), ids (N,)."""
    dtype = getattr(torch, case.dtype)
    rows, vocab, hidden_size = case.rows, case.vocab, case.hidden_size
    weight = torch.empty(vocab, hidden_size, dtype=dtype, device=device)
    weight.normal_(std=hidden_size**-0.5, generator=generator)
    ids = torch.randint(vocab, (rows,), generator=generator, device=device)
    hidden = torch.empty(rows, hidden_size, dtype=dtype, device=device).normal_(generator=generator)
    # A row of the weight has norm 1, so that a peak of `a` adds `a` to the target's logit.
    peak = _peaks(case, device, generator)[:, None]
    for span in _spans(case, device):
        hidden[span] = (hidden[span].float() + peak[span] * weight[ids[span]].float()).to(dtype)
    return hidden, weight, ids


def _peaks(case: Case, device: str, generator: torch.Generator) -> Tensor:
    """(N,) added logit of each target; log-sum-exp of its rivals' logits, standard normal ones, is log V + 1/2."""
    even = torch.rand(case.rows, generator=generator, device=device)
    rivals = math.log(case.vocab) + 0.5
    if case.peaks == FLAT:
        return torch.zeros_like(even)
    if case.peaks == SURE:
        # p > 0.99 is a lead of 4.6; the hidden state's own noise moves a lead by 1. Probabilities of the sure tokens
        # then miss 1 by 1e-3 to 1e-8, as the tail of a trained policy does; those of the others are below 0.9.
        sure = torch.rand(case.rows, generator=generator, device=device) < SURE_SHARE
        return torch.where(sure, rivals + 8.0 + 10.0 * even, (rivals + 2.0) * even)
    # From a token the policy did not expect to one it is sure of.
    return even * 2 * math.log(case.vocab)


def _of_policy(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """The same from a folder written by `benchmark.real_policy`."""
    folder = Path(case.policy or "")
    sample = torch.load(folder / f"sample-{case.temperature:g}.pt", map_location=device, weights_only=True)
    weight = torch.load(folder / "weight.pt", map_location=device, weights_only=True)
    return sample["hidden"][: case.rows].clone(), weight, sample["ids"][: case.rows].clone()


def _current(case: Case, hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) log-probabilities and entropies."""
    weight_float32 = weight.float()
    parts = [
        oracle.logprobs(hidden[span].float(), weight_float32, ids[span], case.softcap)
        for span in _spans(case, hidden.device.type)
    ]
    logps, entropies = zip(*parts, strict=True)
    return torch.cat(logps), torch.cat(entropies)


def _spans(case: Case, device: str) -> list[slice]:
    step = max(1, REFERENCE_LOGITS_BYTES[device] // (4 * case.vocab))
    return [slice(start, start + step) for start in range(0, case.rows, step)]
