"""Gradients that are made in the forward: their sums over chunks of tokens, and the Function that hands them on."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from liger_rl.distill.pair_kernels import find_pair_kernels
from liger_rl.head.record import Gradients, Head, Needs
from liger_rl.head.tiles import take_span
from liger_rl.kernels import gemm, reference
from liger_rl.kernels.public_call import refuse_second_derivative


class Totals:
    """The gradients of hidden, weight and bias, to which chunks are added."""

    def __init__(self, head: Head, sum_dtype: torch.dtype, needs: Needs) -> None:
        hidden, weight, bias = head.hidden, head.weight, head.bias
        self.head, self.needs = head, needs
        # It is made after the launch of the first chunk's fold, which need not wait for its clearing.
        self.hidden: Tensor | None = None
        self.weight: Tensor | None = None
        if needs[1]:
            self.weight = torch.empty(weight.shape, dtype=sum_dtype, device=weight.device)
        self.bias: Tensor | None = None
        if bias is not None and needs[2]:
            self.bias = torch.zeros(bias.shape, dtype=torch.float32, device=hidden.device)
        # True until the first chunk. Its products are written, not added, so that the weight's sum needs no clearing.
        self.empty = True

    def add(
        self,
        rows: Tensor,  # (m, H), the hidden states of some tokens, in the dtype of products
        index: Tensor | slice,  # their places in all N tokens
        tiles: Sequence[tuple[int, int]],  # of the vocabulary
        make_tile: Callable[[int, int], Tensor],  # (first entry, end) -> dL/dlogits (m, end - first)
    ) -> None:
        """Add the gradients of a chunk of tokens."""
        weight, hidden = self.head.weight, self.head.hidden
        grad_rows = torch.empty_like(rows, dtype=torch.float32) if self.needs[0] else None
        for first, last in tiles:
            tile = make_tile(first, last)
            if grad_rows is not None:
                product = gemm.write if first == 0 else gemm.accumulate
                product(grad_rows, tile, take_span(weight, first, last).to(rows.dtype))
            if self.weight is not None:
                self._add_weight(take_span(self.weight, first, last), tile, rows)
            if self.bias is not None:
                self.bias[first:last] += gemm.column_sums(tile)
            del tile
        self.empty = False
        if grad_rows is None:
            return
        if isinstance(index, slice) and rows.shape[0] == hidden.shape[0]:  # these are all N tokens
            self.hidden = grad_rows.to(hidden.dtype)
            return
        if self.hidden is None:
            self.hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
        if isinstance(index, slice):
            self.hidden[index] = grad_rows
        else:
            reference.write_rows(grad_rows, index, self.hidden)

    def _add_weight(self, out: Tensor, tile: Tensor, rows: Tensor) -> None:
        """out (v, H) += tile.T @ rows, for dL/dlogits (n, v) and hidden states (n, H)."""
        if out.dtype == torch.float32:
            (gemm.write if self.empty else gemm.accumulate)(out, tile.T, rows)
        elif out.is_cuda and out.dtype == rows.dtype:
            # The product adds `out` in its float32 accumulators, and rounds the sum once.
            torch.mm(tile.T, rows, out=out) if self.empty else out.addmm_(tile.T, rows)
        else:
            product = gemm.matmul(tile.T, rows)
            out.copy_(product if self.empty else product + out)

    def finish(self) -> Gradients:
        """The sums in the dtypes of hidden, weight and bias."""
        head, hidden, weight, bias = self.head, self.hidden, self.weight, self.bias
        if hidden is None and self.needs[0]:
            hidden = torch.zeros_like(head.hidden, memory_format=torch.contiguous_format)
        if weight is not None and self.empty:
            weight.zero_()
        return Gradients(
            hidden,
            None if weight is None else weight.to(head.weight.dtype),
            None if bias is None or head.bias is None else bias.to(head.bias.dtype),
        )


class WithGradients(torch.autograd.Function):
    """(value (), hidden, weight, bias) -> value. The gradients are already known, up to the factor from above."""

    @staticmethod
    def forward(ctx, value, hidden, weight, bias, gradients):
        ctx.set_materialize_grads(False)
        ctx.shape = hidden.shape
        # Gradients are no saved tensors: the backward scales them in place, which a saved-tensor hook would see.
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx, factor):
        refuse_second_derivative()
        assert ctx.saved_tensors == ()  # asked for because PyTorch raises here in a second backward without a graph
        factor, gradients = factor.float(), ctx.gradients
        # With retain_graph the backward may run again, so the gradients stay. Otherwise we give them away without a
        # reference: autograd's accumulation copies a gradient that anything else refers to.
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        if not keeps_graph:
            ctx.gradients = None

        def scaled(gradient: Tensor | None) -> Tensor | None:
            if gradient is None:
                return None
            # `gradient * factor` would round the factor to the gradient's dtype first.
            result = gradient.clone() if keeps_graph else gradient
            find_pair_kernels(gradient.device).scale_(result, factor)
            return result

        hidden, weight, bias = map(scaled, gradients)
        return None, None if hidden is None else hidden.view(ctx.shape), weight, bias, None
