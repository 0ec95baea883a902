"""A linear layer with a LoRA adapter as one autograd Function: y = x W^T + s (x A^T) B^T.

PEFT's layer casts x to the adapter's dtype, autocast casts it back, and the backward keeps x, A x and B A x. Here two
products and one product added in place make y. The backward keeps x and x A^T. The base of a quantized model runs as it
is. Its output is not written, because its autograd, a hook or a checkpoint may keep it.

`forward_lora_layer` takes the place of the `forward` of PEFT's layer classes, for every model of the process
(`liger_rl.integrations.peft`). It leaves a layer that it does not understand to PEFT, and the log "liger_rl" says once
why, at the level INFO.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.module import _has_any_global_hook

from liger_rl.kernels.gemm import matmul
from liger_rl.models.tensors import is_zero_3

HALF = (torch.bfloat16, torch.float16)
# Their layers, or weights in an nn.Linear, take an input in the dtype of the products. A layer of the user's may not.
QUANTIZED_BY = ("auto_gptq", "awq", "bitsandbytes", "gptqmodel", "torchao", "transformers")

logger = logging.getLogger("liger_rl")
_logged_reasons: set[str] = set()


class _Shared(threading.local):
    """What the forwards of a `sharing_casts` share. A thread that starts within it is not in it."""

    # By the weight's id and the dtype of the cast: the weight, its version and address, the cast.
    casts: dict[tuple[int, torch.dtype], tuple[Tensor, tuple[int, int], Tensor]] | None = None


_shared = _Shared()


class LoraLinear(torch.autograd.Function):
    """x (n, in) 16-bit, W (out, in), bias (out,) or None, A (r, in), B (out, r), scaling s -> y (n, out) in x's dtype.

    Parameters of another dtype are cast to x's. The gradients of A and B have the dtypes of A and B. W and the bias get
    no gradient. `dropped` is x after the adapter's dropout, or None if it is x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scaling: float,
    ) -> Tensor:
        y, a_cast, b_cast, projected = multiply(x, dropped, weight, bias, a, b, scaling)
        ctx.save_for_backward(weight, x if dropped is None else dropped, a_cast, b_cast, projected)
        ctx.scaling, ctx.is_dropped, ctx.dtype = scaling, dropped is not None, a.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, x, a, b, projected = ctx.saved_tensors
        by_rank = grad @ b
        grad_a, grad_b = differentiate_factors(grad, by_rank, x, projected, ctx.scaling, ctx.dtype)
        grad_x = grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None
        grad_dropped = None
        if ctx.is_dropped:
            grad_dropped = (by_rank @ a).mul_(ctx.scaling)
        elif grad_x is not None:
            grad_x.addmm_(by_rank, a, alpha=ctx.scaling)
        return grad_x, grad_dropped, None, None, grad_a, grad_b, None


class AddedLora(torch.autograd.Function):
    """y (n, out) + s (x A^T) B^T: the adapter of a quantized layer, which has made y from its own input."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        a_cast, b_cast = _cast(a, x.dtype), _cast(b, x.dtype)
        projected = x @ a_cast.T
        ctx.save_for_backward(x, a_cast, b_cast, projected)
        ctx.scaling, ctx.dtype = scaling, a.dtype
        return torch.addmm(y, projected, b_cast.T, alpha=scaling)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, projected = ctx.saved_tensors
        by_rank = grad @ b
        grad_a, grad_b = differentiate_factors(grad, by_rank, x, projected, ctx.scaling, ctx.dtype)
        grad_x = (by_rank @ a).mul_(ctx.scaling) if ctx.needs_input_grad[1] else None
        return grad, grad_x, grad_a, grad_b, None


def multiply(
    x: Tensor, dropped: Tensor | None, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`LoraLinear`'s inputs -> y (n, out), A and B in the dtype of x, and the adapter's input times A^T (n, r)."""
    dtype = x.dtype
    a, b = _cast(a, dtype), _cast(b, dtype)
    y = nn.functional.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))
    projected = nn.functional.linear(x if dropped is None else dropped, a)
    return y.addmm_(projected, b.T, alpha=scaling), a, b, projected


def differentiate_factors(
    grad: Tensor,  # (n, out) dL/dy
    by_rank: Tensor,  # (n, r) its product with B
    x: Tensor,  # (n, in) the adapter's input
    projected: Tensor,  # (n, r) x A^T
    scaling: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """dL/dA (r, in) and dL/dB (out, r) in `dtype`."""
    grad_a, grad_b = matmul(by_rank.T, x), matmul(grad.T, projected)
    if scaling != 1:  # a launch each, of a layer that is mostly launches
        grad_a.mul_(scaling)
        grad_b.mul_(scaling)
    return grad_a.to(dtype), grad_b.to(dtype)


@contextmanager
def sharing_casts() -> Iterator[None]:
    """The context of forwards between which weights stay as they are: each casts no adapter that one before has cast.

    No cast outlives it: FSDP2 and optimizers that write through an address change a weight and not its version.
    """
    outside, _shared.casts = _shared.casts, {}
    try:
        yield
    finally:
        _shared.casts = outside


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """weight.to(dtype), without a gradient."""
    # A compiled forward would keep what it has found. A tensor of the inference mode has no version.
    casts = None if torch.compiler.is_compiling() else _shared.casts
    if casts is None or weight.dtype == dtype or weight.is_inference():
        return weight.to(dtype)
    key, state = (id(weight), dtype), (weight._version, weight.data_ptr())
    kept = casts.get(key)
    if kept is None or kept[1] != state:
        kept = casts[key] = weight, state, weight.to(dtype)
    return kept[2]


# --- PEFT's layers ----------------------------------------------------------------------------------------------------


def forward_lora_layer(original: Callable[..., Tensor], layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The `forward` of a LoRA layer of PEFT; `original` is PEFT's own.

    x (..., in) -> (..., out), in the dtype of the products.
    """
    if layer.disable_adapters or layer.merged:
        return original(layer, x, *args, **kwargs)
    kind = x.device.type
    is_autocast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if is_autocast else x.dtype
    if args or kwargs:
        adapter: _Adapter | str = "a call has other arguments than the input"
    else:
        adapter = _find_adapter(layer, x, dtype, is_autocast)
    if isinstance(adapter, str):
        # Hooks of a trial, which has no graph, are no reason.
        if torch.is_grad_enabled() and adapter not in _logged_reasons:
            _logged_reasons.add(adapter)
            logger.info("LoRA layers of PEFT run as they are: %s", adapter)
        return original(layer, x, *args, **kwargs)
    x = x.to(dtype)
    dropped = adapter.dropout(x)
    if adapter.weight is None:
        y = adapter.base(x)
        added = AddedLora.apply(_flatten(y).to(dtype), _flatten(dropped), adapter.a, adapter.b, adapter.scaling)
        return added.view_as(y).to(y.dtype)
    inputs = _flatten(x), None if dropped is x else _flatten(dropped), adapter.weight, *adapter[3:]
    # A Function takes as long to call as a product.
    y = LoraLinear.apply(*inputs) if torch.is_grad_enabled() else multiply(*inputs)[0]
    return y.view(*x.shape[:-1], y.shape[-1])


def _flatten(x: Tensor) -> Tensor:
    """(..., width) -> (n, width)"""
    return x.reshape(-1, x.shape[-1])


class _Adapter(NamedTuple):
    """The active adapter of a layer, and the layer that it adapts."""

    base: Any
    dropout: nn.Module
    weight: Tensor | None  # (out, in) of an nn.Linear; None: the base is quantized
    bias: Tensor | None  # (out,)
    a: Tensor  # (r, in)
    b: Tensor  # (out, r)
    scaling: float


def _find_adapter(layer: Any, x: Tensor, dtype: torch.dtype, is_autocast: bool) -> _Adapter | str:
    """The layer's adapter, or why PEFT's own forward runs. `dtype` is that of the products.

    Each call reads all of it anew, so no change of the layer is missed.
    """
    modules = layer._modules  # an attribute of a module takes 20 times as long to read
    all_a, variants, scaling = modules["lora_A"]._modules, layer.lora_variant, layer.scaling
    names = [name for name in layer.active_adapters if name in all_a]
    if len(names) != 1:
        return "several adapters, or none, are active"
    (name,) = names
    if name in variants:
        return f"{type(variants[name]).__name__} is no plain LoRA"
    factor_a, factor_b, base = all_a[name], modules["lora_B"]._modules[name], modules["base_layer"]
    if _read(factor_a, "bias") is not None or _read(factor_b, "bias") is not None:
        return "the adapter has a bias"
    if not isinstance(scaling[name], (int, float)):
        return "the scaling is no number"
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func is active"
    if dtype not in HALF:
        return "the products are not of a 16-bit dtype"
    if _has_any_global_hook():
        return "a hook is registered for all modules"
    a, b = _read_plain_weight(factor_a), _read_plain_weight(factor_b)
    if a is None or b is None or _has_hooks(factor_a) or _has_hooks(factor_b):
        return "a factor of the adapter is sharded on its own, or has hooks"
    weight = _read_plain_weight(base)
    if weight is None and not _is_quantized(base):
        return f"the adapted layer, {type(base).__name__}, is neither an nn.Linear nor a quantized layer we know"
    bias = None if weight is None else _read(base, "bias")
    # Also of a weight that is no parameter: the output of another module, or a part of a larger tensor.
    # `LoraConfig(bias="all")` trains the bias alone.
    is_trained = any(tensor is not None and tensor.requires_grad for tensor in (weight, bias))
    if is_trained or (weight is not None and _has_hooks(base)):
        return "the adapted layer is trained, or has hooks"
    # Without autocast PEFT computes in the adapter's dtype, and a linear layer in its weight's.
    dtypes = {tensor.dtype for tensor in (x, a, b, weight, bias) if tensor is not None}
    if torch.float64 in dtypes if is_autocast else dtypes != {dtype}:
        return "a tensor is of float64 under autocast, or of another dtype than the input without it"
    return _Adapter(base, modules["lora_dropout"]._modules[name], weight, bias, a, b, scaling[name])


def _read(module: nn.Module, name: str) -> Any:
    """A module's parameter, or an attribute that stands in its place."""
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


def _read_plain_weight(module: nn.Module) -> Tensor | None:
    """The weight of a linear layer, if both are plain."""
    if type(module) is not nn.Linear:
        return None
    weight = _read(module, "weight")
    return weight if type(weight) in (Tensor, nn.Parameter) else None


def _is_quantized(base: nn.Module) -> bool:
    """torchao keeps the layer and quantizes its weight. Other packages have layers of their own."""
    made = base.weight if type(base) is nn.Linear else base
    return type(made).__module__.partition(".")[0] in QUANTIZED_BY


def _has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module does more than its forward. ZeRO-3 gathers a weight where it is read, too."""
    has_hooks = (
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    )
    return bool(has_hooks or "forward" in vars(module)) and not is_zero_3(module.weight)
