"""Checks of arguments that several public functions share.

An error names the argument, the expected value and the value it got.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch.autograd import forward_ad

from liger_rl.kernels.argument_checks import check_type
from liger_rl.kernels.statistics import EXTRAS
from liger_rl.kernels.transform import LogitTransform

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
MASK_DTYPES = (torch.bool, *INTEGER_DTYPES, *FLOAT_DTYPES)
PLAIN = (Tensor, nn.Parameter)


def check_flag(name: str, value: bool) -> None:
    check_type(name, value, bool, "a bool")


def check_count(name: str, value: Any, *, least: int, expected: str = "an int") -> None:
    check_type(name, value, int, expected)
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_optional_count(name: str, value: Any) -> None:
    if value is not None:
        check_count(name, value, least=1, expected="an int or None")


def check_extras(_name: str, extras: Collection[str]) -> None:
    if isinstance(extras, str):
        raise TypeError(f"extras must be a collection of names, got the string {extras!r}")
    check_type("extras", extras, Collection, "a collection of names")
    unknown = [name for name in extras if name not in EXTRAS]
    if unknown:
        raise ValueError(f"extras must be among {', '.join(EXTRAS)}; got {', '.join(sorted(map(str, unknown)))}")


def check_compute_dtype(name: str, value: torch.dtype | None) -> None:
    if value is not None and value not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or None, got {value}")


def check_gather(name: str, value: object) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable or None, got {type(value).__name__}")


def check_dense(name: str, tensor: Any, like: Tensor | None = None, source: str = "") -> Tensor:
    """Raise unless this is a plain dense tensor, on the device of `like`, whose name is `source`."""
    if type(tensor) not in PLAIN:
        check_type(name, tensor, Tensor, "a tensor")
        if hasattr(tensor, "device_mesh"):
            raise TypeError(
                f"{name} must be a plain tensor, got a DTensor; localize of models.tensors gives this rank's"
            )
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got the layout {tensor.layout}")
    if like is None and tensor.is_meta:
        raise ValueError(f"{name} must have values, got a tensor on the meta device")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} must be on {like.device} from {source}, got {tensor.device}")
    return tensor


def check_shape(name: str, tensor: Tensor, shape: Sequence[int | None], expected: str) -> None:
    """Raise ValueError unless the tensor has this shape, in which None stands for any size of at least 1."""
    fits = tensor.dim() == len(shape)
    for place, size in enumerate(shape):
        fits = fits and (tensor.shape[place] > 0 if size is None else tensor.shape[place] == size)
    if not fits:
        raise ValueError(f"{name} must be {expected}, got {tuple(tensor.shape)}")


def check_constant(name: str, tensor: Any) -> None:
    """Raise ValueError for a tensor that wants a gradient, where it would get none."""
    if torch.is_grad_enabled() and isinstance(tensor, Tensor) and tensor.requires_grad:
        raise ValueError(
            f"{name} must require no gradient, because it gets none; detach it, or make it under torch.no_grad() from "
            "frozen parameters"
        )


def check_integers(name: str, tensor: Any) -> None:
    if check_dense(name, tensor).dtype not in INTEGER_DTYPES:
        raise TypeError(f"{name} must be integers, got {tensor.dtype}")


def check_transform(transform: LogitTransform) -> None:
    check_type("transform", transform, LogitTransform, "a LogitTransform")


def check_floating(name: str, tensor: Tensor, like: Tensor | None = None, source: str = "") -> None:
    """Raise unless this is a plain dense tensor of FLOAT_DTYPES, on the device of `like`, whose name is `source`."""
    # This is asked of every tensor of every call, so `check_dense` runs only if it has something to say.
    if (
        type(tensor) not in PLAIN
        or tensor.layout != torch.strided
        or tensor.is_meta
        or (like is not None and tensor.device != like.device)
    ):
        check_dense(name, tensor, like, source)
    if tensor.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be float32, bfloat16 or float16, got {tensor.dtype}")
    # The levels come first because reading them costs nothing.
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise NotImplementedError(f"{name} must have no tangent: there is no forward-mode derivative, only a backward")
    if functorch.maybe_current_level() is not None:
        check_not_transformed(name, tensor)


def check_not_transformed(name: str, tensor: Tensor) -> None:
    """Raise for a tensor of torch.func, which has no memory that a kernel could read."""
    if functorch.is_functorch_wrapped_tensor(tensor):
        raise NotImplementedError(
            f"{name} must be a plain tensor, got one of torch.func (grad, vmap, ...): call torch.autograd.grad or "
            "backward in place of grad, and give a batch in place of vmap"
        )


def check_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, compute_dtype: torch.dtype | None, prefix: str = ""
) -> torch.dtype:
    """Check the types, shapes, devices and dtypes of one head. Its names in messages start with the prefix.

    Returns:
        The dtype of its products: `compute_dtype`, or if that is None, autocast's dtype, or else the dtype of hidden.
    """
    check_floating(f"{prefix}hidden", hidden)
    if hidden.dim() not in (2, 3) or hidden.shape[-1] == 0:
        raise ValueError(f"{prefix}hidden must be (B, T, H) or (N, H) with H of at least 1, got {tuple(hidden.shape)}")
    check_floating(f"{prefix}weight", weight, hidden, f"{prefix}hidden")
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{prefix}weight must be (V, H) with H = {hidden.shape[-1]} from {prefix}hidden and V of at least 1, "
            f"got {tuple(weight.shape)}"
        )
    if bias is not None:
        check_floating(f"{prefix}bias", bias, hidden, f"{prefix}hidden")
        check_shape(f"{prefix}bias", bias, weight.shape[:1], f"(V,) = ({weight.shape[0]},) from {prefix}weight")
    if compute_dtype is not None:
        return compute_dtype
    kind, dtype = hidden.device.type, hidden.dtype
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    # A float32 bias is added in float32, whatever the other dtypes are.
    for name, tensor in (("weight", weight), ("bias", None if bias is None or bias.dtype == torch.float32 else bias)):
        if tensor is not None and tensor.dtype != dtype:
            raise TypeError(
                f"{prefix}{name} must be {dtype} from {prefix}hidden (or run under autocast), got {tensor.dtype}"
            )
    return dtype


def check_tokens(
    targets: Tensor,
    mask: Tensor | None,
    shape: torch.Size,
    like: Tensor,
    source: str,
    targets_name: str = "targets",
) -> None:
    columns: list[tuple[str, Tensor, tuple[torch.dtype, ...]]] = [(targets_name, targets, INTEGER_DTYPES)]
    if mask is not None:
        columns.append(("mask", mask, MASK_DTYPES))
    for name, tensor, dtypes in columns:
        if functorch.maybe_current_level() is not None:
            check_not_transformed(name, tensor)
        is_plain = type(tensor) in PLAIN and tensor.layout == torch.strided
        if not is_plain or tensor.device != like.device:
            check_dense(name, tensor, like, source)
        if tensor.dtype not in dtypes:
            kinds = "integers" if dtypes is INTEGER_DTYPES else "bool, integer or float 0/1"
            raise TypeError(f"{name} must be {kinds}, got {tensor.dtype}")
        if tensor.shape != shape:
            expected = f"{'(B, T)' if len(shape) == 2 else '(N,)'} = {tuple(shape)} from {source}"
            raise ValueError(f"{name} must be {expected}, got {tuple(tensor.shape)}")
