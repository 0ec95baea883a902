"""The exponentials that a forward keeps, and the gradient made of them: Triton against eager, both against float64."""

import math

import pytest
import torch

import oracles
from devices import TRUNCATES, skip_where_misread
from liger_rl import LogitTransform
from liger_rl.kernels import compiled, gemm, reference
from liger_rl.kernels.reference import Kept, grad_at_targets
from liger_rl.kernels.statistics import Fold, TokenGradients

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ALL = LogitTransform(temperature=0.7, softcap=3.0, scale=0.5)
CASES = [
    # tokens, vocab, vocabulary entries of a tile, columns of a tile of logits, transform, bias, gradient of the entropy
    (3, 300, 256, 256, LogitTransform(), False, False),
    (5, 700, 256, 512, LogitTransform(temperature=0.8), True, True),
    (4, 100, 32, 64, ALL, True, False),
    (4, 97, 8, 40, ALL, False, True),
    (1, 5, 4, 4, LogitTransform(), True, True),
]


def make(tokens, vocab, bias):
    logits = (3 * torch.randn(tokens, vocab)).to(DEVICE)
    targets = torch.randint(vocab, (tokens,)).to(DEVICE)
    return logits, targets, torch.randn(vocab).to(DEVICE) if bias else None


def fill(kernels, logits, bias, transform, dtype, tile_vocab, columns) -> Kept:
    found = Kept.empty(*logits.shape, DEVICE, dtype, tile_vocab)
    found.values.fill_(math.nan)
    found.peaks.fill_(math.nan)
    for first in range(0, logits.shape[1], columns):
        last = min(first + columns, logits.shape[1])
        kernels.keep(logits[:, first:last], first, None if bias is None else bias[first:last], transform, found)
    return found


def token_gradients(logits, targets, bias, transform, entropy) -> tuple[TokenGradients, torch.Tensor]:
    """-> those of a random loss, and dL/dlogits at the targets."""
    state = Fold.start(logits.shape[0], DEVICE, entropy=True)
    reference.fold(logits, targets, 0, bias, transform, state)
    g, e = torch.randn(2, logits.shape[0]).to(DEVICE)
    statistics = state.finish(with_target=True)
    tokens = TokenGradients.of(statistics, g, e if entropy else None)
    return tokens, grad_at_targets(tokens, statistics, transform)


def truth_of(logits, targets, bias, transform, tokens):
    x = logits.double().requires_grad_()
    logps, entropy = oracles.logits_logprobs(x if bias is None else x + bias.double(), targets, **vars(transform))
    loss = (logps * tokens.grad_logps.double()).sum()
    if tokens.grad_entropy is not None:
        loss = loss + (entropy * tokens.grad_entropy.double()).sum()
    return torch.autograd.grad(loss, x)[0]


def relative(found, expected) -> float:
    return (torch.linalg.norm(found.double() - expected.double()) / torch.linalg.norm(expected.double())).item()


TRUNCATED = pytest.mark.skipif(DEVICE.type == "cpu", reason=TRUNCATES)


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        (reference, torch.float32),
        (reference, torch.bfloat16),
        (compiled, torch.float32),
        pytest.param(compiled, torch.bfloat16, marks=TRUNCATED),
    ],
    ids=["eager-float32", "eager-bfloat16", "triton-float32", "triton-bfloat16"],
)
@pytest.mark.parametrize(("tokens", "vocab", "tile_vocab", "columns", "transform", "bias", "entropy"), CASES)
def test_gradient_in_the_exponentials_own_memory(
    tokens, vocab, tile_vocab, columns, transform, bias, entropy, dtype, kernels
):
    """As exact as rounding the exact gradient to the dtype: 1.7e-3 for bfloat16, of which float16 adds an eighth."""
    # Tokens enough for a mean of what 16 bits round; in float32 the bound is twice what is found with as few.
    logits, targets, biases = make(64 if dtype == torch.bfloat16 else 16, vocab, bias)
    found = fill(kernels, logits, biases, transform, dtype, tile_vocab, columns)
    some, at = token_gradients(logits, targets, biases, transform, entropy)
    out = found.values.view(dtype)
    for first in range(0, vocab, columns):
        kernels.grad_kept(found, None, first, targets, transform, some, at, out[:, first : first + columns])
    expected = truth_of(logits, targets, biases, transform, some)
    rounded = relative(expected.to(dtype), expected)
    assert relative(out, expected) < (1.1 * rounded if dtype == torch.bfloat16 else 1e-6)


BOTH = pytest.mark.parametrize("kernels", [compiled, reference], ids=["triton", "eager"])
ENTROPY = pytest.mark.parametrize("entropy", [False, True])
SOFTCAPS = [(1.0, 1.0, 1.0), (5.0, 0.5, 2.0), (30.0, 1.0, 1.0), (50.0, 1.3, 0.25), (1e4, 0.7, 1.0)]
PLAIN = LogitTransform()


class Gradient:
    """Of what a kernel keeps of logits, of two passes, and in float64."""

    def __init__(
        self, kernels, logits, targets, transform, entropy, dtype=torch.float32, tile_vocab=256, kept_by=None
    ) -> None:
        some, at = token_gradients(logits, targets, None, transform, entropy)
        kept = fill(kept_by or kernels, logits, None, transform, dtype, tile_vocab, 2 * tile_vocab)
        self.found, self.two_passes = torch.full_like(logits, math.nan), torch.empty_like(logits)
        kernels.grad_kept(kept, None, 0, targets, transform, some, at, self.found)
        reference.grad(logits, targets, 0, None, transform, some, self.two_passes)
        self.truth = truth_of(logits, targets, None, transform, some)


@BOTH
@ENTROPY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("softcap", "temperature", "scale"), SOFTCAPS)
def test_gradient_under_a_softcap(softcap, temperature, scale, entropy, dtype, kernels):
    """Whatever the target is and however many logits are near the cap.

    Values in float16 add less to the error than rounding the gradient to bfloat16 does, values in float32 nothing.
    """
    transform = LogitTransform(softcap=softcap, temperature=temperature, scale=scale)
    # From rows far below the cap to rows where most logits are within 1% of it.
    spread = torch.logspace(-1.5, 0.7, 16).repeat(3)[:, None] * min(softcap, 100.0) / scale
    logits = (spread * torch.randn(48, 700)).to(DEVICE)
    least, most = logits[16:32].argmin(1), logits[32:].argmax(1)
    targets = torch.cat([torch.randint(700, (16,)).to(DEVICE), least, most])
    grad = Gradient(kernels, logits, targets, transform, entropy, dtype, kept_by=reference)
    room = relative(grad.truth.to(dtype), grad.truth) if dtype == torch.bfloat16 else 2e-7
    assert relative(grad.found, grad.truth) < relative(grad.two_passes, grad.truth) + room


@BOTH
@ENTROPY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("below", [40.0, 400.0])
def test_a_target_whose_exponential_underflowed(entropy, below, dtype, kernels):
    """Its gradient is not small: dz/dx has to be that of its own logit."""
    logits = torch.full((2, 300), -1.0, device=DEVICE)
    logits[0, 5], logits[0, 7] = 0.75 * below, -0.25 * below
    logits[1, 290] = 0.5 * below
    targets = torch.tensor([7, 3], device=DEVICE)
    transform = LogitTransform(softcap=below)
    grad = Gradient(kernels, logits, targets, transform, entropy, dtype, kept_by=reference)
    atol = 2e-6 if dtype == torch.float32 else 1e-4
    torch.testing.assert_close(grad.found.double(), grad.truth, rtol=2e-6, atol=atol)


@BOTH
@ENTROPY
def test_a_row_that_is_sure_of_one_id(entropy, kernels):
    """Probabilities beside it of 1e-8, which together have half of the gradient, to float16's 11 bits."""
    logits = (torch.randn(2, 700) - 18.0).to(DEVICE)
    logits[:, 7] = 0.0
    grad = Gradient(kernels, logits, torch.tensor([7, 7], device=DEVICE), PLAIN, entropy, torch.bfloat16, 1024)
    grad.found[:, 7] = grad.truth[:, 7] = 0.0
    assert relative(grad.found, grad.truth) < 1e-3


@BOTH
@ENTROPY
def test_a_banned_id_under_a_softcap(entropy, kernels):
    """tanh(-inf) is -1, so it is not banned at all; nothing changes its logit."""
    logits = torch.randn(3, 300, device=DEVICE)
    logits[:2, 7], logits[2] = -math.inf, -math.inf
    grad = Gradient(kernels, logits, torch.tensor([7, 3, 5], device=DEVICE), LogitTransform(softcap=4.0), entropy)
    torch.testing.assert_close(grad.found.double(), grad.truth, rtol=1e-5, atol=1e-6)
    assert grad.found[2].abs().max() < 1e-6


@BOTH
@ENTROPY
def test_banned_ids_large_logits_and_nan(kernels, entropy):
    """-inf columns and logits of +-1e4, a whole tile of -inf included; NaN stays where it is."""
    logits = torch.randn(5, 96, device=DEVICE)
    logits[0, 10:60] = -math.inf
    logits[1] *= 1e4
    logits[2, :32] = -math.inf
    logits[3, 64:] = -math.inf
    logits[4, 7] = math.nan
    targets = torch.tensor([3, 70, 40, 50, 1], device=DEVICE)
    grad = Gradient(kernels, logits, targets, PLAIN, entropy, tile_vocab=32)
    assert grad.found[:4].isfinite().all()
    torch.testing.assert_close(grad.found[:4], grad.two_passes[:4], rtol=1e-5, atol=1e-5)
    assert grad.found[4].isnan().any()


@pytest.mark.parametrize("statistics_bytes", [None, 1])
@pytest.mark.parametrize(("transform", "bias", "entropy"), [(LogitTransform(), False, False), (ALL, True, True)])
def test_kept_in_the_epilogue_of_a_product(transform, bias, entropy, statistics_bytes, monkeypatch):
    """As kept of the same logits; the fold beside it is what it is without."""
    from liger_rl.kernels import epilogue

    skip_where_misread(72)

    if statistics_bytes is not None:
        monkeypatch.setattr(epilogue, "STATISTICS_BYTES", statistics_bytes)
    hidden = (2 * torch.randn(150, 72)).to(DEVICE, torch.float16)
    weight = (torch.randn(301, 72) / 8).to(DEVICE, torch.float16)
    biases = torch.randn(301).to(DEVICE) if bias else None
    targets = torch.randint(301, (150,)).to(DEVICE)
    found = Kept.empty(150, 301, DEVICE, torch.bfloat16, 256)
    found.values.fill_(math.nan)
    arguments = (hidden, weight, biases, targets, transform)
    with_kept, _ = epilogue.gemm_fold(*arguments, entropy=entropy, kept=found)
    without, _ = epilogue.gemm_fold(*arguments, entropy=entropy)
    assert with_kept.target is not None
    for mine, other in zip(with_kept._replace(target=None), without, strict=True):
        assert mine is other is None or torch.equal(mine, other)
    expected = fill(reference, gemm.matmul(hidden, weight.T), biases, transform, torch.bfloat16, 256, 512)
    torch.testing.assert_close(found.values, expected.values, rtol=2e-3, atol=1e-6)
    torch.testing.assert_close(found.peaks, expected.peaks, rtol=1e-5, atol=1e-5)


@BOTH
@pytest.mark.parametrize("factor", [1.0, 0.25, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scale(kernels, factor, dtype):
    values = torch.randn(90, 101).to(DEVICE, dtype)
    expected = values * factor
    kernels.scale_(values, torch.tensor(factor, device=DEVICE))
    assert torch.equal(values, expected)
