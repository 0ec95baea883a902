"""Log-probabilities over each token's listed ids, from gathered rows of the weight: the public function.

README.md has the steps. P ids in all take 2 P H operations, where a head takes 2 N H V. With few ids the host takes
longer than the device. The forward is safe with invalid ids, so it is launched first; only then does the host wait for
the result of the checks of values.

Tokens with an empty row take the head's two passes inside the same autograd Function, so that a backward gathers a
sharded weight once.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.head import two_pass
from liger_rl.head.checks import check_dense
from liger_rl.head.head_options import IDENTITY, Gather, HeadOptions
from liger_rl.head.host_answer import HostAnswer
from liger_rl.head.live_tokens import start_selection
from liger_rl.head.record import Gradients, Head, Needs, gather_head
from liger_rl.kernels import gemm
from liger_rl.kernels.argument_checks import check_type
from liger_rl.kernels.devices import runs_triton
from liger_rl.kernels.public_call import public, refuse_second_derivative
from liger_rl.kernels.statistics import TokenStatistics, map_fields
from liger_rl.kernels.transform import LogitTransform
from liger_rl.support import slots as torch_kernels
from liger_rl.support.sampling_sets import Support
from liger_rl.support.segment_sums import (
    BAD_MASKS,
    BAD_TARGETS,
    FULL_ROWS,
    LONG_ROWS,
    Entries,
    Factors,
    Slots,
    ones_of,
)
from liger_rl.support.slots import SlotGradients

__all__ = ["SupportLogProbs", "support_logprobs"]


class SupportLogProbs(NamedTuple):
    """Per-token results, shaped like the tokens (B, T) or (N,), 0 or False at masked tokens."""

    logps: Tensor
    """float32: log-probability of the target in nats among its row's ids, <= 0, differentiable."""
    entropy: Tensor | None
    """float32: entropy of the row's distribution in nats, >= 0, differentiable; None unless asked for."""
    missing_target: Tensor
    """bool: the token's row lists ids, but not the target, which was added."""


@public
def support_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    support: Support,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    transform: LogitTransform = IDENTITY,
    entropy: bool = False,
    compute_dtype: torch.dtype | None = None,
    gather: Gather | None = None,
) -> SupportLogProbs:
    """Log-probabilities of the targets over the ids that each token could have been drawn from.

    Equal to

        z = transform(hidden @ weight.T + bias)
        z = where(the token's row lists v, z, -inf)
        logps = torch.log_softmax(z.float(), -1).gather(-1, targets[..., None]).squeeze(-1)

    but only rows of the weight that are listed are multiplied, in float32. A token with an empty row takes the whole
    vocabulary, in the dtype of `linear_logprobs`. The host waits for one count, and in a backward with empty rows for
    another.

    Args:
        hidden: (B, T, H) or packed (N, H), float32, bfloat16 or float16; position t predicts targets[t].
        weight: (V, H), in hidden's dtype unless under autocast or with a compute_dtype. It must be whole on this rank.
        targets: (B, T) or (N,) integer ids in [0, V); a negative id masks its token.
        support: the ids of each token, one row for each of the B T or N targets, in flattened order.
        mask, bias: as in `linear_logprobs`.
        transform, entropy, compute_dtype, gather: the fields of `HeadOptions`.

    Raises:
        TypeError, ValueError: as `linear_logprobs`, and for a support whose rows, offsets or ids do not fit.
        NotImplementedError, RuntimeError: a forward-mode derivative or a second derivative is asked for.
    """
    options = HeadOptions(transform=transform, entropy=entropy, compute_dtype=compute_dtype, gather=gather)
    with gather_head(options, weight, bias):
        head = Head.of(hidden, weight, targets, options, mask=mask, bias=bias)
        check_type("support", support, Support, "a Support")
        _check_tokens(support, targets)
        listed = _list_ids(head, support)
        logps, entropies = _evaluate(head, listed)
    results = SupportLogProbs(logps, entropies, listed.slots.missing)
    return map_fields(results, lambda values: values.view(head.shape))


def _check_tokens(support: Support, targets: Tensor) -> None:
    """Raise if the support has another number of tokens than the targets, or is on another device. No value is read."""
    if support.tokens != targets.numel():
        raise ValueError(
            f"support must have a row for each of the {targets.numel()} tokens of targets, got {support.tokens} rows"
        )
    check_dense("support", support.token_ids, targets, "targets")


def kernels_for(device: torch.device) -> ModuleType:
    """The module of the slot kernels: `slots_triton`, or `slots` without Triton."""
    if runs_triton(device):
        from liger_rl.support import slots_triton

        return slots_triton
    return torch_kernels


class ListedIds:
    """The slots of a call, and the result of their checks, for which the host waits once."""

    def __init__(self, slots: Slots, check: Callable[[], Sequence[int]]) -> None:
        """
        Args:
            check: waits for the device, raises for bad values of the call, and returns `Slots.numbers`.
        """
        self.slots = slots
        self._check: Callable[[], Sequence[int]] | None = check
        self._empty_rows: Tensor | None = None
        self.all_short = False  # True once the host knows that no token has more than `LIMITS.by_token.piece` slots

    @property
    def empty_rows(self) -> Tensor | None:
        """Index of the tokens that count and have an empty row; None if there are none. Waits for the check."""
        if self._check is not None:
            numbers = self._check()
            count = numbers[FULL_ROWS]
            # We sort, because `nonzero` would wait for the count, which is known.
            self._empty_rows = torch.argsort(self.slots.full.logical_not(), stable=True)[:count] if count else None
            self.all_short = numbers[LONG_ROWS] == 0
            self._check = None
        return self._empty_rows


def _list_ids(head: Head, support: Support) -> ListedIds:
    """The slots of the head's tokens. Invalid values do not raise before the host asks for the empty rows."""
    slots = kernels_for(head.hidden.device).make_slots(
        support.token_ids, support.offsets, head.targets, None if head.mask is None else head.mask.flatten(),
        vocab=head.vocab, distinct=support.distinct,
    )  # fmt: skip
    answer = HostAnswer(slots.numbers)

    def check() -> list[int]:
        numbers = answer.wait()
        if numbers[BAD_TARGETS] or numbers[BAD_MASKS]:
            # Raises the error with the wrong values.
            start_selection(head.ids, head.mask, head.vocab)()
        support.check_values(numbers, vocab=head.vocab)
        return numbers

    return ListedIds(slots, check)


def _evaluate(head: Head, listed: ListedIds) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities and entropies (N,), differentiable if a tensor of the head wants a gradient."""
    if True in head.needs:
        return ListedFunction.apply(head.hidden, head.weight, head.bias, head, listed)
    with torch.no_grad(), gemm.without_autocast(head.hidden.device):
        _, statistics = _fold(head, listed)
    return statistics.logps, statistics.entropy


class ListedFunction(torch.autograd.Function):
    """(hidden, weight, bias) -> log-probabilities and entropies of all N tokens.

    The caller of the forward enters `options.gather`. The backward enters it itself, once.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, head, listed):
        ctx.set_materialize_grads(False)
        with gemm.without_autocast(hidden.device):
            logits, statistics = _fold(head, listed)
        # The record keeps no tensor that autograd has to track.
        ctx.head, ctx.listed = head._replace(hidden=None, weight=None, bias=None, targets=None), listed
        saved = logits, statistics.logps, statistics.lse, statistics.entropy
        ctx.save_for_backward(hidden, weight, bias, head.targets, *saved)
        # Copies, because the caller may write to its results.
        return statistics.logps.clone(), None if statistics.entropy is None else statistics.entropy.clone()

    @staticmethod
    def backward(ctx, grad_logps, grad_entropy):
        refuse_second_derivative()
        if grad_logps is None and grad_entropy is None:
            return None, None, None, None, None
        hidden, weight, bias, targets, logits, logps, lse, entropy = ctx.saved_tensors
        head = ctx.head._replace(hidden=hidden, weight=weight, bias=bias, targets=targets)
        grad_logps = torch.zeros_like(logps) if grad_logps is None else grad_logps.float()
        tokens = SlotGradients(logps, lse, grad_logps, None if grad_entropy is None else entropy, grad_entropy)
        with gemm.without_autocast(hidden.device), gather_head(head.options, weight, bias):
            gradients = _find_gradients(head, ctx.listed, logits, tokens, ctx.needs_input_grad[:3])
        return *gradients, None, None


def _fold(head: Head, listed: ListedIds) -> tuple[Tensor, TokenStatistics]:
    """-> logits of the slots, and statistics of all N tokens: logps and entropy 0 if a token does not count, or has
    one id."""
    kernels = kernels_for(head.hidden.device)
    logits = kernels.dots(_contiguous_factors(head), listed.slots, head.options.transform)
    statistics = kernels.fold_slots(logits, listed.slots, entropy=head.options.entropy)
    empty_rows = listed.empty_rows  # waits for the device
    if empty_rows is not None:
        dense_statistics = two_pass.fold_head(head._replace(live=empty_rows))
        statistics = TokenStatistics._make(
            None if values is None or dense is None else values.index_copy(0, empty_rows, dense)
            for values, dense in zip(statistics, dense_statistics, strict=True)
        )
    return logits, statistics


def _find_gradients(head: Head, listed: ListedIds, logits: Tensor, tokens: SlotGradients, needs: Needs) -> Gradients:
    """Gradients, summed in float32 and rounded once; once more where tokens have an empty row."""
    gradients = _sum_slot_gradients(head, listed, logits, tokens, needs)
    empty_rows = listed.empty_rows
    if empty_rows is None:
        return gradients
    dense_gradients = two_pass.head_gradients(
        head._replace(live=empty_rows), tokens.of_whole_rows().take(empty_rows), needs
    )
    return Gradients._make(
        None if values is None or dense is None else values.add_(dense)
        for values, dense in zip(gradients, dense_gradients, strict=True)
    )


def _contiguous_factors(head: Head) -> Factors:
    """The head's tensors with contiguous rows, as kernels read them."""
    factors = Factors(head.hidden, head.weight, head.bias)
    return map_fields(factors, lambda x: x if x.stride(-1) == 1 else x.contiguous())


def _sum_slot_gradients(
    head: Head, listed: ListedIds, logits: Tensor, tokens: SlotGradients, needs: Needs
) -> Gradients:
    """Gradients of the tokens that list ids."""
    hidden, weight, bias = _contiguous_factors(head)
    kernels, slots = kernels_for(hidden.device), listed.slots
    coefficients = kernels.grad_slots(logits, slots, tokens, head.options.transform)
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
