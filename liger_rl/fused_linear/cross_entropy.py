"""The lm_head and a supervised loss in one module: cross entropy and its relatives, without logits in memory."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_rl.distributed import VocabParallel
from liger_rl.fused_linear.loss_module import FusedLinearLoss, HeadKeywords, build_terms, keywords_of
from liger_rl.head.checks import Passes, check_constant, check_dense, check_shape
from liger_rl.head.divergence import linear_divergence
from liger_rl.head.live_tokens import find_counted
from liger_rl.head.record import Head
from liger_rl.kernels.public_call import public
from liger_rl.losses.batch import AlignedBatch, PolicyBatch
from liger_rl.losses.loss import PolicyLoss, ppo_loss_fn
from liger_rl.losses.metrics import MetricsLevel
from liger_rl.losses.objectives import Objective, TokenLoss
from liger_rl.losses.presets import SUPERVISED, SupervisedKeywords, show_options
from liger_rl.losses.reductions import GlobalTokenMean, Reduction, check_divisors
from liger_rl.losses.segments import Segments
from liger_rl.losses.supervised import CrossEntropy

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class _Supervised(HeadKeywords, SupervisedKeywords, total=False):
        pass


class TargetsAlone:
    """A cross entropy without the term of label smoothing, which `class_smoothing` adds."""

    def reads(self: Any, level: MetricsLevel) -> set[str]:
        return super().reads(level) - {"mean_logits"}  # type: ignore[misc]

    def compute_loss(self: Any, logps: Tensor, _: AlignedBatch) -> Tensor:
        return (self.label_smoothing - 1) * logps


@dataclass(frozen=True, kw_only=True)
class _ClassSmoothed(TargetsAlone, CrossEntropy):
    pass


def class_smoothing(head: Head, batch: PolicyBatch, class_weights: Tensor, reduction: Reduction | None) -> Tensor:
    """The reduced mean over the ids v of c_v (-log p_v), differentiable; `batch` has no advantages but token weights.

    With q = c / sum(c) the sum is sum(c) (KL(q || p) + entropy of q). A teacher's bias of log q has that distribution
    at every token.
    """
    if head.vocab_parallel is not None:
        raise ValueError("vocab_parallel must be None with class_weights and label_smoothing")
    hidden, weight, total = head.hidden, head.weight, class_weights.sum()
    share, counted = class_weights / total, find_counted(head.ids, head.mask)
    divergence = linear_divergence(
        hidden, weight, hidden.new_zeros(*hidden.shape[:-1], 8), weight.new_zeros(weight.shape[0], 8),
        teacher_bias=share.log(), bias=head.bias, transform=head.options.transform,
        mask=counted.flatten(),
    ).divergence  # fmt: skip
    values = (divergence.view(head.shape) + torch.special.entr(share).sum()) * (total / weight.shape[0])
    batch = replace(batch, mask=counted)
    return ppo_loss_fn(values, batch, lambda values, batch: TokenLoss(batch.advantages * values), reduction).loss


class FusedLinearCrossEntropyLoss(FusedLinearLoss):
    """Cross entropy of an lm_head: `CrossEntropy`, or with weights of its tokens `Focal`, `DFT` or `EAFT`.

    Args:
        loss_type: a key of `SUPERVISED`: "nll", "focal", "dft" or "eaft". Or your own objective, a callable
            (logps, batch) -> TokenLoss.
        reduction: a callable (batch) -> weights, such as `SequenceMean()` or `TokenSum()`. None is `GlobalTokenMean`:
            the mean over the tokens that count, or their sum over num_items_in_batch.
        class_weights: (V,) a weight of each id of the whole vocabulary: the loss is then the weighted mean of the
            tokens, as torch's `cross_entropy` has it. With label_smoothing, which then weighs each id's share, one more
            forward and backward run, the weights must not be negative, and loss_type must be "nll".
        metrics: "none"; "loss": `nll` and `z_loss`; "basic": also `accuracy`; "with_entropy": also `entropy`. Each is
            a mean over the tokens with a weight.
        passes: as in `FusedLinearGRPOLoss`.
        options: the fields of the objective, such as label_smoothing and z_loss; world_size, of the reduction; and
            temperature, softcap, scale, chunk_tokens, chunk_vocab, as in `FusedLinearGRPOLoss`.

    Raises:
        TypeError, ValueError: an unknown loss_type or option, with the known ones; a bad value.
    """

    class_weights: Tensor | None
    COLUMNS = ("token_weights", "segments", "num_sequences", "num_items_in_batch")

    @show_options(SupervisedKeywords)
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
        terms, head = build_terms(
            loss_type, dict(options), SUPERVISED, GlobalTokenMean(), reduction=reduction, metrics=metrics,
            keywords=KEYWORDS,
        )  # fmt: skip
        if class_weights is not None:
            check_shape("class_weights", check_dense("class_weights", class_weights), (None,), "(V,)")
            check_constant("class_weights", class_weights)
        smoothing: float = getattr(terms.objective, "label_smoothing", 0.0)
        if class_weights is not None and smoothing:
            if type(terms.objective) is not CrossEntropy or bool((class_weights < 0).any()):
                raise ValueError('class_weights with label_smoothing must be >= 0, and loss_type must be "nll"')
            terms = replace(terms, objective=_ClassSmoothed(**vars(terms.objective)))
        super().__init__(terms, passes, head)
        self.register_buffer("class_weights", class_weights, persistent=False)

    def check_vocabulary(self, vocab: int) -> None:
        super().check_vocabulary(vocab)
        if self.class_weights is not None:
            check_shape("class_weights", self.class_weights, (vocab,), f"(V,) = ({vocab},) from the lm_head")

    def check_step(self) -> None:
        super().check_step()
        if isinstance(self.terms.objective, _ClassSmoothed):
            raise ValueError(
                "class_weights must be None with label_smoothing here: together they need the hidden states, which the "
                "module itself takes"
            )

    def batch(
        self,
        ids: Tensor,
        mask: Tensor | None,
        *,
        source: str = "targets",
        token_weights: Tensor | None = None,
        num_items_in_batch: int | float | Tensor | None = None,
        of_smoothing: bool = False,  # the batch of `class_smoothing`
        **columns: Any,
    ) -> PolicyBatch:
        weights = token_weights
        if weights is None:
            weights = torch.ones(ids.shape[:1], dtype=torch.float32, device=ids.device)
        elif (weights := check_dense("token_weights", weights, ids, source)).shape != ids.shape:
            check_shape(
                "token_weights", weights, ids.shape[:1], f"{tuple(ids.shape)} from {source}, or one for each row"
            )
        check_constant("token_weights", weights)
        check_divisors(
            self.terms.reduction, num_items_in_batch=num_items_in_batch, num_sequences=columns.get("num_sequences")
        )
        if self.class_weights is not None:
            classes = self.class_weights.to(ids.device, torch.float32)
            counted = find_counted(ids, mask)
            # An id without a weight makes the loss NaN.
            known = torch.where(ids < classes.numel(), classes[ids.clamp(0, classes.numel() - 1)], torch.nan)
            of_ids = torch.where(counted, known, 0.0)
            weights = weights if weights.shape == ids.shape else weights.view(-1, *[1] * (ids.dim() - 1))
            if num_items_in_batch is None and isinstance(self.terms.reduction, GlobalTokenMean):
                # The sum of the weights is the divisor of a weighted mean; the reduction divides by their number.
                weights = weights * (counted.sum() / of_ids.sum())
            if not of_smoothing:
                weights = weights * of_ids
            weights = weights.expand(ids.shape)
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
        head = self._head(hidden, weight, targets, mask=mask, bias=bias, vocab_parallel=vocab_parallel)
        columns: dict[str, Any] = {
            "token_weights": token_weights, "segments": segments, "num_sequences": num_sequences,
            "num_items_in_batch": num_items_in_batch,
        }  # fmt: skip
        batch = self.batch(targets, mask, **columns)
        if not isinstance(self.terms.objective, _ClassSmoothed):
            return self._loss(head, batch)
        assert self.class_weights is not None
        batch_of_term, classes = self.batch(targets, mask, of_smoothing=True, **columns), self.class_weights.float()
        term = class_smoothing(head, batch_of_term, classes, self.terms.reduction)
        loss, metrics = self._loss(head, batch)
        return PolicyLoss(loss + self.terms.objective.label_smoothing * term, metrics)

    if TYPE_CHECKING:  # the signature of a call of the module
        __call__ = forward


KEYWORDS = keywords_of(FusedLinearCrossEntropyLoss, SupervisedKeywords)
