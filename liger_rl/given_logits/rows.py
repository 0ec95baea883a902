"""Per-token softmax statistics of given logits, and their gradient, row by row where the rows lie."""

from dataclasses import dataclass

import torch
from torch import Tensor

from liger_rl.kernels import for_device
from liger_rl.kernels.statistics import TokenStatistics
from liger_rl.kernels.transform import LogitTransform
from liger_rl.once import differentiable_once


@dataclass(frozen=True, kw_only=True)
class LogitRowsOptions:
    """Everything the autograd Functions take that is not differentiated or an index."""

    transform: LogitTransform
    entropy: bool = False
    in_place: bool = False
    grad_buffer: Tensor | None = None


class LogitRows(torch.autograd.Function):
    """(logits, targets, mask) -> (logps, entropy), (tokens,) each, 0 where none counts; a gradient for the logits."""

    @staticmethod
    def forward(ctx, logits, targets, mask, options):
        # See `liger_rl.kernels.given_logits` for the shapes, and for which tokens count.
        ctx.set_materialize_grads(False)
        statistics = fold_rows(logits, targets, mask, options)
        ctx.options = options
        # By name: torch.compile of torch 2.8 traces no slice of a NamedTuple.
        ctx.save_for_backward(logits, targets, mask, statistics.logps, statistics.lse, statistics.entropy)
        return statistics.logps.clone(), None if statistics.entropy is None else statistics.entropy.clone()

    @staticmethod
    @differentiable_once
    def backward(ctx, saved, grad_logps, grad_entropy):
        logits, targets, mask, *statistics = saved
        if grad_logps is None and grad_entropy is None:
            return None, None, None, None
        known = TokenStatistics(*statistics)
        return grad_rows(logits, targets, mask, known, grad_logps, grad_entropy, ctx.options), None, None, None


def fold_rows(logits: Tensor, targets: Tensor, mask: Tensor | None, options: LogitRowsOptions) -> TokenStatistics:
    """Statistics of the logits, (tokens,) each."""
    kernels = for_device(logits.device)
    return kernels.fold_rows(_with_rows(logits), targets, mask, options.transform, entropy=options.entropy)


def _with_rows(logits: Tensor) -> Tensor:
    """The logits with a contiguous last dimension."""
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def grad_rows(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    statistics: TokenStatistics,
    grad_logps: Tensor | None,  # (tokens,)
    grad_entropy: Tensor | None,  # (tokens,), one of the two at least
    options: LogitRowsOptions,
) -> Tensor | None:
    """The gradient of the logits, in their place or a new one; None where a buffer took it."""
    if grad_logps is None:
        assert grad_entropy is not None
        grad_logps = torch.zeros_like(grad_entropy)
    add = options.grad_buffer is not None
    if options.in_place:
        out = logits
    elif options.grad_buffer is not None:
        out = options.grad_buffer
    else:
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    kernels = for_device(logits.device)
    kernels.grad_rows(
        _with_rows(logits), targets, mask, options.transform, statistics, grad_logps.float(), grad_entropy, out, add=add
    )
    if options.in_place:
        # Counted as a write, so that a second backward, or anyone else who saved the logits, is told.
        torch.autograd.graph.increment_version(logits)
    return None if add else out
