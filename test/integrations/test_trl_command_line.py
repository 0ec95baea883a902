"""TRL's command line. It starts its scripts in processes; here they run in this one, as accelerate starts them."""

import json
import logging
import os
import runpy
import sys

import pytest

pytest.importorskip("trl", reason="TRL is not installed")

import datasets
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

from liger_rl import patch_trl
from trl_runs import ANSWERS, CPU_ARGS, PREFERENCES, PROMPTS, save_model, tokenizer

# A process of its own has not imported the script before.
pytestmark = pytest.mark.filterwarnings("ignore:'trl.scripts:RuntimeWarning")

GROUP = {"num_generations": 2, "max_completion_length": 4, "reward_funcs": "trl_runs.evenness", "beta": 0.1}
LAUNCH = ("--num_processes=1", "--mixed_precision=no")  # options of accelerate
SCRIPTS = {
    "sft": (ANSWERS, {}),
    "dpo": (PREFERENCES, {}),
    "grpo": ({"prompt": PROMPTS}, GROUP),
}


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """(script, options) -> its command line, for a saved model and a file of data."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script of GRPO adds to it
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def build(script: str, **options) -> list[str]:
        columns, fixed = SCRIPTS[script]
        model = save_model("qwen3", tmp_path)
        tokenizer().save_pretrained(model)
        (tmp_path / "data").mkdir()
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
        names = {
            **CPU_ARGS, "report_to": "none", "max_steps": 1, "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2, "model_name_or_path": model, "dtype": "float32",
            "dataset_name": tmp_path / "data", "output_dir": tmp_path / "out", **fixed, **options,
        }  # fmt: skip
        return [script, *(f"--{name}={value}" for name, value in names.items())]

    return build


@pytest.fixture
def launched(monkeypatch):
    """The commands of `accelerate launch`, each of which is run in this process."""
    commands = []

    def run(arguments) -> None:
        command, environment = prepare_simple_launcher_cmd_env(arguments)
        commands.append(command)
        with monkeypatch.context() as child:
            for name, value in environment.items():
                child.setenv(name, value)
            child.setattr(sys, "argv", ["trl.py", *command[3:]])
            runpy.run_module(command[2], run_name="__main__")

    monkeypatch.setattr("accelerate.commands.launch.simple_launcher", run)
    for name in ("ACCELERATE_MIXED_PRECISION", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return commands


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_run_patched(script, arguments, launched, monkeypatch, capsys):
    options = arguments(script)
    monkeypatch.setattr(sys, "argv", ["trl.py", *options, *LAUNCH])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("liger_rl.trl", run_name="__main__")
    assert [command[1:] for command in launched] == [["-m", "liger_rl.trl", *options]]
    assert "'liger_rl/body_tokens_saved'" in capsys.readouterr().out
    assert "LIGER_RL_PATCH_TRL" not in os.environ


def test_the_processes_of_a_script_have_the_options_of_the_patch(arguments, launched, caplog):
    from trl.cli.main import main

    patch_trl(whole_step=False)
    caplog.set_level(logging.INFO, "liger_rl")
    main([*arguments("sft", log_level="info"), *LAUNCH])
    assert len(launched) == 1
    assert "whole_step=False" in caplog.text


@pytest.mark.parametrize("given", [[], ["stf"]])
def test_an_unknown_script_is_refused(given, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(sys, "argv", ["trl.py", *given])
    with pytest.raises(SystemExit, match=r"must be followed by one of .*grpo.*, got '(stf)?'"):
        runpy.run_module("liger_rl.trl", run_name="__main__")
