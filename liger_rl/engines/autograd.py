"""Runs an engine on a head. If a gradient is needed, the values come out of one autograd Function."""

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from liger_rl.call.options import EngineOptions
from liger_rl.engines.interface import Gradients, Head, Needs, whole_head
from liger_rl.kernels import gemm
from liger_rl.kernels.statistics import EXTRAS, TokenGradients, TokenStatistics
from liger_rl.once import differentiable_once

# The values of a call, in the order of `linear_values`.
VALUES = ("logps", "entropy", "lse", "mean_logits", "log_sum_sq_probs", "is_top1", "topk_logps", "topk_ids")
DIFFERENTIABLE = 4
Values = Sequence[Tensor | None]


def linear_values(head: Head, options: EngineOptions, engine: ModuleType) -> Values:
    """VALUES of the live tokens, None for values that the options leave out.

    The first four are differentiable if `head.wants_gradient`. If `head.live` is a mask, values cover all N
    tokens. Entries of tokens that do not count are undefined.
    """
    with torch.no_grad(), gemm.without_autocast(head.hidden.device):
        statistics, saved = engine.forward(head, options)
    values = list(values_of(statistics, head.vocab, options).values())
    if not head.wants_gradient:
        return values
    # The backward does not read the extras.
    token_values = head.temperatures, statistics.logps, statistics.lse, statistics.entropy
    rest_of_head = head._replace(temperatures=None)[6:]
    tensors, backward = (head.targets, *token_values, *(saved or ())), partial(_backward, rest_of_head, options, engine)
    count = getattr(engine, "DIFFERENTIABLE", DIFFERENTIABLE)
    return EngineFunction.apply(*head.differentiable, values, count, tensors, backward)


def values_of(statistics: TokenStatistics, vocab: int, options: EngineOptions) -> dict[str, Tensor | None]:
    """VALUES by name."""
    fields = statistics._asdict() | {name: statistics.extra(name, vocab) for name in EXTRAS}
    return {name: None if name == "lse" and not options.lse else fields[name] for name in VALUES}


class EngineFunction(torch.autograd.Function):
    """(hidden, weight, bias, low_inputs, low_weight) -> values, the first `count` of them differentiable.

    `backward(saved, grads, needs)` computes the gradients. It gets these five tensors and then `saved`, and holds no
    tensor itself. The caller of the forward enters `options.gather`, because it reads the shape of the whole head.
    `backward` enters it itself, once.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, low_inputs, low_weight, values, count, saved, backward):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, low_inputs, low_weight, *saved)
        ctx.count, ctx.engine_backward = count, backward
        ctx.mark_non_differentiable(*(value for value in values[count:] if value is not None))
        return *(None if value is None else value.clone() for value in values[:count]), *values[count:]

    @staticmethod
    @differentiable_once
    def backward(ctx, saved, *grads):
        gradients = ctx.engine_backward(saved, grads[: ctx.count], ctx.needs_input_grad[:5])
        return *gradients, None, None, None, None


def _backward(
    rest_of_head: Sequence[Any],
    options: EngineOptions,
    engine: ModuleType,
    saved: Sequence[Any],
    grads: Sequence[Tensor | None],
    needs: Needs,
) -> Gradients:
    head = Head(*saved[:6], *rest_of_head)._replace(temperatures=saved[6])
    statistics = TokenStatistics(*saved[7:10])
    of_sum = None if len(grads) < 4 or grads[3] is None else grads[3] / head.vocab
    return token_gradients(engine, head, options, statistics, saved[10:] or None, (*grads[:3], of_sum), needs)


def tokens_with(
    statistics: TokenStatistics,
    grads: Sequence[Tensor | None],  # dL/dlogps, dL/dentropy, dL/dlse, dL/dsum_logits
    tokens_of: Callable[..., TokenGradients] = TokenGradients.of,
) -> TokenGradients:
    grad_logps, grad_entropy, grad_lse, grad_sum_logits = grads
    grad_logps = torch.zeros_like(statistics.logps) if grad_logps is None else grad_logps.float()
    tokens = tokens_of(statistics, grad_logps, grad_entropy)
    if grad_lse is not None:
        tokens = tokens.with_lse(grad_lse, statistics.logps)
    return tokens if grad_sum_logits is None else tokens.with_sum_logits(grad_sum_logits.float())


def token_gradients(
    engine: ModuleType,
    head: Head,
    options: EngineOptions,
    statistics: TokenStatistics,  # (n,) each, from the engine's forward
    saved: Sequence[Tensor | None] | None,  # the fields of `engine.Saved`
    grads: Sequence[Tensor | None],  # dL/dlogps, dL/dentropy, dL/dlse, dL/dsum_logits
    needs: Needs,
) -> Gradients:
    """The gradients of `head.differentiable`, with the shapes and dtypes of the inputs."""
    if all(grad is None for grad in grads):
        return Gradients()
    with gemm.without_autocast(head.hidden.device), whole_head(options.gather, head.weight, head.bias):
        tokens = tokens_with(statistics, grads, getattr(engine, "tokens_of", TokenGradients.of))
        saved_fields = None if saved is None else engine.Saved(*saved)
        return engine.backward(head, options, statistics, saved_fields, tokens, needs)
