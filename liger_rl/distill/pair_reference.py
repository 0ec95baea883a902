"""Fold and gradient of a student's and a teacher's tile of logits, in PyTorch: the CPU path and the specification.

With z, t the transformed logits, p, q their probabilities, m = (1 - beta) p + beta q, and sums over the vocabulary v:

    forward   sum_v q_v (log q_v - log p_v)                                      dz = p - q
    reverse   sum_v p_v (log p_v - log q_v)                                      dz = p (log p - log q - reverse)
    mixture   beta sum_v q_v (log q_v - log m_v) + (1 - beta) S                  dz = (1 - beta) p (log p - log m - S)
              with S = sum_v p_v (log p_v - log m_v)

One fold gives the forward and the reverse divergence. A mixture needs both normalisers at every entry, so it takes
a second step, `mix_pair`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.kernels.reference import times_derivative, transform_logits
from liger_rl.kernels.statistics import map_fields
from liger_rl.kernels.transform import LogitTransform

FORWARD, REVERSE, MIXTURE = 0, 1, 2


class Measure(NamedTuple):
    """The kind of a divergence, and the weight of a mixture."""

    kind: int  # FORWARD, REVERSE or MIXTURE
    beta: float = 0.0  # the teacher's weight in a mixture, in (0, 1)

    @property
    def needs_second_step(self) -> bool:
        """Whether entries need both normalisers."""
        return self.kind == MIXTURE


class Tile(NamedTuple):
    """Columns of one head's logits, before bias and transform."""

    logits: Tensor  # (n, v) float32
    bias: Tensor | None  # (v,)
    transform: LogitTransform


class PairTile(NamedTuple):
    """The same columns of both heads' logits, for the same n tokens."""

    student: Tile
    teacher: Tile
    measure: Measure


class PairFold(NamedTuple):
    """Running sums over the vocabulary, (n,) float32 each; kernels update them in place, tile by tile.

    The peaks are those of the entries so far, a = z - peak and b = t - teacher_peak.
    """

    peak: Tensor  # max_v z_v
    sum_exp: Tensor  # sum_v exp(a_v)
    teacher_peak: Tensor  # max_v t_v
    teacher_sum_exp: Tensor  # sum_v exp(b_v)
    gap: Tensor | None  # FORWARD: sum_v exp(b_v) (b_v - a_v); REVERSE: sum_v exp(a_v) (a_v - b_v); else None
    moment: Tensor  # sum_v exp(a_v) a_v, for the student's entropy

    @classmethod
    def start(cls, n: int, device: torch.device, measure: Measure) -> "PairFold":
        """The fold of no tile."""
        lowest = torch.finfo(torch.float32).min  # see `Fold.start`
        first_values = lowest, 0.0, lowest, 0.0, None if measure.needs_second_step else 0.0, 0.0
        return cls._make(
            None if value is None else torch.full((n,), value, dtype=torch.float32, device=device)
            for value in first_values
        )

    def take(self, rows: slice) -> "PairFold":
        """Views of these tokens, so that kernels write to this fold."""
        return map_fields(self, lambda values: values[rows])

    def rescale(self, measure: Measure, peak: Tensor, teacher_peak: Tensor) -> "PairFold":
        """The same sums relative to higher peaks, in new tensors."""
        lower, teacher_lower = self.peak - peak, self.teacher_peak - teacher_peak
        factor, teacher_factor = lower.exp(), teacher_lower.exp()
        gap, moment = self.gap, _rescale_moment(self.moment, factor, lower, self.sum_exp)
        if gap is not None and measure.kind == FORWARD:
            gap = _rescale_moment(gap, teacher_factor, teacher_lower - lower, self.teacher_sum_exp)
        elif gap is not None:
            gap = _rescale_moment(gap, factor, lower - teacher_lower, self.sum_exp)
        sums = factor * self.sum_exp, teacher_factor * self.teacher_sum_exp
        return PairFold(peak, sums[0], teacher_peak, sums[1], gap, moment)


class PairStatistics(NamedTuple):
    """A student's and a teacher's softmax, (n,) float32 each."""

    lse: Tensor  # log sum_v exp z_v
    teacher_lse: Tensor  # log sum_v exp t_v
    entropy: Tensor  # of the student, in nats
    divergence: Tensor | None  # None of a mixture before its second step
    value: Tensor | None  # see `PairGradients`

    @classmethod
    def of(cls, fold: PairFold, measure: Measure, sums: "MixtureSums | None" = None) -> "PairStatistics":
        """`sums` are those of a mixture's second step."""
        log_sum, teacher_log_sum = fold.sum_exp.log(), fold.teacher_sum_exp.log()
        entropy = (log_sum - fold.moment / fold.sum_exp).clamp_(min=0.0)
        divergence = value = None
        # The divergence is computed relative to the peaks: see `Fold.finish`.
        if fold.gap is not None and measure.kind == FORWARD:
            divergence = (fold.gap / fold.teacher_sum_exp - (teacher_log_sum - log_sum)).clamp_(min=0.0)
        elif fold.gap is not None:
            divergence = value = (fold.gap / fold.sum_exp - (log_sum - teacher_log_sum)).clamp_(min=0.0)
        elif sums is not None:
            divergence = (measure.beta * sums.teacher + (1.0 - measure.beta) * sums.student).clamp_(min=0.0)
            value = sums.student
        lse, teacher_lse = fold.peak + log_sum, fold.teacher_peak + teacher_log_sum
        return cls(lse, teacher_lse, entropy, divergence, value)


class MixtureSums(NamedTuple):
    """Running sums over the vocabulary of a second step, (n,) float32 each, updated in place."""

    student: Tensor  # S: sum_v p_v (log p_v - log m_v)
    teacher: Tensor  # sum_v q_v (log q_v - log m_v)

    @classmethod
    def start(cls, like: Tensor) -> "MixtureSums":
        return cls(torch.zeros_like(like), torch.zeros_like(like))

    def take(self, rows: slice) -> "MixtureSums":
        return map_fields(self, lambda values: values[rows])


class PairGradients(NamedTuple):
    """The numbers of each token that the gradient of a tile of the student's logits needs, (n,) float32 each."""

    lse: Tensor
    teacher_lse: Tensor
    grad: Tensor  # dL/d divergence
    value: Tensor | None  # the divergence for REVERSE, S for a mixture, None for FORWARD

    def take(self, rows: Tensor | slice) -> "PairGradients":
        return map_fields(self, lambda values: values[rows])

    def contiguous(self) -> "PairGradients":
        return map_fields(self, Tensor.contiguous)


def fold_pair(tile: PairTile, state: PairFold) -> None:
    """Add a pair of tiles to the fold `state`."""
    student, teacher, measure = tile
    z, t = transform_logits(*student), transform_logits(*teacher)
    fold = state.rescale(measure, torch.maximum(state.peak, z.amax(-1)), torch.maximum(state.teacher_peak, t.amax(-1)))
    a, b = z - fold.peak[:, None], t - fold.teacher_peak[:, None]
    exp, teacher_exp = a.exp(), b.exp()
    fold.sum_exp.add_(exp.sum(-1))
    fold.teacher_sum_exp.add_(teacher_exp.sum(-1))
    fold.moment.add_(_weighted_sum(exp, a))
    if fold.gap is not None:
        fold.gap.add_(_weighted_sum(teacher_exp, b - a) if measure.kind == FORWARD else _weighted_sum(exp, a - b))
    for out, values in zip(state, fold, strict=True):
        if out is not None and values is not None:
            out.copy_(values)


def _rescale_moment(moment: Tensor, factor: Tensor, shift: Tensor, total: Tensor) -> Tensor:
    """A moment relative to new peaks. It is 0 where `factor` is 0, because there the shift may be infinite."""
    return torch.where(factor > 0, factor * (moment + shift * total), 0.0)


def _weighted_sum(weight: Tensor, values: Tensor) -> Tensor:
    """(n, v) -> (n,) sums of weight * values. A banned id, with weight 0 and an infinite value, adds 0."""
    return torch.where(weight > 0, weight * values, 0.0).sum(-1)


def mix_pair(tile: PairTile, lse: Tensor, teacher_lse: Tensor, sums: MixtureSums) -> None:
    """The second step, from both normalisers: update `sums`."""
    log_p, log_q = (
        transform_logits(*tile.student) - lse[:, None],
        transform_logits(*tile.teacher) - teacher_lse[:, None],
    )
    difference, teacher_difference = _subtract_log_mixture(log_q - log_p, tile.measure.beta)
    sums.student.add_(_weighted_sum(log_p.exp(), difference))
    sums.teacher.add_(_weighted_sum(log_q.exp(), teacher_difference))


def _subtract_log_mixture(gap: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log q - log p -> log p - log m, log q - log m; precise also where p and q are nearly equal."""
    # If p >= q, log m = log p + log(1 + beta (q / p - 1)). Otherwise p and q, beta and 1 - beta change places, so that
    # no exponential overflows.
    less = torch.expm1(-gap.abs())
    # Tensors of the gap's dtype, because `torch.where` gives Python numbers the default dtype.
    lesser_weight = torch.where(gap <= 0, gap.new_full((), beta), gap.new_full((), 1.0 - beta))
    larger = -torch.log1p(lesser_weight * less)
    return torch.where(gap <= 0, larger, larger - gap), torch.where(gap <= 0, larger + gap, larger)


def grad_pair(tile: PairTile, gradients: PairGradients, out: Tensor) -> None:
    """Write dL/dx of the student's logits to `out` (n, v), of any float dtype; it may be these logits themselves."""
    student, teacher, measure = tile
    z, t = transform_logits(*student), transform_logits(*teacher)
    log_p, log_q = z - gradients.lse[:, None], t - gradients.teacher_lse[:, None]
    p = log_p.exp()
    if measure.kind == FORWARD:
        grad_z = p - log_q.exp()
    else:
        assert gradients.value is not None
        if measure.kind == MIXTURE:
            difference, factor = _subtract_log_mixture(log_q - log_p, measure.beta)[0], 1.0 - measure.beta
        else:
            difference, factor = log_p - log_q, 1.0
        # An infinite divergence may have no gradient, and 0 * inf is NaN.
        counts = (p > 0) & (gradients.grad != 0)[:, None]
        grad_z = torch.where(counts, p * (difference - gradients.value[:, None]), 0.0).mul_(factor)
    grad_z.mul_(gradients.grad[:, None])
    out.copy_(times_derivative(grad_z, z, student.transform))


def scale_(values: Tensor, factor: Tensor) -> None:
    """values *= factor, a () float32 tensor. With a factor of 1 the Triton kernel does not read the values."""
    values.mul_(factor)
