"""Exponentials of the logits, which a forward keeps so that the gradient needs no second product, in plain PyTorch.

A forward keeps exp(z - peak), with z the transformed logits, and in float32 the peak of each tile of vocabulary
entries. The probability of an entry is exp(z - peak) exp(peak - lse). The exponentials lie in [0, 1]. With bfloat16
factors they are float16: two bytes as well, and an eighth of the rounding. Multiplied by KEPT_ONE they use all
exponents of float16, and an exponential that underflows is under 2^-39 of the tile's largest. The gradient takes their
memory.

Under a softcap the gradient also needs z, the logarithm of a kept value plus the peak. The rounding u of a value is
2^-11 in float16. Then z is off by u, and dz/dx = 1 - (z temperature / softcap)^2 by at most
2 u temperature / softcap. One pass needs softcap >= temperature, so this error is smaller than that of rounding the
gradient to bfloat16, unless all likely ids are within 1% of the cap. The z of a tile's largest logit is exact, and so
is the target's, which the fold gives.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.kernels import eager
from liger_rl.kernels.devices import empty_rows
from liger_rl.kernels.statistics import KEPT_ONE, TokenGradients, TokenStatistics
from liger_rl.kernels.transform import LogitTransform


class Kept(NamedTuple):
    """The exponentials of n tokens over the whole vocabulary."""

    values: Tensor  # (n, V) float16 or float32, KEPT_ONE exp(z - peak)
    peaks: Tensor  # (tiles, n) float32, max_v z_v over a tile; the lowest finite number where every id is banned
    tile_vocab: int  # vocabulary entries in a tile, a power of two

    @classmethod
    def empty(cls, n: int, vocab: int, device: torch.device, compute_dtype: torch.dtype, tile_vocab: int) -> "Kept":
        dtype = torch.float32 if compute_dtype == torch.float32 else torch.float16
        values = empty_rows(n, vocab, dtype, device)
        return cls(values, torch.empty(-(-vocab // tile_vocab), n, dtype=torch.float32, device=device), tile_vocab)

    @staticmethod
    def bytes_per_token(vocab: int, compute_dtype: torch.dtype, tile_vocab: int) -> int:
        return vocab * compute_dtype.itemsize + 4 * -(-vocab // tile_vocab)

    def rows(self, rows: slice) -> "Kept":
        """Views of some tokens."""
        return Kept(self.values[rows], self.peaks[:, rows], self.tile_vocab)

    def from_column(self, first: int) -> tuple[Tensor, Tensor]:
        """Views of the values and peaks from the first column of a tile on."""
        return self.values[:, first:], self.peaks[first // self.tile_vocab :]


def keep(
    logits: Tensor,  # (n, v) float32
    first: int,  # vocabulary id of the first column; begins a tile
    bias: Tensor | None,  # (v,)
    transform: LogitTransform,
    kept: Kept,  # (n, V), columns `first` on are written
) -> None:
    z = eager.transformed(logits, bias, transform)
    columns, tile_vocab = z.shape[1], kept.tile_vocab
    z = torch.nn.functional.pad(z, (0, -columns % tile_vocab), value=-torch.inf).view(z.shape[0], -1, tile_vocab)
    peaks = z.amax(-1).clamp_(min=torch.finfo(torch.float32).min)
    tile = first // tile_vocab
    kept.peaks[tile : tile + peaks.shape[1]] = peaks.T
    kept.values[:, first : first + columns] = (z - peaks[..., None]).exp_().mul_(KEPT_ONE).flatten(1)[:, :columns]


def grad_at_targets(tokens: TokenGradients, statistics: TokenStatistics, transform: LogitTransform) -> Tensor:
    """(n,) float32 dL/dlogits at the targets, from the forward's statistics, which include the targets' logits.

    The exponential of a target may have underflowed, and its gradient is large then.
    """
    grad = eager.target_gradient(tokens, statistics.logps)
    if transform.softcap is not None:
        assert statistics.target is not None
        grad = grad * (1.0 - eager.tanh_square(statistics.target, transform))
    return grad * (transform.scale / transform.temperature)


def grad_kept(
    kept: Kept,
    rows: Tensor | None,  # (n,) positions of the tokens with a gradient among the kept ones; None is all
    first: int,  # vocabulary id of the first column of `out`; begins a tile
    targets: Tensor,  # (n,)
    transform: LogitTransform,
    tokens: TokenGradients,  # (n,) each; `at_target` is not read
    at_target: Tensor,  # (n,) as `grad_at_targets` gives it
    out: Tensor,  # (n, v) any float dtype; without `rows` it may be the memory of the same columns of the values
) -> None:
    values, peaks = kept.from_column(first)
    values, peaks = values[:, : out.shape[1]], peaks[: -(-out.shape[1] // kept.tile_vocab)]
    if rows is not None:
        values, peaks = values[rows], peaks[:, rows]
    exp, peaks = values.float() / KEPT_ONE, peaks.T.repeat_interleave(kept.tile_vocab, 1)[:, : out.shape[1]]
    # Any finite logarithm does where a value underflowed, because the probability is 0 there.
    log_exp = exp.log().clamp_(min=eager.LOWEST_LOG_PROBABILITY)
    lse = tokens.lse[:, None]
    p = (peaks - lse).exp_().mul_(exp)
    log_p = (log_exp + (peaks - lse)).clamp_(min=eager.LOWEST_LOG_PROBABILITY)
    grad_z = eager.grad_beside_targets(log_p, p, tokens)
    grad = eager.times_derivative(grad_z, log_exp + peaks, transform)
    eager.put_at_targets(grad, at_target, targets, first)
    out.copy_(grad)


def scale_(values: Tensor, factor: Tensor) -> None:
    """values *= factor, a () float32 tensor. With a factor of 1 a GPU does not read the values."""
    values.mul_(factor)
