"""logits_logprobs, in PyTorch and in Triton: its corners. Values are the fuzzer's, properties test_properties.py's."""

import math

import pytest
import torch

import oracles
from devices import NEEDS_GPU
from head_calls import run_triton
from liger_rl import LogitTransform, logits_logprobs

TRANSFORMS = [{}, {"temperature": 0.7}, {"temperature": 1.6, "softcap": 2.0, "scale": 1.7}]
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU compiles what the interpreter would run")


@pytest.fixture(params=["cpu", pytest.param("interpreter", marks=WITHOUT_GPU), pytest.param("cuda", marks=NEEDS_GPU)])
def device(request, monkeypatch) -> torch.device:
    if request.param == "interpreter":
        run_triton(monkeypatch)
    return torch.device("cuda" if request.param == "cuda" else "cpu")


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
def test_rows_of_several_blocks(dtype, transform, device):
    """Two whole blocks of a row, and a part of one: within twice the error of eager PyTorch."""
    logits, targets = problem((2, 4), 2100, dtype, device)
    found = solve(logits, targets, transform=LogitTransform(**transform))
    eager = solve(logits, targets, lambda x, y: oracles.logits_logprobs(x.float(), y, **transform))
    truth = solve(logits.double(), targets, oracles.logits_logprobs, **transform)
    assert [t.dtype for t in found] == [torch.float32, torch.float32, dtype]
    for mine, other, expected, kind in zip(found, eager, truth, (torch.float32, torch.float32, dtype), strict=True):
        assert oracles.max_error(mine, expected) <= oracles.error_budget(other, expected, kind)


@pytest.mark.parametrize("view", ["drop_first", "transposed_vocabulary", "every_other"])
def test_strided_logits(view, device):
    views = {
        "drop_first": lambda x: x[:, 1:],
        "transposed_vocabulary": lambda x: x.mT.contiguous().mT[:, :-1],
        "every_other": lambda x: x[:, :-1, ::2],
    }
    logits, _ = problem((3, 6), device=device)
    seen = views[view](logits)
    targets = torch.randint(seen.shape[-1], seen.shape[:-1], device=device)
    expected = solve(logits.double(), targets, lambda x, y: oracles.logits_logprobs(views[view](x), y))
    found = solve(logits, targets, lambda x, y: logits_logprobs(views[view](x), y, entropy=True))
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-5)


def test_rows_without_gradient_may_hold_anything(device):
    logits, targets = torch.randn(5, 130, device=device), torch.arange(5, device=device)
    logits[1], logits[2, 5], logits[3] = math.nan, math.inf, math.nan
    mask = torch.tensor([True, True, True, False, True], device=device)
    factors = torch.tensor([1.0, 0.0, 0.0, 3.0, -2.0], device=device)
    leaf = logits.requires_grad_()
    found = logits_logprobs(leaf, targets, mask=mask, entropy=True)
    assert found.logps[1].isnan()
    assert found.logps[3] == 0.0
    torch.autograd.backward([found.logps, found.entropy], [factors, factors])
    assert leaf.grad.isfinite().all()
    assert leaf.grad.any(1).tolist() == [True, False, False, False, True]


def test_a_nan_in_a_row_that_counts_stays(device):
    logits, targets = torch.randn(2, 130, device=device), torch.tensor([3, 4], device=device)
    logits[1, 100] = math.nan
    logps, entropy, grad = solve(logits, targets)
    assert logps.isnan().tolist() == entropy.isnan().tolist() == [False, True]
    assert grad[0].isfinite().all()
    assert grad[1].isnan().any()


def test_a_sure_token_keeps_its_digits(device):
    """The target's own gradient is 1 - p as the log-probability has it, from 1/2 to 1e-6, and no difference of sums."""
    logits = torch.zeros(40, 2, device=device)
    logits[:, 0] = torch.linspace(0.1, 14.0, 40, device=device)
    leaf = logits.requires_grad_()
    logps = logits_logprobs(leaf, torch.zeros(40, dtype=torch.long, device=device)).logps
    logps.sum().backward()
    torch.testing.assert_close(leaf.grad[:, 0].double(), -logps.detach().double().expm1(), rtol=1e-6, atol=0.0)


def test_only_the_target_allowed(device):
    logits = torch.full((2, 9), -math.inf, device=device)
    logits[:, 4] = 1.5
    for values in solve(logits, torch.tensor([4, 4], device=device)):
        torch.testing.assert_close(values, torch.zeros_like(values), rtol=0.0, atol=1e-6)


def test_large_logits_stay_finite_and_at_most_zero(device):
    logits, targets = problem((40,), device=device)
    logps, entropy, grad = solve(logits * 1e4, targets)
    assert all(values.isfinite().all() for values in (logps, entropy, grad))
    assert (logps <= 0).all()
    assert (entropy >= 0).all()


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
