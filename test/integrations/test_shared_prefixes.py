"""Steps of sequences that begin with the same tokens, which run once. The numbers: test_fuzz_steps.py."""

import copy
import pickle
from functools import cache, partial

import pytest
import torch

import oracles
from hf_models import BEFORE_5, CONFIGS, HEADS, NEEDS_TREES_OF_GPT2, VOCAB, build
from liger_rl import FusedLinearGRPOLoss, completion_logps, loss_step, loss_steps, swap_lm_head
from liger_rl.losses import TopEntropyMask
from liger_rl.step import attention, layout, trial
from liger_rl.step.prefix_tree import build_prefix_tree
from step_calls import Calls, assert_as_padded, expected_step, run, sharing, small_llama
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


def batch_of(sequences=SEQUENCES, padding="right", device="cpu") -> dict:
    width = max(len(tokens) for tokens, *_ in sequences) + 2
    ids, attention, mask = (torch.zeros(len(sequences), width, dtype=torch.long) for _ in range(3))
    for row, (tokens, first, _) in enumerate(sequences):
        start = {"left": width - len(tokens), "right": 0, "both": row % 3}[padding]
        ids[row, start : start + len(tokens)] = torch.tensor(tokens)
        attention[row, start : start + len(tokens)] = 1
        mask[row, start + first : start + len(tokens)] = 1
    batch = {"input_ids": ids, "attention_mask": attention, "mask": mask}
    batch["advantages"] = torch.tensor([advantage for *_, advantage in sequences])
    return {name: value.to(device) for name, value in batch.items()}


def assert_in_trees(model, batch: dict, loss=None, **options):
    """-> the steps, which are those of the padded batch."""
    with sharing(True):
        steps = assert_as_padded(model, batch, loss or FusedLinearGRPOLoss("dapo", metrics="basic"), **options)
    assert "in trees of shared prefixes" in steps.layout
    return steps


# --- the same loss, gradients and metrics -----------------------------------------------------------------------------

WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(("name", "tokens"), [("Llama", (126, 357)), ("OPT", (126, 357)), ("Mixtral", (108, 423))])
def test_tokens_that_run(name, tokens):
    """A row without a gradient has a tree of its own; a router loss is of all tokens."""
    for padding in ("left", "right", "both"):
        steps = loss_steps(build(name), batch_of(padding=padding), FusedLinearGRPOLoss("dapo", metrics="basic"))
        assert steps.layout.startswith("{} tokens in trees of shared prefixes, of {}".format(*tokens))


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_every_device(name, device):
    """Of rows of more than a block, in blocks that are whole, partial and empty."""
    options = {"head_dim": 16, "max_position_embeddings": 1024}
    model = build(name, device, **options | ({"sliding_window": 150} if name == "Mistral" else {}))
    long = (NUMBERS * 2)[:330]
    sequences = [(long + NUMBERS[40 * n : 40 * n + 30 + n], 330, n - 1.5) for n in range(4)]
    batch, loss = batch_of(sequences, "left", device=device), FusedLinearGRPOLoss("dapo")
    if device.type == "cpu":
        steps = assert_in_trees(model, batch, loss)
    else:
        total, _, truth, _ = expected_step(model, batch, loss)
        with sharing(True):
            steps, grads = run(model, batch, loss)
        torch.testing.assert_close(steps.total.loss, total, rtol=1e-4, atol=1e-5)
        assert oracles.relative_error(*(oracles.whole(found) for found in (grads, truth))) <= 1e-3
    assert steps.layout.startswith("459 tokens in trees of shared prefixes, of 1,452")


@pytest.mark.parametrize("name", ["Llama", pytest.param("GPT2", marks=NEEDS_TREES_OF_GPT2)])
def test_lora(name):
    peft = pytest.importorskip("peft", reason="the adapters are PEFT's")
    targets = {"Llama": ["q_proj", "v_proj"], "GPT2": ["c_attn"]}[name]
    model = peft.get_peft_model(build(name), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.2)
    assert_in_trees(model.train(), batch_of())


@pytest.mark.filterwarnings("error:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    model = build("Gemma3Text", **WINDOWS).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_in_trees(model, batch_of())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_autocast(attention):
    """It adds no more error than it does in separate rows."""
    model, batch, loss = build("Llama", attention=attention), batch_of(), FusedLinearGRPOLoss("dapo")

    def run_shared(shares):
        with sharing(shares):
            return run(model, batch, loss)[1]

    exact = run_shared(False)
    with torch.autocast("cpu", torch.bfloat16):
        found = [run_shared(shares) for shares in (True, False)]
    error, allowed = (oracles.norm_error(oracles.whole(grads), oracles.whole(exact)) for grads in found)
    assert 0 < error <= 1.5 * allowed


@pytest.mark.parametrize("change", ["int32", "dummy rows"])
@pytest.mark.parametrize("name", ["Llama", "OPT"])
def test_other_batches(name, change):
    batch = batch_of(padding="both")
    if change == "int32":
        batch = {key: value.int() if not value.is_floating_point() else value for key, value in batch.items()}
    else:  # a sampler fills its batch with them
        for column in ("attention_mask", "mask"):
            batch[column][-2:] = 0
        batch["attention_mask"][-1, 3:5] = 1
    assert_in_trees(build(name), batch)


# --- micro-batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metrics", ["loss", "basic"])
@pytest.mark.parametrize(("max_tokens", "number"), [(None, 1), (98, 1), (97, 2), (61, 2), (60, 3), (47, 4)])
def test_no_micro_batch_has_more_tokens_than_allowed(max_tokens, number, metrics):
    """The first prompt's group has 61 tokens, and is split if it has to be; the second one's has 28."""
    model, batch, loss = swap_lm_head(small_llama()), batch_of(), FusedLinearGRPOLoss("dapo", metrics=metrics)
    loss_step(model, batch, loss)  # tries out the model
    calls = Calls(model)
    with sharing(True):
        steps = run(model, batch, loss, max_tokens=max_tokens)[0]
    assert all(shape[0] == 1 and shape[1] <= (max_tokens or 127) for shape, *_ in calls)
    assert len(steps) == number == len([call for call in calls if call[1]])
    assert max_tokens not in (None, 98, 97, 61) or sum(shape[1] for shape, live, _ in calls if live) == 98
    idle = [] if metrics == "loss" else [((1, 28), False, {"position_ids", "attention_mask"})]
    assert [call for call in calls if not call[1]] == idle
    assert_in_trees(model, batch, loss, max_tokens=max_tokens)


def test_the_least_budget_of_a_loss_of_all_sequences():
    model, loss = small_llama(), FusedLinearGRPOLoss("grpo", corrections=[TopEntropyMask(top_entropy_quantile=0.5)])
    loss_step(model, batch_of(), loss)
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
UNTRIED = {"GPTNeo": NEO, "Llama4Text": LLAMA_4}
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
    "windows of columns": (lambda: build("GPTNeo", attention="eager"), "makes an attention mask of its own", None),
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
    with sharing(True):
        assert reason in loss_steps(model, batch, loss).layout
    hook.remove()


def test_a_router_loss_that_is_no_mean_of_tokens():
    model, loss = build("Llama", output_router_logits=True), FusedLinearGRPOLoss("grpo")
    with pytest.raises(ValueError, match="LlamaForCausalLM has a router loss of its own; set output_router_logits=Fal"):
        loss_steps(model, batch_of(), loss)
    # They do not read it.
    logps = (completion_logps(of, batch_of(), loss) for of in (model, build("Llama")))
    torch.testing.assert_close(*logps, rtol=1e-5, atol=1e-5)


def test_the_dropout_of_an_adapter_has_the_same_mean():
    """A shared token draws once, so only the draws of different sequences are no longer independent."""
    options = {"target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False, "r": 4}
    model, loss = tuned(lora_dropout=0.4, **options), FusedLinearGRPOLoss("dapo", metrics="basic")
    draws = {}
    for shares in (True, False):
        torch.manual_seed(5)
        with sharing(shares):
            steps = [loss_step(model, batch_of(), loss) for _ in range(120)]
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


def test_of_a_compilers_error_the_reason_is_the_first_line(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("LoweringException: at least 16\n  target: flex_attention\n  args[0]: ...")

    monkeypatch.setattr(trial, "_try_trees", fail)
    layout = loss_step(build("Llama"), batch_of(), FusedLinearGRPOLoss("dapo")).layout
    assert layout.endswith("the forward of LlamaForCausalLM fails with a tree: LoweringException: at least 16")


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
        torch.testing.assert_close(loss_step(other, batch, loss).loss, expected)


def test_threads():
    model, batch, loss = swap_lm_head(small_llama()), batch_of(), FusedLinearGRPOLoss("dapo")
    call = partial(completion_logps, model, batch, loss)
    with sharing(False):
        expected = call()
    for results in in_threads(call, call, times=2):
        torch.testing.assert_close(results, [expected] * 2)


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
    before = functions["sdpa"]
    monkeypatch.setattr(attention, "make_masks", lambda *args, dense: make_masks(*args, dense=False))
    monkeypatch.setattr(trial, "make_masks", attention.make_masks)
    for module in (layout, trial):
        monkeypatch.setattr(module, "build_prefix_tree", lambda *given: build_prefix_tree(*given[:2], attention.BLOCK))
    monkeypatch.setattr(attention, "_compile_attention", lambda *shape: attention._attend)
    options = {"Gemma3Text": WINDOWS, "Mistral": {"sliding_window": 18}}.get(name, {})
    model, loss = build(name, **options).requires_grad_(False), FusedLinearGRPOLoss("dapo")
    try:
        with sharing(True):
            trees = completion_logps(model, batch_of(), loss)
        assert functions["sdpa"] is not before
    finally:
        attention.restore_attention()
    assert functions["sdpa"] is before
    with sharing(False):
        rows = completion_logps(model, batch_of(), loss)
    torch.testing.assert_close(trees, rows, rtol=1e-5, atol=2e-5)


def test_attention_that_does_not_ask_for_its_function_is_no_place_for_blocks():
    model = build("Falcon")
    find = partial(attention.find_attention_obstacle, model, list(model.modules()), model.config)
    assert find(torch.device("cpu")) is None
    reason = find(torch.device("cuda"))
    assert str(reason) == "attention 'sdpa' cannot run as flex attention, which shared prefixes need"


def test_attention_functions_that_others_set_stay(monkeypatch):
    functions = attention.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setattr(type(functions), "_global_mapping", {**functions._global_mapping})
    monkeypatch.setattr(functions, "_local_mapping", {})
    plain, first, second = functions["sdpa"], lambda *args: "first", lambda *args: "second"
    attention._install_flex_attention("sdpa")
    attention.restore_attention()
    assert functions["sdpa"] is plain
    attention._install_flex_attention("sdpa")
    functions.register("sdpa", first)
    assert functions["sdpa"] is first
    attention._install_flex_attention("sdpa")
    functions["sdpa"] = second
    attention._install_flex_attention("sdpa")
    assert functions["sdpa"](None, None, None, None, None) == "second"
    assert functions["sdpa"] is not second
    attention.restore_attention()
    assert functions["sdpa"] is second
    assert functions._global_mapping["sdpa"] is first


def test_attention_stays_compiled_whatever_a_process_trains(monkeypatch):
    """Dynamo makes at most 8 variants of a code object, here 3. Beyond them scores would be in memory, with no error.

    The CPU has no backward of flex attention, so nothing but dynamo's tracing is that of a GPU.
    """
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(attention.torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(attention, "_compile_attention", cache(attention._compile_attention.__wrapped__))
    everything, values = (True, True, True), (True, False, True)
    kinds = [(True, everything, True), (True, values, True), (False, everything, True), (True, everything, False)]
    for with_graph, trained, autocast, blocks in [(*kind, 2) for kind in kinds] + [(*kinds[0], 3), (*kinds[0], 1)]:
        n = blocks * attention.BLOCK
        mask = attention._make_block_mask(torch.full((n,), n), torch.arange(n), None, torch.device("cpu"))
        columns = [
            torch.randn(1, heads, n, 8, dtype=torch.bfloat16).requires_grad_(requires_grad)
            for heads, requires_grad in zip((2, 1, 1), trained, strict=True)
        ]
        with (
            torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=3),
            torch.set_grad_enabled(with_graph),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            attention._run_flex_attention(*columns, mask, None, None)
