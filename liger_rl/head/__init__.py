"""Hidden states and a weight in, per-token values out. No RL here."""

from liger_rl.head.logprobs import LogProbs, linear_logprobs, logits_logprobs
from liger_rl.kernels.transform import LogitTransform

__all__ = [
    "LogProbs",
    "LogitTransform",
    "linear_logprobs",
    "logits_logprobs",
]
