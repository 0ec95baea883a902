"""A policy loss whose forward chooses the blocks of its backward.

Choosing takes some thirty small launches. At the start of a backward the device has nothing else to do while the host
makes them. A loss with a kernel knows dL/dlogps in its forward, where the device is still busy with the product.
"""

from collections.abc import Callable

import torch

from liger_rl.head.call import HeadCall
from liger_rl.head.engines import block_sparse
from liger_rl.head.engines.interface import Head
from liger_rl.head.function import Way, values_of
from liger_rl.head.options import EngineOptions
from liger_rl.head.tokens import live_tokens
from liger_rl.kernels import gemm
from liger_rl.kernels.statistics import TileBounds, TokenGradients, TokenStatistics
from liger_rl.once import differentiable_once
from liger_rl.one_pass_loss import loss_obstacle
from liger_rl.policy.batch import AlignedBatch
from liger_rl.policy.fused import evaluate, evaluate_with_slopes, kernel_of
from liger_rl.policy.loss import PolicyLoss, PolicyTerms, PreparedLoss


def chooses_ahead(call: HeadCall, terms: PolicyTerms, given: AlignedBatch, options: EngineOptions) -> bool:
    """Whether dL/dlogps are known before the backward, which may leave blocks out; the weight is what is multiplied."""
    asked = call.options
    if not options.may_leave_out or call.exact or call.low_rank or asked.gather or asked.transform.per_token:
        return False
    wants_gradient = torch.is_grad_enabled() and any(call.needs)
    return wants_gradient and loss_obstacle(call, terms, given.segments) is None and kernel_of(terms, given) is not None


def loss_in_blocks(call: HeadCall, prepare: Callable[[], PreparedLoss], options: EngineOptions) -> PolicyLoss:
    """As the loss of the log-probabilities of `linear_logprobs`; one host sync, and one in the backward.

    `prepare` is not called before the product is launched.
    """
    ids, hidden = call.targets, call.hidden.flatten(0, -2)
    wait = live_tokens(
        ids, call.mask, call.weight.shape[0], "weight", wanted=call.needed_mask, targets_name=call.targets_name
    )
    live = wait().selection
    head = Head(hidden, call.weight, call.bias, None, None, ids.view(-1), live)
    with torch.no_grad(), gemm.without_autocast(hidden.device):
        statistics, known = block_sparse.forward(head, options)
    prepared = prepare()
    found = None if known is None else evaluate_with_slopes(prepared, live.spread(statistics.logps, ids.shape))
    if known is None or found is None:
        logps = values_of(head, options, Way.of(block_sparse), statistics, known)[0]
        assert logps is not None
        return evaluate(prepared, live.spread(logps, ids.shape))
    result, slopes = found
    slopes = live.gather(slopes.flatten())
    loss = _LossInBlocks.apply(result.loss, *head[:3], head, options, (statistics, known, slopes))
    return PolicyLoss(loss, result.metrics)


class _LossInBlocks(torch.autograd.Function):
    """A loss () that is known, as a function of hidden states (N, H), weight and bias."""

    @staticmethod
    def forward(ctx, loss, hidden, weight, bias, head, options, found):
        statistics, known, slopes = found
        tokens, targets = TokenGradients.of(statistics, slopes, None), head.live.gather(head.targets)
        with gemm.without_autocast(hidden.device):
            shares = block_sparse.shares_for(head, options, statistics, tokens, targets)
            ctx.chosen = block_sparse.choose_blocks(known, statistics, tokens, targets, shares, options)
        ctx.save_for_backward(hidden, weight, bias, head.targets, statistics.logps, statistics.lse, slopes, *known)
        ctx.live, ctx.options = head.live, options
        return loss.clone()  # and not a view, which nobody could divide in place

    @staticmethod
    @differentiable_once
    def backward(ctx, saved, factor):
        hidden, weight, bias, targets, logps, lse, slopes, *known = saved
        head = Head(hidden, weight, bias, None, None, targets, ctx.live)
        statistics, needs = TokenStatistics(logps, lse, None), (*ctx.needs_input_grad[1:4], False, False)
        with gemm.without_autocast(hidden.device):
            tokens = TokenGradients.of(statistics, slopes * factor, None)
            bounds = TileBounds(*known)
            found = block_sparse.backward(head, ctx.options, statistics, bounds, tokens, needs, ctx.chosen)
        return None, *found[:3], None, None, None
