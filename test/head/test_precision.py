"""A float32 weight beside bfloat16 hidden states in bfloat16 products: errors against float64, memory, bad input."""

import pytest
import torch

from head_calls import Products, call, functional, problem, run_triton, solve, truth
from liger_rl import LogitTransform, LowRank, Support, linear_divergence, linear_logprobs, plan_linear_logprobs
from liger_rl.kernels import gemm, planes, planes_triton
from oracles import norm_error
from peaks import tensor_peak

BF16, F32 = torch.bfloat16, torch.float32
# Of a product's relative error: what two planes leave out at most, and float32 sums, which three have alone.
ERRORS = {"bf16x2": 2.0**-16, "bf16x3": 2.0**-20}
TRANSFORM = {"temperature": 0.7, "softcap": 4.0, "scale": 1.5}
CASES = {
    "plain": {},
    "tiles": {"chunk_tokens": 13, "chunk_vocab": 100},
    "transform": {"transform": LogitTransform(**TRANSFORM)},
    "fixed shape": {"fixed_shape": True},
    "batch invariant": {"batch_invariant": True},
    "budget": {"max_extra_bytes": 1 << 27},
    "tolerance": {"grad_tolerance": 0.01},  # without effect
}


def options_of(precision):
    return {"compute_dtype": F32, "precision": precision}


def mixed(shape=(3, 17), hidden_size=64, vocab=501, **more):
    """Float32 but for the hidden states. Logits have a standard deviation of 2."""
    whole = problem(shape, hidden_size, vocab, **more)
    return whole._replace(hidden=whole.hidden.to(BF16))


def rms(error):
    return error.double().square().mean().sqrt().item()


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("precision", ERRORS)
def test_errors_against_float64(precision, options, device):
    inputs = mixed(device=device, bias=True)
    exact = truth(inputs, **(TRANSFORM if "transform" in options else {}))
    found = solve(inputs, **options, **options_of(precision))
    slope = TRANSFORM["scale"] / TRANSFORM["temperature"] if "transform" in options else 1.0
    size = slope * inputs.hidden.double().norm(dim=-1).max() * inputs.weight.double().norm(dim=-1).max() / 64**0.5
    bound = ERRORS[precision] * size.item()  # of independent errors of the H products of a logit
    assert rms(found.logps - exact.logps) < bound
    assert rms(found.entropy - exact.entropy) < 2 * bound
    for name in ("weight", "bias"):
        assert found.grads[name].dtype == F32
        assert norm_error(found.grads[name], exact.grads[name]) < 2**-14 * exact.grads[name].norm()
    # Of hidden, nothing but the one rounding to its dtype.
    mine, of_hidden = found.grads["hidden"], exact.grads["hidden"]
    assert mine.dtype == BF16
    assert norm_error(mine, of_hidden) < 1.02 * norm_error(of_hidden.to(BF16), of_hidden)


def test_beside_bfloat16_and_float32(device):
    inputs = mixed(device=device)
    exact, rounded = truth(inputs), inputs._replace(weight=inputs.weight.to(BF16))
    ways = {
        "bfloat16": (rounded, {}),
        "two": (inputs, options_of("bf16x2")),
        "three": (inputs, options_of("bf16x3")),
        "float32": (inputs, {"compute_dtype": F32}),
    }
    found = {name: solve(given, **options) for name, (given, options) in ways.items()}
    logps = {name: rms(part.logps - exact.logps) for name, part in found.items()}
    of_weight = {name: norm_error(part.grads["weight"], exact.grads["weight"]) for name, part in found.items()}
    assert 100 * logps["two"] < logps["bfloat16"]
    assert 2 * logps["three"] < logps["two"]
    assert logps["three"] < 4 * logps["float32"]
    assert max(100 * of_weight["two"], 100 * of_weight["three"]) < of_weight["bfloat16"]


@pytest.mark.parametrize("precision", ERRORS)
def test_the_gradient_of_hidden_in_float32(precision):
    """What the products leave before it is rounded."""
    left, right = torch.randn(40, 300), torch.randn(300, 50)
    exact = left.double() @ right.double()
    total = torch.zeros(40, 50)
    of_right = [plane.T for plane in planes.planes(right.T, 2).split(300, dim=1)]
    gemm.accumulate_planes(total, planes.planes(left, 2).split(300, dim=1), of_right)
    assert norm_error(total, exact) < 2**-15 * exact.norm()


@pytest.mark.parametrize("kernels", [planes, planes_triton], ids=["eager", "triton"])
def test_planes_add_up(kernels, monkeypatch):
    monkeypatch.setattr(planes_triton, "BLOCK", 4)
    on_gpu = torch.cuda.is_available()
    values = torch.cat([torch.randn(6, 7) * 10.0**power for power in (-20, -3, 0, 30)])
    values[0] = torch.tensor([0.0, 1.0, -1.0, 1 + 2**-23, 1 - 2**-24, 257.0, -3.0e38])
    values = values.cuda() if on_gpu else values
    truncates = kernels is planes_triton and not on_gpu  # Triton's interpreter does, where its compiler rounds
    for count, left_out in ((1, 2.0**-8), (2, 2.0**-16), (3, 0.0)):
        found = kernels.planes(values, count)
        assert (found.shape, found.dtype) == ((24, count * 7), BF16)
        assert truncates or torch.equal(found, planes.planes(values, count))
        assert torch.equal(found, kernels.planes(values.T.contiguous().T, count))
        total = sum(plane.double() for plane in found.split(7, dim=1))
        most = 2.0 ** (-7 * count) if truncates else left_out
        assert ((total - values.double()).abs() <= most * values.double().abs()).all()
    assert kernels.planes(values[:0], 2).shape == (0, 14)


@pytest.mark.parametrize("precision", ERRORS)
def test_products_take_planes_of_a_tile(precision):
    """One product for each plane of the weight in either direction, and three and two for the gradients."""
    inputs, planes = mixed((26,)).leaves(), int(precision[-1])
    with Products() as forward:
        logps = call(inputs, chunk_tokens=13, chunk_vocab=100, **options_of(precision)).logps
    with Products() as backward:
        logps.sum().backward()
    product = 2 * 26 * 64 * 501
    assert forward.flops == planes * product
    assert backward.flops == (planes + 3 + 2) * product
    assert max(size for shape, _ in forward.made + backward.made for size in shape) <= 501
    assert all(shape != (501, planes * 64) for shape, _ in forward.made)  # no copy of the weight


@pytest.mark.parametrize("precision", ERRORS)
def test_the_weights_gradient_in_place(precision, device):
    inputs = mixed(device=device)
    total = torch.ones_like(inputs.weight)
    found = solve(inputs, weight_grad=total, **options_of(precision))
    plain = solve(inputs, **options_of(precision))
    assert found.grads["weight"] is None
    assert torch.equal(found.grads["hidden"], plain.grads["hidden"])
    torch.testing.assert_close(total - 1, plain.grads["weight"], rtol=1e-5, atol=1e-6)


def test_kernels_in_triton(monkeypatch):
    inputs, options = mixed((9,), 24, 130, bias=True), {"chunk_vocab": 100, **options_of("bf16x3")}
    plain = solve(inputs, **options)
    run_triton(monkeypatch)
    found = solve(inputs, **options)
    torch.testing.assert_close(found.logps, plain.logps, rtol=1e-5, atol=1e-5)
    for name in ("weight", "bias"):
        assert norm_error(found.grads[name], plain.grads[name]) < 2**-12 * plain.grads[name].norm()
    assert norm_error(found.grads["hidden"], plain.grads["hidden"]) < 2**-7 * plain.grads["hidden"].double().norm()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_factor(frozen, device):
    inputs, options = mixed(device=device), options_of("bf16x2")
    found, plain = solve(inputs, frozen=[frozen], **options).grads, solve(inputs, **options).grads
    other = {"hidden": "weight", "weight": "hidden"}[frozen]
    assert found[frozen] is None
    assert torch.equal(found[other], plain[other])


@pytest.mark.parametrize("precision", ERRORS)
def test_masked_tokens_and_no_token(precision, device):
    inputs, options = mixed(device=device).leaves(), options_of(precision)
    mask = torch.zeros(3, 17, device=device)
    assert not call(inputs, mask=mask, **options).logps.any()
    mask[1, 4:9] = 1
    found = call(inputs, mask=mask, **options).logps
    alone = linear_logprobs(inputs.hidden[1, 4:9], inputs.weight, inputs.targets[1, 4:9], **options).logps
    torch.testing.assert_close(found[1, 4:9], alone, rtol=1e-5, atol=1e-5)
    assert torch.equal(found != 0, mask != 0)
    none = mixed((0,), device=device).leaves()
    functional(call(none, **options).logps).backward()
    assert none.hidden.grad.shape == (0, 64)
    assert not none.weight.grad.any()


def test_several_targets_and_the_likeliest(device):
    inputs, options = mixed((9,), device=device).leaves(), options_of("bf16x3")
    z = inputs.hidden.double() @ inputs.weight.double().T
    exact, ids = z.log_softmax(-1), torch.randint(501, (9, 3), device=device)
    found = linear_logprobs(inputs.hidden, inputs.weight, ids, topk=4, lse=True, **options)
    torch.testing.assert_close(found.logps.double(), exact.gather(1, ids), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.topk_logps.double(), exact.topk(4).values, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.lse.double(), z.logsumexp(-1), rtol=0, atol=1e-5)
    assert torch.equal(found.topk_ids, exact.topk(4).indices)
    found.logps.sum().backward()
    mine = inputs.weight.grad.clone()
    (expected,) = torch.autograd.grad(exact.gather(1, ids).sum(), inputs.weight)
    assert norm_error(mine, expected.double()) < 2**-14 * expected.norm()


@pytest.mark.parametrize("precision", ERRORS)
def test_in_a_graph(precision):
    """The operator takes it, too: the same bits."""

    def both(inputs, function):
        leaves = inputs.leaves()
        logps = function(leaves.hidden, leaves.weight, leaves.targets)
        functional(logps).backward()
        return logps.detach(), leaves.hidden.grad, leaves.weight.grad

    def logps(hidden, weight, targets):
        return linear_logprobs(hidden, weight, targets, **options_of(precision)).logps

    torch._dynamo.reset()
    for mine, other in zip(
        both(mixed(), torch.compile(logps, backend="aot_eager", fullgraph=True)), both(mixed(), logps), strict=True
    ):
        assert torch.equal(mine, other)
    torch._dynamo.reset()


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budgeted", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("precision", ERRORS)
def test_the_peak_bounds_what_is_measured(precision, transposed, budgeted, device):
    n, vocab, size = (600, 3003, 64) if device.type == "cpu" else (4096, 32000, 2048)
    hidden = torch.randn(n, size, device=device).to(BF16).requires_grad_()
    weight = torch.randn(vocab, size, device=device) / size**0.5
    weight = (weight.T.contiguous().T if transposed else weight).requires_grad_()
    targets = torch.randint(vocab, (n,), device=device)
    sizes = {"dtype": BF16, "weight_dtype": F32, "device": device, "contiguous": (True, not transposed)}
    options = options_of(precision) | {"entropy": True}
    plan = plan_linear_logprobs(n, vocab, size, **sizes, **options)
    if budgeted:
        options["max_extra_bytes"] = plan.least_bytes
        plan = plan_linear_logprobs(n, vocab, size, **sizes, **options)
    assert (plan.path, plan.epilogue) == ("two passes", False)
    for _ in range(1 if device.type == "cpu" else 2):  # libraries have taken the memory that they keep
        hidden.grad = weight.grad = None
        with tensor_peak(device) as first:
            found = linear_logprobs(hidden, weight, targets, **options)
        with tensor_peak(device) as second:
            (found.logps.sum() + found.entropy.sum()).backward()
        extra = max(first.bytes, first.held + second.bytes - hidden.grad.nbytes - weight.grad.nbytes)
    assert extra <= plan.extra_bytes <= options.get("max_extra_bytes", plan.extra_bytes)
    assert device.type != "cpu" or extra >= plan.extra_bytes / 4
    if budgeted:
        with pytest.raises(ValueError, match="max_extra_bytes must be at least"):
            linear_logprobs(hidden, weight, targets, **options | {"max_extra_bytes": plan.least_bytes - 1})


def test_one_pass_is_refused():
    given = {"dtype": BF16, "weight_dtype": F32, "device": "cpu"} | options_of("bf16x2")
    with pytest.raises(ValueError, match="one\" needs precision = None, got 'bf16x2'"):
        plan_linear_logprobs(64, 1000, 32, passes="one", **given)
    assert plan_linear_logprobs(64, 1000, 32, passes="auto", **given).path == "two passes"


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"precision": "bf16x4"}, ValueError, r"precision must be one of \['bf16x2', 'bf16x3'\] or None, got 'bf16x4'"),
        ({"precision": 2}, ValueError, "precision must be one of .* got 2"),
        ({"precision": ["bf16x2"]}, ValueError, "precision must be one of"),
        ({"compute_dtype": None}, ValueError, "compute_dtype must be torch.float32 with precision='bf16x2', got None"),
        ({"compute_dtype": BF16}, ValueError, "compute_dtype must be torch.float32 .* got torch.bfloat16"),
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
        ((torch.float16, F32), "hidden must be torch.bfloat16 .* got torch.float16"),
        ((BF16, BF16), "weight must be torch.float32 with precision='bf16x2', got torch.bfloat16"),
        ((BF16, torch.float16), "weight must be torch.float32 .* got torch.float16"),
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
    inputs, options = mixed().leaves(), options_of("bf16x3")
    hidden, weight, targets = inputs.hidden, inputs.weight, inputs.targets
    term = LowRank(a=torch.randn(2, 64), b=torch.randn(501, 2))
    support = Support(targets.flatten(), torch.arange(targets.numel() + 1))  # each token's own id
    with Products() as products:
        with pytest.raises(ValueError, match="precision must be None with low_rank, got 'bf16x3'"):
            linear_logprobs(hidden, weight, targets, low_rank=[term], **options)
        with pytest.raises(ValueError, match="precision must be None with support, got 'bf16x3'"):
            linear_logprobs(hidden, weight, targets, support=support, **options)
        with pytest.raises(TypeError, match="takes no precision"):
            linear_divergence(hidden, weight, hidden, weight, **options)
    assert products.flops == 0
