"""TRL's experimental distillation trainers without logits: whole runs against TRL's own, and what runs as it does."""

import importlib
import logging
import queue
from contextlib import ExitStack

import numpy as np
import pytest
import torch
import transformers
from torch import nn

pytest.importorskip("trl.kernels.chunked_divergence", reason="TRL 1.16 is not installed")
pytest.importorskip("peft", reason="PEFT is not installed")

from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig
from tokenizers import decoders
from trl.experimental.async_distillation.async_rollout_worker import RolloutSample
from trl.experimental.gkd import GKDTrainer
from trl.experimental.iw_opd import IWOPDTrainer
from trl.generation import vllm_client

import trl_runs
from liger_rl import LogitTransform
from liger_rl.integrations import trl_distillers
from liger_rl.integrations.transformers import swap_lm_head
from liger_rl.integrations.trl import patched_trl
from liger_rl.integrations.trl_divergence import METHOD, RefusedStudentLayer

V = len(trl_runs.TOKENS)
# Every message as it stands, one after the other.
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
CHATS = [
    [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    for prompt, answer in zip(trl_runs.PROMPTS, trl_runs.CHOSEN, strict=True)
]
FIXED = {"per_device_train_batch_size": 4, "max_steps": 3, "temperature": 0.9}
SELF = {"max_completion_length": 8, "num_generations": 2}
SERVED_BY = {"teacher_model_server_url": "http://teacher", "max_completion_length": 8}
HINTS = {"prompt": trl_runs.PROMPTS, "privileged_context": [f"w{i} w{i + 5}" for i in range(4)]}
# Module -> prefix of its classes, columns, options.
KINDS = {
    "gkd": ("GKD", {"messages": CHATS}, {"max_new_tokens": 8, "max_length": 40}),
    "gold": ("GOLD", {"messages": CHATS}, {"max_completion_length": 8, "max_length": 40}),
    "iw_opd": ("IWOPD", {"messages": CHATS}, {"max_completion_length": 8, "max_length": 40, "max_prompt_length": 30}),
    "sdft": ("SDFT", HINTS, SELF | {"num_loss_tokens_to_skip": 1, "distillation_topk": 5}),
    "sdpo": ("SDPO", HINTS, SELF | {"include_environment_feedback": True}),
    "server_distillation": ("ServerDistillation", {"prompt": trl_runs.PROMPTS}, SERVED_BY),
}
WITH_TEACHER = ("gkd", "gold", "iw_opd")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """-> the path of a teacher with its tokenizer."""
    path = trl_runs.save_model("granite", tmp_path_factory.mktemp("teacher"), seed=1)
    chat_tokenizer().save_pretrained(path)
    return path


def chat_tokenizer():
    tokenizer = trl_runs.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()  # the only kind that GOLD takes
    return tokenizer


def loaded(path):
    return (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) if isinstance(path, str) else path
    )


class Server:
    """In place of TRL's client of a vLLM server that holds the teacher."""

    path, weight = "", None

    def __init__(self, **_options):
        self.teacher = loaded(self.path)
        Server.weight = self.teacher.lm_head.weight

    @torch.no_grad()
    def get_sequence_logprobs(self, sequences, prompt_lengths, top_logprobs, temperature):
        answer = {"logprobs": [], "logprob_token_ids": [], "actual_logprobs": []}
        for ids, length in zip(sequences, prompt_lengths, strict=True):
            logps = (self.teacher(torch.tensor([ids])).logits[0, length - 1 : -1] / temperature).log_softmax(-1)
            values, found = logps.topk(top_logprobs)
            actual = logps.gather(-1, torch.tensor(ids[length:])[:, None])
            for name, value in zip(answer, (values, found, actual), strict=True):
                answer[name].append(value.tolist())
        return answer


def build(name, student, teacher, directory, *, trainer=None, peft_config=None, **options):
    prefix, columns, fixed = KINDS[name]
    module = importlib.import_module(f"trl.experimental.{name}")
    arguments = {**trl_runs.CPU_ARGS, "output_dir": str(directory), **FIXED, **fixed, **options}
    served = name not in WITH_TEACHER or "use_teacher_server" in options
    extra = {} if served else {"teacher_model": loaded(teacher)}
    if name == "sdpo":
        extra["reward_funcs"] = trl_runs.evenness
    if "eval_strategy" in options:
        extra["eval_dataset"] = Dataset.from_dict(columns)
    torch.manual_seed(0)  # of the adapters
    return (trainer or getattr(module, f"{prefix}Trainer"))(
        model=loaded(student),
        args=getattr(module, f"{prefix}Config")(**arguments),
        train_dataset=Dataset.from_dict(columns),
        processing_class=chat_tokenizer(),
        peft_config=peft_config,
        **extra,
    )


def train(name, student, teacher, directory, *, patch, patch_options=None, built_before=False, **options):
    """-> the run, and the number of logits that the heads make within the loss, but for single tokens of a trial."""
    made, inside = [], []

    def linear(hidden, weight, bias=None):
        if inside and weight is not Server.weight and weight.shape[0] == V and hidden.numel() > hidden.shape[-1]:
            made.append(hidden.shape)
        return original(hidden, weight, bias)

    original = nn.functional.linear
    with pytest.MonkeyPatch.context() as changed, ExitStack() as held:
        changed.setattr(Server, "path", teacher)
        changed.setattr(vllm_client, "VLLMClient", Server)
        changed.setattr(nn.functional, "linear", linear)
        if patch and not built_before:
            held.enter_context(patched_trl(**(patch_options or {})))
        trainer = build(name, student, teacher, directory, **options)
        if patch and built_before:
            held.enter_context(patched_trl())
        compute_loss, before = trainer.compute_loss, hooks_of(trainer)

        def within(*args, **named):
            inside.append(1)
            loss = compute_loss(*args, **named)
            inside.pop()
            return loss

        changed.setattr(trainer, "compute_loss", within)
        run = trl_runs.run(trainer)
    assert hooks_of(trainer) == before  # none of ours is left
    return run, len(made)


def hooks_of(trainer):
    modules = trainer.model, trainer.model.get_output_embeddings()
    return [[*module._forward_pre_hooks, *module._forward_hooks] for module in modules]


def case(name, student="qwen3", **options):
    return name, student, options


SERVER = {"use_teacher_server": True, "teacher_model_server_url": "http://teacher"}
JSD = {"distillation_objective": "jsd"}
LORA = {"r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
ON_HEAD = LoraConfig(**LORA, target_modules=["q_proj", "lm_head"])
CASES = {
    "GKD": case("gkd"),
    "GKD, forward KL": case("gkd", "gemma2", beta=0.0, lmbda=0.0),
    "GKD, reverse KL": case("gkd", "cohere", beta=1.0, lmbda=1.0),
    "GKD, the teacher's words": case("gkd", seq_kd=True, lmbda=0.0, gradient_checkpointing=True),
    "GKD, accumulated": case("gkd", per_device_train_batch_size=2, gradient_accumulation_steps=2),
    "GKD, built before": case("gkd", built_before=True),
    "GKD, eval": case("gkd", eval_strategy="steps", eval_steps=1, patch_options={"chunk_vocab": 16}),
    "GKD, LoRA": case("gkd", peft_config=LoraConfig(**LORA, target_modules=["q_proj"])),
    "GOLD": case("gold"),
    "GOLD, a softcap": case("gold", "gemma2", beta=0.2, lmbda=0.0),
    "IW-OPD": case("iw_opd"),
    "IW-OPD, LoRA on the head": case("iw_opd", peft_config=ON_HEAD),
    "IW-OPD, all ids": case("iw_opd", **JSD, beta=0.3),
    "IW-OPD, both models' ids": case("iw_opd", **JSD, beta=0.3, loss_top_k=3),
    "IW-OPD, the likeliest": case("iw_opd", **JSD, beta=0.3, loss_top_k=1, reverse_kl_top_1_mode="argmax"),
    "IW-OPD, a server": case("iw_opd", **SERVER),
    "IW-OPD, a server's ids": case("iw_opd", **SERVER, **JSD, beta=0.0, loss_top_k=3),
    "SDFT": case("sdft", teacher_model_kind="live"),
    "SDFT, a tail": case("sdft", distillation_add_tail=True, num_iterations=2),
    "SDFT, all ids": case("sdft", "gemma2", distillation_mode="full_logits"),
    "SDPO": case("sdpo"),
    "SDPO, with a policy loss": case("sdpo", distillation_weight=0.5, num_iterations=2),
    "SDPO, no token counts": case("sdpo", include_environment_feedback=False, success_reward_threshold=9.0),
    "server": case("server_distillation", beta=0.5),
    "server, the teacher's ids": case("server_distillation", beta=0.0, loss_top_k=4),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_runs_agree_and_make_no_logits(name, path_of, teacher, tmp_path):
    kind, student, options = CASES[name]
    (plain, made), (patched, left) = (
        train(kind, path_of[student], teacher, tmp_path, patch=patch, **options) for patch in (False, True)
    )
    trl_runs.assert_same_log(patched, plain)
    assert made >= 3
    assert left == 0
    assert plain.log["loss"][0] != plain.log["loss"][-1] or "no token counts" in name


@pytest.fixture
def nothing_accepted():
    """A method of DistillationTrainer, the server's base, outlives the patch once an adapter was accepted."""
    yield
    RefusedStudentLayer.accepted = False
    METHOD.undo()


@pytest.mark.usefixtures("nothing_accepted")
@pytest.mark.parametrize("kind", ["gkd", "gold", "server_distillation"])
def test_an_adapter_on_the_head_that_trl_refuses_is_trained(kind, path_of, teacher, tmp_path, monkeypatch):
    """As with the logits of the model's own forward, adapter and all."""

    def run():
        return train(kind, path_of["qwen3"], teacher, tmp_path, patch=True, peft_config=ON_HEAD)

    def refused(*_args):
        raise ValueError("full logits are asked for")

    patched, left = run()
    monkeypatch.setattr(trl_distillers, "_heads", refused)
    full, made = run()
    assert left == 0
    assert made >= 3
    trl_runs.assert_same_log(patched, full)


@pytest.mark.parametrize(("kind", "more"), [("gkd", {}), ("iw_opd", {**JSD, "beta": 0.3, "loss_top_k": 3})])
def test_autocast_is_about_as_far_from_float32(kind, more, path_of, teacher, tmp_path):
    exact, plain, patched = (
        train(kind, path_of["qwen3"], teacher, tmp_path, patch=patch, bf16=bf16, lmbda=0.0, **more)[0]
        for patch, bf16 in ((False, False), (False, True), (True, True))
    )
    assert 0 < trl_runs.weight_distance(patched, exact) < 2 * trl_runs.weight_distance(plain, exact)
    assert trl_runs.log_distance(patched, exact, "loss") < 2**-6 * max(map(abs, exact.log["loss"]))


# --- as without the patch ---------------------------------------------------------------------------------------------


class OwnLoss(GKDTrainer):
    @staticmethod
    def generalized_jsd_loss(student_logits, teacher_logits, **options):
        return 2 * GKDTrainer.generalized_jsd_loss(student_logits, teacher_logits, **options)


class OwnWeights(IWOPDTrainer):
    def _compute_iw_opd_loss(self, student_logits, **tensors):
        return super()._compute_iw_opd_loss(student_logits.clamp(max=2.0), **tensors)


class OwnOutputs(GKDTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        return loss + 0.1 * outputs.logits.logsumexp(-1).mean()


def hooked(model):
    model.lm_head.register_forward_hook(lambda *args: 2 * args[2])


REFUSED = {
    "own loss": ("gkd", None, {"trainer": OwnLoss}, "methods of its own"),
    "own weights": ("iw_opd", None, {"trainer": OwnWeights}, "methods of its own"),
    "outputs": ("gkd", None, {"trainer": OwnOutputs}, ""),
    "hook": ("gkd", hooked, {}, "something other than h @ W.T"),
    "swapped": ("gold", swap_lm_head, {}, "another fused forward"),
    "the teacher's adapters": ("sdft", None, {"peft_config": ON_HEAD}, "the teacher has adapters"),
    "ULD": ("gold", None, {"use_uld_loss": True, "lmbda": 0.0}, "the ULD loss"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_runs_as_without_the_patch(name, path_of, teacher, tmp_path, caplog):
    caplog.set_level(logging.INFO, "liger_rl")
    kind, change, options, reason = REFUSED[name]
    runs = []
    for patch in (False, True):
        model = loaded(path_of["qwen3"])
        if change is not None:
            change(model)
        runs.append(train(kind, model, teacher, tmp_path, patch=patch, max_steps=2, **options))
    (plain, made), (patched, left) = runs
    assert left == made
    assert patched.log["loss"] == plain.log["loss"]
    assert all(torch.equal(patched.weights[n], weight) for n, weight in plain.weights.items())
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda trainer: setattr(trainer, "is_fsdp_enabled", True), "sharded"),
        (lambda trainer: setattr(trainer.teacher_model.model.norm.weight, "ds_id", 0), "sharded"),  # DeepSpeed's ZeRO-3
        (lambda trainer: setattr(trainer.args, "_n_gpu", 2), "replicated by DataParallel"),
        (lambda trainer: setattr(trainer.args, "use_liger_kernel", True), "another fused forward"),
        (lambda trainer: setattr(trainer.args, "torch_compile", True), "compiled"),
        (lambda trainer: setattr(trainer.args, "loss_top_k", 1025), "more than 1024 ids"),
        (lambda trainer: setattr(trainer.model, "active_peft_config", PROMPTS), "tokens of its own"),
    ],
)
def test_what_else_is_refused(change, reason, path_of, teacher, tmp_path):
    trainer = build("gkd", path_of["qwen3"], teacher, tmp_path)
    change(trainer)
    with pytest.raises(ValueError, match=reason):
        trl_distillers._heads(trainer, [trainer.model, trainer.teacher_model], ExitStack())


PROMPTS = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)


def test_a_reading_that_needs_logits_is_an_error():
    hidden, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    logits = trl_distillers.Logits(hidden, weight, None, [], LogitTransform(), torch.float32, True)
    torch.testing.assert_close(
        (logits[:, 1:, :] / 0.7).topk(2), torch.topk((hidden @ weight.T / 0.7).log_softmax(-1)[:, 1:], 2)[:]
    )
    with pytest.raises(TypeError, match="softmax needs them"):
        torch.softmax(logits, -1)
    with pytest.raises(TypeError, match="sliced by sequences and tokens alone"):
        logits[:, :, :2]


class Rollouts:
    """A rollout worker with more samples than three steps take, and a weight transfer that transfers nothing."""

    def __init__(self):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        generator = np.random.default_rng(0)
        for i in range(20):
            ids, topk = generator.integers(3, V, 12), generator.integers(3, V, (12, 3))
            topk[:, 2] = ids
            logps = np.log(generator.dirichlet([1.0] * 4, 12)[:, :3]).astype(np.float32)
            mask = (np.arange(12) >= 5).astype(np.int64)
            self.rollout_buffer.put(RolloutSample([], [], ids, mask, topk, logps, 0, {}, "default", i))

    def nothing(self, *_args):
        pass

    start = stop = update_model_version = check_health = nothing
    init_weight_transfer = pause = send_weights = resume = destroy = nothing


def test_async_distillation_is_left_alone(path_of, tmp_path, monkeypatch):
    """It makes tiles of logits of the student alone, and calls no head."""
    module = importlib.import_module("trl.experimental.async_distillation.async_distillation_trainer")
    monkeypatch.setattr(module, "VLLMClient", lambda *_: None)
    monkeypatch.setattr(module, "get_peak_flops_per_device", lambda *_: None)  # asks CUDA
    config = module.AsyncDistillationConfig(
        **trl_runs.CPU_ARGS | {"max_steps": 3, "output_dir": str(tmp_path)}, per_device_train_batch_size=4,
        token_budget=0, model_init_kwargs={"attn_implementation": "eager", "dtype": "float32"},
    )  # fmt: skip

    def trained():
        rollouts = Rollouts()
        return trl_runs.run(
            module.AsyncDistillationTrainer(
                path_of["qwen3"], config, Dataset.from_dict({"prompt": trl_runs.PROMPTS}), chat_tokenizer(),
                rollout_worker=rollouts, weight_transfer=rollouts,
            )
        )  # fmt: skip

    plain = trained()
    with patched_trl():
        patched = trained()
    assert patched.calls == 0
    assert patched.log["loss"] == plain.log["loss"]
    assert plain.log["loss"][0] != plain.log["loss"][-1]
    assert all(torch.equal(patched.weights[n], weight) for n, weight in plain.weights.items())
