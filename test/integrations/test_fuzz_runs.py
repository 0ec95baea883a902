"""The property of a patched trainer: with any options it is TRL's own run.

Random trainers, models, data and options, alone and together. The policy stays as it is, so that both runs sample the
same completions, each with its own generation between the steps.
"""

import os
import random
from functools import partial
from typing import Any

import pytest

pytest.importorskip("trl", "1.16", reason="TRL 1.16 is not installed")
pytest.importorskip("peft", reason="PEFT is not installed")

from peft import LoraConfig
from test_trl_runs import SYSTEM_PROMPT, architecture, dynamic_rope, glm4_moe, gpt2, half_without_advantage, moe, window

import trl_runs
from hf_models import BEFORE_5

MODELS = {
    **{name: name for name in trl_runs.MODELS},
    "dynamic rope": dynamic_rope, "experts": partial(moe, 0.0), "Glm4Moe": glm4_moe, "GPT2": gpt2, "router": moe,
    "window": window,
    **{name: partial(architecture, name) for name in ("Bamba", "GptOss", "Lfm2", "Qwen3_5Text") if not BEFORE_5},
}  # fmt: skip
KINDS = ("DPO", "DPO", "Distillation", "GRPO", "GRPO", "GRPO", "KTO", "RLOO", "SFT", "SFT")
CASES = 24
if "FUZZ_CASES" in os.environ:
    CASES = max(1, round(0.03 * int(os.environ["FUZZ_CASES"])))
# Without a FUZZ_CASES the cases are the same in every run, as in test/fuzz.
SEEDS = range(CASES) if "FUZZ_CASES" not in os.environ else random.SystemRandom().sample(range(2**40), CASES)
GRADIENT_ERROR, LEAST_GRADIENT = 2e-4, 1e-4  # of rounding in shares of the gradient; a smaller one is rounding itself


class Draw(random.Random):
    """Random options."""

    def some(self, share: float, **options: Any) -> dict[str, Any]:
        """The options with this probability; a list is one of its values."""
        if self.random() >= share:
            return {}
        return {name: self.choice(x) if isinstance(x, list) else x for name, x in options.items()}

    def all(self, **options: Any) -> dict[str, Any]:
        return self.some(1.0, **options)


def draw_run(draw: Draw) -> tuple[str, Any, dict[str, Any]]:
    """-> the trainer, the model and the options of `trl_runs.train`."""
    kind, model = draw.choice(KINDS), MODELS[draw.choice(sorted(MODELS))]
    options = draw.all(
        gradient_accumulation_steps=[1, 2, 2, 3, 4], max_steps=[2, 3], seed=draw.randrange(1000),
        per_device_train_batch_size=[2, 4, 8] if kind in ("GRPO", "RLOO", "KTO") else [1, 2, 4],
    )  # fmt: skip
    options |= {"learning_rate": 0.0, "patch_options": {}}
    if draw.random() < 0.3:
        options |= {"gradient_checkpointing": True}
        options |= draw.some(0.3, gradient_checkpointing_kwargs={"use_reentrant": True})
    options |= draw.some(0.3, max_grad_norm=[0.0, 0.01, 0.1]) | draw.some(0.2, logging_steps=2)
    options |= draw.some(0.15, lr_scheduler_type="linear", warmup_steps=1)
    options |= draw.some(0.15, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8)
    for option in ({"memory": [0, 0.5]}, {"max_tokens": [80, 200]}, {"joined_hooks": True}, {"whole_step": False}):
        options["patch_options"] |= draw.some(0.1, **option)
    if isinstance(model, str) and draw.random() < 0.3:
        modules, is_scaled = draw.choice((["q_proj"], ["v_proj", "down_proj"], "all-linear")), draw.random() < 0.3
        options["peft_config"] = LoraConfig(
            target_modules=modules, task_type="CAUSAL_LM", init_lora_weights=False, use_rslora=is_scaled
        )
    return kind, model, options | DRAWS[kind](draw, options)


def draw_prompts(draw: Draw) -> dict[str, list[str]]:
    return {
        "prompt": [" ".join(f"w{(3 * i + n) % 37}" for i in range(draw.choice((4, 17, 20, 24)))) for n in range(48)]
    }


def draw_scored(draw: Draw, options: dict[str, Any]) -> dict[str, Any]:
    drawn = draw.all(num_generations=[2, 4], max_completion_length=[4, 8, 10], temperature=[0.7, 1.0])
    drawn |= draw.all(num_iterations=[1, 1, 2], beta=[0.0, 0.0, 0.1])
    sequences = options["per_device_train_batch_size"] * options["gradient_accumulation_steps"]
    if sequences % drawn["num_generations"]:
        drawn["gradient_accumulation_steps"] = drawn["num_generations"]
    if "eval_strategy" in options:
        drawn["num_generations_eval"] = drawn["num_generations"]
    return drawn | {"data": draw_prompts(draw)} | draw.some(0.4, scored=half_without_advantage())


def draw_grpo(draw: Draw, options: dict[str, Any]) -> dict[str, Any]:
    drawn = draw_scored(draw, options)
    drawn |= draw.all(loss_type=["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"])
    drawn |= draw.some(0.3, importance_sampling_level=["token", "sequence"])
    drawn |= draw.some(0.3, scale_rewards=["group", "batch", "none"]) | draw.some(0.25, mask_truncated_completions=True)
    drawn |= draw.some(0.2, epsilon=0.02) | draw.some(0.2, delta=1.5) | draw.some(0.15, entropy_coef=0.02)
    drawn |= draw.some(0.1, off_policy_mask_threshold=0.01) | draw.some(0.1, use_bias_correction_kl=True)
    steps = drawn.get("gradient_accumulation_steps", options["gradient_accumulation_steps"])
    return drawn | draw.some(0.2, steps_per_generation=2 * steps) | draw.some(0.2, shuffle_dataset=False)


def draw_rloo(draw: Draw, options: dict[str, Any]) -> dict[str, Any]:
    return draw_scored(draw, options) | draw.some(0.3, normalize_advantages=True)


def draw_sft(draw: Draw, options: dict[str, Any]) -> dict[str, Any]:
    drawn = draw.all(loss_type=["nll", "nll", "dft", "chunked_nll"]) | draw.some(
        0.3, completion_only_loss=[True, False]
    )
    way = draw.random()
    if way < 0.25:
        drawn |= draw.all(packing=True, max_length=[64, 102], packing_strategy=["bfd", "bfd", "bfd_split", "wrapped"])
    elif way < 0.4:
        drawn |= {"padding_free": True, "max_length": None}
    else:
        drawn |= draw.some(0.3, max_length=[20, 40])
    drawn |= draw.some(0.1, neftune_noise_alpha=5.0) | draw.some(0.2, pad_to_multiple_of=8)
    return drawn | draw.some(0.5, data=SYSTEM_PROMPT["data"])


def draw_dpo(draw: Draw, options: dict[str, Any]) -> dict[str, Any]:
    losses = ("sigmoid", "ipo", "hinge", "robust", "apo_zero", "sppo_hard", "nca_pair", "bco_pair", "aot", "discopop")
    drawn = {"loss_type": draw.choice((*([name] for name in losses), ["sft", "sigmoid"]))} | draw.all(beta=[0.1, 0.3])
    drawn |= draw.some(0.3, label_smoothing=0.1) | draw.some(0.2, precompute_ref_log_probs=True)
    return drawn | draw.some(0.2, ld_alpha=0.5) | draw.some(0.2, use_weighting=True) | draw.some(0.2, max_length=30)


def draw_kto(draw: Draw, options: dict[str, Any]) -> dict[str, Any]:
    drawn = draw.all(loss_type=["kto", "apo_zero_unpaired"], beta=[0.1, 0.3])
    return drawn | draw.some(0.3, desirable_weight=1.3) | draw.some(0.3, precompute_ref_log_probs=True)


def draw_distillation(draw: Draw, options: dict[str, Any]) -> dict[str, Any]:
    drawn = draw.all(max_completion_length=[4, 8], temperature=[0.9, 1.0]) | draw.some(0.7, beta=[0.0, 0.5, 1.0])
    return drawn | {"data": draw_prompts(draw)}


DRAWS = {
    "GRPO": draw_grpo, "RLOO": draw_rloo, "SFT": draw_sft, "DPO": draw_dpo, "KTO": draw_kto,
    "Distillation": draw_distillation,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.loss_type='chunked_nll':FutureWarning")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_with_random_options_is_trls_run(seed, path_of, tmp_path):
    kind, model, options = draw_run(Draw(seed))
    path = path_of[model] if isinstance(model, str) else trl_runs.save(model, tmp_path)
    if kind == "Distillation":
        options["teacher"] = path_of["teacher"]
    try:
        plain = trl_runs.train(kind, path, tmp_path, patch=False, **options)
    except (NotImplementedError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        pytest.skip(f"TRL's own run fails: {error}")
    patched = trl_runs.train(kind, path, tmp_path, patch=True, **options)
    for mine, theirs in zip(patched.gradients, plain.gradients, strict=True):
        assert theirs.norm() < LEAST_GRADIENT or (mine - theirs).norm() <= GRADIENT_ERROR * theirs.norm(), options
    for run in (plain, patched):
        run.gradients.clear()
        # Whether a margin of 0 is positive, and a deviation of 0 is one where a KL is part of the reward, is rounding.
        run.log.pop("rewards/accuracies", None)
        run.log.pop("frac_reward_zero_std" if kind == "RLOO" else None, None)
    assert plain.log.get("loss"), options
    trl_runs.assert_same_run(patched, plain)
