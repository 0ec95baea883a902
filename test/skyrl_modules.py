"""SkyRL's two modules from a checkout, without what they import and do not need here."""

import importlib
import sys
from types import ModuleType
from unittest.mock import MagicMock

import torch
from torch import nn

import checkouts
import megatron_layers
from liger_rl.integrations import skyrl as integration

# Not installed here: annotations, logging, and kernels that CPUs do not have.
ABSENT = ("jaxtyping", "loguru", "flash_attn.bert_padding")


def load(name: str) -> ModuleType:
    """SkyRL's module of that name; `megatron.core` is real, or one without anything in it."""
    path = str(checkouts.source("SkyRL").parent)
    if path not in sys.path:
        sys.path.append(path)
        megatron_layers.load()
        sys.modules.setdefault("megatron.core.parallel_state", MagicMock())
        sys.modules |= {absent: MagicMock() for absent in ABSENT if absent not in sys.modules}
        sys.modules["flash_attn.bert_padding"].unpad_input = unpad_input
        sys.modules["flash_attn.bert_padding"].pad_input = pad_input
        backends = ModuleType("skyrl.backends")  # its own imports every backend
        backends.__path__ = [f"{path}/skyrl/backends"]
        sys.modules[backends.__name__] = backends
    return importlib.import_module(name)


def unpad_input(values, attention_mask):
    places = attention_mask.flatten().nonzero().flatten()
    return values.flatten(0, 1)[places], places, None, None, None


def pad_input(values, indices, batch, seqlen):
    padded = values.new_zeros(batch * seqlen, *values.shape[1:])
    return padded.index_copy(0, indices, values).unflatten(0, (batch, seqlen))


def tiny_wrapper(*, remove_padding: bool = False) -> nn.Module:
    """An HFModelWrapper of a random Llama, the same each time."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=52, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    module = load(integration.MODULES["fsdp"])
    return module.HFModelWrapper(
        transformers.LlamaForCausalLM(config),
        use_flash_attention_2=remove_padding,
        remove_microbatch_padding=remove_padding,
        logprobs_chunk_size=4,
    )
