"""Log-probabilities of given logits: checks, and the way into autograd or a graph."""

import torch
from torch import Tensor

from liger_rl.given_logits.operator import logits_op
from liger_rl.given_logits.rows import LogitRows, LogitRowsOptions
from liger_rl.head.call import LogProbs
from liger_rl.head.checks import check_apart, check_device, check_flag, check_floating, check_tokens, overlaps_itself
from liger_rl.head.tokens import ask_vocabulary


def row_logprobs(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    options: LogitRowsOptions,
    *,
    fixed_shape: bool,
    targets_name: str = "targets",
) -> LogProbs:
    """`logits_logprobs` of what is already checked; logits may be (B, P, V) with P > T, further positions unused."""
    if torch.compiler.is_compiling():
        if options.in_place or options.grad_buffer is not None:
            raise ValueError("in_place and grad_buffer must be left out under torch.compile, which writes for itself")
        logps, entropies = logits_op(
            logits, targets, mask, options.transform, entropy=options.entropy, fixed_shape=fixed_shape,
            targets_name=targets_name,
        )  # fmt: skip
    else:
        raise_if_outside = ask_vocabulary(
            targets, mask, logits.shape[-1], "logits", fixed_shape=fixed_shape, targets_name=targets_name
        )
        logps, entropies = LogitRows.apply(logits, targets, mask, options)
        raise_if_outside()
    return LogProbs(logps.view(targets.shape), None if entropies is None else entropies.view(targets.shape))


def check_logits(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    *,
    in_place: bool,
    grad_buffer: Tensor | None,
    targets_name: str = "targets",
    spare_position: bool = False,
) -> None:
    """Raise for what can be seen without reading values; `spare_position` allows (B, T + 1, V) beside (B, T)."""
    check_flag("in_place", in_place)
    check_floating("logits", logits)
    if logits.dim() not in (2, 3) or logits.shape[-1] == 0:
        raise ValueError(f"logits must be (B, T, V) or (N, V), got {tuple(logits.shape)}")
    shape: torch.Size = logits.shape[:-1]
    if spare_position and len(shape) == 2 and isinstance(targets, Tensor) and targets.shape == (shape[0], shape[1] - 1):
        shape = torch.Size(targets.shape)
    check_tokens(targets, mask, shape, logits, "logits", targets_name)
    if grad_buffer is not None:
        check_floating("grad_buffer", grad_buffer)
        if grad_buffer.shape != logits.shape:
            raise ValueError(f"grad_buffer must be {tuple(logits.shape)} from logits, got {tuple(grad_buffer.shape)}")
        check_device("grad_buffer", grad_buffer, logits, "logits")
        if in_place:
            raise ValueError("in_place and grad_buffer are two places for one gradient; give one of them")
        check_apart("grad_buffer", grad_buffer, logits=logits)
    for name, place in (("logits", logits if in_place else None), ("grad_buffer", grad_buffer)):
        if place is not None and place.numel() > 0 and (place.stride(-1) != 1 or overlaps_itself(place)):
            raise ValueError(
                f"{name} must have rows of its own and a contiguous last dimension for the gradient, "
                f"got strides {place.stride()}"
            )
