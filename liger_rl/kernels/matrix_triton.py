"""Tiles of matrices, read and written with the tensor memory accelerator (TMA) or with pointers.

`store` and `product` take a TMA descriptor, a `PointerMatrix` or a `RaggedMatrix`. Past the last column all
three read zeros. Past the last row a descriptor reads zeros. Pointers read the last row again, so the caller must mask
these results.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

GROUP = tl.constexpr(8)  # 16-bit numbers in 16 bytes; the stride of rows is a multiple of GROUP


class PointerMatrix(NamedTuple):
    """A matrix with contiguous rows, for pointers. No tile reaches past its last column."""

    start: Tensor
    stride: int  # from row to row in units of GROUP, so that the compiler knows a divisor
    rows: int


class RaggedMatrix(NamedTuple):
    """`PointerMatrix` whose last tiles reach past the last column. Columns past it are masked in groups of GROUP.

    It is no `PointerMatrix` with columns=None, because Triton 3.6 cannot tell a tuple with None from a descriptor.
    """

    start: Tensor
    stride: int
    rows: int
    columns: int


def matrix(
    values: Tensor, rows: int, columns: int, *, tma: bool, slices: int = 1
) -> TensorDescriptor | PointerMatrix | RaggedMatrix:
    """`values` as an argument of a kernel whose tiles are (rows, columns), read in `slices` slices of columns."""
    if tma:
        return TensorDescriptor.from_tensor(values, [rows, columns // slices])
    plain, width = PointerMatrix(values, values.stride(0) // GROUP.value, values.shape[0]), values.shape[1]
    return plain if width % columns == 0 else RaggedMatrix(*plain, width)


@triton.jit
def _starts(matrix, row, ROWS: tl.constexpr):
    """-> where ROWS rows from `row` on start, for `_columns`; past the last row, pointers are the last row's."""
    if isinstance(matrix, tl.core.tensor_descriptor_base):
        return row
    else:
        place = tl.minimum(row + tl.arange(0, ROWS), matrix.rows - 1)
        return (matrix.start + place.to(tl.int64) * matrix.stride * GROUP)[:, None]


@triton.jit
def _inside(column, matrix):
    """-> whether columns are in the matrix; the same answer for all columns of a GROUP."""
    return column // GROUP < tl.cdiv(matrix.columns, GROUP)


@triton.jit
def _from_rows(starts, matrix, first, COLUMNS: tl.constexpr):
    """-> (ROWS, COLUMNS): COLUMNS columns from `first` on, of the rows at the addresses `starts`."""
    column = first + tl.arange(0, COLUMNS)
    if len(matrix) == 4:
        return tl.load(starts + column[None, :], mask=_inside(column, matrix)[None, :], other=0.0)
    else:
        return tl.load(starts + column[None, :])


@triton.jit
def store(matrix, row, column, values):
    """Write the part of a tile that lies in the matrix."""
    if isinstance(matrix, tl.core.tensor_descriptor_base):
        matrix.store([row, column], values.to(matrix.dtype))
    else:
        rows = row + tl.arange(0, values.shape[0])
        columns = column + tl.arange(0, values.shape[1])
        inside = (rows < matrix.rows)[:, None]
        if len(matrix) == 4:
            inside &= _inside(columns, matrix)[None, :]
        place = matrix.start + rows.to(tl.int64)[:, None] * matrix.stride * GROUP + columns[None, :]
        tl.store(place, values.to(matrix.start.dtype.element_ty), mask=inside)


@triton.jit
def _columns(matrix, starts, first, COLUMNS: tl.constexpr):
    """-> COLUMNS columns from `first` on, of the rows at `starts`."""
    if isinstance(matrix, tl.core.tensor_descriptor_base):
        return matrix.load([starts, first])
    else:
        return _from_rows(starts, matrix, first, COLUMNS)


@triton.jit
def product(
    a, b, row, entry, size, ROWS: tl.constexpr, ENTRIES: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """-> (ROWS, ENTRIES) float32, a[row : row + ROWS] @ b[entry : entry + ENTRIES].T, over `size` columns."""
    total = tl.zeros((ROWS, ENTRIES), tl.float32)
    a_starts, b_starts = _starts(a, row, ROWS), _starts(b, entry, ENTRIES)
    for step in range(tl.cdiv(size, STEP)):
        left = _columns(a, a_starts, step * STEP, STEP)
        total = tl.dot(left, _columns(b, b_starts, step * STEP, STEP).T, total)
    return total
