"""liger_rl: per-token log-probabilities and policy losses straight from hidden states, without the logits."""

from liger_rl.grpo import FusedLinearGRPOLoss
from liger_rl.kernels.transform import LogitTransform
from liger_rl.logprobs import LogProbs, linear_logprobs, logits_logprobs
from liger_rl.policy.batch import PolicyBatch
from liger_rl.policy.loss import PolicyLoss, ppo_loss_fn
from liger_rl.policy.objectives import PPOClip, TokenLoss
from liger_rl.policy.penalties import KLPenalty
from liger_rl.policy.presets import PRESETS
from liger_rl.policy.reductions import FixedLengthMean, GlobalTokenMean, SequenceMean, TokenMean

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "FixedLengthMean",
    "FusedLinearGRPOLoss",
    "GlobalTokenMean",
    "KLPenalty",
    "LogProbs",
    "LogitTransform",
    "PPOClip",
    "PolicyBatch",
    "PolicyLoss",
    "SequenceMean",
    "TokenLoss",
    "TokenMean",
    "linear_logprobs",
    "logits_logprobs",
    "ppo_loss_fn",
]
