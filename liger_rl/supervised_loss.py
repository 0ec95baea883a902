"""The lm_head and a supervised loss in one module: cross entropy and its relatives, without logits in memory."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_rl.call.checks import Passes, check_dense, check_shape
from liger_rl.call.dtensors import low_rank_tensors
from liger_rl.call.head_call import HeadCall, shared_errors
from liger_rl.call.keywords import named_keywords
from liger_rl.call.low_rank import LowRank
from liger_rl.call.tokens import counted_tokens
from liger_rl.distributed import VocabParallel
from liger_rl.fused_loss import FusedLinearLoss, HeadKeywords, built, keywords_of
from liger_rl.losses.batch import PolicyBatch
from liger_rl.losses.loss import PolicyLoss
from liger_rl.losses.metrics import MetricsLevel
from liger_rl.losses.objectives import Objective
from liger_rl.losses.presets import SUPERVISED, SupervisedKeywords, shows
from liger_rl.losses.reductions import GlobalTokenMean, Reduction
from liger_rl.losses.segments import Segments

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class _Supervised(HeadKeywords, SupervisedKeywords, total=False):
        pass


class FusedLinearCrossEntropyLoss(FusedLinearLoss):
    """Cross entropy of an lm_head: `CrossEntropy`, or with weights of its tokens `Focal`, `DFT` or `EAFT`.

    Args:
        loss_type: a key of `SUPERVISED`: "nll", "focal", "dft" or "eaft". Or your own objective, a callable
            (logps, batch) -> TokenLoss.
        reduction: a callable (batch) -> weights, such as `SequenceMean()` or `TokenSum()`. None is `GlobalTokenMean`:
            the mean over the tokens that count, or their sum over num_items_in_batch.
        class_weights: (V,) a weight of each id of the whole vocabulary: the loss is then the weighted mean of the
            tokens, as torch's `cross_entropy` has it. Not with label_smoothing, which in torch weighs each id's share.
        metrics: "none"; "loss": `nll` and `z_loss`; "basic": also `accuracy`; "with_entropy": also `entropy`. Each is
            a mean over the tokens with a weight.
        passes: as in `FusedLinearGRPOLoss`.
        options: the fields of the objective, such as label_smoothing and z_loss; world_size, of the reduction; and
            temperature, softcap, scale, grad_tolerance, chunk_tokens, chunk_vocab, fixed_shape, batch_invariant, as in
            `FusedLinearGRPOLoss`.

    Raises:
        TypeError, ValueError: an unknown loss_type or option, with the known ones; a bad value.
    """

    class_weights: Tensor | None
    COLUMNS = ("token_weights", "segments", "num_sequences", "num_items_in_batch")

    @shows(SupervisedKeywords)
    def __init__(
        self,
        loss_type: str | Objective = "nll",
        *,
        reduction: Reduction | None = None,
        class_weights: Tensor | None = None,
        metrics: MetricsLevel = "loss",
        passes: Passes = "auto",
        **options: "Unpack[_Supervised]",
    ) -> None:
        terms, head = built(
            loss_type, dict(options), SUPERVISED, GlobalTokenMean(), reduction=reduction, metrics=metrics,
            keywords=KEYWORDS,
        )  # fmt: skip
        super().__init__(terms, passes, head)
        if class_weights is not None:
            check_shape("class_weights", check_dense("class_weights", class_weights), (None,), "(V,)")
            if getattr(terms.objective, "label_smoothing", 0.0):
                raise ValueError(
                    "label_smoothing must be 0 with class_weights, of which it would read all for each token"
                )
        self.register_buffer("class_weights", class_weights, persistent=False)

    def batch(
        self,
        ids: Tensor,
        mask: Tensor | None,
        *,
        token_weights: Tensor | None = None,
        num_items_in_batch: int | float | Tensor | None = None,
        **columns: Any,
    ) -> PolicyBatch:
        weights = token_weights
        if weights is None:
            weights = torch.ones(ids.shape[:1], dtype=torch.float32, device=ids.device)
        elif (weights := check_dense("token_weights", weights, ids, "targets")).shape != ids.shape:
            check_shape(
                "token_weights", weights, ids.shape[:1], f"{tuple(ids.shape)} from targets, or one for each row"
            )
        if self.class_weights is not None:
            classes = self.class_weights.to(ids.device, torch.float32)
            counted = counted_tokens(ids, mask)
            # An id without a weight makes the loss NaN.
            known = torch.where(ids < classes.numel(), classes[ids.clamp(0, classes.numel() - 1)], torch.nan)
            of_ids = torch.where(counted, known, 0.0)
            weights = of_ids * (weights if weights.shape == ids.shape else weights.view(-1, *[1] * (ids.dim() - 1)))
            if num_items_in_batch is None and isinstance(self.terms.reduction, GlobalTokenMean):
                # The sum of the weights is the divisor of a weighted mean; the reduction divides by their number.
                weights = weights * (counted.sum() / of_ids.sum())
        return PolicyBatch(advantages=weights, mask=mask, num_items_in_batch=num_items_in_batch, **columns)

    @named_keywords
    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        mask: Tensor | None = None,
        token_weights: Tensor | None = None,
        bias: Tensor | None = None,
        low_rank: Sequence[LowRank] = (),
        weight_grad: Tensor | None = None,
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
            bias, low_rank, weight_grad, vocab_parallel: as in `linear_logprobs`.
            segments, num_sequences: as in `PolicyBatch`, for means over sequences.
            num_items_in_batch: tokens of the whole optimiser step, the divisor of `GlobalTokenMean`.

        Returns:
            A `PolicyLoss`, with `.loss` () in float32 and `.metrics`, a dict of `Metric` by name.

        Raises:
            TypeError, ValueError: before anything is computed; the message names the argument.
        """
        call = HeadCall(
            hidden=hidden, weight=weight, targets=targets, mask=mask, bias=bias, low_rank=low_rank,
            vocab_parallel=vocab_parallel, weight_grad=weight_grad, options=self.options,
        )  # fmt: skip
        with shared_errors(vocab_parallel, weight, hidden, targets, mask, *low_rank_tensors(low_rank)):
            call.check_tensors()
            if self.class_weights is not None and vocab_parallel is None:
                expected = f"(V,) = ({weight.shape[0]},) from weight"
                check_shape("class_weights", self.class_weights, weight.shape[:1], expected)
            batch = self.batch(
                targets, mask, token_weights=token_weights, segments=segments, num_sequences=num_sequences,
                num_items_in_batch=num_items_in_batch,
            )  # fmt: skip
        return self._loss(call, batch)

    if TYPE_CHECKING:  # the signature of a call of the module
        __call__ = forward


KEYWORDS = keywords_of(FusedLinearCrossEntropyLoss, SupervisedKeywords)
