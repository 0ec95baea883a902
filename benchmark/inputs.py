"""Batches that look like RL: sampled tokens with probabilities from 0 to 1, policies that have drifted apart."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmark import oracle
from benchmark.cases import FLAT, TAILED, Case

SEED = 0
# SmolLM2-135M-Instruct (V = 49,152) at temperature 0.6, 1.22 nats in the mean, over 256 tokens of Python sources and of
# the language reference: the mean log-probability at ranks 1, 2, 4 and 8 in each eighth of the tokens, from the surest
# on, and the standard deviation of a token's logits.
CURVES = (
    (-0.005, -7.0, -9.3, -10.9),
    (-0.1, -3.6, -6.0, -7.7),
    (-0.2, -2.6, -4.7, -6.3),
    (-0.3, -2.3, -4.1, -5.8),
    (-0.5, -1.7, -4.0, -5.8),
    (-0.7, -1.4, -3.7, -5.6),
    (-1.0, -1.5, -2.8, -4.6),
    (-1.4, -1.8, -2.5, -3.9),
)
DEVIATION = 5.3
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

    hidden, weight, ids = _synthetic(case, device, generator)
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
    if case.peaks == TAILED:
        return _tailed(case, device, generator)
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


def _tailed(case: Case, device: str, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """As `_synthetic`, from CURVES. Ids are drawn from the softmax of the rounded hidden states and weight.

    A row of the weight has norm 1. Noise of deviation s in a hidden state gives normal logits of this deviation. Eight
    rows of the weight are added to it, so that their logits are those of the curve above the log-sum-exp of all
    others. A softcap changes the curve.
    """
    dtype, rows, width = getattr(torch, case.dtype), case.rows, case.hidden_size
    weight = torch.empty(case.vocab, width, dtype=dtype, device=device)
    weight.normal_(std=width**-0.5, generator=generator)
    curves = torch.tensor(CURVES, device=device)
    curves = curves[torch.randint(len(CURVES), (rows,), generator=generator, device=device)]
    # Between ranks 1, 2, 4 and 8 the log-probability is linear in the logarithm of the rank.
    place = torch.arange(1, 9, device=device).log2()
    lower = place.long().clamp(max=2)
    leaders = torch.lerp(curves[:, lower], curves[:, lower + 1], place - lower)
    leaders -= torch.log1p(-leaders.exp().sum(1, keepdim=True))  # relative to the sum of the other ids
    logits = leaders + math.log(case.vocab) + DEVIATION**2 / 2
    start = torch.randint(case.vocab, (rows, 1), generator=generator, device=device)
    likeliest = (start + torch.arange(8, device=device) * (case.vocab // 8)) % case.vocab
    # The leading rows spread the other logits, too.
    noise = (DEVIATION**2 - logits.square().sum(1, keepdim=True) / width).clamp(min=0.0).sqrt()
    hidden = torch.empty(rows, width, dtype=dtype, device=device).normal_(generator=generator)
    ids = torch.empty(rows, dtype=torch.int64, device=device)
    for span in _spans(case, device):
        leading, spread = weight[likeliest[span]].float(), noise[span] * hidden[span].float()
        others = _reaching(spread, leading, logits[span]) @ weight.float().T
        others = others.scatter_(1, likeliest[span], -math.inf).logsumexp(-1, keepdim=True)
        hidden[span] = _reaching(spread, leading, leaders[span] + others).to(dtype)
        p = (hidden[span].float() @ weight.float().T).softmax(-1)
        ids[span] = torch.multinomial(p, 1, generator=generator).squeeze(1)
    return hidden, weight, ids


def _reaching(hidden: Tensor, rows: Tensor, logits: Tensor) -> Tensor:
    """(n, H) with multiples of `rows` (n, k, H) added, so that their logits are `logits` (n, k)."""
    missing = logits - (rows @ hidden[:, :, None]).squeeze(2)
    return hidden + (torch.linalg.solve(rows @ rows.mT, missing)[:, None, :] @ rows).squeeze(1)


def _peaks(case: Case, device: str, generator: torch.Generator) -> Tensor:
    """(N,) added logit of each target."""
    even = torch.rand(case.rows, generator=generator, device=device)
    if case.peaks == FLAT:
        return torch.zeros_like(even)
    # From a token the policy did not expect to one it is sure of.
    return even * 2 * math.log(case.vocab)


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
