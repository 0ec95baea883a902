"""A head and a loss in one module."""

from liger_rl.fused_linear.cross_entropy import FusedLinearCrossEntropyLoss
from liger_rl.fused_linear.from_logits import grpo_loss_from_logits
from liger_rl.fused_linear.grpo import FusedLinearGRPOLoss
from liger_rl.fused_linear.preference_loss import FusedLinearPreferenceLoss, FusedLinearUnpairedLoss, ReferenceHead

__all__ = [
    "FusedLinearCrossEntropyLoss",
    "FusedLinearGRPOLoss",
    "FusedLinearPreferenceLoss",
    "FusedLinearUnpairedLoss",
    "ReferenceHead",
    "grpo_loss_from_logits",
]
