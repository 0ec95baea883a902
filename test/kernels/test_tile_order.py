"""The order in which products take their tiles, on CPU in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
import triton
import triton.language as tl

from liger_rl.kernels.tile_epilogues import TOKEN_GROUP_BYTES, tile_coordinates, token_group_size

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TILE_TOKENS = 128


@triton.jit
def _order_kernel(places, shared, token_tiles, vocab_tiles, hidden_size, TILE_TOKENS: tl.constexpr):
    group_size = token_group_size(token_tiles, TILE_TOKENS * hidden_size)
    tl.store(shared, group_size)
    for tile in range(token_tiles * vocab_tiles):
        token_tile, vocab_tile = tile_coordinates(tile, token_tiles, vocab_tiles, group_size)
        tl.store(places + 2 * tile, token_tile)
        tl.store(places + 2 * tile + 1, vocab_tile)


@pytest.mark.parametrize(("token_tiles", "vocab_tiles", "hidden_size", "group_size"), [
    (1, 1, 64, 1),
    (1, 5, 4096, 1),
    (7, 3, 1, 7),
    (16, 3, 4096, 16),  # just what fits
    (17, 3, 4096, 9),  # and one more: 9 and 8
    (18, 1, 4096, 9),
    (10, 4, 16384, 4),  # 4, 4 and 2
    (9, 4, 16384, 3),
    (5, 3, 65544, 1),  # of which not even one fits
])  # fmt: skip
def test_every_tile_is_taken_once_and_neighbours_share(token_tiles, vocab_tiles, hidden_size, group_size):
    places = torch.full((token_tiles * vocab_tiles, 2), -1, dtype=torch.int32, device=DEVICE)
    shared = torch.zeros((), dtype=torch.int32, device=DEVICE)
    _order_kernel[(1,)](places, shared, token_tiles, vocab_tiles, hidden_size, TILE_TOKENS)
    assert shared.item() == group_size
    assert group_size == 1 or group_size * TILE_TOKENS * hidden_size * 2 <= TOKEN_GROUP_BYTES.value
    groups = torch.arange(token_tiles).split(group_size)
    expected = [(row, column) for group in groups for column in range(vocab_tiles) for row in group.tolist()]
    assert list(map(tuple, places.tolist())) == expected
