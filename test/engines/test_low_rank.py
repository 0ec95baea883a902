"""A head with low-rank terms: its corners. Values are the fuzzer's, properties test_properties.py's."""

import math

import pytest
import torch

import oracles
from devices import NEEDS_GPU, skip_where_misread
from head_calls import Products, assert_same, call, eager, functional, problem, run_triton, solve, truth
from liger_rl import FusedLinearGRPOLoss, LowRank, linear_logprobs


def adapted(shape=(3, 5), hidden_size=16, vocab=129, rank=3, dtype=torch.float32, adapter_dtype=None, device="cpu"):
    return problem(shape, hidden_size, vocab, dtype, device, bias=True, rank=rank, adapter_dtype=adapter_dtype)


def test_no_copy_of_the_hidden_states_is_kept():
    """What autograd keeps between forward and backward: its inputs, and (n,) and (N, r) vectors."""
    inputs = adapted((64,), 32, 50, 2, torch.bfloat16, torch.float32).leaves()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        call(inputs, mask=torch.arange(64) % 3 > 0)
    given = {t.data_ptr() for t in (*inputs.floats().values(), inputs.targets)}
    assert max(t.numel() for t in kept if t.data_ptr() not in given) <= 64 * 2


@pytest.mark.parametrize("dtypes", [(torch.float16,), (torch.float16, torch.bfloat16), (torch.float32, torch.float16)])
def test_factors_of_another_16_bit_dtype_under_autocast(dtypes, device):
    generator = torch.Generator().manual_seed(0)

    def made(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device, dtype).requires_grad_()

    hidden, weight = made(12, 16), made(129, 16)
    low_rank = [LowRank(a=made(3, 16, dtype=dtype), b=made(129, 3, dtype=dtype)) for dtype in dtypes]
    targets = torch.arange(12, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = linear_logprobs(hidden, weight, targets, low_rank=low_rank).logps
    logits = hidden.double() @ weight.double().T
    for term in low_rank:
        logits = logits + (hidden.double() @ term.a.double().T) @ term.b.double().T
    expected, _ = oracles.logits_logprobs(logits, targets)
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.1)
    leaves = [hidden, weight, *(factor for term in low_rank for factor in (term.a, term.b))]
    grads = (torch.autograd.grad(values.sum(), leaves) for values in (found, expected))
    for mine, other in zip(*grads, strict=True):
        assert mine.dtype == other.dtype
        assert (mine - other).norm() <= 0.02 * other.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_on_triton_with_the_gradient_in_the_epilogue(dtype, monkeypatch):
    """The joined tiles are what TMA can address, whatever the rank; on CPU in Triton's interpreter."""
    run_triton(monkeypatch, epilogue=True)
    from liger_rl.kernels import devices, epilogue

    seen, gemm_grad = [], epilogue.gemm_grad

    def recorded(hidden, weight, *rest, **options):
        assert devices.aligned(hidden)
        assert devices.aligned(weight)
        seen.append(weight.shape)
        return gemm_grad(hidden, weight, *rest, **options)

    if dtype == torch.float16:
        skip_where_misread(40)
    monkeypatch.setattr(epilogue, "gemm_grad", recorded)
    inputs = adapted((40,), 24, 300, 5, dtype, device="cuda" if torch.cuda.is_available() else "cpu")
    found, expected, other = solve(inputs), truth(inputs), eager(inputs)
    assert seen == ([(300, 40)] if dtype == torch.float16 else [])
    assert oracles.max_error(found.logps, expected.logps) < 1e-5
    for name, mine in found.grads.items():
        exact = expected.grads[name]
        assert oracles.norm_error(mine, exact) <= oracles.norm_budget(other.grads[name], exact, dtype)


@NEEDS_GPU
@pytest.mark.parametrize("adapter_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "vocab", "rank"), [(1000, 3001, 5), (9000, 2000, 16)])
def test_enough_tokens_for_our_own_products(tokens, vocab, rank, adapter_dtype):
    """The gradient in a product's epilogue; the second shape is more than one chunk of tokens."""
    inputs = adapted((tokens,), 128, vocab, rank, torch.bfloat16, adapter_dtype, "cuda")
    mask = torch.arange(tokens, device="cuda") % 5 > 0
    found, again = (solve(inputs, entropy=False, mask=mask) for _ in range(2))
    assert_same(found, again)
    exact = truth(inputs, mask, entropy=False)
    assert oracles.max_error(found.logps, exact.logps) < 1e-4
    for name, expected in exact.grads.items():
        assert (found.grads[name].double() - expected).norm() <= 5e-3 * expected.norm()


# --- what costs nothing -----------------------------------------------------------------------------------------------

TOKENS, SIZE, VOCAB, RANK, JOINED = 12, 13, 50, 2, 16  # H + r padded to a multiple of 8
RECOMPUTED = 2 * TOKENS * JOINED * VOCAB
OF_HIDDEN = OF_WEIGHT = 2 * TOKENS * SIZE * VOCAB
OF_RANK = 2 * TOKENS * RANK * VOCAB  # each of the two factors of the term
INSIDE = 2 * TOKENS * SIZE * RANK  # hidden @ a.T, and each of its two gradients


@pytest.mark.parametrize(
    ("frozen", "flops"),
    [
        ((), RECOMPUTED + OF_HIDDEN + OF_WEIGHT + 2 * OF_RANK + 2 * INSIDE),
        (("weight",), RECOMPUTED + OF_HIDDEN + 2 * OF_RANK + 2 * INSIDE),
        (("hidden", "weight"), RECOMPUTED + 2 * OF_RANK + INSIDE),
        (("hidden", "weight", "a"), RECOMPUTED + OF_RANK),
        (("weight", "a", "b"), RECOMPUTED + OF_HIDDEN + OF_RANK + INSIDE),
    ],
)
def test_frozen_factors_get_none_and_cost_no_product(frozen, flops):
    inputs = adapted((TOKENS,), SIZE, VOCAB, RANK)
    leaves = inputs.leaves(frozen)
    with Products() as forward:
        outputs = call(leaves, entropy=True)
    assert forward.flops == RECOMPUTED + INSIDE
    with Products() as backward:
        functional(*outputs[:2]).backward()
    assert backward.flops == flops
    for name, expected in solve(inputs).grads.items():
        grad = leaves.grads()[name]
        assert (grad is None) == (name in frozen)
        if grad is not None:
            torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-6)


# --- bad input --------------------------------------------------------------------------------------------------------


def term(**changed) -> LowRank:
    return LowRank(**{"a": torch.zeros(3, 16), "b": torch.zeros(129, 3), **changed})


@pytest.mark.parametrize(
    ("low_rank", "error", "message"),
    [
        (term(), TypeError, "low_rank must be a list or tuple of LowRank, got LowRank"),
        ([(torch.zeros(3, 16), torch.zeros(129, 3))], TypeError, r"low_rank\[0\] must be a LowRank, got tuple"),
        ([term(), term(a=torch.zeros(3, 15))], ValueError, r"low_rank\[1\].a must be \(r, H\) with H = 16"),
        ([term(a=torch.zeros(16))], ValueError, r"low_rank\[0\].a must be \(r, H\)"),
        ([term(a=torch.zeros(0, 16), b=torch.zeros(129, 0))], ValueError, r"low_rank\[0\].a must be \(r, H\)"),
        ([term(b=torch.zeros(129, 4))], ValueError, r"low_rank\[0\].b must be \(V, r\) = \(129, 3\)"),
        ([term(b=torch.zeros(128, 3))], ValueError, r"low_rank\[0\].b must be \(V, r\) = \(129, 3\)"),
        ([term(b=torch.zeros(129, 3, dtype=torch.float64))], TypeError, r"low_rank\[0\].b must be float32"),
        ([term(a=[[0.0]])], TypeError, r"low_rank\[0\].a must be a tensor"),
        ([term(b=torch.zeros(129, 3, device="meta"))], ValueError, r"low_rank\[0\].b must be on cpu"),
        ([term(hidden=torch.zeros(3, 4, 16))], ValueError, r"low_rank\[0\].hidden must be \(3, 5, 16\)"),
        ([term(scaling="1")], TypeError, r"low_rank\[0\].scaling must be a number"),
        ([term(scaling=math.nan)], ValueError, r"low_rank\[0\].scaling must be finite"),
        ([term(scaling=10**400)], ValueError, r"low_rank\[0\].scaling must be finite"),
        ([LowRank], TypeError, r"low_rank\[0\] must be a LowRank"),
        ([term(a=torch.zeros(3, 16).to_sparse())], TypeError, r"low_rank\[0\].a must be a dense tensor"),
    ],
)
def test_bad_terms_are_named_before_any_product(low_rank, error, message):
    inputs = problem()
    with Products() as products, pytest.raises(error, match=message):
        linear_logprobs(inputs.hidden, inputs.weight, inputs.targets, low_rank=low_rank)
    with pytest.raises(error, match=message):
        FusedLinearGRPOLoss()(inputs.hidden, inputs.weight, inputs.targets, torch.zeros(3), low_rank=low_rank)
    assert products.flops == 0
