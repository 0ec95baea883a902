"""Every option of PEFT's LoraConfig: its outputs to rounding, and gradients of exactly the parameters it trains."""

import dataclasses
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

pytest.importorskip("peft", reason="PEFT is not installed")

import peft
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import config as configs

import oracles
from hf_models import build, make_batch
from liger_rl.integrations.peft import patched_peft
from liger_rl.models import lora_linear

FIELDS = {field.name: field for field in dataclasses.fields(LoraConfig)}
# Fields that are no part of a layer, or that need another package or data.
NOT_OF_A_LAYER = {
    "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "task_type", "peft_type",
}  # fmt: skip
NOT_TRIED = {
    "megatron_config": "needs Megatron",
    "megatron_core": "needs Megatron",
    "use_qalora": "PEFT has it for GPTQ alone",
    "qalora_group_size": "PEFT has it for GPTQ alone",
    "loftq_config": "needs scipy; the layer is plain",
    "corda_config": "needs a preprocessed model; the layer is plain",
    "lora_ga_config": "needs a preprocessed model; the layer is plain",
}
OURS, PEFT_S = True, False


class Convolutions(nn.Module):
    """Of one dimension, of two, and a Conv1D of transformers, which is linear."""

    def __init__(self):
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.embed, self.line, self.plane = nn.Embedding(211, 16), nn.Conv1d(16, 16, 3), nn.Conv2d(1, 2, 3, padding=1)
        self.turned, self.dense = Conv1D(16, 16), nn.Linear(16, 8)

    def forward(self, input_ids, **_):
        x = self.line(self.embed(input_ids).mT).mT
        return self.dense(self.turned(self.plane(x[:, None]).sum(1)))


def sub_config(name, **options):
    """A function, since not every version of PEFT has the class."""
    return lambda: getattr(configs, name)(**options)


# Options of the config -> whether a layer of the model is ours. `model` is no option: it names the model.
CASES = {
    "plain": ({}, OURS),
    "r": ({"r": 3}, OURS),
    "lora_alpha": ({"lora_alpha": 2}, OURS),
    "lora_dropout": ({"lora_dropout": 0.5}, OURS),
    "bias of all layers": ({"bias": "all", "target_modules": "all-linear"}, PEFT_S),
    "bias of LoRA layers": ({"bias": "lora_only"}, PEFT_S),
    "use_rslora": ({"use_rslora": True}, OURS),
    "use_dora": ({"use_dora": True}, PEFT_S),
    "lora_bias": ({"lora_bias": True}, PEFT_S),
    "rank_pattern": ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}, OURS),
    "all-linear": ({"target_modules": "all-linear", "exclude_modules": ["k_proj"]}, OURS),
    "the head and the embedding": ({"target_modules": ["embed_tokens", "lm_head", "q_proj"]}, OURS),
    "modules_to_save": ({"modules_to_save": ["lm_head", "embed_tokens", "norm"]}, OURS),
    "a saved LoRA target": ({"modules_to_save": ["mlp"], "target_modules": "all-linear"}, OURS),
    "ensure_weight_tying": (
        {"model": {"tie_word_embeddings": True}, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        OURS,
    ),
    "tied targets": (
        {
            "model": {"tie_word_embeddings": True},
            "target_modules": ["embed_tokens", "lm_head"],
            "ensure_weight_tying": True,
        },
        OURS,
    ),
    "layers_to_transform": (
        {"model": {"num_hidden_layers": 2}, "layers_to_transform": [1], "layers_pattern": "layers"},
        OURS,
    ),
    "layer_replication": ({"layer_replication": [(0, 1), (0, 1)]}, OURS),
    "trainable_token_indices": ({"trainable_token_indices": [9, 10, 11]}, OURS),
    "target_parameters": ({"target_parameters": ["v_proj.weight"], "target_modules": ["q_proj"]}, OURS),
    "inference_mode": ({"inference_mode": True, "modules_to_save": ["norm"]}, OURS),
    "alora_invocation_tokens": ({"alora_invocation_tokens": [12], "task_type": "CAUSAL_LM"}, PEFT_S),
    "use_bdlora": (
        {"use_bdlora": sub_config("BdLoraConfig", target_modules_bd_a=["q_proj"], target_modules_bd_b=["v_proj"])},
        PEFT_S,
    ),
    "velora_config": ({"velora_config": sub_config("VeloraConfig", num_groups=4)}, PEFT_S),
    "monteclora_config": ({"monteclora_config": sub_config("MontecloraConfig")}, PEFT_S),
    "kasa_config": ({"kasa_config": sub_config("KasaConfig")}, PEFT_S),
    "arrow_config": ({"arrow_config": sub_config("ArrowConfig", top_k=1, rng_seed=1)}, PEFT_S),
    "eva_config": ({"init_lora_weights": "eva", "eva_config": sub_config("EvaConfig")}, OURS),
    "runtime_config": ({"runtime_config": sub_config("LoraRuntimeConfig", ephemeral_gpu_offload=True)}, OURS),
    "fan_in_fan_out": ({"model": Convolutions, "target_modules": ["turned"], "fan_in_fan_out": True}, OURS),
    "every kind of layer": (
        {"model": Convolutions, "target_modules": ["embed", "line", "plane", "turned", "dense"]},
        OURS,
    ),
    "convolutions": ({"model": Convolutions, "target_modules": ["embed", "line", "plane"]}, PEFT_S),
    **{
        f"init_lora_weights {value}": ({"init_lora_weights": value}, PEFT_S if value == "mica" else OURS)
        for value in (False, "gaussian", "olora", "pissa", "pissa_niter_2", "orthogonal", "mica")
    },
}
ADAPTERS = {"two active": (["default", "second"], PEFT_S), "switched": ("second", OURS), "none": ([], PEFT_S)}
# dtypes of the weights, of the adapters and of autocast
DTYPES = {
    "bf16 autocast": (torch.bfloat16, torch.float32, torch.bfloat16),
    "fp16 autocast": (torch.float32, torch.float32, torch.float16),
    "no autocast": (torch.bfloat16, torch.bfloat16, None),
}

# PEFT's own forward raises an error.
IMPOSSIBLE = [
    *(("arrow_config", name) for name in DTYPES if name != "no autocast"),
    ("monteclora_config", "no autocast"),
]


def test_every_field_of_the_config_is_tried():
    """A new one fails here, until a case tries it or it is named above with the reason why not."""
    tried = {name for options, _ in CASES.values() for name in options}
    assert FIELDS.keys() <= tried | NOT_TRIED.keys() | NOT_OF_A_LAYER


def make_model(options, weights=torch.float32, adapters=torch.float32):
    options = {name: value() if callable(value) and name != "model" else value for name, value in options.items()}
    source = options.pop("model", {})
    torch.manual_seed(0)
    if source is Convolutions:
        model = Convolutions()
    else:
        small = {"num_hidden_layers": 1, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
        model = build("Llama", **{**small, **source})
    config = LoraConfig(**{"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], **options})
    if options.get("arrow_config"):
        options.pop("arrow_config")
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), adapter_name="task_0")
        config.arrow_config.task_adapter_names, config.arrow_config.gks_adapter_names = ["task_0"], []
        model.add_adapter("arrow_router", config)
        model.set_adapter("arrow_router")
    else:
        model = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_adapter = "lora_" in name
            parameter.data = parameter.to(adapters if is_adapter else weights)
            if is_adapter and "magnitude" not in name:
                parameter.normal_(std=0.2)
    return model.train()


def solve(model, patch, autocast):
    """-> the output, and the gradient of each parameter that gets one."""
    model.zero_grad()
    torch.manual_seed(3)
    inputs = {name: value for name, value in make_batch().items() if name != "labels"}
    context = torch.autocast("cpu", autocast) if autocast else nullcontext()
    with patched_peft() if patch else nullcontext(), context:
        output = model(**inputs)
        output = getattr(output, "logits", output)
    if output.requires_grad:
        output.float().square().mean().backward()
    gradients = {name: own.grad.clone() for name, own in model.named_parameters() if own.grad is not None}
    return {"the output": output.detach(), **gradients}


def assert_same_as_peft(make, is_ours, dtypes, monkeypatch):
    calls = []
    for function in (lora_linear.LoraLinear, lora_linear.AddedLora):
        apply = function.apply
        monkeypatch.setattr(function, "apply", lambda *args, apply=apply: (calls.append(1), apply(*args))[1])
    # Some variants have a state.
    models = [make(*dtypes[:2])] * 3 if is_ours else [make(*dtypes[:2]) for _ in range(3)]
    theirs, ours = (solve(model, patch, dtypes[2]) for model, patch in zip(models, (False, True), strict=False))
    exact = solve(models[2].float(), False, None)
    monkeypatch.undo()
    assert bool(calls) == is_ours
    assert ours.keys() == theirs.keys()
    for name, found in ours.items():
        assert found.dtype == theirs[name].dtype
        error, allowed = (oracles.norm_error(one, exact[name]) for one in (found, theirs[name]))
        assert error <= 1.5 * allowed + 2**-7 * exact[name].norm(), name


@pytest.mark.parametrize("name", CASES)
def test_every_option(name, monkeypatch):
    options, is_ours = CASES[name]
    value = options.get("init_lora_weights")
    if not options.keys() - {"model"} <= FIELDS.keys() or (value == "mica" and "kasa_config" not in FIELDS):
        pytest.skip(f"PEFT {peft.__version__} has no such option")
    for dtypes in DTYPES.keys() - {run for case, run in IMPOSSIBLE if case == name}:
        assert_same_as_peft(partial(make_model, options), is_ours, DTYPES[dtypes], monkeypatch)


@pytest.mark.parametrize("name", ADAPTERS)
def test_several_adapters(name, monkeypatch):
    active, is_ours = ADAPTERS[name]

    def make(*dtypes):
        model = make_model({}, *dtypes)
        model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        model.base_model.set_adapter(active)
        return model

    assert_same_as_peft(make, is_ours, DTYPES["bf16 autocast"], monkeypatch)
