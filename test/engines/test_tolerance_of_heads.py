"""Properties of a backward with a tolerance, asked of one head and of two. Certificates: test_sparse.py and
test_divergence_tolerance.py.
"""

import math

import pytest
import torch

from devices import NEEDS_GPU
from liger_rl import LogitTransform
from liger_rl.engines.sparse import lists
from tolerances import (
    DEVICE,
    LOW,
    TOKENS,
    Heads,
    distance,
    interpret,
    interpret_pairs,
    one_head,
    recorded_plans,
    two_heads,
)

HEADS = {"one head": (one_head, interpret), "two heads": (two_heads, interpret_pairs)}
EPS = torch.finfo(LOW).eps
FEW = TOKENS if DEVICE.type == "cuda" else 16  # of which one head drops parts


@pytest.fixture(params=HEADS)
def made(request, monkeypatch):
    """-> a function that makes heads, the plans of their backwards."""
    make, patch = HEADS[request.param]
    patch(monkeypatch)
    return make, recorded_plans(monkeypatch)


PLAIN, CAPPED = LogitTransform(), LogitTransform(softcap=4.0, scale=1.5)
ONE = ({"transform": PLAIN}, {"transform": PLAIN, "entropy": True}, {"transform": CAPPED, "entropy": True})
TWO = [{"kind": "forward_kl"}, {"kind": "reverse_kl"}, {"kind": "jsd", "beta": 0.5}]
TWO += [pytest.param({"kind": "jsd", "beta": beta}, marks=NEEDS_GPU) for beta in (0.02, 0.97)]


def assert_close(heads: Heads, tolerance: float, bound: float, **options) -> None:
    """The tolerance is of dL/dlogits; the products with weight and hidden enlarge an error by no more than `bound`."""
    exact, found, again = (heads.gradients(t, **options) for t in (0.0, tolerance, tolerance))
    for mine, same, other in zip(found, again, exact, strict=True):
        assert mine.dtype == other.dtype == LOW
        assert torch.equal(mine, same)
        assert distance(mine, other) <= bound


@pytest.mark.parametrize("options", ONE, ids=str)
@pytest.mark.parametrize("kind", ["sure", pytest.param("unsure", marks=NEEDS_GPU)])
def test_gradients_of_one_head(kind, options, monkeypatch):
    interpret(monkeypatch)
    for tolerance in (1e-3, 1e-2, 1e-1) if DEVICE.type == "cuda" else (1e-2,):
        assert_close(one_head(kind=kind), tolerance, 4 * tolerance + 1.2 * EPS, **options)


@pytest.mark.parametrize("options", TWO, ids=str)
def test_gradients_of_two_heads(options, monkeypatch):
    interpret_pairs(monkeypatch)
    plans, heads = recorded_plans(monkeypatch), two_heads()
    if options["kind"] != "forward_kl":
        heads = heads._replace(targets=torch.arange(40, device=DEVICE) * 29)
    assert_close(heads, 0.1, 0.3 + 1.5 * EPS, **options)
    assert 0 < plans[0].share < 0.9


def test_two_backwards_of_one_forward(made):
    """Lists are each one's own; without a gradient of the hidden states they are made, too."""
    heads = made[0]()
    leaves, exact = heads.trained(), heads.gradients(0.0)
    loss = heads.loss(leaves, grad_tolerance=1e-2)
    for _ in range(2):
        for mine, other in zip(torch.autograd.grad(loss, leaves, retain_graph=True), exact, strict=True):
            assert distance(mine, other) <= 0.04 + 1.2 * EPS
    heads.gradients(1e-2, frozen=0)
    assert len(made[1]) == 3


def test_frozen_inputs(made):
    heads = made[0](FEW)
    everything = heads.gradients(1e-1)
    for frozen in range(3):
        expected = [part for place, part in enumerate(everything) if place != frozen]
        assert all(map(torch.equal, heads.gradients(1e-1, frozen), expected)), frozen
    assert len(made[1]) == 4


@pytest.mark.parametrize("dead", ["both", "all", *(pytest.param(k, marks=NEEDS_GPU) for k in ("mask", "gradient"))])
def test_tokens_that_do_not_count(dead, made):
    """They take part in nothing: NaN among them stays where it is."""
    heads = made[0]()
    places = torch.arange(heads.grad.numel(), device=DEVICE)
    masked, zero = (places % step == 1 for step in (3, 5))
    if dead == "all":
        masked, zero = torch.zeros_like(masked), torch.ones_like(zero)
    masked, zero = (part & (dead in ("all", "both", name)) for name, part in (("mask", masked), ("gradient", zero)))
    heads.grad[zero] = 0.0
    found, exact = (heads.gradients(tolerance, mask=~masked) for tolerance in (1e-2, 0.0))
    heads.leaves[0][masked | zero] = math.nan
    if heads.teacher is not None:
        heads.teacher[0][masked] = math.inf
    again = heads.gradients(1e-2, mask=~masked)
    for mine, truth, same in zip(found, exact, again, strict=True):
        assert torch.equal(mine, same)
        assert not mine.any() if dead == "all" else distance(mine, truth) <= 0.04 + 1.2 * EPS
    assert not found[0][masked | zero].any()


def test_no_token_counts(made):
    """Gradients of zero, not an error: a micro-batch may hold masked tokens alone, or none."""
    for tokens in (0, FEW):
        heads = made[0](tokens)
        for mine, leaf in zip(heads.gradients(0.1, mask=torch.zeros(tokens, device=DEVICE)), heads.leaves, strict=True):
            assert torch.equal(mine, torch.zeros_like(leaf))


def test_a_gradient_of_nan_is_not_left_out(made):
    heads = made[0](FEW)
    heads.grad[3] = math.nan
    found = heads.gradients(0.5)
    assert made[1][0].share < 0.8
    assert found[0][3].isnan().all()
    assert not found[0][4].isnan().any()
    assert found[1].isnan().all()


@NEEDS_GPU  # float16 has no such numbers
@pytest.mark.parametrize("size", [1e-25, 1e-20, 1e25])
def test_gradients_whose_squares_leave_float32(size, made):
    """The tolerance is relative: a tiny loss keeps its gradient, a huge one too."""
    heads = made[0]()
    heads = heads._replace(grad=heads.grad * size)
    exact, found = (heads.gradients(tolerance) for tolerance in (0.0, 1e-2))
    assert made[1][0].share < 1.0
    for mine, truth in zip(found, exact, strict=True):
        assert distance(mine / size, truth / size) <= 0.04 + 1.2 * EPS


def test_a_named_chunk_keeps_the_backward_exact(made):
    heads = made[0](FEW)
    found, exact = (heads.gradients(tolerance, chunk_vocab=512) for tolerance in (0.5, 0.0))
    assert all(map(torch.equal, found, exact))
    assert not made[1]


@pytest.mark.parametrize("kind", ["flat", "equal", "long lists"])
def test_where_much_is_kept_the_gradient_is_exact(kind, made, monkeypatch):
    """To the last bit. The gradient of equal heads is rounding, of which nothing can be promised but itself."""
    heads = made[0](FEW) if made[0] is one_head else two_heads(16, (48, 48))
    if kind == "long lists":
        monkeypatch.setattr(lists, "most_ids", lambda vocab: 1)
    else:
        monkeypatch.setattr(lists, "dense_share", lambda hidden_size: 0.7)
    if kind == "flat":
        heads.leaves[1].mul_(0.1)
    if kind == "equal":
        if heads.teacher is None:
            pytest.skip("one head equals no other")
        heads.leaves[2].zero_()
        heads = heads._replace(teacher=tuple(heads.leaves[:2]))
    heads.grad[:3] = 0.0
    found, exact = (heads.gradients(tolerance) for tolerance in (1e-2 if kind != "flat" else 1e-5, 0.0))
    assert made[1][0].pays == (kind == "long lists")
    assert all(map(torch.equal, found, exact))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [one_head, two_heads])
def test_without_an_epilogue_the_gradient_is_exact(make, dtype):
    """To the last bit: on CPU a tolerance changes nothing."""
    heads = make(16, dtype=dtype, device="cpu")
    assert all(map(torch.equal, heads.gradients(0.5), heads.gradients(0.0)))
