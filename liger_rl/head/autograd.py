"""Runs an engine on a head. If a gradient is needed, the values come out of one autograd Function."""

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_rl.head.head_options import EngineOptions
from liger_rl.head.interface import Gradients, Head, Needs, whole_head
from liger_rl.kernels import gemm
from liger_rl.kernels.differentiable_once import differentiable_once
from liger_rl.kernels.statistics import TokenGradients, TokenStatistics


class HeadGradients(NamedTuple):
    """The gradients of the differentiable values of n tokens; None for a value that the loss does not depend on."""

    logps: Tensor | None  # (n,), or (n, K) of K targets
    entropy: Tensor | None = None  # (n,), as the next two
    lse: Tensor | None = None
    mean_logits: Tensor | None = None
    topk_logps: Tensor | None = None  # (n, K)


class HeadValues(NamedTuple):
    """The values of n tokens, the fields of `LogProbs`; None for a value that the options leave out."""

    logps: Tensor
    entropy: Tensor | None
    lse: Tensor | None
    mean_logits: Tensor | None
    topk_logps: Tensor | None  # the last differentiable one
    log_sum_sq_probs: Tensor | None
    is_top1: Tensor | None
    topk_ids: Tensor | None

    @classmethod
    def of(cls, statistics: TokenStatistics, options: EngineOptions, vocab: int) -> "HeadValues":
        lse, mean = statistics.lse.float() if options.lse else None, statistics.extra("mean_logits", vocab)
        differentiable = statistics.logps, statistics.entropy, lse, mean, statistics.topk_logps
        return cls(*differentiable, statistics.log_sum_sq_probs, statistics.is_top1, statistics.topk_ids)

    @classmethod
    def unwritten(cls, n: int, options: EngineOptions, device: torch.device) -> "HeadValues":
        """Memory for the values of one pass, which has no topk."""
        asked = {"logps", *options.extras, *(name for name in ("entropy", "lse") if getattr(options, name))}
        dtypes = [(torch.bool if key == "is_top1" else torch.float32) if key in asked else None for key in cls._fields]
        return cls._make(None if dtype is None else torch.empty(n, dtype=dtype, device=device) for dtype in dtypes)


def linear_values(head: Head, options: EngineOptions, engine: ModuleType) -> HeadValues:
    """The values of the live tokens.

    The fields of `HeadGradients` are differentiable if `head.wants_gradient`.
    """
    with torch.no_grad(), gemm.without_autocast(head.hidden.device):
        statistics, saved = engine.forward(head, options)
    values = HeadValues.of(statistics, options, head.vocab)
    if not head.wants_gradient:
        return values
    # The backward does not read the extras.
    token_values = statistics.logps, statistics.lse, statistics.entropy
    tensors, backward = (head.targets, *token_values, *(saved or ())), partial(_backward, head[4:], options, engine)
    count = len(HeadGradients._fields)
    return HeadValues._make(EngineFunction.apply(*head.differentiable, values, count, tensors, backward))


class EngineFunction(torch.autograd.Function):
    """(hidden, weight, bias) -> values, the first `count` of them differentiable.

    `backward(saved, grads, needs)` computes the gradients. It gets these three tensors and then `saved`, and holds no
    tensor itself. The caller of the forward enters `options.gather`, because it reads the shape of the whole head.
    `backward` enters it itself, once.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, values, count, saved, backward):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, *saved)
        ctx.count, ctx.engine_backward = count, backward
        ctx.mark_non_differentiable(*(value for value in values[count:] if value is not None))
        return *(None if value is None else value.clone() for value in values[:count]), *values[count:]

    @staticmethod
    @differentiable_once
    def backward(ctx, saved, *grads):
        gradients = ctx.engine_backward(saved, grads[: ctx.count], ctx.needs_input_grad[:3])
        return *gradients, None, None, None, None


def _backward(
    rest_of_head: Sequence[Any],
    options: EngineOptions,
    engine: ModuleType,
    saved: Sequence[Any],
    grads: Sequence[Tensor | None],
    needs: Needs,
) -> Gradients:
    head = Head(*saved[:4], *rest_of_head)
    statistics = TokenStatistics(*saved[4:7])
    return token_gradients(engine, head, options, statistics, saved[7:] or None, HeadGradients(*grads), needs)


def token_gradients(
    engine: ModuleType,
    head: Head,
    options: EngineOptions,
    statistics: TokenStatistics,  # (n,) each, from the engine's forward
    saved: Sequence[Tensor | None] | None,  # the fields of `engine.Saved`
    grads: HeadGradients,
    needs: Needs,
) -> Gradients:
    """The gradients of `head.differentiable`, with the shapes and dtypes of the inputs."""
    if all(grad is None for grad in grads):
        return Gradients()
    with gemm.without_autocast(head.hidden.device), whole_head(options.gather, head.weight, head.bias):
        saved_fields = None if saved is None else engine.Saved(*saved)
        if grads.topk_logps is not None:
            head, statistics, grads = engine.with_topk(head, statistics, saved_fields, grads)
        tokens = token_inputs(statistics, grads, head.vocab, getattr(engine, "tokens_of", TokenGradients.of))
        return engine.backward(head, options, statistics, saved_fields, tokens, needs)


def token_inputs(
    statistics: TokenStatistics,
    grads: HeadGradients,
    vocab: int,  # entries of the whole vocabulary
    of: Callable[[TokenStatistics, Tensor, Tensor | None], TokenGradients] = TokenGradients.of,
) -> TokenGradients:
    """The inputs of an engine's backward; `of` makes those of logps and entropy."""
    grad_logps = torch.zeros_like(statistics.logps) if grads.logps is None else grads.logps.float()
    tokens = of(statistics, grad_logps, grads.entropy)
    if grads.lse is not None:
        tokens = tokens.with_lse(grads.lse.float(), statistics.logps)
    return tokens if grads.mean_logits is None else tokens.with_mean_logits(grads.mean_logits, vocab)
