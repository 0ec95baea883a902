"""A pretrained model's policy for the benchmark; a tiny random model stands for the published one."""

import json
import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("benchmark.cases", reason="the benchmark is not part of an installed package")
pytest.importorskip("transformers", reason="a pretrained model needs it")

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmark import pretrained, real_policy
from benchmark.cases import preset
from benchmark.inputs import make_inputs
from liger_rl.integrations.transformers import swap_lm_head

RECIPE = replace(real_policy.TOY, tokenizer_bytes=20 << 10, hidden_size=32)


@pytest.fixture
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


def test_added_ids_continue_the_power_law():
    torch.manual_seed(0)
    vocab, s = 4096, 1.3
    position = torch.arange(1, vocab + 1).float()
    mass = position**-s
    assert pretrained.exponent(mass / mass.sum()) == pytest.approx(s, abs=0.01)
    # The last coordinate, a constant of the hidden states, lays the law on random logits.
    weight = torch.cat([torch.randn(vocab, 8), -s * position.log()[:, None]], dim=1)
    hidden = torch.cat([torch.randn(512, 8), torch.ones(512, 1)], dim=1)
    large, rows, about = pretrained.enlarge(hidden, weight, 16, 4 * vocab, in_order=True)
    assert about["exponent"] == pytest.approx(s, abs=0.1)
    octaves = pretrained.mean_probabilities(large, rows)
    ratio = 2 ** (1 - s)
    upper, first, second = (octaves[vocab * k // 2 : vocab * k].sum() for k in (1, 2, 4))
    assert (first / upper).item() == pytest.approx(ratio, rel=0.25)
    assert (second / first).item() == pytest.approx(ratio, rel=0.25)


def test_kept_blocks_are_those_of_the_gradient():
    """Against dlogp/dlogits in full: what is kept leaves out no more than the tolerance, and no block less would do."""
    torch.manual_seed(0)
    n, vocab = 256, 1000
    hidden, weight = 4.0 * torch.randn(n, 32), torch.randn(vocab, 32)
    weight[:256] *= 3.0
    ids = torch.multinomial((hidden @ weight.T).softmax(-1), 1).squeeze(1)
    found = real_policy.kept_shares(hidden, weight, ids)
    factors = torch.randn(n, generator=torch.Generator().manual_seed(real_policy.SEED))
    logits = (hidden @ weight.T).double().requires_grad_()
    chosen = logits.log_softmax(-1).gather(1, ids[:, None]).squeeze(1)
    (gradient,) = torch.autograd.grad((chosen * factors).sum(), logits)
    gradient = torch.nn.functional.pad(gradient, (0, 24)).view(2, 128, 4, 256)
    energies = sorted(gradient.square().sum((1, 3)).flatten().tolist())
    for tolerance in real_policy.TOLERANCES:
        left_out = sum(sum(energies[:k]) <= tolerance**2 * sum(energies) for k in range(1, 9))
        assert found["kept"][f"{tolerance:g}"] == 1 - left_out / 8
        assert 0 < found["kept_sorted"][f"{tolerance:g}"] <= found["kept"][f"{tolerance:g}"]
