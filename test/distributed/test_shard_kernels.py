"""Kernels on a part of the vocabulary: a target of another part leaves no trace but in what comes before it."""

from dataclasses import asdict

import pytest
import torch

import oracles
from liger_rl import LogitTransform, VocabParallel
from liger_rl.distributed import BEYOND, VocabShard
from liger_rl.kernels import reference
from liger_rl.kernels.statistics import EXTRAS, Fold, TokenGradients

triton = pytest.importorskip("liger_rl.kernels.tile_triton", reason="triton is not installed")
epilogue = pytest.importorskip("liger_rl.kernels.epilogue", reason="triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, HIDDEN, ROWS = 33, 64, 90
TRANSFORMS = [LogitTransform(), LogitTransform(temperature=0.7, softcap=3.0)]


def inputs():
    hidden = torch.randn(TOKENS, HIDDEN, device=DEVICE, dtype=torch.float16)
    weight = torch.randn(ROWS, HIDDEN, device=DEVICE, dtype=torch.float16) * 0.2
    # Before the shard; in it; after it, also within the last tile of a kernel that works in 256s.
    targets = torch.tensor([-1, -300, 0, 41, ROWS - 1, BEYOND], device=DEVICE).repeat(6)[:TOKENS]
    return hidden, weight, targets


def plainly(z, targets):
    """target, rival"""
    inside = (targets >= 0) & (targets < ROWS)
    target = torch.where(inside, z.gather(1, targets.clamp(0, ROWS - 1)[:, None])[:, 0], 0.0)
    before = torch.arange(ROWS, device=z.device) < targets[:, None]
    return target, torch.where(before, z, -torch.inf).amax(1)


def folds(hidden, weight, targets, transform):
    logits = hidden.float() @ weight.float().T
    for kernels in (reference, triton):
        state = Fold.start(TOKENS, logits.device, entropy=True, extras=EXTRAS)
        for first in (0, 40):
            last = 40 if first == 0 else ROWS
            kernels.fold(logits[:, first:last].contiguous(), targets, first, None, transform, state)
        yield state
    torch.use_deterministic_algorithms(True)  # memory that nobody writes is NaN
    try:
        found: list[Fold] = []
        options = {"entropy": True, "extras": EXTRAS, "over_parts": lambda fold: found.append(fold) or fold}
        epilogue.gemm_fold(hidden, weight, None, targets, transform, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    yield from found


@pytest.mark.parametrize("transform", TRANSFORMS, ids=["plain", "softcap"])
def test_fold(transform):
    hidden, weight, targets = inputs()
    z = oracles.transformed(hidden.float() @ weight.float().T, **asdict(transform))
    target, rival = plainly(z, targets)
    for state in folds(hidden, weight, targets, transform):
        torch.testing.assert_close(state.target, target, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state.rival, rival, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state.peak, z.amax(1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state.peak + state.sum_exp.log(), z.logsumexp(1), rtol=1e-4, atol=1e-4)
        assert (state.target[(targets < 0) | (targets >= ROWS)] == 0).all()
        for name, values in state._asdict().items():
            assert not values.isnan().any(), name


@pytest.mark.parametrize("transform", TRANSFORMS, ids=["plain", "softcap"])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_grad(transform, with_entropy):
    hidden, weight, targets = inputs()
    logits = hidden.float() @ weight.float().T
    z = oracles.transformed(logits, **asdict(transform))
    lse = z.logsumexp(1) + 1.0  # of a larger vocabulary than this part
    entropy = torch.rand(TOKENS, device=DEVICE)
    grad_logps, at_target, grad_entropy = torch.randn(3, TOKENS, device=DEVICE)
    tokens = TokenGradients(
        lse, grad_logps, at_target, entropy if with_entropy else None, grad_entropy if with_entropy else None
    )
    p = (z - lse[:, None]).exp()
    expected = -grad_logps[:, None] * p
    inside = (targets >= 0) & (targets < ROWS)
    expected[inside, targets[inside]] = at_target[inside]
    if with_entropy:
        expected -= grad_entropy[:, None] * p * (z - lse[:, None] + entropy[:, None])
    factor = transform.scale / transform.temperature
    if transform.softcap is not None:
        factor = factor * (1 - (z * transform.temperature / transform.softcap).square())
    expected = expected * factor
    for kernels in (reference, triton):
        out = torch.empty_like(logits)
        kernels.grad(logits, targets, 0, None, transform, tokens, out)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    if not with_entropy and transform.softcap is None:
        out = epilogue.gemm_grad(hidden, weight, None, targets, 0, transform, tokens)
        torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=1e-3)


def test_rows_of_a_shard():
    place = VocabParallel.__new__(VocabParallel)  # without a group: nothing is sent
    object.__setattr__(place, "vocab_start", 10)
    shard = VocabShard(place, 5, 20)
    found = shard.local(torch.tensor([0, 9, 10, 14, 15, 19, -100]))
    assert found.tolist() == [-10, -1, 0, 4, BEYOND, BEYOND, -110]
