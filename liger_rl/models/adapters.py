"""LoRA adapters on an lm_head, as additional columns of its hidden states and of its weight.

Adding scaling * b @ a to a 16-bit weight would round the adapter away. So hidden states and weight get r more columns
for an adapter of rank r, which is exact:

    [hidden | scaling * hidden @ a.T] @ [weight | b].T = hidden @ weight.T + scaling * (hidden @ a.T) @ b.T

Each call reads the adapters anew, because they can be added, switched, merged and disabled between two calls. Other
kinds of adapters raise an error that names them.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_rl.models.tensors import has_dtensor, plain_type

COLUMN_MULTIPLE = 8  # so that 16-bit rows start at multiples of 16 bytes, as matmul kernels need it


@dataclass(frozen=True)
class Adapter:
    """One active LoRA adapter of a layer: scaling * b(a(dropout(hidden)))."""

    a: nn.Linear
    b: nn.Linear
    dropout: nn.Module
    scaling: float

    def project_hidden(self, hidden: Tensor) -> Tensor:
        """(..., H) -> (..., r), scaling times the input of `b`, with dropout as in PEFT."""
        a = self.a.weight
        if self.dropout.training and getattr(self.dropout, "p", 0.0) > 0:
            hidden = self.dropout(hidden.to(a.dtype))
        dtype = torch.promote_types(hidden.dtype, a.dtype)
        return nn.functional.linear(hidden.to(dtype), a.to(dtype)) * self.scaling


@dataclass(frozen=True)
class HeadParts:
    """The layer with an lm_head's weight, and its active adapters."""

    module: nn.Module  # the module that the model calls
    linear: Any  # the layer with the weight
    adapters: tuple[Adapter, ...] = ()  # the active ones

    def sum_biases(self) -> Tensor | None:
        """(V,) bias of the layer plus those of the adapters; float32 if an adapter has one."""
        total = self.linear.bias
        for adapter in self.adapters:
            if adapter.b.bias is not None:
                added = adapter.b.bias.float() * adapter.scaling
                total = added if total is None else total.float() + added
        return total

    def widen(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(..., H) and the layer's weight (V, H) -> (..., H + r) and (V, H + r), whose product includes the adapters.

        The new columns are rounded to the dtypes of hidden and weight. Without an active adapter both are returned as
        they are.
        Raises ValueError for a DTensor.
        """
        if not self.adapters:
            return hidden, weight
        tables = [adapter.b.weight for adapter in self.adapters]
        if has_dtensor((hidden, weight, *tables, *(adapter.a.weight for adapter in self.adapters))):
            raise ValueError("a head with active adapters must be whole on this rank, got a DTensor")
        columns = [adapter.project_hidden(hidden) for adapter in self.adapters]
        return _append_columns(hidden, columns), _append_columns(weight, tables)

    def bypassed_modules(self) -> Iterator[nn.Module]:
        """The modules whose forward and hooks do not run if the parts are used in place of the head."""
        yield self.module
        if self.linear is not self.module:
            yield self.linear
        for adapter in self.adapters:
            yield from (adapter.a, adapter.b, adapter.dropout)


def _append_columns(values: Tensor, columns: list[Tensor]) -> Tensor:
    """(..., H) -> (..., H + r), padded with columns of zeros to a multiple of COLUMN_MULTIPLE."""
    width = values.shape[-1] + sum(block.shape[-1] for block in columns)
    zeros = values.new_zeros(*values.shape[:-1], -width % COLUMN_MULTIPLE)
    return torch.cat([values, *(block.to(values.dtype) for block in columns), zeros], -1)


def unwrap_peft(model: Any) -> Any:
    """The model inside a `peft.PeftModel`; other models are returned as they are."""
    peft = sys.modules.get("peft")
    return model.get_base_model() if peft is not None and isinstance(model, peft.PeftModel) else model


def read_head(module: nn.Module, owner: str) -> HeadParts:
    """The parts of `module`, the output embeddings of a model of class `owner`.

    Plain LoRA on an `nn.Linear` and modules_to_save are known. Another PEFT layer raises TypeError or ValueError.
    """
    if "peft" not in sys.modules:
        return HeadParts(module, module)
    from peft.tuners.lora import Linear as LoraLinear
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    inner = _select_saved_module(module) if isinstance(module, ModulesToSaveWrapper) else module
    if isinstance(inner, (AuxiliaryTrainingWrapper, BaseTunerLayer)) and plain_type(inner) is not LoraLinear:
        raise TypeError(
            f"the head of {owner} carries a PEFT layer that the fused head does not know: "
            f"{type(inner).__module__}.{type(inner).__name__}; only LoRA on an nn.Linear and modules_to_save are known"
        )
    if plain_type(inner) is not LoraLinear:
        return HeadParts(module, inner)
    if isinstance(inner.base_layer, BaseTunerLayer):
        raise TypeError(f"the head of {owner} carries LoRA on another PEFT layer, {type(inner.base_layer).__name__}")
    return HeadParts(module, inner.base_layer, _read_active_adapters(inner, owner))


def _select_saved_module(wrapper: Any) -> nn.Module:
    """The module that a `ModulesToSaveWrapper` calls: the active copy, or the original."""
    active, copies = wrapper.active_adapters, wrapper.modules_to_save
    if wrapper.disable_adapters or not active or any(name not in copies for name in active):
        return wrapper.original_module
    return copies[active[0]]


def _read_active_adapters(layer: Any, owner: str) -> tuple[Adapter, ...]:
    if layer.disable_adapters and layer.merged:
        layer.unmerge()  # as its own forward does
    if layer.disable_adapters or layer.merged:
        return ()
    return tuple(_read_adapter(layer, name, owner) for name in layer.active_adapters if name in layer.lora_A)


def _read_adapter(layer: Any, name: str, owner: str) -> Adapter:
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
