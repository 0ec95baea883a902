"""What a forward keeps of two heads' logits so that a divergence's gradient needs no second products, in Triton.

With a = z - peak and b = t - teacher_peak, the peaks those of the same entries, each entry keeps

    larger  max(exp(a), exp(b)), in (0, 1]
    gap   a - b

in float16. The smaller exponential is the larger one times exp(-|gap|). What underflows is under 2^-24 of the largest
entry of its head beside it. Both exponentials share the rounding of the larger one, and a gap is rounded relative to
itself. So p - q and log p - log q have a relative error of 2^-11 however near the heads are, an eighth of what rounding
the gradient to bfloat16 adds. Two exponentials would have p - q to 2^-11 of p alone.

A reverse KL divergence and a mixture subtract a mean of log ratios. It nearly cancels that of an entry with almost all
of the probability, so it is made of what is kept, too.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.engines.pair import reference as divergence
from liger_rl.engines.pair.reference import Measure, MixtureSums, PairGradients
from liger_rl.engines.pair.tile_epilogues import FORWARD, REVERSE, divergence_gradient, over_mixture
from liger_rl.kernels.devices import empty_rows, on
from liger_rl.kernels.softmax import (
    LOWEST,
    LOWEST_LOG_PROBABILITY,
    flushed_exp,
    gradient,
    rough_log,
    times_slope,
)
from liger_rl.kernels.statistics import BLOCK_VOCAB
from liger_rl.kernels.transform import LogitSteps, LogitTransform

ENTRIES, WARPS = 1024, 2  # of a program
LARGEST_GAP = tl.constexpr(65504.0)  # that float16 has


class KeptPair(NamedTuple):
    """Of n tokens over the whole vocabulary."""

    larger: Tensor  # (n, V) float16
    gaps: Tensor  # (n, V) float16
    peaks: Tensor  # (n, parts) float32, over a part of as many entries each and others near it, the same of both heads
    teacher_peaks: Tensor  # (n, parts) float32

    @classmethod
    def empty(cls, n: int, vocab: int, device: torch.device, entries: int) -> "KeptPair":
        # Two tensors, because the gradient that takes the place of one outlives the other.
        larger, gaps = (empty_rows(n, vocab, torch.float16, device) for _ in range(2))
        parts = -(-vocab // BLOCK_VOCAB) * (BLOCK_VOCAB // entries)
        return cls(larger, gaps, *torch.empty(2, n, parts, dtype=torch.float32, device=device).unbind())

    @property
    def entries(self) -> int:
        """Of a part."""
        return -(-self.larger.shape[1] // BLOCK_VOCAB) * BLOCK_VOCAB // self.peaks.shape[1]

    @property
    def strides(self) -> tuple[int, int]:
        """Of the rows of what is kept and of the peaks."""
        return self.larger.stride(0), self.peaks.stride(0)


@triton.jit
def _loaded(kept, row, columns, strides, lse, teacher_lse, PARTS: tl.constexpr, ENTRIES: tl.constexpr):
    """-> column, inside, p, q and log p - log q of a program's parts (PARTS, ENTRIES / PARTS) of a row.

    log p - log q is 0 where neither has a probability.
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
    # A larger one is infinite in float16, and 0 * inf is NaN; that of an id that both heads ban is NaN itself.
    gap = tl.where(larger > 0.0, tl.minimum(tl.maximum(gap, -LARGEST_GAP), LARGEST_GAP), 0.0)
    lesser = flushed_exp(-tl.abs(gap))
    p = larger * tl.where(gap < 0.0, lesser, 1.0) * flushed_exp(below)[:, None]
    q = larger * tl.where(gap < 0.0, 1.0, lesser) * flushed_exp(teacher_below)[:, None]
    gap = tl.where(larger > 0.0, gap + (below - teacher_below)[:, None], 0.0)
    return column, inside, p, q, gap


@triton.jit
def _sum_kept_kernel(
    kept,  # `KeptPair`
    strides,
    lse,
    teacher_lse,
    sums,  # written of each program: p, its log ratios, q, its log ratios, (4 or of REVERSE 2, programs of a row, n)
    columns,
    beta,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    _column, _inside, p, q, over = _loaded(
        kept, row, columns, strides, tl.load(lse + row), tl.load(teacher_lse + row), PARTS, ENTRIES
    )
    n = tl.num_programs(0)
    out, step = sums + tl.program_id(1).to(tl.int64) * n + row, tl.num_programs(1).to(tl.int64) * n
    if KIND != REVERSE:
        over, teacher_over = over_mixture(-over, beta)
        tl.store(out + 2 * step, tl.sum(q))
        tl.store(out + 3 * step, tl.sum(tl.where(q > 0.0, q * teacher_over, 0.0)))
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
    column, inside, p, q, gap = _loaded(kept, row, columns, strides, norm, teacher_norm, PARTS, ENTRIES)
    value = 0.0
    if KIND != FORWARD:
        value = tl.load(tokens.value + row)
    grad = divergence_gradient(gap, 0.0, p, q, value, beta, KIND) * tl.load(tokens.grad + row)
    # Where an exponential underflowed any finite logarithm will do: the probability beside it is 0.
    log_p = tl.maximum(rough_log(p), LOWEST_LOG_PROBABILITY)
    ENTROPY: tl.constexpr = tokens.grad_entropy is not None
    if (tokens.grad_logps is not None) | ENTROPY:
        g, e, entropy, at_target = 0.0, 0.0, 0.0, 0.0
        hit = column < 0
        if tokens.grad_logps is not None:
            g = tl.load(tokens.grad_logps + row)
            at_target = tl.load(tokens.at_target + row)
            hit = column == tl.load(targets + row)
        if ENTROPY:
            e = tl.load(tokens.grad_entropy + row)
            entropy = tl.load(tokens.entropy + row)
        grad += gradient(p, log_p, hit, at_target, g, e, entropy, ENTROPY)
    tl.store(out + row * out_stride + column, times_slope(grad, steps).to(out.dtype.element_ty), mask=inside)


def sum_kept(kept: KeptPair, measure: Measure, lse: Tensor, teacher_lse: Tensor) -> MixtureSums:
    """The sums (n,) of `divergence.mix_pair` over the whole vocabulary.

    A reverse KL divergence is the mixture of the teacher alone, whose own sum is 0. Both are means: the probabilities
    that are kept add up to 1 but for their rounding, and a row's gradient to 0.
    """
    n, columns = kept.larger.shape
    programs = triton.cdiv(columns, ENTRIES)
    sums = torch.empty(
        2 if measure.kind == divergence.REVERSE else 4, programs, n, dtype=torch.float32, device=lse.device
    )
    if n:
        with on(lse.device):
            _sum_kept_kernel[(n, programs)](
                kept, kept.strides, lse.contiguous(), teacher_lse.contiguous(), sums, columns, measure.beta,
                KIND=measure.kind, PARTS=ENTRIES // kept.entries, ENTRIES=ENTRIES, num_warps=WARPS,
            )  # fmt: skip
    masses, totals = sums.sum(1).unflatten(0, (-1, 2)).unbind(1)
    means = totals / masses
    return MixtureSums(means[0], means[1] if len(means) > 1 else torch.zeros_like(means[0]))


def grad_kept_pair(
    kept: KeptPair,
    targets: Tensor,  # (n,)
    transform: LogitTransform,  # without a softcap
    measure: Measure,
    tokens: PairGradients,  # (n,) each
    out: Tensor,  # (n, V) any float dtype; may have the memory of the larger exponentials
) -> None:
    """dL/dx of the student's logits, as `divergence.grad_pair` over the whole vocabulary."""
    assert transform.softcap is None
    n, columns = out.shape
    if n:
        with on(out.device):
            _grad_kept_pair_kernel[(n, triton.cdiv(columns, ENTRIES))](
                kept, kept.strides, out, out.stride(0), targets.contiguous(),
                tokens.contiguous(), columns, LogitSteps.of(transform), measure.beta,
                KIND=measure.kind, PARTS=ENTRIES // kept.entries, ENTRIES=ENTRIES, num_warps=WARPS,
            )  # fmt: skip
