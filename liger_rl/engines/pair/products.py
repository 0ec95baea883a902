"""One head of a pair (`Side`), and folds and gradients in the epilogue of both heads' products (`PairProducts`)."""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from liger_rl.call.low_rank import LowRankRows
from liger_rl.call.options import EngineOptions
from liger_rl.engines.interface import Head
from liger_rl.engines.pair.reference import (
    FORWARD,
    KeptPair,
    Measure,
    PairFold,
    PairGradients,
    PairStatistics,
    Tile,
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
from liger_rl.kernels.transform import HeadFactors

# Bytes of copies of weights that a fold has in memory at a time. Tokens whose folds of tiles, 24 bytes for each tile of
# 128 entries, are merged at a time.
COPIED_BYTES, MERGED_TOKENS = 128 << 20, 4096
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

    def factors(self, part: slice, first: int, last: int) -> HeadFactors:
        """Without a low-rank term."""
        bias = self.bias_tile(first, last)
        return HeadFactors(self.factor[part], self.weight_tile(first, last), bias, self.options.transform)

    def width(self, vocab: int) -> int:
        """Columns of a product, if products cover the whole vocabulary one after the other."""
        return vocab if gemm.ADDS_TO_FLOAT32 and not self.converts else free_tile_vocab(vocab)

    def whole_tile(self, part: slice, vocab: int) -> Tile:
        """The tokens' float32 logits over the whole vocabulary, without a low-rank term."""
        logits = torch.empty(part.stop - part.start, vocab, dtype=torch.float32, device=self.factor.device)
        for first, last in spans(vocab, self.width(vocab)):
            gemm.write(logits[:, first:last], self.factor[part], self.weight_tile(first, last).T)
        return Tile(logits, self.bias_tile(0, vocab), self.options.transform)

    def tile(self, part: slice, factor_tile: Tensor, first: int) -> Tile:
        rows, columns = self.factor[part], factor_tile.shape[0]
        logits = torch.empty(rows.shape[0], columns, dtype=torch.float32, device=rows.device)
        gemm.write(logits, rows, factor_tile.T)
        return Tile(logits, self.bias_tile(first, first + columns), self.options.transform)


# The statistics of n tokens, and a function that turns their gradients into dL/dlogits (n, V). It may be called once.
ValuesAndGradient = tuple[PairStatistics, Callable[[PairGradients], Tensor]]


class PairProducts:
    """Folds and gradients in the epilogue of both heads' products."""

    def __init__(self, epilogue: ModuleType, student: Side, teacher: Side, vocab: int, measure: Measure) -> None:
        self.epilogue, self.student, self.teacher = epilogue, student, teacher
        self.vocab, self.measure = vocab, measure
        self.copied_bytes = student.bytes_per_entry + teacher.bytes_per_entry  # for each entry of the vocabulary

    @staticmethod
    def applies_to(student: Head, teacher: Head, options: EngineOptions, teacher_options: EngineOptions) -> bool:
        """Whether both products have the epilogue; neither head need be gathered."""
        return not options.names_chunk and all(
            head.low_inputs is None
            and devices.pairs_apply_to(student.live.count, head.hidden.shape[1], of_head.compute_dtype, head.weight)
            for head, of_head in ((student, options), (teacher, teacher_options))
        )

    @classmethod
    def of(cls, student: Side, teacher: Side, vocab: int, measure: Measure) -> "PairProducts | None":
        """None if the epilogue does not apply, for example on a rank whose part of the vocabulary is padding only."""
        if not vocab or not cls.applies_to(student.rows, teacher.rows, student.options, teacher.options):
            return None
        if not all(devices.aligned(side.factor) for side in (student, teacher)):
            return None
        from liger_rl.engines.pair import epilogue

        return cls(epilogue, student, teacher, vocab, measure)

    def _tile(self, part: slice, first: int, last: int) -> tuple[HeadFactors, HeadFactors, Tensor, int, Measure]:
        """Arguments of the epilogue for tokens `part` and entries `first` to `last` - 1."""
        student, teacher = (side.factors(part, first, last) for side in (self.student, self.teacher))
        return student, teacher, self.student.rows.targets[part], first, self.measure

    def gradient_tiles(self, tokens: int) -> Tiles:
        """The tiles of calls of `gradient` for `tokens` tokens in all."""
        from liger_rl.kernels.epilogue import device_programs

        kind, hidden_size = kind_of(self.student.factor.device), self.student.factor.shape[1]
        chunk = max(min(tokens, MAX_CHUNK_TOKENS[kind]), 1)
        # The student's products copy its weight once more. Chunks add up the gradient of a tile's weight in float32.
        bytes_per_column = self.student.options.compute_dtype.itemsize * chunk + self.student.bytes_per_entry
        bytes_per_column += self.copied_bytes + (4 * hidden_size if tokens > chunk else 0)
        most = min(WORKSPACE_BYTES[kind] // bytes_per_column, -(-self.vocab // BLOCK_VOCAB) * BLOCK_VOCAB)
        return Tiles(chunk, min(whole_waves(chunk, most, device_programs(self.student.factor.device)), self.vocab))

    def _fold(self, part: slice, *, targets: bool, kept: KeptPair | None = None) -> PairFold:
        """The fold of the tokens `part` over the vocabulary; `kept` is written."""
        n, device, options = part.stop - part.start, self.student.factor.device, self.student.options
        tiles = self.epilogue.unwritten_tiles(
            n, self.vocab, device, self.measure, entropy=options.entropy, targets=targets
        )
        columns = COPIED_BYTES // self.copied_bytes // BLOCK_VOCAB * BLOCK_VOCAB if self.copied_bytes else self.vocab
        for first, last in spans(self.vocab, max(columns, BLOCK_VOCAB)):
            self.epilogue.fold_pair(*self._tile(part, first, last), tiles, kept)
        return self.epilogue.merged(tiles, self.measure)

    def fold(self, *, targets: bool) -> PairFold:
        """The fold of all tokens."""
        # Twice as many tokens at a time if weights are copied, because each time copies both weights.
        parts = spans(self.student.factor.shape[0], MERGED_TOKENS * (2 if self.copied_bytes else 1))
        folds = [self._fold(slice(*part), targets=targets) for part in parts]
        return PairFold._make(None if part[0] is None else torch.cat(part) for part in zip(*folds, strict=True))

    def values_and_gradient(self, part: slice, *, targets: bool) -> ValuesAndGradient:
        """Values of the tokens `part`, and their gradient, which takes the memory of `KeptPair.larger`."""
        from liger_rl.engines.pair import kept_triton

        kept = KeptPair.empty(part.stop - part.start, self.vocab, self.student.factor.device)
        measure = self.measure
        known = PairStatistics.of(self._fold(part, targets=targets, kept=kept), measure)
        if measure.kind != FORWARD:
            sums = kept_triton.sum_kept(kept, measure, known.lse, known.teacher_lse)
            if known.divergence is not None:
                # A finite mean of finite log ratios would make the gradient of an infinite value finite.
                sums = sums._replace(student=torch.where(known.divergence.isinf(), torch.inf, sums.student))
            known = known.with_sums(measure, sums)
        options, ids = self.student.options, self.student.rows.targets[part]

        def gradient(tokens: PairGradients) -> Tensor:
            out = kept.larger.view(options.compute_dtype)
            kept_triton.grad_kept_pair(kept, ids, options.transform, measure, tokens, out)
            return out

        return known, gradient

    def gradient(self, part: slice, first: int, last: int, tokens: PairGradients) -> Tensor:
        """-> dL/dlogits (n, v) of the student for tokens `part` and entries `first` to `last` - 1, in compute_dtype."""
        return self.epilogue.grad_pair(*self._tile(part, first, last), tokens)
