"""TRL's trainers on our head: the fused forward against TRL's own, what is patched and what is refused.

Whole runs: test_trl_runs.py.
"""

import copy
import logging
import math
from unittest import mock

import pytest
import torch
import transformers

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="PEFT is not installed")

import trl.trainer.utils as trl_utils
from peft import LoraConfig
from trl import GRPOTrainer, RLOOTrainer

import oracles
import trl_runs
from hf_models import VOCAB, build, make_batch
from liger_rl import explain_trl, patch_trl
from liger_rl.integrations.trl import patched_trl, unpatch_trl
from liger_rl.integrations.trl.caught_calls import caught_calls
from liger_rl.integrations.trl.forward import CALL, PER_TOKEN, ModelCall
from liger_rl.integrations.trl.settings import get_settings
from liger_rl.models import project

NAME = "add_fused_lm_head"
THEIRS = vars(trl_utils)[NAME]
METHODS = ("_get_per_token_logps_and_entropies", "_compute_loss")


# --- the fused forward against TRL's own ------------------------------------------------------------------------------


def fused(name, *, temperature=1.0, outputs=PER_TOKEN, dtype=torch.float32, device="cpu", in_float32=False):
    """A model with our forward, which is TRL's after `unpatch_trl`."""
    patch_trl()
    model = build(name, device, num_hidden_layers=1).to(dtype)
    trl_utils.add_fused_lm_head(model, temperature=temperature, outputs=outputs, cast_lm_head_to_fp32=in_float32)
    return model


def solve(model, batch, *, patched):
    """-> the outputs for each token, and the gradients of a loss of those that have one."""
    if not patched:
        unpatch_trl()
    model.zero_grad()
    output = model(**batch, fused_lm_head=True)
    generator = torch.Generator().manual_seed(1)
    names = [name for name in ("log_probs", "entropy") if getattr(output, name) is not None]
    weights = (torch.randn(output[name].shape, generator=generator).to(output[name].device) for name in names)
    (output.loss + sum((output[name] * w).sum() for name, w in zip(names, weights, strict=True))).backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# -> the model: a head without anything, a bias, a softcap, a scale, a divisor, a tied head.
MODELS = {"Llama": 1.0, "Phi": 0.7, "Gemma2": 1.6, "Cohere": 2, "Granite": 0.9, "GPT2": 1.0}


@pytest.mark.parametrize("name", MODELS)
def test_float32_agrees_with_trls_forward(name, device):
    model, batch = fused(name, temperature=MODELS[name], device=device), make_batch(device)
    # Every other label is the model's own choice.
    best = model(batch["input_ids"]).logits.argmax(-1).roll(1, 1)
    batch["labels"] = torch.where((batch["labels"] >= 0) & (torch.arange(best.shape[1], device=device) % 2 == 0), best,
                                  batch["labels"])  # fmt: skip
    (values, grads), (expected, truth) = (solve(model, batch, patched=patched) for patched in (True, False))
    assert values.keys() == expected.keys()
    for name in PER_TOKEN:
        assert values[name].requires_grad == expected[name].requires_grad, name
    torch.testing.assert_close(dict(values), dict(expected), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(grads, truth, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("outputs", [("log_probs",), ("log_probs", "log_sum_sq_probs")])
def test_outputs_are_those_that_were_asked_for(outputs):
    batch = make_batch()
    batch["labels"][1] = -100
    model = fused("Llama", outputs=outputs)
    values, expected = (solve(model, batch, patched=patched)[0] for patched in (True, False))
    assert [name for name in PER_TOKEN if getattr(values, name) is not None] == list(outputs)
    torch.testing.assert_close(dict(values), dict(expected), rtol=1e-5, atol=1e-5)


def test_a_call_without_labels_has_a_loss():
    model, batch = fused("Llama"), make_batch()
    batch["labels"][:] = -100
    values, grads = solve(model, batch, patched=True)
    assert not any(grad.any() for grad in grads.values())
    assert values.loss.item() == 0.0


def test_shifted_labels_agree_with_trls_forward():
    """As context parallelism gives them."""
    model, batch = fused("Llama"), make_batch()
    batch["shift_labels"] = batch.pop("labels").roll(-1, 1)
    (values, grads), (expected, truth) = (solve(model, batch, patched=patched) for patched in (True, False))
    torch.testing.assert_close(dict(values), dict(expected), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype"), [("Llama", torch.bfloat16), ("Granite", torch.bfloat16), ("Llama", torch.float16)]
)
def test_low_precision_is_closer_to_float64(name, dtype, device):
    """TRL rounds the logits. The hidden states are the same."""
    model, batch, hidden = fused(name, dtype=dtype, device=device), make_batch(device), []
    handle = model.base_model.register_forward_hook(lambda *args: hidden.append(args[-1].last_hidden_state.detach()))
    values, expected = (solve(model, batch, patched=patched)[0] for patched in (True, False))
    handle.remove()
    torch.testing.assert_close(hidden[-2], hidden[-1], rtol=0, atol=0)
    scale = 1 / model.config.logits_scaling if name == "Granite" else 1.0
    weight = model.lm_head.weight.detach().double()
    found = oracles.values(
        oracles.linear_logits(hidden[-1].double(), weight, None, 1.0, None, scale)[:, :-1],
        batch["labels"][:, 1:].clamp(min=0),
    )
    for key, truth in (("log_probs", found.logps), ("entropy", found.entropy)):
        truth = truth.where(values.label_mask, 0.0)
        mine, theirs = (oracles.norm_error(output[key], truth) for output in (values, expected))
        assert mine < 0.1 * theirs


def test_a_head_in_float32_agrees_with_trls_forward():
    """TRL's `cast_lm_head_to_fp32`, on a body in bfloat16, also under autocast."""
    model, batch = fused("Llama", dtype=torch.bfloat16, in_float32=True), make_batch()
    model.lm_head.float()
    model.lm_head.register_forward_pre_hook(lambda head, args: (args[0].float(),))
    for autocast in (False, True):
        ours = mock.patch.object(project, "linear_logprobs", side_effect=project.linear_logprobs)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), ours as calls:
            values, expected = (solve(model, batch, patched=patched)[0] for patched in (True, False))
            patch_trl()
        assert calls.call_count == (1 if autocast else 3), "the model is compared once, and runs with our head"
        torch.testing.assert_close(values.log_probs, expected.log_probs, rtol=2e-6, atol=1e-5)


def test_a_model_that_computes_something_else_runs_as_trl_runs_it(caplog):
    caplog.set_level(logging.INFO, "liger_rl")
    model, batch = fused("Llama"), make_batch()
    model.lm_head.register_forward_hook(lambda head, args, logits: 2 * logits)
    values, expected = (solve(model, batch, patched=patched)[0] for patched in (True, False))
    assert torch.equal(values.log_probs, expected.log_probs)
    text = "LlamaForCausalLM: as TRL runs it: the plain forward of LlamaForCausalLM has other log-probabilities"
    assert text in caplog.text


def test_micro_batches_of_such_a_model_run_apart():
    model, batch = fused("Mixtral"), make_batch()
    model.lm_head.register_forward_hook(lambda head, args, logits: 2 * logits)
    rows, width = batch["input_ids"].shape
    shapes = [(1, width), (rows - 1, width - 4)]
    batch = {name: x.clone() for name, x in batch.items()}
    for name, nothing in (("attention_mask", 0), ("labels", -100)):
        batch[name][1:, width - 4 :] = nothing
    joined = model(**batch, fused_lm_head=True, **{CALL: ModelCall(shapes=shapes)}, output_router_logits=True)
    row = 0
    for number, (count, columns) in enumerate(shapes):
        alone = {name: x[row : row + count, :columns] for name, x in batch.items()}
        expected = model(**alone, fused_lm_head=True, output_router_logits=True)
        torch.testing.assert_close(joined.log_probs[row : row + count, : columns - 1], expected.log_probs)
        assert not joined.label_mask[row : row + count, columns - 1 :].any()
        torch.testing.assert_close(joined.aux_loss[number], expected.aux_loss)
        row += count


@pytest.mark.compilation
def test_a_compiled_model_runs_as_trl_runs_it():
    pytest.importorskip("trl", "1.16", reason="Dynamo cannot trace Triton's interpreter, which runs TRL 1.15's kernel")
    model, batch = fused("Llama"), make_batch()
    expected = solve(model, batch, patched=False)[0]
    patch_trl()
    values = torch.compile(model, backend="eager")(**batch, fused_lm_head=True)
    torch.testing.assert_close(values.log_probs, expected.log_probs)


def test_a_target_beyond_the_vocabulary_is_named():
    """TRL returns -lse for one."""
    model, batch = fused("Llama"), make_batch()
    batch["labels"][0, 5] = VOCAB
    with pytest.raises(ValueError, match=rf"\[0, {VOCAB}\)"):
        solve(model, batch, patched=True)


# --- what is patched --------------------------------------------------------------------------------------------------


def test_options_come_and_go_with_the_patch():
    patch_trl(max_tokens=64)
    assert vars(trl_utils)[NAME] is not THEIRS
    assert get_settings().max_tokens == 64
    with patched_trl(max_tokens=32):
        assert get_settings().max_tokens == 32
    assert get_settings().max_tokens == 64
    with patched_trl():
        assert get_settings().max_tokens is None
        unpatch_trl()
        assert vars(trl_utils)[NAME] is THEIRS
    assert get_settings().max_tokens == 64


@pytest.mark.parametrize("options", [{"max_tokens": -1}, {"max_tokens": math.nan}, {"memory": 2}])
def test_options_are_refused_before_anything_is_patched(options):
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        patch_trl(**options)
    assert vars(trl_utils)[NAME] is THEIRS
    patch_trl(max_tokens=64)
    with pytest.raises((TypeError, ValueError)):
        patch_trl(**options)
    assert get_settings().max_tokens == 64


def test_a_trainer_is_no_option():
    with pytest.raises(TypeError, match=r"takes options by name alone, got a str .*call it before they are built"):
        patch_trl("trainer")
    assert vars(trl_utils)[NAME] is THEIRS


def test_nothing_is_left():
    def list_patched():
        methods = [vars(kind)[name] for kind in (GRPOTrainer, RLOOTrainer) for name in METHODS]
        return [vars(trl_utils)[NAME], *methods]

    before = list_patched()
    with patched_trl():
        assert not set(before) & set(list_patched())
    assert list_patched() == before


def test_switches_come_and_go_with_the_patch():
    for value in ("yes", 1, None):
        for option in ("whole_step", "even_ranks"):
            with pytest.raises(TypeError, match=option):
                patch_trl(**{option: value})
    patch_trl(whole_step=False)
    with patched_trl():
        assert get_settings().whole_step
    assert not get_settings().whole_step


@pytest.mark.parametrize("kind", ["GRPO", "SFT"])
def test_an_adapter_on_the_head_is_refused_by_trl(kind, path_of, tmp_path):
    adapter = LoraConfig(target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    with patched_trl(), pytest.raises(ValueError, match="Applying a PEFT adapter to `lm_head` is not supported"):
        trl_runs.build(kind, path_of["qwen3"], tmp_path, peft_config=adapter)


# --- trainers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "parted"),
    [
        ({}, False),
        ({"clip_ratio/region_mean": 0.25}, True),
        ({"clip_ratio/region_mean": 0.25, "grad_norm": 1.5}, True),
        ({"clip_ratio/region_mean": 0.25, "loss": 0.31}, False),
        ({"clip_ratio/region_mean": 0.25, "kl": float("nan")}, False),
        ({"grad_norm": 1.5}, False),
    ],
)
def test_only_clipped_tokens_part_runs_at_a_bound(changed, parted):
    log = {"loss": 0.3, "kl": 0.1, "grad_norm": 1.0, "clip_ratio/region_mean": 0.2}
    other = {**log, **changed}
    later = 0.5 if changed else 0.0  # what follows the parting does not count
    plain = trl_runs.Run({name: [value, value, value] for name, value in log.items()}, {})
    patched = trl_runs.Run({name: [log[name], other[name], other[name] + later] for name in log}, {})
    assert trl_runs.parted_at_a_bound(patched, plain) == parted


@pytest.mark.parametrize(
    ("kind", "options"),
    [("GRPO", {"prepare": lambda trainer: unpatch_trl()}), ("DPO", {"built_before": True})],
    ids=["outlives the patch", "built before"],
)
def test_a_trainer_runs_as_trl_runs_it(kind, options, path_of, tmp_path):
    plain, patched = trl_runs.pair(kind, path_of["qwen3"], tmp_path, max_steps=2, **options)
    assert patched.head_calls == 0
    assert patched.log["loss"] == plain.log["loss"]


def test_a_later_trainer_takes_the_head_out_of_a_model(path_of, tmp_path):
    """TRL's own head stands in its place, until another trainer is built under the patch."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path_of["qwen3"])
    with patched_trl():
        trl_runs.build("SFT", model, tmp_path)
    trainer = trl_runs.build("SFT", model, tmp_path, bf16=True, max_steps=1)
    with patched_trl():
        trainer.train()
        line = "SFTTrainer: as TRL runs it: the trainer was built before patch_trl()"
        assert explain_trl(trainer).startswith(line)
        assert "prompts once" in explain_trl(trl_runs.build("SFT", model, tmp_path, bf16=True))


def test_trainers_share_a_reference(path_of, tmp_path):
    """A reward of GRPO trains a critic by DPO, whose reference is GRPO's."""

    def train():
        options = {"gradient_accumulation_steps": 1, "max_steps": 2}
        trainer = trl_runs.build("GRPO", path_of["qwen3"], tmp_path, beta=0.1, **options)
        critic = trl_runs.build("DPO", path_of["qwen3"], tmp_path, **options)
        critic.ref_model, reward = trainer.ref_model, trainer.reward_funcs[0]

        def train_critic(*args, **columns):
            state = torch.get_rng_state()
            critic.train()
            torch.set_rng_state(state)
            return reward(*args, **columns)

        trainer.reward_funcs[0] = train_critic
        trainer.train()
        return [entry["loss"] for run in (trainer, critic) for entry in run.state.log_history if "loss" in entry]

    plain = train()
    with patched_trl():
        patched = train()
    assert patched == pytest.approx(plain, abs=1e-6)


def test_a_copy_of_a_caught_model_is_a_model_of_its_own(path_of):
    model = transformers.AutoModelForCausalLM.from_pretrained(path_of["qwen3"])
    with caught_calls([model], lambda *call: "caught"):
        other = copy.deepcopy(model)
        assert model(fused_lm_head=True) == "caught"
        assert other._call_impl.__self__ is other
        other.lm_head = torch.nn.Identity()
        assert other(torch.ones(1, 2, dtype=torch.long)).logits.shape[-1] == model.config.hidden_size
    assert "_call_impl" not in vars(model)


def test_a_float32_head_on_a_bfloat16_body(path_of, tmp_path):
    """TRL's cast_lm_head_to_fp32: both compute the head in float32, so the first step agrees as in float32. The body,
    which rounds by its layout, runs TRL's."""
    options = {"dtype": "bfloat16", "cast_lm_head_to_fp32": True, "entropy_coef": 0.02, "max_steps": 1}
    options["patch_options"] = {"whole_step": False}
    plain, patched = trl_runs.pair("GRPO", path_of["qwen3"], tmp_path, **options)
    for name in ("loss", "kl", "entropy", "grad_norm"):
        assert patched.log[name] == pytest.approx(plain.log[name], rel=1e-3, abs=1e-6), name
    assert patched.head_calls > 0
    assert patched.forwards == plain.forwards
