"""TRL's distillation on this package's divergence of two heads: the loss of DistillationTrainer, and the op in it.

The loss knows each token's factor, 1 / the divisor, and makes the gradients in the forward where that is free. The op
does not know its caller's factors, and makes them in the backward.

With PEFT two more things are replaced, to train a LoRA adapter on the student's lm_head: the trainer's refusal of such
an adapter, and the method that calls the loss, which also has to say which head it is. Once an adapter was accepted,
that method stays when the patch is undone, and raises if TRL's op would leave the adapter out.

TRL 1.15 has none of this, and then nothing is replaced.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from liger_rl.call.options import HeadOptions
from liger_rl.engines.pair.run import DivergenceCall, divergence_of, in_one_pass_if_free, measure_of
from liger_rl.integrations import trl_adapters
from liger_rl.integrations.patching import Patch, parameters_of
from liger_rl.kernels.transform import LogitTransform

MODULE, NAME = "trl.kernels.chunked_divergence", "ChunkedDivergenceFunction"
TRAINER, LOSS = "trl.trainer.distillation_trainer", "_chunked_divergence_loss"
SINCE = (1, 16)  # of TRL


class _Side(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None

    def transform(self, temperature: float) -> LogitTransform:
        return LogitTransform(temperature=temperature, softcap=self.softcap, scale=self.scale)


@dataclass
class FusedDivergence:
    """In place of TRL's `ChunkedDivergenceFunction`, whose `apply` is called."""

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
        student = _Side(
            student_hidden, student_weight, student_bias, student_logit_scale, student_final_logit_softcapping
        )
        teacher = _Side(
            teacher_hidden, teacher_weight, teacher_bias, teacher_logit_scale, teacher_final_logit_softcapping
        )
        result = divergence_of(self.call(student, teacher, beta, temperature))
        assert result.entropy is not None
        return result.divergence, result.entropy.detach()

    def call(
        self, student: _Side, teacher: _Side, beta: float, temperature: float, mask: Tensor | None = None
    ) -> DivergenceCall:
        compute_dtype = None
        if not torch.is_autocast_enabled(student.hidden.device.type) and student.hidden.dtype == teacher.hidden.dtype:
            compute_dtype = student.hidden.dtype  # as in TRL, whatever the weights are
        head = trl_adapters.adapted_head()
        parameters = student.weight, student.bias, teacher.weight, teacher.bias
        return DivergenceCall(
            hidden=student.hidden,
            weight=student.weight,
            bias=student.bias if head is None else head.bias(),
            low_rank=() if head is None else head.low_rank(student.hidden),
            teacher_hidden=teacher.hidden,
            teacher_weight=teacher.weight,
            teacher_bias=teacher.bias,
            teacher_transform=teacher.transform(temperature),
            teacher_may_require_grad=True,
            measure=measure_of("jsd", beta),
            mask=mask,
            options=HeadOptions(
                transform=student.transform(temperature),
                entropy=True,
                compute_dtype=compute_dtype,
                # The mark is DeepSpeed's, on every parameter under ZeRO-3.
                gather=trl_adapters.gathered_head if any(hasattr(p, "ds_id") for p in parameters) else None,
                chunk_tokens=self.chunk_tokens,
                chunk_vocab=self.chunk_vocab,
            ),
        )


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
    It alone has a gradient.

    Raises:
        TypeError, ValueError: as `FusedDivergence.apply`.
    """
    student = _Side(
        student_hidden_states, student_lm_head_weight, student_lm_head_bias,
        student_logit_scale, student_final_logit_softcapping,
    )  # fmt: skip
    teacher = _Side(
        teacher_hidden_states, teacher_lm_head_weight, teacher_lm_head_bias,
        teacher_logit_scale, teacher_final_logit_softcapping,
    )  # fmt: skip
    counted = completion_mask != 0
    count = counted.sum()
    divisor = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    divisor = torch.as_tensor(divisor, device=student_hidden_states.device).float()
    call = op.call(_unsharded(student), _unsharded(teacher), beta, temperature, counted)
    result, one_pass_loss = in_one_pass_if_free(call, 1.0 / divisor)
    assert result.entropy is not None
    loss = result.divergence.sum() / divisor
    return loss if one_pass_loss is None else loss + one_pass_loss, result.entropy.detach().sum(), count


def _unsharded(side: _Side) -> _Side:
    """Whole under FSDP2, as TRL's loss has a head."""
    if not isinstance(side.weight, DTensor):
        return side
    bias = side.bias.full_tensor() if isinstance(side.bias, DTensor) else side.bias
    return side._replace(weight=side.weight.full_tensor().to(side.hidden.dtype), bias=bias)


class RefusedStudentLayer(trl_adapters.RefusedLayer):
    """The class for the trainer whose method must go on naming its head."""

    accepted = False


class _MethodPatch(Patch):
    """The replacement outlives the patch if an adapter was accepted."""

    def undo(self) -> None:
        if not RefusedStudentLayer.accepted:
            super().undo()


def _compute_loss(self: Any, unwrapped_student: Any, inputs: Any, num_items_in_batch: Any) -> Any:
    """The trainer's, naming the head of its loss."""
    with trl_adapters.naming_head(unwrapped_student):
        return METHOD.original(self, unwrapped_student, inputs, num_items_in_batch)


op = FusedDivergence()
METHOD = _MethodPatch(
    f"{TRAINER}:DistillationTrainer._compute_loss", _compute_loss, since=SINCE, needed=trl_adapters.uses_peft
)
ROWS = (
    Patch(f"{MODULE}:{NAME}", op, f"ctx {parameters_of(op.apply)}", checked=f"{NAME}.forward", since=SINCE),
    Patch(f"{TRAINER}:{LOSS}", _chunked_divergence_loss, modules=(TRAINER,), since=SINCE),
    METHOD,
    trl_adapters.refusal(TRAINER, RefusedStudentLayer, since=SINCE),
)
