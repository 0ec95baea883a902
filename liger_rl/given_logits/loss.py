"""Per-token losses of given logits: one kernel for the rows of logits, one for the loss.

torch.compile generates the second kernel from the objective's formulas. It also makes d loss / d logp in the forward,
which is one number per token where tokens do not depend on each other. The backward is then the kernel of the rows.
"""

from collections.abc import Callable
from functools import lru_cache
from types import CodeType, FunctionType
from typing import NamedTuple, cast

import torch
from torch import Tensor

from liger_rl.given_logits.rows import fold_rows, grad_rows
from liger_rl.kernels.devices import compiles
from liger_rl.kernels.statistics import TokenStatistics
from liger_rl.once import differentiable_once
from liger_rl.policy.batch import AlignedBatch
from liger_rl.policy.loss import PolicyTerms, PreparedLoss
from liger_rl.policy.objectives import TokenLoss

ClipIndicator = Callable[[TokenLoss, AlignedBatch], Tensor | None]
DEVICES = ("cuda",)  # where a kernel is generated; elsewhere the formulas cost little beside the rows
BACKEND = "inductor"


class PerTokenLoss(NamedTuple):
    """(B, T) or (N,) each, 0 at masked tokens."""

    loss: Tensor
    """float32, differentiable."""
    kl: Tensor | None
    """float32 in nats, without gradient; None without a KL penalty."""
    is_clipped: Tensor | None
    """bool, by the chosen indicator; None where the objective does not clip."""


class Columns(NamedTuple):
    """What a token-local loss reads of a batch, with the values that the caller left there."""

    ids: Tensor
    mask: Tensor  # bool
    advantages: Tensor
    old_per_token_logps: Tensor | None
    ref_per_token_logps: Tensor | None
    importance_ratio: Tensor | None


def per_token_loss(prepared: PreparedLoss, logps: Tensor, indicator: ClipIndicator) -> PerTokenLoss:
    """(B, T) or (N,) log-probabilities -> what a caller gets."""
    result = prepared.per_token(logps)
    with torch.no_grad():
        mask = prepared.batch.mask
        clipped = indicator(result.token_loss, prepared.batch)
        kl = None if result.kl is None else torch.where(mask, result.kl.detach(), 0.0)
        return PerTokenLoss(result.loss, kl, None if clipped is None else clipped & mask)


def generates(device: torch.device, terms: PolicyTerms) -> bool:
    """Whether a kernel can be generated of a loss: it takes Triton, and tokens that do not depend on each other."""
    if device.type not in DEVICES or terms.locality != "token" or torch.compiler.is_compiling():
        return False
    return device.type != "cuda" or compiles(device)


class LogitLoss(torch.autograd.Function):
    """(logits, columns) -> PerTokenLoss; a gradient for the logits."""

    @staticmethod
    def forward(ctx, logits, columns, terms, indicator, options, raise_if_outside):
        ctx.set_materialize_grads(False)
        ctx.raise_if_outside = raise_if_outside
        statistics = fold_rows(logits, columns.ids, columns.mask, options)
        found, slope = generated(terms, indicator)(statistics.logps, columns, logits.shape[-1])
        ctx.options = options
        ctx.save_for_backward(logits, columns.ids, columns.mask, statistics.logps, statistics.lse, slope)
        ctx.mark_non_differentiable(*(part for part in found[1:] if part is not None))
        return tuple(found)

    @staticmethod
    @differentiable_once
    def backward(ctx, saved, grad_loss, *_):
        nothing = (None, None, None, None, None)
        if grad_loss is None:
            return None, *nothing
        logits, ids, mask, logps, lse, slope = saved
        known = TokenStatistics(logps, lse, None)
        grad_logps = (grad_loss * slope).flatten()
        grad = grad_rows(logits, ids, mask, known, grad_logps, None, ctx.options)
        # Last, because the device has work queued while the host waits.
        ctx.raise_if_outside()
        return grad, *nothing


@lru_cache(maxsize=64)
def generated(
    terms: PolicyTerms, indicator: ClipIndicator
) -> Callable[[Tensor, Columns, int], tuple[PerTokenLoss, Tensor]]:
    """Function of (tokens,) log-probabilities, columns and vocabulary -> per-token loss and d loss / d logp."""

    def evaluated(logps: Tensor, columns: Columns, vocab: int) -> tuple[PerTokenLoss, Tensor]:
        ids = columns.ids.long()
        counted = (ids >= 0) & (ids < vocab) & columns.mask
        given = AlignedBatch(
            mask=counted,
            advantages=columns.advantages,
            old_per_token_logps=columns.old_per_token_logps,
            ref_per_token_logps=columns.ref_per_token_logps,
            importance_ratio=columns.importance_ratio,
            sampling_per_token_logps=None,
            importance_ratio_per_sequence=False,
            segments=None,
            num_sequences=None,
            num_items_in_batch=None,
        )
        prepared = PreparedLoss(terms, given.cleaned(torch.float32), None)

        def total(logps: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss, kl, is_clipped = per_token_loss(prepared, logps, indicator)
            found = {"loss": loss, "kl": kl, "is_clipped": is_clipped}
            # torch.func.grad returns only tensors beside the gradient.
            return loss.sum(), {name: part for name, part in found.items() if part is not None}

        slope, found = torch.func.grad(total, has_aux=True)(logps.view(columns.ids.shape))
        return PerTokenLoss(found["loss"], found.get("kl"), found.get("is_clipped")), slope

    # Not fullgraph: beyond torch.compile's limit of layouts and dtypes the formulas run step by step.
    return torch.compile(_with_code_of_its_own(evaluated), dynamic=True, backend=BACKEND)


def _with_code_of_its_own(function: Callable) -> Callable:
    """torch.compile limits how often it compiles one code object. With its own, no loss uses up another's limit."""
    plain = cast(FunctionType, function)
    code: CodeType = plain.__code__.replace()
    return FunctionType(code, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__)
