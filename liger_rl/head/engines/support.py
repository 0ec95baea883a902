"""The support engine: log-probabilities over the ids that each token lists, by rows of the weight gathered one by one.

It costs 2 P H operations a product for P ids in all, where the dense engines cost 2 N H V. It is worth it up to a few
hundred ids a token. Nothing here waits for the device, so a CUDA graph can capture it; a sparse gradient alone does.
"""

from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.head.engines.two_pass import ProjectionGradients, ProjectionOptions
from liger_rl.head.support import Support
from liger_rl.kernels import support as plain
from liger_rl.kernels.devices import compiles
from liger_rl.kernels.statistics import TokenGradients, TokenStatistics
from liger_rl.kernels.support import Factors, Segments, Slots


def kernels_for(device: torch.device) -> ModuleType:
    """The module whose kernels of a support run on `device`."""
    return import_module("liger_rl.kernels.support_triton") if compiles(device) else plain


def support_slots(
    support: Support,
    targets: Tensor,  # (N,) ids of the whole vocabulary
    live: Tensor | None,  # (N,) bool: the tokens that count; None for those of targets >= 0
    weight: Tensor,  # (V', H): its rows are the shard's, where there is one
    options: ProjectionOptions,
) -> Slots:
    """Where logits are wanted: each token's target, and the distinct ids of its row beside it.

    `numbers` of the result say what `Support.check_values` needs; `full` says which tokens the dense path must take.
    A target that is not in its row is added. Nothing here raises for values, and bad ones do no harm.
    """
    shard, rows = options.shard, weight.shape[0]
    return kernels_for(targets.device).make_slots(
        support.token_ids,
        support.offsets,
        targets.long(),
        live,
        rows=rows,
        first=0 if shard is None else shard.place.vocab_start,
        vocab=rows if shard is None else shard.vocab,
        keep_single="mean_logits" in options.extras,
    )


class SupportFold(NamedTuple):
    """What a backward needs of the forward, beside the statistics."""

    logits: Tensor  # (S,) float32, transformed
    sizes: Tensor | None  # (N,) float32: ids of each token, for `mean_logits`


def fold_support(
    factors: Factors,
    targets: Tensor,  # (N,) ids of the whole vocabulary
    slots: Slots,
    options: ProjectionOptions,
    temperatures: Tensor | None = None,  # (N,) float32, in place of the transform's, which is 1
) -> tuple[TokenStatistics, SupportFold]:
    """Statistics of all N tokens over their own ids. Collectives, with a shard: one maximum and one sum.

    A token with one id has log-probability 0 and entropy 0. So has one whose row is empty, or that does not count.
    """
    factors, temperatures = _prepared(factors, temperatures, options)
    kernels, targets, shard = kernels_for(targets.device), targets.long(), options.shard
    logits = kernels.dots(factors, slots, options.transform, temperatures)
    given = {"entropy": options.entropy, "extras": options.extras}
    if shard is None:
        statistics, sizes = kernels.statistics(logits, slots, targets, **given)
    else:
        fold, sizes = kernels.fold(logits, slots, targets, **given)
        statistics = kernels.finished(fold.over_ranks(shard.maximum, shard.total), slots)
    return statistics, SupportFold(logits, sizes)


def mean_logits(statistics: TokenStatistics, saved: SupportFold) -> Tensor | None:
    """(N,) mean of the transformed logits over each token's ids, 0 where there is none."""
    if statistics.sum_logits is None or saved.sizes is None:
        return None
    return statistics.sum_logits / saved.sizes.clamp(min=1.0)


def support_gradients(
    factors: Factors,
    slots: Slots,
    saved: SupportFold,
    statistics: TokenStatistics,
    grad_logps: Tensor | None,  # (N,)
    grad_entropy: Tensor | None,  # (N,), one of the two at least
    options: ProjectionOptions,
    needs: tuple[bool, ...],  # for hidden, weight, bias, low_inputs and low_weight
    temperatures: Tensor | None = None,  # as in the forward
    *,
    weight_out: Tensor | None = None,  # (V', H) any float dtype: added to, in place of a new gradient
    sparse: bool = False,
) -> ProjectionGradients:
    """Gradients like their inputs, hidden's for all N tokens, summed in float32 and rounded once.

    The weight's is dense, or added to `weight_out` or `options.weight_grad`, whose other rows are not touched. With
    `sparse` it is a coalesced sparse tensor of the listed rows, whose number the host waits for. With a shard,
    gradients of hidden and low_inputs are summed over the ranks, beneath the sums for the weight.
    """
    factors, temperatures = _prepared(factors, temperatures, options)
    hidden, weight, bias, low_inputs, low_weight = factors
    kernels, shard = kernels_for(hidden.device), options.shard
    if grad_logps is None:
        assert grad_entropy is not None
        grad_logps = torch.zeros_like(grad_entropy)
    tokens = TokenGradients.of(statistics, grad_logps.float(), None if grad_entropy is None else grad_entropy.float())
    coefficients = kernels.slot_gradients(saved.logits, slots, tokens, options.transform, temperatures)

    def by_token(table: Tensor | None, left: Tensor | None, needed: bool) -> Tensor | None:
        if table is None or left is None or not needed:
            return None
        out = torch.empty_like(left, dtype=left.dtype if shard is None else torch.float32)
        kernels.segment_sums(slots.by_token, coefficients, slots.ids, table, out)
        return out

    grad_hidden, grad_inputs = by_token(weight, hidden, needs[0]), by_token(low_weight, low_inputs, needs[3])
    pending = None
    if shard is not None:
        pending = shard.pending_sum(grad_hidden, grad_inputs)
        pending.start()
    grad_weight = grad_bias = grad_low = None
    if needs[1] or needs[2] or needs[4]:
        pairs = sorted_pairs(slots, coefficients)
        if needs[1]:
            add_to = options.weight_grad if weight_out is None else weight_out
            if add_to is not None:
                kernels.segment_sums(*pairs, hidden, add_to, add=True)
            elif sparse:
                grad_weight = _sparse_sums(kernels, pairs, hidden, weight)
            else:
                grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
                kernels.segment_sums(*pairs, hidden, grad_weight)
        if bias is not None and needs[2]:
            grad_bias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
            ones = torch.ones(1, 1, device=bias.device).expand(slots.kinds.numel(), 1)
            kernels.segment_sums(*pairs, ones, grad_bias[:, None])
        if low_inputs is not None and low_weight is not None and needs[4]:
            grad_low = torch.empty(low_weight.shape, dtype=low_weight.dtype, device=low_weight.device)
            kernels.segment_sums(*pairs, low_inputs, grad_low)
    if pending is not None:
        pending.wait()
    if grad_hidden is not None:
        grad_hidden = grad_hidden.to(hidden.dtype)
    if grad_inputs is not None and low_inputs is not None:
        grad_inputs = grad_inputs.to(low_inputs.dtype)
    return ProjectionGradients(grad_hidden, grad_weight, grad_bias, grad_inputs, grad_low)


class SortedPairs(NamedTuple):
    """The slots of each row of the weight side by side, a stable order."""

    segments: Segments
    coefficients: Tensor  # (S,) float32
    tokens: Tensor  # (S,) int32


def sorted_pairs(slots: Slots, coefficients: Tensor) -> SortedPairs:
    ids, order = torch.sort(slots.ids, stable=True)
    rows = torch.arange(slots.rows + 1, dtype=ids.dtype, device=ids.device)
    return SortedPairs(Segments(torch.searchsorted(ids, rows), ids), coefficients[order], slots.tokens[order])


def _sparse_sums(kernels: ModuleType, pairs: SortedPairs, hidden: Tensor, weight: Tensor) -> Tensor:
    starts, ids = pairs.segments
    listed = (starts[1:] > starts[:-1]).nonzero().squeeze(1)
    place = torch.searchsorted(listed, ids.long())
    place = torch.where(ids < weight.shape[0], place, listed.numel())
    segments = Segments(torch.cat([starts[listed], starts[-1:]]), place)
    rows = torch.empty(listed.numel(), weight.shape[1], dtype=weight.dtype, device=weight.device)
    kernels.segment_sums(segments, *pairs[1:], hidden, rows)
    return torch.sparse_coo_tensor(listed[None], rows, weight.shape, is_coalesced=True, check_invariants=False)


def _prepared(
    factors: Factors, temperatures: Tensor | None, options: ProjectionOptions
) -> tuple[Factors, Tensor | None]:
    """Rows that lie side by side, which kernels read."""
    if temperatures is not None:
        assert options.transform.temperature == 1.0, "one temperature, the transform's or each token's own"
        temperatures = temperatures.float().contiguous()
    parts = (part if part is None or part.stride(-1) == 1 else part.contiguous() for part in factors)
    return Factors._make(parts), temperatures
