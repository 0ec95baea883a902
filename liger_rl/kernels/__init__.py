"""Kernels that engines share: one implementation for each kind of device, with the same signatures.

Nothing here knows what the log-probabilities are for.
"""

from types import ModuleType

import torch
from torch import Tensor

from liger_rl.kernels import devices


def for_device(device: torch.device) -> ModuleType:
    """`compiled`, in Triton, on CUDA where Triton is installed; else `reference`, in PyTorch.

    `fold` and `grad` of a tile, `fold_rows` and `grad_rows` of given logits, `keep`, `grad_kept` and `scale_` of one
    pass, `keep_largest` and `put` of several ids, `select` and `scatter_rows` of tokens.
    """
    if devices.compiles(device):
        from liger_rl.kernels import compiled

        return compiled
    from liger_rl.kernels import reference

    return reference


def epilogue_for(hidden: Tensor, weight: Tensor) -> ModuleType | None:
    """The module whose `gemm_fold` and `gemm_grad` take hidden (N, H) @ weight (V, H).T; None where it does not apply.

    They fold a product, or make a gradient of it, in its own epilogue. They apply on NVIDIA GPUs of compute capability
    8.0 and higher and AMD's gfx942 and gfx950, to bfloat16 or float16 matrices of one dtype whose rows start at
    multiples of 16 bytes, from 512 tokens on.
    """
    if not devices.applies(hidden, weight):
        return None
    from liger_rl.kernels import epilogue

    return epilogue
