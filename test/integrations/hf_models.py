"""Small random HuggingFace models of every architecture, a batch for them, and what their full logits give."""

import inspect

import pytest
import torch
from torch import Tensor, nn

# Imported from here, so that tests of models are skipped without it.
transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from transformers.integrations import hub_kernels  # noqa: E402

import oracles  # noqa: E402
from liger_rl import swap_lm_head  # noqa: E402
from liger_rl.models.swap import FusedCausalLMOutput, is_swapped  # noqa: E402

# Transformers 4.57 lacks some models, and some of its models make an attention mask of their own.
BEFORE_5 = transformers.__version__.startswith("4.")
# Newer references of layers with a state raise where earlier ones read a packed row as one sequence.
REFUSES_PACKED = "packed sequences apart" in inspect.getsource(hub_kernels)
NEEDS_TREES_OF_GPT2 = pytest.mark.skipif(
    BEFORE_5, reason="in transformers 4.57 GPT-2 makes an attention mask of its own"
)
VOCAB, HIDDEN, BATCH, LENGTH = 211, 32, 3, 14
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {**SIZES, "head_dim": 8}
GPT2 = {
    "vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "loss_type": "ForCausalLM", "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}  # fmt: skip
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
# Experts one at a time, because grouped products know no float64.
ROUTER = {"output_router_logits": True, "router_aux_loss_coef": 0.1, "experts_implementation": "eager"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **ROUTER}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
SCAN = {"mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False}
# Models with layers of a state.
HYBRIDS = {
    "FalconH1": {**HEADS, **MAMBA},
    "Bamba": {**SIZES, **MAMBA_2, "attn_layer_indices": [1]},
    "Qwen3_5Text": {**HEADS, **LINEAR, "layer_types": ["linear_attention", "full_attention"]},
    "Qwen3Next": {
        **HEADS, **LINEAR, **EXPERTS, "layer_types": ["linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 16,
    },
    "Qwen3_5MoeText": {
        **HEADS, **LINEAR, **EXPERTS, "layer_types": ["linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 16, "output_router_logits": False,
    },
    "OlmoHybrid": {**HEADS, **LINEAR, "layer_types": ["linear_attention", "full_attention"]},
    "Zamba2": {
        **SIZES, "layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 8, "mamba_headdim": 8, "n_mamba_heads": 8,
        "mamba_ngroups": 1, "chunk_size": 8, "num_mem_blocks": 1, "use_mem_rope": True,
    },
    "Lfm2": {**SIZES, "layer_types": ["conv", "full_attention"]},
    "Lfm2Moe": {
        **SIZES, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "experts_implementation": "eager",
    },
    # Without positions.
    "KimiLinear": {
        **HEADS, **LATENT, "q_lora_rank": None, "num_key_value_heads": 4, "num_local_experts": 4, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "experts_implementation": "eager",
        "layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 8, "linear_num_heads": 2,
    },
    "GraniteMoeHybrid": {
        **SIZES, **MAMBA_2, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 48,
        "num_local_experts": 0, "router_aux_loss_coef": 0.0,
    },
    "NemotronH": {
        **HEADS, "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 8,
        "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8, "use_mamba_kernels": False, "expand": 1,
    },
    "Jamba": {
        **SIZES, **SCAN, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "experts_implementation": "eager",
    },
    "Zamba": {
        **SIZES, **SCAN, "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "n_mamba_heads": 2, "attention_head_dim": 16, "attention": "eager",
    },
    "Mamba2": {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "state_size": 8, "num_hidden_layers": 2, "num_heads": 8,
        "head_dim": 8, "n_groups": 1, "chunk_size": 8, "attention": "eager",
    },
}  # fmt: skip
# Model class without ForCausalLM -> options of its config.
CONFIGS = {
    "Llama": SIZES,
    "Mistral": HEADS,
    "Qwen2": SIZES,
    "Qwen3": HEADS,
    "Gemma": HEADS,
    "Gemma2": {**HEADS, "final_logit_softcapping": 3.0},
    "Gemma3Text": HEADS,
    "RecurrentGemma": {
        **HEADS, "num_key_value_heads": 1, "num_hidden_layers": 3, "lru_width": HIDDEN, "attention_window_size": 14,
        "logits_soft_cap": 3.0,  # another name for it
    },
    "Cohere": {**SIZES, "logit_scale": 0.25},
    "Cohere2": {**HEADS, "logit_scale": 0.25},
    "Granite": {**SIZES, "logits_scaling": 4.0},  # divides
    "HyperCLOVAX": {**SIZES, "logits_scaling": 1.5},  # multiplies
    "FalconH1": {**HYBRIDS["FalconH1"], "lm_head_multiplier": 0.5},
    "Phi": SIZES,  # a bias on the head
    "Phi3": SIZES,
    "GPT2": GPT2,  # tied
    "GPTNeoX": SIZES,
    "Olmo2": SIZES,
    "SmolLM3": SIZES,
    "Starcoder2": SIZES,
    "StableLm": SIZES,
    "Glm4": HEADS,
    "Nemotron": SIZES,
    "Falcon": SIZES,
    "OPT": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": HIDDEN, "dropout": 0.0},
    "Mixtral": {**SIZES, "num_local_experts": 4, **ROUTER},
    "Qwen3Moe": {**HEADS, **EXPERTS},
    "Olmoe": {**SIZES, **EXPERTS},
    "GptOss": {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, **ROUTER},
    "GraniteMoe": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 4.0},
    "DeepseekV3": {
        **SIZES, **LATENT, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
}  # fmt: skip
# One of every convention for what follows the head.
CONVENTIONS = ("Llama", "Gemma2", "Granite", "HyperCLOVAX", "Cohere", "FalconH1", "Phi", "GPT2", "OPT", "Mixtral")


@torch.no_grad()
def randomised(model: nn.Module) -> nn.Module:
    """Weights three times the usual size and the head's more, so that distributions are far from flat; no zero bias."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        elif parameter.any():
            parameter.mul_(3)
        else:  # Gemma 3 begins with a blind projector
            parameter.normal_(std=0.3)
    model.get_output_embeddings().weight.mul_(5)
    return model


def make_config(name: str, **options) -> "transformers.PretrainedConfig":
    if BEFORE_5 and not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, f"{name}Config")(**options)


def build(name: str, device="cpu", attention: str = "sdpa", **overrides) -> "transformers.PreTrainedModel":
    torch.manual_seed(0)
    options = {**(CONFIGS.get(name) or HYBRIDS[name]), **overrides}
    attention = options.pop("attention", attention)
    config = make_config(name, **options)
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    except ValueError:  # transformers 5.23 has no "sdpa" for Gemma 2
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return randomised(model).to(device)


def make_batch(device="cpu") -> dict[str, Tensor]:
    """Rows padded on the right by 0, 3 and 6 tokens; the first two tokens of each are a prompt without labels."""
    ids = torch.randint(9, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([LENGTH, LENGTH - 3, LENGTH - 6])
    attention_mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    labels = torch.where(attention_mask == 1, ids, -100)
    labels[:, :2] = -100
    batch = {"input_ids": torch.where(attention_mask == 1, ids, 0), "attention_mask": attention_mask, "labels": labels}
    return {name: value.to(device) for name, value in batch.items()}


def from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """(B, T, V) logits of the plain forward -> (B, T) log-probabilities and entropies, aligned with the labels."""
    logits = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32))
    targets = labels[:, 1:]
    values = oracles.logits_logprobs(logits, targets.clamp(min=0), temperature=temperature)
    logps, entropy = (nn.functional.pad(torch.where(targets >= 0, v, 0.0), (1, 0)) for v in values)
    return logps, entropy


def full(model: nn.Module, batch: dict[str, Tensor], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return from_logits(model(**inputs).logits, batch["labels"], temperature)


def fused_logps(model: nn.Module, batch: dict) -> Tensor:
    return model(**batch, fused=True).per_token_logps


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def state_of(model: nn.Module) -> list:
    """Attributes and hooks of every module."""
    return [
        (set(vars(module)), list(module._forward_pre_hooks.items()), list(module._forward_hooks.items()))
        for module in model.modules()
    ]


def assert_same_gradients(grads: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 1e-5) -> None:
    """Together to `bound` of their size, each to ten times that of its own or once of the whole's."""
    assert grads.keys() == expected.keys()
    size = oracles.whole(expected).norm()
    assert size > 1e-3, "a gradient that is all but zero would test nothing"
    assert oracles.relative_error(oracles.whole(grads), oracles.whole(expected)) <= bound
    for name, grad in expected.items():
        assert (grads[name] - grad).norm() <= bound * (10 * grad.norm() + size), name


def assert_same_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def assert_same_as_full_logits(model: nn.Module, batch: dict[str, Tensor]) -> FusedCausalLMOutput:
    """Log-probabilities, entropies, loss and gradients of the fused call and of the plain one; swaps the head."""
    logps, entropy = full(model, batch)
    assert logps[logps != 0].std() > 0.3, "logits too flat to tell conventions apart"
    trained = any(p.requires_grad for p in model.parameters())
    plain = model(**batch)
    expected = gradients(model, plain.loss) if trained else {}
    assert is_swapped(swap_lm_head(model))
    fused = model(**batch, fused=True, entropy=True)
    torch.testing.assert_close(fused.per_token_logps, logps, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused.entropy, entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused.loss, plain.loss, rtol=1e-6, atol=1e-6)
    if trained:
        assert_same_gradients(gradients(model, fused.loss), expected)
    return fused
