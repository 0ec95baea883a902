"""LoRA adapters on an lm_head, as further columns of its hidden states and of its weight.

Adding scaling * b @ a to a 16-bit weight would round the adapter away. So the head's product gets a column for each row
of `a` instead, which is exact:

    [hidden | scaling * hidden @ a.T] @ [weight | b].T = hidden @ weight.T + scaling * (hidden @ a.T) @ b.T

Each call reads the adapters anew, because they can be added, switched, merged and disabled between two calls. Any other
kind of adapter is refused by name.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_rl.head.local_tensors import has_dtensor

COLUMNS = 8  # of 16 bits: rows of a multiple of 8 start at multiples of 16 bytes, which the products' kernels need


@dataclass(frozen=True)
class Adapter:
    """One active LoRA adapter of a layer: scaling * b(a(dropout(hidden)))."""

    a: nn.Linear
    b: nn.Linear
    dropout: nn.Module
    scaling: float

    def columns(self, hidden: Tensor) -> Tensor:
        """(..., H) -> (..., r), the input of `b` times scaling. The dropout is drawn here, as PEFT draws it."""
        a = self.a.weight
        if self.dropout.training and getattr(self.dropout, "p", 0.0) > 0:
            hidden = self.dropout(hidden.to(a.dtype))
        dtype = torch.promote_types(hidden.dtype, a.dtype)
        return nn.functional.linear(hidden.to(dtype), a.to(dtype)) * self.scaling


@dataclass(frozen=True)
class Head:
    """An lm_head taken apart."""

    module: nn.Module  # the module that the model calls
    linear: Any  # the layer with the weight
    adapters: tuple[Adapter, ...] = ()  # those that are active

    def bias(self) -> Tensor | None:
        """(V,) of the layer and of the adapters together, float32 if there are any of those."""
        total = self.linear.bias
        for adapter in self.adapters:
            if adapter.b.bias is not None:
                added = adapter.b.bias.float() * adapter.scaling
                total = added if total is None else total.float() + added
        return total

    def joined(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(..., H) and the layer's weight (V, H) -> (..., H + r) and (V, H + r), whose product has the adapters in it.

        The new columns are rounded to the dtypes of hidden and weight. Without an active adapter nothing is copied.
        Raises ValueError for a DTensor.
        """
        if not self.adapters:
            return hidden, weight
        tables = [adapter.b.weight for adapter in self.adapters]
        if has_dtensor(hidden, weight, *tables, *(adapter.a.weight for adapter in self.adapters)):
            raise ValueError("a head with active adapters must be whole on this rank, got a DTensor")
        return _beside(hidden, [adapter.columns(hidden) for adapter in self.adapters]), _beside(weight, tables)

    def bypassed(self) -> Iterator[nn.Module]:
        """Every module whose own forward is not run when the head is taken apart."""
        yield self.module
        yield self.linear
        for adapter in self.adapters:
            yield from (adapter.a, adapter.b, adapter.dropout)


def _beside(values: Tensor, columns: list[Tensor]) -> Tensor:
    """(..., H) -> (..., H + r), r with columns of zeros up to a multiple of COLUMNS in all."""
    width = values.shape[-1] + sum(block.shape[-1] for block in columns)
    zeros = values.new_zeros(*values.shape[:-1], -width % COLUMNS)
    return torch.cat([values, *(block.to(values.dtype) for block in columns), zeros], -1)


def base_model(model: Any) -> Any:
    """The model inside a `peft.PeftModel`; any other as it is."""
    peft = sys.modules.get("peft")
    return model.get_base_model() if peft is not None and isinstance(model, peft.PeftModel) else model


def read_head(module: nn.Module, owner: str) -> Head:
    """The output embeddings of a model of class `owner`, with the adapters that are active now.

    Raises TypeError or ValueError for a PEFT layer other than modules_to_save and plain LoRA on an `nn.Linear`.
    """
    if "peft" not in sys.modules:
        return Head(module, module)
    from peft.tuners.lora import Linear as LoraLinear
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    inner = _saved_module(module) if isinstance(module, ModulesToSaveWrapper) else module
    if isinstance(inner, (AuxiliaryTrainingWrapper, BaseTunerLayer)) and type(inner) is not LoraLinear:
        raise TypeError(
            f"the head of {owner} carries a PEFT layer that the fused head does not know: "
            f"{type(inner).__module__}.{type(inner).__name__}; only LoRA on an nn.Linear and modules_to_save are known"
        )
    if type(inner) is not LoraLinear:
        return Head(module, inner)
    if isinstance(inner.base_layer, BaseTunerLayer):
        raise TypeError(f"the head of {owner} carries LoRA on another PEFT layer, {type(inner.base_layer).__name__}")
    return Head(module, inner.base_layer, _active_adapters(inner, owner))


def _saved_module(wrapper: Any) -> nn.Module:
    """The copy of the module that a `ModulesToSaveWrapper` would call."""
    active, copies = wrapper.active_adapters, wrapper.modules_to_save
    if wrapper.disable_adapters or not active or any(name not in copies for name in active):
        return wrapper.original_module
    return copies[active[0]]


def _active_adapters(layer: Any, owner: str) -> tuple[Adapter, ...]:
    if layer.disable_adapters and layer.merged:
        layer.unmerge()  # as its own forward does
    if layer.disable_adapters or layer.merged:
        return ()
    return tuple(_adapter(layer, name, owner) for name in layer.active_adapters if name in layer.lora_A)


def _adapter(layer: Any, name: str, owner: str) -> Adapter:
    variant = layer.lora_variant.get(name)
    if variant is not None:
        raise ValueError(
            f"adapter {name!r} on the head of {owner} is a {type(variant).__name__}, which is more than "
            "columns beside the weight's; the fused head knows plain LoRA alone"
        )
    a, b, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    for factor, kind in ((a, nn.Linear), (b, nn.Linear), (dropout, (nn.Dropout, nn.Identity))):
        if not isinstance(factor, kind):
            raise TypeError(f"adapter {name!r} on the head of {owner} holds a {type(factor).__name__}, not known here")
    return Adapter(a, b, dropout, float(layer.scaling[name]))
