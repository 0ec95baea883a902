"""liger-kernel's chunked preference losses on this package's head and losses: docs/liger.md."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from liger_rl.integrations.liger_head import check_shape, head_factors, label_ids
from liger_rl.losses.batch import AlignedBatch
from liger_rl.losses.metrics import Metric
from liger_rl.losses.preference import CPO, DPO, KTO, ORPO
from liger_rl.losses.reductions import SequenceMean
from liger_rl.preference_loss import FusedLinearPreferenceLoss, FusedLinearUnpairedLoss
from liger_rl.reference_loss import ReferenceHead
from liger_rl.supervised_loss import FusedLinearCrossEntropyLoss

__all__ = [
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearKTOLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearSimPOLoss",
]


class _ByPair:
    """Metrics of each pair, (B / 2,), in place of their means."""

    def metrics_of(self, values: dict[str, Tensor], batch: AlignedBatch) -> dict[str, Metric]:
        rows = batch.mask.shape[0]
        return {name: Metric(value.expand(rows, 1)[: rows // 2, 0]) for name, value in values.items()}


class _DPO(_ByPair, DPO):
    pass


class _CPO(_ByPair, CPO):
    pass


class _ORPO(_ByPair, ORPO):
    pass


def _labels(target: Tensor, _input: Tensor, vocab: int, ignore_index: int) -> Tensor:
    if _input.dim() != 3:
        raise ValueError(f"_input must be (B, T, H), got {tuple(_input.shape)}")
    check_shape("target", target, _input, tuple(_input.shape[:2]))
    return label_ids(target, vocab, ignore_index)


@torch.no_grad()
def _sum_of_logits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """() the sum of the logits of rows (b, T, H) over all positions and ids, without the logits."""
    total = rows.sum((0, 1), dtype=torch.float32) @ weight.sum(0, dtype=torch.float32)
    return total if bias is None else total + rows.shape[:2].numel() * bias.sum(dtype=torch.float32)


@dataclass(eq=False, repr=False)
class _OfPairs(nn.Module):
    ignore_index: int = -100
    beta: float = 0.1

    def __post_init__(self) -> None:
        super().__init__()
        self._objective()  # so that a mistake shows here

    def _objective(self) -> Any:
        raise NotImplementedError

    def _pairs(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None,
        *,
        reference: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
        nll_target: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...], dict[str, Metric]]:
        """-> the loss, Liger's first five metrics, and all by name."""
        vocab = lin_weight.shape[0]
        ids = _labels(target, _input, vocab, self.ignore_index)
        if nll_target is not None:
            nll_target = _labels(nll_target, _input, vocab, self.ignore_index)[: ids.shape[0] // 2]
        objective, ref, chosen = self._objective(), None, ids[: ids.shape[0] // 2]
        # One pass serves both terms if they have the same ids.
        apart = nll_target is not None and bool(((chosen >= 0) & (nll_target >= 0) & (chosen != nll_target)).any())
        if apart:
            objective = replace(objective, nll_coef=0.0)
        if objective.reads_reference:
            if reference[0] is None or reference[1] is None:
                raise ValueError("ref_input and ref_weight must be given with use_ref_model=True")
            ref_input, ref_weight, ref_bias = head_factors(reference[0], reference[1], reference[2])
            ref = ReferenceHead(hidden=ref_input, weight=ref_weight, bias=ref_bias)
        hidden, weight, bias = head_factors(_input, lin_weight, bias)
        loss_fn = FusedLinearPreferenceLoss(objective, reduction=SequenceMean())
        pairs, nll_targets = ids.shape[0] // 2, None if apart else nll_target
        loss, metrics = loss_fn(hidden, weight, ids, reference=ref, nll_targets=nll_targets, bias=bias)
        if apart:
            assert nll_target is not None
            nll, of_nll = FusedLinearCrossEntropyLoss()(hidden[:pairs], weight, nll_target, bias=bias)
            loss, metrics = loss + self._objective().nll_coef * nll, metrics | of_nll
        means = (_sum_of_logits(rows, weight, bias) / (ids.numel() // 2 * vocab) for rows in hidden.split(pairs))
        nll = metrics["nll"].value if self._objective().nll_coef else loss.new_zeros(())
        return loss, (metrics["chosen_logps"].total, metrics["rejected_logps"].total, *means, nll), metrics


def _with_rewards(result: tuple[Tensor, tuple[Tensor, ...], dict[str, Metric]], *more: Tensor) -> tuple[Tensor, tuple]:
    loss, first, metrics = result
    return loss, (*first, *(metrics[name].total for name in ("chosen_rewards", "rejected_rewards")), *more)


@dataclass(eq=False, repr=False)
class LigerFusedLinearCPOLoss(_OfPairs):
    """Drop-in for `liger_kernel.chunked_loss.LigerFusedLinearCPOLoss` 0.8.5: `(loss, metrics)` from hidden states."""

    alpha: float = 1.0
    label_smoothing: float = 0.0
    compute_nll_loss: bool = True
    compiled: bool = True  # no effect
    average_log_prob: bool = False
    chunk_size: int = 1  # no effect

    def _objective(self) -> CPO:
        coef = self.alpha * self.compute_nll_loss
        options: dict[str, Any] = {"beta": self.beta, "label_smoothing": self.label_smoothing, "nll_coef": coef}
        return _CPO(average_log_prob=self.average_log_prob, **options)

    def forward(
        self,
        lin_weight: Tensor,  # (V, H)
        _input: Tensor,  # (B, T, H), first the chosen sequences, then the rejected ones
        target: Tensor,  # (B, T), ignore_index where a token does not count
        bias: Tensor | None = None,  # (V,)
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """-> loss (), and chosen and rejected log-probabilities, means of logits, the NLL, and rewards."""
        return _with_rewards(self._pairs(lin_weight, _input, target, bias))


@dataclass(eq=False, repr=False)
class LigerFusedLinearSimPOLoss(_OfPairs):
    """Drop-in for `liger_kernel.chunked_loss.LigerFusedLinearSimPOLoss` 0.8.5."""

    alpha: float = 1.0
    label_smoothing: float = 0.0
    compute_nll_loss: bool = True
    compiled: bool = True  # no effect
    gamma: float = 0.5
    chunk_size: int = 1  # no effect
    forward = LigerFusedLinearCPOLoss.forward

    def _objective(self) -> CPO:
        coef = self.alpha * self.compute_nll_loss
        options: dict[str, Any] = {"beta": self.beta, "label_smoothing": self.label_smoothing, "nll_coef": coef}
        return _CPO(kind="simpo", simpo_gamma=self.gamma, **options)


@dataclass(eq=False, repr=False)
class LigerFusedLinearORPOLoss(_OfPairs):
    """Drop-in for `liger_kernel.chunked_loss.LigerFusedLinearORPOLoss` 0.8.5."""

    compute_nll_loss: bool = True
    compiled: bool = True  # no effect
    chunk_size: int = 1  # no effect

    def _objective(self) -> ORPO:
        return _ORPO(beta=self.beta, nll_coef=float(self.compute_nll_loss))

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        nll_target: Tensor | None = None,  # (B, T), the chosen rows' ids for the NLL
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """-> as `LigerFusedLinearCPOLoss`, and at the end the means of log odds-ratio and log odds."""
        result = self._pairs(lin_weight, _input, target, bias, nll_target=nll_target)
        means = (result[2][name].total.mean() for name in ("log_odds_ratio", "log_odds_chosen"))
        return _with_rewards(result, *means)


@dataclass(eq=False, repr=False)
class LigerFusedLinearDPOLoss(_OfPairs):
    """Drop-in for `liger_kernel.chunked_loss.LigerFusedLinearDPOLoss` 0.8.5."""

    alpha: float = 1.0
    compute_nll_loss: bool = False
    compiled: bool = True  # no effect
    use_ref_model: bool = True
    average_log_prob: bool = False
    chunk_size: int = 1  # no effect
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05

    def _objective(self) -> DPO:
        return _DPO(
            beta=self.beta,
            nll_coef=self.alpha * self.compute_nll_loss,
            loss_types=(self.loss_type,),
            label_smoothing=self.label_smoothing,
            reference_free=not self.use_ref_model,
            average_log_prob=self.average_log_prob,
            discopop_tau=self.discopop_tau,
        )

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,  # (B, T, H')
        ref_weight: Tensor | None = None,  # (V, H')
        ref_bias: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """-> as `LigerFusedLinearCPOLoss`."""
        return _with_rewards(self._pairs(lin_weight, _input, target, bias, reference=(ref_input, ref_weight, ref_bias)))


@dataclass(eq=False, repr=False)
class LigerFusedLinearKTOLoss(nn.Module):
    """Drop-in for `liger_kernel.chunked_loss.LigerFusedLinearKTOLoss` 0.8.5."""

    ignore_index: int = -100
    beta: float = 0.1
    compiled: bool = True  # no effect
    use_ref_model: bool = False
    average_log_prob: bool = False
    chunk_size: int = 1  # no effect

    def __post_init__(self) -> None:
        super().__init__()
        self._objective()

    def _objective(self) -> KTO:
        return KTO(beta=self.beta, reference_free=not self.use_ref_model, average_log_prob=self.average_log_prob)

    def forward(
        self,
        _input: Tensor,  # (B, T, H)
        lin_weight: Tensor,  # (V, H)
        target: Tensor,  # (B, T)
        bias: Tensor | None = None,
        preference_labels: Tensor | None = None,  # (B,) bool
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        kl: Tensor | None = None,  # () or (B,)
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """-> loss (), and sums over chosen and rejected sequences of log-probabilities, logits and rewards."""
        vocab = lin_weight.shape[0]
        ids, ref = _labels(target, _input, vocab, self.ignore_index), None
        if self.use_ref_model:
            if ref_input is None or ref_weight is None:
                raise ValueError("ref_input and ref_weight must be given with use_ref_model=True")
            ref_input, ref_weight, ref_bias = head_factors(ref_input, ref_weight, ref_bias)
            ref = ReferenceHead(hidden=ref_input, weight=ref_weight, bias=ref_bias)
        hidden, weight, bias = head_factors(_input, lin_weight, bias)
        loss_fn = FusedLinearUnpairedLoss(self._objective(), reduction=SequenceMean())
        labels: Any = preference_labels
        loss, metrics = loss_fn(hidden, weight, ids, labels, reference=ref, kl=0.0 if kl is None else kl, bias=bias)
        sides = hidden[labels], hidden[~labels]
        sums = [_sum_of_logits(rows, weight, bias) for rows in sides]
        of = {name: metric.total for name, metric in metrics.items()}
        logps, rewards = ([of[f"{side}_{name}"] for side in ("chosen", "rejected")] for name in ("logps", "rewards"))
        return loss, (*logps, *sums, *rewards)
