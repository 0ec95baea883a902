"""What the user sees of TRL's trainers under the patch: logged tokens, one line, warnings, and `explain_trl`."""

import logging
import sys
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="PEFT is not installed")

from test_trl_runs import gpt2, subclass_with

import forks
import trl_runs
from hf_models import BEFORE_5
from liger_rl import explain_trl, patch_trl
from liger_rl.integrations.trl import optimizer_step, patched_trl
from liger_rl.integrations.trl.report import SAVED, TOKENS

SCORED = {"per_device_train_batch_size": 4, "max_completion_length": 6}
OPTIONS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1, "log_level": "passive"}


@pytest.mark.parametrize("size", [2, 4])
def test_a_smaller_micro_batch_is_no_loss(size, path_of, tmp_path):
    """Groups of four, in micro-batches of two or four sequences, and both groups of a step in one of eight."""
    options, script = {"num_iterations": 1, "max_steps": 3}, []
    whole, small = (
        trl_runs.train(
            "GRPO", path_of["qwen3"], tmp_path, patch=True, script=script, max_completion_length=6,
            **options, per_device_train_batch_size=rows, gradient_accumulation_steps=8 // rows,
        )
        for rows in (8, size)
    )  # fmt: skip
    assert small.log[TOKENS] == whole.log[TOKENS]
    assert small.log[SAVED] == whole.log[SAVED]


# --- the line and the warning of a training run -----------------------------------------------------------------------


def read_lines(capture, *, name) -> tuple[list[str], list[str]]:
    """(lines at INFO, warnings) of the logger of the report that name the trainer."""
    records = [record for record in capture.records if record.name == "liger_rl.trl"]
    assert all(name in record.getMessage() for record in records)
    return tuple(
        [record.getMessage() for record in records if record.levelno == level]
        for level in (logging.INFO, logging.WARNING)
    )


def test_the_line_is_logged_once_for_each_training_run(path_of, tmp_path, caplog):
    def train_again(trainer):
        run = trainer.train
        trainer.train = lambda: (run(), run())

    options = OPTIONS | {"gradient_accumulation_steps": 1}
    run = trl_runs.train("DPO", path_of["qwen3"], tmp_path, patch=True, **options)
    (line,), warnings = read_lines(caplog, name="DPOTrainer")
    assert line.startswith(f"DPOTrainer: {run.log[TOKENS][0]:.0f} of ")
    assert line.endswith("tokens run; prompts once, no padding")
    assert warnings == []
    caplog.clear()
    trl_runs.train("DPO", path_of["qwen3"], tmp_path, patch=True, prepare=train_again, max_steps=2, log_level="passive")
    trl_runs.train("DPO", path_of["qwen3"], tmp_path, patch=True, max_steps=1)  # log_level="error"
    lines, _ = read_lines(caplog, name="DPOTrainer")
    assert len(lines) == 2


def with_attention_dropout():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**trl_runs.SIZES, attention_dropout=0.1))


def with_dropout_of_a_residual():
    """GPT-2's config has the dropout of a head of summaries, too."""
    model = gpt2()
    model.config.resid_pdrop = model.transformer.h[0].mlp.dropout.p = 0.1
    return model


def compile_calls(trainer):
    """As torch.compile does, whose compiler is left out."""
    trainer.model._compiled_call_impl = trainer.model._call_impl


def with_own_step(trainer):
    """The subclass does not call the training step of transformers."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model.train(), self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()

    trainer.__class__ = type("Subclass", (type(trainer),), {"training_step": training_step})


def with_logits(trainer):
    """The subclass makes logits, as TRL's GKD does."""

    def compute_loss(self, model, inputs, *args, **options):
        return model(**{name: inputs[name] for name in ("input_ids", "attention_mask", "labels")}).loss

    trainer.__class__ = type("Subclass", (type(trainer),), {"compute_loss": compute_loss})


# What runs more than it must -> its options, a reason and the setting to change it, which a warning names and
# `explain_trl` of a trained trainer, what `explain_trl` says before, and whether tokens are known.
REASONS = {
    "built before": ({"built_before": True}, "built before patch_trl()", "before the trainer is built", "", False),
    "attention's dropout": (
        {"model": with_attention_dropout}, "dropout draws", "attention_dropout=0",
        "no prefix shared: dropout draws for each sequence (to change that: att", True,
    ),
    "a residual's dropout": (
        {"model": with_dropout_of_a_residual}, "dropout draws", "resid_pdrop=0",
        "for each sequence (to change that: resid_pdrop=0)", True,
    ),
    "label smoothing": (
        {"label_smoothing_factor": 0.1}, "label smoothing", "label_smoothing_factor=0",
        "a forward for each of its 2 micro-batches: label smoothing takes logits (to", True,
    ),
    "NEFTune": (
        {"neftune_noise_alpha": 5.0}, "NEFTune's noise", "neftune_noise_alpha=None",
        "policy: the batch as it is: NEFTune's noise is scaled by a row's length and", True,
    ),
    "compiled": ({"prepare": compile_calls}, "the model is compiled", "torch_compile=False", "", False),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_one_warning_names_the_setting(name, path_of, tmp_path, caplog):
    options, reason, setting, before, has_tokens = REASONS[name]
    if BEFORE_5 and name == "a residual's dropout":
        pytest.skip("in transformers 4.57 GPT-2 makes an attention mask of its own")
    torch.manual_seed(0)
    options = OPTIONS | {"model": lambda: path_of["qwen3"], **options}
    model = options.pop("model")()
    prepare, kept = options.pop("prepare", lambda trainer: None), []

    def keep(trainer):
        kept.append(trainer)
        assert before in explain_trl(trainer)
        prepare(trainer)

    trl_runs.train("SFT", model, tmp_path, patch=True, prepare=keep, **options)
    lines, (warning,) = read_lines(caplog, name="SFTTrainer")
    assert warning.count(reason) == warning.count(setting) == 1
    assert len(lines) == has_tokens
    with patched_trl():
        assert setting in explain_trl(kept[0])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"patch_options": {"whole_step": False}}, "SFTTrainer: the head alone: whole_step=False"),
        (
            {"prepare": subclass_with("compute_loss")},
            "Subclass: 114 of 114 tokens run; no prefix shared, no padding: no two sequences have more than",
        ),
        (
            {"padding_free": True, "max_length": None},
            "SFTTrainer: 107 of 107 tokens run; the batch as it is: no two sequences have more than their first 16 "
            "tokens in common; a forward for each of its 2 micro-batches",
        ),
        (
            {"prepare": with_own_step},
            "have more than their first 16 tokens in common; a forward for each of its 2 micro-batches: Subclass has a "
            "training_step of its own",
        ),
        ({"prepare": with_logits}, "Subclass: as TRL runs it: Subclass has a compute_loss of its own"),
    ],
    ids=["the head alone", "a subclass", "padding-free", "own step", "a loss of logits"],
)
def test_what_a_user_chose_or_cannot_change_is_no_warning(options, text, path_of, tmp_path, caplog):
    trl_runs.train("SFT", path_of["qwen3"], tmp_path, patch=True, **OPTIONS | options)
    (line,), warnings = read_lines(caplog, name="S")
    assert text in line
    assert warnings == []


@pytest.mark.parametrize(
    ("built_before", "text"),
    [
        (False, "DistillationTrainer: 288 of 288 tokens run; no prefix shared, rows of similar length: no two"),
        (
            True,
            "DistillationTrainer runs more than it must under patch_trl(): the trainer was built before patch_trl()",
        ),
    ],
)
def test_a_distillation_has_a_line_too(built_before, text, path_of, tmp_path, caplog):
    pytest.importorskip("trl", "1.16", reason="TRL 1.16 is not installed")
    options = {"teacher": path_of["teacher"], "max_steps": 1, "log_level": "passive", "built_before": built_before}
    run = trl_runs.train("Distillation", path_of["qwen3"], tmp_path, patch=True, **options)
    lines, warnings = read_lines(caplog, name="DistillationTrainer")
    assert text in (warnings if built_before else lines)[0]
    assert (TOKENS in run.log) is not built_before


def test_deepspeed_runs_a_distillation_as_trl_does(path_of, tmp_path, monkeypatch):
    pytest.importorskip("trl", "1.16", reason="TRL 1.16 is not installed")
    create = transformers.Trainer.create_accelerator_and_postprocess

    def create_with_deepspeed(self):
        create(self)
        self.is_deepspeed_enabled = True

    monkeypatch.setattr(transformers.Trainer, "create_accelerator_and_postprocess", create_with_deepspeed)
    monkeypatch.setattr("trl.trainer.distillation_trainer.prepare_deepspeed", lambda model, accelerator: model)
    with patched_trl():
        trainer = trl_runs.build("Distillation", path_of["qwen3"], tmp_path, teacher=path_of["teacher"])
        assert explain_trl(trainer).endswith(
            "the loss alone: DistillationTrainer's models run as in TRL under DeepSpeed"
        )


def test_the_calls_of_a_distillation_have_names(path_of, tmp_path):
    pytest.importorskip("trl", "1.16", reason="TRL 1.16 is not installed")
    trainers = []
    options = {"teacher": path_of["teacher"], "max_steps": 1, "prepare": trainers.append}
    with patched_trl():
        before = explain_trl(trl_runs.build("Distillation", path_of["qwen3"], tmp_path, teacher=path_of["teacher"]))
        trl_runs.train("Distillation", path_of["qwen3"], tmp_path, patch=True, **options)
        after = explain_trl(trainers[0])
    for text in (before, after):
        names = [line.split(":")[0] for line in text.splitlines()]
        assert names == ["DistillationTrainer", "- optimizer step", "- policy", "- teacher"]


def test_a_trainer_with_logits_of_its_own_has_a_line_too(path_of, tmp_path, caplog):
    """Its training_step does not call that of transformers."""
    online_dpo = pytest.importorskip("trl.experimental.online_dpo")
    config = online_dpo.OnlineDPOConfig(
        **trl_runs.CPU_ARGS | {"output_dir": str(tmp_path), "max_steps": 1, "log_level": "passive"},
        max_new_tokens=4, max_length=40, per_device_train_batch_size=2,
    )  # fmt: skip
    with patched_trl():
        trainer = online_dpo.OnlineDPOTrainer(
            model=transformers.AutoModelForCausalLM.from_pretrained(path_of["qwen3"]),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": trl_runs.PROMPTS}),
            processing_class=trl_runs.tokenizer(),
            reward_funcs=lambda prompts, completions, **columns: [float(len(text)) for text in completions],
        )
        trainer.train()
        text = "OnlineDPOTrainer: as TRL runs it: OnlineDPOTrainer does not call TRL's fused head"
        assert read_lines(caplog, name="OnlineDPOTrainer") == ([text], [])
        assert explain_trl(trainer) == text


def train_as_ranks(path: str, directory: Path) -> None:
    """One run of the main process, and one of another."""
    patch_trl()
    for rank in range(2):
        trainer = trl_runs.build("SFT", path, directory, max_steps=1, log_level="passive")
        trainer.is_world_process_zero = lambda rank=rank: rank == 0
        print("rank", rank, file=sys.stderr)
        trainer.train()


def test_the_line_is_visible_where_no_logging_is_configured(path_of, tmp_path):
    """On stderr, of the main process alone."""
    errors = forks.run(train_as_ranks, path_of["qwen3"], tmp_path, log=tmp_path / "log")
    first, second = errors.split("rank 0")[1].split("rank 1")
    assert (first.count("[liger_rl] SFTTrainer: 1"), second.count("[liger_rl]")) == (1, 0)


# --- explain_trl ------------------------------------------------------------------------------------------------------


def test_explain_trl_before_and_after_training(path_of, tmp_path):
    options = OPTIONS | SCORED | {"num_iterations": 1, "max_steps": 2}
    trainer = trl_runs.build("GRPO", path_of["qwen3"], tmp_path, **options)
    assert explain_trl(trainer) == "GRPOTrainer: runs as TRL runs it, because patch_trl() is not in place"
    patch_trl()
    assert "built before patch_trl()" in explain_trl(trainer)
    trainer = trl_runs.build("GRPO", path_of["qwen3"], tmp_path, **options)
    title, step, *models = explain_trl(trainer).splitlines()
    assert (title, step) == (
        "GRPOTrainer", "- optimizer step: its 2 micro-batches in one forward",
    )  # fmt: skip
    assert models == [f"- {role}: live tokens only, prompts once" for role in ("policy", "reference")]
    run = trl_runs.run(trainer)
    *_, policy, reference = lines = explain_trl(trainer).splitlines()
    assert len(lines) == 4
    assert "tokens run; prompts once, no padding" in policy
    numbers = [int(line.split(": ")[1].split(" of ")[0]) for line in (policy, reference)]
    assert sum(numbers) == run.log[TOKENS][-1]


def test_explain_trl_knows_that_another_rank_has_a_reason(path_of, tmp_path, monkeypatch):
    patch_trl()
    agree = optimizer_step.agree
    monkeypatch.setattr(optimizer_step, "agree", lambda *args: agree(*args)._replace(refuses=True))
    trainer = trl_runs.build("SFT", path_of["qwen3"], tmp_path, **OPTIONS | {"max_steps": 1})
    assert "its 2 micro-batches in one forward" in explain_trl(trainer)
    trainer.train()
    assert f"a forward for each of its 2 micro-batches: {optimizer_step.ANOTHER_RANK}" in explain_trl(trainer)


def test_explain_trl_knows_a_limit_of_tokens(path_of, tmp_path):
    patch_trl(max_tokens=100)
    text = explain_trl(trl_runs.build("SFT", path_of["qwen3"], tmp_path, **OPTIONS))
    assert "optimizer step: 1 of its 2 micro-batches in one forward" in text


def test_explain_trl_of_a_loss_of_logits(path_of, tmp_path):
    patch_trl()
    trainer = trl_runs.build("SFT", path_of["qwen3"], tmp_path, **OPTIONS)
    with_logits(trainer)
    assert explain_trl(trainer).endswith("policy: known after the first step")
    trainer.train()
    assert explain_trl(trainer).endswith("policy: as TRL runs it: its loss does not call TRL's fused head")


def test_explain_trl_takes_trainers_of_trl(tmp_path):
    trainer = transformers.Trainer(torch.nn.Linear(1, 1), transformers.TrainingArguments(str(tmp_path), use_cpu=True))
    for wrong in (trainer, None):
        with pytest.raises(TypeError, match="trainer must be a trainer of TRL, got"):
            explain_trl(wrong)
