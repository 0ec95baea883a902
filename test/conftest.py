"""Devices and seeds for every test, and Triton's interpreter where there is no GPU."""

import os

import pytest
import torch

from devices import NEEDS_GPU

if not torch.cuda.is_available():
    # Read when a kernel is decorated, so it must be set before any test imports a module of kernels.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def device(request) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
