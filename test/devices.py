"""Marks for tests that need a device; not in a conftest.py, of which there are several by that name."""

import pytest
import torch

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
