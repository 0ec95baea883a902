"""Steps whose padding and sequences without a gradient leave the model, against full logits of the padded batch."""

import copy

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from hf_models import CONFIGS, HEADS, VOCAB, assert_same_gradients, build, full, gradients  # noqa: E402
from liger_rl import PRESETS, FusedLinearGRPOLoss, PolicyBatch, Support, TopEntropyMask, ppo_loss_fn  # noqa: E402
from liger_rl.integrations.transformers import is_swapped, swap_lm_head  # noqa: E402
from liger_rl.step import ranks as step_ranks  # noqa: E402
from liger_rl.step.policy_step import completion_logps, policy_step, policy_steps  # noqa: E402

BATCH, LENGTH = 6, 13
# First attended token, first completion token, end, of each row. The last row has no completion token that counts.
SPANS = {
    "right": [(0, 3, 13), (0, 2, 9), (0, 4, 12), (0, 3, 7), (0, 2, 10), (0, 5, 5)],
    "left": [(0, 3, 13), (2, 5, 13), (5, 9, 13), (3, 6, 13), (1, 2, 13), (4, 13, 13)],
    "both": [(0, 5, 13), (2, 5, 9), (1, 5, 12), (3, 5, 7), (4, 5, 10), (2, 5, 5)],
}
IDLE = 2  # the row whose advantages are 0
OPTIONS = {
    "dr_grpo": {"max_completion_length": 10},
    "dro": {"dro_beta": 0.3},
    "cispo": {"epsilon_high": 2.0},
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": -0.5},
    "kl_cov": {"kl_cov_ratio": 0.2},
}


def make_batch(padding="both", *, positions=False, mask=True, device="cpu") -> dict:
    generator = torch.Generator().manual_seed(1)
    first, begin, end = (torch.tensor(numbers)[:, None] for numbers in zip(*SPANS[padding], strict=True))
    column = torch.arange(LENGTH)
    attended = (column >= first) & (column < end)
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)
    batch = {
        "input_ids": torch.where(attended, ids, 0),
        "completion_mask": attended & (column >= begin),
        "advantages": torch.tensor([1.0, -0.5, 0.0, 2.0, -1.5, 0.7]),
        "num_items_in_batch": 31,
    }
    if mask:
        batch["attention_mask"] = attended.long()
    if positions:
        batch["position_ids"] = (attended.cumsum(-1) - 1).clamp(min=0)
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def with_columns(model: nn.Module, batch: dict) -> dict:
    """The columns that losses compare with, a little off the policy."""
    logps = full_step(model, batch)[0].detach()
    noise = torch.randn(2, *logps.shape, generator=torch.Generator().manual_seed(2)).to(logps.device)
    columns = {"old_per_token_logps": logps + 0.3 * noise[0], "ref_per_token_logps": logps + 0.3 * noise[1]}
    return {**batch, **columns}


def full_step(model: nn.Module, batch: dict) -> tuple[Tensor, Tensor]:
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
    return full(model, {**inputs, "labels": batch["input_ids"]})


def expected_step(model: nn.Module, batch: dict, loss: FusedLinearGRPOLoss):
    """-> what `ppo_loss_fn` makes of full logits, its gradients, and the log-probabilities."""
    logps, entropy = full_step(model, batch)
    names, terms = set(PolicyBatch.__dataclass_fields__) & set(batch), loss.terms
    found = ppo_loss_fn(
        logps, PolicyBatch(**{name: batch[name] for name in names}), terms.objective, terms.reduction, entropy=entropy,
        kl=terms.kl, entropy_bonus=terms.entropy_bonus, corrections=terms.corrections, metrics=terms.metrics,
    )  # fmt: skip
    total = found.loss
    if getattr(model.config, "output_router_logits", False):
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
        total = total + 0.1 * model(**inputs).aux_loss
    return total.detach(), found.metrics, gradients(model, total), logps.detach()


def run(model: nn.Module, batch: dict, loss: FusedLinearGRPOLoss, **options):
    """-> the iterator after its last backward, and the summed gradients."""
    model.zero_grad()
    steps = policy_steps(model, batch, loss, **options)
    for step in steps:
        step.loss.backward()
    return steps, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_as_padded(model: nn.Module, batch: dict, loss: FusedLinearGRPOLoss, **options):
    torch.manual_seed(5)  # for the objective that draws lots
    total, metrics, expected, logps = expected_step(model, batch, loss)
    torch.manual_seed(5)
    steps, found = run(model, batch, loss, **options)
    torch.testing.assert_close(steps.total.loss, total, rtol=1e-5, atol=1e-5)
    assert steps.total.metrics.keys() == metrics.keys()
    for name, metric in metrics.items():
        torch.testing.assert_close(steps.total.metrics[name].value, metric.value, rtol=1e-4, atol=1e-5)
    seen, mask = steps.total.per_token_logps, batch["completion_mask"].bool()
    known = seen.isfinite()
    torch.testing.assert_close(seen[known & mask], logps[known & mask], rtol=1e-5, atol=1e-5)
    assert not seen[~mask].any()
    assert_same_gradients(found, expected)
    return steps


class Calls(list):
    """(shape of the token ids, whether there is a graph, names of other tensors) of each forward of a model's body."""

    def __init__(self, model: nn.Module) -> None:
        self.hook = model.base_model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, module, args, kwargs) -> None:
        names = {name for name, value in kwargs.items() if isinstance(value, Tensor)} - {"input_ids"}
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self.append((tuple(ids.shape), torch.is_grad_enabled(), names))


# --- the same loss, gradients and metrics -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset(name, device):
    """With a sequence without advantages, one without completion tokens, and no two of one length."""
    model = build("Llama", device, num_hidden_layers=1)
    loss = FusedLinearGRPOLoss(name, metrics="basic", **OPTIONS.get(name, {}))
    batch = with_columns(model, make_batch(device=device))
    together = loss.terms.locality == "batch"
    assert together == (name in ("clip_cov", "kl_cov"))
    calls = Calls(swap_lm_head(model))
    steps = assert_as_padded(model, batch, loss, max_tokens=None if together else 20)
    assert len(steps) == {"clip_cov": 1, "kl_cov": 1, "dro": 4}.get(name, 3)
    assert len([call for call in calls if not call[1]]) == (0 if name in ("dro", "clip_cov", "kl_cov") else 1)
    assert steps.total.per_token_logps.isfinite().all()
    torch.manual_seed(5)
    step = policy_step(model, batch, loss)
    torch.testing.assert_close(step.loss.detach(), steps.total.loss, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.1},
        {"entropy_coef": 0.05, "metrics": "with_entropy"},
        {"corrections": [TopEntropyMask(top_entropy_quantile=0.5)], "entropy_coef": 0.05},
        {"metrics": "none"},
    ],
    ids=["kl", "bonus", "top entropy", "no metrics"],
)
def test_what_else_a_loss_has(options):
    model, loss = build("Llama", num_hidden_layers=1), FusedLinearGRPOLoss("bnpo", **options)
    batch = with_columns(model, make_batch("left"))
    if loss.terms.locality != "batch":
        assert len(assert_as_padded(model, batch, loss, max_tokens=24)) == 3
    assert len(assert_as_padded(model, batch, loss)) == 1


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
    for positions in (False, True):
        batch = with_columns(model, make_batch(padding, positions=positions))
        steps = assert_as_padded(model, batch, loss, max_tokens=budget)
        assert (len(steps) > 1) == (budget is not None)
        assert_as_padded(model, batch, loss)


def test_without_a_mask_only_what_follows_the_completions_leaves():
    model, loss = build("GPT2"), FusedLinearGRPOLoss("dapo")
    batch = with_columns(model, make_batch("right", mask=False))
    batch["completion_mask"][0, 11:] = False
    calls = Calls(swap_lm_head(model))
    assert_as_padded(model, batch, loss)
    assert calls[-1] == ((4, 11), True, set())


BERT = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
XLM = {"vocab_size": VOCAB, "n_words": VOCAB, "emb_dim": 32, "n_layers": 1, "n_heads": 4, "pad_token_id": 0}
OF_BOTH_SIDES = {
    "Bert": BERT,
    "BigBird": BERT,
    "CpmAnt": {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 48},
    "Doge": HEADS,
    "Llama": {**CONFIGS["Llama"], "is_causal": False},
    "MegatronBert": BERT,
    "RemBert": {**BERT, "input_embedding_size": 32, "output_embedding_size": 32},
    "RoFormer": {**BERT, "embedding_size": 32},
    "XLM": XLM,
    "XLNet": {"vocab_size": VOCAB, "d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 48},
}


@pytest.mark.parametrize("name", OF_BOTH_SIDES)
def test_models_that_are_not_causal_are_refused(name):
    """Transformers loads these for causal language modelling. A last token changes what they say of those before it."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**OF_BOTH_SIDES[name]))
    ids = torch.randint(3, VOCAB - 1, (1, 9))
    given, others = {"attention_mask": torch.ones_like(ids)}, torch.cat([ids[:, :-1], ids[:, -1:] + 1], 1)
    with torch.no_grad():
        before, after = (model.eval()(input_ids=row, **given).logits[:, :-1] for row in (ids, others))
    if name == "Doge" and torch.allclose(before, after, atol=1e-6):
        pytest.skip("Doge is causal in transformers 5.23")
    assert not torch.allclose(before, after, atol=1e-6)
    with pytest.raises(ValueError, match=f"must be a causal LM; a token of this {type(model).__name__} changes"):
        swap_lm_head(model)
    assert not is_swapped(model)


def test_a_mask_with_holes_stays():
    model, loss = build("Llama"), FusedLinearGRPOLoss("grpo")
    batch = with_columns(model, make_batch("both"))
    batch["attention_mask"][0, 3:5] = 0
    calls = Calls(swap_lm_head(model))
    assert_as_padded(model, batch, loss)
    assert calls[-1][0] == (4, 13)
    assert "attention_mask" in calls[-1][2]


def test_positions_with_gaps_stay():
    """Without a mask they would be those of packed sequences."""
    model, loss = build("Llama"), FusedLinearGRPOLoss("grpo")
    batch = make_batch("both", positions=True)
    batch["position_ids"][:, 4:] += 2
    batch = with_columns(model, batch)
    assert_as_padded(model, batch, loss)
    with pytest.raises(ValueError, match="packing must not be True here: row 0 of input_ids is no run of tokens"):
        policy_step(model, batch, loss, packing=True)


def test_a_completion_at_the_start_of_its_row():
    """Its first token is predicted by padding, which stays, whatever a model makes of it. All others are the same."""
    model, loss = build("Llama"), FusedLinearGRPOLoss("grpo", beta=0.1)
    batch = with_columns(model, make_batch("left"))
    batch["completion_mask"][3] = batch["attention_mask"][3].bool()
    expected = torch.where(batch["completion_mask"], full_step(model, batch)[0], 0.0)
    calls = Calls(swap_lm_head(model))
    found = policy_step(model, batch, loss).per_token_logps
    assert calls[0] == ((5, 13), True, {"attention_mask", "position_ids"})
    assert found[3, 3] != 0.0
    found[3, 3] = expected[3, 3]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sequences", [False, True])
def test_advantages_and_ratios_per_token(sequences):
    model = build("Llama", num_hidden_layers=1)
    loss = FusedLinearGRPOLoss("dapo" if not sequences else "gmpo", metrics="basic")
    batch = with_columns(model, make_batch())
    batch["advantages"] = torch.randn(BATCH, LENGTH) * (torch.arange(BATCH) != IDLE)[:, None]
    batch["importance_ratio"] = torch.rand(BATCH, 1) + 0.5
    assert_as_padded(model, batch, loss, max_tokens=20)


def test_a_support_goes_with_its_tokens():
    model, loss = swap_lm_head(build("Llama", num_hidden_layers=1)), FusedLinearGRPOLoss("grpo", metrics="loss")
    batch = make_batch()
    listed = torch.randint(3, VOCAB, (BATCH, LENGTH, 5), generator=torch.Generator().manual_seed(3))
    listed[..., 0] = torch.where(torch.rand(BATCH, LENGTH) < 0.8, batch["input_ids"], listed[..., 0])
    batch["support"] = Support.from_padded(listed)
    untouched = policy_step(model, batch, loss, trim=False, idle="backward")
    expected = gradients(model, untouched.loss)
    steps, found = run(model, batch, loss, max_tokens=20)
    torch.testing.assert_close(steps.total.per_token_logps, untouched.per_token_logps, rtol=1e-5, atol=1e-5)
    assert 0 < steps.total.metrics["missing_target"].item() < 1
    for name, metric in untouched.metrics.items():
        torch.testing.assert_close(steps.total.metrics[name].value, metric.value)
    assert_same_gradients(found, expected)


def test_gradients_repeat_bit_by_bit(device):
    model, loss = build("Llama", device), FusedLinearGRPOLoss("gspo", metrics="basic")
    batch = with_columns(model, make_batch("both", device=device))
    first, second = (run(model, batch, loss, max_tokens=20)[1] for _ in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_completion_logps_are_those_of_the_padded_batch():
    model, loss, batch = build("Llama"), FusedLinearGRPOLoss("grpo"), make_batch()
    expected = torch.where(batch["completion_mask"], full_step(model, batch)[0], 0.0)
    calls = Calls(swap_lm_head(model))
    for options in ({}, {"max_tokens": 20}, {"packing": True}):
        found = completion_logps(model, batch, loss, **options)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert not found.requires_grad
    assert [shape for shape, *_ in calls[:5]] == [(5, 13), (1, 13), (1, 11), (2, 7), (1, 4)]
    assert not any("attention_mask" in names for _, _, names in calls)


# --- what the model is given ------------------------------------------------------------------------------------------


def test_sequences_without_a_gradient_are_skipped_or_run_without_a_graph():
    model = swap_lm_head(build("Llama", num_hidden_layers=1))
    batch, calls = make_batch("both"), Calls(model)
    step = policy_step(model, batch, FusedLinearGRPOLoss("grpo"))
    assert calls == [((4, 13), True, {"position_ids"})]
    unknown = step.per_token_logps.isnan()
    assert torch.equal(unknown.any(1), torch.arange(BATCH) == IDLE)
    assert torch.equal(unknown[IDLE], batch["completion_mask"][IDLE])
    for idle, loss, expected in (
        ("forward", FusedLinearGRPOLoss("grpo"), [((1, 11), False), ((4, 13), True)]),
        ("skip", FusedLinearGRPOLoss("gspo", metrics="basic"), [((1, 11), False), ((4, 13), True)]),
        ("skip", FusedLinearGRPOLoss("gspo"), [((4, 13), True)]),
        ("backward", FusedLinearGRPOLoss("grpo"), [((6, 13), True)]),
        ("skip", FusedLinearGRPOLoss("grpo", entropy_coef=0.1), [((5, 13), True)]),
        ("skip", FusedLinearGRPOLoss("dro", dro_beta=0.1), [((5, 13), True)]),
    ):
        calls.clear()
        assert policy_step(model, batch, loss, idle=idle).per_token_logps.isfinite().all() == (
            len(calls) == 2 or calls[0][0][0] > 4
        )
        assert [call[:2] for call in calls] == expected
    calls.clear()
    policy_step(model, batch, FusedLinearGRPOLoss("grpo"), trim=False, idle="backward")
    assert calls == [((6, 13), True, {"attention_mask"})]


@pytest.mark.parametrize("preset", ["grpo", "gspo", "dapo", "cispo"])
def test_log_probabilities_of_an_earlier_step_may_be_given_back(preset):
    """Those of a sequence that did not run are NaN, and it does not run again."""
    model, loss = swap_lm_head(build("Llama", num_hidden_layers=1)), FusedLinearGRPOLoss(preset)
    batch = make_batch("both")
    first = policy_step(model, batch, loss)
    assert first.per_token_logps.isnan().any()
    again = policy_step(model, batch | {"old_per_token_logps": first.per_token_logps}, loss)
    torch.testing.assert_close(again.loss, first.loss, rtol=1e-5, atol=1e-6)
    assert all(metric.value.isfinite() for metric in again.metrics.values())


@pytest.mark.parametrize("counted", [True, False])
def test_a_batch_without_a_gradient_has_a_loss_to_call_backward_on(counted):
    model, loss = build("Llama", num_hidden_layers=1), FusedLinearGRPOLoss("grpo")
    batch = make_batch() | {"advantages": torch.zeros(BATCH)}
    batch["completion_mask"] = batch["completion_mask"] & counted
    calls = Calls(swap_lm_head(model))
    step = policy_step(model, batch, loss)
    step.loss.backward()
    assert len(calls) == 1
    assert calls[0][0][0] == 1
    assert step.loss.item() == 0.0
    assert all(not p.grad.any() for p in model.parameters())


def test_positions_never_go_past_a_table():
    """A row's padding counts on from its last position, which may be the last that the model has."""
    model, loss = build("GPT2", n_positions=LENGTH), FusedLinearGRPOLoss("grpo")
    assert_as_padded(model, with_columns(model, make_batch("left")), loss)
    assert_as_padded(model, with_columns(model, make_batch("left", positions=True)), loss, packing=True)


def test_micro_batches_of_rows_as_they_are():
    model, loss = build("Llama"), FusedLinearGRPOLoss("gspo")
    batch = with_columns(model, make_batch("both"))
    calls = Calls(swap_lm_head(model))
    assert_as_padded(model, batch, loss, max_tokens=2 * LENGTH, trim=False)
    assert [call[0] for call in calls[-2:]] == [(2, LENGTH)] * 2


@pytest.mark.parametrize("changed", [{"token_type_ids": torch.zeros(BATCH, LENGTH, dtype=torch.long)}, "4d", "fixed"])
def test_a_batch_stays_where_an_input_says_what_nobody_knows(changed):
    model, batch = swap_lm_head(build("GPT2")), make_batch()
    options = {"fixed_shape": True} if changed == "fixed" else {}
    if changed == "4d":
        allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & batch["attention_mask"].bool()[:, None, None]
        batch["attention_mask"] = allowed | torch.eye(LENGTH, dtype=torch.bool)
    elif changed != "fixed":
        batch |= changed
    calls = Calls(model)
    policy_step(model, batch, FusedLinearGRPOLoss("grpo", **options)).loss.backward()
    assert calls[0][0] == (BATCH, LENGTH)
    with pytest.raises(ValueError, match=f"max_tokens must be None or at least B T = {BATCH * LENGTH} for a batch"):
        policy_steps(model, batch, FusedLinearGRPOLoss("grpo", **options), max_tokens=LENGTH)


def test_a_rotary_embedding_that_looks_at_the_longest_row():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model, batch = swap_lm_head(build("Llama", max_position_embeddings=8, rope_parameters=rope)), make_batch()
    calls = Calls(model)
    policy_step(model, batch, FusedLinearGRPOLoss("grpo"))
    assert calls[0][0] == (BATCH, LENGTH)
    short = {
        name: value[:, :8] if isinstance(value, Tensor) and value.dim() == 2 else value for name, value in batch.items()
    }
    policy_step(model, short, FusedLinearGRPOLoss("grpo"))
    assert calls[1][0] == (4, 8)
    calls.clear()
    with pytest.raises(ValueError, match="packing must not be True here: the rotary embedding depends on the"):
        policy_step(model, batch, FusedLinearGRPOLoss("grpo"), packing=True)
    # Ranks with shorter rows try the model, too, and wait for this one's part in it.
    assert [shape for shape, *_ in calls] == [(1, 8), (1, 8), (1, 4), (1, 8), (1, 8), (1, 4)]


def test_padding_never_makes_a_long_row_of_a_short_one():
    """A row that begins late and is padded on its right would count on, past the last position of the short factors."""
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [6.0] * 4,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    model = build("Phi3", rope_parameters=rope, original_max_position_embeddings=16)
    assert_as_padded(model, with_columns(model, make_batch("both")), FusedLinearGRPOLoss("gspo"))


def test_queries_that_are_scaled_by_their_columns(monkeypatch):
    options = {"attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 0.3, "no_rope_layers": [1, 0]}
    sizes = {**HEADS, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 4}
    monkeypatch.setitem(CONFIGS, "Llama4Text", {**sizes, **options})
    model = build("Llama4Text", attention="eager")
    assert_as_padded(model, with_columns(model, make_batch("both")), FusedLinearGRPOLoss("gspo"), max_tokens=24)


# --- packed rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "GPT2", "Mistral", "GraniteMoe"])
def test_packed_rows(name):
    model, loss = build(name, **ARCHITECTURES.get(name, {})), FusedLinearGRPOLoss("gspo", metrics="basic")
    batch = with_columns(model, make_batch("both", positions=name == "GPT2"))
    assert_as_padded(model, batch, loss, packing=True)
    if name != "Mixtral":
        calls = Calls(model)
        steps = assert_as_padded(model, batch, loss, packing=True, max_tokens=20)
        assert [call[0] for call in calls if call[1] and call[0][0] == 1] == [(1, 20), (1, 10)]
        assert len(steps) == 2


def test_packed_sequences_keep_positions_that_matter(monkeypatch):
    """HunYuan scales queries and keys, entry by entry, after their rotary embedding."""
    monkeypatch.setitem(CONFIGS, "HunYuanDenseV1", HEADS)
    model, loss = build("HunYuanDenseV1"), FusedLinearGRPOLoss("gspo")
    assert_as_padded(model, with_columns(model, make_batch("both", positions=True)), loss, packing=True)
    with pytest.raises(ValueError, match="packing must not be True here: row 1 of input_ids is no run of tokens"):
        policy_step(model, make_batch("both"), loss, packing=True)


def test_packed_sequences_whose_columns_follow_on():
    """Row 1 begins at the column after row 0's last. By columns they would be one sequence."""
    model, loss = build("Llama"), FusedLinearGRPOLoss("grpo")
    batch = {name: value[:2] if isinstance(value, Tensor) else value for name, value in make_batch().items()}
    column = torch.arange(LENGTH)
    attended = torch.stack([column < 6, column >= 6])
    batch |= {"attention_mask": attended.long(), "completion_mask": attended & (column % 6 > 1)}
    assert_as_padded(model, with_columns(model, batch), loss, packing=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex attention has no backward on CPU")
def test_flex_attention_gets_packed_rows():
    wide = {"head_dim": 16}  # the least that it takes
    model, loss = build("Llama", "cuda", **wide), FusedLinearGRPOLoss("gspo")
    batch = with_columns(model, make_batch("both", device="cuda"))
    total, _, expected, _ = expected_step(model, batch, loss)
    model = build("Llama", "cuda", attention="flex_attention", **wide)
    calls = Calls(swap_lm_head(model))
    steps, found = run(model, batch, loss, packing=True)
    torch.testing.assert_close(steps.total.loss, total, rtol=1e-4, atol=1e-5)
    size = sum(grad.square().sum() for grad in expected.values()).sqrt()
    assert sum((found[name] - grad).square().sum() for name, grad in expected.items()).sqrt() <= 1e-3 * size
    assert calls[-1][0] == (1, 30)


def varlen_attention(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, **kwargs):
    """What flash attention computes of the ends of sequences, (1, heads, n, width) -> (1, n, heads, width)."""
    assert attention_mask is None
    assert kwargs["max_length_q"] == cu_seq_lens_q.diff().max()
    repeats = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(repeats, 1) for states in (key, value))
    sizes = cu_seq_lens_q.diff().tolist()
    sequences = zip(*(states.split(sizes, 2) for states in (query, key, value)), strict=True)
    attend = nn.functional.scaled_dot_product_attention
    return torch.cat([attend(*qkv, is_causal=True, scale=scaling) for qkv in sequences], 2).transpose(1, 2), None


def test_flash_attention_gets_packed_rows_by_itself(monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, loss = build("Llama"), FusedLinearGRPOLoss("gspo")
    batch = with_columns(model, make_batch("both"))
    total, _, expected, _ = expected_step(model, batch, loss)
    tried = copy.deepcopy(swap_lm_head(model))
    for part in (model, tried):
        part.config._attn_implementation = "flash_attention_2"

    def of_trial(module, query, *args, cu_seq_lens_q=None, max_length_q=None, **kwargs):
        if cu_seq_lens_q is None:  # the trial's rows that are not packed
            cu_seq_lens_q, max_length_q = torch.tensor([0, query.shape[2]]), query.shape[2]
        return varlen_attention(module, query, *args, cu_seq_lens_q=cu_seq_lens_q, max_length_q=max_length_q, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", of_trial)
    calls = Calls(model)
    steps, found = run(model, batch, loss)
    torch.testing.assert_close(steps.total.loss, total, rtol=1e-5, atol=1e-6)
    assert_same_gradients(found, expected)
    assert calls[-1] == ((1, 30), True, {"position_ids", "cu_seq_lens_q", "cu_seq_lens_k"})

    def blind(*args, cu_seq_lens_q=None, max_length_q=None, **kwargs):
        return of_trial(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", blind)
    steps, found = run(tried, batch, loss)  # by its trial such a model keeps its rows apart
    assert_same_gradients(found, expected)
    with pytest.raises(ValueError, match="packing must not be True here: sequences in one row of LlamaForCausalLM see"):
        policy_step(tried, batch, loss, packing=True)


# --- bad input --------------------------------------------------------------------------------------------------------


def refused(model, batch, loss, message, **options):
    model = swap_lm_head(model)
    hook = model.base_model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=message):
        policy_steps(model, batch, loss, **options)
    hook.remove()


def test_token_budgets_that_cannot_be():
    batch, grpo = make_batch(), FusedLinearGRPOLoss("grpo")
    llama = build("Llama", num_hidden_layers=1)
    refused(llama, batch, grpo, r"max_tokens must be at least 13, the longest sequence \(row 0 of", max_tokens=12)
    refused(llama, batch, grpo, "max_tokens must be at least 1, got 0", max_tokens=0)
    message = "max_tokens must be None or at least 65 here, got 64: the loss's sequences depend on each other"
    for name in ("clip_cov", "kl_cov"):
        refused(llama, batch, FusedLinearGRPOLoss(name), message, max_tokens=64)
    quantile = FusedLinearGRPOLoss("grpo", corrections=[TopEntropyMask(top_entropy_quantile=0.5)])
    refused(llama, batch, quantile, message, max_tokens=64)
    mixtral = build("Mixtral", num_hidden_layers=1)
    message = "max_tokens must be None or at least 78 here, got 77: the router loss is of all tokens"
    refused(mixtral, batch, grpo, message, max_tokens=77)
    assert policy_steps(llama, batch, FusedLinearGRPOLoss("kl_cov"), max_tokens=65)
    with pytest.raises(TypeError, match="max_tokens must be an int, got str"):
        policy_steps(llama, batch, grpo, max_tokens="all")


@pytest.mark.parametrize(
    ("name", "message", "options"),
    [
        ("FalconH1", "FalconH1ForCausalLM has layers of type hybrid", {}),
        ("Llama", "trim=False keeps rows as they are", {"trim": False}),
        ("Llama", "row 0 of input_ids is no run of tokens", {"holes": True}),
        ("GPT2", "row 1 of input_ids is no run of tokens", {"tries": True}),
    ],
)
def test_packing_that_cannot_be(name, message, options):
    batch, loss = make_batch(), FusedLinearGRPOLoss("grpo")
    model = swap_lm_head(build(name, num_hidden_layers=1) if name != "GPT2" else build(name))
    given = {"trim": options["trim"]} if "trim" in options else {}
    if options.get("holes"):
        batch["attention_mask"][0, 3] = 0
    if not given and name != "FalconH1":
        policy_step(model, make_batch("right"), loss, packing=True)  # tries out the model
    refused(model, batch, loss, f"packing must not be True here: {message}", packing=True, **given)


def test_attention_that_sees_other_sequences_is_found_before_the_batch_runs():
    model = swap_lm_head(build("OPT"))
    calls = Calls(model)
    with pytest.raises(ValueError, match="sequences in one row of OPTForCausalLM see each other"):
        policy_step(model, make_batch(positions=True), FusedLinearGRPOLoss("grpo"), packing=True)
    assert all(shape[0] == 1 and shape[1] <= 32 for shape, *_ in calls)


@torch.no_grad()
def test_attention_that_sees_other_sequences_is_found_under_learned_positions_that_change_more():
    model = swap_lm_head(build("OPT"))
    model.model.decoder.embed_positions.weight.mul_(50)
    with pytest.raises(ValueError, match="sequences in one row of OPTForCausalLM see each other"):
        policy_step(model, make_batch(positions=True), FusedLinearGRPOLoss("grpo"), packing=True)


def test_other_bad_options():
    model, batch, loss = build("Llama", num_hidden_layers=1), make_batch(), FusedLinearGRPOLoss("grpo")
    for options, message in (
        ({"idle": "run"}, r"idle must be one of \['skip', 'forward', 'backward'\], got 'run'"),
        ({"trim": 1}, "trim must be of type bool"),
        ({"packing": "yes"}, "packing must be of type bool"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            policy_step(model, batch, loss, **options)
    steps = policy_steps(model, batch, loss, max_tokens=20)
    next(steps)
    with pytest.raises(RuntimeError, match="total is known after all 3 steps, 1 were taken"):
        _ = steps.total


@pytest.mark.parametrize(("backends", "kind"), [("cuda:nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cpu")])
def test_ranks_agree_on_a_device_that_their_group_has(monkeypatch, backends, kind):
    """DDP and FSDP2 take a batch in CPU memory, NCCL does not."""
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: backends, raising=False)
    assert step_ranks._device_of(None, torch.device("cpu")).type == kind
