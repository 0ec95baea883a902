"""Which tokens count: neither masked nor negative, and inside the vocabulary."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_rl.host_answer import HostAnswer
from liger_rl.kernels import selection_for

# Options of a custom operator that waits for the device. No CUDA graph can capture it, and by this tag torch.compile
# leaves it out of those it makes. Torch 2.8 has no such tag.
WAITING_OPERATOR: dict[str, Any] = (
    {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}
)


class LiveTokens(NamedTuple):
    """The tokens that count."""

    positions: Tensor  # (n,) flat, ascending
    total: int  # N
    counts: list[int]  # what else was asked for

    @property
    def selection(self) -> Tensor | None:
        """Their positions, or None where all tokens count."""
        return self.positions if self.positions.numel() < self.total else None


def counted_tokens(targets: Tensor, mask: Tensor | None, wanted: Tensor | None = None) -> Tensor:
    """bool, shaped like targets: tokens that are neither masked nor negative, and wanted, if only some of them are."""
    live = targets >= 0
    for column in (mask, wanted):
        live = live if column is None else torch.logical_and(live, column)
    return live


def live_tokens(
    targets: Tensor,  # (B, T) or (N,)
    mask: Tensor | None,  # shaped like targets
    vocab: int,
    source: str,
    *,
    wanted: Tensor | None = None,  # shaped like targets or (B, 1)
    counts: Sequence[Tensor] = (),  # integers (k,) each, which are read in the same sync
) -> Callable[[], LiveTokens]:
    """Tokens that are neither masked nor negative, and wanted, if only some of them are.

    The device is asked at once; the call of what is returned is the forward's one host sync, and raises ValueError
    where a token that is neither masked nor negative, wanted or not, is outside the vocabulary. What the host does in
    between costs nothing.
    """
    positions, numbers = selection_for(targets.device).select(targets, mask, vocab, wanted)
    asked = torch.cat([numbers, *counts]) if counts else numbers

    def wait() -> LiveTokens:
        # No HostAnswer, which takes the host longer: little if anything is launched in between that this waits for.
        n, outside, largest, *others = asked.tolist()
        if outside > 0:
            raise _outside(vocab, source, outside, largest)
        return LiveTokens(positions[:n], targets.numel(), others)

    return wait


def ask_vocabulary(
    targets: Tensor, mask: Tensor | None, vocab: int, source: str, *, fixed_shape: bool
) -> Callable[[], None]:
    """Ask the device whether the targets that count are ids of the vocabulary; the call of what is returned waits for
    the answer, and raises if they are not. What the device is given to do in between hides the wait. With `fixed_shape`
    nothing is asked, and the call does nothing."""
    if fixed_shape:
        return lambda: None
    _, numbers = selection_for(targets.device).select(targets, mask, vocab)
    answer = HostAnswer(numbers)

    def wait() -> None:
        _, outside, largest = answer.wait().tolist()
        if outside > 0:
            raise _outside(vocab, source, outside, largest)

    return wait


def _outside(vocab: int, source: str, count: int, largest: int) -> ValueError:
    return ValueError(
        f"targets must be token ids in [0, {vocab}) from {source}, or negative, or masked; "
        f"{count} of them are not, the largest is {largest}"
    )
