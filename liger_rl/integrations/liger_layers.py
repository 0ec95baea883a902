"""liger-kernel's layers (RMSNorm, RoPE, SwiGLU or GeGLU) in the body of a model whose head is ours."""

import importlib.util
from typing import Any


def check_liger_layers(model: Any) -> None:
    """Raise where `apply_liger_layers` would do nothing, or what it does would not run.

    Raises:
        ImportError: liger-kernel is not installed.
        ValueError: the model is not on a CUDA device, or liger-kernel has no layers for its type.
    """
    name = type(model).__name__
    if model.device.type != "cuda":
        raise ValueError(
            f"liger_layers=True needs {name} on a CUDA device, its layers are Triton kernels; it is on {model.device}"
        )
    if importlib.util.find_spec("liger_kernel") is None:
        raise ImportError("liger_layers=True needs liger-kernel: pip install liger-kernel")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(
            f"liger-kernel has no layers for {name}, model type {model.config.model_type!r}; it has them for "
            f"{', '.join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))}"
        )


def apply_liger_layers(model: Any) -> None:
    """Let liger-kernel replace the layers of `model`, and leave its forward and its loss alone.

    What it replaces stays replaced: the norms and MLPs of this model, and for the whole process the RoPE of its
    architecture.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, cross_entropy=False)
