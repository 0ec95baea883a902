"""The lm_head and a supervised loss in one module: cross entropy and its relatives, without logits in memory."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_rl.distributed import VocabParallel
from liger_rl.fused_linear.loss_module import FusedLinearLoss, build_terms
from liger_rl.head.checks import check_constant, check_dense, check_shape
from liger_rl.head.record import Head
from liger_rl.kernels.public_call import public
from liger_rl.losses.batch import PolicyBatch, check_column
from liger_rl.losses.levels import MetricsLevel
from liger_rl.losses.loss import PolicyLoss
from liger_rl.losses.objectives import Objective
from liger_rl.losses.presets import SUPERVISED
from liger_rl.losses.reductions import GlobalTokenMean, Reduction, check_divisors
from liger_rl.losses.segments import Segments


class FusedLinearCrossEntropyLoss(FusedLinearLoss):
    """Cross entropy of an lm_head: `CrossEntropy`, or with weights of its tokens `DFT` or `EAFT`.

    Args:
        loss_type: a key of `SUPERVISED`: "nll", "dft" or "eaft". Or your own objective, a callable
            (logps, batch) -> TokenLoss.
        reduction: a callable (batch) -> weights, such as `SequenceMean()` or `TokenSum()`. None is `GlobalTokenMean`:
            the mean over the tokens that count, or their sum over num_items_in_batch.
        metrics: "none"; "loss": `nll` and `z_loss`; "basic": also `accuracy`; "with_entropy": also `entropy`. Each is
            a mean over the tokens with a weight.
        options: the fields of the objective, such as label_smoothing and z_loss; world_size, of the reduction; and
            temperature, softcap, scale, as in `FusedLinearGRPOLoss`.

    Raises:
        TypeError, ValueError: an unknown loss_type or option, with the known ones; a bad value.
    """

    COLUMNS = ("token_weights", "segments", "num_sequences", "num_items_in_batch")

    def __init__(
        self,
        loss_type: str | Objective = "nll",
        *,
        reduction: Reduction | None = None,
        metrics: MetricsLevel = "loss",
        **options: Any,
    ) -> None:
        terms, head = build_terms(
            loss_type, options, SUPERVISED, GlobalTokenMean(), reduction=reduction, metrics=metrics,
            loss=FusedLinearCrossEntropyLoss,
        )  # fmt: skip
        super().__init__(terms, head)

    def batch(
        self,
        ids: Tensor,
        mask: Tensor | None,
        *,
        source: str = "targets",
        token_weights: Tensor | None = None,
        num_items_in_batch: int | float | Tensor | None = None,
        **columns: Any,
    ) -> PolicyBatch:
        weights = token_weights
        if weights is None:
            weights = torch.ones(ids.shape[:1], dtype=torch.float32, device=ids.device)
        elif check_column("token_weights", check_dense("token_weights", weights, ids, source)).shape != ids.shape:
            check_shape(
                "token_weights", weights, ids.shape[:1], f"{tuple(ids.shape)} from {source}, or one for each row"
            )
        check_constant("token_weights", weights)
        check_divisors(
            self.terms.reduction, num_items_in_batch=num_items_in_batch, num_sequences=columns.get("num_sequences")
        )
        return PolicyBatch(advantages=weights, mask=mask, num_items_in_batch=num_items_in_batch, **columns)

    @public
    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        mask: Tensor | None = None,
        token_weights: Tensor | None = None,
        bias: Tensor | None = None,
        vocab_parallel: VocabParallel | None = None,
        segments: Segments | None = None,
        num_sequences: int | Tensor | None = None,
        num_items_in_batch: int | float | Tensor | None = None,
    ) -> PolicyLoss:
        """The loss of one batch.

        Args:
            hidden: (B, T, H) or packed (N, H) last hidden states; position t predicts targets[t].
            weight: (V, H) of the lm_head.
            targets: (B, T) or (N,) token ids, negative where a token does not count, such as -100.
            mask: (B, T) or (N,), bool or 0/1, the tokens that count; None: those with an id.
            token_weights: (B,), (B, T) or (N,), factors on the tokens' losses. A token of weight 0 enters no product.
            bias, vocab_parallel: as in `linear_logprobs`.
            segments, num_sequences: as in `PolicyBatch`, for means over sequences.
            num_items_in_batch: tokens of the whole optimiser step, the divisor of `GlobalTokenMean`.

        Returns:
            A `PolicyLoss`, with `.loss` () in float32 and `.metrics`, a dict of `Metric` by name.

        Raises:
            TypeError, ValueError: before anything is computed; the message names the argument.
        """
        head = Head.of(hidden, weight, targets, self.options, mask=mask, bias=bias, vocab_parallel=vocab_parallel)
        batch = self.batch(
            targets, mask, token_weights=token_weights, segments=segments, num_sequences=num_sequences,
            num_items_in_batch=num_items_in_batch,
        )  # fmt: skip
        return self._loss(head, batch)

    if TYPE_CHECKING:  # the signature of a call of the module
        __call__ = forward
