"""Corrections: factors on the policy term, without gradient.

A correction is a callable `(logps, batch) -> factor` on an `AlignedBatch`. The factor broadcasts to the tokens. A
correction may have `scope`, `reads` and `check` of `ObjectiveFacts`. If `restricts_entropy` is True, the entropy bonus
is a mean over tokens with factors other than 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from liger_rl.losses.batch import AlignedBatch, bounded_exp
from liger_rl.losses.levels import MetricsLevel
from liger_rl.losses.objectives import Scope
from liger_rl.losses.options import Options

Correction = Callable[[Tensor, AlignedBatch], Tensor]
LEVELS = ("token", "sequence")
MODES = ("truncate", "mask")


@dataclass(frozen=True, kw_only=True)
class SamplerCorrection(Options):
    """The importance ratio exp(old - sampling) of trainer over sampler, bounded; TRL's vLLM correction.

    Without old log-probabilities, the current ones are the old ones. A token without a sampling log-probability (NaN)
    has ratio 1.
    """

    level: Annotated[str, LEVELS] = "sequence"  # one ratio per "token", or exp of the sum over the "sequence"
    mode: Annotated[str, MODES] = "mask"  # "truncate" clamps the ratio to the bounds, "mask" makes it 0 outside them
    ratio_min: Annotated[float | None, "[0, inf)"] = None  # under ratio_max; None is no bound
    ratio_max: Annotated[float | None, "(0, inf]"] = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self._bounds
        if not low < high:
            raise ValueError(f"ratio_min must be under ratio_max = {high}, got {low}")

    @property
    def _bounds(self) -> tuple[float, float]:
        return self.ratio_min or 0.0, math.inf if self.ratio_max is None else self.ratio_max

    def check(self, batch: AlignedBatch) -> None:
        if batch.importance_ratio is not None:
            raise ValueError("importance_ratio must be None with a SamplerCorrection, which computes it")
        if batch.sampling_per_token_logps is None:
            raise ValueError("sampling_per_token_logps must be given for a SamplerCorrection, got None")
        if self.level == "sequence":
            batch.check_sequences()

    @torch.no_grad()
    def ratio(self, old_per_token_logps: Tensor, batch: AlignedBatch) -> Tensor:
        """(B, T) or (N,) per token; at level "sequence" (B, 1) or (N,). Masked old log-probabilities must be 0."""
        assert batch.sampling_per_token_logps is not None
        difference = (old_per_token_logps - batch.sampling_per_token_logps).nan_to_num(nan=0.0)
        ratio = bounded_exp(difference if self.level == "token" else batch.sequence_sum(difference))
        low, high = self._bounds
        if self.mode == "truncate":
            return ratio.clamp(low, high)
        return torch.where((ratio < low) | (ratio > high), 0.0, ratio)


@dataclass(frozen=True, kw_only=True)
class OffPolicySequenceMask(Options):
    """0 on tokens with A < 0 whose sequence's mean of sampling - logp is above the threshold. arXiv:2512.02556.

    If there are no sampling log-probabilities, old ones replace them, and if there are none of these, current ones.
    """

    threshold: Annotated[float, "[-inf, inf]"]  # in nats per token
    scope: ClassVar[Scope] = "sequence"

    def reads(self, _level: MetricsLevel) -> set[str]:
        return {"sampling_per_token_logps", "segments"}

    @torch.no_grad()
    def __call__(self, logps: Tensor, batch: AlignedBatch) -> Tensor:
        sampling = batch.sampling_per_token_logps
        if sampling is None:
            sampling = logps - batch.log_ratio(logps)
        drift = batch.sequence_mean((sampling - logps).nan_to_num(nan=0.0))
        return (batch.advantages >= 0) | (drift <= self.threshold)


@dataclass(frozen=True, kw_only=True)
class TopEntropyMask(Options):
    """1 on the tokens of highest entropy, 0 elsewhere. arXiv:2506.01939.

    For a threshold of all ranks, `gather` maps this rank's entropies (n,) to those of all ranks. NaN is ignored.
    """

    top_entropy_quantile: Annotated[float, "(0, 1]"]  # share of the tokens to keep
    gather: Annotated[Callable[[Tensor], Tensor] | None, callable] = None
    restricts_entropy: ClassVar[bool] = True

    def reads(self, _level: MetricsLevel) -> set[str]:
        return {"entropy"}

    @torch.no_grad()
    def __call__(self, logps: Tensor, batch: AlignedBatch) -> Tensor:
        if batch.entropy is None:
            raise ValueError("entropy must be given for a TopEntropyMask, got None")
        # Masked entropies are NaN, so that the host need not know how many tokens count.
        entropies = torch.where(batch.mask, batch.entropy, math.nan).flatten()
        if self.gather is not None:
            entropies = self.gather(entropies)
        return batch.mask & (batch.entropy >= _nanquantile(entropies, 1 - self.top_entropy_quantile))


def _nanquantile(values: Tensor, q: float) -> Tensor:
    """`torch.nanquantile` for any number of values; PyTorch's refuses more than 16 million."""
    ordered = values.sort().values  # NaN last
    last = (values == values).sum() - 1
    # The count is cast first: an int64 tensor times a number is of torch's default dtype.
    position = last.clamp(min=0).to(torch.promote_types(values.dtype, torch.float32)) * q
    below, above = position.floor().long(), position.ceil().long()
    if not values.numel():
        return values.new_full((), math.nan)
    low, high = (ordered.gather(0, index[None]).squeeze(0) for index in (below, above))
    return torch.lerp(low, high, (position - below).to(values.dtype))
