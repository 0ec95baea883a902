"""Log-probabilities of given logits over the ids that each token lists: the logits are read, and get a gradient, there.

A token whose row is empty takes the row kernels, over its whole row of logits.
"""

import torch
from torch import Tensor

from liger_rl.given_logits.rows import LogitRowsOptions, fold_rows, grad_rows
from liger_rl.head.call import LogProbs
from liger_rl.head.engines.support import kernels_for
from liger_rl.head.support import Support, check_usable
from liger_rl.head.tokens import check_temperatures, improper_temperatures, live_tokens
from liger_rl.kernels.eager import transformed
from liger_rl.kernels.statistics import TokenStatistics
from liger_rl.kernels.support import Rows, Slots
from liger_rl.kernels.transform import LogitTransform
from liger_rl.once import differentiable_once


def check_support(support: Support, targets: Tensor, options: LogitRowsOptions) -> None:
    """Raise for what does not go together with a support, without reading values."""
    check_usable(support, fixed_shape=options.fixed_shape)
    if torch.compiler.is_compiling():
        raise ValueError("support must be None under torch.compile, whose graphs do not hold its kernels")
    if options.in_place or options.grad_buffer is not None:
        raise ValueError(
            "in_place and grad_buffer must be left out with a support, whose gradient is a new tensor, nonzero at the "
            "listed ids alone"
        )
    support.check_together(targets, options.targets_name)


def support_logprobs(
    logits: Tensor, targets: Tensor, mask: Tensor | None, support: Support, options: LogitRowsOptions
) -> LogProbs:
    """`logits_logprobs` with a support, of what is already checked; waits for the device once, in the forward."""
    vocab = logits.shape[-1]
    ids = targets.long()  # a narrow dtype would wrap the vocabulary's size in comparisons
    slots = kernels_for(logits.device).make_slots(
        support.token_ids, support.offsets, ids.reshape(-1), None if mask is None else mask.reshape(-1),
        part=Rows(vocab, 0, vocab), keep_single=False, distinct=support.distinct,
    )  # fmt: skip
    empty = 0
    if not options.fixed_shape:
        improper = improper_temperatures(options.transform.temperature, ids, mask)
        counts = [slots.numbers, *improper]
        found = live_tokens(ids, mask, vocab, "logits", counts=counts, targets_name=options.targets_name)()
        if improper:
            check_temperatures(found.counts[-1])
        empty = support.check_values(found.counts, vocab=vocab, targets_name=options.targets_name)
    full = slots.full.view(targets.shape) if empty else None
    logps, entropy = SupportRows.apply(logits, ids, slots, full, options)
    missing = slots.missing.view(targets.shape)
    return LogProbs(
        logps.view(targets.shape), None if entropy is None else entropy.view(targets.shape), missing_target=missing
    )


class SupportRows(torch.autograd.Function):
    """(logits, targets, slots, full) -> (logps, entropy), (tokens,) each; a gradient for the logits.

    `full` marks the tokens that the row kernels take, and is None where there are none.
    """

    @staticmethod
    def forward(ctx, logits, targets, slots, full, options):
        ctx.set_materialize_grads(False)
        kernels = kernels_for(logits.device)
        transform, temperatures = _transform(options)
        z = transformed(_listed(logits, slots), None, transform)
        if temperatures is not None:
            z = z / temperatures[_token(slots)]
        statistics, _ = kernels.statistics(z, slots, targets.reshape(-1), entropy=options.entropy, extras=())
        rows = None if full is None else fold_rows(logits, targets, full, options)
        ctx.options, ctx.with_rows = options, rows is not None
        ctx.save_for_backward(logits, targets, full, z, *slots[:6], *statistics[:3], *(rows[:3] if rows else ()))
        logps, entropy = statistics.logps, statistics.entropy
        if rows is None:
            return logps.clone(), None if entropy is None else entropy.clone()
        logps = torch.where(slots.full, rows.logps, logps)
        if entropy is not None and rows.entropy is not None:
            entropy = torch.where(slots.full, rows.entropy, entropy)
        return logps, entropy

    @staticmethod
    @differentiable_once
    def backward(ctx, saved, grad_logps, grad_entropy):
        nothing = (None, None, None, None)
        if grad_logps is None and grad_entropy is None:
            return None, *nothing
        logits, targets, full, z, *rest = saved
        ids, tokens_of, starts, kinds, missing, numbers = rest[:6]
        slots = Slots(ids, tokens_of, starts, kinds, missing, numbers, logits.shape[-1], 0)
        if grad_logps is None:
            grad_logps = torch.zeros_like(grad_entropy)
        if ctx.with_rows:
            rows = TokenStatistics(*rest[9:12])
            out = grad_rows(logits, targets, full, rows, grad_logps, grad_entropy, ctx.options)
            assert out is not None  # no buffer took it
        else:
            out = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
        statistics, grads = TokenStatistics(*rest[6:9]), (grad_logps.float(), grad_entropy)
        coefficients, _ = kernels_for(logits.device).slot_gradients(
            z, slots, statistics, grads, *_transform(ctx.options)
        )
        # A slot of no logit adds 0 at its token's target. So every sum has one term that is not 0, in any order.
        token = _token(slots)
        target = targets.reshape(-1).clamp(0, slots.rows - 1)[token]
        places = token * slots.rows + torch.where(slots.ids < slots.rows, slots.ids, target)
        out.view(-1).index_add_(0, places, coefficients.to(out.dtype))
        return out, *nothing


def _transform(options: LogitRowsOptions) -> tuple[LogitTransform, Tensor | None]:
    """-> the transform as it is for all tokens, and the temperatures (tokens,) where each has its own."""
    given = options.transform.temperature
    if not isinstance(given, Tensor):
        return options.transform, None
    return options.transform.of_logits, given.flatten().float()


def _listed(logits: Tensor, slots: Slots) -> Tensor:
    """(S,) float32 logits of the slots; undefined in slots of no logit."""
    token, column = _token(slots), torch.where(slots.ids < slots.rows, slots.ids, 0).long()
    if logits.dim() == 2:
        return logits[token, column].float()
    # A slice of (B, T, V) logits may have no flat view, and a copy would be as large as the logits.
    length = logits.shape[1]
    return logits[token // length, token % length, column].float()


def _token(slots: Slots) -> Tensor:
    """(S,) int64 tokens of the slots; inside the call even where fixed_shape looks at no value of the support."""
    return slots.tokens.long().clamp(0, slots.kinds.numel() - 1)
