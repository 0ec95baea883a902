"""The oracle: full logits, every step spelled out, in the inputs' own dtype up to float64. For tests and benchmarks.

x = hidden @ weight.T + bias,  z = transform(x),  logp = log_softmax(z)_y,  entropy = -sum_v p_v log p_v
"""

import torch
from torch import Tensor

from liger_rl.kernels.transform import LogitTransform


def reference_logits(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None = None,  # (V,)
    transform: LogitTransform | None = None,
) -> Tensor:
    """-> (..., V) transformed logits, at least float32 after the product, as eager training code has them."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return transform_logits(logits, transform or LogitTransform())


def transform_logits(logits: Tensor, transform: LogitTransform) -> Tensor:
    logits = logits * transform.scale
    if transform.softcap is not None:
        logits = torch.tanh(logits / transform.softcap) * transform.softcap
    return logits / transform.temperature


def reference_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,  # (...) ids; a negative one gives 0
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    transform: LogitTransform | None = None,
) -> tuple[Tensor, Tensor]:
    """-> (logps, entropy) like `linear_logprobs(..., entropy=True)`, by full logits."""
    counted = targets >= 0 if mask is None else (targets >= 0) & (mask != 0)
    log_p = torch.log_softmax(reference_logits(hidden, weight, bias, transform), dim=-1)
    logps = log_p.gather(-1, targets.clamp(min=0).long()[..., None]).squeeze(-1)
    entropy = torch.special.entr(log_p.exp()).sum(-1)
    return torch.where(counted, logps, 0.0), torch.where(counted, entropy, 0.0)
