"""TRL's distillation on our divergence: the op against TRL's own, and whole runs."""

import pytest
import torch

pytest.importorskip("trl.kernels.chunked_divergence", reason="TRL 1.16 is not installed")
pytest.importorskip("peft", reason="PEFT is not installed")

import trl.trainer.distillation_trainer as module
from peft import LoraConfig
from trl import DistillationTrainer
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction as THEIRS

import trl_runs
from distillation_runs import assert_same_run, build, run, train
from liger_rl.integrations.trl import patch_trl, patched_trl, unpatch_trl
from liger_rl.integrations.trl_divergence import LOSS_PATCH, FusedDivergence

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


@pytest.mark.parametrize(("student", "beta"), [("qwen3", 0.5), ("gemma2", 0.0), ("qwen3", 1.0)])
def test_three_steps_of_the_trainer(student, beta, models, tmp_path):
    (*plain, none), (*patched, calls) = (
        train(models[student], models["teacher"], tmp_path, beta, patch=patch) for patch in (False, True)
    )
    assert not none
    assert len(calls) == 3
    assert_same_run(patched, plain, 3)


# --- LoRA on the student's head ---------------------------------------------------------------------------------------


class FullLogits:
    """TRL's op from the logits of the student's own head, adapters and all; for a temperature alone."""

    def __init__(self):
        self.head = None

    def apply(self, hidden, _weight, _bias, teacher_hidden, teacher_weight, _teacher_bias, beta, temperature, *rest):
        assert rest == (1.0, None, 0.5, None)  # Granite's scale of the teacher's logits
        log_p = (self.head(hidden) / temperature).log_softmax(-1)
        log_q = (teacher_hidden @ teacher_weight.mT * 0.5 / temperature).log_softmax(-1)
        p, q = log_p.exp(), log_q.exp()
        log_m = ((1 - beta) * p + beta * q).log()
        parts = beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m)
        return parts.sum(-1), -(p * log_p).sum(-1).detach()


LORA = {"r": 4, "target_modules": ["q_proj", "lm_head"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}


def adapted(models, directory, **config):
    torch.manual_seed(0)
    return build(models["qwen3"], models["teacher"], directory, 0.5, peft_config=LoraConfig(**LORA, **config))


def test_an_adapter_on_the_head_is_trained(models, tmp_path, monkeypatch):
    """As with full logits; without the patch it is refused, and a trainer that outlives the patch raises."""
    before = vars(DistillationTrainer)["_compute_loss"]
    with pytest.raises(ValueError, match="Applying a PEFT adapter to `lm_head` is not supported"):
        adapted(models, tmp_path)
    with monkeypatch.context() as changed:
        full_op = FullLogits()
        changed.setattr(module, "BaseTunerLayer", ())
        changed.setattr(module, NAME, full_op)
        trainer = adapted(models, tmp_path)
        full_op.head = trainer.model.get_output_embeddings()
        full = run(trainer)
    with patched_trl():
        trainer = adapted(models, tmp_path)
        start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        found = run(trainer)
    assert_same_run(found, full, 3)
    for factor in ("lora_A", "lora_B"):
        (name,) = (name for name in start if "lm_head" in name and factor in name)
        moved = (full[1][name] - start[name]).norm()
        assert moved > 1e-3 * start[name].norm()
        assert (found[1][name] - full[1][name]).norm() < 1e-4 * moved
    with pytest.raises(RuntimeError, match=r"patch_trl\(\) must hold"):
        adapted_under_the_patch(models, tmp_path).train()
    with patched_trl(), pytest.raises(ValueError, match="DoraLinearVariant"):
        adapted(models, tmp_path, use_dora=True)
    monkeypatch.setattr(LOSS_PATCH, "needed", False)
    LOSS_PATCH.undo()
    assert vars(DistillationTrainer)["_compute_loss"] is before


def adapted_under_the_patch(models, directory):
    with patched_trl():
        return adapted(models, directory)
