"""What a training loop wants to see of a step: 0-dim tensors, each with the way it is merged, never synced.

Three kinds: the sums of a step over micro-batches and ranks, maxima and minima. A mean is kept as its sum and its
count until it is read, so that merging is exact, and a rank without tokens is neutral: 0 to sums, -inf to maxima,
+inf to minima.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from liger_rl.policy.batch import AlignedBatch, bounded_exp
from liger_rl.policy.objectives import TokenLoss
from liger_rl.policy.reductions import divisor

ReductionKind = Literal["sum", "max", "min"]
MetricsLevel = Literal["none", "loss", "basic", "with_entropy"]
LEVELS: tuple[str, ...] = get_args(MetricsLevel)
MERGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


@dataclass(frozen=True)
class Metric:
    """A number of a step and how it is merged.

    Attributes:
        total: () the sum, maximum or minimum, without gradient.
        reduction: "sum", "max" or "min", over micro-batches and ranks.
        count: () for a mean, what the merged total is divided by when it is read; itself merged by sum.
    """

    total: Tensor
    reduction: ReductionKind = "sum"
    count: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """() the number itself."""
        return self.total if self.count is None else self.total / self.count.clamp(min=1)

    def item(self) -> float:
        """The number on the host; this waits for the device."""
        return self.value.item()

    __float__ = item


@torch.no_grad()
def policy_metrics(
    level: MetricsLevel, logps: Tensor, token_loss: TokenLoss, kl: Tensor | None, batch: AlignedBatch
) -> dict[str, Metric]:
    """Metrics by name, at one of four levels.

    - none: nothing.
    - loss: `kl_ref`, mean KL to the reference in nats, when there is a penalty; `clip_low`, `clip_high`, `clip_ratio`,
      the shares of tokens outside the bounds on the side where the plain clip cuts the gradient (under the lower one
      with A < 0, over the upper one with A > 0, either), when the objective clips.
    - basic: these, and with w = m / (tokens of the sequence) / num_sequences the sums over tokens of `new_logprobs`,
      `old_logprobs`, `ratio_new_old`, `kl_new_old` = r - log r - 1, `advantage`, `clipped_ratio_fraction` (the ratio
      is outside the bounds, whatever the sign of A); `ratio_new_old_sum`, `ratio_new_old_squared_sum` and
      `num_tokens` over the tokens themselves; `max_advantage`, `min_advantage`. With R = exp(mean of log r over the
      sequence), GSPO's ratio, `sequence_ratio_new_old` and `sequence_kl_new_old` = R - log R - 1, summed over
      sequences and divided by num_sequences; `sequence_ratio_new_old_sum`, `sequence_ratio_new_old_squared_sum` and
      `num_sequences`, over the sequences with a token that counts. Fast-LLM's GSPO reports these five, without the
      prefix and the last as `num_segments`, and its GRPO the ones per token.
    - with_entropy: these and `entropy`, weighted as new_logprobs.
    """
    if level == "none":
        return {}
    mask, dtype = batch.mask, logps.dtype
    metrics: dict[str, Metric] = {}
    count = mask.sum()

    if kl is not None:
        metrics["kl_ref"] = Metric(torch.where(mask, kl.to(dtype), 0.0).sum(), count=count)
    low, high = token_loss.clip_low, token_loss.clip_high
    if low is not None and high is not None:
        # In one sum: each small launch is time that a GPU has nothing else to do in.
        sides = [side.expand_as(mask) for side in (low, high, low | high)]
        clipped = (torch.stack(sides) & mask).flatten(1).sum(1).to(dtype)
        names = ("clip_low", "clip_high", "clip_ratio")
        metrics |= {name: Metric(total, count=count) for name, total in zip(names, clipped.unbind(), strict=True)}
    if level == "loss":
        return metrics

    if batch.num_sequences is None:
        raise ValueError(f"segments must be given for metrics {level!r} of packed (N,) tokens, got None")
    # Sums to 1 over each sequence, on all ranks that hold parts of it.
    share = mask.to(dtype) / batch.sequence_length()
    sequences = divisor(batch.num_sequences)
    weight = share / sequences
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
        "sequence_ratio_new_old_sum": weighted(mean_ratio, share),
        "sequence_ratio_new_old_squared_sum": weighted(mean_ratio.square(), share),
        "num_sequences": Metric(share.sum()),
        "max_advantage": Metric(_extreme(torch.amax, batch, -math.inf), "max"),
        "min_advantage": Metric(_extreme(torch.amin, batch, math.inf), "min"),
    }
    if token_loss.outside is not None:
        metrics["clipped_ratio_fraction"] = weighted(token_loss.outside)
    if level == "with_entropy":
        if batch.entropy is None:
            raise ValueError('entropy must be given for metrics "with_entropy", got None')
        metrics["entropy"] = weighted(batch.entropy)
    return metrics


def _extreme(reduce: Callable[[Tensor], Tensor], batch: AlignedBatch, neutral: float) -> Tensor:
    values = torch.where(batch.mask, batch.advantages, neutral).flatten()
    return reduce(torch.cat([values, values.new_full((1,), neutral)]))


AllReduceKind = Callable[[Tensor, ReductionKind], Tensor]


@torch.no_grad()
def reduce_metrics(
    parts: Iterable[Mapping[str, Metric]], *, all_reduce: AllReduceKind | None = None
) -> dict[str, Metric]:
    """One step's metrics from those of its micro-batches and, with `all_reduce`, of all ranks.

    Args:
        parts: metrics of micro-batches; names may be missing from some.
        all_reduce: (values, kind) -> values merged over ranks, called once per kind with everything of that kind;
            every rank must have the same names.

    Raises:
        ValueError: a name that is merged in two ways.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
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
