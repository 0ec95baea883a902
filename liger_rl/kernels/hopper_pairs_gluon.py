"""Both heads' products in one kernel, with the warps of `hopper_gluon`: neither's logits reach memory.

A group of warps has registers for one of its two halves of logits. It multiplies the teacher's first, and puts them
into shared memory in float32: 64 KiB a group, and what is left holds steps of half as many columns. Each thread reads
back what it wrote itself, a part of the columns at a time, beside the student's half in registers. What is stored of a
part takes the memory of the teacher's numbers, which nobody needs any more.
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import tma

from liger_rl.kernels.hopper_gluon import (
    EVEN_REGISTERS,
    HALF,
    LAYOUT,
    LOADING_REGISTERS,
    LOADING_WARPS,
    REGISTERS,
    TILE_VOCAB,
    WARPS,
    at_column,
    begin,
    buffers,
    descriptor,
    load_steps,
    product,
    with_bias,
)
from liger_rl.kernels.launches import Launched
from liger_rl.kernels.pair_tiles import fold_pair_tile, grad_pair_tile, of_teacher, store_at_target
from liger_rl.kernels.softmax import LOWEST
from liger_rl.kernels.tile_epilogues import column_of, part_of, tile_place, tokens_together

# One H200, bf16, V = 151808, 8,192 tokens, hidden sizes 2048 and 4096, the fold in turns with both bare products: 20.5
# and 22.8 ms. With 2 steps of 64 columns it took 32.3, with tiles of 128 entries whose logits both stay in registers
# 23.1, and with the teacher's logits in memory 27.0.
TILE_HIDDEN, STAGES = gl.constexpr(32), gl.constexpr(4)


@gluon.jit
def _load(heads, upper, lower, entries, barriers, where, tiles):
    teacher, teacher_weight, teacher_size, hidden, weight, hidden_size = heads
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        token_tile, vocab_tile = tile_place(tile, *where)
        token, entry = token_tile * (2 * HALF), vocab_tile * TILE_VOCAB
        step = load_steps(teacher, teacher_weight, token, entry, teacher_size, upper, lower, entries, barriers, step)
        step = load_steps(hidden, weight, token, entry, hidden_size, upper, lower, entries, barriers, step)


@gluon.jit
def _rows_of(vector, tile):
    """As the functions of these names in `pair_tiles`."""
    return gl.convert_layout(vector, gl.SliceLayout(1, tile.type.layout))


@gluon.jit
def _like(vector, other):
    return gl.convert_layout(vector, other.type.layout)


@gluon.jit
def _columns_of(tile):
    return gl.arange(0, tile.shape[1], gl.SliceLayout(0, tile.type.layout))


@gluon.jit
def _read_teacher(
    teacher, tile, token, live, first, vocab, PART: gl.constexpr, PARTS: gl.constexpr, WHOLE: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    numbers, _stride, _bias, _steps = teacher
    return numbers.index(PART).load(part_of(tile, PART, PARTS).type.layout)


@gluon.jit
def _finished(logits, teacher, column, vocab, WHOLE: gl.constexpr):
    return logits


@gluon.jit
def _store_part(out, row, first, PART: gl.constexpr, values):
    """To a descriptor, from the first or second half of the memory of the teacher's numbers."""
    written, slots, second = out
    slot = slots.index(2 * PART + second)._reinterpret(written.dtype, written.block_type.shape, written.layout)
    slot.store(values.to(written.dtype))
    hopper.fence_async_shared()
    tma.async_copy_shared_to_global(written, [row, first + PART * values.shape[1]], slot)


@gluon.jit
def _pairs(
    rows, entries, barriers, slots, numbers, stored, where, tiles, sizes, given, LOWER: gl.constexpr,
    KIND: gl.constexpr, WHOLE: gl.constexpr, BANS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """The fold of two heads, or with somewhere to store it the gradient."""
    bias, targets, teacher_bias, teacher_steps, folds, squares, peaks, gradients, tokens, vocab, first, steps, beta = (
        given
    )
    out, larger, gaps = stored
    kept = ((larger, slots, 0), (gaps, slots, 1), peaks[0], peaks[1], peaks[2])
    teacher = (numbers, 0, teacher_bias, teacher_steps)
    teacher_size, hidden_size = sizes
    row = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT)) + LOWER * HALF
    column = gl.arange(0, TILE_VOCAB, gl.SliceLayout(0, LAYOUT))
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        logits = begin(rows, entries, barriers, step, teacher_size, LOWER)
        token_tile, vocab_tile = tile_place(tile, *where)
        token, start = token_tile * (2 * HALF) + row, vocab_tile * TILE_VOCAB
        live, first_token = token < tokens, token_tile * (2 * HALF) + LOWER * HALF
        target = column_of(targets, token, live, first + start)
        logits, step = product(logits, rows, entries, barriers, step, teacher_size, LOWER, True)
        logits = of_teacher(logits, teacher, start + column, vocab, WHOLE)
        teacher_peak = None
        if out is None:
            teacher_peak = gl.maximum(gl.max(logits, 1), LOWEST)
            if folds.teacher_target is not None:
                found = at_column(logits, target, 3)
                store_at_target(found, folds.teacher_target, token, live, target, start, vocab, TILE_VOCAB, WHOLE)
        tma.store_wait(0)  # what is stored of the tile before has left the memory
        for part in gl.static_range(PARTS):
            numbers.index(part).store(part_of(logits, part, PARTS))
        logits = begin(rows, entries, barriers, step, hidden_size, LOWER)
        logits, step = product(logits, rows, entries, barriers, step, hidden_size, LOWER, False)
        logits = with_bias(logits, bias, vocab_tile, vocab)
        if out is None:
            fold_pair_tile(
                logits, token, target, vocab_tile, tokens, vocab, teacher, teacher_peak, folds, squares, kept, steps,
                first_token, KIND, WHOLE, BANS, PARTS, _read_teacher, _finished, _rows_of, _like, _columns_of,
                at_column, _store_part,
            )  # fmt: skip
        else:
            grad_pair_tile(
                logits, token, target, vocab_tile, tokens, vocab, teacher, gradients, (out, slots, 0), steps,
                first_token, beta, KIND, WHOLE, PARTS, _read_teacher, _finished, _rows_of, _columns_of, _store_part,
            )  # fmt: skip
    tma.store_wait(0)


@Launched
@gluon.jit
def pair_kernel(
    hidden,  # descriptor of (tokens, H)
    weight,  # descriptor of (vocab, H)
    teacher,  # the same of the teacher
    teacher_weight,
    out,  # descriptor of (tokens, vocab), or None
    larger,
    gaps,
    hidden_size,
    teacher_size,
    bias,
    targets,
    teacher_bias,
    teacher_steps,
    parts,
    squares,
    own_tops,
    tops,
    tops_stride,
    gradients,
    tokens,
    vocab,
    first,
    steps,
    beta,
    KIND: gl.constexpr,
    WHOLE: gl.constexpr,
    BANS: gl.constexpr,
    PARTS: gl.constexpr,
):
    """The other arguments are those of `pair_epilogue._gemm_pair_kernel`."""
    token_tiles, vocab_tiles = gl.cdiv(tokens, 2 * HALF), gl.cdiv(vocab, TILE_VOCAB)
    peaks = (own_tops, tops, tops_stride)
    given = (
        bias, targets, teacher_bias, teacher_steps, parts, squares, peaks, gradients, tokens, vocab, first, steps, beta
    )  # fmt: skip
    tiles, sizes = token_tiles * vocab_tiles, (teacher_size, hidden_size)
    where = (token_tiles, vocab_tiles, tokens_together(token_tiles, 2 * HALF * (hidden_size + teacher_size)))
    upper, lower, entries, barriers = buffers(hidden, weight, STAGES)
    # As wide as what is stored of a part, in two 16-bit numbers for each float32.
    width: gl.constexpr = TILE_VOCAB // PARTS
    gl.static_assert(hidden.block_type.shape[1] == width)
    upper_slots = gl.allocate_shared_memory(hidden.dtype, [2 * PARTS, HALF, width], hidden.layout)
    lower_slots = gl.allocate_shared_memory(hidden.dtype, [2 * PARTS, HALF, width], hidden.layout)
    # Eight rows of a group's threads, which have eight neighbouring columns, in banks of their own.
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, width // 8, [1, 0])
    upper_numbers = upper_slots._reinterpret(gl.float32, [PARTS, HALF, width], swizzled)
    lower_numbers = lower_slots._reinterpret(gl.float32, [PARTS, HALF, width], swizzled)
    stored = (out, larger, gaps)
    heads = (teacher, teacher_weight, teacher_size, hidden, weight, hidden_size)
    gl.warp_specialize(
        [
            (_pairs, (
                upper, entries, barriers, upper_slots, upper_numbers, stored, where, tiles, sizes, given, False, KIND,
                WHOLE, BANS, PARTS,
            )),
            (_pairs, (
                lower, entries, barriers, lower_slots, lower_numbers, stored, where, tiles, sizes, given, True, KIND,
                WHOLE, BANS, PARTS,
            )),
            (_load, (heads, upper, lower, entries, barriers, where, tiles)),
        ],
        [WARPS, LOADING_WARPS],
        [REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


def launch(
    programs: int,
    student: tuple[Tensor, Tensor],  # (n, H) and (v, H)
    teacher: tuple[Tensor, Tensor],  # the same, of another H
    written: tuple[Tensor | None, ...],
    *arguments: Any,
    PARTS: int,
    **constants: Any,
) -> None:
    """With the descriptors and sizes that the kernel's arguments begin with, and what follows these."""
    width = TILE_VOCAB.value // PARTS
    pair_kernel[(programs,)](
        *(
            descriptor(values, rows.value, TILE_HIDDEN.value)
            for head in (student, teacher)
            for values, rows in zip(head, (HALF, TILE_VOCAB), strict=True)
        ),
        *(None if values is None else descriptor(values, HALF.value, width) for values in written),
        student[0].shape[1],
        teacher[0].shape[1],
        *arguments,
        **constants,
        PARTS=PARTS,
        num_warps=WARPS.value,
        maxnreg=EVEN_REGISTERS,
    )
