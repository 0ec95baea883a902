"""A low-rank term of the head's logits, LoRA's, without the sum of the two weights."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_rl.kernels import gemm

ROWS_AT_ONCE = 4096  # of the hidden states, in another dtype or gathered


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """A low-rank term of the head, LoRA's (arXiv:2106.09685): logits += scaling * (hidden @ a.T) @ b.T.

    Attributes:
        a: (r, H) and b: (V, r), both with gradient if they want one; float32, bfloat16 or float16, whatever the head's
            dtype is. Like the head's logits, the term stays float32 from its products' accumulators on. The product
            with `a` runs in the wider of the two dtypes, or in autocast's; the factors are rounded to the head's for
            the products of their gradients.
        scaling: factor on the term (LoRA: alpha / r).
        hidden: shaped like the call's hidden, what `a` is applied to in its place (after a dropout, say).
    """

    a: Tensor
    b: Tensor
    scaling: float = 1.0
    hidden: Tensor | None = None

    def inputs(self, hidden: Tensor, index: Tensor | None) -> Tensor:
        """(..., H) -> (N, r) float32, scaling * (hidden @ a.T), 0 for the tokens that the index leaves out."""
        given = hidden if self.hidden is None else self.hidden
        kind = given.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        else:
            dtype = torch.promote_types(given.dtype, self.a.dtype)
        return _Inputs.apply(given.reshape(-1, given.shape[-1]), self.a, index, dtype) * self.scaling


class _Inputs(torch.autograd.Function):
    """(hidden (N, H), a (r, H)) -> (N, r) float32; the rows are gathered and converted again in the backward, a few at
    a time, so that no copy of the hidden states is kept."""

    @staticmethod
    def forward(ctx, hidden, a, index, dtype):
        ctx.dtype = dtype
        ctx.save_for_backward(hidden, a, index)
        out = torch.zeros(hidden.shape[0], a.shape[0], dtype=torch.float32, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            factor = a.to(dtype)
            for rows in _parts(hidden, index):
                out[rows] = gemm.matmul(hidden[rows].to(dtype), factor.T)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        hidden, a, index = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        total = torch.zeros_like(a, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        with torch.autocast(hidden.device.type, enabled=False):
            factor = a.to(ctx.dtype)
            for rows in _parts(hidden, index):
                part = grad[rows].to(ctx.dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] = gemm.matmul(part, factor).to(hidden.dtype)
                if total is not None:
                    gemm.accumulate(total, part.T, hidden[rows].to(ctx.dtype))
        return grad_hidden, None if total is None else total.to(a.dtype), None, None


def _parts(hidden: Tensor, index: Tensor | None) -> list:
    """The rows that count, a few at a time: slices, or pieces of the index."""
    count = hidden.shape[0] if index is None else index.shape[0]
    pieces = [slice(start, min(start + ROWS_AT_ONCE, count)) for start in range(0, count, ROWS_AT_ONCE)]
    return pieces if index is None else [index[piece] for piece in pieces]
