"""Fold and gradient of two heads in the epilogue of the student's product, which reads the teacher's logits.

Any product may write the teacher's logits of a tile to memory. The epilogue reads them while the student's tile is in
registers. `tile_epilogues` has the code of one tile, `reference` the formulas.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.engines.pair.kept_triton import KeptPair, grad_kept_pair, sum_kept
from liger_rl.engines.pair.reference import TILE_VOCAB, Measure, PairFold, PairGradients, Tile, TileSums
from liger_rl.engines.pair.tile_epilogues import (
    REVERSE,
    fold_pair_tile,
    grad_pair_tile,
    read_at_target,
    store_at_target,
)
from liger_rl.kernels.devices import WARPS, empty_rows, family_of, on
from liger_rl.kernels.epilogue import TILE_TOKENS, device_programs, tile_logits
from liger_rl.kernels.epilogue import TILE_VOCAB as PRODUCT_VOCAB
from liger_rl.kernels.matrix_triton import GROUP, matrix
from liger_rl.kernels.merge_triton import MERGE_TILES, MERGE_TOKENS, MERGE_WARPS
from liger_rl.kernels.softmax import LOWEST
from liger_rl.kernels.tile_epilogues import column_of, tile_place, tokens_together
from liger_rl.kernels.transform import LogitSteps, LogitTransform

__all__ = [
    "Factors", "Parts", "Student", "device_programs", "fold_pair", "grad_kept_pair", "grad_pair", "sum_kept",
]  # fmt: skip

# A tile's columns are handled in this many parts. Numbers of both heads are in registers for one part at a time.
PARTS = 8
JOINED_TOKENS = 128  # tokens of a program of `_tile_sums_kernel`


class Squares(NamedTuple):
    """Sums of products of the x and y of `TileSums`, over tiles of PRODUCT_VOCAB entries, (tiles, n) float32."""

    xx: Tensor | None  # sum_v x_v^2
    xy: Tensor | None  # sum_v x_v y_v
    yy: Tensor | None  # sum_v y_v^2


class Parts(NamedTuple):
    """A separate fold of each tile of PRODUCT_VOCAB entries, and the n tokens' logits at their targets."""

    fold: PairFold  # (tiles, n) each; the targets' logits are (n,)
    squares: Squares

    @classmethod
    def unwritten(
        cls, n: int, vocab: int, device: torch.device, measure: Measure, *, entropy: bool, targets: bool, squares: bool
    ) -> "Parts":
        empty = PairFold.start(0, device, measure, entropy=entropy, targets=targets)
        tiles = -(-vocab // PRODUCT_VOCAB)
        names = [name for name, part in empty._asdict().items() if part is not None and "target" not in name]
        # Separate tensors: Triton compiles a kernel anew for each pattern of aligned and other addresses.
        made = [torch.empty(tiles, n, dtype=torch.float32, device=device) for _ in range(len(names) + 3 * squares)]
        fold = PairFold._make((empty._asdict() | dict(zip(names, made, strict=False))).values())
        if targets:
            # The tile that holds the target writes its logits. A shard of the vocabulary may hold no such tile.
            target, teacher_target = (torch.zeros(n, dtype=torch.float32, device=device) for _ in range(2))
            fold = fold._replace(target=target, teacher_target=teacher_target)
        return cls(fold, Squares(*made[-3:]) if squares else NO_SQUARES)

    def kept(self, vocab: int) -> KeptPair:
        """Memory that `fold_pair` writes together with the fold."""
        peaks = self.fold.peak
        return KeptPair.empty(peaks.shape[1], vocab, peaks.device, PRODUCT_VOCAB // PARTS)

    def from_tile(self, tile: int) -> "Parts":
        """Views of tile number `tile` and all later tiles."""
        fold = PairFold._make(part if part is None or part.dim() == 1 else part[tile:] for part in self.fold)
        return Parts(fold, Squares._make(None if part is None else part[tile:] for part in self.squares))

    def merged(self, measure: Measure) -> PairFold:
        """The fold of the whole vocabulary, (n,) each; tiles are added up in a fixed order."""
        tiles, tokens = self.fold.peak.shape
        of_tiles = self.fold._replace(target=None, teacher_target=None)
        whole = PairFold._make(None if part is None else torch.empty_like(part[0]) for part in of_tiles)
        with on(self.fold.peak.device):
            _merge_pair_kernel[(triton.cdiv(tokens, MERGE_TOKENS),)](
                of_tiles, whole, tiles, tokens, measure.kind, MERGE_TOKENS, MERGE_TILES, num_warps=MERGE_WARPS
            )
        return whole._replace(target=self.fold.target, teacher_target=self.fold.teacher_target)

    def tile_sums(self, measure: Measure, out: TileSums) -> None:
        """Write the sums (n, tiles of TILE_VOCAB) from which bounds are made."""
        tiles, tokens = self.fold.peak.shape
        with on(self.fold.peak.device):
            _tile_sums_kernel[(out.x.shape[1], triton.cdiv(tokens, JOINED_TOKENS))](
                self.fold, self.squares, out, out.x.stride(0), tiles, tokens,
                KIND=measure.kind, SEVERAL=TILE_VOCAB // PRODUCT_VOCAB, TOKENS=JOINED_TOKENS,
            )  # fmt: skip


NO_SQUARES = Squares(None, None, None)


@triton.jit
def _around(moment, kept, shift, total):
    """As `reference._around`."""
    return tl.where(kept > 0.0, kept * (moment + shift * total), 0.0)


@triton.jit(do_not_specialize=["tiles", "tokens"])
def _merge_pair_kernel(
    parts,  # `PairFold` (tiles, tokens), without targets
    whole,  # `PairFold` (tokens,), without targets, written
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
        if parts.gap is not None:
            tile_gap = tl.load(parts.gap + place, mask=inside, other=0.0)
            if KIND == REVERSE:
                tile_gap = _around(tile_gap, kept, lower - teacher_lower, tile_total)
            else:
                tile_gap = _around(tile_gap, teacher_kept, teacher_lower - lower, teacher_tile_total)
            gap += tl.sum(tile_gap, 0)
        if parts.moment is not None:
            tile_moment = tl.load(parts.moment + place, mask=inside, other=0.0)
            moment += tl.sum(_around(tile_moment, kept, lower, tile_total), 0)
    tl.store(whole.peak + token, peak, mask=live)
    tl.store(whole.sum_exp + token, total, mask=live)
    tl.store(whole.teacher_peak + token, teacher_peak, mask=live)
    tl.store(whole.teacher_sum_exp + token, teacher_total, mask=live)
    if parts.gap is not None:
        tl.store(whole.gap + token, gap, mask=live)
    if parts.moment is not None:
        tl.store(whole.moment + token, moment, mask=live)


@triton.jit(do_not_specialize=["tiles", "tokens"])
def _tile_sums_kernel(
    fold,  # `PairFold` (tiles, tokens)
    squares,  # `Squares`
    out,  # `TileSums`, written
    stride,  # elements between two tokens of `out`
    tiles,
    tokens,
    KIND: tl.constexpr,
    SEVERAL: tl.constexpr,  # tiles of PRODUCT_VOCAB that become one tile of TILE_VOCAB
    TOKENS: tl.constexpr,
):
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    first = tl.program_id(0) * SEVERAL
    peak = tl.full((TOKENS,), LOWEST, tl.float32)
    teacher_peak = tl.full((TOKENS,), LOWEST, tl.float32)
    for tile in tl.static_range(SEVERAL):
        inside = token < tl.where(first + tile < tiles, tokens, 0)
        place = (first + tile).to(tl.int64) * tokens + token
        peak = tl.maximum(peak, tl.load(fold.peak + place, mask=inside, other=LOWEST))
        teacher_peak = tl.maximum(teacher_peak, tl.load(fold.teacher_peak + place, mask=inside, other=LOWEST))
    sum_x = tl.zeros((TOKENS,), tl.float32)
    sum_y = tl.zeros((TOKENS,), tl.float32)
    sum_xx = tl.zeros((TOKENS,), tl.float32)
    sum_xy = tl.zeros((TOKENS,), tl.float32)
    sum_yy = tl.zeros((TOKENS,), tl.float32)
    for tile in tl.static_range(SEVERAL):
        inside = token < tl.where(first + tile < tiles, tokens, 0)
        place = (first + tile).to(tl.int64) * tokens + token
        lower = tl.load(fold.peak + place, mask=inside, other=LOWEST) - peak
        teacher_lower = tl.load(fold.teacher_peak + place, mask=inside, other=LOWEST) - teacher_peak
        kept = tl.exp(lower)
        x = kept * tl.load(fold.sum_exp + place, mask=inside, other=0.0)
        xx = kept * kept * tl.load(squares.xx + place, mask=inside, other=0.0)
        xy = tl.load(squares.xy + place, mask=inside, other=0.0)
        yy = tl.load(squares.yy + place, mask=inside, other=0.0)
        if KIND == REVERSE:
            y = kept * tl.load(fold.gap + place, mask=inside, other=0.0)
            # y = x (a - b), and relative to the new peaks a - b is larger by `shift`. Where `kept` is 0, x is 0 and the
            # difference may be infinite.
            shift = tl.where(kept > 0.0, lower - teacher_lower, 0.0)
            sum_yy += kept * kept * yy + shift * (2.0 * kept * kept * xy + shift * xx)
            sum_xy += kept * kept * xy + shift * xx
            sum_y += y + shift * x
        else:
            teacher_kept = tl.exp(teacher_lower)
            sum_y += teacher_kept * tl.load(fold.teacher_sum_exp + place, mask=inside, other=0.0)
            sum_xy += kept * teacher_kept * xy
            sum_yy += teacher_kept * teacher_kept * yy
        sum_x += x
        sum_xx += xx
    place = token.to(tl.int64) * stride + tl.program_id(0)
    live = token < tokens
    tl.store(out.x + place, sum_x, mask=live)
    tl.store(out.y + place, sum_y, mask=live)
    tl.store(out.xx + place, sum_xx, mask=live)
    tl.store(out.xy + place, sum_xy, mask=live)
    tl.store(out.yy + place, sum_yy, mask=live)
    tl.store(out.peak + place, peak, mask=live)
    tl.store(out.teacher_peak + place, teacher_peak, mask=live)


@triton.jit(do_not_specialize=["first"])
def _gemm_pair_kernel(
    hidden,  # a `matrix` (tokens, H)
    weight,  # a `matrix` (vocab, H), the tile's rows
    out,  # a `matrix` (tokens, vocab) for the gradient; None for the fold
    larger,  # of `KeptPair`, as `out`, or None
    gaps,
    teacher,  # logits (tokens, vocab), float32
    teacher_stride,
    hidden_size,
    bias,
    targets,
    teacher_bias,
    teacher_steps,
    parts,  # `Parts.fold`; None for the gradient
    squares,  # `Parts.squares`; None for the gradient
    own_tops,  # the student's peaks of `KeptPair`, or None
    tops,  # the teacher's peaks of `KeptPair`, or None
    tops_stride,
    gradients,  # `PairGradients`; None for the fold
    tokens,
    vocab,
    first,  # id of the tile's first row
    steps,
    beta,
    KIND: tl.constexpr,
    WHOLE: tl.constexpr,  # the vocabulary is a multiple of TILE_VOCAB, so the last tile is full
    BANS: tl.constexpr,  # logits may be -inf: from a bias, or past the end of the vocabulary
    PARTS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_VOCAB: tl.constexpr,
    TILE_HIDDEN: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    token_tiles, vocab_tiles = tl.cdiv(tokens, TILE_TOKENS), tl.cdiv(vocab, TILE_VOCAB)
    together = tokens_together(token_tiles, TILE_TOKENS * hidden_size)
    source = (teacher, teacher_stride, teacher_bias, teacher_steps)
    kept = (larger, gaps, own_tops, tops, tops_stride)
    for tile in tl.range(tl.program_id(0), token_tiles * vocab_tiles, PROGRAMS, flatten=True):
        token_tile, vocab_tile = tile_place(tile, token_tiles, vocab_tiles, together)
        logits = tile_logits(
            hidden, weight, bias, token_tile, vocab_tile, vocab, hidden_size, TILE_TOKENS, TILE_VOCAB, TILE_HIDDEN
        )
        token = token_tile * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
        live = token < tokens
        start = vocab_tile * TILE_VOCAB
        target = column_of(targets, token, live, first + start)
        if out is None:
            if parts.teacher_target is not None:
                teacher_logits = read_at_target(source, token, live, target, start, vocab, TILE_VOCAB, WHOLE)
                store_at_target(
                    teacher_logits, parts.teacher_target, token, live, target, start, vocab, TILE_VOCAB, WHOLE
                )
            fold_pair_tile(
                logits, token, target, vocab_tile, tokens, vocab, source, parts, squares, kept, steps,
                token_tile * TILE_TOKENS, KIND, WHOLE, BANS, PARTS,
            )  # fmt: skip
        else:
            grad_pair_tile(
                logits, token, target, vocab_tile, tokens, vocab, source, gradients, out, steps,
                token_tile * TILE_TOKENS, beta, KIND, WHOLE, PARTS,
            )  # fmt: skip


class Factors(NamedTuple):
    """The factors of a tile of a head's logits: transform(hidden @ weight.T + bias)."""

    hidden: Tensor  # (n, H)
    weight: Tensor  # (v, H), a vocabulary tile's rows
    bias: Tensor | None  # (v,)
    transform: LogitTransform


class Student(NamedTuple):
    """The student's tile: its factors, its tokens' targets and its first id."""

    factors: Factors
    targets: Tensor  # (n,) ids of the whole vocabulary
    first: int  # id of the tile's first row


def fold_pair(
    student: Student,  # `student.first` is a multiple of PRODUCT_VOCAB
    teacher: Tile,  # (n, v); the stride of its rows is a multiple of GROUP
    measure: Measure,
    parts: Parts,  # of the whole vocabulary, written
    kept: KeptPair | None = None,  # of the whole vocabulary, written
) -> None:
    """Fold the student's product with the teacher's tile; `devices.pairs_apply_to` must hold."""
    assert student.first % PRODUCT_VOCAB == 0
    tile_parts, written = parts.from_tile(student.first // PRODUCT_VOCAB), Written()
    if kept is not None:
        columns = slice(student.first, student.first + student.factors.weight.shape[0])
        tops = (part[:, student.first // (PRODUCT_VOCAB // PARTS) :] for part in (kept.peaks, kept.teacher_peaks))
        written = Written(None, kept.larger[:, columns], kept.gaps[:, columns], *tops)
    _launch(student, teacher, measure, tile_parts, written, None)


def grad_pair(student: Student, teacher: Tile, measure: Measure, tokens: PairGradients) -> Tensor:
    """-> (n, v) dL/d(hidden @ weight.T) in the dtype of `hidden`; `devices.pairs_apply_to` must hold."""
    hidden, n, vocab = student.factors.hidden, student.targets.numel(), student.factors.weight.shape[0]
    out = empty_rows(n, vocab, hidden.dtype, hidden.device)
    _launch(student, teacher, measure, (None, None), Written(out), tokens.contiguous())
    return out


def _groups(rows: Tensor) -> int:
    """The stride of the rows in groups of GROUP numbers, so that the compiler knows that it is a multiple of GROUP."""
    assert rows.stride(0) % GROUP.value == 0
    assert rows.stride(1) == 1
    return rows.stride(0) // GROUP.value


class Written(NamedTuple):
    """The kernel's outputs for each token and entry: (n, v), peaks (n, ceil(v / PRODUCT_VOCAB) * PARTS)."""

    out: Tensor | None = None  # the gradient
    larger: Tensor | None = None  # this and the following fields: those of a `KeptPair`
    gaps: Tensor | None = None
    own_tops: Tensor | None = None
    tops: Tensor | None = None


def _launch(
    student: Student,
    teacher: Tile,
    measure: Measure,
    parts: Parts | tuple[None, None],
    written: Written,
    gradients: PairGradients | None,
) -> None:
    hidden, weight, bias, transform = student.factors
    device, vocab = hidden.device, weight.shape[0]
    teacher_bias = None if teacher.bias is None else teacher.bias.contiguous()
    whole = vocab % PRODUCT_VOCAB == 0
    programs, family = device_programs(device), family_of(device)
    with on(device):
        _gemm_pair_kernel[(programs,)](
            matrix(hidden, TILE_TOKENS, family.step, tma=family.tma),
            matrix(weight, PRODUCT_VOCAB, family.step, tma=family.tma),
            *(
                None if values is None else matrix(values, TILE_TOKENS, PRODUCT_VOCAB, tma=family.tma, parts=PARTS)
                for values in written[:3]
            ),
            teacher.logits,
            _groups(teacher.logits),
            hidden.shape[1],
            None if bias is None else bias.contiguous(),
            student.targets.contiguous(),
            teacher_bias,
            LogitSteps.of(teacher.transform),
            *parts,
            written.own_tops,
            written.tops,
            0 if written.tops is None else written.tops.stride(0),
            gradients,
            hidden.shape[0],
            vocab,
            student.first,
            LogitSteps.of(transform),
            measure.beta,
            KIND=measure.kind,
            WHOLE=whole,
            BANS=not whole or bias is not None or teacher_bias is not None,
            PARTS=PARTS,
            TILE_TOKENS=TILE_TOKENS,
            TILE_VOCAB=PRODUCT_VOCAB,
            TILE_HIDDEN=family.step,
            PROGRAMS=programs,
            num_stages=family.stages if written[:3] == (None, None, None) else family.storing_stages,
            num_warps=WARPS,
        )
