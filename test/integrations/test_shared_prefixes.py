"""Steps of sequences that begin with the same tokens, which run them once, against steps of separate rows."""

import copy
import pickle
import re
from functools import partial

import pytest
import torch

import oracles
from hf_models import BEFORE_5, CONFIGS, HEADS, NEEDS_TREES_OF_GPT2, VOCAB, assert_same_gradients, build
from liger_rl import FusedLinearGRPOLoss, completion_logps, loss_step, loss_steps, swap_lm_head
from liger_rl.losses import TopEntropyMask
from liger_rl.step import attention, layout, trial
from liger_rl.step.prefix_tree import build_prefix_tree
from step_calls import Calls, assert_same_metrics, run, small_llama, with_columns
from threads import in_threads

NUMBERS = torch.randint(3, VOCAB, (400,), generator=torch.Generator().manual_seed(4)).tolist()
PROMPT, OTHER, TURN = NUMBERS[:20], NUMBERS[20:38], NUMBERS[40:60]
# Tokens of each sequence, its first completion token, advantage.
SEQUENCES = [
    (PROMPT + NUMBERS[60:66], 20, 1.0),
    (PROMPT + TURN + NUMBERS[70:75], 20, -0.5),
    (PROMPT + TURN + NUMBERS[80:87], 40, 2.0),  # counts no token of its first turn, as the one before does
    (OTHER + NUMBERS[90:94], 18, -1.5),
    (OTHER + NUMBERS[90:99], 19, 0.7),  # continues the one before
    (PROMPT + TURN + NUMBERS[70:75], 21, 0.3),  # the second one again
    (NUMBERS[100:109], 4, 1.2),  # alone
    (PROMPT + NUMBERS[110:118], 22, 0.0),  # without a gradient
    (PROMPT, 20, 0.5),  # without completion tokens
]
TOKENS, PADDED = (
    98 + 28,
    7 * 47 + 28,
)  # of those that run: in trees, and in rows; the second numbers: without a gradient


def batch_of(sequences=SEQUENCES, padding="right", *, positions=False, device="cpu") -> dict:
    width = max(len(tokens) for tokens, *_ in sequences) + 2
    ids, attention, mask = (torch.zeros(len(sequences), width, dtype=torch.long) for _ in range(3))
    for row, (tokens, first, _) in enumerate(sequences):
        start = {"left": width - len(tokens), "right": 0, "both": row % 3}[padding]
        ids[row, start : start + len(tokens)] = torch.tensor(tokens)
        attention[row, start : start + len(tokens)] = 1
        mask[row, start + first : start + len(tokens)] = 1
    batch = {"input_ids": ids, "attention_mask": attention, "mask": mask}
    batch["advantages"] = torch.tensor([advantage for *_, advantage in sequences])
    if positions:
        batch["position_ids"] = (attention.cumsum(-1) - 1).clamp(min=0)
    return {name: value.to(device) for name, value in batch.items()}


def assert_same_results(results, expected) -> None:
    """Results of `run`: losses, metrics, log-probabilities and gradients are the same."""
    (steps, grads), (others, truth) = results, expected
    torch.testing.assert_close(steps.total.loss, others.total.loss, rtol=1e-5, atol=1e-5)
    assert_same_metrics(steps.total.metrics, others.total.metrics)
    logps = (taken.total.per_token_logps for taken in (steps, others))
    torch.testing.assert_close(*logps, rtol=1e-5, atol=2e-5, equal_nan=True)
    assert_same_gradients(grads, truth)


def assert_as_rows(model, batch: dict, loss=None, **options):
    """-> the steps in which prefixes were shared."""
    loss = loss or FusedLinearGRPOLoss("dapo", metrics="basic")
    expected = run(model, batch, loss, **options, share_prefixes=False)
    assert expected[0].layout.endswith("no prefix is shared: share_prefixes=False")
    results = run(model, batch, loss, **options, share_prefixes=True)
    assert "in trees of shared prefixes" in results[0].layout
    assert_same_results(results, expected)
    return results[0]


# --- the same loss, gradients and metrics -----------------------------------------------------------------------------

ARCHITECTURES = {
    "Llama": {},
    "Qwen3": {},
    "Gemma2": {"attn_logit_softcapping": 2.0, "sliding_window": 9},
    "Gemma2 eager": {"attention": "eager", "attn_logit_softcapping": 2.0, "sliding_window": 9},
    "Gemma3Text": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "Mistral": {"sliding_window": 18},
    "Mistral eager": {"attention": "eager", "sliding_window": 18},
    "GPT2": {},  # learned positions, which are columns
    "OPT": {},  # learned positions, which count the attention mask
    "Cohere": {},
    "Qwen3Moe": {"output_router_logits": False},
    "Qwen3Moe with a router loss": {},
    "Mixtral": {},
    "Olmoe": {},
    "GptOss": {"attention": "eager", "sliding_window": 9},
}


@pytest.mark.parametrize(
    ("name", "padding"),
    [(name, "left") for name in ARCHITECTURES if name != "GPT2"]
    + [(name, padding) for name in ("Llama", "Gemma3Text", "OPT") for padding in ("right", "both")]
    + [pytest.param("GPT2", padding, marks=NEEDS_TREES_OF_GPT2) for padding in ("left", "right", "both")],
)
def test_every_architecture(name, padding):
    model = build(name.split()[0], **ARCHITECTURES[name])
    for positions in (True, False) if name in ("GPT2", "OPT") else (padding == "left",):
        steps = assert_as_rows(model, batch_of(padding=padding, positions=positions))
        columns = name == "GPT2" and padding != "right" and not positions
        # A router loss is of all tokens.
        tokens = (108, 423) if model.config.to_dict().get("output_router_logits") else (TOKENS, PADDED)
        assert columns or steps.layout.startswith("{} tokens in trees of shared prefixes, of {}".format(*tokens))


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_every_device(name, device):
    """Of rows of more than a block, in blocks that are whole, partial and empty."""
    options = {"head_dim": 16, "max_position_embeddings": 1024}
    model = build(name, device, **options | ({"sliding_window": 150} if name == "Mistral" else {}))
    long = (NUMBERS * 2)[:330]
    sequences = [(long + NUMBERS[40 * n : 40 * n + 30 + n], 330, n - 1.5) for n in range(4)]
    batch, loss = batch_of(sequences, "left", device=device), FusedLinearGRPOLoss("dapo")
    expected = run(model, batch, loss, share_prefixes=False)
    steps, grads = run(model, batch, loss, share_prefixes=True)
    assert steps.layout.startswith("459 tokens in trees of shared prefixes, of 1,452")
    if device.type == "cpu":
        assert_same_results((steps, grads), expected)
        return
    torch.testing.assert_close(steps.total.loss, expected[0].total.loss, rtol=1e-4, atol=1e-5)
    assert oracles.relative_error(*(oracles.whole(found) for found in (grads, expected[1]))) <= 1e-3


@pytest.mark.parametrize("name", ["Llama", pytest.param("GPT2", marks=NEEDS_TREES_OF_GPT2)])
def test_lora(name):
    peft = pytest.importorskip("peft", reason="the adapters are PEFT's")
    targets = {"Llama": ["q_proj", "v_proj"], "GPT2": ["c_attn"]}[name]
    model = peft.get_peft_model(build(name), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.2)
    assert_as_rows(model.train(), batch_of())


@pytest.mark.filterwarnings("error:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    model = build("Gemma3Text", **ARCHITECTURES["Gemma3Text"]).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_as_rows(model, batch_of())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_autocast(attention):
    """It adds no more error than it does in separate rows."""
    model, batch, loss = build("Llama", attention=attention), batch_of(), FusedLinearGRPOLoss("dapo")
    exact = run(model, batch, loss, share_prefixes=False)[1]
    with torch.autocast("cpu", torch.bfloat16):
        found = [run(model, batch, loss, share_prefixes=shares)[1] for shares in (True, False)]
    error, allowed = (oracles.norm_error(oracles.whole(grads), oracles.whole(exact)) for grads in found)
    assert 0 < error <= 1.5 * allowed


@pytest.mark.parametrize("preset", ["dapo", "gspo", "cispo", "grpo"])
def test_losses_with_more_columns(preset):
    """With a bonus for entropy, a reference, and a sequence that runs without a graph."""
    model, loss = small_llama(), FusedLinearGRPOLoss(preset, beta=0.1, metrics="with_entropy", epsilon_high=2.0)
    assert assert_as_rows(model, with_columns(model, batch_of()), loss).total.entropy is not None


def test_pairs_of_a_preference():
    """A prompt with its chosen and its rejected completion: the difference, and its gradient."""
    model, loss = small_llama(), FusedLinearGRPOLoss("grpo")
    pairs = [SEQUENCES[0], SEQUENCES[7], SEQUENCES[3], (OTHER + NUMBERS[95:98], 18, 0.0)]
    batch = batch_of(pairs, "left")
    logps = [completion_logps(model, batch, loss, share_prefixes=shares).sum(1) for shares in (True, False)]
    torch.testing.assert_close(*logps, rtol=1e-5, atol=1e-5)
    difference = -torch.nn.functional.logsigmoid(logps[0][::2] - logps[0][1::2]).exp()
    batch["advantages"] = torch.stack([difference, -difference], 1).flatten()
    assert_as_rows(model, batch)


# name -> sequences, or a change of the batch
BATCHES = {
    "one token": [(PROMPT[:1], 1, 1.0), (PROMPT, 5, 1.0), (PROMPT, 1, -2.0), (PROMPT[:2], 1, 0.5)],
    "one sequence": [SEQUENCES[0]],
    "the same sequence": [SEQUENCES[0]] * 3,
    "none begins alike": [(NUMBERS[9 * n : 9 * n + 9], 3, n - 1.5) for n in range(4)],
    "each continues the one before": [(NUMBERS[: 18 + 2 * n], 17 - n, n - 1.5) for n in range(4)],
}


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES)
def test_other_trees(sequences, padding):
    assert_as_rows(small_llama(), batch_of(sequences, padding), idle="backward")


@pytest.mark.parametrize("change", ["int32", "no mask", "late positions", "dummy rows", "tokens count in one row"])
@pytest.mark.parametrize("name", ["Llama", "OPT"])
def test_other_batches(name, change):
    batch = batch_of(padding="both" if change == "dummy rows" else "right")
    if change == "int32":
        batch = {key: value.int() if not value.is_floating_point() else value for key, value in batch.items()}
    elif change == "no mask":
        del batch["attention_mask"]
    elif change == "late positions":
        batch["position_ids"] = (torch.arange(49) + torch.tensor([0, 3, 3, 5, 5, 0, 1, 0, 2])[:, None]).clamp(max=60)
    elif change == "dummy rows":  # a sampler fills its batch with them
        for column in ("attention_mask", "mask"):
            batch[column][-2:] = 0
        batch["attention_mask"][-1, 3:5] = 1
    else:
        batch["mask"] = batch["attention_mask"] * (torch.rand(batch["mask"].shape) < 0.5)
    assert_as_rows(build(name), batch)


# --- micro-batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("idle", ["skip", "forward", "backward"])
@pytest.mark.parametrize(("max_tokens", "number"), [(None, 1), (98, 1), (97, 2), (61, 2), (60, 3), (47, 4)])
def test_no_micro_batch_has_more_tokens_than_allowed(max_tokens, number, idle):
    """The first prompt's group has 61 tokens, and is split if it has to be; the second one's has 28."""
    model, batch = swap_lm_head(small_llama()), batch_of()
    loss_step(model, batch, FusedLinearGRPOLoss("dapo"), share_prefixes=True)  # tries out the model
    expected = run(model, batch, FusedLinearGRPOLoss("dapo"), share_prefixes=False, idle=idle)
    calls = Calls(model)
    results = run(model, batch, FusedLinearGRPOLoss("dapo"), share_prefixes=True, idle=idle, max_tokens=max_tokens)
    assert_same_results(results, expected)
    assert all(shape[0] == 1 and shape[1] <= (max_tokens or 127) for shape, *_ in calls)
    if idle == "skip":
        assert (len(calls), len(results[0])) == (number, number)
        assert max_tokens not in (None, 98, 97, 61) or sum(shape[1] for shape, *_ in calls) == 98
    if idle == "forward":
        assert [call for call in calls if not call[1]] == [((1, 28), False, {"position_ids", "attention_mask"})]


def test_the_least_budget_of_a_loss_of_all_sequences():
    model, loss = small_llama(), FusedLinearGRPOLoss("grpo", corrections=[TopEntropyMask(top_entropy_quantile=0.5)])
    loss_step(model, batch_of(), loss, share_prefixes=True)
    for budget in (106, 60):  # with the latter, a group of prefixes would be split
        with pytest.raises(ValueError, match=f"max_tokens must be None or at least 107 here, got {budget}: the loss's"):
            loss_steps(model, batch_of(), loss, max_tokens=budget)
    assert len(loss_steps(model, batch_of(), loss, max_tokens=107)) == 1


# --- what is refused, and why -----------------------------------------------------------------------------------------


def tuned(model=None, **options):
    peft = pytest.importorskip("peft", reason="the adapters are PEFT's")
    config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", "target_modules": ["q_proj"], **options})
    return peft.get_peft_model(small_llama() if model is None else model, config).train()


def prompt_tuned():
    peft = pytest.importorskip("peft", reason="the adapters are PEFT's")
    return peft.get_peft_model(small_llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def split_over_devices():
    model = small_llama()
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    return model


def compiled(*, body):
    model = swap_lm_head(small_llama())
    if not body:
        return torch.compile(model, backend="eager")
    model.model.compile(backend="eager")
    return model


def of_another_attention():
    model = swap_lm_head(small_llama())
    model.config._attn_implementation = "flex_attention"
    return model


def with_a_hole(batch):
    batch["attention_mask"][1, 3] = 0


def with_a_gap(batch):
    batch["position_ids"] = torch.arange(49).repeat(9, 1)
    batch["position_ids"][2, 9:] += 1


def cached(batch):
    batch["use_cache"] = True


NEO = {
    "vocab_size": VOCAB, "num_layers": 2, "num_heads": 4, "hidden_size": 32, "max_position_embeddings": 64,
    "attention_types": [[["global", "local"], 1]], "window_size": 9,
}  # fmt: skip
LLAMA_4 = {**HEADS, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 4}
LLAMA_4 |= {"layer_types": ["chunked_attention"] * 2, "attn_temperature_tuning": False}
MAMBA_ALONE = {"vocab_size": VOCAB, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 1}
UNTRIED = {"GPTNeo": NEO, "Llama4Text": LLAMA_4, "Mamba": MAMBA_ALONE}
DROPOUT = "dropout draws for each sequence"
NO_RUN = "row {} of input_ids has padding between tokens, or positions that jump"
# model, reason, change of the batch
REFUSED = {
    "dropout of attention": (lambda: build("Llama", attention_dropout=0.1).train(), DROPOUT, None),
    "functional dropout": (lambda: build("OPT", dropout=0.1).train(), DROPOUT, None),
    "dropout modules": (lambda: build("Phi", resid_pdrop=0.1).train(), DROPOUT, None),
    "dropout of an adapted model": (
        lambda: tuned(lora_dropout=0.1, model=build("Llama", attention_dropout=0.1)), DROPOUT, None
    ),
    "noise of a router": (
        lambda: build("Mixtral", output_router_logits=False, router_jitter_noise=0.1).train(), DROPOUT, None
    ),
    "chunks": (lambda: build("Llama4Text"), "Llama4ForCausalLM has layers of type chunked_attention", None),
    "a state": (lambda: build("Lfm2"), "Lfm2ForCausalLM has layers of type conv", None),
    "no positions": (lambda: build("Mamba"), "MambaForCausalLM is not a causal model of text", None),
    "windows of columns": (lambda: build("GPTNeo", attention="eager"), "makes an attention mask of its own", None),
    "a router loss": (lambda: build("Llama", output_router_logits=True), "has a router loss of its own", None),
    "devices": (split_over_devices, "the layers of LlamaForCausalLM are on several devices", None),
    "attention": (of_another_attention, "attention 'flex_attention' takes no mask of shared prefixes", None),
    "compiled body": (partial(compiled, body=True), "the model is compiled", None),
    "compiled model": (partial(compiled, body=False), "the model is compiled", None),
    "prompt tuning": (prompt_tuned, "prompt learning of PEFT puts tokens of its own before each sequence", None),
    "cache": (small_llama, "use_cache=True keeps keys and values", cached),
    "hole": (small_llama, NO_RUN.format(1), with_a_hole),
    "gap": (small_llama, NO_RUN.format(2), with_a_gap),
}  # fmt: skip
if BEFORE_5:
    REFUSED["a mask of GPT-2's"] = (lambda: build("GPT2"), "GPT2LMHeadModel makes an attention mask of its own", None)


@pytest.mark.parametrize(("make", "reason", "change"), REFUSED.values(), ids=REFUSED)
def test_trees_that_cannot_be(make, reason, change, monkeypatch):
    for name, config in UNTRIED.items():
        monkeypatch.setitem(CONFIGS, name, config)
    model, batch, loss = make(), batch_of(), FusedLinearGRPOLoss("grpo")
    if change is not None:
        change(batch)
    inner = swap_lm_head(getattr(model, "_orig_mod", model))
    hook = inner.base_model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=f"share_prefixes must not be True here: .*{re.escape(reason)}"):
        loss_steps(model, batch, loss, share_prefixes=True)
    assert reason in loss_steps(model, batch, loss).layout
    hook.remove()


def test_the_dropout_of_an_adapter_has_the_same_mean():
    """A shared token draws once, so only the draws of different sequences are no longer independent."""
    options = {"target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False, "r": 4}
    model, loss = tuned(lora_dropout=0.4, **options), FusedLinearGRPOLoss("dapo")
    draws = {}
    for shares in (True, False):
        torch.manual_seed(5)
        steps = [loss_step(model, batch_of(), loss, share_prefixes=shares, idle="forward") for _ in range(120)]
        draws[shares] = torch.stack([step.per_token_logps for step in steps])
        assert ("in trees" in steps[0].layout) == shares
    mean, other = (values.mean(0) for values in draws.values())
    error = sum(values.var(0) / len(values) for values in draws.values()).sqrt()
    counted = batch_of()["mask"].bool() & (mean != 0)
    assert (error[counted] > 0).all()  # it draws
    assert ((mean - other).abs() <= 5 * error + 1e-6)[counted].all()


def test_an_untried_model_is_refused_after_its_trial():
    """Falcon reads its biases off a mask of two dimensions. Nobody asked for trees, so the step runs without."""
    model, loss = build("Falcon", alibi=True), FusedLinearGRPOLoss("dapo")
    reason = "the forward of FalconForCausalLM fails with a tree: too many values to unpack"
    for _ in range(2):
        assert reason in loss_step(model, batch_of(), loss).layout
    with pytest.raises(ValueError, match=f"share_prefixes must not be True here: {reason}"):
        loss_steps(model, batch_of(), loss, share_prefixes=True)


def test_trees_run_by_themselves_where_they_save_a_tenth():
    """On a CPU, if the pairs of their rows do not take longer. Smaller rows, of a budget, have fewer."""
    model, loss = build("Llama", hidden_size=256, num_hidden_layers=1), FusedLinearGRPOLoss("dapo")
    alone = [(NUMBERS[20 * n : 20 * n + 20], 4, 1.0) for n in range(1, 8)]
    few = [(NUMBERS[:17], 9, 1.0), (NUMBERS[:17], 9, -1.0)]
    assert "138 tokens in trees of shared prefixes, of 160" in loss_step(model, batch_of(few + alone[:-1]), loss).layout
    assert (
        "with prefixes once, 158 of 174 tokens would remain, more than 90%"
        in loss_step(model, batch_of(few + alone), loss).layout
    )
    many = batch_of([([*NUMBERS[n : n + 18], 3 + m], 18, 1.0) for n in range(100) for m in range(2)])
    assert (
        "a row would have 2,100 tokens, and attention on a cpu takes 2,048 at most"
        in loss_steps(model, many, loss).layout
    )
    assert "2,100 tokens in trees" in loss_steps(model, many, loss, max_tokens=400).layout


# --- the model and its trial ------------------------------------------------------------------------------------------


def test_a_model_may_change_between_steps():
    """Its mode, its attention and its copies; a trial is made for each kind of attention of each model."""
    model, batch, loss = swap_lm_head(build("Phi", resid_pdrop=0.1)), batch_of(), FusedLinearGRPOLoss("dapo")
    calls = Calls(model)

    def number_of_calls(model, calls):
        calls.clear()
        assert "in trees" in loss_step(model.eval(), batch, loss).layout
        return len(calls)

    assert [number_of_calls(model, calls) for _ in range(2)] == [11, 1]
    assert DROPOUT in loss_step(model.train(), batch, loss).layout
    model.set_attn_implementation("eager")
    assert [number_of_calls(model, calls) for _ in range(2)] == [11, 1]
    del calls.hook, calls
    model.base_model._forward_pre_hooks.clear()
    expected = loss_step(model, batch, loss).loss
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(loss_step(other, batch, loss, share_prefixes=True).loss, expected)


def test_threads():
    model, batch, loss = swap_lm_head(small_llama()), batch_of(), FusedLinearGRPOLoss("dapo")
    call = partial(completion_logps, model, batch, loss, share_prefixes=True)
    for results in in_threads(call, call, times=2):
        torch.testing.assert_close(results, [completion_logps(model, batch, loss, share_prefixes=False)] * 2)


# --- blocks, as on a GPU ---------------------------------------------------------------------------------------------


AFMOE = {**HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "sliding_window": 20}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize(
    "name", ["Llama", "Gemma3Text", "Mistral", pytest.param("GPT2", marks=NEEDS_TREES_OF_GPT2), "Afmoe"]
)
def test_blocks_in_place_of_another_attention(name, monkeypatch):
    """As on a GPU, without a graph, which flex attention lacks on a CPU. Afmoe gives the mask by its name."""
    monkeypatch.setitem(CONFIGS, "Afmoe", AFMOE)
    functions, make_masks = attention.ALL_ATTENTION_FUNCTIONS, attention.make_masks
    monkeypatch.setitem(functions, "sdpa", functions["sdpa"])
    monkeypatch.setattr(attention, "make_masks", lambda *args, dense: make_masks(*args, dense=False))
    for module in (layout, trial):
        monkeypatch.setattr(module, "build_prefix_tree", lambda *given: build_prefix_tree(*given[:2], attention.BLOCK))
    monkeypatch.setattr(attention, "_compile_attention", lambda *shape: attention._attend)
    attention._install_flex_attention.cache_clear()
    model, loss = build(name, **ARCHITECTURES.get(name, {})).requires_grad_(False), FusedLinearGRPOLoss("dapo")
    trees, rows = (completion_logps(model, batch_of(), loss, share_prefixes=shares) for shares in (True, False))
    attention._install_flex_attention.cache_clear()
    torch.testing.assert_close(trees, rows, rtol=1e-5, atol=2e-5)


def test_attention_that_does_not_ask_for_its_function_is_no_place_for_blocks():
    model = build("Falcon")
    assert attention.find_attention_obstacle(model, model.config, torch.device("cpu")) is None
    reason = attention.find_attention_obstacle(model, model.config, torch.device("cuda"))
    assert str(reason) == "attention 'sdpa' cannot run as flex attention, which shared prefixes need"
