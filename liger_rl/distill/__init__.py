"""Divergences of a student from a teacher: of two heads, or over lists of ids. No RL here."""

from liger_rl.distill.divergence import Divergence, linear_divergence
from liger_rl.distill.lists import TopKDivergence, topk_divergence

__all__ = ["Divergence", "TopKDivergence", "linear_divergence", "topk_divergence"]
