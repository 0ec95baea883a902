"""The kernels of given logits as operators of torch's own: a graph of torch.compile holds each as one node.

They have no derivative of their own. `LogitRows` differentiates them as it does the kernels themselves.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_rl.given_logits.rows import LogitRowsOptions, checked_fold, grad_rows
from liger_rl.head.tokens import WAITING_OPERATOR
from liger_rl.kernels.statistics import TokenStatistics
from liger_rl.kernels.transform import LogitTransform


def flat(options: LogitRowsOptions) -> tuple[list[float], bool, bool, str]:
    """In types that an operator's schema has; without in_place and grad_buffer, which are for eager mode."""
    transform = options.transform
    if isinstance(transform.temperature, Tensor):
        raise ValueError("temperature must be a number under torch.compile, whose graphs hold no tensor of it")
    numbers = [transform.temperature, transform.scale, *([] if transform.softcap is None else [transform.softcap])]
    return numbers, options.entropy, options.fixed_shape, options.targets_name


def options_of(transform: list[float], *flags: Any) -> LogitRowsOptions:
    temperature, scale, *softcap = transform
    whole = LogitTransform(temperature=temperature, scale=scale, softcap=softcap[0] if softcap else None)
    named = dict(zip(("entropy", "fixed_shape", "targets_name"), flags, strict=False))
    return LogitRowsOptions(transform=whole, **named)


def _fold(
    logits: Tensor,  # (B, P, V) or (N, V)
    targets: Tensor,  # (B, T) or (N,)
    mask: Tensor | None,  # like targets
    transform: list[float],
    entropy: bool,
    fixed_shape: bool,
    targets_name: str,
) -> Tensor:
    options = options_of(transform, entropy, fixed_shape, targets_name)
    return torch.stack([part for part in checked_fold(logits, targets, mask, options)[:3] if part is not None])


def _fake_fold(logits, targets, mask, transform, entropy, *_):
    return torch.empty(2 + entropy, targets.numel(), dtype=torch.float32, device=logits.device)


def _registered(name: str, **options: Any) -> Callable[..., Tensor]:
    fold = torch.library.custom_op(f"liger_rl::{name}", _fold, mutates_args=(), **options)
    fold.register_fake(_fake_fold)
    return fold


# Two operators that compute the same, because an operator either has a tag or has it not.
waiting = _registered("logits_logprobs", **WAITING_OPERATOR)
never_waiting = _registered("logits_logprobs_fixed_shape")


@torch.library.custom_op("liger_rl::logits_logprobs_backward", mutates_args=())
def _grad(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    statistics: list[Tensor],
    grad_logps: Tensor | None,
    grad_entropy: Tensor | None,
    transform: list[float],
) -> Tensor:
    logps, lse, *entropies = statistics
    known = TokenStatistics(logps, lse, entropies[0] if entropies else None)
    options = options_of(transform, bool(entropies))
    grad = grad_rows(logits, targets, mask, known, grad_logps, grad_entropy, options)
    assert grad is not None
    return grad


@_grad.register_fake
def _(logits, *_):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def fold_in_graph(logits: Tensor, targets: Tensor, mask: Tensor | None, options: LogitRowsOptions) -> TokenStatistics:
    """`checked_fold` as an operator."""
    fold = never_waiting if options.fixed_shape else waiting
    logps, lse, *entropies = fold(logits, targets, mask, *flat(options))
    return TokenStatistics(logps, lse, entropies[0] if entropies else None)


def grad_in_graph(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    statistics: TokenStatistics,
    grad_logps: Tensor | None,
    grad_entropy: Tensor | None,
    options: LogitRowsOptions,
) -> Tensor:
    """`grad_rows` as an operator."""
    known = [part for part in statistics[:3] if part is not None]
    return _grad(logits, targets, mask, known, grad_logps, grad_entropy, flat(options)[0])
