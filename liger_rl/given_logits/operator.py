"""Log-probabilities of given logits as an operator of torch's own, for torch.compile; see `liger_rl.head.operator`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_rl.given_logits.rows import LogitRowsOptions, fold_rows, grad_rows
from liger_rl.head.tokens import WAITING_OPERATOR, ask_vocabulary
from liger_rl.kernels.statistics import TokenStatistics
from liger_rl.kernels.transform import LogitTransform
from liger_rl.once import differentiable_once


def _forward(
    logits: Tensor,  # (B, P, V) or (N, V)
    targets: Tensor,  # (B, T) or (N,)
    mask: Tensor | None,  # like targets
    temperature: float,
    softcap: float | None,
    scale: float,
    entropy: bool,
    fixed_shape: bool,
    targets_name: str,
) -> list[Tensor]:
    raise_if_outside = ask_vocabulary(
        targets, mask, logits.shape[-1], "logits", fixed_shape=fixed_shape, targets_name=targets_name
    )
    statistics = fold_rows(logits, targets, mask, _options(temperature, softcap, scale, entropy))
    raise_if_outside()
    return [part.clone() for part in statistics[:3] if part is not None]


def _fake_forward(logits, targets, mask, temperature, softcap, scale, entropy, *_):
    def values() -> Tensor:
        return torch.empty(targets.numel(), dtype=torch.float32, device=logits.device)

    return [values() for _ in range(3 if entropy else 2)]


@torch.library.custom_op("liger_rl::logits_logprobs_backward", mutates_args=())
def _backward(
    grad_logps: Tensor | None,
    grad_entropy: Tensor | None,
    logps: Tensor,
    lse: Tensor,
    entropies: Tensor | None,
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    temperature: float,
    softcap: float | None,
    scale: float,
    entropy: bool,
    fixed_shape: bool,
    targets_name: str,
) -> Tensor:
    known = TokenStatistics(logps, lse, entropies)
    options = _options(temperature, softcap, scale, entropy)
    grad = grad_rows(logits, targets, mask, known, grad_logps, grad_entropy, options)
    assert grad is not None
    return grad


@_backward.register_fake
def _(grad_logps, grad_entropy, logps, lse, entropies, logits, *_):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _options(temperature: float, softcap: float | None, scale: float, entropy: bool) -> LogitRowsOptions:
    transform = LogitTransform(temperature=temperature, softcap=softcap, scale=scale)
    return LogitRowsOptions(transform=transform, entropy=entropy)


def _keep(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.options = inputs[3:]
    ctx.save_for_backward(*inputs[:3], *output)


@differentiable_once
def _differentiate(ctx, saved, grads):
    logits, targets, mask, logps, lse, *entropies = saved
    nothing = [None] * (2 + len(ctx.options))
    grad_logps, grad_entropy = grads[0], grads[2] if entropies else None
    if grad_logps is None and grad_entropy is None:
        return None, *nothing
    kept = (logps, lse, entropies[0] if entropies else None)
    return _backward(grad_logps, grad_entropy, *kept, logits, targets, mask, *ctx.options), *nothing


def _registered(name: str, **options: Any) -> Callable[..., list[Tensor]]:
    forward = torch.library.custom_op(f"liger_rl::{name}", _forward, mutates_args=(), **options)
    forward.register_fake(_fake_forward)
    forward.register_autograd(_differentiate, setup_context=_keep)
    return forward


# Two operators that compute the same, because an operator either has a tag or has it not.
waiting = _registered("logits_logprobs", **WAITING_OPERATOR)
never_waiting = _registered("logits_logprobs_fixed_shape")


def logits_op(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: LogitTransform,
    *,
    entropy: bool,
    fixed_shape: bool,
    targets_name: str,
) -> tuple[Tensor, Tensor | None]:
    """(tokens,) logps and entropy, differentiable; 0 for tokens that do not count.

    Raises:
        ValueError: when it runs, a target outside of the vocabulary, unless `fixed_shape`.
    """
    constants = (transform.temperature, transform.softcap, transform.scale)
    operator = never_waiting if fixed_shape else waiting
    logps, _, *entropies = operator(logits, targets, mask, *constants, entropy, fixed_shape, targets_name)
    return logps, entropies[0] if entropies else None
