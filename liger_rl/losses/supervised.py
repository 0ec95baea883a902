"""Supervised objectives: log-probabilities of given tokens -> a loss for each token. The advantage is a token's weight.

A token of weight 0 enters no product. docs/formulas.md has the formulas.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from liger_rl.losses.batch import AlignedBatch
from liger_rl.losses.levels import MetricsLevel
from liger_rl.losses.metrics import Metric
from liger_rl.losses.objectives import Scope, TokenLoss
from liger_rl.losses.options import Options


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Options):
    """(1 - label_smoothing) (-logp) + label_smoothing (mean over the ids of -logp) + z_loss lse^2.

    Smoothing is arXiv:1512.00567, z-loss arXiv:2204.02311 section 5 (1e-4 there), with lse = log sum exp of the logits.
    The z-loss of a subclass is the same: only the cross entropy gets its factor.
    """

    label_smoothing: Annotated[float, "[0, 1]"] = 0.0
    z_loss: Annotated[float, "[0, inf)"] = 0.0
    scope: ClassVar[Scope] = "token"
    zero_without_advantage: ClassVar[bool] = True

    def reads(self, level: MetricsLevel) -> set[str]:
        names = {"is_top1"} if level in ("basic", "with_entropy") else set()
        if level == "with_entropy":
            names.add("entropy")
        if self.label_smoothing or self.z_loss:
            names.add("lse")
        if self.label_smoothing:
            names.add("mean_logits")
        return names

    def compute_loss(self, logps: Tensor, batch: AlignedBatch) -> Tensor:
        loss = -logps
        if self.label_smoothing:
            assert batch.lse is not None
            assert batch.mean_logits is not None
            loss = torch.lerp(loss, batch.lse - batch.mean_logits, self.label_smoothing)
        return loss

    def z_term(self, batch: AlignedBatch) -> Tensor:
        assert batch.lse is not None
        return self.z_loss * batch.lse.square()

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        def metrics(level: MetricsLevel) -> dict[str, Metric]:
            counted = batch.mask & (batch.advantages != 0)
            count = counted.sum()

            def mean(values: Tensor) -> Metric:
                return Metric(torch.where(counted, values.detach().to(logps.dtype), 0.0).sum(), count=count)

            means = {"nll": mean(-logps)} | ({"z_loss": mean(self.z_term(batch))} if self.z_loss else {})
            if level != "loss":
                assert batch.is_top1 is not None
                means["accuracy"] = mean(batch.is_top1)
            if level == "with_entropy":
                assert batch.entropy is not None
                means["entropy"] = mean(batch.entropy)
            return means

        loss = self.compute_loss(logps, batch)
        if self.z_loss:
            loss = loss + self.z_term(batch)
        return TokenLoss(batch.advantages * loss, metrics=metrics)


@dataclass(frozen=True, kw_only=True)
class DFT(CrossEntropy):
    """p times the cross entropy, p without gradient. arXiv:2508.05629; TRL's `loss_type="dft"`."""

    def compute_loss(self, logps: Tensor, batch: AlignedBatch) -> Tensor:
        return logps.detach().exp() * super().compute_loss(logps, batch)


@dataclass(frozen=True, kw_only=True)
class EAFT(CrossEntropy):
    """(entropy / eaft_scale)^eaft_alpha times the cross entropy, the entropy without gradient. arXiv:2601.02151.

    The entropy is that of all ids. The default eaft_scale is LLaMA-Factory's, about log 20; Axolotl's is 1. Both
    take the entropy of the 20 likeliest ids, whose probabilities are scaled to sum to 1.
    """

    eaft_alpha: Annotated[float, "[0, inf)"] = 1.0
    eaft_scale: Annotated[float, "(0, inf)"] = 3.0

    def reads(self, level: MetricsLevel) -> set[str]:
        return super().reads(level) | {"entropy"}

    def compute_loss(self, logps: Tensor, batch: AlignedBatch) -> Tensor:
        assert batch.entropy is not None
        return (batch.entropy / self.eaft_scale).pow(self.eaft_alpha) * super().compute_loss(logps, batch)
