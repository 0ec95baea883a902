"""A model with a swapped head against its own full logits: same numbers, same gradients, nothing else changed.

Tolerances come from the plain forward: against a float64 copy of the model, the fused head may be at most twice as
far off as the plain forward in the same dtype, plus one rounding.
"""

import copy
import functools
import inspect
import pickle
import subprocess
import sys
import threading
from collections import Counter
from typing import TypedDict

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Unpack

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

import oracles  # noqa: E402
from liger_rl import linear_logprobs  # noqa: E402
from liger_rl.integrations.transformers import (  # noqa: E402
    FusedCausalLMOutput,
    is_swapped,
    swap_lm_head,
    unswap_lm_head,
)
from liger_rl.kernels import gemm  # noqa: E402

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
GPT2_SIZES = {
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "loss_type": "ForCausalLM",
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
OPT_SIZES = {"ffn_dim": 48, "word_embed_proj_dim": HIDDEN, "dropout": 0.0}

# One model of every convention for what follows the head: name -> (config class, options).
CONFIGS = {
    "llama": ("LlamaConfig", SIZES),
    "qwen3": ("Qwen3Config", {**SIZES, "head_dim": 8}),
    "gemma2": ("Gemma2Config", {**SIZES, "head_dim": 8, "final_logit_softcapping": 3.0}),
    "granite": ("GraniteConfig", {**SIZES, "logits_scaling": 4.0}),  # divides
    "hyperclovax": ("HyperCLOVAXConfig", {**SIZES, "logits_scaling": 1.5}),  # multiplies
    "cohere": ("CohereConfig", {**SIZES, "logit_scale": 0.25}),
    "falcon_h1": ("FalconH1Config", {**SIZES, **MAMBA, "head_dim": 8, "lm_head_multiplier": 0.5}),
    "phi": ("PhiConfig", SIZES),  # a bias on the head
    "gpt2": ("GPT2Config", {**GPT2_SIZES, **NO_DROPOUT}),  # tied
    "opt": ("OPTConfig", {**SIZES, **OPT_SIZES}),
    "mixtral": (
        "MixtralConfig",
        # Experts one at a time, because grouped products know no float64.
        {
            **SIZES,
            "num_local_experts": 4,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.1,
            "experts_implementation": "eager",
        },
    ),
}

on_every_device = pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))],
)
on_every_model = pytest.mark.parametrize("name", CONFIGS)
on_low_precision_models = pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "cohere", "phi", "mixtral"])


@torch.no_grad()
def build(name: str, device: str = "cpu", **overrides) -> transformers.PreTrainedModel:
    """Random weights, three times the usual size and the head's more, so that the distributions are far from flat."""
    config_class, options = CONFIGS[name]
    config = getattr(transformers, config_class)(**{**options, **overrides})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(3)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.get_output_embeddings().weight.mul_(5)
    return model.to(device)


def make_batch(device: str = "cpu", vocab: int = VOCAB) -> dict[str, Tensor]:
    """Rows padded on the right by 0, 3 and 6 tokens; the first two tokens of each are a prompt without labels."""
    ids = torch.randint(3, vocab, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([LENGTH, LENGTH - 3, LENGTH - 6])
    attention_mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    ids = torch.where(attention_mask == 1, ids, 0)
    labels = torch.where(attention_mask == 1, ids, -100)
    labels[:, :2] = -100
    batch = {"input_ids": ids, "attention_mask": attention_mask, "labels": labels}
    return {key: value.to(device) for key, value in batch.items()}


def from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """(B, T, V) logits of the plain forward -> log-probabilities and entropies, aligned with the labels."""
    log_p = torch.log_softmax(logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32)) / temperature, -1)
    targets = labels[:, 1:]
    counted = targets != -100
    logps = log_p.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)

    def spread(values: Tensor) -> Tensor:
        return nn.functional.pad(torch.where(counted, values, 0.0), (1, 0))

    return spread(logps), spread(entropy)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


def assert_close(actual: Tensor, plain: Tensor, exact: Tensor, what: str, rounding: float, slack: float = 2.0) -> None:
    """|actual - exact| <= slack |plain - exact| + rounding, in the Euclidean norm."""
    assert actual.shape == plain.shape == exact.shape, what
    error = (actual.double() - exact.double()).norm().item()
    allowed = (plain.double() - exact.double()).norm().item()
    assert error <= slack * allowed + rounding, f"{what}: error {error:.2e}, the plain forward's is {allowed:.2e}"


def whole(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[key].double().flatten() for key in sorted(tensors)])


def assert_gradients_close(actual: dict, plain: dict, exact: dict, *, slack: float = 4.0) -> None:
    """Together within twice the plain forward's error and one rounding, each parameter within `slack` times its own.

    A small parameter's error is a draw of few roundings, most of them made in the layers before the head: two draws
    of one spread differ by more than two sums of all of them do (on a GPU by up to 2.6).
    """
    assert actual.keys() == plain.keys() == exact.keys()
    dtype = next(iter(plain.values())).dtype
    size = whole(exact).norm().item()
    assert size > 1e-2, "a gradient that is all but zero would test nothing"
    assert_close(whole(actual), whole(plain), whole(exact), "gradient", torch.finfo(dtype).eps * size, slack=2.0)
    for key in plain:
        # Parameters that cannot change the loss (a key's bias) have gradients of nothing but rounding.
        rounding = torch.finfo(dtype).eps * max(exact[key].double().norm().item(), 0.1 * size)
        assert_close(actual[key], plain[key], exact[key], f"gradient of {key}", rounding, slack)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def assert_same_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


# --- the same numbers -------------------------------------------------------------------------------------------------


@on_every_device
@on_every_model
def test_log_probabilities_entropy_loss_and_gradients_are_those_of_the_full_logits(name, device):
    model, batch = build(name, device), make_batch(device)
    exact_model = copy.deepcopy(model).double()
    exact_output = exact_model(**batch)
    exact_gradients = gradients(exact_model, exact_output.loss)
    exact_logps, exact_entropy = from_logits(exact_output.logits.detach(), batch["labels"])
    plain_output = model(**batch)
    plain_gradients = gradients(model, plain_output.loss)
    plain_logps, plain_entropy = from_logits(plain_output.logits.detach(), batch["labels"])
    assert exact_logps.std() > 0.5, "logits too flat to tell conventions apart"

    swap_lm_head(model)
    output = model(**batch, fused=True, entropy=True)
    assert isinstance(output, FusedCausalLMOutput)
    assert output.per_token_logps.dtype == output.entropy.dtype == output.loss.dtype == torch.float32
    dead = nn.functional.pad(batch["labels"][:, 1:] == -100, (1, 0), value=True)
    for values in (output.per_token_logps, output.entropy):
        assert (values[dead] == 0).all()
        assert (values[~dead] != 0).all()

    eps = torch.finfo(torch.float32).eps
    rounding = eps * exact_logps.norm().item()
    assert_close(output.per_token_logps.detach(), plain_logps, exact_logps, "logps", rounding)
    assert_close(output.entropy.detach(), plain_entropy, exact_entropy, "entropy", eps * exact_entropy.norm().item())
    # A mean is no further off than the mean of its terms is, plus the roundings of its sum.
    loss_error = abs(output.loss.item() - exact_output.loss.item())
    token_error = (plain_logps - exact_logps)[~dead].abs().mean().item()
    assert loss_error <= 2 * token_error + 4 * eps * exact_output.loss.item()
    assert_gradients_close(gradients(model, output.loss), plain_gradients, exact_gradients)


def test_the_router_loss_is_part_of_the_loss_and_of_the_gradient():
    model, batch = swap_lm_head(build("mixtral")), make_batch()
    output = model(**batch, fused=True)
    count = (batch["labels"][:, 1:] != -100).sum()
    cross_entropy = -output.per_token_logps.sum() / count
    plain = model(**batch)
    torch.testing.assert_close(output.aux_loss, plain.aux_loss, rtol=0, atol=0)
    assert output.aux_loss > 1.0
    torch.testing.assert_close(output.loss - cross_entropy, 0.1 * output.aux_loss, rtol=1e-5, atol=1e-6)
    router = "model.layers.0.mlp.gate.weight"
    with_router = gradients(model, output.loss)[router]
    without = gradients(model, -model(**batch, fused=True).per_token_logps.sum() / count)[router]
    assert (with_router - without).norm() > 0.01 * without.norm()


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi", "cohere"])
@on_every_device
def test_any_loss_of_log_probabilities_and_entropy_at_a_temperature(name, device):
    model, batch = build(name, device), make_batch(device)
    generator = torch.Generator().manual_seed(2)
    weights, entropy_weights = (torch.randn(BATCH, LENGTH, generator=generator).to(device) for _ in range(2))

    def full(model):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        logps, entropy = from_logits(logits, batch["labels"], temperature=0.7)
        return (weights * logps + entropy_weights * entropy).sum()

    exact_model = copy.deepcopy(model).double()
    exact, plain = gradients(exact_model, full(exact_model)), gradients(model, full(model))
    swap_lm_head(model)
    output = model(**batch, fused=True, entropy=True, temperature=0.7)
    loss = (weights * output.per_token_logps + entropy_weights * output.entropy).sum()
    assert_gradients_close(gradients(model, loss), plain, exact)
    # The probed transform is the model's own, the temperature the call's.
    assert not torch.allclose(model(**batch, fused=True).per_token_logps, output.per_token_logps, atol=1e-2)


@on_low_precision_models
@on_every_device
def test_bfloat16_stays_within_twice_the_error_of_full_logits_in_bfloat16(name, device):
    """Most of either error is rounding in the layers before the head, so one may be a little above the other.

    What the head alone adds is held to float32 by the next test.
    """
    ids = torch.randint(3, VOCAB, (8, 48), generator=torch.Generator().manual_seed(1)).to(device)
    labels = ids.masked_fill(torch.arange(48, device=device) < 2, -100)
    batch = {"input_ids": ids, "labels": labels}
    exact_model = build(name, device).bfloat16().float()  # the same weights
    model = build(name, device).bfloat16()
    exact_output, plain_output = exact_model(**batch), model(**batch)
    exact, plain = gradients(exact_model, exact_output.loss), gradients(model, plain_output.loss)
    exact_logps, exact_entropy = from_logits(exact_output.logits.detach(), labels)
    plain_logps, plain_entropy = from_logits(plain_output.logits.detach(), labels)
    swap_lm_head(model)
    output = model(**batch, fused=True, entropy=True)
    eps = torch.finfo(torch.bfloat16).eps
    for what, mine, other, truth in (
        ("logps", output.per_token_logps, plain_logps, exact_logps),
        ("entropy", output.entropy, plain_entropy, exact_entropy),
    ):
        assert_close(mine.detach(), other, truth, what, eps * truth.norm().item())
    assert_gradients_close(gradients(model, output.loss), plain, exact)


@on_low_precision_models
@on_every_device
def test_the_head_of_a_bfloat16_model_rounds_no_logit(name, device):
    """Given the hidden states the model makes in bfloat16, outputs are as exact as those of float32 logits."""
    model, batch = swap_lm_head(build(name, device).bfloat16()), make_batch(device)
    seen = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda head, args: seen.append(args[0]))
    with torch.no_grad():
        model(**batch)
        handle.remove()
        head, results = model.get_output_embeddings(), []
        for dtype in (torch.float64, torch.float32):
            bias = None if head.bias is None else head.bias.to(dtype)
            z = nn.functional.linear(seen[0].to(dtype), head.weight.to(dtype), bias)
            if name == "gemma2":
                z = 3.0 * torch.tanh(z / 3.0)
            if name == "cohere":
                z = 0.25 * z
            if name == "granite":
                z = z / model.config.logits_scaling
            results.append(from_logits(z, batch["labels"]))
        fused = model(**batch, fused=True, entropy=True)
    for found, exact, eager in zip((fused.per_token_logps, fused.entropy), *results, strict=True):
        assert oracles.max_error(found, exact) <= oracles.error_budget(eager, exact, torch.float32)


def test_autocast():
    """Float32 weights, bfloat16 products: the plain forward rounds its logits, the fused head does not."""
    model, batch = build("llama"), make_batch()
    exact_output = model(**batch)
    exact = gradients(model, exact_output.loss)
    exact_logps, _ = from_logits(exact_output.logits.detach(), batch["labels"])
    with torch.autocast("cpu", torch.bfloat16):
        plain_output = model(**batch)
    assert plain_output.logits.dtype == torch.bfloat16
    plain = gradients(model, plain_output.loss)
    plain_logps, _ = from_logits(plain_output.logits.detach(), batch["labels"])
    swap_lm_head(model)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**batch, fused=True)
    assert output.per_token_logps.dtype == torch.float32
    actual, eps = gradients(model, output.loss), torch.finfo(torch.bfloat16).eps
    assert all(g.dtype == torch.float32 for g in actual.values())
    for what, *tensors in (
        ("logps", output.per_token_logps.detach(), plain_logps, exact_logps),
        ("gradient", whole(actual), whole(plain), whole(exact)),
    ):
        assert_close(*tensors, what, eps * tensors[-1].norm().item())


def test_num_items_in_batch_divides_as_the_trainer_wants_it():
    model, batch = swap_lm_head(build("mixtral")), make_batch()
    for count in (57, torch.tensor(57)):
        plain = model(**batch, num_items_in_batch=count).loss
        fused = model(**batch, num_items_in_batch=count, fused=True).loss
        torch.testing.assert_close(fused, plain)
    assert not torch.allclose(fused, model(**batch, fused=True).loss, rtol=1e-2)


def test_the_heads_gradient_is_added_in_place():
    model = swap_lm_head(build("llama"))
    batch = make_batch()
    expected = gradients(model, model(**batch, fused=True).loss)
    total = torch.ones_like(model.lm_head.weight)
    found = gradients(model, model(**batch, fused=True, weight_grad=total.detach()).loss)
    torch.testing.assert_close(total, expected.pop("lm_head.weight") + 1)
    assert_same_tensors(found, expected)


def test_shift_labels_are_taken_as_they_are():
    model, batch = swap_lm_head(build("gemma2")), make_batch()
    labels = batch.pop("labels")
    shift_labels = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    shifted = model(**batch, shift_labels=shift_labels, fused=True, entropy=True)
    unshifted = model(**batch, labels=labels, fused=True, entropy=True)
    assert torch.equal(shifted.loss, unshifted.loss)
    assert torch.equal(shifted.per_token_logps[:, :-1], unshifted.per_token_logps[:, 1:])
    assert torch.equal(shifted.entropy[:, :-1], unshifted.entropy[:, 1:])
    assert (shifted.per_token_logps[:, -1] == 0).all()
    # The last position may have a label of its own, which unshifted labels cannot express.
    shift_labels[0, -1] = 7
    last = model(**batch, shift_labels=shift_labels, fused=True).per_token_logps[0, -1]
    expected = torch.log_softmax(model(**batch).logits[0, -1].float(), -1)[7]
    torch.testing.assert_close(last, expected)


def test_a_batch_without_labels_has_loss_zero_and_no_gradient():
    model, batch = swap_lm_head(build("llama")), make_batch()
    output = model(**{**batch, "labels": torch.full_like(batch["labels"], -100)}, fused=True, entropy=True)
    assert output.loss.item() == 0
    assert (output.per_token_logps == 0).all()
    assert (output.entropy == 0).all()
    assert all((g == 0).all() for g in gradients(model, output.loss).values())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant):
    model, batch = swap_lm_head(build("qwen3")), make_batch()
    model.train()
    expected = gradients(model, model(**batch, fused=True).loss)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    layer, calls = model.model.layers[0].mlp, []
    handle = layer.register_forward_pre_hook(lambda *_: calls.append(1))
    actual = gradients(model, model(**batch, fused=True).loss)
    handle.remove()
    assert len(calls) == 2, "the layer was not recomputed"
    assert_same_tensors(actual, expected)


def test_dropout_draws_the_same_random_numbers():
    model, batch = swap_lm_head(build("gpt2", resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)).train(), make_batch()
    torch.manual_seed(3)
    plain = model(**batch).loss
    torch.manual_seed(3)
    fused = model(**batch, fused=True).loss
    torch.testing.assert_close(fused, plain)
    assert not torch.allclose(model(**batch, fused=True).loss, plain, rtol=1e-3)


def test_frozen_parameters_get_no_gradient():
    model, batch = swap_lm_head(build("llama")), make_batch()
    expected = gradients(model, model(**batch, fused=True).loss)
    model.lm_head.weight.requires_grad_(False)
    actual = gradients(model, model(**batch, fused=True).loss)
    expected.pop("lm_head.weight")
    assert_same_tensors(actual, expected)


def test_a_model_without_gradients_and_with_what_else_it_returns():
    model, batch = swap_lm_head(build("llama")), make_batch()
    with torch.no_grad():
        options = {"output_hidden_states": True, "use_cache": True}
        plain, fused = model(**batch, **options), model(**batch, **options, fused=True)
    assert not fused.loss.requires_grad
    assert fused.entropy is None
    assert len(fused.hidden_states) == len(plain.hidden_states) == 3
    assert all(torch.equal(a, b) for a, b in zip(fused.hidden_states, plain.hidden_states, strict=True))
    assert fused.past_key_values.get_seq_length() == LENGTH


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_unlabelled_positions_are_not_projected(monkeypatch):
    model, batch = swap_lm_head(build("llama")), make_batch()
    products, plain_matmul = [], gemm.matmul

    def recorded(a, b):
        products.append((a.shape[0], b.shape[1]))
        return plain_matmul(a, b)

    monkeypatch.setattr(gemm, "matmul", recorded)
    loss = model(**batch, fused=True).loss
    labelled = int((batch["labels"][:, 1:] != -100).sum())
    assert 0 < labelled < BATCH * (LENGTH - 1)
    assert sum(rows * columns for rows, columns in products) == labelled * VOCAB
    products.clear()
    loss.backward()
    assert sum(rows * columns for rows, columns in products) == labelled * VOCAB


class _Recorder(TorchDispatchMode):
    """Shapes of all tensors that operations return."""

    def __init__(self):
        super().__init__()
        self.shapes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.shapes[tuple(tensor.shape)] += 1
        return out


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_no_tensor_has_all_logits_of_a_token(name):
    """With more words and tokens than fit a tile, nothing but weights has the vocabulary as a side."""
    vocab, length = 8192, 1024
    model = build(name, vocab_size=vocab, max_position_embeddings=length)
    swap_lm_head(model)
    ids = torch.randint(3, vocab, (1, length), generator=torch.Generator().manual_seed(1))

    def recorded(**options):
        with _Recorder() as recorder:
            model(input_ids=ids, labels=ids, use_cache=False, **options).loss.backward()
        return {shape for shape in recorder.shapes if vocab in shape}

    weights = {(vocab, HIDDEN), (HIDDEN, vocab)}
    assert recorded(fused=True, entropy=True) <= weights
    assert (1, length, vocab) in recorded()


# --- nothing else is changed ------------------------------------------------------------------------------------------


@on_every_model
def test_generate_and_the_plain_forward_are_the_same_before_swapped_and_after(name):
    # With a cache and an attention mask, transformers' own generate cannot weigh router logits.
    model = build(name, **({"output_router_logits": False} if name == "mixtral" else {})).eval()
    batch = make_batch()
    prompt = batch["input_ids"][:, :5]

    def observed():
        torch.manual_seed(5)
        with torch.no_grad():
            tokens = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, min_new_tokens=6, do_sample=True
            )
            output = model(**batch)
        return {"tokens": tokens, "logits": output.logits, "loss": output.loss}

    before, model_class = observed(), type(model)
    assert len(before["tokens"][:, 5:].unique()) > 3, "a model that repeats one word would test little"
    swap_lm_head(model)
    assert type(model) is not model_class
    assert_same_tensors(observed(), before)
    with torch.no_grad():
        model(**batch, fused=True)
    assert_same_tensors(observed(), before)
    unswap_lm_head(model)
    assert type(model) is model_class
    assert_same_tensors(observed(), before)


def test_swap_and_unswap_leave_parameters_attributes_and_random_numbers_alone():
    model = build("gpt2", resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3).train()
    parameters, state, attributes = dict(model.named_parameters()), state_of(model), set(vars(model))
    head_attributes, hooks = set(vars(model.get_output_embeddings())), hooks_of(model.get_output_embeddings())
    before = torch.get_rng_state()
    assert swap_lm_head(model) is model
    assert is_swapped(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p is parameters[key] for key, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    assert_same_tensors(state_of(model), state)
    assert model.training
    assert unswap_lm_head(model) is model
    assert not is_swapped(model)
    assert set(vars(model)) == attributes
    assert set(vars(model.get_output_embeddings())) == head_attributes
    assert hooks_of(model.get_output_embeddings()) == hooks
    assert_same_tensors(state_of(model), state)


@on_every_device
def test_the_default_device_has_no_say(device):
    """Scripts build and swap their models under `torch.device`."""
    model, batch = build("llama", device), make_batch(device)
    with torch.device(device):
        assert swap_lm_head(model)(**batch, fused=True).loss.isfinite()


def test_swapping_and_unswapping_twice_is_harmless():
    model, batch = build("gemma2"), make_batch()
    model_class = type(model)
    assert not is_swapped(unswap_lm_head(model))
    once = swap_lm_head(model)(**batch, fused=True).per_token_logps
    swapped_class = type(model)
    assert type(swap_lm_head(model)) is swapped_class
    assert torch.equal(model(**batch, fused=True).per_token_logps, once)
    assert type(unswap_lm_head(model)) is model_class
    assert type(unswap_lm_head(model)) is model_class
    assert torch.equal(swap_lm_head(model)(**batch, fused=True).per_token_logps, once)


@pytest.mark.parametrize("name", ["gpt2", "opt", "cohere"])
def test_tied_weights_stay_tied(name):
    model, batch = build(name), make_batch()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert head.weight is embedding.weight
    swap_lm_head(model)
    assert model.get_output_embeddings() is head
    assert head.weight is embedding.weight
    assert head.weight.data_ptr() == embedding.weight.data_ptr()
    both = gradients(model, model(**batch, fused=True).loss)
    tied = next(key for key, p in model.named_parameters() if p is head.weight)
    # Each use alone, by untying a copy: their sum is the gradient of the tied weight.
    head.weight = nn.Parameter(head.weight.detach().clone())
    model.zero_grad()
    model(**batch, fused=True).loss.backward()
    of_head, of_embedding = head.weight.grad, embedding.weight.grad
    assert of_head.norm() > 0.01 * both[tied].norm()
    assert of_embedding.norm() > 0.01 * both[tied].norm()
    torch.testing.assert_close(both[tied], of_head + of_embedding)


def test_a_deep_copy_is_swapped_and_independent():
    model, batch = swap_lm_head(build("cohere")), make_batch()
    expected = model(**batch, fused=True).per_token_logps
    twin = copy.deepcopy(model)
    assert torch.equal(twin(**batch, fused=True).per_token_logps, expected)
    with torch.no_grad():
        twin.get_output_embeddings().weight.mul_(2)
    assert not torch.allclose(twin(**batch, fused=True).per_token_logps, expected, atol=1e-2)
    assert torch.equal(model(**batch, fused=True).per_token_logps, expected)
    unswap_lm_head(twin)
    assert is_swapped(model)
    assert torch.equal(model(**batch, fused=True).per_token_logps, expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_saved_model_is_the_models_own(name, tmp_path):
    model, batch = swap_lm_head(build(name)).eval(), make_batch()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model).__mro__[2]
    assert loaded.config.architectures == [type(loaded).__name__]
    assert not is_swapped(loaded)
    assert_same_tensors(state_of(loaded), state_of(model))
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    expected = model(**batch, fused=True).per_token_logps
    assert torch.equal(swap_lm_head(loaded)(**batch, fused=True).per_token_logps, expected)
    # Loading by way of a swapped model's class gives a plain, working model too.
    assert torch.equal(model.from_pretrained(tmp_path)(**batch).logits, model(**batch).logits)


def test_the_signature_names_the_columns_of_a_data_set():
    model = build("llama")
    before = inspect.signature(model.forward)
    after = inspect.signature(swap_lm_head(model).forward)
    assert {"input_ids", "attention_mask", "labels"} <= set(after.parameters)
    assert after.parameters.keys() == before.parameters.keys()


def test_hooks_on_the_model_still_run():
    model, batch = swap_lm_head(build("llama")), make_batch()
    outputs = []
    handle = model.register_forward_hook(lambda module, args, output: outputs.append(output))
    output = model(**batch, fused=True)
    handle.remove()
    assert len(outputs) == 1
    assert outputs[0] is output


def test_a_training_loop_of_transformers(tmp_path):
    """The Trainer, with the collator asking for the fused head, takes the steps it takes with full logits."""
    generator = torch.Generator().manual_seed(4)
    rows = [{"input_ids": torch.randint(3, VOCAB, (LENGTH,), generator=generator)} for _ in range(16)]
    for row in rows:
        row["labels"] = row["input_ids"].clone()
        row["labels"][:3] = -100
        row["comment"] = "a column that the model does not take"

    def collate(features, **options):
        assert all(feature.keys() == {"input_ids", "labels"} for feature in features)
        return {key: torch.stack([feature[key] for feature in features]) for key in features[0]} | options

    def trained(model, **options):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=8,
            learning_rate=5e-3,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            use_cpu=True,
            seed=0,
        )
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=rows,
            data_collator=lambda features: collate(features, **options),
        )
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    plain, fused = build("llama"), swap_lm_head(build("llama"))
    plain_losses, fused_losses = trained(plain), trained(fused, fused=True)
    assert len(fused_losses) == 8
    assert fused_losses[-1] < 0.8 * fused_losses[0]
    torch.testing.assert_close(torch.tensor(fused_losses), torch.tensor(plain_losses), rtol=1e-3, atol=0)


# --- several callers --------------------------------------------------------------------------------------------------


def in_threads(*calls) -> list[list]:
    """What each of `calls` gives, 50 times over, while the others run in threads of their own."""
    results, start = [[] for _ in calls], threading.Barrier(len(calls))

    def run(call, found):
        start.wait()
        with torch.no_grad():
            for _ in range(50):
                found.append(call())

    threads = [threading.Thread(target=run, args=pair) for pair in zip(calls, results, strict=True)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert [len(found) for found in results] == [50] * len(calls), "a thread raised"
    return results


@pytest.mark.parametrize("body", ["eager", "compiled around a graph break"])
def test_threads_that_share_a_model_get_what_each_of_them_asks_for(body):
    model, batch = swap_lm_head(build("gemma2")), make_batch()
    if body != "eager":
        model.model.layers[0].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    call = model if body == "eager" else torch.compile(model, backend="eager")
    others = {**batch, "labels": batch["labels"].roll(1, 0)}
    calls = [
        lambda: call(**batch).logits,
        lambda: call(**batch, fused=True).per_token_logps,
        lambda: call(**others, fused=True, temperature=0.5).per_token_logps,
    ]
    with torch.no_grad():
        expected = [call() for call in calls]
    for found, value in zip(in_threads(*calls), expected, strict=True):
        assert all(torch.equal(result, value) for result in found)
    assert not torch.equal(expected[1], expected[2])


def test_threads_may_swap_one_model():
    model, batch = build("llama"), make_batch()
    model_class = type(model)
    in_threads(*[lambda: swap_lm_head(model)(**batch, fused=True)] * 3)
    assert type(unswap_lm_head(model)) is model_class


@pytest.mark.parametrize("head", ["its own", "the policy's"])
def test_a_reference_models_call_inside_the_policys(head):
    policy, reference, batch = swap_lm_head(build("llama")), build("gemma2"), make_batch()
    if head != "its own":
        reference.lm_head = policy.lm_head
    swap_lm_head(reference)
    expected = [model(**batch, fused=True).per_token_logps for model in (policy, reference)]
    inside = []
    policy.model.register_forward_hook(lambda *_: inside.append(reference(**batch, fused=True).per_token_logps) or None)
    assert torch.equal(policy(**batch, fused=True).per_token_logps, expected[0])
    assert torch.equal(inside[0], expected[1])
    plain = []
    policy.model.register_forward_hook(lambda *_: plain.append(reference(batch["input_ids"]).logits) or None)
    if head == "its own":
        assert policy(**batch, fused=True).loss.isfinite()
        assert plain[0].shape == (BATCH, LENGTH, VOCAB)
    else:  # the one head cannot know whose call it is, and does not guess
        with pytest.raises(ValueError, match="called its head twice"):
            policy(**batch, fused=True)


def replica_of(module: nn.Module) -> nn.Module:
    """As `nn.parallel.replicate` makes them, with weights that are twice the module's."""
    replica = module._replicate_for_data_parallel()
    for name, parameter in module._parameters.items():
        setattr(replica, name, None if parameter is None else 2 * parameter.detach())
    for name, child in module._modules.items():
        if child is not None:
            replica._modules[name] = replica_of(child)
    return replica


def test_a_replica_runs_with_its_own_weights():
    model, batch = build("llama"), make_batch()
    twice = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twice.parameters():
            parameter.mul_(2)
    replica = replica_of(swap_lm_head(model))
    assert torch.equal(replica(**batch).logits, twice(**batch).logits)
    expected = swap_lm_head(twice)(**batch, fused=True).per_token_logps
    assert torch.equal(replica(**batch, fused=True).per_token_logps, expected)


def test_the_heads_weight_is_cast_once_under_autocast():
    """The head's own forward runs in a fused call too, and must not make a copy of its weight."""
    model, batch = swap_lm_head(build("llama")), make_batch()
    casts = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and tuple(out.shape) == (VOCAB, HIDDEN):
                casts.append(out.dtype)
            return out

    with Casts(), torch.autocast("cpu", torch.bfloat16):
        model(**batch, fused=True)
    assert casts == [torch.bfloat16]


# --- copies and classes -----------------------------------------------------------------------------------------------

LOAD = """
import sys, torch
model, batch = torch.load(sys.argv[1], weights_only=False)
torch.save([model(**batch, fused=True).per_token_logps, model(**batch).logits], sys.argv[2])
"""


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_pickled_model_is_swapped_in_another_process(name, tmp_path):
    model, batch = swap_lm_head(build(name)).eval(), make_batch()
    expected = [model(**batch, fused=True).per_token_logps, model(**batch).logits]
    torch.save((model, batch), tmp_path / "model")
    subprocess.run([sys.executable, "-c", LOAD, tmp_path / "model", tmp_path / "results"], check=True)
    for found, value in zip(torch.load(tmp_path / "results"), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=0)


@pytest.mark.parametrize(
    "copied",
    [copy.copy, *(functools.partial(lambda p, model: pickle.loads(pickle.dumps(model, p)), p) for p in (0, 2, 5))],
    ids=["copy", "pickle 0", "pickle 2", "pickle 5"],
)
def test_a_copy_is_of_the_same_class(copied):
    model, batch = swap_lm_head(build("cohere")).eval(), make_batch()
    twin = copied(model)
    assert type(twin) is type(model)
    assert is_swapped(twin)
    assert torch.equal(twin(**batch, fused=True).per_token_logps, model(**batch, fused=True).per_token_logps)
    assert torch.equal(twin(**batch).logits, model(**batch).logits)
    assert type(unswap_lm_head(twin)) is transformers.CohereForCausalLM
    assert is_swapped(model)


@pytest.mark.parametrize("made", ["built", "from config", "loaded"])
def test_the_class_of_a_swapped_model_makes_plain_models(made, tmp_path):
    """Of its own name, saved under it, and swapped when they are asked to be."""
    model, batch = swap_lm_head(build("llama")).eval(), make_batch()
    swapped_class = type(model)
    assert (swapped_class.__name__, swapped_class.__qualname__) == ("LlamaForCausalLM",) * 2
    if made == "loaded":
        model.save_pretrained(tmp_path)
        other = swapped_class.from_pretrained(tmp_path)
        assert_same_tensors(state_of(other), state_of(model))
    else:
        other = (swapped_class if made == "built" else swapped_class._from_config)(model.config)
    assert type(other) is transformers.LlamaForCausalLM
    assert not is_swapped(other)
    assert other.eval()(**batch).logits.shape == (BATCH, LENGTH, VOCAB)
    assert "fused" not in inspect.signature(other.forward).parameters
    assert inspect.signature(swapped_class.__init__) == inspect.signature(type(other).__init__)
    assert swap_lm_head(other)(**batch, fused=True).loss.isfinite()
    assert type(other) is swapped_class


# --- what is refused --------------------------------------------------------------------------------------------------


def test_labels_are_needed_once():
    model, batch = swap_lm_head(build("llama")), make_batch()
    labels = batch.pop("labels")
    with pytest.raises(ValueError, match="labels or shift_labels must be given"):
        model(**batch, fused=True)
    with pytest.raises(ValueError, match="labels or shift_labels must be given"):
        model(**batch, labels=labels, shift_labels=labels, fused=True)


@pytest.mark.parametrize("logits_to_keep", [1, LENGTH, torch.arange(3)], ids=["one", "all", "positions"])
def test_logits_to_keep_is_refused(logits_to_keep):
    model, batch = swap_lm_head(build("llama")), make_batch()
    with pytest.raises(ValueError, match="logits_to_keep has no meaning"):
        model(**batch, fused=True, logits_to_keep=logits_to_keep)


def test_another_ignore_index_is_refused():
    model, batch = swap_lm_head(build("llama")), make_batch()
    with pytest.raises(ValueError, match="ignore_index must be -100"):
        model(**batch, fused=True, ignore_index=-1)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.full((BATCH, LENGTH - 1), 5), r"\(3, 13\)"),
        (torch.full((BATCH * LENGTH,), 5), r"labels must be \(B, T\)"),
        (torch.full((BATCH, LENGTH), VOCAB), rf"\[0, {VOCAB}\)"),
        (torch.full((BATCH, LENGTH), 5.0), "float32"),
        ([[5] * LENGTH] * BATCH, "labels must be a tensor, got list"),
    ],
    ids=["short", "flat", "outside the vocabulary", "not integers", "not a tensor"],
)
def test_bad_labels_are_refused_and_the_model_stays_usable(labels, message):
    model, batch = swap_lm_head(build("llama")), make_batch()
    expected, expected_fused = model(**batch).logits, model(**batch, fused=True).loss
    with pytest.raises((ValueError, TypeError), match=message):
        model(**{**batch, "labels": labels}, fused=True)
    assert "forward" not in vars(model.lm_head)
    assert torch.equal(model(**batch).logits, expected)
    assert torch.equal(model(**batch, fused=True).loss, expected_fused)


MISSPELT = ["temprature", "mask", "extras", "entropies", "lables", "num_items", "chunk_token", "weight_gradient"]


@on_every_model
def test_an_argument_that_nothing_takes_is_refused(name):
    model, batch = swap_lm_head(build(name)), make_batch()
    model.base_model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    for misspelt in MISSPELT:
        with pytest.raises(
            TypeError, match=rf"{type(model).__name__} takes no {misspelt} with fused=True.* temperature, "
        ):
            model(**batch, fused=True, **{misspelt: 1.0})


def test_arguments_of_the_model_go_through():
    """Those of its signature, of transformers' TypedDict, and those that only its body's forwards know."""
    model, batch = swap_lm_head(build("mixtral")), make_batch()
    seen = []
    model.model.layers[1].self_attn.register_forward_pre_hook(lambda m, a, kw: seen.append(kw), with_kwargs=True)
    given = {
        "position_ids": torch.arange(LENGTH).expand(BATCH, -1),
        "cu_seq_lens_q": torch.tensor([0, LENGTH]),
        "max_length_q": LENGTH,
        "output_router_logits": False,
        "use_cache": False,
        "logits_to_keep": 0,
        "ignore_index": -100,
        "return_dict": True,
    }
    assert model(**batch, **given, fused=True).aux_loss is None
    assert seen[0]["cu_seq_lens_q"] is given["cu_seq_lens_q"]
    assert seen[0]["max_length_q"] == LENGTH


class _Options(TypedDict, total=False):
    typed: int


class _RemoteLlama(transformers.LlamaForCausalLM):
    """As code from the hub has it: a bare **kwargs, some names read out of it, and annotations that nobody imports."""

    def forward(self, input_ids: "Ids" = None, **kwargs) -> "Output":  # noqa: F821
        self.seen = kwargs.pop("quoted", None)
        return super().forward(input_ids, **kwargs)


class _TypedLlama(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs: Unpack[_Options]):
        options = dict(kwargs)
        self.seen = options.pop(min(_Options.__optional_keys__), None)
        return super().forward(*args, **options)


@pytest.mark.parametrize(("model_class", "name"), [(_RemoteLlama, "quoted"), (_TypedLlama, "typed")])
def test_a_models_own_keywords_go_through(model_class, name):
    torch.manual_seed(0)
    model, batch = swap_lm_head(model_class(transformers.LlamaConfig(**SIZES))), make_batch()
    assert model(**batch, **{name: 5}, fused=True).loss.isfinite()
    assert model.seen == 5
    with pytest.raises(TypeError, match=f"{model_class.__name__} takes no temprature"):
        model(**batch, temprature=0.5, fused=True)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf")])
def test_a_temperature_that_is_none_is_refused(temperature):
    model, batch = swap_lm_head(build("llama")), make_batch()
    with pytest.raises(ValueError, match="temperature"):
        model(**batch, fused=True, temperature=temperature)


def test_a_failure_inside_the_model_leaves_the_head_as_it_was():
    model, batch = swap_lm_head(build("llama")), make_batch()
    expected = model(**batch).logits

    def fail(*_):
        raise RuntimeError("out of luck")

    handle = model.model.norm.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        model(**batch, fused=True)
    handle.remove()
    assert torch.equal(model(**batch).logits, expected)


class _Head(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, hidden):
        return self.linear(hidden)


class _ScaledLinear(nn.Linear):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


class _PlainLinear(nn.Linear):
    """Named differently, and nothing else."""


def _with_head(head_class: type) -> transformers.PreTrainedModel:
    model = build("llama")
    weight = model.lm_head.weight
    model.lm_head = head_class(HIDDEN, VOCAB, bias=False)
    model.lm_head.weight = weight
    return model


def hooks_of(head: nn.Module) -> list:
    return [list(hooks.items()) for hooks in (head._forward_pre_hooks, head._forward_hooks)]


def assert_refused(model, error: type, match: str) -> None:
    before, attributes, batch = type(model), set(vars(model)), make_batch()
    head = model.get_output_embeddings()
    expected, hooks = model(**batch).logits, hooks_of(head)
    with pytest.raises(error, match=match):
        swap_lm_head(model)
    assert type(model) is before
    assert set(vars(model)) == attributes
    assert hooks_of(head) == hooks
    assert torch.equal(model(**batch).logits, expected)


def test_a_head_that_is_no_linear_is_refused():
    model = build("llama")
    model.lm_head = _Head(model.lm_head)
    assert_refused(model, TypeError, r"head of LlamaForCausalLM must be an nn\.Linear, got _Head")


def test_a_linear_head_with_a_forward_of_its_own_is_refused():
    assert_refused(_with_head(_ScaledLinear), ValueError, "LlamaForCausalLM.*_ScaledLinear.*other than h @ W.T")


def test_a_hook_that_changes_the_heads_output_is_refused():
    model = build("llama")
    model.lm_head.register_forward_hook(lambda head, args, output: output * 2)
    assert_refused(model, ValueError, "LlamaForCausalLM.*other than h @ W.T")


def test_a_linear_head_of_another_name_is_accepted():
    model, batch = _with_head(_PlainLinear), make_batch()
    expected = swap_lm_head(build("llama"))(**batch, fused=True).per_token_logps
    assert torch.equal(swap_lm_head(model)(**batch, fused=True).per_token_logps, expected)


class _ShiftedLlama(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + 1
        return output


class _SquaredLlama(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits**2
        return output


class _SlightlyScaledLlama(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.01
        return output


class _BannedWordLlama(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits[..., 3] = -1e4
        return output


class _HeadlessLlama(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, **kwargs):
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = nn.functional.linear(hidden, self.lm_head.weight)
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits)


class _TwiceHeadedLlama(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, **kwargs):
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = self.lm_head(hidden) + self.lm_head(hidden.flip(0))
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits)


@pytest.mark.parametrize(
    ("model_class", "message"),
    [
        # Both sets of numbers: what went in, and what came out.
        (_ShiftedLlama, r"it maps logits \(-60\.0, .*50\.0\) to \[-59\.0, .*51\.0\]"),
        (_SquaredLlama, r"it maps logits \(-60\.0, .*50\.0\) to \[3600\.0, .*2500\.0\]"),
        (_SlightlyScaledLlama, r"it maps logits \(-60\.0, .*50\.0\) to \[-60\.[56]"),
        (_BannedWordLlama, r"it maps logits \(-60\.0, .*50\.0\) to .*-10000\.0"),
        (_HeadlessLlama, "does not call it"),
        (_TwiceHeadedLlama, "called its head twice"),
    ],
)
def test_a_forward_that_does_something_unknown_is_refused(model_class, message):
    model = model_class(transformers.LlamaConfig(**SIZES))
    assert_refused(model, ValueError, f"{model_class.__name__}.*{message}")


def test_a_model_on_meta_is_refused():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with pytest.raises(ValueError, match="LlamaForCausalLM must be in memory"):
        swap_lm_head(model)
    assert type(model) is transformers.LlamaForCausalLM


def test_a_model_without_a_head_is_refused():
    model = transformers.LlamaModel(transformers.LlamaConfig(**SIZES))
    with pytest.raises(TypeError, match="LlamaModel"):
        swap_lm_head(model)
    assert type(model) is transformers.LlamaModel


@pytest.mark.parametrize("value", [None, "gpt2", nn.Linear(2, 3), transformers.LlamaForCausalLM])
def test_what_is_no_model_is_refused(value):
    with pytest.raises(TypeError, match="must be a transformers PreTrainedModel"):
        swap_lm_head(value)


def test_a_subclass_made_after_the_swap_has_to_be_undone_first():
    model = swap_lm_head(build("llama"))
    swapped_class = type(model)
    model.__class__ = type("Derived", (swapped_class,), {})
    with pytest.raises(ValueError, match="Derived was derived from the swapped class"):
        unswap_lm_head(model)
    model.__class__ = swapped_class
    assert type(unswap_lm_head(model)) is transformers.LlamaForCausalLM


def test_the_fused_call_is_linear_logprobs_of_the_models_last_hidden_state():
    """The documented meaning, spelt out with the library's own op."""
    model, batch = swap_lm_head(build("granite")), make_batch()
    hidden = model.model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    from liger_rl import LogitTransform

    expected = linear_logprobs(
        hidden[:, :-1], model.lm_head.weight, batch["labels"][:, 1:], transform=LogitTransform(scale=0.25)
    ).logps
    torch.testing.assert_close(model(**batch, fused=True).per_token_logps[:, 1:], expected)


def test_refuses_a_model_whose_forward_was_replaced_on_the_instance():
    """accelerate's mixed precision does that; it would hide the fused forward and swallow its arguments."""
    model = build("llama")
    model.forward = functools.partial(model.forward)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM was replaced on the instance"):
        swap_lm_head(model)
    assert type(model) is transformers.LlamaForCausalLM
    del model.forward
    swap_lm_head(model)
    model.forward = functools.partial(model.forward)
    with pytest.raises(ValueError, match="replaced after the swap"):
        unswap_lm_head(model)
    del model.forward
    assert unswap_lm_head(model) is model


def test_a_forward_of_its_own_class_on_the_instance_is_no_hindrance():
    """Removing accelerate's hooks leaves one behind."""
    model, batch = build("llama"), make_batch()
    expected = swap_lm_head(build("llama"))(**batch, fused=True).per_token_logps
    model.forward = model.forward
    assert torch.equal(swap_lm_head(model)(**batch, fused=True).per_token_logps, expected)
    assert "fused" not in inspect.signature(unswap_lm_head(model).forward).parameters
    assert model(**batch).logits.shape == (BATCH, LENGTH, VOCAB)


def test_refuses_a_model_that_is_not_causal():
    small = {"vocab_size": 211, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = transformers.BertConfig(**small, num_attention_heads=4)
    with pytest.raises(ValueError, match="BertForMaskedLM is not"):
        swap_lm_head(transformers.BertForMaskedLM(config))


def test_refuses_a_tuple():
    with pytest.raises(ValueError, match="return_dict"):
        swap_lm_head(build("llama"))(**make_batch(), fused=True, return_dict=False)


@pytest.mark.parametrize("change", ["another head", "a hook"])
def test_a_head_changed_after_the_swap_is_refused(change):
    """What an adapter or a hook adds would silently be left out of the log-probabilities."""
    model, batch = swap_lm_head(build("llama")), make_batch()

    class Adapted(nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden) + 1.0

    if change == "another head":
        model.lm_head = Adapted(32, VOCAB, bias=False)
    else:
        model.lm_head.register_forward_hook(lambda module, arguments, output: output * 2)
    with pytest.raises(ValueError, match="head of LlamaForCausalLM was a plain Linear when it was swapped"):
        model(**batch, fused=True)
