"""Whole runs of TRL's trainers whose micro-batches run together: every logged value, weight and random number is TRL's.

The head and the layout of the forward have tests of their own. The number of calls of the models shows here that the
micro-batches of an optimizer step ran in one forward, or that each had its own.
"""

import gc
import math
import weakref
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
import transformers
from datasets import IterableDataset
from torch.utils.data import SequentialSampler

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="PEFT is not installed")

from peft import LoraConfig, PromptTuningConfig
from test_trl_step import IMAGE, vlm
from test_trl_window import moe, subclass_with

import trl_runs
from hf_models import build
from liger_rl.integrations.trl import patched_trl
from trl_runs import CHOSEN, PROMPTS, REJECTED

OPTIONS = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_steps": 2}
SCORED = {"per_device_train_batch_size": 4, "max_completion_length": 6}
LORA = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
PROMPT_TUNING = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}


class Watch(transformers.TrainerCallback):
    """Calls of a trainer's models, its backwards, its random state in the end, and the losses of its micro-batches."""

    def __init__(self, trainer) -> None:
        self.trainer, self.is_running, self.calls, self.backwards = trainer, True, 0, 0
        self.losses: list[float] = []
        self.backward, self.training_step = trainer.accelerator.backward, trainer.training_step
        trainer.accelerator.backward = self.count_backward
        trainer.training_step = self.record_loss
        trainer.add_callback(self)
        for model in {trainer.model, getattr(trainer, "ref_model", None)} - {None}:
            model.register_forward_pre_hook(self.count_call, with_kwargs=True)

    def count_call(self, model, args, inputs) -> None:
        self.calls += bool(self.is_running and self.trainer.model.training and inputs.get("fused_lm_head"))

    def count_backward(self, *args, **options):
        self.backwards += 1
        return self.backward(*args, **options)

    def record_loss(self, *args, **options):
        loss = self.training_step(*args, **options)
        self.losses.append(float(loss))
        return loss

    def on_train_end(self, *args, **options):
        self.random_state = torch.get_rng_state()
        self.is_running = False


def train(kind, model, directory, *, patch, prepare=None, **options) -> tuple[trl_runs.Run, Watch]:
    watches = []

    def watch(trainer):
        if prepare is not None:
            prepare(trainer)
        watches.append(Watch(trainer))

    options = OPTIONS | (SCORED if kind in ("GRPO", "RLOO") else {}) | options
    torch.manual_seed(0)
    model = model() if callable(model) else model
    return trl_runs.train(kind, model, directory, patch=patch, prepare=watch, **options), watches[0]


def pair(*args, **options):
    """-> the run without the patch and its watch, the run with it and its watch."""
    return *train(*args, patch=False, **options), *train(*args, patch=True, **options)


# --- runs that are TRL's ----------------------------------------------------------------------------------------------


class Case(NamedTuple):
    kind: str
    calls: tuple[int, int]  # of the policy and the reference while training: TRL's number, the number with the window
    options: dict
    model: object = "qwen3"
    backwards: int | None = None  # with the window; None: one for each optimizer step, or as many as TRL's calls


def moe_without_router_loss():
    model = moe()
    model.config.router_aux_loss_coef = 0.0
    return model


def dynamic_rope():
    """Some micro-batches are longer than 26 tokens, and have another rotary embedding."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    sizes = trl_runs.SIZES | {"max_position_embeddings": 26}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, rope_parameters=rope))


def set_argument(name, value):
    return lambda trainer: setattr(trainer.args, name, value)


def square_logits(outputs, labels, num_items_in_batch=None):
    return outputs.logits.float().square().mean()


def without_length(trainer):
    """An epoch has three micro-batches. The third waits for the next epoch."""
    data = trainer.train_dataset
    trainer.train_dataset = IterableDataset.from_generator(lambda: iter(data))


def with_images(*micro_batches):
    """In these of the four micro-batches."""

    def prepare(trainer):
        inputs_of, numbers = type(trainer)._prepare_inputs, iter(range(4))

        def add(inputs):
            inputs = inputs_of(trainer, inputs)
            if next(numbers) in micro_batches:
                inputs["input_ids"][:, :4] = IMAGE
                inputs["labels"][:, :4] = -100
                inputs["pixel_values"] = torch.ones(len(inputs["input_ids"]), 3, 8, 8)
            return inputs

        trainer._prepare_inputs = add

    return prepare


def with_scaler(trainer):
    """accelerate has no scaler on CPUs."""
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)


def double_loss(trainer):
    compute_loss = trainer.compute_loss
    trainer.calls_of_loss = 0

    def compute(*args, **options):
        trainer.calls_of_loss += 1
        return 2 * compute_loss(*args, **options)

    trainer.compute_loss = compute


SIX = {"prompt": PROMPTS + PROMPTS[:2], "completion": CHOSEN + REJECTED[:2]}
SINGLES = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
SHORT_LAST_STEP = {"gradient_accumulation_steps": 3, "max_steps": 4}  # epochs of 3 and 1 micro-batches
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
CASES = {
    "SFT": Case("SFT", (8, 4), SHORT_LAST_STEP | EVALUATED),
    "SFT, dft, clipped gradient": Case("SFT", (4, 2), {"loss_type": "dft", "max_grad_norm": 0.01}),
    "SFT, LoRA, reentrant checkpoints": Case("SFT", (4, 2), {"peft_config": LORA, **REENTRANT}),
    "SFT, checkpoints": Case("SFT", (4, 2), {"gradient_checkpointing": True}),
    "SFT, prompt tuning": Case("SFT", (4, 2), {"peft_config": PROMPT_TUNING}),
    "SFT, one micro-batch": Case("SFT", (2, 2), {"gradient_accumulation_steps": 1}),
    "SFT, data without a length": Case("SFT", (8, 3), {"prepare": without_length, "data": SIX, "max_steps": 3}),
    "SFT, experts": Case("SFT", (4, 2), {"router_aux_loss_coef": 0.0}, moe),
    "SFT, router loss": Case("SFT", (8, 4), SHORT_LAST_STEP | EVALUATED, moe),
    "SFT, router loss and prompt tuning": Case("SFT", (4, 2), {"peft_config": PROMPT_TUNING}, moe),
    "DPO, router loss": Case("DPO", (12, 6), {"max_steps": 3, "gradient_checkpointing": True}, "moe"),
    "KTO, router loss": Case("KTO", (24, 12), {"max_steps": 3}, "moe"),
    "GRPO, router loss": Case("GRPO", (14, 7), {"max_steps": 3}, "moe"),
    "SFT, a model that can take images": Case("SFT", (4, 2), {}, "vlm"),
    "SFT, a processor of images": Case("SFT", (4, 2), {"prepare": lambda trainer: setattr(trainer, "_is_vlm", True)}),
    "SFT, gradient scaler": Case("SFT", (4, 2), {"prepare": with_scaler, "max_grad_norm": 0.0}),
    "SFT, own training_step": Case("SFT", (4, 2), {"prepare": subclass_with("training_step")}),
    "DPO": Case("DPO", (16, 4), SINGLES),
    "DPO, LoRA, reentrant checkpoints": Case("DPO", (8, 4), {"peft_config": LORA, **REENTRANT}),
    "DPO, known reference": Case("DPO", (4, 2), {"precompute_ref_log_probs": True}),
    "KTO": Case("KTO", (32, 16), SHORT_LAST_STEP),
    "KTO, LoRA": Case("KTO", (16, 8), {"peft_config": LORA}),
    "KTO, known reference": Case("KTO", (8, 4), {"precompute_ref_log_probs": True}),
    "KTO, no KL rows": Case("KTO", (8, 4), {"loss_type": "apo_zero_unpaired"}),
    "RLOO": Case("RLOO", (8, 4), {"peft_config": LORA}),
    "GRPO": Case("GRPO", (8, 4), EVALUATED),
    "GRPO, LoRA": Case("GRPO", (8, 4), {"peft_config": LORA, "loss_type": "bnpo"}),
    "GRPO, entropies": Case("GRPO", (8, 4), {"entropy_coef": 0.1, "top_entropy_quantile": 0.618}),
    "GRPO, old policy": Case(
        "GRPO", (16, 7), {"steps_per_generation": 2, "gradient_accumulation_steps": 3, "max_steps": 3},
    ),
    # The first optimizer step has windows of one micro-batch, the second of two.
    "SFT, few tokens": Case("SFT", (8, 6), SINGLES | {"patch_options": {"max_tokens": 80}}, backwards=6),
    "DPO, few tokens": Case("DPO", (16, 12), SINGLES | {"patch_options": {"max_tokens": 128}}, backwards=6),
    # Each micro-batch has a forward of its own.
    "SFT, padding-free": Case("SFT", (4, 4), {"padding_free": True, "max_length": None}),
    "SFT, packed": Case("SFT", (2, 2), {"packing": True, "max_steps": 1}),
    "SFT, label smoothing": Case("SFT", (4, 4), {"label_smoothing_factor": 0.1}),
    "SFT, a loss of logits": Case(
        "SFT", (4, 4), {"prepare": lambda trainer: setattr(trainer, "compute_loss_func", square_logits)},
    ),
    "SFT, compiled": Case("SFT", (4, 4), {"prepare": set_argument("torch_compile", True)}),
    "SFT, images": Case("SFT", (4, 4), {"prepare": with_images(0, 1, 2, 3)}, "vlm"),
    "SFT, some images": Case("SFT", (4, 4), {"prepare": with_images(0, 3)}, "vlm", backwards=3),
    "SFT, dynamic rotary embedding": Case("SFT", (8, 8), SINGLES, dynamic_rope),
    "DPO, own _compute_loss": Case("DPO", (8, 8), {"prepare": subclass_with("_compute_loss")}),
}  # fmt: skip


@pytest.fixture(scope="session")
def made_paths(tmp_path_factory):
    """Of models of which TRL makes the reference too."""
    paths = {}
    for make in (vlm, moe):
        torch.manual_seed(0)
        paths[make.__name__] = str(tmp_path_factory.mktemp(make.__name__))
        make().save_pretrained(paths[make.__name__])
    return paths


def test_the_router_loss_of_rows_that_run_alone_is_trls(tmp_path):
    """Also behind a run whose micro-batches ran together."""
    trl_runs.train("SFT", moe(), tmp_path, patch=True, **OPTIONS)
    alone = OPTIONS | {"padding_free": True, "max_length": None}
    plain, patched = (trl_runs.train("SFT", moe(), tmp_path, patch=patch, **alone) for patch in (False, True))
    assert min(plain.log["aux_loss"]) > 0.1
    trl_runs.assert_same_log(patched, plain)


@pytest.mark.parametrize("name", CASES)
def test_runs_agree(name, path_of, made_paths, tmp_path):
    kind, calls, options, model, backwards = CASES[name]
    model = ({"qwen3": path_of["qwen3"]} | made_paths).get(model, model)
    script = {"script": []} if kind in ("GRPO", "RLOO") else {}
    plain, watch, patched, patched_watch = pair(kind, model, tmp_path, **script, **options)
    if options.get("precompute_ref_log_probs") and kind == "DPO":
        # At the first step rewards are 0 to rounding, and an accuracy is a comparison of them.
        patched.log["rewards/accuracies"][0] = plain.log["rewards/accuracies"][0]
    trl_runs.assert_same_log(patched, plain)
    assert torch.equal(patched_watch.random_state, watch.random_state)
    assert (watch.calls, patched_watch.calls) == calls
    backwards = backwards or (watch.backwards if calls[0] == calls[1] else len(plain.log["loss"]))
    assert patched_watch.backwards == backwards
    assert len(patched_watch.losses) == len(watch.losses)
    assert sum(patched_watch.losses) == pytest.approx(sum(watch.losses), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen3_5Text", "GRPO"),
        ("FalconH1", "SFT"),
        ("Lfm2", "DPO"),
        ("NemotronH", "GRPO"),
        ("GraniteMoeHybrid", "KTO"),
        ("Qwen3Next", "RLOO"),  # with a router loss
    ],
)
def test_layers_of_a_state_run_without_padding(name, kind, tmp_path):
    """In rows of similar length, without the padding on either side."""
    tokens = {"vocab_size": 40, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    # TRL asks for a router loss itself. With it in the config transformers' generate raises.
    build(name, **tokens, **({"output_router_logits": False} if name == "Qwen3Next" else {})).save_pretrained(
        tmp_path / "model"
    )
    script = {"script": []} if kind in ("GRPO", "RLOO") else {}
    plain, _, patched, _ = pair(kind, str(tmp_path / "model"), tmp_path, max_steps=3, **script)
    trl_runs.assert_same_log(patched, plain)
    numbers = [sum(forward.tokens for forward in run.forwards) for run in (patched, plain)]
    assert numbers[0] < 0.98 * numbers[1]


def test_bf16_is_about_as_far_from_float32(path_of, tmp_path):
    exact, plain, patched = (
        train("SFT", path_of["qwen3"], tmp_path, patch=patch, bf16=bf16)[0]
        for patch, bf16 in ((False, False), (False, True), (True, True))
    )
    assert 0 < trl_runs.weight_distance(patched, exact) < 2 * trl_runs.weight_distance(plain, exact)
    assert trl_runs.log_distance(patched, exact, "loss") < 2**-8


def test_a_resumed_run_is_the_uninterrupted_one(path_of, tmp_path):
    options = {"patch": True, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    whole, _ = train("KTO", path_of["qwen3"], tmp_path, **options)

    def resume(trainer):
        run = trainer.train
        trainer.train = lambda: run(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))

    resumed, watch = train("KTO", path_of["qwen3"], tmp_path, prepare=resume, **options)
    assert watch.calls == 2 * 4
    for name in whole.log.keys() - {"num_tokens", *trl_runs.CLOCKS}:  # TRL counts tokens from 0 again
        assert resumed.log[name] == whole.log[name]
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in whole.weights.items())


@pytest.mark.parametrize("patch", [False, True])
def test_a_loss_of_the_object_runs_once_for_each_micro_batch(patch, path_of, tmp_path):
    trainers = []
    _, watch = train(
        "SFT", path_of["qwen3"], tmp_path, patch=patch,
        prepare=lambda trainer: (double_loss(trainer), trainers.append(trainer)),
    )  # fmt: skip
    assert watch.calls == trainers[0].calls_of_loss == 4
    assert "compute_loss" in vars(trainers[0])


LONGER = {"prompt": PROMPTS * 2, "completion": [" w1"] * 4 + [" w2 w3" * 12] * 4}


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True, "peft_config": LORA}])
def test_a_window_of_longer_sequences_than_before_runs_in_parts(options, path_of, tmp_path):
    """Its size was chosen from the optimizer step before. Each part runs again in the backward."""

    def keep_order(trainer):
        trainer._get_train_sampler = SequentialSampler

    options = SINGLES | {"data": LONGER, "max_length": None, "prepare": keep_order} | options
    plain, _ = train("SFT", path_of["qwen3"], tmp_path, patch=False, **options)
    patched, watch = train("SFT", path_of["qwen3"], tmp_path, patch=True, patch_options={"max_tokens": 140}, **options)
    trl_runs.assert_same_log(patched, plain)
    # Four micro-batches of one forward, then a window of four.
    assert (watch.calls, watch.backwards) == (5, 5)
    tokens = [forward.tokens for forward in patched.forwards]
    assert len(tokens) == 4 + 2 * 2
    assert max(tokens) <= 140 < sum(tokens[4:]) / 2


# --- what differs -----------------------------------------------------------------------------------------------------


def test_the_loss_of_an_optimizer_step_comes_with_its_last_micro_batch(path_of, tmp_path):
    _, watch, _, patched = pair("SFT", path_of["qwen3"], tmp_path)
    assert min(watch.losses) > 0
    assert patched.losses[::2] == [0.0, 0.0]
    sums = [sum(watch.losses[:2]), sum(watch.losses[2:])]
    assert patched.losses[1::2] == pytest.approx(sums, rel=1e-5)


class Evaluation(transformers.TrainerCallback):
    """Between two micro-batches."""

    def __init__(self, trainer) -> None:
        self.trainer = trainer

    def on_substep_end(self, *args, **options):
        self.trainer.evaluate()


def test_tokens_are_counted_with_the_last_micro_batch(path_of, tmp_path):
    options = EVALUATED | {"prepare": lambda trainer: trainer.add_callback(Evaluation(trainer))}
    plain, _, patched, watch = pair("SFT", path_of["qwen3"], tmp_path, **options)
    assert watch.calls == 2
    # Of the first step's evaluations, between its micro-batches and behind it.
    count, number = patched.log.pop("eval_num_tokens"), plain.log.pop("eval_num_tokens")
    assert count[:2] == [0, number[1]]
    assert number[0] > 0
    trl_runs.assert_same_log(patched, plain)


def one_is_nan(trainer):
    """The third of six micro-batches has a loss without a number."""
    prepare, numbers = type(trainer)._prepare_inputs, iter(range(6))

    def mark(inputs):
        inputs = prepare(trainer, inputs)
        if next(numbers) == 2:
            inputs["input_ids"][0, 0] = 39
        return inputs

    def set_nan(model, args, inputs, output):
        marked = inputs["input_ids"][:, :1] == 39
        output.log_probs = torch.where(marked, float("nan"), output.log_probs)
        return output

    trainer._prepare_inputs = mark
    trainer.model.register_forward_hook(set_nan, with_kwargs=True)


@pytest.mark.parametrize("is_filtered", [True, False])
def test_a_loss_without_a_number(is_filtered, path_of, tmp_path):
    """transformers leaves it out of the sum in the log, or the whole sum of the optimizer step under the window."""
    options = {"prepare": one_is_nan, "logging_nan_inf_filter": is_filtered, "learning_rate": 0.0, "max_steps": 3}
    plain, _, patched, watch = pair("SFT", path_of["qwen3"], tmp_path, **options)
    assert watch.calls == 3
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


class Interruption(transformers.TrainerCallback):
    """An error between the first two micro-batches."""

    def __init__(self, kind) -> None:
        self.kind = kind

    def on_substep_end(self, *args, **options):
        raise self.kind


def interrupt_callback(kind):
    def interrupt(trainer):
        callback = Interruption(kind)
        trainer.add_callback(callback)
        return lambda: trainer.remove_callback(callback)

    return interrupt


def interrupt_inputs(trainer):
    """An error before the call of the second micro-batch."""
    prepare, numbers = type(trainer)._prepare_inputs, iter(range(2))

    def fail(inputs):
        inputs = prepare(trainer, inputs)
        return inputs if next(numbers) == 0 else None

    trainer._prepare_inputs = fail
    return lambda: vars(trainer).pop("_prepare_inputs")


def interrupt_forward(trainer):
    def fail(*args):
        raise Error

    return trainer.model.model.register_forward_pre_hook(fail).remove


def interrupt_loss(trainer):
    """An error behind the forward."""
    count = iter(range(100))
    gather = trainer.accelerator.gather_for_metrics

    def fail(values):
        if next(count) == 3:
            raise Error
        return gather(values)

    trainer.accelerator.gather_for_metrics = fail
    return lambda: vars(trainer.accelerator).pop("gather_for_metrics")


def interrupt_backward(trainer):
    def fail(*args, **options):
        raise Error

    trainer.accelerator.backward = fail
    return lambda: vars(trainer.accelerator).pop("backward")


INTERRUPTIONS = {
    "callback": (interrupt_callback(Error), Error),
    "keyboard": (interrupt_callback(KeyboardInterrupt), KeyboardInterrupt),
    "inputs": (interrupt_inputs, TypeError),
    "forward": (interrupt_forward, Error),
    "loss": (interrupt_loss, Error),
    "backward": (interrupt_backward, Error),
}


@pytest.fixture(scope="module")
def plain_sft(path_of, tmp_path_factory):
    """The run without the patch and without an error."""
    return train("SFT", path_of["qwen3"], tmp_path_factory.mktemp("plain"), patch=False)[0]


@pytest.mark.parametrize("interrupt", INTERRUPTIONS)
@pytest.mark.parametrize("again", ["the same trainer", "a second trainer"])
def test_nothing_is_left_of_an_interrupted_step(interrupt, again, plain_sft, path_of, tmp_path):
    interrupt, error = INTERRUPTIONS[interrupt]
    with patched_trl():
        trainer = trl_runs.build("SFT", path_of["qwen3"], tmp_path, **OPTIONS)
        mend, model = interrupt(trainer), trainer.model
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
        trainer._metrics["train"].clear()  # TRL keeps them
        trainer._total_train_tokens = 0
        watch = Watch(trainer)
        patched = trl_runs.run(trainer)
    assert watch.calls == 2
    trl_runs.assert_same_log(patched, plain_sft)


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
        with patched_trl() if patch else nullcontext():
            outer, inner = (trl_runs.build(kind, path_of["qwen3"], directory, **OPTIONS) for kind in ("DPO", "KTO"))
            inner.ref_model = outer.ref_model
            gradient_state = outer.accelerator.gradient_state
            watches = Watch(outer), Watch(inner)

            def run_inner():
                result = trl_runs.run(inner)
                gradient_state._set_sync_gradients(False)  # one record for all trainers
                return result

            interleave = Interleave(run_inner)
            outer.add_callback(interleave)
            return trl_runs.run(outer), interleave.result, watches

    return run_both(False), run_both(True)


@pytest.mark.parametrize("number", [0, 1], ids=["outer", "inner"])
def test_a_run_between_two_micro_batches_of_another(number, interleaved_runs):
    """With the same reference model."""
    plain, patched = interleaved_runs
    trl_runs.assert_same_log(patched[number], plain[number])
    assert [run[2][1].calls for run in interleaved_runs] == [16, 8]
