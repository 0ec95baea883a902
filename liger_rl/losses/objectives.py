"""Policy objectives: log-probabilities and a batch -> one loss per token, to be minimised.

An objective is a callable `(logps, batch) -> TokenLoss` on an `AlignedBatch`. Masked tokens are 0 in every column, and
their losses are dropped. `batch.ratio(logps)` is r_t = exp(logp_t - old_t), at most e^40. `ObjectiveFacts` is what an
objective may say of itself.
"""

import math
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from liger_rl.losses.batch import AlignedBatch, bounded_exp
from liger_rl.losses.levels import POLICY_METRICS, MetricsLevel
from liger_rl.losses.options import Options


class TokenLoss(NamedTuple):
    """An objective's result. The loss has the shape of the log-probabilities, the other tensors broadcast to it."""

    loss: Tensor
    ratio: Tensor | None = None  # differentiable probability ratio before its clip, per token or per sequence
    clip_low: Tensor | None = None  # bool: the ratio is under the lower bound, and A < 0
    clip_high: Tensor | None = None  # bool: the ratio is over the upper bound, and A > 0
    outside: Tensor | None = None  # bool: the ratio is outside the bounds, whatever the advantage's sign
    metrics: Callable[[Any], dict[str, Any]] | None = None  # level -> `Metric` by name, in place of `policy_metrics`
    has_importance_ratio: bool = False  # the loss has the batch's importance ratio as a factor already
    nll_coef: float = 0.0  # factor of the mean of -logp over `AlignedBatch.nll_tokens`, which is added to the loss


Objective = Callable[[Tensor, AlignedBatch], TokenLoss]
Scope = Literal["token", "sequence", "batch"]
RATIO_LEVELS = ("token", "sequence", "sequence_token")


class ObjectiveFacts(Protocol):
    """What an objective may say of itself. Each of the four may be missing; `PolicyTerms` reads them."""

    scope: Scope
    """What the gradient of a token depends on: the token, its sequence or, if this is missing, the batch. `loss_steps`
    splits a batch into micro-batches if it is not the batch."""
    zero_without_advantage: bool
    """A token (a sequence, if that is the scope) whose advantages are 0 has a loss, gradient and clip indicators of 0,
    whatever its log-probabilities. `FusedLinearGRPOLoss` does not project such tokens, `loss_steps` does not run such
    sequences. A subclass with another formula does not inherit this; missing is False."""

    def reads(self, level: MetricsLevel) -> Set[str]:
        """Names of fields of `AlignedBatch` that the loss and its metrics of this level read.

        Those that the head makes are not computed without it. "segments" asks for the sequences of packed tokens, and
        log-probabilities of a reference or sampler that nobody reads are a warning. If this is missing, the objective
        may read any column, and no value of the head.
        """

    def check(self, batch: AlignedBatch) -> None:
        """Raises ValueError for a batch that the objective cannot take. It reads no value."""


class PolicyObjective(Options):
    """Base of the policy objectives, whose metrics are `policy_metrics`."""

    scope: ClassVar[Scope] = "batch"  # until a formula says that it depends on less

    def reads(self, level: MetricsLevel) -> Set[str]:
        return POLICY_METRICS[level] | ({"segments"} if self.scope == "sequence" else set())


@dataclass(frozen=True, kw_only=True)
class PPOClip(PolicyObjective):
    """-min(min(r, delta) A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A). arXiv:1707.06347 eq. 7.

    At the level "token" r is per token. At "sequence" it is GSPO's R = exp(mean over the sequence of logp - old). At
    "sequence_token" it is GSPO-token's sg(R) exp(logp - sg(logp)), where sg() has no gradient; eq. 14 of
    arXiv:2507.18071. If A < 0, the loss is at most -dual_clip A.
    """

    epsilon_low: Annotated[float, "[0, inf)"] = 0.2  # distance of the lower bound of r from 1
    epsilon_high: Annotated[float, "[0, inf)"] = 0.2  # of the upper bound; another than epsilon_low: arXiv:2503.14476
    delta: Annotated[float | None, "(0, inf)"] = None  # upper clamp of the first r, arXiv:2505.07291; None is none
    dual_clip: Annotated[float | None, "(1, inf]"] = None  # arXiv:1912.09729, verl's `clip_ratio_c`
    importance_sampling_level: Annotated[str, RATIO_LEVELS] = "token"
    mean_advantages: Annotated[bool, bool] = False  # replace A by its mean over the sequence, as Fast-LLM's GSPO does
    zero_without_advantage: ClassVar[bool] = True

    @property
    def scope(self) -> Scope:  # type: ignore[override]
        return "token" if self.importance_sampling_level == "token" and not self.mean_advantages else "sequence"

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        ratio = batch.ratio(logps) if self.importance_sampling_level == "token" else self._sequence_ratio(logps, batch)
        low, high = 1 - self.epsilon_low, 1 + self.epsilon_high
        advantages = batch.sequence_mean(batch.advantages) if self.mean_advantages else batch.advantages
        under, over = ratio < low, ratio > high
        clip_low, clip_high = under & (advantages < 0), over & (advantages > 0)
        # The clipped product is the smaller one exactly where an indicator is true.
        smaller = ratio.masked_fill(clip_low, low).masked_fill(clip_high, high)
        if self.delta is not None:
            cap = torch.full_like(smaller, self.delta).masked_fill(advantages < 0, max(self.delta, high))
            # At the cap, as at the bounds, the gradient passes. A clamp's is 0 there since PyTorch 2.14.
            smaller = torch.where(smaller > cap, cap, smaller)
        loss = smaller * -advantages
        if self.dual_clip is not None:
            loss = torch.where(advantages < 0, torch.minimum(loss, -self.dual_clip * advantages), loss)
        loss = loss if loss.shape == logps.shape else loss.expand_as(logps)
        return TokenLoss(loss, ratio, clip_low, clip_high, under | over)

    def _sequence_ratio(self, logps: Tensor, batch: AlignedBatch) -> Tensor:
        if self.importance_sampling_level == "sequence":
            return bounded_exp(batch.sequence_mean(batch.log_ratio(logps)))
        detached = logps.detach()
        return bounded_exp(batch.sequence_mean(batch.log_ratio(detached))) * torch.exp(logps - detached)


@dataclass(frozen=True, kw_only=True)
class CISPO(PolicyObjective):
    """-clip(r, ratio_min, epsilon_high) A logp, the clipped r without gradient. arXiv:2506.13585.

    The options are the bounds of r themselves, not distances from 1. verl's are 1 - clip_ratio_low and
    1 + clip_ratio_high.
    """

    epsilon_high: Annotated[float, "(0, inf)"] = 0.2  # TRL's default; arXiv:2510.13786 recommends 5
    ratio_min: Annotated[float, "[0, inf)"] = 0.0  # at most epsilon_high
    scope: ClassVar[Scope] = "token"
    zero_without_advantage: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio_min > self.epsilon_high:
            raise ValueError(f"ratio_min must be at most epsilon_high = {self.epsilon_high}, got {self.ratio_min}")

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        ratio, low, high = batch.ratio(logps), self.ratio_min, self.epsilon_high
        loss = -ratio.detach().clamp(low, high) * batch.advantages * logps
        return _add_indicators(loss, ratio, batch.advantages, ratio < low, ratio > high)


@dataclass(frozen=True, kw_only=True)
class SAPO(PolicyObjective):
    """-sigmoid(t (r - 1)) 4 / t A. arXiv:2511.20347."""

    sapo_temperature_pos: Annotated[float, "(0, inf)"] = 1.0  # t, the steepness of the gate, for A > 0
    sapo_temperature_neg: Annotated[float, "(0, inf)"] = 1.05  # t for A <= 0
    scope: ClassVar[Scope] = "token"
    zero_without_advantage: ClassVar[bool] = True

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        ratio = batch.ratio(logps)
        steepness = _select_by_sign(batch.advantages > 0, self.sapo_temperature_pos, self.sapo_temperature_neg, logps)
        return TokenLoss(-torch.sigmoid(steepness * (ratio - 1)) * (4 / steepness) * batch.advantages, ratio)


@dataclass(frozen=True, kw_only=True)
class VESPO(PolicyObjective):
    """-phi A logp, phi = exp(lambda + k log w - lambda w) without gradient, per sequence.

    log w = clamp(sum_t clamp(logp - old, +-20) + sum_t log importance_ratio, log 1e-8, 20). The importance ratio is a
    part of w and multiplies nothing else. arXiv:2602.10693, as in TRL's `get_gamma_weights`.
    """

    vespo_k_pos: Annotated[float, "[0, inf)"] = 2.0  # k for A >= 0
    vespo_lambda_pos: Annotated[float, "[0, inf)"] = 3.0  # lambda for A >= 0
    vespo_k_neg: Annotated[float, "[0, inf)"] = 3.0  # k for A < 0
    vespo_lambda_neg: Annotated[float, "[0, inf)"] = 2.0  # lambda for A < 0
    scope: ClassVar[Scope] = "sequence"
    zero_without_advantage: ClassVar[bool] = True

    LOWEST: ClassVar[float] = math.log(1e-8)
    HIGHEST: ClassVar[float] = 20.0

    def check(self, batch: AlignedBatch) -> None:
        if batch.importance_ratio_per_sequence:
            raise ValueError(
                "importance_ratio must be per token, (B, T), for VESPO, which sums its logarithm over the sequence; "
                "got one per sequence"
            )

    @torch.no_grad()
    def weight(self, logps: Tensor, batch: AlignedBatch) -> Tensor:
        """phi of each token: one per sequence and sign of the advantage."""
        log_w = batch.sequence_sum(batch.log_ratio(logps).clamp(-20.0, 20.0))
        if batch.importance_ratio is not None:
            log_correction = batch.importance_ratio.log().clamp(self.LOWEST, self.HIGHEST)
            log_w = log_w + batch.sequence_sum(torch.where(batch.mask, log_correction, 0.0))
        log_w = log_w.clamp(self.LOWEST, self.HIGHEST)
        positive = batch.advantages >= 0
        k = _select_by_sign(positive, self.vespo_k_pos, self.vespo_k_neg, logps)
        rate = _select_by_sign(positive, self.vespo_lambda_pos, self.vespo_lambda_neg, logps).clamp(min=1e-4)
        return (rate + k * log_w - rate * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        loss = -self.weight(logps, batch) * batch.advantages * logps
        return TokenLoss(loss, batch.ratio(logps), has_importance_ratio=True)


@dataclass(frozen=True, kw_only=True)
class GMPO(PolicyObjective):
    """-exp(mean over the sequence of c_t) mean(A), the geometric mean of clipped ratios. arXiv:2507.20673.

    c_t is min(log r_t, epsilon_high) if A_t > 0, else max(log r_t, -epsilon_low), in nats. With mean_importance_ratio a
    sequence's loss is multiplied by the geometric mean of its importance ratios, each at least 1e-10, as in verl's
    `geo_mean`; without it each token's loss is multiplied by its ratio.
    """

    epsilon_low: Annotated[float, "[0, inf)"] = 0.4
    epsilon_high: Annotated[float, "[0, inf)"] = 0.4
    mean_importance_ratio: Annotated[bool, bool] = False
    scope: ClassVar[Scope] = "sequence"
    zero_without_advantage: ClassVar[bool] = True

    LEAST_IMPORTANCE_RATIO: ClassVar[float] = 1e-10

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        log_ratio, advantages = batch.log_ratio(logps), batch.advantages
        one_sided = torch.where(
            advantages > 0, log_ratio.clamp(max=self.epsilon_high), log_ratio.clamp(min=-self.epsilon_low)
        )
        loss = -bounded_exp(batch.sequence_mean(one_sided)) * batch.sequence_mean(advantages)
        if self.mean_importance_ratio and batch.importance_ratio is not None:
            log_correction = batch.importance_ratio.clamp(min=self.LEAST_IMPORTANCE_RATIO).log()
            loss = loss * bounded_exp(batch.sequence_mean(torch.where(batch.mask, log_correction, 0.0)))
        ratio, low, high = bounded_exp(log_ratio), math.exp(-self.epsilon_low), math.exp(self.epsilon_high)
        result = _add_indicators(loss.expand_as(logps), ratio, advantages, ratio < low, ratio > high)
        return result._replace(has_importance_ratio=self.mean_importance_ratio)


@dataclass(frozen=True, kw_only=True)
class Reinforce(PolicyObjective):
    """-A logp. Williams 1992; with advantages of a group, GPG, arXiv:2504.02546."""

    scope: ClassVar[Scope] = "token"
    zero_without_advantage: ClassVar[bool] = True

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        return TokenLoss(-batch.advantages * logps, batch.ratio(logps))


@dataclass(frozen=True, kw_only=True)
class DPPO(PolicyObjective):
    """-min(r, ratio_cap) A logp, r without gradient; 0 for a token whose probability moved too far. arXiv:2602.04879.

    A > 0 drops tokens with p - p_old > divergence_high. A <= 0 drops tokens with p - p_old < -divergence_low. This is
    binary total variation, verl's `dppo_tv`. Below the cap, the gradient is that of prime-rl's DPPO loss.
    """

    divergence_low: Annotated[float, "[0, 1]"] = 0.2
    divergence_high: Annotated[float, "[0, 1]"] = 0.2
    ratio_cap: Annotated[float, "(0, inf)"] = 20.0
    scope: ClassVar[Scope] = "token"
    zero_without_advantage: ClassVar[bool] = True

    def moved_too_far(self, logps: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        """bool: the probability moved too far down, and too far up. Log-probabilities without gradient."""
        change = logps.exp() - old.exp()
        return change < -self.divergence_low, change > self.divergence_high

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        ratio, advantages = batch.ratio(logps), batch.advantages
        detached = logps.detach()
        too_low, too_high = self.moved_too_far(detached, detached - batch.log_ratio(detached))
        dropped = torch.where(advantages > 0, too_high, too_low)
        loss = torch.where(dropped, 0.0, -ratio.detach().clamp(max=self.ratio_cap) * advantages * logps)
        return _add_indicators(loss, ratio, advantages, too_low, too_high)


@dataclass(frozen=True, kw_only=True)
class DPPOKL(DPPO):
    """`DPPO` by the binary KL divergence D = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)).

    A > 0 drops tokens with p > p_old and D > divergence_high. A <= 0 drops tokens with p < p_old and D >
    divergence_low, in nats. As in verl's `dppo_kl`, 1e-8 is added to 1 - p_old and to 1 - p. arXiv:2602.04879.
    """

    divergence_low: Annotated[float, "[0, inf)"] = 0.2
    divergence_high: Annotated[float, "[0, inf)"] = 0.2
    LEAST_PROBABILITY: ClassVar[float] = 1e-8

    def moved_too_far(self, logps: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        # expm1 keeps the digits of 1 - p that a p near 1 loses.
        complement, old_complement = (-torch.expm1(x.clamp(max=0.0)) for x in (logps, old))
        quotient = (old_complement + self.LEAST_PROBABILITY) / (complement + self.LEAST_PROBABILITY)
        divergence = old.exp() * (old - logps) + old_complement * quotient.log()
        down, up = logps < old, logps > old
        return down & (divergence > self.divergence_low), up & (divergence > self.divergence_high)


class _KeptTokens(PolicyObjective):
    """-r A of the tokens that are kept, 0 for the others, whatever the sign of A."""

    scope: ClassVar[Scope] = "token"
    zero_without_advantage: ClassVar[bool] = True

    def find_outside(self, logps: Tensor, ratio: Tensor, batch: AlignedBatch) -> tuple[Tensor, Tensor]:
        """bool: below and above what is kept. Log-probabilities and ratio without gradient."""
        raise NotImplementedError

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        ratio = batch.ratio(logps)
        below, above = self.find_outside(logps.detach(), ratio.detach(), batch)
        # A fill of the ratio: a dropped token has a gradient of 0 even where its ratio is infinite.
        loss = ratio.masked_fill(below | above, 0.0) * -batch.advantages
        return _add_indicators(loss, ratio, batch.advantages, below, above)


@dataclass(frozen=True, kw_only=True)
class IPO(_KeptTokens):
    """-r A; 0 for a token with |p - p_old| > ipo_threshold. prime-rl's default loss since its 0.10."""

    ipo_threshold: Annotated[float, "[0, 1]"] = 0.3

    def find_outside(self, logps: Tensor, ratio: Tensor, batch: AlignedBatch) -> tuple[Tensor, Tensor]:
        change = logps.exp() - (logps - batch.log_ratio(logps)).exp()
        return change < -self.ipo_threshold, change > self.ipo_threshold


@dataclass(frozen=True, kw_only=True)
class IcePop(_KeptTokens):
    """-r A; 0 for a token with r under ratio_min or over ratio_max. arXiv:2510.18855, prime-rl's `icepop`."""

    ratio_min: Annotated[float, "[0, inf)"] = 0.2  # at most ratio_max
    ratio_max: Annotated[float, "(0, inf)"] = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio_min > self.ratio_max:
            raise ValueError(f"ratio_min must be at most ratio_max = {self.ratio_max}, got {self.ratio_min}")

    def find_outside(self, logps: Tensor, ratio: Tensor, batch: AlignedBatch) -> tuple[Tensor, Tensor]:
        return ratio < self.ratio_min, ratio > self.ratio_max


def _select_by_sign(positive: Tensor, if_positive: float, otherwise: float, like: Tensor) -> Tensor:
    # `where` of two numbers is of torch's default dtype.
    return torch.where(positive, like.new_full((), if_positive), like.new_full((), otherwise))


def _add_indicators(loss: Tensor, ratio: Tensor, advantages: Tensor, under: Tensor, over: Tensor) -> TokenLoss:
    return TokenLoss(loss, ratio, under & (advantages < 0), over & (advantages > 0), under | over)
