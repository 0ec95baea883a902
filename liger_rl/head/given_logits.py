"""Log-probabilities of given logits: the checks, and the autograd Function around the row kernels."""

import torch
from torch import Tensor

from liger_rl.head.checks import check_floating, check_tokens, check_transform
from liger_rl.kernels import for_device
from liger_rl.kernels.public_call import refuse_second_derivative
from liger_rl.kernels.statistics import TokenStatistics
from liger_rl.kernels.transform import LogitTransform


class LogitRows(torch.autograd.Function):
    """(logits, targets, mask) -> (logps, entropy, lse), (tokens,) float32 each, with a gradient for the logits.

    A token that does not count has log-probability 0, entropy 0 and lse +inf. A token that counts never has lse +inf:
    a row with an infinity or NaN gives -inf or NaN. `liger_rl.kernels.reference` has the shapes.
    """

    @staticmethod
    def forward(ctx, logits, targets, mask, transform, entropy):
        ctx.set_materialize_grads(False)
        kernels = for_device(logits.device)
        statistics = kernels.fold_rows(_make_rows_contiguous(logits), targets, mask, transform, entropy=entropy)
        ctx.transform = transform
        saved = statistics.logps, statistics.lse, statistics.entropy
        ctx.save_for_backward(logits, targets, mask, *saved)
        lse = statistics.lse.float()
        ctx.mark_non_differentiable(lse)
        # We return copies, because the caller may write to its results and the backward reads the saved ones.
        entropies = None if statistics.entropy is None else statistics.entropy.clone()
        return statistics.logps.clone(), entropies, lse

    @staticmethod
    def backward(ctx, grad_logps, grad_entropy, _):
        refuse_second_derivative()
        logits, targets, mask, *statistics = ctx.saved_tensors
        if grad_logps is None and grad_entropy is None:
            return None, None, None, None, None
        grads = torch.zeros_like(grad_entropy) if grad_logps is None else grad_logps.float(), grad_entropy
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        rows, forward_statistics = _make_rows_contiguous(logits), TokenStatistics(*statistics)
        for_device(logits.device).grad_rows(rows, targets, mask, ctx.transform, forward_statistics, grads, out)
        return out, None, None, None, None


def _make_rows_contiguous(logits: Tensor) -> Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def check_logits(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: LogitTransform,
    *,
    targets_name: str = "targets",  # the caller's name of the targets, for messages
    spare_position: bool = False,  # (B, T + 1, V) logits may come with (B, T) targets
) -> None:
    """Raise for arguments with a wrong type, dtype, shape or device. No tensor's values are read."""
    check_transform(transform)
    check_floating("logits", logits)
    if logits.dim() not in (2, 3) or logits.shape[-1] == 0:
        raise ValueError(f"logits must be (B, T, V) or (N, V), got {tuple(logits.shape)}")
    shape: torch.Size = logits.shape[:-1]
    if spare_position and len(shape) == 2 and isinstance(targets, Tensor) and targets.shape == (shape[0], shape[1] - 1):
        shape = torch.Size(targets.shape)
    check_tokens(targets, mask, shape, logits, "logits", targets_name)
