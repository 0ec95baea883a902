"""Two passes and one pass over two heads: each token's divergence of a student from a teacher, and its gradient.

`README.md` has the steps. The teacher's logits are read and never differentiated.

A mixture needs both normalisers at every entry, so a few tokens at a time keep float32 rows of both heads for a second
step. Both weights are then read once per `_whole_rows` tokens. On an H200 such a read takes as long as the products of
150 tokens, so 75 tokens are as good as a second sweep; at V = 151936 the workspace holds 276. Two sweeps run if under
MIN_WHOLE_ROWS tokens fit, if a chunk is named, if a weight is converted tile by tile, and if the vocabulary is sharded,
because no collective stands inside a loop.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from liger_rl.head.dense import two_pass
from liger_rl.head.dense.totals import Totals
from liger_rl.head.interface import Gradients, Needs, with_gradient
from liger_rl.head.pair.pair_reference import MixtureSums, PairGradients, PairStatistics, PairTile
from liger_rl.head.pair.products import Pair, PairRows
from liger_rl.head.tiles import WORKSPACE_BYTES, Tiles, kind_of, plan_tiles, spans
from liger_rl.kernels.devices import compiles

# Bytes of a chunk of one pass: of float32 rows on each kind of device, and of a `KeptPair`, which has KEPT_BYTES for
# each entry. Chunks are large, because each chunk reads and writes the sum of the weight's gradient.
ONE_PASS_BYTES, KEPT_MOST_BYTES = {"cuda": 1 << 30, "cpu": 48 << 20}, 5 << 28
KEPT_BYTES = 4
MIN_WHOLE_ROWS = 128  # fewest tokens of a product with the whole vocabulary; larger products have a multiple of it

# (places of m tokens among the live tokens, their statistics (m,)) -> dL/d divergence (m,), and dL/dlogp, (m,) or None
PairGradientsOf = Callable[[slice, PairStatistics], tuple[Tensor, Tensor | None]]


def forward(pair: Pair) -> PairStatistics:
    """Statistics of every token that counts."""
    rows, measure, shard = PairRows(pair, pair.student.live), pair.measure, pair.student.shard
    epilogue = None if measure.second_step else rows.epilogue
    if epilogue is not None:
        state, sums = rows.fold(epilogue), None
    else:
        state, sums = rows.empty_fold(rows.count)
        tokens = None if sums is None else _whole_rows(rows)
        if sums is not None and tokens is not None:
            for part in (slice(*span) for span in spans(rows.count, tokens)):
                rows.fold_whole(part, state.take(part), sums.take(part))
            return PairStatistics.of(state, measure).with_sums(measure, sums)
        _sweep(rows, lambda tile, part: rows.kernels.fold_pair(tile, state.take(part)))
    if shard is not None:
        state = state.over_ranks(measure, shard.maximum, shard.total)
    known = PairStatistics.of(state, measure)
    if sums is None:
        return known
    norms = known.lse, known.teacher_lse
    _sweep(rows, lambda tile, part: rows.kernels.mix_pair(tile, norms[0][part], norms[1][part], sums.take(part)))
    total = sums if shard is None else MixtureSums(*shard.total(torch.stack(sums)))
    return known.with_sums(measure, total)


def _sweep(rows: PairRows, step: Callable[[PairTile, slice], None]) -> None:
    tiles = _tiles(rows)
    for first, last in spans(rows.vocab, tiles.vocab):
        factors = rows.weight_tiles(first, last)
        for part in (slice(*span) for span in spans(rows.count, tiles.tokens)):
            # No name for the tile, so that it is freed before the next one is allocated.
            step(rows.tile(part, factors, first), part)


def _bytes_per_logit(device: torch.device) -> int:
    """Bytes for each entry of a pair of tiles; eager kernels work on float32 copies of both."""
    return 8 if compiles(device) else 48


def _tiles(rows: PairRows, *, bytes_per_gradient: int = 0) -> Tiles:
    """Tiles of both heads."""
    hidden_size = rows.student.rows.hidden.shape[1] + rows.teacher.rows.hidden.shape[1]
    bytes_per_logit = _bytes_per_logit(rows.device) + bytes_per_gradient
    options = rows.pair.options
    return plan_tiles(rows.count, rows.vocab, hidden_size, rows.device, options, bytes_per_logit=bytes_per_logit)


def _whole_rows(rows: PairRows) -> int | None:
    """Number of tokens whose logits of both heads over the whole vocabulary fit the workspace; None for two sweeps."""
    converts = rows.student.converts or rows.teacher.converts
    if rows.pair.options.names_chunk or converts or rows.pair.student.shard is not None:
        return None
    tokens = WORKSPACE_BYTES[kind_of(rows.device)] // (_bytes_per_logit(rows.device) * rows.vocab)
    return None if tokens < MIN_WHOLE_ROWS else tokens // MIN_WHOLE_ROWS * MIN_WHOLE_ROWS


def backward(
    pair: Pair,
    tokens: PairGradients,  # of the tokens that count
    needs: Needs,
) -> Gradients:
    """Gradients of the student's tensors; padding entries of the vocabulary get 0."""
    live, tokens = with_gradient(pair.student.live, tokens, tokens.has_gradient)
    # No name for the rows, so that they are freed before the gradients of all tokens are allocated.
    return _gradients(PairRows(pair, live), tokens, needs).of_all_tokens(live, pair.student)


def _gradients(rows: PairRows, tokens: PairGradients, needs: Needs) -> Gradients:
    # A mixture's logarithms take longer in an epilogue than in a separate kernel.
    epilogue = None if rows.measure.second_step else rows.epilogue
    options, factors = rows.pair.options, dict[int, tuple[Tensor, Tensor]]()
    if epilogue is not None:
        tiles = rows.gradient_tiles()
    else:
        dtype = options.compute_dtype
        tiles = _tiles(rows, bytes_per_gradient=dtype.itemsize if dtype != torch.float32 else 0)

    def tile_gradient(first: int, last: int, start: int, stop: int) -> Tensor:
        part = slice(start, stop)
        if epilogue is not None:
            return epilogue.grad_pair(*rows.factors(part, first, last), tokens.take(part))
        if first not in factors:  # `factors` has one tile, which all spans of tokens share
            factors.clear()
            factors[first] = rows.weight_tiles(first, last)
        return rows.tile_gradient(rows.tile(part, factors[first], first), tokens.take(part))

    return two_pass.gradients(
        rows.student.rows, options, None, needs, known=tile_gradient, tiles=tiles, vocab=rows.vocab
    )


def one_pass(pair: Pair, gradients_of: PairGradientsOf, needs: Needs) -> tuple[PairStatistics, Gradients]:
    """As `forward`, and the gradients for hidden, weight and bias; `gradients_of` gives each chunk's."""
    rows, live, weight, vocab = PairRows(pair, pair.student.live), pair.student.live, pair.student.weight, pair.vocab
    chunks = even_spans(rows.count, one_pass_tokens(pair))
    one_sum = len(chunks) <= 1 and weight.dtype == pair.options.compute_dtype
    totals = Totals(pair.student, weight.dtype if one_sum else torch.float32, needs)
    if totals.weight is not None:
        totals.weight[vocab:] = 0
    epilogue = rows.epilogue if _keeps_pairs(pair) else None
    statistics: list[PairStatistics] = []
    for part in (slice(*chunk) for chunk in chunks):
        known, gradient = rows.whole_rows(part) if epilogue is None else rows.kept_rows(epilogue, part)
        tile = gradient(PairGradients.of(known, *gradients_of(part, known)))
        del gradient  # frees its inputs before the products and the next pair are allocated
        index = part if live.index is None else live.index[part]
        tiles = spans(vocab, rows.student.width(vocab))
        totals.add(rows.student.factor[part], index, tiles, partial(_columns, tile))
        del tile
        statistics.append(known)
    if not statistics:
        return forward(pair), totals.finish()
    joined = PairStatistics._make(
        None if parts[0] is None else torch.cat(parts) for parts in zip(*statistics, strict=True)
    )
    return joined, totals.finish()


def _columns(tile: Tensor, first: int, last: int) -> Tensor:
    return tile[:, first:last]


def even_spans(n: int, most: int) -> list[tuple[int, int]]:
    """The fewest near-equal spans of at most `most` tokens, rounded up to multiples of MIN_WHOLE_ROWS up to `most`."""
    parts = -(-n // most)
    step = -(-n // max(parts, 1))
    return spans(n, min(-(-step // MIN_WHOLE_ROWS) * MIN_WHOLE_ROWS, most))


def _keeps_pairs(pair: Pair) -> bool:
    """Whether one pass keeps a `KeptPair`. Not under a softcap: if both numbers underflow, its derivative is lost."""
    return pair.options.transform.softcap is None and pair.epilogue_applies(pair.student.live.count)


def one_pass_tokens(pair: Pair) -> int:
    """Number of tokens of a chunk of one pass."""
    if pair.options.chunk_tokens is not None:
        return pair.options.chunk_tokens
    device, dtype = pair.student.hidden.device, pair.options.compute_dtype
    per_token = pair.vocab * (_bytes_per_logit(device) + (dtype.itemsize if dtype != torch.float32 else 0))
    most = ONE_PASS_BYTES[kind_of(device)]
    if _keeps_pairs(pair):
        per_token, most = KEPT_BYTES * pair.vocab, KEPT_MOST_BYTES
    tokens = most // per_token
    return max(tokens // MIN_WHOLE_ROWS * MIN_WHOLE_ROWS, MIN_WHOLE_ROWS)
