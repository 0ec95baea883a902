"""A pretrained model's policy for the benchmark; a tiny random model stands for the published one."""

import json
import math

import pytest
import torch

pytest.importorskip("benchmark.cases", reason="the benchmark is not part of an installed package")
pytest.importorskip("transformers", reason="a pretrained model needs it")

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmark import pretrained, texts
from benchmark.cases import preset
from benchmark.inputs import make_inputs
from liger_rl import swap_lm_head


@pytest.fixture(scope="module")
def pieces():
    """-> (model, tokenizer) as a GGUF file's would be loaded."""
    torch.manual_seed(0)
    bytes_pair = texts.train_tokenizer(pretrained.prose(), 300, 20 << 10)
    sizes = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=bytes_pair.get_vocab_size(), tie_word_embeddings=True, **sizes)
    ).eval()
    # Larger than at the start of a training, so that the policy is not flat.
    model.lm_head.weight.data.mul_(10.0)
    return swap_lm_head(model), PreTrainedTokenizerFast(tokenizer_object=bytes_pair)


def logps(hidden, weight):
    return (hidden.double() @ weight.double().T).log_softmax(-1)


@pytest.mark.parametrize("shape", [None, (48, 700)])
def test_the_folder_is_one_of_a_policy(pieces, monkeypatch, tmp_path, shape):
    monkeypatch.setattr(pretrained, "load", lambda *named: pieces)
    monkeypatch.setattr(pretrained, "TEXT_BYTES", 100 << 10)
    about = pretrained.make_policy(4, 32, tmp_path, "tiny.gguf", shape, "cpu", tmp_path)
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
