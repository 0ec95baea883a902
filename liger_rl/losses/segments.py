"""Which sequence each token of a packed batch belongs to, and sums over each sequence's tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from liger_rl.losses.options import check_callable, check_whole_number

AllReduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Which sequence each token of a packed batch belongs to."""

    index: Tensor  # (N,) integers in [0, count). A token outside of them belongs to no sequence, and must be masked
    count: int  # number of sequences, the same on every rank. A sequence may have no token
    all_reduce: AllReduce | None = None  # sums (count,) over the ranks that hold parts of the same sequences

    def __post_init__(self) -> None:
        index = self.index
        is_vector = isinstance(index, Tensor) and index.layout == torch.strided and index.dim() == 1
        if not is_vector or index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
            got = f"{tuple(index.shape)} {index.dtype}" if isinstance(index, Tensor) else type(index).__name__
            raise TypeError(f"segments.index must be a dense tensor of integers, (N,), got {got}")
        check_whole_number("segments.count", self.count, least=0)
        if self.all_reduce is not None:
            check_callable("segments.all_reduce", self.all_reduce)


def segment_sum(values: Tensor, segments: Segments) -> Tensor:
    """(N,) -> (N,): each token gets the sum over its segment, on all ranks. Differentiable."""
    return _SegmentSum.apply(values, segments)


class _SegmentSum(torch.autograd.Function):
    """`segment_sum`. The operator is symmetric, so it is its own gradient."""

    @staticmethod
    def forward(ctx, values: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        ctx.save_for_backward(segments.index)
        index = segments.index.long()
        index = torch.where(index < 0, segments.count, index).clamp(max=segments.count)
        order = torch.argsort(index, stable=True)
        lengths = torch.zeros(segments.count + 1, dtype=torch.long, device=index.device)
        lengths.scatter_add_(0, index, torch.ones_like(index))
        # Sums of sorted tokens are the same in every run; the order of scattered adds depends on threads. We sum in
        # float64, because a segment may have thousands of tokens.
        totals = torch.segment_reduce(values.double()[order], "sum", lengths=lengths, initial=0, unsafe=True)
        if segments.all_reduce is not None:
            totals = torch.cat([segments.all_reduce(totals[:-1]), totals[-1:]])
        return totals[index].to(values.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return segment_sum(grad, replace(ctx.segments, index=index)), None
