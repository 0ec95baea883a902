"""Steps whose padding and sequences without a gradient leave the model. The numbers: test_fuzz_steps.py."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, MethodType

import pytest
import torch
from test_architectures import image_text_model
from torch import Tensor

from hf_models import BEFORE_5, CONFIGS, HEADS, HYBRIDS, VOCAB, build, transformers
from liger_rl import FusedLinearGRPOLoss, completion_logps, loss_step, loss_steps, swap_lm_head
from liger_rl.losses import TopEntropyMask
from liger_rl.models.randomness import without_randomness
from liger_rl.models.swap import is_swapped
from liger_rl.step import facts
from step_calls import (
    BATCH,
    IDLE,
    LENGTH,
    Calls,
    assert_as_padded,
    expected_step,
    full_step,
    make_batch,
    rows_of,
    sharing,
    small_llama,
    with_columns,
)

BASIC = {"metrics": "basic"}  # which read sequences without a gradient
QUANTILE = {"corrections": [TopEntropyMask(top_entropy_quantile=0.5)]}

# --- the same loss, gradients and metrics -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("gspo", BASIC),
        ("dapo", {"beta": 0.1, "temperature": 0.7, **BASIC}),
        ("bnpo", QUANTILE | {"entropy_coef": 0.05}),
    ],
    ids=["gspo", "kl", "top entropy"],
)
def test_micro_batches(preset, options, device):
    """With a sequence without advantages, one without completion tokens, and no two of one length."""
    model, loss = build("Gemma2", device, num_hidden_layers=1), FusedLinearGRPOLoss(preset, **options)
    batch = with_columns(model, make_batch("both", device=device), loss.transform.temperature)
    if loss.terms.kl.beta == 0:
        del batch["ref_per_token_logps"]
    step = assert_as_padded(model, batch, loss).total
    assert step.per_token_logps.isfinite().all()
    assert (step.entropy is not None) == loss.terms.needs_entropy
    if "corrections" not in options:
        calls = Calls(model)
        assert len(assert_as_padded(model, batch, loss, max_tokens=20)) == (3 if preset == "gspo" else 4)
        assert len([call for call in calls if not call[1]]) == (preset == "gspo")


@pytest.mark.parametrize(
    "name", [*(name for name in HYBRIDS if name != "Qwen3Next"), "Llava", "Gemma3", "Qwen3VL", "Qwen3_5"]
)
def test_padding_leaves_layers_of_a_state_and_models_of_images(name):
    model = build(name) if name in HYBRIDS else image_text_model(name, "sdpa")
    for padding, count in {"right": 40, "left": 46, "both": 31}.items():
        batch = make_batch(padding)
        if name == "Gemma3":
            batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
        with sharing(False):
            layout = loss_steps(model, batch, FusedLinearGRPOLoss("gspo"), max_tokens=20).layout
        assert layout.startswith(f"{count} tokens in padded rows; no prefix is shared")


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
    trees: bool = False
    call: tuple | None = None  # of the last forward with a graph: shape, and names of tensors beside the ids


STEPS = {
    # A row's padding counts on from its last position, which may be the last that the model has.
    "a short table": Step("GPT2", {"n_positions": LENGTH}, {"padding": "left"}),
    # A row that begins late and is padded on its right would count on, past the last position of the short factors.
    "two sets of factors": Step("Phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 16}),
    "queries scaled by their columns": Step("Llama4Text", {"attention": "eager"}, options={"max_tokens": 24}),
    # HunYuan scales queries and keys, entry by entry, after their rotary embedding.
    "scales behind the rotation": Step("HunYuanDenseV1", {}, {"positions": True}, trees=True),
    # Then only what follows the completions leaves.
    "without a mask": Step(
        "GPT2", {}, {"padding": "right", "mask": False}, shorter_completions, call=((4, 11), set())
    ),
    # What is no run of tokens stays.
    "a hole in the mask": Step("Llama", {}, {}, a_hole_in_the_mask, call=((4, 13), {"attention_mask", "position_ids"})),
    "a gap in the positions": Step(
        "Llama", {}, {"positions": True}, a_gap_in_the_positions, call=((4, 13), {"attention_mask", "position_ids"})
    ),
    "columns that follow on": Step("Llama", {}, {}, columns_that_follow_on, trees=True),
}  # fmt: skip


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_other_batches(step, monkeypatch):
    monkeypatch.setitem(CONFIGS, "Llama4Text", LLAMA_4)
    monkeypatch.setitem(CONFIGS, "HunYuanDenseV1", HEADS)
    model, loss = build(step.model, **step.model_options), FusedLinearGRPOLoss("gspo", **BASIC)
    batch = make_batch(**step.batch)
    if step.change is not None:
        step.change(batch)
    calls, batch = Calls(swap_lm_head(model)), with_columns(model, batch)
    del batch["ref_per_token_logps"]
    with sharing(step.trees):
        layout = assert_as_padded(model, batch, loss, **step.options).layout
    assert ("in trees" in layout) == step.trees
    if step.call is not None:
        assert [(shape, names) for shape, has_graph, names in calls if has_graph][-1] == step.call
    if step.change in (a_hole_in_the_mask, a_gap_in_the_positions):
        assert "no prefix is shared: row 0 of input_ids has padding between tokens" in layout


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
    others = torch.cat([ids[:, :-1], ids[:, -1:] + 1], 1)
    with torch.no_grad():
        before, after = (model(row, attention_mask=torch.ones_like(ids)).logits[:, :-1] for row in (ids, others))
    if name in CAUSAL_IN_SOME and torch.allclose(before, after, atol=1e-6):
        pytest.skip(f"{name} is causal in {CAUSAL_IN_SOME[name]}")
    assert not torch.allclose(before, after, atol=1e-6)
    # The heads of BERT and its kin have a layer of their own before the last one.
    kind = type(model).__name__
    message = f"must be a causal LM; a token of this {kind} changes|the head of {kind} gets other hidden states"
    with pytest.raises(ValueError, match=message):
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
    for shares, options in ((False, {"max_tokens": 20}), (True, {}), (False, {})):
        with sharing(shares):
            logps = completion_logps(model, batch, loss, **options)
        torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)
        assert not logps.requires_grad
    assert [shape for shape, *_ in calls[:4]] == [(1, 13), (1, 11), (2, 7), (1, 4)]
    assert calls[-1][0] == (5, 13)
    assert not any("attention_mask" in names for _, _, names in (*calls[:4], calls[-1]))
    step = loss_step(model, {**batch, "old_per_token_logps": logps, "ref_per_token_logps": logps}, loss)
    assert torch.equal(step.per_token_logps, logps)
    assert step.metrics["kl_ref"].item() == 0.0


# --- what the model is given ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "options", "expected"),
    [
        ("gspo", BASIC, [((4, 13), True), ((1, 11), False)]),
        ("gspo", {}, [((4, 13), True)]),
        ("grpo", {}, [((4, 13), True)]),
        ("grpo", {"entropy_coef": 0.1}, [((5, 13), True)]),
    ],
)
def test_sequences_without_a_gradient_are_skipped_or_run_without_a_graph(preset, options, expected):
    model, batch = swap_lm_head(small_llama()), make_batch("both")
    calls = Calls(model)
    unknown = loss_step(model, batch, FusedLinearGRPOLoss(preset, **options)).per_token_logps.isnan()
    assert [call[:2] for call in calls] == expected
    assert all(names == {"position_ids"} for *_, names in calls)
    skipped = expected == [((4, 13), True)]
    assert torch.equal(unknown, batch["mask"] & (torch.arange(BATCH) == IDLE)[:, None] & skipped)


@pytest.mark.parametrize(("spare", "expected"), [(0, [((5, 13), True)]), (-1, [((4, 13), True), ((1, 11), False)])])
def test_where_the_host_is_slower_sequences_without_a_gradient_run_with_the_others(spare, expected, monkeypatch):
    model, batch = swap_lm_head(small_llama()), make_batch("both")
    tokens = int(batch["attention_mask"][batch["mask"].any(1)].sum())
    monkeypatch.setattr(facts, "_count_host_tokens", lambda *_: tokens + spare)
    calls = Calls(model)
    assert_as_padded(model, batch, FusedLinearGRPOLoss("gspo", **BASIC))
    assert [call[:2] for call in calls[1:]] == expected
    del calls[:]
    for step in loss_steps(model, batch, FusedLinearGRPOLoss("gspo", **BASIC), max_tokens=5 * 13 - 1):
        step.loss.backward()
    assert [call[:2] for call in calls] == [((4, 13), True), ((1, 11), False)]  # one row of 5 would be too many tokens


def test_tokens_up_to_which_the_host_is_slower(monkeypatch):
    """A weight that is trained has half as many again, so half of them are two thirds as many tokens."""
    model, device, capability = small_llama(), torch.device("cuda"), [9]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability[0], 0))

    def count_tokens(device=device):
        return facts._count_host_tokens(model, list(model.modules()), device)

    trained = count_tokens()
    layers = [weight for name, weight in model.named_parameters() if weight.dim() > 1 and "layers" in name]
    flop = 6 * sum(weight.numel() for weight in layers)
    assert trained == pytest.approx(facts.HOST_FLOP / 2 * len(layers) / flop)
    assert count_tokens(torch.device("cpu")) == 0
    capability[0] = 8
    assert count_tokens() == 0
    capability[0] = 9
    model.model.norm.forward = FunctionType((lambda self, hidden: hidden).__code__, {})  # of no module
    assert count_tokens() == trained
    norm = FunctionType((lambda self, hidden: hidden).__code__, {"__name__": "liger_kernel.transformers.rms_norm"})
    model.model.norm.forward = MethodType(norm, model.model.norm)
    assert count_tokens() == 2 * trained
    assert model.requires_grad_(False) is model
    assert count_tokens() == pytest.approx(3 * trained)
    layers[0].requires_grad_(True)  # as an adapter is
    flop += 2 * layers[0].numel() - 2 * sum(weight.numel() for weight in layers)
    assert count_tokens() == pytest.approx(facts.HOST_FLOP * (len(layers) - 0.75) / flop)
    packed = torch.zeros(8, 8, dtype=torch.uint8)
    model.model.layers[0].self_attn.q_proj.weight = torch.nn.Parameter(packed, requires_grad=False)
    assert count_tokens() == 0


@pytest.mark.parametrize(("live_rows", "expected"), [(1, [(4, False), (1, True)]), (4, [(4, True), (1, False)])])
def test_the_part_with_more_tokens_runs_first(live_rows, expected):
    """Then the host launches the other part while a GPU runs the first. The last row has no completion."""
    model = swap_lm_head(small_llama())
    batch = make_batch("both") | {"advantages": (torch.arange(BATCH) < live_rows).float()}
    calls = Calls(model)
    loss_step(model, batch, FusedLinearGRPOLoss("grpo", **BASIC))
    assert [(rows, has_graph) for (rows, _), has_graph, _ in calls] == expected


def test_a_run_that_is_repeated_covers_what_runs_behind_it(monkeypatch):
    """As after an error of memory: sequences without a gradient run while the others' activations are kept."""
    model, batch = swap_lm_head(small_llama()), make_batch("both")
    loss = FusedLinearGRPOLoss("grpo", **BASIC)
    expected = loss_step(model, batch, loss)
    calls = Calls(model)
    twice = lambda model, forward, tokens, **_: (forward(), forward(), None)[1:]  # noqa: E731
    monkeypatch.setattr("liger_rl.step.loss_step.run_with_kept_layers", twice)
    step = loss_step(model, batch, loss)
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
    reason = "the batch as it is: the rotary embedding depends on the longest row of the batch"
    assert loss_step(model, batch, loss).layout.startswith(reason)
    loss_step(model, rows_of(batch, slice(None)) | {n: v[:, :7] for n, v in tables_of(batch).items()}, loss)
    assert [call[0] for call in calls] == [(BATCH, LENGTH), (4, 7)]


def test_positions_beyond_the_row_reach_a_dynamic_rotary_embedding():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    name = "rope_scaling" if BEFORE_5 else "rope_parameters"
    model, loss = (
        build("Llama", max_position_embeddings=LENGTH + 9, **{name: rope}).train(),
        FusedLinearGRPOLoss("grpo"),
    )
    batch = make_batch()
    places = torch.arange(LENGTH).expand(BATCH, LENGTH) + 20 * (torch.arange(BATCH) == BATCH - 1)[:, None]
    batch["position_ids"] = places
    expected = expected_step(model, batch, loss)
    assert_as_padded(swap_lm_head(model), batch, loss, expected)


@pytest.mark.parametrize("width", [LENGTH - 1, LENGTH])
def test_a_rotary_embedding_that_keeps_what_a_longer_row_made_of_it(width):
    """Until a row is shorter than the model's positions."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    name = "rope_scaling" if BEFORE_5 else "rope_parameters"
    model = swap_lm_head(build("Llama", max_position_embeddings=LENGTH, **{name: rope}).train())
    batch, loss = make_batch("left"), FusedLinearGRPOLoss("grpo")
    batch |= {name: x[:, LENGTH - width :] for name, x in tables_of(batch).items()}
    longer = torch.ones(1, LENGTH + 9, dtype=torch.long)
    for shares in (True, False):
        model(longer)
        expected = expected_step(model, batch, loss)
        after = model.model.rotary_emb.inv_freq.clone()
        model(longer)
        with sharing(shares):
            assert_as_padded(model, batch, loss, expected)
        assert torch.equal(model.model.rotary_emb.inv_freq, after)
    assert torch.equal(after, model.model.rotary_emb.original_inv_freq) == (width < LENGTH)


def test_what_a_trial_runs_leaves_a_rotary_embedding_as_it_was():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = build("Llama", max_position_embeddings=LENGTH, rope_parameters=rope).train()
    rows = [torch.ones(1, LENGTH + more, dtype=torch.long) for more in (9, 5)]
    model(rows[0])
    expected = model(rows[1]).logits  # with the frequencies of the longer row
    with without_randomness(model, model.device):
        model(rows[1][:, :4])
    assert torch.equal(model(rows[1]).logits, expected)


def tables_of(batch: dict) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim() == 2}


# --- bad input --------------------------------------------------------------------------------------------------------


def refused(model, batch, loss, message, error=ValueError, **options):
    hook = swap_lm_head(model).base_model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(error, match=message):
        loss_steps(model, batch, loss, **options)
    hook.remove()


TOGETHER = "max_tokens must be None or at least {} here, got {}: "
BAD_OPTIONS = {
    "a long sequence": ("Llama", "grpo", {"max_tokens": 12}, r"max_tokens must be at least 13, the longest"),
    "no tokens": ("Llama", "grpo", {"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    "words": ("Llama", "grpo", {"max_tokens": "all"}, "max_tokens must be an int or None, got str"),
    "quantile": ("Llama", "quantile", {"max_tokens": 64}, TOGETHER.format(65, 64)),
    "router": ("Mixtral", "grpo", {"max_tokens": 77}, TOGETHER.format(78, 77) + "the router's loss is of all tokens"),
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
