"""OpenRLHF's Actor with our forward beside its own; where its source is. DeepSpeed and flash-attn are stand-ins."""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

import checkouts
from hf_models import build
from liger_rl.integrations.openrlhf import patch_openrlhf, patched_openrlhf, unpatch_openrlhf
from skyrl_modules import pad_input, unpad_input

BATCH, TOKENS, ACTIONS, VOCAB = 3, 9, 5, 137


FLASH = {
    "unpad_input": unpad_input,
    "pad_input": pad_input,
    "index_first_axis": lambda values, indices: values[indices],
    "rearrange": lambda values, pattern: values.flatten(0, 1),
}


@pytest.fixture
def actors(monkeypatch):
    """-> a function that makes an Actor of OpenRLHF's."""
    root = checkouts.source("OpenRLHF")
    pytest.importorskip("peft", reason="OpenRLHF needs it")
    flash = ("flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed")
    for name in ("deepspeed", *flash):
        stub = ModuleType(name)
        stub.__spec__, stub.__path__ = ModuleSpec(name, None), []
        monkeypatch.setitem(sys.modules, name, stub)
    vars(sys.modules["flash_attn.bert_padding"]).update(FLASH)
    sys.modules["flash_attn.utils.distributed"].all_gather = None
    monkeypatch.setattr(torch, "compile", lambda function: function)  # of its entropy
    checkouts.say_version(monkeypatch, "openrlhf", "0.11.2")
    with checkouts.bare(root, "openrlhf", "openrlhf.models"):
        home = importlib.import_module("openrlhf.models.actor")

        def actor(model, temperature=0.7, packing=False):
            made = home.Actor(model, temperature=temperature)
            made.packing_samples = packing
            return made

        yield actor
        unpatch_openrlhf()


def model_of(kind="Qwen3"):
    return build(kind, vocab_size=VOCAB, num_hidden_layers=1, max_position_embeddings=64)


def batch():
    ids = torch.randint(1, VOCAB, (BATCH, TOKENS))
    attention = torch.ones(BATCH, TOKENS, dtype=torch.int64)
    attention[0, :3] = attention[1, -2:] = 0
    actions = attention[:, -ACTIONS:].clone()
    actions[2, 1] = 0
    return ids, attention, actions


def outcome(actor, weights, *arguments, **options):
    actor.zero_grad()
    result = actor(*arguments, **options)
    logps, output = result if options.get("return_output") else (result, None)
    total = (logps * weights[:, : logps.shape[1]]).sum()
    entropy = None
    if options.get("return_entropy"):
        entropy = output.entropy[:, -ACTIONS:] * arguments[1]
        total = total + (entropy * weights[:, :ACTIONS]).sum()
    total.backward()
    return [logps, entropy, *(p.grad.clone() for p in actor.parameters() if p.grad is not None)]


def assert_same(mine, other):
    mine, other = ([value for value in values if value is not None] for values in (mine, other))
    torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["Qwen3", "Gemma2"])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_of_actions(actors, kind, packing, entropy):
    ids, attention, actions = batch()
    actor, weights = actors(model_of(kind), packing=packing), torch.randn(BATCH, TOKENS)
    options = {"attention_mask": attention, "return_output": True, "return_entropy": entropy}
    other = outcome(actor, weights, ids, actions, **options)
    with patched_openrlhf():
        patch_openrlhf()
        assert_same(outcome(actor, weights, ids, actions, **options), other)
    assert_same(outcome(actor, weights, ids, actions, **options), other)  # OpenRLHF's, on a swapped model


@pytest.mark.parametrize("packing", [False, True])
def test_of_all_tokens(actors, packing):
    """As its SFT and DPO ask."""
    ids, attention, _ = batch()
    actor, weights = actors(model_of(), packing=packing), torch.randn(BATCH, TOKENS) * attention
    options = {"attention_mask": attention, "return_logprobs": True}
    other = outcome(actor, weights, ids, **options)
    patch_openrlhf()
    mine = outcome(actor, weights, ids, **options)
    counted = attention[:, 1:] * attention[:, :-1]
    assert_same([mine[0] * counted], [other[0] * counted])
    assert mine[0].shape == other[0].shape


def test_no_logits_are_made(actors, monkeypatch):
    ids, attention, actions = batch()
    actor = actors(model_of())
    patch_openrlhf()
    actor(ids, actions, attention_mask=attention)  # which swaps, and tries the head out
    shapes, linear = [], torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *a: shapes.append(linear(*a).shape) or linear(*a))
    actor(ids, actions, attention_mask=attention)
    assert shapes
    assert all(VOCAB not in shape or 0 in shape for shape in shapes)


def test_a_call_for_logits_stays(actors):
    ids, attention, _ = batch()
    actor = actors(model_of(), temperature=1.0)
    expected = actor(ids, attention_mask=attention, return_output=True)["logits"]
    patch_openrlhf()
    assert torch.equal(actor(ids, attention_mask=attention, return_output=True)["logits"], expected)


def test_zero_3_is_not_served(actors):
    ids, attention, actions = batch()
    actor = actors(model_of())
    next(actor.parameters()).ds_id = 0
    patch_openrlhf()
    with pytest.raises(ValueError, match="ZeRO-3"):
        actor(ids, actions, attention_mask=attention)
