"""What the results should be: full logits and plain loops, float64. Imports nothing of the package under test."""

import torch
from torch import Tensor


def transformed(
    logits: Tensor, *, temperature: float = 1.0, softcap: float | None = None, scale: float = 1.0
) -> Tensor:
    z = scale * logits
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z / temperature


def logits_logprobs(logits: Tensor, targets: Tensor, **transform) -> tuple[Tensor, Tensor]:
    """-> log-probability of each target and entropy, in the dtype of `logits`; (..., V) and (...)."""
    log_p = transformed(logits, **transform).log_softmax(-1)
    logps = log_p.gather(-1, targets.long()[..., None]).squeeze(-1)
    p = log_p.exp()
    return logps, -torch.where(p > 0, p * log_p, 0.0).sum(-1)


def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **transform):
    """-> (logps, entropy) in float64 from the full logits."""
    return logits_logprobs(linear_logits(hidden, weight, bias, **transform), targets)


def linear_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
) -> Tensor:
    """-> transformed logits (..., V) in float64."""
    logits = hidden.double() @ weight.double().mT
    if bias is not None:
        logits = logits + bias.double()
    return transformed(logits, temperature=temperature, softcap=softcap, scale=scale)


def divergence(log_p: Tensor, log_q: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """Of a student's log-probabilities (..., V) and its teacher's -> (...)."""
    p, q = log_p.exp(), log_q.exp()
    if kind == "forward_kl" or (kind, beta) == ("jsd", 0):
        return (q * (log_q - log_p)).sum(-1)
    if kind == "reverse_kl" or (kind, beta) == ("jsd", 1):
        return (p * (log_p - log_q)).sum(-1)
    log_m = torch.log((1 - beta) * p + beta * q)
    return beta * (q * (log_q - log_m)).sum(-1) + (1 - beta) * (p * (log_p - log_m)).sum(-1)


def logits_extras(z: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-> log sum p^2, mean of the logits, whether the target is the first of the largest; z (..., V) transformed."""
    return (2 * z.log_softmax(-1)).logsumexp(-1), z.mean(-1), z.argmax(-1) == targets


def error_budget(eager: Tensor, truth: Tensor, dtype: torch.dtype) -> float:
    """Twice the error of eager PyTorch, plus one rounding to `dtype` of the largest value."""
    truth = truth.double()
    rounding = torch.finfo(dtype).eps * truth.abs().max().item()
    return 2.0 * (eager.double() - truth).abs().max().item() + rounding


def norm_budget(eager: Tensor, truth: Tensor, dtype: torch.dtype) -> float:
    """`error_budget` in the Frobenius norm, where the largest of a few errors would be a matter of luck."""
    truth = truth.double()
    return 2.0 * (eager.double() - truth).norm().item() + torch.finfo(dtype).eps * truth.norm().item()


def norm_error(found: Tensor, truth: Tensor) -> float:
    return (found.double() - truth.double()).norm().item()


def max_error(found: Tensor, truth: Tensor) -> float:
    return (found.double() - truth.double()).abs().max().item()
