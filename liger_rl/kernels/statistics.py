"""What is known of a token's softmax: while tiles of the vocabulary are folded in, and afterwards."""

import math
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

# Further results of a fold on demand, without a gradient.
EXTRAS = ("log_sum_sq_probs", "mean_logits", "is_top1")


class TokenStatistics(NamedTuple):
    """The softmax of n tokens in one number each, float32."""

    logps: Tensor  # (n,) log-probability of the target; (n, K) of several targets
    lse: Tensor  # (n,) log sum_v exp z_v
    entropy: Tensor | None  # (n,) in nats
    log_sum_sq_probs: Tensor | None = None  # (n,) log sum_v p_v^2
    sum_logits: Tensor | None = None  # (n,) sum_v z_v
    is_top1: Tensor | None = None  # (n,) bool: the target is the first of the ids with the largest z
    target: Tensor | None = None  # (n,) z at the target, on demand
    topk_logps: Tensor | None = None  # (n, K) the largest log-probabilities, descending, on demand
    topk_ids: Tensor | None = None  # (n, K) int64, their ids of the whole vocabulary

    def first(self, count: int) -> "TokenStatistics":
        """The statistics of the first `count` tokens."""
        return TokenStatistics._make(None if part is None else part[:count] for part in self)

    def mean_logits(self, vocab: int) -> Tensor | None:
        return None if self.sum_logits is None else self.sum_logits / vocab


class Fold(NamedTuple):
    """Running sums over the vocabulary, float32; kernels update them in place, tile by tile."""

    peak: Tensor  # (n,) max_v z_v so far
    sum_exp: Tensor  # (n,) sum_v exp(z_v - peak)
    target: Tensor  # (n,) z at the target id, once its tile has passed
    moment: Tensor | None  # (n,) sum_v exp(z_v - peak) (z_v - peak), kept for the entropy alone
    sum_sq_exp: Tensor | None  # (n,) sum_v exp(z_v - peak)^2, for log_sum_sq_probs
    sum_logits: Tensor | None  # (n,) sum_v z_v, for mean_logits
    rival: Tensor | None  # (n,) max of z_v over the ids before the target, for is_top1

    @classmethod
    def start(cls, n: int, device: torch.device, *, entropy: bool, extras: Collection[str] = ()) -> "Fold":
        """The fold of no tile."""

        def full(value: float) -> Tensor:
            return torch.full((n,), value, dtype=torch.float32, device=device)

        # The lowest finite peak instead of -inf: (peak - new peak) * 0 stays 0 in the moment's update.
        return cls(
            full(torch.finfo(torch.float32).min),
            full(0.0),
            full(0.0),
            full(0.0) if entropy else None,
            full(0.0) if "log_sum_sq_probs" in extras else None,
            full(0.0) if "mean_logits" in extras else None,
            full(-math.inf) if "is_top1" in extras else None,
        )

    @classmethod
    def unwritten(cls, shape: tuple[int, ...], target: Tensor, *, entropy: bool, extras: Collection[str]) -> "Fold":
        """Memory of `shape` for all fields except the target, for a kernel that writes all of it."""

        def part() -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=target.device)

        return cls(
            part(),
            part(),
            target,
            part() if entropy else None,
            part() if "log_sum_sq_probs" in extras else None,
            part() if "mean_logits" in extras else None,
            part() if "is_top1" in extras else None,
        )

    def take(self, rows: slice) -> "Fold":
        """Views of some tokens, for a kernel to write to."""
        return Fold._make(None if values is None else values[rows] for values in self)

    def over_ranks(self, maximum: Callable[[Tensor], Tensor], total: Callable[[Tensor], Tensor]) -> "Fold":
        """The fold of a sharded vocabulary, the same on each rank: one maximum and one sum over ranks.

        A rank without the target has 0 for it, so the sum over ranks is the logit itself, to the last bit.
        """
        tops = maximum(torch.stack([self.peak] if self.rival is None else [self.peak, self.rival]))
        peak, rival = tops[0], None if self.rival is None else tops[1]
        lower = self.peak - peak
        kept = lower.exp()
        parts = {
            "sum_exp": kept * self.sum_exp,
            "target": self.target,
            "moment": None if self.moment is None else kept * (self.moment + lower * self.sum_exp),
            "sum_sq_exp": None if self.sum_sq_exp is None else kept.square() * self.sum_sq_exp,
            "sum_logits": self.sum_logits,
        }
        given = {name: part for name, part in parts.items() if part is not None}
        sums = total(torch.stack(list(given.values())))
        return self._replace(peak=peak, rival=rival, **dict(zip(given, sums, strict=True)))

    def finish(self, *, with_target: bool = False) -> TokenStatistics:
        log_sum = self.sum_exp.log()
        # Around the peak, not around lse: where the target is the peak, logp keeps float32's precision near 0
        # rather than near the size of the logits.
        logps = ((self.target - self.peak) - log_sum).clamp_(max=0.0)
        entropy = None if self.moment is None else (log_sum - self.moment / self.sum_exp).clamp_(min=0.0)
        log_sum_sq = None if self.sum_sq_exp is None else (self.sum_sq_exp.log() - 2.0 * log_sum).clamp_(max=0.0)
        # Exact: peak and rival are logits of the same tiles as the target's, and a tie counts for the earlier id.
        is_top1 = None if self.rival is None else (self.target >= self.peak) & (self.target > self.rival)
        target = self.target if with_target else None
        return TokenStatistics(logps, self.peak + log_sum, entropy, log_sum_sq, self.sum_logits, is_top1, target)


# Sides of a tile of a product with an epilogue.
BLOCK_TOKENS, BLOCK_VOCAB = 128, 256
KEPT_ONE = 2.0**15  # factor on the exponentials of `saved_exponentials`: the largest power of two in float16
# Sampled tokens, whose probabilities spread a tile's dropped gradient over its entries.
SAMPLES = 64


class TileStatistics(NamedTuple):
    """Softmax sums of each token over each tile of BLOCK_VOCAB vocabulary entries, float32."""

    peaks: Tensor  # (tiles, n) max_v z_v; the lowest finite number where every id is banned
    sums: Tensor  # (tiles, n) sum_v exp(z_v - peak)
    moments: Tensor | None  # (tiles, n) sum_v exp(z_v - peak) (z_v - peak), where entropies are asked for


class PartBounds(NamedTuple):
    """Bounds of each token's dL/dz in each tile, in units of the token's own, from which the kept parts are chosen.

    The constant part of dz/dx is left out of all bounds.
    """

    most: Tensor  # (tiles, n) float32, upper bound of the norm over a tile
    rest: Tensor  # (tiles, n) float32, sum over a tile
    least: Tensor  # (n,) float32, lower bound of the sum of squares over the vocabulary, the target with it
    unit: Tensor  # (n,) float32, 0 without a gradient
    size: Tensor  # (n,) float64, sum of |rest|; 0 without a gradient, or if not finite
    at_target: Tensor | None  # (n,) float32, dL/dx at the target, not in units; None where parts include targets

    @classmethod
    def empty(cls, n: int, tiles: int, device: torch.device, *, targets: bool) -> "PartBounds":
        def part(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        tokens = part(n), part(n), part(n, dtype=torch.float64), part(n) if targets else None
        return cls(part(tiles, n), part(tiles, n), *tokens)


class Tail(NamedTuple):
    """The shares of a tile's vocabulary entries in the gradient that tokens drop there."""

    entries: Tensor  # (padded tiles * width,) float32, adding up to 1 over a tile; 0 past the vocabulary
    squares: Tensor  # (padded tiles,) float32, sums of their squares

    @classmethod
    def empty(cls, tiles: int, width: int, device: torch.device) -> "Tail":
        entries = torch.empty(tiles * width, dtype=torch.float32, device=device)
        return cls(entries, torch.empty(tiles, dtype=torch.float32, device=device))


class TokenGradients(NamedTuple):
    """The numbers of each token that the gradient of a tile of logits needs, float32.

    Without an entropy's gradient dL/dz_v is at_target at the target, and -grad_logps p_v elsewhere.
    """

    lse: Tensor  # (n,)
    grad_logps: Tensor  # (n,) dL/dlogp, without dL/dlse
    at_target: Tensor  # (n,) dL/dlogp (1 - p_target), with dL/dlse p_target
    entropy: Tensor | None  # (n,) given together with grad_entropy
    grad_entropy: Tensor | None  # (n,) dL/dentropy
    # (n,) bool: there is a gradient, where grad_logps may be 0 and does not tell.
    wanted: Tensor | None = None

    @classmethod
    def of(cls, statistics: TokenStatistics, grad_logps: Tensor, grad_entropy: Tensor | None) -> "TokenGradients":
        # 1 - p from the forward's logp: recomputed from a tile it would carry the rounding of lse, which is as
        # large as 1 - p itself for a token the policy is sure of.
        at_target = -torch.expm1(statistics.logps) * grad_logps
        entropy = statistics.entropy if grad_entropy is not None else None
        return cls(statistics.lse, grad_logps, at_target, entropy, grad_entropy)

    def with_lse(self, grad_lse: Tensor, logps: Tensor) -> "TokenGradients":
        """With dL/dlse (n,) added, which adds dL/dlse p_v to dL/dz_v."""
        if logps.dim() == 2:  # of several targets lse is minus the log-probability of one more, whose logit is always 0
            return self._replace(grad_logps=torch.cat([self.grad_logps, -grad_lse[:, None]], dim=1))
        wanted, at_target = (self.grad_logps != 0) | (grad_lse != 0), self.at_target + grad_lse * logps.exp()
        return self._replace(grad_logps=self.grad_logps - grad_lse, at_target=at_target, wanted=wanted)

    def contiguous(self) -> "TokenGradients":
        return TokenGradients._make(None if part is None else part.contiguous() for part in self)

    def take(self, rows: Tensor | slice) -> "TokenGradients":
        return TokenGradients._make(None if part is None else part[rows] for part in self)

    def silenced(self, live: Tensor) -> "TokenGradients":
        """Zero gradients where the mask is False, for any finite logits of these rows."""

        def silent(part: Tensor) -> Tensor:
            return torch.where(live.view(-1, *[1] * (part.dim() - 1)), part, 0.0)

        parts = TokenGradients._make(None if part is None else silent(part) for part in self)
        # exp(z - inf) is 0 whatever z is; exp(z - 0) might overflow, and inf * 0 is NaN.
        return parts._replace(lse=torch.where(live, self.lse, math.inf))
