"""Rows to where they belong, rounded on the way, as one Triton kernel that reads and writes each of them once."""

import triton
import triton.language as tl
from torch import Tensor

from liger_rl.kernels.tile_triton import on

BLOCK, WARPS = 2048, 4


@triton.jit
def _scatter_kernel(rows, row_stride, index, out, out_stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    values = tl.load(rows + row * row_stride + column, mask=inside, other=0.0)
    place = out + tl.load(index + row) * out_stride + column
    tl.store(place, values.to(out.dtype.element_ty), mask=inside)


def scatter_rows(rows: Tensor, index: Tensor, out: Tensor) -> None:
    """As `scatter.scatter_rows`; the last dimensions must be contiguous."""
    assert rows.stride(-1) == 1
    assert out.stride(-1) == 1
    n, size = rows.shape
    if n == 0 or size == 0:
        return
    with on(out.device):
        _scatter_kernel[(n, triton.cdiv(size, BLOCK))](
            rows, rows.stride(0), index, out, out.stride(0), size, BLOCK, num_warps=WARPS
        )
