"""The policy loss on per-token log-probabilities: objective, corrections, penalty, reduction."""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.policy.batch import AlignedBatch, PolicyBatch
from liger_rl.policy.metrics import loss_metrics
from liger_rl.policy.objectives import Objective
from liger_rl.policy.penalties import KLPenalty
from liger_rl.policy.reductions import Reduction

NO_PENALTY = KLPenalty()


class PolicyLoss(NamedTuple):
    """A loss to call backward on, and what to log of it."""

    loss: Tensor
    """() in float32; with reduction=None per token, shaped like the log-probabilities, 0 at masked tokens."""
    metrics: dict[str, Tensor]
    """0-dim float32 tensors by name, without gradient; see `liger_rl.policy.metrics`."""


def ppo_loss_fn(
    per_token_logps: Tensor,
    batch: PolicyBatch,
    objective: Objective,
    reduction: Reduction | None,
    *,
    kl: KLPenalty = NO_PENALTY,
) -> PolicyLoss:
    """sum_t weight_t (importance_ratio_t objective_t + beta kl_t) over the tokens that count.

    Args:
        per_token_logps: (B, T) or packed (N,) log-probabilities in nats under the current policy, with gradient.
        batch: the other columns.
        objective: callable (logps, batch) -> TokenLoss, such as `PPOClip()` or your own.
        reduction: callable (batch) -> one weight per token, such as `SequenceMean()`; None leaves tokens unreduced.
        kl: penalty for leaving the reference policy.

    Raises:
        TypeError, ValueError: columns that do not fit together, or a KL penalty without a reference.
    """
    if not isinstance(per_token_logps, Tensor) or not per_token_logps.is_floating_point():
        kind = per_token_logps.dtype if isinstance(per_token_logps, Tensor) else type(per_token_logps).__name__
        raise TypeError(f"per_token_logps must be a floating tensor, got {kind}")
    dtype = torch.promote_types(per_token_logps.dtype, torch.float32)
    terms = PolicyTerms.prepare(batch, reduction, kl, per_token_logps.shape, per_token_logps.device, dtype)
    return terms.loss(per_token_logps.to(dtype), objective)


class PolicyTerms(NamedTuple):
    """All of a loss that does not depend on the log-probabilities, checked before they are computed."""

    batch: AlignedBatch
    weights: Tensor | None  # one per token; None leaves tokens unreduced
    kl: KLPenalty

    @classmethod
    def prepare(
        cls,
        batch: PolicyBatch,
        reduction: Reduction | None,
        kl: KLPenalty,
        shape: torch.Size,
        device: torch.device,
        dtype: torch.dtype,
    ) -> "PolicyTerms":
        kl.check(batch)
        aligned = batch.align(shape, device, dtype)
        return cls(aligned, None if reduction is None else reduction(aligned), kl)

    def loss(self, per_token_logps: Tensor, objective: Objective) -> PolicyLoss:
        batch, mask = self.batch, self.batch.mask
        # `where` and not a product: a masked NaN stays out of the value and of the gradient.
        logps = torch.where(mask, per_token_logps, 0.0)
        token_loss = objective(logps, batch)
        loss = token_loss.loss
        if batch.importance_ratio is not None:
            loss = loss * batch.importance_ratio
        kl_per_token = self.kl(logps, batch)
        if kl_per_token is not None:
            loss = loss + self.kl.beta * kl_per_token
        loss = torch.where(mask, loss, 0.0)
        if self.weights is not None:
            loss = (loss * self.weights).sum()
        return PolicyLoss(loss, loss_metrics(token_loss, kl_per_token, batch))
