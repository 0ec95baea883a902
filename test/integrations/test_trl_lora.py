"""LoRA adapters on the lm_head under TRL's trainers: whole runs against runs with full logits, and what is refused."""

import functools
import importlib
from contextlib import contextmanager
from types import MethodType

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="PEFT is not installed")

import trl.trainer.grpo_trainer as grpo_module
import trl.trainer.utils as trl_utils
from peft import LoraConfig, LoHaConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

import oracles
import trl_runs
from liger_rl.integrations import trl as integration
from liger_rl.integrations import trl_adapters
from liger_rl.integrations.trl import patch_trl, patched_trl, unpatch_trl

TARGETS = ["q_proj", "v_proj", "down_proj", "lm_head"]
# Weights of both factors at random, so that the adapter counts from the first step on.
LORA = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 4, "target_modules": TARGETS, "init_lora_weights": False}


@pytest.fixture(autouse=True)
def unpatched():
    yield
    unpatch_trl()


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {name: trl_runs.save_model(name, directory) for name in trl_runs.MODELS}


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
            for values in (*oracles.logits_logprobs(z, targets), *oracles.logits_extras(z, targets))
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
        for name in trl_adapters.TRAINERS:
            module = importlib.import_module(name)
            patch.setattr(module, "add_fused_lm_head", add_full_head)
            patch.setattr(module, "BaseTunerLayer", ())
        yield


@contextmanager
def terms_seen():
    """-> a list that grows by the number of low-rank terms of every call of our op."""
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        plain = integration.linear_logprobs

        def counting(*args, low_rank=(), **options):
            seen.append(len(low_rank))
            return plain(*args, low_rank=low_rank, **options)

        patch.setattr(integration, "linear_logprobs", counting)
        yield seen


def both(kind, model, directory, **options):
    """-> the run with full logits, the patched one, and the number of low-rank terms of each call of our op.

    `model` is a path, or a function that makes a model.
    """
    made = (lambda: model) if isinstance(model, str) else model
    with full_logits():
        full = trl_runs.train(kind, made(), directory, patch=False, **options)
    with terms_seen() as seen:
        patched = trl_runs.train(kind, made(), directory, patch=True, **options)
    return full, patched, seen[1:]  # the patch has tried its options


def assert_head_was_trained(run, model):
    moved = {name for name, weight in run.weights.items() if "lm_head.lora" in name and weight.abs().max() > 0}
    assert len(moved) >= 2, model


@pytest.mark.parametrize("model", ["qwen3", "gemma2"])
def test_grpo(model, path_of, tmp_path):
    """With a KL penalty towards the model without adapters, an entropy bonus, a temperature; Gemma 2 has a softcap."""
    full, patched, terms = both(
        "grpo",
        path_of[model],
        tmp_path,
        peft_config=LoraConfig(**LORA),
        max_steps=10,
        epsilon=0.02,
        entropy_coef=0.02,
    )
    trl_runs.assert_same_run(patched, full)
    # The reference turns the adapters off.
    assert set(terms) == {0, 1}
    assert min(full.log["kl"]) > 0.01
    assert full.log["entropy"][0] != full.log["entropy"][-1]
    assert_head_was_trained(patched, model)


@pytest.mark.parametrize("kind", ["rloo", "dpo", "kto", "sft"])
def test_other_trainers(kind, path_of, tmp_path):
    full, patched, terms = both(kind, path_of["qwen3"], tmp_path, peft_config=LoraConfig(**LORA), max_steps=3)
    trl_runs.assert_same_run(patched, full)
    assert 1 in terms
