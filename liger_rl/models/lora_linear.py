"""A linear layer with a LoRA adapter as one autograd Function: y = x W^T + s (x A^T) B^T.

PEFT's layer casts x to the adapter's dtype, autocast casts it back, and the backward keeps x, A x and B A x. Here two
products and one product added in place make y. The backward keeps x and x A^T. The base of a quantized model runs as it
is. Its output is not written, because its autograd, a hook or a checkpoint may keep it.

`forward_lora_layer` takes the place of the `forward` of PEFT's layer classes, for every model of the process
(`liger_rl.integrations.peft`). It leaves a layer that it does not understand to PEFT, and the log "liger_rl" says once
why, at the level INFO.
"""

import logging
from collections.abc import Callable
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
        cast_weight = weight.to(x.dtype)
        y = x @ cast_weight.T if bias is None else torch.addmm(bias.to(x.dtype), x, cast_weight.T)
        low_rank = _Factors(x if dropped is None else dropped, a.to(x.dtype), b.to(x.dtype), scaling)
        ctx.save_for_backward(weight, low_rank.x, low_rank.a, low_rank.b, low_rank.add_to(y))
        ctx.scaling, ctx.is_dropped, ctx.dtype = scaling, dropped is not None, a.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, x, a, b, projected = ctx.saved_tensors
        low_rank = _Factors(x, a, b, ctx.scaling)
        by_rank = grad @ b
        grad_a, grad_b = low_rank.differentiate(grad, by_rank, projected, ctx.dtype)
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
        a_cast, b_cast = a.to(x.dtype), b.to(x.dtype)
        projected = x @ a_cast.T
        ctx.save_for_backward(x, a_cast, b_cast, projected)
        ctx.scaling, ctx.dtype = scaling, a.dtype
        return torch.addmm(y, projected, b_cast.T, alpha=scaling)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, projected = ctx.saved_tensors
        by_rank = grad @ b
        grad_a, grad_b = _Factors(x, a, b, ctx.scaling).differentiate(grad, by_rank, projected, ctx.dtype)
        grad_x = (by_rank @ a).mul_(ctx.scaling) if ctx.needs_input_grad[1] else None
        return grad, grad_x, grad_a, grad_b, None


class _Factors(NamedTuple):
    """An adapter's input and factors, in the dtype of the products."""

    x: Tensor  # (n, in)
    a: Tensor  # (r, in)
    b: Tensor  # (out, r)
    scaling: float

    def add_to(self, y: Tensor) -> Tensor:
        """y (n, out) += s (x A^T) B^T, in place. -> x A^T (n, r)."""
        projected = self.x @ self.a.T
        y.addmm_(projected, self.b.T, alpha=self.scaling)
        return projected

    def differentiate(
        self, grad: Tensor, by_rank: Tensor, projected: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """dL/dA (r, in) and dL/dB (out, r) in `dtype`, from dL/dy (n, out), its product with B (n, r) and x A^T."""
        grad_a, grad_b = matmul(by_rank.T, self.x), matmul(grad.T, projected)
        return grad_a.mul_(self.scaling).to(dtype), grad_b.mul_(self.scaling).to(dtype)


# --- PEFT's layers ----------------------------------------------------------------------------------------------------


def forward_lora_layer(original: Callable[..., Tensor], layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The `forward` of a LoRA layer of PEFT; `original` is PEFT's own.

    x (..., in) -> (..., out), in the dtype of the products.
    """
    if layer.disable_adapters or layer.merged:
        return original(layer, x, *args, **kwargs)
    name, reason = _find_adapter(layer, x, args, kwargs)
    if name is None:
        if reason not in _logged_reasons:
            _logged_reasons.add(reason)
            logger.info("LoRA layers of PEFT run as they are: %s", reason)
        return original(layer, x, *args, **kwargs)
    base, a, b, scaling = layer.base_layer, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]
    x = x.to(_product_dtype(x))
    dropped = layer.lora_dropout[name](x)
    if _is_plain(base):
        inputs = _flatten(x), None if dropped is x else _flatten(dropped)
        y = LoraLinear.apply(*inputs, base.weight, base.bias, a, b, scaling)
        return y.view(*x.shape[:-1], y.shape[-1])
    y = base(x)
    return AddedLora.apply(_flatten(y).to(x.dtype), _flatten(dropped), a, b, scaling).view_as(y).to(y.dtype)


def _flatten(x: Tensor) -> Tensor:
    """(..., width) -> (n, width)"""
    return x.reshape(-1, x.shape[-1])


def _product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a linear layer's products of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _find_adapter(layer: Any, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str | None, str]:
    """(the name of the layer's adapter, "") or (None, why PEFT's own forward runs)."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if args or kwargs:
        return None, "a call has other arguments than the input"
    if len(names) != 1:
        return None, "several adapters, or none, are active"
    (name,) = names
    if name in layer.lora_variant:
        return None, f"{type(layer.lora_variant[name]).__name__} is no plain LoRA"
    a, b, base, dtype = layer.lora_A[name], layer.lora_B[name], layer.base_layer, _product_dtype(x)
    if a.bias is not None or b.bias is not None:
        return None, "the adapter has a bias"
    if not isinstance(layer.scaling[name], (int, float)):
        return None, "the scaling is no number"
    if torch._C._are_functorch_transforms_active():
        return None, "a transform of torch.func is active"
    if dtype not in HALF:
        return None, "the products are not of a 16-bit dtype"
    if _has_any_global_hook():
        return None, "a hook is registered for all modules"
    if not all(_is_plain(factor) and not _has_hooks(factor) for factor in (a, b)):
        return None, "a factor of the adapter is sharded on its own, or has hooks"
    if not (_is_plain(base) or _is_quantized(base)):
        return None, f"the adapted layer, {type(base).__name__}, is neither an nn.Linear nor a quantized layer we know"
    # Also of a weight that is no parameter: the output of another module, or a part of a larger tensor.
    own = [tensor for tensor in (base.weight, base.bias) if tensor is not None] if _is_plain(base) else []
    # `LoraConfig(bias="all")` trains the bias alone.
    if own and (_has_hooks(base) or any(tensor.requires_grad for tensor in own)):
        return None, "the adapted layer is trained, or has hooks"
    # Without autocast PEFT computes in the adapter's dtype, and a linear layer in its weight's.
    is_autocast, tensors = torch.is_autocast_enabled(x.device.type), (x, a.weight, b.weight, *own)
    if any(tensor.dtype == torch.float64 if is_autocast else tensor.dtype != dtype for tensor in tensors):
        return None, "a tensor is of float64 under autocast, or of another dtype than the input without it"
    return name, ""


def _is_plain(base: nn.Module) -> bool:
    """Whether the layer is linear with a plain weight."""
    return type(base) is nn.Linear and type(base.weight) in (Tensor, nn.Parameter)


def _is_quantized(base: nn.Module) -> bool:
    """torchao keeps the layer and quantizes its weight. Other packages have layers of their own."""
    made = base.weight if type(base) is nn.Linear else base
    return type(made).__module__.partition(".")[0] in QUANTIZED_BY


def _has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module does more than its forward. ZeRO-3 gathers a weight where it is read, too."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return (any(hooks) or "forward" in vars(module)) and not is_zero_3(module.weight)
