"""Twenty steps of TRL's distillation trainers with and without the patch."""

import pytest

pytest.importorskip("trl.kernels.chunked_divergence", reason="TRL 1.16 is not installed")

from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl.experimental.gkd import GKDConfig, GKDTrainer

import trl_runs
from liger_rl.integrations.trl import patch_trl

pytestmark = pytest.mark.convergence
STEPS = 20
# Every message as it stands, one after the other.
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def teacher(tmp_path):
    return trl_runs.save_model("granite", tmp_path, seed=1)


@pytest.mark.parametrize(("model", "beta"), [("qwen3", 0.5), ("gemma2", 0.0), ("cohere", 1.0)])
def test_distillation(model, beta, teacher, tmp_path):
    student = trl_runs.save_model(model, tmp_path)
    plain, patched = trl_runs.pair("Distillation", student, tmp_path, teacher=teacher, beta=beta, max_steps=STEPS)
    assert patched.calls == STEPS
    trl_runs.assert_same_run(patched, plain, by_step=True)


def gkd(student, teacher, directory):
    tokenizer = trl_runs.tokenizer()
    tokenizer.chat_template = TEMPLATE
    options = {"per_device_train_batch_size": 4, "lmbda": 0.5, "beta": 0.3, "max_new_tokens": 8, "max_length": 16}
    pairs = zip(trl_runs.PROMPTS, trl_runs.CHOSEN, strict=True)
    rows = [[{"role": "user", "content": p}, {"role": "assistant", "content": c}] for p, c in pairs]
    trainer = GKDTrainer(
        model=AutoModelForCausalLM.from_pretrained(student),
        teacher_model=AutoModelForCausalLM.from_pretrained(teacher),
        args=GKDConfig(output_dir=str(directory), **{**trl_runs.CPU_ARGS, "max_steps": STEPS, **options}),
        train_dataset=Dataset.from_dict({"messages": rows}),
        processing_class=tokenizer,
    )
    return trl_runs.run(trainer)


def test_gkd_is_left_alone(teacher, tmp_path):
    """It takes the models' own logits, and computes no divergence through the op."""
    student = trl_runs.save_model("qwen3", tmp_path)
    plain = gkd(student, teacher, tmp_path)
    patch_trl()
    patched = gkd(student, teacher, tmp_path)
    assert patched.calls == 0
    trl_runs.assert_same_log(patched, plain, by_step=True)
