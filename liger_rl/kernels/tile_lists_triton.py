"""Parts of products: for each tile of the vocabulary the tokens that keep it, and a product with these tokens' rows.

`chosen` has `rank` (tiles, n), the number of a kept part among its token's kept parts or -1, and `starts` (n + 1,)
int64, the number of each token's first part among all kept parts.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

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

    If the tokens keep more parts than `room`, no kernel writes any part. So the kernels of a span may start before the
    host knows how many parts there are.
    """

    first: int
    last: int
    base: int
    room: int


class TileLists(NamedTuple):
    """For each tile, the tokens of a span that keep it; for each part of the span, its tile and its token."""

    tokens: Tensor  # (tiles, tokens of the span) int32
    counts: Tensor  # (tiles,) int32
    tile_of: Tensor  # (room,) int32
    token_of: Tensor  # (room,) int32


@triton.jit
def count_span_parts(chosen, last, base, room):
    """-> number of the span's parts; -1 if it exceeds `room`."""
    parts = tl.load(chosen.starts + last) - base
    return tl.where(parts <= room, parts, -1)


@triton.jit(do_not_specialize=["first", "last", "base", "room"])
def _list_tiles_kernel(chosen, lists, first, last, base, room, count, STEP: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    width = last - first
    at = 0
    # No tokens if the span's parts exceed its room.
    stop = tl.where(count_span_parts(chosen, last, base, room) > 0, last, first)
    for start in range(first, stop, STEP):
        token = start + tl.arange(0, STEP)
        inside = token < last
        rank = tl.load(chosen.rank + tile * count + token, mask=inside, other=-1).to(tl.int32)
        kept = rank >= 0
        number = kept.to(tl.int32)
        tl.store(lists.tokens + tile * width + at + tl.cumsum(number, 0) - number, token, mask=kept)
        part = tl.load(chosen.starts + token, mask=kept, other=0) + rank - base
        tl.store(lists.tile_of + part, (tile + tl.zeros((STEP,), tl.int64)).to(tl.int32), mask=kept)
        tl.store(lists.token_of + part, token, mask=kept)
        at += tl.sum(number, 0)
    tl.store(lists.counts + tile, at)


def list_tiles(chosen: Any, span: Span) -> TileLists:
    tiles, n = chosen.rank.shape
    sizes = (tiles, span.last - span.first), (tiles,), (span.room,), (span.room,)
    lists = TileLists(*(torch.empty(size, dtype=torch.int32, device=chosen.rank.device) for size in sizes))
    with launch_context(chosen.rank.device):
        _list_tiles_kernel[(tiles,)](chosen, lists, *span, n, LISTED_TOKENS)
    return lists


@triton.jit
def pick_tile_tokens(chunk, chosen, lists, tiles, count, base, width, ROWS: tl.constexpr, TILES: tl.constexpr):
    """-> the tile of a chunk, ROWS tokens that keep it, their parts in a span, and a mask of the tokens that exist.

    A chunk past the last one gets the tile number `TILES`, which is no tile.
    """
    tile = tl.arange(0, TILES)
    kept = tl.load(lists.counts + tile, mask=tile < tiles, other=0)
    chunks = tl.cdiv(kept, ROWS)
    here = tl.sum((tl.cumsum(chunks, 0) <= chunk).to(tl.int32), 0)
    before = tl.sum(tl.where(tile < here, chunks, 0), 0)
    place = (chunk - before) * ROWS + tl.arange(0, ROWS)
    inside = place < tl.sum(tl.where(tile == here, kept, 0), 0)
    here_long = here.to(tl.int64)
    token = tl.load(lists.tokens + here_long * width + place, mask=inside, other=0)
    part = tl.load(chosen.starts + token) - base
    part += tl.load(chosen.rank + here_long * count + token, mask=inside, other=0).to(tl.int64)
    return here, token, part, inside


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
