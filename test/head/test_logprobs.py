"""linear_logprobs: as exact as promised, and the arguments that it refuses.

Options in all their combinations are the fuzzer's, properties test_properties.py's.
"""

import itertools
import math

import pytest
import torch

import oracles
from devices import skip_where_misread, skip_without_interpreter
from head_calls import call, eager, problem, run_triton, solve, truth
from liger_rl import linear_logprobs, support_logprobs
from liger_rl.head import LogitTransform, logits_logprobs
from liger_rl.support import Support

OFFSET_TRANSFORMS = [{}, {"temperature": 0.7}, {"softcap": 3e4, "temperature": 2.0}]
TRANSFORMS = [{}, {"temperature": 1.6, "softcap": 2.0, "scale": 1.7}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=["plain", "all"])
def test_values_and_gradients_within_twice_eager_error(dtype, transform, device):
    inputs = problem((4, 24), 64, 517, dtype, device, bias=True)
    ours = solve(inputs, transform=LogitTransform(**transform))
    other, exact = eager(inputs, **transform), truth(inputs, **transform)
    # The outputs are float32, whatever the inputs: one rounding is float32's.
    for name in ("logps", "entropy"):
        found, expected = getattr(ours, name), getattr(exact, name)
        assert found.dtype == torch.float32
        assert found.shape == inputs.targets.shape
        budget = oracles.error_budget(getattr(other, name), expected, torch.float32)
        assert oracles.max_error(found, expected) <= min(budget, 2e-5), name
    for name, found in ours.grads.items():
        budget = oracles.error_budget(other.grads[name], exact.grads[name], dtype)
        assert found.dtype == dtype
        assert oracles.max_error(found, exact.grads[name]) <= budget, name


@pytest.mark.parametrize("chunk_vocab", [None, 10])
def test_large_logits_stay_finite_and_at_most_zero(chunk_vocab, device):
    inputs = problem((40,), device=device)
    scaled = inputs._replace(hidden=inputs.hidden * 1e4)
    best = (scaled.hidden @ scaled.weight.mT).argmax(-1)
    for targets in (inputs.targets, best):
        result = solve(scaled._replace(targets=targets), chunk_vocab=chunk_vocab)
        assert all(values.isfinite().all() for values in (result.logps, result.entropy, *result.grads.values()))
        assert (result.logps <= 0).all()
        assert (result.entropy >= 0).all()


def round_fma_once(monkeypatch):
    """As a GPU does: Triton's interpreter rounds the product, and a fold's exponents of +-1e4 are then off by 5e-4."""
    from triton.runtime import interpreter

    def create_fma(_, x, y, z):
        exact = x.data.astype("float64") * y.data + z.data
        return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", create_fma)


@pytest.mark.parametrize("transform", OFFSET_TRANSFORMS, ids=["plain", "temperature", "softcap"])
@pytest.mark.parametrize(
    ("kernels", "of"),
    [
        *itertools.product(["PyTorch", "Triton"], ["all", "several targets", "support", "given logits"]),
        *itertools.product(["an epilogue"], ["logps", "all", "several targets"]),
    ],
)
def test_a_constant_in_all_logits_cancels(kernels, transform, of, device, monkeypatch):
    """At +-1e4 float32 rounds lse by up to 5e-4. Probabilities that are off by that factor add up to another number."""
    if kernels != "PyTorch":
        skip_without_interpreter(device)
        run_triton(monkeypatch, epilogue=kernels == "an epilogue")
    n, vocab, dtype = (
        4 if of == "support" else 16,
        600,
        torch.float32 if kernels in ("PyTorch", "Triton") else torch.float16,
    )
    if kernels == "an epilogue":
        skip_where_misread(n + 8)
        round_fma_once(monkeypatch)
    # Under one-hot hidden states dL/dweight is dL/dlogits. In steps of 2^-6 all logits are exact.
    logits = ((torch.randn(n, vocab) * 32).round() / 64).to(device)
    offset = torch.where(torch.arange(n, device=device) % 2 == 0, 1e4, -1e4)
    hidden = torch.cat([torch.eye(n, device=device), offset[:, None] / 8 * torch.ones(1, 8, device=device)], 1).to(
        dtype
    )
    weight = torch.cat([logits.T, torch.ones(vocab, 8, device=device)], 1).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (n, 3) if of == "several targets" else (n,)).to(device)
    listed = torch.ones(n, vocab, dtype=torch.bool, device=device)
    options = {"transform": LogitTransform(**transform)}
    if of == "support":
        listed = (torch.rand(n, vocab) < 0.3).to(device).scatter(1, targets[:, None], True)
        support = Support.from_padded(torch.where(listed, torch.arange(vocab, device=device), -1))
    if of != "logps":
        options["entropy"] = True
    if of in ("all", "several targets"):
        options["lse"] = True

    def values(hidden, weight):
        if of == "given logits":
            logits = hidden.float() @ weight.float().T
            return logits_logprobs(logits, targets, transform=options["transform"], entropy=True)
        if of == "support":
            return support_logprobs(hidden, weight, targets, support, **options)
        return linear_logprobs(hidden, weight, targets, **options)

    found = values(hidden, weight)
    outputs = [found.logps, found.entropy, getattr(found, "lse", None)]
    outputs = [value for value in outputs if value is not None]
    upstream = [torch.rand(value.shape).to(device) + 0.5 for value in outputs]
    torch.autograd.backward(outputs, upstream)
    exact = (logits.double() + offset.double()[:, None]).requires_grad_()
    z = oracles.transformed(exact, **transform).masked_fill(~listed, -math.inf)
    values_of, ids = oracles.values(z, targets), targets if targets.dim() == 2 else targets[:, None]
    expected = [getattr(values_of, name) for name in ("logps", "entropy", "lse") if name in {"logps", *options}]
    torch.autograd.backward(expected, [grad.double() for grad in upstream])
    mine = weight.grad[:, :n].T.double()
    # All ids but the targets, whose gradients are computed from log-probabilities: in float16 they are rounded by more.
    mine, truth = (grad.scatter(1, ids, 0.0) for grad in (mine, exact.grad))
    assert ((mine - truth).sum(1).abs() / truth.abs().sum(1)).max() <= 1e-4


# --- several targets for each token -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_small_difference_of_two_terms_is_rounded_once(dtype):
    """A student whose probabilities are nearly its teacher's: dL/dz = p - q, where p and q are 100 times larger."""
    logits = torch.randn(16, 40).to(dtype)
    logits[:, :8] += 8  # the listed ids have nearly all of the mass
    weight = logits.T.contiguous().requires_grad_()  # under one-hot hidden states dL/dweight is dL/dlogits
    ids = torch.arange(8).expand(16, 8)
    log_p = logits.double().log_softmax(-1)
    q = (log_p + 0.01 * torch.randn(16, 40)).softmax(-1)[:, :8]
    found = linear_logprobs(torch.eye(16).to(dtype), weight, ids)
    (-q.float() * found.logps).sum().backward()
    truth = q.float().double().sum(1, keepdim=True) * log_p.exp()
    truth[:, :8] -= q.float().double()
    assert oracles.relative_error(weight.grad.T, truth) < torch.finfo(dtype).eps
    rounded_apart = (q.sum(1, keepdim=True) * log_p.exp()).to(dtype).double()[:, :8] - q
    assert (rounded_apart - truth[:, :8]).norm() / truth.norm() > 10 * torch.finfo(dtype).eps


# --- what the backward holds ------------------------------------------------------------------------------------------


def test_no_copy_of_the_hidden_states_is_kept():
    """What autograd keeps between forward and backward: its inputs, and (n,) vectors."""
    inputs = problem((64,), 32, 50, torch.bfloat16, bias=True).leaves()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        call(inputs, mask=torch.arange(64) % 3 > 0)
    given = {t.data_ptr() for t in (*inputs.floats().values(), inputs.targets)}
    assert max(t.numel() for t in kept if t.data_ptr() not in given) <= 64


# --- bad input --------------------------------------------------------------------------------------------------------


BAD_VALUES = [(ValueError, value) for value in (0.0, -1.0, math.nan, math.inf, 10**400, 1e300, 1e-60)]


@pytest.mark.parametrize(("error", "value"), [*BAD_VALUES, *((TypeError, value) for value in ("1.0", [1.0], True))])
@pytest.mark.parametrize("option", ["temperature", "softcap", "scale"])
def test_transform_values(option, error, value):
    with pytest.raises(error, match=option):
        LogitTransform(**{option: value})
