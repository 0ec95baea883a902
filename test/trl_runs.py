"""Real TRL trainers on tiny random models, with and without the patch: the same run from the same seed."""

import copy
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

import oracles
from liger_rl.integrations.trl import distillation, patched_trl, report
from liger_rl.models import project
from liger_rl.models.swap import CACHE
from liger_rl.step import trial

TOKENS = ("<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(37)))
SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    # Larger than transformers' 0.02, so that the policy is not flat and no gradient is all rounding.
    "initializer_range": 0.2,
}
MODELS = {
    "qwen3": transformers.Qwen3Config(**SIZES),
    "gemma2": transformers.Gemma2Config(**SIZES, final_logit_softcapping=20.0),
    # A scale of the logits, a divisor of them; Cohere's head is the embeddings, too.
    "cohere": transformers.CohereConfig(**SIZES, logit_scale=0.5),
    "granite": transformers.GraniteConfig(**SIZES, logits_scaling=2.0),
}
CPU_ARGS = {
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "log_level": "error",
    "max_steps": 20,
    "learning_rate": 3e-3,
    # Adam's step is g / (|g| + epsilon): with 1e-8 a gradient that is all rounding takes a full step either way.
    "adam_epsilon": 1e-4,
    "lr_scheduler_type": "constant",
    "seed": 3,
}
# More than 16 tokens, or no prefix is shared; of different lengths, so that they are padded.
PROMPTS = [" ".join(f"w{(3 * i + n) % 37}" for i in range(length)) for n, length in enumerate((24, 20, 28, 22))]
CHOSEN = [" w9 w10 w11", " w12 w13", " w14 w15 w16 w17", " w18"]
REJECTED = [" w19", " w20 w21 w22", " w23 w24", " w25 w26 w27 w28"]
PREFERENCES = {"prompt": PROMPTS, "chosen": CHOSEN, "rejected": REJECTED}
ANSWERS = {"prompt": PROMPTS * 2, "completion": [*CHOSEN, *REJECTED]}
VERDICTS = {**ANSWERS, "label": [True] * 4 + [False] * 4}


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    splitter = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<unk>"))
    splitter.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=splitter, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def save_model(name: str, directory, *, seed: int = 0, head_gain: float = 1.0) -> str:
    """-> path, of which a trainer makes its reference model too; the head's weight is `head_gain` times as large."""
    torch.manual_seed(seed)
    # A trainer changes the config of its model.
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name]))
    model.lm_head.weight.data *= head_gain
    path = str(directory / f"{name}-{seed}")
    model.save_pretrained(path)
    return path


def evenness(completion_ids, **columns) -> list[float]:
    """A reward that any policy can raise and that differs within a group: the share of even token ids."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


SCORED = {"num_generations": 4, "max_completion_length": 10, "per_device_train_batch_size": 8, "temperature": 0.9}
PAIRED = {"per_device_train_batch_size": 4, "max_length": 48}
# Prefix of the trainer's and the config's name -> columns of the data set, options of the config.
TRAINERS = {
    "GRPO": ({"prompt": PROMPTS}, {**SCORED, "num_iterations": 2, "beta": 0.1}),
    "RLOO": ({"prompt": PROMPTS}, {**SCORED, "num_iterations": 2, "beta": 0.1}),
    "DPO": (PREFERENCES, PAIRED),
    # Both answers of a prompt in one batch.
    "KTO": (VERDICTS, {**PAIRED, "per_device_train_batch_size": 8}),
    "SFT": (ANSWERS, {**PAIRED, "per_device_train_batch_size": 8}),
}
DISTILLATION = {"per_device_train_batch_size": 4, "temperature": 0.9, "max_completion_length": 8}

CLOCKS = ("step_time", "train_runtime", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
# Bounds of the clip so narrow that steps of this size pass them.
GRPO_RUNS = {
    name: {"loss_type": name, "epsilon": 0.02}
    for name in ("grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "vespo", "luspo")
}
GRPO_RUNS["cispo"] |= {"epsilon_high": 1.02}
GRPO_RUNS["grpo at sequence level"] = {
    "loss_type": "grpo",
    "importance_sampling_level": "sequence",
    "epsilon": 0.005,
}
# Every other option of GRPOConfig that its loss has.
GRPO_RUNS["other options"] = {
    "loss_type": "dapo",
    "epsilon": 0.02,
    "epsilon_high": 0.03,
    "delta": 1.02,
    "use_bias_correction_kl": False,
    # A threshold that falls on a token tips with its rounding: 0.382 (n - 1) is far from an integer for n <= 80 tokens.
    "top_entropy_quantile": 0.618,
    "off_policy_mask_threshold": 0.01,
}
UNCLIPPED = ("sapo", "vespo")
# A pair of 20 steps now and then parts at a bound of the clip; the others end 1.3e-7 apart in their weights at most.
GRPO_STEPS, SEEDS = 8, (3, 4, 5)


class Run(NamedTuple):
    log: dict[str, list[float]]  # by name, a value of each step
    weights: dict[str, Tensor]  # of the trained model
    calls: int  # of our op or our divergence
    forwards: list["Forward"]  # of the policy, with the fused head


class Forward(NamedTuple):
    """What the model's body gets."""

    tokens: int
    tree: bool  # its mask is that of shared prefixes


@contextmanager
def counted_calls():
    """-> a list that grows by the columns of every call of our op or our divergence: H, more with adapters."""
    calls: list[int] = []
    logprobs, divergence = project.linear_logprobs, distillation.DivergenceCall

    def counting(hidden, *args, **options):
        calls.append(hidden.shape[-1])
        return logprobs(hidden, *args, **options)

    def counting_divergence(**tensors):
        made = divergence(**tensors)
        calls.append(made.hidden.shape[-1])
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(project, "linear_logprobs", counting)
        patch.setattr(distillation, "DivergenceCall", counting_divergence)
        yield calls


def build(
    kind: str, path, directory, *, dtype="float32", teacher: str | None = None, peft_config=None, data=None, **options
):
    """A trainer of `kind`, a key of TRAINERS or "Distillation", of the model at a path or of a model. `data`: columns
    in place of those of TRAINERS."""
    columns, fixed = TRAINERS[kind] if teacher is None else ({"prompt": PROMPTS}, DISTILLATION)
    arguments = {**CPU_ARGS, "output_dir": str(directory), **fixed, **options}
    extra = {"reward_funcs": evenness} if "num_generations" in fixed else {}
    if teacher is not None:
        path, extra["teacher_model"] = (
            transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) for name in (path, teacher)
        )
    elif isinstance(path, str):
        arguments["model_init_kwargs"] = {"dtype": dtype}
    data = Dataset.from_dict(data or columns)
    if "eval_strategy" in options:
        extra["eval_dataset"] = data
    torch.manual_seed(0)  # of the adapters
    config = getattr(trl, f"{kind}Config")(**arguments)
    config._n_gpu = min(config.n_gpu, 1)  # else all GPUs of the host take part
    return getattr(trl, f"{kind}Trainer")(
        model=path,
        args=config,
        train_dataset=data,
        processing_class=tokenizer(),
        peft_config=peft_config,
        **extra,
    )


def is_in_trial() -> bool:
    """Whether a forward is one of a trial, or of the proof of a model."""
    return trial._lock.locked() or project._lock.locked()


def watched(model) -> list[Forward]:
    """-> a list that grows by each forward in training mode, and so without generation and trials."""
    forwards = []

    def before(body, _args, kwargs) -> None:
        if kwargs.get(CACHE) is None and body.training and not is_in_trial():
            mask = kwargs.get("attention_mask")
            tree = isinstance(mask, dict) or (mask is not None and mask.dim() == 4)
            ids, embeddings = kwargs.get("input_ids"), kwargs.get("inputs_embeds")  # the latter from prompt tuning
            forwards.append(Forward(embeddings[..., 0].numel() if ids is None else ids.numel(), tree))

    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    model.base_model.register_forward_pre_hook(before, with_kwargs=True)
    return forwards


def run(trainer) -> Run:
    forwards = watched(trainer.model)
    with counted_calls() as calls:
        trainer.train()
    log: dict[str, list[float]] = {}
    for entry in trainer.state.log_history:
        for name, value in entry.items() if "train_runtime" not in entry else ():
            if value is not None:  # as TRL logs a mean of nothing
                log.setdefault(name, []).append(value)
    return Run(log, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}, len(calls), forwards)


def train(
    kind,
    path,
    directory,
    *,
    patch,
    script=None,
    prepare: Callable[[Any], None] | None = None,
    built_before=False,
    patch_options=None,
    **options,
) -> Run:
    """One run of `build(kind, path, directory, **options)`, with `patch_options` of `patched_trl`.

    `prepare` is given the trainer before it trains. With `built_before` the patch comes when the trainer is there.

    With a `script`, a list of what the policy has said in each of its turns, a GRPO run says that, and not what it
    would say itself; an empty list is filled with the run's own.
    """
    with ExitStack() as held:
        if patch and not built_before:
            held.enter_context(patched_trl(**(patch_options or {})))
        trainer = build(kind, path, directory, **options)
        if patch and built_before:
            held.enter_context(patched_trl())
        if script is not None:
            _follow(trainer, script)
        if prepare is not None:
            prepare(trainer)
        return run(trainer)


def pair(kind, path, directory, **options) -> tuple[Run, Run]:
    """-> the runs without the patch and with it."""
    plain, patched = (train(kind, path, directory, patch=patch, **options) for patch in (False, True))
    return plain, patched


def assert_same_run(patched: Run, plain: Run, *, shares: bool = True, **how) -> None:
    """Also that prefixes are shared, or that the model runs the batches as they are."""
    assert plain.calls == 0
    assert patched.calls >= len(plain.log["loss"])
    assert_layout(patched, plain, shares=shares)
    assert_same_log(patched, plain, **how)


def assert_layout(patched: Run, plain: Run, *, shares: bool) -> None:
    tokens, before = (sum(forward.tokens for forward in run.forwards) for run in (patched, plain))
    trees, none = ([forward.tree for forward in run.forwards] for run in (patched, plain))
    assert not any(none)
    assert any(trees) == shares
    assert tokens < 0.8 * before if shares else tokens <= before, (tokens, before, patched.forwards)


def assert_same_log(patched: Run, plain: Run, *, by_step: bool = False) -> None:
    """Every step's log and the final weights, to float32 rounding: of the largest value of its kind in the run, or
    `by_step` of the step's own."""
    assert patched.log.keys() - {report.TOKENS, report.SAVED} == plain.log.keys()
    for name in plain.log:
        if name not in CLOCKS:
            assert not any(_differs(patched, plain, name, by_step)), name
    assert weight_distance(patched, plain) <= 1e-6


def grpo_pair(name: str, path: str, directory, **options) -> tuple[Run, Run]:
    """-> the runs without the patch and with it, of the same completions.

    A pair that parts at a bound of the clip is no evidence either way, so another seed decides.
    """
    options = GRPO_RUNS[name] | {"max_steps": GRPO_STEPS} | options
    for seed in SEEDS:
        plain, patched = pair("GRPO", path, directory, script=[], seed=seed, **options)
        if not parted_at_a_bound(patched, plain):
            break
    return plain, patched


def assert_same_grpo_run(name: str, path: str, directory) -> None:
    """Loss, policy loss, KL, entropy and clip metrics among others, with a KL penalty and an entropy bonus."""
    plain, patched = grpo_pair(name, path, directory, entropy_coef=0.02)
    assert_same_run(patched, plain)
    assert max(plain.log["kl"]) > 0.01
    if name not in UNCLIPPED:
        clipped = "cispo_clip_ratio" if name == "cispo" else "clip_ratio/region_mean"
        assert max(plain.log[clipped]) > 0.1


def parted_at_a_bound(patched: Run, plain: Run) -> bool:
    """Whether the runs part where the loss agrees and the number of clipped tokens does not.

    The clipped loss is continuous and its gradient is not: a token whose ratio is within float32 rounding of a bound
    has another gradient on the other side of it. A wrong log-probability or loss parts the losses first.
    """
    steps = len(plain.log["loss"])
    differs = {
        name: _differs(patched, plain, name)
        for name, values in plain.log.items()
        if len(values) == steps and name not in CLOCKS
    }
    first = next((step for step in range(steps) if any(values[step] for values in differs.values())), None)
    if first is None:
        return False
    names = {name for name, values in differs.items() if values[first]}
    return any("clip_ratio" in name for name in names) and not names & {"loss", "policy_loss", "kl", "entropy"}


def _differs(a: Run, b: Run, name: str, by_step: bool = False) -> list[bool]:
    values, expected = torch.tensor([a.log[name], b.log[name]], dtype=torch.float64)
    sizes = expected.abs() if by_step else expected.abs().max()
    # Before its version 5 transformers rounds a logged loss to four digits.
    rounding = 1e-4 if name == "loss" and transformers.__version__.startswith("4.") else 0.0
    same = (values - expected).abs() <= 1e-5 * sizes.clamp(min=1.0) + rounding
    return (~same).tolist()  # a NaN is not the same


def _follow(trainer, script: list) -> None:
    generate, lines = trainer._generate_single_turn, iter(list(script))

    def turn(*args):
        line = next(lines, None)
        if line is None:
            line = generate(*args), torch.get_rng_state()
            script.append(line)
        said, state = line
        torch.set_rng_state(state)  # what follows, the shuffle of the completions, draws the same
        return said

    trainer._generate_single_turn = turn


def log_distance(a: Run, b: Run, name: str) -> float:
    """Mean over the steps."""
    return sum(abs(x - y) for x, y in zip(a.log[name], b.log[name], strict=True)) / len(b.log[name])


def weight_distance(a: Run, b: Run) -> float:
    """Relative Frobenius distance."""
    return oracles.relative_error(oracles.whole(a.weights), oracles.whole(b.weights))
