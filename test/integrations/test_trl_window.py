"""The micro-batches of an optimizer step in one forward: what differs from TRL, errors, and two trainers at once.

That the runs are TRL's: test_trl_runs.py.
"""

import gc
import itertools
import math
import weakref
from contextlib import nullcontext
from functools import partial
from types import MethodType
from unittest import mock

import pytest
import torch
import transformers
from torch.utils.data import SequentialSampler

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="PEFT is not installed")

from peft import LoHaConfig, PrefixTuningConfig
from test_trl_runs import EVALUATED, LORA, NEFTUNE, SINGLES, apart, architecture, leave_out_the_last, moe

import trl_runs
from hf_models import BEFORE_5
from liger_rl.integrations.trl import between, optimizer_step, patched_trl
from liger_rl.integrations.trl.between import StateReader
from liger_rl.integrations.trl.optimizer_step import OptimizerStep
from trl_runs import PROMPTS

OPTIONS = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_steps": 2}


not_before_5 = pytest.mark.skipif(BEFORE_5, reason="transformers 4.57 has no such model")
JOINED_HOOKS = {"patch_options": {"joined_hooks": True}}


def pair(kind, path, directory, **options) -> tuple[trl_runs.Run, trl_runs.Run]:
    """-> the runs without the patch and with it."""
    return trl_runs.pair(kind, path, directory, **OPTIONS | options)


def test_the_router_loss_of_rows_that_run_alone_is_trls(tmp_path):
    """Also behind a run whose micro-batches ran together."""
    path = trl_runs.save(moe, tmp_path)
    trl_runs.train("SFT", path, tmp_path, patch=True, **OPTIONS)
    plain, _ = trl_runs.assert_row(apart("SFT", moe, trees=False, **NEFTUNE), path, tmp_path)
    assert min(plain.log["aux_loss"]) > 0.1


@pytest.mark.parametrize(
    ("kind", "name", "bound"),
    [
        ("SFT", "qwen3", 2**-8),
        ("DPO", "qwen3", 2**-8),
        pytest.param("SFT", "Qwen3_5Text", 2**-6, marks=not_before_5),  # TRL's own loss is 0.002 to 0.013 off
    ],
)
def test_bf16_is_about_as_far_from_float32(kind, name, bound, path_of, tmp_path):
    """Of several models: test/convergence/test_trl_training.py."""
    path = path_of[name] if name == "qwen3" else trl_runs.save(partial(architecture, name), tmp_path / "state")
    exact, plain, patched = (
        trl_runs.train(kind, path, tmp_path, patch=patch, bf16=bf16, **OPTIONS)
        for patch, bf16 in ((False, False), (False, True), (True, True))
    )
    assert (plain.calls, patched.calls) == ((4, 2) if kind == "SFT" else (8, 4))
    assert 0 < trl_runs.weight_distance(patched, exact) < 2 * trl_runs.weight_distance(plain, exact)
    assert trl_runs.log_distance(patched, exact, "loss") < bound


def test_a_resumed_run_is_the_uninterrupted_one(path_of, tmp_path):
    options = OPTIONS | {"patch": True, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    whole = trl_runs.train("KTO", path_of["qwen3"], tmp_path, **options)

    def resume(trainer):
        run = trainer.train
        trainer.train = lambda: run(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))

    resumed = trl_runs.train("KTO", path_of["qwen3"], tmp_path, prepare=resume, **options)
    assert resumed.calls == 2 * 4
    for name in whole.log.keys() - {"num_tokens", "train_loss", *trl_runs.CLOCKS}:  # TRL counts tokens from 0 again
        assert resumed.log[name] == whole.log[name]
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in whole.weights.items())


LONGER = {"prompt": PROMPTS * 2, "completion": [" w1"] * 4 + [" w2 w3" * 12] * 4}


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True, "peft_config": LORA}])
def test_a_window_of_longer_sequences_than_before_runs_in_parts(options, path_of, tmp_path):
    """Its size was chosen from the optimizer step before. Each part runs again in the backward."""

    def keep_order(trainer):
        trainer._get_train_sampler = SequentialSampler

    options = SINGLES | {"data": LONGER, "max_length": None, "prepare": keep_order} | options
    plain, patched = pair("SFT", path_of["qwen3"], tmp_path, patch_options={"max_tokens": 140}, **options)
    trl_runs.assert_same_run(patched, plain)
    # Four micro-batches of one forward, then a window of four.
    assert (patched.calls, patched.backwards) == (5, 5)
    tokens = [forward.tokens for forward in patched.forwards]
    assert len(tokens) == 4 + 2 * 2
    assert max(tokens) <= 140 < sum(tokens[4:]) / 2


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO"])
def test_prefix_tuning_runs_each_micro_batch(kind, path_of, tmp_path):
    """Its keys and values have the rows of one micro-batch."""
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    plain, patched = pair(kind, path_of["qwen3"], tmp_path, peft_config=config)
    trl_runs.assert_same_run(patched, plain)
    assert patched.calls == plain.calls


class Frozen(torch.nn.Linear):
    def train(self, mode=True):
        return super().train(False)


def test_a_model_whose_train_would_change_nothing():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    state = StateReader(model)
    assert state.is_training(model)
    assert not state.is_training(Frozen(2, 2))
    model[1].eval()
    assert not state.is_training(model)
    model.train()
    model[0].train = lambda mode: model[0]
    assert not state.is_training(model)
    assert not StateReader(torch.nn.Sequential(Frozen(2, 2))).is_training(Frozen(2, 2))


def test_a_model_with_a_train_of_its_own_keeps_it(path_of, tmp_path):
    modes = []

    class Recorder(transformers.TrainerCallback):
        def on_step_end(self, *args, model, **options):
            modes.append(model.model.training)

    def stay(trainer):
        model = trainer.model
        model.train = lambda mode=True: torch.nn.Module.train(model, mode).model.eval()
        trainer.add_callback(Recorder())

    plain, patched = pair("SFT", path_of["qwen3"], tmp_path, prepare=stay)
    assert (plain.calls, patched.calls) == (4, 2)
    assert modes == [False] * 4
    trl_runs.assert_same_run(patched, plain)


def test_no_module_is_visited_in_vain(path_of, tmp_path, monkeypatch):
    """transformers calls `model.train()` in each micro-batch. It changes a module only behind an evaluation."""
    visited, modes, original = [], [], torch.nn.Module.train

    def train(module, mode=True):
        visited.append(module)
        return original(module, mode)

    class Evaluated(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, *, model, **options):
            visited.clear()
            model.model.layers[0].train(state.global_step != 1)

        def on_step_end(self, args, state, control, *, model, **options):
            modes.append((visited.count(model), model.model.layers[0].training))

    monkeypatch.setattr(torch.nn.Module, "train", train)
    monkeypatch.setattr(between, "PLAIN_TRAIN", (*between.PLAIN_TRAIN, train))
    options = {"prepare": lambda trainer: trainer.add_callback(Evaluated()), "max_steps": 3}
    plain, patched = pair("SFT", path_of["qwen3"], tmp_path, **options)
    assert (plain.calls, patched.calls) == (6, 3)
    assert modes[:3] == [(2, True)] * 3
    assert modes[4:] == [(1, True), (0, True)]  # the first step's depends on transformers


# --- what differs -----------------------------------------------------------------------------------------------------


def test_the_loss_of_an_optimizer_step_comes_with_its_last_micro_batch(path_of, tmp_path, monkeypatch):
    losses, run = [], OptimizerStep.run_micro_batch

    def record(step, run_training_step):
        losses.append(run(step, run_training_step))
        return losses[-1]

    monkeypatch.setattr(OptimizerStep, "run_micro_batch", record)
    patched = trl_runs.train("SFT", path_of["qwen3"], tmp_path, patch=True, **OPTIONS)
    assert losses[::2] == [0.0, 0.0]
    assert min(losses[1::2]) > 0
    assert torch.stack(losses[1::2]).tolist() == pytest.approx(
        patched.log["loss"], rel=1e-5, abs=5e-5 if BEFORE_5 else 0
    )  # 4.57 logs four digits


class Evaluation(transformers.TrainerCallback):
    """Between two micro-batches."""

    def __init__(self, trainer) -> None:
        self.trainer = trainer

    def on_substep_end(self, *args, **options):
        self.trainer.evaluate()


def test_tokens_are_counted_with_the_last_micro_batch(path_of, tmp_path):
    options = EVALUATED | {"prepare": lambda trainer: trainer.add_callback(Evaluation(trainer)), **JOINED_HOOKS}
    plain, patched = pair("SFT", path_of["qwen3"], tmp_path, **options)
    assert patched.calls == 2
    # Of the first step's evaluations, between its micro-batches and behind it.
    count, number = patched.log.pop("eval_num_tokens"), plain.log.pop("eval_num_tokens")
    assert count[:2] == [0, number[1]]
    assert number[0] > 0
    trl_runs.assert_same_run(patched, plain)


def switch_adapters(trainer):
    """Behind each micro-batch, where nobody is expected."""
    trainer.model.add_adapter("other", LORA)

    def switch(inputs):
        trainer.model.set_adapter("default" if trainer.accelerator.sync_gradients else "other")
        return 0

    trainer._track_num_input_tokens = switch


@pytest.mark.skipif(BEFORE_5, reason="transformers 4.57 has no such method")
def test_a_model_that_changes_unseen_is_a_warning_and_runs_apart(path_of, tmp_path, caplog):
    options = {"prepare": switch_adapters, "peft_config": LORA, "log_level": "passive"}
    plain, patched = pair("SFT", path_of["qwen3"], tmp_path, **options)
    assert (plain.calls, patched.calls) == (4, 1 + 2)
    assert trl_runs.weight_distance(patched, plain) > 1e-4  # of the first optimizer step
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "the model changed between the micro-batches of an optimizer step: 1 micro-batches ran with" in warning


def test_micro_batches_that_never_ran_are_a_warning(path_of, tmp_path, caplog, monkeypatch):
    """Of a training step that is not seen as the user's."""
    monkeypatch.setattr(optimizer_step, "find_refusal", lambda *args: None)
    options = {"prepare": leave_out_the_last, "log_level": "passive"}
    trl_runs.train("SFT", path_of["qwen3"], tmp_path, patch=True, **OPTIONS | options)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == OPTIONS["max_steps"]
    assert all("1 micro-batches have not run" in warning for warning in warnings)


class Stop(transformers.TrainerCallback):
    """Of the first training run, between the micro-batches of its second optimizer step."""

    def __init__(self) -> None:
        self.left = 2

    def on_substep_end(self, args, state, control, **options):
        self.left -= 1
        control.should_training_stop = self.left == 0


@pytest.mark.parametrize("joined_hooks", [True, False])
def test_a_run_that_stops_within_an_optimizer_step_and_another_one(joined_hooks, path_of, tmp_path):
    def train_twice(patch):
        with patched_trl(joined_hooks=joined_hooks) if patch else nullcontext():
            trainer = trl_runs.build("SFT", path_of["qwen3"], tmp_path, **OPTIONS)
            trainer.add_callback(Stop())
            return trl_runs.run(trainer), trl_runs.run(trainer)

    runs, patched_runs = train_twice(False), train_twice(True)
    if joined_hooks:  # the loss of a micro-batch comes with the last one of its step
        assert patched_runs[0].log.pop("train_loss") < runs[0].log.pop("train_loss")
    for plain, patched in zip(runs, patched_runs, strict=True):
        trl_runs.assert_same_run(patched, plain)
    assert [run.calls for run in runs] == [3, 4]
    assert [run.calls for run in patched_runs] == ([2, 2] if joined_hooks else [3, 4])


def one_is_nan(trainer):
    """The third of six micro-batches has a loss without a number."""
    collate, numbers = trainer.data_collator, iter(range(6))

    def mark(examples):
        inputs = collate(examples)
        if next(numbers) == 2:
            inputs["input_ids"][0, 0] = 39
        return inputs

    def set_nan(model, args, inputs, output):
        marked = inputs["input_ids"][:, :1] == 39
        output.log_probs = torch.where(marked, float("nan"), output.log_probs)
        return output

    trainer.data_collator = mark
    trainer.model.register_forward_hook(set_nan, with_kwargs=True)


@pytest.mark.parametrize("is_filtered", [True, False])
def test_a_loss_without_a_number(is_filtered, path_of, tmp_path):
    """transformers leaves it out of the sum in the log, or the whole sum of the optimizer step under the window."""
    options = {"prepare": one_is_nan, "logging_nan_inf_filter": is_filtered, "learning_rate": 0.0, "max_steps": 3}
    options |= JOINED_HOOKS
    plain, patched = pair("SFT", path_of["qwen3"], tmp_path, **options)
    assert patched.calls == 3
    losses, expected = patched.log["loss"], plain.log["loss"]
    if is_filtered:
        assert losses == pytest.approx([expected[0], 0.0, expected[2]], rel=1e-5)
        assert expected[1] > 0
    else:
        assert losses == pytest.approx([expected[0], math.nan, math.nan], rel=1e-5, nan_ok=True)
        assert expected[1:] == pytest.approx([math.nan] * 2, nan_ok=True)


# --- errors -----------------------------------------------------------------------------------------------------------


class Error(RuntimeError):
    pass


def fail_at(owner, name, number, error=Error):
    """The method raises in this call. -> a function that mends it."""
    method, count = getattr(owner, name), itertools.count(1)

    def fail(*args, **options):
        if next(count) == number:
            raise error
        return method(*args, **options)

    setattr(owner, name, fail)
    return lambda: delattr(owner, name)


def fail_in_forward(trainer):
    def fail(*args):
        raise Error

    return trainer.model.model.register_forward_pre_hook(fail).remove


# -> between the first two micro-batches, before the call of the second, in the forward, behind it, and later.
INTERRUPTIONS = {
    "callback": (lambda trainer: fail_at(trainer.callback_handler, "on_substep_end", 1), Error),
    "keyboard": (
        lambda trainer: fail_at(trainer.callback_handler, "on_substep_end", 1, KeyboardInterrupt),
        KeyboardInterrupt,
    ),
    "inputs": (lambda trainer: fail_at(trainer, "_prepare_context_parallel_inputs", 2), Error),
    "forward": (fail_in_forward, Error),
    "loss": (lambda trainer: fail_at(trainer.accelerator, "gather_for_metrics", 4), Error),
    "backward": (lambda trainer: fail_at(trainer.accelerator, "backward", 1), Error),
}


@pytest.fixture(scope="module")
def plain_sft(path_of, tmp_path_factory):
    """The run without the patch and without an error."""
    return trl_runs.train("SFT", path_of["qwen3"], tmp_path_factory.mktemp("plain"), patch=False, **OPTIONS)


@pytest.mark.parametrize("place", ["backward", "reward"])
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_a_trainer_that_stays_after_an_error_takes_trls_micro_batches(kind, place, path_of, tmp_path, monkeypatch):
    """It counts its training steps. The first backward, which fails, stands in another one than TRL's."""
    options = OPTIONS | {"gradient_accumulation_steps": 4, "num_iterations": 1, "beta": 0.0, "max_steps": 3}
    if place == "reward":
        options |= {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_iterations": 3}
        options["per_device_train_batch_size"] = 4

    def train():
        trainer = trl_runs.build(kind, path_of["qwen3"], tmp_path, **options)
        with monkeypatch.context() as patch:
            if place == "backward":
                patch.setattr(torch.Tensor, "backward", mock.Mock(side_effect=Error))
            else:
                mend = fail_at(trainer, "_calculate_rewards", 2)
            with pytest.raises(Error):
                trainer.train()
        if place == "reward":
            mend()
        assert trainer._step == (0 if place == "backward" else 3)
        trainer.train()
        return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]

    plain = train()
    with patched_trl():
        assert train() == pytest.approx(plain, rel=1e-5, abs=1e-7)


def test_a_compute_loss_on_the_trainer_stays(path_of, tmp_path):
    """It is transformers' own in place of TRL's, which counts and logs."""

    def put(trainer):
        trainer.compute_loss = MethodType(transformers.Trainer.compute_loss, trainer)

    plain, patched = pair("SFT", path_of["qwen3"], tmp_path, prepare=put)
    assert patched.log["loss"] == pytest.approx(plain.log["loss"], rel=1e-5)
    assert trl_runs.weight_distance(patched, plain) < 1e-6


class Grow(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **options):
        args.gradient_accumulation_steps = 1 + min(state.global_step, 2)


def test_a_number_of_micro_batches_that_grows(path_of, tmp_path):
    """transformers fetches as many as it was, and divides each loss by that."""
    options = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 1, "max_steps": 5}
    plain, patched = pair("DPO", path_of["qwen3"], tmp_path, prepare=lambda t: t.add_callback(Grow()), **options)
    assert patched.log["grad_norm"] == pytest.approx(plain.log["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("rate", ["rank_dropout", "module_dropout"])
def test_an_adapter_that_draws_for_a_whole_forward(rate, path_of, tmp_path, caplog):
    caplog.set_level("INFO", logger="liger_rl")
    config = LoHaConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2, init_weights=False, **{rate: 0.3})
    plain, patched = pair("SFT", path_of["qwen3"], tmp_path, peft_config=config)
    assert patched.log["loss"] == pytest.approx(plain.log["loss"], rel=1e-5)
    assert "an adapter draws once for a whole forward" in caplog.text


@pytest.mark.parametrize("interrupt", INTERRUPTIONS)
@pytest.mark.parametrize("again", ["the same trainer", "a second trainer"])
def test_nothing_is_left_of_an_interrupted_step(interrupt, again, plain_sft, path_of, tmp_path):
    interrupt, error = INTERRUPTIONS[interrupt]
    with patched_trl():
        trainer = trl_runs.build("SFT", path_of["qwen3"], tmp_path, **OPTIONS)
        mend, model, random_state = interrupt(trainer), trainer.model, torch.get_rng_state()
        with pytest.raises(error):
            trainer.train()
        assert "compute_loss" not in vars(trainer)
        assert "_call_impl" not in vars(model)
        mend()
        mend = None
        if again == "a second trainer":
            reference, trainer = weakref.ref(trainer), None
            gc.collect()
            assert reference() is None
            trainer = trl_runs.build("SFT", model, tmp_path, **OPTIONS)
        torch.set_rng_state(random_state)
        trainer._metrics["train"].clear()  # TRL keeps them
        trainer._total_train_tokens = 0
        patched = trl_runs.run(trainer)
    assert patched.calls == 2
    trl_runs.assert_same_run(patched, plain_sft)


# --- another package's training_step ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_first", [True, False], ids=["before the patch", "after the patch"])
def test_a_wrapper_of_the_training_step_runs_each_micro_batch(is_first, plain_sft, path_of, tmp_path, monkeypatch):
    """Also when the patch is taken back, and put there again."""
    seen, wrapped = [], []

    def wrap():
        function = transformers.Trainer.training_step
        wrapper = lambda self, *args, **options: (seen.append(self), function(self, *args, **options))[1]  # noqa: E731
        monkeypatch.setattr(transformers.Trainer, "training_step", wrapper)

    if is_first:
        wrap()
    for patch in (True, False, True):
        seen.clear()
        with patched_trl() if patch else nullcontext():
            if not (is_first or wrapped):
                wrapped.append(wrap())
            run = trl_runs.run(trl_runs.build("SFT", path_of["qwen3"], tmp_path, **OPTIONS))
        assert (len(seen), run.calls) == (4, 4)
        assert run.log["loss"] == pytest.approx(plain_sft.log["loss"], rel=1e-5)
        assert trl_runs.weight_distance(run, plain_sft) <= 1e-6


# --- two trainers -----------------------------------------------------------------------------------------------------


class Interleave(transformers.TrainerCallback):
    """Another trainer's run between two micro-batches."""

    def __init__(self, run) -> None:
        self.run, self.result = run, None

    def on_substep_end(self, *args, **options):
        self.result = self.result or self.run()


@pytest.fixture(scope="module")
def interleaved_runs(path_of, tmp_path_factory):
    """-> runs of DPO and KTO without the patch and with it."""

    def run_both(patch):
        directory = tmp_path_factory.mktemp("interleaved")
        with patched_trl(joined_hooks=True) if patch else nullcontext():
            outer, inner = (trl_runs.build(kind, path_of["qwen3"], directory, **OPTIONS) for kind in ("DPO", "KTO"))
            inner.ref_model = outer.ref_model
            gradient_state = outer.accelerator.gradient_state

            def run_inner():
                result = trl_runs.run(inner)
                gradient_state._set_sync_gradients(False)  # one record for all trainers
                return result

            interleave = Interleave(run_inner)
            outer.add_callback(interleave)
            return trl_runs.run(outer), interleave.result

    return run_both(False), run_both(True)


@pytest.mark.parametrize("number", [0, 1], ids=["outer", "inner"])
def test_a_run_between_two_micro_batches_of_another(number, interleaved_runs):
    """With the same reference model."""
    plain, patched = interleaved_runs
    trl_runs.assert_same_run(patched[number], plain[number])
    assert [run[1].calls for run in interleaved_runs] == [16, 8]
