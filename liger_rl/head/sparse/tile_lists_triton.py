"""Parts of products: for each tile of the vocabulary the tokens that selected it, and a product with their rows."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.head.sparse.parts import SelectedParts
from liger_rl.kernels.devices import Family, launch_context
from liger_rl.kernels.matrix_triton import load, load_rows, matrix
from liger_rl.kernels.softmax_triton import transform_logits
from liger_rl.kernels.transform import HeadFactors, LogitSteps

LISTED_TOKENS = 1024  # tokens of a step of `_list_tiles_kernel`
# Tokens and warps of a program's product. Two programs share a multiprocessor: one H200, H = 4096, 337 TFLOPS; 8 warps
# and 4 stages had 306.
ROWS, PRODUCT_WARPS = 128, 4


class Span(NamedTuple):
    """Tokens `first` to `last` - 1, and memory for `room` parts. Their first part is number `base` of all parts.

    If the tokens have more parts than `room`, no kernel writes any part. So the kernels of a span may start before the
    host knows how many parts there are.
    """

    first: int
    last: int
    base: int
    room: int


class TileLists(NamedTuple):
    """For each tile, the tokens of a span that selected it; for each part of the span, its tile and its token."""

    tokens: Tensor  # (tiles, tokens of the span) int32
    counts: Tensor  # (tiles,) int32
    tile_of: Tensor  # (room,) int32
    token_of: Tensor  # (room,) int32


@triton.jit
def count_span_parts(parts, last, base, room):
    """-> number of the span's parts; -1 if it exceeds `room`."""
    number = tl.load(parts.starts + last) - base
    return tl.where(number <= room, number, -1)


@triton.jit(do_not_specialize=["first", "last", "base", "room"])
def _list_tiles_kernel(parts, lists, first, last, base, room, count, STEP: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    width = last - first
    at = 0
    # No tokens if the span's parts exceed its room.
    stop = tl.where(count_span_parts(parts, last, base, room) > 0, last, first)
    for start in range(first, stop, STEP):
        token = start + tl.arange(0, STEP)
        inside = token < last
        rank = tl.load(parts.rank + tile * count + token, mask=inside, other=-1).to(tl.int32)
        selected = rank >= 0
        number = selected.to(tl.int32)
        tl.store(lists.tokens + tile * width + at + tl.cumsum(number, 0) - number, token, mask=selected)
        part = tl.load(parts.starts + token, mask=selected, other=0) + rank - base
        tl.store(lists.tile_of + part, (tile + tl.zeros((STEP,), tl.int64)).to(tl.int32), mask=selected)
        tl.store(lists.token_of + part, token, mask=selected)
        at += tl.sum(number, 0)
    tl.store(lists.counts + tile, at)


def list_tiles(parts: SelectedParts, span: Span) -> TileLists:
    tiles, n = parts.rank.shape
    sizes = (tiles, span.last - span.first), (tiles,), (span.room,), (span.room,)
    lists = TileLists(*(torch.empty(size, dtype=torch.int32, device=parts.rank.device) for size in sizes))
    with launch_context(parts.rank.device):
        _list_tiles_kernel[(tiles,)](parts, lists, *span, n, LISTED_TOKENS)
    return lists


@triton.jit
def pick_tile_tokens(chunk, parts, lists, tiles, count, base, width, ROWS: tl.constexpr, TILES: tl.constexpr):
    """-> the tile of a chunk, ROWS tokens that selected it, their parts in a span, and a mask of the tokens that exist.

    A chunk past the last one gets the tile number `TILES`, which is no tile.
    """
    tile = tl.arange(0, TILES)
    count_in_tile = tl.load(lists.counts + tile, mask=tile < tiles, other=0)
    chunks = tl.cdiv(count_in_tile, ROWS)
    chunk_tile = tl.sum((tl.cumsum(chunks, 0) <= chunk).to(tl.int32), 0)
    before = tl.sum(tl.where(tile < chunk_tile, chunks, 0), 0)
    place = (chunk - before) * ROWS + tl.arange(0, ROWS)
    inside = place < tl.sum(tl.where(tile == chunk_tile, count_in_tile, 0), 0)
    chunk_tile_long = chunk_tile.to(tl.int64)
    token = tl.load(lists.tokens + chunk_tile_long * width + place, mask=inside, other=0)
    part = tl.load(parts.starts + token) - base
    part += tl.load(parts.rank + chunk_tile_long * count + token, mask=inside, other=0).to(tl.int64)
    return chunk_tile, token, part, inside


def product_arguments(head: HeadFactors, entries: int, family: Family) -> tuple:
    """The arguments `hidden`, `weight`, `bias`, `size` and `steps` of a kernel that calls `gather_logits`."""
    hidden, weight, bias, transform = head
    # Separate arguments, because Triton launches no kernel with a TMA descriptor in a tuple.
    return (
        matrix(hidden, 1, family.step, tma=False),
        matrix(weight, entries, family.step, tma=family.tma),
        None if bias is None else bias.contiguous(),
        hidden.shape[1],
        LogitSteps.of(transform),
    )


@triton.jit
def gather_logits(
    hidden,  # a `matrix` (n, H), for pointers
    weight,  # a `matrix` (vocab, H)
    bias,
    size,  # H
    steps,
    row, first, vocab,
    ENTRIES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """-> z and tanh^2 of hidden[row] @ weight[first : first + ENTRIES].T; columns past the last entry are undefined."""
    x = tl.zeros((row.shape[0], ENTRIES), tl.float32)
    for step in range(tl.cdiv(size, STEP)):
        left = load_rows(hidden, row, step * STEP, STEP)
        x = tl.dot(left, load(weight, first, step * STEP, ENTRIES, STEP).T, x)
    if bias is not None:
        column = first + tl.arange(0, ENTRIES)
        x += tl.load(bias + column, mask=column < vocab, other=0.0).to(tl.float32)[None, :]
    return transform_logits(x, steps)
