"""Two passes and one pass over two heads: each token's divergence of a student from a teacher, and its gradient.

`README.md` has the steps and their operations, with S = 2 N H V for one product of the student's head and T for one of
the teacher's. The teacher's logits are read and never differentiated.

The value of a mixture needs both normalisers at every entry. They are known after all tiles, so the plain way is two
sweeps over all tiles: a forward of 2 S + 2 T, as TRL's. Instead, a few tokens at a time are multiplied with the whole
vocabulary, and their float32 rows are kept for the second step. That is S + T, and one read of both weights per
`_whole_rows` tokens. On an H200 such a read takes as long as the products of 150 tokens, so 75 tokens are as good as a
second sweep; at V = 151936 the workspace holds 276. The forward takes two sweeps if under MIN_WHOLE_ROWS tokens fit, if
a chunk is named, if a weight is converted tile by tile, and if the vocabulary is sharded, because no collective stands
inside a loop.

One pass keeps float32 logits of both heads over the whole vocabulary for a chunk of tokens. With the epilogue it keeps
four bytes for each entry of both, unless the student has a softcap. The weight's gradient is summed over the chunks in
float32. Each chunk reads and writes this sum once.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.call.options import EngineOptions
from liger_rl.call.tokens import TokenSelection
from liger_rl.engines.dense import two_pass
from liger_rl.engines.dense.totals import OnePassPlan, Totals
from liger_rl.engines.interface import Gradients, Head, Needs, picked_rows
from liger_rl.engines.pair import kernels as kernels_of_pairs
from liger_rl.engines.pair.products import (
    KEPT_BYTES,
    KEPT_MOST_BYTES,
    PairProducts,
    PairValues,
    Side,
    ValuesAndGradient,
)
from liger_rl.engines.pair.reference import (
    MIXTURE,
    TILE_VOCAB,
    Measure,
    MixtureSums,
    PairFold,
    PairGradients,
    PairStatistics,
    Tile,
    TileSums,
)
from liger_rl.engines.tiles import WORKSPACE_BYTES, Tiles, kind_of, plan_tiles, spans
from liger_rl.kernels import for_device, gemm
from liger_rl.kernels.devices import compiles

# Bytes of a chunk of one pass. Chunks are large, because each chunk reads and writes the sum of the weight's gradient.
ONE_PASS_BYTES = {"cuda": 1 << 30, "cpu": 48 << 20}
MIN_WHOLE_ROWS = 128  # fewest tokens of a product with the whole vocabulary; larger products have a multiple of it


class Pair(NamedTuple):
    """Two heads over the same tokens. Entries of the vocabulary from `vocab` on are padding."""

    student: Head
    teacher: Head
    vocab: int


class PairOptions(NamedTuple):
    student: EngineOptions
    teacher: EngineOptions  # as the student's, except for transform and dtype
    measure: Measure
    targets: bool  # whether to compute log-probabilities at the targets


# (places of m tokens among the live tokens, their divergence (m,), their statistics) -> dL/d divergence (m,), and
# dL/dlogp and dL/dentropy, (m,) or None
PairGradientsOf = Callable[[slice, Tensor, PairStatistics], tuple[Tensor, Tensor | None, Tensor | None]]


def sides(pair: Pair, options: PairOptions, live: TokenSelection) -> tuple[Side, Side]:
    """The sides of both heads, with the rows of the tokens in `live`."""
    student = pair.student.gathered(options.student.compute_dtype, live)
    teacher = pair.teacher.gathered(options.teacher.compute_dtype, live)
    return Side(student, options.student), Side(teacher, options.teacher)


def forward(pair: Pair, options: PairOptions, *, bounded: bool = False) -> PairValues:
    """Statistics of every token that counts; if `bounded`, also the sums over tiles from which bounds are made.

    There are no such sums if a chunk is named, under the student's softcap, with a low-rank term and with a sharded
    vocabulary.
    """
    student, teacher = sides(pair, options, pair.student.live)
    measure, targets = options.measure, student.rows.targets
    n, device = student.factor.shape[0], student.factor.device
    kernels, tile_sums = kernels_of_pairs.for_device(device), None
    bounded = bounded and not options.student.names_chunk and options.student.transform.softcap is None
    if bounded and student.low_rank is None and student.rows.shard is None:
        tile_sums = TileSums.unwritten(n, pair.vocab, device, measure)

    def sums_of(part: slice, first: int) -> TileSums | None:
        return None if tile_sums is None else tile_sums.part(part, first)

    def finished(state: PairFold, sums: MixtureSums | None = None) -> PairValues:
        return PairValues.of(PairStatistics.of(state, measure), measure, sums)._replace(tile_sums=tile_sums)

    def fold(student_tile: Tile, teacher_tile: Tile, part: slice, first: int) -> None:
        kernels.fold_pair(
            student_tile, teacher_tile, targets[part], first, measure, state.take(part), sums_of(part, first)
        )

    shard = pair.student.shard

    def over_ranks(state: PairFold) -> PairFold:
        return state if shard is None else state.over_ranks(measure, shard.maximum, shard.total)

    if measure.kind != MIXTURE:
        products = PairProducts.of(student, teacher, pair.vocab, measure)
        if products is not None:
            return finished(over_ranks(products.fold(targets=options.targets, sums=tile_sums)))
    state = PairFold.start(n, device, measure, entropy=options.student.entropy, targets=options.targets)
    if measure.kind != MIXTURE:
        _sweep(pair, student, teacher, _tiles(pair, options, n, whole=tile_sums is not None), fold)
        return finished(over_ranks(state))

    sums = MixtureSums.start(state.peak)

    def mix(student_tile: Tile, teacher_tile: Tile, part: slice, first: int) -> None:
        known = PairStatistics.of(state.take(part), measure)
        kernels.mix_pair(
            student_tile, teacher_tile, measure, known.lse, known.teacher_lse, sums.take(part), sums_of(part, first)
        )

    def fold_and_mix(*arguments) -> None:
        fold(*arguments)
        mix(*arguments)

    tokens = _whole_rows(pair, student, teacher) if shard is None else None
    if tokens is not None:
        _sweep(pair, student, teacher, Tiles(tokens, pair.vocab), fold_and_mix)
    else:
        tiles = _tiles(pair, options, n, whole=tile_sums is not None)
        _sweep(pair, student, teacher, tiles, fold)
        state = over_ranks(state)
        _sweep(pair, student, teacher, tiles, mix)
        if shard is not None:
            sums = MixtureSums(*shard.total(torch.stack(sums)))
    return finished(state, sums)


def _sweep(pair: Pair, student: Side, teacher: Side, tiles: Tiles, step: Callable[..., None]) -> None:
    """Call step(student's tile, teacher's tile, tokens, first column) for each pair of tiles, then free the pair."""
    token_spans = spans(student.factor.shape[0], tiles.tokens)
    for first, last in spans(pair.vocab, tiles.vocab):
        factors = [side.factor_tile(side.weight_tile(first, last), first) for side in (student, teacher)]
        for start, stop in token_spans:
            part = slice(start, stop)
            step(student.tile(part, factors[0], first), teacher.tile(part, factors[1], first), part, first)


def _bytes_per_logit(device: torch.device) -> int:
    """Bytes for each entry of a pair of tiles; eager kernels work on float32 copies of both."""
    return 8 if compiles(device) else 48


def _tiles(
    pair: Pair,
    options: PairOptions,
    tokens: int,
    *,
    bytes_per_gradient: int = 0,
    whole: bool = False,  # make the width a multiple of TILE_VOCAB, for `TileSums`
) -> Tiles:
    device = pair.student.hidden.device
    hidden_size = pair.student.hidden.shape[1] + pair.teacher.hidden.shape[1]
    tiles = plan_tiles(
        tokens, pair.vocab, hidden_size, device, options.student,
        bytes_per_logit=_bytes_per_logit(device) + bytes_per_gradient,
    )  # fmt: skip
    if not whole or tiles.vocab == pair.vocab:
        return tiles
    return tiles._replace(vocab=max(tiles.vocab // TILE_VOCAB, 1) * TILE_VOCAB)


def _whole_rows(pair: Pair, student: Side, teacher: Side) -> int | None:
    """Number of tokens whose logits of both heads over the whole vocabulary fit the workspace; None for two sweeps."""
    if student.options.names_chunk or student.converts or teacher.converts:
        return None
    device = pair.student.hidden.device
    tokens = WORKSPACE_BYTES[kind_of(device)] // (_bytes_per_logit(device) * pair.vocab)
    return None if tokens < MIN_WHOLE_ROWS else tokens // MIN_WHOLE_ROWS * MIN_WHOLE_ROWS


def backward(
    pair: Pair,
    options: PairOptions,
    tokens: PairGradients,  # of the tokens that count
    needs: Needs,
    *,
    count: int | None = None,  # number of tokens with a gradient, if the host knows it
) -> Gradients:
    """Gradients of the student's tensors."""
    live, tokens = _with_gradient(pair.student.live, tokens, count)
    return gradients(pair, options, live, tokens, needs).of_all_tokens(live, pair.student)


def _with_gradient(
    live: TokenSelection, tokens: PairGradients, count: int | None
) -> tuple[TokenSelection, PairGradients]:
    """The live tokens whose gradient is not exactly zero. One host sync, unless `live` is a mask or `count` given."""
    has_gradient = tokens.grad != 0
    for grad in (tokens.grad_logps, tokens.grad_entropy):
        has_gradient = has_gradient if grad is None else has_gradient | (grad != 0)
    if live.mask is not None:
        live = live.restricted(has_gradient)
        assert live.mask is not None
        here = live.mask
        parts = PairGradients._make(None if part is None else torch.where(here, part, 0.0) for part in tokens)
        # exp(z - inf) is 0 whatever z is; exp(z - 0) might overflow, and inf * 0 is NaN.
        silent = {name: torch.where(here, getattr(tokens, name), torch.inf) for name in ("lse", "teacher_lse")}
        return live, parts._replace(**silent)
    picked = picked_rows(has_gradient, count)
    return (live, tokens) if picked is None else (live.among(picked), tokens.take(picked))


def gradients(pair: Pair, options: PairOptions, live: TokenSelection, tokens: PairGradients, needs: Needs) -> Gradients:
    """Gradients from the tokens in `live`; `tokens` has their numbers. Padding entries of the vocabulary get 0."""
    student, teacher = sides(pair, options, live)
    rows, dtype = student.rows, options.student.compute_dtype
    kernels, n = kernels_of_pairs.for_device(rows.weight.device), tokens.lse.numel()
    products = None
    if options.measure.kind != MIXTURE:  # a mixture's logarithms take longer in an epilogue than in a separate kernel
        products = PairProducts.of(student, teacher, pair.vocab, options.measure)
    if products is not None:
        tiles = products.gradient_tiles(n)
    else:
        tiles = _tiles(pair, options, n, bytes_per_gradient=dtype.itemsize if dtype != torch.float32 else 0)
    factors: dict[int, list[Tensor]] = {}

    def tile_gradient(first: int, last: int, start: int, stop: int) -> Tensor:
        part = slice(start, stop)
        if products is not None:
            return products.gradient(part, first, last, tokens.take(part))
        if first not in factors:  # `factors` has one tile, which all spans of tokens share
            factors.clear()
            factors[first] = [side.factor_tile(side.weight_tile(first, last), first) for side in (student, teacher)]
        student_tile, teacher_tile = (
            side.tile(part, factor, first) for side, factor in zip((student, teacher), factors[first], strict=True)
        )
        out = student_tile.logits if dtype == torch.float32 else torch.empty_like(student_tile.logits, dtype=dtype)
        kernels.grad_pair(
            student_tile, teacher_tile, rows.targets[part], first, options.measure, tokens.take(part), out
        )
        return out

    return two_pass.gradients(rows, options.student, None, needs, known=tile_gradient, tiles=tiles, vocab=pair.vocab)


def one_pass(
    pair: Pair, options: PairOptions, gradients_of: PairGradientsOf, needs: Needs
) -> tuple[PairValues, Gradients]:
    """As `forward`, and the gradients for hidden, weight and bias; `gradients_of` gives each chunk's token gradients.

    The student's head must have no low-rank term.
    """
    student, teacher = sides(pair, options, pair.student.live)
    measure, live, n = options.measure, pair.student.live, student.factor.shape[0]
    weight, vocab = student.rows.weight, pair.vocab
    chunks = even_spans(n, one_pass_tokens(pair, options))
    same_dtype = weight.dtype == options.student.compute_dtype
    sum_dtype = weight.dtype if len(chunks) <= 1 and same_dtype else torch.float32
    totals = Totals(pair.student, OnePassPlan(chunk_tokens=n, sum_dtype=sum_dtype), needs, in_place=False)
    if totals.weight is not None:
        totals.weight[vocab:] = 0
    products = PairProducts.of(student, teacher, vocab, measure) if _keeps_pairs(pair, options) else None
    chunk_values: list[PairValues] = []
    for start, stop in chunks:
        part = slice(start, stop)
        if products is None:
            values, gradient = _values_and_gradient(student, teacher, part, vocab, options)
        else:
            values, gradient = products.values_and_gradient(part, targets=options.targets)
        grads = gradients_of(part, values.divergence, values.statistics)
        tile = gradient(PairGradients.of(values.statistics, values.value, *grads))
        del gradient  # frees its inputs before the products and the next pair are allocated
        _add_products(totals, student, tile, part, live, vocab)
        del tile
        chunk_values.append(values)
    if not chunk_values:
        return forward(pair, options), totals.finish()
    return _joined(chunk_values), totals.finish()


def _values_and_gradient(
    student: Side, teacher: Side, part: slice, vocab: int, options: PairOptions
) -> ValuesAndGradient:
    """Values and gradient from float32 rows of both heads. A float32 gradient overwrites the student's rows."""
    student_tile, teacher_tile = (side.whole_tile(part, vocab) for side in (student, teacher))
    measure, targets, dtype = options.measure, student.rows.targets[part], options.student.compute_dtype
    kernels, device = kernels_of_pairs.for_device(student_tile.logits.device), student_tile.logits.device
    state = PairFold.start(
        part.stop - part.start, device, measure, entropy=options.student.entropy, targets=options.targets
    )
    kernels.fold_pair(student_tile, teacher_tile, targets, 0, measure, state)
    known = PairStatistics.of(state, measure)
    sums = None
    if measure.kind == MIXTURE:
        sums = MixtureSums.start(state.peak)
        kernels.mix_pair(student_tile, teacher_tile, measure, known.lse, known.teacher_lse, sums)

    def gradient(tokens: PairGradients) -> Tensor:
        tile = student_tile.logits if dtype == torch.float32 else torch.empty_like(student_tile.logits, dtype=dtype)
        kernels.grad_pair(student_tile, teacher_tile, targets, 0, measure, tokens, tile)
        return tile

    return PairValues.of(known, measure, sums), gradient


def even_spans(n: int, most: int) -> list[tuple[int, int]]:
    """The fewest near-equal spans of at most `most` tokens, rounded up to multiples of MIN_WHOLE_ROWS up to `most`."""
    parts = -(-n // most)
    step = -(-n // max(parts, 1))
    return spans(n, min(-(-step // MIN_WHOLE_ROWS) * MIN_WHOLE_ROWS, most))


def _joined(chunk_values: Sequence[PairValues]) -> PairValues:
    """The values of consecutive chunks of tokens, concatenated."""
    statistics = PairStatistics._make(
        None if parts[0] is None else torch.cat(parts)
        for parts in zip(*(v.statistics for v in chunk_values), strict=True)
    )
    divergence, value = (torch.cat([getattr(v, name) for v in chunk_values]) for name in ("divergence", "value"))
    return PairValues(divergence, statistics, value)


def _add_products(totals: Totals, student: Side, tile: Tensor, part: slice, live: TokenSelection, vocab: int) -> None:
    hidden, grad_rows = student.factor[part], None
    for first, last in spans(vocab, student.width(vocab)):
        columns = tile[:, first:last]
        if totals.hidden is not None:
            if grad_rows is None:
                grad_rows = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
            gemm.accumulate(grad_rows, columns, student.weight_tile(first, last))
        totals.add_weight(first, last, columns, hidden)
        totals.add_bias(first, last, columns)
    totals.empty = False
    if totals.hidden is not None and grad_rows is not None:
        if live.index is None:
            totals.hidden[part] = grad_rows
        else:
            for_device(hidden.device).scatter_rows(grad_rows, live.index[part], totals.hidden)


def _keeps_pairs(pair: Pair, options: PairOptions) -> bool:
    """Whether one pass keeps a `KeptPair`. Not under a softcap: if both numbers underflow, its derivative is lost."""
    return options.student.transform.softcap is None and PairProducts.applies_to(pair.student, options.student)


def one_pass_tokens(pair: Pair, options: PairOptions) -> int:
    """Number of tokens of a chunk of one pass."""
    if options.student.chunk_tokens is not None:
        return options.student.chunk_tokens
    device, dtype = pair.student.hidden.device, options.student.compute_dtype
    per_token = pair.vocab * (_bytes_per_logit(device) + (dtype.itemsize if dtype != torch.float32 else 0))
    most = ONE_PASS_BYTES[kind_of(device)]
    if _keeps_pairs(pair, options):
        per_token, most = KEPT_BYTES * pair.vocab, KEPT_MOST_BYTES
    tokens = most // per_token
    return max(tokens // MIN_WHOLE_ROWS * MIN_WHOLE_ROWS, MIN_WHOLE_ROWS)
