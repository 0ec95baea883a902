"""Gradient sums of engines that compute gradients in the forward. Each chunk of tokens is added to them."""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from liger_rl.head.record import Gradients, Head, Needs
from liger_rl.kernels import gemm, reference


class Totals:
    """The gradients of hidden, weight and bias, to which chunks are added."""

    def __init__(self, head: Head, sum_dtype: torch.dtype | None, needs: Needs) -> None:
        hidden, weight, bias = head.hidden, head.weight, head.bias
        self.hidden_like, self.head_weight = hidden if needs[0] else None, weight
        self.weight: Tensor | None = None
        if needs[1]:
            self.weight = torch.empty(weight.shape, dtype=sum_dtype, device=weight.device)
        self.bias = None
        if bias is not None and needs[2]:
            self.bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
        self.dtypes = weight.dtype, None if bias is None else bias.dtype
        # True until the first chunk. Its products are written, not added, so that the weight's sum needs no clearing.
        self.empty = True

    @cached_property
    def hidden(self) -> Tensor | None:
        """(N, H). It is cleared at its first use, after the launch of the first chunk's fold, which need not wait."""
        if self.hidden_like is None:
            return None
        return torch.zeros_like(self.hidden_like, memory_format=torch.contiguous_format)

    def add(
        self,
        rows: Tensor,  # (m, H), the hidden states of some tokens, in the dtype of products
        index: Tensor | slice,  # their places in all N tokens
        tiles: Sequence[tuple[int, int]],  # of the vocabulary
        tile_of: Callable[[int, int], Tensor],  # (first entry, end) -> dL/dlogits (m, end - first)
    ) -> None:
        """Add the gradients of a chunk of tokens."""
        grad_rows = torch.empty_like(rows, dtype=torch.float32) if self.hidden is not None else None
        for first, last in tiles:
            tile = tile_of(first, last)
            if grad_rows is not None:
                product = gemm.write if first == 0 else gemm.accumulate
                product(grad_rows, tile, self.head_weight[first:last].to(rows.dtype))
            self._add_weight(first, last, tile, rows)
            if self.bias is not None:
                self.bias[first:last] += gemm.column_sums(tile)
            del tile
        self.empty = False
        if self.hidden is None or grad_rows is None:
            return
        if isinstance(index, slice):
            self.hidden[index] = grad_rows
        else:
            reference.scatter_rows(grad_rows, index, self.hidden)

    def _add_weight(self, first: int, last: int, tile: Tensor, rows: Tensor) -> None:
        """weight[first:last] += tile.T @ rows, for dL/dlogits (n, last - first) and hidden states (n, H)."""
        if self.weight is None:
            return
        out = self.weight[first:last]
        if out.dtype == torch.float32:
            (gemm.write if self.empty else gemm.accumulate)(out, tile.T, rows)
        elif out.is_cuda and out.dtype == rows.dtype:
            # The product adds `out` in its float32 accumulators, and rounds the sum once.
            torch.mm(tile.T, rows, out=out) if self.empty else out.addmm_(tile.T, rows)
        else:
            product = gemm.matmul(tile.T, rows)
            out.copy_(product if self.empty else product + out)

    def finish(self) -> Gradients:
        """The sums in the dtypes of weight and bias."""
        weight, bias = self.weight, self.bias
        if weight is not None and self.empty:
            weight.zero_()
        return Gradients(
            self.hidden,
            None if weight is None else weight.to(self.dtypes[0]),
            None if bias is None else bias.to(self.dtypes[1]),
        )
