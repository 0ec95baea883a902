"""liger_rl: per-token log-probabilities and policy losses straight from hidden states, without the logits."""

from liger_rl.distributed import VocabParallel, merge_over, sum_over
from liger_rl.fused_linear.cross_entropy import FusedLinearCrossEntropyLoss
from liger_rl.fused_linear.from_logits import PerTokenLoss, grpo_loss_from_logits
from liger_rl.fused_linear.grpo import FusedLinearGRPOLoss
from liger_rl.fused_linear.preference_loss import FusedLinearPreferenceLoss, FusedLinearUnpairedLoss, ReferenceHead
from liger_rl.head.divergence import Divergence, linear_divergence
from liger_rl.head.head_options import HeadOptions
from liger_rl.head.logprobs import LogProbs, linear_logprobs, logits_logprobs
from liger_rl.head.plan import LinearPlan, plan_linear_logprobs
from liger_rl.head.support import Support
from liger_rl.head.topk import TopKDivergence, list_divergence, topk_divergence
from liger_rl.kernels.transform import LogitTransform
from liger_rl.losses.batch import AlignedBatch, PolicyBatch
from liger_rl.losses.corrections import OffPolicySequenceMask, SamplerCorrection, TopEntropyMask
from liger_rl.losses.loss import PolicyLoss, ppo_loss_fn
from liger_rl.losses.metrics import Metric, reduce_metrics
from liger_rl.losses.objectives import (
    CISPO,
    DPPO,
    DPPOKL,
    DRO,
    GMPO,
    IPO,
    SAPO,
    VESPO,
    ClipCov,
    IcePop,
    KLCov,
    PPOClip,
    Reinforce,
    TokenLoss,
)
from liger_rl.losses.penalties import EntropyBonus, KLPenalty
from liger_rl.losses.preference import BCO, CPO, DPO, KTO, ORPO, APOZeroUnpaired
from liger_rl.losses.presets import PREFERENCES, PRESETS, SUPERVISED, UNPAIRED
from liger_rl.losses.reductions import (
    FixedLengthMean,
    GlobalTokenMean,
    SequenceMean,
    SequenceSum,
    TokenMean,
    TokenSum,
)
from liger_rl.losses.segments import Segments
from liger_rl.losses.supervised import DFT, EAFT, CrossEntropy, Focal

__version__ = "0.1.0"

__all__ = [
    "BCO",
    "CISPO",
    "CPO",
    "DFT",
    "DPO",
    "DPPO",
    "DPPOKL",
    "DRO",
    "EAFT",
    "GMPO",
    "IPO",
    "KTO",
    "ORPO",
    "PREFERENCES",
    "PRESETS",
    "SAPO",
    "SUPERVISED",
    "UNPAIRED",
    "VESPO",
    "APOZeroUnpaired",
    "AlignedBatch",
    "ClipCov",
    "CrossEntropy",
    "Divergence",
    "EntropyBonus",
    "FixedLengthMean",
    "Focal",
    "FusedLinearCrossEntropyLoss",
    "FusedLinearGRPOLoss",
    "FusedLinearPreferenceLoss",
    "FusedLinearUnpairedLoss",
    "GlobalTokenMean",
    "HeadOptions",
    "IcePop",
    "KLCov",
    "KLPenalty",
    "LinearPlan",
    "LogProbs",
    "LogitTransform",
    "Metric",
    "OffPolicySequenceMask",
    "PPOClip",
    "PerTokenLoss",
    "PolicyBatch",
    "PolicyLoss",
    "ReferenceHead",
    "Reinforce",
    "SamplerCorrection",
    "Segments",
    "SequenceMean",
    "SequenceSum",
    "Support",
    "TokenLoss",
    "TokenMean",
    "TokenSum",
    "TopEntropyMask",
    "TopKDivergence",
    "VocabParallel",
    "grpo_loss_from_logits",
    "linear_divergence",
    "linear_logprobs",
    "list_divergence",
    "logits_logprobs",
    "merge_over",
    "plan_linear_logprobs",
    "ppo_loss_fn",
    "reduce_metrics",
    "sum_over",
    "topk_divergence",
]
