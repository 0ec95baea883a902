"""The support engine: log-probabilities over each token's listed ids, from rows of the weight gathered one by one.

`README.md`, under "Given", has the steps. A product takes 2 P H operations for P ids in all; the dense engines take
2 N H V. With few ids the host takes longer than the device. So the host first launches the forward, to which wrong
values do no harm, and only then waits for the checks of the values.

Results keep all N tokens in their places. This engine, and not its caller, takes the two passes for tokens with empty
rows, so that a backward gathers the weight once for all kinds of rows.
"""

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.distributed import VocabShard
from liger_rl.head.dense import two_pass
from liger_rl.head.head_options import EngineOptions
from liger_rl.head.interface import Gradients, Head, Needs
from liger_rl.head.live_tokens import TokenSelection
from liger_rl.head.sparse import slots
from liger_rl.head.support import ListedIds, Support
from liger_rl.kernels.devices import compiles
from liger_rl.kernels.segment_sums import Entries, Factors, Rows, Slots, ones_of
from liger_rl.kernels.statistics import TokenGradients, TokenStatistics


class Saved(NamedTuple):
    """Tensors that the backward reads from the forward, in addition to the statistics and the slots."""

    logits: Tensor  # (S,) float32, transformed
    sizes: Tensor | None  # (N,) float32, number of ids of each row; None without mean_logits


def kernels_for(device: torch.device) -> ModuleType:
    """The module with the slot kernels for `device`: `slots_triton`, or `slots` without Triton."""
    if compiles(device):
        from liger_rl.head.sparse import slots_triton

        return slots_triton
    return slots


def support_slots(
    support: Support,
    targets: Tensor,  # (N,) ids of the whole vocabulary
    mask: Tensor | None,  # (N,) bool or 0/1: tokens that count; None for the tokens with targets >= 0
    wanted: Tensor | None,  # (N,) or (B,) bool or 0/1: tokens whose logits are needed; None for all that count
    weight: Tensor,  # (V', H): all rows, or the shard's rows
    options: EngineOptions,
    shard: VocabShard | None = None,
) -> Slots:
    """The slots of each token: its target, and the distinct other ids of its row.

    A target that is not in its row is added. Bad values raise no error here and do no harm. `Support.check_values`
    reads `numbers` of the result. `full` of the result marks the tokens that take two passes.
    """
    number = weight.shape[0]
    part = Rows(number, 0, number) if shard is None else Rows(number, shard.place.vocab_start, shard.vocab)
    return kernels_for(targets.device).make_slots(
        support.token_ids,
        support.offsets,
        targets,
        mask,
        wanted,
        part=part,
        keep_single="mean_logits" in options.extras,
        distinct=support.distinct,
    )


def forward(head: Head, options: EngineOptions) -> tuple[TokenStatistics, Saved]:
    """Statistics of all N tokens; `head.targets` are ids of the whole vocabulary.

    A token with one id has log-probability 0 and entropy 0, and so has a token that does not count. With a shard there
    are two collectives, a maximum and a sum, and two more if a row is empty.
    """
    listed = head.listed
    assert listed is not None
    statistics, saved = _over_ids(head, listed, options)
    full = listed.full  # waits for the device
    if full is not None:
        whole, _ = two_pass.forward(_over_whole_vocabulary(head, full), options)
        statistics = TokenStatistics._make(
            None if part is None or there is None else part.index_copy(0, full, there)
            for part, there in zip(statistics, whole, strict=True)
        )
    return statistics, saved


def _over_whole_vocabulary(head: Head, full: Tensor) -> Head:
    """The head with only the tokens `full`, whose rows are empty."""
    targets = head.targets if head.shard is None else head.shard.local(head.targets)
    return head._replace(targets=targets, live=TokenSelection(targets.numel(), index=full), listed=None)


def _over_ids(head: Head, listed: ListedIds, options: EngineOptions) -> tuple[TokenStatistics, Saved]:
    """Statistics over the tokens' listed ids; 0 for a token whose row is empty."""
    slots, targets, shard = listed.slots, head.targets, head.shard
    kernels = kernels_for(targets.device)
    logits = kernels.dots(_factors(head), slots, options.transform)
    outputs = {"entropy": options.entropy, "extras": options.extras}
    if shard is None:
        statistics, sizes = kernels.statistics(logits, slots, targets, **outputs)
    else:
        fold, sizes = kernels.fold(logits, slots, targets, **outputs)
        statistics = kernels.finished(fold.over_ranks(shard.maximum, shard.total), slots)
    if sizes is not None and statistics.sum_logits is not None:
        # The sum over the whole vocabulary that gives the mean over the row: callers divide by V.
        whole = statistics.sum_logits / sizes.clamp(min=1.0) * head.vocab
        statistics = statistics._replace(sum_logits=whole)
    return statistics, Saved(logits, sizes)


def _factors(head: Head) -> Factors:
    """The head's tensors with contiguous rows, as kernels read them."""
    parts = (p if p is None or p.stride(-1) == 1 else p.contiguous() for p in head.differentiable)
    return Factors._make(parts)


def tokens_of(statistics: TokenStatistics, grad_logps: Tensor, grad_entropy: Tensor | None) -> TokenGradients:
    """Inputs of `backward`. Slot kernels compute `at_target` from the log-probabilities and do not read the field."""
    entropy = None if grad_entropy is None else statistics.entropy
    return TokenGradients(statistics.lse, grad_logps, grad_logps, entropy, grad_entropy)


def backward(
    head: Head,
    options: EngineOptions,
    statistics: TokenStatistics,
    saved: Saved,
    tokens: TokenGradients,  # (N,) each, as `tokens_of` makes them
    needs: Needs,
) -> Gradients:
    """Gradients, summed in float32 and rounded once. With an empty row, adding two passes' gradients rounds once more.

    With a shard, the gradient of hidden
    is summed over the ranks while the sums for the weight run.
    """
    listed = head.listed
    assert listed is not None
    of_lists = tokens
    if tokens.uniform is not None and saved.sizes is not None:
        # Each row's mean is over its own ids.
        of_lists = tokens._replace(uniform=tokens.uniform * (head.vocab / saved.sizes.clamp(min=1.0)))
    listed_gradients = _by_ids(head, listed, options, statistics, saved, of_lists, needs)
    full = listed.full
    if full is None:
        return listed_gradients
    whole = TokenGradients.of(statistics, tokens.grad_logps, tokens.grad_entropy)
    tokens = whole._replace(uniform=tokens.uniform).take(full)
    full_gradients = two_pass.backward(_over_whole_vocabulary(head, full), options, statistics, None, tokens, needs)
    return Gradients._make(
        None if of_lists is None or of_passes is None else of_lists.add_(of_passes)
        for of_lists, of_passes in zip(listed_gradients, full_gradients, strict=True)
    )


def _by_ids(
    head: Head,
    listed: ListedIds,
    options: EngineOptions,
    statistics: TokenStatistics,
    saved: Saved,
    tokens: TokenGradients,
    needs: Needs,
) -> Gradients:
    """Gradients of the tokens that list ids."""
    hidden, weight, bias = _factors(head)
    kernels, shard, slots = kernels_for(hidden.device), head.shard, listed.slots
    coefficients = kernels.slot_gradients(saved.logits, slots, statistics, tokens, options.transform)

    grad_hidden = grad_weight = grad_bias = pending = None
    if needs[0]:
        grad_hidden = torch.empty_like(hidden, dtype=hidden.dtype if shard is None else torch.float32)
        segments = slots.by_token._replace(all_short=listed.all_short)
        kernels.segment_sums(segments, coefficients, slots.ids, weight, grad_hidden)
    if shard is not None:
        pending = shard.pending_sum(grad_hidden)
        pending.start()
    if needs[1] or needs[2]:
        by_id = kernels.order_by_id(Entries(slots.ids, coefficients, slots.tokens), slots.rows)
        if needs[1]:
            grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
            kernels.segment_sums(*by_id, hidden, grad_weight)
        if bias is not None and needs[2]:
            grad_bias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
            kernels.segment_sums(*by_id, ones_of(hidden), grad_bias[:, None])
    if pending is not None:
        pending.wait()
    if grad_hidden is not None:
        grad_hidden = grad_hidden.to(hidden.dtype)
    return Gradients(grad_hidden, grad_weight, grad_bias)
