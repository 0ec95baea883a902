"""Which tokens count: neither masked nor negative, and inside the vocabulary."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_rl.head.host_answer import HostAnswer
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
    targets_name: str = "targets",  # the caller's
) -> Callable[[], LiveTokens]:
    """Tokens that are neither masked nor negative, and wanted, if only some of them are.

    The device is asked at once; the call of what is returned is the forward's one host sync, and raises ValueError
    where a token that is neither masked nor negative, wanted or not, is outside the vocabulary, and where the mask has
    other values than 0 and 1. What the host does in between costs nothing.
    """
    positions, numbers = selection_for(targets.device).select(targets, mask, vocab, wanted)
    asked = torch.cat([numbers, *counts]) if counts else numbers

    def wait() -> LiveTokens:
        # No HostAnswer, which takes the host longer: little if anything is launched in between that this waits for.
        n, outside, largest, improper, *others = asked.tolist()
        _check_answer(outside, largest, improper, vocab, source, targets_name)
        return LiveTokens(positions[:n], targets.numel(), others)

    return wait


def ask_vocabulary(
    targets: Tensor,
    mask: Tensor | None,
    vocab: int,
    source: str,
    *,
    fixed_shape: bool,
    targets_name: str = "targets",
) -> Callable[[], None]:
    """Ask the device whether the targets that count are ids of the vocabulary, and the mask has only 0 and 1.

    The call of what is returned waits for the answer, and raises ValueError if it is no. What the device is given to do
    in between hides the wait. With `fixed_shape` nothing is asked, and the call does nothing.
    """
    if fixed_shape:
        return lambda: None
    _, numbers = selection_for(targets.device).select(targets, mask, vocab)
    answer = HostAnswer(numbers)

    def wait() -> None:
        _, outside, largest, improper = answer.wait().tolist()
        _check_answer(outside, largest, improper, vocab, source, targets_name)

    return wait


def _check_answer(outside: int, largest: int, improper: int, vocab: int, source: str, targets_name: str) -> None:
    if improper > 0:
        raise ValueError(f"mask must be 0 or 1 at each token; {improper} of its values are neither")
    if outside > 0:
        raise ValueError(
            f"{targets_name} must be token ids in [0, {vocab}) from {source}, or negative, or masked; "
            f"{outside} of them are not, the largest is {largest}"
        )
