"""Layers of the hub kernel: their `forward` replaces that of a module of another library.

`kernels` takes a layer for a forward and nothing more. It binds the forward to the module that is replaced, whose
attributes are the options here.
"""

import inspect
from typing import Any

from torch import Tensor, nn

from liger_rl.head import logits_logprobs
from liger_rl.integrations import liger


class LigerFusedLinearGRPOLoss(nn.Module):
    """For `liger_kernel.chunked_loss.LigerFusedLinearGRPOLoss` 0.8: the fused head and loss, by Liger's signature."""

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: int | float | Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Loss () in float32 and metrics; arguments, results and errors of the integration for liger-kernel."""
        fused = liger.LigerFusedLinearGRPOLoss
        options = {name: getattr(self, name) for name in inspect.signature(fused).parameters}
        return fused(**options)(
            _input,
            lin_weight,
            selected_token_ids,
            attention_mask,
            advantages,
            bias=bias,
            ref_per_token_logps=ref_per_token_logps,
            old_per_token_logps=old_per_token_logps,
            ref_input=ref_input,
            ref_weight=ref_weight,
            ref_bias=ref_bias,
            vllm_is_ratio=vllm_is_ratio,
            num_items_in_batch=num_items_in_batch,
        )


class ForCausalLMLoss(nn.Module):
    """For transformers' `ForCausalLMLoss`: cross-entropy without a float32 copy of the logits or of their gradient."""

    def forward(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """-mean of the labels' log-probabilities, () in float32; with num_items_in_batch their sum over that.

        Args:
            logits: (B, T, vocab_size) float32, bfloat16 or float16; position t predicts labels[:, t + 1].
            labels: (B, T) integer ids, ignore_index where a token does not count; None with shift_labels.
            vocab_size: size of the vocabulary.
            num_items_in_batch: tokens of the whole optimiser step.
            ignore_index: the label of tokens that do not count.
            shift_labels: (B, T) ids that position t predicts, in place of labels.
            kwargs: no effect, as in transformers.

        Raises:
            ValueError: a label that is not ignore_index and not in [0, vocab_size).
        """
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        ids = shift_labels.reshape(-1).to(logits.device)
        counted = ids != ignore_index
        # An id below 0 would be masked there; one beyond the vocabulary raises, without another wait for the device.
        ids = ids.where(ids >= 0, vocab_size).where(counted, -1)
        logps = logits_logprobs(logits.reshape(-1, vocab_size), ids).logps
        divisor = counted.sum() if num_items_in_batch is None else num_items_in_batch
        return -logps.sum() / (divisor.to(logits.device) if isinstance(divisor, Tensor) else divisor)
