"""Log-probabilities of given logits: checks, and one autograd Function for eager mode and torch.compile."""

from typing import Any

import torch
from torch import Tensor

from liger_rl.given_logits.operator import flat, fold_in_graph, grad_in_graph, options_of
from liger_rl.given_logits.rows import LogitRowsOptions, checked_fold, grad_rows
from liger_rl.head.call import LogProbs
from liger_rl.head.checks import (
    check_apart,
    check_device,
    check_floating,
    check_temperature,
    check_tokens,
    overlaps_itself,
)
from liger_rl.kernels.statistics import TokenStatistics
from liger_rl.once import differentiable_once


class LogitRows(torch.autograd.Function):
    """(logits, targets, mask) -> (logps, entropy), (tokens,) each, 0 where none counts; a gradient for the logits."""

    @staticmethod
    def forward(ctx, logits, targets, mask, options, in_graph):
        # See `liger_rl.kernels.given_logits` for the shapes, and for which tokens count.
        ctx.set_materialize_grads(False)
        statistics = (fold_in_graph if in_graph else checked_fold)(logits, targets, mask, options)
        ctx.options, ctx.grad_rows = options, grad_in_graph if in_graph else grad_rows
        ctx.save_for_backward(logits, targets, mask, *statistics[:3])
        return statistics.logps.clone(), None if statistics.entropy is None else statistics.entropy.clone()

    @staticmethod
    @differentiable_once
    def backward(ctx, saved, grad_logps, grad_entropy):
        logits, targets, mask, *statistics = saved
        nothing = (None, None, None, None)
        if grad_logps is None and grad_entropy is None:
            return None, *nothing
        known = TokenStatistics(*statistics)
        return ctx.grad_rows(logits, targets, mask, known, grad_logps, grad_entropy, ctx.options), *nothing


def _in_graph(logits: Tensor, targets: Tensor, mask: Tensor | None, *constants: Any) -> list[Tensor]:
    found = LogitRows.apply(logits, targets, mask, options_of(*constants), True)
    return [part for part in found if part is not None]


# Dynamo traces no such Function, but puts an operator into its graph. AOTAutograd then runs `_in_graph`, because a
# composite operator has no derivative of its own.
_LIBRARY = torch.library.Library("liger_rl", "FRAGMENT")
_LIBRARY.define(
    "logit_rows(Tensor logits, Tensor targets, Tensor? mask, float[] transform, bool entropy, bool fixed_shape, "
    "str targets_name) -> Tensor[]"
)
_LIBRARY.impl("logit_rows", _in_graph, "CompositeImplicitAutograd")


def row_logprobs(logits: Tensor, targets: Tensor, mask: Tensor | None, options: LogitRowsOptions) -> LogProbs:
    """`logits_logprobs` of what is already checked; logits may be (B, P, V) with P > T, further positions unused."""
    if torch.compiler.is_compiling():
        if options.in_place or options.grad_buffer is not None:
            raise ValueError("in_place and grad_buffer must be left out under torch.compile, which writes for itself")
        logps, *rest = torch.ops.liger_rl.logit_rows(logits, targets, mask, *flat(options))
        entropies = rest[0] if rest else None
    else:
        logps, entropies = LogitRows.apply(logits, targets, mask, options, False)
    return LogProbs(logps.view(targets.shape), None if entropies is None else entropies.view(targets.shape))


def check_logits(
    logits: Tensor, targets: Tensor, mask: Tensor | None, options: LogitRowsOptions, *, spare_position: bool = False
) -> None:
    """Raise for what can be seen without reading values; `spare_position` allows (B, T + 1, V) beside (B, T)."""
    grad_buffer = options.grad_buffer
    check_floating("logits", logits)
    if logits.dim() not in (2, 3) or logits.shape[-1] == 0:
        raise ValueError(f"logits must be (B, T, V) or (N, V), got {tuple(logits.shape)}")
    shape: torch.Size = logits.shape[:-1]
    if spare_position and len(shape) == 2 and isinstance(targets, Tensor) and targets.shape == (shape[0], shape[1] - 1):
        shape = torch.Size(targets.shape)
    check_tokens(targets, mask, shape, logits, "logits", options.targets_name)
    check_temperature(options.transform, targets, options.targets_name)
    if grad_buffer is not None:
        check_floating("grad_buffer", grad_buffer)
        if grad_buffer.shape != logits.shape:
            raise ValueError(f"grad_buffer must be {tuple(logits.shape)} from logits, got {tuple(grad_buffer.shape)}")
        check_device("grad_buffer", grad_buffer, logits, "logits")
        check_apart("grad_buffer", grad_buffer, logits=logits)
    for name, place in (("logits", logits if options.in_place else None), ("grad_buffer", grad_buffer)):
        if place is not None and place.numel() > 0 and (place.stride(-1) != 1 or overlaps_itself(place)):
            raise ValueError(
                f"{name} must have rows of its own and a contiguous last dimension for the gradient, "
                f"got strides {place.stride()}"
            )
