"""TRL's distillation on this package's divergence of two heads: the op that DistillationTrainer calls.

TRL 1.15 has no such op, and then nothing is replaced.
"""

import importlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_rl.head.divergence import DivergenceCall, divergence_of, measure_of
from liger_rl.head.options import HeadOptions
from liger_rl.integrations.patching import GlobalPatch, check_parameters
from liger_rl.kernels.transform import LogitTransform

MODULE, NAME = "trl.kernels.chunked_divergence", "ChunkedDivergenceFunction"
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
    """In place of TRL's `ChunkedDivergenceFunction`, of which the trainer calls `apply`."""

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
        found = divergence_of(
            DivergenceCall(
                hidden=student_hidden,
                weight=student_weight,
                bias=student_bias,
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


def patches() -> tuple[GlobalPatch, ...]:
    """What is patched beside TRL's op for log-probabilities; nothing where TRL has no op for divergences."""
    try:
        importlib.import_module(MODULE)
    except ModuleNotFoundError:
        return ()
    return (PATCH,)


op = FusedDivergence()
PATCH = GlobalPatch(op, _find_op, modules=("trl",))
