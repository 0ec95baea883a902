"""verl's functions against full logits in float64, and against verl's own torch backend where its source is there."""

import importlib
from types import SimpleNamespace

import pytest
import torch

import checkouts
import oracles
from liger_rl import patch_verl
from liger_rl.integrations.verl import fused_linear_for_ppo, linear_cross_entropy, patched_verl, unpatch_verl

TOKENS, HIDDEN, VOCAB = 23, 12, 137
# (shape of hidden without H, shape of labels): packed, FSDP without padding, padded, Megatron's (S, B, H)
SHAPES = [((TOKENS,), (TOKENS,)), ((1, TOKENS), (1, TOKENS)), ((1, TOKENS), (TOKENS,)), ((TOKENS, 1), (1, TOKENS))]


def problem(device="cpu", dtype=torch.float32):
    hidden = (2 * torch.randn(TOKENS, HIDDEN, device=device)).to(dtype)
    weight = torch.randn(VOCAB, HIDDEN, device=device).to(dtype)
    return hidden, weight, torch.randint(VOCAB, (TOKENS,), device=device)


@pytest.mark.parametrize("reduction", ["sum", "mean", "MEAN"])
def test_reductions(reduction):
    """Of the log-probabilities alone; a mean divides by all tokens, masked ones too, as verl's."""
    leaves = [leaf.requires_grad_() for leaf in problem()[:2]]
    labels = problem()[2]
    labels[4] = -100
    (reduced, entropy), (logps, same) = (linear_cross_entropy(*leaves, labels, 0.6, r) for r in (reduction, "none"))
    expected = logps.sum() / (1 if reduction == "sum" else TOKENS)
    torch.testing.assert_close((reduced, entropy), (expected, same))
    grads = (torch.autograd.grad(value, leaves) for value in (reduced, expected))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(("rows", "ids"), SHAPES)
def test_shapes_as_verl_has_them(rows, ids):
    """FSDP without padding has a first dimension of one, Megatron its tokens before the batch; outputs are flat."""
    hidden, weight, labels = problem()
    expected = linear_cross_entropy(hidden, weight, labels, 0.7)
    strided = hidden.T.contiguous().T.reshape(*rows, HIDDEN).requires_grad_()
    outputs = linear_cross_entropy(strided, weight, labels.reshape(ids), 0.7)
    torch.testing.assert_close(tuple(values.detach() for values in outputs), expected)
    (grad,) = torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), strided)
    assert grad.shape == strided.shape
    assert grad.any()


def test_logits_far_under_zero():
    """A running maximum that starts at 0 has nothing left of them."""
    arguments = torch.ones(3, 1), torch.linspace(-220, -200, VOCAB)[:, None], torch.tensor([0, 60, 136])
    outputs = tuple(values.double() for values in linear_cross_entropy(*arguments))
    torch.testing.assert_close(outputs, oracles.logprobs(*arguments), rtol=1e-5, atol=1e-4)


# --- the torch backend ------------------------------------------------------------------------------------------------


@pytest.fixture
def verl():
    root = checkouts.verl()
    inner = ("utils", "utils.experimental", "utils.kernel", "models", "models.transformers")
    with checkouts.bare(root, "verl", *(f"verl.{name}" for name in inner)) as package:
        package.__version__ = (root / "version" / "version").read_text().strip()
        yield package


def torch_backend(**options):
    return importlib.import_module("verl.utils.experimental.torch_functional").FusedLinearForPPO(**options)


@pytest.mark.parametrize("shape", [(TOKENS,), (1, TOKENS), (3, 5)])
@pytest.mark.parametrize(("temperature", "factors"), [(1.0, (1.0, 0.0)), (0.7, (0.0, 1.0)), (0.7, (1.0, 1.0))])
def test_verls_torch_backend(verl, shape, temperature, factors, device):
    hidden, weight = torch.randn(*shape, HIDDEN, device=device), torch.randn(VOCAB, HIDDEN, device=device)
    labels = torch.randint(VOCAB, shape, dtype=torch.int32, device=device)
    results = []
    for ours in (True, False):
        backend = torch_backend(chunk_size=7)  # made before the patch
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        if ours:
            patch_verl()
        logps, entropy = backend(*leaves, labels, temperature)
        unpatch_verl()
        upstream = torch.linspace(-1, 2, labels.numel(), device=device).view(shape)
        total = factors[0] * (logps * upstream).sum() + factors[1] * (entropy * upstream).sum()
        results.append([logps, entropy, *torch.autograd.grad(total, leaves)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=2e-5)


def test_verls_torch_backend_in_bfloat16(verl):
    """verl rounds logits and entropies to bfloat16."""
    hidden, weight, labels = problem(dtype=torch.bfloat16)
    exact = oracles.logprobs(hidden, weight, labels)
    theirs = torch_backend()(hidden, weight, labels)
    with patched_verl():
        mine = torch_backend()(hidden, weight, labels)
    for values, rounded, truth in zip(mine, theirs, exact, strict=True):
        assert oracles.max_error(values, truth) < 0.1 * oracles.max_error(rounded, truth)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_model_of_verls(verl, backend):
    """Its forward for each backend, by labels and by labels that are shifted already."""
    model = importlib.import_module("hf_models").build("Qwen3", vocab_size=VOCAB, num_hidden_layers=1)
    dense = importlib.import_module("verl.models.transformers.dense_common")
    ids = torch.randint(VOCAB, (2, 9))
    expected = oracles.logits_logprobs(model(ids).logits / 0.7, ids.roll(-1, -1))
    patch_verl()
    for labels in ({"labels": ids}, {"shift_labels": ids.roll(-1, -1)}):
        forward = getattr(dense, f"forward_with_{backend}_backend")
        output = forward(model, input_ids=ids, temperature=0.7, return_dict=True, **labels)
        mine = tuple(values.view(2, 9) for values in (output.log_probs, output.entropy))
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_verls_output_processor_for_megatron(tied, monkeypatch):
    """Where verl is installed with what it needs, and Megatron-Core."""
    pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
    pytest.importorskip("verl", reason="verl is not installed")
    fused = importlib.import_module("verl.models.mcore.model_forward_fused")
    monkeypatch.setattr(fused.parallel_state, "get_tensor_model_parallel_group", lambda: None)
    hidden, weight, labels = problem()
    with patched_verl():
        output = fused.fused_output_processor(
            hidden_states=hidden[:, None],
            output_layer=SimpleNamespace(weight=None if tied else weight),
            output_weight=weight if tied else None,
            labels=labels[None],
            context=fused.FusedOutputProcessorContext(temperature=0.7),
            config=SimpleNamespace(sequence_parallel=False),
        )
    expected = oracles.logprobs(hidden, weight, labels, temperature=0.7)
    mine = tuple(values.double() for values in (output.log_probs, output.entropy))
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


def test_arguments_of_the_torch_backend():
    """Those of linear_cross_entropy, but for the shape of what comes back."""
    hidden, weight, labels = problem()
    outputs = fused_linear_for_ppo(None, hidden[None], weight, labels[None], 0.9)
    flat = linear_cross_entropy(hidden, weight, labels, 0.9)
    torch.testing.assert_close(tuple(values[0] for values in outputs), flat, rtol=0, atol=0)
    with pytest.raises(ValueError, match="labels must have 23 elements"):
        fused_linear_for_ppo(None, hidden, weight, labels[1:])
