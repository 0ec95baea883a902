"""Losses, gradients and metrics against TRL's own `GRPOTrainer._compute_loss`, on log-probabilities given to both."""

import math
from itertools import product

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from liger_rl import SamplerCorrection
from parity_cases import (
    BATCH,
    CISPO_HIGH,
    CLIPPING,
    ENTROPY_COEF,
    ITEMS,
    LENGTH,
    LENGTHS,
    MAX_LENGTH,
    QUANTILE,
    SAPO,
    THRESHOLD,
    VESPO,
    Case,
    assert_each_option_has_a_part,
    assert_same,
    columns,
    differ,
    gradients,
    leaves,
    ours,
    pairwise,
)

COMMON = {
    "kl": ["none", "plain", "importance_weighted"],
    "advantages": ["(B,)", "(B, T)"],
    "old": [True, False],
    "ratio": ["none", "(B, T)", "(B, 1)"],
    "off_policy": ["none", "old", "sampling"],
    "top_entropy": [False, True],
    "entropy_bonus": [False, True],
}
FAMILIES = [
    {"loss_type": list(CLIPPING), "level": ["token", "sequence"], "delta": [False, True], **COMMON},
    {"loss_type": ["cispo"], **COMMON},
    {"loss_type": ["sapo"], **COMMON},
    {"loss_type": ["vespo"], **COMMON, "ratio": ["none", "(B, T)"]},  # a sum over tokens: per sequence has no meaning
    {"loss_type": ["gmpo"], "kl": ["none", "plain"], "old": [True, False]},
]
CASES = [case for options in FAMILIES for case in pairwise(options)]
METRIC_NAMES = {
    "clip_low": "clip_ratio/low_mean",
    "clip_high": "clip_ratio/high_mean",
    "clip_ratio": "clip_ratio/region_mean",
    "kl_ref": "kl",
}


def trainer_of(trainer_class, config_class, directory):
    """A trainer of a random model, for its `_compute_loss` alone."""
    token_ids = {"<pad>": 0, "<eos>": 1, "<unk>": 2, "a": 3, "b": 4}
    tokenizer = Tokenizer(models.WordLevel(token_ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = Qwen3Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=1, head_dim=4)  # fmt: skip
    trainer = trainer_class(
        Qwen3ForCausalLM(config),
        lambda completions, **columns: [float(len(completion)) for completion in completions],
        args=config_class(
            output_dir=str(directory), report_to=[], use_cpu=True, bf16=False, per_device_train_batch_size=4,
            num_generations=2, gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
        ),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1  # the training loop sets it
    return trainer


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    yield {
        "gmpo": trainer_of(GMPOTrainer, GMPOConfig, tmp_path_factory.mktemp("gmpo")),
        "grpo": trainer_of(GRPOTrainer, GRPOConfig, tmp_path_factory.mktemp("grpo")),
    }
    AcceleratorState._reset_state(reset_partial_state=True)  # it says CPU, and is the whole process's


@pytest.fixture
def trainer(trainers):
    return trainers["grpo"]


def theirs(case, data, trainer, monkeypatch, *, ratio=None):
    """-> the same of the trainer; its metrics are lists by its own names."""
    logps, entropies = leaves(data)
    ratio = data.ratio[case.ratio] if ratio is None else ratio
    low, high, delta = case.bounds
    settings = {
        "loss_type": "dapo" if case.loss_type == "gmpo" else case.loss_type,
        "importance_sampling_level": case.level,
        "beta": case.beta,
        "epsilon_low": low,
        "epsilon_high": CISPO_HIGH if case.loss_type == "cispo" else high,
        "max_completion_length": MAX_LENGTH,
        "use_vllm": ratio is not None,
        "vllm_importance_sampling_correction": True,
        "off_policy_mask_threshold": None if case.off_policy == "none" else THRESHOLD,
        "top_entropy_quantile": QUANTILE if case.top_entropy else 1.0,
        "_entropy_bonus_enabled": case.entropy_bonus,
        "entropy_coef": ENTROPY_COEF,
        "_get_per_token_logps_and_entropies": lambda *arguments, **keywords: (logps, entropies, None),
    }
    arguments = {
        "delta": delta,
        "use_bias_correction_kl": case.kl == "importance_weighted",
        **SAPO,
        **VESPO,
    }
    inputs = {
        "prompt_ids": torch.zeros(BATCH, 2, dtype=torch.long),
        "prompt_mask": torch.ones(BATCH, 2, dtype=torch.long),
        "completion_ids": torch.zeros(BATCH, LENGTH, dtype=torch.long),
        "completion_mask": data.mask.long(),
        "advantages": data.advantages[case.advantages],
        "num_items_in_batch": torch.tensor(ITEMS),
    }
    if case.old:
        inputs["old_per_token_logps"] = data.old
    if case.kl != "none":
        inputs["ref_per_token_logps"] = data.ref
    if ratio is not None:
        inputs["importance_sampling_ratio"] = ratio
    if case.off_policy == "sampling":
        inputs["sampling_per_token_logps"] = data.sampling
    with monkeypatch.context() as patch:
        for target, values in ((trainer, settings), (trainer.args, arguments)):
            for name, value in values.items():
                patch.setattr(target, name, value)
        for recorded in trainer._metrics.values():
            recorded.clear()
        loss = trainer._compute_loss(None, inputs)
    return loss.detach(), *gradients(loss, logps, entropies), trainer._metrics


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compute_loss(case, trainers, monkeypatch):
    gmpo = case.loss_type == "gmpo"  # see test_gmpo_gives_an_empty_sequence_no_value
    data = columns(lengths=LENGTHS.clamp(min=1) if gmpo else LENGTHS)
    found, expected = ours(case, data), theirs(case, data, trainers["gmpo" if gmpo else "grpo"], monkeypatch)
    assert expected[1].any()
    assert expected[2].any() == case.entropy_bonus
    assert_same(found, expected)
    assert_each_option_has_a_part(case, data, found)
    if case.level == "token":  # the trainer's are means over sequences where the ratio is per sequence
        recorded = expected[3]["train"]
        for name, metric in found[3].items():
            if case.loss_type == "cispo" and name.startswith("clip_"):
                # Only the upper bound, and under another name.
                value = 0.0 if name == "clip_low" else recorded["cispo_clip_ratio"][0]
            else:
                value = recorded[METRIC_NAMES[name]][0]
            assert metric.item() == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize(
    ("mode", "accumulated", "per_generation"), [("train", 4, 2), ("train", 3, 6), ("eval", 4, 2)]
)  # fmt: skip
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "luspo", "sapo", "dapo", "cispo", "vespo"])
def test_gradient_accumulation(loss_type, mode, accumulated, per_generation, trainer, monkeypatch):
    """A micro-batch's share of a step: what to hand over as the count, and what to divide by."""
    case, data = Case(loss_type, kl="plain"), columns(1)
    monkeypatch.setattr(trainer, "current_gradient_accumulation_steps", accumulated)
    monkeypatch.setattr(trainer.args, "steps_per_generation", per_generation)
    trainer.model.train(mode == "train")
    expected = theirs(case, data, trainer, monkeypatch)
    trainer.model.train()
    share = accumulated / per_generation if mode == "train" else 1.0
    scale = accumulated if mode == "train" and loss_type not in ("dapo", "cispo", "vespo") else 1.0
    assert_same(ours(case, data, items=ITEMS * share, scale=scale), expected)
    if mode == "train":
        assert differ(ours(case, data), expected)


# --- the sampler's ratio ----------------------------------------------------------------------------------------------


def vllm_ratio(old, sampling, mask, mode, low, high):
    """The lines of `GRPOTrainer._generate_and_score_completions` that make the ratio, in float64."""
    difference = torch.nan_to_num((old.double() - sampling.double()) * mask, nan=0.0)
    ratio = torch.exp(difference.sum(dim=-1, keepdim=True) if mode.startswith("sequence") else difference)
    if mode.endswith("truncate"):
        return torch.clamp(ratio, min=low, max=high)
    minimum, maximum = -math.inf if low is None else low, math.inf if high is None else high
    return ratio.masked_fill((ratio < minimum) | (ratio > maximum), value=0.0)


MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
RATIO_BOUNDS = [(None, 1.4), (0.7, 1.4), (0.7, None)]


@pytest.mark.parametrize(
    ("loss_type", "mode", "bounds"),
    [*product(["dapo"], MODES, RATIO_BOUNDS), *product(["grpo", "cispo", "sapo"], MODES, RATIO_BOUNDS[1:2]),
     *product(["vespo"], MODES[:2], RATIO_BOUNDS)],
)  # fmt: skip
def test_sampler_correction(loss_type, mode, bounds, trainer, monkeypatch):
    case, data = Case(loss_type, kl="plain"), columns(2)
    ratio = vllm_ratio(data.old, data.sampling, data.mask, mode, *bounds).float()
    cut = (ratio != vllm_ratio(data.old, data.sampling, data.mask, mode, None, math.inf).float()).float().mean()
    assert 0 < cut < 1
    assert mode.startswith("sequence") or ratio[0, 2] == 1  # NaN corrects nothing
    expected = theirs(case, data, trainer, monkeypatch, ratio=ratio)
    level, kind = mode.split("_")
    correction = SamplerCorrection(level=level, mode=kind, ratio_min=bounds[0], ratio_max=bounds[1])
    found = ours(case, data, sampler_correction=correction)
    assert_same(found, expected)
    assert differ(found, ours(case, data))


def test_gmpo_gives_an_empty_sequence_no_value(trainers, monkeypatch):
    """TRL adds -A / B for it, a constant; the gradients are the same."""
    case, data = Case("gmpo", kl="plain"), columns()
    found, expected = ours(case, data), theirs(case, data, trainers["gmpo"], monkeypatch)
    empty = data.advantages["(B,)"][LENGTHS == 0].sum() / BATCH
    assert abs(empty) > 0.01
    assert_same((found[0] - empty, *found[1:]), expected)
