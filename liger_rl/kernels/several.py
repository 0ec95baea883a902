"""Several vocabulary entries a token, in plain PyTorch: the largest logits so far, and gradients put into a tile.

A logit and its id are one int64 key, by which keys are ordered as their logits are, and of equal logits the smaller id
is the larger key: the largest keys of a token are the same in whatever order tiles and ranks come.
"""

import torch
from torch import Tensor

from liger_rl.kernels.eager import transformed
from liger_rl.kernels.transform import LogitTransform

ID_BITS = 32
LARGEST_ID = (1 << ID_BITS) - 1
LEAST_KEY = -(1 << 63)


def no_keys(n: int, count: int, device: torch.device) -> Tensor:
    """(n, count) int64 under every key of a logit, and no two of a token the same."""
    return (LEAST_KEY + torch.arange(count, device=device)).repeat(n, 1)


def keys_of(z: Tensor, ids: Tensor) -> Tensor:
    """(n, v) float32 and (v,) int64 -> (n, v) int64. As with `torch.topk`, NaN is the largest."""
    bits = torch.where(z == 0, 0.0, z).view(torch.int32)  # 0 and -0 are the same
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << ID_BITS) | (LARGEST_ID - ids)


def taken_apart(keys: Tensor) -> tuple[Tensor, Tensor]:
    """-> float32 logits and int64 ids."""
    ordered = (keys >> ID_BITS).to(torch.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32), LARGEST_ID - (keys & LARGEST_ID)


def keep_largest(
    logits: Tensor,  # (n, v) float32
    first: int,  # vocabulary id of the tile's first column
    bias: Tensor | None,  # (v,)
    transform: LogitTransform,
    keys: Tensor,  # (n, K) int64, updated: the largest of all tiles so far, in any order
) -> None:
    ids = torch.arange(first, first + logits.shape[1], device=logits.device)
    found = keys_of(transformed(logits, bias, transform), ids)
    keys.copy_(torch.cat([keys, found], dim=1).topk(keys.shape[1], sorted=False).values)


def put(
    tile: Tensor,  # (n, v) any float dtype
    ids: Tensor,  # (n, K) int64; those outside of the tile are left out
    values: Tensor,  # (n, K) float32, the same number where a token's id is repeated
    first: int,  # id of the tile's first column
) -> None:
    """tile[i, ids[i, k] - first] = values[i, k]"""
    column = ids - first
    row, place = ((column >= 0) & (column < tile.shape[1])).nonzero(as_tuple=True)
    tile[row, column[row, place]] = values[row, place].to(tile.dtype)
