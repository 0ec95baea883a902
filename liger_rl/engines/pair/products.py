"""One head of a pair (`Side`), and folds and gradients in the epilogue of the student's product (`PairProducts`).

The teacher's logits of a tile are made first. The student's product reads them in its epilogue, so no tile of the
student's logits is written to memory.
"""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.call.low_rank import LowRankRows
from liger_rl.call.options import EngineOptions
from liger_rl.engines.interface import Head
from liger_rl.engines.pair.reference import (
    FORWARD,
    Measure,
    MixtureSums,
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

    def factor_tile(self, weight_tile: Tensor, first: int) -> Tensor:
        return weight_tile if self.low_rank is None else self.low_rank.beside_tile(weight_tile, first)

    def width(self, vocab: int) -> int:
        """Columns of a product, if products cover the whole vocabulary one after the other."""
        return vocab if gemm.ADDS_TO_FLOAT32 and not self.converts else free_tile_vocab(vocab)

    def whole_tile(self, part: slice, vocab: int) -> Tile:
        """The tokens' float32 logits over the whole vocabulary, without a low-rank term."""
        factor, bias = self.factor[part], self.rows.bias
        logits = torch.empty(factor.shape[0], vocab, dtype=torch.float32, device=factor.device)
        for first, last in spans(vocab, self.width(vocab)):
            gemm.write(logits[:, first:last], factor, self.weight_tile(first, last).T)
        return Tile(logits, None if bias is None else bias[:vocab], self.options.transform)

    def tile(self, part: slice, factor_tile: Tensor, first: int) -> Tile:
        bias = self.rows.bias
        rows, columns = self.factor[part], factor_tile.shape[0]
        width = -(-columns // ROW_MULTIPLE) * ROW_MULTIPLE
        logits = torch.empty(rows.shape[0], width, dtype=torch.float32, device=rows.device)[:, :columns]
        gemm.write(logits, rows, factor_tile.T)
        return Tile(logits, None if bias is None else bias[first : first + columns], self.options.transform)


class PairValues(NamedTuple):
    """Results of the forward for the n tokens that count, float32."""

    divergence: Tensor  # (n,)
    statistics: PairStatistics
    # (n,) `PairGradients.value`: the divergence itself, or the student's sum of a mixture or of a `KeptPair`.
    value: Tensor
    tile_sums: TileSums | None = None  # None unless `forward` was called with `bounded` and can make them

    @classmethod
    def of(cls, known: PairStatistics, measure: Measure, sums: MixtureSums | None) -> "PairValues":
        """`sums` are those of a mixture, or of the `KeptPair` of a reverse KL divergence."""
        if known.divergence is not None:
            return cls(known.divergence, known, known.divergence if sums is None else sums.student)
        assert sums is not None
        mixed = (measure.beta * sums.teacher + (1.0 - measure.beta) * sums.student).clamp_(min=0.0)
        return cls(mixed, known, sums.student)


# The values of n tokens, and a function that turns their gradients into dL/dlogits (n, V). It may be called once only.
ValuesAndGradient = tuple[PairValues, Callable[[PairGradients], Tensor]]


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

    def _tile(self, part: slice, first: int, last: int) -> tuple:
        """-> `epilogue.Student` and the teacher's `Tile` of tokens `part` and entries `first` to `last` - 1."""
        side, rows = self.student, self.student.rows
        bias = None if rows.bias is None else rows.bias[first:last]
        factors = self.epilogue.Factors(side.factor[part], side.weight_tile(first, last), bias, side.options.transform)
        student = self.epilogue.Student(factors, rows.targets[part], first)
        weight_tile = self.teacher.weight_tile(first, last)
        return student, self.teacher.tile(part, self.teacher.factor_tile(weight_tile, first), first)

    def _columns(self, tokens: int, bytes_per_column: int, most_bytes: int) -> int:
        """Entries of a tile of `tokens` tokens, so that the teacher's float32 logits fit `most_bytes` with the rest."""
        programs = self.epilogue.device_programs(self.student.factor.device)
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

    def _fold(self, part: slice, *, targets: bool, sums: TileSums | None, keep: bool) -> tuple:
        """-> the `PairFold` of the tokens `part` over the vocabulary, and their `KeptPair`, or None without `keep`."""
        n, device, options = part.stop - part.start, self.student.factor.device, self.student.options
        parts = self.epilogue.Parts.unwritten(
            n, self.vocab, device, self.measure, entropy=options.entropy, targets=targets, squares=sums is not None
        )
        kept = parts.kept(self.vocab) if keep else None
        for first, last in spans(self.vocab, self._columns(n, 0, TEACHER_BYTES)):
            student, teacher = self._tile(part, first, last)
            self.epilogue.fold_pair(student, teacher, self.measure, parts, kept)
            del student, teacher  # frees the tile before the next one is allocated
        if sums is not None:
            parts.tile_sums(self.measure, sums)
        return parts.merged(self.measure), kept

    def fold(self, *, targets: bool, sums: TileSums | None) -> PairFold:
        """The fold of all tokens; `sums` are written."""
        folds = []
        # Twice as many tokens at a time if weights are copied, because each time copies both weights.
        for start, stop in spans(self.student.factor.shape[0], MERGED_TOKENS * (2 if self.copied_bytes else 1)):
            part = slice(start, stop)
            here = None if sums is None else sums.part(part, 0)
            folds.append(self._fold(part, targets=targets, sums=here, keep=False)[0])
        return PairFold._make(None if part[0] is None else torch.cat(part) for part in zip(*folds, strict=True))

    def values_and_gradient(self, part: slice, *, targets: bool) -> ValuesAndGradient:
        """Values of the tokens `part`, and their gradient, which takes the memory of `KeptPair.larger`."""
        fold, kept = self._fold(part, targets=targets, sums=None, keep=True)
        known, sums = PairStatistics.of(fold, self.measure), None
        if self.measure.kind != FORWARD:
            sums = self.epilogue.sum_kept(kept, self.measure, known.lse, known.teacher_lse)
        options, ids = self.student.options, self.student.rows.targets[part]

        def gradient(tokens: PairGradients) -> Tensor:
            out = kept.larger.view(options.compute_dtype)
            self.epilogue.grad_kept_pair(kept, ids, options.transform, self.measure, tokens, out)
            return out

        return PairValues.of(known, self.measure, sums), gradient

    def gradient(self, part: slice, first: int, last: int, tokens: PairGradients) -> Tensor:
        """-> dL/dlogits (n, v) of the student for tokens `part` and entries `first` to `last` - 1, in compute_dtype."""
        return self.epilogue.grad_pair(*self._tile(part, first, last), self.measure, tokens)
