"""Properties of a backward with a tolerance, asked of one head and of two. Certificates: test_sparse.py and
test_divergence_tolerance.py.
"""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from devices import NEEDS_GPU
from liger_rl import linear_divergence
from tolerances import DEVICE, LOW, TOKENS, batch, distance, gradients, interpret, interpret_pairs, pair, recorded_plans


class Heads(NamedTuple):
    """A loss of one head's log-probabilities, or of two heads' divergence."""

    leaves: list[Tensor]  # hidden, weight, bias
    grad: Tensor  # dL/d result of each token
    targets: Tensor | None = None
    teacher: tuple[Tensor, Tensor] | None = None

    def gradients(self, tolerance: float, frozen: int | None = None, **options) -> tuple[Tensor, ...]:
        leaves = [leaf.detach().requires_grad_(place != frozen) for place, leaf in enumerate(self.leaves)]
        if self.teacher is None:
            return gradients(leaves, self.targets, self.grad, grad_tolerance=tolerance, **options)
        found = linear_divergence(*leaves[:2], *self.teacher, bias=leaves[2], grad_tolerance=tolerance, **options)
        return torch.autograd.grad((found.divergence * self.grad).sum(), [x for x in leaves if x.requires_grad])


def one_head(tokens: int = TOKENS, **options) -> Heads:
    leaves, targets, grad = batch("sure", tokens=tokens, **options)
    return Heads([leaf.detach() for leaf in leaves], grad, targets)


def two_heads(tokens: int = 40, **options) -> Heads:
    heads = pair(tokens=tokens, **options)
    return Heads(list(heads[:3]), heads.grad, None, heads[3:5])


HEADS = {"one head": (one_head, interpret), "two heads": (two_heads, interpret_pairs)}


@pytest.fixture(params=HEADS)
def made(request, monkeypatch):
    """-> a function that makes heads, the plans of their backwards."""
    make, patch = HEADS[request.param]
    patch(monkeypatch)
    return make, recorded_plans(monkeypatch)


def test_frozen_inputs(made):
    heads = made[0](16)
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
        assert not mine.any() if dead == "all" else distance(mine, truth) <= 0.04 + 1.2 * torch.finfo(LOW).eps
    assert not found[0][masked | zero].any()


def test_no_token_counts(made):
    """Gradients of zero, not an error: a micro-batch may hold masked tokens alone, or none."""
    for tokens in (0, 16):
        heads = made[0](tokens)
        for mine, leaf in zip(heads.gradients(0.1, mask=torch.zeros(tokens, device=DEVICE)), heads.leaves, strict=True):
            assert torch.equal(mine, torch.zeros_like(leaf))


def test_a_gradient_of_nan_is_not_left_out(made):
    heads = made[0](16)
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
        assert distance(mine / size, truth / size) <= 0.04 + 1.2 * torch.finfo(LOW).eps


def test_a_named_chunk_keeps_the_backward_exact(made):
    heads = made[0](16)
    found, exact = (heads.gradients(tolerance, chunk_vocab=512) for tolerance in (0.5, 0.0))
    assert all(map(torch.equal, found, exact))
    assert not made[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [one_head, two_heads])
def test_without_an_epilogue_the_gradient_is_exact(make, dtype):
    """To the last bit: on CPU a tolerance changes nothing."""
    heads = make(16, dtype=dtype)
    teacher = None if heads.teacher is None else tuple(part.cpu() for part in heads.teacher)
    targets = None if heads.targets is None else heads.targets.cpu()
    heads = Heads([leaf.cpu() for leaf in heads.leaves], heads.grad.cpu(), targets, teacher)
    assert all(map(torch.equal, heads.gradients(0.5), heads.gradients(0.0)))
