"""Draw one id of each token from the fold of its logits, as Triton kernels.

Over the whole vocabulary the product's epilogue draws an id of each tile (`tile_epilogues.draw_of_tile`), and
`_choose_kernel` draws the tile. Under top-k, top-p or min-p the epilogue keeps the exponentials of a few hundred tokens
at a time. `_parts_kernel`, `_scan_kernel` and `_candidates_kernel` find the ids that may be drawn from these, to 2^-11
of their probabilities, and `_limits_kernel` chooses and draws among the candidates' own float32 logits.

Each sum has one order, and each draw depends on one token's numbers alone.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.kernels.devices import on
from liger_rl.kernels.reference import Kept, Uniforms
from liger_rl.kernels.segments import SEVERAL, SINGLE, Slots
from liger_rl.kernels.softmax import LOWEST
from liger_rl.kernels.statistics import BLOCK_VOCAB, PART_VOCAB, Fold, TileStatistics
from liger_rl.kernels.tile_epilogues import KEPT_ONE
from liger_rl.kernels.tile_epilogues import PART_VOCAB as PART

CANDIDATES = 1024  # ids of a token whose exact logits are computed; a multiple of a piece of `segments_triton.DOTS`
# SHARES programs scan the parts of a token that may have candidates. Each reads BLOCK parts at a time, and has ROOM for
# the ids that it finds. One H200, 512 tokens with 60 ids each in a nucleus of 0.95, V = 128256: 16 programs with blocks
# of 4 parts took 37 us, 8 with 8 parts 55, 8 with 16 parts 80. One program for each token, which also found the parts,
# took 157 us: a token with many candidates kept all others waiting.
SHARES, ROOM, BLOCK = 16, 256, 4
WARPS = 4
# Ids with smaller probabilities are no candidates; the second number is for a top-p. `_limits_kernel` finds the tokens
# whose limits may reach such ids.
LEAST_LOG2, LEAST_OF_NUCLEUS_LOG2 = tl.constexpr(-120.0), tl.constexpr(-28.0)
SIGN = tl.constexpr(-(1 << 31))
PART_STEPS, ID_STEPS = tl.constexpr(12), tl.constexpr(8)  # of the searches for a threshold among parts and among ids
SMALLEST = tl.constexpr(2.0**-14)  # normal float16; smaller exponentials have lost digits
# Factors on a probability that a float16 exponential gives, and on sums of them: twice its rounding error, and more.
LESS, MORE = tl.constexpr(1.0 - 2.0**-8), tl.constexpr(1.0 + 2.0**-9)


class Draw(NamedTuple):
    """What an epilogue draws of each tile, or with no uniforms the largest logit's id; see `Fold` for the rest."""

    of_tile: Tensor | None  # (n,)
    in_tile: Tensor | None
    columns: Tensor  # (tiles, n) int16, written

    @classmethod
    def of(cls, uniforms: Uniforms | None, shape: tuple[int, ...], device: torch.device) -> "Draw":
        columns = torch.empty(shape, dtype=torch.int16, device=device)
        return cls(None, None, columns) if uniforms is None else cls(*uniforms, columns)


def _arguments(top_k: int | None, top_p: float | None, min_p: float | None) -> dict[str, int | float]:
    top_p = 1.0 if top_p is None else float(top_p)
    numbers = {"top_k": top_k or 0, "top_p": top_p, "min_p": float(min_p or 0.0)}
    return numbers | {"TOP_K": top_k is not None, "TOP_P": top_p < 1.0}


@triton.jit
def key_of(z):
    """-> uint32 in the order of the numbers, above 0; as `reference.keys_of`, from 0 on and without the id."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return bits.to(tl.uint32, bitcast=True) ^ ((bits >> 31) | SIGN).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["count", "seed"])
def _uniforms_kernel(positions, of_tile, in_tile, count, seed, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + token, mask=token < count, other=0)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    first, second, _third, _fourth = tl.philox(seed, low, high, low * 0, low * 0)
    tl.store(of_tile + token, ((first >> 9).to(tl.float32) + 0.5) * 2.0**-23, mask=token < count)
    tl.store(in_tile + token, ((second >> 9).to(tl.float32) + 0.5) * 2.0**-23, mask=token < count)


def uniforms(seed: int, positions: Tensor) -> Uniforms:
    """As `reference.uniforms`."""
    found = Uniforms(*(torch.empty(positions.shape, dtype=torch.float32, device=positions.device) for _ in range(2)))
    count, block = positions.numel(), 128
    with on(positions.device):
        _uniforms_kernel[(triton.cdiv(count, block),)](positions.contiguous(), *found, count, seed, BLOCK=block)
    return found


@triton.jit
def _first_past(mass, uniform, SIZE: tl.constexpr):
    """-> the place that a uniform number draws by the masses (SIZE,); one with a mass above 0, if there is one."""
    place = tl.arange(0, SIZE)
    hit = (tl.cumsum(mass, 0) > uniform * tl.sum(mass)) & (mass > 0.0)
    found = tl.min(tl.where(hit, place, SIZE))
    # Rounding may leave the number at the end of the last one.
    largest = tl.min(tl.where(mass == tl.max(mass), place, SIZE))
    return tl.minimum(tl.where(found < SIZE, found, largest), SIZE - 1)


@triton.jit(do_not_specialize=["tiles", "tokens", "vocab"])
def _choose_kernel(
    folds,  # `Fold` of each tile; its target is the logit of the id that was drawn of the tile, (tiles, tokens)
    draw,  # `Draw`
    state,  # `Fold` (tokens,), merged; its target is written
    ids,  # (tokens,) int64, written
    tiles,
    tokens,
    vocab,
    TILE_VOCAB: tl.constexpr,
    TILES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    place = tile.to(tl.int64) * tokens + token
    peaks = tl.load(folds.peak + place, mask=tile < tiles, other=LOWEST)
    if draw.of_tile is None:
        chosen = tl.min(tl.where(peaks == tl.max(peaks), tile, TILES))
    else:
        sums = tl.load(folds.sum_exp + place, mask=tile < tiles, other=0.0)
        mass = tl.exp(peaks - tl.load(state.peak + token)) * sums
        chosen = _first_past(mass, tl.load(draw.of_tile + token), TILES)
    place = tl.minimum(chosen, tiles - 1).to(tl.int64) * tokens + token
    id = tl.minimum(chosen, tiles - 1).to(tl.int64) * TILE_VOCAB + tl.load(draw.columns + place)
    tl.store(ids + token, tl.minimum(id, vocab - 1))
    tl.store(state.target + token, tl.load(folds.target + place))


def choose(folds: Fold, draw: Draw, state: Fold, ids: Tensor, vocab: int) -> None:
    """Draw a tile of each token, and with it an id and its logit."""
    tiles, n = folds.peak.shape
    with on(ids.device):
        _choose_kernel[(n,)](
            folds, draw, state, ids, tiles, n, vocab,
            TILE_VOCAB=BLOCK_VOCAB, TILES=triton.next_power_of_2(tiles), num_warps=WARPS,
        )  # fmt: skip


@triton.jit
def _halved(low, best, mass, top_k, top_p, TOP_K: tl.constexpr, STEPS: tl.constexpr):
    """-> log2 of a probability, at least `low`, below which no id belongs to the K likeliest or to the nucleus.

    `best` and `mass` are the largest and the sum of groups of PART probabilities, or `best` of single ones and mass 0.
    """
    high = 0.0 * low
    for _ in range(STEPS):
        middle = 0.5 * (low + high)
        threshold = tl.exp2(middle)
        over = best >= threshold
        # Ids over a probability t have at least the mass of their group less PART t, and the best of them this share.
        over_mass = mass - threshold * PART
        if TOP_K:
            reached = tl.sum(tl.where(over, tl.maximum(1.0, over_mass / best * LESS), 0.0)) >= top_k
        else:
            reached = tl.sum(tl.where(over, tl.maximum(best, over_mass), 0.0)) >= top_p * MORE
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low


@triton.jit(do_not_specialize=["tokens", "parts", "top_k", "top_p", "min_p"])
def _parts_kernel(
    known,  # `TileStatistics` (parts, tokens)
    tile_peaks,  # `Kept.peaks`
    state,  # `Fold` (tokens,)
    chosen,  # (tokens, parts) int32, written as are the rest: the parts that may have candidates, ascending
    numbers,  # (tokens,) int32, of them
    least,  # (tokens,) float32: ids with smaller probabilities are none
    tokens,
    parts,
    top_k,
    top_p,
    min_p,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    PARTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    peak = tl.load(state.peak + token)
    total = tl.load(state.sum_exp + token)
    part = tl.arange(0, PARTS)
    inside = part < parts
    place = part.to(tl.int64) * tokens + token
    best = tl.exp(tl.load(known.peaks + place, mask=inside, other=LOWEST) - peak) / total
    tile_place = (part // 2).to(tl.int64) * tokens + token
    mass = tl.exp(tl.load(tile_peaks + tile_place, mask=inside, other=LOWEST) - peak) / total
    mass *= tl.load(known.sums + place, mask=inside, other=0.0)
    low = 0.0 * total + (LEAST_OF_NUCLEUS_LOG2 if TOP_P else LEAST_LOG2)
    if TOP_K or TOP_P:
        low = _halved(low, best, mass, top_k, top_p, TOP_K, PART_STEPS)
    least_p = min_p / total
    if TOP_K and TOP_P:  # the nucleus is a share of the K likeliest ids, so all of these are candidates
        least_p = 0.0 * total
    threshold = tl.maximum(tl.exp2(low), least_p) * LESS
    taken = (inside & (best >= threshold)).to(tl.int32)
    tl.store(chosen + token * parts + tl.cumsum(taken, 0) - 1, part, mask=taken != 0)
    tl.store(numbers + token, tl.sum(taken))
    tl.store(least + token, threshold)


@triton.jit(do_not_specialize=["tokens", "parts", "stride", "vocab"])
def _scan_kernel(
    exponentials,  # `Kept.values` and `Kept.peaks`
    tile_peaks,
    state,  # `Fold` (tokens,)
    chosen,  # of `_parts_kernel`
    numbers,
    least,
    rough_ids,  # (tokens, SHARES, ROOM) int32, written as are the rest: ids over `least`, ascending
    rough,  # (tokens, SHARES, ROOM) float32: their probabilities; of one that has lost digits its bound, negative
    counts,  # (tokens, SHARES) int32: how many of a share there are, with those that have no room
    tokens,
    parts,
    stride,  # of the kept exponentials
    vocab,
    SHARES: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    peak = tl.load(state.peak + token)
    total = tl.load(state.sum_exp + token)
    threshold = tl.load(least + token)
    number = tl.load(numbers + token)
    exponentials += token * stride
    chosen += token * parts
    row = token * SHARES + share
    size = tl.cdiv(number, SHARES)
    stop = tl.minimum(number, (share + 1) * size)
    count = 0
    for start in range(share * size, stop, BLOCK):
        place = tl.arange(0, BLOCK * PART)
        entry = start + place // PART
        own = tl.load(chosen + entry, mask=entry < stop, other=0)
        id = own * PART + place % PART
        tile_peak = tl.load(tile_peaks + (own // 2).to(tl.int64) * tokens + token, mask=entry < stop, other=LOWEST)
        value = tl.load(exponentials + id, mask=(entry < stop) & (id < vocab), other=0.0).to(tl.float32)
        p = tl.maximum(value, SMALLEST) * (tl.exp(tile_peak - peak) / (total * KEPT_ONE))
        above = ((p >= threshold) & (entry < stop) & (id < vocab)).to(tl.int32)
        at = count + tl.cumsum(above, 0) - 1
        stored = (above != 0) & (at < ROOM)
        tl.store(rough_ids + row * ROOM + at, id, mask=stored)
        tl.store(rough + row * ROOM + at, tl.where(value < SMALLEST, -p, p), mask=stored)
        count += tl.sum(above)
    tl.store(counts + row, count)


@triton.jit(do_not_specialize=["vocab", "top_k", "top_p"])
def _candidates_kernel(
    rough_ids,  # of `_scan_kernel`
    rough,
    counts,
    ids,  # (tokens, CANDIDATES) int32, written: ascending, then `vocab` + 1, which is no id
    least,  # (tokens,) float32, raised: other ids than these have smaller probabilities
    lost,  # (tokens,) bool, written: there are more candidates than room
    vocab,
    top_k,
    top_p,
    min_p,  # not read: it is in `least` already
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    SHARES: tl.constexpr,
    ROOM: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SHARES * ROOM)
    count = tl.load(counts + token * SHARES + place // ROOM)
    known = place % ROOM < count
    rough_ids += token * SHARES * ROOM
    p = tl.load(rough + token * SHARES * ROOM + place, mask=known, other=0.0)
    threshold = tl.load(least + token)
    if TOP_K or TOP_P:
        low = _halved(tl.log2(threshold), p, 0.0 * p, top_k, top_p, TOP_K, ID_STEPS)
        threshold = tl.maximum(threshold, tl.exp2(low) * LESS)
    left = (known & (tl.abs(p) >= threshold)).to(tl.int32)
    found = tl.sum(left)
    at = tl.cumsum(left, 0) - 1
    id = tl.load(rough_ids + place, mask=left != 0, other=0)
    tl.store(ids + token * CANDIDATES + at, id, mask=(left != 0) & (at < CANDIDATES))
    room = tl.arange(0, CANDIDATES)
    tl.store(ids + token * CANDIDATES + room, room * 0 + vocab + 1, mask=room >= found)
    tl.store(least + token, threshold)
    tl.store(lost + token, (tl.max(count) > ROOM) | (found > CANDIDATES))


@triton.jit
def _threshold(key, weight, wanted):
    """-> the largest number that keys of weight `wanted` or more reach, 0 if all keys weigh less; `key` is uint32."""
    threshold = tl.full((), 0, tl.int64)
    bit = tl.full((), 1 << 31, tl.int64)
    while bit > 0:
        candidate = threshold + bit
        reached = tl.sum(tl.where(key >= candidate.to(tl.uint32), weight, 0.0)) >= wanted
        threshold = tl.where(reached, candidate, threshold)
        bit = bit >> 1
    return threshold.to(tl.uint32)


@triton.jit(do_not_specialize=["vocab", "top_k", "top_p", "min_p"])
def _limits_kernel(
    candidates,  # (tokens, SIZE) int32, of `_candidates_kernel`
    logits,  # (tokens, SIZE) float32
    state,  # `Fold` (tokens,)
    uniform,  # (tokens,)
    least,  # of `_candidates_kernel`
    lost,  # updated: what may be drawn is not known
    ids,  # (tokens,) int64, written as are the rest
    listed,  # (tokens, SIZE) int32: the ids that may be drawn, ascending
    counts,  # (tokens,) int64
    slots,  # `Slots`, SIZE for each token, as `make_slots` makes them of these lists
    slot_logits,  # (tokens, SIZE)
    vocab,
    top_k,
    top_p,
    min_p,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    SIZE: tl.constexpr,
    SINGLE: tl.constexpr = SINGLE,
    SEVERAL: tl.constexpr = SEVERAL,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE)
    row = token * SIZE
    id = tl.load(candidates + row + place)
    z = tl.load(logits + row + place, mask=id < vocab, other=float("-inf"))
    known = z > float("-inf")
    z = tl.where(known, z, float("-inf"))
    total = tl.load(state.sum_exp + token)
    p = tl.exp(z - tl.load(state.peak + token)) / total
    key = tl.where(known, key_of(z), 0)
    kept = known
    least_p = tl.load(least + token)
    # Whether some limit excludes all ids that are no candidates. Their probabilities are smaller than `least_p`.
    contained = min_p / total >= least_p
    if TOP_K and TOP_P:  # a nucleus of the K likeliest ids depends on more ids than min_p leaves
        contained = least_p < 0.0
    outside = 0.0 * total
    if TOP_K:
        kept = kept & (key >= _threshold(key, tl.where(known, 1.0, 0.0), top_k.to(tl.float32)))
        contained = contained | (tl.sum(kept.to(tl.int32)) >= top_k)
        outside = least_p * top_k
    if TOP_P:
        wanted = top_p * 1.0
        if TOP_K:
            wanted = top_p * tl.sum(tl.where(kept, p, 0.0))
        smallest = _threshold(key, tl.where(kept, p, 0.0), wanted)
        above = kept & (key > smallest)
        equal = kept & (key == smallest)
        before = tl.sum(tl.where(above, p, 0.0)) + (tl.cumsum(equal.to(tl.int32), 0) - 1).to(tl.float32) * p
        kept = above | (equal & (before < wanted))
        contained = contained | (tl.sum(tl.where(kept, p, 0.0)) >= wanted + top_p * outside)
    kept = kept & (tl.exp(z - tl.max(z)) >= min_p)
    smallest_p = tl.min(tl.where(kept, p, 2.0))
    contained = contained & (smallest_p >= least_p * MORE) & (smallest_p <= 1.5) & (tl.load(lost + token) == 0)
    number = tl.sum(kept.to(tl.int32))
    drawn = _first_past(tl.where(kept, p, 0.0), tl.load(uniform + token), SIZE)
    hit = place == drawn
    target = tl.minimum(tl.sum(tl.where(hit, id, 0)), vocab - 1)
    among = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(ids + token, target.to(tl.int64))
    tl.store(counts + token, number.to(tl.int64))
    tl.store(listed + row + among, id, mask=kept)
    # The target has the first slot. Ids before it come one slot later.
    slot = tl.where(hit, 0, among + (place < drawn).to(tl.int32))
    # A row with one id needs no logit.
    tl.store(slots.ids + row + slot, tl.where(number > 1, id, vocab + 1), mask=kept)
    tl.store(slots.ids + row + place, id * 0 + vocab + 1, mask=place >= number)
    tl.store(slot_logits + row + slot, z, mask=kept)
    tl.store(slots.kinds + token, tl.where(number > 1, SEVERAL, SINGLE).to(tl.uint8))
    tl.store(lost + token, contained == 0)


class Candidates(NamedTuple):
    """The ids that may be drawn under limits, and some more."""

    ids: Tensor  # (n, CANDIDATES) int32, ascending, then V + 1
    least: Tensor  # (n,) float32: other ids have smaller probabilities
    lost: Tensor  # (n,) bool: there are more of them than room


class Limited(NamedTuple):
    """The draws of n tokens under limits."""

    ids: Tensor  # (n,) int64
    listed: Tensor  # (n, CANDIDATES) int32: the ids that could be drawn, ascending
    counts: Tensor  # (n,) int64
    slots: Slots  # of these lists, CANDIDATES for each token
    logits: Tensor  # (n CANDIDATES,) float32, of the slots


def candidates(
    n: int,  # the first tokens of the rest, which may have more
    state: Fold,
    known: TileStatistics,
    kept: Kept,
    vocab: int,
    limits: tuple[int | None, float | None, float | None],  # top_k, top_p, min_p
) -> Candidates:
    """The candidates of tokens whose exponentials are kept."""
    parts, device = triton.cdiv(vocab, PART_VOCAB), kept.values.device

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    found = Candidates(empty(n, CANDIDATES), empty(n, dtype=torch.float32), empty(n, dtype=torch.bool))
    chosen = empty(n, parts), empty(n), found.least
    rough = empty(n, SHARES, ROOM), empty(n, SHARES, ROOM, dtype=torch.float32), empty(n, SHARES)
    given, room = _arguments(*limits), {"SHARES": SHARES, "ROOM": ROOM}
    with on(device):
        _parts_kernel[(n,)](
            known, kept.peaks, state, *chosen, known.peaks.shape[1], parts, **given,
            PARTS=triton.next_power_of_2(parts), num_warps=WARPS,
        )  # fmt: skip
        _scan_kernel[(n, SHARES)](
            *kept[:2], state, *chosen, *rough, known.peaks.shape[1], parts, kept.values.stride(0), vocab, **room,
            BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
        _candidates_kernel[(n,)](
            *rough, *found, vocab, **given, **room, CANDIDATES=CANDIDATES, num_warps=WARPS
        )  # fmt: skip
    return found


def slots_of(found: Candidates, vocab: int) -> Slots:
    """The slots of the candidates, CANDIDATES for each token."""
    n, device = found.lost.shape[0], found.lost.device
    starts = torch.arange(0, (n + 1) * CANDIDATES, CANDIDATES, device=device)
    tokens = torch.arange(n, dtype=torch.int32, device=device).repeat_interleave(CANDIDATES)
    kinds = torch.empty(n, dtype=torch.uint8, device=device)
    return Slots(found.ids.view(-1), tokens, starts, kinds, found.lost, starts[:0], vocab, 0)


def limited(
    found: Candidates,  # whose `lost` is updated: nothing in the result holds
    slots: Slots,  # of `slots_of`
    logits: Tensor,  # (n CANDIDATES,) float32, of the slots
    state: Fold,
    uniform: Tensor,  # (n,)
    limits: tuple[int | None, float | None, float | None],
) -> Limited:
    """Draw among the ids that the limits leave."""
    n, device = uniform.numel(), uniform.device
    ids, counts = (torch.empty(n, dtype=torch.int64, device=device) for _ in range(2))
    out = Limited(
        ids, torch.empty_like(found.ids), counts, slots._replace(ids=torch.empty_like(slots.ids)),
        torch.empty_like(logits),
    )  # fmt: skip
    with on(device):
        _limits_kernel[(n,)](
            found.ids, logits, state, uniform.contiguous(), found.least, found.lost, *out, slots.rows,
            **_arguments(*limits), SIZE=CANDIDATES, num_warps=WARPS,
        )  # fmt: skip
    return out
