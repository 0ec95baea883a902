"""Per-token losses of given logits: one kernel for the rows of logits, one for the loss.

The second kernel also makes d loss / d logp in the forward, which is one number per token where tokens do not depend on
each other. The backward is then the kernel of the rows.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.given_logits.rows import fold_rows, grad_rows
from liger_rl.kernels.statistics import TokenStatistics
from liger_rl.once import differentiable_once
from liger_rl.policy.batch import AlignedBatch
from liger_rl.policy.loss import PreparedLoss
from liger_rl.policy.objectives import TokenLoss

ClipIndicator = Callable[[TokenLoss, AlignedBatch], Tensor | None]


class PerTokenLoss(NamedTuple):
    """(B, T) or (N,) each, 0 at masked tokens."""

    loss: Tensor
    """float32, differentiable."""
    kl: Tensor | None
    """float32 in nats, without gradient; None without a KL penalty."""
    is_clipped: Tensor | None
    """bool, by the chosen indicator; None where the objective does not clip."""


def per_token_loss(prepared: PreparedLoss, logps: Tensor, indicator: ClipIndicator) -> PerTokenLoss:
    """(B, T) or (N,) log-probabilities -> what a caller gets, by the formulas."""
    result = prepared.per_token(logps)
    with torch.no_grad():
        mask = prepared.batch.mask
        clipped = indicator(result.token_loss, prepared.batch)
        kl = None if result.kl is None else torch.where(mask, result.kl.detach(), 0.0)
        return PerTokenLoss(result.loss, kl, None if clipped is None else clipped & mask)


class LogitLoss(torch.autograd.Function):
    """(logits, ids, mask) -> PerTokenLoss, by the kernel of a loss whose columns are not cleaned; a gradient for the
    logits."""

    @staticmethod
    def forward(ctx, logits, ids, mask, kernel, prepared, indicator, options, raise_if_outside):
        ctx.set_materialize_grads(False)
        ctx.options, ctx.raise_if_outside = options, raise_if_outside
        statistics = fold_rows(logits, ids, mask, options)
        # +inf where the token does not count, and nowhere else: a row with an infinity or NaN gives -inf or NaN.
        counted = (statistics.lse != math.inf).view(ids.shape)
        prepared = prepared._replace(batch=replace(prepared.batch, mask=counted))
        found = kernel.launch_per_token(prepared, statistics.logps, indicator)
        ctx.save_for_backward(logits, ids, mask, statistics.logps, statistics.lse, found.slopes)
        ctx.mark_non_differentiable(*(part for part in (found.kls, found.clipped) if part is not None))
        return found.losses, found.kls, found.clipped

    @staticmethod
    @differentiable_once
    def backward(ctx, saved, grad_loss, *_):
        nothing = (None,) * 7
        if grad_loss is None:
            return None, *nothing
        logits, ids, mask, logps, lse, slopes = saved
        known = TokenStatistics(logps, lse, None)
        grad_logps = (grad_loss * slopes).flatten()
        grad = grad_rows(logits, ids, mask, known, grad_logps, None, ctx.options)
        # Last, because the device has work queued while the host waits.
        ctx.raise_if_outside()
        return grad, *nothing
