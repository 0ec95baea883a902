"""How the calls of a trainer's models ran: `forward` records them, `report` reads them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_rl.step.reason import Reason


@dataclass(frozen=True)
class CallRecord:
    """One call of a model, in place of one or more of TRL's forwards."""

    role: str  # "policy" or "reference"
    has_graph: bool
    padded_tokens: int  # that TRL's forwards run
    body_tokens: int  # that the model's body ran, padding included
    text: str  # how it ran, a clause
    reason: Reason | None  # why the batch ran as it is, or why no prefix was shared


@dataclass(frozen=True)
class _Recorder:
    trainer: Any
    calls: list[CallRecord]


_recorder: ContextVar[_Recorder | None] = ContextVar("liger_rl_trl_recorder", default=None)


@contextmanager
def recorded_calls(trainer: Any, calls: list[CallRecord]) -> Iterator[None]:
    """`calls` grows by each call of the trainer's models with TRL's fused head in this context."""
    token = _recorder.set(_Recorder(trainer, calls))
    try:
        yield
    finally:
        _recorder.reset(token)


def record_call(model: nn.Module, padded_tokens: int, body_tokens: int, text: str, reason: Reason | None) -> None:
    """Record a call of `model`, if a trainer trains."""
    recorder, role = _recorder.get(), find_role(model)
    if recorder is not None and role is not None:
        recorder.calls.append(CallRecord(role, torch.is_grad_enabled(), padded_tokens, body_tokens, text, reason))


def find_role(model: Any) -> str | None:
    """What the model is in the training step that runs, "policy" or "reference"; None outside of one."""
    recorder = _recorder.get()
    if recorder is None or not isinstance(model, nn.Module):
        return None
    is_policy = any(module is model for module in recorder.trainer.model.modules())
    return "policy" if is_policy and (torch.is_grad_enabled() or not _runs_as_reference(model)) else "reference"


def _runs_as_reference(model: nn.Module) -> bool:
    """Whether the model's adapters are off, or TRL's copy "ref" of them is active."""
    if "peft" not in sys.modules:
        return False
    layer: Any = next((module for module in model.modules() if hasattr(module, "_disable_adapters")), None)
    return layer is not None and (layer.disable_adapters or layer.active_adapters == ["ref"])
