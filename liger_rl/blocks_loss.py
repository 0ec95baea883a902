"""A policy loss of a small head whose gradients are made of blocks in the forward, where all they depend on is known.

They take the same products as in the backward. What is saved is the host's time: autograd runs a backward in a thread
of its own, in which the many small launches that choose blocks take longer, and a small head's device waits for them.
One H200, V = 151936, 8,192 tokens of a sure policy, H = 1024: 4.5 ms a step in place of 4.7 to 4.9, and on another host
4.5 to 5.3 in place of 5.0 to 6.6. At H = 2048 it is 6.8 in place of 7.0 or less.
"""

from collections.abc import Callable

import torch

from liger_rl.head.call import HeadCall
from liger_rl.head.engines import block_sparse
from liger_rl.head.engines.choose import HeadShape
from liger_rl.head.engines.interface import Gradients, Head
from liger_rl.head.engines.one_pass import WithGradients
from liger_rl.head.options import EngineOptions
from liger_rl.head.tokens import live_tokens
from liger_rl.kernels import gemm
from liger_rl.kernels.statistics import TokenGradients
from liger_rl.one_pass_loss import WholeLoss
from liger_rl.policy.loss import PolicyLoss, PreparedLoss

# What is made before the loss is scaled vanishes in these.
NARROW = (torch.float16,)
# Of a weight, at most: a factor on the loss multiplies the gradients, which takes a larger weight's longer than what is
# saved.
SMALL_HEAD = 2**28


def blocks_in_forward(shape: HeadShape) -> bool:
    """Whether a loss with a tolerance, for which `loss_obstacle` finds nothing, makes its gradients in the forward."""
    if shape.vocab * shape.hidden_size > SMALL_HEAD or any(x in NARROW for x in (shape.dtype, shape.weight_dtype)):
        return False
    # A copy of the weight would be made twice.
    return shape.tells_blocks_apart and not shape.casts_weight and shape.options.gather is None


@torch.no_grad()
def _made(head: Head, options: EngineOptions, loss: WholeLoss, needs: tuple[bool, ...]) -> tuple[PolicyLoss, Gradients]:
    with gemm.without_autocast(head.hidden.device):
        statistics, known = block_sparse.forward(head, options)
        every = slice(0, head.live.count)
        tokens = TokenGradients.of(statistics, *loss(every, statistics.logps, statistics.entropy))
        assert loss.result is not None
        return loss.result, block_sparse.backward(head, options, statistics, known, tokens, needs)


def loss_in_blocks(call: HeadCall, prepare: Callable[[], PreparedLoss], options: EngineOptions) -> PolicyLoss:
    """As the loss of the log-probabilities of `linear_logprobs`, with the gradients already made; two host syncs.

    `prepare` is not called before the product is launched.
    """
    ids, hidden = call.targets, call.hidden.flatten(0, -2)
    live = live_tokens(
        ids, call.mask, call.weight.shape[0], "weight", wanted=call.needed_mask, targets_name=call.targets_name
    )().selection
    head = Head(hidden, call.weight, call.bias, None, None, ids.view(-1), live)
    (loss, metrics), gradients = _made(head, options, WholeLoss(prepare, live, ids.shape), (*call.needs, False, False))
    loss, _ = WithGradients.apply(loss.detach(), call.hidden, call.weight, call.bias, gradients, None, None)
    return PolicyLoss(loss, metrics)
