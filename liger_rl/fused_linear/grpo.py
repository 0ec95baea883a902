"""The lm_head and the policy loss in one module: hidden states in, loss and metrics out, without logits in memory."""

from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torch import Tensor

from liger_rl.distributed import VocabParallel
from liger_rl.fused_linear.loss_module import FusedLinearLoss
from liger_rl.head.record import Head
from liger_rl.kernels.public_call import public
from liger_rl.losses.batch import PolicyBatch, make_batch
from liger_rl.losses.corrections import Correction, SamplerCorrection
from liger_rl.losses.levels import MetricsLevel
from liger_rl.losses.loss import PolicyLoss
from liger_rl.losses.objectives import Objective
from liger_rl.losses.presets import build_loss, list_keywords
from liger_rl.losses.reductions import Reduction
from liger_rl.losses.segments import Segments


class FusedLinearGRPOLoss(FusedLinearLoss):
    """loss = ppo_loss_fn(linear_logprobs(hidden, weight, selected_token_ids), ...) in one call.

    Args:
        loss_type: the name of a preset (a key of `PRESETS`: "grpo", "dapo", "gspo", "cispo", ...). Or your own
            objective, a callable (logps, batch) -> TokenLoss; it needs `reduction` too.
        reduction: a callable (batch) -> weights, instead of the preset's.
        sampler_correction: makes importance ratios from `sampling_per_token_logps`.
        corrections: callables (logps, batch) -> factor on the policy term, such as `TopEntropyMask(...)`.
        metrics: "none", "loss", "basic" or "with_entropy"; see `liger_rl.losses.metrics`.
        beta, kl_estimator, importance_weighted: the fields of `KLPenalty`.
        entropy_coef: the field of `EntropyBonus`.
        temperature, softcap, scale: the fields of `LogitTransform`.
        chunk_tokens, chunk_vocab: as in `linear_logprobs`.
        options: the fields of the preset's objective, such as `epsilon_low`, `epsilon_high` and `delta`, and of its
            reduction, `world_size` or `max_completion_length`. Their defaults are the preset's: "gmpo" has 0.4 where
            other presets have 0.2, and "gspo" another importance_sampling_level.

    Raises:
        ValueError: an unknown loss_type or option (the message lists the known ones), a missing option, a bad value.
        TypeError: loss_type is neither a name nor callable.
    """

    COLUMNS = tuple(field.name for field in fields(PolicyBatch) if field.name != "mask")

    def __init__(
        self,
        loss_type: str | Objective = "dapo",
        *,
        reduction: Reduction | None = None,
        sampler_correction: SamplerCorrection | None = None,
        corrections: Iterable[Correction] = (),
        metrics: MetricsLevel = "loss",
        beta: float = 0.0,
        kl_estimator: str = "k3",
        importance_weighted: bool = False,
        entropy_coef: float = 0.0,
        temperature: float = 1.0,
        softcap: float | None = None,
        scale: float = 1.0,
        chunk_tokens: int | None = None,
        chunk_vocab: int | None = None,
        **options: Any,
    ) -> None:
        penalties = {"beta": beta, "kl_estimator": kl_estimator, "importance_weighted": importance_weighted}
        terms = build_loss(
            loss_type, {**options, **penalties, "entropy_coef": entropy_coef}, reduction=reduction,
            keywords=list_keywords(FusedLinearGRPOLoss), sampler_correction=sampler_correction,
            corrections=corrections, metrics=metrics,
        )  # fmt: skip
        head = {
            "temperature": temperature, "softcap": softcap, "scale": scale, "chunk_tokens": chunk_tokens,
            "chunk_vocab": chunk_vocab,
        }  # fmt: skip
        super().__init__(terms, head)

    def batch(self, ids: Tensor, mask: Tensor | None, *, source: str = "targets", **columns: Any) -> PolicyBatch:
        return PolicyBatch(mask=mask, **columns)

    @public
    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        selected_token_ids: Tensor,
        advantages: Tensor | PolicyBatch,
        mask: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        vocab_parallel: VocabParallel | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        sampling_per_token_logps: Tensor | None = None,
        importance_ratio: Tensor | None = None,
        segments: Segments | None = None,
        num_sequences: int | Tensor | None = None,
        num_items_in_batch: int | float | Tensor | None = None,
    ) -> PolicyLoss:
        """Policy loss of one batch.

        Args:
            hidden: (B, T, H) or packed (N, H) last hidden states; position t predicts selected_token_ids[t].
            weight: (V, H) of the lm_head.
            selected_token_ids: (B, T) or (N,) sampled token ids; a negative id masks its token.
            advantages: (B,) or (B, T) / (N,). Or a `PolicyBatch`, instead of advantages, mask and the last seven.
            mask: (B, T) or (N,), the completion tokens that count; None counts all. A token with advantage 0 is not
                projected if neither the loss nor a metric depends on it.
            bias: as in `linear_logprobs`.
            vocab_parallel: as in `linear_logprobs`. The batch must be the same on every rank of its group, and so is
                the loss.
            old_per_token_logps, ref_per_token_logps, sampling_per_token_logps: columns of `PolicyBatch`.
            importance_ratio, segments, num_sequences, num_items_in_batch: the same.

        Returns:
            A `PolicyLoss`, with `.loss` () in float32 and `.metrics`, a dict of `Metric` by name.

        Raises:
            TypeError, ValueError: before anything is computed; the message names the argument. With a sharded
                head, each rank raises by itself.
        """
        batch = make_batch(
            "FusedLinearGRPOLoss", advantages, mask=mask, old_per_token_logps=old_per_token_logps,
            ref_per_token_logps=ref_per_token_logps, sampling_per_token_logps=sampling_per_token_logps,
            importance_ratio=importance_ratio, segments=segments, num_sequences=num_sequences,
            num_items_in_batch=num_items_in_batch,
        )  # fmt: skip
        head = Head.of(
            hidden, weight, selected_token_ids, self.options, mask=batch.mask, bias=bias,
            vocab_parallel=vocab_parallel, targets_name="selected_token_ids",
        )  # fmt: skip
        return self._loss(head, batch)

    if TYPE_CHECKING:  # the signature of a call of the module
        __call__ = forward
