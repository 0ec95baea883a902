"""Megatron-Core's output processor: log-probabilities where `GPTModel` would make logits, see docs/megatron.md.

The output layer's checks and hooks run. For one call our product replaces the layer's own, and reads from its arguments
how tensor and sequence parallelism are set.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_rl.call.head_call import shared_errors
from liger_rl.call.options import HOW
from liger_rl.distributed import gathered_rows, vocab_shard
from liger_rl.integrations.patching import check_version
from liger_rl.kernels.transform import LogitTransform
from liger_rl.logprobs import LogProbs, linear_logprobs

__all__ = ["FusedOutput", "fused_loss", "fused_output"]

# The keys of `output_processor_context`.
OPTIONS = ("temperature", "entropy", "support", "compute_dtype", *HOW)
PROBE_LOGITS = (1.0, -60.0, 0.25, 30.0)


@dataclass(frozen=True)
class FusedOutput:
    """The result of `fused_output`. Not a NamedTuple, because Megatron's Float16Module makes a plain tuple of one."""

    logps: Tensor  # (b, s) float32 in nats, differentiable; 0 where the label is negative or loss_mask is 0
    entropy: Tensor | None = None  # (b, s) float32 in nats, differentiable; None unless asked for
    missing_target: Tensor | None = None  # (b, s) bool, as in `LogProbs`; None without a support


def fused_output(
    *,
    hidden_states: Tensor,  # (s, b, h); (s / tensor parallel ranks, b, h) with sequence parallelism
    output_layer: Any,  # a ColumnParallelLinear of (v / tensor parallel ranks, h)
    output_weight: Tensor | None,  # the tied embedding's weight; None: the layer's own
    labels: Tensor | None,  # (b, s) ids, shifted by the caller; negative ones are masked
    loss_mask: Tensor | None = None,  # (b, s); tokens at 0 are not projected, every other value counts as 1
    inference_context: Any = None,  # must be None
    scale_logits: Callable[[Tensor], Tensor],  # the model's, which must multiply by a number
    context: Mapping[str, Any] | None = None,
    **_: Any,
) -> FusedOutput:
    """An `output_processor` of Megatron-Core's `GPTModel.forward`.

    `context`, Megatron's `output_processor_context`, may hold temperature (a number or (b, s)), entropy, a support of
    b s rows, and grad_tolerance, compute_dtype, chunk_tokens, chunk_vocab, fixed_shape and batch_invariant as in
    `linear_logprobs`. docs/megatron.md says how each kind of parallelism is served. A version, a layer or an option
    that is not reproduced raises before anything is computed.
    """
    _check_layer(output_layer, output_layer.weight if output_weight is None else output_weight)
    if inference_context is not None:
        raise ValueError(f"inference_context must be None, got {type(inference_context).__name__}")
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor, whose log-probabilities are returned, got {type(labels).__name__}")
    if context is not None and not isinstance(context, Mapping):
        raise TypeError(f"output_processor_context must be a mapping or None, got {type(context).__name__}")
    options = dict(context or {})
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise TypeError(f"output_processor_context must hold {', '.join(OPTIONS)}; got {', '.join(map(str, unknown))}")
    options["transform"] = LogitTransform(temperature=options.pop("temperature", 1.0), scale=_scale_of(scale_logits))
    results: list[LogProbs] = []

    def product(input: Tensor, weight: Tensor, **arguments: Any) -> Tensor:
        results.append(_log_probs(input, weight, arguments, labels, loss_mask, options))
        return results[0].logps

    output_layer._forward_impl = product
    try:
        output, _ = output_layer(hidden_states, weight=output_weight, runtime_gather_output=False)
    finally:
        del output_layer._forward_impl
    if len(results) != 1 or output is not results[0].logps:
        raise ValueError("output_layer must have no hooks that change its output, which is not logits here")
    return FusedOutput(results[0].logps, results[0].entropy, results[0].missing_target)


def fused_loss(**keywords: Any) -> Tensor:
    """`fused_output` for a caller of `GPTModel` that expects losses: -logps, (b, s), 0 at masked tokens."""
    return fused_output(**keywords).logps.neg()


def _log_probs(
    input: Tensor,
    weight: Tensor,
    arguments: Mapping[str, Any],  # of ColumnParallelLinear's product
    labels: Tensor,
    loss_mask: Tensor | None,
    options: dict[str, Any],  # of `linear_logprobs`
) -> LogProbs:
    if arguments.get("gtp_remat_size", 1) > 1:
        raise ValueError(f"gtp_remat_size of output_layer must be 1, got {arguments['gtp_remat_size']}")
    group = arguments["tp_group"]
    hidden = (gathered_rows(input, group) if arguments["sequence_parallel"] else input).transpose(0, 1)
    place = vocab_shard(group, weight, sum_hidden_grad=arguments["allreduce_dgrad"])
    with shared_errors(place, weight):
        for name, tensor in (("labels", labels), ("loss_mask", loss_mask)):
            if tensor is not None and tensor.shape != hidden.shape[:2]:
                raise ValueError(f"{name} must be (b, s) = {tuple(hidden.shape[:2])}, got {tuple(tensor.shape)}")
        main_grad = None
        if arguments["gradient_accumulation_fusion"] and weight.requires_grad and torch.is_grad_enabled():
            main_grad = getattr(weight, "main_grad", None)
            if main_grad is not None and main_grad.dtype != torch.float32:
                raise TypeError(f"main_grad of output_layer's weight must be float32, got {main_grad.dtype}")
    result = linear_logprobs(
        hidden,
        weight,
        labels,
        mask=None if loss_mask is None else loss_mask != 0,
        bias=arguments["bias"],
        weight_grad=main_grad,
        vocab_parallel=place,
        **options,
    )
    if main_grad is None or not hasattr(weight, "grad_added_to_main_grad"):
        return result
    logps, entropy = _AddedToMainGrad.apply(weight, result.logps, result.entropy)
    return result._replace(logps=logps, entropy=entropy)


def _check_layer(layer: Any, weight: Tensor) -> None:
    import megatron.core
    from megatron.core.tensor_parallel import ColumnParallelLinear

    check_version("megatron-core", getattr(megatron.core, "__version__", None), (0, 18), (0, 20))
    methods = ("forward", "_forward_impl")
    if not isinstance(layer, ColumnParallelLinear) or any(
        name in vars(layer) or getattr(type(layer), name) is not getattr(ColumnParallelLinear, name) for name in methods
    ):
        raise TypeError(
            f"output_layer must be a ColumnParallelLinear with its own forward, got {type(layer).__name__}, which may "
            "compute something other than h @ W.T + b"
        )
    if layer.config.defer_embedding_wgrad_compute:
        raise ValueError("defer_embedding_wgrad_compute must be False: there are no logits whose gradient could wait")
    if hasattr(weight, "__fsdp_param__"):
        raise ValueError("output_layer must not be sharded by Megatron-FSDP, which keeps its gradients elsewhere")


def _scale_of(scale_logits: Callable[[Tensor], Tensor]) -> float:
    probe = torch.tensor(PROBE_LOGITS, device="cpu")
    seen = scale_logits(probe.clone())
    scale = seen[0].item()
    if not torch.allclose(seen, scale * probe):
        raise ValueError(f"scale_logits must multiply by a number, it maps {probe.tolist()} to {seen.tolist()}")
    return scale


class _AddedToMainGrad(torch.autograd.Function):
    """The identity. Its backward marks the weight and gives it a placeholder gradient, as Megatron's product does.

    The hooks of Megatron's data parallelism read the mark and throw the placeholder away. Without a gradient they would
    run in another thread, at the same time as other hooks' collectives.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, *outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return tuple(None if output is None else output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        weight = ctx.weight
        weight.grad_added_to_main_grad = True
        like = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        return like(weight, requires_grad=False), *grads
