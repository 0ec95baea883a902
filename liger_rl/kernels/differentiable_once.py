"""Gradients without a second derivative, which raise if one is asked for."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


class _NoSecondDerivative(torch.autograd.Function):
    """(number of gradients, gradients, tensors that they depend on) -> the gradients, whose backward raises."""

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
    """`backward(ctx, saved, *grads)` -> the backward of an autograd Function, whose gradients raise if differentiated.

    `saved` is `ctx.saved_tensors`, and must contain an input or an output of the Function. With `create_graph=True` the
    gradients are connected to the saved tensors, and a second backward that goes through the gradients raises. Nothing
    raises before, because `create_graph=True` may be meant for another part of the graph.

    `torch.autograd.function.once_differentiable` raises only if the gradient from above requires a gradient, and does
    not connect the error to the inputs. A gradient penalty would silently do nothing.
    """

    @wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: a checkpoint can unpack its tensors only once
        with torch.no_grad():
            gradients = backward(ctx, saved, *grads)
        if not torch.is_grad_enabled():  # only create_graph=True enables it here
            return gradients
        depends_on = [tensor for tensor in (*saved, *grads) if isinstance(tensor, Tensor) and tensor.requires_grad]
        return _NoSecondDerivative.apply(len(gradients), *gradients, *depends_on)

    return wrapper
