"""TRL's experimental CPO and ORPO without logits: whole runs against TRL's own, and what runs as without the patch."""

import logging

import pytest
import torch
import transformers
from torch.nn.functional import pad

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="PEFT is not installed")

from peft import LoraConfig, PrefixTuningConfig
from test_trl_batches import moe
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

import trl_runs
from liger_rl.integrations import trl_pairs
from liger_rl.integrations.transformers import swap_lm_head
from liger_rl.integrations.trl import patch_trl


def logging_responses(trainer):
    """In place of the mean of all logits, of the prompt and the padding too, the mean of each response's."""
    original = trainer.concatenated_forward

    def forward(model, batch):
        outputs = list(original(model, batch))
        labels = [batch["chosen_labels"], batch["rejected_labels"]]
        places = max(part.shape[1] for part in labels)
        for i, part in enumerate(labels, 2):
            if outputs[i].dim() == 3:
                counted = pad(part, (0, places - part.shape[1]), value=-100)[:, 1:] != -100
                means = outputs[i][:, : places - 1].mean(-1)
                outputs[i] = torch.where(counted, means, 0).sum(-1) / counted.sum(-1)
        return tuple(outputs)

    trainer.concatenated_forward = forward


def train(kind, model, directory, *, patch, prepare=None, **options):
    """-> the run, and the number of calls of the model's head."""
    calls = []

    def prepared(trainer):
        logging_responses(trainer)
        trainer.model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
        if prepare is not None:
            prepare(trainer)

    run = trl_runs.train(kind, model(), directory, patch=patch, prepare=prepared, **{"max_steps": 3, **options})
    return run, len(calls)


def assert_same(kind, model, directory, *, shares=True, **options):
    (plain, made), (patched, left) = (train(kind, model, directory, patch=patch, **options) for patch in (False, True))
    trl_runs.assert_same_run(patched, plain, shares=shares)
    assert made >= 3
    assert left == 0
    assert plain.log["loss"][0] != plain.log["loss"][-1]


def case(kind="CPO", model="qwen3", **options):
    return kind, model, options


LORA = {"r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
CASES = {
    **{name: case(loss_type=name) for name in ("sigmoid", "hinge", "ipo", "simpo", "alphapo")},
    "alpha": case(alpha=0.02, beta=0.02),
    "no NLL": case(cpo_alpha=0.0),
    "a softcap": case(model="gemma2"),
    "a scale": case(model="granite"),
    "ORPO": case("ORPO"),
    "ORPO, a softcap": case("ORPO", "gemma2"),
    "ORPO, accumulated": case("ORPO", per_device_train_batch_size=2, gradient_accumulation_steps=2),
    "eval": case(eval_strategy="steps", eval_steps=1),
    "ORPO, eval": case("ORPO", eval_strategy="steps", eval_steps=1),
    "checkpointing": case(gradient_checkpointing=True),
    "LoRA": case(peft_config=LoraConfig(**LORA, target_modules=["q_proj"])),
    "LoRA on the head": case("ORPO", peft_config=LoraConfig(**LORA, target_modules=["q_proj", "lm_head"])),
    "LoRA, checkpointing": case(
        "ORPO", peft_config=LoraConfig(**LORA, target_modules=["q_proj"]), gradient_checkpointing=True
    ),
    "the head alone": case("ORPO", patch_options={"whole_step": False}, shares=False),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_runs_agree_and_make_no_logits(name, path_of, tmp_path):
    kind, model, options = CASES[name]
    assert_same(kind, lambda: path_of[model], tmp_path, **options)


@pytest.mark.parametrize("kind", trl_runs.PAIRS)
def test_a_router_loss(kind, tmp_path):
    def model():
        made = moe()
        made.config.output_router_logits = True
        return made

    assert_same(kind, model, tmp_path, shares=False)


@pytest.mark.parametrize("kind", trl_runs.PAIRS)
def test_autocast_is_about_as_far_from_float32(kind, path_of, tmp_path):
    exact, plain, patched = (
        train(kind, lambda: path_of["qwen3"], tmp_path, patch=patch, bf16=bf16)[0]
        for patch, bf16 in ((False, False), (False, True), (True, True))
    )
    trl_runs.assert_layout(patched, plain, shares=True)
    assert 0 < trl_runs.weight_distance(patched, exact) < 2 * trl_runs.weight_distance(plain, exact)
    assert trl_runs.log_distance(patched, exact, "loss") < 2**-6


# --- as without the patch ---------------------------------------------------------------------------------------------


class OwnLogps(CPOTrainer):
    @staticmethod
    def get_batch_logps(logits, labels, **options):
        return 2 * CPOTrainer.get_batch_logps(logits, labels, **options)


class OwnMetrics(ORPOTrainer):
    def get_batch_loss_metrics(self, model, batch, train_eval="train"):
        loss, metrics = super().get_batch_loss_metrics(model, batch, train_eval)
        return loss, {**metrics, "positions": float(self.concatenated_forward(model, batch)[2].shape[1])}


class OwnForward(CPOTrainer):
    def concatenated_forward(self, model, batch):
        return ORPOTrainer.concatenated_forward(self, model, batch)

    padding_value = 0


def hooked(model):
    model.lm_head.register_forward_hook(lambda *args: 2 * args[2])


def recurrent_gemma():
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "lru_width": 16}
    config = transformers.RecurrentGemmaConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=8, block_types=("attention",),
        attention_window_size=64, pad_token_id=0, eos_token_id=1, logits_soft_cap=3.0, initializer_range=0.2,
    )  # fmt: skip
    return transformers.RecurrentGemmaForCausalLM(config)


class Tanh(transformers.Qwen3ForCausalLM):
    """It changes the hidden states between its body and its head."""

    def forward(self, input_ids, attention_mask=None, **options):
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=self.lm_head(hidden.tanh()))


def t5():
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    )


def with_other_labels(trainer):
    """One label of each chosen response is not the token."""
    collator = trainer.data_collator

    def collate(features):
        batch = collator(features)
        places = (batch["chosen_labels"] != -100).int().argmax(1)
        batch["chosen_labels"].scatter_(1, places[:, None], 5)
        return batch

    trainer.data_collator = collate


REFUSED = {
    "built before": ("CPO", None, {"built_before": True}, ""),
    "own log-probabilities": ("CPO", None, {"trainer": OwnLogps}, ""),
    "own metrics": ("ORPO", None, {"trainer": OwnMetrics}, ""),
    "own forward": ("CPO", None, {"trainer": OwnForward}, ""),
    "hook": ("CPO", hooked, {}, "something other than h @ W.T"),
    "swapped": ("ORPO", swap_lm_head, {}, "another fused forward"),
    "softcap": ("CPO", recurrent_gemma, {}, "differs from the model's own"),
    "dense layer": ("CPO", lambda: Tanh(trl_runs.MODELS["qwen3"]), {}, "differs from the model's own"),
    "labels": ("ORPO", None, {"prepare": with_other_labels}, ""),
    "prefix": (
        "CPO", None, {"peft_config": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)},
        "tokens of its own",
    ),
    "encoder": ("ORPO", t5, {}, "it has an encoder"),
    "DoRA": (
        "ORPO", None, {"peft_config": LoraConfig(**LORA, target_modules=["lm_head"], use_dora=True)}, "DoraLinear",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_runs_as_without_the_patch(name, path_of, tmp_path, caplog):
    caplog.set_level(logging.INFO, "liger_rl")
    kind, change, options, reason = REFUSED[name]
    runs = []
    for patch in (False, True):
        model = path_of["qwen3"]
        if change in (hooked, swap_lm_head):
            change(model := transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
        elif change is not None:
            torch.manual_seed(0)
            model = change()
        runs.append(trl_runs.train(kind, model, tmp_path, patch=patch, max_steps=2, **options))
    plain, patched = runs
    assert patched.calls == 0
    assert patched.log["loss"] == plain.log["loss"]
    assert all(torch.equal(patched.weights[n], weight) for n, weight in plain.weights.items())
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda trainer: setattr(trainer, "is_fsdp_enabled", True), "sharded"),
        (lambda trainer: setattr(trainer.model.model.norm.weight, "ds_id", 0), "sharded"),  # as DeepSpeed's ZeRO-3
        (lambda trainer: setattr(trainer.args, "_n_gpu", 2), "replicated by DataParallel"),
        (lambda trainer: setattr(trainer.args, "use_liger_kernel", True), "another fused forward"),
    ],
)
def test_what_else_is_refused(change, reason, path_of, tmp_path):
    trainer = trl_runs.build("CPO", path_of["qwen3"], tmp_path)
    change(trainer)
    patch_trl()
    assert reason in trl_pairs._refusal(trainer, trainer.model)
    assert "forward" not in vars(trainer.model)
