"""What a loss per packed sequence should be: loops over segments in float64. Imports nothing of the package."""

import torch
from torch import Tensor


def gspo(
    logps: Tensor,  # (N,), with gradient
    old: Tensor,  # (N,)
    advantages: Tensor,  # (N,)
    mask: Tensor,  # (N,)
    index: Tensor,  # (N,) the segment of each token
    count: int,
    *,
    epsilon_low: float,
    epsilon_high: float,
    divisor: float,
    weight: str = "uniform",  # each segment counts once; or "length", each token
) -> tuple[Tensor, list[float]]:
    """-> sum over segments of -min(R A, clip(R) A), R = exp(mean log-ratio), A the mean advantage; and each R."""
    total = torch.zeros((), dtype=torch.float64)
    ratios = []
    for s in range(count):
        tokens = [t for t in range(len(logps)) if index[t] == s and mask[t] != 0]
        if not tokens:
            continue
        mean_log_ratio = sum(logps[t] - old[t].double() for t in tokens) / len(tokens)
        advantage = sum(advantages[t].item() for t in tokens) / len(tokens)
        ratio = torch.exp(mean_log_ratio)
        ratios.append(ratio.item())
        clipped = min(max(ratio.item(), 1 - epsilon_low), 1 + epsilon_high)
        if ratio.item() * advantage <= clipped * advantage:
            loss = -ratio * advantage
        else:
            loss = torch.tensor(-clipped * advantage, dtype=torch.float64)
        total = total + loss * (1 if weight == "uniform" else len(tokens)) / divisor
    return total, ratios
