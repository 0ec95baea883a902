"""One head of a pair (`Side`), and folds and gradients in the epilogue of the student's product (`PairProducts`).

The teacher's logits of a tile are made first. The student's product reads them in its epilogue, so no tile of the
student's logits is written to memory.
"""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from liger_rl.call.low_rank import LowRankRows
from liger_rl.call.options import EngineOptions
from liger_rl.engines.interface import Head
from liger_rl.engines.pair.reference import (
    FORWARD,
    Factors,
    KeptPair,
    Measure,
    PairFold,
    PairGradients,
    PairStatistics,
    Tile,
    TileSums,
)
from liger_rl.engines.tiles import (
    MAX_CHUNK_TOKENS,
    WORKSPACE_BYTES,
    Tiles,
    free_tile_vocab,
    kind_of,
    spans,
    whole_waves,
)
from liger_rl.kernels import devices, gemm
from liger_rl.kernels.statistics import BLOCK_VOCAB

# Bytes of the teacher's logits and of copies of weights that a fold has in memory at a time. Tokens whose folds of
# tiles, 24 bytes for each tile, are merged at a time.
TEACHER_BYTES, MERGED_TOKENS = 128 << 20, 4096
ROW_MULTIPLE = 8  # the rows of logits have a stride of a multiple of 8 numbers
# Bytes of a `KeptPair` for each entry, and for a chunk of one pass. Chunks are large, because each chunk reads and
# writes the sum of the weight's gradient.
KEPT_BYTES, KEPT_MOST_BYTES = 4, 5 << 28


class Side:
    """One head's gathered rows, and the tiles of its weight and its logits."""

    def __init__(self, rows: Head, options: EngineOptions) -> None:
        self.rows, self.options = rows, options
        self.low_rank = LowRankRows.of(rows.low_inputs, rows.low_weight)
        self.factor = rows.hidden if self.low_rank is None else self.low_rank.beside_rows(rows.hidden)

    @property
    def converts(self) -> bool:
        """Whether a tile of the weight is a copy: in another dtype, or joined with a low-rank factor."""
        dtype, weight = self.options.compute_dtype, self.rows.weight
        as_it_is = weight.is_cuda or dtype == torch.float32  # on CPU, 16-bit products run in float32
        return self.bytes_per_entry > 0 or self.low_rank is not None or not as_it_is

    @property
    def bytes_per_entry(self) -> int:
        """Bytes of a copied row of the weight, if tiles are copies in another dtype; otherwise 0."""
        dtype = self.options.compute_dtype
        return 0 if self.rows.weight.dtype == dtype else dtype.itemsize * self.rows.weight.shape[1]

    def weight_tile(self, first: int, last: int) -> Tensor:
        """(v, H) in the compute dtype, without a low-rank term. A copy is contiguous, as our own products need it."""
        weight, dtype = self.rows.weight[first:last], self.options.compute_dtype
        return weight if weight.dtype == dtype else weight.to(dtype, memory_format=torch.contiguous_format)

    def factor_tile(self, first: int, last: int) -> Tensor:
        """(v, H), or (v, H + columns of the low-rank term) to match the columns of `factor`."""
        weight_tile = self.weight_tile(first, last)
        return weight_tile if self.low_rank is None else self.low_rank.beside_tile(weight_tile, first)

    def bias_tile(self, first: int, last: int) -> Tensor | None:
        return None if self.rows.bias is None else self.rows.bias[first:last]

    def factors(self, part: slice, first: int, last: int) -> Factors:
        """Without a low-rank term."""
        bias = self.bias_tile(first, last)
        return Factors(self.factor[part], self.weight_tile(first, last), bias, self.options.transform)

    def width(self, vocab: int) -> int:
        """Columns of a product, if products cover the whole vocabulary one after the other."""
        return vocab if gemm.ADDS_TO_FLOAT32 and not self.converts else free_tile_vocab(vocab)

    def whole_tile(self, part: slice, vocab: int) -> Tile:
        """The tokens' float32 logits over the whole vocabulary, without a low-rank term."""
        logits = self._unwritten(part, vocab)
        for first, last in spans(vocab, self.width(vocab)):
            gemm.write(logits[:, first:last], self.factor[part], self.weight_tile(first, last).T)
        return Tile(logits, self.bias_tile(0, vocab), self.options.transform)

    def tile(self, part: slice, factor_tile: Tensor, first: int) -> Tile:
        logits = self._unwritten(part, factor_tile.shape[0])
        gemm.write(logits, self.factor[part], factor_tile.T)
        return Tile(logits, self.bias_tile(first, first + logits.shape[1]), self.options.transform)

    def _unwritten(self, part: slice, columns: int) -> Tensor:
        width = -(-columns // ROW_MULTIPLE) * ROW_MULTIPLE
        n, device = part.stop - part.start, self.factor.device
        return torch.empty(n, width, dtype=torch.float32, device=device)[:, :columns]


# The statistics of n tokens, and a function that turns their gradients into dL/dlogits (n, V). It may be called once.
ValuesAndGradient = tuple[PairStatistics, Callable[[PairGradients], Tensor]]


class PairProducts:
    """Folds and gradients of the student's product, whose epilogue reads the teacher's tiles."""

    def __init__(self, epilogue: ModuleType, student: Side, teacher: Side, vocab: int, measure: Measure) -> None:
        self.epilogue, self.student, self.teacher = epilogue, student, teacher
        self.vocab, self.measure = vocab, measure
        self.copied_bytes = student.bytes_per_entry + teacher.bytes_per_entry  # for each entry of the vocabulary

    @staticmethod
    def applies_to(student: Head, options: EngineOptions) -> bool:
        """Whether the student's product has the epilogue; `student` need not be gathered."""
        if student.low_inputs is not None or options.names_chunk:
            return False
        tokens, hidden_size = student.live.count, student.hidden.shape[1]
        return devices.pairs_apply_to(tokens, hidden_size, options.compute_dtype, student.weight)

    @classmethod
    def of(cls, student: Side, teacher: Side, vocab: int, measure: Measure) -> "PairProducts | None":
        """None if the epilogue does not apply, for example on a rank whose part of the vocabulary is padding only."""
        if not vocab or not cls.applies_to(student.rows, student.options) or not devices.aligned(student.factor):
            return None
        from liger_rl.engines.pair import epilogue

        return cls(epilogue, student, teacher, vocab, measure)

    def _tile(self, part: slice, first: int, last: int) -> tuple[Factors, Tile, Tensor, int, Measure]:
        """Arguments of the epilogue for tokens `part` and entries `first` to `last` - 1."""
        student = self.student.factors(part, first, last)
        teacher = self.teacher.tile(part, self.teacher.factor_tile(first, last), first)
        return student, teacher, self.student.rows.targets[part], first, self.measure

    def _columns(self, tokens: int, bytes_per_column: int, most_bytes: int) -> int:
        """Entries of a tile of `tokens` tokens, so that the teacher's float32 logits fit `most_bytes` with the rest."""
        from liger_rl.kernels.epilogue import device_programs

        programs = device_programs(self.student.factor.device)
        bytes_per_column += self.copied_bytes + 4 * tokens
        most = min(most_bytes // bytes_per_column, -(-self.vocab // BLOCK_VOCAB) * BLOCK_VOCAB)
        return min(whole_waves(tokens, most, programs), self.vocab)

    def gradient_tiles(self, tokens: int) -> Tiles:
        """The tiles of calls of `gradient` for `tokens` tokens in all."""
        kind = kind_of(self.student.factor.device)
        chunk = max(min(tokens, MAX_CHUNK_TOKENS[kind]), 1)
        # The student's products copy its weight once more.
        bytes_per_column = self.student.options.compute_dtype.itemsize * chunk + self.student.bytes_per_entry
        if tokens > chunk:  # chunks add up the gradient of a tile's weight in float32
            bytes_per_column += 4 * self.student.factor.shape[1]
        return Tiles(chunk, self._columns(chunk, bytes_per_column, WORKSPACE_BYTES[kind]))

    def _fold(
        self, part: slice, *, targets: bool, sums: TileSums | None = None, kept: KeptPair | None = None
    ) -> PairFold:
        """The fold of the tokens `part` over the vocabulary; `sums` and `kept` are written."""
        n, device, options = part.stop - part.start, self.student.factor.device, self.student.options
        tiles = self.epilogue.unwritten_tiles(
            n, self.vocab, device, self.measure, entropy=options.entropy, targets=targets, squares=sums is not None
        )
        for first, last in spans(self.vocab, self._columns(n, 0, TEACHER_BYTES)):
            self.epilogue.fold_pair(*self._tile(part, first, last), tiles, kept)
        if sums is not None:
            self.epilogue.write_tile_sums(tiles, self.measure, sums)
        return self.epilogue.merged(tiles, self.measure)

    def fold(self, *, targets: bool, sums: TileSums | None) -> PairFold:
        """The fold of all tokens; `sums` are written."""
        folds = []
        # Twice as many tokens at a time if weights are copied, because each time copies both weights.
        for start, stop in spans(self.student.factor.shape[0], MERGED_TOKENS * (2 if self.copied_bytes else 1)):
            part = slice(start, stop)
            folds.append(self._fold(part, targets=targets, sums=None if sums is None else sums.part(part, 0)))
        return PairFold._make(None if part[0] is None else torch.cat(part) for part in zip(*folds, strict=True))

    def values_and_gradient(self, part: slice, *, targets: bool) -> ValuesAndGradient:
        """Values of the tokens `part`, and their gradient, which takes the memory of `KeptPair.larger`."""
        from liger_rl.engines.pair import kept_triton

        kept = KeptPair.empty(part.stop - part.start, self.vocab, self.student.factor.device)
        measure = self.measure
        known = PairStatistics.of(self._fold(part, targets=targets, kept=kept), measure)
        if measure.kind != FORWARD:
            known = known.with_sums(measure, kept_triton.sum_kept(kept, measure, known.lse, known.teacher_lse))
        options, ids = self.student.options, self.student.rows.targets[part]

        def gradient(tokens: PairGradients) -> Tensor:
            out = kept.larger.view(options.compute_dtype)
            kept_triton.grad_kept_pair(kept, ids, options.transform, measure, tokens, out)
            return out

        return known, gradient

    def gradient(self, part: slice, first: int, last: int, tokens: PairGradients) -> Tensor:
        """-> dL/dlogits (n, v) of the student for tokens `part` and entries `first` to `last` - 1, in compute_dtype."""
        return self.epilogue.grad_pair(*self._tile(part, first, last), tokens)
