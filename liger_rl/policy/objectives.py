"""Policy objectives: log-probabilities and a batch -> one loss per token, to be minimised.

An objective is any callable `(logps, batch) -> TokenLoss` on the columns of an `AlignedBatch`. It sees clean zeros at
masked tokens, and its values there are dropped. An objective may have these attributes:

    token_local: bool, whether a token's gradient depends on that token alone; for callers who split sequences.
    sequence_local: bool, whether it depends on the token's sequence alone; for callers who split batches. An objective
        with `token_local`, true or not, is a function of its arguments alone, through which all its gradient flows.
    zero_without_advantage: bool, whether loss and gradient of a token are 0 where its advantage is, whatever the
        log-probabilities, and so its clip indicators; such tokens may then not be projected at all. A subclass with a
        formula of its own does not inherit it.
    sequence_zero_without_advantages: bool, whether the same holds of a sequence whose advantages are all 0. What has
        zero_without_advantage has this, too.
    needs_sequences: bool, whether it must know which tokens are of one sequence.
    takes_importance_ratio: bool, whether it uses `batch.importance_ratio` itself, so that the loss must not.
    check(batch): raises ValueError where the batch has something that the objective cannot mean.

Ratios: r_t = exp(logp_t - old_t), at most e^40 (`AlignedBatch.ratio`). All bounds are numbers of a frozen dataclass,
validated when it is made.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from liger_rl.policy.batch import AlignedBatch, bounded_exp
from liger_rl.policy.options import above_zero, at_least_zero, flag, instance_of, number, one_of, share, zero_to_one


class TokenLoss(NamedTuple):
    """What an objective says of each token, shaped like the log-probabilities or broadcastable to them."""

    loss: Tensor
    ratio: Tensor | None = None
    """The probability ratio of the objective's level before its clip, differentiable."""
    clip_low: Tensor | None = None
    """bool: the ratio is under the lower bound, and A < 0."""
    clip_high: Tensor | None = None
    """bool: the ratio is over the upper bound, and A > 0."""
    outside: Tensor | None = None
    """bool: the ratio is outside the bounds, whatever the advantage's sign."""


Objective = Callable[[Tensor, AlignedBatch], TokenLoss]


@dataclass(frozen=True, kw_only=True)
class PPOClip:
    """-min(min(r, delta) A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A). arXiv:1707.06347 eq. 7.

    Attributes:
        epsilon_low, epsilon_high: distance of the bounds from 1, >= 0; an epsilon_low of 1 or more is no lower bound.
            Apart from each other: arXiv:2503.14476.
        delta: upper clamp of the first r, > 0, usually above 1 + epsilon_high: two-sided clipping, arXiv:2505.07291.
        dual_clip: c > 1; where A < 0 the loss is at most -c A. arXiv:1912.09729, verl's `clip_ratio_c`.
        importance_sampling_level: "token", r per token; "sequence", one r per sequence (GSPO); "sequence_token", the
            sequence's value with each token's own gradient (GSPO-token). The ratio of a sequence is exp(mean of
            logp - old), that of GSPO-token this without gradient times exp(logp_t - logp_t without gradient);
            arXiv:2507.18071 eq. 14.
        mean_advantages: use the mean of the advantages over each sequence, as Fast-LLM's GSPO does; the same where
            they are one per sequence.
    """

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    dual_clip: float | None = None
    importance_sampling_level: str = "token"
    mean_advantages: bool = False
    sequence_local: ClassVar[bool] = True
    sequence_zero_without_advantages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least_zero(self, "epsilon_low", "epsilon_high")
        if self.delta is not None:
            above_zero(self, "delta")
        if self.dual_clip is not None and not number("dual_clip", self.dual_clip) > 1:
            raise ValueError(f"dual_clip must be above 1, or None, got {self.dual_clip}")
        one_of("importance_sampling_level", self.importance_sampling_level, ("token", "sequence", "sequence_token"))
        flag("mean_advantages", self.mean_advantages)

    @property
    def token_local(self) -> bool:
        return self.importance_sampling_level == "token"

    @property
    def zero_without_advantage(self) -> bool:
        return self.token_local and not self.mean_advantages

    @property
    def needs_sequences(self) -> bool:
        return not self.token_local or self.mean_advantages

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        ratio = self._ratio(logps, batch)
        low, high = 1 - self.epsilon_low, 1 + self.epsilon_high
        unclipped = ratio if self.delta is None else ratio.clamp(max=self.delta)
        advantages = batch.sequence_mean(batch.advantages) if self.mean_advantages else batch.advantages
        loss = -torch.minimum(unclipped * advantages, ratio.clamp(low, high) * advantages)
        if self.dual_clip is not None:
            loss = torch.where(advantages < 0, torch.minimum(loss, -self.dual_clip * advantages), loss)
        return _clipped(loss, ratio, advantages, low, high)

    def _ratio(self, logps: Tensor, batch: AlignedBatch) -> Tensor:
        if self.importance_sampling_level == "token":
            return batch.ratio(logps)
        of_sequence = logps if self.importance_sampling_level == "sequence" else logps.detach()
        ratio = bounded_exp(batch.sequence_mean(batch.log_ratio(of_sequence)))
        return ratio if of_sequence is logps else ratio * torch.exp(logps - logps.detach())


@dataclass(frozen=True, kw_only=True)
class CISPO:
    """-clip(r, ratio_min, epsilon_high) A logp, the clipped r without gradient. arXiv:2506.13585.

    Attributes:
        epsilon_high: the upper bound of r itself, > 0, not its distance from 1. TRL's default is 0.2, arXiv:2510.13786
            recommends 5.
        ratio_min: the lower bound of r itself, in [0, epsilon_high]; 0 is none, as in TRL. verl's `cispo` has both:
            1 - clip_ratio_low and 1 + clip_ratio_high.
    """

    epsilon_high: float = 0.2
    ratio_min: float = 0.0
    token_local: ClassVar[bool] = True
    zero_without_advantage: ClassVar[bool] = True

    def __post_init__(self) -> None:
        above_zero(self, "epsilon_high")
        at_least_zero(self, "ratio_min")
        if self.ratio_min > self.epsilon_high:
            raise ValueError(f"ratio_min must be at most epsilon_high = {self.epsilon_high}, got {self.ratio_min}")

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        ratio = batch.ratio(logps)
        loss = -ratio.detach().clamp(self.ratio_min, self.epsilon_high) * batch.advantages * logps
        return _clipped(loss, ratio, batch.advantages, self.ratio_min, self.epsilon_high)


@dataclass(frozen=True, kw_only=True)
class SAPO:
    """-sigmoid(t (r - 1)) 4 / t A, t = sapo_temperature_pos where A > 0, else sapo_temperature_neg. arXiv:2511.20347.

    Attributes:
        sapo_temperature_pos, sapo_temperature_neg: steepness of the gate, > 0.
    """

    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    token_local: ClassVar[bool] = True
    zero_without_advantage: ClassVar[bool] = True

    def __post_init__(self) -> None:
        above_zero(self, "sapo_temperature_pos", "sapo_temperature_neg")

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        ratio = batch.ratio(logps)
        steepness = _by_sign(batch.advantages > 0, self.sapo_temperature_pos, self.sapo_temperature_neg, logps)
        return TokenLoss(-torch.sigmoid(steepness * (ratio - 1)) * (4 / steepness) * batch.advantages, ratio)


@dataclass(frozen=True, kw_only=True)
class VESPO:
    """-phi A logp, phi = exp(lambda + k log w - lambda w) without gradient, per sequence.

    log w = clamp(sum_t clamp(logp - old, +-20) + sum_t log importance_ratio, log 1e-8, 20); k and lambda by the sign
    of A, A >= 0 positive. The importance ratio is part of w and multiplies nothing. arXiv:2602.10693, as in TRL's
    `get_gamma_weights`.

    Attributes:
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: shape and rate of the weight, >= 0.
    """

    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    token_local: ClassVar[bool] = False
    sequence_local: ClassVar[bool] = True
    needs_sequences: ClassVar[bool] = True
    takes_importance_ratio: ClassVar[bool] = True
    sequence_zero_without_advantages: ClassVar[bool] = True

    LOWEST: ClassVar[float] = math.log(1e-8)
    HIGHEST: ClassVar[float] = 20.0

    def __post_init__(self) -> None:
        at_least_zero(self, "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")

    def check(self, batch: AlignedBatch) -> None:
        if batch.importance_ratio_per_sequence:
            raise ValueError(
                "importance_ratio must be per token, (B, T), for VESPO, which sums its logarithm over the sequence; "
                "got one per sequence"
            )

    @torch.no_grad()
    def weight(self, logps: Tensor, batch: AlignedBatch) -> Tensor:
        """phi, per sequence and sign of the advantage."""
        log_w = batch.sequence_sum(batch.log_ratio(logps).clamp(-20.0, 20.0))
        if batch.importance_ratio is not None:
            log_correction = batch.importance_ratio.log().clamp(self.LOWEST, self.HIGHEST)
            log_w = log_w + batch.sequence_sum(torch.where(batch.mask, log_correction, 0.0))
        log_w = log_w.clamp(self.LOWEST, self.HIGHEST)
        positive = batch.advantages >= 0
        k = _by_sign(positive, self.vespo_k_pos, self.vespo_k_neg, logps)
        rate = _by_sign(positive, self.vespo_lambda_pos, self.vespo_lambda_neg, logps).clamp(min=1e-4)
        return (rate + k * log_w - rate * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        return TokenLoss(-self.weight(logps, batch) * batch.advantages * logps, batch.ratio(logps))


@dataclass(frozen=True, kw_only=True)
class GMPO:
    """-exp(mean over the sequence of clipped log r) A: the geometric mean of clipped ratios. arXiv:2507.20673.

    A is the sequence's mean advantage.

    Each log r is clipped at -epsilon_low where A < 0 and at epsilon_high where A > 0, in log space.

    Attributes:
        epsilon_low, epsilon_high: bounds of log r, >= 0.
        mean_importance_ratio: an importance ratio multiplies a sequence's loss as its geometric mean over the sequence,
            each at least 1e-10, as in verl's `geo_mean`. False multiplies each token's loss by its own.
    """

    epsilon_low: float = 0.4
    epsilon_high: float = 0.4
    mean_importance_ratio: bool = False
    token_local: ClassVar[bool] = False
    sequence_local: ClassVar[bool] = True
    needs_sequences: ClassVar[bool] = True
    sequence_zero_without_advantages: ClassVar[bool] = True

    LEAST_IMPORTANCE_RATIO: ClassVar[float] = 1e-10

    def __post_init__(self) -> None:
        at_least_zero(self, "epsilon_low", "epsilon_high")
        flag("mean_importance_ratio", self.mean_importance_ratio)

    @property
    def takes_importance_ratio(self) -> bool:
        return self.mean_importance_ratio

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        log_ratio, advantages = batch.log_ratio(logps), batch.advantages
        one_sided = torch.where(
            advantages > 0, log_ratio.clamp(max=self.epsilon_high), log_ratio.clamp(min=-self.epsilon_low)
        )
        loss = -bounded_exp(batch.sequence_mean(one_sided)) * batch.sequence_mean(advantages)
        if self.mean_importance_ratio and batch.importance_ratio is not None:
            log_correction = batch.importance_ratio.clamp(min=self.LEAST_IMPORTANCE_RATIO).log()
            loss = loss * bounded_exp(batch.sequence_mean(torch.where(batch.mask, log_correction, 0.0)))
        low, high = math.exp(-self.epsilon_low), math.exp(self.epsilon_high)
        return _clipped(loss, bounded_exp(log_ratio), advantages, low, high)


@dataclass(frozen=True, kw_only=True)
class Reinforce:
    """-A logp. Williams 1992; with group advantages GPG, arXiv:2504.02546."""

    token_local: ClassVar[bool] = True
    zero_without_advantage: ClassVar[bool] = True

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        return TokenLoss(-batch.advantages * logps, batch.ratio(logps))


@dataclass(frozen=True, kw_only=True)
class DPPO:
    """-min(r, ratio_cap) A logp, r without gradient, 0 where the probability has moved too far. arXiv:2602.04879.

    Binary total variation: a token is dropped where p - p_old > divergence_high for A > 0, or < -divergence_low
    otherwise. verl's `dppo_tv`; its gradient is prime-rl's default loss where r is under the cap.

    Attributes:
        divergence_low, divergence_high: bounds of the change of probability, in [0, 1].
        ratio_cap: upper bound of r, > 0.
    """

    divergence_low: float = 0.2
    divergence_high: float = 0.2
    ratio_cap: float = 20.0
    token_local: ClassVar[bool] = True
    zero_without_advantage: ClassVar[bool] = True

    def __post_init__(self) -> None:
        zero_to_one(self, "divergence_low", "divergence_high")
        above_zero(self, "ratio_cap")

    def moved_too_far(self, logps: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities without gradient -> bool, whether the probability moved too far down, and up."""
        change = logps.exp() - old.exp()
        return change < -self.divergence_low, change > self.divergence_high

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        ratio, advantages = batch.ratio(logps), batch.advantages
        detached = logps.detach()
        too_low, too_high = self.moved_too_far(detached, detached - batch.log_ratio(detached))
        dropped = torch.where(advantages > 0, too_high, too_low)
        loss = torch.where(dropped, 0.0, -ratio.detach().clamp(max=self.ratio_cap) * advantages * logps)
        return TokenLoss(loss, ratio, too_low & (advantages < 0), too_high & (advantages > 0), too_low | too_high)


@dataclass(frozen=True, kw_only=True)
class DPPOKL(DPPO):
    """As `DPPO`, by the binary Kullback-Leibler divergence; verl's `dppo_kl`. arXiv:2602.04879.

    A token is dropped where D = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)) is above divergence_high
    and p > p_old for A > 0, or above divergence_low and p < p_old otherwise. As in verl, 1e-8 is added to 1 - p_old
    and to 1 - p.

    Attributes:
        divergence_low, divergence_high: bounds of D in nats, >= 0.
        ratio_cap: as in `DPPO`.
    """

    LEAST_PROBABILITY: ClassVar[float] = 1e-8

    def __post_init__(self) -> None:
        at_least_zero(self, "divergence_low", "divergence_high")
        above_zero(self, "ratio_cap")

    def moved_too_far(self, logps: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        # expm1 keeps the digits of 1 - p that a p near 1 loses.
        rest, old_rest = (-torch.expm1(x.clamp(max=0.0)) for x in (logps, old))
        shares = (old_rest + self.LEAST_PROBABILITY) / (rest + self.LEAST_PROBABILITY)
        divergence = old.exp() * (old - logps) + old_rest * shares.log()
        down, up = logps < old, logps > old
        return down & (divergence > self.divergence_low), up & (divergence > self.divergence_high)


@dataclass(frozen=True, kw_only=True)
class DRO:
    """-(A logp - dro_beta / 2 (logp - old)^2): direct reward optimisation, arXiv:2405.19107, as verl's `dro`.

    A is the caller's; the paper's is the reward minus a learned value.

    Attributes:
        dro_beta: strength of the penalty for leaving the old policy, > 0; there is no default.
    """

    dro_beta: float
    token_local: ClassVar[bool] = True

    def __post_init__(self) -> None:
        above_zero(self, "dro_beta")

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        penalty = self.dro_beta / 2 * batch.log_ratio(logps).square()
        return TokenLoss(penalty - batch.advantages * logps, batch.ratio(logps))


@dataclass(frozen=True, kw_only=True)
class ClipCov:
    """PPO-clip with the gradient of a few tokens of high covariance cut. arXiv:2505.22617, verl's `clip_cov`.

    A token may be cut if its covariance (A - mean A)(logp - mean logp) lies between the bounds, unless PPO clips it. Of
    these, max(1, floor(clip_cov_ratio * tokens)) random ones have loss 0.

    Attributes:
        epsilon_low, epsilon_high: as in `PPOClip`.
        clip_cov_ratio: share of the tokens to cut, in (0, 1].
        clip_cov_lb, clip_cov_ub: bounds of the covariance, clip_cov_lb < clip_cov_ub.
        generator: of the random choice, on the log-probabilities' device; None is torch's own.
    """

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    clip_cov_ratio: float = 0.0002
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    generator: torch.Generator | None = None
    token_local: ClassVar[bool] = False

    def __post_init__(self) -> None:
        at_least_zero(self, "epsilon_low", "epsilon_high")
        share(self, "clip_cov_ratio")
        low, high = (number(name, getattr(self, name)) for name in ("clip_cov_lb", "clip_cov_ub"))
        if math.isnan(high):
            raise ValueError(f"clip_cov_ub must not be NaN, got {high}")
        if not low < high:
            raise ValueError(f"clip_cov_lb must be under clip_cov_ub = {self.clip_cov_ub}, got {self.clip_cov_lb}")
        if self.generator is not None:
            instance_of("generator", self.generator, torch.Generator)

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        plain = PPOClip(epsilon_low=self.epsilon_low, epsilon_high=self.epsilon_high)(logps, batch)
        assert plain.clip_low is not None
        assert plain.clip_high is not None
        covariance = _covariance(logps, batch)
        eligible = (covariance > self.clip_cov_lb) & (covariance < self.clip_cov_ub) & batch.mask
        eligible = eligible & ~(plain.clip_low | plain.clip_high)
        lottery = torch.rand(logps.shape, generator=self.generator, device=logps.device, dtype=torch.float32)
        cut = eligible & (_rank(torch.where(eligible, lottery, 2.0)) < _share_of_tokens(self.clip_cov_ratio, batch))
        _, *rest = plain  # not by _replace, which torch.compile of 2.8 does not trace
        return TokenLoss(torch.where(cut, 0.0, plain.loss), *rest)


@dataclass(frozen=True, kw_only=True)
class KLCov:
    """-r A, plus ppo_kl_coef |logp - old| on the tokens of highest covariance. arXiv:2505.22617, verl's `kl_cov`.

    Attributes:
        kl_cov_ratio: share of the tokens that are held back, in (0, 1]; at least one token is.
        ppo_kl_coef: how strongly, >= 0.
    """

    kl_cov_ratio: float = 0.0002
    ppo_kl_coef: float = 1.0
    token_local: ClassVar[bool] = False

    def __post_init__(self) -> None:
        share(self, "kl_cov_ratio")
        at_least_zero(self, "ppo_kl_coef")

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        ratio = batch.ratio(logps)
        covariance = torch.where(batch.mask, _covariance(logps, batch), -math.inf)
        held = (_rank(-covariance) < _share_of_tokens(self.kl_cov_ratio, batch)) & batch.mask
        penalty = torch.where(held, self.ppo_kl_coef * batch.log_ratio(logps).abs(), 0.0)
        return TokenLoss(-ratio * batch.advantages + penalty, ratio)


def _by_sign(positive: Tensor, if_positive: float, otherwise: float, like: Tensor) -> Tensor:
    """In the dtype of `like`: two numbers in `where` would be float32 always."""
    return torch.where(positive, like.new_full((), if_positive), like.new_full((), otherwise))


def _clipped(loss: Tensor, ratio: Tensor, advantages: Tensor, low: float, high: float) -> TokenLoss:
    under, over = ratio < low, ratio > high
    return TokenLoss(loss, ratio, under & (advantages < 0), over & (advantages > 0), under | over)


@torch.no_grad()
def _covariance(logps: Tensor, batch: AlignedBatch) -> Tensor:
    """(A - mean A)(logp - mean logp), the means over the batch's tokens."""
    count = batch.mask.sum().clamp(min=1)
    return (batch.advantages - batch.advantages.sum() / count) * (logps - logps.sum() / count)


def _rank(keys: Tensor) -> Tensor:
    """Place of each element in ascending order, ties by position; without a host sync, unlike a choice of indices."""
    return keys.flatten().argsort(stable=True).argsort().view(keys.shape)


def _share_of_tokens(share: float, batch: AlignedBatch) -> Tensor:
    # In the dtype that losses have: an int64 tensor times a number would be of torch's default dtype.
    return (batch.mask.sum().to(batch.advantages.dtype) * share).floor().clamp(min=1)
