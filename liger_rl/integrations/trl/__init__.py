"""TRL's trainers on this package."""

from liger_rl.integrations.trl.patches import is_patched, patch_trl, patched_trl, unpatch_trl
from liger_rl.integrations.trl.report import explain_trl

__all__ = ["explain_trl", "is_patched", "patch_trl", "patched_trl", "unpatch_trl"]
