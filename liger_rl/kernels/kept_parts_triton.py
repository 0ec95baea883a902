"""Gradients of two heads from chosen parts alone, as Triton products whose rows are gathered.

Both heads' logits of a tile's kept tokens are made again, and become dL/dlogits in registers. These are stored one part
after another, tile by tile. The weight's gradient sums, for each tile, their products with the gathered hidden states.
The hidden states' is made in two steps: a row of each part, and for each token the sum of its rows. Every sum has one
program and a fixed order: no atomics, the same bits on every run.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.kernels import devices
from liger_rl.kernels.block_lists import BlockLists
from liger_rl.kernels.devices import family_of, on
from liger_rl.kernels.divergence_tiles import Drawn
from liger_rl.kernels.kept_parts import LeftOutParts, PartInputs, PartSums
from liger_rl.kernels.launches import Launched, cdiv, next_power_of_2
from liger_rl.kernels.matrix_triton import load, load_picked, matrix, store
from liger_rl.kernels.pair_tiles import divergence_gradient, with_other_gradients
from liger_rl.kernels.softmax import flushed_exp, times_derivative, transformed
from liger_rl.kernels.transform import LogitSteps

# Tokens and entries of a program's parts, of which there are two products in registers; columns of H in one sum.
PART_TOKENS, PART_ENTRIES = 128, 128
# One H200, H = 2048, 9.6% kept, in TFLOPS: both heads 428 with four stages, 383 with three, 413 in steps of 128. With
# the teacher's logits in memory, read by the student's product of 256 entries, 436. The weight's sums 447 with 128
# columns and four warps, 351 with 256 and eight. Parts read by TMA were no faster.
HIDDEN_COLUMNS, WEIGHT_COLUMNS, ADDED_COLUMNS = 256, 128, 1024
WARPS = 8
WEIGHT_WARPS = 4  # on GPUs whose sums of so many warps spill no registers: those with TMA


def applies(inputs: PartInputs) -> bool:
    """Whether these kernels run: where the products of our own do, but for any number of tokens."""
    return all(
        devices.applies_to(devices.MIN_TOKENS, head.hidden.shape[1], head.hidden.dtype, head.weight)
        and devices.aligned(head.hidden)
        for head in (inputs.student, inputs.teacher)
    )


@triton.jit
def _logits(
    hidden, weight, bias, size, steps, row, first, vocab,
    ENTRIES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """-> transformed logits (rows, ENTRIES) of gathered rows, and tanh^2; past the last entry they are noise."""
    total = tl.zeros((row.shape[0], ENTRIES), tl.float32)
    for step in range(tl.cdiv(size, STEP)):
        left = load_picked(hidden, row, step * STEP, STEP)
        total = tl.dot(left, load(weight, first, step * STEP, ENTRIES, STEP).T, total)
    if bias is not None:
        column = first + tl.arange(0, ENTRIES)
        total += tl.load(bias + column, mask=column < vocab, other=0.0).to(tl.float32)[None, :]
    return transformed(total, steps)


@triton.jit
def _gradient(
    hidden, weight, bias, size, steps, teacher_hidden, teacher_weight, teacher_bias, teacher_size, teacher_steps,
    targets, tokens, row, inside, first, vocab, beta,
    KIND: tl.constexpr, ENTRIES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """-> dL/dlogits (rows, ENTRIES) float32 of gathered rows; 0 of those not inside and past the last entry.

    Without targets no entry is one.
    """
    z, square = _logits(hidden, weight, bias, size, steps, row, first, vocab, ENTRIES, STEP)
    t, _square = _logits(
        teacher_hidden, teacher_weight, teacher_bias, teacher_size, teacher_steps, row, first, vocab, ENTRIES, STEP
    )
    log_p = z - tl.load(tokens.lse + row)[:, None]
    log_q = t - tl.load(tokens.teacher_lse + row)[:, None]
    p = flushed_exp(log_p)
    value = 0.0
    if tokens.value is not None:
        value = tl.load(tokens.value + row)[:, None]
    grad = divergence_gradient(log_p, log_q, p, flushed_exp(log_q), value, beta, KIND)
    grad *= tl.load(tokens.grad + row)[:, None]
    column = first + tl.arange(0, ENTRIES)
    target = tl.full(row.shape, -1, tl.int64)
    if targets is not None:
        target = tl.load(targets + row)
    grad = with_other_gradients(grad, p, log_p, row, inside, target, column, tokens)
    grad = times_derivative(grad, square, steps)
    return tl.where(inside[:, None] & (column < vocab)[None, :], grad, 0.0)


@Launched
@triton.jit
def _sizes_kernel(
    out,  # (vocab,) float32
    hidden,  # a `matrix` (tokens, H)
    weight,  # a `matrix` (vocab, H)
    bias,
    size,  # H
    steps,
    teacher_hidden,
    teacher_weight,
    teacher_bias,
    teacher_size,
    teacher_steps,
    drawn,  # `Drawn`
    tokens,  # `PairGradients`
    vocab,
    beta,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    STEP: tl.constexpr,
):
    first = tl.program_id(0) * ENTRIES
    sample = tl.arange(0, ROWS)
    row, scale = tl.load(drawn.rows + sample), tl.load(drawn.scales + sample)
    grad = _gradient(
        hidden, weight, bias, size, steps, teacher_hidden, teacher_weight, teacher_bias, teacher_size, teacher_steps,
        None, tokens, row, sample >= 0, first, vocab, beta, KIND, ENTRIES, STEP,
    )  # fmt: skip
    sizes = tl.abs(grad) * scale[:, None]
    column = first + tl.arange(0, ENTRIES)
    tl.store(out + column, tl.sum(tl.where(sizes < float("inf"), sizes, 0.0), 0), mask=column < vocab)


@triton.jit
def _parts_at(chunk, lists, first_tile, last_tile, ROWS: tl.constexpr, TILES: tl.constexpr):
    """-> the tile of so many of its parts side by side, their positions, and which of them there are."""
    tile = tl.arange(0, TILES)
    here = (tile >= first_tile) & (tile < last_tile)
    chunks = tl.cdiv(tl.load(lists.tile_count + tile, mask=here, other=0), ROWS)
    here = tl.sum((tl.cumsum(chunks, 0) <= chunk).to(tl.int32), 0)
    before = tl.sum(tl.where(tile < here, chunks, 0), 0)
    end = tl.load(lists.tile_end + here)
    position = end - tl.load(lists.tile_count + here) + (chunk - before) * ROWS + tl.arange(0, ROWS)
    return here, position, position < end


@Launched
@triton.jit(do_not_specialize=["base", "first_tile", "last_tile"])
def _parts_kernel(
    out,  # (room, TILE_VOCAB)
    lists,  # `BlockLists` of rows of one token
    base,  # the position that the first of the room is for
    first_tile,
    last_tile,
    hidden,  # as in `_sizes_kernel`
    weight,
    bias,
    size,
    steps,
    teacher_hidden,
    teacher_weight,
    teacher_bias,
    teacher_size,
    teacher_steps,
    targets,
    tokens,
    vocab,
    beta,
    KIND: tl.constexpr,
    TILE_VOCAB: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    STEP: tl.constexpr,
    TILES: tl.constexpr,
):
    # Neighbours share their rows.
    slices: tl.constexpr = TILE_VOCAB // ENTRIES
    chunk, entry = tl.program_id(0) // slices, tl.program_id(0) % slices * ENTRIES
    tile, position, inside = _parts_at(chunk, lists, first_tile, last_tile, ROWS, TILES)
    row = tl.load(lists.row + position, mask=inside, other=0)
    grad = _gradient(
        hidden, weight, bias, size, steps, teacher_hidden, teacher_weight, teacher_bias, teacher_size, teacher_steps,
        targets, tokens, row, inside, tile * TILE_VOCAB + entry, vocab, beta, KIND, ENTRIES, STEP,
    )  # fmt: skip
    place = out + (position - base).to(tl.int64)[:, None] * TILE_VOCAB + entry + tl.arange(0, ENTRIES)[None, :]
    tl.store(place, grad.to(out.dtype.element_ty), mask=inside[:, None])


@Launched
@triton.jit(do_not_specialize=["base", "first_tile", "last_tile"])
def _rows_kernel(
    parts,  # (room, TILE_VOCAB)
    weight,  # a `matrix` (vocab, H)
    out,  # (room, H) float32
    lists,
    base,
    first_tile,
    last_tile,
    size,
    TILE_VOCAB: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    TILES: tl.constexpr,
):
    """Each part's product with the weight."""
    slabs = tl.cdiv(size, COLUMNS)
    chunk, column = tl.program_id(0) // slabs, tl.program_id(0) % slabs * COLUMNS
    tile, position, inside = _parts_at(chunk, lists, first_tile, last_tile, ROWS, TILES)
    first, place = tile * TILE_VOCAB, (position - base).to(tl.int64)[:, None]
    starts = parts + place * TILE_VOCAB
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for entry in range(0, TILE_VOCAB, STEP):
        grad = tl.load(starts + entry + tl.arange(0, STEP)[None, :], mask=inside[:, None], other=0.0)
        total = tl.dot(grad, load(weight, first + entry, column, STEP, COLUMNS), total)
    columns = column + tl.arange(0, COLUMNS)
    tl.store(out + place * size + columns[None, :], total, mask=inside[:, None] & (columns < size)[None, :])


@Launched
@triton.jit(do_not_specialize=["base", "kept"])
def _add_rows_kernel(rows, out, lists, base, kept, size, COLUMNS: tl.constexpr):
    """Onto each token the rows of its parts that are in the room, in the order of their tiles."""
    token = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    end = tl.load(lists.row_end + token)
    first = end - tl.load(lists.row_count + token)
    if first < end:
        place = out + token.to(tl.int64) * size + column
        total = tl.load(place, mask=inside, other=0.0)
        for at in range(first, end):
            position = tl.load(lists.by_row + at) - base
            known = tl.where((position >= 0) & (position < kept), size, 0)
            total += tl.load(rows + position.to(tl.int64) * size + column, mask=column < known, other=0.0)
        tl.store(place, total, mask=inside)


@Launched
@triton.jit(do_not_specialize=["base", "first_tile"])
def _weight_kernel(
    parts,  # (room, TILE_VOCAB)
    hidden,  # a `matrix` (tokens, H)
    out,  # a `matrix` (vocab, H)
    lists,
    base,
    first_tile,
    shares,  # (tiles, TILE_VOCAB) float32
    left_out,  # (tiles, H) float32
    size,
    TILE_VOCAB: tl.constexpr,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Each tile's products of its parts and their hidden states, onto the shares of what is left out."""
    slices: tl.constexpr = TILE_VOCAB // ENTRIES
    slabs = tl.cdiv(size, COLUMNS)
    item = tl.program_id(0)
    tile = first_tile + item // (slabs * slices)
    entry, column = item // slabs % slices * ENTRIES, item % slabs * COLUMNS
    end = tl.load(lists.tile_end + tile)
    first = end - tl.load(lists.tile_count + tile)
    total = tl.zeros((ENTRIES, COLUMNS), tl.float32)
    # Rows are known a step ahead of what they address, which can then be fetched as early as the parts.
    ahead = tl.minimum(first + tl.arange(0, STEP), end - 1)
    row = tl.load(lists.row + ahead, mask=ahead >= first, other=0)
    for start in tl.range(first, end, STEP):
        position = start + tl.arange(0, STEP)
        place = parts + (position - base).to(tl.int64)[:, None] * TILE_VOCAB + entry + tl.arange(0, ENTRIES)[None, :]
        grad = tl.load(place, mask=(position < end)[:, None], other=0.0)
        total = tl.dot(grad.T, load_picked(hidden, row, column, COLUMNS), total)
        row = tl.load(lists.row + tl.minimum(position + STEP, end - 1))
    columns = column + tl.arange(0, COLUMNS)
    share = tl.load(shares + tile * TILE_VOCAB + entry + tl.arange(0, ENTRIES))
    rest = tl.load(left_out + tile.to(tl.int64) * size + columns, mask=columns < size, other=0.0)
    store(out, tile * TILE_VOCAB + entry, column, total + share[:, None] * rest[None, :])


@Launched
@triton.jit(do_not_specialize=["base", "first_tile"])
def _bias_kernel(
    parts,  # (room, TILE_VOCAB)
    out,  # (vocab,)
    lists,
    base,
    first_tile,
    shares,  # (tiles, TILE_VOCAB) float32
    left_out,  # (tiles,) float32
    vocab,
    TILE_VOCAB: tl.constexpr,
    ENTRIES: tl.constexpr,
    STEP: tl.constexpr,
):
    tile = first_tile + tl.program_id(0)
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    end = tl.load(lists.tile_end + tile)
    total = tl.zeros((ENTRIES,), tl.float32)
    for start in range(end - tl.load(lists.tile_count + tile), end, STEP):
        position = start + tl.arange(0, STEP)
        place = parts + (position - base).to(tl.int64)[:, None] * TILE_VOCAB + entry[None, :]
        total += tl.sum(tl.load(place, mask=(position < end)[:, None], other=0.0).to(tl.float32), 0)
    total += tl.load(shares + tile * TILE_VOCAB + entry) * tl.load(left_out + tile)
    column = tile * TILE_VOCAB + entry
    tl.store(out + column, total.to(out.dtype.element_ty), mask=column < vocab)


def _heads(inputs: PartInputs) -> list[Any]:
    """Both heads as kernels take them."""
    family, given = family_of(inputs.student.hidden.device), []
    for hidden, weight, bias, transform in (inputs.student, inputs.teacher):
        given += [
            matrix(hidden, 1, family.step, tma=False),
            matrix(weight, PART_ENTRIES, family.step, tma=family.tma),
            None if bias is None else bias.contiguous(),
            hidden.shape[1],
            LogitSteps.of(transform),
        ]
    return given


def entry_sizes(inputs: PartInputs, drawn: Drawn) -> Tensor:
    """As `kept_parts.entry_sizes`, in one launch; the number of samples is a power of 2, and 16 at least."""
    (vocab, _), device = inputs.student.weight.shape, inputs.student.hidden.device
    family, out = family_of(device), torch.empty(vocab, dtype=torch.float32, device=device)
    with on(device):
        _sizes_kernel[(cdiv(vocab, PART_ENTRIES),)](
            out, *_heads(inputs), drawn, inputs.tokens.contiguous(), vocab, inputs.measure.beta,
            KIND=inputs.measure.kind, ROWS=drawn.rows.numel(), ENTRIES=PART_ENTRIES, STEP=family.step,
            num_stages=family.storing_stages, num_warps=WARPS // 2,
        )  # fmt: skip
    return out


class _Span(NamedTuple):
    """Tiles `first` to `last`, and what they keep."""

    first: int
    last: int
    kept: int  # parts
    chunks: int  # of so many of a tile's parts


def _spans(counts: list[int], room: int) -> list[_Span]:
    """Runs of tiles with at most so many parts, at least one tile each."""
    spans, first, kept = [], 0, 0
    for tile, count in enumerate([*counts, room + 1]):
        if tile > first and kept + count > room:
            spans.append(_Span(first, tile, kept, sum(cdiv(c, PART_TOKENS) for c in counts[first:tile])))
            first, kept = tile, 0
        kept += count
    return spans


class Begun(NamedTuple):
    """As `kept_parts.Begun`."""

    inputs: PartInputs
    heads: list[Any]  # as kernels take them
    lists: BlockLists

    @property
    def numbers(self) -> Tensor:
        return self.lists.tile_count


def begin(inputs: PartInputs, keep: Tensor, wanted: Tensor) -> Begun:
    """As `kept_parts.begin`."""
    inputs = inputs._replace(targets=inputs.targets.contiguous(), tokens=inputs.tokens.contiguous())
    with on(keep.device):
        return Begun(inputs, _heads(inputs), BlockLists.of(keep, wanted, order_rows=False))


def add_parts(begun: Begun, counts: list[int], left_out: LeftOutParts, sums: PartSums, workspace: int) -> None:
    """As `kept_parts.add_parts`, in four launches for each run of tiles whose parts fit the workspace."""
    inputs, heads, lists = begun
    student, targets, tokens, width = inputs.student, inputs.targets, inputs.tokens, left_out.shares.shape[1]
    hidden, (vocab, size), family = student.hidden, student.weight.shape, family_of(student.hidden.device)
    per_part, step = width * hidden.element_size() + (0 if sums.hidden is None else 4 * size), family.step
    spans, base = _spans(counts, workspace // per_part), 0
    most = max(span.kept for span in spans)
    parts = torch.empty(most, width, dtype=hidden.dtype, device=hidden.device)
    rows = None if sums.hidden is None else torch.empty(most, size, dtype=torch.float32, device=hidden.device)
    with on(hidden.device):
        for first, last, kept, chunks in spans:
            places = {"ROWS": PART_TOKENS, "STEP": step, "TILES": next_power_of_2(len(counts)), "num_warps": WARPS}
            if kept:
                _parts_kernel[(chunks * (width // PART_ENTRIES),)](
                    parts, lists, base, first, last, *heads, targets, tokens, vocab, inputs.measure.beta,
                    KIND=inputs.measure.kind, TILE_VOCAB=width, ENTRIES=PART_ENTRIES,
                    num_stages=family.stages, **places,
                )  # fmt: skip
            if kept and rows is not None and sums.hidden is not None:
                _rows_kernel[(chunks * cdiv(size, HIDDEN_COLUMNS),)](
                    parts, matrix(student.weight, step, HIDDEN_COLUMNS, tma=family.tma), rows, lists, base, first, last,
                    size, TILE_VOCAB=width, COLUMNS=HIDDEN_COLUMNS, num_stages=family.storing_stages, **places,
                )  # fmt: skip
                _add_rows_kernel[(hidden.shape[0], cdiv(size, ADDED_COLUMNS))](
                    rows, sums.hidden, lists, base, kept, size, COLUMNS=ADDED_COLUMNS
                )
            if sums.weight is not None:
                _weight_kernel[((last - first) * (width // PART_ENTRIES) * cdiv(size, WEIGHT_COLUMNS),)](
                    parts, matrix(hidden, 1, WEIGHT_COLUMNS, tma=False),
                    matrix(sums.weight[:vocab], PART_ENTRIES, WEIGHT_COLUMNS, tma=False), lists, base, first,
                    left_out.shares, left_out.hidden, size,
                    TILE_VOCAB=width, ENTRIES=PART_ENTRIES, COLUMNS=WEIGHT_COLUMNS, STEP=step,
                    num_stages=family.storing_stages, num_warps=WEIGHT_WARPS if family.tma else WARPS,
                )  # fmt: skip
            if sums.bias is not None:
                _bias_kernel[(last - first, width // PART_ENTRIES)](
                    parts, sums.bias, lists, base, first, left_out.shares, left_out.total, vocab,
                    TILE_VOCAB=width, ENTRIES=PART_ENTRIES, STEP=step,
                )  # fmt: skip
            base += kept
