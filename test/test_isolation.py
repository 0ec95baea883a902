"""What one test leaves in the process does not reach the next: each test here runs twice and would see its own rest."""

import os

import pytest
import torch

twice = pytest.mark.parametrize("time", ["first", "second"])


@twice
def test_settings_of_torch(time):
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_default_device() == torch.device("cpu")
    assert torch.is_grad_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")


@twice
def test_environment_and_process_groups(time):
    assert "ACCELERATE_OF_A_TEST" not in os.environ
    assert os.environ["HOME"] != "/nowhere"
    os.environ |= {"ACCELERATE_OF_A_TEST": "1", "HOME": "/nowhere"}
    assert not torch.distributed.is_initialized()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


@twice
def test_the_device_that_accelerate_decided_on(time):
    """As a trainer does where there is a GPU, after which an Accelerator of the CPU raises."""
    accelerate = pytest.importorskip("accelerate", reason="the state is accelerate's")
    from accelerate.state import AcceleratorState, PartialState

    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.device.type == "cpu"
    assert accelerator.gradient_state.num_steps == 1
    for state in (AcceleratorState, PartialState):
        state._shared_state["device"] = torch.device("cuda", 0)
    accelerator.gradient_state.plugin_kwargs["num_steps"] = 7
    with pytest.raises(ValueError, match="cpu=True"):
        accelerate.Accelerator(cpu=True)


@twice
def test_patched_packages(time):
    pytest.importorskip("trl", reason="the patched package is TRL")
    from trl.trainer import utils

    from liger_rl.integrations.trl import patch_trl

    assert isinstance(utils._ChunkedLogProbFunction, type)  # TRL's class; ours is an instance
    patch_trl()
    assert not isinstance(utils._ChunkedLogProbFunction, type)
