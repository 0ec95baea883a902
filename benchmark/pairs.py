"""Two heads and what float64 says of them, for the benchmarks of divergences."""

from typing import NamedTuple

import torch
from torch import Tensor

ENTRIES = 8192  # rows of the weight whose gradient is compared with float64
GOLD_TOKENS = 256  # whose logits are in float64 at a time
AT_ONCE = 1 << 14  # rows of a weight that are converted at a time


class Heads(NamedTuple):
    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    teacher_hidden: Tensor  # (N, H')
    teacher_weight: Tensor  # (V, H')


def log_probs(heads: Heads, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Of some tokens: the student's and the teacher's (n, V)."""
    found = []
    for hidden, weight in (heads[:2], heads[2:]):
        parts = [hidden[rows].double() @ part.double().T for part in weight.split(AT_ONCE)]
        found.append(torch.cat(parts, dim=1).log_softmax(-1))
    return found[0], found[1]


def value_and_slopes(log_p: Tensor, log_q: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """-> the divergence (n,) and its gradient of the student's logits (n, V)."""
    p, q = log_p.exp(), log_q.exp()
    if kind == "forward_kl":
        return (q * (log_q - log_p)).sum(-1), p - q
    if kind == "reverse_kl":
        value = (p * (log_p - log_q)).sum(-1)
        return value, p * (log_p - log_q - value[:, None])
    log_m = ((p + q) / 2).log()
    own = (p * (log_p - log_m)).sum(-1)
    return (own + (q * (log_q - log_m)).sum(-1)) / 2, p * (log_p - log_m - own[:, None]) / 2


def gradients_of(slopes: Tensor, heads: Heads, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the student's logits of some tokens -> of their hidden states, and of the weight's first ENTRIES."""
    hidden, weight = heads[:2]
    grad_hidden = torch.zeros(slopes.shape[0], weight.shape[1], dtype=torch.float64, device=weight.device)
    for slope, part in zip(slopes.split(AT_ONCE, dim=1), weight.split(AT_ONCE), strict=True):
        grad_hidden += slope @ part.double()
    return grad_hidden, slopes[:, :ENTRIES].T @ hidden[rows].double()
