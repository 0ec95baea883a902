"""LoRA adapters on the lm_head under TRL, whose op gets only the head's weight and bias.

Two things are replaced besides the op. TRL's trainers refuse a head that is an instance of PEFT's `BaseTunerLayer`. Our
class in its place accepts the layers that `read_head` understands, and raises for all others. TRL's `add_fused_lm_head`
gives a model its fused forward. Our forward also sets the head that the op works for, for the length of a call.

A model keeps our forward after `unpatch_trl`. It then computes as TRL's does, and raises if TRL's op leaves an adapter
out.
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from liger_rl.integrations.patching import Patch, Version
from liger_rl.integrations.trl.forward import WRAPPED_MODELS, wrap_forward
from liger_rl.integrations.trl.settings import get_settings
from liger_rl.models.adapters import HeadParts, read_head
from liger_rl.models.lm_head import check_bypassed_modules
from liger_rl.models.tensors import is_zero_3

TRAINERS = tuple(f"trl.trainer.{name}_trainer" for name in ("grpo", "rloo", "dpo", "kto", "sft"))


@dataclass
class _ForwardCall:
    """One run of the fused forward of a model with adapters on its head."""

    head: HeadParts
    reached_op: bool = False


_call: ContextVar[_ForwardCall | None] = ContextVar("liger_rl_trl_call", default=None)


def get_adapted_head() -> HeadParts | None:
    """The head of the model whose fused forward calls the op; None if it has no active adapters."""
    call = _call.get()
    if call is None:
        return None
    call.reached_op = True
    return call.head


def gather_head(*parameters: Tensor) -> AbstractContextManager:
    """TRL's context that gathers a head under ZeRO-3, and does nothing for a head that is whole."""
    return importlib.import_module("trl.trainer.utils").maybe_gather_lm_head_ctx(*parameters)


def uses_peft() -> bool:
    """Whether TRL finds a PEFT that it can use."""
    from transformers.utils import is_peft_available

    return is_peft_available()


class _LayerCheck(type):
    def __instancecheck__(cls: Any, layer: Any) -> bool:
        from peft.tuners.tuners_utils import BaseTunerLayer

        owner = "the trained model"
        if issubclass(type(layer), BaseTunerLayer):
            check_bypassed_modules(read_head(layer, owner), owner, nn.Linear)
            cls.accepted = True
        return False


class CheckedLayer(metaclass=_LayerCheck):
    """In place of PEFT's `BaseTunerLayer` in TRL's trainers, which refuse a head that is an instance of it.

    No layer is an instance of it. `isinstance` raises for a layer that `read_head` refuses.
    """


def make_layer_patch(trainer: str, replacement: type = CheckedLayer, *, since: Version = (0, 0)) -> Patch:
    """The patch of PEFT's class in one trainer's module."""
    return Patch(f"{trainer}:BaseTunerLayer", replacement, None, modules=(trainer,), since=since, needed=uses_peft)


def add_fused_lm_head(
    model: Any,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> None:
    """`trl.trainer.utils.add_fused_lm_head`, with a forward that runs live tokens and sets the head of the op.

    With PEFT installed it raises for adapters on the head that `read_head` refuses, and as TRL for any adapter together
    with cast_lm_head_to_fp32.
    """
    peft = uses_peft()
    if peft and cast_lm_head_to_fp32 and _read_unsharded_head(model).adapters:
        raise ValueError(
            f"cast_lm_head_to_fp32 and an adapter on the head of {type(model).__name__} exclude each other in TRL, "
            "whose cast replaces the head's forward; leave one out and load the model anew"
        )
    FORWARD_PATCH.original(model, temperature=temperature, cast_lm_head_to_fp32=cast_lm_head_to_fp32, outputs=outputs)
    forward = model.forward.__func__
    if peft:
        forward = _wrap_with_head(forward)
    model.forward = MethodType(
        wrap_forward(forward, lambda: get_settings().whole_step and FORWARD_PATCH.patched), model
    )
    WRAPPED_MODELS.add(model)


def _wrap_with_head(fused_forward: Callable) -> Callable:
    @functools.wraps(fused_forward)  # `generate` reads the signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        with set_adapted_head(self) if fused_lm_head else nullcontext():
            return fused_forward(self, *args, fused_lm_head=fused_lm_head, **kwargs)

    return forward


@contextmanager
def set_adapted_head(model: Any) -> Iterator[None]:
    """`get_adapted_head` is the model's head in this context, if it has adapters. RuntimeError if no op reads it."""
    head = _read_unsharded_head(model)
    if not head.adapters:
        yield
        return
    call = _ForwardCall(head)
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)
    if not call.reached_op:
        raise RuntimeError(
            f"TRL's own op has left the adapters on the head of {type(model).__name__} out: patch_trl() must hold "
            "for as long as the trainer is used, not only while it is built"
        )


def _read_unsharded_head(model: Any) -> HeadParts:
    owner = type(model).__name__
    head = read_head(model.get_output_embeddings(), owner)
    factors = [factor.weight for adapter in head.adapters for factor in (adapter.a, adapter.b)]
    if any(isinstance(factor, DTensor) or is_zero_3(factor) for factor in factors):
        raise ValueError(
            f"the adapters on the head of {owner} are sharded (FSDP2 or ZeRO-3), which the fused head does not "
            "gather; shard less, or leave lm_head out of target_modules"
        )
    return head


FORWARD_PATCH = Patch("trl.trainer.utils:add_fused_lm_head", add_fused_lm_head)
PATCHES = (FORWARD_PATCH, *map(make_layer_patch, TRAINERS))
