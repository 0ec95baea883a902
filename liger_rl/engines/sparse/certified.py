"""The sparse backward: of each token's gradient only the entries without which its own error could pass the tolerance.

1. The forward keeps the peak and the sum of exponentials of each token in each tile of 256 vocabulary entries. They
   bound the norm of dL/dlogits there (`bounds_triton.part_bounds`).
2. A token keeps the tiles without which its error could exceed its share of the tolerance. If tokens keep many of them,
   the exact backward runs. This is the first host sync.
3. The kept parts are computed again: a product whose tokens are gathered tile by tile.
4. Of these, the entries above the token's own threshold become its list. How many there are is the second host sync.
5. The gradients are sums over lists, as with ids that a sampler could have drawn: rows of the weight for the hidden
   states, and hidden states, after a sort by id, for the weight.
6. What a token leaves out of a tile is not forgotten. The tile's entries share its sum as they share the gradients of
   some tokens, so that dL/dlogits still adds up to zero.

Each token's dL/dlogits is then within `grad_tolerance` of itself, relative to its own norm, whatever the loss.

Tiles are kept where the forward's product has an epilogue. Everywhere else the backward is exact.
"""

from functools import partial

from liger_rl.call.options import EngineOptions
from liger_rl.engines.dense import two_pass
from liger_rl.engines.interface import Gradients, Head, Needs, gathered
from liger_rl.engines.shape import NO_GRADIENT, HeadShape
from liger_rl.engines.sparse import lists
from liger_rl.engines.sparse.lists import ListedHead
from liger_rl.kernels import gemm
from liger_rl.kernels.segments import PARTIAL_BYTES
from liger_rl.kernels.statistics import (
    BLOCK_TOKENS,
    BLOCK_VOCAB,
    SAMPLES,
    TileStatistics,
    TokenGradients,
    TokenStatistics,
)

Saved = TileStatistics
forward = partial(two_pass.forward, with_tiles=True)


def backward(
    head: Head,
    options: EngineOptions,
    statistics: TokenStatistics,
    known: TileStatistics | None,
    tokens: TokenGradients,  # (n,) each, of the tokens that count
    needs: Needs,
) -> Gradients:
    """From lists of ids; exact where the lists would be long. Two host syncs."""
    if known is None:
        return two_pass.backward(head, options, statistics, None, tokens, needs)
    from liger_rl.engines.sparse import bounds_triton, listing_triton

    transform, dtype, live = options.transform, options.compute_dtype, head.live
    weight_dtype, head = head.weight.dtype, head.with_weight_in(dtype)
    weight, bias = head.weight, head.bias
    targets, tokens = live.gather(head.targets), tokens.contiguous()
    bounds = bounds_triton.part_bounds(known, statistics, tokens, targets, transform)
    drawn = bounds_triton.draw_tokens(bounds, live.index)
    sample = head.hidden[drawn.positions].to(dtype)
    tail = bounds_triton.tail_of_logits(gemm.matmul(weight, sample.T), bias, drawn, targets, tokens, transform)
    signed = tokens.grad_entropy is not None
    choice = lists.choose_parts(bounds, tail, options.grad_tolerance, transform, dtype, weight.shape[1], signed=signed)
    at_target = bounds.at_target
    assert at_target is not None
    del bounds
    selection, finite = lists.readable(live, drawn)
    hidden = gathered(head.hidden, selection, dtype)
    make = partial(listing_triton.make_parts, hidden, weight, bias, targets, tokens, transform)
    dtypes = head.hidden.dtype, weight_dtype
    listed = ListedHead(hidden, finite, weight, bias, weight.shape[0], transform, dtypes)
    found, kept = lists.list_gradients(listed, choice, tail, make, (targets, at_target), needs)
    if found is None:
        del choice, tail, hidden, make, listed
        return two_pass.backward(head, options, statistics, None, tokens, needs, count=kept.wanted)
    return found.of_all_tokens(live, head)


def lacks(shape: HeadShape) -> str | None:
    if shape.passes == "one":
        return 'passes other than "one"'
    if shape.options.grad_tolerance == 0.0:
        exact = "16-bit products, and no option that makes the gradient exact"
        return exact if shape.auto_tolerance else "a grad_tolerance above 0"
    if not shape.wants_gradient:
        return NO_GRADIENT
    return "weight_grad = None" if shape.in_place else shape.epilogue_of_two_lacks


def workspace(shape: HeadShape) -> int:
    """The statistics of all tiles; with two passes, or with kept parts and the longest lists that are summed."""
    n, size, c, s = shape.tokens, shape.hidden_size, shape.options.compute_dtype.itemsize, shape.dtype.itemsize
    tiles = -(-shape.vocab // BLOCK_VOCAB)
    statistics = 4 * (2 + shape.options.entropy) * n * tiles
    listed = n * lists.BYTES_PER_ID * lists.most_ids(shape.vocab) + 2 * PARTIAL_BYTES
    parts = max(lists.PARTS_BYTES, 2 * BLOCK_TOKENS * BLOCK_VOCAB * tiles)
    rows = n * (size * (s + c + 4) + tiles * (8 + 2 * c))
    shared = tiles * size * (c + 8) + 4 * (SAMPLES + 1) * shape.vocab
    copy = shape.vocab * size * c * shape.casts_weight
    return statistics + max(two_pass.workspace(shape), shape.base_bytes + rows + copy + shared + max(parts, listed))
