"""Marks for tests that need a device; not in a conftest.py, of which there are several by that name."""

from importlib.metadata import version

import pytest
import torch

from liger_rl.kernels.devices import BLACKWELL_TRITON, SHARED_BYTES, TMA_CAPABILITY, Gpu

HOPPER = Gpu(TMA_CAPABILITY, SHARED_BYTES, amd=False, triton=BLACKWELL_TRITON)
TRUNCATES = "Triton's interpreter truncates to bfloat16, where its compiler rounds"
NEEDS_GPU, NEEDS_GPUS = pytest.mark.gpus(1), pytest.mark.gpus(2)  # see conftest.py


def on_gpu(*cases):
    """These cases where there is a GPU; in Triton's interpreter one shape for each kernel and option is enough."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=NEEDS_GPU) for case in cases]


def triton_version() -> tuple[int, int]:
    major, minor = version("triton").split(".")[:2]
    return int(major), int(minor)


def skip_where_misread(columns: int) -> None:
    """Skip where a descriptor of rows of so many two-byte numbers is one that Triton's interpreter wrongly refuses."""
    before_fix = triton_version() < (3, 6)
    if before_fix and columns % 16 and not torch.cuda.is_available():
        pytest.skip("before 3.6, the interpreter takes the elements of a descriptor's stride for its bytes")


def skip_without_interpreter(device: str | torch.device = "cpu") -> None:
    """For a test that runs Triton's kernels on CPU: with a GPU they are compiled, and take no tensors of the CPU."""
    if torch.device(device).type == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
