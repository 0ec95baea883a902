"""What TRL does on a GPU alone, beside the patch: liger-kernel's kernels for layers, and activations in CPU memory."""

import sys

import pytest
import torch

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
pytest.importorskip("trl", reason="TRL is not installed")

import trl_runs
from devices import NEEDS_GPU
from hf_models import CONFIGS, transformers
from liger_rl.integrations.trl import patched_trl
from liger_rl.step.memory import DEFAULT_SHARE

# A layout needs 1,024 tokens on a GPU, and flex attention heads of 16 numbers.
LARGER = {"hidden_size": 64, "head_dim": 16, "max_position_embeddings": 512, "vocab_size": len(trl_runs.TOKENS)}
# TRL asks for the router's logits itself.
SPECIAL = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "output_router_logits": False}
PROMPTS = [" ".join(f"w{(3 * i + n) % 37}" for i in range(300 - 9 * n)) for n in range(4)]
OPTIONS = {
    "use_cpu": False,
    "use_liger_kernel": True,
    "gradient_accumulation_steps": 2,
    "beta": 0.0,
    "max_steps": 3,
    "num_iterations": 1,
    "learning_rate": 0.0,  # AdamW would turn the rounding of a gradient near 0 into a whole step
    "data": {"prompt": PROMPTS},
}


def build_model(kind: str):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**CONFIGS[kind] | LARGER | SPECIAL)
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)


@pytest.fixture
def kind(request):
    """A kind of model, in whose module Liger's functions stay no longer than the test."""
    module = sys.modules[type(build_model(request.param)).__module__]
    before = dict(vars(module))
    yield request.param
    vars(module).update(before)


def train(kind: str, directory, rollouts: list[dict]) -> list[dict[str, float]]:
    """The log of a run with these rollouts. An empty list is filled with the run's own.

    Sampling on a GPU does not repeat itself to the bit.
    """
    trainer = trl_runs.build("GRPO", build_model(kind), directory, **OPTIONS)
    score, given = trainer._generate_and_score_completions, iter(list(rollouts))

    def score_or_repeat(inputs):
        batch = next(given, None)
        if batch is None:
            batch = score(inputs)
            rollouts.append(batch)
        return dict(batch)

    trainer._generate_and_score_completions = score_or_repeat
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@NEEDS_GPU
@pytest.mark.parametrize("memory", [DEFAULT_SHARE, 0], ids=["kept", "on the host"])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma3Text", "Mistral", "Qwen3Moe"], indirect=True)
def test_a_run_with_ligers_layers_is_the_same_and_shares_prompts(kind, memory, tmp_path):
    rollouts: list[dict] = []
    plain = train(kind, tmp_path, rollouts)
    with patched_trl(memory=memory):
        patched = train(kind, tmp_path, rollouts)
    assert len(plain) == len(patched) == OPTIONS["max_steps"]
    # Four completions of each prompt, of a few tokens. The first step runs its micro-batches apart, to measure memory.
    assert all(step["liger_rl/body_tokens_saved"] > 0.5 for step in patched[1:])
    for before, after in zip(plain, patched, strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            assert after[name] == pytest.approx(before[name], rel=2e-3, abs=1e-5), name


@NEEDS_GPU
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_a_run_with_trls_activation_offloading_is_the_same(kind, path_of, tmp_path):
    options = {"activation_offloading": True, "use_cpu": False, "gradient_accumulation_steps": 2, "max_steps": 3}
    options |= {"per_device_train_batch_size": 2, "learning_rate": 0.0}
    path = path_of["qwen3"]
    plain, patched = (trl_runs.train(kind, path, tmp_path, patch=patch, **options) for patch in (False, True))
    for name in ("loss", "grad_norm"):
        assert patched.log[name] == pytest.approx(plain.log[name], rel=1e-4, abs=1e-5), name
