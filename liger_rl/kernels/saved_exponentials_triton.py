"""What a forward keeps of the logits, and their gradient from it, as Triton kernels; see `saved_exponentials`.

Rows go on grid axis 0, which is not limited to 65535 as the others are, and row offsets are int64.
"""

import triton
import triton.language as tl
from torch import Tensor

from liger_rl.kernels.saved_exponentials import Kept
from liger_rl.kernels.statistics import TokenGradients
from liger_rl.kernels.tile_triton import (
    LOWEST_LOG_PROBABILITY,
    heat_of,
    on,
    rough_log,
    transform_constants,
    transformed,
)
from liger_rl.kernels.transform import LogitTransform

# Words a program. On an H200, 2048 tokens of V = 128256 take 273 us, of 256000 with a softcap 567; with 4096 words and
# 8 warps they took 279 and 626.
BLOCK, WARPS = 1024, 1
SCALE_BLOCK, SCALE_WARPS = 8192, 8
LOWEST = tl.constexpr(-3.4028234663852886e38)  # float32's


@triton.jit
def _keep_kernel(
    logits,
    stride,
    bias,
    values,  # column 0 is that of the logits, as the tiles' of the peaks
    value_stride,
    peaks,
    peak_stride,
    columns,
    gain,
    cap,
    inverse,
    inverse_rest,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    HEATED: tl.constexpr,
    TILES: tl.constexpr,
    WORDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    column = tile[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    inside = column < columns
    x = tl.load(logits + row * stride + column, mask=inside, other=0.0)
    if bias is not None:
        x += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    z, _ = transformed(x, gain, cap, inverse, inverse_rest, SCALED, CAPPED, HEATED)
    z = tl.where(inside, z, float("-inf"))
    peak = tl.maximum(tl.max(z, 1), LOWEST)
    exp = tl.exp(z - peak[:, None])
    tl.store(values + row * value_stride + column, exp.to(values.dtype.element_ty), mask=inside)
    tl.store(peaks + tile.to(tl.int64) * peak_stride + row, peak, mask=tile * WORDS < columns)


@triton.jit(do_not_specialize=["first"])
def _grad_kept_kernel(
    values,
    value_stride,
    peaks,
    peak_stride,
    rows,
    out,
    out_stride,
    targets,
    lse_of,
    grad_logps,
    entropies,
    grad_entropies,
    at_target,
    columns,
    first,
    slope,  # scale / temperature
    heat,  # temperature / softcap
    CAPPED: tl.constexpr,
    TILES: tl.constexpr,
    WORDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = row
    if rows is not None:
        source = tl.load(rows + row)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    column = tile[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    inside = column < columns
    exp = tl.load(values + source * value_stride + column, mask=inside, other=0.0).to(tl.float32)
    known = tile * WORDS < columns
    peak = tl.load(peaks + tile.to(tl.int64) * peak_stride + source, mask=known, other=LOWEST)
    lse = tl.load(lse_of + row)
    p = exp * tl.exp(peak - lse)[:, None]
    grad = -tl.load(grad_logps + row) * p
    if entropies is not None or CAPPED:
        # Where a value underflowed any finite logarithm will do: the probability beside it is 0.
        log_exp = tl.maximum(rough_log(exp), LOWEST_LOG_PROBABILITY)
        if entropies is not None:
            log_p = tl.maximum(log_exp + (peak - lse)[:, None], LOWEST_LOG_PROBABILITY)
            grad -= tl.load(grad_entropies + row) * p * (log_p + tl.load(entropies + row))
        if CAPPED:
            tanh = (log_exp + peak[:, None]) * heat
            grad *= 1.0 - tanh * tanh
    hit = column == tl.load(targets + row) - first
    grad = tl.where(hit, tl.load(at_target + row), grad * slope)
    tl.store(out + row * out_stride + column, grad.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scale_kernel(values, factor, count, BLOCK: tl.constexpr):
    scale = tl.load(factor)
    if scale != 1.0:
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        scaled = tl.load(values + place, mask=inside, other=0.0).to(tl.float32) * scale
        tl.store(values + place, scaled.to(values.dtype.element_ty), mask=inside)


def keep(logits: Tensor, first: int, bias: Tensor | None, transform: LogitTransform, kept: Kept) -> None:
    """As `kept.keep`; the last dimension of `logits` must be contiguous."""
    assert logits.stride(-1) == 1
    n, columns = logits.shape
    if n == 0:
        return
    values, peaks = kept.values[:, first:], kept.peaks[first // kept.words :]
    tiles = _tiles(columns, kept.words)
    with on(logits.device):
        _keep_kernel[(n, triton.cdiv(columns, tiles * kept.words))](
            logits,
            logits.stride(0),
            None if bias is None else bias.contiguous(),
            values,
            values.stride(0),
            peaks,
            peaks.stride(0),
            columns,
            **transform_constants(transform),
            TILES=tiles,
            WORDS=kept.words,
            num_warps=WARPS,
        )


def grad_kept(
    kept: Kept,
    rows: Tensor | None,
    first: int,
    targets: Tensor,
    transform: LogitTransform,
    tokens: TokenGradients,
    at_target: Tensor,
    out: Tensor,
) -> None:
    """As `kept.grad_kept`; the last dimension of `out` must be contiguous."""
    assert out.stride(-1) == 1
    n, columns = out.shape
    if n == 0:
        return
    values, peaks = kept.values[:, first:], kept.peaks[first // kept.words :]
    tiles = _tiles(columns, kept.words)
    with on(out.device):
        _grad_kept_kernel[(n, triton.cdiv(columns, tiles * kept.words))](
            values,
            values.stride(0),
            peaks,
            peaks.stride(0),
            rows,
            out,
            out.stride(0),
            targets.contiguous(),
            tokens.lse.contiguous(),
            tokens.grad_logps.contiguous(),
            None if tokens.entropy is None else tokens.entropy.contiguous(),
            None if tokens.grad_entropy is None else tokens.grad_entropy.contiguous(),
            at_target.contiguous(),
            columns,
            first,
            slope=float(transform.scale / transform.temperature),
            heat=heat_of(transform),
            CAPPED=transform.softcap is not None,
            TILES=tiles,
            WORDS=kept.words,
            num_warps=WARPS,
        )


def scale_(values: Tensor, factor: Tensor) -> None:
    """As `kept.scale_`; the values must be contiguous."""
    assert values.is_contiguous()
    with on(values.device):
        _scale_kernel[(triton.cdiv(values.numel(), SCALE_BLOCK),)](
            values, factor, values.numel(), SCALE_BLOCK, num_warps=SCALE_WARPS
        )


def _tiles(columns: int, words: int) -> int:
    return max(1, min(BLOCK, triton.next_power_of_2(columns)) // words)
