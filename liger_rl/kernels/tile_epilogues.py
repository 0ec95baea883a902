"""Epilogues of one head: what a product's kernel does with a tile of logits in registers, as Triton functions."""

import triton
import triton.language as tl

from liger_rl.kernels.matrix_triton import store
from liger_rl.kernels.softmax_triton import (
    LN_2,
    LOG2_E,
    LOWEST,
    LOWEST_LOG_PROBABILITY,
    PORTABLE,
    cap_left,
    divide_by_temperature,
    exp_of_difference,
    exp_of_steps,
    flushed_exp,
    gradient,
    times_derivative,
    token_terms,
    transform_logits,
    with_uniform,
)

# Bits of a variant of `fold_tile`: softcap / temperature is at most `epilogue.MAX_EPILOGUE_CAP`; registers are few,
# as before Hopper.
CAP_BIT, REGISTERS_BIT = tl.constexpr(1), tl.constexpr(2)
LAST_COLUMN = tl.constexpr(2**30)  # behind those of any tile
# Hidden states that stay in the cache while the whole vocabulary goes by. On an H200 (a cache of 50 MB) 16 MB gave
# the fastest fold of 4, 8, 16 and 32 MB at H = 4096, and 8 and 16 MB at H = 2048. A fixed 8 tiles took 2% more time.
TOKEN_GROUP_BYTES = tl.constexpr(16 << 20)


@triton.jit
def token_group_size(token_tiles, tile_numbers):
    """-> how many token tiles, of so many 16-bit numbers each, share a weight tile in the cache: near-equal groups."""
    most = max(TOKEN_GROUP_BYTES // 2 // tile_numbers, 1)
    return tl.cdiv(token_tiles, tl.cdiv(token_tiles, most))


@triton.jit
def tile_coordinates(tile, token_tiles, vocab_tiles, group_size):
    """-> (token tile, vocabulary tile). Neighbours share weight tiles, see `token_group_size`."""
    group_tiles = group_size * vocab_tiles
    first = (tile // group_tiles) * group_size
    size = min(token_tiles - first, group_size)
    return first + (tile % group_tiles) % size, (tile % group_tiles) // size


@triton.jit
def target_column(targets, token, live, first):
    """-> the column of a token's target, counted from id `first`, in 32 bits; -1 for every smaller target.

    With the ids' 64 bits each comparison with a column would take two instructions.
    """
    target = tl.load(targets + token, mask=live, other=-1) - first
    return tl.minimum(tl.maximum(target, -1), LAST_COLUMN).to(tl.int32)


@triton.jit
def halves(tile):
    """-> left and right half of a tile (M, N)."""
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def pick_slice(tile, SLICE: tl.constexpr, SLICES: tl.constexpr):
    """-> the columns of one of 1, 2, 4 or 8 slices of a tile. Each slice has registers of its own."""
    if SLICES > 1:
        left, right = halves(tile)
        tile = right if SLICE >= SLICES // 2 else left
    if SLICES > 2:
        left, right = halves(tile)
        tile = right if SLICE % (SLICES // 2) >= SLICES // 4 else left
    if SLICES > 4:
        left, right = halves(tile)
        tile = right if SLICE % 2 else left
    return tile


@triton.jit
def pick_column(tile, column, HALVINGS: tl.constexpr):
    """-> (M,) the numbers of a tile (M, N) at `column` (M,), anything outside of [0, N); N is a power of two.

    It chooses between halves as long as both are on the same threads. On AMD they never are.
    """
    for _level in tl.static_range(0 if PORTABLE else HALVINGS):
        left, right = halves(tile)
        tile = tl.where(((column & left.shape[1]) != 0)[:, None], right, left)
    place = tl.arange(0, tile.shape[1])
    return tl.sum(tl.where(place[None, :] == (column & (tile.shape[1] - 1))[:, None], tile, 0.0), 1)


@triton.jit
def fold_tile(
    logits,  # (TILE_TOKENS, TILE_VOCAB) float32
    token,  # (TILE_TOKENS,) indices of the tokens, from `first_token` on
    target,  # (TILE_TOKENS,) column of each token's target, see `target_column`
    first_token, vocab_tile, tokens, vocab,
    tiles,  # `Fold` of the tiles, (vocabulary tiles, tokens), but target (tokens,)
    out,  # None: the fold stores no tile
    steps,
    VARIANT: tl.constexpr,  # CAP_BIT + REGISTERS_BIT
    WHOLE: tl.constexpr,
    SLICES: tl.constexpr,  # of the tile's columns
):  # fmt: skip
    """Write the fold of one tile of logits.

    Exponentials are made of one slice of the tile after the other, so that they fit the registers.
    """
    CAPPED: tl.constexpr = CAP_BIT & VARIANT != 0
    FEW_REGISTERS: tl.constexpr = REGISTERS_BIT & VARIANT != 0
    TILE_VOCAB: tl.constexpr = logits.shape[1]
    column = tl.arange(0, TILE_VOCAB)
    live = token < tokens
    inside = (column < vocab - vocab_tile * TILE_VOCAB)[None, :]
    place = vocab_tile.to(tl.int64) * tokens + token
    if tiles.sum_logits is not None:
        z, _ = transform_logits(logits, steps)
        tl.store(tiles.sum_logits + place, tl.sum(z if WHOLE else tl.where(inside, z, 0.0), 1), mask=live)
    full = 0.0
    # `level` is cap - z in units of the cap, or z itself.
    if CAPPED:
        full = steps.cap
        if steps.inverse is not None:
            full = divide_by_temperature(full, steps)
        level = cap_left(logits, steps.gain)
        if not WHOLE:
            level = tl.where(inside, level, float("inf"))
        least = tl.min(level, 1)
        peak = tl.maximum(_under_cap(least, full), LOWEST)
    else:
        level, _ = transform_logits(logits, steps)
        if not WHOLE:
            level = tl.where(inside, level, float("-inf"))
        # The lowest finite number where every id is banned: -inf minus -inf is NaN.
        peak = tl.maximum(tl.max(level, 1), LOWEST)
    tl.store(tiles.peak + place, peak, mask=live)
    # If registers are short, the target comes before the exponentials, so that these may overwrite the logits.
    FIRST: tl.constexpr = FEW_REGISTERS or PORTABLE
    if FIRST:
        _fold_target(level, token, target, column, live, place, tiles, full, CAPPED, FEW_REGISTERS)
    total, moment, squares = 0.0, 0.0, 0.0
    for part in tl.static_range(SLICES):
        part_level = pick_slice(level, part, SLICES)
        if CAPPED:
            # A number for every row, of whatever layout the rows have.
            exp, exponent, factor, rest = exp_of_steps(part_level, least, 0.0 * least - full * LOG2_E)
        else:
            exp, exponent, factor, rest = exp_of_difference(part_level, peak)
        if tiles.moment is not None:
            # No capped id is banned, and no column of a whole tile is past the last id.
            if not (CAPPED and WHOLE):
                exponent = tl.maximum(exponent, LOWEST_LOG_PROBABILITY)
            moment += tl.sum(exp * exponent, 1)
        total += tl.sum(exp, 1)
        if tiles.sum_sq_exp is not None:
            squares += tl.sum(exp * exp, 1)
    tl.store(tiles.sum_exp + place, total * factor, mask=live)
    if tiles.moment is not None:
        tl.store(tiles.moment + place, (moment - total * rest) * (factor * LN_2), mask=live)
    if tiles.sum_sq_exp is not None:
        tl.store(tiles.sum_sq_exp + place, squares * (factor * factor), mask=live)
    if not FIRST:
        _fold_target(level, token, target, column, live, place, tiles, full, CAPPED, FEW_REGISTERS)


@triton.jit
def _fold_target(
    level, token, target, column, live, place, tiles, full, CAPPED: tl.constexpr, FEW_REGISTERS: tl.constexpr,
):  # fmt: skip
    """The target's logit, and the largest before it."""
    # Before Hopper a product spreads 32 of 256 columns over the threads.
    target_z = pick_column(level, target, 3 if FEW_REGISTERS else 5)
    if CAPPED:
        target_z = _under_cap(target_z, full)
    tl.store(tiles.target + token, target_z, mask=live & (target >= 0) & (target < level.shape[1]))
    if tiles.peak_before is not None:
        before = column[None, :] < target[:, None]
        if CAPPED:
            peak_before = _under_cap(tl.min(tl.where(before, level, float("inf")), 1), full)
        else:
            peak_before = tl.max(tl.where(before, level, float("-inf")), 1)
        tl.store(tiles.peak_before + place, peak_before, mask=live)


@triton.jit
def _under_cap(left, full):
    """-> z, from the fraction of the cap that it leaves."""
    return tl.fma(-left, full, full)


@triton.jit
def grad_tile(
    logits, token, target, first_token, vocab_tile, tokens, vocab,  # as in `fold_tile`
    gradients,  # `TokenGradients`, (tokens,) each
    out,  # a `matrix` (tokens, vocab)
    steps,
    VARIANT: tl.constexpr, WHOLE: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Write dL/dlogits of one tile. Rows past the last token and columns past the last id are noise."""
    live = token < tokens
    ENTROPY: tl.constexpr = gradients.grad_entropy is not None
    for part in tl.static_range(SLICES):
        x = pick_slice(logits, part, SLICES)
        column = part * x.shape[1] + tl.arange(0, x.shape[1])
        z, square = transform_logits(x, steps)
        log_p = z - tl.load(gradients.lse + token, mask=live, other=0.0)[:, None]
        p = flushed_exp(log_p)
        g, e, entropy = token_terms(gradients, token, live)
        if ENTROPY:
            e = e[:, None]
            entropy = entropy[:, None]
        if gradients.at_target is not None:
            hit = column[None, :] == target[:, None]
            at_target = tl.load(gradients.at_target + token, mask=live, other=0.0)[:, None]
        else:
            hit = None
            at_target = None
        grad = gradient(p, log_p, hit, at_target, g[:, None], e, entropy, ENTROPY)
        grad = times_derivative(with_uniform(grad, gradients, token[:, None], live[:, None]), square, steps)
        store(out, first_token, vocab_tile * logits.shape[1] + part * x.shape[1], grad)
