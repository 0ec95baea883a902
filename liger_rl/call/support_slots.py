"""Where a call over a support wants logits, and what the host and the backward need to know of it, each found once.

A `ListedIds` follows from a support, the targets and the mask alone. So a Support keeps the one of its last call, and
old, reference and policy log-probabilities over the same tokens share it: its slots, its checks and its order by id.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from liger_rl.kernels.segments import LONG_ROWS, Ordered, Slots


class ListedIds:
    """The slots of a call, with what is known of them on the host, and their order by id."""

    def __init__(self, slots: Slots, check: Callable[[], tuple[Sequence[int], int]] | None = None) -> None:
        """`check` waits for the device, raises for what is wrong with the call's values, and returns
        `Slots.numbers` and how many tokens take the whole vocabulary. None asks nothing: then there is no such token.
        """
        self.slots = slots
        self._check = check
        self._full: Tensor | None = None
        self._by_id: Ordered | None = None
        self.all_short = False  # known to be: no row is longer than LONG_ROW
        self.when_checked: Callable[[], None] | None = None

    def checked(self) -> None:
        if self._check is None:
            return
        numbers, empty = self._check()
        self._full, self.all_short = empty_rows(self.slots, empty), numbers[LONG_ROWS] == 0
        self._check = None
        if self.when_checked is not None:
            self.when_checked()
            self.when_checked = None

    @property
    def full(self) -> Tensor | None:
        """Index of the tokens that count and whose row is empty; None for none."""
        self.checked()
        return self._full

    def by_id(self) -> Ordered:
        if self._by_id is None:
            self._by_id = torch.sort(self.slots.ids, stable=True)
        return self._by_id


def empty_rows(slots: Slots, count: int) -> Tensor | None:
    """Index of the `count` tokens that count and whose row is empty; None if there is no such token."""
    # A sort, because `nonzero` would wait for a number that is known.
    return torch.argsort(slots.full.logical_not(), stable=True)[:count] if count else None
