"""A pretrained model's policy for the benchmark; a tiny random model stands for the published one."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("benchmark.cases", reason="the benchmark is not part of an installed package")
pytest.importorskip("transformers", reason="a pretrained model needs it")

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmark import certificate, entropies, list_lengths, pretrained, real_policy, teacher_hidden
from benchmark.cases import preset
from benchmark.inputs import make_inputs
from devices import skip_without_interpreter
from liger_rl import linear_logprobs
from liger_rl.integrations.transformers import swap_lm_head
from tolerances import interpret, recorded_plans

ENVIRONMENT = {
    "device": "cpu", "device_name": "Some CPU", "threads": 1, "torch": "2", "commit": "0123456789", "dirty": False,
    "date": "2026-01-01",
}  # fmt: skip
RECIPE = replace(real_policy.TOY, tokenizer_bytes=20 << 10, hidden_size=32)


@pytest.fixture(scope="module")
def pieces():
    """-> (model, tokenizer) as a GGUF file's would be loaded."""
    torch.manual_seed(0)
    bytes_pair = real_policy.train_tokenizer(pretrained.prose(), RECIPE)
    model = LlamaForCausalLM(RECIPE.config(bytes_pair.get_vocab_size())).eval()
    # Larger than at the start of a training, so that the policy is not flat.
    model.lm_head.weight.data.mul_(10.0)
    return swap_lm_head(model), PreTrainedTokenizerFast(tokenizer_object=bytes_pair)


def logps(hidden, weight):
    return (hidden.double() @ weight.double().T).log_softmax(-1)


@pytest.mark.parametrize("shape", [None, (48, 700)])
def test_the_folder_is_one_of_a_policy(pieces, monkeypatch, tmp_path, shape):
    monkeypatch.setattr(pretrained, "load", lambda *named: pieces)
    monkeypatch.setattr(pretrained, "TEXT_BYTES", 100 << 10)
    about = pretrained.make_policy(RECIPE, tmp_path, "tiny.gguf", shape, "cpu", tmp_path)
    assert about == json.loads((tmp_path / "policy.json").read_text())
    assert (about["hidden_size"], about["vocab"]) == (shape or tuple(reversed(pieces[0].lm_head.weight.shape)))
    cases = [case for case in preset("cpu", quick=True, policy=str(tmp_path)) if case.policy]
    assert [case.name for case in cases[:3]] == [f"rl-{case.name}" for case in cases[3:]]
    for case, sample in zip(cases[3:], about["samples"], strict=True):
        inputs = make_inputs(case, "cpu")
        assert inputs.current_entropy.mean().item() == pytest.approx(sample["entropy"], rel=1e-3)
        # The spread of the distribution itself: few sampled tokens are rare, so a sample's own spread may miss them.
        all_logps = logps(inputs.hidden.float(), inputs.weight.float())
        variance = (all_logps.exp() * all_logps.square()).sum(-1) - inputs.current_entropy.double().square()
        spread = variance.mean().sqrt().item() / math.sqrt(inputs.current_logps.numel())
        assert abs(-inputs.current_logps.mean().item() - sample["entropy"]) < 8 * spread


def test_lists_of_texts_and_of_own_samples(pieces):
    model, tokenizer = pieces
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
    samples = list(list_lengths.measure(model, tokenizer, "cpu", 4, 8))
    assert [row["temperature"] for row in samples] == [0.4, 0.4, 0.6, 0.6, 1.0, 1.0]
    assert [row["kind"] for row in samples] == 3 * [list_lengths.TEXTS, list_lengths.OWN_SAMPLES]
    assert {row["tokens"] for row in samples} == {32}
    # What the cache gives is what the model gives for the whole sequence.
    asked = list_lengths.prompts(tokenizer, torch.randint(256, (2, 8)))
    hidden, drawn = list_lengths.answers(model, asked, 4, 0.5, torch.Generator().manual_seed(0))
    whole = torch.cat([asked, drawn.view(2, 4)], 1)
    expected = real_policy.hidden_states(model, whole, "cpu").unflatten(0, (2, -1))[:, -5:-1] / 0.5
    torch.testing.assert_close(hidden.view_as(expected), expected, rtol=1e-3, atol=1e-4)
    results = {
        "environment": ENVIRONMENT,
        "model": "tiny.gguf", "hidden_size": 32, "vocab": 300, "samples": samples,
    }  # fmt: skip
    table = list_lengths.markdown(results)
    assert table.count("\n| own samples, ") == 3 * 2


def test_batches_of_given_entropies(pieces, monkeypatch):
    monkeypatch.setattr(entropies, "ENTROPIES", entropies.ENTROPIES[:2])
    rows = list(entropies.measure(*pieces, replace(RECIPE, sequences=8), [(48, 700)], "cpu"))
    names = [*(f"{nats:g} nats" for nats in entropies.ENTROPIES), "flat"]
    assert [row["case"] for row in rows] == [name + kind for name in names for kind in ("", ", RL")]
    for row, nats in zip(rows[:-2:2], entropies.ENTROPIES, strict=True):
        assert row["mean_entropy"] == pytest.approx(nats, rel=1e-2)
    assert len({row["temperature"] for row in rows}) == 3
    for row in rows:
        assert row["live_tokens"] == (174 if row["case"].endswith("RL") else 256)
        # On CPU the default is exact.
        assert row["ours_grad_hidden_error"] == row["ours-3e-4_grad_hidden_error"] < 1e-4
    results = {"environment": ENVIRONMENT, "model": "tiny.gguf", "rows": rows}
    assert entropies.markdown(results).count("\n| H = 48") == len(rows)


def test_a_larger_shape_has_the_probabilities_of_the_model():
    torch.manual_seed(0)
    hidden, weight = 2.0 * torch.randn(64, 16), torch.randn(200, 16)
    large, rows, about = pretrained.enlarge(hidden, weight, 40, 500, in_order=True)
    assert (large.shape, rows.shape) == ((64, 40), (500, 40))
    logits = large.double() @ rows.double().T
    torch.testing.assert_close(logits[:, :200], hidden.double() @ weight.double().T, rtol=0, atol=1e-3)
    added = logits.softmax(-1)[:, 200:].sum(-1).mean().item()
    assert about["added_mass"] == pytest.approx(added, rel=1e-3)
    # The ids are permuted, the probabilities are the same ones.
    shuffled, permuted, _ = pretrained.enlarge(hidden, weight, 40, 500, in_order=False)
    assert not torch.allclose(permuted, rows)
    torch.testing.assert_close(
        logps(shuffled, permuted).sort(-1).values, logps(large, rows).sort(-1).values, rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("tolerance", [3e-3, 3e-2])
def test_lists_are_those_of_the_engine(monkeypatch, tolerance):
    """The engine in Triton's interpreter, in float16, keeps these parts and lists these ids."""
    skip_without_interpreter()
    interpret(monkeypatch)
    plans, lengths = recorded_plans(monkeypatch), []
    from liger_rl.engines.sparse import lists
    from liger_rl.kernels import segments_triton

    monkeypatch.setattr(lists, "most_ids", lambda vocab: vocab)  # lists of half a small vocabulary are not too long
    monkeypatch.setattr(lists, "ROOM_FOR_IDS", 1.0)

    order_by_id = segments_triton.order_by_id

    def ordered(entries, *others):
        lengths.append(entries.ids.numel())
        return order_by_id(entries, *others)

    monkeypatch.setattr(segments_triton, "order_by_id", ordered)
    n, vocab = 32, 1000
    hidden, weight, factors = torch.randn(n, 32).half(), 0.6 * torch.randn(vocab, 32).half(), torch.randn(n)
    weight[:256] *= 2.0
    ids = torch.multinomial((hidden.float() @ weight.float().T).softmax(-1), 1).squeeze(1)
    (expected,) = certificate.measure_lists(hidden, weight, ids, factors, tolerances=(tolerance,))["lists"].values()
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    (linear_logprobs(*leaves, ids, grad_tolerance=tolerance).logps * factors).sum().backward()
    assert 0.1 < plans[0].share < 1.0
    assert [plan.share for plan in plans] == [pytest.approx(expected["kept_parts"], abs=0.02)]
    assert lengths == [pytest.approx(n * expected["ids"], rel=0.02)]


def test_errors_of_lists_are_those_of_the_gradient():
    """Lists of everything are off by rounding alone. Groups cover all tokens. Shorter lists have larger errors."""
    torch.manual_seed(0)
    n, vocab = 100, 1000
    hidden, weight = torch.randn(n, 32), 0.6 * torch.randn(vocab, 32)
    ids = torch.multinomial((hidden @ weight.T).softmax(-1), 1).squeeze(1)
    found = certificate.measure_lists(hidden, weight, ids, tolerances=(1e-9, 1e-3, 1e-1))
    assert sum(found["group_tokens"].values()) == n
    everything, short, shorter = found["lists"].values()
    assert everything["kept_parts"] == 1.0
    assert everything["ids"] == pytest.approx(vocab, rel=0.01)
    assert max(everything["errors"]["all"]) < everything["largest_token_error"] < 2**-16
    assert vocab > short["ids"] > shorter["ids"] >= 1
    for lists_of, tolerance in ((short, 1e-3), (shorter, 1e-1)):
        assert lists_of["largest_token_error"] <= tolerance
        assert max(lists_of["errors"]["all"]) <= 4 * tolerance


def test_errors_of_a_teachers_rounded_hidden_states(pieces):
    model = copy.deepcopy(pieces[0])
    ids = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(0))
    found = teacher_hidden.measure(model, ids, "cpu")
    bfloat16, float8 = found["rows"].values()
    assert 2**-10 < bfloat16["hidden_error"] < 2**-8 < 2**-6 < float8["hidden_error"] < 2**-4
    hidden, weight = real_policy.hidden_states(pieces[0], ids, "cpu"), pieces[0].lm_head.weight
    log_q, rounded = logps(hidden, weight), logps(hidden.bfloat16(), weight)
    assert bfloat16["kl"] == pytest.approx((log_q.exp() * (log_q - rounded)).sum(-1).mean().item(), rel=1e-4)
    divergences = [student["divergence"] for student in found["students"]]
    assert 0 < divergences[0] < divergences[1] < divergences[2]
    for row in (bfloat16, float8):
        errors = [row[f"{bits} bits"] for bits in teacher_hidden.BITS]
        assert errors[0] > errors[1] > errors[2] > 0
    table = teacher_hidden.markdown({"environment": ENVIRONMENT, "model": "tiny.gguf", **found})
    assert "float8_e4m3fn, one scale per token" in table
