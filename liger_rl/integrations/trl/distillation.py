"""TRL's DistillationTrainer: its loss on this package's divergence of two heads, its bodies on live tokens only.

Student and teacher are calls of its `OptimizerStep`, as the policy and the reference of the other trainers.

TRL 1.15 does not have it, and then nothing is replaced.
"""

import functools
import importlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from liger_rl.distill.divergence import DivergenceCall, compute_in_one_pass_if_free, make_measure
from liger_rl.head.head_options import HeadOptions
from liger_rl.integrations.patching import Patch
from liger_rl.integrations.trl.forward import DISTILLED_MODELS, run_body
from liger_rl.integrations.trl.optimizer_step import find_step, is_compiled
from liger_rl.integrations.trl.settings import get_settings
from liger_rl.kernels.transform import LogitTransform
from liger_rl.models.project import IGNORE_INDEX
from liger_rl.models.tensors import is_zero_3

TRAINER, LOSS = "trl.trainer.distillation_trainer", "_chunked_divergence_loss"
SINCE = (1, 16)  # of TRL
IN_WINDOW = "liger_rl_in_window"  # of hidden states, whether micro-batches have one backward together


def _chunked_divergence_loss(
    student_hidden_states: Tensor,  # (B, T, H)
    teacher_hidden_states: Tensor,  # (B, T, H')
    student_lm_head_weight: Tensor,  # (V, H)
    teacher_lm_head_weight: Tensor,  # (V, H')
    completion_mask: Tensor,  # (B, T)
    beta: float,
    num_items_in_batch: Tensor | int | None = None,
    student_lm_head_bias: Tensor | None = None,  # (V,)
    teacher_lm_head_bias: Tensor | None = None,  # (V,)
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> (loss, sum of the student's entropies in nats, number of tokens that count), () each.

    The loss is the sum of the divergences over num_items_in_batch, or without it over the number of tokens that count.
    Only the loss has a gradient. The teacher's tensors may require gradients, as in TRL.
    """
    dtype = student_hidden_states.dtype
    teacher_dtype = teacher_hidden_states.dtype
    weight, bias = _gather_weight(student_lm_head_weight, student_lm_head_bias, dtype)
    teacher_weight, teacher_bias = _gather_weight(teacher_lm_head_weight, teacher_lm_head_bias, teacher_dtype)
    # As in TRL, whatever the dtype of the weights.
    autocast = torch.is_autocast_enabled(student_hidden_states.device.type)
    compute_dtype = None if autocast or dtype != teacher_dtype else dtype
    sharded = any(map(is_zero_3, (weight, bias, teacher_weight, teacher_bias)))
    mask = completion_mask != 0
    call = DivergenceCall(
        hidden=student_hidden_states,
        weight=weight,
        bias=bias,
        teacher_hidden=teacher_hidden_states,
        teacher_weight=teacher_weight,
        teacher_bias=teacher_bias,
        teacher_transform=LogitTransform(
            temperature=temperature, softcap=teacher_final_logit_softcapping, scale=teacher_logit_scale
        ),
        measure=make_measure("jsd", beta),
        mask=mask,
        options=HeadOptions(
            transform=LogitTransform(
                temperature=temperature, softcap=student_final_logit_softcapping, scale=student_logit_scale
            ),
            compute_dtype=compute_dtype,
            gather=_gather_head if sharded else None,
        ),
    )
    count = mask.sum()
    divisor = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    divisor = torch.as_tensor(divisor, device=student_hidden_states.device).float()
    several = vars(student_hidden_states).get(IN_WINDOW, False)
    result, one_pass_loss = compute_in_one_pass_if_free(call, 1.0 / divisor, several)
    loss = result.divergence.sum() / divisor
    if one_pass_loss is not None:
        loss = loss + one_pass_loss
    return loss, result.entropy.sum(), count


def _gather_head(*parameters: Tensor) -> AbstractContextManager:
    """TRL's context that gathers a head under ZeRO-3."""
    return importlib.import_module("trl.trainer.utils").maybe_gather_lm_head_ctx(*parameters)


def _gather_weight(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The whole head under FSDP2, as TRL's loss gathers it."""
    if not isinstance(weight, DTensor):
        return weight, bias
    return weight.full_tensor().to(dtype), bias.full_tensor() if isinstance(bias, DTensor) else bias


# --- the bodies -------------------------------------------------------------------------------------------------------


def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
    """`DistillationTrainer.__init__`, after which the patch serves its models."""
    _init.original(self, *args, **kwargs)
    for model in (self.model, self.teacher_model):
        if model is not None and not self.is_deepspeed_enabled:
            DISTILLED_MODELS.add(_get_causal_lm(self.accelerator.unwrap_model(model)))


def _get_causal_lm(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # as TRL, past PEFT's


def _get_last_hidden_state(
    self: Any, unwrapped_model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **images: Any
) -> Tensor:
    """(B, logits_to_keep, H), 0 where there is no token."""
    step, model = find_step(self), _get_causal_lm(unwrapped_model)
    serves = model in DISTILLED_MODELS and get_settings().whole_step and self.model.training
    if step is None or not serves or is_compiled(self, step.model):
        return _hidden.original(self, unwrapped_model, input_ids, attention_mask, logits_to_keep, **images)
    labels = input_ids.masked_fill(attention_mask == 0, IGNORE_INDEX)
    labels[:, :-logits_to_keep] = IGNORE_INDEX
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, **images}
    inputs["first_column"] = labels.shape[1] - logits_to_keep
    if getattr(model.config.get_text_config(), "output_router_logits", False):  # this loss has no router's
        inputs["output_router_logits"] = False
    run, outer, in_window = functools.partial(run_body, model), self.model, step.window is not None
    if unwrapped_model is not self.accelerator.unwrap_model(self.model):
        outer = self.teacher_model
        if in_window:
            run = functools.partial(step.redirect, outer, unwrapped_model, run)
    hidden = step.call(outer, run, inputs)[:, -logits_to_keep:]
    vars(hidden)[IN_WINDOW] = in_window
    return hidden


_init = Patch(f"{TRAINER}:DistillationTrainer.__init__", __init__, None, since=SINCE)
_hidden = Patch(f"{TRAINER}:DistillationTrainer._get_last_hidden_state", _get_last_hidden_state, None, since=SINCE)
_loss = Patch(f"{TRAINER}:{LOSS}", _chunked_divergence_loss, modules=(TRAINER,), since=SINCE)
PATCHES = (_loss, _init, _hidden)
