"""liger-kernel's chunked distillation loss on this package's divergence of two heads: docs/liger.md."""

from dataclasses import dataclass

from torch import Tensor, nn

from liger_rl.head.checks import check_dense
from liger_rl.head.head_options import HeadOptions
from liger_rl.head.logprobs import linear_logprobs
from liger_rl.head.pair.pair_call import DivergenceCall, compute_in_one_pass_if_free, make_measure
from liger_rl.integrations.liger.liger_head import copy_under_zero_3, make_targets
from liger_rl.kernels.public_call import outside_of_graphs
from liger_rl.kernels.transform import LogitTransform
from liger_rl.losses.options import check_interval
from liger_rl.models.local_tensors import localize

__all__ = ["LigerFusedLinearJSDLoss"]


@dataclass(eq=False, repr=False)
class LigerFusedLinearJSDLoss(nn.Module):
    """Drop-in for `liger_kernel.chunked_loss.LigerFusedLinearJSDLoss` 0.8.5.

        loss = weight_hard_loss * hard + weight_soft_loss * soft
        soft = mean of JSD_beta(student, teacher) at `temperature`
        hard = mean of -log p_student(label) at temperature 1

    Both means are over the tokens whose label is not ignore_index. beta, in [0, 1], is the teacher's share in the
    mixture. At beta 0 and 1 the JSD is KL(teacher || student) and KL(student || teacher), see `linear_divergence`.

    Options are attributes of the same names, checked here and at every call. If temperature is not 1, the hard loss
    needs a second pass over the student's head. docs/liger.md lists the differences from Liger's.
    """

    weight_hard_loss: float = 0.5
    weight_soft_loss: float = 0.5
    beta: float = 0.5
    ignore_index: int = -100  # the label of tokens that do not count, of either sign
    temperature: float = 1.0  # of both heads' logits in the soft loss
    compiled: bool = True  # no effect
    chunk_size: int = 1024  # no effect
    return_soft_hard_loss: bool = False  # return (loss, soft, hard)

    def __post_init__(self) -> None:
        super().__init__()
        self._check()  # of the options

    @outside_of_graphs
    def forward(
        self,
        student_input: Tensor,  # (N, H) or (B, T, H)
        student_weight: Tensor,  # (V, H), in student_input's dtype; any under autocast
        teacher_input: Tensor,  # (N, H') or (B, T, H')
        teacher_weight: Tensor,  # (V, H')
        true_labels: Tensor,  # (N,) or (B, T); student_input[t] predicts true_labels[t]
        student_bias: Tensor | None = None,  # (V,)
        teacher_bias: Tensor | None = None,  # (V,)
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Loss of one batch, () float32; with return_soft_hard_loss also its two parts. No gradient for the teacher."""
        self._check()
        student = localize(student_input, student_weight, bias=student_bias, targets=true_labels)
        teacher = localize(teacher_input, teacher_weight, bias=teacher_bias, student=student)
        student_input, true_labels = student.hidden, student.targets
        check_dense("student_input", student_input)
        check_dense("student_weight", student.weight, student_input, "student_input")
        check_dense("teacher_weight", teacher.weight, student_input, "student_input")
        check_dense("true_labels", true_labels, student_input, "student_input")
        if true_labels.is_floating_point() or true_labels.shape != student_input.shape[:-1]:
            raise ValueError(
                f"true_labels must be integers of shape {tuple(student_input.shape[:-1])} from student_input, got "
                f"{tuple(true_labels.shape)} {true_labels.dtype}"
            )
        if teacher_weight.shape[0] != student_weight.shape[0]:
            raise ValueError(
                f"teacher_weight must have the {student_weight.shape[0]} vocabulary entries of student_weight, got "
                f"{teacher_weight.shape[0]}; liger-kernel would give the student logits of 0 for the rest, and so a "
                "weight to padding; liger_rl.linear_divergence(vocab=...) leaves padding out"
            )
        labels = make_targets(true_labels, student_weight.shape[0], self.ignore_index)
        weight, bias = copy_under_zero_3(student.weight), copy_under_zero_3(student.bias)
        has_hard, counted, hard = self.weight_hard_loss != 0 or self.return_soft_hard_loss, labels >= 0, None
        count, transform = counted.sum().clamp(min=1), LogitTransform(temperature=self.temperature)
        call = DivergenceCall(
            hidden=student_input,
            weight=weight,
            bias=bias,
            vocab_parallel=student.vocab_parallel,
            teacher_hidden=teacher.hidden,
            teacher_weight=copy_under_zero_3(teacher.weight),
            teacher_bias=copy_under_zero_3(teacher.bias),
            teacher_transform=transform,
            teacher_may_require_grad=True,
            measure=make_measure("jsd", self.beta),
            mask=counted,
            # Without a hard loss, labels need not be valid ids.
            targets=labels if has_hard and self.temperature == 1.0 else None,
            options=HeadOptions(transform=transform),
            targets_name="true_labels",
        )
        result, one_pass_loss = compute_in_one_pass_if_free(
            call, self.weight_soft_loss / count, -self.weight_hard_loss / count
        )
        soft, logps = result.divergence.sum() / count, result.logps
        if has_hard and logps is None:
            place = student.vocab_parallel
            logps = linear_logprobs(student_input, weight, labels, mask=counted, bias=bias, vocab_parallel=place).logps
        loss = self.weight_soft_loss * soft
        if logps is not None:
            hard = -logps.sum() / count
            loss = loss + self.weight_hard_loss * hard
        if one_pass_loss is not None:
            loss = loss + one_pass_loss
        if not self.return_soft_hard_loss:
            return loss
        assert hard is not None
        return loss, soft.detach(), hard.detach()

    def _check(self) -> None:
        for name in ("weight_hard_loss", "weight_soft_loss"):
            check_interval(name, getattr(self, name), "(-inf, inf)")
        LogitTransform(temperature=self.temperature)
        make_measure("jsd", self.beta)
