"""The sizes that decide how a call is cut into tiles and pieces, and that tests make small.

Code reads them when it runs, as `LIMITS.workspace_bytes`, and keeps no result that depends on them. Sizes that nobody
changes stay where they are used.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Launch:
    """The shape of a program of `segment_sums_triton`."""

    slots: int  # gathered rows of a step
    columns: int  # most columns of a step
    warps: int
    piece: int  # positions of a segment that the segment's own program takes
    segments: int = 1  # segments of a program


@dataclass(slots=True)
class Limits:
    """A dict has a size for each of "cuda" and "cpu"; `head.tiles.kind_of` gives the key of a device."""

    # Bytes of one tile of logits if the caller names no chunk. Products run at full speed in it, and it is small
    # compared to the memory of a training step. On one H200 (bf16, N = 8192, H = 4096, V = 128256, float32 tiles)
    # forward and backward took 54.7 ms with it. Other tiles of 4096 x 8192 to 8192 x 16384 took up to 57.9 ms, and
    # 4096 x 4096 took 60.9 ms.
    workspace_bytes: dict[str, int] = field(default_factory=lambda: {"cuda": 320 << 20, "cpu": 24 << 20})

    # Tokens from which on a backward runs our own product. With fewer it is no faster. The fold is, for any number. One
    # H100, V = 151936, H = 1024 and 4096, in ms: 16 tokens 0.15 and 0.49, in tiles of logits 0.28 and 0.66; 384 tokens
    # 0.24 and 0.76, in tiles of logits 0.44 and 0.98.
    product_tokens: int = 512

    # Bytes of the statistics of all vocabulary tiles in our own product. With more tokens it is launched several times.
    statistics_bytes: int = 48 << 20

    # Tiles of a step of the kernel that merges folds. With few tokens only wide steps keep an H200 busy: merging 501
    # tiles of 3564 tokens takes 8 us, and 17 us with 32 tokens, 32 tiles and 4 warps.
    merge_tiles: int = 128

    # Tokens of a step of the kernel that selects the tokens that count.
    select_tokens: int = 4096

    # Sums over segments. docs/notes/kernels.md has the times of these shapes and of others. A sampler's rows are seldom
    # longer than the piece of `by_token`. If none is, `_pieces_kernel` is not launched.
    by_token: Launch = Launch(slots=8, columns=1024, warps=4, piece=512)
    # Short pieces, because the programs of a few tokens with thousands of ids would run long after all others. One slab
    # of columns runs after the other, and the weight's slab of 128 columns fits the cache. One H100, H = 4096, 300 ids
    # a token: 3.3 ms; slabs of 1024 columns took 6.5 ms.
    by_long_token: Launch = Launch(slots=32, columns=128, warps=1, piece=64)
    # Four segments for each program, because there are many ids, and most of them are in no row.
    by_id: Launch = Launch(slots=2, columns=1024, warps=4, piece=64, segments=4)
    # Entries, or ids, of a program that sorts entries by their ids.
    sorted_ids: int = 512
    # Listed ids of a step, for each warp, of the kernel that makes a token's slots.
    row_ids: int = 256


LIMITS = Limits()
