"""GRPO and its relatives from logits that a caller already holds: per-token loss, KL and clip indicator, unreduced."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_rl.kernels.transform import LogitTransform
from liger_rl.logprobs import logits_logprobs
from liger_rl.policy.batch import AlignedBatch, PolicyBatch
from liger_rl.policy.loss import PolicyTerms
from liger_rl.policy.objectives import TokenLoss
from liger_rl.policy.presets import build_preset
from liger_rl.policy.segments import Segments


class PerTokenLoss(NamedTuple):
    """(B, T) or (N,) each, 0 at masked tokens."""

    loss: Tensor
    """float32, differentiable."""
    kl: Tensor | None
    """float32 in nats, without gradient; None without a KL penalty."""
    is_clipped: Tensor | None
    """bool, by the chosen indicator; None where the objective does not clip."""


def _active(token_loss: TokenLoss, batch: AlignedBatch) -> Tensor | None:
    if token_loss.clip_low is None or token_loss.clip_high is None:
        return None
    return token_loss.clip_low | token_loss.clip_high


def _range(token_loss: TokenLoss, batch: AlignedBatch) -> Tensor | None:
    return token_loss.outside


def _helion(token_loss: TokenLoss, batch: AlignedBatch) -> Tensor | None:
    # r A < clip(r) A: the ratio lies outside on the side that the sign of A does not cut.
    active = _active(token_loss, batch)
    if active is None or token_loss.outside is None:
        return None
    return token_loss.outside & ~active & (batch.advantages != 0)


CLIP_INDICATORS: dict[str, Callable[[TokenLoss, AlignedBatch], Tensor | None]] = {
    "active": _active,
    "range": _range,
    "helion": _helion,
}


def grpo_loss_from_logits(
    logits: Tensor,
    selected_token_ids: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    loss_type: str = "grpo",
    old_per_token_logps: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    importance_ratio: Tensor | None = None,
    segments: Segments | None = None,
    clip_indicator: str = "active",
    in_place: bool = False,
    grad_buffer: Tensor | None = None,
    fixed_shape: bool = False,
    temperature: float = 1.0,
    **options: Any,
) -> PerTokenLoss:
    """Per-token loss of a preset's objective, before its reduction: reduce it as you like and call backward.

    Args:
        logits: (B, T + 1, V), whose last position predicts nothing and is left out, or (B, T, V), or packed (N, V);
            float32, bfloat16 or float16. They get their gradient in their own dtype.
        selected_token_ids: (B, T) or (N,); a negative id masks its token.
        advantages: (B,) or (B, T) / (N,).
        mask: (B, T) or (N,), the tokens that count.
        loss_type: a preset's name; "gspo" for one ratio per sequence.
        old_per_token_logps, ref_per_token_logps, importance_ratio, segments: see `PolicyBatch`.
        clip_indicator: "active", the gradient is cut (Liger, TRL); "range", the ratio is outside the bounds (Fast-LLM);
            "helion", r A < clip(r) A (Helion's example: tokens outside on the side that is not cut).
        in_place, grad_buffer: where the gradient goes, see `logits_logprobs`.
        fixed_shape: never wait for the device, as in `linear_logprobs`; a token whose id is outside the vocabulary is
            masked and does not raise.
        temperature: divides the logits, > 0.
        options: fields of the preset's objective and of `KLPenalty`, such as `epsilon_high`, `beta`.

    Raises:
        TypeError, ValueError: as `logits_logprobs` and `build_preset`, and for an unknown clip_indicator.
    """
    if clip_indicator not in CLIP_INDICATORS:
        raise ValueError(f"clip_indicator must be one of {sorted(CLIP_INDICATORS)}, got {clip_indicator!r}")
    objective, _, kl, _ = build_preset(loss_type, per_token=True, **options)
    transform = LogitTransform(temperature=temperature)
    for name, tensor in (("logits", logits), ("selected_token_ids", selected_token_ids)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    counted = _counted(selected_token_ids, mask)
    if fixed_shape:
        counted = counted & (selected_token_ids < logits.shape[-1])
    batch = PolicyBatch(
        advantages=advantages,
        completion_mask=counted,
        old_per_token_logps=old_per_token_logps,
        ref_per_token_logps=ref_per_token_logps,
        importance_ratio=importance_ratio,
        segments=segments,
    )
    terms = PolicyTerms(objective=objective, reduction=None, kl=kl, metrics="none")
    prepared = terms.prepare(batch, selected_token_ids.shape, selected_token_ids.device, torch.float32)

    ids, counted = selected_token_ids, prepared.batch.mask
    extra_position = logits.dim() == 3 and ids.dim() == 2 and logits.shape[1] == ids.shape[1] + 1
    if extra_position:
        # Masked and not sliced off: the gradient of a slice would be a second tensor of the logits' size.
        ids, counted = (torch.nn.functional.pad(column, (0, 1)) for column in (ids, counted))
    logps = logits_logprobs(
        logits,
        ids,
        mask=counted,
        transform=transform,
        in_place=in_place,
        grad_buffer=grad_buffer,
        fixed_shape=fixed_shape,
    ).logps
    if extra_position:
        logps = logps[:, :-1]
    result = prepared.per_token(logps)
    with torch.no_grad():
        mask = prepared.batch.mask
        clipped = CLIP_INDICATORS[clip_indicator](result.token_loss, prepared.batch)
        kl_values = None if result.kl is None else torch.where(mask, result.kl.detach(), 0.0)
        return PerTokenLoss(result.loss, kl_values, None if clipped is None else clipped & mask)


def _counted(ids: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return ids >= 0
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a tensor, got {type(mask).__name__}")
    if mask.shape != ids.shape:
        raise ValueError(f"mask must be {tuple(ids.shape)} from selected_token_ids, got {tuple(mask.shape)}")
    return (ids >= 0) & (mask != 0)
