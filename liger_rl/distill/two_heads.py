"""Two passes and one pass over two heads: each token's divergence of a student from a teacher, and its gradient.

`README.md` has the steps. The teacher's logits are read and never differentiated.

A mixture needs both normalisers at every entry, so a few tokens at a time keep float32 rows of both heads for a second
step. Both weights are then read once per `_count_whole_rows` tokens. On an H200 such a read takes as long as the
products of 150 tokens, so 75 tokens are as good as a second sweep; at V = 151936 the workspace holds 276. Two sweeps
run if fewer than MIN_WHOLE_ROWS tokens fit, and if a weight is converted tile by tile.
"""

from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.distill.pair_kernels import find_pair_kernels
from liger_rl.distill.pair_reference import (
    Measure,
    MixtureSums,
    PairFold,
    PairGradients,
    PairStatistics,
    PairTile,
    Tile,
)
from liger_rl.distill.totals import Totals
from liger_rl.head import two_pass
from liger_rl.head.live_tokens import index_of, select_live
from liger_rl.head.record import Gradients, Head, Needs
from liger_rl.head.tiles import VOCAB_ALIGNMENT, Tiles, kind_of, plan_tiles, spans
from liger_rl.kernels import gemm
from liger_rl.kernels.devices import runs_triton
from liger_rl.kernels.limits import LIMITS

# Bytes of a chunk of one pass. Chunks are large, because each chunk reads and writes the sum of the weight's gradient.
ONE_PASS_BYTES = {"cuda": 1 << 30, "cpu": 48 << 20}
VOCAB_TILES = 16  # at most, of copies of a weight in another dtype
MIN_WHOLE_ROWS = 128  # fewest tokens of a product with the whole vocabulary; larger products have a multiple of it


class Pair(NamedTuple):
    """Two heads over the same tokens and the same vocabulary. Their options differ in the transform alone."""

    student: Head
    teacher: Head
    measure: Measure

    def take(self, live: Tensor | None) -> "Pair":
        """The pair of only the tokens `live`, with hidden states in the dtypes of the products."""
        return self._replace(student=self.student.take(live), teacher=self.teacher.take(live))

    @property
    def vocab(self) -> int:
        return self.student.vocab

    # The other methods are for pairs that `take` returned.

    @property
    def heads(self) -> tuple[Head, Head]:
        return self.student, self.teacher

    @property
    def n(self) -> int:
        """Number of tokens."""
        return self.student.hidden.shape[0]

    @property
    def kernels(self) -> ModuleType:
        return find_pair_kernels(self.student.hidden.device)

    def start(self) -> tuple[PairFold, MixtureSums | None]:
        """The sums before the first tile; None without a second step."""
        fold = PairFold.start(self.n, self.student.hidden.device, self.measure)
        return fold, MixtureSums.start(fold.peak) if self.measure.needs_second_step else None

    def tile(self, tokens: slice, first: int, weights: Iterable[Tensor]) -> PairTile:
        """The tile of `tokens` and of the tiles (v, H) of both weights, whose first row is the id `first`."""
        products = (
            gemm.matmul(head.hidden[tokens], weight.T) for head, weight in zip(self.heads, weights, strict=True)
        )
        return self._tile_of_logits(first, *products)

    def _tile_of_logits(self, first: int, logits: Tensor, teacher_logits: Tensor) -> PairTile:
        columns = slice(first, first + logits.shape[1])
        student, teacher = (
            Tile(x, None if head.bias is None else head.bias[columns], head.options.transform)
            for x, head in zip((logits, teacher_logits), self.heads, strict=True)
        )
        return PairTile(student, teacher, self.measure)

    def fold_whole(self, tokens: slice, state: PairFold, sums: MixtureSums | None) -> PairTile:
        """Fold float32 rows of both heads, over the whole vocabulary, into `state` and `sums` of `tokens`."""
        tile = self._tile_of_logits(0, *(_compute_logits(head, tokens) for head in self.heads))
        self.kernels.fold_pair(tile, state)
        if sums is not None:
            statistics = PairStatistics.of(state, self.measure)
            self.kernels.mix_pair(tile, statistics.lse, statistics.teacher_lse, sums)
        return tile

    def tile_gradient(self, tile: PairTile, gradients: PairGradients) -> Tensor:
        """-> dL/dx of the student's logits, in their memory if they have the compute dtype."""
        logits, dtype = tile.student.logits, self.student.dtype
        out = logits if dtype == torch.float32 else torch.empty_like(logits, dtype=dtype)
        self.kernels.grad_pair(tile, gradients, out)
        return out


def forward(pair: Pair) -> PairStatistics:
    """Statistics of every token that counts."""
    rows, measure = pair.take(pair.student.live), pair.measure
    state, sums = rows.start()
    chunk_tokens = None if sums is None else _count_whole_rows(rows)
    if sums is not None and chunk_tokens is not None:
        for tokens in (slice(*span) for span in spans(rows.n, chunk_tokens)):
            rows.fold_whole(tokens, state.take(tokens), sums.take(tokens))
        return PairStatistics.of(state, measure, sums)
    _sweep(rows, lambda tile, tokens: rows.kernels.fold_pair(tile, state.take(tokens)))
    statistics = PairStatistics.of(state, measure)
    if sums is None:
        return statistics
    lse, teacher_lse = statistics.lse, statistics.teacher_lse
    _sweep(rows, lambda tile, tokens: rows.kernels.mix_pair(tile, lse[tokens], teacher_lse[tokens], sums.take(tokens)))
    return PairStatistics.of(state, measure, sums)


def _sweep(rows: Pair, step: Callable[[PairTile, slice], None]) -> None:
    tiles = _plan_tiles(rows)
    for first, last in spans(rows.vocab, tiles.vocab):
        weights = [_weight_tile(head, first, last) for head in rows.heads]
        for tokens in (slice(*span) for span in spans(rows.n, tiles.tokens)):
            # The tile is passed without binding it, so that it is freed before the next one is allocated.
            step(rows.tile(tokens, first, weights), tokens)


def _plan_tiles(rows: Pair, *, bytes_per_gradient: int = 0) -> Tiles:
    """Tiles of both heads."""
    hidden_size, device = sum(head.hidden.shape[1] for head in rows.heads), rows.student.hidden.device
    bytes_per_logit = _bytes_per_logit(device) + bytes_per_gradient
    return plan_tiles(rows.n, rows.vocab, hidden_size, device, rows.student.options, bytes_per_logit=bytes_per_logit)


def _bytes_per_logit(device: torch.device) -> int:
    """Bytes for each entry of a pair of tiles; eager kernels work on float32 copies of both."""
    return 8 if runs_triton(device) else 48


def _weight_tile(head: Head, first: int, last: int) -> Tensor:
    """(v, H) in the dtype of the products."""
    return head.weight[first:last].to(head.hidden.dtype)


def _copies_tiles(head: Head) -> bool:
    """Whether a tile of the weight is a copy, in another dtype."""
    dtype, weight = head.hidden.dtype, head.weight
    # On CPU, 16-bit products run in float32.
    return weight.dtype != dtype or not (weight.is_cuda or dtype == torch.float32)


def _product_columns(head: Head) -> int:
    """Columns of a product, if products cover the whole vocabulary one after the other."""
    if gemm.ADDS_TO_FLOAT32 and not _copies_tiles(head):
        return head.vocab
    return -(-head.vocab // (VOCAB_TILES * VOCAB_ALIGNMENT)) * VOCAB_ALIGNMENT


def _compute_logits(head: Head, tokens: slice) -> Tensor:
    """The tokens' float32 logits over the whole vocabulary."""
    logits = torch.empty(tokens.stop - tokens.start, head.vocab, dtype=torch.float32, device=head.hidden.device)
    for first, last in spans(head.vocab, _product_columns(head)):
        gemm.write(logits[:, first:last], head.hidden[tokens], _weight_tile(head, first, last).T)
    return logits


def _count_whole_rows(rows: Pair) -> int | None:
    """Number of tokens whose logits of both heads over the whole vocabulary fit the workspace; None for two sweeps."""
    if any(_copies_tiles(head) for head in rows.heads):
        return None
    device = rows.student.hidden.device
    tokens = LIMITS.workspace_bytes[kind_of(device)] // (_bytes_per_logit(device) * rows.vocab)
    return None if tokens < MIN_WHOLE_ROWS else tokens // MIN_WHOLE_ROWS * MIN_WHOLE_ROWS


def backward(
    pair: Pair,
    gradients: PairGradients,  # of the tokens that count
    needs: Needs,
) -> Gradients:
    """Gradients of the student's tensors."""
    live, selected = pair.student.live, index_of(gradients.grad != 0)
    if selected is not None:
        live, gradients = select_live(live, selected), gradients.take(selected)
    # The rows are passed without binding them, so that they are freed before the gradients of all tokens are allocated.
    return _tile_gradients(pair.take(live), gradients, needs).of_all_tokens(live, pair.student)


def _tile_gradients(rows: Pair, gradients: PairGradients, needs: Needs) -> Gradients:
    teacher_weights = dict[int, Tensor]()

    def tile_gradient(weight: Tensor, first: int, tokens: slice) -> Tensor:
        if first not in teacher_weights:  # holds one tile, which all spans of tokens share
            teacher_weights.clear()
            teacher_weights[first] = _weight_tile(rows.teacher, first, first + weight.shape[0])
        return rows.tile_gradient(rows.tile(tokens, first, (weight, teacher_weights[first])), gradients.take(tokens))

    dtype = rows.student.dtype
    tiles = _plan_tiles(rows, bytes_per_gradient=dtype.itemsize if dtype != torch.float32 else 0)
    return two_pass.sum_tiles(rows.student, tile_gradient, tiles, needs)


def forward_with_gradients(
    pair: Pair,
    grad: Tensor,  # (n,) float32 dL/d divergence of the tokens that count
    needs: Needs,
) -> tuple[PairStatistics, Gradients]:
    """One pass: as `forward`, and the gradients of the student's tensors."""
    live, weight, measure = pair.student.live, pair.student.weight, pair.measure
    rows = pair.take(live)
    chunks = _split_evenly(rows.n, count_chunk_tokens(pair))
    one_sum = len(chunks) <= 1 and weight.dtype == pair.student.dtype
    totals = Totals(pair.student, weight.dtype if one_sum else torch.float32, needs)
    tiles = spans(pair.vocab, _product_columns(rows.student))
    state, sums = rows.start()
    for tokens in (slice(*chunk) for chunk in chunks):
        chunk_state, chunk_sums = state.take(tokens), None if sums is None else sums.take(tokens)
        tile = rows.fold_whole(tokens, chunk_state, chunk_sums)
        statistics = PairStatistics.of(chunk_state, measure, chunk_sums)
        gradients = PairGradients(statistics.lse, statistics.teacher_lse, grad[tokens], statistics.value)
        tile_gradient = rows.tile_gradient(tile, gradients)
        del tile  # so that the teacher's rows are freed before the products and the next rows are allocated
        index = tokens if live is None else live[tokens]
        totals.add(rows.student.hidden[tokens], index, tiles, partial(_take_columns, tile_gradient))
        del tile_gradient
    return PairStatistics.of(state, measure, sums), totals.finish()


def _take_columns(tile_gradient: Tensor, first: int, last: int) -> Tensor:
    return tile_gradient[:, first:last]


def _split_evenly(n: int, max_tokens: int) -> list[tuple[int, int]]:
    """The fewest near-equal spans of [0, n) of at most `max_tokens`, in multiples of MIN_WHOLE_ROWS if they fit."""
    chunks = -(-n // max_tokens)
    tokens = -(-n // max(chunks, 1))
    return spans(n, min(-(-tokens // MIN_WHOLE_ROWS) * MIN_WHOLE_ROWS, max_tokens))


def count_chunk_tokens(pair: Pair) -> int:
    """Number of tokens of a chunk of one pass."""
    device, dtype = pair.student.hidden.device, pair.student.dtype
    per_token = pair.vocab * (_bytes_per_logit(device) + (dtype.itemsize if dtype != torch.float32 else 0))
    tokens = ONE_PASS_BYTES[kind_of(device)] // per_token
    return max(tokens // MIN_WHOLE_ROWS * MIN_WHOLE_ROWS, MIN_WHOLE_ROWS)
