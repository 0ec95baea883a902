"""A Triton kernel that merges the folds of vocabulary tiles into one fold per token.

Each (tiles, tokens) matrix is read once. The order of the tiles is fixed.
"""

import triton
import triton.language as tl

from liger_rl.kernels.devices import launch_context
from liger_rl.kernels.limits import LIMITS
from liger_rl.kernels.softmax_triton import LOWEST, moment_around
from liger_rl.kernels.statistics import Fold

MERGE_TOKENS, MERGE_WARPS = 16, 8  # tokens of a program, and its warps


@triton.jit
def _merge_kernel(
    folds,  # `Fold` of each tile, (tiles, tokens); `target` is not read
    state,  # `Fold` of the tokens, (tokens,), written; `target` is not
    tiles,
    tokens,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token < tokens
    peak = tl.full((TOKENS,), LOWEST, tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    moment = tl.zeros((TOKENS,), tl.float32)
    total_sq = tl.zeros((TOKENS,), tl.float32)
    logit_sum = tl.zeros((TOKENS,), tl.float32)
    peak_before = tl.full((TOKENS,), float("-inf"), tl.float32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        inside = (tile < tiles)[:, None] & live[None, :]
        place = tile.to(tl.int64)[:, None] * tokens + token[None, :]
        tile_peak = tl.load(folds.peak + place, mask=inside, other=LOWEST)
        tile_sum = tl.load(folds.sum_exp + place, mask=inside, other=0.0)
        new_peak = tl.maximum(peak, tl.max(tile_peak, 0))
        rescale = tl.exp(peak - new_peak)
        distance = tile_peak - new_peak[None, :]
        weight = tl.exp(distance)
        if folds.moment is not None:
            tile_moment = tl.load(folds.moment + place, mask=inside, other=0.0)
            moment = moment_around(new_peak, peak, rescale, total, moment)
            moment += tl.sum(moment_around(new_peak[None, :], tile_peak, weight, tile_sum, tile_moment), 0)
        if folds.sum_sq_exp is not None:
            tile_sq = tl.load(folds.sum_sq_exp + place, mask=inside, other=0.0)
            total_sq = total_sq * rescale * rescale + tl.sum(weight * weight * tile_sq, 0)
        if folds.sum_logits is not None:
            logit_sum += tl.sum(tl.load(folds.sum_logits + place, mask=inside, other=0.0), 0)
        if folds.peak_before is not None:
            tile_peak_before = tl.load(folds.peak_before + place, mask=inside, other=float("-inf"))
            peak_before = tl.maximum(peak_before, tl.max(tile_peak_before, 0))
        total = total * rescale + tl.sum(weight * tile_sum, 0)
        peak = new_peak
    tl.store(state.peak + token, peak, mask=live)
    tl.store(state.sum_exp + token, total, mask=live)
    if folds.moment is not None:
        tl.store(state.moment + token, moment, mask=live)
    if folds.sum_sq_exp is not None:
        tl.store(state.sum_sq_exp + token, total_sq, mask=live)
    if folds.sum_logits is not None:
        tl.store(state.sum_logits + token, logit_sum, mask=live)
    if folds.peak_before is not None:
        tl.store(state.peak_before + token, peak_before, mask=live)


def merge(folds: Fold, state: Fold) -> None:
    """Merge the `folds` (tiles, n) of all tiles into `state` (n,). `state.target` stays as it is."""
    tiles, n = folds.peak.shape
    if n == 0:
        return
    with launch_context(state.peak.device):
        _merge_kernel[(triton.cdiv(n, MERGE_TOKENS),)](
            folds, state, tiles, n, MERGE_TOKENS, LIMITS.merge_tiles, num_warps=MERGE_WARPS
        )
