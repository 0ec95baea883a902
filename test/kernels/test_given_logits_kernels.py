"""Statistics and gradients of rows of given logits: Triton's kernels beside reference ones, and both beside float64."""

import math

import pytest
import torch

import oracles
from liger_rl import LogitTransform
from liger_rl.kernels import compiled, reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNELS = pytest.mark.parametrize("kernels", [reference, compiled], ids=["eager", "triton"])
TRANSFORMS = [
    LogitTransform(),
    LogitTransform(temperature=0.7),
    LogitTransform(softcap=4.0, scale=0.5, temperature=1.3),
]


def strided(batch: int, positions: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    whole = (3 * torch.randn(batch, positions + 2, vocab + 7)).to(DEVICE, dtype)
    return whole[:, 1:-1, :vocab]


def problem(layout: str, vocab: int, dtype: torch.dtype):
    """-> logits, targets, mask: some tokens masked, one negative and one outside the vocabulary."""
    logits = strided(3, 6, vocab, dtype)
    targets = torch.randint(vocab, (3, 5 if layout == "spare position" else 6), device=DEVICE)
    targets[0, 1], targets[2, 3] = -100, vocab
    mask = torch.rand(targets.shape, device=DEVICE) < 0.7
    if layout == "packed":
        return logits[1], targets[0].int(), None
    return logits, targets, mask if layout == "masked" else mask.float()


def counted(logits, targets, mask):
    inside = (targets >= 0) & (targets < logits.shape[-1])
    return inside if mask is None else inside & (mask != 0)


def expected(logits, targets, mask, transform, grad_logps, grad_entropy):
    """float64 log-probabilities, entropies and the gradient, 0 where a token does not count."""
    leaf = logits.double().requires_grad_()
    used = leaf if targets.dim() == 1 else leaf[:, : targets.shape[1]]
    counts = counted(logits, targets, mask)
    logps, entropy = oracles.logits_logprobs(used, torch.where(counts, targets, 0).long(), **vars(transform))
    logps, entropy = (torch.where(counts, values, 0.0) for values in (logps, entropy))
    loss = (logps.flatten() * grad_logps).sum()
    if grad_entropy is not None:
        loss = loss + (entropy.flatten() * grad_entropy).sum()
    (grad,) = torch.autograd.grad(loss, leaf)
    return logps.detach().flatten(), entropy.detach().flatten(), grad


@KERNELS
@pytest.mark.parametrize("layout", ["masked", "spare position", "packed"])
@pytest.mark.parametrize("vocab", [5, 129, 2100])  # 2100: two whole blocks of a row, and a part of one
@pytest.mark.parametrize("transform", TRANSFORMS, ids=["plain", "heated", "softcap"])
@pytest.mark.parametrize("entropy", [False, True])
def test_values_and_gradients(kernels, layout, vocab, transform, entropy):
    logits, targets, mask = problem(layout, vocab, torch.float32)
    grad_logps = torch.randn(targets.numel(), device=DEVICE)
    grad_logps[2] = 0.0
    grad_entropy = torch.randn(targets.numel(), device=DEVICE) if entropy else None
    logps, entropies, grad = expected(logits, targets, mask, transform, grad_logps, grad_entropy)
    found = kernels.fold_rows(logits, targets, mask, transform, entropy=entropy)
    torch.testing.assert_close(found.logps.double(), logps, rtol=1e-5, atol=2e-6)
    assert (found.logps[~counted(logits, targets, mask).flatten()] == 0).all()
    assert (found.entropy is not None) == entropy
    if entropy:
        torch.testing.assert_close(found.entropy.double(), entropies, rtol=1e-5, atol=1e-5)
    out = torch.full_like(logits, math.nan)
    kernels.grad_rows(logits, targets, mask, transform, found, (grad_logps, grad_entropy), out)
    torch.testing.assert_close(out.double(), grad, rtol=1e-5, atol=2e-6)
    assert (out[grad == 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("entropy", [False, True])
def test_16_bit_logits(dtype, entropy):
    logits, targets, mask = problem("spare position", 300, dtype)
    grad = torch.randn(targets.numel(), device=DEVICE)
    gradients = (grad, grad.flip(0) if entropy else None)
    outs = []
    for kernels in (reference, compiled):
        out = torch.full_like(logits, math.nan)
        found = kernels.fold_rows(logits, targets, mask, TRANSFORMS[1], entropy=entropy)
        kernels.grad_rows(logits, targets, mask, TRANSFORMS[1], found, gradients, out)
        outs.append(out.float())
    torch.testing.assert_close(*outs, rtol=torch.finfo(dtype).eps, atol=1e-5)
    assert outs[0].any()


@KERNELS
@pytest.mark.parametrize("entropy", [False, True])
def test_rows_without_gradient_may_hold_anything(kernels, entropy):
    logits, targets = torch.randn(5, 130, device=DEVICE), torch.arange(5, device=DEVICE)
    logits[1], logits[2, 5], logits[3] = math.nan, math.inf, math.nan
    mask = torch.tensor([True, True, True, False, True], device=DEVICE)
    grad = torch.tensor([1.0, 0.0, 0.0, 3.0, -2.0], device=DEVICE)
    found = kernels.fold_rows(logits, targets, mask, LogitTransform(), entropy=entropy)
    assert found.logps[1].isnan()
    assert found.logps[3] == 0.0
    out = torch.full_like(logits, math.nan)
    kernels.grad_rows(logits, targets, mask, LogitTransform(), found, (grad, grad if entropy else None), out)
    assert (out[1:4] == 0).all()
    assert out.isfinite().all()
    assert out[[0, 4]].any(1).all()


@KERNELS
def test_a_nan_in_a_row_that_counts_stays(kernels):
    logits, targets = torch.randn(2, 130, device=DEVICE), torch.tensor([3, 4], device=DEVICE)
    logits[1, 100] = math.nan
    found = kernels.fold_rows(logits, targets, None, LogitTransform(), entropy=True)
    assert found.logps.isnan().tolist() == found.entropy.isnan().tolist() == [False, True]
    out = torch.zeros_like(logits)
    ones = torch.ones(2, device=DEVICE)
    kernels.grad_rows(logits, targets, None, LogitTransform(), found, (ones, None), out)
    assert out[0].isfinite().all()
    assert out[1].isnan().any()


@KERNELS
@pytest.mark.parametrize(
    "transform", [*TRANSFORMS[:2], LogitTransform(temperature=0.5), LogitTransform(temperature=3.0)]
)
def test_banned_ids(kernels, transform):
    """-inf has probability 0, whichever way the reciprocal of a temperature is rounded."""
    logits, targets, mask = problem("masked", 140, torch.float32)
    logits[..., 100:] = -math.inf
    targets[targets < 140] %= 100
    grad_logps, grad_entropy = torch.randn(2, targets.numel(), device=DEVICE)
    # To float64, a logit of -1e6 has probability 0 too, without the oracle's own 0 * inf.
    truth = expected(logits.clamp(min=-1e6), targets, mask, transform, grad_logps, grad_entropy)
    found = kernels.fold_rows(logits, targets, mask, transform, entropy=True)
    out = torch.full_like(logits, math.nan)
    kernels.grad_rows(logits, targets, mask, transform, found, (grad_logps, grad_entropy), out)
    for mine, theirs in zip((found.logps, found.entropy, out), truth, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
    assert (out[..., 100:] == 0).all()


@KERNELS
def test_a_sure_token_keeps_its_digits(kernels):
    """The target's own gradient is 1 - p as the log-probability has it, from 1/2 to 1e-6, and no difference of sums."""
    logits = torch.zeros(40, 2, device=DEVICE)
    logits[:, 0] = torch.linspace(0.1, 14.0, 40, device=DEVICE)
    targets, ones = torch.zeros(40, dtype=torch.long, device=DEVICE), torch.ones(40, device=DEVICE)
    found = kernels.fold_rows(logits, targets, None, LogitTransform(), entropy=False)
    out = torch.empty_like(logits)
    kernels.grad_rows(logits, targets, None, LogitTransform(), found, (ones, None), out)
    torch.testing.assert_close(out[:, 0].double(), -found.logps.double().expm1(), rtol=1e-6, atol=0.0)


@KERNELS
@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_no_token(kernels, shape):
    targets = torch.zeros(shape, dtype=torch.long, device=DEVICE)
    logits = torch.randn(shape[0], shape[1] + 1, 7, device=DEVICE)
    found = kernels.fold_rows(logits, targets, None, LogitTransform(), entropy=True)
    assert found.logps.shape == found.entropy.shape == (0,)
    out = torch.full_like(logits, math.nan)
    nothing = torch.empty(0, device=DEVICE)
    kernels.grad_rows(logits, targets, None, LogitTransform(), found, (nothing, None), out)
    assert (out == 0).all()
