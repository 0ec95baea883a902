"""GRPO and its relatives from logits that a caller already holds: per-token loss, KL and clip indicator, unreduced."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_rl.given_logits.function import check_logits, row_logprobs
from liger_rl.given_logits.loss import ClipIndicator, Columns, LogitLoss, PerTokenLoss, generates, per_token_loss
from liger_rl.given_logits.rows import LogitRowsOptions
from liger_rl.head.checks import check_flag
from liger_rl.head.tokens import ask_vocabulary
from liger_rl.kernels.transform import LogitTransform
from liger_rl.policy.batch import AlignedBatch, PolicyBatch
from liger_rl.policy.loss import PolicyTerms
from liger_rl.policy.objectives import TokenLoss
from liger_rl.policy.options import one_of
from liger_rl.policy.presets import build_per_token
from liger_rl.policy.segments import Segments


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


CLIP_INDICATORS: dict[str, ClipIndicator] = {
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
    compiled: bool = True,
    temperature: float = 1.0,
    **options: Any,
) -> PerTokenLoss:
    """Per-token loss of a preset's objective, before its reduction: reduce it as you like and call backward.

    Args:
        logits: (B, T + 1, V), whose last position is left out, or (B, T, V), or packed (N, V); float32, bfloat16 or
            float16. The gradient has their dtype.
        selected_token_ids: (B, T) or (N,); a negative id masks its token.
        advantages: (B,) or (B, T) / (N,).
        mask: (B, T) or (N,), the tokens that count.
        loss_type: a preset's name; "gspo" for one ratio per sequence.
        old_per_token_logps, ref_per_token_logps, importance_ratio, segments: see `PolicyBatch`.
        clip_indicator: which tokens `is_clipped` marks. "active": the gradient is cut (Liger, TRL). "range": the ratio
            is outside the bounds (Fast-LLM). "helion": r A < clip(r) A, outside on the side that is not cut (Helion's
            example).
        in_place, grad_buffer: where the gradient goes, see `logits_logprobs`.
        fixed_shape: never wait for the device, as in `linear_logprobs`; a token whose id is outside the vocabulary is
            masked and does not raise.
        compiled: on CUDA, torch.compile makes one kernel of the objective's formulas and their derivative, if tokens
            do not depend on each other. The first call with each set of options takes some seconds, so take False for
            a coefficient that changes with every step. False runs the formulas step by step, as sequence-level losses
            and other devices always do.
        temperature: divides the logits, > 0.
        options: fields of the preset's objective and of `KLPenalty`, such as `epsilon_high`, `beta`.

    Raises:
        TypeError, ValueError: as `logits_logprobs`; for an unknown loss_type, option or clip_indicator; for a
            `reduction`, because the result is per token. If the loss is one kernel and has a gradient, an unmasked id
            outside [0, V) raises in the backward, so that the host need not wait in the forward. Its token is masked
            until then, and a `grad_buffer` already has the gradient of the other tokens.
    """
    one_of("clip_indicator", clip_indicator, CLIP_INDICATORS)
    objective, kl = build_per_token(loss_type, **options)
    terms = PolicyTerms(objective=objective, reduction=None, kl=kl, metrics="none")
    check_flag("compiled", compiled)
    where = LogitRowsOptions(
        transform=LogitTransform(temperature=temperature),
        in_place=in_place,
        grad_buffer=grad_buffer,
        fixed_shape=fixed_shape,
        targets_name="selected_token_ids",
    )
    check_logits(logits, selected_token_ids, mask, where, spare_position=True)
    batch = PolicyBatch(
        advantages=advantages,
        completion_mask=mask,
        old_per_token_logps=old_per_token_logps,
        ref_per_token_logps=ref_per_token_logps,
        importance_ratio=importance_ratio,
        segments=segments,
    )
    indicator = CLIP_INDICATORS[clip_indicator]
    if compiled and generates(logits.device, terms):
        columns = _columns(selected_token_ids, batch, terms)
        vocab = logits.shape[-1]
        raise_if_outside = ask_vocabulary(
            columns.ids, mask, vocab, "logits", fixed_shape=fixed_shape, targets_name="selected_token_ids"
        )
        found = PerTokenLoss(*LogitLoss.apply(logits, columns, terms, indicator, where, raise_if_outside))
        if not found.loss.requires_grad:
            raise_if_outside()
        return found

    counted = selected_token_ids >= 0
    if fixed_shape:
        counted = counted & (selected_token_ids.long() < logits.shape[-1])
    if mask is not None:
        counted = counted & (mask != 0)
    batch = replace(batch, completion_mask=counted)
    given = terms.check(batch, counted.shape, counted.device)
    logps = row_logprobs(logits, selected_token_ids, mask, where).logps
    return per_token_loss(terms.prepared(given, torch.float32), logps, indicator)


def _columns(ids: Tensor, batch: PolicyBatch, terms: PolicyTerms) -> Columns:
    checked = terms.check(batch, ids.shape, ids.device)
    return Columns(
        ids,
        checked.mask if checked.mask.dtype == torch.bool else checked.mask != 0,
        checked.advantages,
        checked.old_per_token_logps,
        checked.ref_per_token_logps,
        checked.importance_ratio,
    )
