"""A model without randomness and without a graph, for runs whose values are compared."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from liger_rl.models.unknown_layers import list_unknown_layers


def list_rates(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str]]:
    """Attributes by which modules draw random numbers in training: rates of dropout, a router's noise."""
    rates = []
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, float) and value > 0 and _is_rate(module, name):
                rates.append((module, name))
    return rates


def _is_rate(module: nn.Module, name: str) -> bool:
    is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
    return "drop" in name or "jitter_noise" in name or (is_dropout and name == "p")


@contextmanager
def no_graph() -> Iterator[None]:
    """`torch.no_grad` for a forward that is followed by one with a graph.

    Autocast caches the weights that it casts. Before torch 2.10 the next forward would take these, without a graph.
    """
    with torch.no_grad():
        yield
    torch.clear_autocast_cache()


@contextmanager
def seeded(device: torch.device) -> Iterator[None]:
    """What draws random numbers in this context draws the same each time, and leaves the generators as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


@contextmanager
def without_randomness(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Without dropout, noise, checkpoints and updates of running statistics.

    A rotary embedding that depends on the rows before (rope_type dynamic) is what it was in the end. The model stays in
    training mode, because some quantized layers store their weights in another way in evaluation.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        modules = list(model.modules())
        values: list[tuple[nn.Module, str, Any]] = [(module, name, 0.0) for module, name in list_rates(modules)]
        for module in modules:
            if vars(module).get("gradient_checkpointing"):
                values.append((module, "gradient_checkpointing", False))
            # NEFTune's noise is an embedding's. A trial sees what one's own embedding does.
            if isinstance(module, nn.Embedding | nn.modules.batchnorm._NormBase) and not list_unknown_layers([module]):
                values.append((module, "training", False))
        changed = [(vars(module), name, vars(module)[name]) for module, name, _ in values]
        rotary = [module for module in modules if [name for name in module._buffers if name.endswith("inv_freq")]]
        before = [(module, dict(vars(module)), dict(module._buffers)) for module in rotary]
        for module, name, value in values:
            vars(module)[name] = value
        try:
            yield
        finally:
            for attributes, name, value in changed:
                attributes[name] = value
            for module, attributes, buffers in before:
                vars(module).update(attributes)
                module._buffers.update(buffers)
