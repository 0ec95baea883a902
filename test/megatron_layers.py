"""Megatron-Core's output layer, its own or one like it.

It is its own where there is a checkout or an unpacked wheel (see `checkouts`). No CUDA is needed.
"""

import sys
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import checkouts

SOURCE = checkouts.found("Megatron-LM")


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
    """`megatron.core` is there afterwards."""
    if "megatron.core" in sys.modules:
        return
    if SOURCE is None:
        core, layers = ModuleType("megatron.core"), ModuleType("megatron.core.tensor_parallel")
        core.__version__, layers.ColumnParallelLinear = "0.19.2", ColumnParallelLinear
        core.tensor_parallel = layers
        sys.modules |= {"megatron": ModuleType("megatron"), core.__name__: core, layers.__name__: layers}
        sys.modules["megatron"].core = core
        return
    sys.path.append(str(SOURCE.parent))
    load_from_bytes = torch.storage._load_from_bytes
    import megatron.core.tensor_parallel  # noqa: F401

    torch.storage._load_from_bytes = load_from_bytes  # Megatron's is not there where answers of ranks are unpickled


@contextmanager
def on_cpu():
    """Megatron asks for CUDA's device and stream wherever it is, and its norms refuse sequence parallelism, where their
    gradients are added up elsewhere."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def norm(_, config, hidden_size, eps=1e-5, **__):
        return nn.LayerNorm(hidden_size, eps)

    with (
        patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        patch.object(torch.cuda, "current_stream", lambda: None),
        patch.object(CudaRNGStatesTracker, "fork", lambda *_: nullcontext()),
        patch.object(WrappedTorchNorm, "__new__", norm),
    ):
        yield


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
    layer.to(weight.device)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


@contextmanager
def gpt_model(sequence_parallel, tied, mup):
    """Of two tensor parallel ranks, twice."""
    load()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    with on_cpu():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=2,
            use_cpu_initialization=True,
            tensor_model_parallel_size=2,
            sequence_parallel=sequence_parallel,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            **({"use_mup": True, "mup_base_hidden_size": 8} if mup else {}),
        )
        torch.manual_seed(0)
        try:
            yield GPTModel(
                config,
                get_gpt_layer_local_spec(),
                vocab_size=64,
                max_sequence_length=12,
                share_embeddings_and_output_weights=tied,
                position_embedding_type="rope",
            )
        finally:
            parallel_state.destroy_model_parallel()
