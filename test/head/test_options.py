"""How often the host waits for the device at the size of a training step."""

import torch

from devices import NEEDS_GPU
from head_calls import (
    batch,
    functional,
)
from host_reads import host_reads
from liger_rl import (
    linear_logprobs,
)


@NEEDS_GPU
def test_host_reads_at_the_size_of_a_training_step():
    device = torch.device("cuda")
    x = batch((4, 512), 256, 5000, torch.bfloat16, device).leaves(("hidden", "weight"))

    def logps():
        return linear_logprobs(x.hidden, x.weight, x.targets, mask=x.mask).logps

    functional(logps()).backward()
    with host_reads(device) as forward:
        values = logps()
    total = functional(values)
    with host_reads(device) as backward:
        total.backward()
    assert len(forward.names) == 1
    assert len(backward.names) == 1
