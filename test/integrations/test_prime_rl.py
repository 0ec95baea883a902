"""prime-rl's heads with ours in their place, and beside its own where they are. Full logits: test_frameworks.py."""

import importlib
import inspect
import sys
from functools import partial
from types import ModuleType

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import checkouts
import oracles
from framework_calls import BATCH, HIDDEN, VOCAB, Case, alone, full_logits, problem, solve
from framework_calls import LENGTH as TOKENS
from liger_rl.integrations import prime_rl as integration
from liger_rl.integrations.prime_rl import patch_prime_rl, patched_prime_rl, unpatch_prime_rl


@pytest.fixture
def x():
    return problem(Case("prime_rl", "of tokens", replay=True))


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


def test_heads_that_are_there_and_heads_to_come(head, x):
    """What is not log-probabilities stays prime-rl's."""
    hidden, labels, temperature = x.hidden, x.labels, x.temperature
    patch_prime_rl()
    for made in (head, type(head)(HIDDEN, VOCAB, bias=False)):
        assert isinstance(made(hidden, labels, temperature), dict)
    assert head(hidden, labels) == head(hidden, None, temperature) == ("prime-rl's own", None)
    head.return_mask_logprobs = True
    assert head(hidden, labels, temperature) == ("prime-rl's own", None)
    if "sampling_mask" in inspect.signature(integration.PRIME_RL.original("FusedOutputLinear.forward")).parameters:
        assert head(hidden, labels, temperature, x.rows)[1] is x.rows
    unpatch_prime_rl()
    del head.return_mask_logprobs
    assert head(hidden, labels, temperature) == ("prime-rl's own", None)


def test_under_fsdp(head, x, lone_rank):
    """Which derives a class from the head's, and gives its output's gradient hooks."""
    grads = []
    for sharded in (False, True):
        head.zero_grad()
        if sharded:
            fully_shard(head, mesh=lone_rank, reshard_after_forward=True)
        leaf = x.hidden.clone().requires_grad_()
        with patched_prime_rl():
            head(leaf, x.labels, x.temperature)["logprobs"].sum().backward()
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
    case = Case("prime_rl", "of tokens", softcap, replay=replay, dtype=dtype)

    def called(rank, case, x, hidden, weight):
        head = plain.FusedOutputLinear if softcap is None else partial(gemma.GemmaFusedOutputLinear, softcap=softcap)
        head = head(HIDDEN, VOCAB, chunk_size=4)
        head.weight = weight
        output = head(hidden, x.labels, x.temperature, **({"sampling_mask": x.rows} if replay else {}))
        # prime-rl's entropy of a replay is of the whole vocabulary.
        return output["logprobs"], None if replay else output["entropy"].detach()

    theirs = solve(alone(device), case, called)
    with patched_prime_rl():
        mine = solve(alone(device), case, called)
    if dtype == torch.float32:
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5)
        return
    x = problem(case)
    truth, _ = full_logits(x, case, x.hidden, x.weight)
    assert oracles.max_error(mine["logps"], truth) < 0.1 * oracles.max_error(theirs["logps"], truth)


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
