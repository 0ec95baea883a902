"""Options of the head that change how, not what is computed: `fixed_shape`, `weight_grad`, and a temperature for each
token. Their values are the fuzzer's, properties of every call test_properties.py's.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from devices import NEEDS_GPU
from head_calls import (
    assert_close,
    batch,
    call,
    finish,
    functional,
    problem,
    run_triton,
    solve,
    truth,
)
from host_reads import host_reads
from liger_rl import (
    PRESETS,
    FusedLinearGRPOLoss,
    LogitTransform,
    Segments,
    TopEntropyMask,
    grpo_loss_from_logits,
    linear_logprobs,
    plan_linear_logprobs,
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


# --- a temperature for each token -------------------------------------------------------------------------------------


def test_a_tolerance_computes_exactly(device):
    """And the plan says why."""
    transform = LogitTransform(temperature=0.5 + torch.rand(23, device=device))
    leaves = [problem((23,), device=device).leaves() for _ in range(2)]
    options = {"transform": transform, "entropy": True}
    found, exact = (finish(call(x, **options, grad_tolerance=t), x) for x, t in zip(leaves, (0.1, 0.0), strict=True))
    assert_close(found, exact, 1e-6)
    plan = plan_linear_logprobs(4096, 129, 16, device="cuda", transform=transform, grad_tolerance=0.1)
    assert plan.path == "two passes"
    assert "one temperature for all tokens" in plan.reason


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_in_the_products_epilogue(softcap, monkeypatch):
    """Forward and backward without tiles of logits: the float64 values, and gradients beside those of tiles."""
    on_gpu = torch.cuda.is_available()
    dtype, tokens = (torch.bfloat16, 900) if on_gpu else (torch.float16, 9)
    if not on_gpu:
        run_triton(monkeypatch, epilogue=True)
    epilogue = pytest.importorskip("liger_rl.kernels.epilogue")
    inputs = problem((tokens,), 64, 700, dtype, "cuda" if on_gpu else "cpu", bias=True)
    heats = torch.rand(tokens, device=inputs.hidden.device) + 0.4
    transform = LogitTransform(temperature=heats, softcap=softcap)
    folds, gradients = [], []
    for name, calls in (("gemm_fold", folds), ("gemm_grad", gradients)):
        kernel = getattr(epilogue, name)
        monkeypatch.setattr(
            epilogue, name, lambda *a, kernel=kernel, calls=calls, **k: calls.append(1) or kernel(*a, **k)
        )
    found = solve(inputs, transform=transform)
    assert folds
    assert gradients
    exact = truth(inputs, temperature=heats[:, None].double(), softcap=softcap)
    tiles = solve(inputs, transform=transform, chunk_vocab=700)
    assert len(folds) == 1
    torch.testing.assert_close(found[0].double(), exact[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1].double(), exact[1], rtol=1e-4, atol=1e-4)
    for name, mine in found[-1].items():
        expected = exact[-1][name]
        error, other = ((x[-1][name].double() - expected).norm() / expected.norm() for x in (found, tiles))
        assert mine is not None
        assert error < 2 * other + 1e-3
