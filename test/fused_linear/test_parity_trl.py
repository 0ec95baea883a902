"""Losses, gradients and metrics against TRL's own `GRPOTrainer._compute_loss`, on log-probabilities given to both."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from liger_rl import ppo_loss_fn
from liger_rl.losses import OffPolicySequenceMask, PolicyBatch, TopEntropyMask
from liger_rl.losses.presets import build_loss

LENGTHS = torch.tensor([9, 4, 7, 1, 9, 5, 0, 8, 6, 2, 9, 3])  # one token, and none
BATCH, LENGTH = len(LENGTHS), 9
ITEMS = 97.0  # tokens of the whole step: more than LENGTHS has
CLIPPING = ("grpo", "bnpo", "dapo", "dr_grpo", "luspo")
SAPO = {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.6}
VESPO = {"vespo_k_pos": 1.7, "vespo_lambda_pos": 2.2, "vespo_k_neg": 2.6, "vespo_lambda_neg": 1.4}
CISPO_HIGH, BETA, THRESHOLD, QUANTILE, ENTROPY_COEF, MAX_LENGTH = 1.3, 0.13, 0.02, 0.4, 0.07, 11


@dataclass(frozen=True)
class Case:
    """One combination of options; the defaults are what each option is when it is off."""

    loss_type: str
    level: str = "token"
    kl: str = "none"
    delta: bool = False
    advantages: str = "(B,)"
    old: bool = True
    ratio: str = "none"
    off_policy: str = "none"
    top_entropy: bool = False
    entropy_bonus: bool = False

    @property
    def bounds(self):
        """epsilon_low, epsilon_high, delta: a mean over a sequence moves less."""
        if self.loss_type == "gmpo":
            return 0.25, 0.35, None
        low, high, delta = (0.2, 0.28, 1.5) if self.level == "token" else (0.04, 0.06, 1.1)
        return low, high, delta if self.delta else None

    @property
    def options(self):
        """Of the objective and the reduction, by the names that all libraries use."""
        low, high, delta = self.bounds
        if self.loss_type in CLIPPING:
            options = {
                "epsilon_low": low,
                "epsilon_high": high,
                "delta": delta,
                "importance_sampling_level": self.level,
            }
            return options | ({"max_completion_length": MAX_LENGTH} if self.loss_type == "dr_grpo" else {})
        others = {"cispo": {"epsilon_high": CISPO_HIGH}, "sapo": SAPO, "vespo": VESPO}
        return others.get(self.loss_type, {"epsilon_low": low, "epsilon_high": high})

    @property
    def beta(self):
        return 0.0 if self.kl == "none" else BETA


def columns(seed=7):
    """What both are given: float32, ratios on either side of every bound, nothing near a factor of 0 or 1."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    logps = -normal(BATCH, LENGTH).abs() - 0.1
    mask = torch.arange(LENGTH) < LENGTHS[:, None]
    sampling = logps + 0.4 * normal(BATCH, LENGTH)
    sampling[0, 2] = math.nan  # the engine reported none
    ratio = 0.3 + 1.7 * torch.rand(BATCH, LENGTH, generator=g)
    return SimpleNamespace(
        logps=logps,
        entropies=0.2 + 2 * torch.rand(BATCH, LENGTH, generator=g),
        mask=mask,
        advantages={"(B,)": normal(BATCH), "(B, T)": normal(BATCH, LENGTH)},
        old=logps + 0.4 * normal(BATCH, LENGTH),
        ref=logps + 0.4 * normal(BATCH, LENGTH),
        sampling=sampling,
        # TRL makes them from masked differences, so they are 1 under the mask.
        ratio={"none": None, "(B, T)": torch.where(mask, ratio, 1.0), "(B, 1)": ratio[:, :1]},
    )


def leaves(data):
    return data.logps.clone().requires_grad_(), data.entropies.clone().requires_grad_()


def gradients(loss, *inputs):
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, grads, strict=True)]


def ours(case, data, *, items=ITEMS, scale=1.0):
    """-> loss, gradients with respect to log-probabilities and entropies, metrics."""
    penalties = {"beta": case.beta, "importance_weighted": case.kl == "importance_weighted"}
    penalties["entropy_coef"] = ENTROPY_COEF if case.entropy_bonus else 0.0
    parts = build_loss(case.loss_type, case.options | penalties)
    corrections = [OffPolicySequenceMask(threshold=THRESHOLD)] if case.off_policy != "none" else []
    corrections += [TopEntropyMask(top_entropy_quantile=QUANTILE)] if case.top_entropy else []
    batch = PolicyBatch(
        advantages=data.advantages[case.advantages],
        mask=data.mask,
        old_per_token_logps=data.old if case.old else None,
        ref_per_token_logps=data.ref if case.kl != "none" else None,
        sampling_per_token_logps=data.sampling if case.off_policy == "sampling" else None,
        importance_ratio=data.ratio[case.ratio],
        num_items_in_batch=items,
    )
    logps, entropies = leaves(data)
    found = ppo_loss_fn(
        logps, batch, parts.objective, parts.reduction, entropy=entropies, kl=parts.kl,
        entropy_bonus=parts.entropy_bonus, corrections=corrections,
    )  # fmt: skip
    loss = found.loss / scale
    return loss.detach(), *gradients(loss, logps, entropies), found.metrics


def assert_same(found, expected):
    """Loss to 1e-5 of itself; each gradient to 1e-5 of itself, with a floor of 1e-6 of the largest."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    for mine, truth in zip(found[1:3], expected[1:3], strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-6 * truth.abs().max().item())


# --- TRL's own --------------------------------------------------------------------------------------------------------

# A case for each loss, and each value of every option once; their cross product is the fuzzer's, in float64.
CASES = [
    Case("grpo", "sequence", kl="plain", delta=True, off_policy="old", top_entropy=True),
    Case("bnpo", "sequence", kl="importance_weighted", ratio="(B, 1)", off_policy="sampling"),
    Case("dapo", kl="importance_weighted", delta=True, advantages="(B, T)", ratio="(B, T)"),
    Case("dr_grpo", old=False, entropy_bonus=True),
    Case("luspo", kl="plain"),
    Case("cispo", kl="importance_weighted", ratio="(B, 1)"),
    Case("sapo", kl="plain", ratio="(B, T)", top_entropy=True, entropy_bonus=True),
    Case("vespo", kl="plain", ratio="(B, T)", off_policy="sampling"),
    Case("gmpo", kl="plain"),
]
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


def theirs(case, data, trainer, monkeypatch):
    """-> the same of the trainer; its metrics are lists by its own names."""
    logps, entropies = leaves(data)
    ratio = data.ratio[case.ratio]
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
    data, gmpo = columns(), case.loss_type == "gmpo"
    found, expected = ours(case, data), theirs(case, data, trainers["gmpo" if gmpo else "grpo"], monkeypatch)
    if gmpo:  # TRL adds a constant for the empty sequence
        empty = data.advantages["(B,)"][LENGTHS == 0].sum() / BATCH
        assert abs(empty) > 0.01
        found = found[0] - empty, *found[1:]
    assert expected[1].any()
    assert expected[2].any() == case.entropy_bonus
    assert_same(found, expected)
    if case.loss_type in (*CLIPPING, "gmpo") and case.old:
        assert 0 < found[3]["clip_low"].item() < 0.5
        assert 0 < found[3]["clip_high"].item() < 0.5
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
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
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
