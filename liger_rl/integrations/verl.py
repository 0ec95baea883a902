"""verl's fused log-probabilities and entropies on this package's head, by verl's signatures: docs/verl.md."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from liger_rl.distributed import VocabParallel
from liger_rl.head.logprobs import linear_logprobs
from liger_rl.integrations.patching import Framework, Patch, join_parameters
from liger_rl.kernels.transform import LogitTransform
from liger_rl.models.tensors import localize

__all__ = ["is_patched", "linear_cross_entropy", "patch_verl", "patched_verl", "unpatch_verl"]

REDUCTIONS = ("none", "sum", "mean")


def linear_cross_entropy(
    hidden: Tensor,  # (..., H): (N, H), (1, N, H) or Megatron's (N, 1, H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # N ids in any shape
    temperature: float = 1.0,  # > 0
    reduction: str = "none",  # of the log-probabilities: "none", "sum", or "mean" over all N tokens
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Drop-in for `verl.utils.kernel.linear_cross_entropy.linear_cross_entropy`.

    Position t predicts labels[t]. A negative label masks its token. docs/verl.md lists the differences from verl's.

    Each rank of dist_process_group holds an equal part of the vocabulary, in rank order, and all of hidden and labels.
    As in verl the gradient of hidden is then this rank's part of the sum.

    Returns:
        logprobs: float32 in nats, <= 0, differentiable: (N,), or () with "sum" or "mean".
        entropy: (N,) float32 in nats, differentiable. It is not reduced.
    """
    vocab_parallel = None
    if dist_process_group is not None and dist.get_world_size(dist_process_group) > 1:
        start = dist.get_rank(dist_process_group) * weight.shape[0]
        vocab_parallel = VocabParallel(dist_process_group, start, sum_hidden_grad=False)
    local = localize(hidden, weight, vocab_parallel=vocab_parallel)
    hidden = local.hidden
    for name, tensor in (("hidden", hidden), ("labels", labels)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if hidden.dim() < 2:
        raise ValueError(f"hidden must be (..., H) with at least two dimensions, got {tuple(hidden.shape)}")
    rows = hidden.shape[:-1].numel()
    if labels.numel() != rows:
        raise ValueError(
            f"labels must have {rows} elements, one per row of hidden {tuple(hidden.shape)}, got {tuple(labels.shape)}"
        )
    if not isinstance(reduction, str) or reduction.lower() not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {list(REDUCTIONS)}, got {reduction!r}")
    transform = LogitTransform(temperature=temperature)
    logprobs, entropy, *_ = linear_logprobs(
        hidden.reshape(-1, hidden.shape[-1]),
        local.weight,
        labels.reshape(-1),
        transform=transform,
        entropy=True,
        vocab_parallel=local.vocab_parallel,
    )
    assert entropy is not None
    reduced = logprobs if reduction.lower() == "none" else getattr(logprobs, reduction.lower())()
    return reduced, entropy


def fused_linear_for_ppo(
    self: Any,  # verl's module, or None; not used
    hidden_states: Tensor,  # (N, H) or (B, T, H)
    vocab_weights: Tensor,  # (V, H)
    input_ids: Tensor,  # (N,) or (B, T), the predicted ids
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """verl's `FusedLinearForPPO.forward`, with float32 logits. The module's chunk_size has no effect.

    Returns log_probs in the shape of input_ids, and entropy in the shape of hidden_states without H.
    """
    log_probs, entropy = linear_cross_entropy(hidden_states, vocab_weights, input_ids, temperature)
    return log_probs.view(input_ids.shape), entropy.view(hidden_states.shape[:-1])


VERL = Framework(
    "verl",
    (0, 5),
    (0, 11),
    Patch(
        "verl.utils.kernel.linear_cross_entropy:linear_cross_entropy",
        linear_cross_entropy,
        f"ctx {join_parameters(linear_cross_entropy)}",
        checked="LinearCrossEntropy.forward",
    ),
    Patch("verl.utils.experimental.torch_functional:FusedLinearForPPO.forward", fused_linear_for_ppo),
    gain="float32 logits and entropies on every device, whichever fused backend is set",
)


def patch_verl() -> None:
    """Put this module's functions in place of verl's fused backends, in all of verl's modules.

    `linear_cross_entropy` serves `impl_backend=triton` and Megatron. `fused_linear_for_ppo` serves the default
    `impl_backend=torch` and `liger`. verl calls them with `use_fused_kernels=True`. Patch in every worker process.
    """
    VERL.patch()


unpatch_verl = VERL.unpatch
patched_verl = VERL.within
is_patched = VERL.is_patched
