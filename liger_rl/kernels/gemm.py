"""Matrix products and column sums of 16-bit matrices, in float32 without a rounding on the way."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

# Rows that `column_sums` adds at a time. PyTorch on CUDA splits longer columns over thread blocks, and takes up to 512
# bytes for each column and block. On an H200 that was 140 MiB, as much as the summed tile of the gradient.
SUMMED_ROWS = 256
# From torch 2.10 on, addmm with an out_dtype accepts a float32 input.
ADDS_TO_FLOAT32 = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """The context in which autocast does not convert the factors of products."""
    # Entering torch.autocast takes as much host time as a launch, even if autocast is off.
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a (m, k) @ b (k, n) -> float32 (m, n), never rounded to the factors' dtype on the way."""
    if a.dtype == torch.float32 == b.dtype:
        return torch.mm(a, b)
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a.float(), b.float())


def write(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out (m, n) float32 = a (m, k) @ b (k, n)."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a.float(), b.float(), out=out)


def accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total (m, n) float32 += a (m, k) @ b (k, n), in place."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif a.is_cuda:
        if ADDS_TO_FLOAT32:
            torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
        else:
            total += torch.mm(a, b, out_dtype=torch.float32)
    else:
        total.addmm_(a.float(), b.float())


def column_sums(matrix: Tensor) -> Tensor:
    """(m, n) any float dtype -> (n,) float32."""
    blocks = matrix.shape[0] // SUMMED_ROWS
    block_sums = matrix[: blocks * SUMMED_ROWS].unflatten(0, (blocks, SUMMED_ROWS)).sum(1, dtype=torch.float32)
    return block_sums.sum(0) + matrix[blocks * SUMMED_ROWS :].sum(0, dtype=torch.float32)
