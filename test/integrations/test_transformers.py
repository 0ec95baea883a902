"""A model with a swapped head against its own full logits: same numbers, same gradients, nothing else changed."""

import copy
import functools
import inspect
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import forks
import oracles
from hf_models import (
    BATCH,
    CONVENTIONS,
    HIDDEN,
    LENGTH,
    VOCAB,
    assert_same_tensors,
    build,
    from_logits,
    fused_logps,
    gradients,
    make_batch,
    state_of,
    transformers,
)
from liger_rl import swap_lm_head
from liger_rl.models.swap import FusedCausalLMOutput, is_swapped, unswap_lm_head
from peaks import tensor_peak
from threads import in_threads

DROPOUT = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}


def swapped(name: str = "Llama", device="cpu", **overrides) -> transformers.PreTrainedModel:
    return swap_lm_head(build(name, device, **overrides))


# --- the same numbers -------------------------------------------------------------------------------------------------


# Model class -> what follows its head.
LOW_PRECISION = {
    "Llama": {},
    "Gemma2": {"softcap": 3.0},
    "Granite": {"scale": 0.25},
    "Cohere": {"scale": 0.25},
    "Phi": {},
    "Mixtral": {},
}


@pytest.mark.parametrize(("name", "transform"), LOW_PRECISION.items())
def test_a_bfloat16_model_is_as_close_to_float64_as_with_full_logits(name, transform, device):
    """Most of either error is rounding in the layers before the head. Given the hidden states that they make, the head
    is as exact as float32 logits. In float32: test_architectures.py.
    """
    model = build(name, device).bfloat16()
    ids = torch.randint(3, VOCAB, (8, 48), generator=torch.Generator().manual_seed(1)).to(device)
    batch = {"input_ids": ids, "labels": ids.masked_fill(torch.arange(48, device=device) < 2, -100)}
    seen, head = [], model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda head, args: seen.append(args[0].detach()))
    exact, plain = (
        (
            *from_logits((output := m(**batch)).logits.detach(), batch["labels"]),
            oracles.whole(gradients(m, output.loss)),
        )
        for m in (copy.deepcopy(model).double(), model)
    )
    handle.remove()
    output = swap_lm_head(model)(**batch, fused=True, entropy=True)
    assert isinstance(output, FusedCausalLMOutput)
    assert output.loss.dtype == output.per_token_logps.dtype == output.entropy.dtype == torch.float32
    dead = nn.functional.pad(batch["labels"][:, 1:] == -100, (1, 0), value=True)
    outputs = (output.per_token_logps.detach(), output.entropy.detach())
    assert all(torch.equal(values == 0, dead) for values in outputs)
    for values, theirs, truth in zip(
        (*outputs, oracles.whole(gradients(model, output.loss))), plain, exact, strict=True
    ):
        assert oracles.norm_error(values, truth) <= oracles.norm_budget(theirs, truth, torch.bfloat16)
    of_head = []
    for wide in (torch.float64, torch.float32):
        bias = None if head.bias is None else head.bias.detach().to(wide)
        z = nn.functional.linear(seen[-1].to(wide), head.weight.detach().to(wide), bias)
        of_head.append(from_logits(oracles.transformed(z, **transform), batch["labels"]))
    for values, truth, eager in zip(outputs, *of_head, strict=True):
        assert oracles.max_error(values, truth) <= oracles.error_budget(eager, truth, torch.float32)


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_the_divisor_of_the_loss(name):
    """As the Trainer passes it. A router loss is not divided."""
    model, batch = swapped(name), make_batch()
    for divisor in (57, torch.tensor(57)):
        plain, fused = (model(**batch, num_items_in_batch=divisor, **o).loss for o in ({}, {"fused": True}))
        torch.testing.assert_close(fused, plain)
        assert not torch.allclose(fused, model(**batch, fused=True).loss, rtol=1e-2)


class Casts(TorchDispatchMode):
    """Dtypes that the head's weight was cast to."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and tuple(out.shape) == (VOCAB, HIDDEN):
            self.dtypes.append(out.dtype)
        return out


def test_autocast_casts_the_head_once():
    """The head's own forward runs in a fused call too, and must not make another copy of its weight.

    The numbers under autocast: test_accelerates_mixed_precision_after_the_swap, and the engines' properties.
    """
    model, batch = swapped(), make_batch()
    with Casts() as casts, torch.autocast("cpu", torch.bfloat16):
        output = model(**batch, fused=True)
    assert casts.dtypes == [torch.bfloat16]
    assert all(
        grad.dtype == torch.float32 for grad in (output.per_token_logps, *gradients(model, output.loss).values())
    )


def test_a_frozen_head_has_no_gradient():
    model, batch = swapped(), make_batch()
    expected = gradients(model, model(**batch, fused=True).loss)
    del expected["lm_head.weight"]
    model.lm_head.weight.requires_grad_(False)
    assert_same_tensors(gradients(model, model(**batch, fused=True).loss), expected)


def test_the_last_position_may_have_a_shifted_label():
    """Which unshifted labels cannot express. The other positions: test_replayed_support.py."""
    model, batch = swapped("Gemma2"), make_batch()
    shift_labels = nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
    assert (fused_logps(model, {**batch, "shift_labels": shift_labels})[:, -1] == 0).all()
    shift_labels[0, -1] = 7
    last = fused_logps(model, {**batch, "shift_labels": shift_labels})[0, -1]
    torch.testing.assert_close(last, torch.log_softmax(model(**batch).logits[0, -1].float(), -1)[7])


def test_a_batch_without_labels_has_loss_zero_and_no_gradient():
    model, batch = swapped(), make_batch()
    output = model(**{**batch, "labels": torch.full_like(batch["labels"], -100)}, fused=True, entropy=True)
    assert output.loss.item() == 0
    assert (output.per_token_logps == 0).all()
    assert (output.entropy == 0).all()
    assert all((g == 0).all() for g in gradients(model, output.loss).values())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant):
    model, batch = swapped("Qwen3").train(), make_batch()
    expected = gradients(model, model(**batch, fused=True).loss)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    assert_same_tensors(gradients(model, model(**batch, fused=True).loss), expected)
    assert len(calls) == 2, "the layer was not recomputed"


def test_a_model_without_gradients_and_with_what_else_it_returns():
    model, batch = swapped(), make_batch()
    with torch.no_grad():
        options = {"output_hidden_states": True, "use_cache": True}
        plain, fused = model(**batch, **options), model(**batch, **options, fused=True)
    assert not fused.loss.requires_grad
    assert fused.entropy is None
    assert len(fused.hidden_states) == len(plain.hidden_states) == 3
    assert all(torch.equal(a, b) for a, b in zip(fused.hidden_states, plain.hidden_states, strict=True))
    assert fused.past_key_values.get_seq_length() == LENGTH


def test_no_tensor_has_all_logits_of_a_token():
    vocab, length = 32768, 512  # so few tokens that attention is small beside the logits, "eager" too
    model = swapped("Gemma2", vocab_size=vocab, max_position_embeddings=length, num_hidden_layers=1)
    ids = torch.randint(3, vocab, (1, length), generator=torch.Generator().manual_seed(1))
    logits = 4 * vocab * length

    def peak(**options):
        with tensor_peak(torch.device("cpu")) as peak:
            model(input_ids=ids, labels=ids, use_cache=False, **options).loss.backward()
        return peak.bytes

    assert peak(fused=True, entropy=True) < logits < peak()


# --- nothing else is changed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONVENTIONS)
def test_generate_and_the_plain_forward_are_the_same_before_swapped_and_after(name):
    # With a cache and an attention mask, transformers' own generate cannot weigh router logits.
    model = build(name, **({"output_router_logits": False} if name == "Mixtral" else {})).eval()
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
    assert len(before["tokens"][:, 5:].unique()) > 3, "a model that repeats one token would test little"
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
    model = build("GPT2", **DROPOUT).train()
    parameters, untouched = dict(model.named_parameters()), state_of(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.transformer.h[0].eval()
    modes, model_class = [module.training for module in model.modules()], type(model)
    assert unswap_lm_head(model) is model
    assert not is_swapped(model)
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        before = torch.get_rng_state()
        for _ in range(2):  # twice is harmless
            assert swap_lm_head(model) is model
            assert is_swapped(model)
        assert torch.equal(torch.get_rng_state(), before)
        assert all(p is parameters[key] and p.grad is None for key, p in model.named_parameters())
        assert_same_tensors(model.state_dict(), state)
        assert [module.training for module in model.modules()] == modes
        results.append((type(model), fused_logps(model, make_batch())))
        for _ in range(2):
            assert unswap_lm_head(model) is model
            assert type(model) is model_class
        assert state_of(model) == untouched
        assert_same_tensors(model.state_dict(), state)
    assert results[0][0] is results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_the_default_device_has_no_say(device):
    """Scripts build and swap their models under `torch.device`."""
    model, batch = build("Llama", device), make_batch(device)
    with torch.device(device):
        assert swap_lm_head(model)(**batch, fused=True).loss.isfinite()


def test_a_training_loop_of_transformers(tmp_path):
    """The Trainer, with the collator asking for the fused head, takes the steps it takes with full logits."""
    generator = torch.Generator().manual_seed(4)
    rows = [{"input_ids": torch.randint(3, VOCAB, (LENGTH,), generator=generator)} for _ in range(16)]
    for row in rows:
        row["labels"] = torch.where(torch.arange(LENGTH) < 3, -100, row["input_ids"])
        row["comment"] = "a column that the model does not take"

    def trained(model, **options):
        def collate(features):
            assert all(feature.keys() == {"input_ids", "labels"} for feature in features)
            return {key: torch.stack([feature[key] for feature in features]) for key in features[0]} | options

        sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 8}
        quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), learning_rate=5e-3, use_cpu=True, seed=0, **sizes, **quiet
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)
        trainer.train()
        return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])

    plain, fused = trained(build("Llama")), trained(swapped(), fused=True)
    assert len(fused) == 8
    assert fused[-1] < 0.8 * fused[0]
    torch.testing.assert_close(fused, plain, rtol=1e-3, atol=0)


# --- several callers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", ["eager", pytest.param("compiled around a graph break", marks=pytest.mark.compilation)]
)
def test_threads_that_share_a_model_get_what_each_of_them_asks_for(body):
    batch = make_batch()
    model = call = swapped("Gemma2" if body == "eager" else "GPT2", num_hidden_layers=1)
    if body != "eager":
        model.base_model.register_forward_hook(lambda *_: torch._dynamo.graph_break())
        call = torch.compile(model, backend="eager")
    others = {**batch, "labels": batch["labels"].roll(1, 0)}

    def calls_of(model) -> list:
        calls = (
            lambda: model(**batch).logits,
            lambda: model(**batch, fused=True).per_token_logps,
            lambda: model(**others, fused=True, temperature=0.5).per_token_logps,
        )
        return [torch.no_grad()(call) for call in calls]

    expected = [call() for call in calls_of(model)]
    assert all(map(torch.equal, [call() for call in calls_of(call)], expected))
    for results, value in zip(in_threads(*calls_of(call), times=20), expected, strict=True):
        assert all(torch.equal(result, value) for result in results)
    assert not torch.equal(expected[1], expected[2])


@pytest.mark.parametrize("head", ["its own", "the policy's"])
def test_a_reference_models_call_inside_the_policys(head):
    policy, reference, batch = swapped(), build("Gemma2"), make_batch()
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
    assert torch.equal(policy(**batch, fused=True).per_token_logps, expected[0])
    assert plain[0].shape == (BATCH, LENGTH, VOCAB)


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
    model, batch = build("Llama"), make_batch()
    twice = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twice.parameters():
            parameter.mul_(2)
    replica = replica_of(swap_lm_head(model))
    assert torch.equal(replica(**batch).logits, twice(**batch).logits)
    expected = swap_lm_head(twice)(**batch, fused=True).per_token_logps
    assert torch.equal(replica(**batch, fused=True).per_token_logps, expected)


# --- copies and classes -----------------------------------------------------------------------------------------------


def run_saved(models: Path, results: Path) -> None:
    pairs = torch.load(models, weights_only=False)
    torch.save([[model(**batch, fused=True).per_token_logps, model(**batch).logits] for model, batch in pairs], results)


def test_pickled_models_are_swapped_in_another_process(tmp_path):
    pairs = [(swapped(name).eval(), make_batch()) for name in ("Llama", "GPT2")]
    torch.save(pairs, tmp_path / "models")
    forks.run(run_saved, tmp_path / "models", tmp_path / "results", log=tmp_path / "log")
    for (model, batch), results in zip(pairs, torch.load(tmp_path / "results"), strict=True):
        assert torch.equal(results[0], fused_logps(model, batch))
        assert torch.equal(results[1], model(**batch).logits)


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        *(functools.partial(lambda p, model: pickle.loads(pickle.dumps(model, p)), p) for p in (0, 2, 5)),
    ],
    ids=["copy", "deep copy", "pickle 0", "pickle 2", "pickle 5"],
)
def test_a_copy_is_swapped_and_independent(copied):
    model, batch = swapped("Cohere").eval(), make_batch()
    expected, twin = fused_logps(model, batch), copied(model)
    assert type(twin) is type(model)
    assert is_swapped(twin)
    assert torch.equal(fused_logps(twin, batch), expected)
    assert torch.equal(twin(**batch).logits, model(**batch).logits)
    if copied is not copy.copy:  # which shares the weights
        with torch.no_grad():
            twin.get_output_embeddings().weight.mul_(2)
        assert not torch.allclose(fused_logps(twin, batch), expected, atol=1e-2)
        assert torch.equal(fused_logps(model, batch), expected)
    assert type(unswap_lm_head(twin)) is transformers.CohereForCausalLM
    assert is_swapped(model)
    if copied is not copy.copy:
        assert torch.equal(fused_logps(model, batch), expected)


@pytest.mark.parametrize("made", ["built", "from config", "loaded", "loaded by the auto class"])
def test_the_class_of_a_swapped_model_makes_plain_models(made, tmp_path):
    """Of its own name, saved under it, and swapped when they are asked to be."""
    model, batch = swapped("GPT2").eval(), make_batch()
    swapped_class, plain_class = type(model), type(build("GPT2"))
    assert (swapped_class.__name__, swapped_class.__qualname__) == (plain_class.__name__,) * 2
    if made.startswith("loaded"):
        model.save_pretrained(tmp_path)
        twin = (swapped_class if made == "loaded" else transformers.AutoModelForCausalLM).from_pretrained(tmp_path)
        assert twin.config.architectures == [plain_class.__name__]
        assert_same_tensors(twin.state_dict(), model.state_dict())
        assert torch.equal(twin(**batch).logits, model(**batch).logits)
    else:
        twin = (swapped_class if made == "built" else swapped_class._from_config)(model.config)
    assert type(twin) is plain_class
    assert not is_swapped(twin)
    assert twin.eval()(**batch).logits.shape == (BATCH, LENGTH, VOCAB)
    assert "fused" not in inspect.signature(twin.forward).parameters
    assert inspect.signature(swapped_class.__init__) == inspect.signature(plain_class.__init__)
    logps = fused_logps(swap_lm_head(twin), batch)
    assert type(twin) is swapped_class
    if made.startswith("loaded"):
        assert torch.equal(logps, fused_logps(model, batch))
