"""Properties of a backward with a tolerance. The certificate: test_sparse.py."""

import math

import pytest
import torch

from devices import NEEDS_GPU
from liger_rl.kernels.limits import LIMITS
from oracles import relative_error
from tolerances import (
    DEVICE,
    LOW,
    TOKENS,
    interpret,
    one_head,
    recorded_plans,
)

EPS = torch.finfo(LOW).eps
FEW = TOKENS if DEVICE.type == "cuda" else 16  # of which a head drops parts


@pytest.fixture
def plans(monkeypatch):
    interpret(monkeypatch)
    return recorded_plans(monkeypatch)


def test_two_backwards_of_one_forward(plans):
    """Lists are each one's own, with the same bits; without a gradient of the hidden states they are made, too.

    The tolerance is of dL/dlogits; the products with weight and hidden enlarge an error by no more than 4.
    """
    heads = one_head()
    leaves, exact = heads.trained(), heads.gradients(0.0)
    loss = heads.loss(leaves, grad_tolerance=1e-2)
    found, again = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
    for mine, same, other in zip(found, again, exact, strict=True):
        assert torch.equal(mine, same)
        assert mine.dtype == other.dtype == LOW
        assert relative_error(mine, other) <= 0.04 + 1.2 * EPS
    heads.gradients(1e-2, frozen=0)
    assert len(plans) == 3


def test_frozen_inputs(plans):
    heads = one_head(FEW)
    everything = heads.gradients(1e-1)
    for frozen in range(3):
        expected = [part for place, part in enumerate(everything) if place != frozen]
        assert all(map(torch.equal, heads.gradients(1e-1, frozen), expected)), frozen
    assert len(plans) == 4


@pytest.mark.parametrize("dead", ["both", "all", *(pytest.param(k, marks=NEEDS_GPU) for k in ("mask", "gradient"))])
def test_tokens_that_do_not_count(dead, plans):
    """They take part in nothing: NaN among them stays where it is."""
    heads = one_head()
    places = torch.arange(heads.grad.numel(), device=DEVICE)
    masked, zero = (places % step == 1 for step in (3, 5))
    if dead == "all":
        masked, zero = torch.zeros_like(masked), torch.ones_like(zero)
    masked, zero = (part & (dead in ("all", "both", name)) for name, part in (("mask", masked), ("gradient", zero)))
    heads.grad[zero] = 0.0
    found, exact = (heads.gradients(tolerance, mask=~masked) for tolerance in (1e-2, 0.0))
    heads.leaves[0][masked | zero] = math.nan
    again = heads.gradients(1e-2, mask=~masked)
    for mine, truth, same in zip(found, exact, again, strict=True):
        assert torch.equal(mine, same)
        assert not mine.any() if dead == "all" else relative_error(mine, truth) <= 0.04 + 1.2 * EPS
    assert not found[0][masked | zero].any()


def test_no_token_counts(plans):
    """Gradients of zero, not an error: a micro-batch may hold masked tokens alone, or none."""
    for tokens in (0, FEW):
        heads = one_head(tokens)
        for mine, leaf in zip(heads.gradients(0.1, mask=torch.zeros(tokens, device=DEVICE)), heads.leaves, strict=True):
            assert torch.equal(mine, torch.zeros_like(leaf))


def test_a_gradient_of_nan_is_not_left_out(plans):
    heads = one_head(FEW)
    heads.grad[3] = math.nan
    found = heads.gradients(0.5)
    assert plans[0].share < 0.8
    assert found[0][3].isnan().all()
    assert not found[0][4].isnan().any()
    assert found[1].isnan().all()


@NEEDS_GPU  # float16 has no such numbers
@pytest.mark.parametrize("size", [1e-25, 1e-20, 1e25])
def test_gradients_whose_squares_leave_float32(size, plans):
    """The tolerance is relative: a tiny loss keeps its gradient, a huge one too."""
    heads = one_head()
    heads = heads._replace(grad=heads.grad * size)
    exact, found = (heads.gradients(tolerance) for tolerance in (0.0, 1e-2))
    assert plans[0].share < 1.0
    for mine, truth in zip(found, exact, strict=True):
        assert relative_error(mine / size, truth / size) <= 0.04 + 1.2 * EPS


def test_a_named_chunk_keeps_the_backward_exact(plans):
    heads = one_head(FEW)
    found, exact = (heads.gradients(tolerance, chunk_vocab=512) for tolerance in (0.5, 0.0))
    assert all(map(torch.equal, found, exact))
    assert not plans


@pytest.mark.parametrize("kind", ["flat", "long lists"])
def test_where_much_is_kept_the_gradient_is_exact(kind, plans, monkeypatch):
    """To the last bit."""
    heads = one_head(FEW)
    if kind == "long lists":
        monkeypatch.setattr(LIMITS, "mean_ids", 1)
    else:
        monkeypatch.setattr(LIMITS, "selected_share", 0.7 * LIMITS.selected_share)
    if kind == "flat":
        heads.leaves[1].mul_(0.1)
    heads.grad[:3] = 0.0
    found, exact = (heads.gradients(tolerance) for tolerance in (1e-2 if kind != "flat" else 1e-5, 0.0))
    assert plans[0].lists_are_faster == (kind == "long lists")
    assert all(map(torch.equal, found, exact))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_without_an_epilogue_the_gradient_is_exact(dtype):
    """To the last bit: on CPU a tolerance changes nothing."""
    heads = one_head(16, dtype=dtype, device="cpu")
    assert all(map(torch.equal, heads.gradients(0.5), heads.gradients(0.0)))
