"""Policy objectives: log-probabilities and a batch -> one loss per token, to be minimised.

An objective is any callable `(logps, batch) -> TokenLoss` on the aligned columns of a `AlignedBatch`. It sees clean
zeros at masked tokens, and its values there are dropped.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.policy.batch import AlignedBatch
from liger_rl.policy.sequences import sequence_mean


class TokenLoss(NamedTuple):
    """What an objective says of each token, shaped like the log-probabilities or broadcastable to them."""

    loss: Tensor
    clip_low: Tensor | None = None
    """bool: the ratio is under the lower bound and the gradient is cut for it."""
    clip_high: Tensor | None = None
    """bool: the ratio is over the upper bound and the gradient is cut for it."""


Objective = Callable[[Tensor, AlignedBatch], TokenLoss]


def token_ratio(logps: Tensor, batch: AlignedBatch) -> Tensor:
    """r_t = exp(logp_t - old_t), (B, T) or (N,)."""
    return torch.exp(batch.log_ratio(logps))


def sequence_ratio(logps: Tensor, batch: AlignedBatch) -> Tensor:
    """R = exp(mean over the sequence of logp - old), (B, 1), through which gradient flows. arXiv:2507.18071 eq. 7."""
    return torch.exp(sequence_mean(batch.log_ratio(logps), batch))


RATIOS: dict[str, Callable[[Tensor, AlignedBatch], Tensor]] = {"token": token_ratio, "sequence": sequence_ratio}


@dataclass(frozen=True, kw_only=True)
class PPOClip:
    """-min(min(r, delta) A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A). arXiv:1707.06347 eq. 7.

    Attributes:
        epsilon_low, epsilon_high: distance of the bounds from 1, >= 0. Apart from each other: arXiv:2503.14476 eq. 10.
        delta: upper clamp of the first r, > 0, usually above 1 + epsilon_high: two-sided clipping, arXiv:2505.07291.
        importance_sampling_level: "token", r per token, or "sequence", one r per sequence (GSPO).
    """

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    importance_sampling_level: str = "token"

    def __post_init__(self) -> None:
        for name in ("epsilon_low", "epsilon_high"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")
        if self.delta is not None and not self.delta > 0:
            raise ValueError(f"delta must be above 0, or None, got {self.delta}")
        if self.importance_sampling_level not in RATIOS:
            raise ValueError(
                f"importance_sampling_level must be one of {sorted(RATIOS)}, got {self.importance_sampling_level!r}"
            )

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        ratio = RATIOS[self.importance_sampling_level](logps, batch)
        low, high = 1 - self.epsilon_low, 1 + self.epsilon_high
        unclipped = ratio if self.delta is None else ratio.clamp(max=self.delta)
        advantages = batch.advantages
        loss = -torch.minimum(unclipped * advantages, ratio.clamp(low, high) * advantages)
        return TokenLoss(loss, (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0))
