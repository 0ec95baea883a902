"""Calls of a trainer's models are caught in the trainer's own contexts, in its thread."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

RunModel = Callable[..., Any]  # of the model's arguments


@contextmanager
def caught_calls(
    models: Sequence[nn.Module], call: Callable[[nn.Module, RunModel, dict[str, Any]], Any]
) -> Iterator[None]:
    """In this context calls of the models with fused_lm_head=True go to `call`, with what runs the model.

    A model is called at its outermost module, before the forward of DDP and the hooks of FSDP. Its own calls of other
    models (DDP's of its module) are not caught. Trainers that share a model, one inside of the other or in threads,
    catch their own calls.
    """
    models, catcher = list({id(model): model for model in models}.values()), _Catcher(models, call)
    with _lock:
        for model in models:
            _contexts[model] = _contexts.get(model, 0) + 1
            # An attribute of the object in front of the class's method, through which torch calls a module.
            vars(model)["_call_impl"] = MethodType(_call_caught, model)
    _thread.catchers.append(catcher)
    try:
        yield
    finally:
        _thread.catchers.remove(catcher)
        with _lock:
            for model in models:
                _contexts[model] -= 1
                if not _contexts[model]:
                    del _contexts[model], vars(model)["_call_impl"]


def is_catching(call: Callable[..., Any]) -> bool:
    """Whether the innermost context of this thread gives calls to `call`."""
    return bool(_thread.catchers) and getattr(_thread.catchers[-1], "call", None) == call


@dataclass(frozen=True, eq=False)
class _Catcher:
    models: Sequence[nn.Module]
    call: Callable[..., Any]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.catchers: list[_Catcher | None] = []  # None while a model runs whose call was caught


_thread, _lock = _Thread(), threading.Lock()
_contexts: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # of all threads, that catch a model's calls


def _call_caught(model: nn.Module, *args: Any, **inputs: Any) -> Any:
    if not args and inputs.get("fused_lm_head"):
        for catcher in reversed(_thread.catchers):
            if catcher is None:
                break
            if any(caught is model for caught in catcher.models):
                return catcher.call(model, functools.partial(_run_caught, model), inputs)
    return type(model)._call_impl(model, *args, **inputs)


def _run_caught(model: nn.Module, **inputs: Any) -> Any:
    _thread.catchers.append(None)
    try:
        return type(model)._call_impl(model, **inputs)
    finally:
        _thread.catchers.pop()
