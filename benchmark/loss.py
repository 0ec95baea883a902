"""The loss every variant computes: clipped policy gradient with a k3 penalty, the mean over the tokens that count.

Written out once more here, so that what measures the library does not compute its expectations with it.
"""

import torch
from torch import Tensor

from benchmark.inputs import Inputs

EPSILON = 0.2
BETA = 0.04


def grpo_loss(logps: Tensor, inputs: Inputs) -> Tensor:
    """(B, T) log-probabilities in nats -> () loss in their dtype."""
    old, ref = (column.to(logps.dtype) for column in (inputs.old_logps, inputs.ref_logps))
    advantages = inputs.advantages.to(logps.dtype)[:, None]
    ratio = torch.exp(logps - old)
    policy = -torch.minimum(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages)
    away = ref - logps
    token_loss = policy + BETA * (torch.exp(away) - away - 1)
    return torch.where(inputs.mask, token_loss, 0.0).sum() / inputs.mask.sum()
