"""LoRA adapters on the lm_head under TRL, whose op is given the head's weight and bias and no more.

Two things are replaced beside the op. The first is the class by which TRL's trainers recognise a head that they refuse:
ours accepts what `read_head` understands and raises for the rest. The second is the function that gives a model its
fused forward: the new forward says, for the length of a call, which head the op is working for.

A model keeps that forward after the patch is undone. It then computes as TRL's does. It raises if TRL's op would leave
an adapter out.
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

from liger_rl.integrations.head import check_own_forwards, hook_count
from liger_rl.integrations.patching import Patch
from liger_rl.integrations.peft import Head, read_head

TRAINERS = tuple(f"trl.trainer.{name}_trainer" for name in ("grpo", "rloo", "dpo", "kto", "sft"))


@dataclass
class _Call:
    """One run of the fused forward of a model with adapters on its head."""

    head: Head
    reached_op: bool = False


_call: ContextVar[_Call | None] = ContextVar("liger_rl_trl_call", default=None)


def adapted_head() -> Head | None:
    """For the op: the head of the model whose fused forward is calling it; None if no adapters are active on it."""
    call = _call.get()
    if call is None:
        return None
    call.reached_op = True
    return call.head


def gathered_head(*parameters: Tensor) -> AbstractContextManager:
    """TRL's context in which ZeRO-3 holds a head whole. It does nothing where the head is whole already."""
    return importlib.import_module("trl.trainer.utils").maybe_gather_lm_head_ctx(*parameters)


def uses_peft() -> bool:
    """Whether TRL finds a PEFT that it can use."""
    from transformers.utils import is_peft_available

    return is_peft_available()


# --- the refusal ------------------------------------------------------------------------------------------------------


class _AsksTheReading(type):
    def __instancecheck__(cls, layer: Any) -> bool:
        from peft.tuners.tuners_utils import BaseTunerLayer

        if isinstance(layer, BaseTunerLayer):
            _check_taken_apart(layer)
        return False


class RefusedLayer(metaclass=_AsksTheReading):
    """In place of PEFT's `BaseTunerLayer` in TRL's trainers. They refuse a head that is an instance of it.

    No layer is an instance. A layer that the fused head cannot take apart raises TypeError or ValueError and says why.
    """


def _check_taken_apart(layer: Any) -> None:
    owner = "the trained model"
    head = read_head(layer, owner)
    hooks = hook_count(head)
    if type(head.linear) is not nn.Linear or hooks:
        raise ValueError(
            f"the head of {owner} must be LoRA on a plain nn.Linear without hooks, which the fused head would leave "
            f"out; found a {type(head.linear).__name__} with {hooks} hooks"
        )
    check_own_forwards(head, owner)


class RefusalPatch(Patch):
    """The name of PEFT's class in each of the trainers' modules."""

    def find(self) -> Any:
        original = super().find()
        for name in sorted(self.home):
            if vars(importlib.import_module(name)).get("BaseTunerLayer") is not original:
                raise RuntimeError(f"{name} has no BaseTunerLayer of PEFT's here; nothing was patched")
        return original


# --- the forward ------------------------------------------------------------------------------------------------------


def add_fused_lm_head(
    model: Any,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> None:
    """In place of `trl.trainer.utils.add_fused_lm_head`: the forward that it sets tells the op its head.

    Raises:
        TypeError, ValueError: adapters on the head that `read_head` does not understand, or any at all together with
            cast_lm_head_to_fp32, which TRL refuses too.
    """
    if _read(model).adapters and cast_lm_head_to_fp32:
        raise ValueError(
            f"cast_lm_head_to_fp32 and an adapter on the head of {type(model).__name__} exclude each other in TRL, "
            "whose cast replaces the head's forward; leave one out and load the model anew"
        )
    original: Callable[..., None] = FORWARD.original
    original(model, temperature=temperature, cast_lm_head_to_fp32=cast_lm_head_to_fp32, outputs=outputs)
    model.forward = MethodType(_naming_its_head(model.forward.__func__), model)


def _naming_its_head(fused_forward: Callable) -> Callable:
    @functools.wraps(fused_forward)  # `generate` reads the signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        with naming_head(self) if fused_lm_head else nullcontext():
            return fused_forward(self, *args, fused_lm_head=fused_lm_head, **kwargs)

    return forward


@contextmanager
def naming_head(model: Any) -> Iterator[None]:
    """The context in which `adapted_head` is the model's, if adapters are active on it.

    Raises:
        TypeError, ValueError: adapters that `read_head` does not understand.
        RuntimeError: nobody has asked for them within.
    """
    head = _read(model)
    if not head.adapters:
        yield
        return
    call = _Call(head)
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


def _read(model: Any) -> Head:
    owner = type(model).__name__
    head = read_head(model.get_output_embeddings(), owner)
    for adapter in head.adapters:
        for factor in (adapter.a.weight, adapter.b.weight):
            # The mark is DeepSpeed's, on every parameter under ZeRO-3.
            if isinstance(factor, DTensor) or hasattr(factor, "ds_id"):
                raise ValueError(
                    f"the adapters on the head of {owner} are sharded (FSDP2 or ZeRO-3), which the fused head does not "
                    "gather; shard less, or leave lm_head out of target_modules"
                )
    return head


FORWARD = Patch(
    "trl.trainer.utils:add_fused_lm_head",
    add_fused_lm_head,
    "model temperature cast_lm_head_to_fp32 outputs",
    needed=uses_peft,
)
LAYER = "peft.tuners.tuners_utils:BaseTunerLayer"
ROWS = (FORWARD, RefusalPatch(LAYER, RefusedLayer, modules=TRAINERS, needed=uses_peft))
