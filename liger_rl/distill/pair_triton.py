"""Fold and gradient of a pair of tiles, a student's and a teacher's logits, in Triton.

A program folds one row, or makes the gradient of a block of one row. The signatures and formulas are those of
`liger_rl.distill.pair_reference`.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from liger_rl.distill import pair_reference
from liger_rl.distill.pair_reference import MixtureSums, PairFold, PairGradients, PairTile, Tile
from liger_rl.kernels.devices import launch_context
from liger_rl.kernels.logit_rows_triton import BLOCK, WARPS, load_logits
from liger_rl.kernels.softmax_triton import (
    LOWEST_LOG_PROBABILITY,
    moment_around,
    one_minus_exp,
    times_derivative,
    transform_logits,
)
from liger_rl.kernels.transform import LogitSteps

SCALE_BLOCK, SCALE_WARPS = 8192, 8
SCALE_PROGRAMS = 2048  # at most: each program reads the factor, which is 1 as a rule

FORWARD, REVERSE = tl.constexpr(pair_reference.FORWARD), tl.constexpr(pair_reference.REVERSE)


class TileArgument(NamedTuple):
    """A `pair_reference.Tile` as an argument of a kernel."""

    logits: Tensor
    stride: int  # elements between two rows
    bias: Tensor | None
    steps: LogitSteps

    @classmethod
    def of(cls, tile: Tile) -> "TileArgument":
        assert tile.logits.stride(1) == 1
        bias = None if tile.bias is None else tile.bias.contiguous()
        return cls(tile.logits, tile.logits.stride(0), bias, LogitSteps.of(tile.transform))


@triton.jit
def _load_pair(student, teacher, token, column, inside):
    """-> z, t, and tanh^2 of the student. z and t are -inf outside the tiles; `inside` None means all are inside."""
    x = load_logits(student.logits + token * student.stride, student.bias, column, inside)
    z, square = transform_logits(x, student.steps)
    x = load_logits(teacher.logits + token * teacher.stride, teacher.bias, column, inside)
    t, _square = transform_logits(x, teacher.steps)
    if inside is not None:
        # After the transform, because a softcap would make -inf finite.
        z = tl.where(inside, z, float("-inf"))
        t = tl.where(inside, t, float("-inf"))
    return z, t, square


@triton.jit
def _subtract_log_mixture(gap, beta):
    """As `pair_reference._subtract_log_mixture`."""
    lesser = gap <= 0.0
    y = -tl.where(lesser, beta, 1.0 - beta) * one_minus_exp(-tl.abs(gap))
    # log(1 + y) to float32's precision also near 0: the quotient corrects the rounding of 1 + y.
    w = 1.0 + y
    rounded = w - 1.0
    larger = -tl.where(rounded == 0.0, y, tl.log(w) * (y / tl.where(rounded == 0.0, 1.0, rounded)))
    return tl.where(lesser, larger, larger - gap), tl.where(lesser, larger + gap, larger)


@triton.jit
def _rescale_moment(moment, factor, shift, total):
    """As `pair_reference._rescale_moment`."""
    return tl.where(factor > 0.0, factor * (moment + shift * total), 0.0)


@triton.jit
def _weighted_sum(weight, values):
    """As `pair_reference._weighted_sum`, for one row."""
    return tl.sum(tl.where(weight > 0.0, weight * values, 0.0))


@triton.jit
def _fold_block(
    student, teacher, token, column, inside,
    peak, total, teacher_peak, teacher_total, gap, moment, KIND: tl.constexpr,
):  # fmt: skip
    """-> the running numbers of a `PairFold` after one more block."""
    z, t, _square = _load_pair(student, teacher, token, column, inside)
    new_peak = tl.maximum(peak, tl.max(z))
    new_teacher_peak = tl.maximum(teacher_peak, tl.max(t))
    lower = peak - new_peak
    teacher_lower = teacher_peak - new_teacher_peak
    factor = tl.exp(lower)
    teacher_factor = tl.exp(teacher_lower)
    a = z - new_peak
    b = t - new_teacher_peak
    exp = tl.exp(a)
    teacher_exp = tl.exp(b)
    moment = moment_around(new_peak, peak, factor, total, moment)
    moment += tl.sum(exp * tl.maximum(a, LOWEST_LOG_PROBABILITY))
    if KIND == FORWARD:
        gap = _rescale_moment(gap, teacher_factor, teacher_lower - lower, teacher_total) + _weighted_sum(
            teacher_exp, b - a
        )
    elif KIND == REVERSE:
        gap = _rescale_moment(gap, factor, lower - teacher_lower, total) + _weighted_sum(exp, a - b)
    total = total * factor + tl.sum(exp)
    teacher_total = teacher_total * teacher_factor + tl.sum(teacher_exp)
    return new_peak, total, new_teacher_peak, teacher_total, gap, moment


@triton.jit
def _fold_pair_kernel(
    student,  # `TileArgument`
    teacher,
    state,  # `PairFold`, updated
    columns,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    peak = tl.load(state.peak + token)
    total = tl.load(state.sum_exp + token)
    teacher_peak = tl.load(state.teacher_peak + token)
    teacher_total = tl.load(state.teacher_sum_exp + token)
    moment = tl.load(state.moment + token)
    gap = 0.0
    if state.gap is not None:
        gap = tl.load(state.gap + token)
    whole = columns // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        peak, total, teacher_peak, teacher_total, gap, moment = _fold_block(
            student, teacher, token, start + tl.arange(0, BLOCK), None,
            peak, total, teacher_peak, teacher_total, gap, moment, KIND,
        )  # fmt: skip
    # The last, partial block is separate, so that the loop above needs no mask.
    for start in range(whole, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        peak, total, teacher_peak, teacher_total, gap, moment = _fold_block(
            student, teacher, token, column, column < columns,
            peak, total, teacher_peak, teacher_total, gap, moment, KIND,
        )  # fmt: skip
    tl.store(state.peak + token, peak)
    tl.store(state.teacher_peak + token, teacher_peak)
    tl.store(state.sum_exp + token, total)
    tl.store(state.teacher_sum_exp + token, teacher_total)
    if state.gap is not None:
        tl.store(state.gap + token, gap)
    tl.store(state.moment + token, moment)


@triton.jit
def _mix_pair_kernel(
    student,  # `TileArgument`
    teacher,
    lse,
    teacher_lse,
    sums,  # `MixtureSums`, updated
    columns,
    beta,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    norm = tl.load(lse + token)
    teacher_norm = tl.load(teacher_lse + token)
    student_sum = tl.load(sums.student + token)
    teacher_sum = tl.load(sums.teacher + token)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        z, t, _square = _load_pair(student, teacher, token, column, inside)
        log_p = z - norm
        log_q = t - teacher_norm
        p = tl.exp(log_p)
        difference, teacher_difference = _subtract_log_mixture(log_q - log_p, beta)
        student_sum += _weighted_sum(p, difference)
        teacher_sum += _weighted_sum(tl.exp(log_q), teacher_difference)
    tl.store(sums.student + token, student_sum)
    tl.store(sums.teacher + token, teacher_sum)


@triton.jit
def _grad_pair_kernel(
    student,  # `TileArgument`
    teacher,
    out,
    out_stride,
    gradients,  # `PairGradients`
    columns,
    beta,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    z, t, square = _load_pair(student, teacher, token, column, inside)
    log_p = z - tl.load(gradients.lse + token)
    log_q = t - tl.load(gradients.teacher_lse + token)
    p = tl.exp(log_p)
    factor = tl.load(gradients.grad + token)
    if KIND == FORWARD:
        grad = p - tl.exp(log_q)
    elif KIND == REVERSE:
        # An infinite divergence may have no gradient, and 0 * inf is NaN.
        counts = tl.where(factor != 0.0, p, 0.0) > 0.0
        grad = tl.where(counts, p * (log_p - log_q - tl.load(gradients.value + token)), 0.0)
    else:
        difference, _teacher_difference = _subtract_log_mixture(log_q - log_p, beta)
        grad = tl.where(p > 0.0, (1.0 - beta) * p * (difference - tl.load(gradients.value + token)), 0.0)
    grad *= factor
    grad = times_derivative(grad, square, student.steps)
    tl.store(out + token * out_stride + column, grad.to(out.dtype.element_ty), mask=inside)


def fold_pair(tile: PairTile, state: PairFold) -> None:
    """As `pair_reference.fold_pair`. Logits must be contiguous in their last dimension, also in the other two."""
    student, teacher, measure = tile
    n, columns = student.logits.shape
    if n:
        with launch_context(student.logits.device):
            _fold_pair_kernel[(n,)](
                TileArgument.of(student), TileArgument.of(teacher), state, columns,
                KIND=measure.kind, BLOCK=_block_size(columns), num_warps=WARPS,
            )  # fmt: skip


def mix_pair(tile: PairTile, lse: Tensor, teacher_lse: Tensor, sums: MixtureSums) -> None:
    """As `pair_reference.mix_pair`."""
    n, columns = tile.student.logits.shape
    if n:
        with launch_context(lse.device):
            _mix_pair_kernel[(n,)](
                TileArgument.of(tile.student), TileArgument.of(tile.teacher), lse, teacher_lse, sums,
                columns, tile.measure.beta, BLOCK=_block_size(columns),
                num_warps=WARPS,
            )  # fmt: skip


def grad_pair(tile: PairTile, gradients: PairGradients, out: Tensor) -> None:
    """As `pair_reference.grad_pair`."""
    assert out.stride(-1) == 1
    student, teacher, measure = tile
    n, columns = student.logits.shape
    if n:
        block = _block_size(columns)
        with launch_context(out.device):
            _grad_pair_kernel[(n, triton.cdiv(columns, block))](
                TileArgument.of(student), TileArgument.of(teacher), out, out.stride(0), gradients.contiguous(),
                columns, measure.beta, KIND=measure.kind, BLOCK=block, num_warps=WARPS,
            )  # fmt: skip


def _block_size(columns: int) -> int:
    return min(BLOCK, triton.next_power_of_2(columns))


@triton.jit
def _scale_kernel(values, factor, count, BLOCK: tl.constexpr):
    scale = tl.load(factor)
    if scale != 1.0:
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
            place = first + tl.arange(0, BLOCK)
            inside = place < count
            scaled = tl.load(values + place, mask=inside, other=0.0).to(tl.float32) * scale
            tl.store(values + place, scaled.to(values.dtype.element_ty), mask=inside)


def scale_(values: Tensor, factor: Tensor) -> None:
    """As `pair_reference.scale_`; the values must be contiguous."""
    assert values.is_contiguous()
    with launch_context(values.device):
        _scale_kernel[(min(triton.cdiv(values.numel(), SCALE_BLOCK), SCALE_PROGRAMS),)](
            values, factor, values.numel(), SCALE_BLOCK, num_warps=SCALE_WARPS
        )
