"""Batches that look like RL: sampled tokens with probabilities from 0 to 1, policies that have drifted apart."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmark.cases import Case
from liger_rl import LogitTransform
from liger_rl.reference import reference_logprobs

SEED = 0
DRIFT_NATS = 0.1  # of the old and the reference policy from the current one, standard deviation per token

# Log-probabilities are taken a few rows at a time: on CPU, so that making the inputs does not raise the
# process's high-water mark of memory; on CUDA, so that float32 logits of 256k ids fit beside everything else.
REFERENCE_LOGITS_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}


@dataclass(frozen=True)
class Inputs:
    """What a loss is given."""

    hidden: Tensor  # (B, T, H), leaf that requires a gradient
    weight: Tensor  # (V, H), leaf that requires a gradient
    ids: Tensor  # (B, T) int64
    mask: Tensor  # (B, T) bool, True at the tokens that count
    advantages: Tensor  # (B,) float32
    current_logps: Tensor  # (B, T) float32, from float32 logits of the same rounded hidden and weight
    old_logps: Tensor  # (B, T) float32
    ref_logps: Tensor  # (B, T) float32


def make_inputs(case: Case, device: str) -> Inputs:
    generator = torch.Generator(device).manual_seed(SEED)
    dtype = getattr(torch, case.dtype)
    rows, vocab, hidden_size = case.rows, case.vocab, case.hidden_size

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    weight = torch.empty(vocab, hidden_size, dtype=dtype, device=device)
    weight.normal_(std=hidden_size**-0.5, generator=generator)
    ids = torch.randint(vocab, (rows,), generator=generator, device=device)
    hidden = torch.empty(rows, hidden_size, dtype=dtype, device=device).normal_(generator=generator)
    # A row of the weight has norm 1, so that a peak of `a` adds `a` to the target's logit: from a token the policy
    # did not expect (0) to one it is sure of (twice the log of the number of its rivals).
    peak = uniform(rows, 1) * 2 * math.log(vocab)

    step = max(1, REFERENCE_LOGITS_BYTES[device] // (4 * vocab))
    weight_float32 = weight.float()
    transform = logit_transform(case)
    parts = []
    for start in range(0, rows, step):
        span = slice(start, start + step)
        hidden[span] = (hidden[span].float() + peak[span] * weight_float32[ids[span]]).to(dtype)
        logps, _ = reference_logprobs(hidden[span].float(), weight_float32, ids[span], transform=transform)
        parts.append(logps)
    del weight_float32
    shape = (case.batch, case.tokens)
    current = torch.cat(parts).view(shape)
    lengths = torch.tensor(case.lengths, device=device)
    return Inputs(
        hidden=hidden.view(*shape, hidden_size).requires_grad_(),
        weight=weight.requires_grad_(),
        ids=ids.view(shape),
        mask=torch.arange(case.tokens, device=device) < lengths[:, None],
        advantages=normal(case.batch),
        current_logps=current,
        old_logps=current + DRIFT_NATS * normal(*shape),
        ref_logps=current + DRIFT_NATS * normal(*shape),
    )


def logit_transform(case: Case) -> LogitTransform:
    return LogitTransform(softcap=case.softcap)
