"""linear_logprobs: as exact as promised, and what it promises beside its numbers.

Values and gradients of the options in all their combinations are the fuzzer's.
"""

import math
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import oracles
from head_calls import (
    EXTRAS,
    Products,
    Result,
    assert_close,
    assert_same,
    call,
    eager,
    functional,
    problem,
    solve,
    truth,
)
from liger_rl import LogitTransform, linear_logprobs

LOW = [torch.bfloat16, torch.float16]
HALF_AND_FULL = [torch.float32, *LOW]
TRANSFORMS = [{}, {"temperature": 1.6, "softcap": 2.0, "scale": 1.7}]
CAPPED = LogitTransform(temperature=0.8, softcap=4.0)


# --- values and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF_AND_FULL)
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


@pytest.mark.parametrize("dtype", LOW)
def test_chunks_lose_no_precision_in_low_precision(dtype, device):
    """Partial sums over tiles stay float32: many tiny tiles are as good as one."""
    inputs = problem((64,), 32, 400, dtype, device)
    exact, whole = truth(inputs).grads, solve(inputs, chunk_tokens=64, chunk_vocab=400).grads
    for name, found in solve(inputs, chunk_tokens=5, chunk_vocab=7).grads.items():
        assert oracles.max_error(found, exact[name]) <= oracles.error_budget(whole[name], exact[name], dtype)


@pytest.mark.parametrize("chunk_vocab", [None, 20])
def test_strided_inputs(chunk_vocab, device):
    """Transposed, sliced and strided views give what their contiguous copies give."""
    base = problem((3, 5), device=device, bias=True)
    views = base._replace(
        hidden=base.hidden.transpose(0, 1).contiguous().transpose(0, 1),
        weight=torch.stack([base.weight.mT.contiguous(), torch.ones_like(base.weight.mT)], -1)[..., 0].mT,
        bias=torch.stack([base.bias, base.bias * 0], -1)[:, 0],
        targets=torch.cat([base.targets, base.targets], 1)[:, :5],
    )
    assert not any(t.is_contiguous() for t in (*views.floats().values(), views.targets))
    assert_close(solve(views, chunk_vocab=chunk_vocab), truth(base))


def test_a_flat_head(device):
    """Entropy and log-probability are the logarithm of the vocabulary; of a tie the first word is the top one."""
    inputs = problem((4,), vocab=1000, device=device)
    targets = torch.tensor([0, 1, 20, 999], device=device)
    found = linear_logprobs(
        inputs.hidden, inputs.weight * 0.0, targets, entropy=True, extras=("is_top1",), chunk_vocab=64
    )
    expected = torch.full_like(found.entropy, math.log(1000))
    torch.testing.assert_close(found.entropy, expected, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(found.logps, -expected, rtol=1e-6, atol=0.0)
    assert found.is_top1.tolist() == [True, False, False, False]


@pytest.mark.parametrize("magnitude", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("chunk_vocab", [None, 10])
def test_large_logits_stay_finite_and_at_most_zero(magnitude, chunk_vocab, device):
    inputs = problem((40,), device=device)
    scaled = inputs._replace(hidden=inputs.hidden * magnitude)
    best = (scaled.hidden @ scaled.weight.mT).argmax(-1)
    for targets in (inputs.targets, best):
        result = solve(scaled._replace(targets=targets), chunk_vocab=chunk_vocab)
        assert all(values.isfinite().all() for values in (result.logps, result.entropy, *result.grads.values()))
        assert (result.logps <= 0).all()
        assert (result.entropy >= 0).all()


@pytest.mark.parametrize("dtype", HALF_AND_FULL)
@pytest.mark.parametrize("transform", TRANSFORMS, ids=["plain", "all"])
def test_extras_against_float64(dtype, transform, device):
    """Every other target is the model's own choice."""
    inputs = problem((4, 24), 64, 517, dtype, device, bias=True)
    best = oracles.linear_logits(inputs.hidden, inputs.weight, inputs.bias).argmax(-1)
    inputs = inputs._replace(targets=torch.where(torch.arange(24, device=device) % 2 == 0, best, inputs.targets))
    keep = torch.rand(inputs.targets.shape, device=device) < 0.7
    z = oracles.linear_logits(inputs.hidden, inputs.weight, inputs.bias, **transform)
    dirty = inputs._replace(targets=inputs.targets.masked_fill(~keep, 10**9))
    for chunks in ({}, {"chunk_tokens": 7, "chunk_vocab": 50}):
        found = call(dirty, mask=keep, transform=LogitTransform(**transform), extras=EXTRAS, **chunks)
        assert found.entropy is None
        for name, expected in zip(EXTRAS, oracles.logits_extras(z, inputs.targets), strict=True):
            mine = getattr(found, name)
            assert mine.dtype == (torch.bool if name == "is_top1" else torch.float32)
            assert mine.shape == inputs.targets.shape
            assert not mine[~keep].any()
            assert oracles.max_error(mine[keep], expected[keep]) < 1e-5, name
        assert found.is_top1[keep].float().mean() > 0.3


@pytest.mark.parametrize("wanted", [("is_top1",), ["mean_logits", "log_sum_sq_probs"], set(EXTRAS)], ids=len)
def test_extras_change_nothing_else_and_carry_no_gradient(wanted, device):
    inputs = problem(bias=True, device=device)
    leaves = inputs.leaves()
    found = call(leaves, entropy=True, extras=wanted)
    for name in EXTRAS:
        values = getattr(found, name)
        assert (values is not None) == (name in wanted)
        assert values is None or not values.requires_grad
    functional(*found[:2]).backward()
    assert_same(Result(found.logps.detach(), found.entropy.detach(), leaves.grads()), solve(inputs))


@pytest.mark.parametrize("dtype", LOW)
def test_a_compute_dtype_of_float32(dtype, device):
    """A low-precision head in float32, gradients in the parameters' dtype; autocast has no say."""
    inputs = problem((4, 24), 64, 517, dtype, device, bias=True)
    wide = inputs.to(torch.float32)
    expected = solve(wide)
    with torch.autocast(device.type, torch.bfloat16):
        found = solve(inputs, compute_dtype=torch.float32)
    # The same products of the same numbers; cuBLAS may still choose another kernel for another address.
    exact = {"rtol": 0.0, "atol": 0.0 if device.type == "cpu" else 2e-5}
    torch.testing.assert_close(found[:2], expected[:2], **exact)
    rounding = {"rtol": 0.0 if device.type == "cpu" else 2 * torch.finfo(dtype).eps, "atol": exact["atol"]}
    for name, mine in found.grads.items():
        torch.testing.assert_close(mine, expected.grads[name].to(dtype), **rounding)
    mixed = solve(inputs._replace(hidden=wide.hidden), compute_dtype=torch.float32)
    torch.testing.assert_close(mixed.logps, expected.logps, **exact)
    assert mixed.grads["hidden"].dtype == torch.float32


def test_autocast(device):
    """Products in autocast's dtype, gradients in the parameters' own."""
    inputs = problem((4, 24), 64, 517, device=device, bias=True)
    exact = truth(inputs)
    with torch.autocast(device.type, torch.bfloat16):
        ours, other = solve(inputs), eager(inputs)
    assert ours.logps.dtype == torch.float32
    for found, theirs, expected in zip(
        (*ours[:2], *ours.grads.values()), (*other[:2], *other.grads.values()), (*exact[:2], *exact.grads.values()),
        strict=True,
    ):  # fmt: skip
        assert found.dtype == torch.float32
        assert oracles.max_error(found, expected) <= oracles.error_budget(theirs, expected, torch.bfloat16)
    assert not torch.equal(ours.logps, solve(inputs).logps)


def test_autocast_takes_mixed_dtypes(device):
    inputs = problem(bias=True, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        found = solve(inputs._replace(hidden=inputs.hidden.bfloat16()))
    assert [g.dtype for g in found.grads.values()] == [torch.bfloat16, torch.float32, torch.float32]
    torch.testing.assert_close(found.logps, solve(inputs.to(torch.bfloat16)).logps, rtol=1e-2, atol=1e-2)


def test_a_float32_bias_beside_a_bfloat16_head(device):
    """The bias is added in float32, so it need not be rounded to the head's dtype."""
    inputs = problem(dtype=torch.bfloat16, device=device)._replace(bias=torch.randn(129, device=device) * 3)
    found, exact = solve(inputs), truth(inputs)
    assert oracles.max_error(found.logps, exact.logps) < 2e-5
    assert found.grads["bias"].dtype == torch.float32


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
    leaves = inputs.leaves()
    parameters = [leaves.weight, leaves.bias][: 1 + bias]
    head = Sharded(*parameters)
    found = call(leaves, mask=mask, entropy=True, gather=head.gather)
    assert leaves.weight.shape == (0,)
    assert head.entered == [len(parameters)]
    # Not .backward(): to accumulate a whole gradient beside a shard is up to the framework that shards.
    grads = torch.autograd.grad(functional(*found[:2]), (leaves.hidden, *parameters))
    assert head.entered == [len(parameters)] * 2
    named = dict(zip(inputs.floats(), grads, strict=True))
    assert_same(Result(found.logps.detach(), found.entropy.detach(), named), solve(inputs, mask=mask))


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_mask_dtypes_and_negative_targets_agree(dtype, device):
    inputs = problem(bias=True, device=device)
    keep = torch.rand(inputs.targets.shape, device=device) < 0.6
    by_mask = solve(inputs, mask=keep.to(dtype))
    assert 0 < keep.sum() < keep.numel()
    assert_same(by_mask, solve(inputs._replace(targets=inputs.targets.masked_fill(~keep, -100))))
    torch.testing.assert_close(by_mask.logps[keep].double(), truth(inputs).logps[keep], rtol=1e-5, atol=1e-5)
    for values in (by_mask.logps, by_mask.entropy, by_mask.grads["hidden"]):
        assert (values[~keep] == 0).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_target_dtypes(dtype):
    inputs = problem()
    assert_same(solve(inputs._replace(targets=inputs.targets.to(dtype))), solve(inputs))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e38])
@pytest.mark.parametrize("rank", [0, 3])
def test_nothing_under_the_mask_matters(garbage, rank, device):
    """The gradient of `a` included, whose product sees the hidden states before the head does."""
    inputs = problem((4, 9), bias=True, rank=rank, device=device)
    keep = torch.rand(inputs.targets.shape, device=device) < 0.5
    clean = solve(inputs, mask=keep, chunk_tokens=7, chunk_vocab=40)
    hidden = inputs.hidden.masked_fill(~keep[..., None], garbage)
    for wrong_id in (10**9, 129, -1, -(10**9)):
        dirty = inputs._replace(hidden=hidden, targets=inputs.targets.masked_fill(~keep, wrong_id))
        assert_same(solve(dirty, mask=keep, chunk_tokens=7, chunk_vocab=40), clean)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (3, 5)])
@pytest.mark.parametrize("rank", [0, 3])
def test_no_live_token(shape, rank, device):
    inputs = problem(shape, bias=True, rank=rank, device=device)
    result = solve(inputs, mask=torch.zeros(shape, dtype=torch.bool, device=device))
    assert result.logps.shape == result.entropy.shape == shape
    assert not result.logps.any()
    for name, parameter in inputs.floats().items():
        assert result.grads[name].shape == parameter.shape
        assert not result.grads[name].any()  # any() is true for NaN


# --- what costs nothing -----------------------------------------------------------------------------------------------

PRODUCT = 2 * 8 * 50  # of one token


def test_masked_rows_enter_no_product():
    inputs = problem((4, 10), 8, 50)
    keep = torch.rand(4, 10) < 0.5
    n = int(keep.sum())
    poisoned = inputs._replace(hidden=inputs.hidden.masked_fill(~keep[..., None], math.nan)).leaves()
    with Products() as forward:
        found = call(poisoned, mask=keep)
    with Products() as backward:
        found.logps.sum().backward()
    assert (forward.flops, backward.flops) == (n * PRODUCT, 3 * n * PRODUCT)
    assert not any(t.isnan().any() for pair in forward.factors + backward.factors for t in pair)


@pytest.mark.parametrize("rows", [[0, 3, 4], []], ids=["some", "none"])
@pytest.mark.parametrize("chunk_tokens", [None, 2])
def test_rows_without_gradient_enter_no_product(rows, chunk_tokens, device):
    """A row is dropped only where the gradients of log-probability and entropy are both zero."""
    inputs = problem((6,), 8, 50, bias=True, device=device)
    leaves = inputs.leaves()
    chosen = torch.zeros(2, 6, device=device)
    chosen[0, rows[:2]], chosen[1, rows[2:]] = 1.5, -0.5
    found = call(leaves, entropy=True, chunk_tokens=chunk_tokens, chunk_vocab=chunk_tokens and 13)
    with Products() as backward:
        (found.logps * chosen[0] + found.entropy * chosen[1]).sum().backward()
    if device.type == "cpu":
        assert backward.flops == 3 * len(rows) * PRODUCT
    assert leaves.hidden.grad.abs().sum(-1).nonzero().flatten().tolist() == rows
    wide = inputs.to(torch.float64).leaves()
    logps, entropy = oracles.logprobs(wide.hidden, wide.weight, wide.targets, wide.bias)
    (logps * chosen[0] + entropy * chosen[1]).sum().backward()
    for name, expected in wide.grads().items():
        torch.testing.assert_close(leaves.grads()[name].double(), expected, rtol=1e-4, atol=1e-5)


def test_nan_gradient_is_not_dropped(device):
    """A diverging loss must show in the gradients."""
    inputs = problem((6,), device=device).leaves()
    (call(inputs).logps * torch.tensor([1.0, math.nan, 0, 0, 0, 0], device=device)).sum().backward()
    assert inputs.hidden.grad[1].isnan().all()
    assert inputs.hidden.grad[0].isfinite().all()
    assert inputs.weight.grad.isnan().any()


@pytest.mark.parametrize("frozen", [("hidden",), ("weight",), ("bias",), ("hidden", "bias"), ("hidden", "weight")])
def test_frozen_inputs_get_none_and_cost_no_product(frozen):
    inputs = problem((12,), 8, 50, bias=True)
    leaves = inputs.leaves(frozen)
    found = call(leaves)
    with Products() as backward:
        functional(found.logps).backward()
    assert backward.flops == (1 + ("hidden" not in frozen) + ("weight" not in frozen)) * 12 * PRODUCT
    expected = solve(inputs, entropy=False).grads
    for name, grad in leaves.grads().items():
        assert (grad is None) == (name in frozen)
        if grad is not None:
            torch.testing.assert_close(grad, expected[name], rtol=1e-6, atol=1e-6)
    if "weight" in frozen:
        assert ((50, 8), torch.float32) not in backward.made


def test_no_gradient_asked_for_runs_the_forward_alone():
    inputs = problem((12,), 8, 50).leaves()
    expected = call(inputs, entropy=True)
    for context in (torch.no_grad, torch.inference_mode):
        with context(), Products() as products:
            found = call(inputs, entropy=True)
        assert products.flops == 12 * PRODUCT
        for mine, other in zip(found[:2], expected[:2], strict=True):
            assert not mine.requires_grad
            assert torch.equal(mine, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_larger_than_a_tile(dtype):
    tokens, hidden_size, vocab, chunk_tokens, chunk_vocab = 64, 4, 1000, 16, 50
    inputs = problem((tokens,), hidden_size, vocab, dtype, bias=True)
    with Products() as products:
        solve(inputs, chunk_tokens=chunk_tokens, chunk_vocab=chunk_vocab)
    allowed = max(chunk_tokens * chunk_vocab, tokens * hidden_size, vocab)
    large = {(shape, kind) for shape, kind in products.made if math.prod(shape) > allowed}
    # The gradient of the weight itself is the one exception, and it is never held in a wider dtype.
    assert large == {((vocab, hidden_size), dtype)}


def test_default_tiles_hold_no_full_logits():
    inputs = problem((2000,), 2, 6000).leaves()
    with Products() as products:
        call(inputs).logps.sum().backward()
    assert products.largest() <= 2000 * 6000 / 4


# --- autograd ---------------------------------------------------------------------------------------------------------


def test_inputs_are_left_alone(device):
    inputs = problem(bias=True, device=device)
    before = [t.clone() for t in inputs[:4]]
    solve(inputs, transform=CAPPED)
    assert all(torch.equal(t, copy) for t, copy in zip(inputs[:4], before, strict=True))


def test_writing_to_the_results_does_not_change_the_gradient():
    inputs = problem()
    leaves = inputs.leaves()
    found = call(leaves, entropy=True)
    loss = functional(*found[:2])
    with torch.no_grad():
        found.logps.zero_()
        found.entropy.fill_(9.0)
    loss.backward()
    for name, expected in solve(inputs).grads.items():
        assert torch.equal(leaves.grads()[name], expected)


def test_another_default_dtype_changes_nothing():
    inputs = problem()
    expected = call(inputs, entropy=True)
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            found = call(inputs, entropy=True)
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(found[:2], expected[:2], strict=True))


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


def test_dtypes_may_not_mix_without_autocast():
    good = problem()
    with pytest.raises(TypeError, match="autocast"):
        linear_logprobs(good.hidden.bfloat16(), good.weight, good.targets)


BAD_VALUES = [(ValueError, value) for value in (0.0, -1.0, math.nan, math.inf, 10**400, 1e300, 1e-60)]


@pytest.mark.parametrize(("error", "value"), [*BAD_VALUES, *((TypeError, value) for value in ("1.0", [1.0], True))])
@pytest.mark.parametrize("option", ["temperature", "softcap", "scale"])
def test_transform_values(option, error, value):
    with pytest.raises(error, match=option):
        LogitTransform(**{option: value})
