"""Where a call over a support wants logits, and what the host and the backward need to know of it, each found once.

A `ListedIds` follows from a support, the targets and the mask alone. So a Support keeps the one of its last call, and
old, reference and policy log-probabilities over the same tokens share it: its slots, its checks and its order by id.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_rl.head.support import Support
from liger_rl.kernels.support import LONG_ROWS, Segments, Slots

MOST_KEPT = 1 << 20  # slots that a Support keeps


class ListedIds:
    """The slots of a call, with what is known of them on the host, and their order by id."""

    def __init__(self, slots: Slots, check: Callable[[], tuple[Sequence[int], int]] | None = None) -> None:
        """`check` waits for the device, raises for what is wrong with the call's values, and returns
        `Slots.numbers` and how many tokens take the whole vocabulary. None asks nothing: then there is no such token.
        """
        self.slots = slots
        self._check = check
        self._full: Tensor | None = None
        self._by_id: SlotsById | None = None
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

    def by_id(self) -> "SlotsById":
        if self._by_id is None:
            self._by_id = SlotsById(self.slots)
        return self._by_id


class SlotsById:
    """The slots of each row of the weight side by side, in a stable order."""

    def __init__(self, slots: Slots) -> None:
        ids, self.order = torch.sort(slots.ids, stable=True)
        rows = torch.arange(slots.rows + 1, dtype=ids.dtype, device=ids.device)
        self.segments = Segments(torch.searchsorted(ids, rows), ids, by_id=True)
        self.tokens = slots.tokens[self.order]  # (S,) int32


def empty_rows(slots: Slots, count: int) -> Tensor | None:
    """Index of the tokens that count and whose row is empty, of which there are so many; None for no token."""
    # A sort, because `nonzero` would wait for a number that is known.
    return torch.argsort(slots.full.logical_not(), stable=True)[:count] if count else None


def kept(support: Support, values: Sequence[Tensor | None], rest: Any, make: Callable[[], ListedIds]) -> ListedIds:
    """`make()`, or what it made at the last call with this support, if nothing has been written to any of the tensors.

    Args:
        values: the tensors whose values it depends on, beside the support's.
        rest: all else that it depends on.
    """
    tensors = (support.token_ids, support.offsets, *values)
    if any(tensor is not None and tensor.is_inference() for tensor in tensors):  # nothing says what is written to them
        return make()
    device, key = support.token_ids.device, (rest, *map(_state, tensors))
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():  # a replay has other values
            return make()
        key = (torch.cuda.current_stream(device.index).cuda_stream, *key)
    last = support.__dict__.get("_last")
    if last is not None and last[0] == key:
        return last[1]
    found = make()
    if found.slots.ids.numel() <= MOST_KEPT:
        # With the tensors, so that no other one gets their address.
        found.when_checked = lambda: object.__setattr__(support, "_last", (key, found, tensors))
    return found


def _state(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """What changes with a tensor's values, as far as PyTorch is told."""
    if tensor is None:
        return None
    return tensor.data_ptr(), tensor._version, tensor.dtype, tensor.shape, tensor.stride()
