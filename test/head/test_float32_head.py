"""A float32 head in 16-bit products, which read a copy of the weight: results, and kernels that run."""

import pytest
import torch

from devices import skip_where_misread, skip_without_interpreter
from head_calls import call, functional, problem, run_triton, solve
from liger_rl.head.record import Head
from oracles import norm_error

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ON_GPU = torch.cuda.is_available()
LOW = BF16 if ON_GPU else F16  # the interpreter misreads bfloat16 descriptors
HIDDEN_SIZE = 72


def mixed(shape=(3, 47), hidden_size=HIDDEN_SIZE, vocab=301, low=BF16, **more):
    """A float32 head beside 16-bit hidden states. Logits have a standard deviation of 2."""
    whole = problem(shape, hidden_size, vocab, **more)
    return whole._replace(hidden=whole.hidden.to(low))


@pytest.fixture
def folds(monkeypatch, device):
    """Dtypes of each product with a fold in its epilogue: (hidden, weight)."""
    skip_without_interpreter(device)
    skip_where_misread(HIDDEN_SIZE)
    run_triton(monkeypatch, epilogue=True)
    from liger_rl.kernels import epilogue

    found, gemm_fold = [], epilogue.gemm_fold

    def recorded(hidden, weight, *args, **kwargs):
        found.append((hidden.dtype, weight.dtype))
        return gemm_fold(hidden, weight, *args, **kwargs)

    monkeypatch.setattr(epilogue, "gemm_fold", recorded)
    return found


@pytest.mark.parametrize("options", [{}, {"lse": True}], ids=str)
def test_the_same_bits_as_the_rounded_weight(options, folds, device):
    inputs = mixed(device=device, bias=True, low=LOW)
    found = solve(inputs, **options, compute_dtype=LOW)
    expected = solve(inputs._replace(weight=inputs.weight.to(LOW)), **options)
    assert folds == [(LOW, LOW)] * 2
    assert torch.equal(found.entropy, expected.entropy)
    assert_rounded_once(found, expected)


def assert_rounded_once(found, expected) -> None:
    """Those of the rounded weight, but for gradients of the weight that are not rounded."""
    assert torch.equal(found.logps, expected.logps)
    assert torch.equal(found.grads["hidden"], expected.grads["hidden"])
    mine, other = found.grads["weight"], expected.grads["weight"]
    assert (mine.dtype, other.dtype) == (F32, LOW)
    assert norm_error(mine, other) < torch.finfo(LOW).eps * mine.norm()
    assert not torch.equal(mine, mine.to(LOW).float())


def test_one_copy_in_each_direction_and_none_beside_tiles(folds, device, monkeypatch):
    copied, with_weight_in = [], Head.with_weight_in
    monkeypatch.setattr(Head, "with_weight_in", lambda *args: copied.append(args) or with_weight_in(*args))
    for options, copies in (({}, 2), ({"chunk_vocab": 300}, 2)):
        inputs = mixed((26,), device=device, low=LOW).leaves()
        functional(call(inputs, compute_dtype=LOW, **options).logps).backward()
        assert len(copied) == copies
    assert len(folds) == 1
