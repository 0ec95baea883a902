"""The router loss of a mixture of experts, of a batch whose tokens run in other rows.

transformers' `load_balancing_loss_func` takes the attention mask as weights of the tokens. So the loss of a batch is
that of the tokens that ran, each weighted by the number of attended tokens of the batch that it stands for.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

FUNCTION = "load_balancing_loss_func"


class RouterCall(NamedTuple):
    """A call of `load_balancing_loss_func`, without the mask."""

    function: Callable[..., Tensor]
    logits: tuple[Tensor, ...]  # of each layer, (b n, E), of all tokens of the forward
    options: tuple[Any, ...]  # number of experts, number of experts of a token


_calls: ContextVar[list[RouterCall] | None] = ContextVar("liger_rl_router_calls", default=None)


def find_router_module(model: Any) -> ModuleType | None:
    """The Python module whose `load_balancing_loss_func` the model's forward calls; None if none has it."""
    modules = [sys.modules.get(kind.__module__) for kind in type(model).__mro__ if "forward" in vars(kind)]
    return next((module for module in modules if hasattr(module, FUNCTION)), None)


@contextmanager
def recorded_router_calls(module: ModuleType | None) -> Iterator[list[RouterCall]]:
    """Yields a list of the calls in this context of the function of a Python module. The calls return 0.

    Without a module no call is recorded, of any module that was recorded before.
    """
    if module is not None:
        _install_recorder(module)
    calls: list[RouterCall] = []
    token = _calls.set(None if module is None else calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


@cache
def _install_recorder(module: ModuleType) -> None:
    """Let the function of a Python module record its calls, for the rest of the process."""
    original = getattr(module, FUNCTION)

    @wraps(original)
    def record(gate_logits: Any, num_experts: Any = None, top_k: Any = 2, attention_mask: Any = None) -> Any:
        calls = _calls.get()
        if calls is None or not isinstance(gate_logits, tuple):
            return original(gate_logits, num_experts, top_k, attention_mask)
        calls.append(RouterCall(original, gate_logits, (num_experts, top_k)))
        return gate_logits[0].new_zeros(())

    setattr(module, FUNCTION, record)


def compute_router_losses(
    calls: Sequence[RouterCall],  # of the forwards of a batch, one of each
    source: Tensor,  # (B, T) int64 in CPU memory: index of each token into the tokens of the forwards, concatenated
    attention: Tensor | None,  # (B, T) attention mask; None: all tokens count
    sizes: Sequence[int],  # number of rows of each micro-batch
) -> Tensor:
    """(M,) the router loss of each micro-batch, with a graph. An attended token must have run."""
    function, _, options = calls[0]
    layers = zip(*[call.logits for call in calls], strict=True)
    logits = [torch.cat([part.reshape(-1, part.shape[-1]) for part in layer]) for layer in layers]
    device, tokens = logits[0].device, logits[0].shape[0]
    attention = torch.ones_like(source) if attention is None else attention
    losses = []
    for cells, mask in zip(source.split(tuple(sizes)), attention.split(tuple(sizes)), strict=True):
        places, index = (torch.from_numpy(x) for x in np.unique(cells.numpy(), return_inverse=True))
        index, live = index.reshape(-1).to(device, non_blocking=True), places[places < tokens]
        weights = torch.zeros(len(places), device=device)
        weights.index_add_(0, index, mask.reshape(-1).to(weights))
        live = live.to(device, non_blocking=True)
        chosen = tuple(layer.index_select(0, live.to(layer.device)) for layer in logits)
        losses.append(function(chosen, *options, weights[None, : len(live)]))
    return torch.stack(losses)
