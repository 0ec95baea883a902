"""liger-kernel's chunked distillation losses on this package's heads: docs/liger.md."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_rl.call.checks import check_dense, check_head, check_shape
from liger_rl.call.dtensors import has_dtensor
from liger_rl.call.options import HeadOptions
from liger_rl.engines.graphs import break_graph
from liger_rl.engines.pair.inner_products import inner_products
from liger_rl.engines.pair.run import DivergenceCall, in_one_pass_if_free, measure_of
from liger_rl.integrations.liger_head import kept_whole, label_ids
from liger_rl.kernels.transform import LogitTransform
from liger_rl.logprobs import linear_logprobs
from liger_rl.losses.options import in_interval

__all__ = ["LigerFusedLinearCosineSimilarityLoss", "LigerFusedLinearJSDLoss"]


Head = tuple[Tensor, Tensor, Tensor | None]  # hidden, weight, bias
# (), the labels' log-probabilities if they cost nothing, and a 0 that carries the gradients of both
SoftLoss = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass(eq=False, repr=False)
class _Distillation(nn.Module):
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
        self._check()  # so that a mistake shows here

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
        break_graph(type(self).__name__)
        self._check()
        check_dense("student_input", student_input)
        check_dense("student_weight", student_weight, student_input, "student_input")
        check_dense("teacher_weight", teacher_weight, student_input, "student_input")
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
        labels = label_ids(true_labels, student_weight.shape[0], self.ignore_index)
        student = student_input, kept_whole(student_weight), kept_whole(student_bias)
        teacher = teacher_input, kept_whole(teacher_weight), kept_whole(teacher_bias)
        has_hard, counted, hard = self.weight_hard_loss != 0 or self.return_soft_hard_loss, labels >= 0, None
        count = counted.sum().clamp(min=1)
        soft, logps, one_pass_loss = self._soft_loss(student, teacher, labels, count, has_hard)
        if has_hard and logps is None:
            logps = linear_logprobs(*student[:2], labels, mask=counted, bias=student[2]).logps
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
        for name in ("weight_hard_loss", "weight_soft_loss", "beta"):
            in_interval(name, getattr(self, name), "(-inf, inf)")
        LogitTransform(temperature=self.temperature)

    def _soft_loss(self, student: Head, teacher: Head, labels: Tensor, count: Tensor, has_hard: bool) -> SoftLoss:
        raise NotImplementedError


class LigerFusedLinearJSDLoss(_Distillation):
    """Drop-in for `liger_kernel.chunked_loss.LigerFusedLinearJSDLoss` 0.8.5.

        loss = weight_hard_loss * hard + weight_soft_loss * soft
        soft = mean of JSD_beta(student, teacher) at `temperature`
        hard = mean of -log p_student(label) at temperature 1

    Both means are over the tokens whose label is not ignore_index. At beta 0 and 1 the JSD is KL(teacher || student)
    and KL(student || teacher), see `linear_divergence`. docs/liger.md lists the differences from Liger's, for example a
    teacher with more vocabulary entries than the student raises here.

    A hard loss at another temperature than 1 takes products of its own. beta is in [0, 1], the teacher's share in the
    mixture. Options are attributes of the same names, checked here and at every call.
    """

    def _check(self) -> None:
        super()._check()
        measure_of("jsd", self.beta)

    def _soft_loss(self, student: Head, teacher: Head, labels: Tensor, count: Tensor, has_hard: bool) -> SoftLoss:
        transform = LogitTransform(temperature=self.temperature)
        call = DivergenceCall(
            hidden=student[0],
            weight=student[1],
            bias=student[2],
            teacher_hidden=teacher[0],
            teacher_weight=teacher[1],
            teacher_bias=teacher[2],
            teacher_transform=transform,
            teacher_may_require_grad=True,
            measure=measure_of("jsd", self.beta),
            mask=labels >= 0,
            # A label without a hard loss may be no id.
            targets=labels if has_hard and self.temperature == 1.0 else None,
            options=HeadOptions(transform=transform),
            targets_name="true_labels",
        )
        result, one_pass_loss = in_one_pass_if_free(call, self.weight_soft_loss / count, -self.weight_hard_loss / count)
        return result.divergence.sum() / count, result.logps, one_pass_loss


class LigerFusedLinearCosineSimilarityLoss(_Distillation):
    """Drop-in for `liger_kernel.chunked_loss.LigerFusedLinearCosineSimilarityLoss` 0.8.5.

        loss = weight_hard_loss * hard + weight_soft_loss * soft
        soft = mean of beta * (1 - cos(student's logits, teacher's logits))
        hard = mean of -log p_student(label) at temperature 1

    Both means are over the tokens whose label is not ignore_index. The temperature does not change the cosine, which is
    0 where all logits are 0. From about N > H tokens on no logits are made: `engines/pair/inner_products.py`. Products
    and sums are float32, under autocast too. docs/liger.md lists the costs and the differences from Liger's.

    Options are attributes of the same names, checked here and at every call.
    """

    def _soft_loss(self, student: Head, teacher: Head, labels: Tensor, count: Tensor, has_hard: bool) -> SoftLoss:
        if has_dtensor(*student, *teacher):
            raise ValueError("student and teacher tensors must be whole on this rank, got a DTensor")
        check_head(*student, None, "student_")
        check_head(*teacher, None, "teacher_")
        tokens = tuple(labels.shape)
        check_shape("teacher_input", teacher[0], (*tokens, None), f"({tokens} tokens of student_input, H')")
        teacher_factors = (factor.detach() for factor in _with_bias(*teacher, labels >= 0))
        products = inner_products(*_with_bias(*student, labels >= 0), *teacher_factors)
        # 1 / |s|, and 0 without a gradient if s is 0
        inverse = torch.where(products[1:] > 0, products[1:], torch.inf).rsqrt()
        cosine = products[0] * inverse[0] * inverse[1]
        return self.beta * (1 - cosine).sum() / count, None, None


def _with_bias(hidden: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens that count, and the bias as a column of the weight. Eight columns keep 16-bit products aligned."""
    hidden = hidden[mask]
    if bias is None:
        return hidden, weight
    columns = F.pad(hidden.new_ones(len(hidden), 1), (0, 7)), F.pad(bias[:, None], (0, 7))
    return torch.cat([hidden, columns[0]], 1), torch.cat([weight, columns[1]], 1)
