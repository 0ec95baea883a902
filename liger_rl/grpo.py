"""The lm_head and the policy loss in one module: hidden states in, loss and metrics out, no logits between."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from liger_rl.kernels.transform import LogitTransform
from liger_rl.logprobs import check_linear, linear_logprobs
from liger_rl.policy.batch import PolicyBatch
from liger_rl.policy.loss import PolicyLoss, PolicyTerms
from liger_rl.policy.objectives import Objective
from liger_rl.policy.penalties import KLPenalty
from liger_rl.policy.presets import build_preset
from liger_rl.policy.reductions import Reduction


class FusedLinearGRPOLoss(nn.Module):
    """loss = ppo_loss_fn(linear_logprobs(hidden, weight, selected_token_ids), ...), one call.

    Args:
        loss_type: a preset's name ("grpo", "bnpo", "dapo", "dr_grpo", "gspo"), or an objective of your own: a callable
            (logps, batch) -> TokenLoss, which then needs `reduction`.
        reduction: a callable (batch) -> weights in place of the preset's.
        temperature, softcap, scale: of `LogitTransform`.
        chunk_tokens, chunk_vocab: upper bounds of a tile's sides, as in `linear_logprobs`.
        options: fields of the preset's objective (`epsilon_low`, `epsilon_high`, `delta`, `importance_sampling_level`),
            of its reduction (`max_completion_length`, `world_size`) and of `KLPenalty` (`beta`).

    Raises:
        ValueError: an unknown loss_type or option (the known ones are listed), a required one left out, a bad value.
        TypeError: loss_type is neither a name nor callable.
    """

    objective: Objective
    reduction: Reduction
    kl: KLPenalty

    def __init__(
        self,
        loss_type: str | Objective = "dapo",
        *,
        reduction: Reduction | None = None,
        chunk_tokens: int | None = None,
        chunk_vocab: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        transform_names = [f.name for f in fields(LogitTransform)]
        self.transform = LogitTransform(**{name: options.pop(name) for name in transform_names if name in options})
        self.chunk_tokens, self.chunk_vocab = chunk_tokens, chunk_vocab
        if isinstance(loss_type, str):
            self.objective, preset_reduction, self.kl = build_preset(loss_type, **options)
            self.reduction = preset_reduction if reduction is None else reduction
        elif callable(loss_type):
            if reduction is None:
                raise ValueError("reduction must be given with an objective of your own, such as TokenMean()")
            unknown = sorted(set(options) - {f.name for f in fields(KLPenalty)})
            if unknown:
                raise ValueError(f"{', '.join(unknown)}: options of an objective of your own are its own attributes")
            self.objective, self.reduction, self.kl = loss_type, reduction, KLPenalty(**options)
        else:
            raise TypeError(f"loss_type must be a name or a callable objective, got {type(loss_type).__name__}")

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        selected_token_ids: Tensor,
        advantages: Tensor,
        mask: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        importance_ratio: Tensor | None = None,
        num_items_in_batch: int | float | Tensor | None = None,
    ) -> PolicyLoss:
        """Policy loss of one batch.

        Args:
            hidden: (B, T, H) or packed (N, H) last hidden states; position t predicts selected_token_ids[t].
            weight: (V, H) of the lm_head.
            selected_token_ids: (B, T) or (N,) the sampled tokens; a negative id masks its token.
            advantages: (B,) or (B, T) / (N,).
            mask: (B, T) or (N,), the completion tokens that count; None counts all.
            bias: (V,) of the lm_head.
            old_per_token_logps, ref_per_token_logps, importance_ratio, num_items_in_batch: see `PolicyBatch`.

        Returns:
            PolicyLoss: `.loss` () in float32 and `.metrics`, a dict of 0-dim tensors (`kl_ref` when beta > 0,
            `clip_ratio`, `clip_low`, `clip_high`).

        Raises:
            TypeError, ValueError: before anything is computed, naming the argument.
        """
        check_linear(hidden, weight, selected_token_ids, mask, bias, targets_name="selected_token_ids")
        counted = selected_token_ids >= 0
        if mask is not None:
            counted = counted & (mask != 0)
        batch = PolicyBatch(
            advantages=advantages,
            completion_mask=counted,
            old_per_token_logps=old_per_token_logps,
            ref_per_token_logps=ref_per_token_logps,
            importance_ratio=importance_ratio,
            num_items_in_batch=num_items_in_batch,
        )
        terms = PolicyTerms.prepare(batch, self.reduction, self.kl, counted.shape, counted.device, torch.float32)
        return terms.loss(self._logps(hidden, weight, selected_token_ids, counted, bias), self.objective)

    @torch.no_grad()
    def reference_logps(
        self,
        hidden: Tensor,
        weight: Tensor,
        selected_token_ids: Tensor,
        mask: Tensor | None = None,
        *,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Log-probabilities under a reference or old policy's head, (B, T) or (N,) float32, without gradient.

        Arguments as in `forward`, from the other policy's model; the logit transform is this module's.
        """
        return self._logps(hidden, weight, selected_token_ids, mask, bias)

    def _logps(self, hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
        return linear_logprobs(
            hidden,
            weight,
            ids,
            mask=mask,
            bias=bias,
            transform=self.transform,
            chunk_tokens=self.chunk_tokens,
            chunk_vocab=self.chunk_vocab,
        ).logps

    def extra_repr(self) -> str:
        return f"{self.objective}, {self.reduction}, {self.kl}, {self.transform}"
