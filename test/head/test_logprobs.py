"""linear_logprobs against full logits in float64, and the invariants it promises."""

import math
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import oracles
from liger_rl import LogitTransform, linear_logprobs

HALF_AND_FULL = [torch.float32, torch.bfloat16, torch.float16]
TRANSFORMS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 3.0},
    "scale": {"scale": 0.25},
    "all": {"temperature": 1.6, "softcap": 2.0, "scale": 1.7},
}
CPU = torch.device("cpu")


class Problem(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor

    def leaves(self) -> "Problem":
        """Fresh leaves with the same values and strides."""
        tensors = [None if t is None else t.detach().requires_grad_() for t in self[:3]]
        return Problem(*tensors, self.targets)


def problem(shape=(3, 5), hidden_size=16, vocab=129, dtype=torch.float32, device=CPU, bias=False, seed=0) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, hidden_size, generator=generator)
    weight = torch.randn(vocab, hidden_size, generator=generator) * 2 / math.sqrt(hidden_size)
    bias_values = torch.randn(vocab, generator=generator) if bias else None
    targets = torch.randint(vocab, shape, generator=generator)
    floats = [None if t is None else t.to(device, dtype) for t in (hidden, weight, bias_values)]
    return Problem(*floats, targets.to(device))


class Result(NamedTuple):
    logps: Tensor
    entropy: Tensor | None
    grads: tuple[Tensor | None, ...]  # hidden, weight, bias


def functional(outputs: tuple[Tensor, Tensor | None]) -> Tensor:
    """A fixed random linear functional of log-probabilities and entropies."""
    generator = torch.Generator().manual_seed(7)
    total = 0.0
    for values in outputs:
        coefficients = torch.randn(values.shape, generator=generator) if values is not None else None
        if values is not None:
            total = total + (values * coefficients.to(values)).sum()
    return total


def solve(inputs: Problem, *, entropy=True, function=None, **options) -> Result:
    """Values and gradients, of linear_logprobs or of an oracle taking (hidden, weight, targets, bias)."""
    leaves = inputs.leaves()
    if function is None:
        outputs = linear_logprobs(
            leaves.hidden, leaves.weight, leaves.targets, bias=leaves.bias, entropy=entropy, **options
        )
    else:
        outputs = function(leaves.hidden, leaves.weight, leaves.targets, leaves.bias, **options)
    functional(outputs).backward()
    return Result(outputs[0].detach(), outputs[1] if outputs[1] is None else outputs[1].detach(), grads_of(leaves))


def grads_of(leaves: Problem) -> tuple[Tensor | None, ...]:
    return tuple(None if t is None else t.grad for t in leaves[:3])


def truth_of(inputs: Problem, **transform) -> Result:
    doubled = Problem(*(None if t is None else t.double() for t in inputs[:3]), inputs.targets)
    return solve(doubled, function=oracles.logprobs, **transform)


def assert_same(found: Result, expected: Result) -> None:
    """Bit for bit."""
    assert torch.equal(found.logps, expected.logps)
    if expected.entropy is not None:
        assert torch.equal(found.entropy, expected.entropy)
    for mine, other in zip(found.grads, expected.grads, strict=True):
        assert (mine is None and other is None) or torch.equal(mine, other)


def assert_close(found: Result, expected: Result, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.logps.double(), expected.logps.double(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.entropy.double(), expected.entropy.double(), rtol=tolerance, atol=tolerance)
    for mine, other in zip(found.grads, expected.grads, strict=True):
        if other is not None:
            torch.testing.assert_close(mine.double(), other.double(), rtol=tolerance, atol=tolerance)


class Products(TorchDispatchMode):
    """Counts the FLOPs of every matrix product, and keeps the shape and dtype of every tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.made: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.operands: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            a, b = args[-2:]
            self.flops += 2 * a.numel() * b.shape[-1]
            self.operands += [a, b]
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known:
                self.made.append((tuple(t.shape), t.dtype))
        return result


# --- values and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF_AND_FULL)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_values_and_gradients_within_twice_eager_error(dtype, transform, device):
    inputs = problem((4, 24), 64, 517, dtype, device, bias=True)
    ours = solve(inputs, transform=LogitTransform(**transform))
    eager = solve(inputs, function=oracles.eager_logprobs, **transform)
    truth = truth_of(inputs, **transform)
    # The outputs are float32, whatever the inputs: one rounding is float32's.
    for name in ("logps", "entropy"):
        found, expected = getattr(ours, name), getattr(truth, name)
        assert found.dtype == torch.float32
        assert found.shape == inputs.targets.shape
        budget = oracles.error_budget(getattr(eager, name), expected, torch.float32)
        assert oracles.max_error(found, expected) <= budget, name
        assert oracles.max_error(found, expected) < 2e-5, name
    for name, found, other, expected in zip(Problem._fields[:3], ours.grads, eager.grads, truth.grads, strict=True):
        assert found.dtype == dtype
        assert oracles.max_error(found, expected) <= oracles.error_budget(other, expected, dtype), name


@pytest.mark.parametrize("vocab", [1, 7, 129, 1000])
def test_any_vocabulary(vocab, device):
    inputs = problem(vocab=vocab, bias=True, device=device)
    assert_close(solve(inputs), truth_of(inputs))


@pytest.mark.parametrize(
    ("chunk_tokens", "chunk_vocab"),
    [
        (1, 1),
        (1, 129),
        (15, 1),
        (4, 50),
        (7, 64),
        (8, 128),
        (15, 129),
        (16, 130),
        (10_000, 10_000),
        (3, None),
        (None, 5),
    ],
)
def test_chunk_sizes_change_nothing(chunk_tokens, chunk_vocab, device):
    inputs = problem(bias=True, device=device)
    transform = LogitTransform(temperature=0.8, softcap=4.0)
    found = solve(inputs, transform=transform, chunk_tokens=chunk_tokens, chunk_vocab=chunk_vocab)
    assert_close(found, truth_of(inputs, temperature=0.8, softcap=4.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunks_lose_no_precision_in_low_precision(dtype, device):
    """Partial sums over tiles stay float32: many tiny tiles are as good as one."""
    inputs = problem((64,), 32, 400, dtype, device)
    truth = truth_of(inputs)
    whole = solve(inputs, chunk_tokens=64, chunk_vocab=400)
    tiny = solve(inputs, chunk_tokens=5, chunk_vocab=7)
    for found, reference, expected in zip(tiny.grads[:2], whole.grads[:2], truth.grads[:2], strict=True):
        assert oracles.max_error(found, expected) <= oracles.error_budget(reference, expected, dtype)


def test_packed_equals_padded(device):
    inputs = problem((3, 5), bias=True, device=device)
    packed = Problem(inputs.hidden.reshape(15, -1), inputs.weight, inputs.bias, inputs.targets.reshape(15))
    padded, flat = solve(inputs), solve(packed)
    assert flat.logps.shape == (15,)
    assert torch.equal(flat.logps, padded.logps.reshape(15))
    assert_close(
        flat._replace(logps=padded.logps, entropy=padded.entropy, grads=flat.grads[1:]),
        padded._replace(grads=padded.grads[1:]),
    )
    torch.testing.assert_close(flat.grads[0], padded.grads[0].reshape(15, -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_vocab", [None, 20])
def test_strided_inputs(chunk_vocab, device):
    """Transposed, sliced and strided views give what their contiguous copies give."""
    base = problem((3, 5), 16, 129, device=device, bias=True)
    views = Problem(
        base.hidden.transpose(0, 1).contiguous().transpose(0, 1),
        base.weight.mT.contiguous().mT,
        torch.stack([base.bias, base.bias * 0], -1)[:, 0],
        torch.cat([base.targets, base.targets], 1)[:, :5],
    )
    assert not any(t.is_contiguous() for t in views)
    assert_close(solve(views, chunk_vocab=chunk_vocab), truth_of(base))

    hidden = torch.randn(3, 6, 32, device=device, requires_grad=True)
    weight = torch.randn(129, 32, device=device, requires_grad=True)
    found = linear_logprobs(hidden[:, :-1, ::2], weight[:, ::2], base.targets, chunk_vocab=chunk_vocab).logps
    expected = oracles.logprobs(hidden[:, :-1, ::2], weight[:, ::2], base.targets)[0]
    mine = torch.autograd.grad(found.sum(), (hidden, weight))
    theirs = torch.autograd.grad(expected.sum(), (hidden, weight))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_target_dtypes(dtype):
    inputs = problem()
    assert_same(solve(inputs._replace(targets=inputs.targets.to(dtype))), solve(inputs))


def test_gradient_through_one_output_alone(device):
    inputs = problem(device=device)
    for pick in (0, 1):
        leaves = inputs.leaves()
        found = linear_logprobs(leaves.hidden, leaves.weight, leaves.targets, entropy=True)[pick]
        found.sum().backward()
        doubles = inputs.leaves()
        oracles.logprobs(doubles.hidden, doubles.weight, doubles.targets)[pick].sum().backward()
        for a, b in zip(grads_of(leaves)[:2], grads_of(doubles)[:2], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_entropy_is_none_unless_asked():
    inputs = problem()
    assert linear_logprobs(inputs.hidden, inputs.weight, inputs.targets).entropy is None


def test_entropy_of_uniform_logits_is_log_of_vocabulary(device):
    inputs = problem(vocab=1000, device=device)
    found = linear_logprobs(inputs.hidden, inputs.weight * 0, inputs.targets, entropy=True, chunk_vocab=64)
    expected = torch.full_like(found.entropy, math.log(1000))
    torch.testing.assert_close(found.entropy, expected, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(found.logps, -expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("magnitude", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("chunk_vocab", [None, 10])
def test_large_logits_stay_finite_and_at_most_zero(magnitude, chunk_vocab, device):
    inputs = problem((40,), device=device)
    scaled = inputs._replace(hidden=inputs.hidden * magnitude)
    best = (scaled.hidden @ scaled.weight.mT).argmax(-1)
    for targets in (inputs.targets, best):
        result = solve(scaled._replace(targets=targets), chunk_vocab=chunk_vocab)
        for values in (result.logps, result.entropy, *result.grads[:2]):
            assert values.isfinite().all()
        assert (result.logps <= 0).all()
        assert (result.entropy >= 0).all()


# --- further statistics -----------------------------------------------------------------------------------------------

EXTRAS = ("log_sum_sq_probs", "mean_logits", "is_top1")


def extras_problem(dtype, device) -> Problem:
    """Every other target is the model's own choice."""
    inputs = problem((4, 24), 64, 517, dtype, device, bias=True)
    best = oracles.linear_logits(*inputs[:3]).argmax(-1)
    first_half = torch.arange(24, device=device) % 2 == 0
    return inputs._replace(targets=torch.where(first_half, best, inputs.targets))


@pytest.mark.parametrize("dtype", HALF_AND_FULL)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("chunks", [{}, {"chunk_tokens": 7, "chunk_vocab": 50}], ids=["whole", "tiles"])
def test_extras_against_float64(dtype, transform, chunks, device):
    inputs = extras_problem(dtype, device)
    keep = torch.rand(inputs.targets.shape, device=device) < 0.7
    z = oracles.linear_logits(*inputs[:3], **transform)
    found = linear_logprobs(
        inputs.hidden, inputs.weight, inputs.targets.masked_fill(~keep, 10**9), mask=keep, bias=inputs.bias,
        transform=LogitTransform(**transform), extras=EXTRAS, **chunks,
    )  # fmt: skip
    assert found.entropy is None
    for name, expected in zip(EXTRAS, oracles.logits_extras(z, inputs.targets), strict=True):
        mine = getattr(found, name)
        assert mine.dtype == (torch.bool if name == "is_top1" else torch.float32)
        assert mine.shape == inputs.targets.shape
        assert not mine[~keep].any()
        assert oracles.max_error(mine[keep], expected[keep]) < 1e-5, name
    assert found.is_top1[keep].float().mean() > 0.3


@pytest.mark.parametrize("wanted", [(), ("is_top1",), ["mean_logits", "log_sum_sq_probs"], set(EXTRAS)])
def test_extras_change_nothing_else_and_carry_no_gradient(wanted, device):
    inputs = extras_problem(torch.float32, device)
    leaves = inputs.leaves()
    found = linear_logprobs(leaves.hidden, leaves.weight, leaves.targets, bias=leaves.bias, entropy=True, extras=wanted)
    for name in EXTRAS:
        values = getattr(found, name)
        assert (values is not None) == (name in wanted)
        assert values is None or not values.requires_grad
    functional(found[:2]).backward()
    expected = solve(inputs)
    assert_same(Result(found.logps, found.entropy, grads_of(leaves)), expected)


def test_top1_of_a_tie_is_the_earlier_word(device):
    inputs = problem((4,), vocab=129, device=device)
    weight = inputs.weight.index_fill(0, torch.tensor([20, 90], device=device), 0.0) * 0.0
    targets = torch.tensor([0, 1, 20, 128], device=device)
    found = linear_logprobs(inputs.hidden, weight, targets, extras=("is_top1",), chunk_vocab=50)
    assert found.is_top1.tolist() == [True, False, False, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_compute_dtype_of_float32(dtype, device):
    """A low-precision head in float32, gradients in the parameters' dtype; autocast has no say."""
    inputs = problem((4, 24), 64, 517, dtype, device, bias=True)
    wide = Problem(*(t.float() for t in inputs[:3]), inputs.targets)
    expected = solve(wide)
    with torch.autocast(device.type, torch.bfloat16):
        found = solve(inputs, compute_dtype=torch.float32)
    # The same products of the same numbers; cuBLAS may still choose another kernel for another address.
    exact = {"rtol": 0.0, "atol": 0.0 if device.type == "cpu" else 2e-5}
    torch.testing.assert_close(found.logps, expected.logps, **exact)
    torch.testing.assert_close(found.entropy, expected.entropy, **exact)
    for mine, other in zip(found.grads, expected.grads, strict=True):
        rounding = {"rtol": 0.0 if device.type == "cpu" else 2 * torch.finfo(dtype).eps, "atol": exact["atol"]}
        torch.testing.assert_close(mine, other.to(dtype), **rounding)
    mixed = solve(inputs._replace(hidden=wide.hidden), compute_dtype=torch.float32)
    torch.testing.assert_close(mixed.logps, expected.logps, **exact)
    assert mixed.grads[0].dtype == torch.float32


# --- a head that is whole only now and then ---------------------------------------------------------------------------


class Sharded:
    """Parameters whose data is a shard of no size, but inside `gather`; counts how often it is entered."""

    def __init__(self, *parameters: Tensor) -> None:
        self.whole = {id(p): p.data for p in parameters}
        self.entered = []
        for p in parameters:
            p.data = p.data.new_empty(0)

    @contextmanager
    def gather(self, *parameters: Tensor):
        self.entered.append(len(parameters))
        for p in parameters:
            p.data = self.whole[id(p)]
        yield
        for p in parameters:
            p.data = p.data.new_empty(0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("masked", [False, True], ids=["live", "all masked"])
def test_gather_is_entered_once_in_each_direction(bias, masked, device):
    """By every rank, whatever it holds: gathering is a collective."""
    inputs = problem(bias=bias, device=device)
    mask = torch.full(inputs.targets.shape, not masked, device=device)
    expected = solve(inputs, mask=mask)
    leaves = inputs.leaves()
    parameters = [p for p in (leaves.weight, leaves.bias) if p is not None]
    head = Sharded(*parameters)
    found = linear_logprobs(
        leaves.hidden, leaves.weight, leaves.targets, mask=mask, bias=leaves.bias, entropy=True, gather=head.gather
    )
    assert leaves.weight.shape == (0,)
    assert head.entered == [len(parameters)]
    # Not .backward(): to accumulate a whole gradient beside a shard is up to the framework that shards.
    grads = torch.autograd.grad(functional(found[:2]), (leaves.hidden, *parameters))
    assert head.entered == [len(parameters)] * 2
    assert_same(Result(found.logps, found.entropy, grads), expected._replace(grads=expected.grads[: 2 + bias]))


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_mask_dtypes_and_negative_targets_agree(dtype, device):
    inputs = problem(bias=True, device=device)
    keep = torch.rand(inputs.targets.shape, device=device) < 0.6
    by_mask = solve(inputs, mask=keep.to(dtype))
    by_target = solve(inputs._replace(targets=inputs.targets.masked_fill(~keep, -100)))
    assert 0 < keep.sum() < keep.numel()
    assert_same(by_mask, by_target)
    expected = oracles.logprobs(inputs.hidden, inputs.weight, inputs.targets, inputs.bias)[0]
    torch.testing.assert_close(by_mask.logps[keep].double(), expected[keep], rtol=1e-5, atol=1e-5)
    assert (by_mask.logps[~keep] == 0).all()
    assert (by_mask.entropy[~keep] == 0).all()
    assert (by_mask.grads[0][~keep] == 0).all()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e38])
def test_nothing_under_the_mask_matters(garbage, device):
    inputs = problem((4, 9), bias=True, device=device)
    keep = torch.rand(inputs.targets.shape, device=device) < 0.5
    clean = solve(inputs, mask=keep, chunk_tokens=7, chunk_vocab=40)
    hidden = inputs.hidden.masked_fill(~keep[..., None], garbage)
    for wrong_id in (10**9, 129, -1, -(10**9)):
        targets = inputs.targets.masked_fill(~keep, wrong_id)
        found = solve(inputs._replace(hidden=hidden, targets=targets), mask=keep, chunk_tokens=7, chunk_vocab=40)
        assert_same(found, clean)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (3, 5)])
def test_no_live_token(shape, device):
    inputs = problem(shape, bias=True, device=device)
    result = solve(inputs, mask=torch.zeros(shape, dtype=torch.bool, device=device))
    assert result.logps.shape == result.entropy.shape == shape
    assert not result.logps.any()
    for found, parameter in zip(result.grads, inputs[:3], strict=True):
        assert found.shape == parameter.shape
        assert not found.any()  # any() is true for NaN


# --- what costs nothing -----------------------------------------------------------------------------------------------


def test_masked_rows_enter_no_product():
    inputs = problem((4, 10), 8, 50)
    keep = torch.rand(4, 10) < 0.5
    n = int(keep.sum())
    poisoned = inputs._replace(hidden=inputs.hidden.masked_fill(~keep[..., None], math.nan)).leaves()
    with Products() as forward:
        found = linear_logprobs(poisoned.hidden, poisoned.weight, poisoned.targets, mask=keep)
    with Products() as backward:
        found.logps.sum().backward()
    assert forward.flops == 2 * n * 8 * 50
    assert backward.flops == 3 * 2 * n * 8 * 50
    assert not any(t.isnan().any() for t in forward.operands + backward.operands)


@pytest.mark.parametrize("chunk_tokens", [None, 6])
def test_rows_without_gradient_enter_no_product(chunk_tokens, device):
    inputs = problem((40,), 8, 50, device=device).leaves()
    live = torch.arange(40, device=device) % 3 == 0
    with Products() as forward:
        found = linear_logprobs(
            inputs.hidden, inputs.weight, inputs.targets, entropy=True, chunk_tokens=chunk_tokens, chunk_vocab=13
        )
    coefficients = torch.where(live, torch.randn(40, device=device), 0.0)
    with Products() as backward:
        (found.logps * coefficients).sum().backward()
    if device.type == "cpu":  # on CUDA the backward runs in a thread of its own, out of the mode's sight
        assert forward.flops == 2 * 40 * 8 * 50
        assert backward.flops == 3 * 2 * int(live.sum()) * 8 * 50
    assert (inputs.hidden.grad[~live] == 0).all()
    doubles = inputs.leaves()
    (oracles.logprobs(doubles.hidden, doubles.weight, doubles.targets)[0] * coefficients).sum().backward()
    for mine, expected in zip(grads_of(inputs)[:2], grads_of(doubles)[:2], strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def test_entropy_gradient_alone_keeps_its_row():
    """A row is dropped only where the gradients of log-probability and entropy are both zero."""
    inputs = problem((6,), 8, 50).leaves()
    found = linear_logprobs(inputs.hidden, inputs.weight, inputs.targets, entropy=True)
    with Products() as backward:
        (found.logps[0] + found.entropy[3]).backward()
    assert backward.flops == 3 * 2 * 2 * 8 * 50
    assert inputs.hidden.grad.abs().sum(-1).nonzero().flatten().tolist() == [0, 3]


def test_all_gradients_zero_costs_no_product():
    inputs = problem((6,), 8, 50, bias=True).leaves()
    found = linear_logprobs(inputs.hidden, inputs.weight, inputs.targets, bias=inputs.bias)
    with Products() as backward:
        (found.logps * 0.0).sum().backward()
    assert backward.flops == 0
    assert not any(grad.any() for grad in grads_of(inputs))


def test_nan_gradient_is_not_dropped(device):
    """A diverging loss must show in the gradients."""
    inputs = problem((6,), device=device).leaves()
    found = linear_logprobs(inputs.hidden, inputs.weight, inputs.targets)
    (found.logps * torch.tensor([1.0, math.nan, 0, 0, 0, 0], device=device)).sum().backward()
    assert inputs.hidden.grad[1].isnan().all()
    assert inputs.hidden.grad[0].isfinite().all()
    assert inputs.weight.grad.isnan().any()


@pytest.mark.parametrize("frozen", [("hidden",), ("weight",), ("bias",), ("hidden", "bias"), ("hidden", "weight")])
def test_frozen_inputs_get_none_and_cost_no_product(frozen):
    inputs = problem((12,), 8, 50, bias=True)
    everything = solve(inputs, entropy=False)
    leaves = inputs.leaves()
    for name in frozen:
        getattr(leaves, name).requires_grad_(False)
    found = linear_logprobs(leaves.hidden, leaves.weight, leaves.targets, bias=leaves.bias)
    with Products() as backward:
        functional((found.logps, None)).backward()
    products = 1 + ("hidden" not in frozen) + ("weight" not in frozen)
    assert backward.flops == products * 2 * 12 * 8 * 50
    for name, found_grad, expected in zip(
        ("hidden", "weight", "bias"), grads_of(leaves), everything.grads, strict=True
    ):
        if name in frozen:
            assert found_grad is None
        else:
            torch.testing.assert_close(found_grad, expected, rtol=1e-6, atol=1e-6)
    if "weight" in frozen:
        assert ((50, 8), torch.float32) not in backward.made


def test_no_gradient_asked_for_runs_the_forward_alone():
    inputs = problem((12,), 8, 50).leaves()
    expected = linear_logprobs(inputs.hidden, inputs.weight, inputs.targets, entropy=True)
    for context in (torch.no_grad, torch.inference_mode):
        with context(), Products() as products:
            found = linear_logprobs(inputs.hidden, inputs.weight, inputs.targets, entropy=True)
        assert products.flops == 2 * 12 * 8 * 50
        assert not found.logps.requires_grad
        assert not found.entropy.requires_grad
        assert torch.equal(found.logps, expected.logps)
        assert torch.equal(found.entropy, expected.entropy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_larger_than_a_tile(dtype):
    tokens, hidden_size, vocab, chunk_tokens, chunk_vocab = 64, 4, 1000, 16, 50
    inputs = problem((tokens,), hidden_size, vocab, dtype, bias=True).leaves()
    with Products() as products:
        found = linear_logprobs(
            inputs.hidden, inputs.weight, inputs.targets, bias=inputs.bias, entropy=True,
            chunk_tokens=chunk_tokens, chunk_vocab=chunk_vocab,
        )  # fmt: skip
        functional(found).backward()
    allowed = max(chunk_tokens * chunk_vocab, tokens * hidden_size, vocab)
    large = [(shape, kind) for shape, kind in products.made if math.prod(shape) > allowed]
    # The gradient of the weight itself is the one exception, and it is never held in a wider dtype.
    assert set(large) == {((vocab, hidden_size), dtype)}


def test_default_tiles_hold_no_full_logits():
    tokens, hidden_size, vocab = 2000, 2, 6000
    inputs = problem((tokens,), hidden_size, vocab).leaves()
    with Products() as products:
        linear_logprobs(inputs.hidden, inputs.weight, inputs.targets).logps.sum().backward()
    assert max(math.prod(shape) for shape, _ in products.made) <= tokens * vocab / 4


# --- autograd ---------------------------------------------------------------------------------------------------------


def test_second_backward_gives_the_same_gradients(device):
    inputs = problem(bias=True, device=device).leaves()
    loss = functional(linear_logprobs(inputs.hidden, inputs.weight, inputs.targets, bias=inputs.bias, entropy=True))
    first = torch.autograd.grad(loss, inputs[:3], retain_graph=True)
    second = torch.autograd.grad(loss, inputs[:3])
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_are_bitwise_equal(dtype, device):
    inputs = problem((4, 30), 32, 500, dtype, device, bias=True)
    keep = torch.rand(4, 30, device=device) < 0.7
    runs = [solve(inputs, mask=keep, chunk_tokens=32, chunk_vocab=96) for _ in range(2)]
    assert_same(*runs)


def test_inputs_are_left_alone(device):
    inputs = problem(bias=True, device=device)
    before = [t.clone() for t in inputs]
    solve(inputs, transform=LogitTransform(temperature=0.5, softcap=2.0))
    for t, copy in zip(inputs, before, strict=True):
        assert torch.equal(t, copy)


def test_writing_to_the_results_does_not_change_the_gradient():
    inputs = problem()
    expected = solve(inputs)
    leaves = inputs.leaves()
    found = linear_logprobs(leaves.hidden, leaves.weight, leaves.targets, entropy=True)
    loss = functional(found)
    with torch.no_grad():
        found.logps.zero_()
        found.entropy.fill_(9.0)
    loss.backward()
    for a, b in zip(grads_of(leaves)[:2], expected.grads[:2], strict=True):
        assert torch.equal(a, b)


def test_autocast(device):
    """Products in autocast's dtype, gradients in the parameters' own."""
    inputs = problem((4, 24), 64, 517, device=device, bias=True)
    truth = truth_of(inputs)
    with torch.autocast(device.type, torch.bfloat16):
        ours = solve(inputs)
        eager = solve(inputs, function=oracles.eager_logprobs)
    assert ours.logps.dtype == torch.float32
    for name in ("logps", "entropy"):
        expected = getattr(truth, name)
        budget = oracles.error_budget(getattr(eager, name), expected, torch.bfloat16)
        assert oracles.max_error(getattr(ours, name), expected) <= budget
    for found, other, expected in zip(ours.grads, eager.grads, truth.grads, strict=True):
        assert found.dtype == torch.float32
        assert oracles.max_error(found, expected) <= oracles.error_budget(other, expected, torch.bfloat16)
    assert not torch.equal(ours.logps, solve(inputs).logps)


def test_autocast_takes_mixed_dtypes(device):
    inputs = problem(bias=True, device=device)
    mixed = inputs._replace(hidden=inputs.hidden.bfloat16())
    with torch.autocast(device.type, torch.bfloat16):
        found = solve(mixed)
    assert [g.dtype for g in found.grads] == [torch.bfloat16, torch.float32, torch.float32]
    rounded = Problem(*(t.bfloat16() for t in inputs[:3]), inputs.targets)
    expected = solve(rounded)
    torch.testing.assert_close(found.logps, expected.logps, rtol=1e-2, atol=1e-2)


# --- bad input --------------------------------------------------------------------------------------------------------

NAN = math.nan
BAD_ARGUMENTS = [
    # name in the message, type, arguments that replace good ones
    ("hidden", ValueError, {"hidden": torch.zeros(16)}),
    ("hidden", ValueError, {"hidden": torch.zeros(1, 3, 5, 16)}),
    ("hidden", TypeError, {"hidden": torch.zeros(3, 5, 16, dtype=torch.float64)}),
    ("hidden", TypeError, {"hidden": torch.zeros(3, 5, 16, dtype=torch.int64)}),
    ("hidden", TypeError, {"hidden": [[0.0]]}),
    ("hidden", ValueError, {"hidden": torch.zeros(3, 5, 0), "weight": torch.zeros(129, 0)}),
    ("hidden", TypeError, {"hidden": torch.zeros(15, 16).to_sparse(), "targets": torch.zeros(15, dtype=torch.int64)}),
    ("weight", TypeError, {"weight": torch.zeros(129, 16).to_sparse()}),
    ("targets", TypeError, {"targets": torch.zeros(3, 5, dtype=torch.int64).to_sparse()}),
    ("mask", TypeError, {"mask": torch.ones(3, 5).to_sparse()}),
    ("weight", ValueError, {"weight": torch.zeros(129)}),
    ("weight", ValueError, {"weight": torch.zeros(129, 17)}),
    ("weight", ValueError, {"weight": torch.zeros(0, 16)}),
    ("weight", TypeError, {"weight": torch.zeros(129, 16, dtype=torch.float64)}),
    ("weight", TypeError, {"weight": torch.zeros(129, 16, dtype=torch.bfloat16)}),
    ("weight", ValueError, {"weight": torch.zeros(129, 16, device="meta")}),
    ("bias", ValueError, {"bias": torch.zeros(128)}),
    ("bias", ValueError, {"bias": torch.zeros(129, 1)}),
    ("bias", TypeError, {"bias": torch.zeros(129, dtype=torch.float16)}),
    ("bias", TypeError, {"bias": 1.0}),
    ("bias", ValueError, {"bias": torch.zeros(129, device="meta")}),
    ("targets", ValueError, {"targets": torch.zeros(3, 4, dtype=torch.int64)}),
    ("targets", ValueError, {"targets": torch.zeros(15, dtype=torch.int64)}),
    ("targets", TypeError, {"targets": torch.zeros(3, 5)}),
    ("targets", TypeError, {"targets": torch.zeros(3, 5, dtype=torch.bool)}),
    ("targets", TypeError, {"targets": [0]}),
    ("targets", ValueError, {"targets": torch.zeros(3, 5, dtype=torch.int64, device="meta")}),
    ("targets", ValueError, {"targets": torch.full((3, 5), 129)}),
    ("targets", ValueError, {"targets": torch.full((3, 5), 10**12)}),
    ("mask", ValueError, {"mask": torch.ones(3, 4)}),
    ("mask", ValueError, {"mask": torch.ones(3)}),
    ("mask", TypeError, {"mask": [1]}),
    ("mask", ValueError, {"mask": torch.full((3, 5), 0.5)}),
    ("mask", ValueError, {"mask": torch.full((3, 5), NAN)}),
    ("mask", ValueError, {"mask": torch.full((3, 5), -1)}),
    ("mask", ValueError, {"mask": torch.ones(3, 5, device="meta")}),
    ("transform", TypeError, {"transform": 0.5}),
    ("transform", TypeError, {"transform": LogitTransform}),
    ("entropy", TypeError, {"entropy": 1}),
    ("fixed_shape", TypeError, {"fixed_shape": "no"}),
    ("batch_invariant", TypeError, {"batch_invariant": 0}),
    ("extras", TypeError, {"extras": 5}),
    ("chunk_tokens", ValueError, {"chunk_tokens": 0}),
    ("chunk_tokens", TypeError, {"chunk_tokens": 4.0}),
    ("chunk_vocab", ValueError, {"chunk_vocab": -1}),
    ("chunk_vocab", TypeError, {"chunk_vocab": True}),
    ("grad_tolerance", ValueError, {"grad_tolerance": -0.1}),
    ("grad_tolerance", ValueError, {"grad_tolerance": 1.0}),
    ("grad_tolerance", ValueError, {"grad_tolerance": NAN}),
    ("grad_tolerance", TypeError, {"grad_tolerance": "1e-3"}),
    ("extras", ValueError, {"extras": ("is_top2",)}),
    ("extras", TypeError, {"extras": "is_top1"}),
    ("compute_dtype", TypeError, {"compute_dtype": torch.float64}),
    ("gather", TypeError, {"gather": True}),
    ("vocab_parallel", TypeError, {"vocab_parallel": object()}),
]


@pytest.mark.parametrize(("name", "error", "arguments"), BAD_ARGUMENTS)
def test_bad_arguments_are_named_before_any_product(name, error, arguments):
    good = problem().leaves()
    with Products() as products, pytest.raises(error, match=rf"\b{name}\b"):
        linear_logprobs(**{"hidden": good.hidden, "weight": good.weight, "targets": good.targets, **arguments})
    assert products.flops == 0
    assert good.hidden.grad is None
    assert good.weight.grad is None


def test_dtypes_may_not_mix_without_autocast():
    good = problem()
    with pytest.raises(TypeError, match="autocast"):
        linear_logprobs(good.hidden.bfloat16(), good.weight, good.targets)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 10**400, 1e300, 1e-60])
@pytest.mark.parametrize("option", ["temperature", "softcap", "scale"])
def test_transform_values(option, value):
    with pytest.raises(ValueError, match=option):
        LogitTransform(**{option: value})


@pytest.mark.parametrize("value", ["1.0", [1.0], True])
@pytest.mark.parametrize("option", ["temperature", "softcap", "scale"])
def test_transform_types(option, value):
    with pytest.raises(TypeError, match=option):
        LogitTransform(**{option: value})
