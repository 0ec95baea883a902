"""prime-rl's heads with ours in their place, against full logits in float64, and beside its own where they are."""

import importlib
import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import checkouts
import oracles
from liger_rl.integrations import prime_rl as integration
from liger_rl.integrations.prime_rl import fused_output, patch_prime_rl, patched_prime_rl, unpatch_prime_rl

BATCH, TOKENS, HIDDEN, VOCAB, IDS = 2, 7, 12, 137, 5


def problem(dtype=torch.float32, one_temperature=False, device="cpu"):
    hidden = (2 * torch.randn(BATCH, TOKENS, HIDDEN)).to(device, dtype)
    weight = torch.randn(VOCAB, HIDDEN).to(device, dtype)
    labels = torch.randint(VOCAB, (BATCH, TOKENS), device=device)
    temperature = torch.full((BATCH, TOKENS), 0.7) if one_temperature else 0.5 + torch.rand(BATCH, TOKENS)
    return hidden, weight, labels, temperature.to(device)


def masks(labels):
    """Rows with the label and other ids, one of the label alone, one without ids, one without its label."""
    device = labels.device
    others = torch.rand(BATCH, TOKENS, VOCAB - 1, device=device).argsort(-1)[..., :IDS] + 1  # it counts repeated ids
    rows = ((labels[..., None] + others) % VOCAB).int()
    rows[..., 0] = labels
    rows[..., 3:][torch.rand(BATCH, TOKENS, device=device) < 0.5] = -1
    rows[0, 0, 1:] = -1
    rows[0, 1] = -1
    rows[1, 2] = (labels[1, 2] + torch.arange(1, 1 + IDS, device=device)) % VOCAB
    return rows


def expected_outputs(hidden, weight, labels, temperature, softcap=None, rows=None):
    """In float64, over the ids of `rows` where these have the label."""
    z = hidden.double() @ weight.double().T
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature.double()[..., None]
    if rows is not None:
        listed = torch.zeros(BATCH, TOKENS, VOCAB + 1, dtype=torch.bool, device=z.device)
        listed = listed.scatter(-1, torch.where(rows < 0, VOCAB, rows.long()), True)[..., :VOCAB]
        has_label = listed.gather(-1, labels[..., None])
        z = torch.where(listed | ~has_label, z, -1e9)
    return oracles.logits_logprobs(z, labels)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("one_temperature", [False, True])
@pytest.mark.parametrize("replay", [False, True])
def test_values_and_gradients(softcap, one_temperature, replay, device):
    hidden, weight, labels, temperature = problem(one_temperature=one_temperature, device=device)
    rows = masks(labels) if replay else None
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    head = SimpleNamespace(weight=leaves[1], **({} if softcap is None else {"softcap": softcap}))
    output = fused_output(head, leaves[0], labels, temperature, rows)
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    expected = expected_outputs(*exact, labels, temperature, softcap, rows)
    mine = (output["logprobs"], output["entropy"])
    assert all(values.dtype == torch.float32 for values in mine)
    torch.testing.assert_close(tuple(values.double() for values in mine), expected, rtol=1e-5, atol=1e-5)
    grads, truths = (
        torch.autograd.grad(logps.sum() + 0.3 * entropy.sum(), inputs)
        for (logps, entropy), inputs in ((mine, leaves), (expected, exact))
    )
    for ours, truth in zip(grads, truths, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-5 * truth.abs().max().item())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", torch.zeros(BATCH, TOKENS), "temperature"),
        ("labels", torch.full((BATCH, TOKENS), VOCAB), "targets"),
        ("sampling_mask", torch.zeros(BATCH, TOKENS - 1, IDS), "shape"),
    ],
)
def test_bad_arguments(name, value, message):
    hidden, weight, labels, temperature = problem()
    arguments = {"labels": labels, "temperature": temperature, "sampling_mask": None, name: value}
    with pytest.raises((ValueError, RuntimeError), match=message):
        fused_output(SimpleNamespace(weight=weight), hidden, **arguments)


# --- the patch --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["with masks", "without masks"])
def head(request, monkeypatch):
    """A head of a prime-rl of nothing else, made before the patch."""

    def with_masks(self, hidden_states, labels=None, temperature=None, sampling_mask=None):
        return "prime-rl's own", sampling_mask

    def without_masks(self, hidden_states, labels=None, temperature=None):
        return "prime-rl's own", None

    # A new class, because the patch is of the class.
    forward = with_masks if request.param else without_masks
    kind = type("FusedOutputLinear", (torch.nn.Linear,), {"forward": forward})
    checkouts.say_version(monkeypatch, "prime-rl", "0.9.0")
    for i in range(integration.LAYERS.count(".") + 2):
        module = ModuleType(f"{integration.LAYERS}.lm_head".rsplit(".", i)[0])
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    sys.modules[f"{integration.LAYERS}.lm_head"].FusedOutputLinear = kind
    return kind(HIDDEN, VOCAB, bias=False)


def test_heads_that_are_there_and_heads_to_come(head):
    """What is not log-probabilities stays prime-rl's."""
    hidden, _, labels, temperature = problem()
    patch_prime_rl()
    for made in (head, type(head)(HIDDEN, VOCAB, bias=False)):
        assert isinstance(made(hidden, labels, temperature), dict)
    assert head(hidden, labels) == head(hidden, None, temperature) == ("prime-rl's own", None)
    head.return_mask_logprobs = True
    assert head(hidden, labels, temperature) == ("prime-rl's own", None)
    if "sampling_mask" in inspect.signature(integration.PRIME_RL.original("FusedOutputLinear.forward")).parameters:
        rows = masks(labels)
        assert head(hidden, labels, temperature, rows)[1] is rows
    unpatch_prime_rl()
    del head.return_mask_logprobs
    assert head(hidden, labels, temperature) == ("prime-rl's own", None)


def test_under_fsdp(head, lone_rank):
    """Which derives a class from the head's, and gives its output's gradient hooks."""
    hidden, _, labels, temperature = problem()
    grads = []
    for sharded in (False, True):
        head.zero_grad()
        if sharded:
            fully_shard(head, mesh=lone_rank, reshard_after_forward=True)
        leaf = hidden.clone().requires_grad_()
        with patched_prime_rl():
            head(leaf, labels, temperature)["logprobs"].sum().backward()
        grads.append((leaf.grad, head.weight.grad.full_tensor() if sharded else head.weight.grad))
    torch.testing.assert_close(grads[1], grads[0])


# --- prime-rl's own ---------------------------------------------------------------------------------------------------


@pytest.fixture
def layers(monkeypatch):
    """prime-rl's lm_head and lm_head_gemma."""
    pytest.importorskip("loguru", reason="loguru is not installed")
    root = checkouts.source("prime-rl")
    if (project := root.parent.parent).joinpath("pyproject.toml").is_file():
        checkouts.say_version(monkeypatch, "prime-rl", checkouts.project_version(project))
    inner = ("utils", "trainer", "trainer.models", "trainer.models.layers")
    with checkouts.bare(root, "prime_rl", *(f"prime_rl.{name}" for name in inner)):
        yield [importlib.import_module(f"{integration.LAYERS}.{name}") for name in ("lm_head", "lm_head_gemma")]


@pytest.mark.parametrize(("softcap", "replay"), [(None, False), (None, True), (5.0, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beside_prime_rls(layers, softcap, replay, dtype, device):
    plain, gemma = layers
    if replay and "sampling_mask" not in inspect.signature(plain.FusedOutputLinear.forward).parameters:
        pytest.skip("this head of prime-rl replays no sampling mask")
    hidden, weight, labels, temperature = problem(dtype, device=device)
    rows = {"sampling_mask": masks(labels)} if replay else {}
    kind, options = (
        (plain.FusedOutputLinear, {}) if softcap is None else (gemma.GemmaFusedOutputLinear, {"softcap": 5.0})
    )
    head = kind(HIDDEN, VOCAB, chunk_size=4, **options)
    head.weight = torch.nn.Parameter(weight)
    results = []
    for patched in (True, False):
        leaf = hidden.clone().requires_grad_()
        head.weight.grad = None
        if patched:
            patch_prime_rl()
        output = head(leaf, labels, temperature, **rows)
        unpatch_prime_rl()
        output["logprobs"].mul(torch.linspace(-1, 2, TOKENS, device=device)).sum().backward()
        results.append([output["logprobs"], output["entropy"], leaf.grad, head.weight.grad])
    if dtype == torch.bfloat16:
        truth = expected_outputs(hidden, weight, labels, temperature, softcap, rows.get("sampling_mask"))[0]
        mine, theirs = (oracles.max_error(result[0], truth) for result in results)
        assert mine < 0.1 * theirs
        return
    if replay:  # prime-rl's entropy is of the whole vocabulary
        del results[0][1], results[1][1]
    torch.testing.assert_close(*results, rtol=1e-4, atol=2e-5)


def test_a_model_that_prime_rl_gave_its_head(layers):
    from hf_models import build

    model = build("Qwen3", vocab_size=VOCAB, num_hidden_layers=1)
    ids, positions = torch.randint(VOCAB, (BATCH, TOKENS)), torch.arange(1, TOKENS + 1)[None]  # as its forward counts
    temperature = 0.5 + torch.rand(BATCH, TOKENS)
    z = model(ids, position_ids=positions).logits / temperature[..., None]
    layers[0].inject_prime_lm_head(model, chunk_size=3)
    with patched_prime_rl():
        output = model(input_ids=ids, position_ids=positions, labels=ids, temperature=temperature)
    mine = (output["logprobs"], output["entropy"])
    torch.testing.assert_close(mine, oracles.logits_logprobs(z, ids), rtol=1e-4, atol=1e-5)
