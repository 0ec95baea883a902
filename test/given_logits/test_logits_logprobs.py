"""logits_logprobs: log-probabilities of logits the caller already holds."""

import math

import pytest
import torch

import oracles
from liger_rl import LogitTransform, logits_logprobs

TRANSFORMS = [{}, {"temperature": 0.7}, {"temperature": 1.6, "softcap": 2.0, "scale": 1.7}]


def problem(shape=(3, 5), vocab=129, dtype=torch.float32, device="cpu"):
    logits = (3 * torch.randn(*shape, vocab)).to(device, dtype)
    return logits, torch.randint(vocab, shape).to(device)


def functional(outputs):
    """A fixed random linear functional of log-probabilities and entropies."""
    generator = torch.Generator().manual_seed(7)
    return sum((values * torch.randn(values.shape, generator=generator).to(values)).sum() for values in outputs[:2])


def solve(logits, targets, function=logits_logprobs, **options):
    leaf = logits.detach().requires_grad_()
    if function is logits_logprobs:
        options["entropy"] = True
    logps, entropy = function(leaf, targets, **options)[:2]
    functional((logps, entropy)).backward()
    return logps.detach(), entropy.detach(), leaf.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
def test_values_and_gradients(dtype, transform, device):
    logits, targets = problem((4, 20), 517, dtype, device)
    found = solve(logits, targets, transform=LogitTransform(**transform))
    eager = solve(logits, targets, lambda x, y: oracles.logits_logprobs(x.float(), y, **transform))
    truth = solve(logits.double(), targets, oracles.logits_logprobs, **transform)
    assert [t.dtype for t in found] == [torch.float32, torch.float32, dtype]
    for mine, other, expected, kind in zip(found, eager, truth, (torch.float32, torch.float32, dtype), strict=True):
        assert oracles.max_error(mine, expected) <= oracles.error_budget(other, expected, kind)


@pytest.mark.parametrize("view", ["drop_last", "drop_first", "transposed_vocabulary", "transposed_rows", "every_other"])
def test_strided_logits(view, device):
    views = {
        "drop_last": lambda x: x[:, :-1],
        "drop_first": lambda x: x[:, 1:],
        "transposed_vocabulary": lambda x: x.mT.contiguous().mT[:, :-1],
        "transposed_rows": lambda x: x.transpose(0, 1)[:5].transpose(0, 1),
        "every_other": lambda x: x[:, :-1, ::2],
    }
    logits, _ = problem((3, 6), device=device)
    seen = views[view](logits)
    targets = torch.randint(seen.shape[-1], seen.shape[:-1], device=device)
    expected = solve(logits.double(), targets, lambda x, y: oracles.logits_logprobs(views[view](x), y))
    leaf = logits.detach().requires_grad_()
    outputs = logits_logprobs(views[view](leaf), targets, entropy=True)
    functional(outputs).backward()
    for mine, other in zip((*outputs[:2], leaf.grad), expected, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-5)
    if view == "drop_last":
        assert (leaf.grad[:, -1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_nothing_under_the_mask_matters(garbage, dtype, device):
    logits, targets = problem((4, 9), dtype=dtype, device=device)
    keep = torch.rand(4, 9, device=device) < 0.5
    clean = solve(logits, targets, mask=keep)
    dirty = logits.masked_fill(~keep[..., None], garbage)
    for wrong_id in (10**9, -(10**9), -100):
        found = solve(dirty, targets.masked_fill(~keep, wrong_id), mask=keep)
        for mine, expected in zip(found, clean, strict=True):
            assert torch.equal(mine, expected)
    for values in clean:
        assert (values[~keep] == 0).all()


def test_rows_without_gradient_get_exactly_zero(device):
    logits, targets = problem((12,), device=device)
    leaf = logits.requires_grad_()
    (logits_logprobs(leaf, targets).logps[::3].sum()).backward()
    assert leaf.grad.abs().sum(-1).nonzero().flatten().tolist() == [0, 3, 6, 9]


def test_only_the_target_allowed(device):
    logits = torch.full((2, 9), -math.inf, device=device)
    logits[:, 4] = 1.5
    logps, entropy, grad = solve(logits, torch.tensor([4, 4], device=device))
    for values in (logps, entropy, grad):
        torch.testing.assert_close(values, torch.zeros_like(values), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("magnitude", [1e2, 1e4])
def test_large_logits_stay_finite_and_at_most_zero(magnitude, device):
    logits, targets = problem((40,), device=device)
    logps, entropy, grad = solve(logits * magnitude, targets)
    assert all(values.isfinite().all() for values in (logps, entropy, grad))
    assert (logps <= 0).all()
    assert (entropy >= 0).all()


def test_second_backward_gives_the_same_gradients(device):
    logits, targets = problem(device=device)
    leaf = logits.requires_grad_()
    loss = functional(logits_logprobs(leaf, targets, entropy=True))
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(loss, leaf)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("name", "error", "arguments"),
    [
        ("logits", ValueError, {"logits": torch.zeros(129)}),
        ("logits", ValueError, {"logits": torch.zeros(3, 5, 0)}),
        ("logits", TypeError, {"logits": torch.zeros(3, 5, 129, dtype=torch.float64)}),
        ("logits", TypeError, {"logits": None}),
        ("targets", ValueError, {"targets": torch.zeros(3, 4, dtype=torch.int64)}),
        ("targets", TypeError, {"targets": torch.zeros(3, 5)}),
        ("targets", ValueError, {"targets": torch.zeros(3, 5, dtype=torch.int64, device="meta")}),
        ("targets", ValueError, {"targets": torch.full((3, 5), 129)}),
        ("mask", ValueError, {"mask": torch.ones(15)}),
        ("mask", TypeError, {"mask": [1]}),
        ("mask", ValueError, {"mask": torch.full((3, 5), 0.5)}),
        ("logits", TypeError, {"logits": torch.zeros(3, 5, 129).to_sparse()}),
        ("entropy", TypeError, {"entropy": 1}),
        ("fixed_shape", TypeError, {"fixed_shape": None}),
        ("transform", TypeError, {"transform": {"temperature": 1.0}}),
    ],
)
def test_bad_arguments_are_named(name, error, arguments):
    logits, targets = problem()
    with pytest.raises(error, match=rf"\b{name}\b"):
        logits_logprobs(**{"logits": logits, "targets": targets, **arguments})
