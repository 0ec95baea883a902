"""Several ids per token: the log-probabilities of K targets, and the K largest log-probabilities (`topk`).

Let g_k be the gradients of a token's K log-probabilities, and G = sum_k g_k. Then

    dL/dz_v = sum_{k: id_k = v} g_k - p_v G

The backward of a token without a target computes -p_v G. dL/dz at the K ids is written into its tiles before their
products, so it is summed in float32 and rounded once. Two products would round the two terms apart. That matters if a
student has nearly its teacher's probabilities: dL/dz_v is then their small difference.

The K logits are gathered from float32 tiles of logits, which a fold in a product's epilogue does not make. `topk` reads
the same tiles. Its ids are further targets in the backward.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.distributed import VocabShard
from liger_rl.head.autograd import HeadGradients
from liger_rl.head.dense import two_pass
from liger_rl.head.head_options import EngineOptions
from liger_rl.head.head_shape import HeadShape
from liger_rl.head.interface import Gradients, Head, Needs
from liger_rl.head.tiles import spans
from liger_rl.kernels import for_device
from liger_rl.kernels.reference import (
    decode_keys,
    entropy_term,
    lowest_keys,
    times_derivative,
    transform_logits,
    with_uniform,
)
from liger_rl.kernels.statistics import TokenGradients, TokenStatistics
from liger_rl.kernels.transform import LogitTransform

PAIRS = 1 << 23  # pairs of a token's ids compared at a time, 5 bytes each


class Saved(NamedTuple):
    topk_logps: Tensor  # (n, K)
    topk_ids: Tensor


def forward(head: Head, options: EngineOptions) -> tuple[TokenStatistics, Saved | None]:
    """Statistics of every token that counts. A negative target has log-probability 0."""
    statistics = _statistics(head.gathered(options.compute_dtype), options)
    saved = None
    if statistics.topk_logps is not None and statistics.topk_ids is not None:
        saved = Saved(statistics.topk_logps, statistics.topk_ids)
    return statistics, saved


def with_topk(
    head: Head, statistics: TokenStatistics, saved: Saved, grads: HeadGradients
) -> tuple[Head, TokenStatistics, HeadGradients]:
    """The topk ids as further targets, whose log-probabilities have the gradients `grads.topk_logps`."""
    targets, logps = head.targets, statistics.logps
    if targets.dim() == 1:
        # Ids of the whole vocabulary, as several targets are.
        targets = (targets if head.shard is None else targets + head.shard.place.vocab_start)[:, None]
        logps = logps[:, None]
    grad_logps = torch.zeros_like(logps) if grads.logps is None else grads.logps.view_as(logps)
    assert grads.topk_logps is not None
    ids = head.live.spread(saved.topk_ids + 1, targets.shape[:1]) - 1  # -1 at tokens that do not count
    return (
        head._replace(targets=torch.cat([targets, ids], 1)),
        statistics._replace(logps=torch.cat([logps, saved.topk_logps], 1)),
        grads._replace(logps=torch.cat([grad_logps, grads.topk_logps], 1), topk_logps=None),
    )


def _statistics(rows: Head, options: EngineOptions) -> TokenStatistics:
    targets = None
    if rows.targets.dim() == 2:
        targets = _Targets(rows, options)
        rows = rows._replace(targets=rows.targets.new_full(rows.targets.shape[:1], two_pass.NOWHERE))
    largest = None if options.topk is None else _Largest(rows, options.topk, options.transform)
    seen = [collector.look for collector in (targets, largest) if collector is not None]
    state = two_pass.fold_tiles(rows, options, seen=seen)
    statistics = state.finish()

    def log_probabilities(z: Tensor) -> Tensor:
        # We subtract the peak first, as `Fold.finish` does, for precision near 0.
        return (z - state.peak[:, None]) - state.sum_exp.log()[:, None]

    if targets is not None:
        statistics = statistics._replace(logps=targets.logps(log_probabilities))
    if largest is not None:
        z, ids = largest.finish(rows.shard)
        statistics = statistics._replace(topk_logps=log_probabilities(z).clamp_(max=0.0), topk_ids=ids)
    return statistics


class _Targets:
    """The logits of K targets per token, gathered while tiles are folded."""

    def __init__(self, rows: Head, options: EngineOptions) -> None:
        self.rows, self.transform = rows, options.transform
        self.ids = rows.targets if rows.shard is None else rows.shard.local(rows.targets)
        self.on_rank = (self.ids >= 0) & (self.ids < rows.weight.shape[0])
        self.x = torch.zeros(self.ids.shape, dtype=torch.float32, device=self.ids.device)

    def look(self, logits: Tensor, token_rows: slice, first: int, bias: Tensor | None) -> None:
        column, width = self.ids[token_rows] - first, logits.shape[1]
        clamped_values = logits.gather(1, column.clamp(0, width - 1))
        self.x[token_rows] = torch.where((column >= 0) & (column < width), clamped_values, self.x[token_rows])

    def logps(self, log_probabilities: Callable[[Tensor], Tensor]) -> Tensor:
        """Log-probabilities (n, K), 0 at negative targets. With a shard the logits are summed over the ranks."""
        bias, shard = self.rows.bias, self.rows.shard
        listed = None if bias is None else bias[torch.where(self.on_rank, self.ids, 0)]
        z = torch.where(self.on_rank, transform_logits(self.x, listed, self.transform), 0.0)
        z = z if shard is None else shard.total(z)
        return log_probabilities(z).clamp(max=0.0).masked_fill(self.rows.targets < 0, 0.0)


class _Largest:
    """The K largest logits of each token, kept while tiles are folded."""

    def __init__(self, rows: Head, count: int, transform: LogitTransform) -> None:
        self.rows, self.transform = rows, transform
        self.start = 0 if rows.shard is None else rows.shard.place.vocab_start
        self.keys = lowest_keys(rows.hidden.shape[0], count, rows.hidden.device)

    def look(self, logits: Tensor, token_rows: slice, first: int, bias: Tensor | None) -> None:
        for_device(logits.device).update_topk(logits, self.start + first, bias, self.transform, self.keys[token_rows])

    def finish(self, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
        """-> logits (n, K) in descending order, and their ids (n, K) of the whole vocabulary."""
        keys = self.keys if shard is None else shard.gathered(self.keys)
        return decode_keys(keys.sort(dim=1, descending=True).values[:, : self.keys.shape[1]])


def backward(
    head: Head,
    options: EngineOptions,
    statistics: TokenStatistics,
    _saved: Saved | None,
    tokens: TokenGradients,  # (n,) each; with K targets grad_logps is (n, K), or (n, K + 1) with dL/dlse
    needs: Needs,
) -> Gradients:
    if head.targets.dim() == 2:
        ids, logps = head.live.gather(head.targets), statistics.logps
        # Column K, if there is one, is -dL/dlse.
        listed = torch.where(ids >= 0, tokens.grad_logps[:, : ids.shape[1]], 0.0)
        gradients = torch.cat([listed, tokens.grad_logps[:, ids.shape[1] :]], dim=1)
        total = gradients.sum(1)
        at_targets = _at_targets(ids, logps, listed, total, tokens)
        at_targets = times_derivative(at_targets, (logps + tokens.lse[:, None]).float(), options.transform)
        tokens = tokens._replace(grad_logps=total, at_target=at_targets, has_gradient=(gradients != 0).any(1))
    return two_pass.backward(head, options, statistics, None, tokens, needs)


def _at_targets(ids: Tensor, logps: Tensor, listed: Tensor, total: Tensor, tokens: TokenGradients) -> Tensor:
    """-> dL/dz at the targets, (n, K) float32, 0 at negative targets."""
    id_sums, total = _sums_of_repeated(ids, listed), total[:, None]
    # For p near 1 we use 1 - p = -expm1(logp), which is exact to its last digit, as `TokenGradients.of` does.
    grad = torch.where(logps > -0.5, (id_sums - total) - total * torch.expm1(logps), id_sums - total * logps.exp())
    if tokens.grad_entropy is not None and tokens.entropy is not None:
        grad -= tokens.grad_entropy[:, None] * entropy_term(logps, tokens.entropy[:, None])
    return torch.where(ids >= 0, with_uniform(grad, tokens), 0.0)


def _sums_of_repeated(ids: Tensor, values: Tensor) -> Tensor:
    """ids, values (n, K) -> (n, K): at each place the sum of its token's values with the same id.

    Places with the same id get the same bits.
    """
    n, count = ids.shape
    out = torch.empty_like(values)
    for start, stop in spans(n, max(1, PAIRS // count**2)):
        here, part = ids[start:stop], values[start:stop]
        same = here[:, :, None] == here[:, None, :]
        out[start:stop] = torch.where(same, part[:, None, :], 0.0).sum(2)
    return out


def lacks(shape: HeadShape) -> str | None:
    if shape.passes == "one":
        return 'passes other than "one"'
    lists = shape.several or shape.options.topk is not None
    return None if lists else "several targets for each token, or topk"
