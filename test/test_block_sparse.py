"""The backward with a tolerance: the bound holds, what is kept is exact, what is left out is what was promised."""

import math

import pytest
import torch

from liger_rl import LogitTransform, block_sparse, linear_logprobs, projection
from liger_rl.block_sparse import BlockPlan, Tolerance, plan_blocks
from liger_rl.kernels import bounds
from liger_rl.kernels.statistics import BLOCK_TOKENS, BLOCK_VOCAB, TileBounds, TokenGradients, TokenStatistics

pytest.importorskip("triton", reason="Triton is not installed")
from liger_rl.kernels import blocks, epilogue

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOW = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter misreads bfloat16 descriptors


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, False)])
@pytest.mark.parametrize(
    ("tokens", "hidden_size", "vocab", "transform", "bias", "entropy"),
    [
        (300, 72, 1000, LogitTransform(), False, False),
        (257, 64, 770, LogitTransform(temperature=0.7), True, True),
        (128, 136, 512, LogitTransform(softcap=3.0, scale=1.5), True, False),
        (5, 8, 300, LogitTransform(softcap=3.0), False, True),
    ],
)
def test_block_kernels(tokens, hidden_size, vocab, transform, bias, entropy, needs, monkeypatch):
    """Triton's products of chosen blocks against plain PyTorch's, in several spans of tiles."""
    monkeypatch.setattr(blocks, "BLOCKS_BYTES", 3 * BLOCK_TOKENS * BLOCK_VOCAB * 2)
    hidden = torch.randn(tokens, hidden_size).to(DEVICE, LOW)
    weight = (torch.randn(vocab, hidden_size) * hidden_size**-0.5).to(DEVICE, LOW)
    biases = torch.randn(vocab).to(DEVICE, LOW) if bias else None
    targets = torch.randint(vocab, (tokens,)).to(DEVICE)
    options = projection.ProjectionOptions(
        transform=transform, entropy=entropy, compute_dtype=LOW, chunk_tokens=None, chunk_vocab=None
    )
    statistics, _ = projection.fold_projection(hidden, weight, biases, targets, options)
    grad_entropy = torch.randn(tokens).to(DEVICE) if entropy else None
    gradients = TokenGradients.of(statistics, torch.randn(tokens).to(DEVICE), grad_entropy)
    rows, tiles = math.ceil(tokens / BLOCK_TOKENS), math.ceil(vocab / BLOCK_VOCAB)
    scales = torch.randint(3, (rows, tiles)).float()
    scales[:, tiles // 2] = 0  # a tile without a block
    plan = BlockPlan(torch.arange(tokens).to(DEVICE), scales.to(DEVICE), (scales != 0).sum(0).tolist())
    inputs = (hidden, weight, biases, targets, gradients)
    expected = block_sparse._grad_blocks_by_tile(*inputs, plan, transform, needs)
    found = blocks.grad_blocks(*inputs, plan.scales, plan.counts, transform, needs)
    for mine, other, needed in zip(found, expected, needs, strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            assert needed
            assert mine.dtype == other.dtype
            assert other.abs().max() > 0.01
            torch.testing.assert_close(mine.float(), other.float(), rtol=4e-3, atol=4e-3 * other.abs().max().item())
