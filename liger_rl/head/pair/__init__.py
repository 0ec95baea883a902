"""Two heads: divergences."""

from types import ModuleType

import torch

from liger_rl.kernels import devices


def for_device(device: torch.device) -> ModuleType:
    """The module with `fold_pair`, `mix_pair`, `grad_pair` and `scale_`: `tiles_triton`, or `pair_reference`."""
    if devices.runs_triton(device):
        from liger_rl.head.pair import tiles_triton

        return tiles_triton
    from liger_rl.head.pair import pair_reference as reference

    return reference
