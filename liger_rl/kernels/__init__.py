"""Fold and gradient of a tile of logits: one implementation per kind of device, the same signatures.

Nothing here knows what the log-probabilities are for.
"""

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from liger_rl.kernels import devices


def for_device(device: torch.device) -> ModuleType:
    """The kernels of a device: `compiled`, in Triton, on CUDA where Triton is installed, else `plain`, in PyTorch.

    `fold` and `grad` of a tile, `fold_rows` and `grad_rows` of given logits, `keep`, `grad_kept` and `scale_` of one
    pass, `select` and `scatter_rows` of tokens, `fold_pair`, `mix_pair` and `grad_pair` of two heads.
    """
    return import_module(f"{__name__}.{'compiled' if devices.compiles(device) else 'plain'}")


def epilogue_for(hidden: Tensor, weight: Tensor) -> ModuleType | None:
    """The module whose `gemm_fold` and `gemm_grad` take hidden (N, H) @ weight (V, H).T; None where it does not apply.

    They fold a product, or make a gradient of it, in its own epilogue. They apply on NVIDIA GPUs of compute capability
    8.0 and higher and AMD's gfx942 and gfx950, to bfloat16 or float16 matrices of one dtype whose rows start at
    multiples of 16 bytes, from 512 tokens on.
    """
    return import_module(f"{__name__}.epilogue") if devices.applies(hidden, weight) else None


def for_pairs() -> ModuleType:
    """The same of two heads, where `devices.applies_to` says so: the module of `fold_pair` and `grad_pair`."""
    return import_module(f"{__name__}.pair_epilogue")
