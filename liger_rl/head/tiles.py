"""The default sizes of tiles of logits."""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.head.head_options import HeadOptions
from liger_rl.kernels.limits import LIMITS
from liger_rl.kernels.statistics import BLOCK_VOCAB

# Of a tile, unless `chunk_tokens` says another number.
MOST_TOKENS = {"cuda": 8192, "cpu": 512}
VOCAB_ALIGNMENT = BLOCK_VOCAB


class Tiles(NamedTuple):
    """Upper bounds of a tile's sides."""

    tokens: int
    vocab: int


def plan_tiles(
    tokens: int, vocab: int, hidden_size: int, device: torch.device, options: HeadOptions, *, bytes_per_logit: int
) -> Tiles:
    """Tiles for which t v bytes_per_logit + 4 v H <= LIMITS.workspace_bytes, for t tokens and v vocabulary entries.

    The second term is a float32 copy of a weight tile (v, H). A tile may be larger if `options` names a chunk, or
    because v is at least VOCAB_ALIGNMENT (or V, if V is smaller).
    """
    kind = kind_of(device)
    most_tokens = max(1, min(options.chunk_tokens or MOST_TOKENS[kind], tokens))
    if options.chunk_vocab is not None:
        return Tiles(most_tokens, min(options.chunk_vocab, vocab))
    bytes_per_column = most_tokens * bytes_per_logit + 4 * hidden_size
    columns = LIMITS.workspace_bytes[kind] // bytes_per_column // VOCAB_ALIGNMENT * VOCAB_ALIGNMENT
    return Tiles(most_tokens, min(max(columns, VOCAB_ALIGNMENT), vocab))


def kind_of(device: torch.device) -> str:
    """Key of sizes that depend on the device: "cuda" or "cpu"."""
    return device.type if device.type in MOST_TOKENS else "cpu"


def take_span(values: Tensor, first: int, last: int) -> Tensor:
    """values[first:last]. All of it is `values` itself, because a view takes as much host time as a small kernel."""
    return values if last - first == values.shape[0] else values[first:last]


def spans(total: int, step: int) -> list[tuple[int, int]]:
    """[0, total) in pieces of `step`, the last one shorter: spans(5, 2) = [(0, 2), (2, 4), (4, 5)]."""
    if 0 < total <= step:
        return [(0, total)]
    return [(start, min(start + step, total)) for start in range(0, total, max(step, 1))]
