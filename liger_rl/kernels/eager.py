"""Fold and gradient of a tile of logits in plain PyTorch, for CPU and any device without Triton.

Formulas, with z the transformed logits and p = exp(z - lse):

    logp = z_y - lse,  entropy = lse - sum_v p_v z_v
    dL/dz_v = dL/dlogp (1[v=y] - p_v) - dL/dentropy p_v (log p_v + entropy)
"""

import math

import torch
from torch import Tensor

from liger_rl.kernels.statistics import Fold, TokenGradients
from liger_rl.kernels.transform import LogitTransform

# exp(-200) is 0 in float32, so nothing is lost, and 0 * -200 is 0 where 0 * -inf (a banned id) is NaN.
LOWEST_LOG_PROBABILITY = -200.0


def fold(
    logits: Tensor,  # (n, v) any float dtype
    targets: Tensor,  # (n,) token ids of the whole vocabulary
    first: int,  # vocabulary id of the tile's first column
    bias: Tensor | None,  # (v,)
    transform: LogitTransform,
    state: Fold,  # (n,) each, updated in place
) -> None:
    z = transformed(logits, bias, transform)
    peak = torch.maximum(state.peak, z.amax(-1))
    kept = (state.peak - peak).exp_()
    shifted = z - peak[:, None]
    column, hit = _target_column(targets, first, z.shape[-1])
    if state.sum_logits is not None:
        state.sum_logits.add_(z.sum(-1))
    if state.rival is not None:
        before = torch.arange(first, first + z.shape[-1], device=z.device) < targets[:, None]
        torch.maximum(state.rival, torch.where(before, z, -math.inf).amax(-1), out=state.rival)
    if state.moment is None:
        exp = shifted.exp_()
    else:
        shifted.clamp_(min=LOWEST_LOG_PROBABILITY)
        exp = shifted.exp()
        moment = state.moment + (state.peak - peak) * state.sum_exp
        state.moment.copy_(kept * moment + (exp * shifted).sum(-1))
    state.sum_exp.mul_(kept).add_(exp.sum(-1))
    if state.sum_sq_exp is not None:
        state.sum_sq_exp.mul_(kept.square()).add_(exp.square().sum(-1))
    state.peak.copy_(peak)
    state.target.copy_(torch.where(hit, z.gather(-1, column[:, None]).squeeze(-1), state.target))


def grad(
    logits: Tensor,  # as in fold
    targets: Tensor,
    first: int,
    bias: Tensor | None,
    transform: LogitTransform,
    tokens: TokenGradients,  # (n,) each
    out: Tensor,  # shaped like logits, any float dtype, may be the logits themselves
) -> None:
    z = transformed(logits, bias, transform)
    log_p, at_target = z - tokens.lse[:, None], tokens.at_target
    if tokens.grad_entropy is None or tokens.entropy is None:
        p = log_p.exp_()
    else:
        p = log_p.clamp_(min=LOWEST_LOG_PROBABILITY).exp()
        column = _target_column(targets, first, z.shape[-1])[0][:, None]
        p_there, log_p_there = (values.gather(-1, column).squeeze(-1) for values in (p, log_p))
        at_target = at_target - p_there * ((log_p_there + tokens.entropy) * tokens.grad_entropy)
    grad_z = grad_beside_targets(log_p, p, tokens)
    put_at_targets(grad_z, at_target, targets, first)
    out.copy_(times_derivative(grad_z, z, transform))


def grad_beside_targets(
    log_p: Tensor,  # (n, v) read and overwritten for a gradient of the entropy alone; finite
    p: Tensor,  # (n, v) overwritten
    tokens: TokenGradients,  # (n,) each
) -> Tensor:
    """-> dL/dz (n, v) in float32, wrong at the targets."""
    if tokens.grad_entropy is None or tokens.entropy is None:
        return p.mul_(-tokens.grad_logps[:, None])
    # g + e (log p + entropy), then times -p: one temporary less than the two terms apart.
    grad_z = log_p.add_(tokens.entropy[:, None]).mul_(tokens.grad_entropy[:, None])
    return grad_z.add_(tokens.grad_logps[:, None]).mul_(p).neg_()


def put_at_targets(grad: Tensor, at_target: Tensor, targets: Tensor, first: int) -> None:
    """grad (n, v) = at_target (n,) in the targets' columns, for targets in [first, first + v)."""
    column, hit = _target_column(targets, first, grad.shape[-1])
    beside = grad.gather(-1, column[:, None]).squeeze(-1)
    grad.scatter_(-1, column[:, None], torch.where(hit, at_target, beside)[:, None])


def entropy_term(log_p: Tensor, entropy: Tensor) -> Tensor:
    """p (log p + entropy), which is 0 for a banned id: exp(-inf) times -inf would be NaN."""
    log_p = log_p.clamp(min=LOWEST_LOG_PROBABILITY)
    return log_p.exp() * (log_p + entropy)


def target_gradient(tokens: TokenGradients, logps: Tensor) -> Tensor:
    """(n,) dL/dz at the target."""
    if tokens.grad_entropy is None or tokens.entropy is None:
        return tokens.at_target
    return tokens.at_target - tokens.grad_entropy * entropy_term(logps, tokens.entropy)


def _target_column(targets: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """-> column of the target in the tile, clamped into it, and whether it is really there."""
    column = targets - first
    return column.clamp(0, width - 1), (column >= 0) & (column < width)


def transformed(logits: Tensor, bias: Tensor | None, transform: LogitTransform) -> Tensor:
    """z in float32; may be `logits` itself, so the caller must not write to it."""
    x = logits.float()
    if bias is not None:
        x = x + bias.float()
    z = x
    if transform.softcap is not None:
        z = (x * (transform.scale / transform.softcap)).tanh_().mul_(transform.softcap)
    elif transform.scale != 1.0:
        z = x * transform.scale
    if isinstance(transform.temperature, Tensor):
        return z / transform.temperature[:, None]
    return z if transform.temperature == 1.0 else z / transform.temperature


def tanh_square(z: Tensor, transform: LogitTransform) -> Tensor:
    """tanh^2 of transformed logits z under a softcap."""
    assert transform.softcap is not None
    heat = transform.temperature / transform.softcap
    return (z * (heat[:, None] if isinstance(heat, Tensor) else heat)).square_()


def times_derivative(grad_z: Tensor, z: Tensor, transform: LogitTransform) -> Tensor:
    """dL/dx in the memory of grad_z: dz/dx = scale / temperature (1 - tanh^2)."""
    if transform.softcap is not None:
        grad_z.mul_(tanh_square(z, transform).neg_().add_(1.0))
    factor = transform.scale / transform.temperature
    if isinstance(factor, Tensor):
        return grad_z.mul_(factor[:, None])
    return grad_z if factor == 1.0 else grad_z.mul_(factor)
