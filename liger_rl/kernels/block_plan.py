"""What a backward of chosen blocks is given by the host, and what it starts from."""

from typing import NamedTuple

from torch import Tensor

from liger_rl.kernels import gemm
from liger_rl.kernels.statistics import BLOCK_TOKENS


class BlockPlan(NamedTuple):
    """The blocks of a gradient to compute, known to the host as far as it must plan for them."""

    keep: Tensor  # (row blocks, tiles) bool
    counted: Tensor  # as `left_out_blocks_triton.count` gives it, of which the rest is known to the host
    counts: Tensor  # (tiles,) int64, blocks kept in each
    kept: int  # in all
    wanted: int  # tokens with a gradient, the first of all

    @property
    def row_blocks(self) -> int:
        return -(-self.wanted // BLOCK_TOKENS)

    @property
    def share(self) -> float:
        """Kept blocks, of all the blocks of the tokens with a gradient."""
        return self.kept / max(self.row_blocks * self.counts.numel(), 1)


class LeftOutGradients(NamedTuple):
    """What the sums of left-out blocks give, float32; None where it is not asked for."""

    hidden: Tensor | None  # (n, H)
    weight: Tensor | None  # (tiles or more, H), of which a tile's words have their shares
    bias: Tensor | None  # (tiles or more,), as well

    @classmethod
    def of(
        cls, left_out: Tensor, hidden: Tensor, from_left_out: Tensor | None, needs: tuple[bool, bool]
    ) -> "LeftOutGradients":
        """Of sums (n, tiles or more) and hidden (n, H); `from_left_out` is hidden's, `needs` for weight and bias."""
        weight = gemm.matmul(left_out.T, hidden) if needs[0] else None
        return cls(from_left_out, weight, gemm.column_sums(left_out) if needs[1] else None)
