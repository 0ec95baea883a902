"""The lm_head and a loss in one module: what all fused losses share."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from liger_rl.distributed import VocabParallel
from liger_rl.head.head_options import COMPUTE_OPTIONS, HeadOptions
from liger_rl.head.live_tokens import find_counted
from liger_rl.head.logprobs import log_probs
from liger_rl.head.record import Head
from liger_rl.kernels.public_call import public
from liger_rl.kernels.statistics import EXTRAS
from liger_rl.kernels.transform import LogitTransform
from liger_rl.losses.batch import PolicyBatch
from liger_rl.losses.fused import evaluate
from liger_rl.losses.levels import MetricsLevel
from liger_rl.losses.loss import PolicyLoss, PolicyTerms
from liger_rl.losses.presets import Preset, build_loss, list_keywords
from liger_rl.losses.reductions import Reduction

TRANSFORM = ("temperature", "softcap", "scale")  # the options of the head that every loss has


class FusedLinearLoss(nn.Module):
    """Base of the fused losses: a loss of log-probabilities, and how a head makes them."""

    # Names of a batch's columns that this loss takes, besides the token ids and their mask.
    COLUMNS: tuple[str, ...] = ()

    def __init__(self, terms: PolicyTerms, head: dict[str, Any]) -> None:
        super().__init__()
        self.terms = terms
        how: dict[str, Any] = {name: value for name, value in head.items() if name in COMPUTE_OPTIONS}
        transform: dict[str, Any] = {name: value for name, value in head.items() if name in TRANSFORM}
        self.options = HeadOptions(
            transform=LogitTransform(**transform), entropy=terms.needs_entropy, lse="lse" in terms.head_values,
            extras=tuple(name for name in EXTRAS if name in terms.head_values), **how,
        )  # fmt: skip

    def batch(self, ids: Tensor, mask: Tensor | None, *, source: str = "targets", **columns: Any) -> PolicyBatch:
        """The batch of `columns`, named as in COLUMNS. A negative id and a mask of 0 mask a token.

        Raises TypeError or ValueError for a column that does not fit the ids, which the caller names `source`.
        """
        raise NotImplementedError

    def list_options(self) -> list[str]:
        """The names of this loss's options."""
        parts: list[Any] = [self.terms.objective, self.terms.reduction]
        names = (option.name for part in parts if is_dataclass(part) for option in fields(part))
        return [*list_keywords(type(self)), *TRANSFORM, *names]

    def _loss(self, head: Head, batch: PolicyBatch) -> PolicyLoss:
        """The loss of a call's head and batch; `batch.mask` is the head's."""
        terms = self.terms
        aligned = terms.check(batch, head.shape, head.hidden.device)
        head = head._replace(needed=terms.tokens_to_project(aligned))
        projected = head
        if head.vocab_parallel is not None and head.needed is not None:
            # Every rank has the same tokens, which it selects without the others.
            projected = head._replace(mask=find_counted(head.ids, head.mask, head.needed), needed=None)
        values = log_probs(projected)
        # We prepare the loss only now. Its small kernels are launched while the device computes the log-probabilities.
        prepared = terms.prepare(aligned, torch.float32, find_counted(head.ids, head.mask))
        others = {name: getattr(values, name) for name in terms.head_values}
        result = evaluate(prepared, values.logps, values.entropy, others)
        return result

    @torch.no_grad()
    def _logps(self, head: Head, transform: LogitTransform | None = None) -> Tensor:
        """Log-probabilities alone, of a call's head; with another transform than this module's if one is given."""
        transform = transform or self.transform
        options = replace(self.options, entropy=False, lse=False, extras=(), transform=transform)
        return log_probs(head._replace(options=options)).logps

    @public
    def reference_logps(
        self,
        hidden: Tensor,
        weight: Tensor,
        selected_token_ids: Tensor,
        mask: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        vocab_parallel: VocabParallel | None = None,
    ) -> Tensor:
        """Log-probabilities (B, T) or (N,), float32, under a reference or old policy's head, without gradient.

        The arguments are as in `forward`, with the tensors of that policy. The logit transform is this module's.
        """
        return self._logps(
            Head.of(
                hidden, weight, selected_token_ids, self.options, mask=mask, bias=bias,
                vocab_parallel=vocab_parallel, targets_name="selected_token_ids",
            )
        )  # fmt: skip

    @property
    def transform(self) -> LogitTransform:
        return self.options.transform

    def extra_repr(self) -> str:
        return f"{self.terms}, {self.transform}"


def build_terms(
    loss_type: Any,
    options: dict[str, Any],
    presets: Mapping[str, Preset],
    mean: Reduction,
    *,
    reduction: Reduction | None,
    metrics: MetricsLevel,
    loss: type,  # the class that is built
) -> tuple[PolicyTerms, dict[str, Any]]:
    """The loss of a preset or of the caller's objective, whose default reduction is `mean`; and the head's options."""
    head = {name: value for name, value in options.items() if name in TRANSFORM}
    loss_options = {name: value for name, value in options.items() if name not in head}
    if reduction is None and not isinstance(loss_type, str):
        reduction = mean
    keywords = [*list_keywords(loss), *TRANSFORM]
    terms = build_loss(
        loss_type, loss_options, presets=presets, reduction=reduction, metrics=metrics, keywords=keywords
    )
    return terms, head
