"""With `batch_invariant` a token's bits are the same in any company. Every call: test_properties.py, the fuzzer."""

import math

import pytest
import torch
from torch import Tensor

from devices import NEEDS_GPU
from head_calls import EXTRAS, Problem, Products, call, problem
from liger_rl import FusedLinearGRPOLoss, LogitTransform

TOKENS, HIDDEN, VOCAB = 300, 96, 1003


def batch(dtype=torch.float32, device="cpu", *, tokens=TOKENS, vocab=VOCAB, **more) -> Problem:
    return problem((tokens,), HIDDEN, vocab, dtype, device, bias=True, **more)


def invariant(inputs: Problem, tokens: Tensor | slice = slice(None), **options):
    """Of some of the tokens, in any order."""
    some = inputs._replace(hidden=inputs.hidden[tokens], targets=inputs.targets[tokens])
    return call(some, batch_invariant=True, **options)


def assert_identical(found, expected, place=slice(None)) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            assert torch.equal(mine, other[place])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shuffled_split_masked_and_padded(dtype, device):
    """More tokens than a tile has."""
    inputs, generator = batch(dtype, device), torch.Generator().manual_seed(1)
    options = {"entropy": True, "extras": EXTRAS, "transform": LogitTransform(temperature=0.7, softcap=5.0)}
    whole = invariant(inputs, **options)
    order = torch.randperm(TOKENS, generator=generator).to(device)
    assert_identical(invariant(inputs, order, **options), whole, order)
    for sizes in ([1, 1, 2, 296], [127, 129, 44]):
        for rows in order.split(sizes):
            assert_identical(invariant(inputs, rows, **options), whole, rows)
    assert invariant(inputs, slice(0), **options).logps.shape == (0,)
    for keep in (0.9, 0.02):
        mask = (torch.rand(TOKENS, generator=generator) < keep).to(device)
        assert torch.equal(invariant(inputs, mask=mask, **options).logps, torch.where(mask, whole.logps, 0.0))
    # (B, T) rows with padding of NaN
    hidden = torch.full((4, 100, HIDDEN), math.nan, dtype=dtype, device=device)
    targets = torch.full((4, 100), -100, device=device)
    for row, (start, length) in enumerate([(0, 3), (3, 97), (100, 100), (200, 100)]):
        hidden[row, 100 - length :] = inputs.hidden[start : start + length]
        targets[row, 100 - length :] = inputs.targets[start : start + length]
    padded = call(inputs._replace(hidden=hidden, targets=targets), batch_invariant=True, **options).logps
    assert torch.equal(padded[targets >= 0], whole.logps)


@NEEDS_GPU
def test_few_tokens_and_many_on_a_gpu():
    """On both sides of the number of tokens from which on the kernel of our own is worth it."""
    inputs = batch(torch.bfloat16, "cuda", tokens=5000, vocab=20000)
    whole = invariant(inputs, entropy=True)
    for rows in (slice(0, 1), slice(17, 300), slice(100, 613), slice(1000, 5000), torch.randperm(5000).cuda()):
        assert_identical(invariant(inputs, rows, entropy=True), whole, rows)


def test_every_product_has_one_shape():
    """What the promise rests on where libraries multiply."""
    with Products() as products:
        for tokens in (1, 77, 128, 300):
            invariant(batch(), slice(tokens))
    assert len({(a.shape, b.shape) for a, b in products.factors}) == 1


def test_a_loss_takes_it():
    inputs = batch()
    loss = FusedLinearGRPOLoss("grpo", batch_invariant=True)
    reference = loss.reference_logps(inputs.hidden, inputs.weight, inputs.targets, bias=inputs.bias)
    assert torch.equal(reference[5:6], invariant(inputs, slice(5, 6)).logps)
