"""Liger's classes on this package."""

from liger_rl.integrations.liger.liger_patch import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    is_patched,
    patch_liger,
    patched_liger,
    unpatch_liger,
)

__all__ = [
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearJSDLoss",
    "is_patched",
    "patch_liger",
    "patched_liger",
    "unpatch_liger",
]
