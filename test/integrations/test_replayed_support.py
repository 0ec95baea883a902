"""The support of a sampler, in a swapped model's fused call and in a policy step, beside masked full logits."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from hf_models import VOCAB, assert_same_gradients, build, from_logits, gradients, make_batch
from liger_rl import FusedLinearGRPOLoss, completion_logps, loss_step, swap_lm_head
from liger_rl.head import Support
from liger_rl.losses import Segments
from step_calls import assert_same_metrics, expected_step, packed


def sizes_of(batch: dict[str, Tensor]) -> Tensor:
    """(B, T) numbers of ids: none, one or several, at the first token of a row too, which nothing predicts."""
    return torch.arange(batch["input_ids"].numel()).view_as(batch["input_ids"]) % 5


def sampled(batch: dict[str, Tensor], *, without: tuple[int, int] | None = None) -> tuple[Support, Tensor]:
    """-> a support whose rows hold their token, but for the one at `without`, and what it allows, (B, T, V) bool."""
    ids, sizes = batch["input_ids"].cpu(), sizes_of(batch)
    padded = torch.full((*ids.shape, 6), -1)
    for place in sizes.nonzero().tolist():
        row, size = tuple(place), int(sizes[tuple(place)])
        others = torch.randperm(VOCAB)[:6]
        listed = others[others != ids[row]][: size if row == without else size - 1]
        listed = listed if row == without else torch.cat([listed, ids[row][None], ids[row][None]])  # twice: once counts
        padded[row][: listed.numel()] = listed
    allowed = torch.zeros(*ids.shape, VOCAB, dtype=torch.bool)
    for place in sizes.nonzero().tolist():
        listed = padded[tuple(place)]
        allowed[tuple(place)][listed[listed >= 0]] = True
        allowed[tuple(place)][ids[tuple(place)]] = True
    allowed[sizes == 0] = True
    return Support.from_padded(padded), allowed


def full(model: nn.Module, batch: dict[str, Tensor], allowed: Tensor, temperature: float = 1.0):
    """(B, T) log-probabilities and entropies over the allowed ids; position t - 1 predicts token t."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    logits = model(**inputs).logits
    shifted = nn.functional.pad(allowed[:, 1:], (0, 0, 0, 1), value=True).to(logits.device)
    return from_logits(torch.where(shifted, logits, -1e4), batch["labels"], temperature)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Phi", "Cohere"])
@pytest.mark.parametrize("shift", [False, True], ids=["labels", "shift_labels"])
def test_a_fused_call_is_that_of_the_masked_logits(name, shift, device):
    """A row stands where its token's log-probability does."""
    model, batch = build(name, device), make_batch(device)
    support, allowed = sampled(batch)
    labels, temperature = batch["labels"], 0.8
    logps, entropy = full(model, batch, allowed, temperature)
    g = torch.randn(logps.shape, generator=torch.Generator().manual_seed(3)).to(device)
    expected = gradients(model, (g * logps + 0.3 * g * entropy).sum())
    swap_lm_head(model)
    if shift:
        # A row belongs to the position whose label it allows.
        labels = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        support = support.take(torch.arange(1, support.tokens + 1) % support.tokens, batch=support.tokens)
        g, logps, entropy = (nn.functional.pad(values[:, 1:], (0, 1)) for values in (g, logps, entropy))
    del batch["labels"]
    batch["shift_labels" if shift else "labels"] = labels
    out = model(**batch, fused=True, entropy=True, temperature=temperature, support=support)
    torch.testing.assert_close((out.per_token_logps, out.entropy), (logps, entropy), rtol=1e-5, atol=1e-5)
    assert out.missing_target.shape == labels.shape
    assert not out.missing_target.any()
    assert_same_gradients(gradients(model, (g * out.per_token_logps + 0.3 * g * out.entropy).sum()), expected)


def test_a_missing_target_is_named_where_its_token_is():
    model, batch = swap_lm_head(build("Llama")), make_batch()
    place = (0, 6)
    assert sizes_of(batch)[place] == 1
    support, allowed = sampled(batch, without=place)
    out = model(**batch, fused=True, support=support)
    assert out.missing_target.nonzero().tolist() == [list(place)]
    assert out.entropy is None
    torch.testing.assert_close(out.per_token_logps, full(model, batch, allowed)[0], rtol=1e-5, atol=1e-5)
    assert model(**batch, fused=True).missing_target is None


@pytest.mark.parametrize(
    ("support", "error", "message"),
    [
        ([[1]], TypeError, "support must be a Support or None, got list"),
        (Support.from_vllm([[1], [2]]), ValueError, "row for each of the 42 tokens of labels, got 2 rows"),
    ],
)
def test_a_support_that_does_not_fit_raises_before_the_model_runs(support, error, message):
    model, batch = swap_lm_head(build("Llama")), make_batch()
    model.model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(error, match=message):
        model(**batch, fused=True, support=support)


@pytest.mark.parametrize("loss_type", ["dapo", "gspo"])
def test_a_policy_step_replays(loss_type):
    model, batch = build("Gemma2"), make_batch()
    loss = FusedLinearGRPOLoss(loss_type, beta=0.1, temperature=0.7, entropy_coef=0.01, metrics="with_entropy")
    support, allowed = sampled(batch, without=(0, 6))
    logps, entropy = full(model, batch, allowed, 0.7)
    mask = batch.pop("labels") >= 0
    batch |= {
        "advantages": torch.tensor([1.0, -0.5, 2.0]),
        "mask": mask,
        "old_per_token_logps": logps.detach() + 0.2 * torch.randn(logps.shape),
        "ref_per_token_logps": logps.detach() + 0.2 * torch.randn(logps.shape),
    }
    total, metrics, expected, _ = expected_step(model, batch, loss, (logps, entropy))
    step = loss_step(model, {**batch, "support": support}, loss)
    torch.testing.assert_close(step.loss.detach(), total, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(step.per_token_logps, logps.detach(), rtol=1e-5, atol=1e-5)
    assert torch.equal(completion_logps(model, {**batch, "support": support}, loss), step.per_token_logps)
    assert step.metrics["missing_target"].item() == pytest.approx(1 / int(mask.sum()))
    assert_same_metrics({name: step.metrics[name] for name in metrics}, metrics)
    assert_same_gradients(gradients(model, step.loss), expected)
    assert "missing_target" not in loss_step(model, batch, loss).metrics


@pytest.mark.parametrize("replay", [False, True])
def test_a_packed_row_is_the_padded_batch(replay):
    """Sequences one after the other, told apart by position_ids, per-sequence ratios included."""
    model, batch = build("Llama", attention="eager"), make_batch()
    loss = FusedLinearGRPOLoss("gspo", metrics="basic")
    support, _ = sampled(batch)
    batch |= {"advantages": torch.tensor([1.0, -0.5, 2.0]), "mask": batch.pop("labels") >= 0}
    batch["old_per_token_logps"] = completion_logps(model, batch, loss) + 0.1 * torch.randn(batch["input_ids"].shape)
    row, sequence = packed(batch)
    real = batch["attention_mask"].bool()
    row["segments"] = Segments(index=sequence, count=3)
    if replay:
        batch["support"] = support
        row["support"] = support.take(real.flatten(), batch=support.tokens)
    expected = loss_step(model, batch, loss)
    expected_gradients = gradients(model, expected.loss)
    step = loss_step(model, row, loss)
    torch.testing.assert_close(step.loss, expected.loss, rtol=1e-5, atol=1e-6)
    assert step.per_token_logps.shape == row["input_ids"].shape
    torch.testing.assert_close(step.per_token_logps[0], expected.per_token_logps[real], rtol=1e-5, atol=1e-5)
    assert_same_metrics(step.metrics, expected.metrics)
    assert_same_gradients(gradients(model, step.loss), expected_gradients)


def listed(support: Support) -> list[list[int]]:
    bounds, ids = support.offsets.tolist(), support.token_ids.tolist()
    return [ids[first:last] for first, last in pairwise(bounds)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_take_and_placed(dtype, device):
    rows = [[1, 2], [], [3], [4, 4, 5], [], [6]]
    made = Support.from_vllm(rows)
    support = Support(made.token_ids.to(device, dtype), made.offsets.to(device, dtype), True)
    picked = {
        "slice": (slice(1, 3), [*rows[2:]]),
        "index": (torch.tensor([2, 0]), [*rows[4:], *rows[:2]]),
        "mask": (torch.tensor([False, True, False]), rows[2:4]),
        "none": (slice(0, 0), []),
    }
    for sequences, expected in picked.values():
        taken = support.take(sequences, batch=3)
        assert listed(taken) == expected
        assert taken.token_ids.dtype == dtype
        assert taken.distinct
    mask = torch.tensor([[False, True, True], [True, True, False], [False, True, True]], device=device)
    remaining = iter(rows)
    assert listed(support.placed(mask)) == [next(remaining) if counts else [] for counts in mask.flatten().tolist()]
    nothing = Support.from_vllm([]).to(device)
    assert listed(nothing.placed(torch.zeros(3, dtype=torch.bool, device=device))) == [[], [], []]
    assert support.to("cpu").offsets.device.type == "cpu"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: s.take(slice(1), batch=4), ValueError, "batch must divide the 6 rows of the support, got 4"),
        (lambda s: s.take(slice(1), batch=0), ValueError, "batch must be at least 1, got 0"),
        (lambda s: s.take([0], batch=3), TypeError, "sequences must be a slice or a tensor, got list"),
        (lambda s: s.placed(torch.ones(6)), TypeError, "mask must be bool, got torch.float32"),
        (lambda s: s.placed(torch.ones(7) != 0), ValueError, "mask must be True at 6 tokens, .* got 7"),
    ],
)
def test_bad_parts(call, error, message):
    with pytest.raises(error, match=message):
        call(Support.from_vllm([[1], [2], [3], [4], [5], [6]]))


def test_what_the_sampler_drew_has_its_probability():
    """transformers' own top-p sampling, replayed: the trainer's log-probabilities are the sampler's."""
    model = swap_lm_head(build("Llama")).eval()
    model.generation_config.eos_token_id = None
    prompt = torch.randint(9, VOCAB, (4, 3))
    generated = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=True, top_p=0.9,
        top_k=0, temperature=1.3, output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    scores, ids = torch.stack(generated.scores, 1), generated.sequences
    drawn = scores.log_softmax(-1).gather(-1, ids[:, 3:, None]).squeeze(-1)
    mask = torch.arange(9).expand(4, 9) >= 3
    batch = {"input_ids": ids, "mask": mask, "attention_mask": torch.ones_like(ids)}
    loss = FusedLinearGRPOLoss("grpo", temperature=1.3)
    support = Support.from_logits(scores).placed(mask)
    replayed = completion_logps(model, {**batch, "support": support}, loss)[:, 3:]
    torch.testing.assert_close(replayed, drawn, rtol=1e-5, atol=1e-5)
    mismatch = drawn - completion_logps(model, batch, loss)[:, 3:]
    assert mismatch.max() > 0.01
    assert mismatch.max() <= -math.log(0.9) + 1e-5
