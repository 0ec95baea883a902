"""Probability ratios of the current policy over the one that sampled, per token and per sequence."""

from collections.abc import Callable

import torch
from torch import Tensor

from liger_rl.policy.batch import AlignedBatch
from liger_rl.policy.sequences import sequence_mean

# Beyond it a ratio is 2e17 and says nothing. Products of two ratios stay finite in float32 under it, and so does the
# zero gradient of a clipped token times its ratio, which would be NaN with an infinite one.
MAX_LOG_RATIO = 40.0


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp, of at most e^40."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def token_ratio(logps: Tensor, batch: AlignedBatch) -> Tensor:
    """r_t = exp(logp_t - old_t), (B, T) or (N,)."""
    return bounded_exp(batch.log_ratio(logps))


def sequence_ratio(logps: Tensor, batch: AlignedBatch) -> Tensor:
    """R = exp(mean over the sequence of logp - old), through which gradient flows. arXiv:2507.18071."""
    return bounded_exp(sequence_mean(batch.log_ratio(logps), batch))


def sequence_token_ratio(logps: Tensor, batch: AlignedBatch) -> Tensor:
    """R without gradient times exp(logp_t - logp_t without gradient): GSPO-token, arXiv:2507.18071 eq. 14."""
    return sequence_ratio(logps.detach(), batch) * torch.exp(logps - logps.detach())


RATIOS: dict[str, Callable[[Tensor, AlignedBatch], Tensor]] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "sequence_token": sequence_token_ratio,
}
