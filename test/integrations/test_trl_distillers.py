"""TRL's experimental distillation trainers without logits: whole runs against TRL's own, and what runs as it does."""

import importlib
import logging
import queue
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import transformers
from torch import nn

pytest.importorskip("trl.kernels.chunked_divergence", reason="TRL 1.16 is not installed")
pytest.importorskip("peft", reason="PEFT is not installed")

from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig
from trl.experimental.async_distillation.async_rollout_worker import RolloutSample
from trl.generation import vllm_client

import trl_runs
from liger_rl.integrations.trl import patched_trl
from liger_rl.integrations.transformers import swap_lm_head

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
    "sdft": ("SDFT", HINTS, SELF | {"num_loss_tokens_to_skip": 1}),
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
    return tokenizer


def loaded(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) if isinstance(path, str) else path


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
    extra = {"teacher_model": loaded(teacher)} if name in WITH_TEACHER else {}
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


def train(name, student, teacher, directory, *, patch, patch_options=None, prepare=None, **options):
    """-> the run, and the number of products of a head within the loss."""
    made, inside = [], []

    def linear(hidden, weight, bias=None):
        if inside and weight is not Server.weight and weight.shape[0] == V and hidden.numel() > hidden.shape[-1]:
            made.append(hidden.shape)
        return original(hidden, weight, bias)

    original = nn.functional.linear
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(Server, "path", teacher)
        changed.setattr(vllm_client, "VLLMClient", Server)
        changed.setattr(nn.functional, "linear", linear)
        if patch:
            held = patched_trl(**(patch_options or {}))
            held.__enter__()
        trainer = build(name, student, teacher, directory, **options)
        if prepare is not None:
            prepare(trainer)
        compute_loss = trainer.compute_loss

        def within(*args, **named):
            inside.append(1)
            loss = compute_loss(*args, **named)
            inside.pop()
            return loss

        changed.setattr(trainer, "compute_loss", within)
        try:
            run = trl_runs.run(trainer)
        finally:
            if patch:
                held.__exit__(None, None, None)
    return run, len(made)


def case(name, student="qwen3", **options):
    return name, student, options


LORA = {"r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
CASES = {
    "GKD": case("gkd"),
    "GKD, forward KL": case("gkd", "gemma2", beta=0.0, lmbda=0.0),
    "GKD, reverse KL": case("gkd", "cohere", beta=1.0, lmbda=1.0),
    "GKD, the teacher's words": case("gkd", seq_kd=True, lmbda=0.0),
    "GOLD": case("gold"),
    "GOLD, softcap": case("gold", "gemma2", beta=0.2, lmbda=0.0),
    "IW-OPD": case("iw_opd"),
    "IW-OPD, divergence": case("iw_opd", distillation_objective="divergence"),
    "SDFT": case("sdft", distillation_topk=5),
    "SDFT, tail": case("sdft", distillation_topk=5, distillation_add_tail=True),
    "SDFT, all ids": case("sdft", "gemma2", distillation_mode="full_logits"),
    "SDPO": case("sdpo"),
    "server": case("server_distillation"),
    "server, forward KL": case("server_distillation", beta=0.0, loss_top_k=4),
}


@pytest.mark.parametrize("name", CASES)
def test_runs_agree_and_make_no_logits(name, path_of, teacher, tmp_path):
    kind, student, options = CASES[name]
    (plain, made), (patched, left) = (
        train(kind, path_of[student], teacher, tmp_path, patch=patch, **options) for patch in (False, True)
    )
    trl_runs.assert_same_log(patched, plain)
    assert made >= 3
    assert left == 0
    assert plain.log["loss"][0] != plain.log["loss"][-1]
    print(name, plain.log["loss"], patched.log["loss"], trl_runs.weight_distance(patched, plain))
