"""TRL's trainers on this package."""

from liger_rl.integrations.trl.patches import is_patched, patch_trl, patched_trl, unpatch_trl

__all__ = ["is_patched", "patch_trl", "patched_trl", "unpatch_trl"]
