"""Runs an engine on a head. If a gradient is needed, the values come out of one autograd Function, `LinearLogProbs`."""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from liger_rl.call.options import EngineOptions
from liger_rl.engines.interface import Gradients, Head, Needs, whole_head
from liger_rl.kernels import gemm
from liger_rl.kernels.statistics import EXTRAS, TokenGradients, TokenStatistics
from liger_rl.once import differentiable_once

# The values of a call, in the order of `linear_values`.
VALUES = ("logps", "entropy", "lse", *EXTRAS, "topk_logps", "topk_ids")
DIFFERENTIABLE = 3
Values = Sequence[Tensor | None]


def linear_values(head: Head, options: EngineOptions, engine: ModuleType) -> Values:
    """VALUES of the live tokens, None for values that the options leave out.

    logps, entropy and lse are differentiable if `head.wants_gradient`. If `head.live` is a mask, values cover all N
    tokens. Entries of tokens that do not count are undefined.
    """
    with torch.no_grad(), gemm.without_autocast(head.hidden.device):
        statistics, saved = engine.forward(head, options)
    if head.wants_gradient:
        return LinearLogProbs.apply(*head.differentiable, head, options, engine, statistics, saved)
    return _values(statistics, head, options)


def _values(statistics: TokenStatistics, head: Head, options: EngineOptions) -> Values:
    mean_logits, lse = statistics.mean_logits(head.vocab), statistics.lse if options.lse else None
    extras = statistics.log_sum_sq_probs, mean_logits, statistics.is_top1
    return statistics.logps, statistics.entropy, lse, *extras, statistics.topk_logps, statistics.topk_ids


class LinearLogProbs(torch.autograd.Function):
    """(hidden, weight, bias, low_inputs, low_weight) -> VALUES. The engine's backward computes the gradients.

    The caller of the forward enters `options.gather`, because it reads the shape of the whole head. The backward enters
    `options.gather` itself, once.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, low_inputs, low_weight, head, options, engine, statistics, saved):
        ctx.set_materialize_grads(False)
        # The extras have no gradient, and the backward does not read them.
        tensors = hidden, weight, bias, low_inputs, low_weight, head.targets
        ctx.save_for_backward(*tensors, statistics.logps, statistics.lse, statistics.entropy, *(saved or ()))
        ctx.rest, ctx.options, ctx.engine = head[len(tensors) :], options, engine
        values = _values(statistics, head, options)
        extras = values[DIFFERENTIABLE:]
        ctx.mark_non_differentiable(*(value for value in extras if value is not None))
        return *(None if value is None else value.clone() for value in values[:DIFFERENTIABLE]), *extras

    @staticmethod
    @differentiable_once
    def backward(ctx, saved, *grads):
        head, statistics = Head(*saved[:6], *ctx.rest), TokenStatistics(*saved[6:9])
        grads, needs = grads[:DIFFERENTIABLE], ctx.needs_input_grad[:5]
        gradients = token_gradients(ctx.engine, head, ctx.options, statistics, saved[9:] or None, grads, needs)
        return *gradients, None, None, None, None, None


def token_gradients(
    engine: ModuleType,
    head: Head,
    options: EngineOptions,
    statistics: TokenStatistics,  # (n,) each, from the engine's forward
    saved: Sequence[Tensor | None] | None,  # the fields of `engine.Saved`
    grads: Sequence[Tensor | None],  # dL/dlogps, dL/dentropy, dL/dlse
    needs: Needs,
) -> Gradients:
    """The gradients of `head.differentiable`, with the shapes and dtypes of the inputs."""
    grad_logps, grad_entropy, grad_lse = grads
    if grad_logps is None and grad_entropy is None and grad_lse is None:
        return Gradients()
    with gemm.without_autocast(head.hidden.device), whole_head(options.gather, head.weight, head.bias):
        if grad_logps is None:
            grad_logps = torch.zeros_like(statistics.logps)
        tokens_of = getattr(engine, "tokens_of", TokenGradients.of)
        tokens = tokens_of(statistics, grad_logps.float(), grad_entropy)
        if grad_lse is not None:
            tokens = tokens.with_lse(grad_lse, statistics.logps)
        saved_fields = None if saved is None else engine.Saved(*saved)
        return engine.backward(head, options, statistics, saved_fields, tokens, needs)
