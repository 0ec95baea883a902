"""LoRA on the lm_head through the fused head, against the adapted model's own full logits."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import oracles
from hf_models import (
    LENGTH,
    assert_same_as_full_logits,
    build,
    from_logits,
    full,
    fused_logps,
    gradients,
    make_batch,
    transformers,
)
from liger_rl import FusedLinearGRPOLoss, completion_logps, swap_lm_head
from liger_rl.models.adapters import read_head
from liger_rl.models.swap import is_swapped, unswap_lm_head

peft = pytest.importorskip("peft", reason="the adapters are PEFT's")
ADAPTERS = ("lora_A", "lora_B")


def gemma(device="cpu", dtype: torch.dtype = torch.float32, **options) -> transformers.PreTrainedModel:
    sizes = {"num_hidden_layers": 1, "final_logit_softcapping": 5.0, "tie_word_embeddings": False}
    return build("Gemma2", device, **{**sizes, **options}).to(dtype)


def lora(**options) -> "peft.LoraConfig":
    defaults = {"task_type": "CAUSAL_LM", "r": 5, "lora_alpha": 8, "target_modules": ["lm_head", "q_proj"]}
    return peft.LoraConfig(**{**defaults, **options})


@torch.no_grad()
def randomise(model: nn.Module) -> nn.Module:
    """Adapters that do something: an untrained one is zero."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.normal_(std=0.3)
    return model


def adapted(device="cpu", dtype: torch.dtype = torch.float32, **options) -> "peft.PeftModel":
    return randomise(peft.get_peft_model(gemma(device, dtype), lora(**options)))


def head_of(model: nn.Module) -> nn.Module:
    return model.get_base_model().lm_head


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swapped", ["before", "after", "inside"])
@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True}, {"lora_bias": True, "target_modules": ["lm_head"]}, {"target_modules": ["lm_head"]}],
    ids=["lora", "rslora", "bias", "head alone"],
)
def test_lora_on_the_head(swapped, options, device):
    """Swapped before PEFT wraps the model, after that, or by way of the model inside."""
    model, batch = gemma(device), make_batch(device)
    if swapped == "before":
        swap_lm_head(model)
    model = randomise(peft.get_peft_model(model, lora(**options)))
    if swapped != "before":
        target = model if swapped == "after" else model.get_base_model()
        assert swap_lm_head(target) is target
    assert is_swapped(model)
    logps = assert_same_as_full_logits(model, batch).per_token_logps
    grads = gradients(model, model(**batch, fused=True).loss)
    assert grads
    assert all("lora_" in name for name in grads)
    with model.disable_adapter():
        plain = assert_same_as_full_logits(model, batch).per_token_logps
    assert (logps - plain).abs().max() > 0.05
    torch.testing.assert_close(plain, full(gemma(device), batch)[0], rtol=1e-5, atol=1e-5)


def test_equals_the_merged_model():
    model, batch = swap_lm_head(adapted()), make_batch()
    logps = fused_logps(model, batch)
    merged = copy.deepcopy(model).merge_and_unload()
    torch.testing.assert_close(logps, full(merged, batch)[0], rtol=1e-5, atol=1e-5)
    # Merged in place, the adapters' terms are in the weight and must not be added again.
    model.merge_adapter()
    torch.testing.assert_close(fused_logps(model, batch), logps, rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        torch.testing.assert_close(fused_logps(model, batch), full(gemma(), batch)[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(fused_logps(merged, batch), fused_logps(swap_lm_head(merged), batch))


def test_a_step_hands_adapter_names_on():
    """PEFT's wrapper reads them of its keywords."""
    model = randomise(peft.get_peft_model(swap_lm_head(gemma()), lora(target_modules=["q_proj"]))).eval()
    ids = make_batch()["input_ids"]
    batch = {"input_ids": ids, "mask": torch.ones_like(ids), "advantages": torch.ones(len(ids))}
    logps = partial(completion_logps, model, batch, FusedLinearGRPOLoss("grpo"))
    named = logps(adapter_names=["__base__"] * len(ids))
    with model.disable_adapter():
        torch.testing.assert_close(named, logps())
    assert not torch.allclose(named, logps(), atol=1e-2)


def test_several_adapters_are_switched_and_summed():
    model, batch = adapted(r=4), make_batch()
    model.add_adapter("second", lora(r=3, lora_alpha=2))
    model.add_adapter("body", lora(target_modules=["q_proj"]))
    swap_lm_head(randomise(model))
    results = []
    for names in ("default", "second", "body", ["default", "second"]):
        model.base_model.set_adapter(names)
        results.append(assert_same_as_full_logits(model, batch).per_token_logps)
    for i, first in enumerate(results):
        assert all((first - second).abs().max() > 0.01 for second in results[:i])
    model.delete_adapter("second")
    logps = assert_same_as_full_logits(model, batch).per_token_logps
    torch.testing.assert_close(logps, results[0], rtol=1e-5, atol=1e-5)


def test_modules_to_save_trains_the_copy_of_the_head():
    model, batch = (
        peft.get_peft_model(gemma(), lora(target_modules=["q_proj"], modules_to_save=["lm_head"])),
        make_batch(),
    )
    with torch.no_grad():
        head_of(model).modules_to_save["default"].weight.mul_(0.5)
    swap_lm_head(randomise(model))
    logps = assert_same_as_full_logits(model, batch).per_token_logps
    assert any("lm_head.modules_to_save" in n for n in gradients(model, model(**batch, fused=True).loss))
    with model.disable_adapter():
        original = assert_same_as_full_logits(model, batch).per_token_logps
    assert (logps - original).abs().max() > 0.05
    model.add_adapter("other", lora(target_modules=["q_proj"]))
    model.set_adapter("other")  # it saves no head, so the original is called
    assert_same_as_full_logits(model, batch)


HEAD = {"target_modules": ["lm_head"]}


def config_of(kind: str, **options) -> "peft.PeftConfig":
    defaults = {} if kind in ("IA3", "TrainableTokens") else {"r": 2}
    return getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **{**HEAD, **defaults, **options})


BOTH_ENDS = {"ensure_weight_tying": True}
OTHER_HEADS = {
    "tied: head alone": (True, lora(**HEAD)),
    "tied: one adapter for both ends": (True, lora(target_modules=["lm_head", "embed_tokens"], **BOTH_ENDS)),
    "tied: one copy for both ends": (
        True, lora(target_modules=["q_proj"], modules_to_save=["embed_tokens"], **BOTH_ENDS)
    ),
    "tied: a rank of its own": (True, lora(**HEAD, rank_pattern={"lm_head": 9})),
    "the body alone": (False, lora(target_modules=["q_proj"])),
    "the body alone, IA3": (False, config_of("IA3", target_modules=["q_proj"], feedforward_modules=[])),
}  # fmt: skip


@pytest.mark.parametrize(("tied", "config"), OTHER_HEADS.values(), ids=OTHER_HEADS)
def test_other_heads(tied, config):
    model = randomise(peft.get_peft_model(gemma(tie_word_embeddings=tied), copy.deepcopy(config)))
    assert_same_as_full_logits(swap_lm_head(model), make_batch())


@pytest.mark.parametrize("frozen_head", [True, False])
def test_the_heads_own_weight_may_be_trained_too(frozen_head):
    model = swap_lm_head(adapted())
    weight = head_of(model).base_layer.weight.requires_grad_(not frozen_head)
    assert_same_as_full_logits(model, make_batch())
    assert (weight.grad is None) == frozen_head


def test_dropout_is_applied_to_what_peft_applies_it_to():
    model, batch = swap_lm_head(adapted(lora_dropout=0.4)).train(), make_batch()
    losses, grads = [], []
    for options in ({}, {"fused": True}):
        torch.manual_seed(3)
        losses.append(model(**batch, **options).loss)
        grads.append(gradients(model, losses[-1]))
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(**batch, fused=True).loss, losses[0], rtol=1e-3)
    assert_same_as_full_logits(model.eval(), batch)


@pytest.mark.parametrize("autocast_adapter_dtype", [True, False], ids=["float32 adapters", "bfloat16 adapters"])
def test_bfloat16_is_closer_to_float64_than_full_logits(autocast_adapter_dtype, device):
    """Given the same hidden states; PEFT keeps adapters of a bfloat16 model in float32 unless told otherwise."""
    base = gemma(device, torch.bfloat16)
    model = peft.get_peft_model(base, lora(**HEAD), autocast_adapter_dtype=autocast_adapter_dtype)
    swap_lm_head(randomise(model))
    head, batch, seen = base.lm_head, make_batch(device), []
    handle = head.register_forward_pre_hook(lambda head, args: seen.append(args[0].detach()))
    plain, _ = full(model, batch)
    handle.remove()
    a, b = (getattr(head, name)["default"].weight.double() for name in ADAPTERS)
    merged = head.base_layer.weight.double() + head.scaling["default"] * b @ a
    exact, _ = from_logits(5.0 * torch.tanh(seen[0].double() @ merged.T / 5.0), batch["labels"])
    output = model(**batch, fused=True)
    assert oracles.norm_error(output.per_token_logps, exact) < oracles.norm_error(plain, exact)
    grads, expected = gradients(model, output.loss), gradients(model, model(**batch).loss)
    for name, grad in grads.items():
        assert grad.dtype == (torch.float32 if autocast_adapter_dtype else torch.bfloat16)
        assert (grad - expected[name]).norm() < 0.05 * expected[name].norm()


def test_autocast():
    model, batch = swap_lm_head(adapted()), make_batch()
    exact, _ = full(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        plain, fused = full(model, batch)[0], model(**batch, fused=True)
    error = oracles.norm_error(fused.per_token_logps, exact)
    assert error <= oracles.norm_budget(plain, exact, torch.bfloat16)
    assert all(g.dtype == torch.float32 for g in gradients(model, fused.loss).values())


def test_nothing_is_copied_without_an_active_adapter():
    model = adapted()
    layer = head_of(model)
    hidden, weight = torch.randn(3, layer.in_features), layer.base_layer.weight
    wide = read_head(layer, "the model").widen(hidden, weight)
    assert [tensor.shape[1] for tensor in wide] == [layer.in_features + 8] * 2  # 5 columns and 3 of zeros
    with model.disable_adapter():
        assert read_head(layer, "the model").widen(hidden, weight) == (hidden, weight)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens(kind):
    """The labels grow with the prompt, the log-probabilities with them."""
    model = peft.get_peft_model(gemma(), getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4))
    batch, plain = make_batch(), model(**make_batch()).loss
    fused = swap_lm_head(model)(**batch, fused=True)
    torch.testing.assert_close(fused.loss, plain)
    assert fused.per_token_logps.shape[1] == LENGTH + (4 if kind == "PromptTuningConfig" else 0)
    grads, expected = (gradients(model, loss) for loss in (fused.loss, model(**batch).loss))
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-6)


# --- nothing else is changed ------------------------------------------------------------------------------------------


def test_generate_state_and_undoing(tmp_path):
    model, batch = adapted(), make_batch()
    prompt, before = batch["input_ids"][:, :4], model.get_base_model().__class__
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model.generate(input_ids=prompt, max_new_tokens=5, do_sample=False)
    random_numbers = torch.get_rng_state()
    swap_lm_head(model)
    assert torch.equal(torch.get_rng_state(), random_numbers)
    assert torch.equal(model.generate(input_ids=prompt, max_new_tokens=5, do_sample=False), expected)
    logps = fused_logps(model, batch)
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    model.save_pretrained(tmp_path)
    loaded = swap_lm_head(peft.PeftModel.from_pretrained(gemma(), tmp_path))
    torch.testing.assert_close(fused_logps(loaded, batch), logps)
    twin = pickle.loads(pickle.dumps(model))
    assert is_swapped(twin)
    assert torch.equal(fused_logps(twin, batch), logps)
    with twin.disable_adapter():
        assert_same_as_full_logits(twin, batch)
    assert unswap_lm_head(unswap_lm_head(model)) is model
    assert type(model.get_base_model()) is before
    assert not is_swapped(model)


@pytest.mark.compilation
def test_adapters_that_come_after_the_swap_are_compiled_too():
    """The model then calls a layer that was not there at swap time."""
    llama = swap_lm_head(build("Llama", num_hidden_layers=1))
    model, batch = randomise(peft.get_peft_model(llama, lora(**HEAD))), make_batch()
    compiled = torch.compile(model, backend="aot_eager")
    logps, logits = fused_logps(compiled, batch), compiled(**batch).logits
    torch.testing.assert_close(logps, assert_same_as_full_logits(model, batch).per_token_logps)
    torch.testing.assert_close(logits, model(**batch).logits)
    for register in (head_of(model).register_forward_hook, head_of(model).register_forward_pre_hook):
        register(lambda *_: None, prepend=True).remove()
    unswap_lm_head(model)
    hooks = [(m._forward_hooks, m._forward_pre_hooks) for m in model.modules()]
    assert not any(registered for pair in hooks for registered in pair)


# --- what is refused --------------------------------------------------------------------------------------------------


REFUSED = {
    "DoRA": (lora(use_dora=True), ValueError, "'default' on the head of Gemma2ForCausalLM is a DoraLinearVariant"),
    "IA3": (
        config_of("IA3", feedforward_modules=[]),
        TypeError,
        r"carries a PEFT layer .* peft\.tuners\.ia3\.layer\.L",
    ),
    "LoHa": (config_of("LoHa"), TypeError, r"of Gemma2ForCausalLM carries .*peft\.tuners\.loha\.layer\.Linear"),
    "LoKr": (config_of("LoKr"), TypeError, r"peft\.tuners\.lokr\.layer\.Linear"),
    "AdaLoRA": (config_of("AdaLora", init_r=2, total_step=10), TypeError, "SVDLinear"),
    "VeRA": (config_of("Vera"), TypeError, r"peft\.tuners\.vera\.layer\.Linear"),
    "trainable tokens": (config_of("TrainableTokens", token_indices=[1, 2]), TypeError, "TrainableTokens"),
}


@pytest.mark.parametrize(("config", "error", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("swapped", ["before", "after"])
def test_other_adapters_on_the_head_are_refused_by_name(config, error, message, swapped):
    base, batch = gemma(), make_batch()
    if swapped == "before":
        swap_lm_head(base)
    model = peft.get_peft_model(base, copy.deepcopy(config))
    expected = model(**batch).logits
    with pytest.raises(error, match=message):
        swap_lm_head(model) if swapped == "after" else model(**batch, fused=True)
    assert is_swapped(model) == (swapped == "before")
    assert torch.equal(model(**batch).logits, expected)


def test_a_dora_adapter_is_refused_when_it_becomes_the_active_one():
    model, batch = adapted(), make_batch()
    model.add_adapter("dora", lora(use_dora=True))
    swap_lm_head(model)
    assert_same_as_full_logits(model, batch)
    model.set_adapter("dora")
    with pytest.raises(ValueError, match="'dora' on the head of Gemma2ForCausalLM is a DoraLinearVariant"):
        model(**batch, fused=True)
    model.set_adapter("default")
    assert_same_as_full_logits(model, batch)


@pytest.mark.parametrize("hooked", ["lora_A", "lora_B", "lora_dropout", None])
def test_a_hook_inside_the_adapter_is_refused(hooked):
    """PEFT hands `adapter_names` to its layers by hooks for the length of a call."""
    model = adapted().eval()
    model.add_adapter("second", lora())
    swap_lm_head(model)
    options = {} if hooked else {"adapter_names": ["default", "second", "default"]}
    if hooked:
        getattr(head_of(model), hooked)["default"].register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(ValueError, match="hooks, which the fused head would leave out"):
        model(**make_batch(), fused=True, **options)


def test_an_adapter_that_computes_something_else_is_refused_at_swap_time():
    model = adapted()
    lora_b = head_of(model).lora_B["default"]
    lora_b.forward = lambda x: 2 * nn.functional.linear(x, lora_b.weight)
    with pytest.raises(ValueError, match=r"other log-probabilities than h @ W\.T"):
        swap_lm_head(model)
    assert not is_swapped(model)
