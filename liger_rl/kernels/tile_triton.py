"""Fold and gradient of a tile of logits as Triton kernels: one read of the tile each, any number of columns.

The signatures and formulas are those of `liger_rl.kernels.eager`. Rows go on grid axis 0, which is not limited to
65535 as the others are, and row offsets are int64, because rows times columns passes 2^31.
"""

import os
import struct
from contextlib import nullcontext
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.kernels.statistics import Fold, TokenGradients
from liger_rl.kernels.transform import LogitTransform

LOWEST_LOG_PROBABILITY = tl.constexpr(-200.0)  # exp of it is 0 in float32, and 0 * -200 is 0 where 0 * -inf is NaN
MAX_BLOCK = 4096
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on"))
# Triton's own functions in place of NVIDIA's instructions: the interpreter knows none, and at those AMD's compiler ends
# the process.
PORTABLE = tl.constexpr(INTERPRETED.value or torch.version.hip is not None)


@triton.jit
def flushed_exp(x):
    """exp, but 0 where that is under float32's smallest normal number: two instructions where tl.exp takes five."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def exp_of_difference(z, peak):
    """z (M, N), peak (M,) its maximum -> exp(z - peak) as `exp_of_steps` gives it."""
    # Of larger numbers what differs is 32 apart: the smaller has probability 0, also by 2 to that power, and r is 0. A
    # factor of more than 1 would make the largest peaks infinite.
    return exp_of_steps(z, peak, tl.where(tl.abs(peak) < 2.0**29, LOG2_E, 1.0))


@triton.jit
def exp_of_steps(z, peak, unit):
    """z (M, N), peak, unit (M,) -> e, b (M, N), f, r (M,): 2^((z - peak) unit) = e f and (z - peak) unit = b - r.

    No number of a row is larger than e at the peak. e is 2^b, and b is rounded once in one instruction, where a
    difference and its exponential round twice in two. r is what rounding the peak's exponent left, under 1e-5 for a
    peak of under 100 nats, and f is 2^-r.
    """
    high = peak * unit
    rest = tl.fma(peak, unit, -high)
    exponent = tl.fma(z, unit[:, None], -high[:, None])
    return tl.exp2(exponent), exponent, tl.exp2(-rest), rest


@triton.jit
def _reciprocal(x):
    """1 / x to 1.2e-7 for x >= 0.5, and 0 from 2^126 on: one instruction where a quotient takes ten."""
    if PORTABLE:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _tanh(x, gain):
    """tanh(gain x) to 2.4e-7, absolute, with a gain above 0: six instructions."""
    # An odd function, or the mean of many logits would be off. Beyond float32 the exponential is infinite, and its
    # reciprocal 0.
    e = tl.exp2(_magnitude(x) * (gain * (2.0 * LOG2_E)))
    return _copysign(1.0 - 2.0 * _reciprocal(1.0 + e), x)


@triton.jit
def cap_left(x, gain):
    """1 - tanh(gain x) to 2.4e-7, absolute, with a gain above 0: what is left under a cap of 1, in four instructions.

    Not odd around 1 to the last digit: the mean of many logits takes `_tanh`.
    """
    # Half of it is 1 / (1 + e) with e = exp(2 gain x), which is infinite where nothing is left.
    return _reciprocal(0.5 + tl.exp2(tl.fma(x, gain * (2.0 * LOG2_E), -1.0)))


@triton.jit
def _magnitude(x):
    """|x| as part of what reads it: of tl.abs a product makes two instructions."""
    if PORTABLE:
        return tl.abs(x)
    return tl.inline_asm_elementwise("abs.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _copysign(magnitude, sign):
    """In one instruction, where a choice takes two."""
    if PORTABLE:
        return tl.where(sign < 0, -magnitude, magnitude)
    return tl.inline_asm_elementwise(
        "copysign.f32 $0, $2, $1;", "=f,f,f", [magnitude, sign], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def rough_log(x):
    """log of x >= 0 to 2e-7, absolute between 1/2 and 2 and relative elsewhere: one instruction where log takes twenty.

    For what is known to fewer digits than that, such as exponentials that were kept in float16.
    """
    if PORTABLE:
        return tl.log(x)
    log2 = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return log2 * LN_2


@triton.jit
def _loaded(logits, bias, columns, inside):
    """-> x = logits + bias in float32, 0 outside the tile."""
    x = tl.load(logits + columns, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def transformed(x, gain, cap, inverse, inverse_rest, SCALED: tl.constexpr, CAPPED: tl.constexpr, HEATED: tl.constexpr):
    """-> z and tanh^2 of float32 logits x; the numbers and flags are those of `transform_constants`."""
    z = x
    square = 0.0
    if CAPPED:
        tanh = _tanh(x, gain)
        square = tanh * tanh
        z = tanh * cap
    elif SCALED:
        z = x * gain
    if HEATED:
        # As good as a quotient, for two instructions. The rounded reciprocal alone would be a slightly different
        # temperature for every logit, which adds up to more.
        z = tl.fma(z, inverse, z * inverse_rest)
    return z, square


@triton.jit(do_not_specialize=["first"])
def _fold_kernel(
    logits,  # (rows, columns)
    stride,
    targets,
    bias,
    peaks,
    sums,
    target_logits,
    moments,
    sums_sq,
    logit_sums,
    rivals,
    columns,
    first,
    gain,
    cap,
    inverse,
    inverse_rest,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    HEATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    column_of_target = tl.load(targets + row) - first
    peak = tl.load(peaks + row)
    total = tl.load(sums + row)
    target = tl.load(target_logits + row)
    moment = 0.0
    if moments is not None:
        moment = tl.load(moments + row)
    total_sq = 0.0
    if sums_sq is not None:
        total_sq = tl.load(sums_sq + row)
    logit_sum = 0.0
    if logit_sums is not None:
        logit_sum = tl.load(logit_sums + row)
    rival = float("-inf")
    if rivals is not None:
        rival = tl.load(rivals + row)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        z, _ = transformed(
            _loaded(logits, bias, column, inside), gain, cap, inverse, inverse_rest, SCALED, CAPPED, HEATED
        )
        target += tl.sum(tl.where(column == column_of_target, z, 0.0))
        if logit_sums is not None:
            logit_sum += tl.sum(tl.where(inside, z, 0.0))
        # Only now, so that a softcap cannot make the lanes past the end finite again.
        z = tl.where(inside, z, float("-inf"))
        if rivals is not None:
            rival = tl.maximum(rival, tl.max(tl.where(column < column_of_target, z, float("-inf"))))
        new_peak = tl.maximum(peak, tl.max(z))
        kept = tl.exp(peak - new_peak)
        shifted = z - new_peak
        exp = tl.exp(shifted)
        if moments is not None:
            moment = kept * (moment + (peak - new_peak) * total)
            moment += tl.sum(exp * tl.maximum(shifted, LOWEST_LOG_PROBABILITY))
        total = total * kept + tl.sum(exp)
        if sums_sq is not None:
            total_sq = total_sq * kept * kept + tl.sum(exp * exp)
        peak = new_peak
    tl.store(peaks + row, peak)
    tl.store(sums + row, total)
    tl.store(target_logits + row, target)
    if moments is not None:
        tl.store(moments + row, moment)
    if sums_sq is not None:
        tl.store(sums_sq + row, total_sq)
    if logit_sums is not None:
        tl.store(logit_sums + row, logit_sum)
    if rivals is not None:
        tl.store(rivals + row, rival)


@triton.jit(do_not_specialize=["first"])
def _grad_kernel(
    logits,
    stride,
    out,
    out_stride,
    targets,
    bias,
    lse_of,
    grad_logps,
    at_target,
    entropies,
    grad_entropies,
    columns,
    first,
    gain,
    cap,
    inverse,
    inverse_rest,
    slope,  # scale / temperature
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    HEATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    out += row * out_stride
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    z, square = transformed(
        _loaded(logits, bias, column, inside), gain, cap, inverse, inverse_rest, SCALED, CAPPED, HEATED
    )
    log_p = z - tl.load(lse_of + row)
    p = tl.exp(log_p)
    hit = column == tl.load(targets + row) - first
    g = tl.load(grad_logps + row)
    grad = tl.where(hit, tl.load(at_target + row), -g * p)
    if entropies is not None:
        e = tl.load(grad_entropies + row)
        log_p = tl.maximum(log_p, LOWEST_LOG_PROBABILITY)
        grad -= e * p * (log_p + tl.load(entropies + row))
    grad *= slope
    if CAPPED:
        grad *= 1.0 - square
    tl.store(out + column, grad.to(out.dtype.element_ty), mask=inside)


def fold(
    logits: Tensor,
    targets: Tensor,
    first: int,
    bias: Tensor | None,
    transform: LogitTransform,
    state: Fold,
) -> None:
    """As `eager.fold`; the last dimension of `logits` must be contiguous."""
    assert logits.stride(-1) == 1
    n = targets.numel()
    if n == 0:
        return
    block = _block(logits.shape[-1])
    with on(logits.device):
        _fold_kernel[(n,)](
            logits,
            logits.stride(0),
            targets.contiguous(),
            None if bias is None else bias.contiguous(),
            *state,
            logits.shape[-1],
            first,
            **transform_constants(transform),
            BLOCK=block,
            num_warps=_warps(block),
        )


def grad(
    logits: Tensor,
    targets: Tensor,
    first: int,
    bias: Tensor | None,
    transform: LogitTransform,
    tokens: TokenGradients,
    out: Tensor,
) -> None:
    """As `eager.grad`; the last dimensions of `logits` and `out` must be contiguous."""
    assert logits.stride(-1) == 1
    assert out.stride(-1) == 1
    n, columns = targets.numel(), logits.shape[-1]
    if n == 0:
        return
    block = _block(columns)
    with on(logits.device):
        _grad_kernel[(n, triton.cdiv(columns, block))](
            logits,
            logits.stride(0),
            out,
            out.stride(0),
            targets.contiguous(),
            None if bias is None else bias.contiguous(),
            *(None if column is None else column.contiguous() for column in tokens),
            columns,
            first,
            slope=transform.scale / transform.temperature,
            **transform_constants(transform),
            BLOCK=block,
            num_warps=_warps(block),
        )


@lru_cache
def transform_constants(transform: LogitTransform) -> dict[str, float | bool]:
    """Steps of z = cap * tanh(gain * x) / temperature, or gain * x / temperature; those that change nothing are off.

    1 / temperature is in two parts of float32, the second what the first was cut by. It is above 0, if by as little as
    changes no sum, so that the product of either with the -inf of a banned word is -inf.
    """
    capped = transform.softcap is not None
    inverse = 1.0 / transform.temperature
    (bits,) = struct.unpack("Q", struct.pack("d", inverse))
    (cut,) = struct.unpack("d", struct.pack("Q", bits >> 29 << 29))  # to float32's digits
    gain = transform.scale / transform.softcap if capped else transform.scale
    return {
        # float(), because an int would be an integer in the kernel, and some of them compiled in.
        "gain": float(gain),
        "cap": float(transform.softcap) if transform.softcap is not None else 1.0,
        "inverse": cut,
        "inverse_rest": max(inverse - cut, inverse * 2.0**-60),
        "SCALED": gain != 1.0,
        "CAPPED": capped,
        "HEATED": transform.temperature != 1.0,
    }


def heat_of(transform: LogitTransform) -> float:
    """temperature / softcap, which makes a tanh of z; 0 without a softcap."""
    return 0.0 if transform.softcap is None else transform.temperature / transform.softcap


def _block(columns: int) -> int:
    return min(MAX_BLOCK, triton.next_power_of_2(columns))


def _warps(block: int) -> int:
    return max(1, min(8, block // 512))


def on(device: torch.device):
    """Triton launches on the current device, which need not be the tensors'."""
    # By its index, which is looked up in no time.
    return torch.cuda.device(device.index) if device.type == "cuda" else nullcontext()
