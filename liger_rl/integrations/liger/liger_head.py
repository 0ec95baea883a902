"""Arguments of liger-kernel's losses -> arguments of this package."""

from typing import Any, TypeVar

import torch
from torch import Tensor

from liger_rl.head.checks import check_dense
from liger_rl.models.local_tensors import is_zero_3

TensorT = TypeVar("TensorT", Tensor, Tensor | None)


def check_shape(name: str, value: Any, hidden: Tensor, *shapes: tuple[int, ...]) -> None:
    if check_dense(name, value, hidden, "_input").shape not in shapes:
        raise ValueError(f"{name} must be {' or '.join(map(str, shapes))} from _input, got {tuple(value.shape)}")


def prepare_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """hidden, weight and bias: hidden in float32 if the weight is, and parameters that ZeRO-3 will empty as copies."""
    autocast = torch.is_autocast_enabled(hidden.device.type)
    if weight.dtype == torch.float32 and hidden.dtype in (torch.bfloat16, torch.float16) and not autocast:
        hidden = hidden.float()
    return hidden, copy_under_zero_3(weight), copy_under_zero_3(bias)


def copy_under_zero_3(parameter: TensorT) -> TensorT:
    """A copy if ZeRO-3 empties the parameter after the forward."""
    return parameter.clone() if parameter is not None and is_zero_3(parameter) else parameter


def make_targets(labels: Tensor, vocab: int, ignore_index: int) -> Tensor:
    """(...,) int64 token ids, -1 where a label is `ignore_index`, of either sign.

    Other negative labels become `vocab`, an id that the head refuses. As they are, they would be masked.
    """
    ids = labels.long()  # a narrow dtype could not hold `vocab`
    return torch.where(ids == ignore_index, -1, torch.where(ids < 0, vocab, ids))
