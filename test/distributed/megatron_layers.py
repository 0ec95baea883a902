"""Megatron-Core's output layer, its own or one like it.

It is its own where there is a checkout or an unpacked wheel (see `checked_out`). No CUDA is needed.
"""

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import checked_out
import torch
import torch.distributed as dist
from torch import nn

SOURCE = checked_out.folder("Megatron-LM")


class ColumnParallelLinear(nn.Module):
    """What the processor relies on: which arguments its product gets, and what is done around it."""

    def __init__(self, *, config, weight, tp_group, sequence_parallel):
        super().__init__()
        self.config, self.tp_group, self.sequence_parallel = config, tp_group, sequence_parallel
        self.weight, self.bias = nn.Parameter(weight), None
        self.gradient_accumulation_fusion = False

    def _forward_impl(self, input, weight, **_):
        return input @ weight.T

    def forward(self, input_, weight=None, runtime_gather_output=None):
        assert not runtime_gather_output
        split = dist.get_world_size(self.tp_group) > 1
        output = self._forward_impl(
            input=input_,
            weight=self.weight if weight is None else weight,
            bias=self.bias,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
            allreduce_dgrad=split and not self.sequence_parallel,
            sequence_parallel=split and self.sequence_parallel,
            grad_output_buffer=None,
            wgrad_deferral_limit=None,
            tp_group=self.tp_group,
        )
        return output, None


def load() -> None:
    """`megatron.core` is there afterwards, and runs on CPU."""
    if "megatron.core" in sys.modules:
        return
    if SOURCE is None:
        core, layers = ModuleType("megatron.core"), ModuleType("megatron.core.tensor_parallel")
        core.__version__, layers.ColumnParallelLinear = "0.19.2", ColumnParallelLinear
        core.tensor_parallel = layers
        sys.modules |= {"megatron": ModuleType("megatron"), core.__name__: core, layers.__name__: layers}
        sys.modules["megatron"].core = core
        return
    sys.path.append(SOURCE)
    load_from_bytes = torch.storage._load_from_bytes
    import megatron.core.tensor_parallel.random as rng
    import megatron.core.transformer.torch_norm as norms

    torch.storage._load_from_bytes = load_from_bytes  # Megatron's is not there where answers of ranks are unpickled
    if not torch.cuda.is_available():
        torch.cuda.current_device, torch.cuda.current_stream = lambda: torch.device("cpu"), lambda: None
        rng.CudaRNGStatesTracker.fork = lambda *_: nullcontext()
    # It refuses sequence parallelism, whose gradients of norms Megatron adds up elsewhere.
    norms.WrappedTorchNorm.__new__ = lambda _, config, hidden_size, eps=1e-5, **__: nn.LayerNorm(hidden_size, eps)


def output_layer(weight, group, *, sequence_parallel=False):
    """Of this rank's rows of the vocabulary."""
    load()
    if SOURCE is None:
        config = SimpleNamespace(defer_embedding_wgrad_compute=False)
        return ColumnParallelLinear(config=config, weight=weight, tp_group=group, sequence_parallel=sequence_parallel)
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear as Real

    ranks = dist.get_world_size(group)
    config = ModelParallelConfig(
        tensor_model_parallel_size=ranks, sequence_parallel=sequence_parallel and ranks > 1, use_cpu_initialization=True
    )
    config.transformer_impl = "local"
    rows, size = weight.shape
    layer = Real(
        size, rows * ranks, config=config, init_method=nn.init.normal_, bias=False, tp_group=group, gather_output=False
    )
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer
