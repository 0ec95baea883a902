"""Metrics of a step: 0-dim tensors, merged over micro-batches and ranks by sum, maximum or minimum.

A mean keeps its sum and its count until it is read, so that merging is exact. A rank without tokens is neutral: 0 in a
sum, -inf in a maximum, +inf in a minimum. No metric waits for a device.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from liger_rl.losses.batch import AlignedBatch, bounded_exp
from liger_rl.losses.levels import MetricsLevel
from liger_rl.losses.objectives import TokenLoss
from liger_rl.losses.reductions import divisor

ReductionKind = Literal["sum", "max", "min"]
MERGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


@dataclass(frozen=True)
class Metric:
    """A number of a step and how it is merged. Printing one waits for the device."""

    total: Tensor  # () the sum, maximum or minimum, without gradient
    reduction: ReductionKind = "sum"  # over micro-batches and ranks
    count: Tensor | None = None  # () the divisor of a mean, merged by sum; None for other metrics

    @property
    def value(self) -> Tensor:
        """() the number itself."""
        return self.total if self.count is None else self.total / self.count.clamp(min=1)

    def item(self) -> float:
        """The number on the host; this waits for the device."""
        return self.value.item()

    __float__ = item

    def __repr__(self) -> str:
        try:
            return f"Metric({self.item():.6g})"
        except RuntimeError:  # of a tensor without a value, on the meta device or in a graph
            return f"Metric(total={self.total}, reduction={self.reduction!r}, count={self.count})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)


def policy_metrics(
    level: MetricsLevel, logps: Tensor, token_loss: TokenLoss, kl: Tensor | None, batch: AlignedBatch
) -> dict[str, Metric]:
    """Metrics by name, at one of three levels, without gradient: call it in `no_grad`.

    Each level has the metrics of the level before.

    - "loss", with a KL penalty: `kl_ref`, the mean KL to the reference in nats. With an objective that clips, shares of
      the tokens: `clip_low` (r below the lower bound and A < 0), `clip_high` (r above the upper bound and A > 0), and
      `clip_ratio` (either).
    - "basic", means over sequences of their token means: `new_logprobs`, `old_logprobs`, `ratio_new_old`, `kl_new_old`
      (r - log r - 1), `advantage`, and `clipped_ratio_fraction` (r is outside the bounds, whatever the sign of A).
      Sums over tokens: `ratio_new_old_sum`, `ratio_new_old_squared_sum`, `num_tokens`. Extremes: `max_advantage`,
      `min_advantage`. Of R = exp(mean over the sequence of log r), means over sequences: `sequence_ratio_new_old`,
      `sequence_kl_new_old` (R - log R - 1); sums over sequences: `sequence_ratio_new_old_sum`,
      `sequence_ratio_new_old_squared_sum`, `num_sequences` (with a token that counts). Fast-LLM's GSPO reports these
      five without the prefix, and the last as `num_segments`.
    - "with_entropy": `entropy`, averaged as `new_logprobs`.
    """
    mask, dtype, kl_total, clipped = batch.mask, logps.dtype, None, None
    count = mask.sum()
    if kl is not None:
        kl_total = torch.where(mask, kl.to(dtype), 0.0).sum()
    low, high = token_loss.clip_low, token_loss.clip_high
    if low is not None and high is not None:
        # One sum for the three, because each small launch costs a GPU time.
        indicators = torch.stack([low.expand_as(mask), high.expand_as(mask), (low | high).expand_as(mask)])
        clipped = (indicators & mask).flatten(1).sum(1, dtype=dtype)
    metrics = loss_metrics(count, kl_total, clipped)
    if level == "loss":
        return metrics

    assert batch.num_sequences is not None
    # Sums to 1 over each sequence, on all ranks that hold parts of it.
    of_sequence = mask.to(dtype) / batch.sequence_length()
    sequences = divisor(batch.num_sequences)
    weight = of_sequence / sequences
    log_ratio = batch.log_ratio(logps)
    ratio = bounded_exp(log_ratio)
    mean_log_ratio = batch.sequence_mean(log_ratio)
    mean_ratio = bounded_exp(mean_log_ratio)

    def weighted(values: Tensor, weight: Tensor = weight) -> Metric:
        return Metric(torch.where(mask, values.to(dtype) * weight, 0.0).sum())

    metrics |= {
        "new_logprobs": weighted(logps),
        "old_logprobs": weighted(logps - log_ratio),
        "ratio_new_old": weighted(ratio),
        "kl_new_old": weighted(ratio - log_ratio - 1),
        "advantage": weighted(batch.advantages),
        "ratio_new_old_sum": Metric(torch.where(mask, ratio, 0.0).sum()),
        "ratio_new_old_squared_sum": Metric(torch.where(mask, ratio.square(), 0.0).sum()),
        "num_tokens": Metric(count.to(dtype)),
        "sequence_ratio_new_old": weighted(mean_ratio),
        "sequence_kl_new_old": weighted(mean_ratio - mean_log_ratio - 1),
        "sequence_ratio_new_old_sum": weighted(mean_ratio, of_sequence),
        "sequence_ratio_new_old_squared_sum": weighted(mean_ratio.square(), of_sequence),
        "num_sequences": Metric(of_sequence.sum()),
        "max_advantage": Metric(_reduce_masked(torch.amax, batch, -math.inf), "max"),
        "min_advantage": Metric(_reduce_masked(torch.amin, batch, math.inf), "min"),
    }
    if token_loss.outside is not None:
        metrics["clipped_ratio_fraction"] = weighted(token_loss.outside)
    if level == "with_entropy":
        assert batch.entropy is not None
        metrics["entropy"] = weighted(batch.entropy)
    return metrics


@torch.no_grad()
def sequence_means(values: Mapping[str, Tensor], batch: AlignedBatch, where: Tensor | None = None) -> dict[str, Metric]:
    """Means over sequences with a token, by name, of values that broadcast to the tokens; `where` (bool) picks some."""
    weight = batch.mask.to(batch.advantages.dtype) / batch.sequence_length()
    if where is not None:
        weight = torch.where(where, weight, 0.0)
    return {name: Metric((weight * value).sum(), count=weight.sum()) for name, value in values.items()}


def loss_metrics(count: Tensor, kl: Tensor | None, clipped: Tensor | None) -> dict[str, Metric]:
    """The level "loss", from sums over `count` tokens: the KL, (), and the three clip indicators, (3,)."""
    metrics = {} if kl is None else {"kl_ref": Metric(kl, count=count)}
    if clipped is not None:
        for index, name in enumerate(("clip_low", "clip_high", "clip_ratio")):
            metrics[name] = Metric(clipped[index], count=count)
    return metrics


def _reduce_masked(reduce: Callable[[Tensor], Tensor], batch: AlignedBatch, neutral: float) -> Tensor:
    values = torch.where(batch.mask, batch.advantages, neutral).flatten()
    return reduce(torch.cat([values, values.new_full((1,), neutral)]))


AllReduceKind = Callable[[Tensor, ReductionKind], Tensor]


@torch.no_grad()
def reduce_metrics(
    micro_batches: Iterable[Mapping[str, Metric]], *, all_reduce: AllReduceKind | None = None
) -> dict[str, Metric]:
    """A step's metrics, merged over its micro-batches, of which one may lack a name, and over all ranks.

    `all_reduce` maps (values, kind) to the values merged over ranks, such as `merge_over(group)`. It is called once for
    each kind. Every rank must have the same names. None is one rank.
    """
    merged: dict[str, Metric] = {}
    for metrics in micro_batches:
        for name, metric in metrics.items():
            merged[name] = metric if name not in merged else _merge(name, merged[name], metric)
    if all_reduce is None:
        return merged
    for kind in get_args(ReductionKind):
        names = sorted(name for name, metric in merged.items() if metric.reduction == kind)
        tensors = [merged[name].total for name in names]
        counted = [name for name in names if merged[name].count is not None] if kind == "sum" else []
        tensors += [merged[name].count.to(merged[name].total.dtype) for name in counted]  # type: ignore[union-attr]
        if not tensors:
            continue
        values = all_reduce(torch.stack(tensors), kind).unbind()
        counts = dict(zip(counted, values[len(names) :], strict=True))
        for name, value in zip(names, values, strict=False):
            merged[name] = Metric(value, kind, counts.get(name))
    return merged


def _merge(name: str, a: Metric, b: Metric) -> Metric:
    if a.reduction != b.reduction or (a.count is None) != (b.count is None):
        raise ValueError(f"metric {name} must be merged in one way, got {a.reduction} and {b.reduction}")
    count = None if a.count is None or b.count is None else a.count + b.count
    return Metric(MERGES[a.reduction](a.total, b.total), a.reduction, count)
