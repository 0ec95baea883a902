"""Logits at listed ids, and sums over segments of them, as Triton kernels, with the formulas of `segment_sums`.

The first piece of a segment (`piece_of` has its size) belongs to the segment's own program. Its other positions are cut
at multiples of the piece. At most one segment has such positions in a cut: a segment that starts inside the cut has its
first piece there. So the host needs no segment's length, and each sum has one order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.kernels.devices import launch_context
from liger_rl.kernels.limits import LIMITS, Launch
from liger_rl.kernels.softmax_triton import transform_logits
from liger_rl.kernels.transform import LogitSteps, LogitTransform
from liger_rl.support.segment_sums import PARTIAL_BYTES, Entries, Factors, Segments, Slots

# docs/notes/kernels.md has the times of these shapes and of others.
DOTS = Launch(slots=4, columns=1024, warps=4, piece=32)
SORTING_WARPS = 4  # of `_by_id_kernel`


@triton.jit
def _span(program, of_position, starts, count, piece):
    """-> the segment of a program, and the first and last + 1 of the program's positions in it.

    Programs under `count` take the first piece of their segment. Program `count` + k takes the cut that starts at
    position k `piece`: the positions there that follow the first piece of their segment.
    """
    has_first_piece = program < count
    position = (program - count) * piece
    cut_segment = tl.load(of_position + position, mask=program >= count, other=0).to(tl.int64)
    valid = (cut_segment >= 0) & (cut_segment < count)
    segment = tl.where(has_first_piece, program, tl.where(valid, cut_segment, 0))
    begin = tl.load(starts + segment)
    end = tl.load(starts + segment + 1)
    first = tl.where(has_first_piece, begin, tl.maximum(position, begin + piece))
    last = tl.where(has_first_piece, tl.minimum(end, begin + piece), tl.minimum(end, position + piece))
    return segment, first, tl.where(has_first_piece | valid, last, first)


@triton.jit
def _dots(left, right, right_stride, row, has_row, columns, SLOTS: tl.constexpr, COLUMNS: tl.constexpr):
    """-> (SLOTS,) dot products of `left` (columns,) with the rows `row` of `right`."""
    total = tl.zeros((SLOTS, COLUMNS), tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < columns
        left_values = tl.load(left + column, mask=inside, other=0.0).to(tl.float32)
        right_places = right + row[:, None] * right_stride + column[None, :]
        right_values = tl.load(right_places, mask=has_row[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += right_values * left_values[None, :]
    return tl.sum(total, 1)


@triton.jit(do_not_specialize=["tokens"])
def _dots_kernel(
    factors,  # `Factors`
    strides,  # `Factors` of the elements between two rows
    slots,  # `Slots`
    logits,
    tokens,
    columns,
    steps,  # LogitSteps
    PIECE: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token, first, last = _span(tl.program_id(0).to(tl.int64), slots.tokens, slots.starts, tokens, PIECE)
    for start in range(first, last, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        row = tl.load(slots.ids + slot, mask=slot < last, other=slots.vocab).to(tl.int64)
        has_row = row < slots.vocab
        if tl.max(has_row.to(tl.int32)) > 0:
            hidden_row = factors.hidden + token * strides.hidden
            x = _dots(hidden_row, factors.weight, strides.weight, row, has_row, columns, SLOTS, COLUMNS)
            if factors.bias is not None:
                x += tl.load(factors.bias + row, mask=has_row, other=0.0).to(tl.float32)
            z, _square = transform_logits(x, steps)
            tl.store(logits + slot, z, mask=has_row)


def dots(factors: Factors, slots: Slots, transform: LogitTransform, launch: Launch = DOTS) -> Tensor:
    """As `segment_sums.dots`; the last dimensions must be contiguous."""
    n, positions, columns = slots.kinds.numel(), slots.ids.numel(), factors.hidden.shape[1]
    logits = torch.empty(positions, dtype=torch.float32, device=factors.hidden.device)
    if n == 0:
        return logits
    if factors.bias is not None:
        factors = factors._replace(bias=factors.bias.contiguous())
    strides = Factors._make(None if part is None else part.stride(0) for part in factors)
    with launch_context(logits.device):
        _dots_kernel[(n + triton.cdiv(positions, launch.piece),)](
            factors, strides, slots, logits, n, columns, LogitSteps.of(transform),
            PIECE=launch.piece, SLOTS=launch.slots, COLUMNS=_columns(columns, launch),
            num_warps=launch.warps,
        )  # fmt: skip
    return logits


def _columns(columns: int, launch: Launch) -> int:
    return min(launch.columns, max(16, 1 << (columns - 1).bit_length()))


@triton.jit(do_not_specialize=["count", "rows", "searches"])
def _by_id_kernel(
    ids,  # (count,) int32, ascending
    order,  # (count,) int64: positions before the sort
    entries,  # `Entries`
    coefficients,  # (count,), written, as are the next two
    tokens,  # (count,)
    starts,  # (rows + 1,) int64
    count,
    rows,
    searches,  # steps of a binary search for a position
    STEP: tl.constexpr,
):
    blocks = tl.cdiv(count, STEP)
    if tl.program_id(0) < blocks:
        place = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
        inside = place < count
        before = tl.load(order + place, mask=inside, other=0)
        tl.store(coefficients + place, tl.load(entries.coefficients + before, mask=inside, other=0.0), mask=inside)
        tl.store(tokens + place, tl.load(entries.tokens + before, mask=inside, other=0), mask=inside)
    else:
        row = (tl.program_id(0) - blocks).to(tl.int64) * STEP + tl.arange(0, STEP)
        low = row * 0
        high = low + count
        for _ in range(searches):
            middle = (low + high) // 2
            under = (low < high) & (tl.load(ids + middle, mask=low < high, other=0).to(tl.int64) < row)
            low = tl.where(under, middle + 1, low)
            high = tl.where(under, high, middle)
        tl.store(starts + row, low, mask=row <= rows)


def order_by_id(entries: Entries, rows: int) -> tuple[Segments, Tensor, Tensor]:
    """As `segment_sums.order_by_id`."""
    (ids, order), count = torch.sort(entries.ids, stable=True), entries.ids.numel()
    coefficients, tokens = torch.empty_like(entries.coefficients), torch.empty_like(entries.tokens)
    starts = torch.empty(rows + 1, dtype=torch.int64, device=ids.device)
    step = LIMITS.sorted_ids
    with launch_context(ids.device):
        _by_id_kernel[(triton.cdiv(count, step) + triton.cdiv(rows + 1, step),)](
            ids, order, entries, coefficients, tokens, starts, count, rows, count.bit_length(),
            STEP=step, num_warps=SORTING_WARPS,
        )  # fmt: skip
    return Segments(starts, ids, by_id=True), coefficients, tokens


@triton.jit
def _weighted_rows(
    coefficients, indices, table, stride, first, last, column, inside, SLOTS: tl.constexpr, COLUMNS: tl.constexpr
):
    """-> (COLUMNS,) float32: sum of coefficients times rows of the table, over positions `first` to `last` - 1."""
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(first, last, SLOTS):
        place = start + tl.arange(0, SLOTS)
        coefficient = tl.load(coefficients + place, mask=place < last, other=0.0)
        nonzero = coefficient != 0.0
        # The mask does not depend on the coefficients, so the two loads do not wait for each other.
        row = tl.load(indices + place, mask=place < last, other=0).to(tl.int64)
        values = table + row[:, None] * stride + column[None, :]
        values = tl.load(values, mask=nonzero[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += tl.sum(values * coefficient[:, None], 0)
    return total


@triton.jit(do_not_specialize=["count", "piece"])
def _pieces_kernel(
    coefficients,
    indices,
    table,
    table_stride,
    starts,
    of_position,
    partial,  # (pieces, columns) float32
    count,
    columns,
    piece,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    cut = tl.program_id(0).to(tl.int64)
    _segment, first, last = _span(cut + count, of_position, starts, count, piece)
    if first < last:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < columns
        total = _weighted_rows(coefficients, indices, table, table_stride, first, last, column, inside, SLOTS, COLUMNS)
        tl.store(partial + cut * columns + column, total, mask=inside)


@triton.jit(do_not_specialize=["count", "piece"])
def _sums_kernel(
    coefficients,
    indices,
    table,
    table_stride,
    starts,
    partial,
    out,  # (count, columns)
    out_stride,
    count,
    columns,
    piece,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * SEGMENTS
    segment = first + tl.arange(0, SEGMENTS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    valid = segment < count
    begins = tl.load(starts + segment, mask=valid, other=0)
    ends = tl.load(starts + segment + 1, mask=valid, other=0)
    empty = begins == ends
    # Most ids are in no row. All empty segments of a program are written at once and wait for memory once.
    rows = out + segment[:, None] * out_stride + column[None, :]
    zeros = tl.zeros((SEGMENTS, COLUMNS), out.dtype.element_ty)
    tl.store(rows, zeros, mask=(valid & empty)[:, None] & inside[None, :])
    number = tl.cumsum((empty == 0).to(tl.int32), 0)
    for which in range(tl.max(number)):
        here = (number == which + 1) & (empty == 0)
        row = tl.sum(tl.where(here, segment, 0))
        begin = tl.sum(tl.where(here, begins, 0))
        end = tl.sum(tl.where(here, ends, 0))
        last = tl.minimum(end, begin + piece)
        total = _weighted_rows(coefficients, indices, table, table_stride, begin, last, column, inside, SLOTS, COLUMNS)
        if end > last:
            after = (end - 1) // piece + 1
            for start in range(last // piece, after, SLOTS):
                cut = start + tl.arange(0, SLOTS)
                values = partial + cut[:, None] * columns + column[None, :]
                total += tl.sum(tl.load(values, mask=(cut < after)[:, None] & inside[None, :], other=0.0), 0)
        place = out + row * out_stride + column
        tl.store(place, total.to(out.dtype.element_ty), mask=inside)


def segment_sums(
    segments: Segments,
    coefficients: Tensor,
    indices: Tensor,
    table: Tensor,
    out: Tensor,
    *,
    launch: Launch | None = None,
) -> None:
    """As `segment_sums.segment_sums`, in one order; the last dimensions must be contiguous."""
    assert table.shape[1] == 1 or table.stride(-1) == out.stride(-1) == 1
    if launch is None:
        by_tokens = LIMITS.by_token if segments.all_short else LIMITS.by_long_token
        launch = LIMITS.by_id if segments.by_id else by_tokens
    positions, columns = coefficients.numel(), table.shape[1]
    if segments.number == 0 or columns == 0:
        return
    piece = piece_of(positions, columns, launch)
    pieces = triton.cdiv(positions, piece)
    partial = coefficients  # any tensor: nothing reads it if no segment is cut
    width = _columns(columns, launch)
    slots = launch.slots * (launch.columns // width)  # a step reads as many numbers with few columns as with many
    slabs = triton.cdiv(columns, width)
    sizes = {"SLOTS": slots, "COLUMNS": width, "num_warps": launch.warps}
    common = (coefficients, indices, table, table.stride(0), segments.starts)
    with launch_context(out.device):
        if not segments.all_short:
            partial = torch.empty(pieces, columns, dtype=torch.float32, device=out.device)
            _pieces_kernel[(pieces, slabs)](
                *common, segments.of_position, partial, segments.number, columns, piece, **sizes
            )
        _sums_kernel[(triton.cdiv(segments.number, launch.segments), slabs)](
            *common, partial, out, out.stride(0), segments.number, columns, piece,
            SEGMENTS=launch.segments, **sizes,
        )  # fmt: skip


def piece_of(positions: int, columns: int, launch: Launch) -> int:
    """Positions of a piece: `launch.piece`, doubled until the sums of all pieces fit PARTIAL_BYTES."""
    piece = launch.piece
    while piece < positions and triton.cdiv(positions, piece) * columns * 4 > PARTIAL_BYTES:
        piece *= 2
    return piece
