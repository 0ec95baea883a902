"""GRPO loss of given logits as two Helion kernels: one pass over the vocabulary for the loss, one for the gradient.

A peer of `benchmark.row_losses`, not of `benchmark.run`: it starts from logits and not from a head. What it computes is
what Helion's published example does: per-token outputs without a reduction, a token counts as clipped where
r A < clip(r) A, and padding is computed like any other token before it is set to 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

try:
    import helion
    import helion.language as hl
except ImportError as error:
    helion = hl = None
    IMPORT_ERROR: str | None = f"helion cannot be imported: {error}"
else:
    IMPORT_ERROR = None


def available() -> str | None:
    """Why the kernels cannot run here, None if they can."""
    return IMPORT_ERROR


@dataclass(frozen=True, kw_only=True)
class Options:
    """The example's own defaults."""

    temperature: float = 0.9
    eps_low: float = 0.2
    eps_high: float = 0.4
    beta: float = 0.04


class RowLosses(NamedTuple):
    """(B, L) each, 0 at masked tokens."""

    loss: Tensor
    """float32, differentiable with respect to the logits."""
    kl: Tensor | None
    """float32, None without reference log-probabilities."""
    is_clipped: Tensor
    """bool, r A < clip(r) A."""


def loss_rows(
    logits: Tensor,  # (B, L + 1, V), read through its strides
    selected: Tensor,  # (B, L) float32, logits of the chosen tokens
    old: Tensor,  # (B, L)
    ref: Tensor | None,  # (B, L); with None the kernel is compiled without a penalty
    advantages: Tensor,  # (B,)
    mask: Tensor,  # (B, L) bool
    temperature: float,
    eps_low: float,
    eps_high: float,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> loss, kl, is_clipped, log-sum-exp and d loss / d logp, (B, L) each."""
    batch, length = selected.shape
    vocab = hl.specialize(logits.size(2))
    inverse = 1.0 / temperature
    loss = torch.empty([batch, length], dtype=torch.float32, device=logits.device)
    kl = torch.empty_like(loss)
    clipped = torch.empty([batch, length], dtype=torch.bool, device=logits.device)
    lse = torch.empty_like(loss)
    slope = torch.empty_like(loss)
    for tile_b, tile_t in hl.tile([batch, length]):
        peak = hl.full([tile_b, tile_t], float("-inf"), dtype=torch.float32)
        total = hl.zeros([tile_b, tile_t], dtype=torch.float32)
        for tile_v in hl.tile(vocab):
            z = logits[tile_b, tile_t, tile_v].to(torch.float32) * inverse
            raised = torch.maximum(peak, torch.amax(z, dim=-1))
            total = total * torch.exp(peak - raised) + torch.exp(z - raised[:, :, None]).sum(dim=-1)
            peak = raised
        log_total = peak + torch.log(total)
        lse[tile_b, tile_t] = log_total

        counted = mask[tile_b, tile_t]
        advantage = advantages[tile_b].to(torch.float32)[:, None]
        logp = selected[tile_b, tile_t] * inverse - log_total
        ratio = torch.exp(logp - old[tile_b, tile_t])
        free = ratio * advantage
        bounded = torch.clamp(ratio, 1 - eps_low, 1 + eps_high) * advantage
        value = -torch.minimum(free, bounded)
        derivative = torch.where(free <= bounded, -free, 0.0)
        if ref is not None:
            away = ref[tile_b, tile_t] - logp
            grown = torch.exp(away)
            penalty = grown - away - 1
            value = value + beta * penalty
            derivative = derivative + beta * (1 - grown)
            kl[tile_b, tile_t] = torch.where(counted, penalty, 0.0)
        loss[tile_b, tile_t] = torch.where(counted, value, 0.0)
        slope[tile_b, tile_t] = torch.where(counted, derivative, 0.0)
        clipped[tile_b, tile_t] = counted & (free < bounded)
    return loss, kl, clipped, lse, slope


def gradient_rows(
    logits: Tensor,  # (B, L + 1, V)
    ids: Tensor,  # (B, L)
    lse: Tensor,  # (B, L)
    slope: Tensor,  # (B, L), d objective / d logp
    mask: Tensor,  # (B, L) bool
    temperature: float,
) -> Tensor:
    """-> (B, L + 1, V) gradient in the logits' dtype; its last position is left unwritten."""
    batch, length = ids.shape
    vocab = hl.specialize(logits.size(2))
    inverse = 1.0 / temperature
    grad = torch.empty_like(logits)
    for tile_b, tile_t in hl.tile([batch, length]):
        chosen = ids[tile_b, tile_t][:, :, None]
        log_total = lse[tile_b, tile_t][:, :, None]
        scale = (slope[tile_b, tile_t] * inverse)[:, :, None]
        counted = mask[tile_b, tile_t][:, :, None]
        for tile_v in hl.tile(vocab):
            z = logits[tile_b, tile_t, tile_v].to(torch.float32) * inverse
            probability = torch.exp(z - log_total)
            one_hot = torch.where(tile_v.index[None, None, :] == chosen, 1.0, 0.0)
            # By selection: a masked token's logits may be infinite.
            values = torch.where(counted, scale * (one_hot - probability), 0.0)
            grad[tile_b, tile_t, tile_v] = values.to(grad.dtype)
    return grad


# One row per program and a few thousand logits at a time: both kernels wait for memory, so little else matters.
CONFIGS: dict[Callable[..., Any], dict[str, Any]] = {
    loss_rows: {"block_sizes": [1, 1, 4096], "num_warps": 8, "num_stages": 2},
    gradient_rows: {"block_sizes": [1, 1, 4096], "num_warps": 8, "num_stages": 2},
}


def _kernels(ref_mode: "helion.RefMode") -> dict[Callable[..., Any], Callable[..., Any]]:
    # static_shapes=False: one compilation serves every batch. A config given here is used as it is, without a search.
    return {
        body: helion.kernel(body, config=helion.Config(**config), static_shapes=False, ref_mode=ref_mode)
        for body, config in CONFIGS.items()
    }


if helion is not None:
    COMPILED = _kernels(helion.RefMode.OFF)
    # What HELION_INTERPRET=1 asks for, but by the device of the logits: helion refuses the variable next to
    # TRITON_INTERPRET=1, which other kernels need on CPU.
    INTERPRETED = _kernels(helion.RefMode.EAGER)


class HelionRows(torch.autograd.Function):
    """(logits, ...) -> (loss, kl, is_clipped) per token."""

    @staticmethod
    def forward(ctx, logits, ids, old, ref, advantages, mask, options):
        selected = logits[:, :-1].gather(-1, ids.clamp(min=0)[..., None]).squeeze(-1).float()
        loss, kl, clipped, lse, slope = _kernels_for(logits)[loss_rows](
            logits, selected, old, ref, advantages, mask,
            options.temperature, options.eps_low, options.eps_high, options.beta,
        )  # fmt: skip
        ctx.options = options
        ctx.save_for_backward(logits, ids, lse, slope, mask)
        kl = None if ref is None else kl
        ctx.mark_non_differentiable(*(output for output in (kl, clipped) if output is not None))
        return loss, kl, clipped

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, grad_kl, grad_clipped):
        logits, ids, lse, slope, mask = ctx.saved_tensors
        grad = _kernels_for(logits)[gradient_rows](logits, ids, lse, slope * grad_loss, mask, ctx.options.temperature)
        grad[:, -1] = 0
        return grad, None, None, None, None, None, None


def _kernels_for(logits: Tensor) -> dict[Callable[..., Any], Callable[..., Any]]:
    return COMPILED if logits.is_cuda else INTERPRETED


def helion_grpo_loss(
    logits: Tensor,  # (B, L + 1, V)
    ids: Tensor,  # (B, L)
    old: Tensor,  # (B, L)
    ref: Tensor | None,  # (B, L), needed unless beta is 0
    advantages: Tensor,  # (B,)
    mask: Tensor,  # (B, L)
    options: Options = Options(),
) -> RowLosses:
    """Per-token loss, KL and clip indicator; the logits get a gradient in their own dtype."""
    if IMPORT_ERROR:
        raise RuntimeError(IMPORT_ERROR)
    if (ref is None) != (options.beta == 0.0):
        raise ValueError(f"ref must be given exactly when beta is not 0, got {ref is not None} and {options.beta}")
    return RowLosses(*HelionRows.apply(logits, ids, old, ref, advantages, mask != 0, options))
