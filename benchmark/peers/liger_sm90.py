"""liger-kernel's fused scaled cross entropy: projection and softmax in one CuTe DSL kernel for Hopper GPUs."""

import importlib.util
from importlib import import_module

import torch
from torch import Tensor

from benchmark.cases import Case
from benchmark.inputs import Inputs
from benchmark.peers.peer import Head as Base
from benchmark.peers.peer import Values, import_reason, over_live_rows

KERNELS = "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90"


class Head(Base):
    devices = ("cuda",)
    softcap = False
    entropy = True

    def missing(self) -> str | None:
        # Elsewhere it falls back to chunks of PyTorch without saying so.
        if torch.cuda.get_device_capability() != (9, 0):
            return "its kernels are for compute capability 9.0"
        if importlib.util.find_spec("cutlass") is None:
            return "nvidia-cutlass-dsl is not installed"
        return import_reason("liger-kernel with nvidia-cutlass-dsl", lambda: import_module(KERNELS))

    def values(self, case: Case, inputs: Inputs, *, entropy: bool = False) -> Values:
        from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

        def operator(hidden: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
            found = LigerFusedLinearScaledCrossEntropyFunction.apply(
                hidden, inputs.weight, ids, 1.0, return_entropy=entropy
            )
            return (-found[0], found[1]) if entropy else (-found,)

        return Values(*over_live_rows(inputs, operator))
