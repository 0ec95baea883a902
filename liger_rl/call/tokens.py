"""Which tokens count: neither masked nor negative, and inside the vocabulary."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_rl.call.host_answer import HostAnswer
from liger_rl.kernels import for_device

# Options of a custom operator that waits for the device. No CUDA graph can capture it, and by this tag torch.compile
# leaves it out of those it makes. Torch 2.8 has no such tag.
WAITING_OPERATOR: dict[str, Any] = (
    {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}
)


@dataclass(frozen=True)
class TokenSelection:
    """Which of `total` tokens count: all of them, those of an index, or those of a mask.

    An index makes products smaller. A mask leaves every token in its place, as a row of zeros where it does not count:
    that costs products, but no host has to know how many tokens it keeps.
    """

    total: int  # N
    index: Tensor | None = None  # (n,) int64
    mask: Tensor | None = None  # (N,) bool; never beside an index

    @property
    def count(self) -> int:
        """Rows that `gather` gives."""
        return self.total if self.index is None else self.index.numel()

    def gather(self, values: Tensor) -> Tensor:
        """(N, ...) -> (count, ...)."""
        if self.mask is not None:
            # Not a product with the mask: 0 * NaN is NaN, and would stay it in a product with a gradient of 0.
            return torch.where(self.mask.view(-1, *[1] * (values.dim() - 1)), values, 0)
        return values if self.index is None else values[self.index]

    def spread(self, values: Tensor, shape: torch.Size) -> Tensor:
        """(count, ...) -> `shape` of N tokens, 0 at tokens that do not count."""
        beyond = values.shape[1:]
        if self.mask is not None:
            values = values.masked_fill(~self.mask.view(-1, *[1] * len(beyond)), 0)
        elif self.index is not None:
            values = values.new_zeros(self.total, *beyond).index_copy(0, self.index, values)
        return values.view(*shape, *beyond)

    def restricted(self, wanted: Tensor) -> "TokenSelection":
        """Those of a mask that are among `wanted` (N,) too."""
        assert self.mask is not None
        return TokenSelection(self.total, mask=self.mask & wanted)

    def among(self, picked: Tensor) -> "TokenSelection":
        """Some of the tokens, by their places (n,) in what `gather` gives."""
        return TokenSelection(self.total, index=picked if self.index is None else self.index[picked])

    def first(self, count: int) -> "TokenSelection":
        """The first so many of an index."""
        assert self.index is not None
        return TokenSelection(self.total, index=self.index[:count])


class LiveTokens(NamedTuple):
    """The tokens that count."""

    positions: Tensor  # (n,) flat, ascending
    total: int  # N
    counts: list[int]  # what else was asked for

    @property
    def selection(self) -> TokenSelection:
        every = self.positions.numel() == self.total
        return TokenSelection(self.total, index=None if every else self.positions)


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

    The device is asked at once. Calling the result is the forward's one host sync. It raises ValueError if a token that
    is neither masked nor negative, wanted or not, is outside the vocabulary, and if the mask has values other than 0
    and 1. What the host does in between costs nothing.
    """
    positions, numbers = for_device(targets.device).select(targets, mask, vocab, wanted)
    asked = torch.cat([numbers, *counts]) if counts else numbers

    def wait() -> LiveTokens:
        # No HostAnswer, which takes the host longer: little if anything is launched in between that this waits for.
        n, outside, largest, improper, *others = asked.tolist()
        _check_answer(outside, largest, improper, vocab, source, targets_name)
        return LiveTokens(positions[:n], targets.numel(), others)

    return wait


def improper_temperatures(temperature: float | Tensor, targets: Tensor, mask: Tensor | None) -> list[Tensor]:
    """[(1,) tokens that count whose temperature is not positive and finite]; empty if the temperature is a number."""
    if not isinstance(temperature, Tensor):
        return []
    improper = counted_tokens(targets, mask) & ~((temperature > 0) & temperature.isfinite())
    return [improper.sum()[None]]


def check_temperatures(improper: int) -> None:
    """Raise ValueError for what `improper_temperatures` counted."""
    if improper > 0:
        raise ValueError(f"temperature must be positive and finite at each token; {improper} are not")


def ask_vocabulary(
    targets: Tensor,
    mask: Tensor | None,
    vocab: int,
    source: str,
    *,
    fixed_shape: bool,
    targets_name: str = "targets",
    temperature: float | Tensor = 1.0,
) -> Callable[[], None]:
    """Ask the device whether targets that count are in the vocabulary, the mask is 0 or 1, and temperatures positive.

    Calling the result waits for the answer, and raises ValueError if it is no. Work that is launched in between hides
    the wait. With `fixed_shape` nothing is asked, and the call does nothing.
    """
    if fixed_shape:
        return lambda: None
    _, numbers = for_device(targets.device).select(targets, mask, vocab)
    counts = improper_temperatures(temperature, targets, mask)
    answer = HostAnswer(torch.cat([numbers, *counts]) if counts else numbers)

    def wait() -> None:
        _, outside, largest, improper, *others = answer.wait().tolist()
        _check_answer(outside, largest, improper, vocab, source, targets_name)
        for count in others:
            check_temperatures(count)

    return wait


def _check_answer(outside: int, largest: int, improper: int, vocab: int, source: str, targets_name: str) -> None:
    if improper > 0:
        raise ValueError(f"mask must be 0 or 1 at each token; {improper} of its values are neither")
    if outside > 0:
        raise ValueError(
            f"{targets_name} must be token ids in [0, {vocab}) from {source}, or negative, or masked; "
            f"{outside} of them are not, the largest is {largest}"
        )
