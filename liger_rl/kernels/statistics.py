"""What is known of a token's softmax: while tiles of the vocabulary are folded in, and afterwards."""

import math
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

# What a fold gives on demand besides log-probability and entropy, none of it with a gradient.
EXTRAS = ("log_sum_sq_probs", "mean_logits", "is_top1")


class TokenStatistics(NamedTuple):
    """The softmax of n tokens in one number each, float32."""

    logps: Tensor  # (n,) log-probability of the target
    lse: Tensor  # (n,) log sum_v exp z_v
    entropy: Tensor | None  # (n,) in nats
    log_sum_sq_probs: Tensor | None = None  # (n,) log sum_v p_v^2
    sum_logits: Tensor | None = None  # (n,) sum_v z_v
    is_top1: Tensor | None = None  # (n,) bool: the target is the first of the words with the largest z


class Fold(NamedTuple):
    """Running sums over the vocabulary, float32; kernels update them in place, tile by tile."""

    peak: Tensor  # (n,) max_v z_v so far
    sum_exp: Tensor  # (n,) sum_v exp(z_v - peak)
    target: Tensor  # (n,) z at the target id, once its tile has passed
    moment: Tensor | None  # (n,) sum_v exp(z_v - peak) (z_v - peak), kept for the entropy alone
    sum_sq_exp: Tensor | None  # (n,) sum_v exp(z_v - peak)^2, for log_sum_sq_probs
    sum_logits: Tensor | None  # (n,) sum_v z_v, for mean_logits
    rival: Tensor | None  # (n,) max of z_v over the words before the target, for is_top1

    @classmethod
    def start(cls, n: int, device: torch.device, *, entropy: bool, extras: Collection[str] = ()) -> "Fold":
        def full(value: float) -> Tensor:
            return torch.full((n,), value, dtype=torch.float32, device=device)

        # The lowest finite peak instead of -inf: (peak - new peak) * 0 stays 0 in the moment's update.
        return cls(
            full(torch.finfo(torch.float32).min),
            full(0.0),
            full(0.0),
            full(0.0) if entropy else None,
            full(0.0) if "log_sum_sq_probs" in extras else None,
            full(0.0) if "mean_logits" in extras else None,
            full(-math.inf) if "is_top1" in extras else None,
        )

    def take(self, rows: slice) -> "Fold":
        """Views, so that what a kernel writes to them is written here."""
        return Fold._make(None if values is None else values[rows] for values in self)

    def finish(self) -> TokenStatistics:
        log_sum = self.sum_exp.log()
        # Around the peak, not around lse: where the target is the peak, logp keeps float32's precision near 0
        # rather than near the size of the logits.
        logps = ((self.target - self.peak) - log_sum).clamp_(max=0.0)
        entropy = None if self.moment is None else (log_sum - self.moment / self.sum_exp).clamp_(min=0.0)
        log_sum_sq = None if self.sum_sq_exp is None else (self.sum_sq_exp.log() - 2.0 * log_sum).clamp_(max=0.0)
        # Exact: peak and rival are logits of the same tiles as the target's, and a tie counts for the earlier word.
        is_top1 = None if self.rival is None else (self.target >= self.peak) & (self.target > self.rival)
        return TokenStatistics(logps, self.peak + log_sum, entropy, log_sum_sq, self.sum_logits, is_top1)


class TokenGradients(NamedTuple):
    """What the gradient of a tile of logits needs of each token, float32."""

    lse: Tensor  # (n,)
    grad_logps: Tensor  # (n,) dL/dlogp
    at_target: Tensor  # (n,) dL/dlogp (1 - p_target)
    entropy: Tensor | None  # (n,) given together with grad_entropy
    grad_entropy: Tensor | None  # (n,) dL/dentropy

    @classmethod
    def of(cls, statistics: TokenStatistics, grad_logps: Tensor, grad_entropy: Tensor | None) -> "TokenGradients":
        # 1 - p from the forward's logp: recomputed from a tile it would carry the rounding of lse, which is as
        # large as 1 - p itself for a token the policy is sure of.
        at_target = -torch.expm1(statistics.logps) * grad_logps
        entropy = statistics.entropy if grad_entropy is not None else None
        return cls(statistics.lse, grad_logps, at_target, entropy, grad_entropy)

    def take(self, rows: Tensor | slice) -> "TokenGradients":
        entropy = None if self.entropy is None else self.entropy[rows]
        grad_entropy = None if self.grad_entropy is None else self.grad_entropy[rows]
        return TokenGradients(self.lse[rows], self.grad_logps[rows], self.at_target[rows], entropy, grad_entropy)
