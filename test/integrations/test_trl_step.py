"""The whole step under TRL: what the model runs of a call, and that the outputs are TRL's.

Whole runs: test_trl_runs.py.
"""

import logging
import math

import pytest
import torch
import transformers

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="PEFT is not installed")

import trl.trainer.utils as trl_utils
from peft import LoraConfig
from test_architectures import image_text_model
from test_trl_runs import IMAGE, qwen3, vlm

import trl_runs
from hf_models import assert_same_gradients, build
from liger_rl import patch_trl
from liger_rl.integrations.trl import patched_trl, unpatch_trl
from liger_rl.integrations.trl.forward import CALL, ModelCall
from liger_rl.integrations.trl.window import _join_calls
from liger_rl.step import step, trial
from liger_rl.step.facts import PACKED_INPUTS
from liger_rl.step.layout import MAX_DENSE_TOKENS
from peaks import tensor_peak


class AfterAStep(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            unpatch_trl()


@pytest.mark.parametrize(
    ("options", "trees"),
    [
        ({"prepare": lambda trainer: trainer.add_callback(AfterAStep())}, [True, False]),
        ({"peft_config": LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)}, [True, True]),
        (
            {"prepare": lambda trainer: setattr(trainer.model.model.layers[0].self_attn, "attention_dropout", 0.1)},
            [False] * 2,
        ),
    ],
    ids=["unpatched", "dropout of LoRA", "dropout"],
)
def test_how_the_model_runs(options, trees, path_of, tmp_path, caplog):
    caplog.set_level(logging.INFO, "liger_rl")
    # With a bonus for entropy no sequence is idle.
    options = {"num_iterations": 1, "beta": 0.0, "entropy_coef": 0.02, "max_completion_length": 6} | options
    run = trl_runs.train("GRPO", path_of["qwen3"], tmp_path, patch=True, max_steps=2, **options)
    assert [forward.tree for forward in run.forwards] == trees
    has_dropout = "prepare" in options and trees[0] is False
    assert ("dropout draws for each sequence" in caplog.text) == has_dropout


# --- the forward ------------------------------------------------------------------------------------------------------

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def batch(*, shared=24, padding=3):
    """Two pairs of sequences with a common prefix, padded on both sides."""
    ids = torch.randint(3, 40, (4, 32))
    ids[1::2, : padding + shared] = ids[::2, : padding + shared]
    mask = torch.ones_like(ids)
    mask[:, :padding] = 0
    mask[1, 32 - padding :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, : padding + shared - 4] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def fused(make=qwen3):
    torch.manual_seed(0)
    model = make().train()
    trl_utils.add_fused_lm_head(model, temperature=0.7, outputs=OUTPUTS)
    return model


def solved(model, inputs, whole_step, **call):
    """-> TRL's output, and the gradients of a loss of its log-probabilities and entropies. `call`: of `ModelCall`."""
    model.zero_grad()
    with patched_trl(whole_step=whole_step):
        output = model(**inputs, fused_lm_head=True, **{CALL: ModelCall(**call)})
    (output.log_probs.exp().sum() + 0.3 * output.entropy.square().sum()).backward()
    return output, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("checkpoints", [False, True])
def test_parts_keep_no_activations(checkpoints):
    """Sequences for which the limit of tokens is too small run in parts, each again in the backward."""
    patch_trl()
    model = fused(lambda: qwen3(hidden_size=128, intermediate_size=512))
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = {name: x.repeat(8, 1) for name, x in batch(shared=9).items()}
    inputs["input_ids"][:, 3:] = torch.randint(3, 40, (32, 29))
    inputs["labels"] = inputs["labels"].where(inputs["labels"] == -100, inputs["input_ids"])
    forwards, results, peaks = trl_runs.watched(model), [], []
    for limit in (None, 1, 300):  # a window has at least the tokens of a micro-batch of TRL's
        forwards.clear()
        with tensor_peak(torch.device("cpu")) as peak:
            results.append(solved(model, inputs, True, shapes=((4, 32),) * 8, activation_tokens=limit))
        peaks.append(peak.bytes)
        most = {None: math.inf, 1: 4 * 29, 300: 300}[limit]
        assert max(forward.tokens for forward in forwards) <= most
    for output, gradients in results[1:]:
        torch.testing.assert_close(output.log_probs, results[0][0].log_probs)
        assert_same_gradients(gradients, results[0][1])
    assert peaks[1] < 0.5 * peaks[0]
    assert peaks[1] < peaks[2] < 0.8 * peaks[0]


def test_parts_that_are_trees_have_a_trial(monkeypatch):
    """One row of all sequences is too long for a dense mask, but each part's is not."""
    patch_trl()
    model, inputs = fused(), batch()
    monkeypatch.setitem(MAX_DENSE_TOKENS, "cpu", 60)
    forwards, trials = trl_runs.watched(model), []
    run_trial = trial.run_trial
    monkeypatch.setattr(step, "run_trial", lambda *args: (trials.append(args[-1]), run_trial(*args))[1])
    _, gradients = solved(model, inputs, True, shapes=((2, 32),) * 2, activation_tokens=60)
    assert trials == [trial.TREES]
    assert [forward.tree for forward in forwards] == [True] * 4
    assert_same_gradients(gradients, solved(model, inputs, False)[1])


FORWARDS = {
    "trees": ({}, True),
    "no padding": ({"padding": 0}, True),
    "nothing shared": ({"shared": 9}, False),
    "nothing shared, no padding": ({"shared": 9, "padding": 0}, False),
}


@pytest.mark.parametrize(("options", "shares"), FORWARDS.values(), ids=FORWARDS)
@pytest.mark.parametrize("items", [None, torch.tensor(50)])
def test_every_output_is_trls(options, shares, items, caplog):
    caplog.set_level(logging.INFO, "liger_rl")
    patch_trl()
    inputs = {**batch(**options), "num_items_in_batch": items}
    model = fused()
    (whole, grads), (plain, expected) = (solved(model, inputs, flag) for flag in (True, False))
    assert whole.keys() == plain.keys()
    for name in plain:
        assert (whole[name].shape, whole[name].dtype) == (plain[name].shape, plain[name].dtype), name
    torch.testing.assert_close(dict(whole), dict(plain), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)
    assert ("tokens in trees" in caplog.text) == shares


# Where its four rows end, arguments of the call of two micro-batches -> the tokens of each forward. Of sequences of
# similar length in one part the padding is less, and a part that fits is not recomputed.
ROWS_OF_A_CALL = {
    "similar length": ((32, 14, 30, 12), {"shapes": ((2, 1),) * 2}, [2 * 32, 2 * 14]),
    "an idle row": (
        (32, 14, 30, 12),
        {"shapes": ((2, 1),) * 2, "idle_rows": torch.tensor([True, False, False, False])},
        [30, 2 * 14, 32],
    ),
    "parts that fit together": (
        (32, 12, 32, 12),
        {"shapes": ((2, 32),) * 2, "activation_tokens": 90},
        [2 * 32, 2 * 12],
    ),
    "parts that are recomputed": ((32,) * 4, {"shapes": ((2, 32),) * 2, "activation_tokens": 64}, [2 * 32] * 4),
}


@pytest.mark.parametrize(("ends", "call", "tokens"), ROWS_OF_A_CALL.values(), ids=ROWS_OF_A_CALL)
def test_a_call_of_two_micro_batches_pads_rows_of_similar_length(ends, call, tokens):
    patch_trl()
    model, inputs = fused(), batch(shared=9, padding=0)
    for row, end in enumerate(ends):
        inputs["attention_mask"][row, end:] = 0
        inputs["labels"][row, end:] = -100
    forwards = trl_runs.watched(model)
    whole, grads = solved(model, inputs, True, **call)
    assert [forward.tokens for forward in forwards] == tokens
    plain, expected = solved(model, inputs, False)
    torch.testing.assert_close(dict(whole), dict(plain), rtol=1e-5, atol=1e-5)
    if "idle_rows" not in call:
        torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)
        assert_same_gradients(grads, expected)


def packed_calls():
    """Of two micro-batches with a pair of sequences each, as TRL's collator makes them."""
    calls, rows = [], batch()
    for pair in (slice(2), slice(2, 4)):
        attended = rows["attention_mask"][pair] != 0
        ids, labels, positions = (
            x[attended][None] for x in (rows["input_ids"][pair], rows["labels"][pair], attended.cumsum(1) - 1)
        )
        bounds = torch.tensor([0, *attended.sum(1).cumsum(0)], dtype=torch.int32)
        call = {"input_ids": ids, "labels": labels.where(positions > 0, -100), "position_ids": positions}
        call |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds)
        call |= dict.fromkeys(("max_length_q", "max_length_k"), int(bounds.diff().max()))
        calls.append(call | {"seq_idx": ((positions == 0).cumsum(1) - 1).int()})
    return calls


def with_other_logits():
    model = qwen3()
    model.lm_head.register_forward_hook(lambda head, args, logits: 2 * logits)
    return model


# -> the model, arguments of the call, a change of the second micro-batch, the tokens of the forwards.
PACKED_CALLS = {
    "trees": (qwen3, {}, lambda call: None, [35 + 32]),
    "parts that are recomputed": (qwen3, {"activation_tokens": 1}, lambda call: None, [35, 32, 32, 35]),
    "positions that jump": (qwen3, {}, lambda call: call["position_ids"][:, 4:9].add_(1), [55, 58]),
    "as TRL runs it": (with_other_logits, {}, lambda call: None, [55, 58]),
}


@pytest.mark.parametrize(("make", "options", "change", "tokens"), PACKED_CALLS.values(), ids=PACKED_CALLS)
def test_a_call_of_two_packed_micro_batches(make, options, change, tokens):
    """Where there are no trees, each has the forward that it has in TRL."""
    patch_trl()
    model, calls, given = fused(make), packed_calls(), []
    change(calls[1])
    forwards = trl_runs.watched(model)
    model.model.register_forward_pre_hook(lambda body, args, inputs: given.append(inputs), with_kwargs=True)
    shapes = [tuple(call["input_ids"].shape) for call in calls]
    whole, grads = solved(model, _join_calls(calls), True, shapes=shapes, **options)
    assert [forward.tokens for forward in forwards] == tokens
    if forwards[0].tree:
        assert not PACKED_INPUTS & given[-1].keys()
    else:
        pairs = zip(given[-2:], calls, strict=True)
        assert all(inputs[name] is call[name] for inputs, call in pairs for name in PACKED_INPUTS)
    expected = dict.fromkeys(grads, 0.0)
    for row, call in enumerate(calls):
        plain, grad = solved(model, call, False)
        width = call["input_ids"].shape[1] - 1
        torch.testing.assert_close(
            {name: x[row : row + 1, :width] for name, x in whole.items() if name != "loss"},
            {name: x for name, x in plain.items() if name != "loss"}, rtol=1e-5, atol=1e-5,
        )  # fmt: skip
        expected = {name: expected[name] + x for name, x in grad.items()}
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)


def test_a_packed_tree_of_trl_is_left_as_it_is():
    """TRL's asynchronous GRPO packs samples that share prefixes, for an attention of its own."""
    patch_trl()
    model, given = fused(), []
    ids = torch.randint(3, 40, (1, 32))
    inputs = {
        "input_ids": ids, "position_ids": torch.tensor([[*range(20), *range(14, 26)]]), "shift_labels": ids.roll(-1, 1),
        "tree_kv_index": torch.arange(32), "tree_cu_seqlens_q": torch.tensor([0, 20, 32]), "tree_max_seqlen_q": 20,
    }  # fmt: skip
    model.model.register_forward_pre_hook(lambda body, args, inputs: given.append(inputs), with_kwargs=True)
    (whole, _), (plain, _) = (solved(model, inputs, flag) for flag in (True, False))
    assert torch.equal(whole.log_probs, plain.log_probs)
    assert all(calls[name] is inputs[name] for calls in given[-2:] for name in inputs.keys() - {"shift_labels"})


def test_text_that_is_not_causal_keeps_every_attended_token():
    patch_trl()
    model, inputs = fused(lambda: image_text_model("PaliGemma", "sdpa")), batch()
    inputs["labels"][:, -4:] = -100
    (whole, grads), (plain, expected) = (solved(model, inputs, flag) for flag in (True, False))
    torch.testing.assert_close(dict(whole), dict(plain), rtol=1e-5, atol=1e-5)
    grads, expected = ({n: grad for n, grad in found.items() if grad is not None} for found in (grads, expected))
    assert_same_gradients(grads, expected)


@pytest.mark.parametrize("shared", [24, 9], ids=["trees", "padded rows"])
@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral", "Olmoe", "GptOss"])
def test_each_micro_batch_of_a_call_has_its_router_loss(name, shared):
    patch_trl()
    attention = "eager" if name == "GptOss" else "sdpa"
    model, inputs = fused(lambda: build(name, attention=attention, output_router_logits=True)), batch(shared=shared)
    inputs["attention_mask"][1, 20:] = 0
    inputs["labels"][1, 20:] = -100
    forwards = trl_runs.watched(model)

    def solve(calls, whole_step, **known):
        model.zero_grad()
        with patched_trl(whole_step=whole_step):
            outputs = [model(**call, fused_lm_head=True, **{CALL: ModelCall(**known)}) for call in calls]
        losses = torch.cat([output.aux_loss.view(-1) for output in outputs])
        total = sum(output.log_probs.exp().sum() for output in outputs) + (losses * torch.tensor([3.0, 5.0])).sum()
        total.backward()
        return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    losses, grads = solve([inputs], True, shapes=((2, 32),) * 2)
    assert [forward.tree for forward in forwards] == [shared == 24]
    calls = [{key: value[rows] for key, value in inputs.items()} for rows in (slice(2), slice(2, 4))]
    expected_losses, expected = solve(calls, False)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-6, atol=1e-6)
    assert_same_gradients(grads, expected)


def with_images(inputs):
    ids = inputs["input_ids"].clone()
    ids[:, 4:8] = IMAGE
    return {"input_ids": ids, "pixel_values": torch.randn(4, 3, 8, 8)}


def with_invocations():
    peft = pytest.importorskip("peft", reason="the adapters are PEFT's")
    config = peft.LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[5], task_type="CAUSAL_LM")
    return peft.inject_adapter_in_model(config, qwen3())


# What is said of a batch -> the model, and the inputs that change.
REASONS = {
    "activated LoRA begins at a token of each sequence": (with_invocations, lambda inputs: {}),
    "it has no attention_mask": (qwen3, lambda inputs: {"attention_mask": None}),
    "its labels are not its input_ids": (
        qwen3, lambda inputs: {"labels": inputs["labels"].where(inputs["labels"] < 0, 5)},
    ),
    "it has token_type_ids, which belong to tokens by their place": (  # those of type 0 see later ones
        lambda: image_text_model("PaliGemma", "sdpa"),
        lambda inputs: {"token_type_ids": torch.zeros_like(inputs["input_ids"])},
    ),
    "it has pixel_values, which belong to tokens by their place": (vlm, with_images),
    "the call has no input_ids or no labels by name": (
        qwen3, lambda inputs: {"input_ids": None, "inputs_embeds": torch.randn(4, 32, 16)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", REASONS)
def test_a_batch_runs_as_it_is_and_the_log_says_once_why(reason, caplog):
    caplog.set_level(logging.INFO, "liger_rl")
    make, change = REASONS[reason]
    patch_trl()
    model, inputs = fused(make), batch()
    inputs |= change(inputs)
    (whole, grads), _, (plain, expected) = (solved(model, inputs, flag) for flag in (True, True, False))
    assert caplog.text.count(reason) == 1
    assert torch.equal(whole.log_probs, plain.log_probs)
    torch.testing.assert_close(grads, expected)


def test_a_compiled_forward_is_left_as_it_is(monkeypatch):
    """As Dynamo sees it."""
    patch_trl()
    model, inputs = fused(), batch()
    forwards = trl_runs.watched(model)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    solved(model, inputs, True)
    assert [forward.tokens for forward in forwards] == [inputs["input_ids"].numel()]
