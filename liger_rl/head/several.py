"""The log-probabilities of K targets of a token.

Let g_k be the gradients of a token's K log-probabilities, and G = sum_k g_k. Then

    dL/dz_v = sum_{k: id_k = v} g_k - p_v G

The backward of a token without a target computes -p_v G. dL/dz at the K ids is written into its tiles before their
products, so it is summed in float32 and rounded once. Two products would round the two terms apart. That matters if a
student has nearly its teacher's probabilities: dL/dz_v is then their small difference.

The K logits are gathered from float32 tiles of logits, which a fold in a product's epilogue does not make.
"""

import torch
from torch import Tensor

from liger_rl.distributed import BEYOND
from liger_rl.head.record import Head, LogProbs
from liger_rl.head.tiles import spans
from liger_rl.kernels.reference import entropy_term, times_derivative, transform_logits, with_uniform
from liger_rl.kernels.statistics import Fold, TokenGradients, TokenStatistics

PAIRS = 1 << 23  # pairs of a token's ids compared at a time, 5 bytes each


class SeveralTargets:
    """The logits of K targets per token, gathered while tiles are folded."""

    def __init__(self, rows: Head) -> None:
        self.ids, self.targets = rows.target_rows, rows.targets
        # A fold without a target in any tile.
        self.rows = rows._replace(targets=rows.targets.new_full(rows.targets.shape[:1], BEYOND))
        self.on_rank = (self.ids >= 0) & (self.ids < rows.weight.shape[0])
        self.x = torch.zeros(self.ids.shape, dtype=torch.float32, device=self.ids.device)

    def read_tile(self, logits: Tensor, tokens: slice, first: int) -> None:
        column, width = self.ids[tokens] - first, logits.shape[1]
        clamped_values = logits.gather(1, column.clamp(0, width - 1))
        self.x[tokens] = torch.where((column >= 0) & (column < width), clamped_values, self.x[tokens])

    def finish(self, state: Fold) -> TokenStatistics:
        """With log-probabilities (n, K), 0 at negative targets. With a shard the logits are summed over the ranks."""
        rows = self.rows
        bias = None if rows.bias is None else rows.bias[torch.where(self.on_rank, self.ids, 0)]
        z = torch.where(self.on_rank, transform_logits(self.x, bias, rows.options.transform), 0.0)
        z = z if rows.shard is None else rows.shard.total(z)
        # We subtract the peak first, as `Fold.finish` does, for precision near 0.
        logps = (z - state.peak[:, None]) - state.sum_exp.log()[:, None]
        return state.finish()._replace(logps=logps.clamp(max=0.0).masked_fill(self.targets < 0, 0.0))


def token_gradients(statistics: TokenStatistics, head: Head, grads: LogProbs) -> TokenGradients:
    """As `two_pass.token_gradients`, of tokens with K targets: `at_target` (n, K) is dL/dx at them."""
    ids = head.targets if head.live is None else head.targets[head.live]
    logps, lse = statistics.logps, statistics.lse
    grad_logps = torch.zeros_like(logps) if grads.logps is None else torch.where(ids >= 0, grads.logps.float(), 0.0)
    total, has_gradient = grad_logps.sum(1), (grad_logps != 0).any(1)
    if grads.lse is not None:
        total, has_gradient = total - grads.lse.float(), has_gradient | (grads.lse != 0)
    entropy = None if grads.entropy is None else statistics.entropy
    tokens = TokenGradients(lse, total, None, entropy, grads.entropy, has_gradient)
    if grads.mean_logits is not None:
        tokens = tokens.with_mean_logits(grads.mean_logits, head.vocab)
    z = (logps + lse[:, None]).float()
    at_targets = times_derivative(_at_targets(ids, logps, grad_logps, tokens), z, head.options.transform)
    return tokens._replace(at_target=at_targets)


def _at_targets(ids: Tensor, logps: Tensor, grad_logps: Tensor, gradients: TokenGradients) -> Tensor:
    """-> dL/dz at the targets, (n, K) float32, 0 at negative targets."""
    id_sums, total = _sums_of_repeated(ids, grad_logps), gradients.grad_logps[:, None]
    # For p near 1 we use 1 - p = -expm1(logp), which is exact to its last digit, as `TokenGradients.of` does.
    grad = torch.where(logps > -0.5, (id_sums - total) - total * torch.expm1(logps), id_sums - total * logps.exp())
    if gradients.grad_entropy is not None and gradients.entropy is not None:
        grad -= gradients.grad_entropy[:, None] * entropy_term(logps, gradients.entropy[:, None])
    return torch.where(ids >= 0, with_uniform(grad, gradients), 0.0)


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
