"""What a training loop wants to see of a step, from vectors that are there anyway; 0-dim tensors, never synced."""

import torch
from torch import Tensor

from liger_rl.policy.batch import AlignedBatch
from liger_rl.policy.objectives import TokenLoss


@torch.no_grad()
def loss_metrics(token_loss: TokenLoss, kl: Tensor | None, batch: AlignedBatch) -> dict[str, Tensor]:
    """Means over the tokens that count, float32 without gradient.

    `kl_ref`: KL to the reference in nats, when there is a penalty. `clip_low`, `clip_high`, `clip_ratio`: share of
    tokens whose gradient is cut at the lower bound, the upper one, either; when the objective clips.
    """
    mask = batch.mask
    count = mask.sum().clamp(min=1)

    def mean(values: Tensor) -> Tensor:
        return torch.where(mask, values.float(), 0.0).sum() / count

    metrics = {}
    if kl is not None:
        metrics["kl_ref"] = mean(kl)
    if token_loss.clip_low is not None:
        metrics["clip_low"] = mean(token_loss.clip_low)
    if token_loss.clip_high is not None:
        metrics["clip_high"] = mean(token_loss.clip_high)
    if token_loss.clip_low is not None and token_loss.clip_high is not None:
        metrics["clip_ratio"] = mean(token_loss.clip_low | token_loss.clip_high)
    return metrics
