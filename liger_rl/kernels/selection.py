"""Selection of the tokens that count, and scatter of their rows into those of all tokens, in plain PyTorch."""

import torch
from torch import Tensor

ROWS = 2048  # scattered at a time, so that their converted copy stays small


def select(targets: Tensor, mask: Tensor | None, vocab: int, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Positions of the tokens that count and are wanted. A token counts if its mask is nonzero and its target >= 0.

    Args:
        targets: (B, T) or (N,) integer ids.
        mask: shaped like targets, or None; its values should be 0 or 1.
        vocab: number of ids; larger targets are counted as outside.
        wanted: shaped like targets or (B, 1), nonzero where a token is wanted; None wants all.

    Returns:
        (N,) int64, whose first n entries are the flat positions, ascending, and (4,) int64: n; the number of tokens
        that count with a target outside the vocabulary; the largest of these targets, or 0; the number of mask values
        other than 0 and 1.
    """
    targets = targets.long()  # a narrow dtype would wrap the vocabulary's size in comparisons
    counted = targets >= 0 if mask is None else torch.logical_and(targets >= 0, mask)
    live = counted if wanted is None else torch.logical_and(counted, wanted)
    outside = counted & (targets >= vocab)
    n = live.sum()
    improper = n - n if mask is None or mask.dtype == torch.bool else ((mask != 0) & (mask != 1)).sum()
    largest = (targets * outside).max() if targets.numel() else n
    numbers = torch.stack([n, outside.sum(), largest, improper])
    # A stable sort puts the live positions first and, unlike nonzero, need not ask the device for their number.
    return torch.argsort(live.reshape(-1), descending=True, stable=True), numbers


def scatter_rows(rows: Tensor, index: Tensor, out: Tensor) -> None:
    """out[index] = rows, for float32 rows (n, H), an index (n,) without repeats and out (N, H) of any float dtype."""
    for first in range(0, rows.shape[0], ROWS):
        part = slice(first, first + ROWS)
        out.index_copy_(0, index[part], rows[part].to(out.dtype))
