"""Which tokens count, of unusual integers and masks: the Triton kernel and plain PyTorch. Others are the fuzzer's."""

import math

import pytest
import torch

from liger_rl.kernels import reference, selection_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 50


@pytest.fixture(params=[reference, selection_triton], ids=["eager", "triton"])
def kernels(request, monkeypatch):
    monkeypatch.setattr(selection_triton, "BLOCK", 64)
    return request.param


def test_tokens_of_several_blocks_and_a_nan_among_them_that_are_wanted(kernels):
    """A weight of NaN is not 0."""
    targets, mask = torch.randint(-20, VOCAB + 10, (300,), device=DEVICE), torch.rand(300, device=DEVICE) < 0.6
    wanted = torch.randn(300, device=DEVICE) * (torch.rand(300, device=DEVICE) < 0.5)
    wanted[100], targets[100], mask[100] = math.nan, 5, True
    counted, outside = mask & (targets >= 0), mask & (targets >= VOCAB)
    found, numbers = kernels.select(targets, mask, VOCAB, wanted)
    expected = (counted & (wanted != 0)).nonzero().flatten()
    assert torch.equal(found[: len(expected)], expected)
    assert numbers.tolist() == [len(expected), int(outside.sum()), int(targets[outside].max()), 0]


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
