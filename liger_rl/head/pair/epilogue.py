"""Fold and gradient of two heads in the epilogue of both products, so that no logit of either reaches memory.

`kernels.epilogue` makes a tile of each head at a time. `tile_epilogues` has the code of one pair of tiles, `reference`
the formulas.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.head.pair.pair_reference import KeptPair, Measure, PairFold, PairGradients
from liger_rl.head.pair.tile_epilogues import REVERSE, around, fold_pair_tile, grad_pair_tile, store_sums
from liger_rl.kernels.devices import empty_rows, on
from liger_rl.kernels.epilogue import TWO_HEADS_VOCAB as PRODUCT_VOCAB
from liger_rl.kernels.epilogue import run_product
from liger_rl.kernels.merge_triton import MERGE_TILES, MERGE_TOKENS, MERGE_WARPS
from liger_rl.kernels.softmax import LOWEST
from liger_rl.kernels.statistics import each
from liger_rl.kernels.transform import HeadFactors, LogitSteps

PARTS = 2  # of a tile's columns, one after the other


def unwritten_tiles(
    n: int, vocab: int, device: torch.device, measure: Measure, *, entropy: bool, targets: bool
) -> PairFold:
    """Separate folds (tiles, n) of tiles of PRODUCT_VOCAB entries."""
    fields = PairFold.start(0, device, measure, entropy=entropy, targets=targets)._asdict()
    names = [name for name, part in fields.items() if part is not None and "target" not in name]
    # Separate tensors: Triton compiles a kernel anew for each pattern of aligned and other addresses.
    for name in names:
        fields[name] = torch.empty(-(-vocab // PRODUCT_VOCAB), n, dtype=torch.float32, device=device)
    if targets:
        # The tile that holds the target writes its logits. A shard of the vocabulary may hold no such tile.
        fields |= {name: torch.zeros(n, dtype=torch.float32, device=device) for name in ("target", "teacher_target")}
    return PairFold(**fields)


def merged(tiles: PairFold, measure: Measure) -> PairFold:
    """The fold of the whole vocabulary, (n,) each; tiles are added up in a fixed order."""
    of_tiles = tiles._replace(target=None, teacher_target=None)
    whole = each(of_tiles, lambda part: torch.empty_like(part[0]))
    count, n = tiles.peak.shape
    with on(tiles.peak.device):
        _merge_pair_kernel[(triton.cdiv(n, MERGE_TOKENS),)](
            tiles, whole, count, n, measure.kind, MERGE_TOKENS, MERGE_TILES, num_warps=MERGE_WARPS
        )
    return whole._replace(target=tiles.target, teacher_target=tiles.teacher_target)


@triton.jit(do_not_specialize=["tiles", "tokens"])
def _merge_pair_kernel(
    parts,  # `PairFold` (tiles, tokens); targets are not read
    out,  # `PairFold` (tokens,), written; without targets
    tiles,
    tokens,
    KIND: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token < tokens
    peak = tl.full((TOKENS,), LOWEST, tl.float32)
    teacher_peak = tl.full((TOKENS,), LOWEST, tl.float32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        inside = (tile < tiles)[:, None] & live[None, :]
        place = tile.to(tl.int64)[:, None] * tokens + token[None, :]
        peak = tl.maximum(peak, tl.max(tl.load(parts.peak + place, mask=inside, other=LOWEST), 0))
        tile_peak = tl.load(parts.teacher_peak + place, mask=inside, other=LOWEST)
        teacher_peak = tl.maximum(teacher_peak, tl.max(tile_peak, 0))
    total = tl.zeros((TOKENS,), tl.float32)
    teacher_total = tl.zeros((TOKENS,), tl.float32)
    gap = tl.zeros((TOKENS,), tl.float32)
    moment = tl.zeros((TOKENS,), tl.float32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        inside = (tile < tiles)[:, None] & live[None, :]
        place = tile.to(tl.int64)[:, None] * tokens + token[None, :]
        lower = tl.load(parts.peak + place, mask=inside, other=LOWEST) - peak[None, :]
        teacher_lower = tl.load(parts.teacher_peak + place, mask=inside, other=LOWEST) - teacher_peak[None, :]
        kept, teacher_kept = tl.exp(lower), tl.exp(teacher_lower)
        tile_total = tl.load(parts.sum_exp + place, mask=inside, other=0.0)
        teacher_tile_total = tl.load(parts.teacher_sum_exp + place, mask=inside, other=0.0)
        total += tl.sum(kept * tile_total, 0)
        teacher_total += tl.sum(teacher_kept * teacher_tile_total, 0)
        if out.gap is not None:
            tile_gap = tl.load(parts.gap + place, mask=inside, other=0.0)
            if KIND == REVERSE:
                tile_gap = around(tile_gap, kept, lower - teacher_lower, tile_total)
            else:
                tile_gap = around(tile_gap, teacher_kept, teacher_lower - lower, teacher_tile_total)
            gap += tl.sum(tile_gap, 0)
        if out.moment is not None:
            tile_moment = tl.load(parts.moment + place, mask=inside, other=0.0)
            moment += tl.sum(around(tile_moment, kept, lower, tile_total), 0)
    tl.store(out.peak + token, peak, mask=live)
    tl.store(out.teacher_peak + token, teacher_peak, mask=live)
    store_sums(out, token, total, teacher_total, gap, moment, live)


class KeptPeaks(NamedTuple):
    """The peaks of a `KeptPair` as an argument of the kernel; None if nothing is kept."""

    peaks: Tensor | None = None
    teacher_peaks: Tensor | None = None
    stride: int = 0  # between two tokens


def fold_pair(
    student: HeadFactors,
    teacher: HeadFactors,
    targets: Tensor,  # (n,) ids of the whole vocabulary
    first: int,  # id of the first row of both weights, a multiple of PRODUCT_VOCAB
    measure: Measure,
    tiles: PairFold,  # of the whole vocabulary, from `unwritten_tiles`, written
    kept: KeptPair | None = None,  # of the whole vocabulary, written
) -> None:
    """Fold the products of both heads; `devices.pairs_apply_to` must hold for each."""
    assert first % PRODUCT_VOCAB == 0
    tile, vocab = first // PRODUCT_VOCAB, student.weight.shape[0]
    here = each(tiles, lambda part: part if part.dim() == 1 else part[tile:])
    outs: tuple[Tensor | None, ...] = None, None
    peaks = KeptPeaks()
    if kept is not None:
        outs = kept.larger[:, first : first + vocab], kept.gaps[:, first : first + vocab]
        peaks = KeptPeaks(kept.peaks[:, tile:], kept.teacher_peaks[:, tile:], kept.peaks.stride(0))
    run_product(
        fold_pair_tile, student, targets,
        (LogitSteps.of(teacher.transform), here, peaks, student.bias, teacher.bias),
        teacher=teacher, outs=outs, first=first, variant=measure.kind, whole=vocab % PRODUCT_VOCAB == 0,
        parts=PARTS,
    )  # fmt: skip


def grad_pair(
    student: HeadFactors, teacher: HeadFactors, targets: Tensor, first: int, measure: Measure, tokens: PairGradients
) -> Tensor:
    """-> (n, v) dL/d(hidden @ weight.T) in the dtype of `hidden`, with the arguments of `fold_pair`."""
    hidden = student.hidden
    out = empty_rows(hidden.shape[0], student.weight.shape[0], hidden.dtype, hidden.device)
    run_product(
        grad_pair_tile, student, targets, (LogitSteps.of(teacher.transform), tokens.contiguous(), measure.beta),
        teacher=teacher, outs=(out, None), first=first, variant=measure.kind, parts=PARTS,
    )  # fmt: skip
    return out
