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

from liger_rl.head.dense import two_pass
from liger_rl.head.head_options import EngineOptions
from liger_rl.head.interface import Gradients, Head, Needs
from liger_rl.head.live_tokens import TokenSelection
from liger_rl.head.sparse import slots
from liger_rl.head.support import ListedIds
from liger_rl.kernels.devices import runs_triton
from liger_rl.kernels.segment_sums import Entries, Factors, ones_of
from liger_rl.kernels.statistics import TokenGradients, TokenStatistics


class Saved(NamedTuple):
    """Tensors that the backward reads from the forward, in addition to the statistics and the slots."""

    logits: Tensor  # (S,) float32, transformed


def kernels_for(device: torch.device) -> ModuleType:
    """The module with the slot kernels for `device`: `slots_triton`, or `slots` without Triton."""
    if runs_triton(device):
        from liger_rl.head.sparse import slots_triton

        return slots_triton
    return slots


def forward(head: Head, options: EngineOptions) -> tuple[TokenStatistics, Saved]:
    """Statistics of all N tokens.

    A token with one id has log-probability 0 and entropy 0, and so has a token that does not count.
    """
    listed, kernels = head.listed, kernels_for(head.hidden.device)
    assert listed is not None
    logits = kernels.dots(_factors(head), listed.slots, options.transform)
    statistics = kernels.statistics(logits, listed.slots, entropy=options.entropy)
    full = listed.full  # waits for the device
    if full is not None:
        whole, _ = two_pass.forward(_over_whole_vocabulary(head, full), options)
        statistics = TokenStatistics._make(
            None if part is None or there is None else part.index_copy(0, full, there)
            for part, there in zip(statistics, whole, strict=True)
        )
    return statistics, Saved(logits)


def _over_whole_vocabulary(head: Head, full: Tensor) -> Head:
    """The head with only the tokens `full`, whose rows are empty."""
    return head._replace(live=TokenSelection(head.targets.numel(), index=full), listed=None)


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
    """Gradients, summed in float32 and rounded once. With an empty row, adding those of two passes rounds once more."""
    listed = head.listed
    assert listed is not None
    listed_gradients = _by_ids(head, listed, options, statistics, saved, tokens, needs)
    full = listed.full
    if full is None:
        return listed_gradients
    tokens = TokenGradients.of(statistics, tokens.grad_logps, tokens.grad_entropy).take(full)
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
    kernels, slots = kernels_for(hidden.device), listed.slots
    coefficients = kernels.slot_gradients(saved.logits, slots, statistics, tokens, options.transform)

    grad_hidden = grad_weight = grad_bias = None
    if needs[0]:
        grad_hidden = torch.empty_like(hidden)
        segments = slots.by_token._replace(all_short=listed.all_short)
        kernels.segment_sums(segments, coefficients, slots.ids, weight, grad_hidden)
    if needs[1] or needs[2]:
        by_id = kernels.order_by_id(Entries(slots.ids, coefficients, slots.tokens), slots.vocab)
        if needs[1]:
            grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
            kernels.segment_sums(*by_id, hidden, grad_weight)
        if bias is not None and needs[2]:
            grad_bias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
            kernels.segment_sums(*by_id, ones_of(hidden), grad_bias[:, None])
    return Gradients(grad_hidden, grad_weight, grad_bias)
