"""Upper bounds of a gradient's blocks from the forward's statistics, in plain PyTorch, on any device.

With g = dL/dlogp, e = dL/dentropy and p the softmax,

    dL/dz_v = g (1[v=y] - p_v) - e p_v (log p_v + entropy),    dL/dx_v = dL/dz_v dz/dx,    |dz/dx| <= scale / temperature

The constant scale / temperature is left out on both sides of the comparison.
"""

import math

import torch
from torch import Tensor

from liger_rl.kernels.statistics import (
    BLOCK_TOKENS,
    BLOCK_VOCAB,
    TileBounds,
    TileStatistics,
    TokenGradients,
    TokenStatistics,
)
from liger_rl.kernels.transform import LogitTransform

STEPS_PER_OCTAVE = 4
LARGEST_CODE = 255
# What float32 loses on the way to a bound, added to it: in nats, absolute and relative to the size of the logits.
ROUNDING_NATS, ROUNDING_OF_LSE = 2e-3, 2e-6
ROUNDING_OF_SUM = 2.0**-16  # BLOCK_VOCAB terms of relative rounding 2^-24 each
ROUNDING_OF_DERIVATIVE = 1e-5


def tile_bounds(
    tiles: TileStatistics,
    statistics: TokenStatistics,  # (n,) each
    targets: Tensor,  # (n,)
    transform: LogitTransform,
    out: TileBounds,
) -> None:
    """Write the bounds of n tokens."""
    lse, entropy = statistics.lse, statistics.entropy
    log_peak = tiles.peaks - lse
    log_mass = log_peak + tiles.sums.log()
    slack = ROUNDING_NATS + ROUNDING_OF_LSE * lse.abs()
    out.codes.copy_(_encoded(log_peak + log_mass, slack))

    target_tile = (targets // BLOCK_VOCAB)[None]
    peak_there, sum_there = (part.gather(0, target_tile).squeeze(0) for part in tiles)
    target_term = (statistics.logps + lse - peak_there).exp()
    others = ((sum_there - target_term).clamp_(min=0.0) + ROUNDING_OF_SUM * sum_there) * (1.0 + slack)
    log_others = (peak_there - lse) + others.log()
    log_largest = torch.minimum(peak_there - lse, log_others)
    out.beside_target.copy_((log_largest + log_others + slack).exp())

    largest = log_peak.exp()
    if transform.softcap is not None:
        largest = largest * derivative(tiles.peaks, transform)
    energy = largest.square()
    out.elsewhere.copy_(energy.scatter(0, target_tile, 0.0).sum(0).mul_(1.0 - slack))

    if out.entropy_codes is not None and out.entropy_beside_target is not None and entropy is not None:
        out.entropy_codes.copy_(_encoded(log_mass + _log_supremum(log_peak, entropy), slack))
        out.entropy_beside_target.copy_((log_others + _log_supremum(log_largest, entropy) + slack).exp())


def _encoded(log_energy: Tensor, slack: Tensor) -> Tensor:
    steps = (log_energy + slack) * (-STEPS_PER_OCTAVE / math.log(2.0))
    return steps.floor_().clamp_(0, LARGEST_CODE).to(torch.uint8)


def _decoded(codes: Tensor) -> Tensor:
    return torch.exp2(codes.float() * (-1.0 / STEPS_PER_OCTAVE))


def _log_supremum(log_p: Tensor, entropy: Tensor) -> Tensor:
    """log of the supremum of p (log p + entropy)^2 over 0 < p <= exp(log_p)."""
    value = log_p + 2.0 * (log_p + entropy).abs().log()
    # Its one local maximum, 4 exp(-entropy - 2), is at log p = -entropy - 2.
    hill = math.log(4.0) - 2.0 - entropy
    return torch.where(log_p >= -entropy - 2.0, torch.maximum(value, hill), value)


def derivative(z: Tensor, transform: LogitTransform) -> Tensor:
    """dz/dx without its constant scale / temperature, rounded down, of transformed logits under a softcap."""
    assert transform.softcap is not None
    tanh = z * (transform.temperature / transform.softcap)
    return (1.0 - tanh.square() - ROUNDING_OF_DERIVATIVE).clamp_(min=0.0)


def target_gradient(tokens: TokenGradients, logps: Tensor) -> Tensor:
    """(n,) dL/dz at the target."""
    if tokens.grad_entropy is None or tokens.entropy is None:
        return tokens.at_target
    return tokens.at_target - tokens.grad_entropy * logps.exp() * (logps + tokens.entropy)


def block_bounds(
    bounds: TileBounds,
    tokens: TokenGradients,  # (n,) each
    target_gradients: Tensor,  # (n,)
    targets: Tensor,  # (n,)
    order: Tensor,  # (n,) a permutation of the tokens, BLOCK_TOKENS at a time make a block
) -> Tensor:
    """(row blocks, tiles) float32, upper bounds of the sum of squares of dL/dx in each block."""
    energy = _combined(bounds.codes, bounds.entropy_codes, tokens)
    at_target = _beside(bounds.beside_target, bounds.entropy_beside_target, tokens) + target_gradients.square()
    energy.scatter_(0, (targets // BLOCK_VOCAB)[None], at_target[None])
    energy = energy[:, order]
    rows = -(-order.numel() // BLOCK_TOKENS)
    energy = torch.nn.functional.pad(energy, (0, rows * BLOCK_TOKENS - order.numel()))
    return energy.view(-1, rows, BLOCK_TOKENS).sum(-1).T.contiguous()


def _combined(codes: Tensor, entropy_codes: Tensor | None, tokens: TokenGradients) -> Tensor:
    if tokens.grad_entropy is None or entropy_codes is None:
        return _decoded(codes).mul_(tokens.grad_logps.square())
    amplitude = _decoded(codes).sqrt_().mul_(tokens.grad_logps.abs())
    # The triangle inequality, of two parts of one gradient.
    return amplitude.add_(_decoded(entropy_codes).sqrt_().mul_(tokens.grad_entropy.abs())).square_()


def _beside(energy: Tensor, entropy_energy: Tensor | None, tokens: TokenGradients) -> Tensor:
    amplitude = energy.sqrt() * tokens.grad_logps.abs()
    if tokens.grad_entropy is not None and entropy_energy is not None:
        amplitude = amplitude + entropy_energy.sqrt() * tokens.grad_entropy.abs()
    return amplitude.square()
