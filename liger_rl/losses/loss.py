"""The policy loss on per-token log-probabilities: objective, corrections, penalties, reduction."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from liger_rl.kernels.public_call import outside_of_graphs
from liger_rl.losses.batch import AlignedBatch, PolicyBatch, check_column, check_mask_values
from liger_rl.losses.corrections import Correction, OffPolicySequenceMask, SamplerCorrection
from liger_rl.losses.metrics import LEVELS, Metric, MetricsLevel, policy_metrics
from liger_rl.losses.objectives import Objective, TokenLoss
from liger_rl.losses.options import Options, check_callable, check_instance, warn_caller
from liger_rl.losses.penalties import NO_BONUS, NO_PENALTY, EntropyBonus, KLPenalty
from liger_rl.losses.reductions import Reduction

Locality = Literal["token", "sequence", "batch"]
NOTHING: Mapping[str, Tensor] = {}


class PolicyLoss(NamedTuple):
    """A loss to call backward on, and its metrics."""

    loss: Tensor  # () in float32; with reduction=None per token, shaped like the log-probabilities, 0 at masked tokens
    metrics: dict[str, Metric]  # by name, without gradient; see `liger_rl.losses.metrics`


@dataclass(frozen=True, kw_only=True)
class PolicyTerms(Options):
    """The options of a loss, which are the arguments of `ppo_loss_fn`, checked. Corrections become a tuple."""

    objective: Annotated[Objective, callable]
    reduction: Annotated[Reduction | None, callable]
    kl: Annotated[KLPenalty, KLPenalty] = NO_PENALTY
    entropy_bonus: Annotated[EntropyBonus, EntropyBonus] = NO_BONUS
    sampler_correction: Annotated[SamplerCorrection | None, SamplerCorrection] = None
    corrections: Annotated[Iterable[Correction], Iterable] = ()
    metrics: Annotated[MetricsLevel, LEVELS] = "loss"

    # The other fields are derived once, because each call reads them.
    needs_entropy: bool = field(init=False, repr=False)  # the head must return entropies
    reads: frozenset[str] = field(init=False, repr=False)  # names of other values that the head must return
    needs_sequences: bool = field(init=False, repr=False)  # the batch must say which tokens belong to one sequence
    # The tokens on which the gradient of one token depends, through log-probabilities. Reduction, sampler correction
    # and divisors are computed without these.
    locality: Locality = field(init=False, repr=False)
    penalised: bool = field(init=False, repr=False)  # a penalty or bonus may give a token without advantage a gradient
    metrics_read_all: bool = field(init=False, repr=False)  # a metric reads tokens without advantage
    projects_all: bool = field(init=False, repr=False)  # the loss or a metric reads tokens without advantage
    reads_reference: bool = field(init=False, repr=False)  # a penalty, or perhaps a user's objective or correction
    reads_sampling: bool = field(init=False, repr=False)  # a correction, or perhaps a user's objective
    # A sequence whose advantages are all 0 has no part in the loss, the gradients and the clip metrics.
    idle_without_advantages: bool = field(init=False, repr=False)
    nll_weight: float = field(init=False, repr=False)  # of the mean of -logp over `AlignedBatch.nll_tokens`
    checked_terms: tuple[Any, ...] = field(init=False, repr=False)  # the terms that have a method `check`

    def __post_init__(self) -> None:
        super().__post_init__()
        corrections = tuple(self.corrections)  # an iterator can be read only once
        for index, correction in enumerate(corrections):
            check_callable(f"corrections[{index}]", correction)
        bonus = self.entropy_bonus.entropy_coef != 0.0
        if bonus and self.reduction is None:
            raise ValueError("entropy_coef must be 0 without a reduction: the bonus is a mean over tokens")
        factors = (self.objective, *corrections)
        locality, penalised = _find_locality(factors), bonus or self.kl.beta != 0.0
        of_a_user = any(not type(term).__module__.startswith("liger_rl.") for term in factors)
        restricted = any(getattr(correction, "restricts_entropy", False) for correction in corrections)
        reads: Any = self.objective.reads(self.metrics) if hasattr(self.objective, "reads") else ()
        needs_entropy = restricted or bonus or self.metrics == "with_entropy" or "entropy" in reads
        # An objective's own metrics read the tokens of its loss alone.
        own_metrics = getattr(self.objective, "own_metrics", False)
        by_sequence = self.metrics in ("basic", "with_entropy") and not own_metrics
        metrics_read_all = (needs_entropy or by_sequence) and not own_metrics
        idle_tokens = _read_formula_attribute(self.objective, "zero_without_advantage")
        idle_sequences = idle_tokens or _read_formula_attribute(self.objective, "sequence_zero_without_advantages")
        terms = (*factors, self.reduction)
        derived = {
            "corrections": corrections,
            "needs_entropy": needs_entropy,
            "reads": frozenset(reads) - {"entropy"},
            "needs_sequences": by_sequence or any(getattr(term, "needs_sequences", False) for term in terms),
            "locality": locality,
            "penalised": penalised,
            "metrics_read_all": metrics_read_all,
            "projects_all": not idle_tokens or locality != "token" or penalised or metrics_read_all,
            "reads_reference": self.kl.beta != 0.0 or getattr(self.objective, "reads_reference", False) or of_a_user,
            "reads_sampling": self.sampler_correction is not None
            or of_a_user
            or any(isinstance(correction, OffPolicySequenceMask) for correction in corrections),
            "idle_without_advantages": idle_sequences and locality != "batch" and not penalised,
            "nll_weight": getattr(self.objective, "nll_weight", 0.0),
            "checked_terms": tuple(term for term in terms if hasattr(term, "check")),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def check(self, batch: PolicyBatch, shape: torch.Size, device: torch.device) -> AlignedBatch:
        """The columns of `batch` in `shape`, (B, T) or (N,), without reading their values.

        Raises TypeError or ValueError for columns that do not fit together or are missing.
        """
        if batch.ref_per_token_logps is None:
            if self.kl.beta != 0.0:
                raise ValueError(
                    f"ref_per_token_logps must be given for a KL penalty with beta = {self.kl.beta}, got None"
                )
        elif not self.reads_reference:
            warn_caller("ref_per_token_logps are given, but nothing reads them, because beta is 0")
        if batch.sampling_per_token_logps is not None and not self.reads_sampling:
            warn_caller("sampling_per_token_logps are given, but nothing reads them without a sampler_correction")
        aligned = batch.align(shape, device)
        if self.sampler_correction is not None:
            self.sampler_correction.check(aligned)
            aligned = replace(aligned, importance_ratio_per_sequence=self.sampler_correction.level == "sequence")
        if self.needs_sequences:
            aligned.check_sequences()
        for term in self.checked_terms:
            term.check(aligned)
        return aligned

    def prepare(self, aligned: AlignedBatch, dtype: torch.dtype, mask: Tensor | None = None) -> "PreparedLoss":
        """Computes all that needs no log-probabilities, from the result of `check`. `mask` replaces the batch's."""
        batch = aligned.clean(dtype, mask)
        if self.sampler_correction is not None:
            batch = replace(batch, importance_ratio=self.sampler_correction.ratio(batch))
        weights: Any = None
        if self.reduction is not None:
            weights = self.reduction(batch)
            if isinstance(weights, (int, float)):  # one number for all tokens
                weights = batch.advantages.new_full((), weights)
            if type(weights) is not Tensor or weights.shape != batch.mask.shape:
                _check_broadcasts("the result of reduction", weights, batch.mask.shape)
        nll_weights = None
        if self.nll_weight:
            tokens = batch.nll_tokens
            nll_weights = self.nll_weight * tokens.to(dtype) / tokens.sum().clamp(min=1)
        return PreparedLoss(self, batch, weights, self.metrics, nll_weights=nll_weights)

    def tokens_to_project(self, aligned: AlignedBatch) -> Tensor | None:
        """Nonzero where the result needs this token's log-probability, shaped like the tokens or (B, 1); None for all.

        In GRPO, a group with equal rewards has advantages of 0. Its tokens need not be projected.
        """
        return None if self.projects_all else _drop_expansion(aligned.advantages)


def _check_broadcasts(name: str, values: Any, shape: torch.Size) -> None:
    """Raises unless `values` is a tensor that broadcasts to the tokens' shape; (N, 1) and (N,) would make (N, N)."""
    if isinstance(values, Tensor) and values.shape == shape:
        return
    check_instance(name, values, Tensor)
    sizes = zip(values.shape[::-1], shape[::-1], strict=False)
    if values.dim() > len(shape) or any(size not in (1, tokens) for size, tokens in sizes):
        raise ValueError(f"{name} must broadcast to {tuple(shape)}, one for each token, got {tuple(values.shape)}")


def _drop_expansion(column: Tensor) -> Tensor:
    """(B, 1) of a column that was expanded to (B, T), so that callers do not write out (B, T)."""
    return column[:, :1] if column.dim() == 2 and column.stride(1) == 0 else column


def _find_locality(factors: Iterable[Any]) -> Locality:
    locality: Locality = "token"
    for factor in factors:
        token_local = getattr(factor, "token_local", False)
        # The tokens of an entropy bonus are known only after the entropies of the whole batch.
        if getattr(factor, "restricts_entropy", False) or not (token_local or getattr(factor, "sequence_local", False)):
            return "batch"
        if not token_local or getattr(factor, "needs_sequences", False):
            locality = "sequence"
    return locality


def _read_formula_attribute(objective: Any, name: str) -> bool:
    """An attribute that a subclass with another formula does not inherit; False if there is none."""
    if name not in getattr(objective, "__dict__", {}):
        for cls in type(objective).__mro__:
            if name in cls.__dict__:
                break
            if "__call__" in cls.__dict__ or "forward" in cls.__dict__:
                return False
    return getattr(objective, name, False)


class TokenTerms(NamedTuple):
    """A loss before its reduction."""

    loss: Tensor  # per token, 0 at masked tokens
    token_loss: TokenLoss
    kl: Tensor | None  # per token in nats
    logps: Tensor  # 0 at masked tokens
    batch: AlignedBatch  # with the entropies, if there are any
    entropy: Tensor | None  # 0 at masked tokens, differentiable
    keeps_entropy: Tensor  # bool, the tokens whose entropy counts


class PreparedLoss(NamedTuple):
    """A loss that waits for log-probabilities."""

    terms: PolicyTerms
    batch: AlignedBatch
    weights: Tensor | None  # one per token; None leaves tokens unreduced
    metrics: MetricsLevel = "none"
    entropy_count: Tensor | None = None  # () tokens in the mean of an entropy bonus; None counts the batch's
    nll_weights: Tensor | None = None  # of -logp, shaped like the tokens

    def take(self, positions: Tensor) -> "PreparedLoss":
        """The loss of the rows (b, w) at flat positions of (B, T).

        The losses of parts add up to the whole loss if no part splits what `PolicyTerms.locality` keeps in one.
        """
        weights, nll_weights = (
            None if column is None else column.expand(self.batch.mask.shape).reshape(-1)[positions]
            for column in (self.weights, self.nll_weights)
        )  # fmt: skip
        batch = self.batch.take(positions)
        entropy_count = self.batch.mask.sum() if self.terms.entropy_bonus.entropy_coef != 0.0 else None
        return PreparedLoss(self.terms, batch, weights, self.metrics, entropy_count, nll_weights)

    def per_token(
        self,
        per_token_logps: Tensor,
        entropy: Tensor | None = None,
        others: Mapping[str, Tensor] = NOTHING,
    ) -> TokenTerms:
        """importance_ratio_t factor_t objective_t + beta kl_t of each token.

        `others` has the head's other values by name: fields of `AlignedBatch`.
        """
        terms, batch = self.terms, self.batch
        masked = ~batch.mask
        # A fill, not a product: a masked NaN must not reach the value or the gradient.
        logps = per_token_logps.masked_fill(masked, 0.0)
        values: dict[str, Any] = {}
        if entropy is not None:
            entropy = entropy.to(logps.dtype).masked_fill(masked, 0.0)
            values["entropy"] = entropy.detach()
        for name, value in others.items():
            values[name] = value.masked_fill(masked, 0)
        if values:
            batch = replace(batch, **values)
        token_loss = terms.objective(logps, batch)
        if not isinstance(token_loss, TokenLoss):
            check_instance("the result of objective", token_loss, TokenLoss)
        loss = token_loss.loss
        if loss.shape != logps.shape:
            raise ValueError(
                f"the loss of objective must be {tuple(logps.shape)}, one for each token, got {tuple(loss.shape)}"
            )
        keeps_entropy = batch.mask
        for index, correction in enumerate(terms.corrections):
            factor = correction(logps, batch)
            _check_broadcasts(f"the result of corrections[{index}]", factor, logps.shape)
            loss = loss * factor
            if getattr(correction, "restricts_entropy", False):
                keeps_entropy = keeps_entropy & (factor != 0)
        if batch.importance_ratio is not None and not getattr(terms.objective, "takes_importance_ratio", False):
            loss = loss * batch.importance_ratio
        kl = None
        if terms.kl.beta != 0.0:
            kl = terms.kl(logps, batch, token_loss.ratio)
            loss = loss + terms.kl.beta * kl
        return TokenTerms(loss.masked_fill(masked, 0.0), token_loss, kl, logps, batch, entropy, keeps_entropy)

    def evaluate(
        self,
        per_token_logps: Tensor,
        entropy: Tensor | None = None,
        others: Mapping[str, Tensor] = NOTHING,
    ) -> PolicyLoss:
        """sum_t weight_t loss_t - entropy_coef mean entropy, by the formulas."""
        tokens = self.per_token(per_token_logps, entropy, others)
        loss = tokens.loss if self.weights is None else (tokens.loss * self.weights).sum()
        if self.nll_weights is not None:
            loss = loss - (tokens.logps * self.nll_weights).sum()
        bonus = self.terms.entropy_bonus
        if bonus.entropy_coef != 0.0:
            assert tokens.entropy is not None
            loss = loss + bonus(tokens.entropy, tokens.keeps_entropy, self.entropy_count)
        if self.metrics == "none":
            return PolicyLoss(loss, {})
        with torch.no_grad():
            if tokens.token_loss.metrics is not None:
                return PolicyLoss(loss, tokens.token_loss.metrics(self.metrics))
            metrics = policy_metrics(self.metrics, tokens.logps, tokens.token_loss, tokens.kl, tokens.batch)
        return PolicyLoss(loss, metrics)


@outside_of_graphs
def ppo_loss_fn(
    per_token_logps: Tensor,
    batch: PolicyBatch,
    objective: Objective,
    reduction: Reduction | None,
    *,
    entropy: Tensor | None = None,
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
        entropy: entropies in nats shaped like per_token_logps, with gradient if there is a bonus. A bonus, a
            `TopEntropyMask` and the metrics "with_entropy" need them.
        kl, entropy_bonus: the penalty for leaving the reference policy; the reward for entropy.
        sampler_correction: makes `importance_ratio` from the batch's sampling_per_token_logps.
        corrections: callables (logps, batch) -> factor on the policy term, such as `OffPolicySequenceMask(...)`.
        metrics: "none", "loss", "basic" or "with_entropy"; see `liger_rl.losses.metrics`.

    Raises:
        TypeError, ValueError: columns that do not fit together or that are missing, naming the argument.
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
    check_instance("batch", batch, PolicyBatch)
    for name, column in (("per_token_logps", per_token_logps), ("entropy", entropy)):
        if column is None and name != "per_token_logps":
            continue
        column = check_column(name, column)
        if not column.is_floating_point():
            raise TypeError(f"{name} must be a floating tensor, got {column.dtype}")
        if column.shape != per_token_logps.shape:
            raise ValueError(
                f"{name} must be {tuple(per_token_logps.shape)} as per_token_logps, got {tuple(column.shape)}"
            )
    if terms.needs_entropy and entropy is None:
        raise ValueError("entropy must be given for an entropy bonus, a TopEntropyMask or entropy metrics, got None")
    dtype = torch.promote_types(per_token_logps.dtype, torch.float32)
    aligned = terms.check(batch, per_token_logps.shape, per_token_logps.device)
    check_mask_values(batch.mask)
    return terms.prepare(aligned, dtype).evaluate(per_token_logps.to(dtype), entropy)
