"""Options of the head that change how, not what is computed: `fixed_shape` and `weight_grad`.

Their values are the fuzzer's, properties of every call test_properties.py's.
"""

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
    PRESETS,
    FusedLinearGRPOLoss,
    Segments,
    TopEntropyMask,
    grpo_loss_from_logits,
    linear_logprobs,
)

# --- losses with fixed_shape never wait for the device ----------------------------------------------------------------

LOSSES = {name: {"loss_type": name, "beta": 0.1} for name in PRESETS if name not in ("dr_grpo", "dro")}
LOSSES["metrics, entropy"] = {
    "loss_type": "dapo",
    "metrics": "with_entropy",
    "entropy_coef": 0.1,
    "corrections": [TopEntropyMask(top_entropy_quantile=0.5)],
}
LOSSES["packed"] = {"loss_type": "gspo", "metrics": "basic"}


@pytest.mark.parametrize("name", [*LOSSES, "from logits"])
def test_losses_never_wait(name, device):
    packed = name == "packed"
    x = batch((24,) if packed else (3, 7), device=device).leaves(("hidden", "weight", "logits"))
    shape = x.mask.shape
    columns = {"old_per_token_logps": torch.full(shape, -4.0, device=device)}
    columns["ref_per_token_logps"] = torch.full(shape, -4.5, device=device)
    if packed:
        columns["segments"] = Segments(index=torch.arange(24, device=device) // 6, count=4)

    def loss():
        given = x.targets, x.advantages, x.mask
        if name == "from logits":
            return grpo_loss_from_logits(x.logits, *given, beta=0.1, fixed_shape=True, **columns).loss.sum()
        return FusedLinearGRPOLoss(**LOSSES[name], fixed_shape=True)(x.hidden, x.weight, *given, **columns).loss

    loss().backward()  # compiles what there is to compile
    with host_reads(device) as reads:
        value = loss()
        value.backward()
    assert reads.names == []
    assert value.isfinite()


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


@pytest.mark.parametrize("rank", [0, 2])
def test_it_may_be_the_weights_own_gradient(rank, device):
    inputs = problem(rank=rank, device=device)
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
