"""verl's fused log-probabilities and entropy, by its own signatures, on this package's head.

    from liger_rl.integrations.verl import linear_cross_entropy, patch_verl

    logprobs, entropy = linear_cross_entropy(hidden, weight, labels, temperature)
    patch_verl()  # or: in all of verl, whatever backend of its fused kernels is chosen

Arguments, outputs, signs and gradients are those of verl 0.9.1.
"""

import importlib
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from liger_rl.distributed import VocabParallel
from liger_rl.integrations.patching import (
    GlobalPatch,
    MethodPatch,
    all_within,
    apply_all,
    check_parameters,
    check_version,
    undo_all,
)
from liger_rl.kernels.transform import LogitTransform
from liger_rl.logprobs import linear_logprobs

__all__ = ["linear_cross_entropy", "patch_verl", "patched_verl", "unpatch_verl"]

REDUCTIONS = ("none", "sum", "mean")
LOWEST, BELOW = (0, 5), (0, 11)
# Where verl has its two backends, and what the methods take that compute them.
KERNEL, KERNEL_PARAMETERS = (
    "verl.utils.kernel.linear_cross_entropy",
    ("ctx", "hidden", "weight", "labels", "temperature", "reduction", "dist_process_group"),
)
TORCH, TORCH_PARAMETERS = (
    "verl.utils.experimental.torch_functional",
    ("self", "hidden_states", "vocab_weights", "input_ids", "temperature"),
)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Drop-in for `verl.utils.kernel.linear_cross_entropy.linear_cross_entropy` of verl 0.5 to 0.10.

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


def fused_linear_for_ppo(
    module: Any,
    hidden_states: Tensor,
    vocab_weights: Tensor,
    input_ids: Tensor,
    temperature: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """In place of `verl.utils.experimental.torch_functional.FusedLinearForPPO.forward` of verl 0.5 to 0.10.

    Tiles are sized from a memory budget: neither the module's chunk_size nor its impl_backend has an effect. Entropies
    are float32. verl's "torch" backend rounds them, and all logits, to the dtype of hidden_states.

    Args:
        module: verl's, or None; not used.
        hidden_states: (N, H), or (B, T, H) with input_ids of (B, T).
        vocab_weights, temperature: as the weight and temperature of `linear_cross_entropy`.
        input_ids: the integer token ids that hidden_states predict.

    Returns:
        (log_probs, entropy), both float32 in nats, shaped like input_ids and differentiable.

    Raises:
        TypeError, ValueError: as `linear_cross_entropy`.
    """
    log_probs, entropy = linear_cross_entropy(hidden_states, vocab_weights, input_ids, temperature)
    return log_probs.view(input_ids.shape), entropy.view(input_ids.shape)


def _home(name: str) -> Any:
    check_version("verl", getattr(importlib.import_module("verl"), "__version__", None), LOWEST, BELOW)
    return importlib.import_module(name)


def _find_kernel() -> Any:
    home = _home(KERNEL)
    _check_forward(home, "LinearCrossEntropy", KERNEL_PARAMETERS)
    return home.linear_cross_entropy


def _find_torch() -> Any:
    home = _home(TORCH)
    _check_forward(home, "FusedLinearForPPO", TORCH_PARAMETERS)
    return home.FusedLinearForPPO


def _check_forward(home: Any, name: str, expected: tuple[str, ...]) -> None:
    found = getattr(getattr(home, name, None), "forward", None)
    check_parameters(f"{home.__name__}.{name}.forward", found, expected)


_PATCHES = (
    GlobalPatch(linear_cross_entropy, _find_kernel, modules=("verl",)),
    MethodPatch(fused_linear_for_ppo, _find_torch),
)


def patch_verl() -> None:
    """Put this module's functions in place of verl's two fused backends, in all of verl's modules.

    `linear_cross_entropy` for `impl_backend=triton` and for Megatron, `fused_linear_for_ppo` for `impl_backend=torch`,
    the default, and `liger`. verl uses them with `use_fused_kernels=True`. Its models for FSDP look the functions up at
    each forward, those for Megatron import them once: all get them. Call it in every worker process. Patching twice is
    harmless. Code outside of verl that has imported `linear_cross_entropy` keeps what it has imported.

    Raises:
        ImportError: verl is not installed, or not of a supported version, which is named.
        RuntimeError: verl's functions do not take what those of its version take.

    In each case nothing is changed.
    """
    apply_all(*_PATCHES)


def unpatch_verl() -> None:
    """Undo `patch_verl`, in verl's modules that were loaded since too; harmless where nothing is patched."""
    undo_all(*_PATCHES)


def patched_verl() -> AbstractContextManager[None]:
    """`patch_verl` for the length of a `with` block."""
    return all_within(*_PATCHES)
