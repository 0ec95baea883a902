"""The loss of a batch of log-probabilities: by one kernel if it knows the formula, else by the formulas themselves.

On a GPU the formulas of `liger_rl.losses` are dozens of small launches each way. `fused_triton` has one kernel for the
published losses in which each token's gradient depends on that token alone. This module decides which of the two runs.
"""

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from liger_rl.kernels.devices import compiles
from liger_rl.kernels.once import differentiable_once
from liger_rl.losses.batch import AlignedBatch
from liger_rl.losses.loss import NOTHING, PolicyLoss, PolicyTerms, PreparedLoss
from liger_rl.losses.metrics import Metric, loss_metrics

DIFFERENTIABLE = ("logps", "entropy", "lse", "mean_logits")  # values of the head
DEVICES = ("cuda",)  # on other devices launches cost little


def evaluate(
    prepared: PreparedLoss,
    logps: Tensor,
    entropy: Tensor | None = None,
    others: Mapping[str, Tensor] = NOTHING,
) -> PolicyLoss:
    """`prepared.evaluate`, differentiable once, for (B, T) or (N,) log-probabilities of the whole batch."""
    kernel = kernel_for(prepared, logps)
    if kernel is None:
        return prepared.evaluate(logps, entropy, others)
    loss, *_, sums = _Launch.apply(logps, prepared, kernel, ("sums",), "active")
    return PolicyLoss(loss, _metrics(prepared, sums, kernel))


@torch.enable_grad()
def with_gradients(
    prepared: PreparedLoss,
    logps: Tensor,
    entropy: Tensor | None,
    others: Mapping[str, Tensor] = NOTHING,
) -> tuple[PolicyLoss, dict[str, Tensor]]:
    """The loss and its gradients by the names of the values; "logps" is always there, others if the loss reads them."""
    values = {"logps": logps, "entropy": entropy, **others}
    leaves = {
        name: x.detach().requires_grad_() for name, x in values.items() if x is not None and name in DIFFERENTIABLE
    }
    read = {name: leaves.get(name, x) for name, x in others.items()}
    result = evaluate(prepared, leaves["logps"], leaves.get("entropy"), read)
    gradients = {"logps": torch.zeros_like(logps)}
    if result.loss.requires_grad:
        found = torch.autograd.grad(result.loss, tuple(leaves.values()), allow_unused=True)
        gradients |= {name: grad for name, grad in zip(leaves, found, strict=True) if grad is not None}
    return result, gradients


def per_token(
    prepared: PreparedLoss, logps: Tensor, clip_indicator: str
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """Unreduced loss, differentiable once, with KL and clip indicator; None without a kernel.

    The batch's columns need not be clean.
    """
    kernel = kernel_of(prepared.terms, prepared.batch)
    if kernel is None:
        return None
    return _Launch.apply(logps, prepared, kernel, ("losses", "kls", "clipped"), clip_indicator)[:3]


class _Launch(torch.autograd.Function):
    """log-probabilities -> loss, KL, clip indicator and sums of the kernel. Only the loss is differentiable."""

    @staticmethod
    def forward(ctx, logps, prepared, kernel, outputs, clip_indicator):
        slopes = ("slopes",) if ctx.needs_input_grad[0] else ()
        out = kernel.launch(prepared, logps, outputs=(*outputs, *slopes), indicator=clip_indicator)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logps, out.slopes)
        constants = out.kls, out.clipped, out.sums
        ctx.mark_non_differentiable(*(column for column in constants if column is not None))
        # A copy of the sum: callers divide the loss in place, which a view does not allow.
        return out.sums[0].clone() if out.losses is None else out.losses, *constants

    @staticmethod
    @differentiable_once
    def backward(ctx, saved, grad, *_):
        _, slopes = saved
        return None if grad is None else grad * slopes, None, None, None, None


def kernel_of(terms: PolicyTerms, batch: AlignedBatch) -> ModuleType | None:
    """`fused_triton`, if it has the formulas of the terms and can read the batch's columns; else None."""
    device = batch.advantages.device
    if device.type not in DEVICES:
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


def kernel_for(prepared: PreparedLoss, logps: Tensor) -> ModuleType | None:
    """`kernel_of` the terms and batch, if it has the metrics and can read these log-probabilities and the weights."""
    kernel, weights = kernel_of(prepared.terms, prepared.batch), prepared.weights
    if kernel is None or not isinstance(weights, Tensor) or weights.requires_grad:
        return None
    if weights.shape != prepared.batch.mask.shape or weights.device != logps.device:
        return None
    if any(tensor.dtype != torch.float32 or type(tensor) is not Tensor for tensor in (logps, weights)):
        return None
    return kernel if prepared.metrics in ("none", "loss") else None


def _metrics(prepared: PreparedLoss, sums: Tensor, kernel: ModuleType) -> dict[str, Metric]:
    """The metrics that `policy_metrics` makes at the level "loss"."""
    penalised, clips = kernel.penalises(prepared), kernel.FORMULAS[type(prepared.terms.objective)].clips
    if prepared.metrics == "none" or not (penalised or clips):
        return {}
    return loss_metrics(prepared.batch.mask.sum(), sums[1] if penalised else None, sums[2:] if clips else None)
