"""Gradients from chosen blocks alone, as persistent Triton products.

The kept blocks of dL/dlogits are recomputed and stored one after another, tile by tile of the vocabulary. The hidden
states' gradient sums, for each row of blocks, their products with the weight; the weight's sums, for each tile, their
products with the hidden states. Every sum has one program and a fixed order: no atomics, the same bits on every run.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.kernels import gemm
from liger_rl.kernels.block_lists import BlockLists
from liger_rl.kernels.devices import family_of, on
from liger_rl.kernels.epilogue import device_programs, tile_logits
from liger_rl.kernels.launches import Launched, cdiv
from liger_rl.kernels.matrix_triton import load, matrix, store
from liger_rl.kernels.statistics import BLOCK_TOKENS, BLOCK_VOCAB, BlockPlan, LeftOut, TokenGradients
from liger_rl.kernels.tile_epilogues import part_of, tile_gradient
from liger_rl.kernels.transform import LogitSteps, LogitTransform

# What these take, and what other shapes took: docs/notes/kernels.md.
HIDDEN_COLUMNS, WEIGHT_COLUMNS = 256, 128  # of H in one program's sum
WARPS = 8  # narrower sums of fewer warps measured the same or worse
LISTED, LAST_POSITION = tl.constexpr(256), tl.constexpr(2**31 - 1)  # positions that a program compares at a time


@Launched
@triton.jit(do_not_specialize=["tiles", "base", "room", "most_of_row"])
def _blocks_kernel(
    hidden,  # a `matrix` (tokens, H)
    weight,  # a `matrix` (V, H)
    out,  # a `matrix` (room * BLOCK_TOKENS, BLOCK_VOCAB)
    lists,  # `BlockLists`
    tiles,
    base,  # from this block on
    room,  # so many are computed,
    most_of_row,  # and none if a row of blocks has more than these on average
    bias,
    targets,
    gradients,  # `TokenGradients`, (tokens,) each
    vocab,
    hidden_size,
    steps,
    PARTS: tl.constexpr,  # of a block, one after the other
    TILE_TOKENS: tl.constexpr,
    TILE_VOCAB: tl.constexpr,
    TILE_HIDDEN: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    tokens, kept = tl.load(lists.tile_count + tiles), tl.load(lists.tile_end + tiles - 1)
    end = tl.where(kept > most_of_row * tl.cdiv(tokens, TILE_TOKENS), 0, tl.minimum(kept, base + room))
    for block in tl.range(base + tl.program_id(0), end, PROGRAMS, flatten=True):
        row, tile = tl.load(lists.row + block), tl.load(lists.tile + block)
        token = row * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
        first = tile * TILE_VOCAB
        live = token < tokens
        logits = tile_logits(
            hidden, weight, bias, row, tile, vocab, hidden_size, TILE_TOKENS, TILE_VOCAB, TILE_HIDDEN, 1
        )
        for part in tl.static_range(PARTS):
            own = part_of(logits, part, PARTS)
            column = part * own.shape[1] + tl.arange(0, own.shape[1])
            grad = tile_gradient(own, token, live, column, targets, first, gradients, steps)
            grad = tl.where(live[:, None] & (column < vocab - first)[None, :], grad, 0.0)
            store(out, (block - base) * TILE_TOKENS, part * own.shape[1], grad)


@triton.jit
def _sum_row(
    item, blocks, weight, out, lists, base, kept, tokens, hidden_size,
    TILE_TOKENS: tl.constexpr, TILE_VOCAB: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Some columns of the hidden states' gradient for one row of blocks."""
    STEPS: tl.constexpr = TILE_VOCAB // STEP
    parts = tl.cdiv(hidden_size, COLUMNS)
    # Neighbours share a row's blocks, and its tiles of the weight.
    row, part = tl.load(lists.row_order + item // parts), item % parts
    total = tl.zeros((TILE_TOKENS, COLUMNS), tl.float32)
    end = tl.load(lists.row_end + row)
    first = end - tl.load(lists.row_count + row)
    if kept < tl.load(lists.row_end + tl.cdiv(tokens, TILE_TOKENS) - 1):
        # The row's blocks in the buffer are next to each other.
        before, until = 0, 0
        for start in range(first, end, LISTED):
            place = start + tl.arange(0, LISTED)
            position = tl.load(lists.by_row + place, mask=place < end, other=LAST_POSITION)
            before += tl.sum((position < base).to(tl.int32), 0)
            until += tl.sum((position < base + kept).to(tl.int32), 0)
        first, end = first + before, first + until
    # Which block comes next is loaded a step ahead: a tile whose address is loaded in its own step is fetched one step
    # before it is used, and not two.
    block = tl.load(lists.by_row + first, mask=first < end, other=0)
    tile = tl.load(lists.tile + block, mask=first < end, other=0)
    for step in tl.range(first * STEPS, end * STEPS):
        entry = (step % STEPS) * STEP
        grad = load(blocks, (block - base) * TILE_TOKENS, entry, TILE_TOKENS, STEP)
        total = tl.dot(grad, load(weight, tile * TILE_VOCAB + entry, part * COLUMNS, STEP, COLUMNS), total)
        block = tl.load(lists.by_row + tl.minimum((step + 1) // STEPS, end - 1))
        tile = tl.load(lists.tile + block)
    token = row * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    place = out + token.to(tl.int64)[:, None] * hidden_size + column[None, :]
    inside = (token < tokens)[:, None] & (column < hidden_size)[None, :]
    tl.store(place, total + tl.load(place, mask=inside, other=0.0), mask=inside)


@triton.jit
def _sum_tile(
    tile, part, blocks, hidden, out, start, shares, lists, base, vocab, hidden_size,
    TILE_TOKENS: tl.constexpr, TILE_VOCAB: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Some columns of the weight's gradient for one tile of the vocabulary, onto the shares of what is left out."""
    STEPS: tl.constexpr = TILE_TOKENS // STEP
    total = tl.zeros((TILE_VOCAB, COLUMNS), tl.float32)
    end = tl.load(lists.tile_end + tile)
    start_block = end - tl.load(lists.tile_count + tile)
    row = tl.load(lists.row + start_block, mask=start_block < end, other=0)  # a step ahead, as above
    for step in tl.range(start_block * STEPS, end * STEPS):
        token = (step % STEPS) * STEP
        grad = load(blocks, (step // STEPS - base) * TILE_TOKENS + token, 0, STEP, TILE_VOCAB)
        total = tl.dot(grad.T, load(hidden, row * TILE_TOKENS + token, part * COLUMNS, STEP, COLUMNS), total)
        row = tl.load(lists.row + tl.minimum((step + 1) // STEPS, end - 1))
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    place = start + tile.to(tl.int64) * hidden_size + column
    entry = tile * TILE_VOCAB + tl.arange(0, TILE_VOCAB)
    share = tl.load(shares + entry, mask=entry < vocab, other=0.0)
    total += share[:, None] * tl.load(place, mask=column < hidden_size, other=0.0)[None, :]
    for half in tl.static_range(PARTS):
        own = part_of(total, half, PARTS)
        store(out, tile * TILE_VOCAB, part * COLUMNS + half * own.shape[1], own)


@Launched
@triton.jit(do_not_specialize=["row_items", "first", "last", "base", "kept"])
def _sums_kernel(
    row_items,  # programs that sum rows of blocks; the others sum tiles
    row_blocks,  # a `matrix` (total * BLOCK_TOKENS, BLOCK_VOCAB)
    weight,  # a `matrix` (V, H)
    grad_hidden,  # (tokens, H) float32, added to
    tokens,
    tile_blocks,  # a `matrix` of the same blocks
    hidden,  # a `matrix` (tokens, H)
    grad_weight,  # a `matrix` (V, H)
    weight_start,  # (tiles, H) float32
    shares,  # (vocab,) float32, of these, of a tile's vocabulary entries
    lists,  # `BlockLists`
    first,  # tile of the vocabulary, and
    last,  # the one after the last whose blocks are in the buffer:
    base,  # from this one on,
    kept,  # so many
    vocab,
    hidden_size,
    HIDDEN: tl.constexpr,
    WEIGHT: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_VOCAB: tl.constexpr,
    HIDDEN_COLUMNS: tl.constexpr,
    WEIGHT_COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PARTS: tl.constexpr,  # of a sum of the weight's, stored one after the other: 2 in float32
):
    item = tl.program_id(0)
    if item < row_items:
        if HIDDEN:
            _sum_row(
                item, row_blocks, weight, grad_hidden, lists, base, kept, tokens, hidden_size,
                TILE_TOKENS, TILE_VOCAB, HIDDEN_COLUMNS, STEP,
            )  # fmt: skip
    else:
        if WEIGHT:
            # Neighbours share a tile's blocks.
            parts = tl.cdiv(hidden_size, WEIGHT_COLUMNS)
            tile, part = tl.load(lists.tile_order + (item - row_items) // parts), (item - row_items) % parts
            if (tile >= first) & (tile < last):
                _sum_tile(
                    tile, part, tile_blocks, hidden, grad_weight, weight_start, shares, lists, base, vocab,
                    hidden_size, TILE_TOKENS, TILE_VOCAB, WEIGHT_COLUMNS, STEP, PARTS,
                )  # fmt: skip


@Launched
@triton.jit(do_not_specialize=["first", "base"])
def _bias_kernel(
    blocks,  # (count * BLOCK_TOKENS, BLOCK_VOCAB)
    out,  # (V,)
    start,  # (tiles,) float32
    shares,  # (vocab,) float32, of these, of a tile's vocabulary entries
    lists,  # `BlockLists`
    first,
    base,
    vocab,
    TILE_TOKENS: tl.constexpr,
    TILE_VOCAB: tl.constexpr,
):
    tile = first + tl.program_id(0)
    column = tl.arange(0, TILE_VOCAB)
    token = tl.arange(0, TILE_TOKENS)
    entry = tile * TILE_VOCAB + column
    total = tl.load(shares + entry, mask=entry < vocab, other=0.0) * tl.load(start + tile)
    end = tl.load(lists.tile_end + tile) - base
    for block in range(end - tl.load(lists.tile_count + tile), end):
        row = (block * TILE_TOKENS + token).to(tl.int64)[:, None] * TILE_VOCAB
        total += tl.sum(tl.load(blocks + row + column[None, :]).to(tl.float32), 0)
    tl.store(out + entry, total.to(out.dtype.element_ty), mask=entry < vocab)


class LeftOutGradients(NamedTuple):
    """What the sums of left-out blocks give, float32; None where it is not asked for."""

    hidden: Tensor | None  # (n, H)
    weight: Tensor | None  # (tiles or more, H); a tile's vocabulary entries share its row
    bias: Tensor | None  # (tiles or more,), as well

    @classmethod
    def of(cls, left_out: LeftOut, hidden: Tensor, needs: tuple[bool, bool]) -> "LeftOutGradients":
        """Of the first tokens, those of hidden (n, H); `needs` for weight and bias."""
        n = hidden.shape[0]
        sums, by_row = left_out.sums[:n], None if left_out.hidden is None else left_out.hidden[:n]
        weight = gemm.matmul(sums.T, hidden) if needs[0] else None
        return cls(by_row, weight, gemm.column_sums(sums) if needs[1] else None)


class BlockInputs(NamedTuple):
    """What blocks of a gradient are computed from, with the tokens in the order of the blocks."""

    hidden: Tensor  # (n, H) in the compute dtype
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    targets: Tensor  # (n,)
    tokens: TokenGradients  # (n,) each
    transform: LogitTransform


class Span(NamedTuple):
    """Tiles `first` to `last`, how many blocks are kept before them, and how many of them."""

    first: int
    last: int
    base: int
    kept: int


class Begun(NamedTuple):
    """The first blocks, computed before the host knows how many there are."""

    lists: BlockLists
    buffer: Tensor  # (room * BLOCK_TOKENS, BLOCK_VOCAB): the first blocks, tile by tile,
    most_of_row: int  # unless a row of blocks has more than these on average


def begin(
    inputs: BlockInputs,
    lists: BlockLists,
    workspace: int,  # bytes of blocks at a time
    most_of_row: int,  # nothing need be done if the rows of blocks with a gradient keep more on average
) -> Begun:
    """Start before the host knows of any block, for `grad_blocks` with the same inputs, where `devices.applies`.

    The device need not wait for a host that waits for it.
    """
    hidden, rows, blocks = inputs.hidden, lists.row_count.numel(), lists.row.numel()
    # At least those of a tile, which is never split.
    room = max(min(workspace // (BLOCK_TOKENS * BLOCK_VOCAB * hidden.element_size()), blocks), rows, 1)
    begun = Begun(lists, hidden.new_empty(room * BLOCK_TOKENS, BLOCK_VOCAB), most_of_row)
    if rows:
        with on(hidden.device):
            _store_blocks(begun, 0, room, most_of_row, inputs)
    return begun


def grad_blocks(
    begun: Begun,  # as `begin` gave it
    inputs: BlockInputs,
    plan: BlockPlan,
    left_out: LeftOut,  # whose gradient of the hidden states is overwritten
    needs: tuple[bool, bool],  # for weight and bias
    weight_dtype: torch.dtype | None = None,  # of the weight's gradient; None: the weight's own
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(wanted, H) float32, (V, H) and (V,) like the bias, of the plan's blocks and all else."""
    weight, bias = inputs.weight, inputs.bias
    # What the rest hold must meet no product, not even with zeros.
    rows = inputs.hidden[: plan.wanted]
    grad_weight = grad_bias = None
    with on(weight.device):
        start = LeftOutGradients.of(left_out, rows, (needs[0], needs[1] and bias is not None))
        if start.weight is not None:
            grad_weight = torch.empty_like(weight, dtype=weight_dtype, memory_format=torch.contiguous_format)
        if start.bias is not None and bias is not None:
            grad_bias = torch.empty_like(bias)
        for span in _spans(plan, begun.buffer.shape[0] // BLOCK_TOKENS):
            if span.kept and (span.first > 0 or plan.kept > begun.most_of_row * plan.row_blocks):
                _store_blocks(begun, span.base, span.kept, plan.counts.numel(), inputs)
            _store_sums(start, left_out.shares, grad_weight, begun, span, rows, weight)
            if grad_bias is not None:
                _bias_kernel[(span.last - span.first,)](
                    begun.buffer,
                    grad_bias,
                    start.bias,
                    left_out.shares,
                    begun.lists,
                    span.first,
                    span.base,
                    weight.shape[0],
                    BLOCK_TOKENS,
                    BLOCK_VOCAB,
                )
    return start.hidden, grad_weight, grad_bias


def _spans(plan: BlockPlan, room: int) -> list[Span]:
    """Runs of tiles with at most so many blocks, at least one tile each."""
    if plan.kept <= room:
        return [Span(0, plan.counts.numel(), 0, plan.kept)]
    counts = plan.counts.tolist()
    spans, first, base, held = [], 0, 0, 0
    for tile, count in enumerate(counts):
        if tile > first and held + count > room:
            spans.append(Span(first, tile, base, held))
            first, base, held = tile, base + held, 0
        held += count
    return [*spans, Span(first, len(counts), base, held)]


def _store_blocks(begun: Begun, base: int, room: int, most_of_row: int, inputs: BlockInputs) -> None:
    hidden, weight, bias, targets, tokens, transform = inputs
    programs, family = device_programs(hidden.device), family_of(hidden.device)
    _blocks_kernel[(programs,)](
        matrix(hidden, BLOCK_TOKENS, family.step, tma=family.tma),
        matrix(weight, BLOCK_VOCAB, family.step, tma=family.tma),
        matrix(begun.buffer, BLOCK_TOKENS, BLOCK_VOCAB, tma=family.tma, parts=family.parts),
        begun.lists,
        begun.lists.tile_end.numel(),
        base,
        room,
        most_of_row,
        None if bias is None else bias.contiguous(),
        targets.contiguous(),
        tokens.contiguous(),
        weight.shape[0],
        hidden.shape[1],
        LogitSteps.of(transform),
        PARTS=family.parts,
        TILE_TOKENS=BLOCK_TOKENS,
        TILE_VOCAB=BLOCK_VOCAB,
        TILE_HIDDEN=family.step,
        PROGRAMS=programs,
        num_stages=family.storing_stages,
        num_warps=WARPS,
    )


def _store_sums(
    start: LeftOutGradients,
    shares: Tensor,
    grad_weight: Tensor | None,
    begun: Begun,
    span: Span,
    hidden: Tensor,
    weight: Tensor,
) -> None:
    """Both gradients in one launch: rows are few and long, tiles many and short, and fill what the rows leave idle."""
    size, lists, buffer = weight.shape[1], begun.lists, begun.buffer
    row_items = 0
    if start.hidden is not None and span.kept:
        row_items = cdiv(size, HIDDEN_COLUMNS) * cdiv(hidden.shape[0], BLOCK_TOKENS)
    tile_items = cdiv(size, WEIGHT_COLUMNS) * lists.tile_order.numel() if grad_weight is not None else 0
    if row_items + tile_items == 0:
        return
    family = family_of(hidden.device)
    step, tma = family.step, family.tma
    # Without a gradient to write, a matrix that nothing is written to.
    out = weight if grad_weight is None else grad_weight
    parts = out.element_size() // 2
    _sums_kernel[(row_items + tile_items,)](
        row_items,
        matrix(buffer, BLOCK_TOKENS, step, tma=tma),
        matrix(weight, step, HIDDEN_COLUMNS, tma=tma),
        start.hidden,
        hidden.shape[0],
        matrix(buffer, step, BLOCK_VOCAB, tma=tma),
        matrix(hidden, step, WEIGHT_COLUMNS, tma=tma),
        matrix(out, BLOCK_VOCAB, WEIGHT_COLUMNS, tma=tma, parts=parts),
        start.weight,
        shares,
        lists,
        *span,
        weight.shape[0],
        size,
        HIDDEN=start.hidden is not None,
        WEIGHT=grad_weight is not None,
        TILE_TOKENS=BLOCK_TOKENS,
        TILE_VOCAB=BLOCK_VOCAB,
        HIDDEN_COLUMNS=HIDDEN_COLUMNS,
        WEIGHT_COLUMNS=WEIGHT_COLUMNS,
        STEP=step,
        PARTS=parts,
        num_stages=family.storing_stages,
        num_warps=WARPS,
    )
