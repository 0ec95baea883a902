"""Lists of chosen blocks of a matrix, tile by tile of the vocabulary and row by row, as two Triton launches.

The GPU has nothing else to do meanwhile, so that launches count, not arithmetic: every program of the second adds up
for itself what it needs of the first's counts. Integers alone, no atomics: the same lists on every run.
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.kernels.devices import on
from liger_rl.kernels.launches import Launched, cdiv

STEP = 256  # rows or tiles that a program reads at a time
ITEMS = 16  # rows or tiles whose places in the order a program finds
TOKENS = 1024  # that one program counts at a time


class BlockLists(NamedTuple):
    """The kept blocks, on the device, tile by tile. A position is a block's place among them, in that order.

    There is room for every block. Entries after the last kept block are undefined.
    """

    row: Tensor  # (row blocks * tiles,) int32, row of blocks
    tile: Tensor  # (row blocks * tiles,) int32, ascending
    by_row: Tensor  # (row blocks * tiles,) int32 positions, row by row, ascending in each
    row_end: Tensor  # (row blocks,) int32 into by_row
    row_count: Tensor  # (row blocks,) int32
    row_order: Tensor | None  # (row blocks,) int32, those with most blocks first, so that the last to start is short
    tile_end: Tensor  # (tiles,) int32 positions
    tile_count: Tensor  # (tiles + 1,) int32, and last the number of tokens with a gradient
    tile_order: Tensor  # (tiles,) int32

    @classmethod
    def of(cls, keep: Tensor, wanted: Tensor, *, order_rows: bool = True) -> "BlockLists":
        """From `keep` (row blocks, tiles) and `wanted` (n,), tokens with a gradient, both bool and contiguous.

        Row blocks whose tokens have no gradient come last. Unless nearly all others are kept, they keep nothing.
        """
        rows, tiles = keep.shape
        assert keep.is_contiguous()
        assert wanted.is_contiguous()
        # Each its own allocation: Triton compiles anew for addresses that are not multiples of 16, and cutting such
        # pieces out of one takes the host no less time.
        ints = partial(torch.empty, dtype=torch.int32, device=keep.device)
        lists = cls(
            row=ints(rows * tiles),
            tile=ints(rows * tiles),
            by_row=ints(rows * tiles),
            row_end=ints(rows),
            row_count=ints(rows),
            row_order=ints(rows) if order_rows else None,
            tile_end=ints(tiles),
            tile_count=ints(tiles + 1),
            tile_order=ints(tiles),
        )
        rank, row_parts = ints((rows, tiles)), cdiv(rows, ITEMS) if order_rows else 0
        with on(keep.device):
            _count_kernel[(rows + tiles + 1,)](keep, rank, lists, rows, tiles, wanted, wanted.numel(), STEP, TOKENS)
            _list_kernel[(rows + row_parts + cdiv(tiles, ITEMS),)](
                keep, rank, lists, rows, tiles, row_parts, STEP, ITEMS
            )
        return lists


@Launched
@triton.jit(do_not_specialize=["rows", "tiles", "tokens"])
def _count_kernel(
    keep,
    rank,  # (rows, tiles) of a kept block among those of its tile
    lists,  # `BlockLists`
    rows,
    tiles,
    wanted,
    tokens,
    STEP: tl.constexpr,
    TOKENS: tl.constexpr,
):
    item = tl.program_id(0)
    count = 0
    if item < rows:
        for start in range(0, tiles, STEP):
            tile = start + tl.arange(0, STEP)
            place = keep + item.to(tl.int64) * tiles + tile
            count += tl.sum(tl.load(place, mask=tile < tiles, other=0).to(tl.int32), 0)
        tl.store(lists.row_count + item, count)
    elif item < rows + tiles:
        tile = item - rows
        for start in range(0, rows, STEP):
            row = (start + tl.arange(0, STEP)).to(tl.int64)
            kept = tl.load(keep + row * tiles + tile, mask=row < rows, other=0).to(tl.int32)
            tl.store(rank + row * tiles + tile, count + tl.cumsum(kept, 0) - 1, mask=kept != 0)
            count += tl.sum(kept, 0)
        tl.store(lists.tile_count + tile, count)
    else:
        counts = tl.zeros((TOKENS,), tl.int32)
        for start in range(0, tokens, TOKENS):
            token = start + tl.arange(0, TOKENS)
            counts += tl.load(wanted + token, mask=token < tokens, other=0).to(tl.int32)
        tl.store(lists.tile_count + tiles, tl.sum(counts, 0))


@triton.jit
def _list_row(row, keep, rank, lists, tiles, STEP: tl.constexpr):
    """What one row of blocks adds to every list."""
    at = 0
    for start in range(0, row, STEP):
        earlier = start + tl.arange(0, STEP)
        at += tl.sum(tl.load(lists.row_count + earlier, mask=earlier < row, other=0), 0)
    earlier_tiles = 0
    for start in range(0, tiles, STEP):
        tile = start + tl.arange(0, STEP)
        inside = tile < tiles
        kept = tl.load(keep + row.to(tl.int64) * tiles + tile, mask=inside, other=0).to(tl.int32)
        chosen = kept != 0
        count = tl.load(lists.tile_count + tile, mask=inside, other=0)
        among = tl.load(rank + row.to(tl.int64) * tiles + tile, mask=chosen, other=0)
        block = earlier_tiles + tl.cumsum(count, 0) - count + among
        tl.store(lists.row + block, tl.zeros_like(tile) + row, mask=chosen)
        tl.store(lists.tile + block, tile, mask=chosen)
        tl.store(lists.by_row + at + tl.cumsum(kept, 0) - 1, block, mask=chosen)
        at += tl.sum(kept, 0)
        earlier_tiles += tl.sum(count, 0)
    tl.store(lists.row_end + row, at)


@triton.jit
def _arrange(part, counts, ends, order, size, STEP: tl.constexpr, ITEMS: tl.constexpr):
    """What place their numbers of blocks give some rows or tiles among all of a kind, and where theirs end."""
    item = part * ITEMS + tl.arange(0, ITEMS)
    inside = item < size
    count = tl.load(counts + item, mask=inside, other=0)
    end = tl.zeros_like(item)
    place = tl.zeros_like(item)
    for start in range(0, size, STEP):
        other = start + tl.arange(0, STEP)
        others = tl.load(counts + other, mask=other < size, other=0)[None, :]
        before = other[None, :] < item[:, None]
        end += tl.sum(tl.where(before, others, 0), 1)
        ahead = (others > count[:, None]) | (before & (others == count[:, None]))
        place += tl.sum(ahead.to(tl.int32), 1)
    if ends is not None:
        tl.store(ends + item, end + count, mask=inside)
    tl.store(order + place, item, mask=inside)


@Launched
@triton.jit(do_not_specialize=["rows", "tiles", "row_parts"])
def _list_kernel(
    keep, rank, lists, rows, tiles,
    row_parts,  # programs that order rows
    STEP: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    if item < rows:
        _list_row(item, keep, rank, lists, tiles, STEP)
    elif item < rows + row_parts:
        if lists.row_order is not None:
            _arrange(item - rows, lists.row_count, None, lists.row_order, rows, STEP, ITEMS)
    else:
        part = item - rows - row_parts
        _arrange(part, lists.tile_count, lists.tile_end, lists.tile_order, tiles, STEP, ITEMS)
