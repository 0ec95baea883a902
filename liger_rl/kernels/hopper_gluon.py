"""The products of `kernels.epilogue` and `kernels.blocks_triton` with one half's epilogue under the other's product.

A program's warps are three groups. One loads; the other two multiply the upper and the lower half of a tile of tokens
with what it loaded, each at its own pace. The lower half begins as many steps later as there are buffers, and keeps
that distance: while one group is busy with its logits, the other has the tensor cores to itself. In Triton's own
language all warps of a program go together, and the tensor cores wait for every epilogue.

Written in Gluon, Triton's lower level, for Hopper's instructions. What is done with the logits is the same code, and so
are the results, to the last bit.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from liger_rl.kernels.launches import Launched
from liger_rl.kernels.pair_tiles import fold_pair_tile, pair_tile_gradient, teacher_ahead, teacher_next
from liger_rl.kernels.statistics import BLOCK_TOKENS, BLOCK_VOCAB
from liger_rl.kernels.tile_epilogues import column_of, fold_tile, halves, part_of, tile_place, tokens_together

# One H200, bf16, N = 8192, medians in turns with the product alone, this beside `epilogue`: 1.02 x for 1.04 x at
# H = 4096, V = 128256; 1.04 x for 1.08 x at H = 2048, V = 151936. Then the fold's loads went behind the next product,
# and token tiles together by their size: log-probabilities 1.06 -> 1.02 x and 1.07 -> 1.00 x.
HALF, TILE_VOCAB, TILE_HIDDEN = (gl.constexpr(size) for size in (BLOCK_TOKENS // 2, BLOCK_VOCAB, 64))
STAGES, STORING_STAGES = gl.constexpr(4), gl.constexpr(3)  # a fourth does not fit beside tiles that are stored
WARPS, LOADING_WARPS = gl.constexpr(4), gl.constexpr(1)  # of each half, and beside them
# What a thread of the halves and of the loading warp gets of the multiprocessor's 65536, which start out evenly spread.
REGISTERS, LOADING_REGISTERS, EVEN_REGISTERS = gl.constexpr(240), gl.constexpr(24), 168
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_VOCAB, 16]))  # of a half's logits
GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def _load(hidden, weight, upper, lower, entries, barriers, where, tiles, hidden_size):
    """Every step's rows of hidden states and of the weight, as soon as a buffer is free."""
    ready, free, _begun = barriers
    stages: gl.constexpr = entries.type.shape[0]
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        token_tile, vocab_tile = tile_place(tile, *where)
        for column in range(0, hidden_size, TILE_HIDDEN):
            stage = step % stages
            # A barrier at which nobody has arrived yet is done with the phase before.
            mbarrier.wait(free.index(stage), (step // stages & 1) ^ 1)
            bar, token = ready.index(stage), token_tile * (2 * HALF)
            mbarrier.expect(bar, 2 * hidden.block_type.nbytes + weight.block_type.nbytes)
            tma.async_copy_global_to_shared(hidden, [token, column], bar, upper.index(stage))
            tma.async_copy_global_to_shared(weight, [vocab_tile * TILE_VOCAB, column], bar, entries.index(stage))
            tma.async_copy_global_to_shared(hidden, [token + HALF, column], bar, lower.index(stage))
            step += 1


@gluon.jit
def _begin(rows, entries, barriers, step, hidden_size, LOWER: gl.constexpr):
    """-> half a tile of logits of which the first step is on its way, for `_product`.

    What is done behind this and needs none of them costs nothing.
    """
    ready, _free, begun = barriers
    stages: gl.constexpr = entries.type.shape[0]
    if LOWER:
        mbarrier.wait(begun, 0, pred=step == 0)
    stage = step % stages
    mbarrier.wait(ready.index(stage), step // stages & 1)
    logits = hopper.warpgroup_mma(
        rows.index(stage), entries.index(stage).permute((1, 0)), gl.zeros([HALF, TILE_VOCAB], gl.float32, LAYOUT),
        use_acc=False, is_async=True,
    )  # fmt: skip
    logits = hopper.warpgroup_mma_wait(1, deps=(logits,))  # for none: a loop takes a tensor
    if not LOWER:
        mbarrier.arrive(begun, pred=(step == 0) & (hidden_size <= TILE_HIDDEN))
    return logits


@gluon.jit
def _product(logits, rows, entries, barriers, step, hidden_size, LOWER: gl.constexpr):
    """-> half a tile of logits in float32, which `_begin` began, and how many steps this group has taken."""
    ready, free, begun = barriers
    stages: gl.constexpr = entries.type.shape[0]
    steps = gl.cdiv(hidden_size, TILE_HIDDEN)
    step += 1
    for _step in range(1, steps):
        stage = step % stages
        mbarrier.wait(ready.index(stage), step // stages & 1)
        logits = hopper.warpgroup_mma(rows.index(stage), entries.index(stage).permute((1, 0)), logits, is_async=True)
        logits = hopper.warpgroup_mma_wait(1, deps=(logits,))
        mbarrier.arrive(free.index((step + stages - 1) % stages))
        if not LOWER:
            mbarrier.arrive(begun, pred=step == gl.minimum(steps, stages) - 1)
        step += 1
    logits = hopper.warpgroup_mma_wait(0, deps=(logits,))
    mbarrier.arrive(free.index((step + stages - 1) % stages))
    return logits, step


@gluon.jit
def _with_bias(logits, bias, vocab_tile, vocab):
    if bias is not None:
        column = gl.arange(0, TILE_VOCAB, gl.SliceLayout(0, LAYOUT)) + vocab_tile * TILE_VOCAB
        logits += gl.load(bias + column, mask=column < vocab, other=0.0).to(gl.float32)[None, :]
    return logits


@gluon.jit
def _at_column(tile, column, HALVINGS: gl.constexpr):
    """As `tile_epilogues.at_column`, with layouts said to be what they are."""
    given: gl.constexpr = column.type.layout
    for _level in gl.static_range(HALVINGS):
        left, right = halves(tile)
        beyond = gl.convert_layout((column & left.shape[1]) != 0, gl.SliceLayout(1, left.type.layout))
        tile = gl.where(beyond[:, None], right, left)
    layout: gl.constexpr = tile.type.layout
    place = gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))
    column = gl.convert_layout(column & (tile.shape[1] - 1), gl.SliceLayout(1, layout))
    return gl.convert_layout(gl.sum(gl.where(place[None, :] == column[:, None], tile, 0.0), 1), given)


@gluon.jit
def _store(out, row, column, values):
    """To a descriptor, from a buffer that may still hold the values before."""
    descriptor, buffer = out
    tma.store_wait(0)
    buffer.store(values.to(descriptor.dtype))
    hopper.fence_async_shared()
    tma.async_copy_shared_to_global(descriptor, [row, column], buffer)


@gluon.jit
def _fold(
    rows, entries, barriers, stored, where, tiles, hidden_size, given, LOWER: gl.constexpr,
    LEVELLED: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    bias, targets, folds, tokens, vocab, steps = given
    row = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT)) + LOWER * HALF
    column = gl.arange(0, TILE_VOCAB, gl.SliceLayout(0, LAYOUT))
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        logits = _begin(rows, entries, barriers, step, hidden_size, LOWER)
        token_tile, vocab_tile = tile_place(tile, *where)
        first = token_tile * (2 * HALF)
        token = first + row
        live = token < tokens
        target = column_of(targets, token, live, vocab_tile * TILE_VOCAB)
        logits, step = _product(logits, rows, entries, barriers, step, hidden_size, LOWER)
        logits = _with_bias(logits, bias, vocab_tile, vocab)
        fold_tile(
            logits, token, target, column, first + LOWER * HALF, vocab_tile, tokens, vocab, folds,
            None if stored[0] is None else stored, steps, LEVELLED, WHOLE, 1, _store, _at_column,
        )  # fmt: skip
    tma.store_wait(0)


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
def _store_beside(out, row, column, values):
    """As `_store`, to two buffers in turns: what the other one holds may still be on its way."""
    descriptor, buffer = out
    tma.store_wait(1)
    buffer.store(values.to(descriptor.dtype))
    hopper.fence_async_shared()
    tma.async_copy_shared_to_global(descriptor, [row, column], buffer)


@gluon.jit
def _pairs(
    rows, entries, barriers, stored, where, tiles, hidden_size, given, LOWER: gl.constexpr,
    KIND: gl.constexpr, WHOLE: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """The fold of two heads, or with somewhere to store it the gradient."""
    bias, targets, teacher, folds, squares, peaks, gradients, tokens, vocab, first, steps, beta = given
    out, larger, gaps, buffers = stored
    kept = ((larger, buffers.index(0)), (gaps, buffers.index(1)), peaks[0], peaks[1], peaks[2])
    row = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT)) + LOWER * HALF
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        logits = _begin(rows, entries, barriers, step, hidden_size, LOWER)
        token_tile, vocab_tile = tile_place(tile, *where)
        token = token_tile * (2 * HALF) + row
        live = token < tokens
        start = vocab_tile * TILE_VOCAB
        target = column_of(targets, token, live, first + start)
        ahead = teacher_ahead(teacher, logits, token, live, start, vocab, 4, PARTS, WHOLE, _rows_of, _columns_of)
        logits, step = _product(logits, rows, entries, barriers, step, hidden_size, LOWER)
        logits = _with_bias(logits, bias, vocab_tile, vocab)
        first_token = token_tile * (2 * HALF) + LOWER * HALF
        if out is None:
            fold_pair_tile(
                logits, ahead, token, target, vocab_tile, tokens, vocab, teacher, folds, squares, kept, steps,
                first_token, KIND, WHOLE, PARTS, _rows_of, _like, _columns_of, _at_column, _store_beside,
            )  # fmt: skip
        else:
            for part in gl.static_range(PARTS):
                raw = ahead[0]
                ahead = teacher_next(
                    ahead, teacher, logits, token, live, start, vocab, part, PARTS, WHOLE, _rows_of, _columns_of
                )
                own = part_of(logits, part, PARTS)
                column = part * own.shape[1] + _columns_of(own)
                grad = pair_tile_gradient(
                    own, raw, _rows_of(token, own), _rows_of(live, own), _rows_of(target, own), column, start,
                    teacher, vocab, gradients, steps, beta, KIND, WHOLE,
                )  # fmt: skip
                _store_beside((out, buffers.index(part % 2)), first_token, start + part * own.shape[1], grad)
    tma.store_wait(0)


@gluon.jit
def _buffers(hidden, weight, out, stages: gl.constexpr):
    """-> those of the rows of either half, of the entries and of what either half stores, and the barriers."""
    upper = gl.allocate_shared_memory(hidden.dtype, [stages, HALF, TILE_HIDDEN], hidden.layout)
    lower = gl.allocate_shared_memory(hidden.dtype, [stages, HALF, TILE_HIDDEN], hidden.layout)
    entries = gl.allocate_shared_memory(weight.dtype, [stages, TILE_VOCAB, TILE_HIDDEN], weight.layout)
    # Without anything to store others stand for these.
    upper_out = upper if out is None else gl.allocate_shared_memory(out.dtype, out.block_type.shape, out.layout)
    lower_out = lower if out is None else gl.allocate_shared_memory(out.dtype, out.block_type.shape, out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    begun = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    mbarrier.init(begun, count=1)
    # The copies that arrive at the barriers are another proxy's, which sees what was written to them from here on.
    hopper.fence_async_shared()
    return upper, lower, entries, upper_out, lower_out, (ready, free, begun)


@Launched
@gluon.jit
def fold_kernel(
    hidden,  # descriptor of (tokens, H)
    weight,  # descriptor of (V, H)
    kept,  # descriptor of (tokens, V), or None
    bias,
    targets,
    folds,
    tokens,
    vocab,
    hidden_size,
    steps,
    LEVELLED: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """The arguments are those of `epilogue._gemm_fold_kernel`."""
    token_tiles, vocab_tiles = gl.cdiv(tokens, 2 * HALF), gl.cdiv(vocab, TILE_VOCAB)
    given = (bias, targets, folds, tokens, vocab, steps)
    tiles = token_tiles * vocab_tiles
    where = (token_tiles, vocab_tiles, tokens_together(token_tiles, 2 * HALF * hidden_size))
    stages: gl.constexpr = STAGES if kept is None else STORING_STAGES
    upper, lower, entries, upper_out, lower_out, barriers = _buffers(hidden, weight, kept, stages)
    gl.warp_specialize(
        [
            (_fold, (
                upper, entries, barriers, (kept, upper_out), where, tiles, hidden_size, given, False, LEVELLED,
                WHOLE,
            )),
            (_fold, (
                lower, entries, barriers, (kept, lower_out), where, tiles, hidden_size, given, True, LEVELLED,
                WHOLE,
            )),
            (_load, (hidden, weight, upper, lower, entries, barriers, where, tiles, hidden_size)),
        ],
        [WARPS, LOADING_WARPS],
        [REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


@Launched
@gluon.jit
def pair_kernel(
    hidden,  # descriptor of (tokens, H)
    weight,  # descriptor of (vocab, H)
    out,  # descriptor of (tokens, vocab), or None
    larger,
    gaps,
    bias,
    targets,
    teacher,
    teacher_stride,
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
    hidden_size,
    steps,
    beta,
    KIND: gl.constexpr,
    WHOLE: gl.constexpr,
    PARTS: gl.constexpr,
):
    """The arguments are those of `pair_epilogue._gemm_pair_kernel`."""
    token_tiles, vocab_tiles = gl.cdiv(tokens, 2 * HALF), gl.cdiv(vocab, TILE_VOCAB)
    of_teacher = (teacher, teacher_stride, teacher_bias, teacher_steps)
    peaks = (own_tops, tops, tops_stride)
    given = (bias, targets, of_teacher, parts, squares, peaks, gradients, tokens, vocab, first, steps, beta)
    tiles = token_tiles * vocab_tiles
    where = (token_tiles, vocab_tiles, tokens_together(token_tiles, 2 * HALF * hidden_size))
    upper, lower, entries, _upper, _lower, barriers = _buffers(hidden, weight, None, STAGES)
    # What is stored is a part of a tile at a time, beside which every stage fits. Others stand for what is not.
    written = out if larger is None else larger
    shape: gl.constexpr = [2, HALF, TILE_VOCAB // PARTS]
    upper_out = upper if written is None else gl.allocate_shared_memory(written.dtype, shape, written.layout)
    lower_out = lower if written is None else gl.allocate_shared_memory(written.dtype, shape, written.layout)
    of_upper, of_lower = (out, larger, gaps, upper_out), (out, larger, gaps, lower_out)
    gl.warp_specialize(
        [
            (_pairs, (
                upper, entries, barriers, of_upper, where, tiles, hidden_size, given, False, KIND, WHOLE, PARTS,
            )),
            (_pairs, (
                lower, entries, barriers, of_lower, where, tiles, hidden_size, given, True, KIND, WHOLE, PARTS,
            )),
            (_load, (hidden, weight, upper, lower, entries, barriers, where, tiles, hidden_size)),
        ],
        [WARPS, LOADING_WARPS],
        [REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


@cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], GLUON_DTYPES[dtype])


def _descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, columns], _layout(rows, columns, matrix.dtype))


def launch(
    programs: int,
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    out: Tensor | None,
    *arguments: Any,
    **constants: Any,
) -> None:
    """The fold, with the descriptors that its arguments begin with, and what follows these."""
    _start(fold_kernel, programs, hidden, weight, (out,), TILE_VOCAB.value, *arguments, **constants)


def launch_pair(
    programs: int,
    hidden: Tensor,
    weight: Tensor,
    written: tuple[Tensor | None, ...],
    *arguments: Any,
    PARTS: int,
    **constants: Any,
) -> None:
    """The same of two heads, which write several matrices, a part of a tile at a time."""
    width = TILE_VOCAB.value // PARTS
    _start(pair_kernel, programs, hidden, weight, written, width, *arguments, **constants, PARTS=PARTS)


def _start(
    kernel: Any,
    programs: int,
    hidden: Tensor,
    weight: Tensor,
    written: tuple[Tensor | None, ...],
    width: int,
    *arguments: Any,
    **constants: Any,
) -> None:
    kernel[(programs,)](
        _descriptor(hidden, HALF.value, TILE_HIDDEN.value),
        _descriptor(weight, TILE_VOCAB.value, TILE_HIDDEN.value),
        *(None if values is None else _descriptor(values, HALF.value, width) for values in written),
        *arguments,
        **constants,
        num_warps=WARPS.value,
        maxnreg=EVEN_REGISTERS,
    )
