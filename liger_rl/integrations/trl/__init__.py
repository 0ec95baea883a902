"""TRL's trainers on this package."""

from liger_rl.integrations.trl.report import explain_trl
from liger_rl.integrations.trl.trl_patch import is_patched, patch_trl, patched_trl, unpatch_trl

__all__ = ["explain_trl", "is_patched", "patch_trl", "patched_trl", "unpatch_trl"]
