"""Evaluates a loss by one kernel if there is one, else by its formulas.

On a GPU the formulas of `liger_rl.losses` are dozens of small launches each way. `fused_triton` is one launch. It has
the published losses in which a token's gradient depends on that token alone.
"""

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from liger_rl.kernels.devices import runs_triton
from liger_rl.kernels.public_call import refuse_second_derivative
from liger_rl.losses.loss import NOTHING, PolicyLoss, PreparedLoss
from liger_rl.losses.metrics import Metric, loss_metrics


def evaluate(
    prepared: PreparedLoss,
    logps: Tensor,
    entropy: Tensor | None = None,
    others: Mapping[str, Tensor] = NOTHING,
) -> PolicyLoss:
    """`prepared.evaluate` of (B, T) or (N,) log-probabilities, differentiable once."""
    prepared = prepared.correct_sampler(logps)
    kernel = find_kernel(prepared, logps)
    if kernel is None:
        return prepared.evaluate(logps, entropy, others)
    loss, *_, sums = _Launch.apply(logps, prepared, kernel, ("sums",))
    return PolicyLoss(loss, _metrics(prepared, sums, kernel))


def per_token(prepared: PreparedLoss, logps: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """Unreduced loss, differentiable once, KL and clip indicator; None if there is no kernel.

    Masked entries of the columns may have any value.
    """
    kernel = find_kernel(prepared, logps, reduces=False)
    if kernel is None:
        return None
    return _Launch.apply(logps, prepared, kernel, ("losses", "kls", "clipped"))[:3]


class _Launch(torch.autograd.Function):
    """log-probabilities -> loss, KL, clip indicator and sums of the kernel. Only the loss is differentiable."""

    @staticmethod
    def forward(ctx, logps, prepared, kernel, outputs):
        slopes = ("slopes",) if ctx.needs_input_grad[0] else ()
        out = kernel.launch(prepared, logps, outputs=(*outputs, *slopes))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out.slopes)
        constants = out.kls, out.clipped, out.sums
        ctx.mark_non_differentiable(*(column for column in constants if column is not None))
        # A copy of the sum: callers divide the loss in place, which a view does not allow.
        return out.sums[0].clone() if out.losses is None else out.losses, *constants

    @staticmethod
    def backward(ctx, grad, *_):
        refuse_second_derivative()
        (slopes,) = ctx.saved_tensors
        return None if grad is None else grad * slopes, None, None, None


def find_kernel(prepared: PreparedLoss, logps: Tensor, *, reduces: bool = True) -> ModuleType | None:
    """`fused_triton`, if it has the formulas of the loss and can read its tensors; else None.

    If it `reduces` the losses of the tokens, it needs one float32 weight for each, and makes no metric above "loss".
    """
    device, terms, batch, weights = logps.device, prepared.terms, prepared.batch, prepared.weights
    if not runs_triton(device):
        return None
    if terms.scope != "token" or terms.corrections or terms.entropy_bonus.entropy_coef != 0.0:
        return None
    columns = [batch.advantages, batch.old_per_token_logps, batch.ref_per_token_logps, batch.importance_ratio]
    if reduces:
        if not isinstance(weights, Tensor) or weights.requires_grad or weights.shape != batch.mask.shape:
            return None
        if weights.device != device or not weights.dtype == logps.dtype == torch.float32:
            return None
        if prepared.metrics not in ("none", "loss"):
            return None
        columns += [logps, weights]
    # A subclass of Tensor, such as a DTensor, has no memory for a kernel to read.
    if any(column is not None and type(column) is not Tensor for column in columns):
        return None
    from liger_rl.losses import fused_triton

    return fused_triton if fused_triton.has_formulas(terms) else None


def _metrics(prepared: PreparedLoss, sums: Tensor, kernel: ModuleType) -> dict[str, Metric]:
    """The metrics that `policy_metrics` makes at the level "loss"."""
    penalised, clips = kernel.has_penalty(prepared), kernel.FORMULAS[type(prepared.terms.objective)].clips
    if prepared.metrics == "none" or not (penalised or clips):
        return {}
    return loss_metrics(prepared.batch.mask.sum(), sums[1] if penalised else None, sums[2:] if clips else None)
