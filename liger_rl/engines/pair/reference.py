"""Fold and gradient of a pair of tiles, a student's and a teacher's logits, in plain PyTorch: the CPU path and the
specification of `tiles_triton`.

With z, t the transformed logits, p, q their probabilities, m = (1 - beta) p + beta q, and sums over the vocabulary v:

    forward   sum_v q_v (log q_v - log p_v)                                      dz = p - q
    reverse   sum_v p_v (log p_v - log q_v)                                      dz = p (log p - log q - reverse)
    mixture   beta sum_v q_v (log q_v - log m_v) + (1 - beta) S                  dz = (1 - beta) p (log p - log m - S)
              with S = sum_v p_v (log p_v - log m_v)

One fold gives the forward and the reverse divergence. A mixture needs both normalisers at every entry, so it takes a
second step, `mix_pair`.

For a backward with a tolerance the same steps write sums of each token over each tile of TILE_VOCAB entries, see
`TileSums`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from liger_rl.kernels.reference import entropy_term, put_at_targets, times_derivative, transformed
from liger_rl.kernels.transform import LogitTransform

FORWARD, REVERSE, MIXTURE = 0, 1, 2
TILE_VOCAB = 1024  # entries of a tile of `TileSums`, and of a block of `tiles_triton`


class Measure(NamedTuple):
    """The kind of a divergence, and the weight of a mixture."""

    kind: int  # FORWARD, REVERSE or MIXTURE
    beta: float = 0.0  # the teacher's share of a mixture, in (0, 1)


class Tile(NamedTuple):
    """Columns of one head's logits, before bias and transform."""

    logits: Tensor  # (n, v) float32
    bias: Tensor | None  # (v,)
    transform: LogitTransform


class PairFold(NamedTuple):
    """Running sums over the vocabulary, (n,) float32 each; kernels update them in place, tile by tile.

    The peaks are those of the entries so far, a = z - peak and b = t - teacher_peak.
    """

    peak: Tensor  # max_v z_v
    sum_exp: Tensor  # sum_v exp(a_v)
    teacher_peak: Tensor  # max_v t_v
    teacher_sum_exp: Tensor  # sum_v exp(b_v)
    gap: Tensor | None  # FORWARD: sum_v exp(b_v) (b_v - a_v); REVERSE: sum_v exp(a_v) (a_v - b_v); else None
    moment: Tensor | None  # sum_v exp(a_v) a_v, kept for the student's entropy
    target: Tensor | None  # z at the target id, once its tile has passed; None without targets
    teacher_target: Tensor | None  # t at the target id

    @classmethod
    def start(cls, n: int, device: torch.device, measure: Measure, *, entropy: bool, targets: bool) -> "PairFold":
        """The fold of no tile."""

        def full(value: float = 0.0, *, present: bool = True) -> Tensor | None:
            return torch.full((n,), value, dtype=torch.float32, device=device) if present else None

        lowest = torch.finfo(torch.float32).min  # see `Fold.start`
        gap, moment = full(present=measure.kind != MIXTURE), full(present=entropy)
        target, teacher_target = full(present=targets), full(present=targets)
        return cls(full(lowest), full(), full(lowest), full(), gap, moment, target, teacher_target)  # type: ignore[arg-type]

    def take(self, rows: slice) -> "PairFold":
        """Views of these tokens, so that kernels write to this fold."""
        return PairFold._make(None if values is None else values[rows] for values in self)

    def over_ranks(
        self, measure: Measure, maximum: Callable[[Tensor], Tensor], total: Callable[[Tensor], Tensor]
    ) -> "PairFold":
        """As `Fold.over_ranks`: the fold of a sharded vocabulary, by one maximum and one sum over ranks."""
        peak, teacher_peak = maximum(torch.stack([self.peak, self.teacher_peak]))
        lower, teacher_lower = self.peak - peak, self.teacher_peak - teacher_peak
        kept, teacher_kept = lower.exp(), teacher_lower.exp()
        parts = self._asdict() | {"peak": None, "teacher_peak": None}
        parts |= {"sum_exp": kept * self.sum_exp, "teacher_sum_exp": teacher_kept * self.teacher_sum_exp}
        if self.moment is not None:
            parts["moment"] = _around(self.moment, kept, lower, self.sum_exp)
        if self.gap is not None and measure.kind == FORWARD:
            parts["gap"] = _around(self.gap, teacher_kept, teacher_lower - lower, self.teacher_sum_exp)
        elif self.gap is not None:
            parts["gap"] = _around(self.gap, kept, lower - teacher_lower, self.sum_exp)
        present = {name: part for name, part in parts.items() if part is not None}
        sums = total(torch.stack(list(present.values())))
        return self._replace(peak=peak, teacher_peak=teacher_peak, **dict(zip(present, sums, strict=True)))


class PairStatistics(NamedTuple):
    """A student's and a teacher's softmax, (n,) float32 each."""

    lse: Tensor  # log sum_v exp z_v
    teacher_lse: Tensor  # log sum_v exp t_v
    entropy: Tensor | None  # of the student, in nats
    logps: Tensor | None  # of the student at the target
    teacher_logps: Tensor | None  # of the teacher at the target
    divergence: Tensor | None  # None for a mixture, whose divergence comes from the second step

    @classmethod
    def of(cls, fold: PairFold, measure: Measure) -> "PairStatistics":
        log_sum, teacher_log_sum = fold.sum_exp.log(), fold.teacher_sum_exp.log()
        entropy = None if fold.moment is None else (log_sum - fold.moment / fold.sum_exp).clamp_(min=0.0)
        logps = teacher_logps = divergence = None
        if fold.target is not None and fold.teacher_target is not None:
            # Logps and the divergence are computed relative to the peaks: see `Fold.finish`.
            logps = ((fold.target - fold.peak) - log_sum).clamp_(max=0.0)
            teacher_logps = ((fold.teacher_target - fold.teacher_peak) - teacher_log_sum).clamp_(max=0.0)
        if fold.gap is not None and measure.kind == FORWARD:
            divergence = (fold.gap / fold.teacher_sum_exp - (teacher_log_sum - log_sum)).clamp_(min=0.0)
        elif fold.gap is not None:
            divergence = (fold.gap / fold.sum_exp - (log_sum - teacher_log_sum)).clamp_(min=0.0)
        lse, teacher_lse = fold.peak + log_sum, fold.teacher_peak + teacher_log_sum
        return cls(lse, teacher_lse, entropy, logps, teacher_logps, divergence)


class MixtureSums(NamedTuple):
    """Running sums over the vocabulary of a mixture's second step, (n,) float32 each, updated in place."""

    student: Tensor  # sum_v p_v (log p_v - log m_v)
    teacher: Tensor  # sum_v q_v (log q_v - log m_v)

    @classmethod
    def start(cls, like: Tensor) -> "MixtureSums":
        return cls(torch.zeros_like(like), torch.zeros_like(like))

    def take(self, rows: slice) -> "MixtureSums":
        return MixtureSums(self.student[rows], self.teacher[rows])


class TileSums(NamedTuple):
    """Sums of each token over each tile of TILE_VOCAB entries, (n, tiles) float32, written by the step that computes y.

    Each measure has an x_v and a y_v. From their sums `bounds_triton` makes the gradient's sum and sum of squares:

        forward   x = exp(z - peak), y = exp(t - teacher_peak)                      in `fold_pair`
        reverse   x = exp(z - peak), y = x ((z - peak) - (t - teacher_peak))        in `fold_pair`
        mixture   x = p, y = p (log p - log m)                                      in `mix_pair`
    """

    x: Tensor  # sum_v x_v
    y: Tensor  # sum_v y_v
    xx: Tensor  # sum_v x_v^2
    xy: Tensor  # sum_v x_v y_v
    yy: Tensor  # sum_v y_v^2
    peak: Tensor | None  # the peak in x and y: a running peak or the tile's own; None for a mixture
    teacher_peak: Tensor | None

    @classmethod
    def unwritten(cls, n: int, vocab: int, device: torch.device, measure: Measure) -> "TileSums":
        fields = 5 if measure.kind == MIXTURE else 7
        parts = torch.empty(fields, n, -(-vocab // TILE_VOCAB), dtype=torch.float32, device=device).unbind()
        return cls(*parts[:5], *(parts[5:] or (None, None)))

    def part(self, tokens: slice, first: int) -> "TileSums":
        """Views of these tokens, from the tile whose first entry is `first` to the last tile."""
        assert first % TILE_VOCAB == 0
        at = first // TILE_VOCAB
        return TileSums._make(None if part is None else part[tokens, at:] for part in self)

    def write(self, x: Tensor, y: Tensor, peaks: tuple[Tensor, Tensor] | None = None) -> None:
        """Write the sums of x and y (n, v) to the first ceil(v / TILE_VOCAB) tiles, and the peaks (n,)."""
        x, y = (pad(part, (0, -part.shape[1] % TILE_VOCAB)).unflatten(1, (-1, TILE_VOCAB)) for part in (x, y))
        for out, values in zip(self, (x, y, x * x, x * y, y * y), strict=False):
            assert out is not None
            out[:, : values.shape[1]] = values.sum(-1)
        for out, peak in zip(self[5:], peaks or (), strict=False):
            assert out is not None
            out[:, : x.shape[1]] = peak[:, None]


class PairGradients(NamedTuple):
    """The numbers of each token that the gradient of a tile of the student's logits needs, (n,) float32 each."""

    lse: Tensor
    teacher_lse: Tensor
    grad: Tensor  # dL/d divergence
    value: Tensor | None  # mean log ratio for REVERSE, S for a mixture; FORWARD does not read it
    grad_logps: Tensor | None  # dL/dlogp
    at_target: Tensor | None  # dL/dlogp (1 - p_target); None without grad_logps
    grad_entropy: Tensor | None  # dL/dentropy
    entropy: Tensor | None  # None without grad_entropy

    @classmethod
    def of(
        cls,
        known: PairStatistics,
        value: Tensor | None,
        grad: Tensor | None,
        grad_logps: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> "PairGradients":
        """From dL/d divergence, dL/dlogp and dL/dentropy, in any float dtype; None stands for 0."""
        grad, grad_logps, grad_entropy = (None if g is None else g.float() for g in (grad, grad_logps, grad_entropy))
        at_target = None
        if grad_logps is not None and known.logps is not None:
            at_target = -torch.expm1(known.logps) * grad_logps
        grad = torch.zeros_like(known.lse) if grad is None else grad
        entropy = None if grad_entropy is None else known.entropy
        return cls(known.lse, known.teacher_lse, grad, value, grad_logps, at_target, grad_entropy, entropy)

    def take(self, rows: Tensor | slice) -> "PairGradients":
        return PairGradients._make(None if part is None else part[rows] for part in self)

    def contiguous(self) -> "PairGradients":
        return PairGradients._make(None if part is None else part.contiguous() for part in self)


def fold_pair(
    student: Tile,
    teacher: Tile,
    targets: Tensor,  # (n,) token ids of the whole vocabulary; not read if the state has no targets' logits
    first: int,  # vocabulary id of the tiles' first column
    measure: Measure,
    state: PairFold,  # updated in place
    sums: TileSums | None = None,  # `TileSums.part(tokens, first)`, written
) -> None:
    """Add a pair of tiles to the fold."""
    z, t = (transformed(*tile) for tile in (student, teacher))
    peak = torch.maximum(state.peak, z.amax(-1))
    teacher_peak = torch.maximum(state.teacher_peak, t.amax(-1))
    lower, teacher_lower = state.peak - peak, state.teacher_peak - teacher_peak
    kept, teacher_kept = lower.exp(), teacher_lower.exp()
    a, b = z - peak[:, None], t - teacher_peak[:, None]
    exp, teacher_exp = a.exp(), b.exp()
    if state.moment is not None:
        state.moment.copy_(_around(state.moment, kept, lower, state.sum_exp) + _weighted(exp, a))
    if sums is not None and measure.kind != MIXTURE:
        y = teacher_exp if measure.kind == FORWARD else torch.where(exp > 0, exp * (a - b), 0.0)
        sums.write(exp, y, (peak, teacher_peak))
    if state.gap is not None and measure.kind == FORWARD:
        before = _around(state.gap, teacher_kept, teacher_lower - lower, state.teacher_sum_exp)
        state.gap.copy_(before + _weighted(teacher_exp, b - a))
    elif state.gap is not None:
        before = _around(state.gap, kept, lower - teacher_lower, state.sum_exp)
        state.gap.copy_(before + _weighted(exp, a - b))
    state.sum_exp.mul_(kept).add_(exp.sum(-1))
    state.teacher_sum_exp.mul_(teacher_kept).add_(teacher_exp.sum(-1))
    state.peak.copy_(peak)
    state.teacher_peak.copy_(teacher_peak)
    if state.target is not None and state.teacher_target is not None:
        column = targets - first
        hit = (column >= 0) & (column < z.shape[1])
        place = column.clamp(0, z.shape[1] - 1)[:, None]
        for values, out in ((z, state.target), (t, state.teacher_target)):
            out.copy_(torch.where(hit, values.gather(-1, place).squeeze(-1), out))


def _around(moment: Tensor, kept: Tensor, shift: Tensor, total: Tensor) -> Tensor:
    """A moment relative to new peaks. It is 0 where `kept` is 0, because there the shift may be infinite."""
    return torch.where(kept > 0, kept * (moment + shift * total), 0.0)


def _weighted(weight: Tensor, values: Tensor) -> Tensor:
    """(n, v) -> (n,) sums of weight * values. A banned id, with weight 0 and an infinite value, adds 0."""
    return torch.where(weight > 0, weight * values, 0.0).sum(-1)


def mix_pair(
    student: Tile,
    teacher: Tile,
    measure: Measure,
    lse: Tensor,
    teacher_lse: Tensor,
    sums: MixtureSums,  # updated in place
    tiles: TileSums | None = None,  # as in `fold_pair`
) -> None:
    """A mixture's second step, with both normalisers known."""
    log_p, log_q = (transformed(*tile) - n[:, None] for tile, n in ((student, lse), (teacher, teacher_lse)))
    over_mixture, teacher_over_mixture = _over_mixture(log_q - log_p, measure.beta)
    if tiles is not None:
        p = log_p.exp()
        tiles.write(p, torch.where(p > 0, p * over_mixture, 0.0))
    sums.student.add_(_weighted(log_p.exp(), over_mixture))
    sums.teacher.add_(_weighted(log_q.exp(), teacher_over_mixture))


def _over_mixture(gap: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log q - log p -> log p - log m, log q - log m; precise also where p and q are nearly equal."""
    # If p >= q, log m = log p + log(1 + beta (q / p - 1)). Else p and q, beta and 1 - beta change places. So no
    # exponential overflows.
    less = torch.expm1(-gap.abs())
    # Tensors of the gap's dtype, because `torch.where` gives Python numbers the default dtype.
    share = torch.where(gap <= 0, gap.new_full((), beta), gap.new_full((), 1.0 - beta))
    larger = -torch.log1p(share * less)
    return torch.where(gap <= 0, larger, larger - gap), torch.where(gap <= 0, larger + gap, larger)


def grad_pair(
    student: Tile,
    teacher: Tile,
    targets: Tensor,
    first: int,
    measure: Measure,
    tokens: PairGradients,
    out: Tensor,  # (n, v) any float dtype, may be the student's logits themselves
) -> None:
    """Write dL/dx of the student's logits."""
    z, t = (transformed(*tile) for tile in (student, teacher))
    log_p, log_q = z - tokens.lse[:, None], t - tokens.teacher_lse[:, None]
    p = log_p.exp()
    if measure.kind == FORWARD:
        grad_z = p - log_q.exp()
    else:
        assert tokens.value is not None
        over = log_p - log_q if measure.kind == REVERSE else _over_mixture(log_q - log_p, measure.beta)[0]
        share = 1.0 if measure.kind == REVERSE else 1.0 - measure.beta
        grad_z = torch.where(p > 0, p * (over - tokens.value[:, None]), 0.0).mul_(share)
    grad_z.mul_(tokens.grad[:, None])
    if tokens.grad_entropy is not None and tokens.entropy is not None:
        grad_z.sub_(entropy_term(log_p, tokens.entropy[:, None]).mul_(tokens.grad_entropy[:, None]))
    if tokens.grad_logps is not None and tokens.at_target is not None:
        of_logps = p.mul_(-tokens.grad_logps[:, None])
        put_at_targets(of_logps, tokens.at_target, targets, first)
        grad_z.add_(of_logps)
    out.copy_(times_derivative(grad_z, z, student.transform))
