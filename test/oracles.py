"""What the results should be: full logits and plain formulas, float64; gradients are autograd's.

Imports nothing of the package under test. Of policy losses: fuzz/oracle.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def transformed(
    logits: Tensor, *, temperature: float = 1.0, softcap: float | None = None, scale: float = 1.0
) -> Tensor:
    z = scale * logits
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z / temperature


class Values(NamedTuple):
    """Of each token, (...); log-probabilities of several targets (..., K)."""

    logps: Tensor
    entropy: Tensor
    lse: Tensor
    log_sum_sq_probs: Tensor
    mean_logits: Tensor
    is_top1: Tensor  # whether the target is the first of the largest


def values(z: Tensor, targets: Tensor) -> Values:
    """Of transformed logits (..., V), -inf where an id is banned, and ids (...) or (..., K); in the dtype of `z`."""
    log_p, ids = z.log_softmax(-1), targets.long() if targets.dim() == z.dim() else targets.long()[..., None]
    known = log_p.masked_fill(z == -torch.inf, 0.0)
    return Values(
        log_p.gather(-1, ids).view(targets.shape), -(log_p.exp() * known).sum(-1), z.logsumexp(-1),
        (2 * log_p).logsumexp(-1), z.mean(-1), (z.argmax(-1, keepdim=True) == ids).view(targets.shape),
    )  # fmt: skip


def logits_logprobs(logits: Tensor, targets: Tensor, **transform) -> tuple[Tensor, Tensor]:
    """-> log-probability of each target and entropy, in the dtype of `logits`; (..., V) and (...)."""
    return values(transformed(logits, **transform), targets)[:2]


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


def list_divergence(p: Tensor, q: Tensor, listed: Tensor, kind: str, beta: float, tail: str) -> Tensor:
    """Of probabilities (..., K) of listed ids, a student's and its teacher's -> (...); lists are not empty."""
    p, q = torch.where(listed, p, 0.0), torch.where(listed, q, 0.0)
    if tail == "bucket":
        p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
    elif tail == "renormalized":
        p, q = (x / x.sum(-1, keepdim=True) for x in (p, q))

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (torch.where(a > 0, a, 1.0) / torch.where(a > 0, b, 1.0)).log()).sum(-1)

    if kind == "jsd" and 0 < beta < 1:
        m = (1 - beta) * p + beta * q
        return beta * kl(q, m) + (1 - beta) * kl(p, m)
    return kl(q, p) if kind == "forward_kl" or (kind, beta) == ("jsd", 0) else kl(p, q)


# --- losses of preferences and of given tokens; those of policies are in fuzz/oracle.py -----------------------------


def dpo(margins: Tensor, beta: float) -> Tensor:
    """Of the margins of chosen sequences and then of the rejected ones, (2 P,) -> ()."""
    chosen, rejected = margins.chunk(2)
    return -logsigmoid(beta * (chosen - rejected)).mean()


def kto(margins: Tensor, desirable: Tensor, beta: float, kl: float, undesirable_weight: float = 1.0) -> Tensor:
    """Of margins (S,) and which sequences are desirable -> ()."""
    sign, weight = torch.where(desirable, 1.0, -1.0), torch.where(desirable, 1.0, undesirable_weight)
    return (weight * torch.sigmoid(-sign * beta * (margins - kl))).mean()


def cross_entropy(logits: Tensor, targets: Tensor, z_loss: float = 0.0, **options) -> Tensor:
    """Of logits (B, T, V) -> (B, T)."""
    losses = torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none", **options)
    return losses + z_loss * logits.logsumexp(-1).square()


def eaft(logits: Tensor, targets: Tensor, alpha: float = 1.0, divisor: float = 3.0) -> Tensor:
    """Cross entropy times a power of the entropy, which has no gradient."""
    return (values(logits.detach(), targets).entropy / divisor) ** alpha * cross_entropy(logits, targets)


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


def relative_error(found: Tensor, truth: Tensor) -> float:
    """In the Frobenius norm."""
    return norm_error(found, truth) / max(truth.double().norm().item(), 1e-30)


def whole(tensors: dict[str, Tensor]) -> Tensor:
    """The numbers of all of them, (n,), in the order of their names."""
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def max_error(found: Tensor, truth: Tensor) -> float:
    return (found.double() - truth.double()).abs().max().item()
