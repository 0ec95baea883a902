"""Terms added to the policy term: distance from the reference policy, and entropy."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_rl.policy.batch import MAX_LOG_RATIO, AlignedBatch, PolicyBatch
from liger_rl.policy.options import at_least_zero, flag, number, one_of


def k1(logps: Tensor, ref_per_token_logps: Tensor) -> Tensor:
    """logp - ref, unbiased and of either sign. http://joschu.net/blog/kl-approx.html"""
    return logps - ref_per_token_logps


def k2(logps: Tensor, ref_per_token_logps: Tensor) -> Tensor:
    """(logp - ref)^2 / 2 >= 0, biased, with the KL's own gradient in expectation. http://joschu.net/blog/kl-approx.html"""
    return (logps - ref_per_token_logps).square() / 2


def k3(logps: Tensor, ref_per_token_logps: Tensor) -> Tensor:
    """exp(ref - logp) - (ref - logp) - 1 >= 0, an unbiased estimate of KL(policy || reference) per sampled token.

    ref - logp counts as at most 40 nats, where exp is 2e17; beyond it the gradient is 0.
    http://joschu.net/blog/kl-approx.html
    """
    difference = (ref_per_token_logps - logps).clamp(max=MAX_LOG_RATIO)
    # expm1(d) - d keeps the digits that exp(d) - d - 1 loses where policy and reference agree.
    return torch.expm1(difference) - difference


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
EXACT = "exact"


@dataclass(frozen=True, kw_only=True)
class KLPenalty:
    """+ beta kl(logp, ref). At beta == 0 nothing is computed.

    Attributes:
        beta: coefficient, >= 0.
        kl_estimator: "k1", "k2" or "k3", of the sampled token; or "exact", KL(policy || reference) of the two whole
            distributions at each sampled prefix, which is what they estimate: the Rao-Blackwellised term of
            arXiv:2504.10637. `FusedLinearGRPOLoss` makes it from a `ReferenceHead`, and `ppo_loss_fn` is given it. Its
            gradient is that of the distribution at each prefix. That the policy also chooses the prefixes is not
            differentiated, as with the others.
        importance_weighted: multiply the estimate by the objective's un-clamped ratio, through which gradient flows:
            TRL's `use_bias_correction_kl`, DeepSeek-V3.2, arXiv:2512.02556. Not with "exact", which does not depend on
            the sampled token that a ratio is of.
    """

    beta: float = 0.0
    kl_estimator: str = "k3"
    importance_weighted: bool = False

    def __post_init__(self) -> None:
        at_least_zero(self, "beta")
        one_of("kl_estimator", self.kl_estimator, (*ESTIMATORS, EXACT))
        flag("importance_weighted", self.importance_weighted)
        if self.importance_weighted and self.kl_estimator == EXACT:
            raise ValueError(
                'importance_weighted must be False with kl_estimator="exact": a ratio corrects for which token was '
                "sampled, and the exact KL does not depend on it"
            )

    @property
    def exact(self) -> bool:
        """Whether the KL itself has to be given."""
        return self.beta != 0.0 and self.kl_estimator == EXACT

    def check(self, batch: PolicyBatch) -> None:
        """Raises ValueError where the penalty is asked for and the batch has no reference."""
        if self.beta != 0.0 and not self.exact and batch.ref_per_token_logps is None:
            raise ValueError(f"ref_per_token_logps must be given for a KL penalty with beta = {self.beta}, got None")

    def __call__(self, logps: Tensor, batch: AlignedBatch, ratio: Tensor | None) -> Tensor | None:
        """-> estimate of the KL per token in nats, before the coefficient, or None at beta == 0."""
        if self.beta == 0.0 or batch.ref_per_token_logps is None:
            return None
        kl = ESTIMATORS[self.kl_estimator](logps, batch.ref_per_token_logps)
        if self.importance_weighted:
            if ratio is None:
                raise ValueError("importance_weighted needs an objective that returns its ratio, got None")
            kl = kl * ratio
        return kl


@dataclass(frozen=True, kw_only=True)
class EntropyBonus:
    """- entropy_coef * mean entropy of the tokens that count, as TRL has it: independent of the reduction.

    With a `TopEntropyMask` among the corrections, the mean is over the tokens it keeps. It is a mean over the batch it
    is given: divide the coefficient by the number of micro-batches to have them add up, as TRL does.

    Attributes:
        entropy_coef: coefficient; 0 computes nothing.
    """

    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(number("entropy_coef", self.entropy_coef)):
            raise ValueError(f"entropy_coef must be finite, got {self.entropy_coef}")

    def __call__(self, entropy: Tensor, kept: Tensor, count: Tensor | None = None) -> Tensor:
        """Entropies in nats and the bool mask of tokens they count at, (B, T) or (N,) -> the term, ().

        `count`, () of tokens, is what the mean divides by where these are not all; None counts them.
        """
        count = kept.sum() if count is None else count
        return -self.entropy_coef * torch.where(kept, entropy, 0.0).sum() / count.clamp(min=1)
