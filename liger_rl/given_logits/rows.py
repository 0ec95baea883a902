"""Per-token softmax statistics of given logits, and their gradient, row by row where the rows lie."""

from dataclasses import dataclass

import torch
from torch import Tensor

from liger_rl.head.checks import check_flag, check_transform
from liger_rl.head.tokens import ask_vocabulary
from liger_rl.kernels import for_device
from liger_rl.kernels.statistics import TokenStatistics
from liger_rl.kernels.transform import LogitTransform


@dataclass(frozen=True, kw_only=True)
class LogitRowsOptions:
    """What the autograd Functions take that is neither differentiated nor an index; checked, except for the buffer."""

    transform: LogitTransform
    entropy: bool = False
    in_place: bool = False
    grad_buffer: Tensor | None = None
    fixed_shape: bool = False
    targets_name: str = "targets"  # the caller's

    def __post_init__(self) -> None:
        check_transform(self.transform)
        for name in ("entropy", "in_place", "fixed_shape"):
            check_flag(name, getattr(self, name))
        if self.in_place and self.grad_buffer is not None:
            raise ValueError("in_place and grad_buffer are two places for one gradient; give one of them")


def fold_rows(logits: Tensor, targets: Tensor, mask: Tensor | None, options: LogitRowsOptions) -> TokenStatistics:
    """Statistics of the logits, (tokens,) each."""
    kernels = for_device(logits.device)
    return kernels.fold_rows(_with_rows(logits), targets, mask, options.transform, entropy=options.entropy)


def checked_fold(logits: Tensor, targets: Tensor, mask: Tensor | None, options: LogitRowsOptions) -> TokenStatistics:
    """`fold_rows`, which raises where a target is outside the vocabulary or the mask is neither 0 nor 1."""
    raise_if_outside = ask_vocabulary(
        targets, mask, logits.shape[-1], "logits", fixed_shape=options.fixed_shape, targets_name=options.targets_name,
        temperature=options.transform.temperature,
    )  # fmt: skip
    statistics = fold_rows(logits, targets, mask, options)
    raise_if_outside()
    return statistics


def _with_rows(logits: Tensor) -> Tensor:
    """The logits with a contiguous last dimension."""
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def grad_rows(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    statistics: TokenStatistics,
    grad_logps: Tensor | None,  # (tokens,)
    grad_entropy: Tensor | None,  # (tokens,), one of the two at least
    options: LogitRowsOptions,
) -> Tensor | None:
    """The gradient of the logits, in their place or a new one; None where a buffer took it."""
    if grad_logps is None:
        assert grad_entropy is not None
        grad_logps = torch.zeros_like(grad_entropy)
    add = options.grad_buffer is not None
    if options.in_place:
        out = logits
    elif options.grad_buffer is not None:
        out = options.grad_buffer
    else:
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    kernels = for_device(logits.device)
    grads = grad_logps.float(), grad_entropy
    kernels.grad_rows(_with_rows(logits), targets, mask, options.transform, statistics, grads, out, add=add)
    if options.in_place:
        # Counted as a write, so that a second backward, or anyone else who saved the logits, is told.
        torch.autograd.graph.increment_version(logits)
    return None if add else out
