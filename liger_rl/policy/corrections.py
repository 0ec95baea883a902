"""Factors on the policy term, without gradient: for what the sampler did differently, and for tokens to leave out.

A correction is any callable `(logps, batch) -> factor` on an `AlignedBatch`, the factor broadcastable to the tokens. It
may have the attributes `token_local`, `sequence_local` and `needs_sequences` of `liger_rl.policy.objectives`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from liger_rl.policy.batch import AlignedBatch, bounded_exp
from liger_rl.policy.options import callable_instance, number, one_of, share

Correction = Callable[[Tensor, AlignedBatch], Tensor]
LEVELS = ("token", "sequence")
MODES = ("truncate", "mask")


@dataclass(frozen=True, kw_only=True)
class SamplerCorrection:
    """The importance ratio exp(old - sampling) of trainer over sampler, bounded; TRL's vLLM correction.

    Per token, or exp of the sum over the sequence. A token without a sampling log-probability (NaN) has ratio 1.

    Attributes:
        level: "token" or "sequence".
        mode: "truncate" clamps the ratio into the bounds, "mask" makes it 0 outside them.
        ratio_min, ratio_max: bounds of the ratio, 0 <= ratio_min < ratio_max; None for none.
    """

    level: str = "sequence"
    mode: str = "mask"
    ratio_min: float | None = None
    ratio_max: float | None = 3.0

    def __post_init__(self) -> None:
        one_of("level", self.level, LEVELS)
        one_of("mode", self.mode, MODES)
        for name in ("ratio_min", "ratio_max"):
            if getattr(self, name) is not None:
                number(name, getattr(self, name))
        low, high = self._bounds
        if not 0 <= low < high:
            raise ValueError(
                f"ratio_min and ratio_max must be bounds with 0 <= ratio_min < ratio_max, or None, "
                f"got {self.ratio_min} and {self.ratio_max}"
            )

    @property
    def _bounds(self) -> tuple[float, float]:
        return self.ratio_min or 0.0, math.inf if self.ratio_max is None else self.ratio_max

    def check(self, batch: AlignedBatch) -> None:
        if batch.importance_ratio is not None:
            raise ValueError("importance_ratio must be None with a SamplerCorrection, which computes it")
        for name in ("old_per_token_logps", "sampling_per_token_logps"):
            if getattr(batch, name) is None:
                raise ValueError(f"{name} must be given for a SamplerCorrection, got None")
        if self.level == "sequence":
            batch.check_sequences()

    @torch.no_grad()
    def ratio(self, batch: AlignedBatch) -> Tensor:
        """-> (B, T) or (N,) per token; at level "sequence" (B, 1) or (N,)."""
        assert batch.old_per_token_logps is not None
        assert batch.sampling_per_token_logps is not None
        difference = (batch.old_per_token_logps - batch.sampling_per_token_logps).nan_to_num(nan=0.0)
        ratio = bounded_exp(difference if self.level == "token" else batch.sequence_sum(difference))
        low, high = self._bounds
        if self.mode == "truncate":
            return ratio.clamp(low, high)
        return torch.where((ratio < low) | (ratio > high), 0.0, ratio)


@dataclass(frozen=True, kw_only=True)
class OffPolicySequenceMask:
    """0 on sequences with A < 0 whose mean of sampling - logp is above the threshold. DeepSeek-V3.2, arXiv:2512.02556.

    The sampling log-probabilities are the batch's, or its old ones where it has none, or the current ones.

    Attributes:
        threshold: in nats per token.
    """

    threshold: float
    token_local: ClassVar[bool] = False
    needs_sequences: ClassVar[bool] = True
    sequence_local: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if math.isnan(number("threshold", self.threshold)):
            raise ValueError(f"threshold must not be NaN, got {self.threshold}")

    @torch.no_grad()
    def __call__(self, logps: Tensor, batch: AlignedBatch) -> Tensor:
        sampling = batch.sampling_per_token_logps
        if sampling is None:
            sampling = logps - batch.log_ratio(logps)
        drift = batch.sequence_mean((sampling - logps).nan_to_num(nan=0.0))
        return (batch.advantages >= 0) | (drift <= self.threshold)


@dataclass(frozen=True, kw_only=True)
class TopEntropyMask:
    """1 on the tokens of highest entropy, 0 elsewhere. arXiv:2506.01939.

    Attributes:
        top_entropy_quantile: share of the tokens to keep, in (0, 1].
        gather: (n,) entropies of this rank's tokens -> those of all ranks, for a threshold they share; NaN entries
            are ignored, so ranks may pad with them. None is one rank.
    """

    top_entropy_quantile: float
    gather: Callable[[Tensor], Tensor] | None = None
    token_local: ClassVar[bool] = False
    restricts_entropy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        share(self, "top_entropy_quantile")
        if self.gather is not None:
            callable_instance("gather", self.gather)

    @torch.no_grad()
    def __call__(self, logps: Tensor, batch: AlignedBatch) -> Tensor:
        if batch.entropy is None:
            raise ValueError("entropy must be given for a TopEntropyMask, got None")
        # NaN at masked tokens and nanquantile, so that no host has to know how many tokens count.
        known = torch.where(batch.mask, batch.entropy, math.nan).flatten()
        if self.gather is not None:
            known = self.gather(known)
        return batch.mask & (batch.entropy >= _nanquantile(known, 1 - self.top_entropy_quantile))


def _nanquantile(values: Tensor, q: float) -> Tensor:
    """torch.nanquantile with linear interpolation, for any number of values (it stops at 16 million)."""
    ordered = values.sort().values  # NaN last
    last = (values == values).sum() - 1
    # An int64 tensor times a number would be of torch's default dtype, whatever that is.
    place = last.clamp(min=0).to(torch.promote_types(values.dtype, torch.float32)) * q
    below, above = place.floor().long(), place.ceil().long()
    if not values.numel():
        return values.new_full((), math.nan)
    low, high = (ordered.gather(0, index[None]).squeeze(0) for index in (below, above))
    return torch.lerp(low, high, (place - below).to(values.dtype))
