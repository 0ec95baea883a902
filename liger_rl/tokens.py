"""Which tokens count: neither masked nor negative, and inside the vocabulary."""

from typing import NamedTuple

import torch
from torch import Tensor


class LiveTokens(NamedTuple):
    """The tokens that count."""

    positions: Tensor  # (n,) flat, ascending
    dead: Tensor  # (N - n,) the others
    counts: list[int]  # what else was asked for

    @property
    def selection(self) -> Tensor | None:
        """Their positions, or None where all tokens count."""
        return self.positions if self.dead.numel() else None


def all_tokens(flat_targets: Tensor) -> LiveTokens:
    positions = torch.arange(flat_targets.numel(), device=flat_targets.device)
    return LiveTokens(positions, positions[:0], [])


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
    live = counted_tokens(flat_targets, mask)
    outside = live & (flat_targets >= vocab)
    largest = torch.where(outside, flat_targets, -1)
    numbers = torch.stack([live.sum(), outside.sum(), largest.max() if largest.numel() else live.sum()])
    count = (numbers if counts is None else torch.cat([numbers, counts])).tolist()
    if count[1] > 0:
        raise ValueError(
            f"targets must be token ids in [0, {vocab}) from {source}, or negative, or masked; "
            f"{count[1]} of them are not, the largest is {count[2]}"
        )
    # A stable sort puts the live positions first and, unlike nonzero, need not ask the device for their number again.
    order = torch.argsort(live.logical_not(), stable=True)
    return LiveTokens(order[: count[0]], order[count[0] :], count[3:])
