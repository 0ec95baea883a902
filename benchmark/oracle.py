"""The oracle of the measurements: full logits, every step spelled out, in the inputs' own dtype up to float64.

z = softcap tanh(hidden @ weight.T / softcap),  logp = log_softmax(z)_y,  entropy = -sum_v p_v log p_v

It imports nothing of what it judges.
"""

import torch
from torch import Tensor


def logprobs(
    hidden: Tensor,  # (n, H)
    weight: Tensor,  # (V, H)
    ids: Tensor,  # (n,) in [0, V)
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """-> log-probabilities and entropies (n,) in nats, by full logits."""
    logits = hidden @ weight.T
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    log_p = torch.log_softmax(logits, dim=-1)
    return log_p.gather(-1, ids[:, None]).squeeze(-1), torch.special.entr(log_p.exp()).sum(-1)
