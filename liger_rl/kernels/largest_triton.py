"""Each token's K largest logits, from the largest logit of each of its parts, as Triton kernels.

A part is one token's logits in PART_VOCAB entries of the vocabulary. The K parts with the largest peaks hold the K
largest logits: each of these parts has one logit that is at least the smallest of their peaks, and every other part has
none above it. `_groups_kernel` chooses these parts, and `_logits_kernel` computes them again. Of their slices of SLICE
entries `_slices_kernel` chooses K in the same way, and `_select_kernel` takes the K largest logits of these. If logits
are equal, the smaller id comes first.

Each result is written by one program, in a fixed order: no atomics, the same bits on every run.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.kernels.devices import family_of, on
from liger_rl.kernels.picked_triton import (
    PRODUCT_WARPS,
    ROWS,
    Span,
    TileLists,
    list_tiles,
    picked_head,
    picked_logits,
    rows_of_tile,
)
from liger_rl.kernels.reference import ID_BITS, LARGEST_ID, LEAST_KEY
from liger_rl.kernels.statistics import PART_VOCAB
from liger_rl.kernels.transform import HeadFactors

LOGITS_BYTES = 128 << 20  # of parts' logits at a time
GROUPED, GROUPING_WARPS = 8192, 4  # parts of a program of `_groups_kernel`; one token's parts may be more
SLICE = 16
SELECTING = 256  # numbers of a warp of `_slices_kernel` and `_select_kernel`
BITS, LAST_ID, LEAST = tl.constexpr(ID_BITS), tl.constexpr(LARGEST_ID), tl.constexpr(LEAST_KEY)
SIGN = tl.constexpr(-(1 << 31))
NO_LESS = tl.constexpr((1 << 32) - 1)  # no key is larger


class Groups(NamedTuple):
    """As `chosen` of `picked_triton`: each token has K parts."""

    rank: Tensor  # (tiles, n) int16 or int32
    starts: Tensor  # (n + 1,) int64


@triton.jit
def key_of(z):
    """-> uint32 in the order of the numbers, above 0; as `reference.keys_of`, from 0 on and without the id."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return bits.to(tl.uint32, bitcast=True) ^ ((bits >> 31) | SIGN).to(tl.uint32, bitcast=True)


@triton.jit
def _largest(key, number):
    """-> 1 for each key among the `number` largest of its column, the first ones if keys are equal; else 0.

    A key of 0 is none. A column has `number` keys or more.
    """
    # The search for a threshold starts at the first bit that differs.
    least = tl.min(tl.where(key == 0, NO_LESS, key), 0).to(tl.int64)
    differing = tl.max(tl.max(key, 0).to(tl.int64) ^ least, 0)
    bit = tl.full((), 1 << 31, tl.int64)
    while bit > differing:
        bit = bit >> 1
    threshold = least & -(bit * 2)
    # A threshold above which there are exactly `number` keys is as good as the smallest of them: half of the bits.
    exact = tl.full((key.shape[1],), 0, tl.int32)
    while (bit > 0) & (tl.min(exact, 0) == 0):
        candidate = threshold + bit
        count = tl.sum((key >= candidate.to(tl.uint32)[None, :]).to(tl.int32), 0)
        threshold = tl.where((count >= number) & (exact == 0), candidate, threshold)
        exact = tl.maximum(exact, (count == number).to(tl.int32))
        bit = bit >> 1
    smallest = threshold.to(tl.uint32)[None, :]
    taken = (key >= smallest).to(tl.int32)
    if tl.min(exact, 0) == 0:  # only then may more keys be equal than are missing
        equal = (key == smallest).to(tl.int32)
        missing = number - tl.sum(taken - equal, 0)
        taken = taken - equal * (tl.cumsum(equal, 0) > missing[None, :]).to(tl.int32)
    return taken


@triton.jit(do_not_specialize=["count", "number"])
def _groups_kernel(peaks, rank, tiles, count, number, TOKENS: tl.constexpr, TILES: tl.constexpr):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    tile = tl.arange(0, TILES)
    inside = (tile < tiles)[:, None] & (token < count)[None, :]
    place = tile.to(tl.int64)[:, None] * count + token[None, :]
    key = tl.where(inside, key_of(tl.load(peaks + place, mask=inside, other=0.0)), 0)
    kept = _largest(key, number)
    among = tl.cumsum(kept, 0) - 1
    tl.store(rank + place, tl.where(kept != 0, among, -1).to(rank.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["base", "width"])
def _logits_kernel(
    out,  # (parts of the span, TILE_VOCAB) float32
    peaks,  # (parts of the span, slices of a part) float32
    hidden, weight, bias, size, steps,  # of `picked_head`
    groups,  # `Groups`
    lists,  # `TileLists`
    base,
    width,  # tokens of the span
    tiles,
    count,
    vocab,
    TILE_VOCAB: tl.constexpr,
    SLICE: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    tile, row, part, inside = rows_of_tile(
        tl.program_id(0), groups, lists, tiles, count, base, width, ROWS, TILES
    )  # fmt: skip
    if tile < tiles:
        first = tile * TILE_VOCAB
        z, _square = picked_logits(hidden, weight, bias, size, steps, row, first, vocab, TILE_VOCAB, STEP)
        column = tl.arange(0, TILE_VOCAB)
        z = tl.where((column < vocab - first)[None, :], z, float("-inf"))
        tl.store(out + part[:, None] * TILE_VOCAB + column[None, :], z, mask=inside[:, None])
        SLICES: tl.constexpr = TILE_VOCAB // SLICE
        of_slices = tl.max(tl.reshape(z, (ROWS, SLICES, SLICE)), 2)
        tl.store(peaks + part[:, None] * SLICES + tl.arange(0, SLICES)[None, :], of_slices, mask=inside[:, None])


@triton.jit(do_not_specialize=["number", "slices"])
def _slices_kernel(
    peaks,  # (tokens of the span, slices) float32
    picks,  # (tokens of the span, number) int32, written: numbers of the chosen slices, ascending
    number,
    slices,
    SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE)
    inside = place < slices
    key = tl.where(inside, key_of(tl.load(peaks + token * slices + place, mask=inside, other=0.0)), 0)
    taken = _largest(key[:, None], number)
    at = tl.cumsum(taken, 0) - 1
    tl.store(picks + token * number + at, place[:, None], mask=taken != 0)


@triton.jit(do_not_specialize=["first", "number"])
def _select_kernel(
    logits,  # (parts of the span, TILE_VOCAB) float32
    picks,  # (tokens of the span, number)
    tile_of,  # (parts of the span,)
    keys,  # (n, number) int64, written: those of `reference.keys_of`, in any order
    z_out,  # (n, number) float32, written in descending order
    ids_out,  # (n, number) int64
    first,  # token of the span
    number,
    vocab,
    TILE_VOCAB: tl.constexpr,
    SLICE: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
):
    SLICES: tl.constexpr = TILE_VOCAB // SLICE
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE)
    inside = place < number * SLICE
    pick = tl.load(picks + token * number + place // SLICE, mask=inside, other=0)
    part = token * number + pick // SLICES
    column = pick % SLICES * SLICE + place % SLICE
    entry = tl.load(tile_of + part, mask=inside, other=0) * TILE_VOCAB + column
    inside &= entry < vocab
    z = tl.load(logits + part * TILE_VOCAB + column, mask=inside, other=0.0)
    key = tl.where(inside, key_of(z), 0)[:, None]
    # Parts are in the order of their tiles, so places are in the order of ids.
    taken = _largest(key, number)
    at = tl.cumsum(taken, 0) - 1
    full = ((key.to(tl.int64) + SIGN) << BITS) | (LAST_ID - entry.to(tl.int64)[:, None])
    tl.store(keys + (first + token) * number + at, full, mask=taken != 0)
    # The program reads the keys that all of its threads wrote.
    tl.debug_barrier()
    each = tl.arange(0, COUNT)
    mine = tl.load(keys + (first + token) * number + each, mask=each < number, other=LEAST)
    others = tl.trans(mine[:, None])
    rank = tl.sum((others > mine[:, None]).to(tl.int32), 1)
    ordered = (mine >> BITS).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    out = (first + token) * number + rank
    tl.store(z_out + out, bits.to(tl.float32, bitcast=True), mask=each < number)
    tl.store(ids_out + out, (mine & LAST_ID) ^ LAST_ID, mask=each < number)


def largest(
    head: HeadFactors,  # of (n, H) and (V, H), whose product has an epilogue
    peaks: Tensor,  # (parts, n) float32, `TileStatistics.peaks`
    count: int,  # K, at most `statistics.most_from_peaks`
) -> tuple[Tensor, Tensor]:
    """-> (n, K) the K largest logits in descending order, and their ids: 2 n K PART_VOCAB H operations."""
    (tiles, n), vocab, device = peaks.shape, head.weight.shape[0], peaks.device
    keys, ids = (torch.empty(n, count, dtype=torch.int64, device=device) for _ in range(2))
    z = torch.empty(n, count, dtype=torch.float32, device=device)
    # The last part may have no entries.
    tiles = min(tiles, triton.cdiv(vocab, PART_VOCAB))
    rank = torch.empty(tiles, n, dtype=torch.int16 if tiles <= 1 << 15 else torch.int32, device=device)
    groups = Groups(rank, torch.arange(0, (n + 1) * count, count, dtype=torch.int64, device=device))
    family, all_tiles = family_of(device), triton.next_power_of_2(tiles)
    together, step = max(GROUPED // all_tiles, 1), max(LOGITS_BYTES // (4 * PART_VOCAB * count), 1)
    with on(device):
        _groups_kernel[(triton.cdiv(n, together),)](
            peaks, rank, tiles, n, count, TOKENS=together, TILES=all_tiles, num_warps=GROUPING_WARPS
        )
        factors = picked_head(head, PART_VOCAB, family)
        slices = count * (PART_VOCAB // SLICE)
        sizes = triton.next_power_of_2(slices), triton.next_power_of_2(count) * SLICE
        for start in range(0, n, step):
            span = Span(start, min(start + step, n), start * count, (min(start + step, n) - start) * count)
            lists: TileLists = list_tiles(groups, span)
            logits = torch.empty(span.room, PART_VOCAB, dtype=torch.float32, device=device)
            slice_peaks = torch.empty(span.room, PART_VOCAB // SLICE, dtype=torch.float32, device=device)
            picks = torch.empty(span.room, dtype=torch.int32, device=device)
            _logits_kernel[(span.room // ROWS + tiles,)](
                logits, slice_peaks, *factors, groups, lists, span.base, span.last - span.first, tiles, n, vocab,
                TILE_VOCAB=PART_VOCAB, SLICE=SLICE, ROWS=ROWS, STEP=family.step, TILES=all_tiles,
                num_stages=family.storing_stages, num_warps=PRODUCT_WARPS,
            )  # fmt: skip
            _slices_kernel[(span.last - span.first,)](
                slice_peaks, picks, count, slices, SIZE=sizes[0], num_warps=_warps(sizes[0])
            )
            _select_kernel[(span.last - span.first,)](
                logits, picks, lists.tile_of, keys, z, ids, start, count, vocab,
                TILE_VOCAB=PART_VOCAB, SLICE=SLICE, SIZE=sizes[1], COUNT=sizes[1] // SLICE,
                num_warps=_warps(sizes[1]),
            )  # fmt: skip
    return z, ids


def _warps(size: int) -> int:
    return min(max(size // SELECTING, 1), 8)
