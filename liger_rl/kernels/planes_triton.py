"""A float32 matrix as bfloat16 matrices that add up to it: read once, where PyTorch reads and writes it many times."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.kernels.devices import on

BLOCK, WARPS = 2048, 4


@triton.jit
def _planes_kernel(matrix, row_stride, column_stride, out, columns, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    rest = tl.load(matrix + row * row_stride + column.to(tl.int64) * column_stride, mask=inside, other=0.0)
    for place in tl.static_range(COUNT):
        plane = rest.to(tl.bfloat16)
        tl.store(out + (row * COUNT + place) * columns + column, plane, mask=inside)
        rest -= plane.to(tl.float32)


def planes(matrix: Tensor, count: int) -> Tensor:
    """As `planes.planes`."""
    rows, columns = matrix.shape
    out = torch.empty(rows, count * columns, dtype=torch.bfloat16, device=matrix.device)
    if out.numel():
        with on(matrix.device):
            _planes_kernel[(rows, triton.cdiv(columns, BLOCK))](
                matrix, *matrix.stride(), out, columns, count, BLOCK, num_warps=WARPS
            )
    return out
