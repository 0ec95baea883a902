"""Statistics and gradients of whole rows of given logits, in plain PyTorch.

Logits are (N, V), or (B, P, V) with any strides between rows; targets are (N,), or (B, T) with T <= P, where positions
from T on have no token. A token counts where its mask is not 0 and its target is an id in [0, V). What the logits of
others are, NaN included, changes nothing.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from liger_rl.kernels import eager
from liger_rl.kernels.statistics import Fold, TokenGradients, TokenStatistics
from liger_rl.kernels.transform import LogitTransform

FLOAT32_BYTES = 16 << 20  # rows are copied to float32, so few at a time


def fold_rows(
    logits: Tensor, targets: Tensor, mask: Tensor | None, transform: LogitTransform, *, entropy: bool
) -> TokenStatistics:
    """-> (tokens,) each, of the flattened targets; 0 (lse: infinite) for tokens that do not count."""
    counts, flat_targets = _counted(logits, targets, mask), targets.flatten().long()
    parts: list[list[Tensor]] = []
    for tokens, rows in _parts(logits, targets):
        state = Fold.start(len(rows[0]), logits.device, entropy=entropy)
        eager.fold(logits[rows], flat_targets[tokens], 0, None, _of_some(transform, tokens), state)
        found = state.finish()
        parts.append([part for part in (found.logps, found.lse, found.entropy) if part is not None])
    if not parts:
        nothing = torch.empty(0, dtype=torch.float32, device=logits.device)
        return TokenStatistics(nothing, nothing, nothing if entropy else None)
    logps, lse, *entropies = (torch.cat(part) for part in zip(*parts, strict=True))
    logps, lse = torch.where(counts, logps, 0.0), torch.where(counts, lse, math.inf)
    return TokenStatistics(logps, lse, torch.where(counts, entropies[0], 0.0) if entropies else None)


def grad_rows(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: LogitTransform,
    statistics: TokenStatistics,  # of fold_rows
    grads: tuple[Tensor, Tensor | None],  # (tokens,) float32, of log-probabilities and entropies
    out: Tensor,  # like the logits, whose memory it may have: every row is written, 0 without a gradient
    *,
    add: bool,  # to what `out` holds
) -> None:
    (grad_logps, grad_entropy), flat_targets = grads, targets.flatten().long()
    wanted = grad_logps != 0 if grad_entropy is None else (grad_logps != 0) | (grad_entropy != 0)
    wanted = wanted & _counted(logits, targets, mask)
    gradients = TokenGradients.of(statistics, grad_logps, grad_entropy)
    for tokens, rows in _parts(logits, targets):
        grad = torch.empty(len(rows[0]), logits.shape[-1], dtype=torch.float32, device=logits.device)
        some = _of_some(transform, tokens)
        eager.grad(logits[rows], flat_targets[tokens], 0, None, some, gradients.take(tokens), grad)
        grad.masked_fill_(~wanted[tokens, None], 0.0)
        out[rows] = (grad + out[rows] if add else grad).to(out.dtype)
    if logits.dim() == 3 and not add:
        out[:, targets.shape[1] :] = 0


def _of_some(transform: LogitTransform, tokens: slice) -> LogitTransform:
    given = transform.temperature
    return transform.of_tokens(given.flatten()[tokens]) if isinstance(given, Tensor) else transform


def _counted(logits: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
    """(tokens,) bool."""
    targets = targets.long()  # a narrow dtype would wrap the vocabulary's size in comparisons
    counts = (targets >= 0) & (targets < logits.shape[-1])
    return (counts if mask is None else counts & (mask != 0)).flatten()


def _parts(logits: Tensor, targets: Tensor) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """A few tokens at a time, and where the rows of their logits are."""
    step = max(1, FLOAT32_BYTES // (4 * logits.shape[-1]))
    for first in range(0, targets.numel(), step):
        last = min(first + step, targets.numel())
        yield slice(first, last), torch.unravel_index(torch.arange(first, last, device=logits.device), targets.shape)
