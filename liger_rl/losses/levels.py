"""The levels of a loss's metrics, and what the metrics of policies read at each."""

from collections.abc import Mapping
from typing import Literal, get_args

MetricsLevel = Literal["none", "loss", "basic", "with_entropy"]
LEVELS: tuple[str, ...] = get_args(MetricsLevel)
# Level -> fields of `AlignedBatch` that `policy_metrics` reads, besides those that every objective may read.
POLICY_METRICS: Mapping[str, frozenset[str]] = {
    "none": frozenset(),
    "loss": frozenset(),
    "basic": frozenset({"segments"}),
    "with_entropy": frozenset({"segments", "entropy"}),
}
