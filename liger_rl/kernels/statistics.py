"""Statistics of tokens' softmax: running sums over tiles of the vocabulary, results, and inputs of the gradients."""

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Record = TypeVar("Record", bound=NamedTuple)


def map_fields(record: Record, function: Callable[[Tensor], Tensor]) -> Record:
    """The record with `function` of each of its tensors. None stays None."""
    return record._make([None if values is None else function(values) for values in record])


LOWEST = torch.finfo(torch.float32).min
# Optional results of a fold, in the order of `TokenStatistics` and of `Fold` from `sum_sq_exp` on.
EXTRAS = ("log_sum_sq_probs", "mean_logits", "is_top1")


class TokenStatistics(NamedTuple):
    """Statistics of the softmax of n tokens, float32 except lse."""

    logps: Tensor  # (n,) log-probability of the target; (n, K) of K targets
    lse: Tensor  # (n,) float64, log sum_v exp z_v
    entropy: Tensor | None  # (n,) in nats
    log_sum_sq_probs: Tensor | None = None  # (n,) log sum_v p_v^2
    sum_logits: Tensor | None = None  # (n,) sum_v z_v
    is_top1: Tensor | None = None  # (n,) bool: the target is the first of the ids with the largest z


class Fold(NamedTuple):
    """Running sums over the vocabulary, float32. Kernels update them in place, tile by tile."""

    peak: Tensor  # (n,) max_v z_v so far
    sum_exp: Tensor  # (n,) sum_v exp(z_v - peak)
    target: Tensor  # (n,) z at the target id; 0 until its tile is folded
    moment: Tensor | None  # (n,) sum_v exp(z_v - peak) (z_v - peak), for the entropy
    sum_sq_exp: Tensor | None  # (n,) sum_v exp(z_v - peak)^2, for log_sum_sq_probs
    sum_logits: Tensor | None  # (n,) sum_v z_v, for mean_logits
    peak_before: Tensor | None  # (n,) max of z_v over the ids before the target, for is_top1

    @classmethod
    def start(cls, n: int, device: torch.device, *, entropy: bool, extras: Collection[str] = ()) -> "Fold":
        """The fold before the first tile."""
        # The first peak is the lowest finite number, not -inf. So (peak - new peak) * 0 is 0 in the moment's update.
        first_values = LOWEST, 0.0, 0.0, 0.0, 0.0, 0.0, -math.inf
        present = True, True, True, entropy, *[name in extras for name in EXTRAS]
        return cls._make(
            [
                torch.full((n,), value, dtype=torch.float32, device=device) if kept else None
                for value, kept in zip(first_values, present, strict=True)
            ]
        )

    @classmethod
    def unwritten(cls, shape: tuple[int, ...], target: Tensor, *, entropy: bool, extras: Collection[str]) -> "Fold":
        """A fold with uninitialized fields of `shape`, except the target. A kernel must write all of them."""
        peak, sum_exp, moment, *of_extras = [
            torch.empty(shape, dtype=torch.float32, device=target.device) if kept else None
            for kept in (True, True, entropy, *[name in extras for name in EXTRAS])
        ]
        return cls._make((peak, sum_exp, target, moment, *of_extras))

    @classmethod
    def concatenate(cls, folds: Sequence["Fold"]) -> "Fold":
        """The fold of the tokens of all `folds`."""
        return cls._make([None if fields[0] is None else torch.cat(fields) for fields in zip(*folds, strict=True)])

    @property
    def extras(self) -> list[str]:
        """The names of EXTRAS that the fold has."""
        return [name for name, values in zip(EXTRAS, self[4:], strict=True) if values is not None]

    def with_earlier_tiles(self, earlier: "Fold") -> "Fold":
        """The fold of all tiles so far. `self` is the last tile's, around the peak and with the target of all tiles."""
        lower = earlier.peak - self.peak
        rescale = lower.exp()
        moment, sum_sq_exp, sum_logits, peak_before = self[3:]
        if moment is not None and earlier.moment is not None:
            moment = rescale * (earlier.moment + lower * earlier.sum_exp) + moment
        if sum_sq_exp is not None and earlier.sum_sq_exp is not None:
            sum_sq_exp = earlier.sum_sq_exp * rescale.square() + sum_sq_exp
        if sum_logits is not None and earlier.sum_logits is not None:
            sum_logits = earlier.sum_logits + sum_logits
        if peak_before is not None and earlier.peak_before is not None:
            peak_before = torch.maximum(earlier.peak_before, peak_before)
        sum_exp = earlier.sum_exp * rescale + self.sum_exp
        return Fold(self.peak, sum_exp, self.target, moment, sum_sq_exp, sum_logits, peak_before)

    def take(self, rows: slice) -> "Fold":
        """Views of the fields of the tokens `rows`. A kernel may write to them."""
        return map_fields(self, lambda values: values[rows])

    def over_ranks(self, maximum: Callable[[Tensor], Tensor], total: Callable[[Tensor], Tensor]) -> "Fold":
        """The fold of a sharded vocabulary, the same on each rank: one maximum and one sum over ranks.

        `target` is 0 on a rank without the target. So its sum over ranks is the target's logit, to the last bit.
        """
        tops = maximum(torch.stack([self.peak] if self.peak_before is None else [self.peak, self.peak_before]))
        peak, peak_before = tops[0], None if self.peak_before is None else tops[1]
        lower = self.peak - peak
        rescale = lower.exp()
        summands = {
            "sum_exp": rescale * self.sum_exp,
            "target": self.target,
            "moment": None if self.moment is None else rescale * (self.moment + lower * self.sum_exp),
            "sum_sq_exp": None if self.sum_sq_exp is None else rescale.square() * self.sum_sq_exp,
            "sum_logits": self.sum_logits,
        }
        present = {name: values for name, values in summands.items() if values is not None}
        sums = total(torch.stack(list(present.values())))
        return self._replace(peak=peak, peak_before=peak_before, **dict(zip(present, sums, strict=True)))

    def finish(self) -> TokenStatistics:
        """The statistics after the last tile."""
        log_sum = self.sum_exp.log()
        # We subtract the peak first, not lse. If the target is the peak, logp = -log_sum then has the precision of a
        # number near 0. target - lse has the precision of the logits.
        logps = ((self.target - self.peak) - log_sum).clamp_(max=0.0)
        entropy = None if self.moment is None else (log_sum - self.moment / self.sum_exp).clamp_(min=0.0)
        log_sum_sq = None if self.sum_sq_exp is None else (self.sum_sq_exp.log() - 2.0 * log_sum).clamp_(max=0.0)
        # The comparison is exact: all three come from the same tiles. In a tie the smaller id is first.
        is_top1 = None if self.peak_before is None else (self.target >= self.peak) & (self.target > self.peak_before)
        # Apple's GPUs have no float64.
        lse = (self.peak if self.peak.device.type == "mps" else self.peak.double()) + log_sum
        return TokenStatistics(logps, lse, entropy, log_sum_sq, self.sum_logits, is_top1)


# The sides of a tile in a product with an epilogue.
BLOCK_TOKENS, BLOCK_VOCAB = 128, 256


class TokenGradients(NamedTuple):
    """Per-token inputs of the gradient of a tile of logits, float32.

    Without a gradient of the entropy, dL/dz_v is at_target at the target, and -grad_logps p_v at all other entries.
    `uniform` is added to both.
    """

    lse: Tensor  # (n,) float64 before `with_float32_lse`
    grad_logps: Tensor  # (n,) dL/dlogp - dL/dlse
    # (n,) dL/dlogp (1 - p_target) + dL/dlse p_target; of K targets (n, K) dL/dx, which no kernel reads. None: no entry
    # is a target, or a kernel makes it.
    at_target: Tensor | None
    entropy: Tensor | None  # (n,); None if grad_entropy is None
    grad_entropy: Tensor | None  # (n,) dL/dentropy
    # (n,) bool: the token has a gradient. Set if grad_logps may be 0 for a token that has one; else None.
    has_gradient: Tensor | None = None
    uniform: Tensor | None = None  # (n,) dL/dmean_logits / V; None without a gradient of mean_logits

    @classmethod
    def of(cls, statistics: TokenStatistics, grad_logps: Tensor, grad_entropy: Tensor | None) -> "TokenGradients":
        # 1 - p comes from the forward's logp. Recomputed from a tile it would carry the rounding error of lse, which is
        # as large as 1 - p itself if p is near 1.
        at_target = -torch.expm1(statistics.logps) * grad_logps
        entropy = statistics.entropy if grad_entropy is not None else None
        return cls(statistics.lse, grad_logps, at_target, entropy, grad_entropy)

    def nonzero(self) -> Tensor:
        """(n,) bool: the gradient is not exactly zero. A NaN is true, because it must reach the gradients."""
        nonzero = self.grad_logps != 0 if self.has_gradient is None else self.has_gradient
        for grad in (self.grad_entropy, self.uniform):
            nonzero = nonzero if grad is None else nonzero | (grad != 0)
        return nonzero

    def with_lse(self, grad_lse: Tensor, logps: Tensor) -> "TokenGradients":
        """Add dL/dlse (n,), which adds dL/dlse p_v to dL/dz_v."""
        assert self.at_target is not None
        has_gradient, at_target = (self.grad_logps != 0) | (grad_lse != 0), self.at_target + grad_lse * logps.exp()
        return self._replace(grad_logps=self.grad_logps - grad_lse, at_target=at_target, has_gradient=has_gradient)

    def with_mean_logits(self, grad_mean_logits: Tensor, vocab: int) -> "TokenGradients":
        """Add dL/dmean_logits (n,), which adds its `vocab`-th part to each dL/dz_v of the whole vocabulary."""
        return self._replace(uniform=grad_mean_logits / vocab)

    def with_float32_lse(self) -> "TokenGradients":
        """The inputs of kernels, which compute exp(z - lse) with lse in float32.

        At logits near 1e4 float32 rounds lse by up to 5e-4. Then the sum of exp(z - lse) is not 1, and dL/dz has a sum
        other than 0. With rest = lse - float32 lse, p = exp(z - float32 lse) exp(-rest). So the gradients get the
        factor exp(-rest), and log p + entropy = (z - float32 lse) + (entropy - rest).
        """
        lse = self.lse.float()
        minus_rest = (lse - self.lse).float().nan_to_num_(0.0)  # inf - inf is NaN
        factor = minus_rest.exp()
        entropy = None if self.entropy is None else self.entropy + minus_rest
        grad_entropy = None if self.grad_entropy is None else self.grad_entropy * factor
        grad_logps = self.grad_logps * factor
        return TokenGradients(lse, grad_logps, self.at_target, entropy, grad_entropy, self.has_gradient, self.uniform)

    def contiguous(self) -> "TokenGradients":
        assert self.lse.dtype == torch.float32  # kernels would compute their tiles in float64
        return map_fields(self, torch.Tensor.contiguous)

    def take(self, rows: Tensor | slice) -> "TokenGradients":
        if isinstance(rows, slice) and rows.stop - rows.start == self.lse.shape[0]:
            return self
        return map_fields(self, lambda values: values[rows])
