"""Which sequence each token of a packed batch belongs to, and sums over each sequence's tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

AllReduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Which sequence each token of a packed batch belongs to.

    Attributes:
        index: (N,) integers in [0, count); one outside belongs to none, and its token has to be masked.
        count: number of sequences, the same on every rank; some may have no token here, or nowhere.
        all_reduce: sums a (count,) tensor over the ranks that hold parts of the same sequences; None is one rank.
    """

    index: Tensor
    count: int
    all_reduce: AllReduce | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.index, Tensor) or self.index.dim() != 1 or self.index.is_floating_point():
            raise TypeError("segments.index must be a tensor of integers, (N,)")
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 0:
            raise ValueError(f"segments.count must be an int of at least 0, got {self.count!r}")

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, num_tokens: int, *, all_reduce: AllReduce | None = None) -> "Segments":
        """From cumulative lengths (S + 1,), as flash-attention takes them; tokens past the last belong to none."""
        if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
            raise ValueError("cu_seqlens must be (S + 1,) cumulative lengths that start at 0")
        positions = torch.arange(num_tokens, device=cu_seqlens.device)
        index = torch.searchsorted(cu_seqlens[1:].contiguous(), positions.to(cu_seqlens.dtype), right=True)
        return cls(index=index, count=cu_seqlens.numel() - 1, all_reduce=all_reduce)


def segment_sum(values: Tensor, segments: Segments) -> Tensor:
    """(N,) -> (N,): each token gets the sum over its segment, on all ranks; differentiable."""
    return _SegmentSum.apply(values, segments)


class _SegmentSum(torch.autograd.Function):
    """(N,) -> (N,): each token gets its segment's sum. A symmetric operator, so it is its own gradient."""

    @staticmethod
    def forward(ctx, values: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        return _sums(values, segments)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return segment_sum(grad, ctx.segments), None


def _sums(values: Tensor, segments: Segments) -> Tensor:
    index = segments.index.long()
    index = torch.where(index < 0, segments.count, index).clamp(max=segments.count)
    order = torch.argsort(index, stable=True)
    lengths = torch.zeros(segments.count + 1, dtype=torch.long, device=index.device)
    lengths.scatter_add_(0, index, torch.ones_like(index))
    # Sorted runs and not scattered adds: float adds in an order that threads decide would differ from run to run.
    # In float64, because thousands of tokens go into one number.
    totals = torch.segment_reduce(values.double()[order], "sum", lengths=lengths, initial=0, unsafe=True)
    if segments.all_reduce is not None:
        totals = torch.cat([segments.all_reduce(totals[:-1]), totals[-1:]])
    return totals[index].to(values.dtype)
