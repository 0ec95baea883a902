"""When the forward of the scores is that of the training, and when it is not: `integrations/trl/kept_scores.py`."""

from functools import partial

import pytest
import torch
from torch import nn

pytest.importorskip("trl", reason="TRL is not installed")

import trl_runs
from devices import NEEDS_GPU
from hf_models import CONFIGS, transformers
from liger_rl.integrations.trl import forward
from liger_rl.integrations.trl.kept_scores import KeptScores

OPTIONS = {
    "num_iterations": 1, "beta": 0.0, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
    "max_completion_length": 6, "max_steps": 2,
}  # fmt: skip


@pytest.fixture
def taken(monkeypatch) -> list[bool]:
    """Grows by each training that asks for what the scores have kept: whether it has got it."""
    taken, take = [], KeptScores.take

    def record(*args):
        outputs = take(*args)
        taken.append(outputs is not None)
        return outputs

    monkeypatch.setattr(KeptScores, "take", record)
    return taken


def run_both(path_of, tmp_path, **options) -> None:
    plain, patched = trl_runs.pair("RLOO", path_of["qwen3"], tmp_path, **OPTIONS | {"seed": 3} | options)
    trl_runs.assert_same_run(patched, plain)


def with_rewards(change):
    """Rewards that change something between the scores and the training."""

    def prepare(trainer):
        def reward(completion_ids, **columns):
            change(trainer)
            return trl_runs.evenness(completion_ids)

        trainer.reward_funcs[0] = reward

    return prepare


def test_each_step_takes_what_its_scores_have_kept(path_of, tmp_path, taken):
    run_both(path_of, tmp_path)
    assert taken == [True, True]


def scale_a_weight(trainer):
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(1.01)


def test_a_model_that_has_changed_since_runs_again(path_of, tmp_path, taken):
    run_both(path_of, tmp_path, prepare=with_rewards(scale_a_weight))
    assert not taken


class Judge(nn.Module):
    """A reward that is a model."""

    config = type("Config", (), {"_name_or_path": "judge"})


WITHOUT = {
    "two iterations": {"num_iterations": 2},
    "a generation of two steps": {"steps_per_generation": 4},
    "memory=0": {"patch_options": {"memory": 0}},
    "whole_step=False": {"patch_options": {"whole_step": False}},
    "a window of one micro-batch": {"patch_options": {"max_tokens": 40}},
    "a reward that is a model": {"prepare": lambda trainer: trainer.reward_funcs.append(Judge())},
    "dropout": {"prepare": lambda trainer: trainer.model.register_module("dropout", nn.Dropout(0.1))},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
}


@pytest.mark.parametrize("options", WITHOUT.values(), ids=WITHOUT)
def test_scores_without_a_graph(options, path_of, tmp_path, taken, monkeypatch):
    if "prepare" in options:  # which has no reward to give
        calculate = trl_runs.trl.RLOOTrainer._calculate_rewards

        def calculate_own(trainer, *args):
            functions, trainer.reward_funcs = trainer.reward_funcs, trainer.reward_funcs[:1]
            try:
                return calculate(trainer, *args)
            finally:
                trainer.reward_funcs = functions

        monkeypatch.setattr(trl_runs.trl.RLOOTrainer, "_calculate_rewards", calculate_own)
    run_both(path_of, tmp_path, **options)
    assert not taken


@pytest.mark.parametrize(("idle", "recomputed"), [(0, 2), (4, 1), (8, 1)])
def test_layers_are_recomputed_for_groups_with_an_advantage(idle, recomputed, path_of, tmp_path, taken, monkeypatch):
    """A loss without any needs a graph to call backward on. TRL turns checkpoints off for scores."""
    runs, silu = [], nn.functional.silu

    def count(hidden, inplace=False):
        runs.append(hidden.shape)
        return silu(hidden, inplace)

    def scored(batch):
        runs[:] = runs[-2 * 2 :]  # of two layers for two groups, without the rollouts
        return {**batch, "advantages": batch["advantages"] * (torch.arange(8) >= idle)}

    monkeypatch.setattr(nn.functional, "silu", count)
    options = OPTIONS | {"max_steps": 1, "gradient_checkpointing": True, "scored": scored}
    trl_runs.train("RLOO", path_of["qwen3"], tmp_path, patch=True, **options)
    assert taken == [True]
    assert len(runs) == 2 * (2 + recomputed)


def test_rewards_find_half_of_the_memory(path_of, tmp_path, taken, monkeypatch):
    """The first step's scores and training are one call with a graph; the second's model changes between them."""
    shares, run = [], forward.run_with_kept_layers

    def record(model, run_model, tokens, *, share, agreed):
        shares.append((torch.is_grad_enabled(), share))
        return run(model, run_model, tokens, share=share, agreed=agreed)

    monkeypatch.setattr(forward, "run_with_kept_layers", record)
    changes = iter([lambda trainer: None, scale_a_weight])
    options = OPTIONS | {"prepare": with_rewards(lambda trainer: next(changes)(trainer))}
    trl_runs.train("RLOO", path_of["qwen3"], tmp_path, patch=True, patch_options={"memory": 0.7}, **options)
    assert taken == [True]
    assert shares == [(True, 0.5), (True, 0.5), (True, 0.7)]


def test_scores_that_must_run_in_parts(path_of, tmp_path, taken, monkeypatch):
    plan = forward._plan
    monkeypatch.setattr(forward, "_plan", lambda *args: plan(*args)._replace(in_parts=True))
    run_both(path_of, tmp_path)
    assert not taken


def test_scores_of_a_model_that_runs_as_in_trl(path_of, tmp_path, taken, monkeypatch):
    graphs, run_as_trl = [], forward._run_as_trl

    def record(run_model, call, *args):
        graphs.append((call.keeps, torch.is_grad_enabled()))
        return run_as_trl(run_model, call, *args)

    monkeypatch.setattr(forward, "find_difference", lambda *args: "differs in a test")
    monkeypatch.setattr(forward, "_run_as_trl", record)
    plain, patched = trl_runs.pair("RLOO", path_of["qwen3"], tmp_path, **OPTIONS | {"seed": 3, "max_steps": 1})
    trl_runs.assert_same_run(
        patched, plain, trl_runs.Row("RLOO", {}, is_ours=False, trees=False, is_logged=False, calls=(4, 2))
    )
    assert not taken
    assert graphs == [(True, False), (False, True)]


def test_memory_that_is_too_small_for_a_graph(path_of, tmp_path, taken, monkeypatch):
    def run_out(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(forward, "KeptScores", run_out)
    run_both(path_of, tmp_path)
    assert not taken


def test_a_training_on_other_sequences_runs_them_and_is_the_last_to_ask(path_of, tmp_path, taken):
    def scored(batch):
        batch["completion_mask"][:, -1] = 0
        return batch

    run_both(path_of, tmp_path, scored=scored)
    assert taken == [False]


def test_reentrant_checkpoints_are_known_although_scores_run_without_them(path_of, tmp_path):
    found = []

    def prepare(trainer):
        compute_loss = trainer._compute_loss

        def watch(model, inputs):
            step = vars(trainer)["_liger_rl_step"]
            found.append(step.read_facts(step.find_wrapped(model)).has_reentrant_checkpoints)
            return compute_loss(model, inputs)

        trainer._compute_loss = watch

    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    train = partial(trl_runs.train, "RLOO", path_of["qwen3"], tmp_path, patch=True, prepare=prepare)
    train(**OPTIONS | options | {"num_iterations": 2})
    assert found
    assert all(found)


# A layout needs 1,024 tokens on a GPU, and flex attention heads of 16 numbers.
LARGER = {"hidden_size": 64, "head_dim": 16, "max_position_embeddings": 512, "vocab_size": len(trl_runs.TOKENS)}
LARGER |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
LONG = {"prompt": [" ".join(f"w{(3 * i + n) % 37}" for i in range(300 - 9 * n)) for n in range(4)]}


@NEEDS_GPU
@pytest.mark.parametrize("checkpoints", [True, False])
def test_gpu_runs_keep_scores_and_layers(checkpoints, tmp_path, taken, caplog):
    caplog.set_level("INFO", "liger_rl")

    def make():
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**CONFIGS["Qwen3"] | LARGER))

    options = {"use_cpu": False, "gradient_checkpointing": checkpoints, "max_steps": 6, "learning_rate": 0.0}
    path = trl_runs.save(make, tmp_path)
    plain, patched = trl_runs.pair("RLOO", path, tmp_path, **OPTIONS | options | {"data": LONG, "beta": 0.1, "seed": 3})
    assert len(taken) >= 3
    assert all(taken)
    for name in ("loss", "grad_norm", "entropy", "kl"):
        assert patched.log[name] == pytest.approx(plain.log[name], rel=2e-3, abs=1e-5), name
    assert patched.log["liger_rl/body_tokens_saved"][-1] > 0.3
    assert ("2 of 2 layers kept" in caplog.text) == checkpoints
