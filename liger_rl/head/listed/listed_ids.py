"""The engine of calls with a support: log-probabilities over each token's listed ids, from gathered rows of the weight.

README.md has the steps. P ids in all take 2 P H operations, where the dense engines take
2 N H V. With few ids the host takes longer than the device. The forward is safe with invalid ids, so it is launched
first; only then does the host wait for the result of the checks of values.

Results cover all N tokens. Tokens with an empty row take two passes inside this engine, so that a backward gathers a
sharded weight once.
"""

from types import ModuleType

import torch
from torch import Tensor

from liger_rl.head.autograd import Engine, Saved, run_engine
from liger_rl.head.dense import two_pass
from liger_rl.head.host_answer import HostAnswer
from liger_rl.head.listed import slots
from liger_rl.head.listed.segment_sums import BAD_MASKS, BAD_TARGETS, Entries, Factors, ones_of
from liger_rl.head.live_tokens import start_selection
from liger_rl.head.record import Gradients, Head, LogProbs, Needs
from liger_rl.head.support import ListedIds, Support
from liger_rl.kernels.devices import runs_triton
from liger_rl.kernels.statistics import TokenGradients, TokenStatistics, map_fields


def kernels_for(device: torch.device) -> ModuleType:
    """The module of the slot kernels: `slots_triton`, or `slots` without Triton."""
    if runs_triton(device):
        from liger_rl.head.listed import slots_triton

        return slots_triton
    return slots


def log_probs_over_support(head: Head, support: Support) -> LogProbs:
    """Log-probabilities over each token's listed ids; over the whole vocabulary for a token with an empty row."""
    mask, needed = (None if column is None else column.flatten() for column in (head.mask, head.needed))
    make_slots = kernels_for(head.hidden.device).make_slots
    # Invalid values do not raise until `check` reads the slots' numbers.
    slots = make_slots(
        support.token_ids, support.offsets, head.targets, mask, needed, vocab=head.vocab, distinct=support.distinct
    )
    answer = HostAnswer(slots.numbers)

    def check() -> list[int]:
        numbers = answer.wait()
        if numbers[BAD_TARGETS] or numbers[BAD_MASKS]:
            # Raises the error with the wrong values.
            start_selection(head.ids, head.mask, head.vocab, needed=head.needed, targets_name=head.targets_name)()
        support.check_values(numbers, vocab=head.vocab)
        return numbers

    values = run_engine(Listed, head._replace(listed=ListedIds(slots, check)), wants_gradient=True in head.needs)
    values = values._replace(missing_target=slots.missing)
    if len(head.shape) == 1:
        return values
    return map_fields(values, lambda value: value.view(head.shape))


class Listed(Engine):
    @staticmethod
    def forward(saved: Saved, head: Head) -> TokenStatistics:
        """Statistics of all N tokens. Tokens that do not count, and tokens with one id, get logps and entropy 0."""
        listed, kernels = head.listed, kernels_for(head.hidden.device)
        assert listed is not None
        saved.logits = kernels.dots(_contiguous_factors(head), listed.slots, head.options.transform)
        statistics = kernels.fold_slots(saved.logits, listed.slots, entropy=head.options.entropy)
        empty_rows = listed.empty_rows  # waits for the device
        if empty_rows is not None:
            dense_statistics = two_pass.fold_head(head._replace(live=empty_rows))
            statistics = TokenStatistics._make(
                None if values is None or dense is None else values.index_copy(0, empty_rows, dense)
                for values, dense in zip(statistics, dense_statistics, strict=True)
            )
        saved.logps, saved.lse, saved.entropy = statistics.logps, statistics.lse, statistics.entropy
        return statistics

    @staticmethod
    def backward(saved: Saved, head: Head, grads: LogProbs, needs: Needs) -> Gradients:
        """Gradients, summed in float32 and rounded once; once more where tokens have an empty row."""
        listed = head.listed
        assert listed is not None
        grad_logps = torch.zeros_like(saved.logps) if grads.logps is None else grads.logps.float()
        gradients = _sum_slot_gradients(saved, head, listed, grad_logps, grads.entropy, needs)
        empty_rows = listed.empty_rows
        if empty_rows is None:
            return gradients
        statistics = TokenStatistics(saved.logps, saved.lse, saved.entropy)
        token_gradients = TokenGradients.of(statistics, grad_logps, grads.entropy).take(empty_rows)
        dense_gradients = two_pass.head_gradients(head._replace(live=empty_rows), token_gradients, needs)
        return Gradients._make(
            None if values is None or dense is None else values.add_(dense)
            for values, dense in zip(gradients, dense_gradients, strict=True)
        )


def _contiguous_factors(head: Head) -> Factors:
    """The head's tensors with contiguous rows, as kernels read them."""
    factors = Factors(head.hidden, head.weight, head.bias)
    return map_fields(factors, lambda x: x if x.stride(-1) == 1 else x.contiguous())


def _sum_slot_gradients(
    saved: Saved, head: Head, listed: ListedIds, grad_logps: Tensor, grad_entropy: Tensor | None, needs: Needs
) -> Gradients:
    """Gradients of the tokens that list ids."""
    hidden, weight, bias = _contiguous_factors(head)
    kernels, slots = kernels_for(hidden.device), listed.slots
    entropy = None if grad_entropy is None else saved.entropy
    # The slot kernels compute dL/dz at the target from the log-probabilities, and do not read the third field.
    gradients = TokenGradients(saved.lse, grad_logps, grad_logps, entropy, grad_entropy)
    coefficients = kernels.grad_slots(saved.logits, slots, saved, gradients, head.options.transform)
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
