"""A process group of one rank, and models for TRL."""

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


@pytest.fixture(scope="session")
def path_of(tmp_path_factory):
    """-> the path of each of TRL's models, and of a teacher's."""
    import trl_runs

    directory = tmp_path_factory.mktemp("models")
    models = {name: trl_runs.save_model(name, directory) for name in trl_runs.MODELS}
    return {**models, "teacher": trl_runs.save_model("granite", directory, seed=1)}
