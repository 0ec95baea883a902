"""Runs of TRL's DistillationTrainer (TRL 1.16) on tiny models, with and without the patch."""

import math
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl import DistillationConfig, DistillationTrainer

import trl_runs
from liger_rl.integrations.trl import patched_trl
from liger_rl.integrations.trl_divergence import FusedDivergence


def build(student, teacher, directory, beta, *, steps=3, **more):
    options = {"max_steps": steps, "beta": beta, "temperature": 0.9, "max_completion_length": 8}
    return DistillationTrainer(
        model=AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32),
        teacher_model=AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32),
        args=DistillationConfig(
            output_dir=str(directory), per_device_train_batch_size=4, **{**trl_runs.CPU_ARGS, **options}
        ),
        train_dataset=trl_runs.prompts(),
        processing_class=trl_runs.tokenizer(),
        **more,
    )


def run(trainer):
    """-> the logged values of each step, and the final weights."""
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return log, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def train(student, teacher, directory, beta, *, patch, steps=3):
    """-> as `run`, and the tokens of each call of our divergence."""
    calls, call = [], FusedDivergence.call

    def counting(self, *given):
        made = call(self, *given)
        calls.append(int(made.mask.sum()))
        return made

    trainer = build(student, teacher, directory, beta, steps=steps)
    with pytest.MonkeyPatch.context() as changed, patched_trl() if patch else nullcontext():
        changed.setattr(FusedDivergence, "call", counting)
        return *run(trainer), calls


def assert_same_run(patched, plain, steps):
    """Every logged value and the final weights to float32 rounding."""
    assert len(plain[0]) == len(patched[0]) == steps
    for mine, other in zip(patched[0], plain[0], strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            if isinstance(value, float) and "time" not in name:
                assert math.isclose(mine[name], value, rel_tol=1e-5, abs_tol=1e-5), name
    distance = sum((patched[1][name] - weight).double().square().sum() for name, weight in plain[1].items())
    norm = sum(part.double().square().sum() for part in plain[1].values())
    assert (distance / norm).sqrt() <= 1e-6
