"""Tiles of logits: how large they are where nobody says it."""

from typing import NamedTuple

import torch

from liger_rl.call.options import EngineOptions
from liger_rl.kernels.statistics import BLOCK_TOKENS, BLOCK_VOCAB

# Working memory of one pass where the caller names no chunk: large enough that the products run at full speed, small
# beside what a training step holds anyway. On one H200 (bf16, N = 8192, H = 4096, V = 128256, float32 tiles) this
# choice took 54.7 ms forward and backward, other tiles of 4096 x 8192 to 8192 x 16384 up to 57.9, 4096 x 4096 60.9.
WORKSPACE_BYTES = {"cuda": 320 << 20, "cpu": 24 << 20}
MAX_CHUNK_TOKENS = {"cuda": 8192, "cpu": 512}
CHUNK_ALIGNMENT = BLOCK_VOCAB
# Where gradients cannot have the memory of the exponentials, the vocabulary is cut into about so many tiles.
VOCAB_TILES = 16


class Tiles(NamedTuple):
    """Upper bounds of a tile's sides."""

    tokens: int
    vocab: int


def plan_tiles(
    tokens: int, vocab: int, hidden_size: int, device: torch.device, options: EngineOptions, *, bytes_per_logit: int
) -> Tiles:
    """Tiles whose logits, gradients and per-tile float32 copies of a weight tile fit the workspace."""
    kind = kind_of(device)
    chunk_tokens = options.chunk_tokens or MAX_CHUNK_TOKENS[kind]
    chunk_tokens = max(1, min(chunk_tokens, tokens))
    if options.chunk_vocab is not None:
        return Tiles(chunk_tokens, min(options.chunk_vocab, vocab))
    bytes_per_column = chunk_tokens * bytes_per_logit + 4 * hidden_size
    columns = WORKSPACE_BYTES[kind] // bytes_per_column // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT
    return Tiles(chunk_tokens, min(max(columns, CHUNK_ALIGNMENT), vocab))


def free_tile_vocab(vocab: int) -> int:
    return -(-vocab // (VOCAB_TILES * CHUNK_ALIGNMENT)) * CHUNK_ALIGNMENT


def whole_waves(tokens: int, columns: int, programs: int) -> int:
    """At most so many columns, and at least half of them, whose tiles keep all programs busy to the end."""
    rows, most = -(-tokens // BLOCK_TOKENS), max(columns // BLOCK_VOCAB, 1)

    def busy(tiles: int) -> float:
        work = rows * tiles
        return round(work / (-(-work // programs) * programs), 2)

    return BLOCK_VOCAB * max(range(-(-most // 2), most + 1), key=lambda tiles: (busy(tiles), tiles))


def kind_of(device: torch.device) -> str:
    """Key of the constants above."""
    return device.type if device.type in WORKSPACE_BYTES else "cpu"


def spans(total: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, total)) for start in range(0, total, max(step, 1))]
