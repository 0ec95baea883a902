"""Which tokens count: the Triton kernel and plain PyTorch beside a loop."""

import math

import pytest
import torch

from liger_rl.kernels import selection, selection_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 50


@pytest.mark.parametrize("kernels", [selection, selection_triton], ids=["eager", "triton"])
@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 300])
@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32, torch.int64])
@pytest.mark.parametrize("outside", [False, True])
def test_select(kernels, tokens, mask, outside, monkeypatch):
    monkeypatch.setattr(selection_triton, "BLOCK", 64)
    targets = torch.randint(-20, VOCAB + (10 if outside else 0), (tokens,), device=DEVICE)
    wanted = None if mask is None else (torch.rand(tokens, device=DEVICE) < 0.6).to(mask)
    found, numbers = kernels.select(targets, wanted, VOCAB)
    ids, keep = targets.tolist(), [True] * tokens if wanted is None else [bool(value) for value in wanted.tolist()]
    expected = [place for place in range(tokens) if keep[place] and ids[place] >= 0]
    beyond = [ids[place] for place in expected if ids[place] >= VOCAB]
    assert found.dtype == numbers.dtype == torch.int64
    assert found[: len(expected)].tolist() == expected
    assert numbers.tolist() == [len(expected), len(beyond), max(beyond, default=0), 0]


@pytest.mark.parametrize("kernels", [selection, selection_triton], ids=["eager", "triton"])
@pytest.mark.parametrize("shape", [(5, 30), (5, 1), (5, 0), (0, 30), (150,)])
@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_only_wanted_tokens_are_listed_and_all_that_count_are_looked_at(
    kernels, shape, per_sequence, masked, dtype, monkeypatch
):
    monkeypatch.setattr(selection_triton, "BLOCK", 64)
    targets = torch.randint(-20, VOCAB + 10, shape, device=DEVICE)
    mask = torch.rand(shape, device=DEVICE) < 0.6 if masked else None
    column_shape = (shape[0], 1) if per_sequence and len(shape) == 2 else shape
    wanted = torch.randn(column_shape, device=DEVICE) * (torch.rand(column_shape, device=DEVICE) < 0.5)
    wanted[:1] = math.nan  # is not 0
    wanted = wanted.to(dtype)
    found, numbers = kernels.select(targets, mask, VOCAB, wanted)
    ids, keep = targets.flatten().tolist(), [True] * targets.numel() if mask is None else mask.flatten().tolist()
    say = [value != 0 for value in wanted.expand(shape).flatten().tolist()]
    counted = [place for place in range(targets.numel()) if keep[place] and ids[place] >= 0]
    expected = [place for place in counted if say[place]]
    beyond = [ids[place] for place in counted if ids[place] >= VOCAB]
    assert found.shape == (targets.numel(),)
    assert found[: len(expected)].tolist() == expected
    assert numbers.tolist() == [len(expected), len(beyond), max(beyond, default=0), 0]


@pytest.mark.parametrize("kernels", [selection, selection_triton], ids=["eager", "triton"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_other_integers_and_strides(kernels, dtype):
    targets = torch.arange(40, device=DEVICE).to(dtype)[::2]
    mask = torch.arange(60, device=DEVICE)[::3] % 2
    found, numbers = kernels.select(targets, mask, 20)
    assert numbers.tolist() == [10, 5, 38, 0]
    assert found[:10].tolist() == list(range(1, 20, 2))


@pytest.mark.parametrize("kernels", [selection, selection_triton], ids=["eager", "triton"])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int8, torch.uint8])
def test_a_vocabulary_beyond_the_dtype_of_the_targets(kernels, dtype):
    targets = torch.tensor([1, 100, 50], device=DEVICE).to(dtype)
    found, numbers = kernels.select(targets, None, 2**17)
    assert numbers.tolist() == [3, 0, 0, 0]
    assert found.tolist() == [0, 1, 2]


@pytest.mark.parametrize("kernels", [selection, selection_triton], ids=["eager", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_values_of_a_mask_other_than_0_and_1_are_counted(kernels, dtype, monkeypatch):
    monkeypatch.setattr(selection_triton, "BLOCK", 64)
    wrong = (
        [0.5, -1.0, 2.0, math.nan, math.inf] if dtype.is_floating_point else [2, 255 if dtype == torch.uint8 else -1]
    )
    mask = torch.ones(150, device=DEVICE, dtype=dtype)
    mask[::3] = 0
    mask[20 : 20 + 20 * len(wrong) : 20] = torch.tensor(wrong, device=DEVICE, dtype=dtype)
    targets = torch.full((150,), -1, device=DEVICE)
    assert kernels.select(targets, mask, VOCAB)[1].tolist() == [0, 0, 0, len(wrong)]
