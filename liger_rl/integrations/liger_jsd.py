"""liger-kernel's distillation loss, by its own signature and definition, on this package's divergence of two heads.

Constructor, call and results are those of liger-kernel 0.8.5.
"""

from typing import overload

import torch
from torch import Tensor, nn

from liger_rl.head.divergence import DivergenceCall, in_one_pass_if_free, measure_of
from liger_rl.head.graphs import break_graph
from liger_rl.head.options import HeadOptions
from liger_rl.kernels.transform import LogitTransform
from liger_rl.logprobs import linear_logprobs
from liger_rl.policy.options import number


class LigerFusedLinearJSDLoss(nn.Module):
    """Drop-in for `liger_kernel.chunked_loss.LigerFusedLinearJSDLoss` 0.8.5.

        loss = weight_hard_loss * hard + weight_soft_loss * soft
        soft = mean of JSD_beta(student, teacher) at `temperature`
        hard = mean of -log p_student(label) at temperature 1

    Both means are over the tokens whose label is not ignore_index. At beta 0 and 1 the JSD is KL(teacher || student)
    and KL(student || teacher), see `linear_divergence`. docs/liger.md lists where the
    numbers differ from Liger's: a teacher with more vocabulary entries than the student raises, for example.

    Args:
        weight_hard_loss, weight_soft_loss: finite. A hard loss at another temperature than 1 takes products of its own.
        beta: in [0, 1], the teacher's share in the mixture.
        ignore_index: the label of tokens that do not count, of either sign.
        temperature: divisor of both heads' logits in the soft loss, > 0.
        compiled: no effect; there is nothing to compile.
        chunk_size: no effect on results, as in Liger, and none on memory: tiles are sized from a memory budget.
        return_soft_hard_loss: return (loss, soft, hard).

    Options are attributes of the same names, read at every call.

    Raises:
        ValueError, TypeError: a value that is not listed above, naming the option.
    """

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> None:
        super().__init__()
        self.weight_hard_loss = weight_hard_loss
        self.weight_soft_loss = weight_soft_loss
        self.beta = beta
        self.ignore_index = ignore_index
        self.temperature = temperature
        self.compiled = compiled
        self.chunk_size = chunk_size
        self.return_soft_hard_loss = return_soft_hard_loss
        # So that a mistake shows here.
        self._weights()
        measure_of("jsd", beta)
        LogitTransform(temperature=temperature)

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Loss of one batch, () float32; with return_soft_hard_loss also its two parts.

        Args:
            student_input: (N, H) or (B, T, H), aligned: position t predicts true_labels[t].
            student_weight: (V, H), in student_input's dtype, or any under autocast.
            teacher_input, teacher_weight: (N, H') or (B, T, H'), and (V, H'); no gradient.
            true_labels: (N,) or (B, T).
            student_bias, teacher_bias: (V,).

        Raises:
            TypeError, ValueError: as `linear_divergence`, except that the teacher may require gradients, as in Liger.
        """
        break_graph("LigerFusedLinearJSDLoss")
        hard_weight, soft_weight = self._weights()
        _check(student_input, student_weight, teacher_weight, true_labels)
        ids = true_labels.long()  # a narrow dtype would wrap the size of the vocabulary
        counted = ids != self.ignore_index
        # One that is negative would be masked; the first id beyond the vocabulary is refused by the rule for ids.
        labels = torch.where(counted & (ids < 0), student_weight.shape[0], ids)
        count = counted.sum().clamp(min=1)
        wants_hard = hard_weight != 0 or self.return_soft_hard_loss
        together = wants_hard and self.temperature == 1.0
        weight, bias = kept_whole(student_weight), kept_whole(student_bias)
        transform = LogitTransform(temperature=self.temperature)
        call = DivergenceCall(
            hidden=student_input,
            weight=weight,
            bias=bias,
            teacher_hidden=teacher_input,
            teacher_weight=kept_whole(teacher_weight),
            teacher_bias=kept_whole(teacher_bias),
            teacher_transform=transform,
            teacher_may_require_grad=True,
            measure=measure_of("jsd", self.beta),
            mask=counted,
            # An ignored label may be an id, and a label without a hard loss no id at all.
            targets=torch.where(counted, labels, -1) if together else None,
            options=HeadOptions(transform=transform),
            targets_name="true_labels",
        )
        on_soft, on_hard = soft_weight / count, -hard_weight / count
        found, made = in_one_pass_if_free(call, on_soft, on_hard)
        soft, hard = found.divergence.sum() / count, None
        loss = soft_weight * soft
        if found.logps is not None:
            hard = -found.logps.sum() / count
            loss = loss + hard_weight * hard
        if made is not None:
            loss = loss + made
        if wants_hard and hard is None:
            hard = -linear_logprobs(student_input, weight, labels, mask=counted, bias=bias).logps.sum() / count
            loss = loss + hard_weight * hard
        if not self.return_soft_hard_loss:
            return loss
        assert hard is not None
        return loss, soft.detach(), hard.detach()

    def _weights(self) -> tuple[float, float]:
        found = []
        for name in ("weight_hard_loss", "weight_soft_loss"):
            value = number(name, getattr(self, name))
            if not abs(value) < float("inf"):
                raise ValueError(f"{name} must be finite, got {value}")
            found.append(value)
        return found[0], found[1]


def _check(student_input: Tensor, student_weight: Tensor, teacher_weight: Tensor, true_labels: Tensor) -> None:
    given = {"student_input": student_input, "student_weight": student_weight}
    given |= {"teacher_weight": teacher_weight, "true_labels": true_labels}
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if true_labels.is_floating_point() or true_labels.shape != student_input.shape[:-1]:
        raise ValueError(
            f"true_labels must be integers of shape {tuple(student_input.shape[:-1])} from student_input, got "
            f"{tuple(true_labels.shape)} {true_labels.dtype}"
        )
    if teacher_weight.shape[0] != student_weight.shape[0]:
        raise ValueError(
            f"teacher_weight must have the {student_weight.shape[0]} vocabulary entries of student_weight, got "
            f"{teacher_weight.shape[0]}; liger-kernel would give the student logits of 0 for the rest, and so "
            "probability to padding; liger_rl.linear_divergence(vocab=...) leaves padding out"
        )


@overload
def kept_whole(parameter: Tensor) -> Tensor: ...
@overload
def kept_whole(parameter: Tensor | None) -> Tensor | None: ...
def kept_whole(parameter: Tensor | None) -> Tensor | None:
    """A copy of what ZeRO-3 gathers for the forward and empties again. DeepSpeed's id marks such a parameter."""
    return parameter.clone() if parameter is not None and hasattr(parameter, "ds_id") else parameter
