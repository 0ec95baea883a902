"""Two heads with the rows of some tokens (`PairRows`): tiles of their logits, and products with an epilogue."""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.head.head_options import EngineOptions
from liger_rl.head.interface import Head
from liger_rl.head.live_tokens import TokenSelection
from liger_rl.head.pair import for_device
from liger_rl.head.pair.pair_reference import (
    FORWARD,
    KeptPair,
    Measure,
    MixtureSums,
    PairFold,
    PairGradients,
    PairStatistics,
    PairTile,
    Tile,
)
from liger_rl.head.tiles import (
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


class Pair(NamedTuple):
    """Two heads over the same tokens, and the options of a call."""

    student: Head
    teacher: Head
    vocab: int  # entries of the vocabulary from `vocab` on are padding
    options: EngineOptions
    teacher_options: EngineOptions  # the student's, except for transform and dtype
    measure: Measure
    targets: bool  # whether to compute log-probabilities at the targets

    def epilogue_applies(self, tokens: int) -> bool:
        """Whether the products of both heads have an epilogue, for `tokens` rows that will be aligned."""
        return not self.options.names_chunk and all(
            devices.pairs_apply_to(tokens, head.hidden.shape[1], options.compute_dtype, head.weight)
            for head, options in ((self.student, self.options), (self.teacher, self.teacher_options))
        )


class Side:
    """One head's gathered rows, and the tiles of its weight and its logits."""

    def __init__(self, head: Head, live: TokenSelection, options: EngineOptions) -> None:
        self.rows, self.options = head.gathered(options.compute_dtype, live), options
        self.factor = self.rows.hidden

    @property
    def converts(self) -> bool:
        """Whether a tile of the weight is a copy, in another dtype."""
        dtype, weight = self.options.compute_dtype, self.rows.weight
        as_it_is = weight.is_cuda or dtype == torch.float32  # on CPU, 16-bit products run in float32
        return self.bytes_per_entry > 0 or not as_it_is

    @property
    def bytes_per_entry(self) -> int:
        """Bytes of a copied row of the weight, if tiles are copies in another dtype; otherwise 0."""
        dtype = self.options.compute_dtype
        return 0 if self.rows.weight.dtype == dtype else dtype.itemsize * self.rows.weight.shape[1]

    def weight_tile(self, first: int, last: int) -> Tensor:
        """(v, H) in the compute dtype. A copy is contiguous, as our own products need it."""
        weight, dtype = self.rows.weight[first:last], self.options.compute_dtype
        return weight if weight.dtype == dtype else weight.to(dtype, memory_format=torch.contiguous_format)

    def bias_tile(self, first: int, last: int) -> Tensor | None:
        return None if self.rows.bias is None else self.rows.bias[first:last]

    def factors(self, part: slice, first: int, last: int) -> HeadFactors:
        bias = self.bias_tile(first, last)
        return HeadFactors(self.factor[part], self.weight_tile(first, last), bias, self.options.transform)

    def width(self, vocab: int) -> int:
        """Columns of a product, if products cover the whole vocabulary one after the other."""
        return vocab if gemm.ADDS_TO_FLOAT32 and not self.converts else free_tile_vocab(vocab)

    def whole_tile(self, part: slice, vocab: int) -> Tile:
        """The tokens' float32 logits over the whole vocabulary."""
        logits = torch.empty(part.stop - part.start, vocab, dtype=torch.float32, device=self.factor.device)
        for first, last in spans(vocab, self.width(vocab)):
            gemm.write(logits[:, first:last], self.factor[part], self.weight_tile(first, last).T)
        return Tile(logits, self.bias_tile(0, vocab), self.options.transform)

    def tile(self, part: slice, weight_tile: Tensor, first: int) -> Tile:
        logits = gemm.matmul(self.factor[part], weight_tile.T)
        return Tile(logits, self.bias_tile(first, first + logits.shape[1]), self.options.transform)


# The statistics of n tokens, and a function that turns their gradients into dL/dlogits (n, V). It may be called once.
ValuesAndGradient = tuple[PairStatistics, Callable[[PairGradients], Tensor]]


class PairRows:
    """Both heads of a pair with the rows of the tokens in `live`."""

    def __init__(self, pair: Pair, live: TokenSelection) -> None:
        self.student = Side(pair.student, live, pair.options)
        self.teacher = Side(pair.teacher, live, pair.teacher_options)
        self.pair, self.vocab, self.measure = pair, pair.vocab, pair.measure
        self.targets, self.device = self.student.rows.targets, self.student.factor.device
        self.count = self.targets.numel()  # of tokens
        self.kernels = for_device(self.device)
        # For each entry of the vocabulary.
        self.copied_bytes = self.student.bytes_per_entry + self.teacher.bytes_per_entry

    @property
    def epilogue(self) -> ModuleType | None:
        """None if the epilogue does not apply, for example on a rank whose part of the vocabulary is padding only."""
        aligned = all(devices.aligned(side.factor) for side in (self.student, self.teacher))
        if not (self.vocab and self.pair.epilogue_applies(self.count) and aligned):
            return None
        from liger_rl.head.pair import epilogue

        return epilogue

    # --- tiles of float32 logits in memory ---

    def weight_tiles(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        return self.student.weight_tile(first, last), self.teacher.weight_tile(first, last)

    def tile(self, part: slice, factors: tuple[Tensor, Tensor], first: int) -> PairTile:
        """`factors` are the `weight_tiles` from `first` on."""
        tiles = self.student.tile(part, factors[0], first), self.teacher.tile(part, factors[1], first)
        return PairTile(*tiles, self.targets[part], first, self.measure)

    def empty_fold(self, count: int) -> tuple[PairFold, MixtureSums | None]:
        """The sums of `count` tokens before the first tile; None without a second step."""
        options, targets = self.pair.options, self.pair.targets
        fold = PairFold.start(count, self.device, self.measure, entropy=options.entropy, targets=targets)
        return fold, MixtureSums.start(fold.peak) if self.measure.second_step else None

    def whole_tile(self, part: slice) -> PairTile:
        """The tokens' float32 rows of both heads over the whole vocabulary."""
        tiles = self.student.whole_tile(part, self.vocab), self.teacher.whole_tile(part, self.vocab)
        return PairTile(*tiles, self.targets[part], 0, self.measure)

    def fold_whole(self, part: slice, state: PairFold, sums: MixtureSums | None) -> PairTile:
        """Add the tokens `part` over the whole vocabulary to `state` and `sums` of these tokens.

        -> the `whole_tile`, which takes both steps of a mixture.
        """
        tile = self.whole_tile(part)
        self.kernels.fold_pair(tile, state)
        if sums is not None:
            known = PairStatistics.of(state, self.measure)
            self.kernels.mix_pair(tile, known.lse, known.teacher_lse, sums)
        return tile

    def tile_gradient(self, tile: PairTile, tokens: PairGradients) -> Tensor:
        """-> dL/dx of the student's logits, in their memory if they have the compute dtype."""
        logits, dtype = tile.student.logits, self.pair.options.compute_dtype
        out = logits if dtype == torch.float32 else torch.empty_like(logits, dtype=dtype)
        self.kernels.grad_pair(tile, tokens, out)
        return out

    def whole_rows(self, part: slice) -> ValuesAndGradient:
        """Values and gradient from float32 rows of both heads. A float32 gradient overwrites the student's rows."""
        state, sums = self.empty_fold(part.stop - part.start)
        tile = self.fold_whole(part, state, sums)
        known = PairStatistics.of(state, self.measure)
        known = known if sums is None else known.with_sums(self.measure, sums)
        return known, lambda tokens: self.tile_gradient(tile, tokens)

    # --- products with an epilogue ---

    def factors(self, part: slice, first: int, last: int) -> tuple[HeadFactors, HeadFactors, Tensor, int, Measure]:
        """Arguments of the epilogue for tokens `part` and entries `first` to `last` - 1."""
        student, teacher = (side.factors(part, first, last) for side in (self.student, self.teacher))
        return student, teacher, self.targets[part], first, self.measure

    def gradient_tiles(self) -> Tiles:
        """The tiles of calls of the epilogue's `grad_pair`."""
        from liger_rl.kernels.epilogue import device_programs

        kind, hidden_size = kind_of(self.device), self.student.factor.shape[1]
        chunk = max(min(self.count, MAX_CHUNK_TOKENS[kind]), 1)
        # The student's products copy its weight once more. Chunks add up the gradient of a tile's weight in float32.
        bytes_per_column = self.pair.options.compute_dtype.itemsize * chunk + self.student.bytes_per_entry
        bytes_per_column += self.copied_bytes + (4 * hidden_size if self.count > chunk else 0)
        most = min(WORKSPACE_BYTES[kind] // bytes_per_column, -(-self.vocab // BLOCK_VOCAB) * BLOCK_VOCAB)
        return Tiles(chunk, min(whole_waves(chunk, most, device_programs(self.device)), self.vocab))

    def fold(self, epilogue: ModuleType) -> PairFold:
        """The fold of all tokens."""
        # Twice as many tokens at a time if weights are copied, because each time copies both weights.
        parts = (slice(*span) for span in spans(self.count, MERGED_TOKENS * (2 if self.copied_bytes else 1)))
        folds = [self._fold(epilogue, part, None) for part in parts]
        return PairFold._make(None if part[0] is None else torch.cat(part) for part in zip(*folds, strict=True))

    def _fold(self, epilogue: ModuleType, part: slice, kept: KeptPair | None) -> PairFold:
        """The fold of the tokens `part` over the vocabulary; `kept` is written."""
        tiles = epilogue.unwritten_tiles(
            part.stop - part.start, self.vocab, self.device, self.measure,
            entropy=self.pair.options.entropy, targets=self.pair.targets,
        )  # fmt: skip
        columns = COPIED_BYTES // self.copied_bytes // BLOCK_VOCAB * BLOCK_VOCAB if self.copied_bytes else self.vocab
        for first, last in spans(self.vocab, max(columns, BLOCK_VOCAB)):
            epilogue.fold_pair(*self.factors(part, first, last), tiles, kept)
        return epilogue.merged(tiles, self.measure)

    def kept_rows(self, epilogue: ModuleType, part: slice) -> ValuesAndGradient:
        """Values of the tokens `part`, and their gradient, which takes the memory of `KeptPair.larger`."""
        from liger_rl.head.pair import kept_triton

        options, measure = self.pair.options, self.measure
        kept = KeptPair.empty(part.stop - part.start, self.vocab, self.device)
        known = PairStatistics.of(self._fold(epilogue, part, kept), measure)
        if measure.kind != FORWARD:
            known = known.with_sums(measure, kept_triton.sum_kept(kept, measure, known))

        def gradient(tokens: PairGradients) -> Tensor:
            out = kept.larger.view(options.compute_dtype)
            kept_triton.grad_kept_pair(kept, self.targets[part], options.transform, measure, tokens, out)
            return out

        return known, gradient
