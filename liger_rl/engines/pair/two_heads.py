"""Two passes and one pass over two heads: each token's divergence of a student from a teacher, and its gradient.

`README.md` has the steps. The teacher's logits are read and never differentiated.

A mixture needs both normalisers at every entry, so a few tokens at a time keep float32 rows of both heads for a second
step. Both weights are then read once per `_whole_rows` tokens. On an H200 such a read takes as long as the products of
150 tokens, so 75 tokens are as good as a second sweep; at V = 151936 the workspace holds 276. Two sweeps run if under
MIN_WHOLE_ROWS tokens fit, if a chunk is named, if a weight is converted tile by tile, and if the vocabulary is sharded,
because no collective stands inside a loop.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.call.options import EngineOptions
from liger_rl.call.tokens import TokenSelection
from liger_rl.engines.dense import two_pass
from liger_rl.engines.dense.totals import OnePassPlan, Totals
from liger_rl.engines.interface import Gradients, Head, Needs, with_gradient
from liger_rl.engines.pair import for_device
from liger_rl.engines.pair.products import KEPT_BYTES, KEPT_MOST_BYTES, PairProducts, Side, ValuesAndGradient
from liger_rl.engines.pair.reference import (
    MIXTURE,
    Measure,
    MixtureSums,
    PairFold,
    PairGradients,
    PairStatistics,
    PairTile,
)
from liger_rl.engines.tiles import WORKSPACE_BYTES, Tiles, kind_of, plan_tiles, spans
from liger_rl.kernels import for_device as kernels_of_all_heads
from liger_rl.kernels import gemm
from liger_rl.kernels.devices import compiles

# Bytes of a chunk of one pass. Chunks are large, because each chunk reads and writes the sum of the weight's gradient.
ONE_PASS_BYTES = {"cuda": 1 << 30, "cpu": 48 << 20}
MIN_WHOLE_ROWS = 128  # fewest tokens of a product with the whole vocabulary; larger products have a multiple of it


class Pair(NamedTuple):
    """Two heads over the same tokens, and the options of a call."""

    student: Head
    teacher: Head
    vocab: int  # entries of the vocabulary from `vocab` on are padding
    options: EngineOptions
    teacher_options: EngineOptions  # the student's, except for transform and dtype
    measure: Measure
    targets: bool  # whether to compute log-probabilities at the targets

    def sides(self, live: TokenSelection) -> tuple[Side, Side]:
        """The sides of both heads, with the rows of the tokens in `live`."""
        student = self.student.gathered(self.options.compute_dtype, live)
        teacher = self.teacher.gathered(self.teacher_options.compute_dtype, live)
        return Side(student, self.options), Side(teacher, self.teacher_options)


# (places of m tokens among the live tokens, their statistics (m,)) -> dL/d divergence (m,), and dL/dlogp and
# dL/dentropy, (m,) or None
PairGradientsOf = Callable[[slice, PairStatistics], tuple[Tensor, Tensor | None, Tensor | None]]


def forward(pair: Pair) -> PairStatistics:
    """Statistics of every token that counts."""
    student, teacher = pair.sides(pair.student.live)
    measure, shard = pair.measure, pair.student.shard
    n, device = student.factor.shape[0], student.factor.device

    def over_ranks(state: PairFold) -> PairFold:
        return state if shard is None else state.over_ranks(measure, shard.maximum, shard.total)

    products = None if measure.kind == MIXTURE else PairProducts.of(student, teacher, pair.vocab, measure)
    if products is not None:
        return PairStatistics.of(over_ranks(products.fold(targets=pair.targets)), measure)
    state = PairFold.start(n, device, measure, entropy=pair.options.entropy, targets=pair.targets)
    sums = MixtureSums.start(state.peak) if measure.kind == MIXTURE else None
    tokens = _whole_rows(pair, student, teacher)
    if sums is not None and tokens is not None:
        for part in (slice(*span) for span in spans(n, tokens)):
            _fold_whole_rows(pair, student, teacher, part, state.take(part), sums.take(part))
        return PairStatistics.of(state, measure).with_sums(measure, sums)

    kernels, tiles = for_device(device), _tiles(pair, n)

    def sweep(step: Callable[[PairTile, slice], None]) -> None:
        for first, last in spans(pair.vocab, tiles.vocab):
            factors = student.factor_tile(first, last), teacher.factor_tile(first, last)
            for part in (slice(*span) for span in spans(n, tiles.tokens)):
                # No name for the tiles, so that they are freed before the next ones are allocated.
                step(_pair_tile(student, teacher, part, factors, first, measure), part)

    sweep(lambda tile, part: kernels.fold_pair(tile, state.take(part)))
    known = PairStatistics.of(over_ranks(state), measure)
    if sums is None:
        return known
    sweep(lambda tile, part: kernels.mix_pair(tile, known.lse[part], known.teacher_lse[part], sums.take(part)))
    return known.with_sums(measure, sums if shard is None else MixtureSums(*shard.total(torch.stack(sums))))


def _pair_tile(
    student: Side, teacher: Side, part: slice, factors: tuple[Tensor, Tensor], first: int, measure: Measure
) -> PairTile:
    tiles = student.tile(part, factors[0], first), teacher.tile(part, factors[1], first)
    return PairTile(*tiles, student.rows.targets[part], first, measure)


def _fold_whole_rows(
    pair: Pair,
    student: Side,
    teacher: Side,
    part: slice,
    state: PairFold,  # of the tokens `part`, updated
    sums: MixtureSums | None,  # updated; None unless for a mixture
) -> PairTile:
    """-> the float32 rows of both heads over the whole vocabulary, which take both steps of a mixture."""
    tiles = student.whole_tile(part, pair.vocab), teacher.whole_tile(part, pair.vocab)
    tile = PairTile(*tiles, student.rows.targets[part], 0, pair.measure)
    kernels = for_device(student.factor.device)
    kernels.fold_pair(tile, state)
    if sums is not None:
        norms = state.peak + state.sum_exp.log(), state.teacher_peak + state.teacher_sum_exp.log()
        kernels.mix_pair(tile, *norms, sums)
    return tile


def _gradient(tile: PairTile, tokens: PairGradients, dtype: torch.dtype) -> Tensor:
    """-> dL/dx of the student's logits, in their memory if they have that dtype."""
    logits = tile.student.logits
    out = logits if dtype == torch.float32 else torch.empty_like(logits, dtype=dtype)
    for_device(logits.device).grad_pair(tile, tokens, out)
    return out


def _bytes_per_logit(device: torch.device) -> int:
    """Bytes for each entry of a pair of tiles; eager kernels work on float32 copies of both."""
    return 8 if compiles(device) else 48


def _tiles(pair: Pair, tokens: int, *, bytes_per_gradient: int = 0) -> Tiles:
    device = pair.student.hidden.device
    hidden_size = pair.student.hidden.shape[1] + pair.teacher.hidden.shape[1]
    bytes_per_logit = _bytes_per_logit(device) + bytes_per_gradient
    return plan_tiles(tokens, pair.vocab, hidden_size, device, pair.options, bytes_per_logit=bytes_per_logit)


def _whole_rows(pair: Pair, student: Side, teacher: Side) -> int | None:
    """Number of tokens whose logits of both heads over the whole vocabulary fit the workspace; None for two sweeps."""
    if student.options.names_chunk or student.converts or teacher.converts or pair.student.shard is not None:
        return None
    device = pair.student.hidden.device
    tokens = WORKSPACE_BYTES[kind_of(device)] // (_bytes_per_logit(device) * pair.vocab)
    return None if tokens < MIN_WHOLE_ROWS else tokens // MIN_WHOLE_ROWS * MIN_WHOLE_ROWS


def backward(
    pair: Pair,
    tokens: PairGradients,  # of the tokens that count
    needs: Needs,
) -> Gradients:
    """Gradients of the student's tensors; padding entries of the vocabulary get 0."""
    live, tokens = with_gradient(pair.student.live, tokens, tokens.has_gradient)
    return _gradients(pair, live, tokens, needs).of_all_tokens(live, pair.student)


def _gradients(pair: Pair, live: TokenSelection, tokens: PairGradients, needs: Needs) -> Gradients:
    student, teacher = pair.sides(live)
    dtype, measure, n = pair.options.compute_dtype, pair.measure, tokens.lse.numel()
    products = None
    if measure.kind != MIXTURE:  # a mixture's logarithms take longer in an epilogue than in a separate kernel
        products = PairProducts.of(student, teacher, pair.vocab, measure)
    if products is not None:
        tiles = products.gradient_tiles(n)
    else:
        tiles = _tiles(pair, n, bytes_per_gradient=dtype.itemsize if dtype != torch.float32 else 0)
    factors: dict[int, tuple[Tensor, Tensor]] = {}

    def tile_gradient(first: int, last: int, start: int, stop: int) -> Tensor:
        part = slice(start, stop)
        if products is not None:
            return products.gradient(part, first, last, tokens.take(part))
        if first not in factors:  # `factors` has one tile, which all spans of tokens share
            factors.clear()
            factors[first] = student.factor_tile(first, last), teacher.factor_tile(first, last)
        tile = _pair_tile(student, teacher, part, factors[first], first, measure)
        return _gradient(tile, tokens.take(part), dtype)

    return two_pass.gradients(
        student.rows, pair.options, None, needs, known=tile_gradient, tiles=tiles, vocab=pair.vocab
    )


def one_pass(pair: Pair, gradients_of: PairGradientsOf, needs: Needs) -> tuple[PairStatistics, Gradients]:
    """As `forward`, and the gradients for hidden, weight and bias; `gradients_of` gives each chunk's token gradients.

    The student's head must have no low-rank term.
    """
    student, teacher = pair.sides(pair.student.live)
    live, n, weight, vocab = pair.student.live, student.factor.shape[0], student.rows.weight, pair.vocab
    chunks = even_spans(n, one_pass_tokens(pair))
    same_dtype = weight.dtype == pair.options.compute_dtype
    sum_dtype = weight.dtype if len(chunks) <= 1 and same_dtype else torch.float32
    totals = Totals(pair.student, OnePassPlan(chunk_tokens=n, sum_dtype=sum_dtype), needs, in_place=False)
    if totals.weight is not None:
        totals.weight[vocab:] = 0
    products = PairProducts.of(student, teacher, vocab, pair.measure) if _keeps_pairs(pair) else None
    statistics: list[PairStatistics] = []
    for start, stop in chunks:
        part = slice(start, stop)
        if products is None:
            known, gradient = _values_and_gradient(pair, student, teacher, part)
        else:
            known, gradient = products.values_and_gradient(part, targets=pair.targets)
        tile = gradient(PairGradients.of(known, *gradients_of(part, known)))
        del gradient  # frees its inputs before the products and the next pair are allocated
        _add_products(totals, student, tile, part, live, vocab)
        del tile
        statistics.append(known)
    if not statistics:
        return forward(pair), totals.finish()
    joined = PairStatistics._make(
        None if parts[0] is None else torch.cat(parts) for parts in zip(*statistics, strict=True)
    )
    return joined, totals.finish()


def _values_and_gradient(pair: Pair, student: Side, teacher: Side, part: slice) -> ValuesAndGradient:
    """Values and gradient from float32 rows of both heads. A float32 gradient overwrites the student's rows."""
    n, device, measure = part.stop - part.start, student.factor.device, pair.measure
    state = PairFold.start(n, device, measure, entropy=pair.options.entropy, targets=pair.targets)
    sums = MixtureSums.start(state.peak) if measure.kind == MIXTURE else None
    tile = _fold_whole_rows(pair, student, teacher, part, state, sums)
    known = PairStatistics.of(state, measure)

    def gradient(tokens: PairGradients) -> Tensor:
        return _gradient(tile, tokens, pair.options.compute_dtype)

    return known if sums is None else known.with_sums(measure, sums), gradient


def even_spans(n: int, most: int) -> list[tuple[int, int]]:
    """The fewest near-equal spans of at most `most` tokens, rounded up to multiples of MIN_WHOLE_ROWS up to `most`."""
    parts = -(-n // most)
    step = -(-n // max(parts, 1))
    return spans(n, min(-(-step // MIN_WHOLE_ROWS) * MIN_WHOLE_ROWS, most))


def _add_products(totals: Totals, student: Side, tile: Tensor, part: slice, live: TokenSelection, vocab: int) -> None:
    hidden = student.factor[part]
    grad_rows = None if totals.hidden is None else torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for first, last in spans(vocab, student.width(vocab)):
        columns = tile[:, first:last]
        if grad_rows is not None:
            gemm.accumulate(grad_rows, columns, student.weight_tile(first, last))
        totals.add_weight(first, last, columns, hidden)
        totals.add_bias(first, last, columns)
    totals.empty = False
    if totals.hidden is not None and grad_rows is not None:
        if live.index is None:
            totals.hidden[part] = grad_rows
        else:
            kernels_of_all_heads(hidden.device).scatter_rows(grad_rows, live.index[part], totals.hidden)


def _keeps_pairs(pair: Pair) -> bool:
    """Whether one pass keeps a `KeptPair`. Not under a softcap: if both numbers underflow, its derivative is lost."""
    return pair.options.transform.softcap is None and PairProducts.applies_to(
        pair.student, pair.teacher, pair.options, pair.teacher_options
    )


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
