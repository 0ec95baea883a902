"""Real TRL trainers on tiny random models, with and without the patch: the same run from the same seed.

`Row` is a case of that property, `run_row` makes its two runs, and `assert_same_run` compares them, on ranks too.
"""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

import oracles
from liger_rl.integrations.trl import distillation, patched_trl, report
from liger_rl.integrations.trl.forward import CALL, ModelCall
from liger_rl.models import project
from liger_rl.models.swap import CACHE
from liger_rl.step import trial
from quick_trainers import hasten

hasten()

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
    "Distillation": (
        {"prompt": PROMPTS},
        {"per_device_train_batch_size": 4, "temperature": 0.9, "max_completion_length": 8},
    ),
}
CLOCKS = ("step_time", "train_runtime", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


class Forward(NamedTuple):
    """What a model's body gets."""

    tokens: int
    tree: bool  # its mask is that of shared prefixes


@dataclass
class Run:
    """What one training run has done."""

    log: dict[str, list[float]]  # by name, a value of each step; and "train_loss", one value
    weights: dict[str, Tensor]  # of the trained model
    head_calls: int = 0  # of our op or our divergence
    # Of the policy and the reference, in training and outside of trials:
    calls: int = 0  # with the fused head, or DistillationTrainer's of the bodies
    forwards: list[Forward] = field(default_factory=list)  # of their bodies
    padded_tokens: list[int] = field(default_factory=list)  # of the calls of each optimizer step
    backwards: int = 0
    gradients: list[Tensor] = field(default_factory=list)  # of each optimizer step, all parameters in one
    # Of each call with a graph, the rows that are known to have no gradient, and those whose outputs have one.
    idle: list[Tensor | None] = field(default_factory=list)
    live: list[Tensor] = field(default_factory=list)
    random_state: Tensor | None = None  # in the end

    @property
    def tokens(self) -> int:
        return sum(forward.tokens for forward in self.forwards)


@dataclass(frozen=True)
class Row:
    """A case of "the patched run is TRL's run"."""

    kind: str  # of TRAINERS
    options: dict[str, Any]  # of `train`
    model: str | Callable[[], transformers.PreTrainedModel] = "qwen3"  # of MODELS, or one to save
    trees: bool | None = True  # whether forwards share prefixes; None: the shuffle of the data decides
    share: float = 1.0  # the bodies get at most this share of TRL's tokens
    is_logged: bool = True  # whether the log has these numbers
    idle: tuple[int, ...] | None = None  # the calls with a graph whose rows without a gradient are known
    together: bool = True  # whether the micro-batches of an optimizer step share their calls
    calls: tuple[int, int] | None = None  # without the patch and with it; None: as `together` says
    is_ours: bool = True  # whether our head runs, and not TRL's forward
    backwards: int | None = None  # with the patch; None: one for each optimizer step whose micro-batches share calls


def build(
    kind: str, path, directory, *, dtype="float32", teacher: str | None = None, peft_config=None, data=None, **options
):
    """A trainer of `kind`, a key of TRAINERS, of the model at a path or of a model. `data`: columns in place of those
    of TRAINERS."""
    columns, fixed = TRAINERS[kind]
    arguments = {**CPU_ARGS, "output_dir": str(directory), **fixed, **options}
    extra = {"reward_funcs": evenness} if "num_generations" in fixed else {}
    if teacher is not None:
        path, extra["teacher_model"] = (
            transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) for name in (path, teacher)
        )
    elif isinstance(path, str):
        arguments["model_init_kwargs"] = {"dtype": dtype, "device_map": None}  # TRL spreads it over a host's GPUs
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


def watched(model, is_training: Callable[[], bool] | None = None) -> list[Forward]:
    """-> a list that grows by each forward in training, and so without generation and trials."""
    forwards = []

    def before(body, _args, kwargs) -> None:
        in_trial = trial._lock.locked() or project._lock.locked()  # or in the proof of a model
        training = body.training if is_training is None else is_training()
        if kwargs.get(CACHE) is None and training and not in_trial:
            mask = kwargs.get("attention_mask")
            tree = isinstance(mask, dict) or (mask is not None and mask.dim() == 4)
            ids, embeddings = kwargs.get("input_ids"), kwargs.get("inputs_embeds")  # the latter from prompt tuning
            forwards.append(Forward(embeddings[..., 0].numel() if ids is None else ids.numel(), tree))

    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    model.base_model.register_forward_pre_hook(before, with_kwargs=True)
    return forwards


class _Watch(transformers.TrainerCallback):
    """Fills the record of a run."""

    def __init__(self, trainer) -> None:
        self.trainer, self.is_running, self.padded_tokens = trainer, True, 0
        trainer.add_callback(self)
        others = [getattr(trainer, name, None) for name in ("ref_model", "teacher_model")]
        models = [model for model in (trainer.model, *others) if model is not None]
        self.forwards = [watched(model, self.is_training) for model in models]
        self.run = Run({}, {})
        self.models = models
        self.calls_bodies = models[-1] is getattr(trainer, "teacher_model", None)  # and no model with the fused head

    def is_training(self) -> bool:
        return self.is_running and self.trainer.model.training

    def call(self, module, *args, **inputs):
        """A call of any module. Not by a hook: with one on a model each micro-batch has a forward of its own."""
        is_model = any(module is model for model in self.models)
        if is_model and self.is_training() and inputs.get("fused_lm_head"):
            self.run.calls += 1
            self.padded_tokens += inputs["input_ids"].numel()
        output = self.call_module(module, *args, **inputs)
        if module is self.trainer.model:
            self.record_rows(inputs, output)
        return output

    def record_rows(self, inputs, output) -> None:
        outputs = [output.get(name) for name in ("log_probs", "entropy")] if isinstance(output, dict) else []
        outputs = [values for values in outputs if values is not None and values.requires_grad]
        if outputs and self.is_running:
            self.run.idle.append(inputs.get(CALL, ModelCall()).idle_rows)
            live = torch.zeros(len(outputs[0]), dtype=torch.bool, device=outputs[0].device)
            self.run.live.append(live)

            def record(grad) -> None:
                live.logical_or_((grad != 0).any(-1))

            for values in outputs:
                values.register_hook(record)

    def on_pre_optimizer_step(self, *args, **options) -> None:
        gradients = [p.grad for p in self.trainer.model.parameters() if p.grad is not None]
        local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in gradients]
        if local:  # DeepSpeed keeps none there
            self.run.gradients.append(torch.cat([grad.flatten() for grad in local]))

    def on_step_end(self, *args, **options) -> None:
        if self.calls_bodies:
            self.padded_tokens = sum(forward.tokens for forwards in self.forwards for forward in forwards)
            self.padded_tokens -= sum(self.run.padded_tokens)
        self.run.padded_tokens.append(self.padded_tokens)
        self.padded_tokens = 0

    def on_train_end(self, *args, **options) -> None:
        self.run.random_state = torch.get_rng_state()
        if self.calls_bodies:
            self.run.calls = sum(map(len, self.forwards))
        self.is_running = False


def run(trainer) -> Run:
    watch, logprobs, divergence = _Watch(trainer), project.linear_logprobs, distillation.DivergenceCall
    backward, watch.call_module = torch.Tensor.backward, torch.nn.Module._call_impl

    def call(module, *args, **inputs):
        return watch.call(module, *args, **inputs)

    def count_backward(*args, **options):
        watch.run.backwards += 1
        return backward(*args, **options)

    with (
        mock.patch.object(torch.Tensor, "backward", count_backward),
        mock.patch.object(torch.nn.Module, "_call_impl", call),
        mock.patch.object(project, "linear_logprobs", side_effect=logprobs) as ours,
        mock.patch.object(distillation, "DivergenceCall", side_effect=divergence) as ours_of_two,
    ):
        trainer.train()
    done = watch.run
    for entry in trainer.state.log_history:
        for name in ("train_loss",) if "train_runtime" in entry else entry:
            if entry[name] is not None:  # as TRL logs a mean of nothing
                done.log.setdefault(name, []).append(entry[name])
    done.weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    done.head_calls = ours.call_count + ours_of_two.call_count
    done.forwards = [forward for forwards in watch.forwards for forward in forwards]
    return done


def train(
    kind,
    path,
    directory,
    *,
    patch,
    script=None,
    scored: Callable[[dict], dict] | None = None,
    prepare: Callable[[Any], None] | None = None,
    built_before=False,
    patch_options=None,
    **options,
) -> Run:
    """One run of `build(kind, path, directory, **options)`, with `patch_options` of `patched_trl`.

    `scored` changes a generation's batch before TRL shuffles it. `prepare` is given the trainer before it trains. With
    `built_before` the patch comes when the trainer is there.

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
        if scored is not None:
            score = trainer._generate_and_score_completions
            trainer._generate_and_score_completions = lambda inputs: scored(score(inputs))
        if prepare is not None:
            prepare(trainer)
        return run(trainer)


def pair(kind, path, directory, **options) -> tuple[Run, Run]:
    """-> the runs without the patch and with it, of the same completions."""
    script = {"script": []} if kind in ("GRPO", "RLOO") else {}
    plain, patched = (train(kind, path, directory, patch=patch, **script, **options) for patch in (False, True))
    return plain, patched


# --- the property -----------------------------------------------------------------------------------------------------

# A pair now and then parts at a bound of the clip, which is no evidence either way; so another seed decides.
SEEDS = (3, 4, 5)


def save(make: Callable[[], transformers.PreTrainedModel], directory) -> str:
    """-> path, of which TRL makes the reference too."""
    torch.manual_seed(0)
    path = str(Path(directory) / "model")
    make().save_pretrained(path)
    return path


def assert_row(row: Row, path: str, directory, **options) -> tuple[Run, Run]:
    """Train twice, with the model at `path`. -> the runs without the patch and with it."""
    for seed in SEEDS:
        plain, patched = pair(row.kind, path, directory, **{"seed": seed} | row.options | options)
        if not parted_at_a_bound(patched, plain):
            break
    assert_same_run(patched, plain, row)
    return plain, patched


def assert_same_run(patched: Run, plain: Run, row: Row | None = None, *, relative: float = 1e-5) -> None:
    """Every step's log and gradient, final weights and the random state, to float32 rounding. With a row
    also how many tokens and calls of the models there were, and which rows were left out.

    `relative`: of a logged value above 1; below, it is the same to 1e-5.
    """
    assert patched.log.keys() - {report.TOKENS, report.SAVED} == plain.log.keys()
    for name in plain.log:
        if name not in CLOCKS:
            assert not any(_differs(patched, plain, name, relative)), (name, patched.log[name], plain.log[name])
    assert weight_distance(patched, plain) <= 1e-6
    for mine, theirs in zip(patched.gradients, plain.gradients, strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()
    assert torch.equal(patched.random_state, plain.random_state)
    assert plain.head_calls == 0
    if row is None or row.is_ours:
        assert patched.head_calls >= len(plain.log["loss"])
    assert not any(forward.tree for forward in plain.forwards)
    if row is not None:
        _assert_layout(patched, plain, row)
        _assert_idle_rows(patched, row)


def _assert_layout(patched: Run, plain: Run, row: Row) -> None:
    assert row.trees in (None, any(forward.tree for forward in patched.forwards))
    assert 0 < patched.tokens <= row.share * plain.tokens, (patched.forwards, plain.forwards)
    if row.is_logged:
        every = row.options.get("logging_steps", 1)
        numbers = zip(patched.log[report.TOKENS], patched.log[report.SAVED], strict=True)
        assert sum(patched.log[report.TOKENS]) * every == patched.tokens
        padded = [sum(plain.padded_tokens[step : step + every]) for step in range(0, len(plain.padded_tokens), every)]
        for total, (tokens, saved) in zip(padded, numbers, strict=True):
            assert saved == pytest.approx(1 - tokens * every / total)
    micro_batches = row.options.get("gradient_accumulation_steps", 1) if row.together else 1
    calls = row.calls or (plain.calls, plain.calls // micro_batches)
    assert (plain.calls, patched.calls) == calls, (plain.calls, patched.calls)
    joined = plain.backwards if patched.calls == plain.calls else len(plain.padded_tokens)
    assert patched.backwards == (row.backwards or joined)


def _assert_idle_rows(patched: Run, row: Row) -> None:
    """An idle row has no gradient. In the first call, where no ratio is at a bound, every other one has one."""
    if row.idle is None:
        return
    known = [number for number, rows in enumerate(patched.idle) if rows is not None]
    assert known == list(row.idle)
    for number in known:
        assert not (patched.idle[number] & patched.live[number]).any()
        assert 0 < patched.idle[number].sum() < len(patched.idle[number])
    if 0 in known:
        assert torch.equal(patched.live[0], ~patched.idle[0])


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


def _differs(a: Run, b: Run, name: str, relative: float = 1e-5) -> list[bool]:
    values, expected = torch.tensor([a.log[name], b.log[name]], dtype=torch.float64)
    # Before its version 5 transformers rounds a logged loss to four digits.
    rounding = 1e-4 if name == "loss" and transformers.__version__.startswith("4.") else 0.0
    same = (values - expected).abs() <= (relative * expected.abs()).clamp(min=1e-5) + rounding
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
