"""Rows to where they belong, in plain PyTorch, on any device."""

from torch import Tensor

ROWS = 2048  # converted at a time, so that the copy stays small beside the float32 rows


def scatter_rows(rows: Tensor, index: Tensor, out: Tensor) -> None:
    """out[index] = rows, for float32 rows (n, H), an index (n,) without repeats and out (N, H) of any float dtype."""
    for first in range(0, rows.shape[0], ROWS):
        part = slice(first, first + ROWS)
        out.index_copy_(0, index[part], rows[part].to(out.dtype))
