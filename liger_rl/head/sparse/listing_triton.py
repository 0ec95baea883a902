"""From kept parts of a gradient to a list of entries for each token, as Triton kernels: README steps 5 and 6.

`bounds_triton` chooses the kept parts. Then

- `list_tiles` gathers, for each tile, the tokens that keep it, and `make_parts` computes these parts again;
- `write_lists` finds, for each token, the largest size up to which all entries may be dropped together. It lists the
  larger entries, and writes the sum of the dropped entries as the part's rest.

A token's list has its target first, then its other ids, tile by tile, ascending.

Each result is written by one program, in a fixed order: no atomics, the same bits on every run.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.head.sparse.bounds_triton import ChosenParts
from liger_rl.kernels.devices import family_of, launch_context
from liger_rl.kernels.segment_sums import Entries
from liger_rl.kernels.softmax_triton import flushed_exp, gradient, times_slope, token_terms
from liger_rl.kernels.statistics import PART_VOCAB, Tail, TokenGradients
from liger_rl.kernels.tile_lists_triton import (
    PRODUCT_WARPS,
    ROWS,
    Span,
    TileLists,
    count_span_parts,
    gather_logits,
    pick_tile_tokens,
    product_arguments,
)
from liger_rl.kernels.transform import HeadFactors, LogitSteps, LogitTransform

COUNTED, COUNTING_WARPS = 2048, 8  # entries of a step of `_limits_kernel`
WRITTEN, WRITTEN_TOKENS = 2048, 1024  # entries, or tokens, of a program of `_write_kernel`
LEVEL_BITS = tl.constexpr(4)  # last bits of `Parts.high` that are 0 in a level: eight levels for each power of 2
# Sums of squares take `Parts.high` alone, whose numbers are off by at most 2^-8, relative.
ROUNDING_OF_SQUARES = tl.constexpr(1.0 - 2.0**-7)


class Parts(NamedTuple):
    """Entries of kept parts, relative to the scale of their token: the first 24 bits of float32 numbers.

    `high` decides which entries are listed. `low` is read for listed entries only. Float16 would round them by up to
    2^-11, which is more than a tolerance of 3e-4.
    """

    high: Tensor  # (room, width) int16: sign, exponent and 7 bits of the mantissa
    low: Tensor  # (room, width) uint8: the next 8 bits of the mantissa

    @classmethod
    def empty(cls, room: int, width: int, device: torch.device) -> "Parts":
        high = torch.empty(room, width, dtype=torch.int16, device=device)
        return cls(high, torch.empty(room, width, dtype=torch.uint8, device=device))


@triton.jit
def _store_parts(parts, place, values, mask):
    bits = values.to(tl.int32, bitcast=True)
    tl.store(parts.high + place, (bits >> 16).to(tl.int16), mask=mask)
    tl.store(parts.low + place, (bits >> 8).to(tl.uint8), mask=mask)


@triton.jit
def _stored(high, low):
    """-> float32 numbers. `low` is int32. The bits that are not stored are in the middle of their range."""
    bits = (high.to(tl.int32) << 16) | (low << 8) | 128
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["base", "width"])
def _parts_kernel(
    out,  # `Parts`
    hidden, weight, bias, size, steps,  # of `product_arguments`
    targets,
    gradients,  # `TokenGradients`, (n,) each
    chosen,  # `ChosenParts`
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
        tl.program_id(0), chosen, lists, tiles, count, base, width, ROWS, TILES
    )  # fmt: skip
    if tile < tiles:
        first = tile * TILE_VOCAB
        z, square = gather_logits(hidden, weight, bias, size, steps, row, first, vocab, TILE_VOCAB, STEP)
        lse = tl.load(gradients.lse + row)[:, None]
        target = (tl.load(targets + row) - first)[:, None]
        per_scale = 1.0 / tl.load(chosen.scale + row)[:, None]
        g, e, entropy = token_terms(gradients, row, inside)
        ENTROPY: tl.constexpr = gradients.grad_entropy is not None
        if ENTROPY:
            e = e[:, None]
            entropy = entropy[:, None]
        column = tl.arange(0, TILE_VOCAB)
        known = (column < vocab - first)[None, :]
        log_p = z - lse
        grad = gradient(flushed_exp(log_p), log_p, None, 0.0, g[:, None], e, entropy, ENTROPY)
        if steps.cap is not None:
            grad *= 1.0 - square
        grad = tl.where(known & (column[None, :] != target), grad * per_scale, 0.0)
        _store_parts(out, part[:, None] * TILE_VOCAB + column[None, :], grad, inside[:, None])


def make_parts(
    head: HeadFactors,  # of the whole vocabulary, with hidden states in the compute dtype
    targets: Tensor,  # (n,)
    tokens: TokenGradients,  # (n,) each
    chosen: ChosenParts,
    lists: TileLists,
    span: Span,
    out: Parts,
) -> None:
    """Write the span's kept parts of dL/dz, in units of each token's scale; 0 at targets."""
    (tiles, n), family = chosen.rank.shape, family_of(chosen.rank.device)
    with launch_context(chosen.rank.device):
        _parts_kernel[(span.room // ROWS + tiles,)](
            out, *product_arguments(head, PART_VOCAB, family), targets.contiguous(), tokens.contiguous(), chosen, lists,
            span.base, span.last - span.first, tiles, n, head.weight.shape[0],
            TILE_VOCAB=PART_VOCAB, ROWS=ROWS, STEP=family.step, TILES=triton.next_power_of_2(tiles),
            num_stages=family.storing_stages, num_warps=PRODUCT_WARPS,
        )  # fmt: skip


# --- from parts to lists ----------------------------------------------------------------------------------------------


@triton.jit
def _level(value):
    """-> the largest level whose size is at most `value` in [0, 2]."""
    return value.to(tl.int32, bitcast=True) >> (16 + LEVEL_BITS)


@triton.jit
def _magnitude(high):
    """-> `Parts.high` as integers in the order of sizes. NaN is larger than all numbers."""
    return high.to(tl.int32) & 0x7FFF


@triton.jit(do_not_specialize=["first", "last", "base", "room"])
def _limits_kernel(
    parts,  # `Parts`
    chosen,  # `ChosenParts`
    limits,  # (n,) int32: the largest magnitude that is not listed
    counts,  # (room,) int32, zeros: number of listed entries of each part
    first,
    last,
    base,
    room,
    TILE_VOCAB: tl.constexpr,
    COUNTED: tl.constexpr,
):
    token = first + tl.program_id(0)
    begin = (tl.load(chosen.starts + token) - base) * TILE_VOCAB
    end = (tl.load(chosen.starts + token + 1) - base) * TILE_VOCAB
    end = tl.where(count_span_parts(chosen, last, base, room) > 0, end, begin)
    tolerated = tl.load(chosen.room + token) * ROUNDING_OF_SQUARES
    tolerated = tl.where(tolerated > 0.0, tolerated, 0.0)  # NaN becomes 0, too
    # All entries up to the low level fit in any case. One entry of the high level or more does not fit. None exceeds 1.
    low = _level(tl.minimum(tl.sqrt(tolerated / tl.maximum(end - begin, 1).to(tl.float32)) * ROUNDING_OF_SQUARES, 2.0))
    high = _level(tl.minimum(tl.sqrt(tolerated), 2.0)) + 1
    # A step tries three levels, so it reads the parts half as often as halving.
    while low + 1 < high:
        step = tl.maximum((high - low) // 4, 1)
        first_level = low + step
        second_level = tl.minimum(low + 2 * step, high)
        third_level = tl.minimum(low + 3 * step, high)
        under_first = tl.zeros((COUNTED,), tl.float32)
        under_second = tl.zeros((COUNTED,), tl.float32)
        under_third = tl.zeros((COUNTED,), tl.float32)
        for start in range(begin, end, COUNTED):
            place = start + tl.arange(0, COUNTED)
            stored = tl.load(parts.high + place, mask=place < end, other=0)
            magnitude, value = _magnitude(stored), _stored(stored, 128)
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
    PARTS: tl.constexpr = COUNTED // TILE_VOCAB
    column = tl.arange(0, TILE_VOCAB)[None, :]
    for start in range(begin // TILE_VOCAB, end // TILE_VOCAB, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = part < end // TILE_VOCAB
        stored = tl.load(parts.high + part[:, None] * TILE_VOCAB + column, mask=inside[:, None], other=0)
        number = tl.sum((_magnitude(stored) > limit).to(tl.int32), 1)
        tl.store(counts + part, number, mask=inside)


@triton.jit(do_not_specialize=["most", "first", "last", "base", "room"])
def _write_kernel(
    parts,  # `Parts`
    chosen,  # `ChosenParts`
    tile_lists,  # `TileLists`
    entries,  # (V,) shares of the tail
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
    count = count_span_parts(chosen, last, base, room)
    if tl.program_id(0) >= blocks:
        # The two branches share no names, because their tensors have different shapes.
        row = first + (tl.program_id(0) - blocks) * TOKENS + tl.arange(0, TOKENS)
        # Not a mask and a scalar's comparison, of which Triton 3.9's interpreter makes an integer.
        end = tl.where(count >= 0, last, -1)
        listed = row < end
        reached = row <= end
        start = tl.load(before + tl.load(chosen.starts + row, mask=reached, other=0), mask=reached, other=0)
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
        high = tl.load(parts.high + stored_at, mask=inside[:, None], other=0)
        kept = _magnitude(high) > tl.load(limits + token)[:, None]
        low = tl.load(parts.low + stored_at, mask=kept, other=128).to(tl.int32)
        grad = _stored(high, low) * tl.load(chosen.scale + token)[:, None]
        left = tl.where(kept, 0.0, grad)
        rest = tl.sum(left, 1)
        share = tl.load(entries + tile[:, None] * TILE_VOCAB + column, mask=inside[:, None], other=0.0)
        # The rest replaces the dropped entries if its shares are closer to them than zeros are.
        away = left - rest[:, None] * share
        helps = tl.sum(away * away, 1) <= tl.sum(left * left, 1)
        rest = times_slope(tl.where(helps, rest, 0.0), steps).to(chosen.rest.dtype.element_ty)
        tl.store(chosen.rest + token.to(tl.int64) * width + tile, rest, mask=inside)
        at = tl.load(before + base + part, mask=inside, other=0) + token + 1
        number = kept.to(tl.int32)
        place = at[:, None] + (tl.cumsum(number, 1) - number)
        kept = kept & (place < most)
        tl.store(lists.ids + place, tile[:, None] * TILE_VOCAB + column, mask=kept)
        tl.store(lists.coefficients + place, times_slope(grad, steps), mask=kept)
        tl.store(lists.tokens + place, token[:, None] + tl.zeros((PARTS, TILE_VOCAB), tl.int32), mask=kept)


def write_lists(
    parts: Parts,  # `span.room` parts or more
    chosen: ChosenParts,  # `chosen.rest` gets the sums that are dropped from kept parts
    of_parts: TileLists,
    tail: Tail,
    targets: tuple[Tensor, Tensor],  # (n,) ids and dL/dx
    span: Span,
    transform: LogitTransform,
    before: Tensor,  # (parts + 1,) int64: number of listed entries in all earlier parts, without targets; zeros
    out: Entries,  # of all spans; entries past the end of its memory are not written
    starts: Tensor,  # (n + 1,) int64, written: first entry of each token of the span, and of the token after the span
) -> None:
    """Drop the smallest entries of each token of the span, as many as fit its room, and list the other entries.

    Earlier spans must have been written before.
    """
    device, tokens, width = starts.device, span.last - span.first, parts.high.shape[1]
    limits = torch.empty(starts.numel(), dtype=torch.int32, device=device)
    counts = torch.zeros(span.room, dtype=torch.int32, device=device)
    together = max(WRITTEN // width, 1)
    with launch_context(device):
        _limits_kernel[(tokens,)](
            parts, chosen, limits, counts, *span, TILE_VOCAB=width, COUNTED=COUNTED, num_warps=COUNTING_WARPS
        )
        sums = before[span.base + 1 : span.base + span.room + 1]
        torch.cumsum(counts, 0, out=sums)
        if span.base:
            sums += before[span.base]
        _write_kernel[(triton.cdiv(span.room, together) + triton.cdiv(tokens + 1, WRITTEN_TOKENS),)](
            parts, chosen, of_parts, tail.entries, *targets, limits, before, out, starts,
            out.ids.numel(), *span, chosen.rest.shape[1], LogitSteps.of(transform),
            TILE_VOCAB=width, PARTS=together, TOKENS=WRITTEN_TOKENS,
        )  # fmt: skip
