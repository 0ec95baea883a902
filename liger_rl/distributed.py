"""Many ranks: a head whose vocabulary is sharded, and sums over the ranks that share a batch.

A function that is a collective says so.
Every rank of the group enters it the same number of times, whatever tensors the rank has.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["VocabParallel", "merge_over", "sum_over"]

# A row index after the last row of any shard. No kernel's last tile reaches it.
BEYOND = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class VocabParallel:
    """This rank's place in an lm_head whose vocabulary is sharded over a group of ranks.

    The rank's weight and bias are the rows of the token ids from `vocab_start` on. Shards may differ in size.
    Everything else of a call (hidden, targets, mask, options), and the loss, must be the same on every rank of the
    group. Targets are ids of the whole vocabulary. Results and the gradient of hidden are the same on every rank.
    docs/distributed.md lists the collectives.

    The first call with a weight is one more collective, in which the ranks tell each other their rows,
    so give the same weight object in each call. Each rank checks its own arguments, and raises by itself.

    With sum_hidden_grad the gradient of hidden is summed over the group. Without it, it is this rank's part, for a
    caller whose own backward adds the parts, such as Megatron's sequence parallelism.
    """

    group: "dist.ProcessGroup"  # the ranks that hold the shards. Ranks with other tokens are not in it
    vocab_start: int  # token id of this rank's first row, >= 0
    sum_hidden_grad: bool = True

    def __post_init__(self) -> None:
        if not dist.is_available() or not isinstance(self.group, dist.ProcessGroup):
            raise TypeError(f"vocab_parallel.group must be a ProcessGroup, got {type(self.group).__name__}")
        if isinstance(self.vocab_start, bool) or not isinstance(self.vocab_start, int) or self.vocab_start < 0:
            raise ValueError(f"vocab_parallel.vocab_start must be an int of at least 0, got {self.vocab_start!r}")
        if not isinstance(self.sum_hidden_grad, bool):
            raise TypeError(f"vocab_parallel.sum_hidden_grad must be a bool, got {type(self.sum_hidden_grad).__name__}")

    def shard_of(self, weight: Tensor) -> "VocabShard":
        """`weight` (rows, H) as a checked shard. The first call with a weight is a collective: its sum of rows is V."""
        shards = _SHARDS.setdefault(weight, {})
        if self not in shards:
            rows = weight.shape[0]
            ranks = gathered_objects((self.vocab_start, rows), self.group, weight)
            shards[self] = VocabShard(self, rows, _count_vocab(ranks))
        return shards[self]


# Weight -> {its place: its checked shard}.
_SHARDS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def share_shards(local: Tensor, dtensor: Tensor) -> None:
    """Let `local`, a new tensor in each call, have the checked shards of the DTensor that it is made from."""
    _SHARDS[local] = _SHARDS.setdefault(dtensor, {})


def gathered_objects(value: object, group: "dist.ProcessGroup", like: object) -> list:
    """A collective: the values of the ranks, in their order. `like` is a tensor on this rank's device, if there is one.

    Objects are gathered through the current device.
    """
    values: list = [None] * dist.get_world_size(group)
    with torch.cuda.device(like.device) if isinstance(like, Tensor) and like.is_cuda else nullcontext():
        dist.all_gather_object(values, value, group)
    return values


def _count_vocab(ranks: list[tuple[int, int]]) -> int:
    """(first id, rows) of each rank -> V of all shards together. Raises if shards do not fit."""
    vocab = 0
    for start, rows in sorted(ranks):
        if start != vocab:
            description = ", ".join(f"[{start}, {start + rows}) on rank {r}" for r, (start, rows) in enumerate(ranks))
            raise ValueError(f"the shards of weight must cover the vocabulary and not overlap, got ids {description}")
        vocab = start + rows
    return vocab


@dataclass(frozen=True)
class VocabShard:
    """A rank's part of the vocabulary, checked against the other ranks' parts."""

    place: VocabParallel
    rows: int
    vocab: int  # V, entries of all shards

    def local(self, targets: Tensor) -> Tensor:
        """Token ids -> rows of this shard; < 0 for an id before the shard, BEYOND for an id after it."""
        rows = targets - self.place.vocab_start
        return torch.where(rows < self.rows, rows, BEYOND)

    def maximum(self, values: Tensor) -> Tensor:
        """A collective: the maximum over the ranks, in place."""
        dist.all_reduce(values, dist.ReduceOp.MAX, self.place.group)
        return values

    def total(self, values: Tensor) -> Tensor:
        """A collective: the sum over the ranks, in place."""
        dist.all_reduce(values, dist.ReduceOp.SUM, self.place.group)
        return values

    def pending_sum(self, grad_hidden: Tensor | None) -> "PendingSum":
        """Sums the gradient of hidden, which every rank has whole. Without sum_hidden_grad it sums nothing."""
        return PendingSum(self.place.group, grad_hidden if self.place.sum_hidden_grad else None)


class PendingSum:
    """Sums a tensor over ranks in place, one collective, while the device computes something else. None: no sum."""

    def __init__(self, group: "dist.ProcessGroup", tensor: Tensor | None) -> None:
        self.group, self.tensor = group, tensor
        self.work: Any = None

    def start(self) -> None:
        """Start the collective. Until `wait` returns, nothing may read or write the tensor."""
        if self.tensor is not None:
            self.work = dist.all_reduce(self.tensor, group=self.group, async_op=True)

    def wait(self) -> None:
        """Wait for the collective, and start it first if `start` was not called."""
        if self.work is None:
            self.start()
        if self.work is not None:
            self.work.wait()


def sum_over(group: "dist.ProcessGroup") -> Callable[[Tensor], Tensor]:
    """-> a collective: values -> their sum over the ranks, a new tensor.

    `Segments.all_reduce` uses it for values and gradients. It also sums the counts of a whole step.
    """
    return lambda values: _reduced(values, "sum", group)


def merge_over(group: "dist.ProcessGroup") -> Callable[[Tensor, str], Tensor]:
    """-> a collective: (values, "sum", "max" or "min") -> values merged over the ranks. For `reduce_metrics`."""
    return lambda values, kind: _reduced(values, kind, group)


def _reduced(values: Tensor, kind: str, group: "dist.ProcessGroup") -> Tensor:
    operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[kind]
    values = values.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(values, operation, group)
    return values
