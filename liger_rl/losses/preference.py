"""Preference objectives: log-probabilities of chosen and rejected sequences -> a loss for each pair or sequence.

The advantage of a token is 1 in a chosen (desirable) sequence, -1 in a rejected one, and 0 if the token counts only in
the NLL term. The two rows of a pair are one sequence of the batch: see `AlignedBatch.pairs`. For packed tokens, a pair
is one segment. Each token gets the loss of its pair, so that `SequenceMean` is the mean over pairs.

docs/formulas.md has the formulas and their papers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from liger_rl.kernels.argument_checks import check_choice
from liger_rl.losses.batch import AlignedBatch
from liger_rl.losses.levels import MetricsLevel
from liger_rl.losses.metrics import Metric, sequence_means
from liger_rl.losses.objectives import Scope, TokenLoss
from liger_rl.losses.options import Options, check_interval

MAX_EXPONENT = 80.0  # exp of it is finite in float32, and so is a difference of two; TRL's bound
LARGEST_MEAN_LOGP = -1e-7  # the odds of a sequence with probability 1 would be infinite


class Pair(NamedTuple):
    """Sums over the chosen and the rejected sequence of each token's pair, or means with average_log_prob."""

    chosen: Tensor  # of logp - ref
    rejected: Tensor
    chosen_score: Tensor  # f'(exp(chosen)) of the f-divergence; `chosen` itself for the reverse KL
    rejected_score: Tensor
    chosen_tokens: Tensor  # at least 1
    rejected_tokens: Tensor

    @property
    def margin(self) -> Tensor:
        return self.chosen_score - self.rejected_score

    @property
    def mean_margin(self) -> Tensor:
        """The margin of scores per token."""
        return self.chosen_score / self.chosen_tokens - self.rejected_score / self.rejected_tokens


def _logistic(margin: Tensor, smoothing: float) -> Tensor:
    """-log sigmoid(margin), with the share `smoothing` of the labels flipped."""
    if smoothing == 0.0:
        return -logsigmoid(margin)
    return -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)


def _exo_pair(pair: Pair, dpo: "DPO") -> Tensor:
    margin, smoothing = dpo.beta * pair.margin, dpo.label_smoothing
    towards = torch.sigmoid(margin) * (logsigmoid(margin) - math.log1p(-smoothing))
    return towards + torch.sigmoid(-margin) * (logsigmoid(-margin) - math.log(smoothing))


def _nca_pair(pair: Pair, dpo: "DPO") -> Tensor:
    chosen, rejected = dpo.beta * pair.chosen, dpo.beta * pair.rejected
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def _robust(pair: Pair, dpo: "DPO") -> Tensor:
    margin, smoothing = dpo.beta * pair.margin, dpo.label_smoothing
    return (smoothing * logsigmoid(-margin) - (1 - smoothing) * logsigmoid(margin)) / (1 - 2 * smoothing)


def _sppo_hard(pair: Pair, dpo: "DPO") -> Tensor:
    return (pair.chosen - 0.5 / dpo.beta).square() + (pair.rejected + 0.5 / dpo.beta).square()


def _discopop(pair: Pair, dpo: "DPO") -> Tensor:
    margin = dpo.beta * pair.margin
    exponential = torch.sigmoid(margin / dpo.discopop_tau)  # the weight of the exponential loss
    return (1 - exponential) * -logsigmoid(margin) + exponential * (-margin).clamp(max=MAX_EXPONENT).exp()


class PairLoss(NamedTuple):
    formula: Callable[[Pair, "DPO"], Tensor]
    smooths: bool = False  # it reads label_smoothing
    scores: bool = False  # it reads scores, so that any f-divergence goes with it


def _sigmoid(pair: Pair, dpo: "DPO") -> Tensor:
    return _logistic(dpo.beta * pair.margin, dpo.label_smoothing)


PAIR_LOSSES: dict[str, PairLoss] = {
    "sigmoid": PairLoss(_sigmoid, smooths=True, scores=True),
    "hinge": PairLoss(lambda pair, dpo: torch.relu(1 - dpo.beta * pair.margin), scores=True),
    "ipo": PairLoss(lambda pair, dpo: (pair.mean_margin - 0.5 / dpo.beta).square(), scores=True),
    "sigmoid_norm": PairLoss(
        lambda pair, dpo: _logistic(dpo.beta * pair.mean_margin, dpo.label_smoothing), smooths=True, scores=True
    ),
    "exo_pair": PairLoss(_exo_pair, smooths=True, scores=True),
    "nca_pair": PairLoss(_nca_pair),
    "robust": PairLoss(_robust, smooths=True, scores=True),
    "bco_pair": PairLoss(lambda pair, dpo: -logsigmoid(dpo.beta * pair.chosen) - logsigmoid(-dpo.beta * pair.rejected)),
    "sppo_hard": PairLoss(_sppo_hard),
    # `DPO._sorted_loss` sorts the margins first.
    "aot": PairLoss(_sigmoid, smooths=True),
    "aot_unpaired": PairLoss(_sigmoid, smooths=True),
    "apo_zero": PairLoss(
        lambda pair, dpo: torch.sigmoid(-dpo.beta * pair.chosen) + torch.sigmoid(dpo.beta * pair.rejected)
    ),
    "apo_down": PairLoss(
        lambda pair, dpo: (
            torch.sigmoid(dpo.beta * pair.chosen) + torch.sigmoid(-dpo.beta * (pair.chosen - pair.rejected))
        )
    ),
    "discopop": PairLoss(_discopop, scores=True),
}
SORTED = ("aot", "aot_unpaired")
SFT = "sft"  # the NLL term alone
SCORES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": lambda ratio, _: ratio,
    "forward_kl": lambda ratio, _: 1 - (-ratio).clamp(max=MAX_EXPONENT).exp(),
    "js_divergence": lambda ratio, _: math.log(2) + logsigmoid(ratio),
    "alpha_divergence": lambda ratio, alpha: (
        ratio if abs(alpha - 1) < 1e-6 else (((alpha - 1) * ratio).clamp(max=MAX_EXPONENT).exp() - 1) / (alpha - 1)
    ),
}


class JudgedObjective(Options):
    """Base of the objectives of judged sequences, whose metrics have one level."""

    scope: ClassVar[Scope] = "sequence"
    needs_reference: ClassVar[bool] = False

    def reads(self, _level: MetricsLevel) -> set[str]:
        return {"segments", "ref_per_token_logps"} if self.needs_reference else {"segments"}

    def check(self, batch: AlignedBatch) -> None:
        if (batch.ref_per_token_logps is not None) != self.needs_reference:
            expected = "given" if self.needs_reference else "None"
            raise ValueError(f"ref_logps (or reference) must be {expected} for {self!r}")


@dataclass(frozen=True, kw_only=True)
class _PairObjective(JudgedObjective):
    """Base of the objectives of pairs: sums over the two sequences of a pair, the NLL term, metrics."""

    beta: Annotated[float, "(0, inf)"] = 0.1
    nll_coef: Annotated[float, "[0, inf)"] = 0.0  # weight of the mean of -logp over the chosen tokens of the batch

    @property
    def nll_weight(self) -> float:
        return self.nll_coef

    def _sum_sides(self, values: Tensor, batch: AlignedBatch) -> tuple[Tensor, Tensor]:
        """Sums over the chosen and the rejected sequence of each token's pair. Masked values must be 0."""
        chosen, rejected = (torch.where(side, values, 0.0) for side in (batch.advantages > 0, batch.advantages < 0))
        return batch.sequence_sum(chosen), batch.sequence_sum(rejected)

    def _count_tokens(self, batch: AlignedBatch) -> tuple[Tensor, Tensor]:
        chosen, rejected = self._sum_sides(torch.ones_like(batch.advantages), batch)
        return chosen.clamp(min=1), rejected.clamp(min=1)

    def _make_result(
        self,
        loss: Tensor,
        logps: Sequence[Tensor],  # of the chosen and the rejected sequence, as the loss reads them
        rewards: Sequence[Tensor],
        batch: AlignedBatch,
        per_token_logps: Tensor,
        **means: Tensor,
    ) -> TokenLoss:
        def metrics(_level: MetricsLevel) -> dict[str, Metric]:
            chosen, rejected = rewards
            values = {
                "chosen_rewards": chosen,
                "rejected_rewards": rejected,
                "reward_margins": chosen - rejected,
                "reward_accuracy": (chosen > rejected).to(chosen.dtype),
                "chosen_logps": logps[0],
                "rejected_logps": logps[1],
                **means,
            }
            nll = Metric(-torch.where(batch.nll_tokens, per_token_logps, 0.0).sum(), count=batch.nll_tokens.sum())
            return sequence_means(values, batch) | {"nll": nll}

        return TokenLoss(loss.expand_as(per_token_logps), metrics=metrics, nll_coef=self.nll_weight)


def _check_unread(objective: Options, unread: dict[str, bool], condition: str) -> None:
    """Raises for an option that is unread under `condition`, but not at its default."""
    for name, is_unread in unread.items():
        default = getattr(type(objective), name)
        if is_unread and getattr(objective, name) != default:
            raise ValueError(f"{name} must be {default} with {condition}, which do not read it")


@dataclass(frozen=True, kw_only=True)
class DPO(_PairObjective):
    """The losses of TRL's DPOTrainer, of liger-kernel's DPO, and weighted sums of several. arXiv:2305.18290."""

    loss_types: Sequence[str] = ("sigmoid",)  # names of PAIR_LOSSES, or "sft"
    loss_weights: Sequence[float] | None = None  # of the loss_types, arXiv:2411.10442 (MPO); None: 1 each
    label_smoothing: Annotated[float, "[0, 0.5)"] = 0.0  # share of flipped labels; "exo_pair" needs some
    reference_free: Annotated[bool, bool] = False  # the reference gives every sequence the same probability
    f_divergence_type: Annotated[str, tuple(SCORES)] = "reverse_kl"  # arXiv:2309.16240
    f_alpha_divergence_coef: Annotated[float, "(-inf, inf)"] = 0.5  # of "alpha_divergence"
    ld_alpha: Annotated[float | None, "[0, 1]"] = None  # weight of tokens past the shorter length, arXiv:2409.06411
    use_weighting: Annotated[bool, bool] = False  # by the policy's own probabilities, WPO, arXiv:2406.11827
    average_log_prob: Annotated[bool, bool] = False  # means over tokens in place of sums
    discopop_tau: Annotated[float, "(0, inf)"] = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("loss_types", "loss_weights"):
            if not isinstance(getattr(self, name), (Sequence, NoneType if name == "loss_weights" else str)):
                raise TypeError(f"{name} must be a list, got {type(getattr(self, name)).__name__}")
        names = [self.loss_types] if isinstance(self.loss_types, str) else list(self.loss_types)
        object.__setattr__(self, "loss_types", tuple(names))
        weights = [1.0] * len(names) if self.loss_weights is None else list(self.loss_weights)
        if not names or len(weights) != len(names):
            raise ValueError(f"loss_weights must be one number for each of loss_types {names}, got {weights}")
        for name, weight in zip(names, weights, strict=True):
            check_choice("loss_types", name, [*PAIR_LOSSES, SFT])
            check_interval("loss_weights", weight, "(-inf, inf)")
        losses = {name: PAIR_LOSSES[name] for name in names if name != SFT}
        unread = {
            "label_smoothing": not any(loss.smooths for loss in losses.values()),
            "discopop_tau": "discopop" not in losses,
            "f_alpha_divergence_coef": self.f_divergence_type != "alpha_divergence",
        }
        _check_unread(self, unread, f"loss_types {names} and f_divergence_type {self.f_divergence_type!r}")
        if "exo_pair" in names and not self.label_smoothing:
            raise ValueError("label_smoothing must be above 0 with exo_pair, whose paper recommends 1e-3; got 0")
        unscored = [name for name, loss in losses.items() if not loss.scores]
        if self.f_divergence_type != "reverse_kl" and unscored:
            raise ValueError(f"f_divergence_type must be 'reverse_kl' with {unscored}, got {self.f_divergence_type!r}")
        if self.use_weighting and set(names) & {*SORTED, SFT}:
            raise ValueError(f"use_weighting must be False with {[*SORTED, SFT]}, which have no loss of one pair")
        if self.average_log_prob and ({"ipo", "sigmoid_norm"} & set(names) or self.ld_alpha is not None):
            raise ValueError("average_log_prob must be False with ipo, sigmoid_norm and ld_alpha")
        object.__setattr__(self, "loss_weights", tuple(weights))

    @property
    def nll_weight(self) -> float:
        weights = zip(self.loss_types, self.loss_weights or (), strict=True)
        return self.nll_coef + sum(weight for name, weight in weights if name == SFT)

    @property
    def needs_reference(self) -> bool:  # type: ignore[override]
        return not self.reference_free

    @property
    def scope(self) -> Scope:  # type: ignore[override]
        return "batch" if set(self.loss_types) & set(SORTED) else "sequence"

    def reads(self, level: MetricsLevel) -> set[str]:
        return super().reads(level) | ({"log_sum_sq_probs"} if self.use_weighting else set())

    def check(self, batch: AlignedBatch) -> None:
        super().check(batch)
        if not batch.pairs and (self.ld_alpha is not None or self.scope == "batch"):
            raise ValueError(f"ld_alpha and {SORTED} need rows (B, T), chosen and then rejected, got packed tokens")

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        tokens = self._count_tokens(batch)
        reference = batch.ref_per_token_logps
        chosen, rejected = self._weigh_sides(logps if reference is None else logps - reference, batch)
        score = SCORES[self.f_divergence_type]
        alpha = self.f_alpha_divergence_coef
        pair = Pair(chosen, rejected, score(chosen, alpha), score(rejected, alpha), *tokens)
        loss = torch.zeros_like(chosen)
        for name, weight in zip(self.loss_types, self.loss_weights or (), strict=True):
            if name in SORTED:
                margins = self._sorted_margins(name, (chosen, rejected), logps, batch)
                loss = loss + weight * _logistic(self.beta * margins, self.label_smoothing).mean()
            elif name != SFT:
                loss = loss + weight * PAIR_LOSSES[name].formula(pair, self)
        if self.use_weighting:
            loss = loss * self._policy_weight(logps, batch, tokens)
        side_logps = self._sum_sides(logps.detach(), batch)
        if self.average_log_prob:
            side_logps = side_logps[0] / tokens[0], side_logps[1] / tokens[1]
        rewards = self.beta * chosen.detach(), self.beta * rejected.detach()
        return self._make_result(loss, side_logps, rewards, batch, logps)

    def _weigh_sides(self, values: Tensor, batch: AlignedBatch) -> tuple[Tensor, Tensor]:
        """`_sum_sides` with ld_alpha and average_log_prob."""
        tokens = self._count_tokens(batch)
        if self.ld_alpha is not None:
            position = (batch.mask & (batch.advantages != 0)).cumsum(-1)
            shorter = torch.minimum(*self._sum_sides(torch.ones_like(batch.advantages), batch))  # 0 beside an empty one
            values = torch.where(position <= shorter, values, self.ld_alpha * values)
        chosen, rejected = self._sum_sides(values, batch)
        return (chosen / tokens[0], rejected / tokens[1]) if self.average_log_prob else (chosen, rejected)

    def _sorted_margins(self, name: str, ratios: tuple[Tensor, Tensor], logps: Tensor, batch: AlignedBatch) -> Tensor:
        """(P, 1) differences of two sorted lists, arXiv:2406.05882."""
        larger, smaller = ratios
        if name == "aot":
            reference = torch.zeros_like(logps) if batch.ref_per_token_logps is None else batch.ref_per_token_logps
            larger, smaller = (a - b for a, b in (self._weigh_sides(x, batch) for x in (logps, reference)))
        pairs = logps.shape[0] // 2
        return larger[:pairs].sort(0).values - smaller[:pairs].sort(0).values

    @torch.no_grad()
    def _policy_weight(self, logps: Tensor, batch: AlignedBatch, tokens: tuple[Tensor, Tensor]) -> Tensor:
        assert batch.log_sum_sq_probs is not None
        values = torch.where(batch.mask, logps - batch.log_sum_sq_probs, 0.0)
        chosen, rejected = self._sum_sides(values, batch)
        return torch.exp(chosen / tokens[0] + rejected / tokens[1])


@dataclass(frozen=True, kw_only=True)
class CPO(_PairObjective):
    """A DPO without a reference, and the NLL of the chosen sequences. arXiv:2401.08417; SimPO is arXiv:2405.14734.

    "ipo" and "simpo" take means over tokens, as TRL does; average_log_prob=True makes the others do so, too.
    """

    nll_coef: Annotated[float, "[0, inf)"] = 1.0  # TRL's cpo_alpha
    kind: Annotated[str, ("sigmoid", "hinge", "ipo", "simpo")] = "sigmoid"
    label_smoothing: Annotated[float, "[0, 0.5)"] = 0.0
    simpo_gamma: Annotated[float, "(-inf, inf)"] = 0.5  # the margin that "simpo" asks for
    # Of AlphaPO's reward (1 - p^-alpha) / alpha, arXiv:2501.03884; 0 is log p.
    alphapo_alpha: Annotated[float, "(-inf, inf)"] = 0.0
    average_log_prob: Annotated[bool, bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        unread = {"label_smoothing": self.kind in ("hinge", "ipo"), "simpo_gamma": self.kind != "simpo"}
        _check_unread(self, unread, f"kind {self.kind!r}")

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        sides = list(self._sum_sides(logps, batch))
        if self.average_log_prob or self.kind in ("ipo", "simpo"):
            sides = [x / tokens for x, tokens in zip(sides, self._count_tokens(batch), strict=True)]
        side_logps = [x.detach() for x in sides]
        if self.alphapo_alpha != 0.0:
            sides = [(1 - (-self.alphapo_alpha * x).clamp(max=MAX_EXPONENT).exp()) / self.alphapo_alpha for x in sides]
        chosen, rejected = sides
        margin = chosen - rejected
        if self.kind == "ipo":
            loss = (margin - 0.5 / self.beta).square()
        elif self.kind == "hinge":
            loss = torch.relu(1 - self.beta * margin)
        else:
            gamma = self.simpo_gamma if self.kind == "simpo" else 0.0
            loss = _logistic(self.beta * margin - gamma, self.label_smoothing)
        return self._make_result(
            loss, side_logps, [self.beta * chosen.detach(), self.beta * rejected.detach()], batch, logps
        )


@dataclass(frozen=True, kw_only=True)
class ORPO(_PairObjective):
    """The NLL of the chosen sequences, and -beta log sigmoid of the log-odds ratio of mean log-probabilities.

    arXiv:2403.07691. In TRL the NLL counts the chosen prompt, too: give `nll_targets`.
    """

    nll_coef: Annotated[float, "[0, inf)"] = 1.0

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        chosen, rejected = (
            x / n for x, n in zip(self._sum_sides(logps, batch), self._count_tokens(batch), strict=True)
        )
        log_odds = (chosen - rejected) - (_log_1_minus_exp(chosen) - _log_1_minus_exp(rejected))
        log_ratio = logsigmoid(log_odds)
        side_logps = chosen.detach(), rejected.detach()
        means = {"log_odds_ratio": log_ratio.detach(), "log_odds_chosen": log_odds.detach()}
        rewards = self.beta * side_logps[0], self.beta * side_logps[1]
        return self._make_result(-self.beta * log_ratio, side_logps, rewards, batch, logps, **means)


def _log_1_minus_exp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0; https://cran.r-project.org/web/packages/Rmpfr/vignettes/log1mexp-note.pdf"""
    x = x.clamp(max=LARGEST_MEAN_LOGP)
    near = x > -math.log(2)
    # In both branches, -1 takes the place of the other branch's x, whose gradient may be infinite.
    near_value = torch.log(-torch.expm1(torch.where(near, x, -1.0)))
    return torch.where(near, near_value, torch.log1p(-torch.exp(torch.where(near, -1.0, x))))


@dataclass(frozen=True, kw_only=True)
class KTO(JudgedObjective):
    """1 - sigmoid(+-beta (x - kl)), x the sequence's sum of logp - ref, + for desirable sequences. arXiv:2402.01306.

    `kl` estimates the policy's KL from the reference: the mean of the same log-ratio over prompts with completions of
    other prompts, at least 0 and without gradient. With kl 0 it is APO-zero unpaired, arXiv:2408.06266.
    """

    beta: Annotated[float, "(0, inf)"] = 0.1
    desirable_weight: Annotated[float, "[0, inf)"] = 1.0
    undesirable_weight: Annotated[float, "[0, inf)"] = 1.0
    reference_free: Annotated[bool, bool] = False
    average_log_prob: Annotated[bool, bool] = False
    shift: ClassVar[str | None] = "kl"  # the argument that is subtracted from the log-ratio
    shift_bounds: ClassVar[str] = "[0, inf)"

    @property
    def needs_reference(self) -> bool:  # type: ignore[override]
        return not self.reference_free

    def check(self, batch: AlignedBatch) -> None:
        super().check(batch)
        if (batch.shift is None) != (self.shift is None):
            expected = "None" if self.shift is None else "given, or be 0.0,"
            raise ValueError(f"{self.shift or 'kl'} must be {expected} for {self!r}")

    def compute_loss(self, ratio: Tensor, sign: Tensor, shift: Tensor | None) -> Tensor:
        assert shift is not None
        return torch.sigmoid(-sign * self.beta * (ratio - shift))

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        ratios = logps if batch.ref_per_token_logps is None else logps - batch.ref_per_token_logps
        divisor = batch.sequence_length() if self.average_log_prob else 1.0
        ratio, chosen = batch.sequence_sum(ratios) / divisor, batch.advantages > 0
        sign = torch.where(chosen, 1.0, -1.0).to(logps.dtype)
        weight = torch.where(chosen, self.desirable_weight, self.undesirable_weight).to(logps.dtype)
        loss = weight * self.compute_loss(ratio, sign, batch.shift)

        def metrics(_level: MetricsLevel) -> dict[str, Metric]:
            values = {"rewards": self.beta * ratio.detach(), "logps": batch.sequence_sum(logps.detach()) / divisor}
            sides = {"chosen": chosen, "rejected": batch.advantages < 0}
            means = {side: sequence_means(values, batch, where) for side, where in sides.items()}
            return {f"{side}_{name}": means[side][name] for side in sides for name in values}

        return TokenLoss(loss.expand_as(logps), metrics=metrics)


@dataclass(frozen=True, kw_only=True)
class APOZeroUnpaired(KTO):
    """`KTO` without the KL term: TRL's "apo_zero_unpaired". arXiv:2408.06266."""

    shift: ClassVar[str | None] = None

    def compute_loss(self, ratio: Tensor, sign: Tensor, shift: Tensor | None) -> Tensor:
        return torch.sigmoid(-sign * self.beta * ratio)


@dataclass(frozen=True, kw_only=True)
class BCO(KTO):
    """-log sigmoid(+-(beta x - delta)), delta a running mean of beta x without gradient. arXiv:2404.04656."""

    shift: ClassVar[str | None] = "delta"
    shift_bounds: ClassVar[str] = "(-inf, inf)"

    def compute_loss(self, ratio: Tensor, sign: Tensor, shift: Tensor | None) -> Tensor:
        assert shift is not None
        return -logsigmoid(sign * (self.beta * ratio - shift))
