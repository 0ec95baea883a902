"""Where the product of our own applies, and the memory it takes beside its results; known without Triton."""

import torch

from liger_rl.kernels.statistics import BLOCK_TOKENS

CAPABILITY = (9, 0)  # of the first GPUs with the tensor memory accelerator
DTYPES = (torch.bfloat16, torch.float16)
MIN_TOKENS = 4 * BLOCK_TOKENS  # under it too few tiles share a read of the weight
STATISTICS_BYTES = 48 << 20  # of the vocabulary tiles' statistics, whatever N and V are
BLOCKS_BYTES = 152 << 20  # of kept blocks of a gradient at a time; a tile of the vocabulary is never split
ALIGNMENT_BYTES = 16


def takes(tokens: int, hidden_size: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> bool:
    """Whether (tokens, hidden_size) @ (V, hidden_size).T of contiguous matrices is for that product, given the GPU."""
    return (
        dtype == weight_dtype
        and dtype in DTYPES
        and tokens >= MIN_TOKENS
        and hidden_size * dtype.itemsize % ALIGNMENT_BYTES == 0
    )
