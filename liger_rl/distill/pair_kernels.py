"""The kernels of two heads: one implementation for each kind of device, with the same signatures."""

from types import ModuleType

import torch

from liger_rl.distill import pair_reference
from liger_rl.kernels import devices


def find_pair_kernels(device: torch.device) -> ModuleType:
    """The module with `fold_pair`, `mix_pair`, `grad_pair` and `scale_`: `pair_triton`, or `pair_reference`."""
    if not devices.runs_triton(device):
        return pair_reference
    from liger_rl.distill import pair_triton

    return pair_triton
