"""What is made of a tile of logits while a product still has it in registers, as Triton functions.

Kernels of Triton and of Gluon call them: nothing in here says which thread has which number.
"""

import torch
import triton
import triton.language as tl

from liger_rl.kernels.tile_triton import (
    LN_2,
    LOG2_E,
    LOWEST_LOG_PROBABILITY,
    cap_left,
    exp_of_difference,
    exp_of_steps,
    flushed_exp,
    transformed,
)

LAST_WORD = tl.constexpr(2**30)  # behind those of any tile
# Rows of hidden states that stay in the cache while all of the vocabulary goes by. On one H200, whose cache has 50 MB,
# of 4, 8, 16 and 32 MB these had the fastest folds at H = 4096, and 8 and 16 MB at H = 2048: 2% less than 8 tiles of
# 128 tokens whatever their size, as long as the clock is bound by power, which memory takes too.
TOGETHER_BYTES = tl.constexpr(16 << 20)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def tokens_together(token_tiles, tile_numbers):
    """-> how many token tiles, of so many 16-bit numbers, share what is loaded of the vocabulary: as evenly many each
    time as goes."""
    most = tl.maximum(TOGETHER_BYTES // 2 // tile_numbers, 1)
    return tl.cdiv(token_tiles, tl.cdiv(token_tiles, most))


@triton.jit
def tile_place(tile, token_tiles, vocab_tiles, together):
    """-> (token tile, vocabulary tile) in an order in which neighbours share what they load, see `tokens_together`."""
    group_tiles = together * vocab_tiles
    first = (tile // group_tiles) * together
    size = min(token_tiles - first, together)
    return first + (tile % group_tiles) % size, (tile % group_tiles) // size


@triton.jit
def blocks_to_compute(kept, room, most_of_row, row_blocks):
    """-> the first so many of the kept blocks; none if a row of blocks has more than `most_of_row` on average."""
    return tl.where(kept > most_of_row * row_blocks, 0, tl.minimum(kept, room))


@triton.jit
def word_of(targets, token, live, first):
    """-> where a token's target is, counted from the word `first`, in 32 bits; before it all are -1.

    Ids have 64 bits, in which each of a tile's comparisons with its words would take two instructions.
    """
    target = tl.load(targets + token, mask=live, other=-1) - first
    return tl.minimum(tl.maximum(target, -1), LAST_WORD).to(tl.int32)


@triton.jit
def tile_gradient(
    logits, token, live, word, targets, first, lse_of, grad_logps, at_target, entropies, grad_entropies,
    gain, cap, inverse, inverse_rest, slope, SCALED: tl.constexpr, CAPPED: tl.constexpr, HEATED: tl.constexpr,
):  # fmt: skip
    """-> dL/dlogits of one tile in float32; what tokens that are not live and words past the last one get is noise.

    `word` counts the tile's from 0, and `first` is the id of that one.
    """
    z, square = transformed(logits, gain, cap, inverse, inverse_rest, SCALED, CAPPED, HEATED)
    log_p = z - tl.load(lse_of + token, mask=live, other=0.0)[:, None]
    p = flushed_exp(log_p)
    target = word_of(targets, token, live, first)
    g = tl.load(grad_logps + token, mask=live, other=0.0)
    g_target = tl.load(at_target + token, mask=live, other=0.0)
    grad = tl.where(word[None, :] == target[:, None], g_target[:, None], -g[:, None] * p)
    if entropies is not None:
        e = tl.load(grad_entropies + token, mask=live, other=0.0)
        entropy = tl.load(entropies + token, mask=live, other=0.0)
        grad -= e[:, None] * p * (tl.maximum(log_p, LOWEST_LOG_PROBABILITY) + entropy[:, None])
    grad *= slope
    if CAPPED:
        grad *= 1.0 - square
    return grad


@triton.jit
def halves(tile):
    """-> left and right half of a tile (M, N)."""
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def at_word(tile, word):
    """-> (M,) what a tile (M, N) has at `word` (M,), anything where that is not one of its words; N a power of two.

    Halves are chosen between until a row has a few numbers on each of few threads: 136 choices of a thread's 128
    numbers, where comparing, choosing and adding each of them takes 350 instructions.
    """
    for _level in tl.static_range(5):
        left, right = halves(tile)
        tile = tl.where(((word & left.shape[1]) != 0)[:, None], right, left)
    place = tl.arange(0, tile.shape[1])
    return tl.sum(tl.where(place[None, :] == (word & (tile.shape[1] - 1))[:, None], tile, 0.0), 1)


@triton.jit
def store(out, row, column, values):
    """To a descriptor."""
    out.store([row, column], values.to(out.dtype))


@triton.jit
def fold_tile(
    logits,  # (TILE_TOKENS, TILE_VOCAB) float32
    token,  # (TILE_TOKENS,) of these
    target,  # of each token, counted from the tile's first word, see `word_of`
    word,  # (TILE_VOCAB,) counted from 0
    first_token, vocab_tile, tokens, vocab,
    peaks, sums, moments, sums_sq, logit_sums, rivals, target_logits, kept,
    gain, cap, inverse, inverse_rest,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, HEATED: tl.constexpr, LEVELLED: tl.constexpr, WHOLE: tl.constexpr,
    STORE: tl.constexpr, AT_WORD: tl.constexpr,
):  # fmt: skip
    """Write what the fold leaves of one tile of logits, of tokens from `first_token` on.

    The arguments are those of `epilogue._gemm_fold_kernel`. STORE and AT_WORD are `store` and `at_word`, or what does
    the same where layouts have to be named.
    """
    TILE_VOCAB: tl.constexpr = logits.shape[1]
    live = token < tokens
    inside = (word < vocab - vocab_tile * TILE_VOCAB)[None, :]
    place = vocab_tile.to(tl.int64) * tokens + token
    if logit_sums is not None:
        z, _ = transformed(logits, gain, cap, inverse, inverse_rest, SCALED, CAPPED, HEATED)
        tl.store(logit_sums + place, tl.sum(z if WHOLE else tl.where(inside, z, 0.0), 1), mask=live)
    # Of each word a number that says how large its logit is: what it leaves of the cap, or z itself.
    full = cap
    if HEATED:
        full = tl.fma(cap, inverse, cap * inverse_rest)
    if LEVELLED:
        level = cap_left(logits, gain)
        if not WHOLE:
            level = tl.where(inside, level, float("inf"))
        least = tl.min(level, 1)
        peak = tl.maximum(_under_cap(least, full), LOWEST)
        # A number for every row, of whatever layout the rows have.
        exp, exponent, factor, rest = exp_of_steps(level, least, 0.0 * least - full * LOG2_E)
    else:
        level, _ = transformed(logits, gain, cap, inverse, inverse_rest, SCALED, CAPPED, HEATED)
        if not WHOLE:
            level = tl.where(inside, level, float("-inf"))
        # The lowest finite number where every word is banned: -inf minus -inf is NaN.
        peak = tl.maximum(tl.max(level, 1), LOWEST)
        exp, exponent, factor, rest = exp_of_difference(level, peak)
    # Not after the values, which under a softcap would then spill.
    total = tl.sum(exp, 1)
    if kept is not None:
        STORE(kept, first_token, vocab_tile * TILE_VOCAB, exp * factor[:, None])
    tl.store(peaks + place, peak, mask=live)
    tl.store(sums + place, total * factor, mask=live)
    if moments is not None:
        # No capped word is banned, and none is past the last one of a whole tile.
        if not (LEVELLED and WHOLE):
            exponent = tl.maximum(exponent, LOWEST_LOG_PROBABILITY)
        moment = tl.sum(exp * exponent, 1)
        tl.store(moments + place, (moment - total * rest) * (factor * LN_2), mask=live)
    if sums_sq is not None:
        tl.store(sums_sq + place, tl.sum(exp * exp, 1) * (factor * factor), mask=live)
    target_z = AT_WORD(level, target)
    if LEVELLED:
        target_z = _under_cap(target_z, full)
    tl.store(target_logits + token, target_z, mask=live & (target >= 0) & (target < TILE_VOCAB))
    if rivals is not None:
        before = word[None, :] < target[:, None]
        if LEVELLED:
            rival = _under_cap(tl.min(tl.where(before, level, float("inf")), 1), full)
        else:
            rival = tl.max(tl.where(before, level, float("-inf")), 1)
        tl.store(rivals + place, rival, mask=live)


@triton.jit
def _under_cap(left, full):
    """-> z, from what it leaves of the cap."""
    return tl.fma(-left, full, full)
