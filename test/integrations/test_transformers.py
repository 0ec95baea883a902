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
from typing import TypedDict

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Unpack

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

import oracles  # noqa: E402
from hf_models import (  # noqa: E402
    BATCH,
    CONVENTIONS,
    HIDDEN,
    LENGTH,
    SIZES,
    VOCAB,
    assert_same_tensors,
    build,
    from_logits,
    full,
    gradients,
    make_batch,
)
from liger_rl.integrations.transformers import (  # noqa: E402
    FusedCausalLMOutput,
    is_swapped,
    swap_lm_head,
    unswap_lm_head,
)
from peaks import tensor_peak  # noqa: E402

DROPOUT = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
LOW_PRECISION = ("Llama", "Gemma2", "Granite", "Cohere", "Phi", "Mixtral")


def swapped(name: str = "Llama", device="cpu", **overrides) -> transformers.PreTrainedModel:
    return swap_lm_head(build(name, device, **overrides))


def fused_logps(model: nn.Module, batch: dict, **options) -> Tensor:
    return model(**batch, fused=True, **options).per_token_logps


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


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in CONVENTIONS), *((name, torch.bfloat16) for name in LOW_PRECISION)],
)
def test_log_probabilities_entropy_loss_and_gradients_are_those_of_the_full_logits(name, dtype, device):
    """In bfloat16 most of either error is rounding in the layers before the head; see the next test for the head's."""
    model, batch = build(name, device).to(dtype), make_batch(device)
    if dtype == torch.bfloat16:
        ids = torch.randint(3, VOCAB, (8, 48), generator=torch.Generator().manual_seed(1)).to(device)
        batch = {"input_ids": ids, "labels": ids.masked_fill(torch.arange(48, device=device) < 2, -100)}
    exact_model = copy.deepcopy(model).double()
    (exact_loss, exact, exact_gradients), (_, plain, plain_gradients) = (
        (
            (output := m(**batch)).loss.item(),
            from_logits(output.logits.detach(), batch["labels"]),
            gradients(m, output.loss),
        )
        for m in (exact_model, model)
    )
    assert exact[0].std() > 0.5, "logits too flat to tell conventions apart"

    output = swap_lm_head(model)(**batch, fused=True, entropy=True)
    assert isinstance(output, FusedCausalLMOutput)
    assert output.loss.dtype == torch.float32
    dead = nn.functional.pad(batch["labels"][:, 1:] == -100, (1, 0), value=True)
    eps = torch.finfo(dtype).eps
    for what, values, other, truth in zip(
        ("logps", "entropy"), (output.per_token_logps, output.entropy), plain, exact, strict=True
    ):
        assert values.dtype == torch.float32
        assert torch.equal(values == 0, dead)
        assert_close(values.detach(), other, truth, what, eps * truth.norm().item())
    if dtype == torch.float32:
        # A mean is no further off than the mean of its terms is, plus the roundings of its sum.
        token_error = (plain[0] - exact[0])[~dead].abs().mean().item()
        assert abs(output.loss.item() - exact_loss) <= 2 * token_error + 4 * eps * exact_loss
    assert_gradients_close(gradients(model, output.loss), plain_gradients, exact_gradients)


@pytest.mark.parametrize("name", LOW_PRECISION)
def test_the_head_of_a_bfloat16_model_rounds_no_logit(name, device):
    """Given the hidden states the model makes in bfloat16, outputs are as exact as those of float32 logits."""
    model, batch = swapped(name, device).bfloat16(), make_batch(device)
    head, seen = model.get_output_embeddings(), []
    transform = {"Gemma2": {"softcap": 3.0}, "Cohere": {"scale": 0.25}, "Granite": {"scale": 0.25}}.get(name, {})
    handle = head.register_forward_pre_hook(lambda head, args: seen.append(args[0]))
    with torch.no_grad():
        model(**batch)
        handle.remove()
        results = []
        for dtype in (torch.float64, torch.float32):
            bias = None if head.bias is None else head.bias.to(dtype)
            z = nn.functional.linear(seen[0].to(dtype), head.weight.to(dtype), bias)
            results.append(from_logits(oracles.transformed(z, **transform), batch["labels"]))
        fused = model(**batch, fused=True, entropy=True)
    for found, exact, eager in zip((fused.per_token_logps, fused.entropy), *results, strict=True):
        assert oracles.max_error(found, exact) <= oracles.error_budget(eager, exact, torch.float32)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Phi", "Cohere"])
def test_any_loss_of_log_probabilities_and_entropy_at_a_temperature(name, device):
    model, batch = build(name, device), make_batch(device)
    weights = torch.randn(2, BATCH, LENGTH, generator=torch.Generator().manual_seed(2)).to(device)

    def total(logps, entropy):
        return (weights[0] * logps + weights[1] * entropy).sum()

    exact_model = copy.deepcopy(model).double()
    exact, plain = (gradients(m, total(*full(m, batch, temperature=0.7))) for m in (exact_model, model))
    output = swap_lm_head(model)(**batch, fused=True, entropy=True, temperature=0.7)
    assert_gradients_close(gradients(model, total(output.per_token_logps, output.entropy)), plain, exact)
    # The probed transform is the model's own, the temperature the call's.
    assert not torch.allclose(fused_logps(model, batch), output.per_token_logps, atol=1e-2)


def test_the_router_loss_is_part_of_the_loss_and_of_the_gradient():
    model, batch = swapped("Mixtral"), make_batch()
    output, plain = model(**batch, fused=True), model(**batch)
    count = (batch["labels"][:, 1:] != -100).sum()
    torch.testing.assert_close(output.aux_loss, plain.aux_loss, rtol=0, atol=0)
    assert output.aux_loss > 1.0
    cross_entropy = -output.per_token_logps.sum() / count
    torch.testing.assert_close(output.loss - cross_entropy, 0.1 * output.aux_loss, rtol=1e-5, atol=1e-6)
    router = "model.layers.0.mlp.gate.weight"
    with_router = gradients(model, output.loss)[router]
    without = gradients(model, -fused_logps(model, batch).sum() / count)[router]
    assert (with_router - without).norm() > 0.01 * without.norm()
    for divisor in (57, torch.tensor(57)):  # as the Trainer passes it
        plain, fused = (model(**batch, num_items_in_batch=divisor, **o).loss for o in ({}, {"fused": True}))
        torch.testing.assert_close(fused, plain)
        assert not torch.allclose(fused, output.loss, rtol=1e-2)


def test_autocast():
    """Float32 weights, bfloat16 products: the plain forward rounds its logits, the fused head does not."""
    model, batch = build("Llama"), make_batch()

    def observed(fused):
        output = model(**batch, fused=True) if fused else model(**batch)
        logps = output.per_token_logps if fused else from_logits(output.logits, batch["labels"])[0]
        found = gradients(model, output.loss)
        assert all(g.dtype == torch.float32 for g in (logps, *found.values()))
        return logps.detach(), whole(found)

    exact = observed(False)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(**batch).logits.dtype == torch.bfloat16
        plain = observed(False)
        swap_lm_head(model)
        found = observed(True)
    for what, *tensors in zip(("logps", "gradient"), found, plain, exact, strict=True):
        assert_close(*tensors, what, torch.finfo(torch.bfloat16).eps * tensors[-1].norm().item())


def test_the_heads_weight_is_cast_once_under_autocast():
    """The head's own forward runs in a fused call too, and must not make a copy of its weight."""
    model, batch = swapped(), make_batch()
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


def test_the_heads_gradient_is_added_in_place_or_left_out():
    model, batch = swapped(), make_batch()
    expected = gradients(model, model(**batch, fused=True).loss)
    total = torch.ones_like(model.lm_head.weight)
    found = gradients(model, model(**batch, fused=True, weight_grad=total.detach()).loss)
    torch.testing.assert_close(total, expected.pop("lm_head.weight") + 1)
    assert_same_tensors(found, expected)
    model.lm_head.weight.requires_grad_(False)
    assert_same_tensors(gradients(model, model(**batch, fused=True).loss), expected)


def test_shift_labels_are_taken_as_they_are():
    model, batch = swapped("Gemma2"), make_batch()
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


def test_dropout_draws_the_same_random_numbers():
    model, batch = swapped("GPT2", **DROPOUT).train(), make_batch()
    losses = []
    for options in ({}, {"fused": True}):
        torch.manual_seed(3)
        losses.append(model(**batch, **options).loss)
    torch.testing.assert_close(losses[1], losses[0])
    assert not torch.allclose(model(**batch, fused=True).loss, losses[0], rtol=1e-3)


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


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_no_tensor_has_all_logits_of_a_token(name):
    vocab, length = 32768, 512  # so few tokens that attention is small beside the logits, "eager" too
    model = swapped(name, vocab_size=vocab, max_position_embeddings=length, num_hidden_layers=1)
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


def hooks_of(head: nn.Module) -> list:
    return [list(hooks.items()) for hooks in (head._forward_pre_hooks, head._forward_hooks)]


def test_swap_and_unswap_leave_parameters_attributes_and_random_numbers_alone():
    model = build("GPT2", **DROPOUT).train()
    head, parameters = model.get_output_embeddings(), dict(model.named_parameters())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    attributes, hooks = [set(vars(module)) for module in (model, head)], hooks_of(head)
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
        assert [set(vars(module)) for module in (model, head)] == attributes
        assert hooks_of(head) == hooks
        assert_same_tensors(model.state_dict(), state)
    assert results[0][0] is results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_the_default_device_has_no_say(device):
    """Scripts build and swap their models under `torch.device`."""
    model, batch = build("Llama", device), make_batch(device)
    with torch.device(device):
        assert swap_lm_head(model)(**batch, fused=True).loss.isfinite()


@pytest.mark.parametrize("name", ["GPT2", "OPT", "Cohere"])
def test_tied_weights_stay_tied(name):
    model, batch = build(name), make_batch()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert head.weight is embedding.weight
    swap_lm_head(model)
    assert model.get_output_embeddings() is head
    assert head.weight is embedding.weight
    both = gradients(model, model(**batch, fused=True).loss)
    tied = next(key for key, p in model.named_parameters() if p is head.weight)
    # Each use alone, by untying a copy: their sum is the gradient of the tied weight.
    head.weight = nn.Parameter(head.weight.detach().clone())
    model.zero_grad()
    model(**batch, fused=True).loss.backward()
    of_head, of_embedding = head.weight.grad, embedding.weight.grad
    assert min(of_head.norm(), of_embedding.norm()) > 0.01 * both[tied].norm()
    torch.testing.assert_close(both[tied], of_head + of_embedding)


def test_the_signature_names_the_columns_of_a_data_set():
    model = build("Llama")
    before = inspect.signature(model.forward)
    after = inspect.signature(swap_lm_head(model).forward)
    assert {"input_ids", "attention_mask", "labels"} <= set(after.parameters)
    assert after.parameters.keys() == before.parameters.keys()


def test_hooks_on_the_model_still_run():
    model, outputs = swapped(), []
    model.register_forward_hook(lambda module, args, output: outputs.append(output))
    output = model(**make_batch(), fused=True)
    assert len(outputs) == 1
    assert outputs[0] is output


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
    batch = make_batch()
    if body == "eager":
        call = swapped("Gemma2", num_hidden_layers=1)
    else:
        model = swapped("GPT2", num_hidden_layers=1)  # the body that takes least time to compile
        model.base_model.register_forward_hook(lambda *_: torch._dynamo.graph_break())
        call = torch.compile(model, backend="eager")
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
    model, batch = build("Llama"), make_batch()
    model_class = type(model)
    in_threads(*[lambda: swap_lm_head(model)(**batch, fused=True)] * 3)
    assert type(unswap_lm_head(model)) is model_class


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

LOAD = """
import sys, torch
pairs = torch.load(sys.argv[1], weights_only=False)
torch.save([[model(**batch, fused=True).per_token_logps, model(**batch).logits] for model, batch in pairs], sys.argv[2])
"""


def test_pickled_models_are_swapped_in_another_process(tmp_path):
    pairs = [(swapped(name).eval(), make_batch()) for name in ("Llama", "GPT2")]
    torch.save(pairs, tmp_path / "models")
    subprocess.run([sys.executable, "-c", LOAD, tmp_path / "models", tmp_path / "results"], check=True)
    for (model, batch), found in zip(pairs, torch.load(tmp_path / "results"), strict=True):
        assert torch.equal(found[0], fused_logps(model, batch))
        assert torch.equal(found[1], model(**batch).logits)


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
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_the_class_of_a_swapped_model_makes_plain_models(name, made, tmp_path):
    """Of its own name, saved under it, and swapped when they are asked to be."""
    model, batch = swapped(name).eval(), make_batch()
    swapped_class, plain_class = type(model), type(build(name))
    assert (swapped_class.__name__, swapped_class.__qualname__) == (plain_class.__name__,) * 2
    if made.startswith("loaded"):
        model.save_pretrained(tmp_path)
        other = (swapped_class if made == "loaded" else transformers.AutoModelForCausalLM).from_pretrained(tmp_path)
        assert other.config.architectures == [plain_class.__name__]
        assert_same_tensors(other.state_dict(), model.state_dict())
        assert torch.equal(other(**batch).logits, model(**batch).logits)
    else:
        other = (swapped_class if made == "built" else swapped_class._from_config)(model.config)
    assert type(other) is plain_class
    assert not is_swapped(other)
    assert other.eval()(**batch).logits.shape == (BATCH, LENGTH, VOCAB)
    assert "fused" not in inspect.signature(other.forward).parameters
    assert inspect.signature(swapped_class.__init__) == inspect.signature(plain_class.__init__)
    found = fused_logps(swap_lm_head(other), batch)
    assert type(other) is swapped_class
    if made.startswith("loaded"):
        assert torch.equal(found, fused_logps(model, batch))


# --- what is refused --------------------------------------------------------------------------------------------------

IDS = torch.full((BATCH, LENGTH), 5)
BAD_CALLS = {
    "no labels": ({"labels": None}, ValueError, "labels or shift_labels must be given"),
    "two labels": ({"shift_labels": IDS}, ValueError, "labels or shift_labels must be given"),
    "one logit": ({"logits_to_keep": 1}, ValueError, "logits_to_keep has no meaning"),
    "all logits": ({"logits_to_keep": LENGTH}, ValueError, "logits_to_keep has no meaning"),
    "some logits": ({"logits_to_keep": torch.arange(3)}, ValueError, "logits_to_keep has no meaning"),
    "ignore_index": ({"ignore_index": -1}, ValueError, "ignore_index must be -100"),
    "a tuple": ({"return_dict": False}, ValueError, "return_dict"),
    "short": ({"labels": IDS[:, 1:]}, ValueError, r"\(3, 13\)"),
    "flat": ({"labels": IDS.flatten()}, ValueError, r"labels must be \(B, T\)"),
    "outside the vocabulary": ({"labels": VOCAB + 0 * IDS}, ValueError, rf"\[0, {VOCAB}\)"),
    "not integers": ({"labels": IDS.float()}, TypeError, "float32"),
    "not a tensor": ({"labels": IDS.tolist()}, TypeError, "labels must be a tensor, got list"),
    "no temperature": ({"temperature": 0.0}, ValueError, "temperature"),
    "negative temperature": ({"temperature": -1.0}, ValueError, "temperature"),
    "infinite temperature": ({"temperature": float("inf")}, ValueError, "temperature"),
}


@pytest.mark.parametrize(("changed", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_calls_are_refused_and_the_model_stays_usable(changed, error, message):
    model, batch = swapped(), make_batch()
    expected, expected_fused = model(**batch).logits, fused_logps(model, batch)
    with pytest.raises(error, match=message):
        model(**{**batch, **changed}, fused=True)
    assert torch.equal(model(**batch).logits, expected)
    assert torch.equal(fused_logps(model, batch), expected_fused)


def test_a_failure_inside_the_model_leaves_the_head_as_it_was():
    model, batch = swapped(), make_batch()
    expected = model(**batch).logits

    def fail(*_):
        raise RuntimeError("out of luck")

    handle = model.model.norm.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        model(**batch, fused=True)
    handle.remove()
    assert torch.equal(model(**batch).logits, expected)


MISSPELT = ["temprature", "mask", "extras", "entropies", "lables", "num_items", "chunk_token", "weight_gradient"]


@pytest.mark.parametrize("name", CONVENTIONS)
def test_an_argument_that_nothing_takes_is_refused(name):
    model, batch = swapped(name), make_batch()
    model.base_model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    for misspelt in MISSPELT:
        message = rf"{type(model).__name__} takes no {misspelt} with fused=True.* temperature, "
        with pytest.raises(TypeError, match=message):
            model(**batch, fused=True, **{misspelt: 1.0})


def test_arguments_of_the_model_go_through():
    """Those of its signature, of transformers' TypedDict, and those that only its body's forwards know."""
    model, batch = swapped("Mixtral"), make_batch()
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
    model = build("Llama")
    weight = model.lm_head.weight
    model.lm_head = head_class(HIDDEN, VOCAB, bias=False)
    model.lm_head.weight = weight
    return model


def _with_wrapped_head() -> transformers.PreTrainedModel:
    model = build("Llama")
    model.lm_head = _Head(model.lm_head)
    return model


def _with_a_hook() -> transformers.PreTrainedModel:
    model = build("Llama")
    model.lm_head.register_forward_hook(lambda head, args, output: output * 2)
    return model


def _with_logits(name: str, change) -> transformers.PreTrainedModel:
    def forward(self, *args, **kwargs):
        output = transformers.LlamaForCausalLM.forward(self, *args, **kwargs)
        output.logits = change(output.logits)
        return output

    return type(name, (transformers.LlamaForCausalLM,), {"forward": forward})(transformers.LlamaConfig(**SIZES))


def _with_products(name: str, product) -> transformers.PreTrainedModel:
    def forward(self, input_ids=None, **kwargs):
        logits = product(self.lm_head, self.model(input_ids=input_ids).last_hidden_state)
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits)

    return type(name, (transformers.LlamaForCausalLM,), {"forward": forward})(transformers.LlamaConfig(**SIZES))


def _banned(logits: Tensor) -> Tensor:
    return logits.index_fill(-1, torch.tensor([3]), -1e4)


MAPS = r"it maps logits \(-60\.0, .*50\.0\) to "  # both sets of numbers: what went in, and what came out
REFUSED_HEADS = {
    "no linear": (_with_wrapped_head, TypeError, r"head of LlamaForCausalLM must be an nn\.Linear, got _Head"),
    "its own forward": (lambda: _with_head(_ScaledLinear), ValueError, "Llama.*_ScaledLinear.*other than h @ W.T"),
    "a hook": (_with_a_hook, ValueError, "LlamaForCausalLM.*other than h @ W.T"),
    "shifted": (lambda: _with_logits("Shifted", lambda z: z + 1), ValueError, rf"Shifted.*{MAPS}\[-59\.0, .*51\.0\]"),
    "squared": (lambda: _with_logits("Squared", lambda z: z**2), ValueError, rf"Squared.*{MAPS}\[3600\.0, .*2500\.0\]"),
    "scaled": (lambda: _with_logits("Scaled", lambda z: z * 1.01), ValueError, rf"Scaled.*{MAPS}\[-60\.[56]"),
    "a banned token": (lambda: _with_logits("Banned", _banned), ValueError, f"Banned.*{MAPS}.*-10000.0"),
    "not called": (
        lambda: _with_products("Headless", lambda head, h: nn.functional.linear(h, head.weight)),
        ValueError,
        "Headless.*does not call it",
    ),
    "called twice": (
        lambda: _with_products("TwiceHeaded", lambda head, h: head(h) + head(h.flip(0))),
        ValueError,
        "TwiceHeaded.*called its head twice",
    ),
}


@pytest.mark.parametrize(("made", "error", "message"), REFUSED_HEADS.values(), ids=REFUSED_HEADS)
def test_a_head_that_would_not_be_reproduced_is_refused(made, error, message):
    model = made()
    before, attributes, batch = type(model), set(vars(model)), make_batch()
    head = model.get_output_embeddings()
    expected, hooks = model(**batch).logits, hooks_of(head)
    with pytest.raises(error, match=message):
        swap_lm_head(model)
    assert type(model) is before
    assert set(vars(model)) == attributes
    assert hooks_of(head) == hooks
    assert torch.equal(model(**batch).logits, expected)


def test_a_linear_head_of_another_name_is_accepted():
    model, batch = _with_head(_PlainLinear), make_batch()
    assert torch.equal(fused_logps(swap_lm_head(model), batch), fused_logps(swapped(), batch))


def _on_meta() -> transformers.PreTrainedModel:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def _bert() -> transformers.PreTrainedModel:
    sizes = {"vocab_size": 211, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, num_attention_heads=4))


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (_on_meta, ValueError, "LlamaForCausalLM must be in memory"),
        (lambda: transformers.LlamaModel(transformers.LlamaConfig(**SIZES)), TypeError, "LlamaModel"),
        (_bert, ValueError, "BertForMaskedLM is not"),
        (lambda: None, TypeError, "must be a transformers PreTrainedModel"),
        (lambda: "gpt2", TypeError, "must be a transformers PreTrainedModel"),
        (lambda: nn.Linear(2, 3), TypeError, "must be a transformers PreTrainedModel"),
        (lambda: transformers.LlamaForCausalLM, TypeError, "must be a transformers PreTrainedModel"),
    ],
)
def test_what_is_no_causal_model_in_memory_is_refused(made, error, message):
    model = made()
    before = type(model)
    with pytest.raises(error, match=message):
        swap_lm_head(model)
    assert type(model) is before


def test_a_subclass_made_after_the_swap_has_to_be_undone_first():
    model = swapped()
    swapped_class = type(model)
    model.__class__ = type("Derived", (swapped_class,), {})
    with pytest.raises(ValueError, match="Derived was derived from the swapped class"):
        unswap_lm_head(model)
    model.__class__ = swapped_class
    assert type(unswap_lm_head(model)) is transformers.LlamaForCausalLM


def test_refuses_a_model_whose_forward_was_replaced_on_the_instance():
    """accelerate's mixed precision does that; it would hide the fused forward and swallow its arguments."""
    model = build("Llama")
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
    model, batch = build("Llama"), make_batch()
    model.forward = model.forward
    assert torch.equal(fused_logps(swap_lm_head(model), batch), fused_logps(swapped(), batch))
    assert "fused" not in inspect.signature(unswap_lm_head(model).forward).parameters
    assert model(**batch).logits.shape == (BATCH, LENGTH, VOCAB)


@pytest.mark.parametrize("change", ["another head", "a hook"])
def test_a_head_changed_after_the_swap_is_refused(change):
    """What an adapter or a hook adds would silently be left out of the log-probabilities."""
    model, batch = swapped(), make_batch()
    if change == "another head":
        model.lm_head = _ScaledLinear(HIDDEN, VOCAB, bias=False)
    else:
        model.lm_head.register_forward_hook(lambda module, arguments, output: output * 2)
    with pytest.raises(ValueError, match="head of LlamaForCausalLM must be a plain Linear"):
        model(**batch, fused=True)
