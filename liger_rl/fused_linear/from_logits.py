"""GRPO and similar losses from logits that a caller already holds: per-token loss, KL and clip indicator, unreduced."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_rl.head.given_logits import LogitRows, check_logits
from liger_rl.head.live_tokens import start_selection
from liger_rl.kernels.public_call import outside_of_graphs
from liger_rl.kernels.transform import LogitTransform
from liger_rl.losses import fused
from liger_rl.losses.batch import PolicyBatch, make_batch
from liger_rl.losses.loss import PreparedLoss
from liger_rl.losses.presets import build_loss, list_keywords
from liger_rl.losses.segments import Segments


class PerTokenLoss(NamedTuple):
    """Unreduced results, (B, T) or (N,) each, 0 or False at masked tokens."""

    loss: Tensor  # float32, differentiable
    kl: Tensor | None  # float32 in nats, without gradient; None without a KL penalty
    is_clipped: Tensor | None  # bool: the gradient is cut; None if the objective does not clip


IDS = "selected_token_ids"


@outside_of_graphs
def grpo_loss_from_logits(
    logits: Tensor,
    selected_token_ids: Tensor,
    advantages: Tensor | PolicyBatch,
    mask: Tensor | None = None,
    *,
    loss_type: str = "grpo",
    temperature: float = 1.0,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    importance_weighted: bool = False,
    old_per_token_logps: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    importance_ratio: Tensor | None = None,
    segments: Segments | None = None,
    **options: Any,
) -> PerTokenLoss:
    """Per-token loss of a preset's objective, not reduced: reduce it as you like and call backward.

    Args:
        logits: (B, T, V), packed (N, V), or (B, T + 1, V), whose last position is left out; float32, bfloat16 or
            float16. The gradient has the same dtype.
        selected_token_ids: (B, T) or (N,). A negative id masks its token.
        advantages: (B,) or (B, T) / (N,). Or a `PolicyBatch`, instead of advantages, mask and the columns below. Its
            sampling log-probabilities and divisors change nothing here.
        mask: (B, T) or (N,), the tokens that count.
        loss_type: the name of a preset, such as "gspo" for one ratio per sequence.
        temperature: divides the logits, > 0.
        beta, kl_estimator, importance_weighted: the fields of `KLPenalty`.
        old_per_token_logps, ref_per_token_logps, importance_ratio, segments: the columns of `PolicyBatch`.
        options: the fields of the preset's objective, such as `epsilon_high`.

    Raises:
        ValueError: as `logits_logprobs`; also for an unknown loss_type or option, a `reduction`, and a mask or column
            together with a `PolicyBatch`.
    """
    batch = make_batch(
        "grpo_loss_from_logits", advantages, mask=mask, old_per_token_logps=old_per_token_logps,
        ref_per_token_logps=ref_per_token_logps, importance_ratio=importance_ratio, segments=segments,
    )  # fmt: skip
    penalty = {"beta": beta, "kl_estimator": kl_estimator, "importance_weighted": importance_weighted}
    keywords = list_keywords(grpo_loss_from_logits)
    terms = build_loss(loss_type, {**options, **penalty}, per_token=True, keywords=keywords, metrics="none")
    transform = LogitTransform(temperature=temperature)
    ids, mask = selected_token_ids, batch.mask
    check_logits(logits, ids, mask, transform, targets_name=IDS, spare_position=True)
    aligned = terms.check(batch, ids.shape, ids.device)
    raise_if_wrong = start_selection(ids, mask, logits.shape[-1], "logits", targets_name=IDS)
    logps, _, lse = LogitRows.apply(logits, ids, mask, transform, False)
    logps, aligned = logps.view(ids.shape), replace(aligned, mask=(lse != math.inf).view(ids.shape))
    columns = fused.per_token(PreparedLoss(terms, aligned, None), logps)
    if columns is None:
        prepared = terms.prepare(aligned, torch.float32)
        values = prepared.per_token(logps)
        with torch.no_grad():
            low, high = values.token_loss.clip_low, values.token_loss.clip_high
            is_clipped = None if low is None or high is None else (low | high) & aligned.mask
            kl_values = None if values.kl is None else torch.where(aligned.mask, values.kl.detach(), 0.0)
            columns = values.loss, kl_values, is_clipped
    raise_if_wrong()
    return PerTokenLoss(*columns)
