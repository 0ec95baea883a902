"""Which tokens count, in plain PyTorch."""

import torch
from torch import Tensor


def select(targets: Tensor, mask: Tensor | None, vocab: int) -> tuple[Tensor, Tensor]:
    """Positions of the tokens that count: those with a mask other than 0 and a target that is not negative.

    Args:
        targets: (N,) integer ids.
        mask: (N,) or None.
        vocab: ids at or above it are counted apart.

    Returns:
        (N,) int64 whose first n entries are the positions, ascending, and (3,) int64: n, how many of the n targets are
        outside the vocabulary, and the largest of these, -1 for none.
    """
    targets = targets.long()  # a narrow dtype would wrap the vocabulary's size in comparisons
    live = targets >= 0 if mask is None else (targets >= 0) & (mask != 0)
    outside = live & (targets >= vocab)
    largest = torch.where(outside, targets, -1)
    numbers = torch.stack([live.sum(), outside.sum(), largest.max() if largest.numel() else live.sum() - 1])
    # A stable sort puts the live positions first and, unlike nonzero, need not ask the device for their number.
    return torch.argsort(live.logical_not(), stable=True), numbers.long()
