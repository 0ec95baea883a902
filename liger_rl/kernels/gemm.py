"""Products and sums of matrices that take low-precision numbers and keep their float32 accumulators."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

# Rows that `column_sums` adds at a time. Of many more PyTorch splits each column over thread blocks on CUDA, and takes
# up to 512 bytes of memory for each of them: 140 MiB on an H200, as much as the tile of the gradient that is summed.
SUMMED_ROWS = 256
# `parts_for`: at most so many parts, each of which costs about so much of the whole, in tiles of so many rows and
# columns. Of the tiles that cuBLAS is known to have these foretold its speed best.
MAX_PARTS, COST_OF_PART, PART_TILE = 4, 0.03, 128
ALIGNED_ELEMENTS = 8  # 16 bytes of 16-bit numbers, at which the rows of fast products start
# Before 2.10, addmm with an out_dtype takes no float32 to add to.
ADDS_TO_FLOAT32 = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """The context in which products take their factors as they are."""
    # Switching off what is off takes the host as long as a launch.
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a (m, k) @ b (k, n) -> float32 (m, n), never rounded to the factors' dtype on the way."""
    if a.dtype == torch.float32:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def parts_for(rows: int, columns: int, device: torch.device) -> int:
    """Into how many products side by side a product (rows, columns) over the vocabulary is best cut.

    A chunk of tokens times the hidden size makes few tiles for a GPU's multiprocessors, and leaves many of them idle at
    the end. On one H200 the products of 13 chunks of 768 to 2304 tokens ran at 673, 640 and 656 TFLOP/s on average with
    H = 2048, 2304 and 4096, at 704, 687 and 669 in the parts that this chooses, and at 716, 719 and 698 in those that
    were fastest; 1664 tokens with H = 2048 at 735 in place of 577, 1024 with H = 2304 at 748 in place of 569.
    """
    if device.type != "cuda":
        return 1
    tiles = -(-rows // PART_TILE) * -(-columns // PART_TILE)
    processors = torch.cuda.get_device_properties(device).multi_processor_count

    def time(parts: int) -> float:
        return -(-tiles * parts // processors) / parts * (1 + COST_OF_PART * parts)

    return min(range(1, MAX_PARTS + 1), key=time)


def write_parts(a: Tensor, b: Tensor, parts: int) -> Tensor:
    """a (m, k) @ b (k, n) as float32 (parts, m, n) that add up to it."""
    if parts == 1:
        out = torch.empty(1, a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
        write(out[0], a, b)
        return out
    width = a.shape[1] // parts // ALIGNED_ELEMENTS * ALIGNED_ELEMENTS
    whole = parts * width
    left = a[:, :whole].unflatten(1, (parts, width)).transpose(0, 1)
    right = b[:whole].unflatten(0, (parts, width))
    if a.is_cuda and a.dtype != torch.float32:
        out = torch.bmm(left, right, out_dtype=torch.float32)
    else:
        out = torch.bmm(left.float(), right.float())
    if whole < a.shape[1]:
        accumulate(out[0], a[:, whole:], b[whole:])
    return out


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
    whole = matrix.shape[0] // SUMMED_ROWS
    parts = matrix[: whole * SUMMED_ROWS].unflatten(0, (whole, SUMMED_ROWS)).sum(1, dtype=torch.float32)
    return parts.sum(0) + matrix[whole * SUMMED_ROWS :].sum(0, dtype=torch.float32)
