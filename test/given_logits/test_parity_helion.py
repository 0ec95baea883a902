"""Per-token losses and gradients against a Helion kernel: Helion's interpreter on CPU, compiled on CUDA."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from liger_rl import grpo_loss_from_logits

helion_rows = pytest.importorskip(
    "benchmark.peers.helion_rows", reason="the benchmark is not part of an installed package"
)
Options = helion_rows.Options

pytestmark = pytest.mark.skipif(helion_rows.available() is not None, reason=helion_rows.available() or "")

SHAPES = {  # (B, L, V); on CUDA those that Helion's own example checks
    "values": {"cpu": (2, 16, 200), "cuda": (4, 512, 2048)},
    "gradients": {"cpu": (2, 8, 64), "cuda": (2, 64, 128)},
    "several tiles of the vocabulary": dict.fromkeys(("cpu", "cuda"), (2, 6, 9001)),  # the last of them not full
}
LOSS_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-3}
# (rtol, atol). Both are computed in float32 and rounded once: in bfloat16 to neighbours at most, 2^-7 apart.
GRADIENT_TOLERANCE = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (2**-7, 1e-6)}


class Problem(NamedTuple):
    logits: Tensor
    ids: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor
    mask: Tensor


def problem(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Problem:
    batch, length, vocab = shape
    logits = (torch.randn(batch, length + 1, vocab) * 2).to(dtype)
    ids = torch.randint(0, vocab, (batch, length))
    logps = torch.log_softmax(logits[:, :-1].float() / Options().temperature, -1)
    now = logps.gather(-1, ids[..., None]).squeeze(-1)
    # Far enough apart that both bounds are crossed, by advantages of both signs.
    old, ref = now + 0.4 * torch.randn(2, batch, length)
    advantages = torch.linspace(-1.0, 1.0, batch)
    mask = torch.rand(batch, length) < 0.8
    return Problem(*(column.to(device) for column in (logits, ids, old, ref, advantages, mask)))


def theirs(logits: Tensor, given: Problem, options: Options):
    ref = given.ref if options.beta else None
    return helion_rows.helion_grpo_loss(logits, given.ids, given.old, ref, given.advantages, given.mask, options)


def ours(logits: Tensor, given: Problem, options: Options):
    return grpo_loss_from_logits(
        logits,
        given.ids,
        given.advantages,
        given.mask,
        old_per_token_logps=given.old,
        ref_per_token_logps=given.ref if options.beta else None,
        temperature=options.temperature,
        epsilon_low=options.eps_low,
        epsilon_high=options.eps_high,
        beta=options.beta,
        clip_indicator="helion",
    )


def gradient(loss_of: Any, given: Problem, options: Options) -> Tensor:
    leaf = given.logits.detach().clone().requires_grad_()
    loss = loss_of(leaf, given, options).loss
    weights = torch.linspace(-1.0, 2.0, loss.numel(), device=loss.device).view_as(loss)
    (loss * weights).sum().backward()
    return leaf.grad


@pytest.mark.parametrize(
    ("shape", "beta"), [(shape, beta) for shape in SHAPES for beta in (0.04, 0.0) if beta or "tiles" not in shape]
)
@pytest.mark.parametrize("dtype", LOSS_TOLERANCE)
def test_values_and_gradients_agree(dtype, shape, beta, device):
    given, options = problem(SHAPES[shape][device.type], dtype, device), Options(beta=beta)
    mine, other = (found(given.logits, given, options) for found in (ours, theirs))
    tolerance = LOSS_TOLERANCE[dtype]
    torch.testing.assert_close(mine.loss, other.loss, rtol=tolerance, atol=tolerance)
    assert mine.loss.dtype == other.loss.dtype == torch.float32
    assert other.loss.abs().max() > 0.1
    if beta:
        torch.testing.assert_close(mine.kl, other.kl, rtol=tolerance, atol=tolerance)
        assert other.kl.abs().max() > 0.1
    else:
        assert mine.kl is None
        assert other.kl is None
    # A ratio within rounding of a bound may fall on either side of it.
    share = (mine.is_clipped != other.is_clipped).float().mean()
    assert share <= (0.0 if device.type == "cpu" else 1e-3)
    assert other.is_clipped.any() or shape != "values"
    assert not other.is_clipped[~given.mask].any()
    if shape == "values":
        return
    mine, other = (gradient(found, given, options) for found in (ours, theirs))
    assert mine.dtype == other.dtype == dtype
    rtol, atol = GRADIENT_TOLERANCE[dtype]
    torch.testing.assert_close(mine, other, rtol=rtol, atol=atol)
    assert other[:, :-1][given.mask].abs().amax() > 0.1
    for grad in (mine, other):
        assert (grad[:, -1] == 0).all()
        assert (grad[:, :-1][~given.mask] == 0).all()
