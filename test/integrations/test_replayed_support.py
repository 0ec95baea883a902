"""The support of a sampler on HuggingFace models: hidden states of the body, `support_logprobs`, a policy loss.

Full logits, masked where an id could not be drawn, are the truth.
"""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from hf_models import VOCAB, assert_same_gradients, build, from_logits, gradients, make_batch
from liger_rl import linear_logprobs, ppo_loss_fn, support_logprobs
from liger_rl.head import LogitTransform
from liger_rl.losses import EntropyBonus, GlobalTokenMean, KLPenalty, PolicyBatch, PPOClip, SequenceMean
from liger_rl.support import Support, SupportLogProbs


def sampled(ids: Tensor, *, without: tuple[int, int] | None = None) -> tuple[Support, Tensor]:
    """-> a support with none, one or several ids a row, and what it allows, (B, T, V) bool.

    The rows hold their token, but for the one at `without`.
    """
    ids = ids.cpu()
    sizes = torch.arange(ids.numel()).view_as(ids) % 5
    padded = torch.full((*ids.shape, 6), -1)
    allowed = torch.zeros(*ids.shape, VOCAB, dtype=torch.bool)
    allowed[sizes == 0] = True
    for place in map(tuple, sizes.nonzero().tolist()):
        others = torch.randperm(VOCAB)[:6]
        listed = others[others != ids[place]][: int(sizes[place]) - (place != without)]
        if place != without:
            listed = torch.cat([listed, ids[place][None], ids[place][None]])  # twice: once counts
        padded[place][: listed.numel()] = listed
        allowed[place][listed] = True
        allowed[place][ids[place]] = True
    return Support.from_padded(padded), allowed


def full(model: nn.Module, batch: dict[str, Tensor], allowed: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(B, T - 1) log-probabilities and entropies of each token but the first, over the allowed ids."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    logits = model(**inputs).logits
    shifted = nn.functional.pad(allowed, (0, 0, 0, 1), value=True).to(logits.device)
    values = from_logits(torch.where(shifted, logits, -1e4), batch["labels"], temperature)
    return tuple(value[:, 1:] for value in values)


def replayed(model: nn.Module, batch: dict[str, Tensor], support: Support | None, temperature: float, **options):
    """The same from the hidden states of the model's body; without a support over the whole vocabulary."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    hidden = model.base_model(**inputs).last_hidden_state[:, :-1]
    head, config = model.get_output_embeddings(), model.config
    scale, softcap = getattr(config, "logit_scale", None), getattr(config, "final_logit_softcapping", None)
    options["transform"] = LogitTransform(temperature=temperature, softcap=softcap, scale=scale or 1.0)
    arguments = hidden, head.weight, batch["labels"][:, 1:]
    if support is None:
        return linear_logprobs(*arguments, bias=head.bias, **options)
    return support_logprobs(*arguments, support.to(hidden.device), bias=head.bias, **options)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Phi", "Cohere"])
def test_the_values_are_those_of_masked_logits(name, device):
    model, batch = build(name, device), make_batch(device)
    place = (0, 6)
    support, allowed = sampled(batch["input_ids"][:, 1:], without=place)
    logps, entropy = full(model, batch, allowed, 0.8)
    g = torch.randn(logps.shape, generator=torch.Generator().manual_seed(3)).to(device)
    expected = gradients(model, (g * logps + 0.3 * g * entropy).sum())
    found = replayed(model, batch, support, 0.8, entropy=True)
    assert isinstance(found, SupportLogProbs)
    torch.testing.assert_close((found.logps, found.entropy), (logps, entropy), rtol=1e-5, atol=1e-5)
    assert found.missing_target.nonzero().tolist() == [list(place)]
    assert_same_gradients(gradients(model, (g * found.logps + 0.3 * g * found.entropy).sum()), expected)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_policy_loss_replays(level):
    """In two micro-batches, which share the whole batch's divisor."""
    model, batch = build("Gemma2"), make_batch()
    support, allowed = sampled(batch["input_ids"][:, 1:])
    logps, _ = full(model, batch, allowed, 0.7)
    mask = batch["labels"][:, 1:] >= 0
    reduction = GlobalTokenMean() if level == "token" else SequenceMean()
    parts = {"kl": KLPenalty(beta=0.1), "objective": PPOClip(importance_sampling_level=level), "reduction": reduction}
    columns = {
        "advantages": torch.tensor([1.0, -0.5, 2.0]),
        "mask": mask,
        "old_per_token_logps": logps.detach() + 0.2 * torch.randn(logps.shape),
        "ref_per_token_logps": logps.detach() + 0.2 * torch.randn(logps.shape),
    }
    divisors = {"num_items_in_batch": mask.sum()} if level == "token" else {"num_sequences": 3}
    whole = ppo_loss_fn(logps, PolicyBatch(**columns, **divisors), **parts)
    expected = gradients(model, whole.loss)
    total = 0.0
    for rows in (slice(0, 1), slice(1, 3)):
        part = {name: values[rows] for name, values in batch.items()}
        found = replayed(model, part, support.take(rows, batch=3), 0.7, mask=mask[rows])
        some = PolicyBatch(**{name: values[rows] for name, values in columns.items()}, **divisors)
        total = total + ppo_loss_fn(found.logps, some, **parts).loss
    torch.testing.assert_close(total.detach(), whole.loss.detach(), rtol=1e-5, atol=1e-6)
    assert_same_gradients(gradients(model, total), expected)


def test_an_entropy_bonus_is_of_the_listed_ids():
    model, batch = build("Llama"), make_batch()
    support, allowed = sampled(batch["input_ids"][:, 1:])
    logps, entropy = full(model, batch, allowed, 1.0)
    columns = PolicyBatch(advantages=torch.ones(3), mask=batch["labels"][:, 1:] >= 0)
    parts = {"objective": PPOClip(), "reduction": GlobalTokenMean(), "entropy_bonus": EntropyBonus(entropy_coef=0.1)}
    expected = ppo_loss_fn(logps, columns, entropy=entropy, **parts)
    found = replayed(model, batch, support, 1.0, entropy=True)
    result = ppo_loss_fn(found.logps, columns, entropy=found.entropy, **parts)
    torch.testing.assert_close(result.loss, expected.loss, rtol=1e-5, atol=1e-6)
    assert_same_gradients(gradients(model, result.loss), gradients(model, expected.loss))


def test_what_the_sampler_drew_has_its_probability():
    """transformers' own top-p sampling, replayed: the trainer's log-probabilities are the sampler's."""
    model = build("Llama").eval()
    model.generation_config.eos_token_id = None
    prompt = torch.randint(9, VOCAB, (4, 3))
    generated = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=True, top_p=0.9,
        top_k=0, temperature=1.3, output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    scores, ids = torch.stack(generated.scores, 1), generated.sequences
    drawn = scores.log_softmax(-1).gather(-1, ids[:, 3:, None]).squeeze(-1)
    mask = torch.arange(1, 9).expand(4, 8) >= 3
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        found = replayed(model, batch, Support.from_logits(scores).place_at(mask), 1.3, mask=mask).logps[:, 2:]
        whole = replayed(model, batch, None, 1.3, mask=mask).logps[:, 2:]
    torch.testing.assert_close(found, drawn, rtol=1e-5, atol=1e-5)
    mismatch = drawn - whole
    assert mismatch.max() > 0.01
    assert mismatch.max() <= -math.log(0.9) + 1e-5


# --- parts of a support -----------------------------------------------------------------------------------------------


def rows_of(support: Support) -> list[list[int]]:
    bounds, ids = support.offsets.tolist(), support.token_ids.tolist()
    return [ids[first:last] for first, last in pairwise(bounds)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_take_and_place_at(dtype, device):
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
        assert rows_of(taken) == expected
        assert taken.token_ids.dtype == dtype
        assert taken.distinct
    mask = torch.tensor([[False, True, True], [True, True, False], [False, True, True]], device=device)
    remaining = iter(rows)
    expected = [next(remaining) if counts else [] for counts in mask.flatten().tolist()]
    assert rows_of(support.place_at(mask)) == expected
    nothing = Support.from_vllm([]).to(device)
    assert rows_of(nothing.place_at(torch.zeros(3, dtype=torch.bool, device=device))) == [[], [], []]
    assert support.to("cpu").offsets.device.type == "cpu"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: s.take(slice(1), batch=4), ValueError, "batch must divide the 6 rows of the support, got 4"),
        (lambda s: s.take(slice(1), batch=0), ValueError, "batch must be at least 1, got 0"),
        (lambda s: s.take([0], batch=3), TypeError, "sequences must be a slice or a tensor, got list"),
        (lambda s: s.place_at(torch.ones(6)), TypeError, "mask must be bool, got torch.float32"),
        (lambda s: s.place_at(torch.ones(7) != 0), ValueError, "mask must be True at 6 tokens, .* got 7"),
    ],
)
def test_bad_parts(call, error, message):
    with pytest.raises(error, match=message):
        call(Support.from_vllm([[1], [2], [3], [4], [5], [6]]))
