"""GRPO and its relatives from logits that a caller already holds: per-token loss, KL and clip indicator, unreduced."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_rl.given_logits.function import check_logits, row_logprobs
from liger_rl.given_logits.loss import ClipIndicator, LogitLoss, PerTokenLoss, per_token_loss
from liger_rl.given_logits.rows import LogitRowsOptions
from liger_rl.head.tokens import ask_vocabulary, counted_tokens
from liger_rl.kernels.transform import LogitTransform
from liger_rl.policy.batch import AlignedBatch, PolicyBatch, batch_of
from liger_rl.policy.fused import kernel_of
from liger_rl.policy.loss import PolicyTerms, PreparedLoss
from liger_rl.policy.objectives import TokenLoss
from liger_rl.policy.options import one_of
from liger_rl.policy.presets import build_per_token


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
COLUMNS = ("old_per_token_logps", "ref_per_token_logps", "importance_ratio", "segments")


def grpo_loss_from_logits(
    logits: Tensor,
    selected_token_ids: Tensor,
    advantages: Tensor | PolicyBatch,
    mask: Tensor | None = None,
    *,
    loss_type: str = "grpo",
    clip_indicator: str = "active",
    in_place: bool = False,
    grad_buffer: Tensor | None = None,
    fixed_shape: bool = False,
    temperature: float = 1.0,
    **options: Any,
) -> PerTokenLoss:
    """Per-token loss of a preset's objective, before its reduction: reduce it as you like and call backward.

    On CUDA one kernel makes the loss, its derivative and the rest, where it knows the objective: `PPOClip` with one
    ratio per token, `CISPO` without a `ratio_min`, `SAPO`, `Reinforce` and `DPPO`. Other objectives, and other devices,
    run the formulas step by step.

    Args:
        logits: (B, T + 1, V), whose last position is left out, or (B, T, V), or packed (N, V); float32, bfloat16 or
            float16. The gradient has their dtype.
        selected_token_ids: (B, T) or (N,); a negative id masks its token.
        advantages: (B,) or (B, T) / (N,); or a `PolicyBatch` in place of it, of mask and of the columns. Its sampling
            log-probabilities and divisors change nothing here.
        mask: (B, T) or (N,), the tokens that count.
        loss_type: a preset's name; "gspo" for one ratio per sequence.
        clip_indicator: which tokens `is_clipped` marks. "active": the gradient is cut (Liger, TRL). "range": the ratio
            is outside the bounds (Fast-LLM). "helion": r A < clip(r) A, outside on the side that is not cut (Helion's
            example).
        in_place, grad_buffer: where the gradient goes, see `logits_logprobs`.
        fixed_shape: never wait for the device, as in `linear_logprobs`; a token whose id is outside the vocabulary is
            masked and does not raise.
        temperature: divides the logits, > 0.
        options: old_per_token_logps, ref_per_token_logps, importance_ratio and segments, see `PolicyBatch`; and fields
            of the preset's objective and of `KLPenalty`, such as `epsilon_high`, `beta`.

    Raises:
        TypeError, ValueError: as `logits_logprobs`; for an unknown loss_type, option or clip_indicator; for a
            `reduction`, because the result is per token; for a column beside a `PolicyBatch`. If the loss is one kernel
            and has a gradient, an unmasked id outside [0, V) raises in the backward, so that the host need not wait in
            the forward. Its token is masked until then, and a `grad_buffer` already has the gradient of the other
            tokens.
    """
    if "compiled" in options:
        raise TypeError(
            "compiled was removed: one kernel always makes the loss on CUDA where it knows the objective, and "
            "nothing is left for torch.compile; leave the argument out"
        )
    one_of("clip_indicator", clip_indicator, CLIP_INDICATORS)
    columns: Any = {name: options.pop(name) for name in COLUMNS if name in options}
    batch = batch_of("grpo_loss_from_logits", advantages, mask, columns)
    mask = batch.completion_mask
    objective, kl = build_per_token(loss_type, **options)
    if kl.exact:
        raise ValueError(
            "kl_estimator must be one of ['k1', 'k2', 'k3'] here, got 'exact': no logits of a reference are taken; "
            "give ppo_loss_fn an exact_kl of your own, or FusedLinearGRPOLoss a reference"
        )
    terms = PolicyTerms(objective=objective, reduction=None, kl=kl, metrics="none")
    where = LogitRowsOptions(
        transform=LogitTransform(temperature=temperature),
        in_place=in_place,
        grad_buffer=grad_buffer,
        fixed_shape=fixed_shape,
        targets_name="selected_token_ids",
    )
    check_logits(logits, selected_token_ids, mask, where, spare_position=True)
    ids, vocab = selected_token_ids, logits.shape[-1]
    given = terms.check(batch, ids.shape, ids.device)
    kernel = kernel_of(terms, given)
    if kernel is not None:
        raise_if_outside = ask_vocabulary(
            ids, mask, vocab, "logits", fixed_shape=fixed_shape, targets_name="selected_token_ids",
            temperature=where.transform.temperature,
        )  # fmt: skip
        prepared = PreparedLoss(terms, given, None)
        found = LogitLoss.apply(logits, ids, mask, kernel, prepared, clip_indicator, where, raise_if_outside)
        if not found[0].requires_grad:
            raise_if_outside()
        return PerTokenLoss(*found)

    counted = counted_tokens(ids, mask)
    if fixed_shape:
        counted = counted & (ids.long() < vocab)
    logps = row_logprobs(logits, ids, mask, where).logps
    prepared = terms.prepared(replace(given, mask=counted), torch.float32)
    return per_token_loss(prepared, logps, CLIP_INDICATORS[clip_indicator])
