"""verl's fused log-probabilities and entropy, by its own signature, on this package's head.

    from liger_rl.integrations.verl import linear_cross_entropy, patch_verl

    logprobs, entropy = linear_cross_entropy(hidden, weight, labels, temperature)
    patch_verl()  # or: in all of verl

Arguments, outputs, signs and gradients are those of verl 0.9.1.
"""

from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import Tensor

from liger_rl.distributed import VocabParallel
from liger_rl.integrations.patching import GlobalPatch, check_version
from liger_rl.kernels.transform import LogitTransform
from liger_rl.logprobs import linear_logprobs

__all__ = ["linear_cross_entropy", "patch_verl", "patched_verl", "unpatch_verl"]

REDUCTIONS = ("none", "sum", "mean")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Drop-in for `verl.utils.kernel.linear_cross_entropy.linear_cross_entropy` of verl 0.5 to 0.9.

    In spite of its name it returns log-probabilities, not their negatives. Where verl's differ:

    - Any device, hidden size and strides. verl asks for CUDA, H a multiple of 128 and contiguous tensors.
    - A negative label masks its token: 0 in both outputs, and no gradient. verl returns uninitialised memory there.
    - Labels beyond the vocabulary raise. verl returns uninitialised memory.
    - Logits all under -87 are as exact as others. verl's underflow, because its running maximum starts at 0.
    - Two host syncs on CUDA (see `linear_logprobs`). verl has none.

    Args:
        hidden: (..., H), such as (N, H), (1, N, H) or Megatron's (N, 1, H); position t predicts labels[t].
        weight: (V, H) of the lm_head; dtype of `hidden` (any float dtype under autocast).
        labels: as many integer token ids as hidden has rows, in any shape.
        temperature: divisor of the logits, > 0; or a float tensor of as many elements as `labels`.
        reduction: of the log-probabilities: "none", "sum", or "mean" over all N tokens.
        dist_process_group: the ranks over which the vocabulary is split in equal parts, in their order, with the same
            hidden and labels on all; None for the whole vocabulary here. As in verl the gradient of hidden is then this
            rank's part, and the gather before it (Megatron's sequence_parallel) adds the parts up.

    Returns:
        logprobs: float32 in nats, <= 0, differentiable: (N,), N = labels.numel(), or () with "sum" or "mean".
        entropy: (N,) float32 in nats, differentiable, whatever the reduction.

    Raises:
        TypeError, ValueError: before anything is computed, naming the argument; on every rank of the group.
    """
    for name, tensor in (("hidden", hidden), ("labels", labels)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if hidden.dim() < 2:
        raise ValueError(f"hidden must be (..., H) with at least two dimensions, got {tuple(hidden.shape)}")
    if labels.numel() != hidden.shape[:-1].numel():
        raise ValueError(
            f"labels must have {hidden.shape[:-1].numel()} elements, one per row of hidden {tuple(hidden.shape)}, "
            f"got {tuple(labels.shape)}"
        )
    if not isinstance(reduction, str) or reduction.lower() not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {list(REDUCTIONS)}, got {reduction!r}")
    if isinstance(temperature, Tensor):
        temperature = temperature.reshape(-1)
    logprobs, entropy, *_ = linear_logprobs(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        transform=LogitTransform(temperature=temperature),
        entropy=True,
        vocab_parallel=_place(dist_process_group, weight),
    )
    assert entropy is not None
    if reduction.lower() == "none":
        return logprobs, entropy
    return logprobs.sum() if reduction.lower() == "sum" else logprobs.mean(), entropy


def _place(group: dist.ProcessGroup | None, weight: Tensor) -> VocabParallel | None:
    if group is None or dist.get_world_size(group) == 1:
        return None
    return VocabParallel(group, dist.get_rank(group) * weight.shape[0], sum_hidden_grad=False)


def _installed() -> object:
    import verl

    check_version("verl", getattr(verl, "__version__", None), (0, 5), (0, 10))
    from verl.utils.kernel import linear_cross_entropy as home

    return home.linear_cross_entropy


_PATCH = GlobalPatch(linear_cross_entropy, _installed, modules=("verl",))


def patch_verl() -> None:
    """Put `linear_cross_entropy` of this module in place of verl's, in all of verl's modules.

    verl's models for FSDP look it up at each forward, those for Megatron import it once: both get it. verl uses it
    with `use_fused_kernels=True` and `fused_kernel_options.impl_backend=triton`. Call it in every worker process.
    Patching twice is harmless. Code outside of verl that has imported the function keeps what it has imported.

    Raises:
        ImportError: verl is not installed, or not of a supported version, which is named; nothing is changed.
    """
    _PATCH.apply()


def unpatch_verl() -> None:
    """Undo `patch_verl`, in verl's modules that were loaded since too; harmless where nothing is patched."""
    _PATCH.undo()


def patched_verl() -> AbstractContextManager[None]:
    """`patch_verl` for the length of a `with` block."""
    return _PATCH.within()
