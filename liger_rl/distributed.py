"""Many ranks: a head whose vocabulary is sharded, and sums over the ranks that share a batch.

The only module that speaks to torch.distributed. Every function here that is a collective says so, and is entered by
every rank of its group the same number of times, whatever the rank holds.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# A row past every shard's last: before it lies the whole shard, and no kernel's last tile reaches so far.
BEYOND = torch.iinfo(torch.int32).max

Facts = Mapping[str, object]


@dataclass(frozen=True)
class VocabParallel:
    """This rank's place in an lm_head whose vocabulary is sharded over a group of ranks.

    The rank's weight, bias and low-rank `b` are the rows of the ids from `vocab_start` on; shards may differ in size.
    Everything else of a call (hidden, targets, mask, a low-rank term's `a`, options) must be the same on every rank of
    the group, and so must be what each rank's loss makes of the results, because which tokens enter the backward is
    decided from dL/dlogp on each rank by itself. Results and the gradient of hidden come out the same on every rank.

    Attributes:
        group: the ranks that hold the shards, not those that hold other tokens.
        vocab_start: id of the first word of this rank's rows, >= 0.
        sum_hidden_grad: the gradient of hidden (and of a low-rank term's `a`) is the whole one, summed over the group;
            False leaves it this rank's part of that sum, for a caller whose own backward adds the parts up, as that of
            Megatron's gather from sequence-parallel ranks does.
    """

    group: "dist.ProcessGroup"
    vocab_start: int
    sum_hidden_grad: bool = True

    def __post_init__(self) -> None:
        if not dist.is_available() or not isinstance(self.group, dist.ProcessGroup):
            raise TypeError(f"vocab_parallel.group must be a ProcessGroup, got {type(self.group).__name__}")
        if isinstance(self.vocab_start, bool) or not isinstance(self.vocab_start, int) or self.vocab_start < 0:
            raise ValueError(f"vocab_parallel.vocab_start must be an int of at least 0, got {self.vocab_start!r}")
        if not isinstance(self.sum_hidden_grad, bool):
            raise TypeError(f"vocab_parallel.sum_hidden_grad must be a bool, got {type(self.sum_hidden_grad).__name__}")

    def shard_of(self, weight: Tensor, facts: Callable[[], Facts], *, known_by: Tensor) -> "VocabShard":
        """The shard that `weight` is, its fit with the others checked at the first call with this weight: a collective.

        Args:
            weight: (rows, H).
            known_by: what stays the same object from call to call, the weight or what it was cut from.
            facts: what has to be the same on every rank, by name; called at the first call alone. What it raises is
                raised on every rank.

        Raises:
            ValueError, TypeError: the same on every rank of the group: shards that overlap or leave ids out, facts that
                differ.
        """
        known = _SHARDS.setdefault(known_by, {}) if isinstance(known_by, Tensor) else {}
        if self not in known:
            described: Facts = {}
            rows, problem = 0, None
            try:
                described = {**facts(), "vocab_parallel.sum_hidden_grad": self.sum_hidden_grad}
                rows = weight.shape[0]
            except (TypeError, ValueError) as error:
                problem = error
            ranks: list = [None] * dist.get_world_size(self.group)
            with _current(weight):
                dist.all_gather_object(ranks, (problem, described, self.vocab_start, rows), self.group)
            known[self] = VocabShard(self, rows, _checked_vocab(ranks))
        return known[self]

    @contextmanager
    def shared_errors(self, weight: Tensor) -> Iterator[None]:
        """What is raised within is raised on every rank, where the others are about to compare notes in `shard_of`.

        `weight` is what their `shard_of` knows it by.
        """
        try:
            yield
        except (TypeError, ValueError) as error:
            problem = error

            def facts() -> Facts:
                raise problem

            self.shard_of(weight, facts, known_by=weight)
            raise


# Weight -> its shards by their place: what has been checked is not checked again.
_SHARDS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _current(tensor: object):
    """Objects are gathered through the current device, which need not be the tensors'."""
    return torch.cuda.device(tensor.device) if isinstance(tensor, Tensor) and tensor.is_cuda else nullcontext()


def _checked_vocab(ranks: list[tuple[Exception | None, Facts, int, int]]) -> int:
    """Words of all shards together."""
    for rank, (problem, *_) in enumerate(ranks):
        if problem is not None:
            raise type(problem)(f"{problem} (rank {rank} of vocab_parallel.group)")
    for name in ranks[0][1]:
        values = [facts[name] for _, facts, *_ in ranks]
        if any(value != values[0] for value in values):
            found = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise ValueError(f"{name} must be the same on every rank of vocab_parallel.group, got {found}")
    vocab = 0
    for start, rows in sorted((start, rows) for _, _, start, rows in ranks):
        if start != vocab:
            found = ", ".join(f"[{start}, {start + rows}) on rank {r}" for r, (*_, start, rows) in enumerate(ranks))
            raise ValueError(f"the shards of weight must cover the vocabulary and not overlap, got ids {found}")
        vocab = start + rows
    return vocab


@dataclass(frozen=True)
class VocabShard:
    """A rank's part of the vocabulary, known to fit the others."""

    place: VocabParallel
    rows: int
    vocab: int  # of all shards together

    def local(self, targets: Tensor) -> Tensor:
        """Ids of the vocabulary -> rows of this shard; < 0 for a word before it, BEYOND for one after it."""
        rows = targets - self.place.vocab_start
        return torch.where(rows < self.rows, rows, BEYOND)

    def maximum(self, values: Tensor) -> Tensor:
        """A collective, in place."""
        dist.all_reduce(values, dist.ReduceOp.MAX, self.place.group)
        return values

    def total(self, values: Tensor) -> Tensor:
        """A collective, in place."""
        dist.all_reduce(values, dist.ReduceOp.SUM, self.place.group)
        return values

    def pending_sum(self, *inputs: Tensor | None) -> "PendingSum":
        """Of the gradients of what every rank has the whole of."""
        wanted = inputs if self.place.sum_hidden_grad else ()
        return PendingSum(self.place.group, [tensor for tensor in wanted if tensor is not None])


class PendingSum:
    """Tensors that become their sums over ranks while something else is computed: one collective for each."""

    def __init__(self, group: "dist.ProcessGroup", tensors: list[Tensor]) -> None:
        self.group, self.tensors = group, tensors
        self.works: list | None = None

    def start(self) -> None:
        """The tensors must not be touched from here to the end of `wait`."""
        self.works = [dist.all_reduce(tensor, group=self.group, async_op=True) for tensor in self.tensors]

    def wait(self) -> None:
        """Starts the sums too, where nothing was there to be computed beside them."""
        if self.works is None:
            self.start()
        for work in self.works or ():
            work.wait()


def sum_over(group: "dist.ProcessGroup") -> Callable[[Tensor], Tensor]:
    """-> a collective: values -> their sum over the ranks, a new tensor. For `Segments.all_reduce` (the gradient of a
    segment's sum is one too, and is made by the same function) and for counts of a whole step."""
    return lambda values: _reduced(values, "sum", group)


def merge_over(group: "dist.ProcessGroup") -> Callable[[Tensor, str], Tensor]:
    """-> a collective: (values, "sum", "max" or "min") -> values merged over the ranks. For `reduce_metrics`."""
    return lambda values, kind: _reduced(values, kind, group)


def _reduced(values: Tensor, kind: str, group: "dist.ProcessGroup") -> Tensor:
    operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[kind]
    values = values.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(values, operation, group)
    return values
