"""liger-kernel's fused linear losses on this package's heads and losses: docs/liger.md."""

from liger_rl.integrations.liger_cross_entropy import LigerFusedLinearCrossEntropyLoss
from liger_rl.integrations.liger_distillation import LigerFusedLinearCosineSimilarityLoss, LigerFusedLinearJSDLoss
from liger_rl.integrations.liger_grpo import LigerFusedLinearGRPOLoss
from liger_rl.integrations.liger_preference import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)
from liger_rl.integrations.patching import Framework, Patch

__all__ = [
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearCosineSimilarityLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearKTOLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearSimPOLoss",
    "is_patched",
    "patch_liger",
    "patched_liger",
    "unpatch_liger",
]

CHUNKED_LOSSES = (
    LigerFusedLinearCosineSimilarityLoss, LigerFusedLinearCPOLoss, LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss, LigerFusedLinearKTOLoss, LigerFusedLinearORPOLoss, LigerFusedLinearSimPOLoss,
)  # fmt: skip
TARGETS: list[tuple[str, type]] = [(f"liger_kernel.chunked_loss:{loss.__name__}", loss) for loss in CHUNKED_LOSSES]
TARGETS.append(("liger_kernel.transformers:LigerFusedLinearCrossEntropyLoss", LigerFusedLinearCrossEntropyLoss))
LIGER = Framework(
    "liger-kernel",
    (0, 8),
    (0, 9),
    *(Patch(target, loss, None, modules=("liger_kernel", "trl", "swift")) for target, loss in TARGETS),
    gain="2% of the time of the chunked GRPO loss, without its defects in padding, masks and ratios",
    distributions=("liger-kernel", "liger-kernel-nightly"),
)


def patch_liger() -> None:
    """Put the classes of this module in place of liger-kernel's, in liger-kernel, TRL and ms-swift.

    Objects made before keep their class. liger-kernel's functional forms, such as `liger_fused_linear_grpo`, stay as
    they are.
    """
    LIGER.patch()


unpatch_liger = LIGER.unpatch
patched_liger = LIGER.within
is_patched = LIGER.is_patched
