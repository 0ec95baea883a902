"""Which tokens count: neither masked nor negative, and inside the vocabulary."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.host_answer import HostAnswer
from liger_rl.kernels import selection_for


class LiveTokens(NamedTuple):
    """The tokens that count."""

    positions: Tensor  # (n,) flat, ascending
    total: int  # N
    counts: list[int]  # what else was asked for

    @property
    def selection(self) -> Tensor | None:
        """Their positions, or None where all tokens count."""
        return self.positions if self.positions.numel() < self.total else None


def counted_tokens(flat_targets: Tensor, mask: Tensor | None) -> Tensor:
    """(N,) bool: tokens that are neither masked nor negative."""
    live = flat_targets >= 0
    return live if mask is None else live & (mask.reshape(-1) != 0)


def within_vocabulary(flat_targets: Tensor, mask: Tensor | None, vocab: int) -> Tensor:
    """(N,) bool: tokens that are neither masked nor negative nor outside the vocabulary, without a host sync."""
    return counted_tokens(flat_targets, mask) & (flat_targets < vocab)


def live_tokens(
    flat_targets: Tensor, mask: Tensor | None, vocab: int, source: str, counts: Tensor | None = None
) -> LiveTokens:
    """Tokens that are neither masked nor negative, checked against the vocabulary: the forward's one host sync.

    It reads `counts`, integers (k,), too.
    """
    mask = None if mask is None else mask.reshape(-1)
    positions, numbers = selection_for(flat_targets.device).select(flat_targets, mask, vocab)
    count = (numbers if counts is None else torch.cat([numbers, counts])).tolist()
    if count[1] > 0:
        raise _outside(vocab, source, count[1], count[2])
    return LiveTokens(positions[: count[0]], flat_targets.numel(), count[3:])


def ask_vocabulary(
    targets: Tensor, mask: Tensor | None, vocab: int, source: str, *, fixed_shape: bool
) -> Callable[[], None]:
    """Ask the device whether the targets that count are ids of the vocabulary; the call of what is returned waits for
    the answer, and raises if they are not. What the device is given to do in between hides the wait. With `fixed_shape`
    nothing is asked, and the call does nothing."""
    if fixed_shape:
        return lambda: None
    flat_mask = None if mask is None else mask.reshape(-1)
    _, numbers = selection_for(targets.device).select(targets.reshape(-1), flat_mask, vocab)
    answer = HostAnswer(numbers)

    def wait() -> None:
        _, outside, largest = answer.wait()
        if outside > 0:
            raise _outside(vocab, source, outside, largest)

    return wait


def _outside(vocab: int, source: str, count: int, largest: int) -> ValueError:
    return ValueError(
        f"targets must be token ids in [0, {vocab}) from {source}, or negative, or masked; "
        f"{count} of them are not, the largest is {largest}"
    )
