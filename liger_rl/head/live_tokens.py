"""Which tokens count: those with a mask of 1 and a target in [0, V)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_rl.head.host_answer import HostAnswer
from liger_rl.kernels import for_device


@dataclass(frozen=True)
class TokenSelection:
    """Which of `total` tokens count: all, or those of an index."""

    total: int  # N
    index: Tensor | None = None  # (n,) int64

    @property
    def count(self) -> int:
        """Number of rows that `gather` returns."""
        return self.total if self.index is None else self.index.numel()

    def gather(self, values: Tensor) -> Tensor:
        """(N, ...) -> (count, ...)."""
        return values if self.index is None else values[self.index]

    def spread(self, values: Tensor, shape: torch.Size) -> Tensor:
        """(count, ...) -> (*shape, ...) with `shape` that of all N tokens; 0 at tokens that do not count."""
        trailing = values.shape[1:]
        if self.index is not None:
            values = values.new_zeros(self.total, *trailing).index_copy(0, self.index, values)
        return values.view(*shape, *trailing)

    def among(self, picked: Tensor) -> "TokenSelection":
        """The tokens at the rows `picked` (n,) of the tensors that `gather` returns."""
        return TokenSelection(self.total, index=picked if self.index is None else self.index[picked])


def counted_tokens(targets: Tensor, mask: Tensor | None, wanted: Tensor | None = None) -> Tensor:
    """bool, shaped like targets: the mask is nonzero, the target >= 0, and `wanted` nonzero, if it is given.

    Ids >= V are not looked for here.
    """
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
    counts: Sequence[Tensor] = (),  # integers (k,) each, read in the same host sync
    targets_name: str = "targets",  # the caller's name for the targets, for messages
) -> Callable[[], tuple[TokenSelection, list[int]]]:
    """Tokens whose mask is nonzero, whose target is >= 0, and that are `wanted`; and the values of `counts`.

    The device starts counting here. Calling the result is the forward's one host sync. The host's work in between is
    free.

    The result raises ValueError if an unmasked target is >= vocab, even at a token that is not wanted, or if the mask
    has a value other than 0 and 1.
    """
    positions, numbers = for_device(targets.device).select_tokens(targets, mask, vocab, wanted)
    total, answer = targets.numel(), HostAnswer(torch.cat([numbers, *counts]) if counts else numbers)

    def wait() -> tuple[TokenSelection, list[int]]:
        n, outside, largest, improper, *values = answer.wait().tolist()
        if improper > 0:
            raise ValueError(f"mask must be 0 or 1 at each token; {improper} of its values are neither")
        if outside > 0:
            raise ValueError(
                f"{targets_name} must be token ids in [0, {vocab}) from {source}, or negative, or masked; "
                f"{outside} of them are not, the largest is {largest}"
            )
        return TokenSelection(total, None if n == total else positions[:n]), values

    return wait
