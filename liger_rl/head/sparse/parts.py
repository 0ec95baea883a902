"""Parts of a gradient and the records of them. A part is one token's dL/dlogits in one tile of PART_VOCAB entries."""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.kernels.statistics import BLOCK_TOKENS


class PartBounds(NamedTuple):
    """Bounds of dL/dz in each part, in units of `unit`.

    `max_norm` and `sums` leave the target out. No bound includes scale / temperature, the constant part of dz/dx.
    """

    max_norm: Tensor  # (tiles, n) float32, upper bound of the norm of a part
    sums: Tensor  # (tiles, n) float32, sum of a part
    min_square: Tensor  # (n,) float32, lower bound of the squared norm over the vocabulary, target included
    unit: Tensor  # (n,) float32, scale of the token's bounds; 0 without a gradient
    total_size: Tensor  # (n,) float64, unit * sum of |sums| over tiles; 0 without a gradient, or if not finite
    at_target: Tensor  # (n,) float32, dL/dx at the target, not in `unit`

    @classmethod
    def empty(cls, n: int, tiles: int, device: torch.device) -> "PartBounds":
        def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        tokens = values(n), values(n), values(n, dtype=torch.float64), values(n)
        return cls(values(tiles, n), values(tiles, n), *tokens)


class EntryShares(NamedTuple):
    """The share of each vocabulary entry in the sum that a token drops in the entry's tile."""

    shares: Tensor  # (padded tiles * width,) float32, sum 1 over a tile; 0 past the vocabulary
    squares: Tensor  # (padded tiles,) float32, sum of the squared shares of a tile

    @classmethod
    def empty(cls, tiles: int, width: int, device: torch.device) -> "EntryShares":
        shares = torch.empty(tiles * width, dtype=torch.float32, device=device)
        return cls(shares, torch.empty(tiles, dtype=torch.float32, device=device))

    @property
    def width(self) -> int:
        """Entries of a tile."""
        return self.shares.numel() // self.squares.numel()


class SelectedParts(NamedTuple):
    """The selected parts of n tokens: token after token, and a token's parts in the order of their tiles."""

    # (tiles, n) int16, or int32 for more than 2^15 tiles: number of a selected part among its token's selected parts;
    # -1 for a dropped part
    rank: Tensor
    starts: Tensor  # (n + 1,) int64: number of each token's first part among all selected parts
    budget: Tensor  # (n,) float32: squared norm of the entries that a token may still drop, in units of scale squared
    scale: Tensor  # (n,) float32: upper bound of an entry's size; 0 for a token without a gradient, which has no part
    dropped_sums: Tensor  # (n, padded tiles): sum of the entries that a token drops in a tile


class PartCounts(NamedTuple):
    """Numbers of selected parts, on the host."""

    gradient_tokens: int  # tokens with a gradient
    block_ends: list[int]  # parts of the first BLOCK_TOKENS tokens, of the first 2 BLOCK_TOKENS, ..., of all
    n: int  # tokens
    tiles: int
    max_share: float  # largest share of selected parts with which lists of ids are faster than the exact backward

    @property
    def share(self) -> float:
        """Selected parts, relative to all parts of the tokens with a gradient."""
        return self.block_ends[-1] / max(self.gradient_tokens * self.tiles, 1)

    @property
    def lists_are_faster(self) -> bool:
        return self.gradient_tokens > 0 and self.share <= self.max_share

    def split(self, max_parts: int) -> list[tuple[int, int, int, int]]:
        """Runs of token blocks: (first token, last token + 1, first part, number of parts) each.

        A run has at most `max_parts` parts, or is one block of BLOCK_TOKENS tokens.
        """
        runs, first, base = [], 0, 0
        for block, end in enumerate(self.block_ends):
            last = min((block + 1) * BLOCK_TOKENS, self.n)
            next_end = self.block_ends[min(block + 1, len(self.block_ends) - 1)]
            if last == self.n or next_end - base > max_parts:
                runs.append((first, last, base, end - base))
                first, base = last, end
        return runs
