"""TRL's trainers on this package."""

from liger_rl.integrations.trl.trl_patch import is_patched, patch_trl, patched_trl, unpatch_trl

__all__ = ["is_patched", "patch_trl", "patched_trl", "unpatch_trl"]
