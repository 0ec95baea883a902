"""Kernels that heads share: one implementation for each kind of device, with the same signatures.

Nothing here knows what the log-probabilities are for.
"""

from types import ModuleType

import torch

from liger_rl.kernels import devices, reference


def for_device(device: torch.device) -> ModuleType:
    """`compiled`, in Triton, on CUDA where Triton is installed; else `reference`, in PyTorch.

    Both have `fold` and `grad` of a tile, `fold_rows` and `grad_rows` of given logits, and `select_tokens`.
    """
    if not devices.runs_triton(device):
        return reference
    from liger_rl.kernels import compiled

    return compiled
