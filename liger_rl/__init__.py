"""liger_rl: the training step of RL on language models several times as fast, by a patch of TRL; and a fused lm_head
with losses, which turns hidden states into log-probabilities without the logits.

The functions and modules that a caller types first. The classes of their arguments are in `liger_rl.head`,
`liger_rl.losses`, `liger_rl.fused_linear`, `liger_rl.support` and `liger_rl.distributed`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from liger_rl.distill.divergence import linear_divergence
from liger_rl.distill.lists import topk_divergence
from liger_rl.fused_linear.cross_entropy import FusedLinearCrossEntropyLoss
from liger_rl.fused_linear.grpo import FusedLinearGRPOLoss
from liger_rl.fused_linear.preference_loss import FusedLinearPreferenceLoss, FusedLinearUnpairedLoss
from liger_rl.head.logprobs import linear_logprobs
from liger_rl.losses.loss import ppo_loss_fn
from liger_rl.support.logprobs_over_sets import support_logprobs

__version__ = "0.2.0"

__all__ = [
    "FusedLinearCrossEntropyLoss",
    "FusedLinearGRPOLoss",
    "FusedLinearPreferenceLoss",
    "FusedLinearUnpairedLoss",
    "completion_logps",
    "explain_trl",
    "linear_divergence",
    "linear_logprobs",
    "loss_step",
    "loss_steps",
    "patch_liger",
    "patch_peft",
    "patch_trl",
    "patch_verl",
    "patched_liger",
    "patched_peft",
    "patched_trl",
    "patched_verl",
    "ppo_loss_fn",
    "support_logprobs",
    "swap_lm_head",
    "topk_divergence",
    "unpatch_liger",
    "unpatch_peft",
    "unpatch_trl",
    "unpatch_verl",
]

_PATCHED = ("liger", "peft", "trl", "verl")
# Name -> its module below the package. These modules import transformers, or belong to another library.
_LAZY = {
    "completion_logps": "step.loss_step",
    "explain_trl": "integrations.trl",
    "loss_step": "step.loss_step",
    "loss_steps": "step.loss_step",
    "swap_lm_head": "models.swap",
    **{f"{verb}_{name}": f"integrations.{name}" for verb in ("patch", "patched", "unpatch") for name in _PATCHED},
}

if TYPE_CHECKING:
    from liger_rl.integrations.liger import patch_liger, patched_liger, unpatch_liger
    from liger_rl.integrations.peft import patch_peft, patched_peft, unpatch_peft
    from liger_rl.integrations.trl import explain_trl, patch_trl, patched_trl, unpatch_trl
    from liger_rl.integrations.verl import patch_verl, patched_verl, unpatch_verl
    from liger_rl.models.swap import swap_lm_head
    from liger_rl.step.loss_step import completion_logps, loss_step, loss_steps
else:  # a type checker would take every name for one that __getattr__ knows

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
