"""Per-token losses and gradients against a Helion kernel: Helion's interpreter on CPU, compiled on CUDA."""

import pytest
import torch

from liger_rl.fused_linear import grpo_loss_from_logits

helion_rows = pytest.importorskip(
    "benchmark.peers.helion_rows", reason="the benchmark is not part of an installed package"
)
Options = helion_rows.Options

pytestmark = pytest.mark.skipif(helion_rows.available() is not None, reason=helion_rows.available() or "")

# (B, L, V); on CUDA one that Helion's own example checks; several tiles of the vocabulary, the last of them not full.
SHAPES = {"one tile": {"cpu": (4, 8, 64), "cuda": (2, 64, 128)}, "tiles": dict.fromkeys(("cpu", "cuda"), (2, 6, 9001))}
LOSS_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-3}
# (rtol, atol). Both are computed in float32 and rounded once: in bfloat16 to neighbours at most, 2^-7 apart.
GRADIENT_TOLERANCE = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (2**-7, 1e-6)}


def theirs(logits, ids, advantages, mask, old, ref, options):
    return helion_rows.helion_grpo_loss(logits, ids, old, ref, advantages, mask, options)


def ours(logits, ids, advantages, mask, old, ref, options):
    bounds = {"epsilon_low": options.eps_low, "epsilon_high": options.eps_high}
    columns = {"old_per_token_logps": old, "ref_per_token_logps": ref}
    more = {"temperature": options.temperature, "beta": options.beta, **bounds, **columns}
    return grpo_loss_from_logits(logits, ids, advantages, mask, **more)


@pytest.mark.parametrize(("shape", "beta"), [("one tile", 0.04), ("one tile", 0.0), ("tiles", 0.04)])
@pytest.mark.parametrize("dtype", LOSS_TOLERANCE)
def test_values_and_gradients_agree(dtype, shape, beta, device):
    (batch, length, vocab), options = SHAPES[shape][device.type], Options(beta=beta)
    logits, ids = (2 * torch.randn(batch, length + 1, vocab)).to(dtype), torch.randint(vocab, (batch, length))
    logps = torch.log_softmax(logits[:, :-1].float() / options.temperature, -1)
    now = logps.gather(-1, ids[..., None]).squeeze(-1)
    # Far enough apart that both bounds are crossed, by advantages of both signs.
    old, ref = now + 0.4 * torch.randn(2, batch, length)
    mask = torch.rand(batch, length) < 0.8
    given = [x.to(device) for x in (ids, torch.linspace(-1.0, 1.0, batch), mask, old, ref)]
    given[-1] = given[-1] if beta else None
    weights, found = torch.linspace(-1.0, 2.0, mask.numel(), device=device).view_as(given[2]), []
    for function in (ours, theirs):
        leaf = logits.to(device).requires_grad_()
        result = function(leaf, *given, options)
        found.append((result, *torch.autograd.grad((result.loss * weights).sum(), leaf)))
    (mine, grad), (other, other_grad) = found
    for name in ("loss", "kl") if beta else ("loss",):
        values = [getattr(result, name) for result in (mine, other)]
        torch.testing.assert_close(*values, rtol=LOSS_TOLERANCE[dtype], atol=LOSS_TOLERANCE[dtype])
        assert values[1].abs().max() > 0.1
    assert beta or mine.kl is other.kl is None
    assert mine.loss.dtype == other.loss.dtype == torch.float32
    # Ours is where the gradient is cut, Helion's where the other bound is crossed.
    assert not (mine.is_clipped & other.is_clipped).any()
    assert other.is_clipped.any() or shape == "tiles"
    rtol, atol = GRADIENT_TOLERANCE[dtype]
    torch.testing.assert_close(grad, other_grad, rtol=rtol, atol=atol)
    assert other_grad[:, :-1][given[2]].abs().amax() > 0.1
    masked = ~given[2]
    assert not other.is_clipped[masked].any()
    for part in (grad, other_grad):
        assert not part[:, -1].any()
        assert not part[:, :-1][masked].any()
