"""The policy loss on per-token log-probabilities: objective, corrections, penalties, reduction."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from liger_rl.kernels.public_call import public
from liger_rl.losses.batch import AlignedBatch, PolicyBatch, check_column, check_mask_values
from liger_rl.losses.corrections import Correction, SamplerCorrection
from liger_rl.losses.levels import LEVELS, POLICY_METRICS, MetricsLevel
from liger_rl.losses.metrics import Metric, policy_metrics
from liger_rl.losses.objectives import Objective, Scope, TokenLoss
from liger_rl.losses.options import Options, check_callable, check_instance, warn_caller
from liger_rl.losses.penalties import NO_BONUS, NO_PENALTY, EntropyBonus, KLPenalty
from liger_rl.losses.reductions import Reduction

SCOPES: tuple[Scope, ...] = ("token", "sequence", "batch")
# Fields of `AlignedBatch` that the head makes, besides the entropy, and the others that a part may say it reads.
HEAD_VALUES = frozenset({"lse", "mean_logits", "log_sum_sq_probs", "is_top1"})
READABLE = HEAD_VALUES | {"entropy", "segments", "ref_per_token_logps", "sampling_per_token_logps"}
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

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "corrections", tuple(self.corrections))  # an iterator can be read only once
        for index, correction in enumerate(self.corrections):
            check_callable(f"corrections[{index}]", correction)
        if self.entropy_bonus.entropy_coef != 0.0 and self.reduction is None:
            raise ValueError("entropy_coef must be 0 without a reduction: the bonus is a mean over tokens")

    @property
    def factors(self) -> tuple[Any, ...]:
        """What makes the policy term of a token."""
        return self.objective, *self.corrections

    # What others ask of a loss before there are log-probabilities. Each answer is found once.

    @cached_property
    def reads(self) -> frozenset[str]:
        """What objective, corrections, bonus and metrics say they read, for `check` and the next three."""
        names = set() if self.entropy_bonus.entropy_coef == 0.0 else {"entropy"}
        for factor in self.factors:
            if hasattr(factor, "reads"):
                names |= factor.reads(self.metrics)
        if not hasattr(self.objective, "reads"):
            names |= POLICY_METRICS[self.metrics]
        if not names <= READABLE:
            raise ValueError(f"reads must return names among {sorted(READABLE)}, got {sorted(names - READABLE)}")
        return frozenset(names)

    @property
    def needs_entropy(self) -> bool:
        """For who calls the head: whether it must return entropies."""
        return "entropy" in self.reads

    @cached_property
    def head_values(self) -> frozenset[str]:
        """For who calls the head: names of other values that it must return."""
        return self.reads & HEAD_VALUES

    @cached_property
    def metrics_read_all(self) -> bool:
        """For steps, which leave sequences out: whether a metric reads those without advantages."""
        return self.metrics in ("basic", "with_entropy") and "segments" in self.reads

    @cached_property
    def scope(self) -> Scope:
        """For steps, which split batches, and `fused`: what the gradient of a token depends on, by log-probabilities.

        Reduction and divisors are computed without these. A sampler correction, which may read them, has no gradient.
        """
        return max((getattr(factor, "scope", "batch") for factor in self.factors), key=SCOPES.index)

    @cached_property
    def idle_scope(self) -> Scope | None:
        """For steps and fused losses: what has no part in the loss, its gradient and clip metrics without advantages.

        A token alone, or a sequence whose advantages are all 0; None if there is no such thing.
        """
        penalised = self.kl.beta != 0.0 or self.entropy_bonus.entropy_coef != 0.0
        is_zero = _read_formula_attribute(self.objective, "zero_without_advantage")
        return None if penalised or not is_zero or self.scope == "batch" else self.scope

    def check(self, batch: PolicyBatch, shape: torch.Size, device: torch.device) -> AlignedBatch:
        """The columns of `batch` in `shape`, (B, T) or (N,), without reading their values.

        Raises TypeError or ValueError for columns that do not fit together or are missing.
        """
        if batch.ref_per_token_logps is None:
            if self.kl.beta != 0.0:
                raise ValueError(
                    f"ref_per_token_logps must be given for a KL penalty with beta = {self.kl.beta}, got None"
                )
        elif self.kl.beta == 0.0 and self._leaves_unread("ref_per_token_logps"):
            warn_caller("ref_per_token_logps are given, but nothing reads them, because beta is 0")
        uncorrected = batch.sampling_per_token_logps is not None and self.sampler_correction is None
        if uncorrected and self._leaves_unread("sampling_per_token_logps"):
            warn_caller("sampling_per_token_logps are given, but nothing reads them without a sampler_correction")
        aligned = batch.align(shape, device)
        if self.sampler_correction is not None:
            self.sampler_correction.check(aligned)
            aligned = replace(aligned, importance_ratio_per_sequence=self.sampler_correction.level == "sequence")
        if "segments" in self.reads:
            aligned.check_sequences()
        for term in (*self.factors, self.reduction):
            if hasattr(term, "check"):
                term.check(aligned)
        return aligned

    def _leaves_unread(self, column: str) -> bool:
        """Whether objective and corrections say what they read, and do not name the column."""
        return column not in self.reads and all(hasattr(factor, "reads") for factor in self.factors)

    def prepare(self, aligned: AlignedBatch, dtype: torch.dtype, mask: Tensor | None = None) -> "PreparedLoss":
        """Computes all that needs no log-probabilities, from the result of `check`. `mask` replaces the batch's."""
        batch = aligned.clean(dtype, mask)
        weights: Any = None
        if self.reduction is not None:
            weights = self.reduction(batch)
            if isinstance(weights, (int, float)):  # one number for all tokens
                weights = batch.advantages.new_full((), weights)
            if type(weights) is not Tensor or weights.shape != batch.mask.shape:
                _check_broadcasts("the result of reduction", weights, batch.mask.shape)
        prepared = PreparedLoss(self, batch, weights, self.metrics)
        old = batch.old_per_token_logps
        return prepared if old is None else prepared.correct_sampler(old)

    def tokens_to_project(self, aligned: AlignedBatch) -> Tensor | None:
        """Nonzero where the result needs this token's log-probability, shaped like the tokens or (B, 1); None for all.

        In GRPO, a group with equal rewards has advantages of 0. Its tokens need not be projected.
        """
        projects_all = self.idle_scope != "token" or self.metrics_read_all
        sampler = self.sampler_correction
        if sampler is not None and sampler.level == "sequence" and aligned.old_per_token_logps is None:
            projects_all = True  # the ratio has the current log-probabilities of all tokens of the sequence
        return None if projects_all else _drop_expansion(aligned.advantages)


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
    whole: AlignedBatch | None = None  # the batch whose part this is; its tokens are counted for means over the batch

    def take(self, positions: Tensor) -> "PreparedLoss":
        """The loss of the rows (b, w) at flat positions of (B, T).

        The losses of parts add up to the whole loss if no part splits what `PolicyTerms.scope` keeps in one.
        """
        weights = self.weights
        if weights is not None:
            weights = weights.expand(self.batch.mask.shape).reshape(-1)[positions]
        return PreparedLoss(self.terms, self.batch.take(positions), weights, self.metrics, self.whole or self.batch)

    def correct_sampler(self, old_per_token_logps: Tensor) -> "PreparedLoss":
        """The loss with the sampler correction's importance ratio, unless it has one or needs none."""
        correction, batch = self.terms.sampler_correction, self.batch
        if correction is None or batch.importance_ratio is not None:
            return self
        old = old_per_token_logps.detach().masked_fill(~batch.mask, 0.0)
        return self._replace(batch=replace(batch, importance_ratio=correction.ratio(old, batch)))

    def per_token(
        self,
        per_token_logps: Tensor,
        entropy: Tensor | None = None,
        others: Mapping[str, Tensor] = NOTHING,
    ) -> TokenTerms:
        """importance_ratio_t factor_t objective_t + beta kl_t of each token.

        `others` has the head's other values by name: fields of `AlignedBatch`.
        """
        terms, batch = self.terms, self.correct_sampler(per_token_logps).batch
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
        if batch.importance_ratio is not None and not token_loss.has_importance_ratio:
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
        """sum_t weight_t loss_t + nll_coef mean -logp - entropy_coef mean entropy, by the formulas."""
        tokens = self.per_token(per_token_logps, entropy, others)
        loss = tokens.loss if self.weights is None else (tokens.loss * self.weights).sum()
        nll_coef, bonus = tokens.token_loss.nll_coef, self.terms.entropy_bonus
        if nll_coef:
            counted = tokens.batch.nll_tokens
            nll_count = (counted if self.whole is None else self.whole.nll_tokens).sum().clamp(min=1)
            loss = loss - (tokens.logps * (nll_coef * counted.to(tokens.logps.dtype) / nll_count)).sum()
        if bonus.entropy_coef != 0.0:
            assert tokens.entropy is not None
            count = None if self.whole is None else self.whole.mask.sum()
            loss = loss + bonus(tokens.entropy, tokens.keeps_entropy, count)
        if self.metrics == "none":
            return PolicyLoss(loss, {})
        with torch.no_grad():
            if tokens.token_loss.metrics is not None:
                return PolicyLoss(loss, tokens.token_loss.metrics(self.metrics))
            unread = POLICY_METRICS[self.metrics] - self.terms.reads
            if unread:
                raise ValueError(f"reads({self.metrics!r}) of the objective must name {sorted(unread)} for its metrics")
            metrics = policy_metrics(self.metrics, tokens.logps, tokens.token_loss, tokens.kl, tokens.batch)
        return PolicyLoss(loss, metrics)


@public
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
        if column.shape != per_token_logps.shape or column.device != per_token_logps.device:
            raise ValueError(
                f"{name} must be {tuple(per_token_logps.shape)} on {per_token_logps.device} as per_token_logps, "
                f"got {tuple(column.shape)} on {column.device}"
            )
    if terms.needs_entropy and entropy is None:
        raise ValueError("entropy must be given for an entropy bonus, a TopEntropyMask or entropy metrics, got None")
    dtype = torch.promote_types(per_token_logps.dtype, torch.float32)
    aligned = terms.check(batch, per_token_logps.shape, per_token_logps.device)
    check_mask_values(batch.mask)
    return terms.prepare(aligned, dtype).evaluate(per_token_logps.to(dtype), entropy)
