"""Gradients that have no gradients of their own, and say so."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


class _NoSecondDerivative(torch.autograd.Function):
    """(number of gradients, gradients, tensors that they depend on) -> the gradients."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(None if tensor is None else tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "log-probabilities and losses of liger_rl can be differentiated once: their gradients, which "
            "create_graph=True asked to be differentiable, have no derivative"
        )


def differentiable_once(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., Any]:
    """`backward(ctx, saved, *grads)` -> an autograd Function's backward, whose gradients raise when differentiated.

    `saved` is `ctx.saved_tensors`. An input or an output of the Function must be among them: the gradients are
    connected to it, so that whatever reaches the Function's inputs through them raises. They raise only then, because
    `create_graph=True` may be meant for another part of the graph.

    `torch.autograd.function.once_differentiable` is not enough. It raises only where the gradient from above requires a
    gradient itself, which that of a plain sum does not, and it does not connect the error to the inputs, so that
    `torch.autograd.grad(..., inputs)` passes it by. Both leave a gradient penalty without effect.
    """

    @wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint's tensors can be unpacked no second time
        with torch.no_grad():
            gradients = backward(ctx, saved, *grads)
        if not torch.is_grad_enabled():  # enabled by create_graph=True alone
            return gradients
        depends_on = [tensor for tensor in (*saved, *grads) if isinstance(tensor, Tensor) and tensor.requires_grad]
        return _NoSecondDerivative.apply(len(gradients), *gradients, *depends_on)

    return wrapper
