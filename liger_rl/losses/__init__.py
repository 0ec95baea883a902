"""Losses on per-token log-probabilities in plain PyTorch: no vocabulary, no chunks, any device."""

from liger_rl.losses.batch import AlignedBatch, PolicyBatch
from liger_rl.losses.corrections import OffPolicySequenceMask, SamplerCorrection, TopEntropyMask
from liger_rl.losses.loss import PolicyLoss, ppo_loss_fn
from liger_rl.losses.metrics import Metric, reduce_metrics
from liger_rl.losses.objectives import (
    CISPO,
    DPPO,
    DPPOKL,
    GMPO,
    IPO,
    SAPO,
    VESPO,
    IcePop,
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
from liger_rl.losses.supervised import DFT, EAFT, CrossEntropy

__all__ = [
    "BCO",
    "CISPO",
    "CPO",
    "DFT",
    "DPO",
    "DPPO",
    "DPPOKL",
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
    "CrossEntropy",
    "EntropyBonus",
    "FixedLengthMean",
    "GlobalTokenMean",
    "IcePop",
    "KLPenalty",
    "Metric",
    "OffPolicySequenceMask",
    "PPOClip",
    "PolicyBatch",
    "PolicyLoss",
    "Reinforce",
    "SamplerCorrection",
    "Segments",
    "SequenceMean",
    "SequenceSum",
    "TokenLoss",
    "TokenMean",
    "TokenSum",
    "TopEntropyMask",
    "ppo_loss_fn",
    "reduce_metrics",
]
