"""prime-rl's heads with ours in their place, against full logits in float64, and beside its own where they are."""

import importlib
import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
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
    others = (
        torch.rand(BATCH, TOKENS, VOCAB - 1, device=labels.device).argsort(-1)[..., :IDS] + 1
    )  # prime-rl counts an id that is repeated
    rows = ((labels[..., None] + others) % VOCAB).int()
    rows[..., 0] = labels
    rows[..., 3:][torch.rand(BATCH, TOKENS, device=labels.device) < 0.5] = -1
    rows[0, 0, 1:] = -1
    rows[0, 1] = -1
    rows[1, 2] = (labels[1, 2] + torch.arange(1, 1 + IDS, device=labels.device)) % VOCAB
    return rows


def expected_outputs(hidden, weight, labels, temperature, softcap=None, rows=None):
    """In float64, over the ids of `rows` where these have the label."""
    z = hidden.double() @ weight.double().T
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature.double()[..., None]
    if rows is not None:
        for b, t in [(b, t) for b in range(BATCH) for t in range(TOKENS)]:
            listed = rows[b, t][rows[b, t] >= 0].long()
            if (listed == labels[b, t]).any():
                others = torch.ones(VOCAB, dtype=torch.bool, device=z.device).index_fill(0, listed, False)
                place = (torch.tensor(b, device=z.device), torch.tensor(t, device=z.device))
                z = z.index_put(place, z[b, t].masked_fill(others, -1e9))
    logps = torch.log_softmax(z, -1)
    return logps.gather(-1, labels[..., None])[..., 0], -(logps.exp() * logps).sum(-1)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("one_temperature", [False, True])
@pytest.mark.parametrize("replay", [False, True])
def test_values_and_gradients(softcap, one_temperature, replay, device):
    hidden, weight, labels, temperature = problem(one_temperature=one_temperature, device=device)
    rows = masks(labels) if replay else None
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    head = SimpleNamespace(weight=leaves[1], **({} if softcap is None else {"softcap": softcap}))
    found = fused_output(head, leaves[0], labels, temperature, rows)
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    expected = expected_outputs(*exact, labels, temperature, softcap, rows)
    mine = (found["logprobs"], found["entropy"])
    for ours, truth in zip(mine, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5)
    grads = [
        torch.autograd.grad(sum((o * w).sum() for o, w in zip(outputs, (1.0, 0.3), strict=True)), inputs)
        for outputs, inputs in ((mine, leaves), (expected, exact))
    ]
    for ours, truth in zip(*grads, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-5 * truth.abs().max().item())


def test_one_temperature_is_a_number():
    assert integration._as_number(torch.full((2, 3), 0.5)) == 0.5
    assert integration._as_number(torch.tensor([[0.5, 1.0]])).shape == (2,)
    assert integration._as_number(torch.empty(0, 3)).shape == (0,)


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


class Head(torch.nn.Linear):
    def forward(self, hidden_states, labels=None, temperature=None, sampling_mask=None):
        return "prime-rl's own", sampling_mask


class HeadWithoutMasks(torch.nn.Linear):
    def forward(self, hidden_states, labels=None, temperature=None):
        return "prime-rl's own", None


class AnotherHead(torch.nn.Linear):
    def forward(self, hidden_states, labels=None, temperatures=None):
        return "prime-rl's own", None


def fake_prime_rl(monkeypatch, head, gemma=None, version="0.9.0"):
    checkouts.say_version(monkeypatch, "prime-rl", version)
    names = ["prime_rl"]
    for name in integration.LAYERS.split(".")[1:]:
        names.append(f"{names[-1]}.{name}")
    modules = {"lm_head": ("FusedOutputLinear", head), "lm_head_gemma": ("GemmaFusedOutputLinear", gemma)}
    for name in [*names, *(f"{names[-1]}.{module}" for module, (_, value) in modules.items() if value is not None)]:
        module = ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    for module, (name, value) in modules.items():
        if value is not None:
            setattr(sys.modules[f"{names[-1]}.{module}"], name, value)


@pytest.fixture
def heads():
    """New classes, because the patch is of the class."""
    return [type(kind.__name__, (torch.nn.Linear,), dict(vars(kind))) for kind in (Head, HeadWithoutMasks, AnotherHead)]


def is_ours(head, **options):
    hidden, _, labels, temperature = problem()
    with torch.no_grad():
        return isinstance(head(hidden, labels, temperature, **options), dict)


@pytest.mark.parametrize("kind", [0, 1])
def test_heads_that_are_there_and_heads_to_come(kind, heads, monkeypatch):
    fake_prime_rl(monkeypatch, heads[kind])
    before = heads[kind](HIDDEN, VOCAB, bias=False)
    assert not is_ours(before)
    with patched_prime_rl():
        patch_prime_rl()
        assert is_ours(before)
        assert is_ours(heads[kind](HIDDEN, VOCAB, bias=False))
    assert not is_ours(before)
    patch_prime_rl()
    unpatch_prime_rl()
    unpatch_prime_rl()
    assert not is_ours(before)


def test_what_is_not_log_probabilities_stays_prime_rls(heads, monkeypatch):
    fake_prime_rl(monkeypatch, heads[0])
    head = heads[0](HIDDEN, VOCAB, bias=False)
    hidden, _, labels, temperature = problem()
    patch_prime_rl()
    assert head(hidden, labels) == ("prime-rl's own", None)
    assert head(hidden, None, temperature) == ("prime-rl's own", None)
    head.return_mask_logprobs = True
    rows = masks(labels)
    assert head(hidden, labels, temperature, rows)[1] is rows


# A process group of gloo that ends right behind a collective may hang (torch 2.13): the group outlives the test.
KEPT = []


def test_under_fsdp(heads, monkeypatch, tmp_path):
    """Which derives a class from the head's, and gives its output's gradient hooks."""
    fake_prime_rl(monkeypatch, heads[0])
    hidden, weight, labels, temperature = problem()
    grads = []
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    for sharded in (False, True):
        head = heads[0](HIDDEN, VOCAB, bias=False)
        head.weight.data = weight.clone()
        if sharded:
            fully_shard(head, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=True)
        leaf = hidden.clone().requires_grad_()
        with patched_prime_rl():
            head(leaf, labels, temperature)["logprobs"].sum().backward()
        grads.append((leaf.grad, head.weight.grad.full_tensor() if sharded else head.weight.grad))
    KEPT.append((dist.group.WORLD, head))
    dist.destroy_process_group()
    for plain, other in zip(*grads, strict=True):
        torch.testing.assert_close(other, plain)


def test_a_head_that_takes_something_else(heads, monkeypatch):
    """The other one stays, too."""
    fake_prime_rl(monkeypatch, heads[0], gemma=heads[2])
    with pytest.raises(RuntimeError, match=r"GemmaFusedOutputLinear\.forward must take .*; nothing was patched"):
        patch_prime_rl()
    assert not is_ours(heads[0](HIDDEN, VOCAB, bias=False))


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


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beside_prime_rls(layers, softcap, replay, dtype, device):
    plain, gemma = layers
    if replay and (
        softcap is not None or "sampling_mask" not in inspect.signature(plain.FusedOutputLinear.forward).parameters
    ):
        pytest.skip("this head of prime-rl replays no sampling mask")
    hidden, weight, labels, temperature = problem(dtype, device=device)
    rows = {"sampling_mask": masks(labels)} if replay else {}
    if softcap is None:
        head = plain.FusedOutputLinear(HIDDEN, VOCAB, chunk_size=4)
    else:
        head = gemma.GemmaFusedOutputLinear(HIDDEN, VOCAB, chunk_size=4, softcap=softcap)
    head.weight = torch.nn.Parameter(weight)
    found = []
    for patched in (True, False):
        leaf = hidden.clone().requires_grad_()
        head.weight.grad = None
        if patched:
            patch_prime_rl()
        output = head(leaf, labels, temperature, **rows)
        unpatch_prime_rl()
        output["logprobs"].mul(torch.linspace(-1, 2, TOKENS, device=device)).sum().backward()
        found.append([output["logprobs"], output["entropy"], leaf.grad, head.weight.grad])
    if dtype == torch.bfloat16:
        truth = expected_outputs(hidden, weight, labels, temperature, softcap, rows.get("sampling_mask"))[0]
        mine, other = (oracles.max_error(pair[0], truth) for pair in found)
        assert mine < 0.1 * other
        return
    for i, (mine, other) in enumerate(zip(*found, strict=True)):
        assert mine.dtype == other.dtype
        if not (replay and i == 1):  # prime-rl's entropy is of the whole vocabulary
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-5)


def test_a_model_that_prime_rl_gave_its_head(layers):
    hf = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = hf.Qwen3ForCausalLM(hf.Qwen3Config(vocab_size=VOCAB, num_hidden_layers=1, head_dim=8, **sizes))
    ids = torch.randint(VOCAB, (BATCH, TOKENS))
    positions = torch.arange(1, TOKENS + 1)[None]  # as prime-rl's forward counts them
    temperature = 0.5 + torch.rand(BATCH, TOKENS)
    z = model(ids, position_ids=positions).logits / temperature[..., None]
    expected = oracles.logits_logprobs(z, ids)
    layers[0].inject_prime_lm_head(model, chunk_size=3)
    with patched_prime_rl():
        output = model(input_ids=ids, position_ids=positions, labels=ids, temperature=temperature)
    for mine, truth in zip((output["logprobs"], output["entropy"]), expected, strict=True):
        torch.testing.assert_close(mine, truth.float(), rtol=1e-4, atol=1e-5)
