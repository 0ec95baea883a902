"""The patched run is TRL's run: every logged value, gradient, weight and random number, of every trainer.

Each row trains twice from the same seed. The layout of the forward and the head have tests of their own. The number of
calls of the models shows here that the micro-batches of an optimizer step ran in one forward, or that each had its own.
"""

import dataclasses
from functools import partial

import pytest
import torch
import transformers
from datasets import Dataset, IterableDataset

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="PEFT is not installed")

from peft import LoraConfig, PromptTuningConfig
from test_architectures import image_text_model

import trl_runs
from hf_models import BEFORE_5, REFUSES_PACKED, build
from trl_runs import CHOSEN, PROMPTS, REJECTED, Row

# --- models -----------------------------------------------------------------------------------------------------------

TOKENS = {"vocab_size": 40, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
IMAGE = 2


def qwen3(**options):
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**trl_runs.SIZES | options))


def large_teacher():
    return qwen3(hidden_size=32, num_hidden_layers=3)


def gpt2():
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout, **TOKENS))


def opt(**options):
    sizes = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"word_embed_proj_dim": 16, "max_position_embeddings": 64, "dropout": 0.0}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, **TOKENS, **options))


def moe(coefficient=0.1):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config = transformers.Qwen3MoeConfig(**trl_runs.SIZES, **sizes, router_aux_loss_coef=coefficient)
    return transformers.Qwen3MoeForCausalLM(config)


def vlm():
    text = transformers.Qwen2Config(**trl_runs.SIZES)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=16)
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, vision_feature_layer=-1)
    )


def window(**options):
    """Shorter than the sequences."""
    return transformers.MistralForCausalLM(transformers.MistralConfig(**trl_runs.SIZES, sliding_window=16, **options))


def dynamic_rope():
    """Some micro-batches are longer than 26 tokens, and have another rotary embedding."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    return qwen3(max_position_embeddings=26, rope_parameters=rope)


def glm4_moe():
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
    return transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**trl_runs.SIZES, **sizes, topk_group=1))


def architecture(name):
    model = build(name, attention="eager" if name == "GptOss" else "sdpa", **TOKENS)
    if hasattr(model.config, "output_router_logits"):  # TRL turns it on. Generation with it raises
        model.config.output_router_logits = False
    return model


def text_of(name):
    return image_text_model(name, "sdpa")


# --- changes of a trainer and of its batches --------------------------------------------------------------------------


def half_without_advantage(*, per_token=False, tool_mask=False):
    """Completions of all lengths. Every other one gets no advantage. Padding has any ids and, per token, advantages."""

    def scored(batch):
        rows, tokens = batch["completion_ids"].shape
        padding = batch["prompt_mask"] == 0
        batch["prompt_ids"] = torch.where(padding, torch.arange(rows)[:, None], batch["prompt_ids"])
        if "old_logps" not in batch:  # RLOO's, of the whole completions
            batch["completion_mask"] *= torch.arange(tokens) <= torch.arange(rows)[:, None] % tokens
        advantages = (torch.arange(rows) % 2) * (torch.arange(rows) - rows / 2)
        if per_token:
            advantages = advantages[:, None] * (torch.arange(tokens) % 2 == 0)
            advantages = torch.where(batch["completion_mask"] == 0, 1.0, advantages)
        if tool_mask:
            batch["tool_mask"] = torch.ones_like(batch["completion_mask"])
            batch["tool_mask"][1::4] = 0
        return {**batch, "advantages": advantages}

    return scored


def one_group_without_advantage(batch):
    return {**batch, "advantages": batch["advantages"] * (torch.arange(len(batch["advantages"])) >= 4)}


def with_vllms_logps(trainer):
    """TRL computes the old policy's log-probabilities in each step, to compare them with those of vLLM."""
    turn = trainer._generate_single_turn

    def turn_with_logps(*args):
        trainer.use_vllm = False
        completion_ids, _ = turn(*args)
        trainer.use_vllm = True
        return completion_ids, [[-3.0 - 0.1 * (i % 7) for i in ids] for ids in completion_ids]

    trainer._generate_single_turn, trainer.use_vllm = turn_with_logps, True


def without_advantages(batch):
    return {**batch, "advantages": torch.zeros(len(batch["advantages"]))}


def without_tokens(batch, *, step=3):
    batch["completion_mask"][::step] = 0
    return batch


def subclass_with(name):
    """The subclass doubles the result of a method."""

    def method(self, *args, **options):
        return 2 * getattr(super(type(self), self), name)(*args, **options)

    def prepare(trainer):
        trainer.__class__ = type("Subclass", (type(trainer),), {name: method})

    return prepare


def double_backward(trainer):
    backward = trainer.accelerator.backward
    trainer.accelerator.backward = lambda loss, **options: backward(2 * loss, **options)


def add_callback(act, trainer):
    """Between two micro-batches."""

    class Callback(transformers.TrainerCallback):
        def on_substep_end(self, *args, model, **options):
            act(model)

    trainer.add_callback(Callback())


def freeze_a_layer(model):
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.requires_grad_(not weight.requires_grad)


def without_last_labels(trainer):
    """A hook of the model, which TRL runs for each micro-batch."""

    def change(model, args, inputs):
        labels = inputs["labels"].clone()
        labels[:, -2:] = -100
        return args, inputs | {"labels": labels}

    trainer.model.register_forward_pre_hook(change, with_kwargs=True)


def own_class(trainer):
    """As a model of remote code, whose forward TRL puts on the object in a step."""

    class Model(type(trainer.model)):
        def forward(self, *args, **options):
            return super().forward(*args, **options)

    trainer.model.__class__ = Model


def with_types(trainer):
    """An input of each token besides its id. Such micro-batches run alone."""
    generate = trainer._generate_and_score_completions

    def add(inputs):
        batch = generate(inputs)
        return batch | {"mm_token_type_ids": torch.zeros(len(inputs), 30, dtype=torch.int64)}

    trainer._generate_and_score_completions = add


def with_gains(trainer):
    """An input that is another one in every second micro-batch. The layers read it."""
    collate, numbers = trainer.data_collator, iter(range(100))
    trainer.data_collator = lambda rows: collate(rows) | {"gain": 1.0 + next(numbers) % 2}
    layer = type(trainer.model.model.layers[0])

    class Layer(layer):
        def forward(self, hidden_states, gain=1.0, **options):
            return gain * super().forward(hidden_states, **options)

    for module in trainer.model.model.layers:
        module.__class__ = Layer


def read_gradients(model):
    assert all(weight.grad is not None for weight in model.parameters())


def with_hooks(register, hook):
    def prepare(trainer):
        for weight in trainer.model.parameters():
            getattr(weight, register)(hook)

    return prepare


def halve_gradient(weight):
    weight.grad *= 0.5


def leave_out_the_last(trainer):
    """Of each optimizer step. The subclass has found it too long."""

    def training_step(self, *args, **options):
        if self.accelerator.sync_gradients:
            return torch.zeros(())
        return super(type(self), self).training_step(*args, **options)

    trainer.__class__ = type("Subclass", (type(trainer),), {"training_step": training_step})


def perturb_embeddings(trainer):
    """A second backward at other embeddings, as in adversarial training."""

    def training_step(self, *args, **options):
        loss = super(type(self), self).training_step(*args, **options)
        weight = self.model.get_input_embeddings().weight
        step = 0.5 * weight.grad / weight.grad.norm()
        weight.data += step
        super(type(self), self).training_step(*args, **options)
        weight.data -= step
        return loss

    trainer.__class__ = type("Subclass", (type(trainer),), {"training_step": training_step})


def switch_adapters(trainer):
    trainer.model.add_adapter("other", LORA)

    def _prepare_inputs(self, inputs):
        active = self.model.active_adapter
        self.model.set_adapter("other" if active == "default" else "default")
        return super(type(self), self)._prepare_inputs(inputs)

    trainer.__class__ = type("Subclass", (type(trainer),), {"_prepare_inputs": _prepare_inputs})


def with_readers(trainer):
    """Of activations, gradients and tokens."""
    trainer.model.model.layers[0].register_forward_hook(lambda layer, args, output: None)
    trainer.model.lm_head.weight.register_hook(lambda gradient: None)
    add_callback(lambda model: None, trainer)


def rows_reversed(trainer):
    """The subclass runs the model on the rows in another order."""

    def method(self, model, ids, mask, *args, **options):
        outputs = super(type(self), self)._get_per_token_logps_and_entropies(
            model, ids.flip(0), mask.flip(0), *args, **options
        )
        return tuple(None if values is None else values.flip(0) for values in outputs)

    trainer.__class__ = type("Subclass", (type(trainer),), {"_get_per_token_logps_and_entropies": method})


def set_attribute(name, value):
    return lambda trainer: setattr(trainer, name, value)


def square_logits(outputs, labels, num_items_in_batch=None):
    return outputs.logits.float().square().mean()


def double_logits(trainer):
    """What no head of TRL's or ours does, so the model runs as TRL runs it."""
    trainer.model.lm_head.register_forward_hook(lambda head, args, logits: 2 * logits)


def double_loss(trainer):
    """A loss of the object, which runs once for each micro-batch."""
    compute_loss = trainer.compute_loss
    trainer.compute_loss = lambda *args, **options: 2 * compute_loss(*args, **options)


def without_length(trainer):
    """An epoch has three micro-batches. The optimizer step of the third goes on in the next epoch."""
    data = trainer.train_dataset
    trainer.train_dataset = IterableDataset.from_generator(lambda: iter(data))


def sixteen_prompts(trainer):
    trainer.train_dataset = Dataset.from_dict({"prompt": [f"w{i}" for i in range(16)]})


def with_images(*micro_batches):
    """In these of the four micro-batches."""

    def prepare(trainer):
        collate, numbers = trainer.data_collator, iter(range(4))

        def add(examples):
            inputs = collate(examples)
            if next(numbers) in micro_batches:
                inputs["input_ids"][:, :4] = IMAGE
                inputs["labels"][:, :4] = -100
                inputs["pixel_values"] = torch.ones(len(inputs["input_ids"]), 3, 8, 8)
            return inputs

        trainer.data_collator = add

    return prepare


def with_scaler(trainer):
    """accelerate has no scaler on CPUs."""
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)


# --- rows -------------------------------------------------------------------------------------------------------------

OPTIONS = {"gradient_accumulation_steps": 2, "max_steps": 2}
SIZES = {
    "SFT": {"per_device_train_batch_size": 4},  # an optimizer step is an epoch
    "DPO": {"per_device_train_batch_size": 2},
    "KTO": {"per_device_train_batch_size": 4},
    "GRPO": {"per_device_train_batch_size": 4, "max_completion_length": 6},
    "RLOO": {"per_device_train_batch_size": 4, "max_completion_length": 6},
    "Distillation": {"per_device_train_batch_size": 2, "teacher": "teacher"},
}


def row(kind, model="qwen3", *, trees=True, share=None, **options) -> Row:
    names = {field.name for field in dataclasses.fields(Row)} & options.keys()
    expected = {name: options.pop(name) for name in names}
    return Row(kind, OPTIONS | SIZES[kind] | options, model, trees, share or (0.8 if trees else 1.0), **expected)


def policy(model="qwen3", *, kind="GRPO", scored=None, **options) -> Row:
    """A loss that has log-probabilities alone, of half of the sequences."""
    scored = scored or half_without_advantage()
    return row(kind, model, **{"num_iterations": 1, "beta": 0.0, "scored": scored} | options)


def apart(kind, model="qwen3", **options) -> Row:
    """Each micro-batch has a forward of its own."""
    return row(kind, model, together=False, **options)


NEVER, FIRST, ALWAYS = (), (0,), (0, 1)
NARROW = 0.02  # a bound of the clip that steps of this size pass


def of_loss(name, *, idle=ALWAYS, **options) -> Row:
    """Two optimizer steps of one generation, so that the second has old log-probabilities."""
    calls = (12, 4) if "beta" in options else (8, 3)  # with those of the old policy and of the reference
    fixed = {"loss_type": name, "epsilon": NARROW, "steps_per_generation": 4, "calls": calls, "idle": idle}
    return policy(**fixed | options)


LORA = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
LORA_EVERYWHERE = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
# Its batch stays as it is. Tokens are counted without the virtual ones.
PROMPT_TUNING = {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)}
PROMPT_TUNING |= {"trees": False, "is_logged": False}
CHECKPOINTS = {"gradient_checkpointing": True}
REENTRANT = CHECKPOINTS | {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
ONE = {"gradient_accumulation_steps": 1}
PAIRS = {"per_device_train_batch_size": 2}
SINGLES = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
SHORT_LAST_STEP = PAIRS | {"gradient_accumulation_steps": 3, "max_steps": 4}  # epochs of 3 and 1 micro-batches
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
SIX = {"prompt": PROMPTS + PROMPTS[:2], "completion": CHOSEN + REJECTED[:2]}
SIX_PAIRS = SIX | {"chosen": SIX["completion"], "rejected": REJECTED + CHOSEN[:2]}
SIX_VERDICTS = {name: values[1:7] for name, values in trl_runs.VERDICTS.items()}
ALONE = {"padding_free": True, "max_length": None}
# A threshold that falls on a token tips with its rounding: 0.382 (n - 1) is far from an integer for n <= 80 tokens.
QUANTILE = {"top_entropy_quantile": 0.618}
EVERY_OPTION = {
    "epsilon_high": 0.03, "delta": 1.02, "use_bias_correction_kl": False, "off_policy_mask_threshold": 0.01,
    "beta": 0.1, "entropy_coef": 0.02, **QUANTILE,
}  # fmt: skip
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0}
NEFTUNE = {"neftune_noise_alpha": 5.0, "max_steps": 3}  # of the policy, whose batch stays as it is
SHORT_PROMPTS = {"prompt": [f"w{n} w1" for n in range(8)], "completion": CHOSEN + REJECTED}
# A third of each packed row, which has two sequences.
SYSTEM_PROMPT = {
    "data": {
        "prompt": [" ".join(f"w{i}" for i in range(20)) + f" w{20 + n}" for n in range(16)],
        "completion": [" ".join(f"w{(5 * i + n) % 37}" for i in range(38 - 20 * (n % 2))) for n in range(16)],
    },
    "max_length": 102,
}
LOGITS = {"share": 0.9, "is_logged": False}  # whose forward is TRL's; that of metrics is not
FOUR_PROMPTS = {"data": {"prompt": [" ".join(f"w{i}" for i in range(20)) + f" w{20 + n} w1" for n in range(4)]}}
STATES = {"max_steps": 3, "trees": not BEFORE_5}  # layers with a state
KEPT = {"num_iterations": 1, "beta": 0.0}
SINGLE_PROMPTS = {"num_generations": 2, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}
SINGLE_PROMPTS |= {"max_steps": 3, "max_completion_length": 10, "data": {"prompt": trl_runs.PROMPTS * 6}}

ROWS = {
    # SFT
    "SFT": row("SFT", calls=(8, 4), **SHORT_LAST_STEP | EVALUATED),
    "SFT, one entry for two steps": row("SFT", logging_steps=2, max_steps=4),
    "SFT, dft, clipped gradient": row("SFT", loss_type="dft", max_grad_norm=0.01),
    "SFT, LoRA, reentrant checkpoints": row("SFT", peft_config=LORA, **REENTRANT),
    "SFT, checkpoints": row("SFT", **CHECKPOINTS),
    "SFT, prompt tuning": apart("SFT", **PROMPT_TUNING),
    "SFT, one micro-batch": row("SFT", "gemma2", per_device_train_batch_size=8, **ONE),
    **{
        f"{kind}, data without a length": row(
            kind, prepare=without_length, data=data, max_steps=3, trees=None, calls=(8 * calls, 5 * calls),
            backwards=5, **PAIRS,
        )
        for kind, data, calls in (("SFT", SIX, 1), ("DPO", SIX_PAIRS, 2), ("KTO", SIX_VERDICTS, 4))
    },
    "SFT, experts": row("SFT", partial(moe, 0.0)),
    "SFT, router loss": row("SFT", moe, calls=(8, 4), **SHORT_LAST_STEP | EVALUATED),
    "SFT, router loss and prompt tuning": apart("SFT", moe, **PROMPT_TUNING),
    "SFT, a model that can take images": row("SFT", vlm),
    "SFT, a processor of images": row("SFT", prepare=set_attribute("_is_vlm", True)),
    "SFT, text alone of Qwen3-VL": row("SFT", partial(text_of, "Qwen3VL")),
    "SFT, gradient scaler": row("SFT", prepare=with_scaler, max_grad_norm=0.0),
    **{
        f"SFT, {name}": apart("SFT", prepare=prepare)
        for name, prepare in {
            "own training_step": subclass_with("training_step"),
            "a backward of the accelerator": double_backward,
            "a layer frozen by a callback": partial(add_callback, freeze_a_layer),
            "a callback that reads gradients": partial(add_callback, read_gradients),
            "a hook of the model": without_last_labels,
            "gradients clipped in a hook": with_hooks("register_hook", lambda gradient: gradient.clamp(-0.01, 0.01)),
            "a hook behind each gradient": with_hooks("register_post_accumulate_grad_hook", halve_gradient),
        }.items()
    },
    "SFT, an input that differs": row(
        "SFT", prepare=with_gains, trees=None, share=1.0, calls=(8, 6), backwards=5, **SINGLES,
    ),
    # One forward fewer with a graph in each optimizer step, or one more.
    "SFT, a micro-batch left out": apart("SFT", prepare=leave_out_the_last, trees=None, **SINGLES),
    "SFT, adversarial embeddings": apart("SFT", prepare=perturb_embeddings, trees=None, backwards=16, **SINGLES),
    "SFT, an adapter for each micro-batch": apart("SFT", prepare=switch_adapters, peft_config=LORA),
    "SFT, hooks that see joined rows": row("SFT", prepare=with_readers, patch_options={"joined_hooks": True}),
    "SFT, FalconH1": row("SFT", partial(architecture, "FalconH1"), **STATES),
    "SFT, Lfm2Moe, LoRA": row("SFT", partial(architecture, "Lfm2Moe"), peft_config=LORA, **REENTRANT),
    "SFT, Jamba": row("SFT", partial(architecture, "Jamba"), trees=False, share=0.98, max_steps=3),
    "SFT, logits twice": apart("SFT", prepare=double_logits, trees=False, is_ours=False),
    "SFT, layerdrop": apart("SFT", partial(opt, layerdrop=0.5), trees=False),
    "SFT, NEFTune": apart("SFT", **NEFTUNE, trees=False),
    # The first optimizer step has windows of one micro-batch, the second of two.
    "SFT, few tokens": row("SFT", patch_options={"max_tokens": 80}, calls=(8, 6), backwards=6, trees=False, **SINGLES),
    "SFT, padding-free": row("SFT", **ALONE),
    "SFT, padding-free, router loss": row("SFT", moe, **ALONE | EVALUATED),
    "SFT, padding-free, few tokens": row("SFT", patch_options={"max_tokens": 240}, calls=(4, 3), backwards=3, **ALONE),
    "SFT, padding-free, nothing to share": row("SFT", data=SHORT_PROMPTS, trees=False, **ALONE),
    "SFT, padding-free, reentrant checkpoints": apart("SFT", **ALONE | REENTRANT),
    "SFT, packed": row("SFT", packing=True, completion_only_loss=False, share=0.7, **SYSTEM_PROMPT | SINGLES),
    "SFT, packed, dft, one micro-batch": row(
        "SFT", packing=True, packing_strategy="bfd_split", loss_type="dft", pad_to_multiple_of=8, **ONE | EVALUATED,
    ),
    "SFT, packed, NEFTune": apart("SFT", packing=True, trees=False, **NEFTUNE | {"max_steps": 1}),
    # In TRL's forward packed sequences of these models see each other. The first optimizer step finds that.
    **{
        f"SFT, packed, one sequence for {name}": row("SFT", model, trees=False, calls=(4, 3), backwards=3, **ALONE)
        for name, model in {"OPT": opt, "Qwen3_5Text": partial(architecture, "Qwen3_5Text")}.items()
        if name == "OPT" or not REFUSES_PACKED
    },
    "SFT, label smoothing": apart("SFT", label_smoothing_factor=0.1, **LOGITS),
    "SFT, a loss of logits": apart("SFT", prepare=set_attribute("compute_loss_func", square_logits), **LOGITS),
    "SFT, compiled": apart(
        "SFT", prepare=lambda trainer: setattr(trainer.args, "torch_compile", True), is_logged=False,
    ),
    "SFT, images": apart("SFT", vlm, prepare=with_images(0, 1, 2, 3), trees=False),
    "SFT, some images": row("SFT", vlm, prepare=with_images(0, 3), calls=(4, 4), backwards=3, share=0.9),
    "SFT, dynamic rotary embedding": apart("SFT", dynamic_rope, trees=False, **SINGLES),
    "SFT, a loss of the object": apart("SFT", prepare=double_loss),
    # DPO
    "DPO": row("DPO", **SINGLES),
    "DPO, one micro-batch, weighting": row("DPO", "gemma2", use_weighting=True, **ONE),  # the only use of log sum p^2
    "DPO, LoRA, reentrant checkpoints": row("DPO", peft_config=LORA, **REENTRANT),
    "DPO, known reference": row("DPO", peft_config=LORA, precompute_ref_log_probs=True),
    "DPO, router loss": row("DPO", moe, max_steps=3, **CHECKPOINTS),
    "DPO, experts of OLMoE": row("DPO", partial(architecture, "Olmoe"), max_steps=3),
    "DPO, text alone of Qwen2.5-VL": row("DPO", partial(text_of, "Qwen2_5_VL"), max_steps=3),
    "DPO, Lfm2": row("DPO", partial(architecture, "Lfm2"), **STATES),
    "DPO, a micro-batch left out": apart("DPO", prepare=leave_out_the_last, trees=None, **SINGLES),
    "DPO, NEFTune": apart("DPO", **NEFTUNE),
    "DPO, few tokens": row("DPO", patch_options={"max_tokens": 128}, calls=(16, 12), backwards=6, **SINGLES),
    "DPO, own _compute_loss": apart("DPO", prepare=subclass_with("_compute_loss")),
    # KTO
    "KTO": row("KTO", calls=(32, 16), **SHORT_LAST_STEP),
    "KTO, one micro-batch": row("KTO", "gemma2", per_device_train_batch_size=8, **ONE),
    "KTO, LoRA": row("KTO", peft_config=LORA),
    "KTO, known reference": row("KTO", precompute_ref_log_probs=True),
    "KTO, no KL rows": row("KTO", loss_type="apo_zero_unpaired"),
    "KTO, router loss": row("KTO", moe, max_steps=3),
    "KTO, experts of GLM4-MoE": row("KTO", glm4_moe),
    "KTO, text alone of SmolVLM": row("KTO", partial(text_of, "SmolVLM")),
    "KTO, GraniteMoeHybrid": row("KTO", partial(architecture, "GraniteMoeHybrid"), **STATES, **CHECKPOINTS),
    # RLOO
    "RLOO": row("RLOO", scored=half_without_advantage(), idle=ALWAYS),
    "RLOO, one micro-batch": row("RLOO", "gemma2", per_device_train_batch_size=8, **ONE),
    "RLOO, LoRA": row("RLOO", peft_config=LORA),
    # With a generation of one optimizer step the scores' forward is the training's: half of TRL's at most run.
    "RLOO, kept": row("RLOO", num_iterations=1, share=0.28),
    # The reference is the policy. With other rounding their KL would not be 0, nor the deviation of equal rewards.
    "RLOO, kept, a KL of 0": row("RLOO", **SINGLE_PROMPTS, num_iterations=1, learning_rate=0.0),
    "RLOO, kept, one group without advantage": row("RLOO", **KEPT, scored=one_group_without_advantage, idle=(1, 3)),
    "RLOO, kept, no advantage": row("RLOO", **KEPT, scored=without_advantages),
    "RLOO, kept, half without advantage": row("RLOO", **KEPT, scored=half_without_advantage(), share=0.25),
    "RLOO, kept, one micro-batch": row("RLOO", "gemma2", per_device_train_batch_size=8, **KEPT, **ONE),
    "RLOO, kept, LoRA": row("RLOO", num_iterations=1, peft_config=LORA, share=0.28),
    "RLOO, kept, checkpoints": row("RLOO", **KEPT, gradient_checkpointing=True, scored=one_group_without_advantage),
    "RLOO, kept, Lfm2": row("RLOO", partial(architecture, "Lfm2"), **KEPT, **STATES),
    "GRPO, vLLM": row("GRPO", num_iterations=1, prepare=with_vllms_logps, share=0.28),
    "GRPO, vLLM, no KL": row("GRPO", **KEPT, prepare=with_vllms_logps, scored=one_group_without_advantage),
    "GRPO, vLLM, GSPO": row("GRPO", **KEPT, prepare=with_vllms_logps, importance_sampling_level="sequence"),
    "RLOO, router loss": row("RLOO", moe, scored=half_without_advantage(), idle=NEVER),
    "RLOO, Qwen3Next": row("RLOO", partial(architecture, "Qwen3Next"), **STATES),  # with a router loss
    # GRPO's losses
    **{f"GRPO, {name}": of_loss(name) for name in ("grpo", "bnpo", "dapo", "luspo")},
    **{f"GRPO, {name}": of_loss(name, epsilon=0.2) for name in ("sapo", "vespo")},  # without a clip
    "GRPO, dr_grpo": of_loss("dr_grpo", off_policy_mask_threshold=1.0),
    "GRPO, cispo": of_loss("cispo", epsilon_high=1.01),
    "GRPO, grpo at sequence level": of_loss("grpo", importance_sampling_level="sequence", epsilon=0.005),
    "GRPO, luspo at sequence level": of_loss("luspo", importance_sampling_level="sequence", epsilon=0.005),
    "GRPO, every option": of_loss("dapo", **EVERY_OPTION, idle=NEVER),
    # As long as the policy is the reference, the KL has no gradient.
    "GRPO, KL": of_loss("dapo", beta=0.1, delta=1.5, idle=NEVER),
    "GRPO, quantile": of_loss("dapo", **QUANTILE),
    "GRPO, entropy": of_loss("dapo", entropy_coef=0.1, idle=NEVER),
    "GRPO, adaptive entropy": of_loss("dapo", **ADAPTIVE, idle=FIRST),  # no bonus without a measured entropy
    "GRPO, advantages of tokens": of_loss("dapo", scored=half_without_advantage(per_token=True)),
    "GRPO, tool mask": of_loss("dapo", scored=half_without_advantage(tool_mask=True)),
    "GRPO, router loss": of_loss("dapo", model=moe, idle=NEVER),
    # A softcap; a scale of the logits, a divisor of them.
    **{f"GRPO, {name}": row("GRPO", name, epsilon=NARROW) for name in ("gemma2", "cohere", "granite")},
    # GRPO's batches
    "GRPO": row("GRPO", **EVALUATED),
    "GRPO, LoRA": row("GRPO", peft_config=LORA, loss_type="bnpo"),
    "GRPO, old policy": row("GRPO", calls=(16, 7), steps_per_generation=2, gradient_accumulation_steps=3, max_steps=3),
    "GRPO, all idle": policy(scored=without_advantages),
    "GRPO, completions without a token": policy(scored=without_tokens),
    "GRPO, no completion has a token": policy(scored=partial(without_tokens, step=1), trees=False),
    "GRPO, truncated": policy(mask_truncated_completions=True, max_completion_length=30),
    "GRPO, checkpoints": policy(**CHECKPOINTS),
    "GRPO, reentrant checkpoints": policy(**REENTRANT),
    "GRPO, learned positions": row("GRPO", gpt2, trees=not BEFORE_5),  # in transformers 4.57 with a mask of its own
    "GRPO, window": row("GRPO", window),
    "GRPO, eager window": row("GRPO", partial(window, attn_implementation="eager")),
    "GRPO, NEFTune": apart("GRPO", share=1.0, **NEFTUNE),
    **{
        f"GRPO, experts of {name}": row("GRPO", partial(architecture, name), max_steps=3)
        for name in ("Mixtral", "GptOss", "DeepseekV3")
    },
    **{f"GRPO, text alone of {name}": row("GRPO", partial(text_of, name)) for name in ("Llava", "Gemma3")},
    **{
        f"GRPO, {name}": row("GRPO", partial(architecture, name), **STATES)
        for name in ("Qwen3_5Text", "NemotronH", "OlmoHybrid", "KimiLinear")
    },
    "GRPO, Qwen3_5Text, LoRA": row(
        "GRPO", partial(architecture, "Qwen3_5Text"), peft_config=LORA_EVERYWHERE, **STATES | REENTRANT,
    ),
    # An optimizer step begins anywhere within a generation. The last one of an epoch may be short.
    **{
        f"GRPO, {number} steps of a generation": policy(
            steps_per_generation=number, gradient_accumulation_steps=steps[0], max_steps=len(steps),
            num_iterations=2, num_generations=2, prepare=sixteen_prompts, trees=False, calls=calls,
        )
        for number, steps, calls in ((2, (4, 4), None), (4, (6, 6, 4), (24, 5)), (3, (2, 2), None))
    },
    **{
        f"GRPO, {name} of a subclass": policy(prepare=prepare, idle=NEVER, together=False)
        for name, prepare in {
            "a call of the model": rows_reversed,
            "_compute_loss": subclass_with("_compute_loss"),
            "compute_loss": subclass_with("compute_loss"),
        }.items()
    },
    "GRPO, the head alone": policy(
        patch_options={"whole_step": False}, trees=False, idle=NEVER, together=False, is_logged=False,
    ),
    # Distillation
    **{
        f"Distillation, {model}": row("Distillation", model, beta=beta, **FOUR_PROMPTS | options)
        for model, beta, options in (("qwen3", 0.5, {}), ("gemma2", 0.0, ONE), ("cohere", 1.0, SINGLES))
    },
    "Distillation, a teacher of another size": row("Distillation", teacher=large_teacher, **FOUR_PROMPTS | SINGLES),
    "Distillation, LoRA": row("Distillation", peft_config=LORA, **FOUR_PROMPTS | EVALUATED | CHECKPOINTS),
    "Distillation, experts": row("Distillation", moe, **FOUR_PROMPTS),
    "Distillation, nothing to share": row("Distillation", trees=False, share=0.99, calls=(8, 8), backwards=2),
    "Distillation, few tokens": row(
        "Distillation", share=0.9, patch_options={"max_tokens": 80}, calls=(16, 12), backwards=6,
        **FOUR_PROMPTS | SINGLES,
    ),
    "Distillation, a class of one's own": row(
        "Distillation", prepare=own_class, share=0.9, calls=(8, 6), backwards=3, **FOUR_PROMPTS,
    ),
    "Distillation, alone": apart(
        "Distillation", prepare=with_types, max_steps=1, **FOUR_PROMPTS,
    ),
    "Distillation, own bodies": apart(
        "Distillation", prepare=subclass_with("_get_last_hidden_state"), **FOUR_PROMPTS,
    ),
    "Distillation, the head alone": apart(
        "Distillation", patch_options={"whole_step": False}, trees=False, is_logged=False, **FOUR_PROMPTS,
    ),
}  # fmt: skip


# In transformers 4.57 these models are their own base, whose tokens are not counted.
IMAGES = {
    "SFT, a model that can take images",
    "SFT, some images",
    *(f"GRPO, text alone of {x}" for x in ("Llava", "Gemma3")),
}


@pytest.mark.skipif(not REFUSES_PACKED, reason="this version of transformers reads packed rows as one sequence")
@pytest.mark.parametrize("patch", [False, True])
def test_packed_rows_that_transformers_refuses(patch, tmp_path):
    path = trl_runs.save(partial(architecture, "Qwen3_5Text"), tmp_path)
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        trl_runs.train("SFT", path, tmp_path, patch=patch, **ALONE)


@pytest.mark.filterwarnings("error:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("name", ROWS)
def test_the_patched_run_is_trls_run(name, path_of, tmp_path):
    row = ROWS[name]
    path = path_of[row.model] if isinstance(row.model, str) else trl_runs.save(row.model, tmp_path)
    teacher = {}
    if row.kind == "Distillation":
        pytest.importorskip("trl", "1.16", reason="TRL 1.16 is not installed")
        made = row.options["teacher"]
        teacher["teacher"] = path_of[made] if isinstance(made, str) else trl_runs.save(made, tmp_path / "teacher")
    if BEFORE_5 and name in IMAGES:
        trl_runs.assert_same_run(
            *reversed(trl_runs.pair(row.kind, path, tmp_path, seed=trl_runs.SEEDS[0], **row.options))
        )
        return
    plain, _ = trl_runs.assert_row(row, path, tmp_path, **teacher)
    if row.options.get("epsilon") == NARROW:
        assert max(plain.log.get("clip_ratio/region_mean", plain.log.get("cispo_clip_ratio"))) > 0.05
