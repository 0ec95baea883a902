"""Devices and seeds for every test, and Triton's interpreter where there is no GPU."""

import os

import pytest
import torch

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def use_triton_interpreter() -> None:
    # Read when a kernel is decorated, so it must be set before any test imports a module of kernels.
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    # The interpreter (Triton 3.6) keeps numbers as arrays of one element and makes loop bounds of them by int(),
    # which NumPy 2.4 refuses.
    patch_lang_tensor = interpreter._patch_lang_tensor

    def with_index(tensor, scope):
        patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = with_index


if not torch.cuda.is_available():
    use_triton_interpreter()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def device(request) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
