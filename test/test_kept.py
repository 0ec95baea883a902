"""The exponentials that a forward keeps, and the gradient made of them: Triton against eager, both against float64."""

import math

import pytest
import torch

import oracles
from devices import skip_where_misread
from liger_rl import LogitTransform
from liger_rl.kernels import eager, gemm, kept, kept_triton
from liger_rl.kernels.kept import Kept
from liger_rl.kernels.statistics import Fold, TokenGradients

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ALL = LogitTransform(temperature=0.7, softcap=3.0, scale=0.5)
CASES = [
    # tokens, vocab, words of a tile, columns of a tile of logits, transform, bias, gradient of the entropy
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


def fill(kernels, logits, bias, transform, dtype, words, columns) -> Kept:
    found = Kept.empty(*logits.shape, DEVICE, dtype, words)
    found.values.fill_(math.nan)
    found.peaks.fill_(math.nan)
    for first in range(0, logits.shape[1], columns):
        last = min(first + columns, logits.shape[1])
        kernels.keep(logits[:, first:last], first, None if bias is None else bias[first:last], transform, found)
    return found


def token_gradients(logits, targets, bias, transform, entropy) -> TokenGradients:
    state = Fold.start(logits.shape[0], DEVICE, entropy=True)
    eager.fold(logits, targets, 0, bias, transform, state)
    g, e = torch.randn(2, logits.shape[0]).to(DEVICE)
    return TokenGradients.of(state.finish(), g, e if entropy else None)


def truth_of(logits, targets, bias, transform, tokens):
    x = logits.double().requires_grad_()
    options = {name: getattr(transform, name) for name in ("temperature", "softcap", "scale")}
    logps, entropy = oracles.logits_logprobs(x if bias is None else x + bias.double(), targets, **options)
    loss = (logps * tokens.grad_logps.double()).sum()
    if tokens.grad_entropy is not None:
        loss = loss + (entropy * tokens.grad_entropy.double()).sum()
    return torch.autograd.grad(loss, x)[0]


def relative(found, expected) -> float:
    return (torch.linalg.norm(found.double() - expected.double()) / torch.linalg.norm(expected.double())).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "vocab", "words", "columns", "transform", "bias", "entropy"), CASES)
def test_triton_as_eager(tokens, vocab, words, columns, transform, bias, entropy, dtype):
    logits, targets, biases = make(tokens, vocab, bias)
    mine, other = (fill(k, logits, biases, transform, dtype, words, columns) for k in (kept_triton, kept))
    assert other.values.dtype == (torch.float32 if dtype == torch.float32 else torch.float16)
    tolerance = torch.finfo(other.values.dtype).eps
    torch.testing.assert_close(mine.values, other.values, rtol=tolerance, atol=1e-6)
    torch.testing.assert_close(mine.peaks, other.peaks, rtol=1e-6, atol=1e-6)
    tokens_gradients = token_gradients(logits, targets, biases, transform, entropy)
    picked = torch.arange(tokens - 1, -1, -2, device=DEVICE)
    for rows in (None, picked):
        some = tokens_gradients if rows is None else tokens_gradients.take(rows)
        row_targets = targets if rows is None else targets[rows]
        for first in range(0, vocab, columns):
            outs = []
            for kernels in (kept_triton, kept):
                out = torch.full((row_targets.numel(), min(columns, vocab - first)), math.nan, device=DEVICE)
                kernels.grad_kept(other, rows, first, row_targets, transform, some, out)
                outs.append(out)
            torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-6)


TRUNCATED = pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter truncates to bfloat16, it does not round")


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        (kept, torch.float32),
        (kept, torch.bfloat16),
        (kept_triton, torch.float32),
        pytest.param(kept_triton, torch.bfloat16, marks=TRUNCATED),
    ],
    ids=["eager-float32", "eager-bfloat16", "triton-float32", "triton-bfloat16"],
)
@pytest.mark.parametrize(("tokens", "vocab", "words", "columns", "transform", "bias", "entropy"), CASES)
def test_gradient_in_the_exponentials_own_memory(
    tokens, vocab, words, columns, transform, bias, entropy, dtype, kernels
):
    """As exact as rounding the exact gradient to the dtype: 1.7e-3 for bfloat16, of which float16 adds an eighth."""
    logits, targets, biases = make(64, vocab, bias)
    found = fill(kernels, logits, biases, transform, dtype, words, columns)
    some = token_gradients(logits, targets, biases, transform, entropy)
    out = found.values.view(dtype)
    for first in range(0, vocab, columns):
        kernels.grad_kept(found, None, first, targets, transform, some, out[:, first : first + columns])
    expected = truth_of(logits, targets, biases, transform, some)
    rounded = relative(expected.to(dtype), expected)
    assert relative(out, expected) < (1.1 * rounded if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("kernels", [kept_triton, kept], ids=["triton", "eager"])
@pytest.mark.parametrize("entropy", [False, True])
def test_banned_words_and_large_logits(kernels, entropy):
    """-inf columns and logits of +-1e4, a whole tile of -inf included."""
    logits = torch.randn(4, 96, device=DEVICE)
    logits[0, 10:60] = -math.inf
    logits[1] *= 1e4
    logits[2, :32] = -math.inf
    logits[3, 64:] = -math.inf
    targets = torch.tensor([3, 70, 40, 50], device=DEVICE)
    some = token_gradients(logits, targets, None, LogitTransform(), entropy)
    found = fill(kernels, logits, None, LogitTransform(), torch.float32, 32, 64)
    out = torch.full_like(logits, math.nan)
    kernels.grad_kept(found, None, 0, targets, LogitTransform(), some, out)
    expected = torch.empty_like(logits)
    eager.grad(logits, targets, 0, None, LogitTransform(), some, expected)
    assert out.isfinite().all()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", [kept_triton, kept], ids=["triton", "eager"])
def test_nan_stays(kernels):
    logits, targets, _ = make(3, 40, False)
    logits[1, 7] = math.nan
    some = token_gradients(logits, targets, None, LogitTransform(), False)
    found = fill(kernels, logits, None, LogitTransform(), torch.float32, 32, 64)
    out = torch.zeros_like(logits)
    kernels.grad_kept(found, None, 0, targets, LogitTransform(), some, out)
    assert out[1].isnan().any()
    assert out[[0, 2]].isfinite().all()


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
    for mine, other in zip(with_kept, without, strict=True):
        assert mine is other is None or torch.equal(mine, other)
    expected = fill(kept, gemm.matmul(hidden, weight.T), biases, transform, torch.bfloat16, 256, 512)
    torch.testing.assert_close(found.values, expected.values, rtol=2e-3, atol=1e-6)
    torch.testing.assert_close(found.peaks, expected.peaks, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", [kept_triton, kept], ids=["triton", "eager"])
@pytest.mark.parametrize("factor", [1.0, 0.25, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scale(kernels, factor, dtype):
    values = torch.randn(90, 101).to(DEVICE, dtype)
    expected = values * factor
    kernels.scale_(values, torch.tensor(factor, device=DEVICE))
    assert torch.equal(values, expected)
