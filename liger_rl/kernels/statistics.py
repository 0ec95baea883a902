"""What is known of a token's softmax: while tiles of the vocabulary are folded in, and afterwards."""

import math
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

# What a fold gives on demand besides log-probability and entropy, none of it with a gradient.
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
        """Of the first so many tokens."""
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
        """Memory for all but the target, (..., n) each, where a kernel writes it as a whole."""

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
        """Views, so that what a kernel writes to them is written here."""
        return Fold._make(None if values is None else values[rows] for values in self)

    def over_ranks(self, maximum: Callable[[Tensor], Tensor], total: Callable[[Tensor], Tensor]) -> "Fold":
        """The fold of a vocabulary whose parts are on several ranks, on each of them: one maximum, one sum over ranks.

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


# Sides of a block of the gradient: the part of it that is kept or left out as a whole.
BLOCK_TOKENS, BLOCK_VOCAB = 128, 256
KEPT_ONE = 2.0**15  # what `saved_exponentials` keeps of 1: the largest power of two in float16
# Tokens that say how vocabulary entries share what is left out. Of a trained model's own tokens 64 say it as well as
# all of them.
SAMPLES = 64
# Of numbers kept in float16: a mass is at most 1, a moment at most the logarithm of the vocabulary.
MASS_SCALE, MOMENT_SCALE = 2.0**15, 2.0**10


class TileStatistics(NamedTuple):
    """Softmax sums of each token over each tile of BLOCK_VOCAB vocabulary entries, float32."""

    peaks: Tensor  # (tiles, n) max_v z_v; the lowest finite number where every id is banned
    sums: Tensor  # (tiles, n) sum_v exp(z_v - peak)
    moments: Tensor | None  # (tiles, n) sum_v exp(z_v - peak) (z_v - peak), where entropies are asked for


class TileBounds(NamedTuple):
    """How large a token's gradient can be in each tile, and what it adds up to: what leaving tiles out unseen needs.

    An energy is a sum of squares over the vocabulary entries of a tile. Upper bounds of two of them are kept, from the
    tile's largest probability P and its mass Q: sum_v p_v^2 <= P Q, what dL/dlogp multiplies; and, with H the entropy,
    sum_v (p_v (log p_v + H))^2 <= Q sup_{p <= P} p (log p + H)^2, what dL/dentropy multiplies. In the target's own tile
    they leave out the target, whose gradient is known.

    A code c of 8 bits stands for 2^(-c / 4), an entropy code for 2^(8 - c / 4), rounded up: at most 19% above what it
    was made of, and what is under 2^-55 is as good as nothing.

    A mass is the sum of p_v over a tile, a moment that of p_v (log p_v + H), again without the target.
    """

    codes: Tensor  # (tiles, n) uint8, for dL/dlogp
    beside_target: Tensor  # (n,) float32, the same for the target's tile, whose code means nothing
    elsewhere: Tensor  # (n,) float32, lower bound of sum_v (p_v dx/dz)^2 over the other tiles, from their peaks
    masses: Tensor  # (tiles, n) float16, times MASS_SCALE
    entropy_codes: Tensor | None  # (tiles, n) uint8, for dL/dentropy
    entropy_beside_target: Tensor | None  # (n,) float32
    moments: Tensor | None  # (tiles, n) float16, times MOMENT_SCALE
    # Of the shares by which a left-out sum takes a tile's place, which the backward knows.
    share_squares: Tensor | None = None  # (tiles,) float32

    @classmethod
    def empty(cls, n: int, vocab: int, device: torch.device, *, entropy: bool) -> "TileBounds":
        tiles = -(-vocab // BLOCK_VOCAB)

        def matrix(dtype: torch.dtype) -> Tensor:
            return torch.empty(tiles, n, dtype=dtype, device=device)

        def energies() -> Tensor:
            return torch.empty(n, dtype=torch.float32, device=device)

        always = (matrix(torch.uint8), energies(), energies(), matrix(torch.float16))
        return cls(*always, *((matrix(torch.uint8), energies(), matrix(torch.float16)) if entropy else (None,) * 3))

    def columns(self, tokens: slice) -> "TileBounds":
        """Views of some tokens."""
        *by_token, squares = self
        return TileBounds._make([*(None if part is None else part[..., tokens] for part in by_token), squares])


class TileShares(NamedTuple):
    """How a tile's vocabulary entries share what is left out of it, see `left_out_blocks_triton.tile_shares`."""

    entries: Tensor  # (V,) float32, adding up to 1 over a tile
    squares: Tensor  # (tiles,) float32, sums of their squares
    rows: Tensor  # (padded tiles, H) in the compute dtype, the weight's rows added up by them


class BlockPlan(NamedTuple):
    """The blocks of a gradient to compute, as far as the host must plan for them."""

    counts: Tensor  # (tiles,) integers on the host, blocks kept in each
    kept: int  # in all
    wanted: int  # tokens with a gradient, the first of all

    @property
    def row_blocks(self) -> int:
        return -(-self.wanted // BLOCK_TOKENS)

    @property
    def share(self) -> float:
        """Kept blocks, of all the blocks of the tokens with a gradient."""
        return self.kept / max(self.row_blocks * self.counts.numel(), 1)


class LeftOut(NamedTuple):
    """What takes the place of the blocks that are not computed."""

    sums: Tensor  # (n, tiles or more) of dL/dx, in the dtype of products
    shares: Tensor  # (V,) float32, of these, of a tile's vocabulary entries
    hidden: Tensor | None  # (n, H) float32, their product with the weight, where hidden's gradient is needed


class TokenGradients(NamedTuple):
    """What the gradient of a tile of logits needs of each token, float32.

    Without an entropy's gradient dL/dz_v is at_target at the target, and -grad_logps p_v elsewhere.
    """

    lse: Tensor  # (n,)
    grad_logps: Tensor  # (n,) dL/dlogp, without dL/dlse
    at_target: Tensor  # (n,) dL/dlogp (1 - p_target), with dL/dlse p_target
    entropy: Tensor | None  # (n,) given together with grad_entropy
    grad_entropy: Tensor | None  # (n,) dL/dentropy
    # (n,) bool: there is a gradient, where grad_logps may be 0 and does not tell. No kernel is given it.
    wanted: Tensor | None = None

    @classmethod
    def of(cls, statistics: TokenStatistics, grad_logps: Tensor, grad_entropy: Tensor | None) -> "TokenGradients":
        # 1 - p from the forward's logp: recomputed from a tile it would carry the rounding of lse, which is as
        # large as 1 - p itself for a token the policy is sure of.
        at_target = -torch.expm1(statistics.logps) * grad_logps
        entropy = statistics.entropy if grad_entropy is not None else None
        return cls(statistics.lse, grad_logps, at_target, entropy, grad_entropy)

    def with_lse(self, grad_lse: Tensor, logps: Tensor) -> "TokenGradients":
        """With dL/dlse (n,) too, whose part of dL/dz_v is dL/dlse p_v."""
        if logps.dim() == 2:  # of several targets lse is minus the log-probability of one more, whose logit is always 0
            return self._replace(grad_logps=torch.cat([self.grad_logps, -grad_lse[:, None]], dim=1))
        wanted, at_target = (self.grad_logps != 0) | (grad_lse != 0), self.at_target + grad_lse * logps.exp()
        return self._replace(grad_logps=self.grad_logps - grad_lse, at_target=at_target, wanted=wanted)

    def contiguous(self) -> "TokenGradients":
        return TokenGradients._make(None if part is None else part.contiguous() for part in self)

    def take(self, rows: Tensor | slice) -> "TokenGradients":
        return TokenGradients._make(None if part is None else part[rows] for part in self)

    def silenced(self, live: Tensor) -> "TokenGradients":
        """Zero gradients where the mask is False, whatever finite logits their rows have."""

        def silent(part: Tensor) -> Tensor:
            return torch.where(live.view(-1, *[1] * (part.dim() - 1)), part, 0.0)

        parts = TokenGradients._make(None if part is None else silent(part) for part in self)
        # exp(z - inf) is 0 whatever z is; exp(z - 0) might overflow, and inf * 0 is NaN.
        return parts._replace(lse=torch.where(live, self.lse, math.inf))
