"""Per-token softmax statistics of given logits, and their gradient, row by row where the rows lie."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_rl.kernels import for_device
from liger_rl.kernels.statistics import Fold, TokenGradients, TokenStatistics
from liger_rl.kernels.transform import LogitTransform

EAGER_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class LogitRowsOptions:
    """Everything the autograd Function takes that is not differentiated or an index."""

    transform: LogitTransform
    entropy: bool
    in_place: bool = False
    grad_buffer: Tensor | None = None


class LogitRows(torch.autograd.Function):
    """(logits, targets, live, dead) -> (logps, entropy) of the live rows; a gradient for the logits."""

    @staticmethod
    def forward(ctx, logits, targets, live, dead, options):
        # logits (B, T, V) or (N, V), targets flat, live and dead flat indices of the rows that count and of the others
        ctx.set_materialize_grads(False)
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        statistics = fold_rows(logits, targets, live, options)
        ctx.options = options
        ctx.save_for_backward(logits, targets, live, dead, *statistics)
        return statistics.logps.clone(), None if statistics.entropy is None else statistics.entropy.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logps, grad_entropy):
        logits, targets, live, dead, *statistics = ctx.saved_tensors
        if grad_logps is None and grad_entropy is None:
            return None, None, None, None, None
        known = TokenStatistics(*statistics)
        out = grad_rows(logits, targets, live, dead, known, grad_logps, grad_entropy, ctx.options)
        if ctx.options.in_place:
            # Counted as a write, so that a second backward, or anyone else who saved the logits, is told.
            torch.autograd.graph.increment_version(logits)
        return None if ctx.options.grad_buffer is not None else out, None, None, None, None


def fold_rows(logits: Tensor, targets: Tensor, live: Tensor, options: LogitRowsOptions) -> TokenStatistics:
    """Statistics of the live rows, (n,) each."""
    state = Fold.start(live.numel(), logits.device, entropy=options.entropy)
    fold = for_device(logits.device).fold
    for part in _parts(live.numel(), logits):
        fold(logits, targets[live[part]], 0, None, options.transform, state.take(part), live[part])
    return state.finish()


def grad_rows(
    logits: Tensor,
    targets: Tensor,
    live: Tensor,
    dead: Tensor,
    statistics: TokenStatistics,  # (n,) each
    grad_logps: Tensor | None,  # (n,)
    grad_entropy: Tensor | None,  # (n,), one of the two at least
    options: LogitRowsOptions,
) -> Tensor:
    """The gradient of the logits, in the place that the options name, or a new one."""
    if grad_logps is None:
        assert grad_entropy is not None
        grad_logps = torch.zeros_like(grad_entropy)
    tokens = TokenGradients.of(statistics, grad_logps.float(), grad_entropy)
    if options.in_place:
        out = logits
    elif options.grad_buffer is not None:
        out = options.grad_buffer
    else:
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    add = options.grad_buffer is not None
    grad = for_device(logits.device).grad
    for part in _parts(live.numel(), logits):
        rows = live[part]
        grad(logits, targets[rows], 0, None, options.transform, tokens.take(part), out, rows, add=add)
    if not add and dead.numel():
        _clear_rows(out, dead)
    return out


def _parts(rows: int, logits: Tensor) -> list[slice]:
    """Triton reads rows where they lie; eager kernels copy them to float32, so few at a time."""
    step = rows if logits.is_cuda else EAGER_BYTES // (4 * logits.shape[-1])
    step = max(step, 1)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _clear_rows(out: Tensor, rows: Tensor) -> None:
    """Zero rows by their flat index, whatever the strides; without the host sync of torch.unravel_index."""
    if out.dim() == 2:
        out.index_fill_(0, rows, 0)
    else:
        out[rows // out.shape[1], rows % out.shape[1]] = 0
