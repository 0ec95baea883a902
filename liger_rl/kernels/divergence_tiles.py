"""Which parts of a divergence's gradient are computed: the certificate of a tolerance, and its path on CPU.

A part is one token's TILE_VOCAB vocabulary entries of dL/dlogits. With the x and y of `divergence.TileSums`, w = dL/d
divergence and g = dL/dlogp of the token, and three factors a, b and s of the token and tile, every measure has

    dL/dz_v = w (b y_v - a x_v) - g s x_v + g 1[v = target]

    forward   p_v - q_v                      a = -exp(peak - lse)           b = -exp(teacher_peak - teacher_lse)
    reverse   p_v (log p_v - log q_v - K)    a = s (K - h)                  b = s
    mixture   (1 - beta) p_v (log p_v - log m_v - S)    a = (1 - beta) S    b = 1 - beta

with s = exp(peak - lse), and 1 of a mixture, K the reverse divergence, S that of the student from the mixture, and h =
(peak - lse) - (teacher_peak - teacher_lse), what a log-ratio around the peaks is short of. So the forward's five sums
give a part's own sum of squares, but for the target. Bounds such as |p - q| <= p + q would know less: they are large
wherever the heads agree on what is likely. With A = w a + g s and B = w b,

    sum_v (B y_v - A x_v)^2 = B^2 yy - 2 A B xy + A^2 xx,    sum_v (B y_v - A x_v) = B y - A x

What float32 may have lost is added to the first, so that heads whose difference is rounding keep everything. The part
with a target is always kept where g is not 0. Its norm is at least the difference of |g| and what is known of the rest.

A part that is left out is replaced by its sum times shares u >= 0 of the tile's entries, which add up to 1 and are
those of some tokens' |dL/dlogits|, their targets aside. It keeps what the products need most: dL/dlogits adds up to
zero over the vocabulary, and the rows of a trained weight have much in common, so a sum that is off is a large error of
dL/dhidden. With G the part,

    |G - sum(G) u| <= |G| + |sum(G)| |u|

The parts with the smallest such bounds are left out while the squares of the bounds add up to at most tolerance^2 times
a lower bound of |dL/dlogits|^2. So the error of dL/dlogits is within `tolerance` of it in the Frobenius norm. The
constant part of dz/dx is on both sides. A softcap's is not: under one the gradient is exact, and so it is where
entropies have a gradient too.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from liger_rl.kernels import gemm
from liger_rl.kernels.divergence import FORWARD, MIXTURE, TILE_VOCAB, Measure, PairGradients, TileSums

# What float32 loses: of sums of squares, relative to what is added up; of probabilities, relative to them, and for each
# nat of the normalisers.
SLACK_OF_SUM, SLACK, SLACK_OF_LSE = 2.0**-17, 2.0**-17, 2.0**-22
LOST = 2.0**-58  # of a part's norm, to squares that are too small for float32, where the largest factor is 1
SLACK_OF_SHARES = 1.0 + 2.0**-7  # of sums and shares to the products' dtype
# Bounds are added up in whole units of the budget, rounded up: a sum of integers is the same in any order, and PyTorch
# has no deterministic running one of floats on CUDA. For 2^20 parts that takes less than a 2,000th of the budget. A
# part above the budget has a unit more than it, which 32 bits hold: they sort in half as many passes as 64.
UNITS = 2**31 - 2
SAMPLES = 64  # tokens whose gradients say how entries share what is left out
TILE_MULTIPLE = 8  # columns of (n, tiles), for products that read them 16 bytes at a time
SHARED_TILES = 32  # whose weights are added up by one product


class TileBounds(NamedTuple):
    """The gradient of each token in each tile, in units of the largest of its factors; of the target but for 1."""

    most: Tensor  # (n, tiles) float32, upper bounds of its norm; infinite where it is to be kept, with its target
    total: Tensor  # (n, tiles) float32, its sum
    least: Tensor  # (n,) float64, lower bound of its sum of squares over all tiles; 0 where it is not wanted
    size: Tensor  # (n,) float64, its sums without their signs, over all tiles; 0 where not wanted or not finite
    wanted: Tensor  # (n,) bool: there is a gradient
    unit: Tensor  # () float32


class Drawn(NamedTuple):
    """Tokens that say how entries share what is left out, (SAMPLES,) each."""

    rows: Tensor  # int64, among n tokens
    scales: Tensor  # float32, by what the gradients of all become alike in size


class TileShares(NamedTuple):
    """How a tile's entries share what is left out of it."""

    entries: Tensor  # (tiles, TILE_VOCAB) float32, adding up to 1 over a tile; 0 past the last entry
    squares: Tensor  # (tiles,) float32, sums of their squares


class ChosenParts(NamedTuple):
    keep: Tensor  # (n, tiles) bool: which parts are computed
    left_out: Tensor  # (n, padded tiles), sums of dL/dlogits of the others, 0 elsewhere; in the dtype of products


def bound_parts(sums: TileSums, measure: Measure, tokens: PairGradients, targets: Tensor) -> TileBounds:
    """Of the sums over tiles; `targets` (n,) are read where log-probabilities have a gradient."""
    grad_logps = torch.zeros_like(tokens.grad) if tokens.grad_logps is None else tokens.grad_logps
    wanted = (tokens.grad != 0) | (grad_logps != 0)
    unit = torch.maximum(tokens.grad.abs(), grad_logps.abs()).amax()
    w, g = (tokens.grad / unit)[:, None], (grad_logps / unit)[:, None]
    a, b, s, of_p = _factors(sums, measure, tokens)
    of_s, of_b = g * s, w * b
    of_a = w * a + of_s
    largest = (w * a).abs() + of_s.abs()
    of_x, of_y = largest.square() * sums.xx, of_b.square() * sums.yy
    energy, rough = of_a.square() * sums.xx + of_y - 2.0 * of_a * of_b * sums.xy, SLACK_OF_SUM * (of_x + of_y)
    known = SLACK + SLACK_OF_LSE * (tokens.lse.abs() + tokens.teacher_lse.abs())
    amplitude = known[:, None] * (of_x.sqrt() + (w * of_p).abs() * sums.xx.sqrt() + of_y.sqrt())
    most = (energy.clamp(min=0.0) + rough).sqrt() + amplitude
    least = ((energy - rough).clamp(min=0.0).sqrt() - amplitude).clamp(min=0.0)
    if tokens.grad_logps is not None:
        own = (torch.arange(most.shape[1], device=most.device) == (targets // TILE_VOCAB)[:, None]) & (g != 0)
        apart = torch.maximum(g.abs() - most, least - g.abs()).clamp(min=0.0)
        least, most = torch.where(own, apart, least), torch.where(own, torch.inf, most)
    total = of_b * sums.y - of_a * sums.x
    size = total.double().abs().sum(1)
    size = torch.where(wanted & (size < torch.inf), size, 0.0)
    return TileBounds(most, total, torch.where(wanted, least.double().square().sum(1), 0.0), size, wanted, unit)


def _factors(sums: TileSums, measure: Measure, tokens: PairGradients) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> a, b, s, and the part of s x that a divergence's gradient has, (n, tiles) or less each."""
    if measure.kind == MIXTURE:
        assert tokens.value is not None
        share = torch.full_like(tokens.value, 1.0 - measure.beta)[:, None]
        return share * tokens.value[:, None], share, torch.ones_like(share), share
    assert sums.peak is not None
    assert sums.teacher_peak is not None
    log_s, log_t = sums.peak - tokens.lse[:, None], sums.teacher_peak - tokens.teacher_lse[:, None]
    s = log_s.exp()
    if measure.kind == FORWARD:
        return -s, -log_t.exp(), s, s
    assert tokens.value is not None
    return s * (tokens.value[:, None] - (log_s - log_t)), s, s, s


def draw_tokens(bounds: TileBounds) -> Drawn:
    """Each token as often as its size says."""
    size, device = bounds.size, bounds.size.device
    # In integers, see UNITS.
    until = (size * (UNITS / size.sum())).nan_to_num(0.0, 0.0).long().cumsum(0)
    step = (torch.arange(SAMPLES, device=device) + 0.5) / SAMPLES * until[-1]
    drawn = torch.searchsorted(until, step.long(), right=True).clamp_(max=size.numel() - 1)
    return Drawn(drawn, torch.where(size > 0, 1.0 / size, 0.0)[drawn].float())


def share_entries(sizes: Tensor) -> TileShares:
    """Of sums of |dL/dlogits| over the drawn tokens, (V,) float32."""
    entries = pad(sizes, (0, -sizes.numel() % TILE_VOCAB)).unflatten(0, (-1, TILE_VOCAB))
    total = entries.sum(1, keepdim=True)
    entries = torch.where((total > 0) & (total < torch.inf), entries / total, 0.0)
    return TileShares(entries, entries.square().sum(1))


def padded(tiles: int) -> int:
    return -(-tiles // TILE_MULTIPLE) * TILE_MULTIPLE


def shared_rows(entries: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(padded tiles, H): the rows of `weight` (V, H), added up by the entries of each tile; zeros past the last."""
    tiles, width = entries.shape
    rows = torch.zeros(padded(tiles), weight.shape[1], dtype=dtype, device=weight.device)
    for first in range(0, tiles, SHARED_TILES):
        here, part = entries[first : first + SHARED_TILES].to(dtype), weight[first * width :][: SHARED_TILES * width]
        # A row for each tile, 0 in the columns of the others.
        apart = torch.zeros(here.shape[0], *here.shape, dtype=dtype, device=here.device)
        apart.diagonal().copy_(here.T)
        rows[first : first + here.shape[0]] = gemm.matmul(apart.flatten(1)[:, : part.shape[0]], part.to(dtype))
    return rows


def choose_parts(
    bounds: TileBounds, squares: Tensor, tolerance: float, slope: float, dtype: torch.dtype
) -> ChosenParts:
    """Which parts are computed: all but those that are small together. All where the bounds are not finite.

    `squares` (tiles,) are the sums of squares of the shares, `slope` is the constant part of dz/dx.
    """
    wanted = bounds.wanted[:, None]
    error = LOST + bounds.most.double() + bounds.total.double().abs() * squares.double().sqrt() * SLACK_OF_SHARES
    budget = bounds.least.sum() * tolerance**2
    # No comparison holds for NaN.
    units = (error.square() * torch.where(budget < torch.inf, UNITS / budget, torch.nan)).ceil()
    units = torch.where(wanted, torch.where(units <= UNITS, units, UNITS + 1.0).int(), 0)
    ascending = units.flatten().sort().values
    dropped = (ascending.cumsum(0) <= UNITS).sum()
    smallest = pad(ascending, (0, 1), value=UNITS + 1).index_select(0, dropped[None])
    keep = (units >= smallest) & wanted
    left_out = torch.where(keep | ~wanted, 0.0, slope * bounds.unit * bounds.total)
    return ChosenParts(keep, pad(left_out, (0, padded(keep.shape[1]) - keep.shape[1])).to(dtype))
