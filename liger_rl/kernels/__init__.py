"""Fold and gradient of a tile of logits: one implementation per kind of device, the same signatures.

Nothing here knows what the log-probabilities are for.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from liger_rl.kernels import devices, eager, given_logits, saved_exponentials, scatter, selection
from liger_rl.kernels.statistics import TileBounds, TokenStatistics


def _module(device: torch.device, plain: ModuleType, compiled: str) -> ModuleType:
    """Triton's module where the device has one, which alone imports Triton, the plain one elsewhere."""
    return import_module(f"{__name__}.{compiled}") if devices.compiles(device) else plain


def for_device(device: torch.device) -> ModuleType:
    """The module whose `fold` and `grad` run on `device`: Triton on CUDA where it is installed, else plain PyTorch."""
    return _module(device, eager, "tile_triton")


def rows_for(device: torch.device) -> ModuleType:
    """The module whose `fold_rows` and `grad_rows` run on `device`."""
    return _module(device, given_logits, "given_logits_triton")


def selection_for(device: torch.device) -> ModuleType:
    """The module whose `select` runs on `device`."""
    return _module(device, selection, "selection_triton")


def gemm_fold_for(hidden: Tensor, weight: Tensor) -> Callable[..., tuple[TokenStatistics, TileBounds | None]] | None:
    """The fold of hidden (N, H) @ weight (V, H).T in the product's own epilogue, None where that kernel does not apply.

    It applies on NVIDIA GPUs with a tensor memory accelerator and 227 KiB of shared memory per block (compute
    capability 9.0 and 10.x), to bfloat16 or float16 matrices of one dtype whose rows start at multiples of 16 bytes,
    from 512 tokens on.
    """
    if not devices.applies(hidden, weight):
        return None
    from liger_rl.kernels import epilogue

    return epilogue.gemm_fold


def gemm_grad_for(hidden: Tensor, weight: Tensor) -> Callable[..., Tensor] | None:
    """The gradient of a tile in the recomputing product's own epilogue, under the conditions of `gemm_fold_for`."""
    if not devices.applies(hidden, weight):
        return None
    from liger_rl.kernels import epilogue

    return epilogue.gemm_grad


def scatter_for(device: torch.device) -> ModuleType:
    """The module whose `scatter_rows` runs on `device`."""
    return _module(device, scatter, "scatter_triton")


def kept_for(device: torch.device) -> ModuleType:
    """The module whose `keep`, `grad_kept` and `scale_` run on `device`."""
    return _module(device, saved_exponentials, "saved_exponentials_triton")
