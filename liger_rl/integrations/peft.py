"""PEFT's LoRA layers as one autograd Function each, by one call: docs/transformers.md.

`patch_trl()` does this too.
"""

import importlib
from typing import Any

from liger_rl.integrations.patching import Framework, Patch
from liger_rl.models.lora_linear import forward_lora_layer

__all__ = ["patch_peft", "patched_peft", "unpatch_peft"]


def _make_patch(target: str) -> Patch:
    """The patch of the `forward` of a class of layers, "module:Class"."""

    def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return forward_lora_layer(patch.original, self, x, *args, **kwargs)

    module, _, name = target.partition(":")
    patch = Patch(f"{target}.forward", forward, None, needed=lambda: _has_class(module, name))
    return patch


def _has_class(module: str, name: str) -> bool:
    """Whether PEFT has the class: those of quantized layers exist only with their library."""
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


PATCHES = (
    _make_patch("peft.tuners.lora.layer:Linear"),
    _make_patch("peft.tuners.lora.bnb:Linear4bit"),
    _make_patch("peft.tuners.lora.bnb:Linear8bitLt"),
    _make_patch("peft.tuners.lora.gptq:GPTQLoraLinear"),
    _make_patch("peft.tuners.lora.awq:AwqLoraLinear"),
)
PEFT = Framework("peft", (0, 17), (0, 22), *PATCHES, gain="a LoRA layer is one autograd Function")


def patch_peft() -> None:
    """Run the LoRA layers of every model of this process as one autograd function each. See docs/transformers.md.

    Raises:
        ImportError: PEFT is not installed, or its version is not supported.
    """
    PEFT.patch()


unpatch_peft = PEFT.unpatch
patched_peft = PEFT.within
