"""When the forward of the scores is that of the training, and when it is not: `integrations/trl/kept_scores.py`."""

import gc
import itertools
from functools import partial
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn

pytest.importorskip("trl", reason="TRL is not installed")

import trl_runs
from devices import NEEDS_GPU
from hf_models import CONFIGS, transformers
from liger_rl.integrations.trl import explain_trl, forward, kept_scores, optimizer_step, patched_trl
from liger_rl.integrations.trl.kept_scores import KeptScores
from liger_rl.step import facts, memory

OPTIONS = {
    "num_iterations": 1, "beta": 0.0, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
    "max_completion_length": 6, "max_steps": 2,
}  # fmt: skip


ONE = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}


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
    trainers = []
    run_both(path_of, tmp_path, prepare=trainers.append)
    assert taken == [True, True]
    with patched_trl():
        assert "; scores and loss in one forward" in explain_trl(trainers[1])


def test_a_frozen_reference_is_laid_out_as_the_policy(path_of, tmp_path, taken, monkeypatch):
    """Its tokens cost the host and the device in another proportion."""
    parts, run = [], forward.run

    def count_tokens(model, modules, device):
        return 20.0 if any(p.requires_grad for p in model.parameters()) else 1e9

    def record(layout, *args, **options):
        parts.append(len(layout.live))
        return run(layout, *args, **options)

    monkeypatch.setattr(facts, "_count_host_tokens", count_tokens)
    monkeypatch.setattr(forward, "run", record)
    trl_runs.train("RLOO", path_of["qwen3"], tmp_path, patch=True, **OPTIONS | {"beta": 0.1})
    assert taken == [True, True]
    assert parts == [2, 2, 2, 2]  # of the policy and the reference


def scale_a_weight(trainer):
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(1.01)


def test_a_model_that_has_changed_since_runs_again(path_of, tmp_path, taken):
    run_both(path_of, tmp_path, prepare=with_rewards(scale_a_weight))
    assert not taken


class Judge(nn.Module):
    """A reward that is a model."""

    config = type("Config", (), {"_name_or_path": "judge"})


JUDGE = Judge()


class HasModel:
    def __init__(self):
        self.model = JUDGE

    def judge(self):
        return self.model


def close_over(judge):
    return lambda: judge


def subclass_with(name):
    """The trainer's class with a method of its own."""

    def prepare(trainer):
        kind = type(trainer)
        own = getattr(kind, name)
        trainer.__class__ = type("Own", (kind,), {name: lambda self, *args, **options: own(self, *args, **options)})

    return prepare


WITHOUT = {
    "two iterations": {"num_iterations": 2},
    "a generation of two steps": {"steps_per_generation": 4},
    "memory=0": {"patch_options": {"memory": 0}},
    "whole_step=False": {"patch_options": {"whole_step": False}},
    "a window of one micro-batch": {"patch_options": {"max_tokens": 40}},
    "a reward that is a model": {"prepare": lambda trainer: trainer.reward_funcs.append(Judge())},
    "a reward with a model": {"prepare": lambda trainer: trainer.reward_funcs.append(HasModel())},
    "a reward's method": {"prepare": lambda trainer: trainer.reward_funcs.append(HasModel().judge)},
    "a reward's global": {"prepare": lambda trainer: trainer.reward_funcs.append(lambda: JUDGE(1))},
    "a reward's closure": {"prepare": lambda trainer: trainer.reward_funcs.append(close_over(Judge()))},
    "a context of its own": {"prepare": subclass_with("compute_loss_context_manager"), **ONE},
    "inputs of its own": {"prepare": subclass_with("_prepare_inputs"), **ONE},
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
        return without_first(idle, batch)

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


@pytest.mark.parametrize("idle", [0, 4])
def test_memory_is_measured_of_what_has_a_backward(idle, path_of, tmp_path, taken, monkeypatch):
    """A recomputed layer takes 100 bytes for each number of its MLP. Rewards take much, between scores and training."""
    now, peak, silu = 0, 0, nn.functional.silu

    def read(device, *, restart_peak=False):
        nonlocal peak
        found = memory.DeviceMemory(10**12, now, peak)
        peak = now if restart_peak else peak
        return found

    def allocate(hidden, inplace=False):
        nonlocal now, peak
        now += 100 * hidden.numel() if memory._is_in_backward() else 0
        peak = max(peak, now)
        return silu(hidden, inplace)

    def take_memory(trainer):
        nonlocal peak
        peak = 10**10

    monkeypatch.setattr(memory, "read_memory", read)
    monkeypatch.setattr(nn.functional, "silu", allocate)
    monkeypatch.setattr(memory, "_measurements", WeakKeyDictionary())
    options = OPTIONS | {"max_steps": 1, "gradient_checkpointing": True, "prepare": with_rewards(take_memory)}
    scored = partial(without_first, idle)
    trl_runs.train("RLOO", path_of["qwen3"], tmp_path, patch=True, scored=scored, **options)
    (measured,) = memory._measurements.values()
    assert taken == [True]
    hidden, inner, layers = (
        trl_runs.SIZES[f"{name}"] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    assert measured.layer_bytes == 100 * inner - 4 * hidden
    assert measured.peak_bytes == pytest.approx(layers * 100 * inner, rel=0.05)  # less the gradients


def without_first(rows, batch):
    return {**batch, "advantages": batch["advantages"] * (torch.arange(len(batch["advantages"])) >= rows)}


@pytest.mark.parametrize(("half", "expected"), [(1, []), (1000, [True])])
def test_scores_with_a_graph_take_half_of_the_memory(half, expected, path_of, tmp_path, taken, monkeypatch):
    shares = []

    def find_limit(trainer, model, measured, share):
        shares.append(share)
        return half if share == kept_scores.MOST_MEMORY else 1000

    monkeypatch.setattr(optimizer_step, "_find_activation_tokens", find_limit)
    run_both(path_of, tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, num_generations=4)
    assert taken == expected
    assert shares == [0.8, 0.8, 0.5]  # the windows of the first step have one micro-batch, to measure it


def test_what_nothing_measures_is_not_kept(path_of, tmp_path, taken, monkeypatch):
    """One micro-batch without checkpoints, on a GPU."""
    monkeypatch.setattr(optimizer_step.OptimizerStep, "bounds_kept", False)
    run_both(path_of, tmp_path, **ONE)
    assert not taken


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


@pytest.mark.parametrize(("times", "expected"), [(1, [True, True]), (2, [])])
@pytest.mark.parametrize("where", ["KeptScores", "_make_output"])
def test_memory_that_is_too_small_for_a_graph(where, times, expected, path_of, tmp_path, taken, monkeypatch, caplog):
    """The scores run again without a graph. After two failures they ask for none."""
    caplog.set_level("INFO", "liger_rl")
    make, failures, alive = getattr(forward, where), [], []

    def run_out(*args):
        keeps = where == "KeptScores" or args[1].keeps
        if keeps and len(failures) < times:
            failures.append(where)
            raise torch.OutOfMemoryError
        if not (keeps or torch.is_grad_enabled()):  # the scores again
            alive.append([type(x) for x in gc.get_objects()].count(KeptScores))
        return make(*args)

    monkeypatch.setattr(forward, where, run_out)
    run_both(path_of, tmp_path, max_steps=3)
    assert taken == expected
    assert len(failures) == times
    assert not any(alive)
    assert "scores and loss have a forward each: memory ran out" in caplog.text


@pytest.mark.parametrize("accumulation", [1, 2])
def test_nothing_is_kept_after_a_reward_has_failed(accumulation, path_of, tmp_path):
    trainers = []

    def fail(trainer):
        trainers.append(trainer)
        assert step_of(trainer)._kept is not None
        raise ArithmeticError

    options = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 8 // accumulation}
    with pytest.raises(ArithmeticError):
        trl_runs.train(
            "RLOO", path_of["qwen3"], tmp_path, patch=True, **OPTIONS | options | {"prepare": with_rewards(fail)}
        )
    assert step_of(trainers[0])._kept is None


def step_of(trainer):
    return vars(trainer)["_liger_rl_step"]


class Noise(nn.Module):
    """Draws, under no name that is known."""

    def forward(self, hidden):
        return nn.functional.silu(hidden) + 0 * torch.rand(())


def test_a_model_that_draws_random_numbers_has_two_forwards(path_of, tmp_path, taken, caplog):
    caplog.set_level("INFO", "liger_rl")

    def prepare(trainer):
        trainer.model.model.layers[0].mlp.act_fn = Noise()

    run = trl_runs.train("RLOO", path_of["qwen3"], tmp_path, patch=True, **OPTIONS | {"prepare": prepare})
    assert not taken
    assert "scores and loss have a forward each: the model draws random numbers" in caplog.text
    assert len(run.log["loss"]) == 2


@pytest.mark.parametrize(("wrong", "expected"), [([1, 3], [False, True, False, True]), ([1, 2], [False, False])])
def test_a_training_on_other_sequences_runs_them(wrong, expected, path_of, tmp_path, taken):
    """In these of four steps. After two in a row none is asked."""
    numbers = itertools.cycle([1, 2, 3, 4])

    def scored(batch):
        if next(numbers) in wrong:
            batch["completion_mask"][:, -1] = 0
        return batch

    run_both(path_of, tmp_path, scored=scored, max_steps=4)
    assert taken == expected


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
