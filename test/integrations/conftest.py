"""A process group of one rank."""

import pytest
import torch.distributed as dist

# A group of gloo that ends right behind a collective waits for its thread, which may wait for the interpreter (torch
# 2.13). So each group outlives its test.
KEPT = []


@pytest.fixture
def lone_rank():
    """-> a mesh of one rank of gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh("cpu", (1,))
    KEPT.append((dist.group.WORLD, mesh))
    yield mesh
    dist.destroy_process_group()
