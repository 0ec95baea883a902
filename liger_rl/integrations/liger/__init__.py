"""liger-kernel's fused linear losses on this package's heads and losses: docs/liger.md."""

from liger_rl.integrations.liger.liger_cross_entropy import LigerFusedLinearCrossEntropyLoss
from liger_rl.integrations.liger.liger_grpo import LigerFusedLinearGRPOLoss
from liger_rl.integrations.liger.liger_jsd import LigerFusedLinearJSDLoss
from liger_rl.integrations.patching import Framework, Patch

__all__ = [
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearJSDLoss",
    "is_patched",
    "patch_liger",
    "patched_liger",
    "unpatch_liger",
]

TARGETS = {
    "liger_kernel.chunked_loss": (LigerFusedLinearGRPOLoss, LigerFusedLinearJSDLoss),
    "liger_kernel.transformers": (LigerFusedLinearCrossEntropyLoss,),
}
LIGER = Framework(
    "liger-kernel",
    (0, 8),
    (0, 9),
    *(
        Patch(f"{module}:{loss.__name__}", loss, None, modules=("liger_kernel", "trl", "swift"))
        for module, losses in TARGETS.items()
        for loss in losses
    ),
    gain="float32 logits, without the defects of the chunked losses in padding, masks and ratios",
    distributions=("liger-kernel", "liger-kernel-nightly"),
)


def patch_liger() -> None:
    """Put the classes of this module in place of liger-kernel's, in liger-kernel, TRL and ms-swift.

    Objects that exist keep their class. liger-kernel's functional forms, such as `liger_fused_linear_grpo`, are not
    replaced.
    """
    LIGER.patch()


unpatch_liger = LIGER.unpatch
patched_liger = LIGER.within
is_patched = LIGER.is_patched
