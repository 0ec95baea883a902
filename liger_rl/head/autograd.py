"""The autograd Function of one head: the values of the tokens that count, and the gradients of its tensors."""

import torch

from liger_rl.head import two_pass
from liger_rl.head.record import Head, LogProbs, gather_head
from liger_rl.kernels import gemm
from liger_rl.kernels.public_call import refuse_second_derivative
from liger_rl.kernels.statistics import TokenStatistics


def compute_values(head: Head) -> LogProbs:
    """The values (n,) of the live tokens, differentiable if a tensor of the head wants a gradient."""
    if True in head.needs:
        return LogProbs._make(HeadFunction.apply(head.hidden, head.weight, head.bias, head))
    with torch.no_grad(), gemm.without_autocast(head.hidden.device):
        return pick_values(two_pass.fold_head(head), head)


def pick_values(statistics: TokenStatistics, head: Head) -> LogProbs:
    """The values (n,) that the options ask for; None for others."""
    return LogProbs(
        statistics.logps,
        statistics.entropy,
        statistics.log_sum_sq_probs,
        None if statistics.sum_logits is None else statistics.sum_logits / head.vocab,
        statistics.is_top1,
        statistics.lse.to(torch.float32, copy=True) if head.options.lse else None,
    )


class HeadFunction(torch.autograd.Function):
    """(hidden, weight, bias) -> the fields of LogProbs.

    The caller of the forward enters `options.gather`, because the checks read the shape of the whole head. The backward
    enters it itself, once.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, head):
        ctx.set_materialize_grads(False)
        with gemm.without_autocast(hidden.device):
            statistics = two_pass.fold_head(head)
        # The record keeps no tensor that autograd has to track.
        ctx.head = head._replace(hidden=None, weight=None, bias=None, targets=None)
        logps, lse, entropy = statistics.logps, statistics.lse, statistics.entropy
        ctx.save_for_backward(hidden, weight, bias, head.targets, logps, lse, entropy)
        # Copies, because the caller may write to its results and the backward reads the saved ones.
        statistics = statistics._replace(logps=logps.clone(), entropy=None if entropy is None else entropy.clone())
        values = pick_values(statistics, head)
        constants = []
        for value in (values.log_sum_sq_probs, values.is_top1):
            if value is not None:
                constants.append(value)
        ctx.mark_non_differentiable(*constants)
        return tuple(values)

    @staticmethod
    def backward(ctx, *grads):
        refuse_second_derivative()
        if all(grad is None for grad in grads):
            return None, None, None, None
        hidden, weight, bias, targets, logps, lse, entropy = ctx.saved_tensors
        head = ctx.head._replace(hidden=hidden, weight=weight, bias=bias, targets=targets)
        with gemm.without_autocast(hidden.device), gather_head(head.options, weight, bias):
            tokens = two_pass.token_gradients(TokenStatistics(logps, lse, entropy), head, LogProbs(*grads))
            gradients = two_pass.head_gradients(head, tokens, ctx.needs_input_grad[:3])
        return *gradients, None
