"""What the drop-ins for liger-kernel's losses do with a head's tensors before this package sees them."""

from typing import Any, TypeVar

import torch
from torch import Tensor

from liger_rl.head.checks import check_dense

ParameterT = TypeVar("ParameterT", Tensor, Tensor | None)


def check_shape(name: str, value: Any, hidden: Tensor, *shapes: tuple[int, ...]) -> None:
    if check_dense(name, value, hidden, "_input").shape not in shapes:
        raise ValueError(f"{name} must be {' or '.join(map(str, shapes))} from _input, got {tuple(value.shape)}")


def head_factors(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The head's factors, for products in the weight's precision and for a backward after the forward's context."""
    autocast = torch.is_autocast_enabled(hidden.device.type)
    if weight.dtype == torch.float32 and hidden.dtype in (torch.bfloat16, torch.float16) and not autocast:
        hidden = hidden.float()
    return hidden, kept_whole(weight), kept_whole(bias)


def kept_whole(parameter: ParameterT) -> ParameterT:
    """A copy of a parameter that ZeRO-3 empties after the forward. DeepSpeed's id marks it."""
    return parameter.clone() if parameter is not None and hasattr(parameter, "ds_id") else parameter


def label_ids(labels: Tensor, vocab: int, ignore_index: int) -> Tensor:
    """(...,) int64: -1 where a label is `ignore_index`, of either sign. Any other negative label is refused later.

    A negative id would be masked. The first id beyond the vocabulary is refused as every such id is.
    """
    ids = labels.long()  # a narrow dtype would wrap the size of the vocabulary
    return torch.where(ids == ignore_index, -1, torch.where(ids < 0, vocab, ids))
