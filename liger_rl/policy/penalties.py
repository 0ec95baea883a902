"""Penalties added to the policy term."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_rl.policy.batch import AlignedBatch, PolicyBatch


def k3(logps: Tensor, ref_per_token_logps: Tensor) -> Tensor:
    """exp(ref - logp) - (ref - logp) - 1 >= 0, an unbiased estimate of KL(policy || reference) per sampled token.

    http://joschu.net/blog/kl-approx.html
    """
    difference = ref_per_token_logps - logps
    # expm1(d) - d keeps the digits that exp(d) - d - 1 loses where policy and reference agree.
    return torch.expm1(difference) - difference


@dataclass(frozen=True, kw_only=True)
class KLPenalty:
    """+ beta k3(logp, ref). At beta == 0 nothing is computed.

    Attributes:
        beta: coefficient, >= 0.
    """

    beta: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.beta) and self.beta >= 0):
            raise ValueError(f"beta must be at least 0 and finite, got {self.beta}")

    def check(self, batch: PolicyBatch) -> None:
        """Raises ValueError where the penalty is asked for and the batch has no reference."""
        if self.beta != 0.0 and batch.ref_per_token_logps is None:
            raise ValueError(f"ref_per_token_logps must be given for a KL penalty with beta = {self.beta}, got None")

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> Tensor | None:
        """-> KL per token in nats, before the coefficient, or None at beta == 0."""
        if self.beta == 0.0 or batch.ref_per_token_logps is None:
            return None
        return k3(logps, batch.ref_per_token_logps)
