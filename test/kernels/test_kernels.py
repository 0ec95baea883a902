"""Kernels of tiles and products with an epilogue against float64; on CPU in Triton's interpreter."""

import math

import numpy as np
import pytest
import torch

import oracles
from devices import NEEDS_GPU
from head_calls import assert_close, call, problem, run_triton, solve, truth
from liger_rl import linear_logprobs
from liger_rl.head import LogitTransform, logits_logprobs
from liger_rl.kernels import reference
from liger_rl.kernels.limits import LIMITS
from liger_rl.kernels.statistics import EXTRAS

pytest.importorskip("triton", reason="Triton is not installed")
from liger_rl.kernels import epilogue, select_tokens_triton

# Where Triton compiles, it takes CUDA tensors alone; elsewhere its interpreter takes CPU tensors.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["PyTorch", "Triton"])
def kernels(request, monkeypatch):
    """Of tiles in memory; those of a GPU are Triton's alone."""
    if request.param == "Triton":
        run_triton(monkeypatch)
    elif DEVICE.type == "cuda":
        pytest.skip("a GPU runs Triton's kernels")


@pytest.fixture
def product(monkeypatch):
    """`gemm_fold` runs, on CPU as on Hopper."""
    run_triton(monkeypatch, epilogue=True)


# --- tiles in memory, through the public call; small ones are the fuzzer's --------------------------------------------


@pytest.mark.parametrize(("vocab", "chunk"), [(9001, 9001), (5000, 4096), pytest.param(151936, 65536, marks=NEEDS_GPU)])
@pytest.mark.parametrize("transform", [{}, {"temperature": 1.6, "softcap": 30.0, "scale": 1.7}], ids=["plain", "all"])
def test_tiles_wider_than_a_block_of_a_kernel(vocab, chunk, transform, kernels):
    x = problem((3,), 8, vocab, device=DEVICE, bias=True)
    best = (x.hidden @ x.weight.T + x.bias).argmax(-1)
    x = x._replace(targets=torch.where(torch.arange(3, device=DEVICE) > 0, best, x.targets))
    found = solve(x, transform=LogitTransform(**transform), chunk_vocab=chunk)
    assert_close(found, truth(x, **transform), 2e-5)
    extras = call(x, transform=LogitTransform(**transform), chunk_vocab=chunk, extras=EXTRAS)
    z = oracles.linear_logits(x.hidden, x.weight, x.bias, **transform)
    expected = oracles.values(z, x.targets)
    torch.testing.assert_close(extras.log_sum_sq_probs.double(), expected.log_sum_sq_probs, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(extras.mean_logits.double(), expected.mean_logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(extras.is_top1, expected.is_top1)


@pytest.mark.parametrize("chunk", [90, 30])
def test_a_tie_counts_for_the_earlier_id(chunk, kernels):
    """As argmax: the first of several equal logits is the top one, within a tile and from tile to tile."""
    logits = torch.full((4, 90), -1.0, device=DEVICE)
    logits[:2, 20] = logits[:2, 25] = logits[2:, 10] = logits[2:, 70] = 2.0
    targets = torch.tensor([20, 25, 10, 70], device=DEVICE)
    found = linear_logprobs(torch.eye(4, device=DEVICE), logits.T, targets, extras=("is_top1",), chunk_vocab=chunk)
    assert found.is_top1.tolist() == [True, False, True, False]


@pytest.mark.skipif(DEVICE.type == "cpu", reason="takes 13 GB of GPU memory")
def test_more_than_two_to_the_31_logits():
    """Offsets are 64 bit: the last rows of 4.4e9 bytes of logits are read and written where they lie."""
    rows, vocab = 15000, 151936
    assert rows * vocab > 2**31
    logits = torch.randn(1000, vocab, device=DEVICE, dtype=torch.bfloat16).repeat(15, 1).requires_grad_()
    targets = torch.randint(vocab, (1000,), device=DEVICE).repeat(15)
    logps = logits_logprobs(logits, targets).logps
    assert torch.equal(logps[-1000:], logps[:1000])
    expected = oracles.logits_logprobs(logits.detach()[-3:].double(), targets[-3:])[0]
    torch.testing.assert_close(logps[-3:].double(), expected, rtol=1e-5, atol=1e-5)
    logps.sum().backward()
    assert torch.equal(logits.grad[-1000:], logits.grad[:1000])
    assert logits.grad[-1].any()


# --- the fold in a product's epilogue; values are the fuzzer's --------------------------------------------------------


@pytest.fixture
def fused_multiply_add(monkeypatch):
    """A GPU's: rounded once. Triton's interpreter also rounds the product."""
    if DEVICE.type == "cpu":
        from triton.runtime import interpreter

        def create_fma(_builder, x, y, z):
            exact = x.data.astype(np.float64) * y.data + z.data
            return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", create_fma)


@pytest.mark.usefixtures("fused_multiply_add")
@pytest.mark.parametrize("softcap", [None, 100.0])
def test_sure_tokens_in_the_epilogue_are_sure_to_the_last_digit(softcap, product):
    """However large the logit of the id that leads: what rounding it leaves is not taken for probability."""
    tokens, vocab = 256, 600
    leads = torch.linspace(8.0, 150.0, tokens)
    hidden = torch.zeros(tokens, 64)
    hidden[:, 0], hidden[:, 1:] = leads, 0.1 * torch.randn(tokens, 63)
    weight = 0.1 * torch.randn(vocab, 64)
    weight[:, 0] = -0.5
    weight[300, 0] = 1.0
    targets = torch.full((tokens,), 300)
    inputs = hidden.to(DEVICE, torch.float16), weight.to(DEVICE, torch.float16), None, targets.to(DEVICE)
    found = epilogue.gemm_fold(*inputs, LogitTransform(softcap=softcap), entropy=True, extras=EXTRAS)
    logps, _ = oracles.logprobs(inputs[0].double(), inputs[1].double(), inputs[3], softcap=softcap)
    sure = logps > -1e-9
    assert 20 < sure.sum() < tokens
    # Of the others lse is known to a few of its last digits.
    assert ((found.logps.double() - logps).abs() <= 3 * 2**-23 * 2 ** inputs[0][:, 0].double().log2().ceil()).all()
    assert found.logps[sure].abs().max() < 1.5e-7
    assert (found.logps <= 0).all()
    assert found.entropy[sure].abs().max() < 3e-7
    assert found.log_sum_sq_probs[sure].abs().max() < 3e-7


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("softcap", "temperature"),
    [(1024.0, 1.0), (1030.0, 1.0), (30.0, 1e-3), (30.0, 1e-8), (30.0, 1e-9), (1e10, 1.0), (3e38, 1.0)],
)
def test_caps_that_are_far_in_the_epilogue(softcap, temperature, whole, product):
    """Statistics are finite however far a cap is, and those of the ids as far as a tanh in float32 says."""
    tokens, vocab = 128, 512 if whole else 300
    hidden, weight = torch.randn(tokens, 64).to(DEVICE, torch.float16), torch.randn(vocab, 64).to(DEVICE, torch.float16)
    targets = torch.randint(vocab, (tokens,)).to(DEVICE)
    transform = LogitTransform(softcap=softcap, temperature=temperature)
    found = epilogue.gemm_fold(hidden, weight, None, targets, transform, entropy=True, extras=EXTRAS)
    for values in found:
        assert values is None or not values.isnan().any()
    assert (found.logps <= 0).all()
    if softcap / temperature < 1e5:
        logps, _ = oracles.logprobs(hidden.double(), weight.double(), targets, softcap=softcap, temperature=temperature)
        assert (found.logps - logps).abs().max() < 2 * 2.4e-7 * softcap / temperature + 1e-5


@pytest.mark.parametrize("level", [2.6e8, -5e8, 6e8, 1e30, 3e38, -3e38, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("banned", [False, True])
def test_large_logits_in_the_epilogue(level, banned, product):
    """Ids that all have one logit are as likely as each other, and ones that are far below have no share."""
    hidden, weight = (torch.zeros(rows, 64, dtype=torch.float16, device=DEVICE) for rows in (50, 600))
    bias = torch.full((600,), level, device=DEVICE)
    lower = torch.tensor(-math.inf, device=DEVICE)
    bias[:300] = lower if banned else bias[:300].nextafter(lower)
    targets = torch.randint(300, 600, (50,), device=DEVICE)
    found = epilogue.gemm_fold(hidden, weight, bias, targets, LogitTransform(), entropy=True, extras=EXTRAS)
    expected = oracles.values(bias.double().expand(50, -1), targets)
    for name, bound in (("logps", 2e-6), ("entropy", 1e-5), ("log_sum_sq_probs", 2e-6)):
        torch.testing.assert_close(getattr(found, name).double(), getattr(expected, name), rtol=0.0, atol=bound)


def test_product_with_fold_under_another_default_dtype(product):
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter misreads bfloat16 descriptors
    hidden, weight = torch.randn(16, 64).to(DEVICE, dtype), torch.randn(300, 64).to(DEVICE, dtype)
    inputs = hidden, weight, None, torch.randint(300, (16,)).to(DEVICE), LogitTransform()
    expected = epilogue.gemm_fold(*inputs, entropy=True)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = epilogue.gemm_fold(*inputs, entropy=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(mine, other) for mine, other in zip(found[:3], expected[:3], strict=True))


def test_a_tie_in_the_epilogue_counts_for_the_earlier_id(product):
    """Equal rows of the weight give equal logits, within a tile and from tile to tile."""
    hidden = torch.randn(128, 64).to(DEVICE, torch.float16)
    weight = (torch.randn(600, 64) / 8).to(DEVICE, torch.float16)
    weight[[40, 50, 550]] = 2.0 * hidden[:1]
    hidden[:] = hidden[:1]
    targets = torch.tensor([40, 50, 550, 7], device=DEVICE).repeat(32)
    found = epilogue.gemm_fold(hidden, weight, None, targets, LogitTransform(), entropy=False, extras=("is_top1",))
    assert found.is_top1.tolist() == [True, False, False, False] * 32


# --- which tokens count; other integers and masks than the fuzzer's ---------------------------------------------------


@pytest.fixture(params=[reference, select_tokens_triton], ids=["eager", "triton"])
def select(request, monkeypatch):
    monkeypatch.setattr(LIMITS, "select_tokens", 64)

    def select_tokens(*args):
        positions, numbers = request.param.select_tokens(*args)
        return positions, list(map(int, numbers))

    return select_tokens


def test_tokens_of_several_blocks_and_a_nan_among_them_that_are_wanted(select):
    """A weight of NaN is not 0."""
    targets, mask = torch.randint(-20, 50 + 10, (300,), device=DEVICE), torch.rand(300, device=DEVICE) < 0.6
    wanted = torch.randn(300, device=DEVICE) * (torch.rand(300, device=DEVICE) < 0.5)
    wanted[100], targets[100], mask[100] = math.nan, 5, True
    counted, outside = mask & (targets >= 0), mask & (targets >= 50)
    found, numbers = select(targets, mask, 50, wanted)
    expected = (counted & (wanted != 0)).nonzero().flatten()
    assert torch.equal(found[: len(expected)], expected)
    assert numbers == [len(expected), int(outside.sum()), int(targets[outside].max()), 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_other_integers_and_strides(select, dtype):
    """Among them those that do not hold the size of the vocabulary."""
    targets = torch.arange(40, device=DEVICE).to(dtype)[::2]
    mask = torch.arange(60, device=DEVICE)[::3] % 2
    for vocab, outside, largest in ((20, 5, 38), (2**17, 0, 0)):
        found, numbers = select(targets, mask, vocab)
        assert numbers == [10, outside, largest, 0]
        assert found[:10].tolist() == list(range(1, 20, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_values_of_a_mask_other_than_0_and_1_are_counted(select, dtype):
    wrong = [2, 255 if dtype == torch.uint8 else -1]
    if dtype.is_floating_point:
        wrong = [0.5, -1.0, 2.0, math.nan, math.inf]
    mask = torch.ones(150, device=DEVICE, dtype=dtype)
    mask[::3] = 0
    mask[20 : 20 + 20 * len(wrong) : 20] = torch.tensor(wrong, device=DEVICE, dtype=dtype)
    targets = torch.full((150,), -1, device=DEVICE)
    assert select(targets, mask, 50)[1] == [0, 0, 0, len(wrong)]
