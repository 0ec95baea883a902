"""Steps whose padding and sequences without a gradient leave the model, against full logits of the padded batch."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from test_architectures import image_text_model
from torch import Tensor, nn

import oracles
from devices import NEEDS_GPU
from hf_models import (
    BEFORE_5,
    CONFIGS,
    HEADS,
    HYBRIDS,
    VOCAB,
    assert_same_gradients,
    build,
    transformers,
)
from liger_rl import FusedLinearGRPOLoss, completion_logps, loss_step, loss_steps, swap_lm_head
from liger_rl.losses import PRESETS, TopEntropyMask
from liger_rl.models.swap import is_swapped
from step_calls import (
    BATCH,
    IDLE,
    LENGTH,
    SPANS,
    Calls,
    assert_as_padded,
    expected_step,
    full_step,
    make_batch,
    rows_of,
    run,
    small_llama,
    with_columns,
)

OPTIONS = {
    "dr_grpo": {"max_completion_length": 10},
    "cispo": {"epsilon_high": 2.0},
}


# --- the same loss, gradients and metrics -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset(name, device):
    """With a sequence without advantages, one without completion tokens, and no two of one length."""
    model = small_llama(device)
    loss = FusedLinearGRPOLoss(name, metrics="basic", **OPTIONS.get(name, {}))
    batch = with_columns(model, make_batch(device=device))
    calls = Calls(swap_lm_head(model))
    steps = assert_as_padded(model, batch, loss, max_tokens=20)
    assert len(steps) == 3
    assert len([call for call in calls if not call[1]]) == 1
    assert steps.total.per_token_logps.isfinite().all()
    torch.manual_seed(5)
    step = loss_step(model, batch, loss)
    torch.testing.assert_close(step.loss.detach(), steps.total.loss, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("bnpo", {"beta": 0.1}),
        ("bnpo", {"entropy_coef": 0.05, "metrics": "with_entropy"}),
        ("bnpo", {"corrections": [TopEntropyMask(top_entropy_quantile=0.5)], "entropy_coef": 0.05}),
        ("bnpo", {"metrics": "none"}),
        ("dapo", {"beta": 0.1, "epsilon_high": 0.28, "temperature": 0.7, "metrics": "basic"}),
        ("cispo", {"epsilon_high": 2.0, "chunk_tokens": 7, "chunk_vocab": 50}),
    ],
    ids=["kl", "bonus", "top entropy", "no metrics", "temperature", "chunks"],
)
def test_what_else_a_loss_has(preset, options, device):
    model, loss = build("Gemma2", device, num_hidden_layers=1), FusedLinearGRPOLoss(preset, **options)
    batch = with_columns(model, make_batch("left", device=device), loss.transform.temperature)
    batch["importance_ratio"] = torch.rand(BATCH, 1, device=device) + 0.5
    if loss.terms.scope != "batch":
        assert len(assert_as_padded(model, batch, loss, max_tokens=24)) == 3
    assert len(assert_as_padded(model, batch, loss)) == 1
    step = loss_step(model, batch, loss)
    assert (step.entropy is not None) == loss.terms.needs_entropy


ARCHITECTURES = {
    "Llama": {},
    "GPT2": {},  # learned positions, which are columns
    "OPT": {},  # learned positions, which count the attention mask
    "Mistral": {"sliding_window": 4},
    "Gemma3Text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "Mixtral": {},  # a router loss
    "FalconH1": {},  # a state
}


@pytest.mark.parametrize("padding", SPANS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_padding(name, padding):
    model, loss = build(name, **ARCHITECTURES[name]), FusedLinearGRPOLoss("gspo")
    budget = None if name == "Mixtral" else 20
    for positions in (True, False):
        batch = with_columns(model, make_batch(padding, positions=positions))
        steps = assert_as_padded(model, batch, loss, max_tokens=budget)
        assert (len(steps) > 1) == (budget is not None)
    assert_as_padded(model, batch, loss)


@pytest.mark.parametrize("padding", SPANS)
@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_of_a_state_run_without_padding(name, padding):
    model, loss = build(name), FusedLinearGRPOLoss("gspo")
    budget = None if "Next" in name else 20  # a router loss
    steps = assert_as_padded(model, with_columns(model, make_batch(padding)), loss, max_tokens=budget)
    count = {"right": 40, "left": 46, "both": 31}[padding]
    assert budget is None or steps.layout.startswith(f"{count} tokens in padded rows; no prefix is shared")
    for option in ("share_prefixes", "packing"):
        with pytest.raises(ValueError, match=f"{option} must not be True here"):
            loss_steps(model, make_batch(padding), loss, **{option: True})


@pytest.mark.parametrize("padding", SPANS)
def test_a_state_that_feels_padding_keeps_it(padding):
    model, loss = build("RecurrentGemma", attention="eager"), FusedLinearGRPOLoss("gspo")
    batch = with_columns(model, make_batch(padding))
    if BEFORE_5:  # without a cache it keeps the state of the rows before
        with pytest.raises(ValueError, match="RecurrentGemmaForCausalLM cannot be swapped: its forward failed on two"):
            loss_steps(model, batch, loss)
        return
    assert_as_padded(model, batch, loss)


@pytest.mark.parametrize("padding", SPANS)
@pytest.mark.parametrize("name", ["Llava", "SmolVLM", "Gemma3", "Qwen2_5_VL", "Qwen3VL", "Qwen3_5"])
def test_text_alone_in_models_of_images(name, padding):
    """Prefixes too, and columns of types that are 0."""
    model, loss = image_text_model(name, "sdpa"), FusedLinearGRPOLoss("gspo")
    batch = with_columns(model, make_batch(padding))
    batch |= {"token_type_ids": torch.zeros_like(batch["input_ids"])} if name == "Gemma3" else {}
    steps = assert_as_padded(model, batch, loss, max_tokens=20)
    assert len(steps) > 1
    count = {"right": 40, "left": 46, "both": 31}[padding]
    assert steps.layout.startswith(f"{count} tokens in padded rows; no prefix is shared")
    if name != "Qwen3_5":  # which has layers of a state
        assert "in trees" in assert_as_padded(model, batch, loss, share_prefixes=True).layout


def test_tokens_of_an_image_stay_as_they_are():
    model, batch = image_text_model("Gemma3", "sdpa"), make_batch()
    batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    batch["token_type_ids"][0, 2:4] = 1
    step = loss_step(model, batch, FusedLinearGRPOLoss("grpo"))
    assert step.layout == "the batch as it is: it has tokens of an image"
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    output = model(**inputs, labels=batch["input_ids"].where(batch["mask"].bool(), -100), fused=True)
    torch.testing.assert_close(step.per_token_logps, output.per_token_logps.detach())


LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [6.0] * 4,
    "original_max_position_embeddings": 16,
}  # fmt: skip
SCALED_QUERIES = {"attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 0.3, "no_rope_layers": [1, 0]}
LLAMA_4 = {**HEADS, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 4, **SCALED_QUERIES}


def advantages_of_tokens(batch):
    batch["advantages"] = torch.randn(BATCH, LENGTH) * (torch.arange(BATCH) != IDLE)[:, None]
    batch["importance_ratio"] = torch.rand(BATCH, 1) + 0.5


def columns_that_follow_on(batch):
    """Row 1 begins at the column after row 0's last. By columns they would be one sequence."""
    batch |= rows_of(batch, slice(2))
    column = torch.arange(LENGTH)
    attended = torch.stack([column < 6, column >= 6])
    batch |= {"attention_mask": attended.long(), "mask": attended & (column % 6 > 1)}


def a_hole_in_the_mask(batch):
    batch["attention_mask"][0, 3:5] = 0


def a_gap_in_the_positions(batch):
    """Without a mask they would be those of packed sequences."""
    batch["position_ids"][:, 4:] += 2


def shorter_completions(batch):
    batch["mask"][0, 11:] = False


@dataclass(frozen=True)
class Step:
    model: str
    model_options: dict = field(default_factory=dict)
    batch: dict = field(default_factory=dict)
    change: Callable[[dict], None] | None = None
    options: dict = field(default_factory=dict)
    preset: str = "gspo"
    call: tuple | None = None  # of the last forward with a graph: shape, and names of tensors beside the ids


STEPS = {
    # A row's padding counts on from its last position, which may be the last that the model has.
    "a short table": Step("GPT2", {"n_positions": LENGTH}, {"padding": "left"}),
    "a short table, packed": Step(
        "GPT2", {"n_positions": LENGTH}, {"padding": "left", "positions": True}, options={"packing": True}
    ),
    # A row that begins late and is padded on its right would count on, past the last position of the short factors.
    "two sets of factors": Step("Phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 16}),
    "queries scaled by their columns": Step("Llama4Text", {"attention": "eager"}, options={"max_tokens": 24}),
    # HunYuan scales queries and keys, entry by entry, after their rotary embedding.
    "scales behind the rotation": Step("HunYuanDenseV1", {}, {"positions": True}, options={"packing": True}),
    # Then only what follows the completions leaves.
    "without a mask": Step(
        "GPT2", {}, {"padding": "right", "mask": False}, shorter_completions, preset="dapo", call=((4, 11), set())
    ),
    # What is no run of tokens stays.
    "a hole in the mask": Step("Llama", {}, {}, a_hole_in_the_mask, call=((4, 13), {"attention_mask", "position_ids"})),
    "a gap in the positions": Step(
        "Llama", {}, {"positions": True}, a_gap_in_the_positions, call=((4, 13), {"attention_mask", "position_ids"})
    ),
    "advantages of tokens": Step("Llama", {}, {}, advantages_of_tokens, {"max_tokens": 20}, "dapo"),
    "advantages of tokens, GMPO": Step("Llama", {}, {}, advantages_of_tokens, {"max_tokens": 20}, "gmpo"),
    "micro-batches of rows as they are": Step(
        "Llama",
        options={"max_tokens": 2 * LENGTH, "trim": False},
        call=((2, LENGTH), {"attention_mask", "position_ids"}),
    ),
    "packed columns that follow on": Step("Llama", {}, {}, columns_that_follow_on, {"packing": True}),
}  # fmt: skip


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_other_batches(step, monkeypatch):
    monkeypatch.setitem(CONFIGS, "Llama4Text", LLAMA_4)
    monkeypatch.setitem(CONFIGS, "HunYuanDenseV1", HEADS)
    model, loss = build(step.model, **step.model_options), FusedLinearGRPOLoss(step.preset, metrics="basic")
    batch = make_batch(**step.batch)
    if step.change is not None:
        step.change(batch)
    calls = Calls(swap_lm_head(model))
    assert_as_padded(model, with_columns(model, batch), loss, **step.options)
    if step.call is not None:
        assert [(shape, names) for shape, has_graph, names in calls if has_graph][-1] == step.call
    if step.change in (a_hole_in_the_mask, a_gap_in_the_positions):
        with pytest.raises(
            ValueError, match="packing must not be True here: row 0 of input_ids has padding between tokens"
        ):
            loss_step(model, batch, loss, packing=True)


BERT = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
OF_BOTH_SIDES = {
    "Bert": BERT,
    "BigBird": BERT,
    "CpmAnt": {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 48},
    "Doge": HEADS,
    "Llama": {**CONFIGS["Llama"], "is_causal": False},
    "MegatronBert": BERT,
    "RemBert": {**BERT, "input_embedding_size": 32, "output_embedding_size": 32},
    "RoFormer": {**BERT, "embedding_size": 32},
    "XLM": {"vocab_size": VOCAB, "n_words": VOCAB, "emb_dim": 32, "n_layers": 1, "n_heads": 4, "pad_token_id": 0},
    "XLNet": {"vocab_size": VOCAB, "d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 48},
}

CAUSAL_IN_SOME = {"Doge": "transformers 5.23"} | (
    {"Llama": "transformers 4.57, whatever is_causal is"} if BEFORE_5 else {}
)


@pytest.mark.parametrize("name", OF_BOTH_SIDES)
def test_models_that_are_not_causal_are_refused(name):
    """Transformers loads these for causal language modelling. A last token changes what they say of those before it."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**OF_BOTH_SIDES[name])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, VOCAB - 1, (1, 9))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "advantages": torch.ones(1)}
    batch["mask"] = (torch.arange(9) > 2) & (torch.arange(9) < 8)[None]
    others = torch.cat([ids[:, :-1], ids[:, -1:] + 1], 1)
    with torch.no_grad():
        before, after = (model(row, attention_mask=batch["attention_mask"]).logits[:, :-1] for row in (ids, others))
    if name in CAUSAL_IN_SOME and torch.allclose(before, after, atol=1e-6):
        pytest.skip(f"{name} is causal in {CAUSAL_IN_SOME[name]}")
    assert not torch.allclose(before, after, atol=1e-6)
    with pytest.raises(ValueError, match=f"must be a causal LM; a token of this {type(model).__name__} changes"):
        swap_lm_head(model)
    assert not is_swapped(model)


def test_a_completion_at_the_start_of_its_row():
    """Its first token is predicted by padding, which stays, whatever a model makes of it. All others are the same."""
    model, loss = build("Llama"), FusedLinearGRPOLoss("grpo", beta=0.1)
    batch = with_columns(model, make_batch("left"))
    batch["mask"][3] = batch["attention_mask"][3].bool()
    expected = torch.where(batch["mask"], full_step(model, batch)[0], 0.0)
    calls = Calls(swap_lm_head(model))
    logps = loss_step(model, batch, loss).per_token_logps
    assert calls[0] == ((5, 13), True, {"attention_mask", "position_ids"})
    assert logps[3, 3] != 0.0
    logps[3, 3] = expected[3, 3]
    torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)


def test_completion_logps_are_those_of_the_padded_batch():
    """And the old ones of a step of the same policy."""
    model, loss, batch = build("Llama"), FusedLinearGRPOLoss("grpo", temperature=0.7, beta=0.1), make_batch()
    expected = torch.where(batch["mask"], full_step(model, batch, 0.7)[0], 0.0)
    calls = Calls(swap_lm_head(model))
    for options in ({"max_tokens": 20}, {"packing": True}, {}):
        logps = completion_logps(model, batch, loss, **options)
        torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)
        assert not logps.requires_grad
    assert [shape for shape, *_ in calls[:4]] == [(1, 13), (1, 11), (2, 7), (1, 4)]
    assert calls[-1][0] == (5, 13)
    assert not any("attention_mask" in names for _, _, names in calls)
    step = loss_step(model, {**batch, "old_per_token_logps": logps, "ref_per_token_logps": logps}, loss)
    assert torch.equal(step.per_token_logps, logps)
    assert step.metrics["kl_ref"].item() == 0.0


# --- what the model is given ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("idle", "preset", "options", "expected"),
    [
        ("forward", "grpo", {}, [((4, 13), True), ((1, 11), False)]),
        ("skip", "gspo", {"metrics": "basic"}, [((4, 13), True), ((1, 11), False)]),
        ("skip", "gspo", {}, [((4, 13), True)]),
        ("skip", "grpo", {}, [((4, 13), True)]),
        ("backward", "grpo", {}, [((6, 13), True)]),
        ("skip", "grpo", {"entropy_coef": 0.1}, [((5, 13), True)]),
    ],
)
def test_sequences_without_a_gradient_are_skipped_or_run_without_a_graph(idle, preset, options, expected):
    model, batch = swap_lm_head(small_llama()), make_batch("both")
    calls = Calls(model)
    unknown = loss_step(model, batch, FusedLinearGRPOLoss(preset, **options), idle=idle).per_token_logps.isnan()
    assert [call[:2] for call in calls] == expected
    assert all(names == {"position_ids"} for *_, names in calls)
    skipped = expected == [((4, 13), True)]
    assert torch.equal(unknown, batch["mask"] & (torch.arange(BATCH) == IDLE)[:, None] & skipped)
    calls.clear()
    loss_step(model, batch, FusedLinearGRPOLoss("grpo"), trim=False, idle="backward")
    assert calls == [((6, 13), True, {"attention_mask"})]


@pytest.mark.parametrize(("live_rows", "expected"), [(1, [(4, False), (1, True)]), (4, [(4, True), (1, False)])])
def test_the_part_with_more_tokens_runs_first(live_rows, expected):
    """Then the host launches the other part while a GPU runs the first. The last row has no completion."""
    model = swap_lm_head(small_llama())
    batch = make_batch("both") | {"advantages": (torch.arange(BATCH) < live_rows).float()}
    calls = Calls(model)
    loss_step(model, batch, FusedLinearGRPOLoss("grpo"), idle="forward")
    assert [(rows, has_graph) for (rows, _), has_graph, _ in calls] == expected


def test_a_run_that_is_repeated_covers_what_runs_behind_it(monkeypatch):
    """As after an error of memory: sequences without a gradient run while the others' activations are kept."""
    model, batch = swap_lm_head(small_llama()), make_batch("both")
    expected = loss_step(model, batch, FusedLinearGRPOLoss("grpo"), idle="forward")
    calls = Calls(model)
    twice = lambda model, forward, tokens, **_: (forward(), forward(), None)[1:]  # noqa: E731
    monkeypatch.setattr("liger_rl.step.loss_step.run_with_kept_layers", twice)
    step = loss_step(model, batch, FusedLinearGRPOLoss("grpo"), idle="forward")
    assert [has_graph for _, has_graph, _ in calls] == [True, False] * 2
    assert torch.equal(step.loss, expected.loss)


@pytest.mark.parametrize("preset", ["grpo", "gspo", "dapo", "cispo"])
def test_log_probabilities_of_an_earlier_step_may_be_given_back(preset):
    """Those of a sequence that did not run are NaN, and it does not run again."""
    model, loss, batch = swap_lm_head(small_llama()), FusedLinearGRPOLoss(preset), make_batch("both")
    first = loss_step(model, batch, loss)
    assert first.per_token_logps.isnan().any()
    again = loss_step(model, batch | {"old_per_token_logps": first.per_token_logps}, loss)
    torch.testing.assert_close(again.loss, first.loss, rtol=1e-5, atol=1e-6)
    assert all(metric.value.isfinite() for metric in again.metrics.values())


@pytest.mark.parametrize("counted", [True, False])
def test_a_batch_without_a_gradient_has_a_loss_to_call_backward_on(counted):
    model, batch = small_llama(), make_batch() | {"advantages": torch.zeros(BATCH)}
    batch["mask"] = batch["mask"] & counted
    calls = Calls(swap_lm_head(model))
    step = loss_step(model, batch, FusedLinearGRPOLoss("grpo"))
    step.loss.backward()
    assert [call[0][0] for call in calls] == [1]
    assert step.loss.item() == 0.0
    assert all(not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("changed", ["token types", "4d"])
def test_a_batch_stays_where_an_input_says_what_nobody_knows(changed):
    model, batch = swap_lm_head(build("GPT2")), make_batch()
    loss = FusedLinearGRPOLoss("grpo")
    if changed == "4d":
        allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & batch["attention_mask"].bool()[:, None, None]
        batch["attention_mask"] = allowed | torch.eye(LENGTH, dtype=torch.bool)
    elif changed == "token types":
        batch["token_type_ids"] = (torch.arange(LENGTH) == 2).long().expand(BATCH, -1)
    calls = Calls(model)
    loss_step(model, batch, loss).loss.backward()
    assert calls[0][0] == (BATCH, LENGTH)
    message = f"max_tokens must be None or at least B T = {BATCH * LENGTH} for a batch"
    with pytest.raises(ValueError, match=message):
        loss_steps(model, batch, loss, max_tokens=LENGTH)


def test_a_rotary_embedding_that_looks_at_the_longest_row():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model, batch = swap_lm_head(build("Llama", max_position_embeddings=8, rope_parameters=rope)), make_batch()
    loss, calls = FusedLinearGRPOLoss("grpo"), Calls(model)
    loss_step(model, batch, loss)
    loss_step(model, rows_of(batch, slice(None)) | {n: v[:, :8] for n, v in tables_of(batch).items()}, loss)
    assert [call[0] for call in calls] == [(BATCH, LENGTH), (4, 8)]
    calls.clear()
    with pytest.raises(ValueError, match="packing must not be True here: the rotary embedding depends on the"):
        loss_step(model, batch, loss, packing=True)
    assert not calls


def tables_of(batch: dict) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim() == 2}


# --- packed rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "GPT2", "Mistral", "GraniteMoe"])
def test_packed_rows(name):
    model, loss = build(name, **ARCHITECTURES.get(name, {})), FusedLinearGRPOLoss("gspo", metrics="basic")
    batch = with_columns(model, make_batch("both", positions=name == "GPT2"))
    if name == "GraniteMoe" and BEFORE_5:  # its mask is causal alone
        with pytest.raises(ValueError, match="packing must not be True here: GraniteMoeForCausalLM lets a sequence"):
            loss_steps(model, batch, loss, packing=True)
        return
    assert_as_padded(model, batch, loss, packing=True)
    if name != "Mixtral":
        calls = Calls(model)
        steps = assert_as_padded(model, batch, loss, packing=True, max_tokens=20)
        assert [call[0] for call in calls if call[1] and call[0][0] == 1] == [(1, 20), (1, 10)]
        assert len(steps) == 2


@NEEDS_GPU  # flex attention has no backward on CPU
def test_flex_attention_gets_packed_rows():
    wide = {"head_dim": 16}  # the least that it takes
    model, loss = build("Llama", "cuda", **wide), FusedLinearGRPOLoss("gspo")
    batch = with_columns(model, make_batch("both", device="cuda"))
    total, _, expected, _ = expected_step(model, batch, loss)
    model = build("Llama", "cuda", attention="flex_attention", **wide)
    calls = Calls(swap_lm_head(model))
    steps, grads = run(model, batch, loss, packing=True)
    torch.testing.assert_close(steps.total.loss, total, rtol=1e-4, atol=1e-5)
    assert oracles.relative_error(*(oracles.whole(found) for found in (grads, expected))) <= 1e-3
    assert calls[-1][0] == (1, 30)


def varlen_attention(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, **kwargs):
    """What flash attention computes of the ends of sequences, (1, heads, n, width) -> (1, n, heads, width)."""
    assert attention_mask is None
    if cu_seq_lens_q is None:  # the trial's rows that are not packed
        cu_seq_lens_q = torch.tensor([0, query.shape[2]])
    else:
        assert kwargs["max_length_q"] == cu_seq_lens_q.diff().max()
    repeats = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(repeats, 1) for states in (key, value))
    sizes = cu_seq_lens_q.diff().tolist()
    sequences = zip(*(states.split(sizes, 2) for states in (query, key, value)), strict=True)
    attend = nn.functional.scaled_dot_product_attention
    return torch.cat([attend(*qkv, is_causal=True, scale=scaling) for qkv in sequences], 2).transpose(1, 2), None


def blind_attention(*args, cu_seq_lens_q=None, max_length_q=None, **kwargs):
    return varlen_attention(*args, **kwargs)


def test_flash_attention_gets_packed_rows_by_itself(monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, loss = build("Llama"), FusedLinearGRPOLoss("gspo")
    batch = with_columns(model, make_batch("both"))
    total, _, expected, _ = expected_step(model, batch, loss)
    tried = copy.deepcopy(swap_lm_head(model))
    for flash in (model, tried):
        flash.config._attn_implementation = "flash_attention_2"
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", varlen_attention)
    calls = Calls(model)
    steps, grads = run(model, batch, loss)
    torch.testing.assert_close(steps.total.loss, total, rtol=1e-5, atol=1e-6)
    assert_same_gradients(grads, expected)
    assert calls[-1] == ((1, 30), True, {"position_ids", "cu_seq_lens_q", "cu_seq_lens_k"})
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", blind_attention)
    assert_same_gradients(run(tried, batch, loss)[1], expected)  # by its trial such a model keeps its rows apart
    with pytest.raises(ValueError, match="packing must not be True here: LlamaForCausalLM lets a sequence see"):
        loss_step(tried, batch, loss, packing=True)


# --- bad input --------------------------------------------------------------------------------------------------------


def refused(model, batch, loss, message, error=ValueError, **options):
    hook = swap_lm_head(model).base_model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(error, match=message):
        loss_steps(model, batch, loss, **options)
    hook.remove()


QUANTILE = {"corrections": [TopEntropyMask(top_entropy_quantile=0.5)]}
TOGETHER = "max_tokens must be None or at least {} here, got {}: "
BAD_OPTIONS = {
    "a long sequence": ("Llama", "grpo", {"max_tokens": 12}, r"max_tokens must be at least 13, the longest"),
    "no tokens": ("Llama", "grpo", {"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    "words": ("Llama", "grpo", {"max_tokens": "all"}, "max_tokens must be an int or None, got str"),
    "quantile": ("Llama", "quantile", {"max_tokens": 64}, TOGETHER.format(65, 64)),
    "router": ("Mixtral", "grpo", {"max_tokens": 77}, TOGETHER.format(78, 77) + "the router's loss is of all tokens"),
    "idle": ("Llama", "grpo", {"idle": "run"}, r"idle must be one of \['skip', 'forward', 'backward'\], got 'run'"),
    "trim": ("Llama", "grpo", {"trim": 1}, "trim must be of type bool"),
    "packing": ("Llama", "grpo", {"packing": "yes"}, "packing must be of type bool"),
}


@pytest.mark.parametrize(("name", "preset", "options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options(name, preset, options, message):
    loss = FusedLinearGRPOLoss("grpo", **QUANTILE) if preset == "quantile" else FusedLinearGRPOLoss(preset)
    refused(build(name, num_hidden_layers=1), make_batch(), loss, message, (TypeError, ValueError), **options)


def test_the_least_budget_and_the_total_before_the_last_step():
    model, batch = small_llama(), make_batch()
    assert loss_steps(model, batch, FusedLinearGRPOLoss("grpo", **QUANTILE), max_tokens=65)
    steps = loss_steps(model, batch, FusedLinearGRPOLoss("grpo"), max_tokens=20)
    next(steps)
    with pytest.raises(RuntimeError, match="total is known after all 3 steps, 1 were taken"):
        _ = steps.total


@pytest.mark.parametrize(
    ("name", "message", "how"),
    [
        ("Lfm2", "Lfm2ForCausalLM has layers of type conv", ""),
        ("Llama", "trim=False keeps rows as they are", "untrimmed"),
        ("Llama", "row 0 of input_ids has padding between tokens", "holes"),
        ("GPT2", "row 1 of input_ids has padding between tokens", ""),
    ],
)
def test_packing_that_cannot_be(name, message, how):
    batch, loss = make_batch(), FusedLinearGRPOLoss("grpo")
    model = swap_lm_head(build(name, num_hidden_layers=1) if name == "Llama" else build(name))
    if how == "holes":
        batch["attention_mask"][0, 3] = 0
    if how != "untrimmed" and name != "Lfm2":
        loss_step(model, make_batch("right"), loss, packing=True)  # tries out the model
    trim = {"trim": False} if how == "untrimmed" else {}
    refused(model, batch, loss, f"packing must not be True here: {message}", packing=True, **trim)


@pytest.mark.parametrize("position_gain", [1, 50])
@torch.no_grad()
def test_attention_that_sees_other_sequences_is_found_before_the_batch_runs(position_gain):
    """Under learned positions that change more, too."""
    model = swap_lm_head(build("OPT"))
    model.model.decoder.embed_positions.weight.mul_(position_gain)
    calls = Calls(model)
    with pytest.raises(ValueError, match="OPTForCausalLM lets a sequence see another one of its row"):
        loss_step(model, make_batch(positions=True), FusedLinearGRPOLoss("grpo"), packing=True)
    assert all(shape[0] == 1 and shape[1] <= 32 for shape, *_ in calls)
