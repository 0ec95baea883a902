"""Runs an engine on a head. If a gradient is needed, the values come out of one autograd Function."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from liger_rl.head.record import DIFFERENTIABLE, Gradients, Head, LogProbs, Needs, gather_head
from liger_rl.kernels import gemm
from liger_rl.kernels.public_call import refuse_second_derivative
from liger_rl.kernels.statistics import TokenGradients, TokenStatistics

# What an engine's backward reads from its forward: tensors by name.
Saved = SimpleNamespace


class Engine:
    """A way to compute the values of a head's tokens and their gradients.

    `forward` and `backward` run without autocast and autograd, with the whole weight.
    """

    @staticmethod
    def forward(saved: Saved, head: Head) -> TokenStatistics:
        """Statistics of the tokens that count. What the backward reads is set as attributes of `saved`."""
        raise NotImplementedError

    @staticmethod
    def backward(saved: Saved, head: Head, grads: LogProbs, needs: Needs) -> Gradients:
        """Gradients from the fields of `grads`, those of the values; None where the loss does not depend on a value."""
        raise NotImplementedError


def run_engine(engine: type[Engine], head: Head, *, wants_gradient: bool) -> LogProbs:
    """The values (n,) of the live tokens. The fields DIFFERENTIABLE are so if a tensor of the head wants a gradient."""
    if wants_gradient:
        return LogProbs._make(EngineFunction.apply(head.hidden, head.weight, head.bias, head, engine))
    with torch.no_grad(), gemm.without_autocast(head.hidden.device):
        return token_values(engine.forward(Saved(), head), head)


def token_values(statistics: TokenStatistics, head: Head) -> LogProbs:
    """The values (n,) that the options ask for; None for others."""
    lse = statistics.lse.float() if head.options.lse else None
    mean_logits = None if statistics.sum_logits is None else statistics.sum_logits / head.vocab
    return LogProbs(
        statistics.logps, statistics.entropy, statistics.log_sum_sq_probs, mean_logits, statistics.is_top1, lse
    )


def save_tensors(ctx: Any, **tensors: Tensor | None) -> None:
    """`ctx.save_for_backward` with names."""
    ctx.saved_names = tuple(tensors)
    ctx.save_for_backward(*tensors.values())


def named_tensors(ctx: Any) -> Saved:
    """The tensors of `save_tensors`, by name."""
    return Saved(**dict(zip(ctx.saved_names, ctx.saved_tensors, strict=True)))


class EngineFunction(torch.autograd.Function):
    """(hidden, weight, bias) -> the fields of LogProbs.

    The caller of the forward enters `options.gather`, because the checks read the shape of the whole head. The backward
    enters it itself, once.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, head, engine):
        ctx.set_materialize_grads(False)
        saved = Saved()
        with gemm.without_autocast(hidden.device):
            values = token_values(engine.forward(saved, head), head)
        # The record keeps no tensor that autograd has to track.
        ctx.head, ctx.engine = head._replace(hidden=None, weight=None, bias=None, targets=None), engine
        save_tensors(ctx, hidden=hidden, weight=weight, bias=bias, targets=head.targets, **vars(saved))
        outputs, constants = [], []
        for name, value in zip(LogProbs._fields, values, strict=True):
            if value is not None and name in DIFFERENTIABLE:
                # A copy, because the caller may write to its results and the backward reads the saved ones.
                value = value.clone()
            elif value is not None:
                constants.append(value)
            outputs.append(value)
        ctx.mark_non_differentiable(*constants)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads):
        refuse_second_derivative()
        if all(grad is None for grad in grads):
            return None, None, None, None, None
        saved = named_tensors(ctx)
        head = ctx.head._replace(hidden=saved.hidden, weight=saved.weight, bias=saved.bias, targets=saved.targets)
        with gemm.without_autocast(head.hidden.device), gather_head(head.options, head.weight, head.bias):
            gradients = ctx.engine.backward(saved, head, LogProbs(*grads), ctx.needs_input_grad[:3])
        return *gradients, None, None


def token_gradients(saved: Saved | TokenStatistics, grads: LogProbs, vocab: int) -> TokenGradients:
    """dL/dlogits of each token as numbers, from the gradients of its values; `vocab`: entries of the whole vocabulary.

    `saved` has logps, lse and entropy.
    """
    grad_logps = torch.zeros_like(saved.logps) if grads.logps is None else grads.logps.float()
    statistics = TokenStatistics(saved.logps, saved.lse, saved.entropy)
    gradients = TokenGradients.of(statistics, grad_logps, grads.entropy)
    if grads.lse is not None:
        gradients = gradients.with_lse(grads.lse.float(), saved.logps)
    return gradients if grads.mean_logits is None else gradients.with_mean_logits(grads.mean_logits, vocab)


def has_gradient(gradients: TokenGradients) -> Tensor:
    """(n,) bool: the gradient is not exactly zero. A NaN is true, because it must reach the gradients."""
    nonzero = gradients.grad_logps != 0 if gradients.has_gradient is None else gradients.has_gradient
    for grad in (gradients.grad_entropy, gradients.uniform):
        nonzero = nonzero if grad is None else nonzero | (grad != 0)
    return nonzero


def index_of(selected: Tensor) -> Tensor | None:
    """Index of the tokens where `selected` (n,) is true; None if it is true everywhere. It takes one host sync."""
    index = selected.nonzero().squeeze(1)
    return None if index.numel() == selected.numel() else index
