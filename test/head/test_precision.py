"""A float32 head in 16-bit products: with a copy of the weight, or as two or three bfloat16 matrices.

Errors against float64, which kernels run, the memory that the plan says, and bad input.
"""

import pytest
import torch

from devices import skip_without_interpreter
from head_calls import Products, assert_same, call, functional, problem, run_triton, solve, truth
from liger_rl import LogitTransform, LowRank, Support, linear_divergence, linear_logprobs, plan_linear_logprobs
from liger_rl.head.engines.interface import Head
from liger_rl.kernels import devices
from oracles import norm_error
from peaks import tensor_peak

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ON_GPU = torch.cuda.is_available()
LOW = BF16 if ON_GPU else F16  # the interpreter misreads bfloat16 descriptors
# Relative error of an entry of the weight, at most. Triton's interpreter truncates where its compiler rounds.
LEFT_OUT = {"bf16x2": 2.0**-17 if ON_GPU else 2.0**-14, "bf16x3": 2.0**-24 if ON_GPU else 2.0**-21}
SUMS = 2.0**-20  # of float32 sums of a few steps' products, beside their size
TRANSFORM = {"temperature": 0.7, "softcap": 4.0, "scale": 1.5}
CASES = {
    "plain": {},
    "transform": {"transform": LogitTransform(**TRANSFORM)},
    "fixed shape": {"fixed_shape": True},
    "batch invariant": {"batch_invariant": True},
}


def options_of(precision):
    return {"compute_dtype": F32, "precision": precision}


def mixed(shape=(3, 47), hidden_size=72, vocab=301, low=BF16, **more):
    """A float32 head beside 16-bit hidden states. Logits have a standard deviation of 2."""
    whole = problem(shape, hidden_size, vocab, **more)
    return whole._replace(hidden=whole.hidden.to(low))


def rms(error):
    return error.double().square().mean().sqrt().item()


@pytest.fixture
def folds(monkeypatch, device):
    """What is given to each product with a fold in its epilogue: (hidden, weight, planes)."""
    skip_without_interpreter(device)
    run_triton(monkeypatch, epilogue=True)
    from liger_rl.kernels import epilogue

    if not ON_GPU:  # where the interpreter reads bfloat16; its products take the bits for integers
        monkeypatch.setattr(epilogue, "family_of", lambda device: devices.PORTABLE[0])
        from triton.language import bfloat16, float32
        from triton.runtime.interpreter import InterpreterBuilder

        create_dot = InterpreterBuilder.create_dot

        def dot(builder, a, b, *rest):
            a, b = (builder.cast_impl(x, float32) if x.dtype.scalar == bfloat16 else x for x in (a, b))
            return create_dot(builder, a, b, *rest)

        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    found, gemm_fold = [], epilogue.gemm_fold

    def recorded(hidden, weight, *args, planes=1, **kwargs):
        found.append((hidden.dtype, weight.dtype, planes))
        return gemm_fold(hidden, weight, *args, planes=planes, **kwargs)

    monkeypatch.setattr(epilogue, "gemm_fold", recorded)
    return found


@pytest.mark.parametrize(
    ("precision", "options"),
    [("bf16x2", case) for case in CASES.values()] + [("bf16x3", CASES[name]) for name in ("plain", "transform")],
    ids=str,
)
def test_errors_against_float64(precision, options, folds, device):
    inputs = mixed(device=device, bias=True)
    exact = truth(inputs, **(TRANSFORM if "transform" in options else {}))
    found = solve(inputs, **options, **options_of(precision))
    assert folds == [(BF16, F32, int(precision[-1]))]
    slope = TRANSFORM["scale"] / TRANSFORM["temperature"] if "transform" in options else 1.0
    size = inputs.hidden.double().norm(dim=-1).max() * inputs.weight.double().norm(dim=-1).max()
    # Of the H products of a logit, whose errors add up to no more than their sizes do.
    bound = slope * (LEFT_OUT[precision] + SUMS) * size.item()
    assert rms(found.logps - exact.logps) < bound
    assert rms(found.entropy - exact.entropy) < 4 * bound
    # Of a bfloat16 step: dL/dlogits is rounded once, as the weight is for dL/dhidden.
    for name in ("hidden", "weight", "bias"):
        assert found.grads[name].dtype == getattr(inputs, name).dtype
        size = exact.grads[name].norm()
        assert norm_error(found.grads[name], exact.grads[name]) < 4 * torch.finfo(BF16).eps * size


def test_three_matrices_leave_out_less_than_two_and_those_less_than_one(folds, device):
    inputs = mixed((60,), device=device)
    exact = truth(inputs)
    ways = {"one": {"compute_dtype": BF16}, "two": options_of("bf16x2"), "three": options_of("bf16x3")}
    one, two, three = (rms(solve(inputs, **way).logps - exact.logps) for way in ways.values())
    assert [planes for *_, planes in folds] == [1, 2, 3]
    assert 20 * two < one
    assert 4 * three < two


@pytest.mark.parametrize("precision", LEFT_OUT)
def test_tiles_multiply_in_float32(precision, device):
    inputs, options = mixed(device=device), {"chunk_tokens": 40, "chunk_vocab": 300, "compute_dtype": F32}
    found, plain = solve(inputs, precision=precision, **options), solve(inputs, **options)
    assert_same(found, plain)


# --- a copy of the weight ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"fixed_shape": True}, {"batch_invariant": True}, {"grad_tolerance": 0.0, "lse": True}], ids=str
)
def test_the_same_bits_as_the_rounded_weight(options, folds, device):
    """And gradients of the weight that are not rounded."""
    inputs = mixed(device=device, bias=True, low=LOW)
    found = solve(inputs, **options, compute_dtype=LOW)
    expected = solve(inputs._replace(weight=inputs.weight.to(LOW)), **options)
    assert folds == [(LOW, LOW, 1)] * 2
    assert torch.equal(found.logps, expected.logps)
    assert torch.equal(found.entropy, expected.entropy)
    assert torch.equal(found.grads["hidden"], expected.grads["hidden"])
    mine, other = found.grads["weight"], expected.grads["weight"]
    assert (mine.dtype, other.dtype) == (F32, LOW)
    assert norm_error(mine, other) < torch.finfo(LOW).eps * mine.norm()
    assert not torch.equal(mine, mine.to(LOW).float())


def test_lists_of_ids_beside_a_float32_weight(folds, device, monkeypatch):
    """As beside its rounding; their sums for the weight are not rounded."""
    from liger_rl.head.engines import lists
    from liger_rl.kernels import epilogue, listing_triton, support, support_triton

    monkeypatch.setattr(listing_triton, "family_of", epilogue.family_of)
    monkeypatch.setattr(lists, "dense_share", lambda hidden_size: 1.0)
    if device.type == "cpu":  # interpreted, the sums would take minutes
        monkeypatch.setattr(support_triton, "segment_sums", support.segment_sums)
    called, list_gradients = [], lists.list_gradients
    monkeypatch.setattr(lists, "list_gradients", lambda *args: called.append(args) or list_gradients(*args))
    tokens = 300 if device.type == "cuda" else 40
    inputs = mixed((tokens,), 64, 1100, device=device, low=LOW)
    surer = inputs.hidden.float() + 6.0 * torch.rand(tokens, 1, device=device) * inputs.weight[inputs.targets]
    inputs = inputs._replace(hidden=surer.to(LOW))
    found = solve(inputs, grad_tolerance=1e-2, compute_dtype=LOW, entropy=False)
    expected = solve(inputs._replace(weight=inputs.weight.to(LOW)), grad_tolerance=1e-2, entropy=False)
    assert len(called) == 2
    assert torch.equal(found.grads["hidden"], expected.grads["hidden"])
    mine, other = found.grads["weight"], expected.grads["weight"]
    assert mine.dtype == F32
    assert norm_error(mine, other) < torch.finfo(LOW).eps * mine.norm()
    assert not torch.equal(mine, mine.to(LOW).float())


def test_under_autocast_into_a_sum_of_the_callers(folds, device):
    inputs = mixed((141,), device=device, low=F32).leaves()
    total = torch.ones_like(inputs.weight)
    with torch.autocast(device.type, LOW):
        logps = call(inputs, weight_grad=total).logps
        functional(logps).backward()
    assert folds == [(LOW, LOW, 1)]
    again = mixed((141,), device=device, low=F32).leaves()
    functional(call(again, compute_dtype=LOW, grad_tolerance=0.0).logps).backward()
    assert inputs.weight.grad is None
    torch.testing.assert_close(total - 1, again.weight.grad, rtol=1e-5, atol=1e-5)
    assert torch.equal(inputs.hidden.grad, again.hidden.grad)


def test_one_copy_in_each_direction_and_none_beside_tiles(folds, device, monkeypatch):
    copied, with_weight_in = [], Head.with_weight_in
    monkeypatch.setattr(Head, "with_weight_in", lambda *args: copied.append(args) or with_weight_in(*args))
    for options, copies in (({}, 2), ({"chunk_vocab": 300}, 2)):
        inputs = mixed((26,), device=device, low=LOW).leaves()
        functional(call(inputs, compute_dtype=LOW, grad_tolerance=0.0, **options).logps).backward()
        assert len(copied) == copies
    assert len(folds) == 1


# --- what goes with it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [options_of("bf16x2"), options_of("bf16x3"), {"compute_dtype": LOW}], ids=str)
def test_several_targets_and_masked_tokens(options, folds, device):
    inputs = mixed((20,), 64, 300, device=device, low=BF16 if "precision" in options else LOW).leaves()
    ids, mask = torch.randint(300, (20, 3), device=device), torch.arange(20, device=device) % 4 != 1
    exact = inputs.hidden.double() @ inputs.weight.double().T
    found = linear_logprobs(inputs.hidden, inputs.weight, ids, mask=mask, lse=True, **options)
    assert len(folds) == 1
    apart = 4 * torch.finfo(BF16).eps if options["compute_dtype"] == LOW else 1e-3
    logps = exact.log_softmax(-1).gather(1, ids) * mask[:, None]
    torch.testing.assert_close(found.logps.double(), logps, rtol=0, atol=apart)
    torch.testing.assert_close(found.lse.double(), exact.logsumexp(-1) * mask, rtol=0, atol=apart)
    found.logps.sum().backward()
    (expected,) = torch.autograd.grad(logps.sum(), inputs.weight)
    assert norm_error(inputs.weight.grad, expected) < 4 * torch.finfo(BF16).eps * expected.norm()
    largest = linear_logprobs(inputs.hidden, inputs.weight, ids, topk=4, **options)  # in tiles
    torch.testing.assert_close(largest.topk_logps.double(), exact.log_softmax(-1).topk(4).values, rtol=0, atol=apart)


@pytest.mark.parametrize("options", [options_of("bf16x3"), {"compute_dtype": LOW}], ids=str)
def test_in_a_graph(options, folds, device):
    """The operators take it, too: the same bits."""
    low = BF16 if "precision" in options else LOW

    def logps(hidden, weight, targets):
        return linear_logprobs(hidden, weight, targets, **options).logps

    torch._dynamo.reset()
    found = []
    for function in (logps, torch.compile(logps, backend="aot_eager", fullgraph=True)):
        leaves = mixed((30,), 64, 300, device=device, low=low).leaves()
        values = function(leaves.hidden, leaves.weight, leaves.targets)
        functional(values).backward()
        found.append((values.detach(), leaves.hidden.grad, leaves.weight.grad))
    assert all(map(torch.equal, *found))
    assert len(folds) == 2
    torch._dynamo.reset()


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("options", [options_of("bf16x2"), {"compute_dtype": BF16}, {"compute_dtype": F32}], ids=str)
def test_the_peak_bounds_what_is_measured(options, transposed, device):
    n, vocab, size = (600, 3003, 64) if device.type == "cpu" else (4096, 32000, 2048)
    hidden = torch.randn(n, size, device=device).to(BF16).requires_grad_()
    weight = torch.randn(vocab, size, device=device) / size**0.5
    weight = (weight.T.contiguous().T if transposed else weight).requires_grad_()
    targets = torch.randint(vocab, (n,), device=device)
    sizes = {"dtype": BF16, "weight_dtype": F32, "device": device, "contiguous": (True, not transposed)}
    sizes |= {"aligned": devices.aligned(weight)}
    options = options | {"entropy": True}
    plan = plan_linear_logprobs(n, vocab, size, **sizes, **options)
    for _ in range(1 if device.type == "cpu" else 2):  # libraries have taken the memory that they keep
        hidden.grad = weight.grad = None
        with tensor_peak(device) as first:
            found = linear_logprobs(hidden, weight, targets, **options)
        with tensor_peak(device) as second:
            (found.logps.sum() + found.entropy.sum()).backward()
        extra = max(first.bytes, first.held + second.bytes - hidden.grad.nbytes - weight.grad.nbytes)
    assert extra <= plan.extra_bytes
    assert device.type != "cpu" or extra >= plan.extra_bytes / 4


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"precision": "bf16x4"}, ValueError, r"precision must be one of .*'bf16x2', 'bf16x3'.* got 'bf16x4'"),
        ({"precision": 2}, ValueError, "precision must be one of .* got 2"),
        ({"precision": ["bf16x2"]}, ValueError, "precision must be one of"),
        ({"compute_dtype": None}, ValueError, "compute_dtype must be torch.float32 with precision='bf16x2', got None"),
        ({"compute_dtype": BF16}, ValueError, "compute_dtype must be torch.float32 .* got torch.bfloat16"),
        ({"grad_tolerance": 1e-3}, ValueError, "grad_tolerance must be 0.0 with precision: .*; got 0.001"),
    ],
)
def test_bad_options_are_named(options, error, message):
    inputs, options = mixed().leaves(), options_of("bf16x2") | options
    with Products() as products:
        with pytest.raises(error, match=message):
            call(inputs, **options)
        with pytest.raises(error, match=message):
            plan_linear_logprobs(8, 40, 16, device="cpu", weight_dtype=F32, **options)
    assert products.flops == 0


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ((F32, F32), "hidden must be torch.bfloat16 with precision='bf16x2', got torch.float32"),
        ((F16, F32), "hidden must be torch.bfloat16 .* got torch.float16"),
        ((BF16, BF16), "weight must be torch.float32 with precision='bf16x2', got torch.bfloat16"),
    ],
)
def test_dtypes_that_are_not_split_are_named(dtypes, message):
    inputs, options = mixed(), options_of("bf16x2")
    inputs = inputs._replace(hidden=inputs.hidden.to(dtypes[0]), weight=inputs.weight.to(dtypes[1])).leaves()
    with Products() as products, pytest.raises(TypeError, match=message):
        call(inputs, **options)
    assert products.flops == 0
    with pytest.raises(TypeError, match=message):
        plan_linear_logprobs(8, 40, 16, device="cpu", dtype=dtypes[0], weight_dtype=dtypes[1], **options)


def test_what_it_does_not_go_with_is_named():
    inputs, options = mixed((9,)).leaves(), options_of("bf16x3")
    hidden, weight, targets = inputs.hidden, inputs.weight, inputs.targets
    term = LowRank(a=torch.randn(2, 72), b=torch.randn(301, 2))
    support = Support(targets, torch.arange(targets.numel() + 1))  # each token's own id
    with Products() as products:
        for name, given in (("low_rank", [term]), ("support", support)):
            with pytest.raises(ValueError, match=f"precision must be None with (a )?{name}: .*; got bf16x3"):
                linear_logprobs(hidden, weight, targets, **{name: given}, **options)
        with pytest.raises(TypeError, match="takes no precision"):
            linear_divergence(hidden, weight, hidden, weight, **options)
    assert products.flops == 0
    with pytest.raises(ValueError, match='one" needs precision = None, got bf16x3'):
        plan_linear_logprobs(64, 1000, 32, device="cpu", weight_dtype=F32, passes="one", **options)
