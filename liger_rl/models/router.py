"""The router loss of a mixture of experts: of a forward, and of a batch whose tokens run in other rows.

transformers' `load_balancing_loss_func` takes the attention mask as weights of the tokens. So the loss of a batch is
that of the tokens that ran, each weighted by the number of attended tokens of the batch that it stands for.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

FUNCTION = "load_balancing_loss_func"
RouterLogits = tuple[Tensor, ...]  # of each layer, (b n, E), of all tokens of a forward


class RouterLoss(NamedTuple):
    """How a model computes its router loss."""

    function: Callable[..., Tensor]  # transformers' `load_balancing_loss_func`
    experts: int
    experts_per_token: int

    def compute(self, logits: RouterLogits, weights: Tensor | None) -> Tensor:
        """() the loss, not weighted by the config's coefficient. weights: (b, n) of the tokens; None counts all."""
        return self.function(logits, self.experts, self.experts_per_token, weights)


def has_router_loss(config: Any, inputs: Mapping[str, Any]) -> bool:
    """Whether the model returns a router loss, by the config of its text or its inputs."""
    router = inputs.get("output_router_logits")
    return bool(getattr(config, "output_router_logits", False) if router is None else router)


def find_router_loss(model: Any, module: Any = None) -> RouterLoss | None:
    """The router loss of a model's own forward; None if it is of another kind.

    `module`: a Python module whose function computes it in place of the model's.
    """
    if module is None:
        modules = [sys.modules.get(kind.__module__) for kind in type(model).__mro__ if "forward" in vars(kind)]
        module = next((module for module in modules if hasattr(module, FUNCTION)), None)
    config = model.config.get_text_config()
    experts = (
        getattr(holder, name, None) for name in ("num_experts", "num_local_experts") for holder in (model, config)
    )
    number = next((x for x in experts if x is not None), None)
    each = getattr(model, "num_experts_per_tok", getattr(config, "num_experts_per_tok", None))
    if module is None or number is None or each is None:
        return None
    return RouterLoss(getattr(module, FUNCTION), number, each)


def weigh_router_loss(model: Any, aux_loss: Tensor) -> Tensor:
    """A mixture of experts' aux_loss, weighted as the model's own loss weighs it."""
    for holder in (model, model.config, model.config.get_text_config()):
        if hasattr(holder, "router_aux_loss_coef"):
            return holder.router_aux_loss_coef * aux_loss
    raise ValueError(f"{type(model).__name__} returns an aux_loss, but names no router_aux_loss_coef to weigh it by")


def compute_router_losses(
    loss: RouterLoss,
    forwards: Sequence[RouterLogits],  # of a batch
    source: Tensor,  # (B, T) int64 in CPU memory: index of each token into the tokens of the forwards, concatenated
    attention: Tensor | None,  # (B, T) attention mask; None: all tokens count
    sizes: Sequence[int],  # number of rows of each micro-batch
) -> Tensor:
    """(M,) the router loss of each micro-batch, with a graph. An attended token must have run."""
    layers = zip(*forwards, strict=True)
    logits = [torch.cat([part.reshape(-1, part.shape[-1]) for part in layer]) for layer in layers]
    device, tokens = logits[0].device, logits[0].shape[0]
    attention = torch.ones_like(source) if attention is None else attention
    losses = []
    for rows, mask in zip(source.split(tuple(sizes)), attention.split(tuple(sizes)), strict=True):
        places, index = (torch.from_numpy(x) for x in np.unique(rows.numpy(), return_inverse=True))
        index, live = index.reshape(-1).to(device, non_blocking=True), places[places < tokens]
        weights = torch.zeros(len(places), device=device)
        weights.index_add_(0, index, mask.reshape(-1).to(weights))
        live = live.to(device, non_blocking=True)
        chosen = tuple(layer.index_select(0, live.to(layer.device)) for layer in logits)
        losses.append(loss.compute(chosen, weights[None, : len(live)]))
    return torch.stack(losses)
