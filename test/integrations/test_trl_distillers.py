"""TRL's experimental GKD, GOLD, SDFT and SDPO without logits: runs of the real trainers against TRL's own."""

import importlib
import logging
from contextlib import ExitStack, nullcontext

import pytest
import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

pytest.importorskip("trl.kernels.chunked_divergence", reason="TRL 1.16 is not installed")
pytest.importorskip("peft", reason="PEFT is not installed")

from peft import LoraConfig
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.gold import GOLDConfig, GOLDTrainer

import oracles
import trl_runs
from liger_rl import LogitTransform
from liger_rl.integrations import trl_distillers
from liger_rl.integrations.peft import base_model
from liger_rl.integrations.trl import patched_trl

KINDS = {"GKD": (GKDTrainer, GKDConfig), "GOLD": (GOLDTrainer, GOLDConfig)}
TEMPLATE = "{% for m in messages %}{{ ' ' + m['content'] + ' <eos>' }}{% endfor %}"
LORA = {"r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM"}


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        (name, seed): trl_runs.save_model(name, folder, seed=seed) for name in ("qwen3", "gemma2") for seed in (0, 1)
    }


def tokenizer(kind: str) -> transformers.PreTrainedTokenizerFast:
    """GOLD asks for pieces of bytes."""
    made = trl_runs.tokenizer()
    if kind == "GOLD":
        pieces = ["<pad>", "<eos>", "<unk>", "Ġw", *map(str, range(len(trl_runs.TOKENS) - 4))]
        backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        special = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "unk")}
        made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **special)
    made.chat_template = TEMPLATE
    return made


def messages() -> Dataset:
    return Dataset.from_dict({"messages": [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer.strip()}]
        for prompt, answer in zip(trl_runs.PROMPTS, trl_runs.CHOSEN, strict=True)
    ]})  # fmt: skip


def train(kind, student, teacher, directory, *, patch, trainer=None, peft_config=None, before=None, **options):
    """-> the losses of three steps, the student's weights, and the widths of the outputs of both heads in training."""
    cls, config = KINDS[kind]
    arguments = {**trl_runs.CPU_ARGS, "output_dir": str(directory), "max_steps": 3, "per_device_train_batch_size": 4}
    arguments |= {"max_length": 64, "lmbda": 0.0} | ({"max_completion_length": 16} if kind == "GOLD" else {}) | options
    both = [transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) for name in (student, teacher)]
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        stack = patched_trl() if patch else None
        if stack is not None:
            stack.__enter__()
        try:
            made = (trainer or cls)(
                model=both[0], teacher_model=both[1], args=config(**arguments), train_dataset=messages(),
                processing_class=tokenizer(kind), peft_config=peft_config,
            )  # fmt: skip
            if before is not None:
                before(made)
            widths = []
            for model in (base_model(made.model), made.teacher_model):
                # Not of the trial, whose rows have two tokens.
                model.register_forward_hook(
                    lambda _m, _a, out: widths.append(out.logits.shape[-1]) if out.logits.shape[1] > 2 else None
                )
            made.train()
        finally:
            if stack is not None:
                stack.__exit__(None, None, None)
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    return losses, {name: p.detach().clone() for name, p in made.model.named_parameters()}, widths


def assert_same(kind, paths, directory, *, served=True, **options):
    plain, patched = (train(kind, *paths, directory, patch=patch, **options) for patch in (False, True))
    assert len(plain[0]) == 3
    assert plain[0][0] != plain[0][-1]
    torch.testing.assert_close(patched[0], plain[0], rtol=2e-5, atol=2e-6)
    for name, weight in plain[1].items():
        torch.testing.assert_close(
            patched[1][name], weight, rtol=1e-4, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}"
        )
    vocab = len(trl_runs.TOKENS)
    assert set(plain[2]) == {vocab}
    assert set(patched[2]) == ({0} if served else {vocab})


CASES = {
    "jsd": {},
    "forward KL": {"beta": 0.0},
    "reverse KL": {"beta": 1.0},
    "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "LoRA": {"peft_config": LoraConfig(**LORA, target_modules=["q_proj"])},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_runs_agree_and_make_no_logits(name, kind, path_of, tmp_path):
    assert_same(kind, (path_of["qwen3", 0], path_of["qwen3", 1]), tmp_path, **CASES[name])


@pytest.mark.parametrize("kind", KINDS)
def test_models_that_cap_their_logits(kind, path_of, tmp_path):
    assert_same(kind, (path_of["gemma2", 0], path_of["qwen3", 1]), tmp_path)


def test_a_temperature(path_of, tmp_path):
    """GOLD divides the logits by it; GKD's own loss does not read it."""
    assert_same("GOLD", (path_of["qwen3", 0], path_of["qwen3", 1]), tmp_path, temperature=0.7)


def test_on_policy_runs_agree(path_of, tmp_path):
    """Generation reads logits, and the loss does not."""
    paths = path_of["qwen3", 0], path_of["qwen3", 1]
    options = {"lmbda": 1.0, "max_new_tokens": 6}
    plain, patched = (train("GKD", *paths, tmp_path, patch=patch, **options) for patch in (False, True))
    torch.testing.assert_close(patched[0], plain[0], rtol=2e-5, atol=2e-6)
    assert 0 in patched[2]
    assert 0 not in plain[2]


def test_a_subclass_with_a_loss_of_its_own_gets_logits(path_of, tmp_path):
    class Own(GKDTrainer):
        @staticmethod
        def generalized_jsd_loss(student_logits, **_):
            return student_logits.square().mean()

    assert_same("GKD", (path_of["qwen3", 0], path_of["qwen3", 1]), tmp_path, served=False, trainer=Own)


def test_a_head_that_cannot_be_taken_apart_gets_logits(path_of, tmp_path, caplog):
    def hooked(trainer):
        head = trainer.model.get_output_embeddings()
        head.forward = lambda hidden, own=head.forward: own(hidden) * 1.0

    with caplog.at_level(logging.INFO, "liger_rl"):
        assert_same("GKD", (path_of["qwen3", 0], path_of["qwen3", 1]), tmp_path, served=False, before=hooked)


def test_evaluation_returns_logits(path_of, tmp_path):
    """`prediction_step` asks for the outputs."""
    with patched_trl():
        both = [transformers.AutoModelForCausalLM.from_pretrained(path_of["qwen3", seed]) for seed in (0, 1)]
        arguments = {**trl_runs.CPU_ARGS, "output_dir": str(tmp_path), "max_length": 64}
        trainer = GKDTrainer(
            model=both[0], teacher_model=both[1], args=GKDConfig(**arguments), train_dataset=messages(),
            processing_class=tokenizer("GKD"),
        )  # fmt: skip
        batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
        assert outputs.logits.shape[-1] == len(trl_runs.TOKENS)
        torch.testing.assert_close(trainer.compute_loss(trainer.model, batch), loss, rtol=1e-5, atol=1e-6)
        assert trl_distillers._pending.sides is None


# --- SDFT and SDPO ----------------------------------------------------------------------------------------------------


def train_self(kind, path, directory, *, patch, peft_config=None, **options):
    """-> the losses of three steps, the weights, and the widths of logits outside of generation."""
    module = importlib.import_module(f"trl.experimental.{kind.lower()}")
    arguments = {
        **trl_runs.CPU_ARGS, "output_dir": str(directory), "max_steps": 3, "per_device_train_batch_size": 4,
        "num_generations": 2, "max_completion_length": 6, "distillation_topk": 5,
    } | options  # fmt: skip
    columns = {"prompt": trl_runs.PROMPTS}
    extra = {"reward_funcs": trl_runs.evenness}
    if kind == "SDFT":
        columns, extra = columns | {"privileged_context": trl_runs.CHOSEN}, {}
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        if patch:
            stack.enter_context(patched_trl())
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        torch.manual_seed(0)
        made = getattr(module, f"{kind}Trainer")(
            model=model, args=getattr(module, f"{kind}Config")(**arguments), processing_class=trl_runs.tokenizer(),
            train_dataset=Dataset.from_dict(columns), peft_config=peft_config, **extra,
        )  # fmt: skip
        widths = []

        def seen(_model, _args, kwargs, output):
            if kwargs.get("use_cache") is False and kwargs["input_ids"].shape[1] > 3:
                widths.append(output.logits.shape[-1])

        inner = base_model(made.model)
        for part in {inner, base_model(made.teacher_model)}:
            part.register_forward_hook(seen, with_kwargs=True)
        made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    return losses, {name: p.detach().clone() for name, p in made.model.named_parameters()}, widths


SELF_CASES = {
    "SDFT, top-K": ("SDFT", {}),
    "SDFT, top-K with a tail, reverse KL": ("SDFT", {"distillation_add_tail": True, "distillation_alpha": 1.0}),
    "SDFT, the whole vocabulary": ("SDFT", {"distillation_mode": "full_logits", "temperature": 0.8}),
    "SDFT, sampled tokens": ("SDFT", {"distillation_mode": "sampled_token", "distillation_alpha": 1.0}),
    "SDFT, several iterations": ("SDFT", {"num_iterations": 2, "gradient_accumulation_steps": 1}),
    "SDFT, LoRA": ("SDFT", {"peft_config": LoraConfig(**LORA, target_modules=["q_proj"])}),
    "SDPO, with its policy loss": ("SDPO", {"distillation_weight": 0.5, "success_reward_threshold": 0.3}),
    "SDPO, the policy loss alone": ("SDPO", {"distillation_weight": 0.0}),
}


@pytest.mark.parametrize("name", SELF_CASES)
def test_self_distillation_makes_no_logits(name, path_of, tmp_path):
    kind, options = SELF_CASES[name]
    plain, patched = (
        train_self(kind, path_of["qwen3", 0], tmp_path, patch=patch, **options) for patch in (False, True)
    )
    assert len(plain[0]) == 3
    assert any(plain[0])
    torch.testing.assert_close(patched[0], plain[0], rtol=2e-5, atol=2e-6)
    for part, weight in plain[1].items():
        torch.testing.assert_close(patched[1][part], weight, rtol=1e-4, atol=2e-6)
    assert set(plain[2]) == {len(trl_runs.TOKENS)}
    assert set(patched[2]) == {0}


def test_logits_that_are_read_elsewhere_are_made():
    """By a function of TRL that gets one model's hidden states and the other's logits."""
    hidden, weight, bias, ids = torch.randn(2, 3, 8), torch.randn(20, 8), torch.randn(20), torch.randint(20, (2, 3))
    transform = LogitTransform(temperature=0.7, softcap=3.0, scale=0.5)
    lazy = trl_distillers.HiddenLogits(hidden, weight, bias, transform, nullcontext)
    logits = oracles.transformed(hidden @ weight.T + bias, temperature=0.7, softcap=3.0, scale=0.5)
    torch.testing.assert_close(lazy.made(), logits)
    torch.testing.assert_close(
        lazy.logps(ids), logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0], rtol=1e-5, atol=1e-5
    )
    with patched_trl():
        utils = importlib.import_module("trl.experimental.sdft.loss_utils")
        mixed = utils.compute_full_logit_self_distillation_loss(lazy, logits, distillation_alpha=0.5)
        torch.testing.assert_close(mixed, torch.zeros(2, 3), rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"distillation_objective": "jsd", "beta": 0.5, "loss_top_k": 4}], ids=str)
def test_iw_opd_is_as_without_the_patch(options, path_of, tmp_path):
    """Its loss reads the student's logits beyond a divergence of both models."""
    module = importlib.import_module("trl.experimental.iw_opd")
    for path in path_of.values():
        trl_runs.tokenizer().save_pretrained(path)
    arguments = {**trl_runs.CPU_ARGS, "output_dir": str(tmp_path), "max_steps": 3, "per_device_train_batch_size": 4}
    runs = []
    for patch in (False, True):
        with patched_trl() if patch else nullcontext():
            made = module.IWOPDTrainer(
                model=transformers.AutoModelForCausalLM.from_pretrained(path_of["qwen3", 0], dtype=torch.float32),
                teacher_model=path_of["qwen3", 1], train_dataset=messages(), processing_class=tokenizer("IW-OPD"),
                args=module.IWOPDConfig(**arguments, max_completion_length=6, **options),
            )  # fmt: skip
            made.train()
        runs.append([entry["loss"] for entry in made.state.log_history if "loss" in entry])
    assert len(runs[0]) == 3
    assert runs[0] == runs[1]
