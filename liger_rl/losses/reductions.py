"""Reductions: a batch -> one weight per token, so that the loss is sum_t weight_t * token_loss_t.

A reduction is a callable `(batch) -> weights` on an `AlignedBatch`, 0 at masked tokens. m is the mask, 1 at tokens that
count. It is cast first, because a bool divided by a number is of torch's default dtype. Micro-batches that a caller
gives to `ppo_loss_fn` add up to the whole batch if they share its divisors, num_sequences or num_items_in_batch. A
reduction may have

    check(batch): raises ValueError for a batch that lacks a column or divisor. `batch.check_sequences()` raises for
        packed tokens that do not say which sequence they are of.
    divisor_name: the divisor that it reads, "num_sequences" or "num_items_in_batch".
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torch import Tensor

from liger_rl.losses.batch import AlignedBatch
from liger_rl.losses.options import Options, check_whole_number

Reduction = Callable[[AlignedBatch], Tensor]


class _OverSequences:
    """A reduction that divides by the number of sequences."""

    divisor_name: ClassVar[str] = "num_sequences"

    def check(self, batch: AlignedBatch) -> None:
        self.sequences(batch)

    def sequences(self, batch: AlignedBatch) -> float | Tensor:
        if batch.num_sequences is None:
            raise ValueError(
                "num_sequences or segments must be given for packed (N,) tokens, because this reduction divides by "
                "the number of sequences; got neither"
            )
        return divisor(batch.num_sequences)


@dataclass(frozen=True, kw_only=True)
class SequenceMean(_OverSequences):
    """m / (tokens of the sequence * num_sequences): the mean of the sequences' token means. arXiv:2402.03300."""

    def check(self, batch: AlignedBatch) -> None:
        batch.check_sequences()
        super().check(batch)

    def __call__(self, batch: AlignedBatch) -> Tensor:
        return batch.mask.to(batch.advantages.dtype) / (batch.sequence_length() * self.sequences(batch))


@dataclass(frozen=True, kw_only=True)
class SequenceSum(_OverSequences):
    """m / num_sequences: the mean of the sequences' token sums. Longer sequences weigh more. arXiv:2602.05261."""

    def __call__(self, batch: AlignedBatch) -> Tensor:
        return batch.mask.to(batch.advantages.dtype) / self.sequences(batch)


@dataclass(frozen=True, kw_only=True)
class TokenMean:
    """m / sum m: the mean over this batch's tokens; TRL's "bnpo"."""

    def __call__(self, batch: AlignedBatch) -> Tensor:
        return batch.mask.to(batch.advantages.dtype) / batch.mask.sum().clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class GlobalTokenMean:
    """m world_size / num_items_in_batch: the mean over the tokens of the whole optimiser step. arXiv:2503.14476.

    Without `num_items_in_batch` in the batch, it is `TokenMean`.
    """

    world_size: int = 1  # number of ranks whose gradients are averaged afterwards, as data parallelism does
    divisor_name: ClassVar[str] = "num_items_in_batch"

    def __post_init__(self) -> None:
        check_whole_number("world_size", self.world_size, least=1)

    def __call__(self, batch: AlignedBatch) -> Tensor:
        weights = batch.mask.to(batch.advantages.dtype)
        if batch.num_items_in_batch is None:
            return weights / batch.mask.sum().clamp(min=1)
        # The weights come first: an integer tensor divided by a number is of torch's default dtype.
        return weights * self.world_size / divisor(batch.num_items_in_batch)


@dataclass(frozen=True, kw_only=True)
class FixedLengthMean(_OverSequences, Options):
    """m / (num_sequences * max_completion_length): a token weighs the same in every batch. arXiv:2503.20783."""

    max_completion_length: Annotated[float, "(0, inf)"]  # the most tokens of a completion; it has no default

    def __call__(self, batch: AlignedBatch) -> Tensor:
        return batch.mask.to(batch.advantages.dtype) / self.max_completion_length / self.sequences(batch)


@dataclass(frozen=True, kw_only=True)
class TokenSum:
    """m: the sum over tokens, for callers with their own divisor."""

    def __call__(self, batch: AlignedBatch) -> Tensor:
        return batch.mask.to(batch.advantages.dtype)


def check_divisors(reduction: Any, **given: Any) -> None:
    """Raises ValueError for a divisor that is given, but that a reduction of this package does not read."""
    for name, value in given.items():
        known = type(reduction).__module__ == __name__
        if value is not None and known and name != getattr(reduction, "divisor_name", None):
            raise ValueError(f"{name} must be None with the reduction {reduction!r}, which does not read it")


def divisor(count: int | float | Tensor) -> float | Tensor:
    """The count, at least 1."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
