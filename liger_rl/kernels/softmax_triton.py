"""The softmax of a tile of logits, once, as Triton functions that every kernel calls: transform, fold and gradient.

The formulas are those of `liger_rl.kernels.reference`. `steps` is a call's `LogitSteps`, `tokens` its `TokenGradients`.
A field of such a NamedTuple that is None is a constant, so `steps.cap is not None` costs nothing at run time. The tuple
itself must not be compared with None: Triton 3.6 has no such comparison where a field is None. Nor may a function
return None.
"""

import os

import torch
import triton
import triton.language as tl

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
LOWEST_LOG_PROBABILITY = tl.constexpr(-200.0)  # exp of it is 0 in float32, and 0 * -200 is 0 where 0 * -inf is NaN
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on"))
# Triton's own functions in place of NVIDIA's instructions. The interpreter knows none of those, and AMD's compiler ends
# the process at one.
PORTABLE = tl.constexpr(INTERPRETED.value or torch.version.hip is not None)


# --- exponentials and their like, in few instructions -----------------------------------------------------------------


@triton.jit
def flushed_exp(x):
    """exp, but 0 where that is under float32's smallest normal number: two instructions where tl.exp takes five."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def exp_of_difference(z, peak):
    """z (M, N), peak (M,) its maximum -> exp(z - peak) as `exp_of_steps` gives it."""
    # From 2^29 on, neighbouring numbers are 32 or more apart: beside the peak, exp and exp2 of a difference vanish
    # alike. There the factor is 1, so that r is 0. LOG2_E would make the largest peaks infinite.
    return exp_of_steps(z, peak, tl.where(tl.abs(peak) < 2.0**29, LOG2_E, 1.0))


@triton.jit
def exp_of_steps(z, peak, unit):
    """z (M, N), peak, unit (M,) -> e, b (M, N), f, r (M,): 2^((z - peak) unit) = e f and (z - peak) unit = b - r.

    No number of a row is larger than e at the peak. e is 2^b, and b is rounded once, in one instruction. r is what
    rounding the peak's exponent left, under 1e-5 for a peak of under 100 nats, and f is 2^-r.
    """
    high = peak * unit
    rest = tl.fma(peak, unit, -high)
    exponent = tl.fma(z, unit[:, None], -high[:, None])
    return tl.exp2(exponent), exponent, tl.exp2(-rest), rest


@triton.jit
def one_minus_exp(x):
    """1 - exp(x) for x <= 0, to float32's precision also near 0."""
    # The series' next term is under 2^-30 of the sum for |x| < 1/4; beyond, the difference loses two bits at most.
    tail = 0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * (1.0 / 120.0 + x * (1.0 / 720.0 + x * (1.0 / 5040.0)))))
    return tl.where(x > -0.25, -x * (1.0 + x * tail), 1.0 - tl.exp(x))


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
    """|x|, which PTX fuses into its reader. A product of tl.abs takes two instructions."""
    if PORTABLE:
        return tl.abs(x)
    return tl.inline_asm_elementwise("abs.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _copysign(magnitude, sign):
    """-> `magnitude` with the sign of `sign`, in one instruction; tl.where takes two."""
    if PORTABLE:
        return tl.where(sign < 0, -magnitude, magnitude)
    return tl.inline_asm_elementwise(
        "copysign.f32 $0, $2, $1;", "=f,f,f", [magnitude, sign], dtype=tl.float32, is_pure=True, pack=1
    )


# --- the transform ----------------------------------------------------------------------------------------------------


@triton.jit
def transform_logits(x, steps):
    """-> z and tanh^2 of float32 logits x; tanh^2 is 0 without a softcap."""
    z = x
    square = 0.0
    if steps.cap is not None:
        tanh = _tanh(x, steps.gain)
        square = tanh * tanh
        z = tanh * steps.cap
    elif steps.gain is not None:
        z = x * steps.gain
    if steps.inverse is not None:
        z = divide_by_temperature(z, steps)
    return z, square


@triton.jit
def divide_by_temperature(z, steps):
    """-> z / temperature, for a temperature other than 1."""
    # Two instructions, as exact as a quotient. The rounded reciprocal alone is a slightly different temperature, and
    # its error adds up over the logits.
    return tl.fma(z, steps.inverse, z * steps.inverse_rest)


@triton.jit
def times_derivative(grad, square, steps):
    """dL/dz and tanh^2 -> dL/dx."""
    if steps.cap is not None:
        grad *= 1.0 - square
    return grad if steps.slope is None else grad * steps.slope


@triton.jit
def tanh_square(z, steps):
    """-> tanh^2 of transformed logits z under a softcap."""
    tanh = z * steps.per_cap
    return tanh * tanh


# --- the fold ---------------------------------------------------------------------------------------------------------


@triton.jit
def moment_around(new_peak, peak, kept, total, moment):
    """-> the moment of a `Fold` around a new peak; kept is exp(peak - new_peak)."""
    # From the lowest number the difference may be infinite, and 0 * inf is NaN.
    return kept * (moment + tl.where(kept > 0.0, peak - new_peak, 0.0) * total)


@triton.jit
def fold_block(z, peak, total, moment, sum_sq, MOMENT: tl.constexpr, SUM_SQ: tl.constexpr):
    """-> a row's running peak, sum of exponentials, moment and sum of squares after one more block z (N,)."""
    new_peak = tl.maximum(peak, tl.max(z))
    kept = tl.exp(peak - new_peak)
    shifted = z - new_peak
    exp = tl.exp(shifted)
    if MOMENT:
        moment = moment_around(new_peak, peak, kept, total, moment)
        moment += tl.sum(exp * tl.maximum(shifted, LOWEST_LOG_PROBABILITY))
    if SUM_SQ:
        sum_sq = sum_sq * kept * kept + tl.sum(exp * exp)
    return new_peak, total * kept + tl.sum(exp), moment, sum_sq


# --- the gradient -----------------------------------------------------------------------------------------------------


@triton.jit
def _entropy_part(p, log_p, e, entropy):
    """-> e p (log p + entropy); see `reference.entropy_term`."""
    return e * p * (tl.maximum(log_p, LOWEST_LOG_PROBABILITY) + entropy)


@triton.jit
def log_probabilities(z, lse):
    """-> z - lse, float32. Subtracting what float32 leaves of a float64 lse keeps the sum of exp(z - lse) at 1."""
    rounded = lse.to(tl.float32)
    rest = (lse - rounded).to(tl.float32)
    return (z - rounded) - tl.where(tl.abs(rounded) < float("inf"), rest, 0.0)  # inf - inf is NaN


@triton.jit
def token_terms(tokens, token, live):
    """-> dL/dlogp, dL/dentropy and entropy of tokens; the last two are 0.0 without a gradient of the entropy."""
    g = tl.load(tokens.grad_logps + token, mask=live, other=0.0)
    e = 0.0
    entropy = 0.0
    if tokens.grad_entropy is not None:
        e = tl.load(tokens.grad_entropy + token, mask=live, other=0.0)
        entropy = tl.load(tokens.entropy + token, mask=live, other=0.0)
    return g, e, entropy


@triton.jit
def gradient(p, log_p, hit, at_target, g, e, entropy, ENTROPY: tl.constexpr):
    """-> dL/dz of one tile. `hit` is true at the targets, where dL/dlogp gives `at_target`; None has no target.

    ENTROPY says whether there is a gradient of the entropy.
    """
    grad = -g * p
    if hit is not None:
        grad = tl.where(hit, at_target, grad)
    if ENTROPY:
        grad -= _entropy_part(p, log_p, e, entropy)
    return grad


@triton.jit
def with_uniform(grad, tokens, token, live):
    """-> dL/dz of `token`, of any shape that broadcasts with it, plus dL/dmean_logits / V."""
    if tokens.uniform is not None:
        grad += tl.load(tokens.uniform + token, mask=live, other=0.0)
    return grad
