"""Statistics with the same bits in every batch, and on any number of vocabulary shards.

A sum of floats depends on its order. Libraries choose the order of a product's sums by its shape, so by the number of
tokens. We fix the shapes, and the order of all that follows:

- The whole vocabulary is cut into tiles at multiples of a width from id 0. One rank computes all of a tile: the rank
  that holds the tile's first id. The other ranks give it the rows of the weight that it lacks.
- If our own product applies, it is used for any number of tokens. It computes every tile in the same way.
- Otherwise every product has the shape (INVARIANT_TOKENS, H) times a tile.
- A tile is folded alone, and the folds of all tiles are merged in the order of the vocabulary.

Rows of zeros fill up the tokens to these shapes. The library must still treat all rows of one product alike. The tests
shuffle rows to check that; numpy's OpenBLAS, for example, does not.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from liger_rl.call.options import EngineOptions
from liger_rl.distributed import VocabShard
from liger_rl.engines.interface import Head
from liger_rl.engines.tiles import plan_tiles, spans
from liger_rl.kernels import for_device, gemm
from liger_rl.kernels.devices import compiles, realigned
from liger_rl.kernels.statistics import Fold, Piece, Pieces, each

INVARIANT_TOKENS = 128  # rows of one product; a library may treat distant rows of a larger product differently
# Triton compiles another merge of tiles, with another order of its sums, for a number of rows that 16 does not divide.
MULTIPLE = 16


def padded_rows(rows: Head, multiple: int) -> Head:
    """The rows, filled up with rows of zeros to a multiple of `multiple`."""
    missing = -rows.hidden.shape[0] % multiple
    if not missing:
        return rows
    temperatures = None if rows.temperatures is None else pad(rows.temperatures, (0, missing), value=1.0)
    hidden, targets = pad(rows.hidden, (0, 0, 0, missing)), rows.targets
    targets = pad(targets, (*[0, 0] * (targets.dim() - 1), 0, missing))
    return rows._replace(hidden=hidden, targets=targets, temperatures=temperatures)


def with_fixed_tiles(rows: Head, options: EngineOptions) -> tuple[Head, EngineOptions]:
    """Rows and options for which each product of tiles in memory has one shape."""
    unchunked, device = replace(options, chunk_tokens=None, chunk_vocab=None), rows.weight.device
    tiles = plan_tiles(
        INVARIANT_TOKENS, rows.vocab, rows.weight.shape[1], device, unchunked,
        bytes_per_logit=4 if compiles(device) else 12,
    )  # fmt: skip
    fixed = replace(unchunked, chunk_tokens=INVARIANT_TOKENS, chunk_vocab=tiles.vocab)
    return padded_rows(rows, INVARIANT_TOKENS), fixed


def whole_tiles(rows: Head, width: int) -> Pieces:
    """The tiles that this rank folds. With a shard a collective, if a tile has rows of several ranks."""
    shard = rows.shard
    if shard is None:
        return Pieces([Piece(0, rows.weight, rows.bias)], rows.vocab)
    start, stop, vocab = shard.place.vocab_start, shard.place.vocab_start + shard.rows, shard.vocab
    first, last = -(-start // width) * width, stop if stop == vocab else stop // width * width
    found = []
    if first < last:
        own = slice(first - start, last - start)
        found.append(Piece(first, rows.weight[own], None if rows.bias is None else rows.bias[own]))
    shared = sorted({each_start // width for each_start in shard.starts if each_start % width})
    weights = _shared_tiles(rows.weight, shared, width, shard)
    biases = None if rows.bias is None else _shared_tiles(rows.bias, shared, width, shard)
    for place, tile in enumerate(shared):
        if start <= tile * width < stop:
            size = min(width, vocab - tile * width)
            bias = None if biases is None else biases[place, :size]
            found.append(Piece(tile * width, weights[place, :size], bias))
    return Pieces(found, vocab, _over_ranks(found, width, shard))


def _shared_tiles(table: Tensor, tiles: list[int], width: int, shard: VocabShard) -> Tensor:
    """-> (tiles, width, ...) the rows of tiles that several ranks share. Adding zeros in float32 changes no number."""
    start, stop = shard.place.vocab_start, shard.place.vocab_start + shard.rows
    out = torch.zeros(len(tiles), width, *table.shape[1:], dtype=torch.float32, device=table.device)
    for place, tile in enumerate(tiles):
        low, high = max(tile * width, start), min((tile + 1) * width, stop)
        if low < high:
            out[place, low - tile * width : high - tile * width] = table[low - start : high - start]
    return (shard.total(out) if tiles else out).to(table.dtype)


def _over_ranks(pieces: list[Piece], width: int, shard: VocabShard) -> Callable[[Fold], Fold]:
    """-> a collective: the folds of this rank's tiles -> of all tiles, in the order of the vocabulary."""

    def gather(own: Fold) -> Fold:
        fields = {name: values for name, values in own._asdict().items() if values is not None and name != "target"}
        n, tiles = own.peak.shape[1], -(-shard.vocab // width)
        out, past = own.peak.new_zeros(len(fields), tiles, n), 0
        for piece in pieces:  # by slices: a list of places would be copied to the device, which no graph can hold
            first, count = piece.first // width, -(-piece.weight.shape[0] // width)
            for of_all, values in zip(out, fields.values(), strict=True):
                of_all[first : first + count] = values[past : past + count]
            past += count
        return own._replace(**dict(zip(fields, shard.total(out), strict=True)))

    return gather


def whole_targets(rows: Head) -> Tensor:
    """(n,) ids of the whole vocabulary. With a shard a collective: the rank of a target tells the others."""
    if rows.shard is None:
        return rows.targets
    here = (rows.targets >= 0) & (rows.targets < rows.weight.shape[0])
    return rows.shard.maximum(torch.where(here, rows.targets + rows.shard.place.vocab_start, -1))


def fold_in_order(rows: Head, options: EngineOptions) -> Fold:
    """The fold of gathered rows over all ranks, from tiles of logits in memory; see `with_fixed_tiles`."""
    assert options.chunk_vocab is not None
    n, device, width, targets = rows.hidden.shape[0], rows.hidden.device, options.chunk_vocab, whole_targets(rows)
    pieces, kernels = whole_tiles(rows, width), for_device(device)

    def start() -> Fold:
        return Fold.start(n, device, entropy=options.entropy, extras=options.extras)

    folds = []
    for piece in pieces.own:
        for first, last in spans(piece.weight.shape[0], width):
            # A library may choose another product for rows at addresses that 16 does not divide.
            tile = realigned(piece.weight[first:last].to(options.compute_dtype).contiguous())
            bias, fold = None if piece.bias is None else piece.bias[first:last], start()
            for rows_first, rows_last in spans(n, INVARIANT_TOKENS):
                here = slice(rows_first, rows_last)
                logits = gemm.matmul(rows.hidden[here], tile.T)
                transform = rows.transform(options, here)
                kernels.fold(logits, targets[here], piece.first + first, bias, transform, fold.take(here))
            folds.append(fold)
    own = Fold._make(
        None if values[0] is None else torch.stack(values[1:]) if folds else values[0].new_empty(0, n)
        for values in zip(start(), *folds, strict=True)
    )
    # One tile has the target's logit, the others have 0.
    target = own.target.sum(0) if rows.shard is None else rows.shard.total(own.target.sum(0))
    state = each(start()._replace(target=target), torch.Tensor.contiguous)
    kernels.merge(pieces.gathered(own), state)
    return state
