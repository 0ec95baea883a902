"""A head with low-rank terms against the full logits of the merged weight in float64."""

import math
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import oracles
from devices import skip_where_misread
from liger_rl import FusedLinearGRPOLoss, LogitTransform, LowRank, linear_logprobs
from liger_rl.head.engines import two_pass as projection

CPU = torch.device("cpu")
HALF_AND_FULL = [torch.float32, torch.bfloat16, torch.float16]
SCALING = 1.5


class Problem(NamedTuple):
    hidden: Tensor
    weight: Tensor
    a: Tensor
    b: Tensor
    bias: Tensor
    targets: Tensor

    def leaves(self) -> "Problem":
        return Problem(*(t.detach().requires_grad_() for t in self[:5]), self.targets)


def problem(
    shape=(3, 5), hidden_size=16, vocab=129, rank=3, dtype=torch.float32, adapter_dtype=None, device=CPU
) -> Problem:
    generator = torch.Generator().manual_seed(0)

    def random(*size: int, std: float) -> Tensor:
        return (torch.randn(*size, generator=generator) * std).to(device, dtype)

    hidden = random(*shape, hidden_size, std=1.0)
    weight = random(vocab, hidden_size, std=2 / math.sqrt(hidden_size))
    a, b = random(rank, hidden_size, std=1 / math.sqrt(hidden_size)), random(vocab, rank, std=1 / math.sqrt(rank))
    bias = random(vocab, std=1.0)
    adapter = [t.to(adapter_dtype or dtype) for t in (a, b)]
    return Problem(hidden, weight, *adapter, bias, torch.randint(vocab, shape, generator=generator).to(device))


def functional(outputs: tuple[Tensor, Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return sum((values * torch.randn(values.shape, generator=generator).to(values)).sum() for values in outputs[:2])


class Result(NamedTuple):
    logps: Tensor
    entropy: Tensor
    grads: tuple[Tensor, ...]  # hidden, weight, a, b, bias


def result(outputs: tuple[Tensor, Tensor], leaves: Problem) -> Result:
    grads = torch.autograd.grad(functional(outputs), leaves[:5])
    return Result(outputs[0].detach(), outputs[1].detach(), grads)


def ours(inputs: Problem, **options) -> Result:
    leaves = inputs.leaves()
    low_rank = [LowRank(a=leaves.a, b=leaves.b, scaling=SCALING)]
    outputs = linear_logprobs(
        leaves.hidden, leaves.weight, leaves.targets, bias=leaves.bias, low_rank=low_rank, entropy=True, **options
    )
    return result(outputs, leaves)


def eager(inputs: Problem, **transform) -> Result:
    """An adapter's own forward: two products added, and rounded to the head's dtype."""
    leaves = inputs.leaves()
    linear = torch.nn.functional.linear
    logits = linear(leaves.hidden, leaves.weight, leaves.bias)
    term = linear(linear(leaves.hidden.to(leaves.a.dtype), leaves.a), leaves.b) * SCALING
    logits = (logits + term).to(logits.dtype)
    return result(oracles.logits_logprobs(logits.float(), leaves.targets, **transform), leaves)


def truth(inputs: Problem, **transform) -> Result:
    """The merged weight's full logits in float64."""
    leaves = Problem(*(t.double() for t in inputs[:5]), inputs.targets).leaves()
    merged = leaves.weight + SCALING * leaves.b @ leaves.a
    return result(oracles.logprobs(leaves.hidden, merged, leaves.targets, leaves.bias, **transform), leaves)


def assert_close(found: Result, expected: Result, tolerance: float = 1e-5) -> None:
    for mine, other in zip(tree_leaves(tuple(found)), tree_leaves(tuple(expected)), strict=True):
        torch.testing.assert_close(mine.double(), other.double(), rtol=tolerance, atol=tolerance)


class Products(TorchDispatchMode):
    """FLOPs of the matrix products, and the shapes of all tensors made."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.removeprefix("aten::").rstrip("_") in ("mm", "addmm"):
            a, b = args[-2:]
            self.flops += 2 * a.numel() * b.shape[-1]
        made = func(*args, **(kwargs or {}))
        self.shapes |= {tuple(t.shape) for t in tree_leaves(made) if isinstance(t, Tensor)}
        return made


# --- values and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF_AND_FULL)
@pytest.mark.parametrize("adapter_dtype", [None, torch.float32], ids=["one dtype", "float32 adapter"])
@pytest.mark.parametrize(
    "transform", [{}, {"temperature": 1.6, "softcap": 2.0, "scale": 1.7}], ids=["plain", "transformed"]
)
def test_within_twice_the_error_of_an_adapters_own_forward(dtype, adapter_dtype, transform, device):
    inputs = problem((4, 24), 64, 517, 6, dtype, adapter_dtype, device)
    found, expected = ours(inputs, transform=LogitTransform(**transform)), truth(inputs, **transform)
    other = eager(inputs, **transform)
    for name in ("logps", "entropy"):
        values, exact = getattr(found, name), getattr(expected, name)
        assert values.dtype == torch.float32
        assert oracles.max_error(values, exact) <= oracles.error_budget(getattr(other, name), exact, torch.float32)
    for name, mine, theirs, exact, given in zip(
        Problem._fields, found.grads, other.grads, expected.grads, inputs, strict=False
    ):
        assert mine.dtype == given.dtype
        assert oracles.norm_error(mine, exact) <= oracles.norm_budget(theirs, exact, dtype), name


def test_float32_is_exact_to_rounding(device):
    inputs = problem(device=device)
    found, expected = ours(inputs), truth(inputs)
    assert_close(found, expected, 1e-5)
    without = linear_logprobs(inputs.hidden, inputs.weight, inputs.targets, bias=inputs.bias).logps
    assert (found.logps - without).abs().max() > 0.1


@pytest.mark.parametrize("rank", [1, 7, 8, 20])
@pytest.mark.parametrize(("chunk_tokens", "chunk_vocab"), [(None, None), (4, 50), (15, 1), (7, 129)])
def test_ranks_and_chunk_sizes_change_nothing(rank, chunk_tokens, chunk_vocab, device):
    inputs = problem(rank=rank, device=device)
    # A sum over tiles of one word is as many float32 additions as there are words.
    tolerance = 1e-5 if chunk_vocab != 1 else 3e-5
    assert_close(ours(inputs, chunk_tokens=chunk_tokens, chunk_vocab=chunk_vocab), truth(inputs), tolerance)


def test_several_terms_add_up(device):
    """Two adapters of different ranks and scales, one of them on an input of its own."""
    inputs, second = problem(rank=3, device=device).leaves(), problem(rank=5, device=device).leaves()
    dropped = torch.randn_like(inputs.hidden).requires_grad_()
    low_rank = [
        LowRank(a=inputs.a, b=inputs.b, scaling=0.5),
        LowRank(a=second.a, b=second.b, scaling=-2, hidden=dropped),
    ]
    found = linear_logprobs(inputs.hidden, inputs.weight, inputs.targets, low_rank=low_rank).logps
    leaves = (inputs.hidden, inputs.weight, inputs.a, inputs.b, second.a, second.b, dropped)
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    hidden, weight, a, b, second_a, second_b, dropped = doubles
    logits = hidden @ weight.T + 0.5 * hidden @ a.T @ b.T - 2 * dropped @ second_a.T @ second_b.T
    expected, _ = oracles.logits_logprobs(logits, inputs.targets)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    coefficients = torch.randn(found.shape, device=device)
    mine = torch.autograd.grad(found, leaves, coefficients)
    theirs = torch.autograd.grad(expected, doubles, coefficients.double())
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 15])
def test_any_number_of_rows_at_once(rows, masked, monkeypatch):
    inputs = problem(dtype=torch.bfloat16, adapter_dtype=torch.float32)
    mask = torch.arange(15).reshape(3, 5) % 4 > 0 if masked else None
    expected = ours(inputs, mask=mask)
    monkeypatch.setattr("liger_rl.head.low_rank.ROWS_AT_ONCE", rows)
    found = ours(inputs, mask=mask)
    for mine, other in zip(tree_leaves(tuple(found)), tree_leaves(tuple(expected)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def test_no_copy_of_the_hidden_states_is_kept():
    """What autograd keeps between forward and backward: its inputs, and (n,) and (N, r) vectors."""
    inputs = problem((64,), 32, 50, 2, torch.bfloat16, torch.float32).leaves()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        terms = [LowRank(a=inputs.a, b=inputs.b)]
        linear_logprobs(inputs.hidden, inputs.weight, inputs.targets, mask=torch.arange(64) % 3 > 0, low_rank=terms)
    given = {t.data_ptr() for t in inputs}
    assert max(t.numel() for t in kept if t.data_ptr() not in given) <= 64 * 2


def test_a_term_of_zeros_changes_no_log_probability():
    """As an adapter starts: b = 0. Its gradient is not zero."""
    inputs = problem()
    found = ours(inputs._replace(b=torch.zeros_like(inputs.b)))
    plain = linear_logprobs(inputs.hidden, inputs.weight, inputs.targets, bias=inputs.bias, entropy=True)
    torch.testing.assert_close(found.logps, plain.logps, rtol=1e-6, atol=1e-6)
    assert (found.grads[2] == 0).all()
    assert found.grads[3].norm() > 0.1


def test_autocast(device):
    inputs = problem((4, 24), 64, 517, 6, device=device)
    expected = truth(inputs)
    with torch.autocast(device.type, torch.bfloat16):
        found, other = ours(inputs), eager(inputs)
    for name in ("logps", "entropy"):
        exact = getattr(expected, name)
        assert oracles.max_error(getattr(found, name), exact) <= oracles.error_budget(
            getattr(other, name), exact, torch.float32
        )
    for mine, theirs, exact in zip(found.grads, other.grads, expected.grads, strict=True):
        assert mine.dtype == torch.float32
        assert oracles.max_error(mine, exact) <= oracles.error_budget(theirs, exact, torch.bfloat16)


@pytest.mark.parametrize("adapter_dtype", [torch.bfloat16, torch.float32])
def test_a_term_of_a_bfloat16_head_is_not_rounded(adapter_dtype, device):
    """As exact as the head's own float32 accumulators, where the adapter's own forward rounds to bfloat16."""
    inputs = problem((4, 24), 64, 517, 6, torch.bfloat16, adapter_dtype, device)
    found, expected, other = ours(inputs), truth(inputs), eager(inputs)
    assert oracles.max_error(found.logps, expected.logps) < 5e-5
    assert oracles.max_error(other.logps, expected.logps) > 1e-2


def test_a_float32_bias_beside_a_bfloat16_head(device):
    """The bias is added in float32, so it need not be rounded to the head's dtype."""
    inputs = problem(dtype=torch.bfloat16, device=device)
    bias = (torch.randn(129, device=device) * 3).requires_grad_()
    found = linear_logprobs(inputs.hidden, inputs.weight, inputs.targets, bias=bias).logps
    expected, _ = oracles.logprobs(inputs.hidden, inputs.weight, inputs.targets, bias)
    assert oracles.max_error(found, expected) < 2e-5
    found.sum().backward()
    assert bias.grad.dtype == torch.float32


def test_two_runs_are_bitwise_equal(device):
    inputs = problem((4, 30), 32, 500, dtype=torch.bfloat16, device=device)
    first, second = (ours(inputs, chunk_tokens=32, chunk_vocab=96) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(tuple(first)), tree_leaves(tuple(second)), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_on_triton_with_the_gradient_in_the_epilogue(dtype, monkeypatch):
    """The joined tiles are what TMA can address, whatever the rank; on CPU in Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from liger_rl.kernels import devices as limits
    from liger_rl.kernels import epilogue
    from liger_rl.kernels import tile_triton as triton

    seen = []

    def gemm_grad(hidden, weight, *rest):
        assert limits.aligned(hidden)
        assert limits.aligned(weight)
        seen.append(weight.shape)
        return epilogue.gemm_grad(hidden, weight, *rest)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(projection, "for_device", lambda device: triton)
    if dtype == torch.float16:
        skip_where_misread(40)
        monkeypatch.setattr(projection, "epilogue_for", lambda *_: SimpleNamespace(gemm_grad=gemm_grad))
    inputs = problem((40,), 24, 300, 5, dtype, device=device)
    found, expected, other = ours(inputs), truth(inputs), eager(inputs)
    assert seen == ([(300, 40)] if dtype == torch.float16 else [])
    assert oracles.max_error(found.logps, expected.logps) < 1e-5
    for mine, theirs, exact in zip(found.grads, other.grads, expected.grads, strict=True):
        assert oracles.norm_error(mine, exact) <= oracles.norm_budget(theirs, exact, dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("adapter_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "vocab", "rank"), [(1000, 3001, 5), (9000, 2000, 16)])
def test_enough_tokens_for_our_own_products(tokens, vocab, rank, adapter_dtype):
    """The gradient in a product's epilogue; the second shape is more than one chunk of tokens."""
    inputs = problem((tokens,), 128, vocab, rank, torch.bfloat16, adapter_dtype, torch.device("cuda"))
    mask = torch.arange(tokens, device="cuda") % 5 > 0

    def logps_alone(low_rank_of, **options):
        leaves = inputs.leaves()
        outputs = linear_logprobs(
            leaves.hidden, leaves.weight, leaves.targets, bias=leaves.bias, mask=mask, low_rank=low_rank_of(leaves),
            **options,
        )  # fmt: skip
        return outputs.logps.detach(), torch.autograd.grad(outputs.logps.sum(), leaves[:5])

    def terms(leaves):
        return [LowRank(a=leaves.a, b=leaves.b, scaling=SCALING)]

    found, grads = logps_alone(terms)
    again, same = logps_alone(terms)
    doubles = Problem(*(t.double() for t in inputs[:5]), inputs.targets).leaves()
    merged = doubles.weight + SCALING * doubles.b @ doubles.a
    exact, _ = oracles.logprobs(doubles.hidden, merged, doubles.targets, doubles.bias)
    exact = torch.where(mask, exact, 0.0)
    assert oracles.max_error(found, exact) < 1e-4
    assert torch.equal(found, again)
    for mine, other, expected in zip(grads, same, torch.autograd.grad(exact.sum(), doubles[:5]), strict=True):
        assert torch.equal(mine, other)
        assert (mine.double() - expected).norm() <= 5e-3 * expected.norm()


# --- masks, and what costs nothing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_nothing_under_the_mask_matters(garbage, device):
    """The gradient of `a` included, whose product sees the hidden states before the head does."""
    inputs = problem((4, 9), device=device)
    keep = torch.rand(inputs.targets.shape, device=device) < 0.5
    clean = ours(inputs, mask=keep)
    poisoned = ours(inputs._replace(hidden=inputs.hidden.masked_fill(~keep[..., None], garbage)), mask=keep)
    for mine, other in zip(tree_leaves(tuple(poisoned)), tree_leaves(tuple(clean)), strict=True):
        assert torch.equal(mine, other)
    assert (clean.grads[0][~keep] == 0).all()


def test_no_live_token():
    found = ours(problem(), mask=torch.zeros(3, 5))
    assert not any(t.any() for t in tree_leaves(tuple(found)))


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
    inputs = problem((TOKENS,), SIZE, VOCAB, RANK)
    everything = dict(zip(Problem._fields, ours(inputs).grads, strict=False))
    leaves = inputs.leaves()
    for name in frozen:
        getattr(leaves, name).requires_grad_(False)
    low_rank = [LowRank(a=leaves.a, b=leaves.b, scaling=SCALING)]
    with Products() as forward:
        outputs = linear_logprobs(
            leaves.hidden, leaves.weight, leaves.targets, bias=leaves.bias, low_rank=low_rank, entropy=True
        )
    assert forward.flops == RECOMPUTED + INSIDE
    with Products() as backward:
        functional(outputs).backward()
    assert backward.flops == flops
    for name, expected in everything.items():
        grad = getattr(leaves, name).grad
        if name in frozen:
            assert grad is None
        else:
            torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-6)


def test_nothing_has_the_shape_of_the_merged_weight_or_of_the_logits():
    tokens, size, vocab, rank = 64, 8, 1000, 4
    inputs = problem((tokens,), size, vocab, rank).leaves()
    inputs.weight.requires_grad_(False)
    low_rank = [LowRank(a=inputs.a, b=inputs.b)]
    with Products() as products:
        found = linear_logprobs(
            inputs.hidden, inputs.weight, inputs.targets, low_rank=low_rank, chunk_tokens=16, chunk_vocab=50
        )
        found.logps.sum().backward()
    large = {shape for shape in products.shapes if math.prod(shape) > max(16 * 50, 50 * 16, tokens * 16, vocab)}
    assert large == {(vocab, rank)}, "the gradient of b, and nothing else"


def test_the_policy_loss_of_an_adapted_head():
    inputs = problem()
    columns = {
        "advantages": torch.randn(3),
        "old_per_token_logps": torch.full((3, 5), -4.0),
        "ref_per_token_logps": torch.full((3, 5), -4.5),
    }
    module = FusedLinearGRPOLoss("grpo", beta=0.1, entropy_coef=0.01)
    leaves, merged = inputs.leaves(), inputs.leaves()
    low_rank = [LowRank(a=leaves.a, b=leaves.b, scaling=SCALING)]
    found = module(leaves.hidden, leaves.weight, leaves.targets, low_rank=low_rank, **columns).loss
    weight = merged.weight + SCALING * merged.b @ merged.a
    expected = module(merged.hidden, weight, merged.targets, **columns).loss
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(
        torch.autograd.grad(found, leaves[:4]), torch.autograd.grad(expected, merged[:4]), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    reference = module.reference_logps(leaves.hidden, leaves.weight, leaves.targets, low_rank=low_rank)
    torch.testing.assert_close(reference, module.reference_logps(merged.hidden, weight, merged.targets))


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
    expected = logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.1)
    leaves = [hidden, weight, *(factor for term in low_rank for factor in (term.a, term.b))]
    for mine, other in zip(
        torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True
    ):
        assert mine.dtype == other.dtype
        assert (mine - other).norm() <= 0.02 * other.norm()


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
