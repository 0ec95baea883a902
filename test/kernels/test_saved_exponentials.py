"""The exponentials that one pass keeps, and the gradient made of them in their memory, against float64 and two passes.

Under one-hot hidden states the weight's gradient is dL/dlogits. Usual logits are the fuzzer's.
"""

import math

import pytest
import torch

import oracles
from devices import TRUNCATES, skip_where_misread, skip_without_interpreter
from head_calls import problem, run_triton
from liger_rl import FusedLinearGRPOLoss
from liger_rl.head import LogitTransform
from liger_rl.head.dense import one_pass
from liger_rl.head.head_options import HeadOptions
from liger_rl.head.record import DIFFERENTIABLE, Head, LogProbs
from liger_rl.head.workload import Workload
from liger_rl.kernels import gemm, reference
from liger_rl.kernels.limits import LIMITS
from liger_rl.kernels.reference import SavedExp
from liger_rl.kernels.statistics import EXTRAS
from liger_rl.losses import Reinforce, TokenSum

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SOFTCAPS = [
    (1.0, 1.0, 1.0, True), (5.0, 0.5, 2.0, False), (30.0, 1.0, 1.0, False), (30.0, 1.0, 1.0, True),
    (50.0, 1.3, 0.25, True), (1e4, 0.7, 1.0, False),
]  # fmt: skip


@pytest.fixture(params=["PyTorch", "Triton"], autouse=True)
def kernels(request, monkeypatch):
    if request.param == "Triton":
        skip_without_interpreter()
        run_triton(monkeypatch)
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request, kernels):
    if request.param == torch.bfloat16 and kernels == "Triton":
        pytest.skip(TRUNCATES)
    return request.param


class Gradient:
    """dL/dlogits of one pass, of two passes, and in float64."""

    def __init__(self, logits, targets, entropy, dtype=torch.float32, *, bias=None, **transform) -> None:
        n, (advantages, coefficient) = len(logits), (torch.randn(len(logits)), 0.7 * entropy)
        logits = logits.to(dtype)

        def made(passes: str) -> torch.Tensor:
            weight = logits.T.to(DEVICE).requires_grad_()
            options = {"reduction": TokenSum(), "passes": passes, "entropy_coef": coefficient, **transform}
            given = [t.to(DEVICE) for t in (targets, advantages)]
            of_bias = None if bias is None else bias.to(DEVICE)
            module = FusedLinearGRPOLoss(Reinforce(), **options)
            module(torch.eye(n).to(DEVICE, dtype), weight, *given, bias=of_bias).loss.backward()
            return weight.grad.T.cpu()

        self.found, self.two_passes = made("one"), made("two")
        x = logits.double().requires_grad_()
        biased = x if bias is None else x + bias.double()
        logps, entropies = oracles.logits_logprobs(biased, targets, **transform)
        loss = -(logps * advantages.double()).sum() - coefficient * entropies.mean()
        (self.truth,) = torch.autograd.grad(loss, x)


@pytest.mark.parametrize(("softcap", "temperature", "scale", "entropy"), SOFTCAPS)
def test_gradient_under_a_softcap(softcap, temperature, scale, entropy, dtype, kernels):
    """Whatever the target is and however many logits are near the cap.

    Values in float16 add less to the error than rounding the gradient to bfloat16 does, values in float32 nothing.
    """
    # From rows far below the cap to rows where most logits are within 1% of it.
    rows = 4 if kernels == "Triton" and DEVICE.type == "cpu" else 16
    spread = torch.logspace(-1.5, 0.7, rows).repeat(3)[:, None] * min(softcap, 100.0) / scale
    logits = spread * torch.randn(3 * rows, 700)
    targets = torch.cat([torch.randint(700, (rows,)), logits[rows : 2 * rows].argmin(1), logits[2 * rows :].argmax(1)])
    grad = Gradient(logits, targets, entropy, dtype, softcap=softcap, temperature=temperature, scale=scale)
    room = oracles.relative_error(grad.truth.to(dtype), grad.truth) if dtype == torch.bfloat16 else 2e-7
    assert oracles.relative_error(grad.found, grad.truth) < oracles.relative_error(grad.two_passes, grad.truth) + room


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("below", [40.0, 400.0])
def test_a_target_whose_exponential_underflowed(entropy, below, dtype):
    """Its gradient is not small: dz/dx has to be that of its own logit."""
    logits = torch.full((2, 300), -1.0)
    logits[0, 5], logits[0, 7], logits[1, 290] = 0.75 * below, -0.25 * below, 0.5 * below
    grad = Gradient(logits, torch.tensor([7, 3]), entropy, dtype, softcap=below)
    exact = dtype == torch.float32
    bounds = {"rtol": 2e-6 if exact else 4e-3, "atol": 2e-6 if exact else 1e-4}
    torch.testing.assert_close(grad.found.double(), grad.truth, **bounds)


@pytest.mark.parametrize("entropy", [False, True])
def test_a_row_that_is_sure_of_one_id(entropy, dtype):
    """Probabilities beside it of 1e-8, which together have half of the gradient, to float16's 11 bits."""
    logits = torch.randn(2, 700) - 18.0
    logits[:, 7] = 0.0
    grad = Gradient(logits, torch.tensor([7, 7]), entropy, dtype)
    grad.found[:, 7] = grad.truth[:, 7] = 0.0
    assert oracles.relative_error(grad.found, grad.truth) < 1e-3 + oracles.relative_error(
        grad.truth.to(dtype), grad.truth
    )


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_banned_ids_and_large_logits(softcap, entropy):
    """A whole tile of -inf, and logits of +-1e4. Under a softcap no id is banned: tanh(-inf) is -1."""
    logits, bias = torch.randn(3, 600), torch.zeros(600)
    bias[10:60] = bias[256:512] = -math.inf
    if softcap is None:
        logits[1] *= 1e4
    grad = Gradient(logits, torch.tensor([3, 70, 540]), entropy, bias=bias, softcap=softcap)
    assert grad.found.isfinite().all()
    torch.testing.assert_close(grad.found, grad.two_passes, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("select", [False, True])
def test_gradients_of_all_values(select):
    """In two chunks, of which the caller knows all values. Some tokens have a gradient of the mean logit alone."""
    options = HeadOptions(entropy=True, lse=True, extras=EXTRAS, transform=LogitTransform(temperature=0.7, scale=1.5))
    index = torch.tensor([token for token in range(60) if token % 3])
    leaves = [(2 * torch.randn(60, 16)).requires_grad_(), torch.randn(700, 16).requires_grad_()]
    targets, upstream = torch.randint(700, (60,)), torch.randn(4, 40)
    upstream[:3, ::4], upstream[:, 1] = 0.0, 0.0
    z = oracles.linear_logits(*(leaf.double() for leaf in leaves), **vars(options.transform))[index]
    exact = oracles.values(z, targets[index])
    expected = LogProbs(**{name: value for name, value in exact._asdict().items() if name in LogProbs._fields})
    differentiable = DIFFERENTIABLE[:4]
    values = [getattr(expected, name) for name in differentiable]
    truth = torch.autograd.grad(sum((v * u).sum() for v, u in zip(values, upstream, strict=True)), leaves)

    def close(found: LogProbs, rows: slice) -> None:
        for mine, other in zip(found, expected, strict=True):
            assert (mine is None) == (other is None)
            if other is not None:
                torch.testing.assert_close(mine.cpu().to(other.dtype), other[rows].detach(), rtol=1e-5, atol=1e-4)

    def gradients_of(chunk: slice, values: LogProbs) -> LogProbs:
        close(values, chunk)
        return LogProbs(**dict(zip(differentiable, upstream[:, chunk].to(DEVICE), strict=True)))

    tensors = [leaf.detach().to(DEVICE) for leaf in leaves]
    head = Head.of(*tensors, targets.to(DEVICE), options)._replace(live=index.to(DEVICE))
    arguments = head, [slice(0, 25), slice(25, 40)], torch.float32, gradients_of, (True, True, False)
    values, gradients = one_pass.run_one_pass(*arguments, select=select)
    close(values, slice(None))
    for mine, other in zip(gradients, truth, strict=False):
        assert oracles.relative_error(mine.cpu(), other.double()) < 1e-5


def test_a_mean_logit_under_a_softcap_is_refused():
    """Its gradient needs the slope of each logit, which an exponential that underflowed does not give back."""
    x = problem((300,)).leaves()
    for softcap, extras, need in ((None, EXTRAS, None), (9.0, ("is_top1",), None), (9.0, EXTRAS, "no softcap")):
        options = HeadOptions(extras=extras, transform=LogitTransform(softcap=softcap))
        head = Head.of(x.hidden, x.weight, x.targets, options)
        found = one_pass.OnePass.reason_against(Workload.of(head)._replace(passes="one"))
        assert found == need or found.startswith(need)


@pytest.mark.parametrize("statistics_bytes", [None, 1])
@pytest.mark.parametrize("more", [False, True])
def test_kept_in_the_epilogue_of_a_product(more, statistics_bytes, kernels, monkeypatch):
    """As kept of the same logits; the fold beside it is what it is without. One pass takes no float16, which alone the
    interpreter has."""
    if kernels == "PyTorch":
        pytest.skip("PyTorch's products have no epilogue")
    from liger_rl.kernels import epilogue

    run_triton(monkeypatch, epilogue=True)
    skip_where_misread(72)
    if statistics_bytes is not None:
        monkeypatch.setattr(LIMITS, "statistics_bytes", statistics_bytes)
    transform = LogitTransform(temperature=0.7, softcap=3.0, scale=0.5) if more else LogitTransform()
    hidden, weight = (2 * torch.randn(150, 72)).to(DEVICE, torch.float16), (torch.randn(301, 72) / 8).to(DEVICE).half()
    bias = torch.randn(301).to(DEVICE) if more else None
    found, expected = (SavedExp.empty(150, 301, DEVICE, torch.bfloat16, 256) for _ in range(2))
    found.values.fill_(math.nan)
    arguments = (hidden, weight, bias, torch.randint(301, (150,)).to(DEVICE), transform)
    with_kept = epilogue.gemm_fold(*arguments, entropy=more, saved_exp=found)
    without = epilogue.gemm_fold(*arguments, entropy=more)
    assert with_kept.target is not None
    for mine, other in zip(with_kept._replace(target=None), without, strict=True):
        assert mine is other is None or torch.equal(mine, other)
    reference.save_exponentials(gemm.matmul(hidden, weight.T), 0, bias, transform, expected)
    torch.testing.assert_close(found.values, expected.values, rtol=2e-3, atol=1e-6)
    torch.testing.assert_close(found.peaks, expected.peaks, rtol=1e-5, atol=1e-5)
