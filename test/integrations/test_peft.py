"""LoRA on the lm_head through the fused head, against the adapted model's own full logits."""

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")
peft = pytest.importorskip("peft", reason="the adapters are PEFT's")

import oracles  # noqa: E402
from liger_rl import FusedLinearGRPOLoss, LowRank  # noqa: E402
from liger_rl.integrations.transformers import is_swapped, swap_lm_head, unswap_lm_head  # noqa: E402

VOCAB, HIDDEN, BATCH, LENGTH = 211, 32, 3, 12
ADAPTERS = ("lora_A", "lora_B")

on_every_device = pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))],
)


@torch.no_grad()
def build(device: str = "cpu", dtype: torch.dtype = torch.float32, **options) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    model = transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**{**sizes, "final_logit_softcapping": 5.0, "tie_word_embeddings": False, **options})
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(3)
    model.lm_head.weight.mul_(5)
    return model.to(device, dtype)


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


def adapted(device: str = "cpu", dtype: torch.dtype = torch.float32, **options) -> "peft.PeftModel":
    return randomise(peft.get_peft_model(build(device, dtype), lora(**options)))


def make_batch(device: str = "cpu") -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :3] = -100
    labels[1, 8:] = -100
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


def logps_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """From the model's own full logits, aligned with the labels."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    logps = logits.float().log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    return nn.functional.pad(torch.where(targets >= 0, logps, 0.0), (1, 0))


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_as_full_logits(model: nn.Module, batch: dict[str, Tensor], tolerance: float = 1e-5) -> Tensor:
    """Log-probabilities, loss and gradients of the fused call and of the plain one."""
    plain = model(**batch)
    plain_logps = logps_of(model, batch).detach()
    trainable = any(p.requires_grad for p in model.parameters())
    plain_gradients = gradients(model, plain.loss) if trainable else {}
    fused = model(**batch, fused=True)
    torch.testing.assert_close(fused.per_token_logps.detach(), plain_logps, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(fused.loss, plain.loss.float(), rtol=tolerance, atol=tolerance)
    fused_gradients = gradients(model, fused.loss) if trainable else {}
    assert fused_gradients.keys() == plain_gradients.keys()
    size = math.sqrt(sum(g.double().square().sum().item() for g in plain_gradients.values()))
    for name, expected in plain_gradients.items():
        torch.testing.assert_close(fused_gradients[name], expected, rtol=10 * tolerance, atol=tolerance * size)
    return fused.per_token_logps.detach()


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swapped", ["before", "after", "inside"])
@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True}, {"lora_bias": True, "target_modules": ["lm_head"]}, {"target_modules": ["lm_head"]}],
    ids=["lora", "rslora", "bias", "head alone"],
)
@on_every_device
def test_lora_on_the_head(swapped, options, device):
    """Swapped before PEFT wraps the model, after that, or by way of the model inside."""
    model, batch = build(device), make_batch(device)
    if swapped == "before":
        swap_lm_head(model)
    model = randomise(peft.get_peft_model(model, lora(**options)))
    if swapped != "before":
        target = model if swapped == "after" else model.get_base_model()
        assert swap_lm_head(target) is target
    assert is_swapped(model)
    found = assert_same_as_full_logits(model, batch)
    adapted_gradients = gradients(model, model(**batch, fused=True).loss)
    assert adapted_gradients
    assert all("lora_" in name for name in adapted_gradients)
    with model.disable_adapter():
        plain = assert_same_as_full_logits(model, batch)
    assert (found - plain).abs().max() > 0.05
    torch.testing.assert_close(plain, logps_of(build(device), batch), rtol=1e-5, atol=1e-5)


def test_equals_the_merged_model():
    model, batch = swap_lm_head(adapted()), make_batch()
    found = model(**batch, fused=True)
    merged = copy.deepcopy(model).merge_and_unload()
    torch.testing.assert_close(found.per_token_logps.detach(), logps_of(merged, batch), rtol=1e-5, atol=1e-5)
    # Merged in place, the adapters' terms are in the weight and must not be added again.
    model.merge_adapter()
    torch.testing.assert_close(model(**batch, fused=True).per_token_logps, found.per_token_logps, rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        without = model(**batch, fused=True).per_token_logps
    torch.testing.assert_close(without, logps_of(build(), batch), rtol=1e-4, atol=1e-4)
    assert torch.equal(merged(**batch, fused=True).per_token_logps, swap_lm_head(merged)(**batch, fused=True)[1])


def test_several_adapters_are_switched_and_summed():
    model = adapted(r=4)
    model.add_adapter("second", lora(r=3, lora_alpha=2))
    model.add_adapter("body", lora(target_modules=["q_proj"]))
    randomise(model)
    swap_lm_head(model)
    batch = make_batch()
    results = []
    for names in ("default", "second", "body"):
        model.set_adapter(names)
        results.append(assert_same_as_full_logits(model, batch))
    model.base_model.set_adapter(["default", "second"])
    results.append(assert_same_as_full_logits(model, batch))
    for i, first in enumerate(results):
        for second in results[:i]:
            assert (first - second).abs().max() > 0.01
    model.delete_adapter("second")
    torch.testing.assert_close(assert_same_as_full_logits(model, batch), results[0], rtol=1e-5, atol=1e-5)


def test_modules_to_save_trains_the_copy_of_the_head():
    model = peft.get_peft_model(build(), lora(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with torch.no_grad():
        model.get_base_model().lm_head.modules_to_save["default"].weight.mul_(0.5)
    batch = make_batch()
    swap_lm_head(randomise(model))
    found = assert_same_as_full_logits(model, batch)
    assert any("lm_head.modules_to_save" in n for n in gradients(model, model(**batch, fused=True).loss))
    with model.disable_adapter():
        original = assert_same_as_full_logits(model, batch)
    assert (found - original).abs().max() > 0.05
    model.add_adapter("other", lora(target_modules=["q_proj"]))
    model.set_adapter("other")  # it saves no head, so the original is called
    assert_same_as_full_logits(model, batch)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["lm_head"]},
        {"target_modules": ["lm_head", "embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["lm_head"], "rank_pattern": {"lm_head": 9}},
    ],
    ids=["head alone", "one adapter for both ends", "one copy for both ends", "a rank of its own"],
)
def test_tied_weights(options):
    model = randomise(peft.get_peft_model(build(tie_word_embeddings=True), lora(**options)))
    assert_same_as_full_logits(swap_lm_head(model), make_batch())


@pytest.mark.parametrize("frozen_head", [True, False])
def test_the_heads_own_weight_may_be_trained_too(frozen_head):
    model, batch = swap_lm_head(adapted()), make_batch()
    weight = model.get_base_model().lm_head.base_layer.weight
    weight.requires_grad_(not frozen_head)
    assert_same_as_full_logits(model, batch)
    assert (weight.grad is None) == frozen_head


def test_dropout_is_applied_to_what_peft_applies_it_to():
    model, batch = swap_lm_head(adapted(lora_dropout=0.4)), make_batch()
    model.train()
    torch.manual_seed(3)
    plain = model(**batch).loss
    plain_gradients = gradients(model, plain)
    torch.manual_seed(3)
    fused = model(**batch, fused=True).loss
    torch.testing.assert_close(fused, plain)
    for name, found in gradients(model, fused).items():
        torch.testing.assert_close(found, plain_gradients[name], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(**batch, fused=True).loss, plain, rtol=1e-3)
    model.eval()
    assert_same_as_full_logits(model, batch)


@pytest.mark.parametrize("autocast_adapter_dtype", [True, False], ids=["float32 adapters", "bfloat16 adapters"])
@on_every_device
def test_bfloat16_is_closer_to_float64_than_full_logits_in_bfloat16(autocast_adapter_dtype, device):
    """Given the same hidden states; PEFT keeps adapters of a bfloat16 model in float32 unless told otherwise."""
    base = build(device, torch.bfloat16)
    config = lora(target_modules=["lm_head"])
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=autocast_adapter_dtype)
    swap_lm_head(randomise(model))
    head, batch, seen = model.get_base_model().lm_head, make_batch(device), []
    handle = head.register_forward_pre_hook(lambda head, args: seen.append(args[0].detach()))
    plain = logps_of(model, batch)
    handle.remove()
    a, b = (getattr(head, name)["default"].weight.double() for name in ADAPTERS)
    merged = head.base_layer.weight.double() + head.scaling["default"] * b @ a
    logits = 5.0 * torch.tanh(seen[0].double() @ merged.T / 5.0)
    targets = batch["labels"][:, 1:]
    exact = logits[:, :-1].log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    exact = nn.functional.pad(torch.where(targets >= 0, exact, 0.0), (1, 0))
    output = model(**batch, fused=True)
    error, plain_error = ((logps - exact).norm().item() for logps in (output.per_token_logps, plain))
    assert error < plain_error / 100
    found = gradients(model, output.loss)
    expected = gradients(model, model(**batch).loss)
    adapter_dtype = torch.float32 if autocast_adapter_dtype else torch.bfloat16
    for name, grad in found.items():
        assert grad.dtype == adapter_dtype
        assert (grad - expected[name]).norm() < 0.05 * expected[name].norm()


def test_autocast():
    model, batch = swap_lm_head(adapted()), make_batch()
    exact = logps_of(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        plain, fused = logps_of(model, batch), model(**batch, fused=True)
    error = oracles.norm_error(fused.per_token_logps, exact)
    assert error <= oracles.norm_budget(plain, exact, torch.bfloat16)
    assert all(g.dtype == torch.float32 for g in gradients(model, fused.loss).values())


def test_padding_of_nan_does_not_reach_the_adapter():
    """Rows of the hidden states that no label needs."""
    model, batch = swap_lm_head(adapted(target_modules=["lm_head"])), make_batch()
    expected = gradients(model, model(**batch, fused=True).loss)

    def poison(module, args, output):
        return output.masked_fill((torch.arange(LENGTH) < 2)[:, None], math.nan)

    handle = model.get_base_model().model.norm.register_forward_hook(poison)
    found = gradients(model, model(**batch, fused=True).loss)
    handle.remove()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens(kind):
    """The labels grow with the prompt, the log-probabilities with them."""
    model = peft.get_peft_model(build(), getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4))
    batch, plain = make_batch(), model(**make_batch()).loss
    fused = swap_lm_head(model)(**batch, fused=True)
    torch.testing.assert_close(fused.loss, plain)
    assert fused.per_token_logps.shape[1] == LENGTH + (4 if kind == "PromptTuningConfig" else 0)
    found, expected = gradients(model, fused.loss), gradients(model, model(**batch).loss)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)


# --- training ---------------------------------------------------------------------------------------------------------


def policy_losses(model: nn.Module, logps, steps: int) -> list[float]:
    """GRPO on the adapters: words below 20 are rewarded. -> the likelihood of those in every step"""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    batch = make_batch()
    good = (batch["labels"] < VOCAB // 2).float() * 2 - 1
    history = []
    for _ in range(steps):
        per_token = logps(model, batch)
        mask = per_token != 0
        loss = -(good * per_token)[mask].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return history


def test_a_head_with_lora_trains_as_with_full_logits():
    """What TRL's GRPOTrainer refuses. Step by step the same losses and, at the end, the same adapters."""
    plain, fused = adapted(), swap_lm_head(adapted())
    plain_losses = policy_losses(plain, logps_of, 15)
    fused_losses = policy_losses(fused, lambda model, batch: model(**batch, fused=True).per_token_logps, 15)
    torch.testing.assert_close(torch.tensor(fused_losses), torch.tensor(plain_losses), rtol=1e-4, atol=1e-4)
    assert fused_losses[-1] < fused_losses[0] - 0.5
    expected = dict(plain.named_parameters())
    for name, parameter in fused.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-3, atol=1e-3)


def test_the_loss_module_takes_the_adapter_as_it_is():
    """The same without the integration: hidden states, the frozen weight, and the two factors."""
    model, batch = adapted(target_modules=["lm_head"]), make_batch()
    base = model.get_base_model()
    head, hidden = base.lm_head, base.model(batch["input_ids"]).last_hidden_state
    a, b = (getattr(head, name)["default"].weight for name in ADAPTERS)
    loss = FusedLinearGRPOLoss("grpo", softcap=5.0)(
        hidden[:, :-1],
        head.base_layer.weight,
        batch["labels"][:, 1:],
        torch.tensor([1.0, -0.5, 2.0]),
        low_rank=[LowRank(a=a, b=b, scaling=head.scaling["default"])],
    ).loss
    loss.backward()
    assert head.base_layer.weight.grad is None
    logps = logps_of(model, batch)[:, 1:]
    mask = batch["labels"][:, 1:] >= 0
    ratio = (logps - logps.detach()).exp() * mask
    expected = -(ratio * torch.tensor([1.0, -0.5, 2.0])[:, None]).sum(1).div(mask.sum(1)).mean()
    torch.testing.assert_close(loss, expected)
    for mine, theirs in zip((a.grad, b.grad), torch.autograd.grad(expected, (a, b)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


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
    fused = model(**batch, fused=True).per_token_logps
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model.save_pretrained(tmp_path)
    loaded = swap_lm_head(peft.PeftModel.from_pretrained(build(), tmp_path))
    torch.testing.assert_close(loaded(**batch, fused=True).per_token_logps, fused)
    assert unswap_lm_head(unswap_lm_head(model)) is model
    assert type(model.get_base_model()) is before
    assert not is_swapped(model)


def test_gradient_checkpointing():
    model, batch = swap_lm_head(adapted()), make_batch()
    expected = gradients(model, model(**batch, fused=True).loss)
    model.train()
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    found = gradients(model, model(**batch, fused=True).loss)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (lora(use_dora=True), ValueError, "'default' on the head of Gemma2ForCausalLM is a DoraLinearVariant"),
        (
            peft.IA3Config(task_type="CAUSAL_LM", target_modules=["lm_head"], feedforward_modules=[]),
            TypeError,
            r"Gemma2ForCausalLM carries a PEFT layer .* peft\.tuners\.ia3\.layer\.Linear",
        ),
        (
            peft.LoHaConfig(task_type="CAUSAL_LM", r=2, target_modules=["lm_head"]),
            TypeError,
            r"peft\.tuners\.loha\.layer\.Linear",
        ),
        (
            peft.LoKrConfig(task_type="CAUSAL_LM", r=2, target_modules=["lm_head"]),
            TypeError,
            r"peft\.tuners\.lokr\.layer\.Linear",
        ),
        (
            peft.AdaLoraConfig(task_type="CAUSAL_LM", init_r=2, target_modules=["lm_head"], total_step=10),
            TypeError,
            "SVDLinear",
        ),
        (
            peft.VeraConfig(task_type="CAUSAL_LM", r=2, target_modules=["lm_head"]),
            TypeError,
            r"peft\.tuners\.vera\.layer\.Linear",
        ),
        (
            peft.TrainableTokensConfig(task_type="CAUSAL_LM", target_modules=["lm_head"], token_indices=[1, 2]),
            TypeError,
            "TrainableTokens",
        ),
    ],
    ids=["DoRA", "IA3", "LoHa", "LoKr", "AdaLoRA", "VeRA", "trainable tokens"],
)
@pytest.mark.parametrize("swapped", ["before", "after"])
def test_other_adapters_on_the_head_are_refused_by_name(config, error, message, swapped):
    base, batch = build(), make_batch()
    if swapped == "before":
        swap_lm_head(base)
    model = peft.get_peft_model(base, copy.deepcopy(config))
    expected = model(**batch).logits
    with pytest.raises(error, match=message):
        swap_lm_head(model) if swapped == "after" else model(**batch, fused=True)
    assert is_swapped(model) == (swapped == "before")
    assert torch.equal(model(**batch).logits, expected)


def test_an_adapter_on_the_body_alone_is_nothing_special():
    config = peft.IA3Config(task_type="CAUSAL_LM", target_modules=["q_proj"], feedforward_modules=[])
    model = peft.get_peft_model(build(), config)
    assert_same_as_full_logits(swap_lm_head(model), make_batch())


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


def test_adapters_chosen_row_by_row_are_refused():
    """PEFT hands `adapter_names` to its layers by hooks for the length of a call."""
    model, batch = adapted().eval(), make_batch()
    model.add_adapter("second", lora())
    swap_lm_head(model)
    with pytest.raises(ValueError, match="hooks, which the fused head would leave out"):
        model(**batch, fused=True, adapter_names=["default", "second", "default"])


def test_adapters_that_come_after_the_swap_are_compiled_too():
    """The model then calls a layer that was not there at swap time."""
    config = lora(target_modules=["lm_head"])
    model, batch = randomise(peft.get_peft_model(swap_lm_head(build()), config)), make_batch()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found, logits = compiled(**batch, fused=True).per_token_logps, compiled(**batch).logits
    torch.testing.assert_close(found, assert_same_as_full_logits(model, batch))
    torch.testing.assert_close(logits, model(**batch).logits)
    head = model.get_base_model().lm_head
    for register in (head.register_forward_hook, head.register_forward_pre_hook):
        register(lambda *_: None, prepend=True).remove()
    unswap_lm_head(model)
    hooks = [(m._forward_hooks, m._forward_pre_hooks) for m in model.modules()]
    assert not any(part for pair in hooks for part in pair)


def test_a_pickled_model_with_adapters_is_swapped():
    model, batch = swap_lm_head(adapted()), make_batch()
    twin = pickle.loads(pickle.dumps(model))
    assert is_swapped(twin)
    assert torch.equal(twin(**batch, fused=True).per_token_logps, model(**batch, fused=True).per_token_logps)
    with twin.disable_adapter():
        assert_same_as_full_logits(twin, batch)


@pytest.mark.parametrize("part", ["lora_A", "lora_B", "lora_dropout"])
def test_a_hook_inside_the_adapter_is_refused(part):
    model, batch = swap_lm_head(adapted()), make_batch()
    module = getattr(model.get_base_model().lm_head, part)["default"]
    module.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(ValueError, match="1 hooks, which the fused head would leave out"):
        model(**batch, fused=True)


def test_an_adapter_that_computes_something_else_is_refused_at_swap_time():
    model = adapted()
    lora_b = model.get_base_model().lm_head.lora_B["default"]
    lora_b.forward = lambda x: 2 * nn.functional.linear(x, lora_b.weight)
    with pytest.raises(ValueError, match=r"something other than h @ W.T \+ b and its LoRA adapters"):
        swap_lm_head(model)
    assert not is_swapped(model)
