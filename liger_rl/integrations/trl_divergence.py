"""TRL's distillation on this package's divergence of two heads: the op that DistillationTrainer calls.

With PEFT two things are replaced beside the op, so that a LoRA adapter on the student's lm_head is trained. One is the
trainer's refusal of such an adapter. The other is the method that calls the op with the head's weight and bias
alone: the new one also says which head it is. Once an adapter was accepted, that method stays when the patch is undone,
and raises if TRL's op would leave the adapter out.

TRL 1.15 has no such op, and then nothing is replaced.
"""

import functools
import importlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_rl.head.divergence import DivergenceCall, divergence_of, measure_of
from liger_rl.head.options import HeadOptions
from liger_rl.integrations import trl_adapters
from liger_rl.integrations.patching import GlobalPatch, check_parameters
from liger_rl.kernels.transform import LogitTransform

MODULE, NAME = "trl.kernels.chunked_divergence", "ChunkedDivergenceFunction"
TRAINER, METHOD = "trl.trainer.distillation_trainer", "_compute_loss"
METHOD_PARAMETERS = ("self", "unwrapped_student", "inputs", "num_items_in_batch")
# TRL passes them by position, in this order.
PARAMETERS = (
    "student_hidden",
    "student_weight",
    "student_bias",
    "teacher_hidden",
    "teacher_weight",
    "teacher_bias",
    "beta",
    "temperature",
    "student_logit_scale",
    "student_final_logit_softcapping",
    "teacher_logit_scale",
    "teacher_final_logit_softcapping",
)


@dataclass
class FusedDivergence:
    """In place of TRL's `ChunkedDivergenceFunction`. The trainer calls its `apply`."""

    chunk_tokens: int | None = None
    chunk_vocab: int | None = None

    def apply(
        self,
        student_hidden: Tensor,  # (N, H)
        student_weight: Tensor,  # (V, H)
        student_bias: Tensor | None,  # (V,)
        teacher_hidden: Tensor,  # (N, H')
        teacher_weight: Tensor,  # (V, H')
        teacher_bias: Tensor | None,  # (V,)
        beta: float,
        temperature: float = 1.0,
        student_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_logit_scale: float = 1.0,
        teacher_final_logit_softcapping: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """-> (divergence, the student's entropy), (N,) float32; gradients through the first, to the student alone.

        Raises:
            TypeError, ValueError: as `linear_divergence`, except that the teacher may require gradients, as in TRL.
        """
        compute_dtype = None
        if not torch.is_autocast_enabled(student_hidden.device.type) and student_hidden.dtype == teacher_hidden.dtype:
            compute_dtype = student_hidden.dtype  # as in TRL, whatever the weights are
        options = HeadOptions(
            transform=LogitTransform(
                temperature=temperature, softcap=student_final_logit_softcapping, scale=student_logit_scale
            ),
            entropy=True,
            compute_dtype=compute_dtype,
            gather=_gather,
            chunk_tokens=self.chunk_tokens,
            chunk_vocab=self.chunk_vocab,
        )
        head = trl_adapters.adapted_head()
        found = divergence_of(
            DivergenceCall(
                hidden=student_hidden,
                weight=student_weight,
                bias=student_bias if head is None else head.bias(),
                low_rank=() if head is None else head.low_rank(student_hidden),
                teacher_hidden=teacher_hidden,
                teacher_weight=teacher_weight,
                teacher_bias=teacher_bias,
                teacher_transform=LogitTransform(
                    temperature=temperature, softcap=teacher_final_logit_softcapping, scale=teacher_logit_scale
                ),
                teacher_may_require_grad=True,
                measure=measure_of("jsd", beta),
                options=options,
            )
        )
        assert found.entropy is not None
        return found.divergence, found.entropy.detach()


def _gather(*parameters: Tensor) -> AbstractContextManager:
    """A head whole under ZeRO-3, as TRL's own op has it."""
    return importlib.import_module("trl.trainer.utils").maybe_gather_lm_head_ctx(*parameters)


def _find_op() -> Any:
    """-> TRL's op; RuntimeError where it is not what this version of TRL is known to have."""
    original = vars(importlib.import_module(MODULE)).get(NAME)
    if original is None:
        raise RuntimeError(f"{MODULE} has no {NAME} here; nothing was patched")
    check_parameters(f"{MODULE}.{NAME}", original.forward, ("ctx", *PARAMETERS))
    return original


# --- adapters on the student's head -----------------------------------------------------------------------------------


class _RemembersAdapters(type(trl_adapters.RefusedLayer)):  # type: ignore[misc]
    def __instancecheck__(cls, layer: Any) -> bool:
        from peft.tuners.tuners_utils import BaseTunerLayer

        refused = super().__instancecheck__(layer)
        LOSS_PATCH.needed = LOSS_PATCH.needed or isinstance(layer, BaseTunerLayer)
        return refused


class RefusedLayer(metaclass=_RemembersAdapters):
    """`trl_adapters.RefusedLayer` for the trainer whose loss must go on naming its head."""


class _LossPatch(GlobalPatch):
    """Replaces a method of the trainer's class."""

    needed = False

    def undo(self) -> None:
        if not self.needed:
            super().undo()

    def _globals_with(self, value: Any, names: Any) -> list[tuple[Any, str]]:
        trainer = importlib.import_module(TRAINER).DistillationTrainer
        return [(trainer, METHOD)] if TRAINER in names and vars(trainer).get(METHOD) is value else []


def _find_loss() -> Any:
    original = vars(importlib.import_module(TRAINER).DistillationTrainer).get(METHOD)
    check_parameters(f"{TRAINER}.DistillationTrainer.{METHOD}", original, METHOD_PARAMETERS)
    return original


def _compute_loss(self: Any, unwrapped_student: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of the trainer's: says which head the op is working for."""
    with trl_adapters.naming_head(unwrapped_student):
        return LOSS_PATCH.original(self, unwrapped_student, *args, **kwargs)


op = FusedDivergence()
PATCH = GlobalPatch(op, _find_op, modules=("trl",))
LOSS_PATCH = _LossPatch(_compute_loss, _find_loss, modules=(TRAINER,))
REFUSAL_PATCH = GlobalPatch(RefusedLayer, functools.partial(trl_adapters.find_refusal, (TRAINER,)), modules=(TRAINER,))
PATCHES = (PATCH, LOSS_PATCH, REFUSAL_PATCH)


def patches() -> tuple[GlobalPatch, ...]:
    """What is patched beside TRL's op for log-probabilities; nothing where TRL has no op for divergences."""
    from transformers.utils import is_peft_available

    try:
        importlib.import_module(MODULE)
    except ModuleNotFoundError:
        return ()
    return PATCHES if is_peft_available() else (PATCH,)
