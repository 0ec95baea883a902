"""Triton kernels from the selected parts of a gradient to a list of entries for each token: steps 5 and 6 of README.md.

- `compute_parts` computes the selected parts, as products with the tokens that `list_tiles` gathers for each tile.
- `write_lists` finds, for each token, the largest size up to which all entries may be dropped. It lists the larger
  entries, and writes the sum of the dropped entries of each part.

A token's list has its target first, then its other ids, tile by tile, ascending.

Each result is written by one program, in a fixed order: no atomics, the same bits on every run.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.head.sparse.parts import EntryShares, SelectedParts
from liger_rl.head.sparse.tile_lists_triton import (
    PRODUCT_WARPS,
    ROWS,
    Span,
    TileLists,
    count_span_parts,
    gather_logits,
    pick_tile_tokens,
    product_arguments,
)
from liger_rl.kernels.devices import family_of, launch_context
from liger_rl.kernels.segment_sums import Entries
from liger_rl.kernels.softmax_triton import flushed_exp, gradient, times_slope, token_terms
from liger_rl.kernels.statistics import PART_VOCAB, TokenGradients
from liger_rl.kernels.transform import HeadFactors, LogitSteps, LogitTransform

LIMIT_ENTRIES, LIMIT_WARPS = 2048, 8  # entries of a step of `_limits_kernel`
WRITE_ENTRIES, WRITE_TOKENS = 2048, 1024  # entries, or tokens, of a program of `_write_kernel`
LEVEL_BITS = tl.constexpr(4)  # last bits of `PartEntries.high` that are 0 in a level: eight levels for each power of 2
# Sums of squares take `PartEntries.high` alone, whose numbers are off by at most 2^-8, relative.
ROUNDING_OF_SQUARES = tl.constexpr(1.0 - 2.0**-7)


class PartEntries(NamedTuple):
    """Entries of selected parts, relative to the scale of their token: the first 24 bits of float32 numbers.

    `high` decides which entries are listed. `low` is read for listed entries only. Float16 would round them by up to
    2^-11, which is more than a tolerance of 3e-4.
    """

    high: Tensor  # (room, width) int16: sign, exponent and 7 bits of the mantissa
    low: Tensor  # (room, width) uint8: the next 8 bits of the mantissa

    @classmethod
    def empty(cls, room: int, width: int, device: torch.device) -> "PartEntries":
        high = torch.empty(room, width, dtype=torch.int16, device=device)
        return cls(high, torch.empty(room, width, dtype=torch.uint8, device=device))


@triton.jit
def _store_entries(part_entries, place, values, mask):
    bits = values.to(tl.int32, bitcast=True)
    tl.store(part_entries.high + place, (bits >> 16).to(tl.int16), mask=mask)
    tl.store(part_entries.low + place, (bits >> 8).to(tl.uint8), mask=mask)


@triton.jit
def _join_bits(high, low):
    """-> float32 numbers. `low` is int32. The 8 bits that are not stored are set to the middle of their range."""
    bits = (high.to(tl.int32) << 16) | (low << 8) | 128
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["base", "width"])
def _parts_kernel(
    out,  # `PartEntries`
    hidden, weight, bias, size, steps,  # of `product_arguments`
    targets,
    gradients,  # `TokenGradients`, (n,) each
    parts,  # `SelectedParts`
    lists,  # `TileLists`
    base,
    width,  # tokens of the span
    tiles,
    count,
    vocab,
    TILE_VOCAB: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    tile, row, part, inside = pick_tile_tokens(
        tl.program_id(0), parts, lists, tiles, count, base, width, ROWS, TILES
    )  # fmt: skip
    if tile < tiles:
        first = tile * TILE_VOCAB
        z, square = gather_logits(hidden, weight, bias, size, steps, row, first, vocab, TILE_VOCAB, STEP)
        lse = tl.load(gradients.lse + row)[:, None]
        target = (tl.load(targets + row) - first)[:, None]
        per_scale = 1.0 / tl.load(parts.scale + row)[:, None]
        g, e, entropy = token_terms(gradients, row, inside)
        ENTROPY: tl.constexpr = gradients.grad_entropy is not None
        if ENTROPY:
            e = e[:, None]
            entropy = entropy[:, None]
        column = tl.arange(0, TILE_VOCAB)
        in_vocab = (column < vocab - first)[None, :]
        log_p = z - lse
        grad = gradient(flushed_exp(log_p), log_p, None, 0.0, g[:, None], e, entropy, ENTROPY)
        if steps.cap is not None:
            grad *= 1.0 - square
        grad = tl.where(in_vocab & (column[None, :] != target), grad * per_scale, 0.0)
        _store_entries(out, part[:, None] * TILE_VOCAB + column[None, :], grad, inside[:, None])


def compute_parts(
    head: HeadFactors,  # of the whole vocabulary, with hidden states in the compute dtype
    targets: Tensor,  # (n,)
    gradients: TokenGradients,  # (n,) each
    parts: SelectedParts,
    lists: TileLists,
    span: Span,
    out: PartEntries,
) -> None:
    """Write the span's selected parts of dL/dz, in units of each token's scale; 0 at targets."""
    (tiles, n), family = parts.rank.shape, family_of(parts.rank.device)
    with launch_context(parts.rank.device):
        _parts_kernel[(span.room // ROWS + tiles,)](
            out, *product_arguments(head, PART_VOCAB, family), targets.contiguous(), gradients.contiguous(), parts,
            lists, span.base, span.last - span.first, tiles, n, head.weight.shape[0],
            TILE_VOCAB=PART_VOCAB, ROWS=ROWS, STEP=family.step, TILES=triton.next_power_of_2(tiles),
            num_stages=family.storing_stages, num_warps=PRODUCT_WARPS,
        )  # fmt: skip


# --- from parts to lists ----------------------------------------------------------------------------------------------


@triton.jit
def _find_level(value):
    """-> the largest level whose size is at most `value` in [0, 2]."""
    return value.to(tl.int32, bitcast=True) >> (16 + LEVEL_BITS)


@triton.jit
def _find_magnitude(high):
    """-> `PartEntries.high` as integers in the order of sizes. NaN is larger than all numbers."""
    return high.to(tl.int32) & 0x7FFF


@triton.jit(do_not_specialize=["first", "last", "base", "room"])
def _limits_kernel(
    part_entries,  # `PartEntries`
    parts,  # `SelectedParts`
    limits,  # (n,) int32: the largest magnitude that is not listed
    counts,  # (room,) int32, zeros: number of listed entries of each part
    first,
    last,
    base,
    room,
    TILE_VOCAB: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    token = first + tl.program_id(0)
    begin = (tl.load(parts.starts + token) - base) * TILE_VOCAB
    end = (tl.load(parts.starts + token + 1) - base) * TILE_VOCAB
    end = tl.where(count_span_parts(parts, last, base, room) > 0, end, begin)
    tolerated = tl.load(parts.budget + token) * ROUNDING_OF_SQUARES
    tolerated = tl.where(tolerated > 0.0, tolerated, 0.0)  # NaN becomes 0, too
    # All entries up to the low level fit in any case. One entry of the high level or more does not fit. None exceeds 1.
    entry_budget = tolerated / tl.maximum(end - begin, 1).to(tl.float32)
    low = _find_level(tl.minimum(tl.sqrt(entry_budget) * ROUNDING_OF_SQUARES, 2.0))
    high = _find_level(tl.minimum(tl.sqrt(tolerated), 2.0)) + 1
    # A step tries three levels, so it reads the parts half as often as halving.
    while low + 1 < high:
        step = tl.maximum((high - low) // 4, 1)
        first_level = low + step
        second_level = tl.minimum(low + 2 * step, high)
        third_level = tl.minimum(low + 3 * step, high)
        under_first = tl.zeros((ENTRIES,), tl.float32)
        under_second = tl.zeros((ENTRIES,), tl.float32)
        under_third = tl.zeros((ENTRIES,), tl.float32)
        for start in range(begin, end, ENTRIES):
            place = start + tl.arange(0, ENTRIES)
            stored = tl.load(part_entries.high + place, mask=place < end, other=0)
            magnitude, value = _find_magnitude(stored), _join_bits(stored, 128)
            square = value * value
            under_first += tl.where(magnitude <= first_level << LEVEL_BITS, square, 0.0)
            under_second += tl.where(magnitude <= second_level << LEVEL_BITS, square, 0.0)
            under_third += tl.where(magnitude <= third_level << LEVEL_BITS, square, 0.0)
        first_fits = tl.sum(under_first) <= tolerated
        second_fits = tl.sum(under_second) <= tolerated
        third_fits = tl.sum(under_third) <= tolerated
        most = high
        high = tl.where(
            first_fits, tl.where(second_fits, tl.where(third_fits, most, third_level), second_level), first_level
        )
        low = tl.where(
            first_fits, tl.where(second_fits, tl.where(third_fits, third_level, second_level), first_level), low
        )
        low = tl.minimum(low, most - 1)
    limit = low << LEVEL_BITS
    tl.store(limits + token, limit)
    PARTS: tl.constexpr = ENTRIES // TILE_VOCAB
    column = tl.arange(0, TILE_VOCAB)[None, :]
    for start in range(begin // TILE_VOCAB, end // TILE_VOCAB, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = part < end // TILE_VOCAB
        stored = tl.load(part_entries.high + part[:, None] * TILE_VOCAB + column, mask=inside[:, None], other=0)
        number = tl.sum((_find_magnitude(stored) > limit).to(tl.int32), 1)
        tl.store(counts + part, number, mask=inside)


@triton.jit(do_not_specialize=["most", "first", "last", "base", "room"])
def _write_kernel(
    part_entries,  # `PartEntries`
    parts,  # `SelectedParts`
    tile_lists,  # `TileLists`
    shares,  # (padded tiles * TILE_VOCAB,) of `EntryShares`
    targets,  # (n,) ids
    at_target,  # (n,) float32
    limits,  # (n,) int32
    before,  # (parts of all spans + 1,) int64: number of listed entries in all earlier parts, without targets
    lists,  # `Entries` with room for `most`
    starts,  # (n + 1,) int64: the first entry of each token
    most,
    first,
    last,
    base,
    room,
    width,  # padded tiles
    steps,
    TILE_VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    blocks = tl.cdiv(room, PARTS)
    count = count_span_parts(parts, last, base, room)
    if tl.program_id(0) >= blocks:
        # The two branches share no names, because their tensors have different shapes.
        row = first + (tl.program_id(0) - blocks) * TOKENS + tl.arange(0, TOKENS)
        # Not a mask and a scalar's comparison, of which Triton 3.9's interpreter makes an integer.
        end = tl.where(count >= 0, last, -1)
        listed = row < end
        reached = row <= end
        start = tl.load(before + tl.load(parts.starts + row, mask=reached, other=0), mask=reached, other=0)
        start += row
        listed = listed & (start < most)
        tl.store(lists.ids + start, tl.load(targets + row, mask=listed, other=0).to(tl.int32), mask=listed)
        tl.store(lists.coefficients + start, tl.load(at_target + row, mask=listed, other=0.0), mask=listed)
        tl.store(lists.tokens + start, row, mask=listed)
        tl.store(starts + row, start, mask=reached)
    elif tl.program_id(0) * PARTS < count:
        part = tl.program_id(0).to(tl.int64) * PARTS + tl.arange(0, PARTS)
        inside = part < count
        column = tl.arange(0, TILE_VOCAB)[None, :]
        token, tile = (
            tl.load(tile_lists.token_of + part, mask=inside, other=first),
            tl.load(tile_lists.tile_of + part, mask=inside, other=0),
        )
        stored_at = part[:, None] * TILE_VOCAB + column
        high = tl.load(part_entries.high + stored_at, mask=inside[:, None], other=0)
        listed_entries = _find_magnitude(high) > tl.load(limits + token)[:, None]
        low = tl.load(part_entries.low + stored_at, mask=listed_entries, other=128).to(tl.int32)
        grad = _join_bits(high, low) * tl.load(parts.scale + token)[:, None]
        dropped = tl.where(listed_entries, 0.0, grad)
        dropped_sum = tl.sum(dropped, 1)
        share = tl.load(shares + tile[:, None] * TILE_VOCAB + column, mask=inside[:, None], other=0.0)
        # The sum replaces the dropped entries only if its shares are closer to them than zeros are.
        error = dropped - dropped_sum[:, None] * share
        replaces = tl.sum(error * error, 1) <= tl.sum(dropped * dropped, 1)
        dropped_sum = times_slope(tl.where(replaces, dropped_sum, 0.0), steps)
        sum_at = parts.dropped_sums + token.to(tl.int64) * width + tile
        tl.store(sum_at, dropped_sum.to(parts.dropped_sums.dtype.element_ty), mask=inside)
        at = tl.load(before + base + part, mask=inside, other=0) + token + 1
        number = listed_entries.to(tl.int32)
        place = at[:, None] + (tl.cumsum(number, 1) - number)
        listed_entries = listed_entries & (place < most)
        tl.store(lists.ids + place, tile[:, None] * TILE_VOCAB + column, mask=listed_entries)
        tl.store(lists.coefficients + place, times_slope(grad, steps), mask=listed_entries)
        tl.store(lists.tokens + place, token[:, None] + tl.zeros((PARTS, TILE_VOCAB), tl.int32), mask=listed_entries)


def write_lists(
    part_entries: PartEntries,  # `span.room` parts or more
    parts: SelectedParts,  # `dropped_sums` of the selected parts are written
    tile_lists: TileLists,
    shares: EntryShares,
    targets: tuple[Tensor, Tensor],  # (n,) ids and dL/dx
    span: Span,
    transform: LogitTransform,
    before: Tensor,  # (parts + 1,) int64: number of listed entries in all earlier parts, without targets; zeros
    out: Entries,  # of all spans; entries past the end of its memory are not written
    starts: Tensor,  # (n + 1,) int64, written: first entry of each token of the span, and of the token after the span
) -> None:
    """Drop the smallest entries of each token of the span, as many as fit its budget, and list the other entries.

    Spans are written in order.
    """
    device, tokens, width = starts.device, span.last - span.first, part_entries.high.shape[1]
    limits = torch.empty(starts.numel(), dtype=torch.int32, device=device)
    counts = torch.zeros(span.room, dtype=torch.int32, device=device)
    parts_per_program = max(WRITE_ENTRIES // width, 1)
    with launch_context(device):
        _limits_kernel[(tokens,)](
            part_entries, parts, limits, counts, *span, TILE_VOCAB=width, ENTRIES=LIMIT_ENTRIES, num_warps=LIMIT_WARPS
        )
        sums = before[span.base + 1 : span.base + span.room + 1]
        torch.cumsum(counts, 0, out=sums)
        if span.base:
            sums += before[span.base]
        _write_kernel[(triton.cdiv(span.room, parts_per_program) + triton.cdiv(tokens + 1, WRITE_TOKENS),)](
            part_entries, parts, tile_lists, shares.shares, *targets, limits, before, out, starts,
            out.ids.numel(), *span, parts.dropped_sums.shape[1], LogitSteps.of(transform),
            TILE_VOCAB=width, PARTS=parts_per_program, TOKENS=WRITE_TOKENS,
        )  # fmt: skip
