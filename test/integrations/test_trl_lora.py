"""LoRA adapters on the lm_head under TRL's trainers: whole runs against runs with full logits, and what is refused."""

import functools
import importlib
import inspect
from contextlib import contextmanager
from types import MethodType

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="PEFT is not installed")

import peft.tuners.tuners_utils as peft_layers
import trl.trainer.utils as trl_utils
from peft import LoHaConfig, LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM

import oracles
import trl_runs
from liger_rl import patch_trl
from liger_rl.integrations.trl import adapted_head, patched_trl, unpatch_trl

# Weights of both factors at random, so that the adapter counts from the first step on.
LORA = {
    "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "down_proj", "lm_head"],
    "init_lora_weights": False,
}  # fmt: skip
PLAIN, ADAPTED = 16, 24  # columns of hidden states: the model's, and with those of adapters in a multiple of 8


def adapted(path, **options):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=options.pop("dtype", torch.float32))
    return get_peft_model(base.to(options.pop("device", "cpu")), LoraConfig(**{**LORA, **options}))


# --- runs against full logits -----------------------------------------------------------------------------------------


def add_full_head(model, temperature=1.0, cast_lm_head_to_fp32=False, outputs=("log_probs",)):
    """TRL's fused forward with the logits of the model's own, adapters on its head and softcap included."""
    own_forward = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, *args, fused_lm_head=False, labels=None, num_items_in_batch=None, **kwargs):
        if not fused_lm_head:
            return own_forward(*args, labels=labels, **kwargs)
        z = own_forward(*args, **kwargs).logits[:, :-1].float() / temperature
        targets = labels[:, 1:].clamp(min=0)
        mask = labels[:, 1:] != -100
        logps, entropy, log_sum_sq, mean_logits, is_top1 = (
            torch.where(mask, values, 0)
            for values in oracles.values(z, targets)._replace(lse=None)
            if values is not None
        )
        return trl_utils.FusedCausalLMOutput(
            loss=-logps.sum() / (mask.sum() if num_items_in_batch is None else num_items_in_batch),
            log_probs=logps,
            entropy=entropy,
            log_sum_sq_probs=log_sum_sq.detach(),
            mean_logits=mean_logits.detach(),
            is_top1=is_top1.bool(),
            label_mask=mask,
        )

    model.forward = MethodType(forward, model)


@contextmanager
def full_logits():
    """TRL's trainers without the fused head, and so without a reason to refuse an adapter on it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in adapted_head.TRAINERS:
            module = importlib.import_module(name)
            patch.setattr(module, "add_fused_lm_head", add_full_head)
            patch.setattr(module, "BaseTunerLayer", ())
        yield


def both(kind, make, directory, **options):
    """-> the run with full logits, the patched one, and the widths of the hidden states that our op got."""
    with full_logits():
        full = trl_runs.train(kind, make(), directory, patch=False, **options)
    with trl_runs.counted_calls() as widths:
        patched = trl_runs.train(kind, make(), directory, patch=True, **options)
    trl_runs.assert_same_run(patched, full)
    return full, patched, set(widths[1:])  # the patch has tried its options


def factors(weights):
    names = ("lm_head.lora_A.default.weight", "lm_head.lora_B.default.weight")
    return [next(w for name, w in weights.items() if name.endswith(factor)) for factor in names]


@pytest.mark.parametrize(("model", "trained_before"), [("qwen3", False), ("gemma2", False), ("qwen3", True)])
def test_grpo(model, trained_before, path_of, tmp_path):
    """With a KL penalty, an entropy bonus, a clip, a temperature and, Gemma 2's, a softcap.

    The reference is the model without adapters, or a copy of the adapter that the model came with.
    """
    options = {} if trained_before else {"peft_config": LoraConfig(**LORA)}
    make = functools.partial(adapted, path_of[model]) if trained_before else lambda: path_of[model]
    full, patched, widths = both(
        "GRPO", make, tmp_path, max_steps=10, num_iterations=2, beta=0.1, epsilon=0.02, entropy_coef=0.02, **options
    )
    start = dict(adapted(path_of[model]).named_parameters())
    # The adapter on the head agrees by itself too, and not because nothing happened to it.
    triples = (factors(weights) for weights in (patched.weights, full.weights, start))
    for mine, other, before in zip(*triples, strict=True):
        assert (other - before).norm() > 0.01 * other.norm()
        assert (mine - other).norm() < 1e-4 * (other - before).norm()
    assert widths == ({ADAPTED} if trained_before else {PLAIN, ADAPTED})
    assert max(full.log["kl"]) > 0.002
    assert max(full.log["clip_ratio/region_mean"]) > 0.05
    assert len(set(full.log["entropy"])) == len(full.log["loss"]) == 10


@pytest.mark.parametrize("kind", ["RLOO", "DPO", "KTO", "SFT"])
def test_other_trainers(kind, path_of, tmp_path):
    options = {"peft_config": LoraConfig(**LORA), "max_steps": 3}
    full, _, widths = both(kind, lambda: path_of["qwen3"], tmp_path, **options)
    assert widths == ({ADAPTED} if kind == "SFT" else {PLAIN, ADAPTED})
    assert full.log["loss"][0] != full.log["loss"][-1]


# --- one call ---------------------------------------------------------------------------------------------------------


def fused_model(path, **options):
    """A PeftModel on the base model's fused forward, as the trainers build it."""
    model = adapted(path, **options)
    trl_utils.add_fused_lm_head(model.get_base_model(), temperature=0.9, outputs=("log_probs", "entropy"))
    return model.train()


def batch_on(device="cpu", *, masked=True):
    ids = torch.randint(3, len(trl_runs.TOKENS), (3, 9), generator=torch.Generator().manual_seed(1)).to(device)
    labels = ids.clone()
    if masked:
        labels[:, :3] = -100
        labels[1, 7:] = -100
    return {"input_ids": ids, "labels": labels}


def assert_agrees(model, device="cpu"):
    """Log-probabilities, entropies and gradients of a call, with those of the model's own logits."""
    batch = batch_on(device)
    targets, mask = batch["labels"][:, 1:].clamp(min=0), batch["labels"][:, 1:] != -100
    output = model(**batch, fused_lm_head=True)
    z = model(input_ids=batch["input_ids"]).logits[:, :-1] / 0.9
    expected = [torch.where(mask, values, 0) for values in oracles.logits_logprobs(z, targets)]
    torch.testing.assert_close([output.log_probs, output.entropy], expected, rtol=1e-5, atol=1e-5)
    assert output.log_probs.requires_grad == expected[0].requires_grad
    if output.log_probs.requires_grad:
        trained = [p for p in model.parameters() if p.requires_grad]
        grads = [
            torch.autograd.grad(logps.sum() + entropy.square().sum(), trained, materialize_grads=True)
            for logps, entropy in ((output.log_probs, output.entropy), expected)
        ]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    return output.log_probs.detach()


def two_adapters(model):
    model.add_adapter("second", LoraConfig(**{**LORA, "r": 2, "lora_alpha": 8}))
    model.base_model.set_adapter(["default", "second"])


STATES = {
    "one": ({}, None, ADAPTED),
    "two": ({}, two_adapters, ADAPTED),
    "rslora": ({"use_rslora": True}, None, ADAPTED),
    "biases": ({"lora_bias": True}, None, ADAPTED),
    "disabled": ({}, lambda model: model.base_model.disable_adapter_layers(), PLAIN),
    "merged": ({}, lambda model: model.merge_adapter(), PLAIN),
    "the body alone": ({"target_modules": ["q_proj"]}, None, PLAIN),
    "a trained copy": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, None, PLAIN),
}


@pytest.mark.parametrize(("options", "change", "width"), STATES.values(), ids=STATES)
def test_what_is_active_at_the_call(options, change, width, path_of, device):
    with patched_trl(), trl_runs.counted_calls() as seen:
        model = fused_model(path_of["qwen3"], device=device, **options)
        assert_agrees(model, device)  # what comes next is read anew
        if change is not None:
            change(model)
            assert_agrees(model, device)
    assert seen[-1] == width


def test_dropout(path_of, device):
    """Drawn in training for every row that the op is given, as `nn.Dropout` draws it; not in evaluation."""
    with patched_trl():
        model = fused_model(path_of["qwen3"], device=device, target_modules=["lm_head"], lora_dropout=0.5)
        batch = batch_on(device, masked=False)
        torch.manual_seed(1)
        logps = model(**batch, fused_lm_head=True).log_probs
        base, head = model.get_base_model(), model.get_output_embeddings()
        hidden = base.base_model(input_ids=batch["input_ids"]).last_hidden_state[:, :-1].reshape(-1, head.in_features)
        torch.manual_seed(1)
        added = head.lora_B["default"](head.lora_A["default"](torch.nn.functional.dropout(hidden, 0.5)))
        z = (head.base_layer(hidden) + added).view(*logps.shape, -1) / 0.9
        expected, _ = oracles.logits_logprobs(z, batch["labels"][:, 1:])
        torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)
        in_evaluation = assert_agrees(model.eval(), device)
    assert (logps - in_evaluation).abs().max() > 0.01


def test_generation_sees_the_forward_it_knows(path_of):
    with patched_trl():
        model = fused_model(path_of["qwen3"]).get_base_model()
    assert inspect.signature(model.forward) == inspect.signature(type(model).forward.__get__(model))
    ids = batch_on()["input_ids"]
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


# --- what is refused --------------------------------------------------------------------------------------------------


def build(path, directory, peft_config=None, **options):
    return trl_runs.build("GRPO", path, directory, peft_config=peft_config, **options)


def test_what_trl_refuses_comes_and_goes(path_of, tmp_path):
    path, config = path_of["qwen3"], LoraConfig(**LORA)
    refused = pytest.raises(ValueError, match="Applying a PEFT adapter to `lm_head` is not supported")
    layer = peft_layers.BaseTunerLayer
    with refused:
        build(path, tmp_path, config)
    patch_trl()
    patch_trl(chunk_vocab=64)
    build(path, tmp_path, config)
    assert peft_layers.BaseTunerLayer is layer  # PEFT's own is left alone
    with pytest.raises(ValueError, match="cast_lm_head_to_fp32"):  # as in TRL; it takes other adapters
        build(path, tmp_path, config, cast_lm_head_to_fp32=True)
    build(path, tmp_path, LoraConfig(target_modules=["q_proj"]), cast_lm_head_to_fp32=True)
    unpatch_trl()
    with refused:
        build(path, tmp_path, config)


def hooked(model):
    model.get_output_embeddings().register_forward_hook(lambda *_: None)


def replaced(model):
    model.get_output_embeddings().base_layer.forward = lambda hidden: torch.zeros(())


OTHERS = {
    "DoRA": (LoraConfig(**{**LORA, "use_dora": True}), ValueError, "'default' .* DoraLinearVariant"),
    "LoHa": (LoHaConfig(target_modules=["lm_head"]), TypeError, r"loha\.layer\.Linear"),
    "a hook": (hooked, ValueError, "1 hooks"),
    "a forward of its own": (replaced, ValueError, "replaced on the instance"),
}


@pytest.mark.parametrize(("other", "error", "message"), OTHERS.values(), ids=OTHERS)
def test_other_adapters_and_heads_that_do_more_are_refused(other, error, message, path_of, tmp_path):
    patch_trl()
    model, config = path_of["qwen3"], other
    if callable(other):
        other(model := adapted(model))
        config = None
    with pytest.raises(error, match=message):
        build(model, tmp_path, config, beta=0.0)


@pytest.mark.parametrize("sharding", ["ZeRO-3", "DTensor", "FSDP2"])
@pytest.mark.parametrize("factor", ["lora_A", "lora_B"])
def test_sharded_adapters_are_refused(sharding, factor, path_of, lone_rank):
    with patched_trl():
        model = fused_model(path_of["qwen3"])
        layer = getattr(model.get_output_embeddings(), factor)["default"]
        if sharding == "ZeRO-3":
            layer.weight.ds_id = 7  # as DeepSpeed does
        elif sharding == "FSDP2":
            fully_shard(model.get_output_embeddings(), mesh=lone_rank)
        else:
            layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.data, lone_rank))
        with pytest.raises(ValueError, match="Qwen3ForCausalLM are sharded"):
            model(**batch_on(), fused_lm_head=True)


def test_a_trainer_that_outlives_the_patch_raises_until_it_is_back(path_of):
    """TRL's own op would leave the adapter out."""
    with patched_trl():
        model = fused_model(path_of["qwen3"])
        kept = [trl_utils.add_fused_lm_head]
    with pytest.raises(RuntimeError, match=r"patch_trl\(\) must hold"):
        model(**batch_on(), fused_lm_head=True)
    assert model(**batch_on()).logits.shape[:2] == batch_on()["input_ids"].shape
    with model.disable_adapter():  # nothing to leave out
        assert_agrees(model)
    with pytest.raises(RuntimeError, match="taken back"):  # what was imported under the patch
        kept[0](model.get_base_model())
    with patched_trl():
        assert_agrees(model)
