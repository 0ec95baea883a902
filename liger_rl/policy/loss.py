"""The policy loss on per-token log-probabilities: objective, corrections, penalties, reduction."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from liger_rl.policy.batch import AlignedBatch, PolicyBatch, check_dense, check_mask_values
from liger_rl.policy.corrections import Correction, SamplerCorrection
from liger_rl.policy.metrics import LEVELS, Metric, MetricsLevel, policy_metrics
from liger_rl.policy.objectives import Objective, TokenLoss
from liger_rl.policy.options import callable_instance, instance_of, one_of
from liger_rl.policy.penalties import EntropyBonus, KLPenalty
from liger_rl.policy.reductions import Reduction

Locality = Literal["token", "sequence", "batch"]
NO_PENALTY = KLPenalty()
NO_BONUS = EntropyBonus()


class PolicyLoss(NamedTuple):
    """A loss to call backward on, and what to log of it."""

    loss: Tensor
    """() in float32; with reduction=None per token, shaped like the log-probabilities, 0 at masked tokens."""
    metrics: dict[str, Metric]
    """By name, without gradient; see `liger_rl.policy.metrics`."""


@dataclass(frozen=True, kw_only=True)
class PolicyTerms:
    """What a loss is made of, apart from the batch: the arguments of `ppo_loss_fn`, checked; corrections as a tuple."""

    objective: Objective
    reduction: Reduction | None
    kl: KLPenalty = NO_PENALTY
    entropy_bonus: EntropyBonus = NO_BONUS
    sampler_correction: SamplerCorrection | None = None
    corrections: Iterable[Correction] = ()
    metrics: MetricsLevel = "loss"

    def __post_init__(self) -> None:
        callable_instance("objective", self.objective)
        if self.reduction is not None:
            callable_instance("reduction", self.reduction)
        instance_of("kl", self.kl, KLPenalty)
        instance_of("entropy_bonus", self.entropy_bonus, EntropyBonus)
        if self.sampler_correction is not None:
            instance_of("sampler_correction", self.sampler_correction, SamplerCorrection)
        if not isinstance(self.corrections, Iterable):
            raise TypeError(f"corrections must be a sequence of callables, got {type(self.corrections).__name__}")
        # Read once: an iterator has nothing left the second time.
        object.__setattr__(self, "corrections", tuple(self.corrections))
        for place, correction in enumerate(self.corrections):
            callable_instance(f"corrections[{place}]", correction)
        one_of("metrics", self.metrics, LEVELS)
        if self.entropy_bonus.entropy_coef != 0.0 and self.reduction is None:
            raise ValueError("entropy_coef must be 0 without a reduction: the bonus is a mean over tokens")

    @property
    def needs_entropy(self) -> bool:
        """Whether the head has to return entropies."""
        restricted = any(getattr(correction, "restricts_entropy", False) for correction in self.corrections)
        return restricted or self.entropy_bonus.entropy_coef != 0.0 or self.metrics == "with_entropy"

    @property
    def locality(self) -> Locality:
        """How many tokens must be seen together for the gradient of any of them.

        "token": that token; "sequence": its sequence; "batch": all tokens, because nothing less is known to do. The
        reduction, the sampler's correction and the divisors of means are known before any log-probability is.
        """
        parts = (self.objective, *self.corrections)
        if all(_token_local(part) for part in parts):
            return "token"
        return "sequence" if all(_sequence_local(part) for part in parts) else "batch"

    @property
    def idle_without_advantages(self) -> bool:
        """Whether a sequence whose advantages are all 0 has loss, gradient and clip indicators of 0, whatever its
        log-probabilities are, and no part in other sequences' gradients."""
        zero = ("zero_without_advantage", "sequence_zero_without_advantages")
        return (
            any(_says_of_its_formula(self.objective, name) for name in zero)
            and self.locality != "batch"
            and self.kl.beta == 0.0
            and self.entropy_bonus.entropy_coef == 0.0
        )

    @property
    def metrics_read_all(self) -> bool:
        """Whether a metric depends on the log-probabilities or entropies of tokens without advantage."""
        return self.needs_entropy or self.metrics not in ("none", "loss")

    def check(self, batch: PolicyBatch, shape: torch.Size, device: torch.device) -> AlignedBatch:
        """Raise for what can be seen without reading values, so that mistakes show before anything is computed.

        Returns:
            The batch's columns in `shape`, with the values that the caller left there.
        """
        instance_of("batch", batch, PolicyBatch)
        self.kl.check(batch)
        given = batch.checked(shape, device)
        if self.sampler_correction is not None:
            self.sampler_correction.check(given)
            given = replace(given, importance_ratio_per_sequence=self.sampler_correction.level == "sequence")
        by_sequence = self.metrics in ("basic", "with_entropy")
        parts: tuple[Any, ...] = (self.objective, *self.corrections, self.reduction)
        for part in parts:
            by_sequence = by_sequence or getattr(part, "needs_sequences", False)
            if hasattr(part, "check"):
                part.check(given)
        if by_sequence:
            given.check_sequences()
        return given

    def prepared(self, given: AlignedBatch, dtype: torch.dtype) -> "PreparedLoss":
        """What does not depend on the log-probabilities, made of what `check` returned."""
        aligned = given.cleaned(dtype)
        if self.sampler_correction is not None:
            aligned = replace(aligned, importance_ratio=self.sampler_correction.ratio(aligned))
        return PreparedLoss(self, aligned, None if self.reduction is None else _weights(self.reduction, aligned))

    def tokens_to_project(self, given: AlignedBatch) -> Tensor | None:
        """Nonzero where the result needs this token's log-probability, shaped like the tokens or (B, 1); None for all.

        In GRPO a group with equal rewards has no advantages; such tokens need not be projected at all.
        """
        idle = (
            _says_of_its_formula(self.objective, "zero_without_advantage")
            and self.locality == "token"
            and self.kl.beta == 0.0
            and not self.metrics_read_all
        )
        return _unexpanded(given.advantages) if idle else None

    def may_have_gradient(self, given: AlignedBatch) -> Tensor | None:
        """Nonzero where a token may have a gradient, as far as can be known; None if all may."""
        penalised = self.entropy_bonus.entropy_coef != 0.0 or self.kl.beta != 0.0
        return None if penalised else _unexpanded(given.advantages)


def _weights(reduction: Reduction, batch: AlignedBatch) -> Tensor:
    weights: Any = reduction(batch)
    if isinstance(weights, (int, float)):  # one number for all tokens
        return batch.advantages.new_full((), weights)
    instance_of("the result of reduction", weights, Tensor)
    return weights


def _unexpanded(column: Tensor) -> Tensor:
    """(B, 1) of a column that was expanded to (B, T), so that nobody writes it out."""
    return column[:, :1] if column.dim() == 2 and column.stride(1) == 0 else column


def _says_of_its_formula(part: Any, name: str) -> bool:
    """A part's attribute. False if a subclass with a formula of its own inherits it: it says nothing about that one."""
    if name not in getattr(part, "__dict__", {}):
        for cls in type(part).__mro__:
            if name in cls.__dict__:
                break
            if "__call__" in cls.__dict__ or "forward" in cls.__dict__:
                return False
    return getattr(part, name, False)


def _token_local(part: Any) -> bool:
    return _sequence_local(part) and not getattr(part, "needs_sequences", False) and getattr(part, "token_local", False)


def _sequence_local(part: Any) -> bool:
    # Which tokens a bonus is a mean of is not known before all entropies are.
    if getattr(part, "restricts_entropy", False):
        return False
    return getattr(part, "token_local", False) or getattr(part, "sequence_local", False)


class TokenTerms(NamedTuple):
    """A loss before its reduction."""

    loss: Tensor  # per token, 0 at masked tokens
    token_loss: TokenLoss
    kl: Tensor | None  # per token in nats
    logps: Tensor  # clean
    batch: AlignedBatch  # with the entropies, if given
    entropy: Tensor | None  # clean, differentiable
    keeps_entropy: Tensor  # bool, the tokens whose entropy counts


class PreparedLoss(NamedTuple):
    """A loss that waits for log-probabilities."""

    terms: PolicyTerms
    batch: AlignedBatch
    weights: Tensor | None  # one per token; None leaves tokens unreduced
    entropy_count: Tensor | None = None  # (), tokens in the mean of an entropy bonus; None counts those at hand

    def take(self, positions: Tensor | slice) -> "PreparedLoss":
        """The part of some tokens, (n,) flat positions, without metrics: parts add up to the whole loss where the
        terms' locality allows it."""
        weights = None if self.weights is None else self.weights.expand(self.batch.mask.shape).reshape(-1)[positions]
        terms = replace(self.terms, metrics="none")
        batch = self.batch.take(positions, sequences=terms.locality != "token")
        entropy_count = self.batch.mask.sum() if terms.entropy_bonus.entropy_coef != 0.0 else None
        return PreparedLoss(terms, batch, weights, entropy_count)

    def per_token(
        self, per_token_logps: Tensor, entropy: Tensor | None = None, exact_kl: Tensor | None = None
    ) -> TokenTerms:
        terms, batch = self.terms, self.batch
        masked = ~batch.mask
        # A fill and not a product: a masked NaN stays out of the value and of the gradient.
        logps = per_token_logps.masked_fill(masked, 0.0)
        if entropy is not None:
            entropy = entropy.to(logps.dtype).masked_fill(masked, 0.0)
            batch = replace(batch, entropy=entropy.detach())
        token_loss = terms.objective(logps, batch)
        instance_of("the result of objective", token_loss, TokenLoss)
        loss = token_loss.loss
        keeps_entropy = batch.mask
        for place, correction in enumerate(terms.corrections):
            factor = correction(logps, batch)
            instance_of(f"the result of corrections[{place}]", factor, Tensor)
            loss = loss * factor
            if getattr(correction, "restricts_entropy", False):
                keeps_entropy = keeps_entropy & (factor != 0)
        if batch.importance_ratio is not None and not getattr(terms.objective, "takes_importance_ratio", False):
            loss = loss * batch.importance_ratio
        kl = exact_kl if terms.kl.exact else terms.kl(logps, batch, token_loss.ratio)
        if kl is not None:
            loss = loss + terms.kl.beta * kl
        return TokenTerms(loss.masked_fill(masked, 0.0), token_loss, kl, logps, batch, entropy, keeps_entropy)

    def evaluate(
        self, per_token_logps: Tensor, entropy: Tensor | None = None, exact_kl: Tensor | None = None
    ) -> PolicyLoss:
        parts = self.per_token(per_token_logps, entropy, exact_kl)
        loss = parts.loss if self.weights is None else (parts.loss * self.weights).sum()
        bonus = self.terms.entropy_bonus
        if bonus.entropy_coef != 0.0:
            if parts.entropy is None:
                raise ValueError(f"entropy must be given with entropy_coef = {bonus.entropy_coef}, got None")
            loss = loss + bonus(parts.entropy, parts.keeps_entropy, self.entropy_count)
        metrics = policy_metrics(self.terms.metrics, parts.logps, parts.token_loss, parts.kl, parts.batch)
        return PolicyLoss(loss, metrics)


def ppo_loss_fn(
    per_token_logps: Tensor,
    batch: PolicyBatch,
    objective: Objective,
    reduction: Reduction | None,
    *,
    entropy: Tensor | None = None,
    exact_kl: Tensor | None = None,
    kl: KLPenalty = NO_PENALTY,
    entropy_bonus: EntropyBonus = NO_BONUS,
    sampler_correction: SamplerCorrection | None = None,
    corrections: Iterable[Correction] = (),
    metrics: MetricsLevel = "loss",
) -> PolicyLoss:
    """sum_t weight_t (importance_ratio_t factor_t objective_t + beta kl_t) - entropy_coef mean entropy.

    Args:
        per_token_logps: (B, T) or packed (N,) log-probabilities in nats under the current policy, with gradient.
        batch: the other columns.
        objective: callable (logps, batch) -> TokenLoss, such as `PPOClip()` or your own.
        reduction: callable (batch) -> one weight per token, such as `SequenceMean()`; None leaves tokens unreduced.
        entropy: entropies in nats shaped like per_token_logps, with gradient if there is a bonus; for the bonus, a
            `TopEntropyMask` and the metrics "with_entropy".
        exact_kl: KL(policy || reference) of each token in nats, with gradient, for `KLPenalty(kl_estimator="exact")`:
            `linear_divergence(kind="reverse_kl").divergence`.
        kl: penalty for leaving the reference policy.
        entropy_bonus: reward for entropy.
        sampler_correction: makes `importance_ratio` from the batch's sampling_per_token_logps.
        corrections: callables (logps, batch) -> factor on the policy term, such as `OffPolicySequenceMask(...)`; any
            iterable, read once.
        metrics: "none", "loss", "basic" or "with_entropy"; see `liger_rl.policy.metrics`.

    Raises:
        TypeError, ValueError: columns that do not fit together, or an option without what it needs; a completion_mask
            in CPU memory with other values than 0 and 1. The error names the argument.
    """
    terms = PolicyTerms(
        objective=objective,
        reduction=reduction,
        kl=kl,
        entropy_bonus=entropy_bonus,
        sampler_correction=sampler_correction,
        corrections=corrections,
        metrics=metrics,
    )
    if terms.kl.exact != (exact_kl is not None):
        wanted = "given with" if terms.kl.exact else "None without"
        found = "None" if exact_kl is None else "one"
        raise ValueError(f'exact_kl must be {wanted} a KLPenalty(beta, kl_estimator="exact"), got {found}')
    columns = {"per_token_logps": per_token_logps, "entropy": entropy, "exact_kl": exact_kl}
    for name, given_column in columns.items():
        if given_column is None and name != "per_token_logps":
            continue
        column = check_dense(name, given_column)
        if not column.is_floating_point():
            raise TypeError(f"{name} must be a floating tensor, got {column.dtype}")
        if column.shape != per_token_logps.shape:
            raise ValueError(
                f"{name} must be {tuple(per_token_logps.shape)} as per_token_logps, got {tuple(column.shape)}"
            )
    if terms.needs_entropy and entropy is None:
        raise ValueError("entropy must be given for an entropy bonus, a TopEntropyMask or entropy metrics, got None")
    dtype = torch.promote_types(per_token_logps.dtype, torch.float32)
    given = terms.check(batch, per_token_logps.shape, per_token_logps.device)
    check_mask_values(batch.completion_mask)
    exact_kl = None if exact_kl is None else exact_kl.to(dtype)
    return terms.prepared(given, dtype).evaluate(per_token_logps.to(dtype), entropy, exact_kl)
