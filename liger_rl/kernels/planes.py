"""A float32 matrix as bfloat16 matrices that add up to it, in plain PyTorch."""

import torch
from torch import Tensor


def planes(matrix: Tensor, count: int) -> Tensor:
    """(m, k) float32 -> (m, count * k) bfloat16: matrices side by side, the largest first, that add up.

    Each is the rounding of what the ones before it leave, 8 significant bits: one leaves up to 2^-8 of an entry, two
    2^-16, three nothing of the 24 bits of an entry from 2^-109 on.
    """
    out = torch.empty(matrix.shape[0], count * matrix.shape[1], dtype=torch.bfloat16, device=matrix.device)
    rest = matrix.clone()
    *others, last = out.split(matrix.shape[1], dim=1)
    for plane in others:
        rest -= plane.copy_(rest)
    last.copy_(rest)
    return out
