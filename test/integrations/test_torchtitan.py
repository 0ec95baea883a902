"""torchtitan's chunked loss with our head, beside its own; where torchtitan is installed."""

import copy
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from liger_rl.integrations.torchtitan import patch_torchtitan, patched_torchtitan, unpatch_torchtitan

losses = pytest.importorskip("torchtitan.components.loss", reason="torchtitan is not installed")


def own_module(path):
    """A file of torchtitan's, without the package around it, which asks for vLLM."""
    spec = importlib.util.spec_from_file_location("torchtitan.of_a_test", Path(losses.__file__).parents[1] / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


rl = own_module("experiments/rl/losses/dapo.py")

BATCH, TOKENS, HIDDEN, VOCAB = 2, 8, 12, 137


class Model(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.body, self.lm_head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=bias)


def loss_of(kind, chunks=4):
    inner = {"sft": losses.CrossEntropyLoss, "rl": rl.DAPOLoss}[kind].Config()
    return losses.ChunkedLossWrapper(losses.ChunkedLossWrapper.Config(num_chunks=chunks, loss_fn=inner))


def inputs(kind):
    labels = torch.randint(VOCAB, (BATCH, TOKENS))
    if kind == "sft":
        labels[0, :3] = losses.IGNORE_INDEX
        return labels, {}
    old = torch.full((BATCH, TOKENS), -5.0)
    old[1, 2] = float("nan")
    mask = torch.rand(BATCH, TOKENS) < 0.7
    return labels, {"generator_logprobs": old, "advantages": torch.randn(BATCH, TOKENS), "loss_mask": mask}


def step(loss, model, hidden, labels, more):
    model.zero_grad()
    loss.set_lm_head(model.lm_head)
    value, metrics = loss(model.body(hidden), labels, torch.tensor(11.0), **more)
    value.backward()
    return value, metrics, [p.grad for p in model.parameters()]


def assert_same(mine, other):
    torch.testing.assert_close(mine[0], other[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine[1], other[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine[2], other[2], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["sft", "rl"])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_metrics_and_gradients(kind, bias):
    model, hidden, (labels, more) = Model(bias), 3 * torch.randn(BATCH, TOKENS, HIDDEN), inputs(kind)
    other = step(loss_of(kind), copy.deepcopy(model), hidden, labels, more)
    loss = loss_of(kind)
    with patched_torchtitan():
        patch_torchtitan()
        mine = step(loss, model, hidden, labels, more)
        with torch.no_grad():  # as its validation calls it
            value, _ = loss(model.body(hidden), labels, torch.tensor(11.0), **more)
        assert torch.equal(value, mine[0].detach())
    assert_same(mine, other)
    assert_same(step(loss, model, hidden, labels, more), other)
    assert "forward" not in vars(model.lm_head)
    assert loss.num_chunks == 4


def test_no_logits_are_made(monkeypatch):
    model, hidden, (labels, more) = Model(), torch.randn(BATCH, TOKENS, HIDDEN), inputs("rl")
    with patched_torchtitan():
        loss = loss_of("rl", chunks=3)  # which does not divide the tokens
        monkeypatch.setattr(nn.Linear, "forward", lambda *args: pytest.fail("the head was called for logits"))
        loss.set_lm_head(model.lm_head)
        loss(hidden, labels, None, **more)


def test_plain_losses_stay():
    """Those that are given logits."""
    logits, labels = torch.randn(BATCH, TOKENS, VOCAB), torch.randint(VOCAB, (BATCH, TOKENS))
    plain = losses.CrossEntropyLoss(losses.CrossEntropyLoss.Config())
    expected = plain(logits, labels)[0], losses.compute_logprobs(logits, labels)
    with patched_torchtitan():
        assert torch.equal(plain(logits, labels)[0], expected[0])
        assert torch.equal(losses.compute_logprobs(logits, labels), expected[1])


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_under_fsdp(kind, lone_rank):
    hidden, (labels, more) = torch.randn(BATCH, TOKENS, HIDDEN), inputs(kind)
    model = Model()
    other = step(loss_of(kind), copy.deepcopy(model), hidden, labels, more)
    for module in (model.body, model.lm_head):
        fully_shard(module, mesh=lone_rank, mp_policy=MixedPrecisionPolicy())
    with patched_torchtitan():
        mine = step(loss_of(kind), model, hidden, labels, more)
    assert "forward" not in vars(model.lm_head)
    assert_same((*mine[:2], [grad.full_tensor() for grad in mine[2]]), other)


class Softcapped(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden).tanh()


class OtherLoss(losses.MSELoss):
    pass


def test_what_is_not_served():
    patch_torchtitan()
    with pytest.raises(ValueError, match="found a Softcapped with its own"):
        loss_of("sft").set_lm_head(Softcapped(HIDDEN, VOCAB))
    head = nn.Linear(HIDDEN, VOCAB)
    head.forward = head.forward  # as torchtitan does for tensor parallelism
    with pytest.raises(ValueError, match="found a Linear with its own"):
        loss_of("sft").set_lm_head(head)
    loss = loss_of("sft")
    loss.loss_fn = OtherLoss(losses.MSELoss.Config())
    with pytest.raises(ValueError, match="found OtherLoss"):
        loss.set_lm_head(nn.Linear(HIDDEN, VOCAB))
    assert loss.lm_head is None
    unpatch_torchtitan()
    loss.set_lm_head(nn.Linear(HIDDEN, VOCAB))
