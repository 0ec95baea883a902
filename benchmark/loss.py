"""The loss every variant computes: clipped policy gradient, with a k3 penalty where the case has one, averaged over
the tokens that count.

Written out once more here, so that what measures the library does not compute its expectations with it.
"""

import torch
from torch import Tensor

from benchmark.inputs import Inputs

EPSILON = 0.2


def grpo_loss(logps: Tensor, inputs: Inputs) -> Tensor:
    """(B, T) log-probabilities in nats -> () loss in their dtype."""
    old = inputs.old_logps.to(logps.dtype)
    advantages = inputs.advantages.to(logps.dtype)[:, None]
    ratio = torch.exp(logps - old)
    token_loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages)
    if inputs.ref_logps is not None:
        away = inputs.ref_logps.to(logps.dtype) - logps
        token_loss = token_loss + inputs.beta * (torch.exp(away) - away - 1)
    return torch.where(inputs.mask, token_loss, 0.0).sum() / inputs.mask.sum()
