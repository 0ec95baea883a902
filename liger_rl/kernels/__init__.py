"""Fold and gradient of a tile of logits: one implementation per kind of device, the same signatures.

Nothing here knows what the log-probabilities are for.
"""

from types import ModuleType

import torch

from liger_rl.kernels import eager


def for_device(device: torch.device) -> ModuleType:
    """The module whose `fold` and `grad` run on `device`: Triton on CUDA, plain PyTorch elsewhere."""
    if device.type != "cuda":
        return eager
    from liger_rl.kernels import triton

    return triton
