"""liger-kernel's fused linear cross entropy on this package's head and losses: docs/liger.md."""

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from liger_rl.fused_linear.cross_entropy import TargetsAlone, class_smoothing
from liger_rl.fused_linear.loss_module import FusedLinearLoss
from liger_rl.head.checks import check_dense, check_integers, check_shape
from liger_rl.head.record import Head
from liger_rl.integrations.liger.liger_head import make_targets, prepare_head
from liger_rl.kernels.argument_checks import check_choice, check_type
from liger_rl.kernels.public_call import outside_of_graphs
from liger_rl.losses.batch import AlignedBatch, PolicyBatch
from liger_rl.losses.loss import PolicyTerms
from liger_rl.losses.metrics import Metric, MetricsLevel
from liger_rl.losses.objectives import TokenLoss
from liger_rl.losses.reductions import TokenMean, TokenSum
from liger_rl.losses.supervised import CrossEntropy
from liger_rl.models.local_tensors import localize

__all__ = ["LigerFusedLinearCrossEntropyLoss"]

REDUCTIONS: dict[str, Any] = {"mean": TokenMean(), "sum": TokenSum(), "none": None}


class CrossEntropyOutput(NamedTuple):
    """The loss and the requested results; others are None. If liger-kernel is loaded, its own class is returned."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None  # (N,) int64, -1 at ignored tokens


@dataclass(frozen=True, kw_only=True)
class _CrossEntropy(CrossEntropy):
    """Liger's cross entropy: class weights do not multiply the z-loss. With `scaled`, p multiplies both."""

    scaled: bool = False
    returns_predicted: bool = False
    extra_reads: tuple[str, ...] = ()  # other results of the head that become metrics

    @property
    def zero_without_advantage(self) -> bool:  # type: ignore[override]
        return not self.z_loss

    @property
    def topk(self) -> int | None:
        return 1 if self.returns_predicted else None

    def reads(self, level: MetricsLevel) -> set[str]:
        return super().reads("loss") | set(self.extra_reads)

    def __call__(self, logps: Tensor, batch: AlignedBatch) -> TokenLoss:
        z = self.z_term(batch) if self.z_loss else torch.zeros_like(logps)
        loss = batch.advantages * self.compute_loss(logps, batch)
        if self.scaled:
            p = logps.detach().exp()
            z, loss = p * z, p * loss
        values = {"z_loss": z.detach(), "is_top1": batch.is_top1, "topk_ids": batch.topk_ids}
        return TokenLoss(loss + z, metrics=lambda _: {n: Metric(x) for n, x in values.items() if x is not None})


@dataclass(frozen=True, kw_only=True)
class _ClassSmoothed(TargetsAlone, _CrossEntropy):
    pass


@dataclass(eq=False, repr=False)
class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """Drop-in for `liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss` 0.8.5."""

    ce_weight: Tensor | None = None  # (V,)
    ignore_index: int = -100
    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    reduction: str = "mean"
    softcap: float | None = None
    return_z_loss: bool = False
    accum_dtype: torch.dtype | None = None  # no effect: gradients are summed in float32
    use_token_scaling: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        check_type("ignore_index", self.ignore_index, int, "an int")
        if self.ce_weight is not None:
            check_dense("ce_weight", self.ce_weight)
        self._fused()  # checks the options

    @property
    def _smooths_classes(self) -> bool:
        return self.ce_weight is not None and bool(self.label_smoothing)

    def _fused(self) -> FusedLinearLoss:
        check_choice("reduction", self.reduction, REDUCTIONS)
        if self._smooths_classes and self.use_token_scaling:
            raise ValueError("use_token_scaling must be False with ce_weight and label_smoothing together")
        extra_reads = ("is_top1",) * self.return_token_accuracy + ("topk_ids",) * self.return_predicted_tokens
        objective = (_ClassSmoothed if self._smooths_classes else _CrossEntropy)(
            label_smoothing=self.label_smoothing, z_loss=self.lse_square_scale, scaled=self.use_token_scaling,
            returns_predicted=self.return_predicted_tokens, extra_reads=extra_reads,
        )  # fmt: skip
        terms = PolicyTerms(objective=objective, reduction=REDUCTIONS[self.reduction])
        return FusedLinearLoss(terms, "two" if self.reduction == "none" else "auto", {"softcap": self.softcap})

    @outside_of_graphs
    def forward(
        self,
        lin_weight: Tensor,  # (V, H)
        _input: Tensor,  # (N, H)
        target: Tensor,  # (N,), ignore_index where a token does not count
        bias: Tensor | None = None,  # (V,)
    ) -> Tensor | CrossEntropyOutput:
        """The loss: () float32, or (N,) with reduction="none". With further results a `CrossEntropyOutput`."""
        fused, vocab = self._fused(), lin_weight.shape[0]
        local = localize(_input, lin_weight, bias=bias, targets=target)
        check_integers("target", local.targets)
        ids = make_targets(local.targets, vocab, self.ignore_index)
        counted = ids >= 0
        weights = factors = torch.ones(ids.shape[:1], device=ids.device)
        if self.ce_weight is not None:
            check_shape("ce_weight", self.ce_weight, (vocab,), f"(V,) = ({vocab},) from lin_weight")
            weights = torch.where(counted, self.ce_weight.float()[ids.clamp(0, vocab - 1)], 0.0)
            if self.reduction == "mean":
                factors = factors * (counted.sum() / weights.sum())
        hidden, weight, bias = prepare_head(local.hidden, local.weight, local.bias)
        head = Head.of(
            hidden, weight, ids, fused.options, bias=bias, vocab_parallel=local.vocab_parallel, targets_name="target"
        )
        loss, metrics = fused._loss(head, PolicyBatch(advantages=weights * factors))
        if self._smooths_classes:
            batch, classes = PolicyBatch(advantages=factors), cast(Tensor, self.ce_weight).float()
            loss = loss + self.label_smoothing * class_smoothing(head, batch, classes, fused.terms.reduction)
        if not (self.return_z_loss or self.return_token_accuracy or self.return_predicted_tokens):
            return loss

        def reduce(name: str) -> Tensor:
            values = metrics[name].total.float()
            if self.reduction == "none":
                return values
            return values.sum() / counted.sum().clamp(min=1) if self.reduction == "mean" else values.sum()

        accuracy = reduce("is_top1") if self.return_token_accuracy else None
        predicted = None
        if self.return_predicted_tokens:
            predicted = torch.where(counted, metrics["topk_ids"].total[..., 0], -1)
        output = getattr(
            sys.modules.get("liger_kernel.transformers.functional"), "CrossEntropyOutput", CrossEntropyOutput
        )
        return output(
            loss=loss, z_loss=reduce("z_loss") if self.return_z_loss else None, token_accuracy=accuracy,
            predicted_tokens=predicted,
        )  # fmt: skip
