"""Terms added to the policy term: distance from the reference policy, and entropy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from liger_rl.losses.batch import MAX_LOG_RATIO, AlignedBatch
from liger_rl.losses.options import Options


def k1(logps: Tensor, ref_per_token_logps: Tensor) -> Tensor:
    """logp - ref, an unbiased estimate of KL(policy || reference). http://joschu.net/blog/kl-approx.html"""
    return logps - ref_per_token_logps


def k2(logps: Tensor, ref_per_token_logps: Tensor) -> Tensor:
    """(logp - ref)^2 / 2, biased; its gradient is the KL's in expectation. http://joschu.net/blog/kl-approx.html"""
    return (logps - ref_per_token_logps).square() / 2


def k3(logps: Tensor, ref_per_token_logps: Tensor) -> Tensor:
    """exp(d) - d - 1, d = min(ref - logp, 40 nats), an unbiased estimate. http://joschu.net/blog/kl-approx.html"""
    difference = (ref_per_token_logps - logps).clamp(max=MAX_LOG_RATIO)
    # exp(d) - d - 1 loses its digits where policy and reference agree.
    return torch.expm1(difference) - difference


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


@dataclass(frozen=True, kw_only=True)
class KLPenalty(Options):
    """+ beta kl(logp, ref). At beta == 0 nothing is computed.

    "k1", "k2" and "k3" estimate the KL from the sampled token. With importance_weighted the estimate is multiplied by
    the objective's un-clamped ratio, with gradient: TRL's `use_bias_correction_kl`, arXiv:2512.02556.
    """

    beta: Annotated[float, "[0, inf)"] = 0.0
    kl_estimator: Annotated[str, tuple(ESTIMATORS)] = "k3"
    importance_weighted: Annotated[bool, bool] = False

    def __call__(self, logps: Tensor, batch: AlignedBatch, ratio: Tensor | None) -> Tensor:
        """The estimate of the KL per token in nats, before the coefficient."""
        assert batch.ref_per_token_logps is not None
        kl = ESTIMATORS[self.kl_estimator](logps, batch.ref_per_token_logps)
        if self.importance_weighted:
            if ratio is None:
                raise ValueError("importance_weighted needs an objective that returns its ratio, got None")
            kl = kl * ratio
        return kl


@dataclass(frozen=True, kw_only=True)
class EntropyBonus(Options):
    """- entropy_coef * mean entropy of the tokens that count, whatever the reduction is; TRL's.

    With a `TopEntropyMask` among the corrections, the mean is over the tokens that it keeps. The mean is over one
    batch: divide the coefficient by the number of micro-batches, as TRL does, and they add up.
    """

    entropy_coef: Annotated[float, "(-inf, inf)"] = 0.0  # 0 computes nothing

    def __call__(self, entropy: Tensor, mask: Tensor, count: Tensor | None = None) -> Tensor:
        """() the term, from entropies in nats and a bool mask, (B, T) or (N,). `count`, (), replaces the mask's sum."""
        count = mask.sum() if count is None else count
        return -self.entropy_coef * torch.where(mask, entropy, 0.0).sum() / count.clamp(min=1)


NO_PENALTY = KLPenalty()
NO_BONUS = EntropyBonus()
