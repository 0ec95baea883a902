"""`weight_grad`, and the reads of the host."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from devices import NEEDS_GPU
from head_calls import (
    batch,
    call,
    functional,
    problem,
    solve,
)
from host_reads import host_reads
from liger_rl import (
    FusedLinearGRPOLoss,
    linear_logprobs,
)

# --- what the host reads ----------------------------------------------------------------------------------------------


@NEEDS_GPU
@pytest.mark.parametrize("tolerance", [0.0, 1e-2])
def test_host_reads_at_the_size_of_a_training_step(tolerance):
    device = torch.device("cuda")
    x = batch((4, 512), 256, 5000, torch.bfloat16, device).leaves(("hidden", "weight"))

    def logps():
        return linear_logprobs(x.hidden, x.weight, x.targets, mask=x.mask, grad_tolerance=tolerance).logps

    functional(logps()).backward()
    with host_reads(device) as forward:
        values = logps()
    total = functional(values)
    with host_reads(device) as backward:
        total.backward()
    assert len(forward.names) == 1
    assert len(backward.names) == 1


# --- the weight's gradient added to a float32 tensor in place ---------------------------------------------------------


def test_it_may_be_the_weights_own_gradient(device):
    inputs = problem(device=device)
    leaves = inputs.leaves()
    place = leaves.weight.grad = torch.ones((129, 16), device=device)
    functional(*call(leaves, entropy=True, weight_grad=place)[:2]).backward()
    assert leaves.weight.grad is place
    torch.testing.assert_close(place, solve(inputs).grads["weight"] + 1, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("of", ["weight", "hidden", "bias"])
@pytest.mark.parametrize("through", ["log-probabilities", "loss"])
def test_memory_of_an_input_is_refused(of, through):
    memory = torch.randn(200, 16)
    parts = {"weight": memory[:129], "hidden": memory[:15], "bias": memory.flatten()[:129]}
    inputs = {"weight": torch.randn((129, 16)), "hidden": torch.randn(15, 16), "bias": torch.randn(129), of: parts[of]}
    inputs = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    before, targets = memory.clone(), torch.arange(15)
    function: Callable = linear_logprobs
    if through == "loss":
        function = partial(FusedLinearGRPOLoss("gpg"), advantages=torch.ones(3))
        inputs["hidden"] = inputs["hidden"].view(3, 5, 16)
        targets = targets.view(3, 5)
    ids = {"targets" if through == "log-probabilities" else "selected_token_ids": targets}
    with pytest.raises(ValueError, match=rf"weight_grad must have memory of its own.*overlaps {of}"):
        function(**inputs, **ids, weight_grad=memory[:129])
    assert torch.equal(memory, before)
