"""The loss of a batch of log-probabilities: by one kernel if it knows the formula, else by the formulas themselves.

On a GPU the formulas of `liger_rl.losses` are dozens of small launches each way. `fused_triton` has one kernel for the
published losses in which each token's gradient depends on that token alone. This module decides which of the two runs.
"""

from types import ModuleType

import torch
from torch import Tensor

from liger_rl.kernels.devices import compiles
from liger_rl.losses.batch import AlignedBatch
from liger_rl.losses.loss import PolicyLoss, PolicyTerms, PreparedLoss
from liger_rl.losses.metrics import Metric
from liger_rl.once import differentiable_once

DEVICES = ("cuda",)  # on other devices launches cost little


def evaluate(
    prepared: PreparedLoss, per_token_logps: Tensor, entropy: Tensor | None = None, exact_kl: Tensor | None = None
) -> PolicyLoss:
    """`prepared.evaluate`, differentiable once, for (B, T) or (N,) log-probabilities of the whole batch."""
    kernel = _kernel_for(prepared, per_token_logps, sums=True)
    if kernel is None:
        return prepared.evaluate(per_token_logps, entropy, exact_kl)
    if torch.is_grad_enabled() and per_token_logps.requires_grad:
        loss, sums = _WithSlopes.apply(per_token_logps, prepared, kernel)
    else:
        _, sums = kernel.launch(prepared, per_token_logps, slopes=False, sums=True)
        loss = sums[0]
    return PolicyLoss(loss, _metrics(prepared, sums, kernel))


def evaluate_with_slopes(prepared: PreparedLoss, logps: Tensor) -> tuple[PolicyLoss, Tensor] | None:
    """The loss, without gradient, and d loss / d logp, shaped like the log-probabilities; None without a kernel."""
    kernel = _kernel_for(prepared, logps, sums=True)
    if kernel is None:
        return None
    slopes, sums = kernel.launch(prepared, logps, slopes=True, sums=True)
    return PolicyLoss(sums[0], _metrics(prepared, sums, kernel)), slopes


def slopes(prepared: PreparedLoss, positions: Tensor | slice, logps: Tensor) -> Tensor | None:
    """(n,) d loss / d logp of the tokens at flat positions of the batch; None without a kernel."""
    kernel = _kernel_for(prepared, logps, sums=False)
    return None if kernel is None else kernel.launch(prepared, logps, positions, slopes=True, sums=False)[0]


def per_token(
    prepared: PreparedLoss, logps: Tensor, clip_indicator: str
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """Unreduced loss, differentiable once, with KL and clip indicator; None without a kernel.

    The batch's columns need not be clean.
    """
    kernel = kernel_of(prepared.terms, prepared.batch)
    return None if kernel is None else _PerToken.apply(logps, prepared, kernel, clip_indicator)


class _PerToken(torch.autograd.Function):
    """log-probabilities -> the three columns of `per_token`."""

    @staticmethod
    def forward(ctx, logps, prepared, kernel, clip_indicator):
        ctx.set_materialize_grads(False)
        columns = kernel.launch_per_token(prepared, logps, clip_indicator)
        ctx.save_for_backward(logps, columns.slopes)
        ctx.mark_non_differentiable(*(column for column in (columns.kls, columns.clipped) if column is not None))
        return columns.losses, columns.kls, columns.clipped

    @staticmethod
    @differentiable_once
    def backward(ctx, saved, grad_loss, *_):
        _, slopes = saved
        return None if grad_loss is None else grad_loss * slopes, None, None, None


class _WithSlopes(torch.autograd.Function):
    """log-probabilities -> loss (), and the kernel's sums without gradient."""

    @staticmethod
    def forward(ctx, logps, prepared, kernel):
        slopes, sums = kernel.launch(prepared, logps, slopes=True, sums=True)
        ctx.save_for_backward(logps, slopes)
        ctx.mark_non_differentiable(sums)
        return sums[0].clone(), sums  # callers divide the loss in place, which a view does not allow

    @staticmethod
    @differentiable_once
    def backward(ctx, saved, grad, _):
        _, slopes = saved
        return grad * slopes, None, None


def kernel_of(terms: PolicyTerms, batch: AlignedBatch) -> ModuleType | None:
    """`fused_triton`, if it has the formulas of the terms and can read the batch's columns; else None."""
    device = batch.advantages.device
    if device.type not in DEVICES or torch.compiler.is_compiling():
        return None
    if device.type == "cuda" and not compiles(device):
        return None
    if terms.locality != "token" or terms.corrections or terms.entropy_bonus.entropy_coef != 0.0:
        return None
    columns = (batch.advantages, batch.old_per_token_logps, batch.ref_per_token_logps, batch.importance_ratio)
    # A subclass of Tensor, such as a DTensor, has no memory for a kernel to read.
    if any(column is not None and type(column) is not Tensor for column in columns):
        return None
    from liger_rl.losses import fused_triton

    return fused_triton if fused_triton.knows(terms) else None


def _kernel_for(prepared: PreparedLoss, logps: Tensor, *, sums: bool) -> ModuleType | None:
    """`kernel_of` the terms and batch, if it can also read these log-probabilities and the weights."""
    kernel, weights = kernel_of(prepared.terms, prepared.batch), prepared.weights
    if kernel is None or not isinstance(weights, Tensor) or weights.requires_grad:
        return None
    if weights.shape != prepared.batch.mask.shape or weights.device != logps.device:
        return None
    if any(tensor.dtype != torch.float32 or type(tensor) is not Tensor for tensor in (logps, weights)):
        return None
    return None if sums and prepared.terms.metrics not in ("none", "loss") else kernel


def _metrics(prepared: PreparedLoss, sums: Tensor, kernel: ModuleType) -> dict[str, Metric]:
    """The metrics that `policy_metrics` makes at the level "loss"."""
    totals: dict[str, Tensor] = {}
    if prepared.terms.metrics != "none":
        kl_ref, *clipped = sums[1:].unbind()
        totals |= {"kl_ref": kl_ref} if kernel.penalises(prepared) else {}
        if kernel.clips(prepared.terms):
            totals |= dict(zip(("clip_low", "clip_high", "clip_ratio"), clipped, strict=True))
    count = prepared.batch.mask.sum() if totals else None
    return {name: Metric(total, count=count) for name, total in totals.items()}
