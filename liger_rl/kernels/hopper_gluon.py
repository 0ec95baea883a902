"""The products of `kernels.epilogue` with one half's epilogue under the other's product.

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
from liger_rl.kernels.statistics import BLOCK_TOKENS, BLOCK_VOCAB
from liger_rl.kernels.tile_epilogues import column_of, fold_tile, halves, tile_place, tokens_together

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
def load_steps(hidden, weight, token, entry, hidden_size, upper, lower, entries, barriers, step):
    """Every step's rows of hidden states and of the weight, as soon as a buffer is free -> the step behind them."""
    ready, free, _begun = barriers
    stages: gl.constexpr = entries.type.shape[0]
    for column in range(0, hidden_size, entries.type.shape[2]):
        stage = step % stages
        # A barrier at which nobody has arrived yet is done with the phase before.
        mbarrier.wait(free.index(stage), (step // stages & 1) ^ 1)
        bar = ready.index(stage)
        mbarrier.expect(bar, 2 * hidden.block_type.nbytes + weight.block_type.nbytes)
        tma.async_copy_global_to_shared(hidden, [token, column], bar, upper.index(stage))
        tma.async_copy_global_to_shared(weight, [entry, column], bar, entries.index(stage))
        tma.async_copy_global_to_shared(hidden, [token + HALF, column], bar, lower.index(stage))
        step += 1
    return step


@gluon.jit
def _load(hidden, weight, upper, lower, entries, barriers, where, tiles, hidden_size):
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        token_tile, vocab_tile = tile_place(tile, *where)
        step = load_steps(
            hidden, weight, token_tile * (2 * HALF), vocab_tile * TILE_VOCAB, hidden_size, upper, lower, entries,
            barriers, step,
        )  # fmt: skip


@gluon.jit
def begin(rows, entries, barriers, step, hidden_size, LOWER: gl.constexpr):
    """-> half a tile of logits of which the first step is on its way, for `product`.

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
        mbarrier.arrive(begun, pred=(step == 0) & (hidden_size <= entries.type.shape[2]))
    return logits


@gluon.jit
def product(logits, rows, entries, barriers, step, hidden_size, LOWER: gl.constexpr, FIRST: gl.constexpr):
    """-> half a tile of logits in float32, which `begin` began, and how many steps this group has taken.

    FIRST is false of all but the first of several products with a tile.
    """
    ready, free, begun = barriers
    stages: gl.constexpr = entries.type.shape[0]
    steps = gl.cdiv(hidden_size, entries.type.shape[2])
    step += 1
    for _step in range(1, steps):
        stage = step % stages
        mbarrier.wait(ready.index(stage), step // stages & 1)
        logits = hopper.warpgroup_mma(rows.index(stage), entries.index(stage).permute((1, 0)), logits, is_async=True)
        logits = hopper.warpgroup_mma_wait(1, deps=(logits,))
        mbarrier.arrive(free.index((step + stages - 1) % stages))
        if not LOWER and FIRST:
            mbarrier.arrive(begun, pred=step == gl.minimum(steps, stages) - 1)
        step += 1
    logits = hopper.warpgroup_mma_wait(0, deps=(logits,))
    mbarrier.arrive(free.index((step + stages - 1) % stages))
    return logits, step


@gluon.jit
def with_bias(logits, bias, vocab_tile, vocab):
    if bias is not None:
        column = gl.arange(0, TILE_VOCAB, gl.SliceLayout(0, LAYOUT)) + vocab_tile * TILE_VOCAB
        logits += gl.load(bias + column, mask=column < vocab, other=0.0).to(gl.float32)[None, :]
    return logits


@gluon.jit
def at_column(tile, column, HALVINGS: gl.constexpr):
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
        logits = begin(rows, entries, barriers, step, hidden_size, LOWER)
        token_tile, vocab_tile = tile_place(tile, *where)
        first = token_tile * (2 * HALF)
        token = first + row
        live = token < tokens
        target = column_of(targets, token, live, vocab_tile * TILE_VOCAB)
        logits, step = product(logits, rows, entries, barriers, step, hidden_size, LOWER, True)
        logits = with_bias(logits, bias, vocab_tile, vocab)
        fold_tile(
            logits, token, target, column, first + LOWER * HALF, vocab_tile, tokens, vocab, folds,
            None if stored[0] is None else stored, steps, LEVELLED, WHOLE, 1, _store, at_column,
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def buffers(hidden, weight, stages: gl.constexpr):
    """-> those of the rows of either half and of the entries, a step's each, and the barriers."""
    step: gl.constexpr = hidden.block_type.shape[1]
    upper = gl.allocate_shared_memory(hidden.dtype, [stages, HALF, step], hidden.layout)
    lower = gl.allocate_shared_memory(hidden.dtype, [stages, HALF, step], hidden.layout)
    entries = gl.allocate_shared_memory(weight.dtype, [stages, TILE_VOCAB, step], weight.layout)
    ready = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    begun = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    mbarrier.init(begun, count=1)
    # The copies that arrive at the barriers are another proxy's, which sees what was written to them from here on.
    hopper.fence_async_shared()
    return upper, lower, entries, (ready, free, begun)


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
    upper, lower, entries, barriers = buffers(hidden, weight, stages)
    # Without anything to store others stand for these.
    upper_out = upper if kept is None else gl.allocate_shared_memory(kept.dtype, kept.block_type.shape, kept.layout)
    lower_out = lower if kept is None else gl.allocate_shared_memory(kept.dtype, kept.block_type.shape, kept.layout)
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


@cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], GLUON_DTYPES[dtype])


def descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
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
    fold_kernel[(programs,)](
        descriptor(hidden, HALF.value, TILE_HIDDEN.value),
        descriptor(weight, TILE_VOCAB.value, TILE_HIDDEN.value),
        None if out is None else descriptor(out, HALF.value, TILE_VOCAB.value),
        *arguments,
        **constants,
        num_warps=WARPS.value,
        maxnreg=EVEN_REGISTERS,
    )
