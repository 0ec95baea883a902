"""Log-probabilities of given logits as an operator of torch's own, for torch.compile; see `liger_rl.linear_op`."""

from typing import Any

import torch
from torch import Tensor

from liger_rl.kernels.statistics import TokenStatistics
from liger_rl.kernels.transform import LogitTransform
from liger_rl.logit_rows import LogitRowsOptions, fold_rows, grad_rows
from liger_rl.tokens import LiveTokens, all_tokens, live_tokens


@torch.library.custom_op("liger_rl::logits_logprobs", mutates_args=())
def _forward(
    logits: Tensor,  # (B, T, V) or (N, V)
    targets: Tensor,  # (N,)
    live: Tensor,  # (N,) bool, the tokens that count
    temperature: float,
    softcap: float | None,
    scale: float,
    entropy: bool,
    fixed_shape: bool,
) -> list[Tensor]:
    rows = _rows(logits, targets, live, fixed_shape)
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    statistics = fold_rows(logits, targets, rows.positions, _options(temperature, softcap, scale, entropy))
    parts = [part for part in statistics[:3] if part is not None]
    return [part.new_zeros(targets.shape).index_copy_(0, rows.positions, part) for part in parts]


@_forward.register_fake
def _(logits, targets, live, temperature, softcap, scale, entropy, fixed_shape):
    def values() -> Tensor:
        return torch.empty(targets.shape, dtype=torch.float32, device=logits.device)

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
    live: Tensor,
    temperature: float,
    softcap: float | None,
    scale: float,
    entropy: bool,
    fixed_shape: bool,
) -> Tensor:
    rows = _rows(logits, targets, live, fixed_shape)
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    live_entropies, grad_logps, grad_entropy = (
        None if column is None else column[rows.positions] for column in (entropies, grad_logps, grad_entropy)
    )
    known = TokenStatistics(logps[rows.positions], lse[rows.positions], live_entropies)
    options = _options(temperature, softcap, scale, entropy)
    return grad_rows(logits, targets, rows.positions, rows.dead, known, grad_logps, grad_entropy, options)


@_backward.register_fake
def _(grad_logps, grad_entropy, logps, lse, entropies, logits, *_):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _options(temperature: float, softcap: float | None, scale: float, entropy: bool) -> LogitRowsOptions:
    transform = LogitTransform(temperature=temperature, softcap=softcap, scale=scale)
    return LogitRowsOptions(transform=transform, entropy=entropy)


def _rows(logits: Tensor, targets: Tensor, live: Tensor, fixed_shape: bool) -> LiveTokens:
    return all_tokens(targets) if fixed_shape else live_tokens(targets, live, logits.shape[-1], "logits")


def _keep(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.options = inputs[3:]
    ctx.save_for_backward(*inputs[:3], *output)


def _differentiate(ctx, grads):
    logits, targets, live, logps, lse, *entropies = ctx.saved_tensors
    nothing = [None] * (2 + len(ctx.options))
    grad_logps, grad_entropy = grads[0], grads[2] if entropies else None
    if grad_logps is None and grad_entropy is None:
        return None, *nothing
    kept = (logps, lse, entropies[0] if entropies else None)
    return _backward(grad_logps, grad_entropy, *kept, logits, targets, live, *ctx.options), *nothing


_forward.register_autograd(_differentiate, setup_context=_keep)


def logits_op(
    logits: Tensor, targets: Tensor, live: Tensor, transform: LogitTransform, *, entropy: bool, fixed_shape: bool
) -> tuple[Any, ...]:
    """(N,) logps and entropy, differentiable; zero, or with `fixed_shape` meaningless, where the mask is False.

    Raises:
        ValueError: when it runs, a target outside of the vocabulary, unless `fixed_shape`.
    """
    constants = (transform.temperature, transform.softcap, transform.scale)
    logps, _, *entropies = _forward(logits, targets, live, *constants, entropy, fixed_shape)
    return logps, entropies[0] if entropies else None
