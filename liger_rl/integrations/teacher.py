"""The lm_head of a teacher that is served elsewhere: docs/distillation.md. Only `TeacherHead.of` needs transformers."""

import json
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from liger_rl.call.checks import check_floating, check_shape, check_transform
from liger_rl.call.options import IDENTITY
from liger_rl.kernels.transform import LogitTransform

__all__ = ["TeacherHead"]
TRANSFORM = "liger_rl.TeacherHead.transform"  # the key of a file's metadata that marks it as ours


@dataclass(frozen=True, eq=False)
class TeacherHead:
    """A teacher's logits from its last hidden states (..., H'): transform(hidden @ weight.T + bias).

    Args:
        weight, bias: (V, H') and (V,) or None; float32, bfloat16 or float16.
        transform: the teacher's own, with a number as temperature.

    Raises:
        TypeError, ValueError: other dtypes or shapes, a sharded or quantised tensor, a temperature for each token.
    """

    weight: Tensor
    bias: Tensor | None = None
    transform: LogitTransform = IDENTITY

    def __post_init__(self) -> None:
        for name, tensor in self._tensors().items():
            check_floating(name, tensor)
            if type(tensor) not in (Tensor, nn.Parameter):
                raise ValueError(f"{name} must be plain, neither sharded nor quantised, got a {type(tensor).__name__}")
            shape = (None, None) if name == "weight" else self.weight.shape[:1]
            check_shape(name, tensor, shape, "(V, H')" if name == "weight" else f"(V,) = {tuple(shape)} from weight")
        check_transform(self.transform)
        if self.transform.per_token:
            raise ValueError("temperature of transform must be a number: a teacher has one for all tokens")

    @classmethod
    def of(cls, model: nn.Module) -> "TeacherHead":
        """The head of a HuggingFace causal LM: its own tensors, detached, and the model's softcap and scale.

        Raises as `swap_lm_head` does, which tries the head out and is undone; ValueError for adapters on the head.
        """
        from liger_rl.integrations.head import current_head
        from liger_rl.integrations.transformers import is_swapped, swap_lm_head, swapped_inside, unswap_lm_head

        was_swapped = is_swapped(model)
        swapped = swapped_inside(swap_lm_head(model))
        try:
            head, transform = current_head(swapped, swapped._fused_head_type), swapped._fused_transform
        finally:
            if not was_swapped:
                unswap_lm_head(model)
        if head.adapters:
            raise ValueError(f"the head of {type(model).__name__} must have no adapters; merge them first")
        bias = head.bias()
        return cls(head.linear.weight.detach(), None if bias is None else bias.detach(), transform)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a safetensors file of the weight and the bias, with the transform in its metadata."""
        tensors = {name: tensor.detach().contiguous() for name, tensor in self._tensors().items()}
        save_file(tensors, path, {TRANSFORM: json.dumps(asdict(self.transform))})

    @classmethod
    def load(cls, path: str | PathLike[str], device: torch.device | str | None = None) -> "TeacherHead":
        """What `save` wrote, on `device`; None is the CPU. ValueError for any other file."""
        try:
            with safe_open(path, "pt", device=str(device or "cpu")) as file:
                transform = LogitTransform(**json.loads((file.metadata() or {})[TRANSFORM]))
                return cls(**{name: file.get_tensor(name) for name in file.keys()}, transform=transform)  # noqa: SIM118
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"path must be a file that TeacherHead.save wrote, got {path}") from error

    @property
    def head(self) -> dict[str, Any]:
        """The teacher's arguments of `linear_divergence`, except `teacher_hidden`."""
        return {"teacher_weight": self.weight, "teacher_bias": self.bias, "teacher_transform": self.transform}

    def _tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})
