"""LoRA adapters on the lm_head under TRL's trainers: whole runs against runs with full logits, and what is refused."""

import functools
import importlib
import inspect
from contextlib import contextmanager
from types import MethodType

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="PEFT is not installed")

import peft.tuners.tuners_utils as peft_layers
import trl.trainer.grpo_trainer as grpo_module
import trl.trainer.utils as trl_utils
from peft import LoHaConfig, LoraConfig, get_peft_model
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

import oracles
import trl_runs
from liger_rl.integrations import trl as integration
from liger_rl.integrations import trl_adapters
from liger_rl.integrations.trl import patch_trl, patched_trl, unpatch_trl

TARGETS = ["q_proj", "v_proj", "down_proj", "lm_head"]
# Weights of both factors at random, so that the adapter counts from the first step on.
LORA = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 4, "target_modules": TARGETS, "init_lora_weights": False}


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {name: trl_runs.save_model(name, directory) for name in trl_runs.MODELS}


# --- runs against full logits -----------------------------------------------------------------------------------------


def add_full_head(model, temperature=1.0, cast_lm_head_to_fp32=False, outputs=("log_probs",)):
    """TRL's fused forward with the logits of the model's own, adapters on its head and softcap included."""
    own_forward = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, *args, fused_lm_head=False, labels=None, num_items_in_batch=None, **kwargs):
        if not fused_lm_head:
            return own_forward(*args, labels=labels, **kwargs)
        z = own_forward(*args, **kwargs).logits[:, :-1].float() / temperature
        targets = labels[:, 1:].clamp(min=0)
        mask = labels[:, 1:] != -100
        logps, entropy, log_sum_sq, mean_logits, is_top1 = (
            torch.where(mask, values, 0)
            for values in (*oracles.logits_logprobs(z, targets), *oracles.logits_extras(z, targets))
        )
        return trl_utils.FusedCausalLMOutput(
            loss=-logps.sum() / (mask.sum() if num_items_in_batch is None else num_items_in_batch),
            log_probs=logps,
            entropy=entropy,
            log_sum_sq_probs=log_sum_sq.detach(),
            mean_logits=mean_logits.detach(),
            is_top1=is_top1.bool(),
            label_mask=mask,
        )

    model.forward = MethodType(forward, model)


@contextmanager
def full_logits():
    """TRL's trainers without the fused head, and so without a reason to refuse an adapter on it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in trl_adapters.TRAINERS:
            module = importlib.import_module(name)
            patch.setattr(module, "add_fused_lm_head", add_full_head)
            patch.setattr(module, "BaseTunerLayer", ())
        yield


@contextmanager
def terms_seen():
    """-> a list that grows by the number of low-rank terms of every call of our op."""
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        plain = integration.linear_logprobs

        def counting(*args, low_rank=(), **options):
            seen.append(len(low_rank))
            return plain(*args, low_rank=low_rank, **options)

        patch.setattr(integration, "linear_logprobs", counting)
        yield seen


def both(kind, model, directory, **options):
    """-> the run with full logits, the patched one, and the number of low-rank terms of each call of our op.

    `model` is a path, or a function that makes a model.
    """
    made = (lambda: model) if isinstance(model, str) else model
    with full_logits():
        full = trl_runs.train(kind, made(), directory, patch=False, **options)
    with terms_seen() as seen:
        patched = trl_runs.train(kind, made(), directory, patch=True, **options)
    return full, patched, seen[1:]  # the patch has tried its options


HEAD_FACTORS = ("lm_head.lora_A.default.weight", "lm_head.lora_B.default.weight")


def factors(weights):
    return [next(w for name, w in weights.items() if name.endswith(factor)) for factor in HEAD_FACTORS]


def assert_same_factors(patched, full, start):
    """The adapter on the head agrees by itself too, and not because nothing happened to it."""
    for mine, other, before in zip(factors(patched.weights), factors(full.weights), factors(start), strict=True):
        moved = (other - before).norm()
        assert moved > 0.01 * other.norm()
        assert (mine - other).norm() < 1e-4 * moved


@pytest.mark.parametrize(("model", "trained_before"), [("qwen3", False), ("gemma2", False), ("qwen3", True)])
def test_grpo(model, trained_before, path_of, tmp_path):
    """With a KL penalty, an entropy bonus, a clip, a temperature and, Gemma 2's, a softcap.

    The reference is the model without adapters, or a copy of the adapter that the model came with.
    """

    def adapted():
        torch.manual_seed(0)
        return get_peft_model(AutoModelForCausalLM.from_pretrained(path_of[model]), LoraConfig(**LORA))

    given, options = (adapted, {}) if trained_before else (path_of[model], {"peft_config": LoraConfig(**LORA)})
    full, patched, terms = both(
        "grpo", given, tmp_path, max_steps=10, num_iterations=2, beta=0.1, epsilon=0.02, entropy_coef=0.02, **options
    )
    trl_runs.assert_same_run(patched, full)
    start = dict(adapted().named_parameters())
    assert_same_factors(patched, full, start)
    assert set(terms) == ({1} if trained_before else {0, 1})
    assert max(full.log["kl"]) > 0.002
    assert max(full.log["clip_ratio/region_mean"]) > 0.05
    assert len(set(full.log["entropy"])) == len(full.log["loss"]) == 10


@pytest.mark.parametrize("kind", ["rloo", "dpo", "kto", "sft"])
def test_other_trainers(kind, path_of, tmp_path):
    full, patched, terms = both(kind, path_of["qwen3"], tmp_path, peft_config=LoraConfig(**LORA), max_steps=3)
    trl_runs.assert_same_run(patched, full)
    assert set(terms) == ({1} if kind == "sft" else {0, 1})
    assert full.log["loss"][0] != full.log["loss"][-1]


# --- one call ---------------------------------------------------------------------------------------------------------


def fused_model(path, device="cpu", dtype=torch.float32, **options):
    """A PeftModel on the base model's fused forward, as the trainers build it."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
    model = get_peft_model(base, LoraConfig(**{**LORA, **options}))
    trl_utils.add_fused_lm_head(base, temperature=0.9, outputs=("log_probs", "entropy"))
    return model.train()


def batch_on(device, *, masked=True):
    ids = torch.randint(3, len(trl_runs.TOKENS), (3, 9), generator=torch.Generator().manual_seed(1)).to(device)
    labels = ids.clone()
    if masked:
        labels[:, :3] = -100
        labels[1, 7:] = -100
    return ids, labels


def assert_agrees(model, device):
    """Log-probabilities, entropies and gradients of a call, with those of the model's own logits."""
    ids, labels = batch_on(device)
    targets, mask = labels[:, 1:].clamp(min=0), labels[:, 1:] != -100
    found = model(input_ids=ids, labels=labels, fused_lm_head=True)
    own = oracles.logits_logprobs(model(input_ids=ids).logits[:, :-1] / 0.9, targets)
    trained = [p for p in model.parameters() if p.requires_grad]
    pairs = list(zip((found.log_probs, found.entropy), own, strict=True))
    for mine, other in pairs:
        torch.testing.assert_close(mine, torch.where(mask, other, 0), rtol=1e-5, atol=1e-5)
    assert found.log_probs.requires_grad == own[0].requires_grad
    if found.log_probs.requires_grad:
        mine, other = (
            torch.autograd.grad(logps[mask].sum() + entropy[mask].square().sum(), trained, materialize_grads=True)
            for logps, entropy in zip(*pairs, strict=True)
        )
        for one, another in zip(mine, other, strict=True):
            torch.testing.assert_close(one, another, rtol=1e-4, atol=1e-4)
    return found.log_probs.detach()


def two_adapters(model):
    model.add_adapter("second", LoraConfig(**{**LORA, "r": 2, "lora_alpha": 8}))
    model.base_model.set_adapter(["default", "second"])


def nothing(model):
    pass


STATES = {
    "one": ({}, nothing, 1),
    "two": ({}, two_adapters, 2),
    "rslora": ({"use_rslora": True}, nothing, 1),
    "biases": ({"lora_bias": True}, nothing, 1),
    "disabled": ({}, lambda model: model.base_model.disable_adapter_layers(), 0),
    "merged": ({}, lambda model: model.merge_adapter(), 0),
    "the body alone": ({"target_modules": ["q_proj"]}, nothing, 0),
    "a trained copy": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, nothing, 0),
}


@pytest.mark.parametrize(("options", "change", "terms"), STATES.values(), ids=STATES)
def test_what_is_active_at_the_call(options, change, terms, path_of, device):
    with patched_trl(), terms_seen() as seen:
        model = fused_model(path_of["qwen3"], device, **options)
        assert_agrees(model, device)  # what comes next is read anew
        change(model)
        assert_agrees(model, device)
    assert seen[-1] == terms


@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision_is_no_further_from_float64(autocast, path_of, device):
    """Adapters in float32 on a bfloat16 model, as PEFT makes them."""
    with patched_trl():
        model = fused_model(path_of["qwen3"], device, dtype=torch.bfloat16, target_modules=["lm_head"])
        ids, labels = batch_on(device, masked=False)
        base, head = model.get_base_model(), model.get_output_embeddings()
        for factor in (head.lora_A, head.lora_B):
            torch.nn.init.normal_(factor["default"].weight, std=0.3)  # no longer what bfloat16 can hold
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            hidden = base.base_model(input_ids=ids).last_hidden_state[:, :-1].double()
            found = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
            own, _ = oracles.logits_logprobs(model(input_ids=ids).logits[:, :-1].float() / 0.9, ids[:, 1:])
        a, b = (factor["default"].weight.double() for factor in (head.lora_A, head.lora_B))
        z = (hidden @ head.base_layer.weight.double().T + hidden @ a.T @ b.T) / 0.9
    truth, _ = oracles.logits_logprobs(z, ids[:, 1:])
    if autocast:  # which rounds the factors of the adapter for both
        assert oracles.norm_error(found, truth) <= oracles.norm_budget(own, truth, torch.bfloat16)
    else:  # float32 against bfloat16 logits: 0.001
        assert oracles.norm_error(found, truth) < 0.01 * oracles.norm_error(own, truth)


def test_dropout(path_of, device):
    """Drawn in training for every row that the op is given, as `nn.Dropout` draws it; not in evaluation."""
    with patched_trl():
        model = fused_model(path_of["qwen3"], device, target_modules=["lm_head"], lora_dropout=0.5)
        ids, labels = batch_on(device, masked=False)
        torch.manual_seed(1)
        found = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
        base, head = model.get_base_model(), model.get_output_embeddings()
        hidden = base.base_model(input_ids=ids).last_hidden_state[:, :-1].reshape(-1, head.in_features)
        torch.manual_seed(1)
        added = head.lora_B["default"](head.lora_A["default"](torch.nn.functional.dropout(hidden, 0.5)))
        z = (head.base_layer(hidden) + added).view(*ids[:, 1:].shape, -1) / 0.9
        expected, _ = oracles.logits_logprobs(z, ids[:, 1:])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        in_evaluation = assert_agrees(model.eval(), device)
    assert (found - in_evaluation).abs().max() > 0.01


def test_generation_sees_the_forward_it_knows(path_of):
    with patched_trl():
        model = fused_model(path_of["qwen3"]).get_base_model()
    assert inspect.signature(model.forward) == inspect.signature(type(model).forward.__get__(model))
    ids, _ = batch_on("cpu")
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


# --- what is refused --------------------------------------------------------------------------------------------------


def build(path, directory, peft_config, **options):
    arguments = {**trl_runs.CPU_ARGS, **trl_runs.SCORED, "output_dir": str(directory), **options}
    return GRPOTrainer(
        model=path,
        reward_funcs=trl_runs.evenness,
        args=GRPOConfig(**arguments),
        train_dataset=trl_runs.prompts(),
        processing_class=trl_runs.tokenizer(),
        peft_config=peft_config,
    )


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (LoraConfig(**{**LORA, "use_dora": True}), ValueError, "'default' .* DoraLinearVariant"),
        (LoHaConfig(target_modules=["lm_head"]), TypeError, r"loha\.layer\.Linear"),
    ],
    ids=["dora", "loha"],
)
def test_other_adapters_are_refused_by_name(config, error, message, path_of, tmp_path):
    patch_trl()
    with pytest.raises(error, match=message):
        build(path_of["qwen3"], tmp_path, config)


def test_a_head_that_does_more_is_refused(path_of, tmp_path):
    patch_trl()
    base = AutoModelForCausalLM.from_pretrained(path_of["qwen3"])
    model = get_peft_model(base, LoraConfig(**LORA))
    hook = model.get_output_embeddings().register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="1 hooks"):
        build(model, tmp_path, None)
    hook.remove()
    linear = model.get_output_embeddings().base_layer
    linear.forward = lambda hidden: torch.zeros(())
    with pytest.raises(ValueError, match="replaced on the instance"):
        build(model, tmp_path, None)


def test_a_float32_head_is_refused_beside_an_adapter_on_it(path_of, tmp_path):
    """As TRL does; without the adapter on the head it is taken."""
    patch_trl()
    with pytest.raises(ValueError, match="cast_lm_head_to_fp32"):
        build(path_of["qwen3"], tmp_path, LoraConfig(**LORA), cast_lm_head_to_fp32=True)
    build(path_of["qwen3"], tmp_path, LoraConfig(target_modules=["q_proj"]), cast_lm_head_to_fp32=True)


def mark_for_zero3(factor):
    factor.weight.ds_id = 7  # as DeepSpeed does


def shard_for_fsdp2(factor):
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    factor.weight = torch.nn.Parameter(distribute_tensor(factor.weight.data, mesh))


@pytest.fixture
def lone_process_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("shard", [mark_for_zero3, shard_for_fsdp2])
@pytest.mark.parametrize("factor", ["lora_A", "lora_B"])
@pytest.mark.usefixtures("lone_process_group")
def test_sharded_adapters_are_refused(shard, factor, path_of):
    with patched_trl():
        model = fused_model(path_of["qwen3"])
        shard(getattr(model.get_output_embeddings(), factor)["default"])
        ids, labels = batch_on("cpu")
        with pytest.raises(ValueError, match="Qwen3ForCausalLM are sharded"):
            model(input_ids=ids, labels=labels, fused_lm_head=True)


def test_a_trainer_that_outlives_the_patch_raises_until_it_is_back(path_of):
    """TRL's own op would leave the adapter out."""
    ids, labels = batch_on("cpu")
    with patched_trl():
        model = fused_model(path_of["qwen3"])
    with pytest.raises(RuntimeError, match=r"patch_trl\(\) must hold"):
        model(input_ids=ids, labels=labels, fused_lm_head=True)
    assert model(input_ids=ids).logits.shape[:2] == ids.shape
    with model.disable_adapter():  # nothing to leave out
        assert_agrees(model, "cpu")
    with patched_trl():
        assert_agrees(model, "cpu")


# --- patching and undoing ---------------------------------------------------------------------------------------------


def patched_names():
    modules = [importlib.import_module(name) for name in trl_adapters.TRAINERS]
    return [vars(module)[name] for module in modules for name in ("BaseTunerLayer", "add_fused_lm_head")]


def test_the_refusal_comes_and_goes(path_of, tmp_path):
    refused = pytest.raises(ValueError, match="Applying a PEFT adapter to `lm_head` is not supported")
    before = patched_names()
    with refused:
        build(path_of["qwen3"], tmp_path, LoraConfig(**LORA))
    patch_trl()
    patch_trl(chunk_vocab=64)
    build(path_of["qwen3"], tmp_path, LoraConfig(**LORA))
    assert not set(before) & set(patched_names())
    assert peft_layers.BaseTunerLayer is before[0]  # PEFT's own is left alone
    unpatch_trl()
    assert patched_names() == before
    unpatch_trl()
    with refused:
        build(path_of["qwen3"], tmp_path, LoraConfig(**LORA))


@pytest.mark.parametrize(
    ("module", "name", "other"),
    [(grpo_module, "BaseTunerLayer", None), (trl_utils, "add_fused_lm_head", lambda model: None)],
    ids=["another class", "another signature"],
)
def test_a_trl_that_is_not_what_its_version_says_is_left_as_it_is(module, name, other):
    """Everything is looked up before anything is replaced."""
    op, whole = vars(trl_utils)["_ChunkedLogProbFunction"], patched_names()
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(module, name, other)
        before = patched_names()
        with pytest.raises(RuntimeError, match=f"{name}.*nothing was patched"):
            patch_trl(chunk_vocab=64)
        assert patched_names() == before
        assert vars(trl_utils)["_ChunkedLogProbFunction"] is op
    patch_trl()
    assert not set(whole) & set(patched_names())
    assert vars(trl_utils)["_ChunkedLogProbFunction"].options["chunk_vocab"] is None


def test_without_peft_there_is_nothing_to_lift(monkeypatch):
    monkeypatch.setattr("transformers.utils.is_peft_available", lambda: False)
    before = patched_names()
    patch_trl()
    assert patched_names() == before
    assert isinstance(vars(trl_utils)["_ChunkedLogProbFunction"], integration.FusedLogProbs)


def test_what_was_imported_under_the_patch_and_kept_says_so(path_of):
    with patched_trl():
        kept = [trl_utils.add_fused_lm_head]
    with pytest.raises(RuntimeError, match="taken back"):
        kept[0](AutoModelForCausalLM.from_pretrained(path_of["qwen3"]))
