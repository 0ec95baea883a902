"""verl's fused log-probabilities and entropies on this package's head, by verl's signatures: docs/verl.md."""

import importlib
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_rl.distributed import VocabParallel
from liger_rl.head.logprobs import linear_logprobs
from liger_rl.integrations.patching import Framework, Patch, join_parameters
from liger_rl.kernels.transform import LogitTransform
from liger_rl.models.local_tensors import localize

__all__ = ["is_patched", "linear_cross_entropy", "patch_verl", "patched_verl", "unpatch_verl"]

REDUCTIONS = ("none", "sum", "mean")


def linear_cross_entropy(
    hidden: Tensor,  # (..., H): (N, H), (1, N, H) or Megatron's (N, 1, H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # N ids in any shape, or K ids for each row, (..., K)
    temperature: float = 1.0,  # > 0
    reduction: str = "none",  # of the log-probabilities: "none", "sum", or "mean" over all N tokens
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Drop-in for `verl.utils.kernel.linear_cross_entropy.linear_cross_entropy`.

    Position t predicts labels[t]. A negative label masks its token. docs/verl.md lists the differences from verl's.

    Each rank of dist_process_group holds an equal part of the vocabulary, in rank order, and all of hidden and labels.
    As in verl the gradient of hidden is then this rank's part of the sum.

    Returns:
        logprobs: float32 in nats, <= 0, differentiable: (N,) of N rows, (N, K) of K ids, or () with "sum" or "mean".
        entropy: (N,) float32 in nats, differentiable. It is not reduced.
    """
    vocab_parallel = None
    if dist_process_group is not None and dist.get_world_size(dist_process_group) > 1:
        start = dist.get_rank(dist_process_group) * weight.shape[0]
        vocab_parallel = VocabParallel(dist_process_group, start, sum_hidden_grad=False)
    local = localize(hidden, weight, targets=labels, vocab_parallel=vocab_parallel)
    hidden, labels = local.hidden, local.targets
    for name, tensor in (("hidden", hidden), ("labels", labels)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if hidden.dim() < 2:
        raise ValueError(f"hidden must be (..., H) with at least two dimensions, got {tuple(hidden.shape)}")
    rows = hidden.shape[:-1].numel()
    has_lists = labels.numel() > rows == labels.shape[:-1].numel() and labels.dim() > 1
    if labels.numel() != rows and not has_lists:
        raise ValueError(
            f"labels must have {rows} elements, one per row of hidden {tuple(hidden.shape)}, got {tuple(labels.shape)}"
        )
    if not isinstance(reduction, str) or reduction.lower() not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {list(REDUCTIONS)}, got {reduction!r}")
    transform = LogitTransform(temperature=temperature)
    logprobs, entropy, *_ = linear_logprobs(
        hidden.reshape(-1, hidden.shape[-1]),
        local.weight,
        labels.reshape(rows, -1) if has_lists else labels.reshape(-1),
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
    input_ids: Tensor,  # (N,) or (B, T), the predicted ids; or K for each, (N, K) or (B, T, K)
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """verl's `FusedLinearForPPO.forward`, with float32 logits. The module's chunk_size has no effect.

    Returns log_probs in the shape of input_ids, and entropy in the shape of hidden_states without H.
    """
    log_probs, entropy = linear_cross_entropy(hidden_states, vocab_weights, input_ids, temperature)
    return log_probs.view(input_ids.shape), entropy.view(hidden_states.shape[:-1])


def inputs_with_teacher(self: Any, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """`FSDPEngineWithLMHead.prepare_model_inputs`, with the teacher's K ids after each token's label.

    verl's fused forwards pass `shift_labels` on, so the head gets 1 + K ids for each token.
    """
    inputs, output_args = INPUTS.original(self, micro_batch)
    teacher = _read_teacher(self, micro_batch)
    if teacher is not None:
        if "shift_labels" not in inputs:
            raise ValueError("use_remove_padding must be True for top-K distillation with use_fused_kernels, got False")
        inputs["shift_labels"] = torch.cat([inputs["shift_labels"][..., None], teacher[0]], dim=-1)
    return inputs, output_args


def outputs_with_losses(
    self: Any, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
) -> dict[str, Any]:
    """`FSDPEngineWithLMHead.prepare_model_outputs`, with the top-K losses that verl would compute from logits."""
    teacher = _read_teacher(self, micro_batch)
    # VeOmni's engine derives from this one, but its models compute the losses themselves.
    if teacher is not None and getattr(output, "fused_linear_aux", None) is None:
        logps = output.log_probs.view(*teacher[0].shape[:-1], 1 + teacher[0].shape[-1])
        output.log_probs = logps[..., 0]
        settings = logits_processor_func.keywords["distillation_config"].distillation_loss
        output.fused_linear_aux = forward_kl_topk(logps[..., 1:], teacher[1].float(), settings.log_prob_min_clamp)
    return OUTPUTS.original(self, output, output_args, micro_batch, logits_processor_func)


def forward_kl_topk(student: Tensor, teacher: Tensor, lowest: float | None) -> SimpleNamespace:
    """verl's `compute_forward_kl_topk` from float32 log-probabilities (..., K) at a teacher's ids.

    sum_k q_k (log q_k - log p_k), with both log-probabilities clamped to at least `lowest`. Masses are not clamped.
    """
    student_mass, teacher_mass = (logps.detach().exp().sum(-1) for logps in (student, teacher))
    log_p, log_q = ((logps if lowest is None else logps.clamp(min=lowest)) for logps in (student, teacher))
    losses = (log_q.exp() * (log_q - log_p)).sum(-1)
    return SimpleNamespace(distillation_losses=losses, student_mass=student_mass, teacher_mass=teacher_mass)


def _read_teacher(engine: Any, micro_batch: Any) -> tuple[Tensor, Tensor] | None:
    """The teacher's ids and log-probabilities (1, N, K) of this rank's tokens; None without a fused top-K loss."""
    setting = importlib.import_module("verl.utils.tensordict_utils").get_non_tensor_data
    fused_topk = all(setting(micro_batch, key, False) for key in ("distillation_use_topk", "use_fused_kernels"))
    if not fused_topk or micro_batch.get("teacher_ids", None) is None:
        return None
    ids, logps = (micro_batch[name].values()[None] for name in ("teacher_ids", "teacher_logprobs"))
    if engine.use_ulysses_sp:
        slice_of_rank = importlib.import_module("verl.utils.ulysses").slice_input_tensor
        ids, logps = slice_of_rank(ids, dim=1), slice_of_rank(logps, dim=1)
    return ids, logps


ENGINE = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead"
INPUTS = Patch(f"{ENGINE}.prepare_model_inputs", inputs_with_teacher, group="distillation", since=(0, 8))
OUTPUTS = Patch(f"{ENGINE}.prepare_model_outputs", outputs_with_losses, group="distillation", since=(0, 8))
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
    INPUTS,
    OUTPUTS,
    gain="float32 logits and entropies on every device, whichever fused backend is set",
)


def patch_verl(*, distillation: bool = False) -> None:
    """Put this module's functions in place of verl's fused backends, in all of verl's modules.

    `linear_cross_entropy` serves `impl_backend=triton` and Megatron. `fused_linear_for_ppo` serves the default
    `impl_backend=torch` and `liger`. verl calls them with `use_fused_kernels=True`. Patch in every worker process.

    Args:
        distillation: also compute verl's loss `forward_kl_topk` without logits, in the engine for FSDP with
            `use_fused_kernels=True` and `use_remove_padding=True`. It needs verl >= 0.8, and imports verl's engines.
    """
    VERL.patch(*(("distillation",) if distillation else ()))


unpatch_verl = VERL.unpatch
patched_verl = VERL.within
is_patched = VERL.is_patched
