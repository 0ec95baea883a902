"""Which tokens count: the Triton kernel and plain PyTorch beside a loop."""

import math

import pytest
import torch

from devices import without_negative_zeros_where_misread
from liger_rl.kernels import reference, selection_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 50


@pytest.fixture(params=[reference, selection_triton], ids=["eager", "triton"])
def kernels(request, monkeypatch):
    monkeypatch.setattr(selection_triton, "BLOCK", 64)
    return request.param


@pytest.mark.parametrize("shape", [(0,), (64,), (300,), (5, 30), (5, 1), (0, 30)], ids=str)
@pytest.mark.parametrize("masked", [None, torch.int64])
@pytest.mark.parametrize(("dtype", "per_sequence"), [(None, False), (torch.bool, False), (torch.bfloat16, True)])
def test_only_wanted_tokens_are_listed_and_all_that_count_are_looked_at(kernels, shape, masked, dtype, per_sequence):
    """`dtype` is of the column that says which are wanted, None for all of them."""
    targets = torch.randint(-20, VOCAB + 10, shape, device=DEVICE)
    mask = None if masked is None else (torch.rand(shape, device=DEVICE) < 0.6).to(masked)
    wanted = None
    if dtype is not None:
        column_shape = (shape[0], 1) if per_sequence and len(shape) == 2 else shape
        wanted = torch.randn(column_shape, device=DEVICE) * (torch.rand(column_shape, device=DEVICE) < 0.5)
        wanted[:1] = math.nan  # is not 0
        wanted = wanted.to(dtype)
        if kernels is selection_triton:
            wanted = without_negative_zeros_where_misread(wanted)
    found, numbers = kernels.select(targets, mask, VOCAB, wanted)
    ids, places = targets.flatten().tolist(), range(targets.numel())
    keep = [True] * len(ids) if mask is None else mask.flatten().tolist()
    say = [True] * len(ids) if wanted is None else [value != 0 for value in wanted.expand(shape).flatten().tolist()]
    counted = [place for place in places if keep[place] and ids[place] >= 0]
    expected = [place for place in counted if say[place]]
    beyond = [ids[place] for place in counted if ids[place] >= VOCAB]
    assert found.dtype == numbers.dtype == torch.int64
    assert found.shape == (targets.numel(),)
    assert found[: len(expected)].tolist() == expected
    assert numbers.tolist() == [len(expected), len(beyond), max(beyond, default=0), 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_other_integers_and_strides(kernels, dtype):
    """Among them those that do not hold the size of the vocabulary."""
    targets = torch.arange(40, device=DEVICE).to(dtype)[::2]
    mask = torch.arange(60, device=DEVICE)[::3] % 2
    for vocab, outside, largest in ((20, 5, 38), (2**17, 0, 0)):
        found, numbers = kernels.select(targets, mask, vocab)
        assert numbers.tolist() == [10, outside, largest, 0]
        assert found[:10].tolist() == list(range(1, 20, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_values_of_a_mask_other_than_0_and_1_are_counted(kernels, dtype):
    wrong = [2, 255 if dtype == torch.uint8 else -1]
    if dtype.is_floating_point:
        wrong = [0.5, -1.0, 2.0, math.nan, math.inf]
    mask = torch.ones(150, device=DEVICE, dtype=dtype)
    mask[::3] = 0
    mask[20 : 20 + 20 * len(wrong) : 20] = torch.tensor(wrong, device=DEVICE, dtype=dtype)
    targets = torch.full((150,), -1, device=DEVICE)
    assert kernels.select(targets, mask, VOCAB)[1].tolist() == [0, 0, 0, len(wrong)]
