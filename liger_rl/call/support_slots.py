"""The slots of a call over a support: where it needs logits, whether its values are good, and the slots' order by id.

A `ListedIds` depends on the support, the targets and the mask, and on no log-probability. So a Support keeps the one of
its last call. Old, reference and policy log-probabilities of the same tokens share it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from liger_rl.kernels.segments import LONG_ROWS, Ordered, Slots


class ListedIds:
    """The slots of a call, the results of their checks on the host, and their order by id. Each is computed once."""

    def __init__(self, slots: Slots, check: Callable[[], tuple[Sequence[int], int]] | None = None) -> None:
        """
        Args:
            check: waits for the device, raises for bad values of the call, and returns `Slots.numbers` and the number
                of tokens that take the whole vocabulary. None checks nothing, and means 0 such tokens (fixed_shape).
        """
        self.slots = slots
        self._check = check
        self._full: Tensor | None = None
        self._by_id: Ordered | None = None
        self.all_short = False  # True once the host knows that no token has more than LONG_ROW slots
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
        """Index of the tokens that count and have an empty row; None if there is none."""
        self.checked()
        return self._full

    def by_id(self) -> Ordered:
        if self._by_id is None:
            self._by_id = torch.sort(self.slots.ids, stable=True)
        return self._by_id


def empty_rows(slots: Slots, count: int) -> Tensor | None:
    """Index of the `count` tokens that count and have an empty row; None if there is none."""
    # We sort, because `nonzero` would wait for the count, which is known.
    return torch.argsort(slots.full.logical_not(), stable=True)[:count] if count else None
