"""Statistics and gradients of whole rows of given logits, in plain PyTorch.

Logits are (N, V), or (B, P, V) with any strides between rows. Targets are (N,), or (B, T) with T <= P: positions from T
on have no token. A token counts if its mask is not 0 and its target is an id in [0, V). The logits of the other tokens,
NaN included, change nothing.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from liger_rl.kernels import eager
from liger_rl.kernels.statistics import Fold, TokenGradients, TokenStatistics
from liger_rl.kernels.transform import LogitTransform

FLOAT32_BYTES = 16 << 20  # bound of a float32 copy of some rows


def fold_rows(
    logits: Tensor, targets: Tensor, mask: Tensor | None, transform: LogitTransform, *, entropy: bool
) -> TokenStatistics:
    """-> (tokens,) each, of the flattened targets. A token that does not count has 0, and an lse of +inf."""
    counts, flat_targets = _counted(logits, targets, mask), targets.flatten().long()
    columns = torch.empty(2 + entropy, targets.numel(), dtype=torch.float32, device=logits.device)
    for tokens, rows in _pieces(logits, targets):
        state = Fold.start(len(rows[0]), logits.device, entropy=entropy)
        eager.fold(logits[rows], flat_targets[tokens], 0, None, _of_tokens(transform, tokens), state)
        piece = state.finish()
        for column, values in zip(columns, (piece.logps, piece.lse, piece.entropy), strict=False):
            column[tokens] = values
    columns.masked_fill_(~counts, 0.0)
    columns[1].masked_fill_(~counts, math.inf)
    return TokenStatistics(columns[0], columns[1], columns[2] if entropy else None)


def grad_rows(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: LogitTransform,
    statistics: TokenStatistics,  # of fold_rows
    grads: tuple[Tensor, Tensor | None],  # (tokens,) float32, of log-probabilities and entropies
    out: Tensor,  # shaped like the logits: every row is written, 0 without a gradient
) -> None:
    (grad_logps, grad_entropy), flat_targets = grads, targets.flatten().long()
    has_gradient = grad_logps != 0 if grad_entropy is None else (grad_logps != 0) | (grad_entropy != 0)
    has_gradient = has_gradient & _counted(logits, targets, mask)
    gradients = TokenGradients.of(statistics, grad_logps, grad_entropy)
    for tokens, rows in _pieces(logits, targets):
        grad = torch.empty(len(rows[0]), logits.shape[-1], dtype=torch.float32, device=logits.device)
        tokens_transform = _of_tokens(transform, tokens)
        eager.grad(logits[rows], flat_targets[tokens], 0, None, tokens_transform, gradients.take(tokens), grad)
        out[rows] = grad.masked_fill_(~has_gradient[tokens, None], 0.0).to(out.dtype)
    if logits.dim() == 3:
        out[:, targets.shape[1] :] = 0


def _of_tokens(transform: LogitTransform, tokens: slice) -> LogitTransform:
    temperature = transform.temperature
    return transform.of_tokens(temperature.flatten()[tokens]) if isinstance(temperature, Tensor) else transform


def _counted(logits: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
    """(tokens,) bool."""
    targets = targets.long()  # a narrow dtype would wrap the vocabulary's size in comparisons
    counts = (targets >= 0) & (targets < logits.shape[-1])
    return (counts if mask is None else counts & (mask != 0)).flatten()


def _pieces(logits: Tensor, targets: Tensor) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """A few tokens at a time, with the indices of their rows of logits."""
    step = max(1, FLOAT32_BYTES // (4 * logits.shape[-1]))
    for first in range(0, targets.numel(), step):
        last = min(first + step, targets.numel())
        yield slice(first, last), torch.unravel_index(torch.arange(first, last, device=logits.device), targets.shape)
