"""Triton kernels of the exponentials that one pass keeps; the formulas are those of `reference`.

Rows are on grid axis 0, the only one that is not limited to 65535. Row offsets are int64.
"""

import triton
import triton.language as tl
from torch import Tensor

from liger_rl.kernels.devices import launch_context
from liger_rl.kernels.logit_rows_triton import load_logits
from liger_rl.kernels.reference import SavedExp
from liger_rl.kernels.softmax_triton import (
    LOWEST,
    LOWEST_LOG_PROBABILITY,
    gradient,
    rough_log,
    tanh_square,
    times_derivative,
    token_terms,
    transform_logits,
    with_uniform,
)
from liger_rl.kernels.statistics import TokenGradients
from liger_rl.kernels.tile_epilogues import SAVED_ONE
from liger_rl.kernels.transform import LogitSteps, LogitTransform

# Vocabulary entries of a program. On an H200, 2048 tokens of V = 128256 take 273 us, of 256000 with a softcap 567; with
# 4096 entries and 8 warps they took 279 and 626.
BLOCK, WARPS = 1024, 1
SCALE_BLOCK, SCALE_WARPS = 8192, 8
SCALE_PROGRAMS = 2048  # at most: each program reads the factor, which is 1 as a rule


@triton.jit
def _save_kernel(
    logits,
    stride,
    bias,
    values,  # column 0 is that of the logits, as the tiles' of the peaks
    value_stride,
    peaks,
    peak_stride,
    columns,
    steps,
    TILES: tl.constexpr,
    TILE_VOCAB: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    column = tile[:, None] * TILE_VOCAB + tl.arange(0, TILE_VOCAB)[None, :]
    inside = column < columns
    z, _ = transform_logits(load_logits(logits + row * stride, bias, column, inside), steps)
    z = tl.where(inside, z, float("-inf"))
    peak = tl.maximum(tl.max(z, 1), LOWEST)
    exp = tl.exp(z - peak[:, None]) * SAVED_ONE
    tl.store(values + row * value_stride + column, exp.to(values.dtype.element_ty), mask=inside)
    tl.store(peaks + tile.to(tl.int64) * peak_stride + row, peak, mask=tile * TILE_VOCAB < columns)


@triton.jit(do_not_specialize=["first"])
def _grad_from_saved_kernel(
    values,
    value_stride,
    peaks,
    peak_stride,
    rows,
    out,
    out_stride,
    targets,
    tokens,  # `TokenGradients`, whose `at_target` is not read
    at_target,
    columns,
    first,
    steps,
    TILES: tl.constexpr,
    TILE_VOCAB: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = row
    if rows is not None:
        source = tl.load(rows + row)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    column = tile[:, None] * TILE_VOCAB + tl.arange(0, TILE_VOCAB)[None, :]
    inside = column < columns
    exp = tl.load(values + source * value_stride + column, mask=inside, other=0.0).to(tl.float32) * (1.0 / SAVED_ONE)
    tile_inside = tile * TILE_VOCAB < columns
    peak = tl.load(peaks + tile.to(tl.int64) * peak_stride + source, mask=tile_inside, other=LOWEST)
    lse = tl.load(tokens.lse + row)
    g, e, entropy = token_terms(tokens, row, True)
    # Any finite logarithm does where a value underflowed, because the probability is 0 there. The compiler drops it if
    # neither an entropy nor a softcap reads it.
    log_exp = tl.maximum(rough_log(exp), LOWEST_LOG_PROBABILITY)
    p = exp * tl.exp(peak - lse)[:, None]
    log_p = log_exp + (peak - lse)[:, None]
    grad = gradient(p, log_p, None, None, g, e, entropy, tokens.grad_entropy is not None)
    square = 0.0
    if steps.cap is not None:
        square = tanh_square(log_exp + peak[:, None], steps)
    grad = times_derivative(with_uniform(grad, tokens, row, True), square, steps)
    hit = column == tl.load(targets + row) - first
    grad = tl.where(hit, tl.load(at_target + row), grad)
    tl.store(out + row * out_stride + column, grad.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scale_kernel(values, factor, count, BLOCK: tl.constexpr):
    scale = tl.load(factor)
    if scale != 1.0:
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
            place = first + tl.arange(0, BLOCK)
            inside = place < count
            scaled = tl.load(values + place, mask=inside, other=0.0).to(tl.float32) * scale
            tl.store(values + place, scaled.to(values.dtype.element_ty), mask=inside)


def save_exponentials(
    logits: Tensor, first: int, bias: Tensor | None, transform: LogitTransform, saved_exp: SavedExp
) -> None:
    """As `reference.save_exponentials`; the last dimension of `logits` must be contiguous."""
    assert logits.stride(-1) == 1
    n, columns = logits.shape
    if n == 0:
        return
    values, peaks = saved_exp.columns(first, first + columns)
    tiles = _tiles(columns, saved_exp.tile_vocab)
    with launch_context(logits.device):
        _save_kernel[(n, triton.cdiv(columns, tiles * saved_exp.tile_vocab))](
            logits,
            logits.stride(0),
            None if bias is None else bias.contiguous(),
            values,
            values.stride(0),
            peaks,
            peaks.stride(0),
            columns,
            LogitSteps.of(transform),
            TILES=tiles,
            TILE_VOCAB=saved_exp.tile_vocab,
            num_warps=WARPS,
        )


def grad_from_saved(
    saved_exp: SavedExp,
    rows: Tensor | None,
    first: int,
    targets: Tensor,
    transform: LogitTransform,
    tokens: TokenGradients,
    at_target: Tensor,
    out: Tensor,
) -> None:
    """As `reference.grad_from_saved`; the last dimension of `out` must be contiguous."""
    assert out.stride(-1) == 1
    n, columns = out.shape
    if n == 0:
        return
    values, peaks = saved_exp.columns(first, first + columns)
    tiles = _tiles(columns, saved_exp.tile_vocab)
    with launch_context(out.device):
        _grad_from_saved_kernel[(n, triton.cdiv(columns, tiles * saved_exp.tile_vocab))](
            values,
            values.stride(0),
            peaks,
            peaks.stride(0),
            rows,
            out,
            out.stride(0),
            targets.contiguous(),
            tokens.contiguous(),
            at_target.contiguous(),
            columns,
            first,
            LogitSteps.of(transform),
            TILES=tiles,
            TILE_VOCAB=saved_exp.tile_vocab,
            num_warps=WARPS,
        )


def scale_(values: Tensor, factor: Tensor) -> None:
    """As `reference.scale_`; the values must be contiguous."""
    assert values.is_contiguous()
    with launch_context(values.device):
        _scale_kernel[(min(triton.cdiv(values.numel(), SCALE_BLOCK), SCALE_PROGRAMS),)](
            values, factor, values.numel(), SCALE_BLOCK, num_warps=SCALE_WARPS
        )


def _tiles(columns: int, tile_vocab: int) -> int:
    return max(1, min(BLOCK, triton.next_power_of_2(columns)) // tile_vocab)
