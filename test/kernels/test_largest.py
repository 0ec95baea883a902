"""`topk` from the peaks of parts, beside a sort of the logits: the kernels of `largest_triton`."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from liger_rl import LogitTransform, linear_logprobs
from liger_rl.kernels import largest_triton
from liger_rl.kernels.statistics import most_from_peaks
from tolerances import DEVICE, LOW, interpret

TOKENS, VOCAB, COUNTS = (700, 40_000, (1, 5, 64, 78)) if DEVICE.type == "cuda" else (12, 1500, (1, 2))


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    interpret(monkeypatch)


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """The K of each call of the kernels."""
    found, largest = [], largest_triton.largest
    monkeypatch.setattr(largest_triton, "largest", lambda *args: found.append(args[2]) or largest(*args))
    return found


def head(vocab: int = VOCAB, size: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = torch.randn(TOKENS, size), torch.randn(vocab, size) * 2 / size**0.5
    return hidden.to(DEVICE, LOW), weight.to(DEVICE, LOW), torch.randn(vocab).to(DEVICE)


def sorted_logits(hidden: Tensor, weight: Tensor, bias: Tensor, transform: LogitTransform) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids in float64, the smaller id first where logits are equal in float32."""
    x = hidden.double() @ weight.double().T + bias.double()
    if transform.softcap is not None:
        x = transform.softcap * torch.tanh(x / transform.softcap)
    return (x / transform.temperature).log_softmax(-1).sort(dim=-1, descending=True, stable=True)


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(softcap=8.0, temperature=0.7)], ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_the_likeliest_ids(count, transform, calls):
    hidden, weight, bias = head()
    mask = torch.rand(TOKENS, device=DEVICE) < 0.8
    targets = torch.randint(VOCAB, (TOKENS,), device=DEVICE)
    found = linear_logprobs(
        hidden, weight, targets, mask=mask, bias=bias, topk=count, transform=transform, entropy=True
    )
    assert calls == [count]
    logps, ids = sorted_logits(hidden, weight, bias, transform)
    torch.testing.assert_close(found.topk_logps[mask].double(), logps[mask, :count], rtol=1e-4, atol=1e-4)
    # Ids may change places with ids of the same logit, to rounding.
    at_found = torch.gather(logps.gather(1, ids.argsort(1)), 1, found.topk_ids.clamp(min=0))
    torch.testing.assert_close(at_found[mask], logps[mask, :count], rtol=1e-4, atol=1e-4)
    assert (found.topk_ids[mask].sort(1).values.diff(dim=1) > 0).all()
    assert found.topk_ids[~mask].eq(-1).all()
    assert found.topk_logps[~mask].eq(0).all()
    torch.testing.assert_close(
        found.logps, linear_logprobs(hidden, weight, targets, mask=mask, bias=bias, transform=transform).logps
    )


def test_equal_logits_give_the_smaller_ids(calls):
    """A hundred rows of the weight are the same row, in several parts; others are banned."""
    hidden, weight, _ = head()
    count, vocab = max(COUNTS), weight.shape[0]
    same = torch.randperm(vocab)[:100].sort().values.to(DEVICE)
    weight[same] = hidden[:1].mul(0.5)
    bias = torch.zeros(vocab, device=DEVICE)
    bias[same] = 50.0
    bias[same[:1]] = -math.inf
    found = linear_logprobs(hidden, weight, same[1].expand(TOKENS), bias=bias, topk=count)
    assert calls == [count]
    assert torch.equal(found.topk_ids, same[1 : count + 1].expand(TOKENS, -1))


def test_every_id_is_banned_but_one(calls):
    hidden, weight, bias = head()
    bias.fill_(-math.inf)
    bias[700] = 0.0
    found = linear_logprobs(hidden, weight, torch.full((TOKENS,), 700, device=DEVICE), bias=bias, topk=2)
    assert calls == [2]
    assert found.topk_ids[:, 0].eq(700).all()
    assert found.topk_ids[:, 1].eq(0).all()
    assert found.topk_logps[:, 0].eq(0).all()
    assert found.topk_logps[:, 1].eq(-math.inf).all()


def test_spans_of_tokens_and_two_runs_give_the_same(calls, monkeypatch):
    hidden, weight, bias = head()
    targets = torch.zeros(TOKENS, dtype=torch.long, device=DEVICE)
    first = linear_logprobs(hidden, weight, targets, bias=bias, topk=2)
    monkeypatch.setattr(largest_triton, "LOGITS_BYTES", 5 * 2 * 512)
    second = linear_logprobs(hidden, weight, targets, bias=bias, topk=2)
    assert len(calls) == 2
    assert torch.equal(first.topk_ids, second.topk_ids)
    assert torch.equal(first.topk_logps, second.topk_logps)


def test_gradients_are_those_of_full_logits(calls):
    hidden, weight, bias = head()
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
    targets = torch.randint(VOCAB, (TOKENS,), device=DEVICE)
    found = linear_logprobs(leaves[0], leaves[1], targets, bias=leaves[2], topk=2)
    slopes = torch.randn(TOKENS, 2, device=DEVICE)
    grads = torch.autograd.grad((found.topk_logps * slopes).sum() + found.logps.sum(), leaves)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    log_p = (wide[0] @ wide[1].T + wide[2]).log_softmax(-1)
    loss = (log_p.gather(1, found.topk_ids) * slopes).sum() + log_p.gather(1, targets[:, None]).sum()
    for grad, truth in zip(grads, torch.autograd.grad(loss, wide), strict=True):
        assert (grad.double() - truth).norm() < 6e-3 * truth.norm()
    assert calls == [2]


@pytest.mark.parametrize("refused", ["too many", "chunk", "batch_invariant", "lists"])
def test_other_calls_take_tiles(refused, calls):
    hidden, weight, bias = head()
    count = most_from_peaks(VOCAB) + 1 if refused == "too many" else 2
    options = {"chunk": {"chunk_vocab": 256}, "batch_invariant": {"batch_invariant": True}}.get(refused, {})
    targets = torch.zeros(TOKENS, *([3] if refused == "lists" else []), dtype=torch.long, device=DEVICE)
    found = linear_logprobs(hidden, weight, targets, bias=bias, topk=count, **options)
    logps, _ = sorted_logits(hidden, weight, bias, LogitTransform())
    torch.testing.assert_close(found.topk_logps.double(), logps[:, :count], rtol=1e-4, atol=1e-4)
    assert not calls
