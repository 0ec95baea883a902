"""TRL's distillation on our divergence: the op against TRL's own, and whole runs."""

import math
from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("trl.kernels.chunked_divergence", reason="TRL 1.16 is not installed")

import trl.trainer.distillation_trainer as module
from transformers import AutoModelForCausalLM
from trl import DistillationConfig, DistillationTrainer
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction as THEIRS

import trl_runs
from liger_rl.integrations.trl import patch_trl, patched_trl, unpatch_trl
from liger_rl.integrations.trl_divergence import FusedDivergence

NAME = "ChunkedDivergenceFunction"


def solve(op, beta, rest, dtype=torch.float32, n=23, device="cpu"):
    """-> divergence, entropy, and gradients of hidden, weight and bias."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((n, 32), (301, 32), (301,), (n, 48), (301, 48), (301,))
    given = [torch.randn(*shape, generator=generator) / (6 if shape[0] == 301 else 1) for shape in shapes]
    given = [part.to(device, dtype).requires_grad_() for part in given]
    found = op.apply(*given, beta, *rest)
    assert not found[1].requires_grad
    weights = torch.linspace(-1, 1, n, device=device)
    return *found, *torch.autograd.grad((found[0] * weights).sum(), given[:3])


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("rest", [(), (0.7, 1.3, 3.0, 1.0, None), (1.6, 1.0, None, 0.5, 2.0)])
@pytest.mark.parametrize("n", [23, 0])
def test_the_op_agrees_with_trls(beta, rest, n, device):
    mine, theirs = (solve(op, beta, rest, n=n, device=device) for op in (FusedDivergence(), THEIRS))
    for found, expected in zip(mine, theirs, strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_float32_tensors_under_autocast(beta, device):
    with torch.autocast(device.type, torch.bfloat16):
        mine, theirs = (solve(op, beta, (), device=device) for op in (FusedDivergence(), THEIRS))
    for found, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)


def test_options_come_and_go_with_the_patch():
    patch_trl(chunk_vocab=64)
    op = vars(module)[NAME]
    assert isinstance(op, FusedDivergence)
    with patched_trl(chunk_tokens=7):
        assert (op.chunk_tokens, op.chunk_vocab) == (7, None)
    assert (op.chunk_tokens, op.chunk_vocab) == (None, 64)
    unpatch_trl()
    assert vars(module)[NAME] is THEIRS


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {
        "qwen3": trl_runs.save_model("qwen3", directory),
        "gemma2": trl_runs.save_model("gemma2", directory),
        "teacher": trl_runs.save_model("granite", directory, seed=1),
    }


def train(student, teacher, directory, beta, *, patch, monkeypatch):
    """-> the log's losses and entropies, the final weights, and the tokens of each call of our op."""
    calls, apply = [], FusedDivergence.apply

    def counting(self, hidden, *given):
        calls.append(hidden.shape[0])
        return apply(self, hidden, *given)

    options = {"max_steps": 3, "beta": beta, "temperature": 0.9, "max_completion_length": 8}
    trainer = DistillationTrainer(
        model=AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32),
        teacher_model=AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32),
        args=DistillationConfig(
            output_dir=str(directory), per_device_train_batch_size=4, **{**trl_runs.CPU_ARGS, **options}
        ),
        train_dataset=trl_runs.prompts(),
        processing_class=trl_runs.tokenizer(),
    )
    with monkeypatch.context() as changed, patched_trl() if patch else nullcontext():
        changed.setattr(FusedDivergence, "apply", counting)
        trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return log, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}, calls


@pytest.mark.parametrize(("student", "beta"), [("qwen3", 0.5), ("gemma2", 0.0), ("qwen3", 1.0)])
def test_three_steps_of_the_trainer(student, beta, models, tmp_path, monkeypatch):
    """Every logged value and the final weights to float32 rounding."""
    (plain, weights, none), (patched, others, calls) = (
        train(models[student], models["teacher"], tmp_path, beta, patch=patch, monkeypatch=monkeypatch)
        for patch in (False, True)
    )
    assert not none
    assert len(calls) == 3
    assert len(plain) == len(patched) == 3
    for mine, other in zip(patched, plain, strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            if isinstance(value, float) and "time" not in name:
                assert math.isclose(mine[name], value, rel_tol=1e-5, abs_tol=1e-5), name
    distance = sum((others[name] - weights[name]).double().square().sum() for name in weights)
    norm = sum(part.double().square().sum() for part in weights.values())
    assert (distance / norm).sqrt() <= 1e-6
