"""Which parts of a divergence's gradient are computed: the certificate of a tolerance, in PyTorch on every device.

A part is one token's TILE_VOCAB vocabulary entries of dL/dlogits. With the x and y of `divergence.TileSums`, w = dL/d
divergence of the token, and two factors a and b of the token and tile, every measure has

    dL/dz_v = w (b y_v - a x_v)

    forward   p_v - q_v                      a = -exp(peak - lse)           b = -exp(teacher_peak - teacher_lse)
    reverse   p_v (log p_v - log q_v - K)    a = s (K - h)                  b = s = exp(peak - lse)
    mixture   (1 - beta) p_v (log p_v - log m_v - S)    a = (1 - beta) S    b = 1 - beta

with K the reverse divergence, S that of the student from the mixture, and h = (peak - lse) - (teacher_peak -
teacher_lse), what a log-ratio around the peaks is short of. So the forward's five sums give a part's own sum of
squares. Bounds such as |p - q| <= p + q would know less: they are large wherever the heads agree on what is likely.

    sum_v (b y_v - a x_v)^2 = b^2 yy - 2 a b xy + a^2 xx,    sum_v (b y_v - a x_v) = b y - a x

What float32 may have lost is added to the first, so that heads whose difference is rounding keep everything.

A part that is left out is replaced by its sum times shares u >= 0 of the tile's entries, which add up to 1 and are
those of some tokens' |dL/dlogits|. It keeps what the products need most: dL/dlogits adds up to zero over the
vocabulary, and the rows of a trained weight have much in common, so a sum that is off is a large error of dL/dhidden.
With G the part,

    |G - sum(G) u| <= |G| + |sum(G)| |u|

The parts with the smallest such bounds are left out while the squares of the bounds add up to at most tolerance^2 times
a lower bound of |dL/dlogits|^2. So the error of dL/dlogits is within `tolerance` of it in the Frobenius norm. The
constant part of dz/dx is on both sides. A softcap's is not: under one the gradient is exact, and so it is where
log-probabilities or entropies have a gradient too.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from liger_rl.kernels.divergence import FORWARD, MIXTURE, Measure, TileSums

# What float32 loses: of sums of squares, relative to what is added up; of probabilities, relative to them, and for each
# nat of the normalisers.
SLACK_OF_SUM, SLACK, SLACK_OF_LSE = 2.0**-17, 2.0**-17, 2.0**-22
SLACK_OF_SHARES = 1.0 + 2.0**-7  # of sums and shares to the products' dtype
# Bounds are added up in whole units of the budget, rounded up: a sum of integers is the same in any order, and PyTorch
# has no deterministic running one of floats on CUDA. 2^27 parts, each at most a unit above the budget, stay below 2^63.
UNITS = 2**35
SAMPLES = 64  # tokens whose gradients say how entries share what is left out


class TileBounds(NamedTuple):
    """The gradient of each token in each tile, for dL/d divergence = 1."""

    most: Tensor  # (n, tiles) float32, upper bounds of its norm
    total: Tensor  # (n, tiles) float32, its sum
    least: Tensor  # (n,) float32, lower bound of its sum of squares over all tiles

    @classmethod
    def of(cls, sums: TileSums, measure: Measure, lse: Tensor, teacher_lse: Tensor, value: Tensor) -> "TileBounds":
        """`value` (n,) is what `PairGradients` has."""
        a, b, s = _factors(sums, measure, lse, teacher_lse, value)
        of_x, of_y = a.square() * sums.xx, b.square() * sums.yy
        energy, rough = of_x + of_y - 2.0 * a * b * sums.xy, SLACK_OF_SUM * (of_x + of_y)
        known = SLACK + SLACK_OF_LSE * (lse.abs() + teacher_lse.abs())
        amplitude = known[:, None] * (of_x.sqrt() + s.abs() * sums.xx.sqrt() + of_y.sqrt())
        most = (energy.clamp(min=0.0) + rough).sqrt() + amplitude
        least = ((energy - rough).clamp(min=0.0).sqrt() - amplitude).clamp(min=0.0)
        return cls(most, b * sums.y - a * sums.x, least.square().sum(1))


def _factors(
    sums: TileSums, measure: Measure, lse: Tensor, teacher_lse: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """-> a, b and what x is short of p, (n, tiles) or less each."""
    if measure.kind == MIXTURE:
        share = torch.full_like(value, 1.0 - measure.beta)[:, None]
        return share * value[:, None], share, share
    assert sums.peak is not None
    assert sums.teacher_peak is not None
    log_s, log_t = sums.peak - lse[:, None], sums.teacher_peak - teacher_lse[:, None]
    s = log_s.exp()
    if measure.kind == FORWARD:
        return -s, -log_t.exp(), s
    return s * (value[:, None] - (log_s - log_t)), s, s


def choose(bounds: TileBounds, grad: Tensor, squares: Tensor, tolerance: float) -> Tensor:
    """(n, tiles) bool, which parts of tokens with `grad` (n,) are computed. The others are small together.

    `squares` (tiles,) are the sums of squares of the shares. Everything is kept where the bounds are not finite.
    """
    wanted = (grad != 0)[:, None]
    size = (grad.abs() / grad.abs().amax()).double()[:, None] if grad.numel() else grad.double()[:, None]
    error = bounds.most.double() + bounds.total.double().abs() * squares.double().sqrt() * SLACK_OF_SHARES
    norm = torch.where(wanted, size.square() * bounds.least[:, None], 0.0).sum()
    # No comparison holds for NaN.
    units = ((error * size).square() * (UNITS / (norm * tolerance**2))).ceil()
    units = torch.where(units <= UNITS, units, UNITS + 1.0).long()
    units = torch.where(wanted, units, 0)
    ascending = units.flatten().sort().values
    dropped = (ascending.cumsum(0) <= UNITS).sum()
    smallest = pad(ascending, (0, 1), value=UNITS + 1).index_select(0, dropped[None])
    return (units >= smallest) & wanted


def draw(bounds: TileBounds, grad: Tensor) -> tuple[Tensor, Tensor]:
    """-> (SAMPLES,) of n tokens, each as often as its size says, and what the size makes each count.

    A token's size is what the sums of its tiles add up to without their signs, times that of `grad` (n,).
    """
    size = grad.abs().double() * bounds.total.double().abs().sum(1)
    size = torch.where((grad != 0) & (size < torch.inf), size, 0.0)
    # In integers, see UNITS.
    until = (size * (UNITS / size.sum())).nan_to_num(0.0, 0.0).long().cumsum(0)
    step = (torch.arange(SAMPLES, device=grad.device) + 0.5) / SAMPLES * until[-1]
    drawn = torch.searchsorted(until, step.long(), right=True).clamp_(max=grad.numel() - 1)
    return drawn, torch.where(size > 0, grad / size, 0.0)[drawn].float()
