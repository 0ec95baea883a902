"""Two float16 numbers for each entry of two heads' logits, kept by the forward so that a divergence's gradient needs no
second products: Triton kernels.

With a = z - peak and b = t - teacher_peak, both peaks over the same part of the columns, each entry keeps in float16

    larger  max(exp(a), exp(b)), in (0, 1]
    gap     a - b

The smaller exponential is the larger one times exp(-|gap|). An exponential that underflows is under 2^-24 of the
largest of its head in the part. Both exponentials share the rounding of the larger one, and the gap has its own
relative rounding. So p - q and log p - log q have a relative error of 2^-11, however near the heads are. That is an
eighth of the error from rounding the gradient to bfloat16. Two stored exponentials would give p - q to 2^-11 of p only.

A reverse KL divergence and a mixture subtract a mean of log ratios. The mean nearly cancels the log ratio of an entry
with almost all of the probability, so the mean is computed from the kept numbers, too (`sum_kept`).

A gap over 65504, such as that of an id that the teacher bans by a finite number, is infinite in float16. In a reverse
KL divergence all such entries of a token get one gap, with which the mean is the one that the fold computed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.head.pair import pair_reference as reference
from liger_rl.head.pair.pair_reference import (
    PART_ENTRIES,
    KeptPair,
    Measure,
    MixtureSums,
    PairGradients,
    PairStatistics,
)
from liger_rl.head.pair.tile_epilogues import REVERSE, over_mixture, pair_gradient
from liger_rl.kernels.devices import on
from liger_rl.kernels.softmax import (
    LOWEST,
    LOWEST_LOG_PROBABILITY,
    flushed_exp,
    rough_log,
    times_slope,
)
from liger_rl.kernels.transform import LogitSteps, LogitTransform

ENTRIES, WARPS = 1024, 2  # entries and warps of a program
LARGEST_GAP = tl.constexpr(65504.0)  # the largest finite float16


@triton.jit
def _loaded(kept, row, columns, strides, lse, teacher_lse, PARTS: tl.constexpr, ENTRIES: tl.constexpr):
    """-> column, inside, p, q and log p - log q of a program's parts (PARTS, ENTRIES / PARTS) of a row.

    log p - log q is 0 if both p and q are 0. The last result is true where the limit is the gap.
    """
    WIDTH: tl.constexpr = ENTRIES // PARTS
    part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    column = part[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = column < columns
    stride, peak_stride = strides
    known, place = part * WIDTH < columns, row * peak_stride + part
    below = tl.load(kept.peaks + place, mask=known, other=LOWEST) - lse
    teacher_below = tl.load(kept.teacher_peaks + place, mask=known, other=LOWEST) - teacher_lse
    larger = tl.load(kept.larger + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    gap = tl.load(kept.gaps + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    # A gap over LARGEST_GAP is infinite in float16, and 0 * inf is NaN. The gap of an id that both heads ban is NaN.
    far = gap > LARGEST_GAP
    gap = tl.where(larger > 0.0, tl.minimum(tl.maximum(gap, -LARGEST_GAP), tl.load(kept.limits + row)), 0.0)
    lesser = flushed_exp(-tl.abs(gap))
    p = larger * tl.where(gap < 0.0, lesser, 1.0) * flushed_exp(below)[:, None]
    q = larger * tl.where(gap < 0.0, 1.0, lesser) * flushed_exp(teacher_below)[:, None]
    gap = tl.where(larger > 0.0, gap + (below - teacher_below)[:, None], 0.0)
    return column, inside, p, q, gap, far


@triton.jit
def _sum_kept_kernel(
    kept,  # `KeptPair`
    strides,
    lse,
    teacher_lse,
    # (4, programs of a row, n), 3 in place of 4 for REVERSE, written: sums over the program's entries of p, of p times
    # its log ratio, of q, and of q times its log ratio; for REVERSE the third is of p where the limit is the gap
    sums,
    columns,
    beta,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    _column, _inside, p, q, over, far = _loaded(
        kept, row, columns, strides, tl.load(lse + row), tl.load(teacher_lse + row), PARTS, ENTRIES
    )
    n = tl.num_programs(0)
    out, step = sums + tl.program_id(1).to(tl.int64) * n + row, tl.num_programs(1).to(tl.int64) * n
    if KIND != REVERSE:
        over, teacher_over = over_mixture(-over, beta)
        tl.store(out + 2 * step, tl.sum(q))
        tl.store(out + 3 * step, tl.sum(tl.where(q > 0.0, q * teacher_over, 0.0)))
    else:
        tl.store(out + 2 * step, tl.sum(tl.where(far, p, 0.0)))
    tl.store(out, tl.sum(p))
    tl.store(out + step, tl.sum(tl.where(p > 0.0, p * over, 0.0)))


@triton.jit
def _grad_kept_pair_kernel(
    kept,  # `KeptPair`
    strides,
    out,
    out_stride,
    targets,
    tokens,  # `PairGradients`
    columns,
    steps,
    beta,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    norm, teacher_norm = tl.load(tokens.lse + row), tl.load(tokens.teacher_lse + row)
    column, inside, p, q, gap, _far = _loaded(kept, row, columns, strides, norm, teacher_norm, PARTS, ENTRIES)
    # For an exponential that underflowed any finite logarithm will do, because its factor p is 0.
    log_p = tl.maximum(rough_log(p), LOWEST_LOG_PROBABILITY)
    hit = column == tl.load(targets + row)
    grad = pair_gradient(p, q, log_p, gap, row, True, hit, tokens, beta, KIND)
    tl.store(out + row * out_stride + column, times_slope(grad, steps).to(out.dtype.element_ty), mask=inside)


def sum_kept(kept: KeptPair, measure: Measure, known: PairStatistics) -> MixtureSums:
    """The sums (n,) of `reference.mix_pair` over the whole vocabulary, from the kept numbers, whose limits it sets.

    A reverse KL divergence is the mixture with beta = 1, m = q, so the teacher's sum is 0. Each sum is divided by the
    sum of the kept probabilities, which add up to 1 except for their rounding. So a row's gradient adds up to 0.
    """
    lse, teacher_lse = known.lse, known.teacher_lse
    n, columns = kept.larger.shape
    programs = triton.cdiv(columns, ENTRIES)
    reverse = measure.kind == reference.REVERSE
    sums = torch.empty(3 if reverse else 4, programs, n, dtype=torch.float32, device=lse.device)
    if n:
        with on(lse.device):
            _sum_kept_kernel[(n, programs)](
                kept, kept.strides, lse.contiguous(), teacher_lse.contiguous(), sums, columns, measure.beta,
                KIND=measure.kind, PARTS=ENTRIES // PART_ENTRIES, ENTRIES=ENTRIES, num_warps=WARPS,
            )  # fmt: skip
    mass, total, *teacher = sums.sum(1)
    mean = total / mass
    if not reverse:
        return MixtureSums(mean, teacher[1] / teacher[0])
    assert known.divergence is not None
    missing = torch.where(teacher[0] > 0, (known.divergence - mean).clamp(min=0.0) * mass, 0.0)
    # A finite mean of finite log ratios would make the gradient of an infinite value finite.
    mean = torch.where(known.divergence.isinf(), torch.inf, mean + missing / mass)
    kept.limits.add_(torch.where(missing > 0, missing / teacher[0], 0.0)).clamp_(max=torch.finfo(torch.float32).max)
    return MixtureSums(mean, torch.zeros_like(mean))


def grad_kept_pair(
    kept: KeptPair,
    targets: Tensor,  # (n,)
    transform: LogitTransform,  # without a softcap
    measure: Measure,
    tokens: PairGradients,  # (n,) each
    out: Tensor,  # (n, V) any float dtype; may share the memory of `kept.larger`
) -> None:
    """dL/dx of the student's logits, as `reference.grad_pair` over the whole vocabulary."""
    assert transform.softcap is None
    n, columns = out.shape
    if n:
        with on(out.device):
            _grad_kept_pair_kernel[(n, triton.cdiv(columns, ENTRIES))](
                kept, kept.strides, out, out.stride(0), targets.contiguous(),
                tokens.contiguous(), columns, LogitSteps.of(transform), measure.beta,
                KIND=measure.kind, PARTS=ENTRIES // PART_ENTRIES, ENTRIES=ENTRIES, num_warps=WARPS,
            )  # fmt: skip
