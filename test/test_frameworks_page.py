"""Each recipe of docs/frameworks.md is run with a stand-in for its framework; full logits are the truth."""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

PAGE = Path(__file__).resolve().parent.parent / "docs" / "frameworks.md"
RECIPES = dict(
    re.findall(r"^## (\S+)\n.*?```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
)
HIDDEN, VOCAB, BATCH, LENGTH = 12, 40, 2, 8
MEGATRON = {"megatron.core.tensor_parallel": {"gather_from_sequence_parallel_region": lambda hidden, group: hidden}}


@pytest.fixture
def run(monkeypatch):
    """-> a function: a framework's name and {module: its names} of the stand-in -> the names of its recipe."""

    def run(name, modules):
        for path, names in modules.items():
            parts = path.split(".")
            for end in range(1, len(parts) + 1):
                module = ModuleType(".".join(parts[:end]))
                module.__path__ = []
                monkeypatch.setitem(sys.modules, module.__name__, module)
            vars(module).update(names)
            if len(parts) > 1:
                setattr(sys.modules[".".join(parts[:-1])], parts[-1], module)
        exec(compile(RECIPES[name], name, "exec"), names := {"__name__": "page"})
        return SimpleNamespace(**names)

    return run


@pytest.fixture
def group():
    """Of one rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def x():
    """hidden (B, T, H), weight (V, H) and labels (B, T), with the log-probabilities of all ids in float64."""
    hidden, weight = (
        torch.randn(BATCH, LENGTH, HIDDEN, requires_grad=True),
        torch.randn(VOCAB, HIDDEN, requires_grad=True),
    )
    log_p = torch.log_softmax(hidden.detach().double() @ weight.detach().double().T, -1)
    return SimpleNamespace(hidden=hidden, weight=weight, labels=torch.randint(VOCAB, (BATCH, LENGTH)), log_p=log_p)


def at(log_p, ids):
    return log_p.gather(-1, ids[..., None])[..., 0]


def assert_close(found, truth):
    torch.testing.assert_close(found.detach().double(), truth, rtol=1e-5, atol=1e-5)


def test_recipes_are_short():
    assert len(RECIPES) == 8
    assert all(len(re.findall(r"\S.*\n", recipe)) <= 15 for recipe in RECIPES.values())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_megatron(run, group, x, sequence_parallel):
    layer = SimpleNamespace(weight=x.weight, tp_group=group, sequence_parallel=sequence_parallel)
    loss_mask = torch.ones(BATCH, LENGTH).index_fill(1, torch.tensor([0]), 0)
    losses = run("Megatron-Core", MEGATRON).fused_losses(
        hidden_states=x.hidden.transpose(0, 1), output_layer=layer, output_weight=None, labels=x.labels,
        loss_mask=loss_mask, scale_logits=None, context=None,
    )  # fmt: skip
    assert_close(losses, -at(x.log_p, x.labels) * loss_mask)
    losses.sum().backward()
    assert x.hidden.grad.any()


@pytest.mark.parametrize("inference_only", [False, True])
def test_skyrl(run, group, x, inference_only):
    path = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
    fused = run("SkyRL", {path: {}}).model_utils._fused_lm_head_logprob_apply
    logps = fused("torch", x.hidden, x.weight, x.labels, 0, VOCAB, 4, group, inference_only)
    assert_close(logps, at(x.log_p, x.labels))
    assert logps.requires_grad != inference_only


@pytest.mark.parametrize("inference_only", [False, True])
def test_nemo_rl(run, group, x, inference_only):
    """Hidden states of sequence-parallel ranks may be longer than the target."""
    utils = run("NeMo-RL", {**MEGATRON, "nemo_rl.distributed.model_utils": {}}).model_utils
    fused, target = utils.from_parallel_hidden_states_to_logprobs, x.labels[:, :-1]
    logps = fused(x.hidden.transpose(0, 1), x.weight, None, target, 0, VOCAB, group, inference_only, None, chunk_size=4)
    assert_close(logps, at(x.log_p[:, : LENGTH - 2], target[:, 1:]))
    assert logps.requires_grad != inference_only


def test_prime_rl(run, x):
    head = type("FusedOutputLinear", (SimpleNamespace,), {})
    run("prime-rl", {"prime_rl.trainer.models.layers.lm_head": {"FusedOutputLinear": head}})
    temperature = torch.full((BATCH, LENGTH), 0.7)
    log_p = torch.log_softmax(x.log_p / 0.7, -1)
    found = head(weight=x.weight).forward(x.hidden, x.labels, temperature)
    assert_close(found["logprobs"], at(log_p, x.labels))
    assert_close(found["entropy"], -(log_p.exp() * log_p).sum(-1))
    mask = torch.stack([x.labels, (x.labels + 1) % VOCAB, torch.full_like(x.labels, -1)], -1)
    replayed = head(weight=x.weight).forward(x.hidden, x.labels, temperature, mask)["logprobs"]
    assert_close(replayed, torch.log_softmax(log_p.gather(-1, mask[..., :2]), -1)[..., 0])
    temperature[0, 0] = 1
    with pytest.raises(ValueError, match="one temperature"):
        head(weight=x.weight).forward(x.hidden, x.labels, temperature)


def test_openrlhf(run):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    actor = type("Actor", (SimpleNamespace,), {})
    run("OpenRLHF", {"openrlhf.models.actor": {"Actor": actor}})
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    ids, mask, actions = torch.randint(VOCAB, (BATCH, LENGTH)), torch.ones(BATCH, LENGTH).long(), torch.ones(BATCH, 3)
    mask[0, :2], actions[1, -1] = 0, 0
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits.double() / 0.7
    truth = at(torch.log_softmax(logits[:, -4:-1], -1), ids[:, -3:]).detach() * actions
    logps, output = actor(model=model, temperature=0.7).forward(ids, actions, mask, True, return_entropy=True)
    assert_close(logps, truth)
    assert output.entropy.shape == ids.shape


def chunked(wrapper, pred, labels, global_valid_tokens=None, **inputs):
    """torchtitan's, without FSDP and metrics."""
    total, grads = 0.0, []
    for hidden, ids in zip(pred.chunk(wrapper.num_chunks, 1), labels.chunk(wrapper.num_chunks, 1), strict=True):
        hidden = hidden.detach().requires_grad_()
        loss, _ = wrapper.loss_fn(wrapper.lm_head(hidden), ids, global_valid_tokens, **inputs)
        loss.backward()
        total, grads = total + loss.detach(), [*grads, hidden.grad]
    return total, torch.cat(grads, 1)


def test_torchtitan(run, x):
    def cross_entropy(logits, labels, tokens):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens, {}

    wrapper_class = type("ChunkedLossWrapper", (SimpleNamespace,), {"__call__": chunked})
    wrapper = wrapper_class(lm_head=torch.nn.Linear(HIDDEN, VOCAB), num_chunks=4, loss_fn=cross_entropy)
    x.labels[0, 3] = -100
    results = []
    for patched in (False, True):
        if patched:
            run("torchtitan", {"torchtitan.components.loss": {"ChunkedLossWrapper": wrapper_class}})
        results.append([*wrapper(x.hidden, x.labels, torch.tensor(15.0)), wrapper.lm_head.weight.grad])
        wrapper.lm_head.zero_grad()
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
    assert (wrapper.num_chunks, wrapper.loss_fn) == (4, cross_entropy)
    assert "forward" not in vars(wrapper.lm_head)


@pytest.mark.parametrize("name", ["ms-swift", "Axolotl"])
def test_recipes_that_patch_liger(run, name):
    loss = pytest.importorskip("liger_kernel.chunked_loss", reason="liger-kernel is not installed")
    recipe = run(name, {"axolotl.integrations.base": {"BasePlugin": object}})
    if name == "Axolotl":
        recipe.LigerRL().pre_model_load({})
    assert loss.LigerFusedLinearGRPOLoss.__module__.startswith("liger_rl.")
