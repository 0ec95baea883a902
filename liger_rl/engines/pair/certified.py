"""Two heads with a tolerance: the steps of `sparse/README.md`, from the forward's sums over tiles.

A part is one token's dL/dlogits in a tile of 1,024 entries. The sums give its norm (`bounds_triton`). The kept parts
take both heads' products again. A part includes the target's entry.

Where `applies` is false the backward is exact. It is also exact if an entropy has a gradient, and if the lists would be
long.
"""

from functools import partial

import torch

from liger_rl.call.tokens import TokenSelection
from liger_rl.engines.interface import Gradients, Needs
from liger_rl.engines.pair import two_heads as exact
from liger_rl.engines.pair.products import Pair, PairRows
from liger_rl.engines.pair.reference import TV, PairGradients, TileSums
from liger_rl.engines.sparse import lists
from liger_rl.engines.sparse.lists import Choice, ListedHead
from liger_rl.kernels import devices


def applies(pair: Pair) -> bool:
    """Whether parts may be dropped: if our own products run for both heads, with any number of tokens.

    Kernels of kept parts read weights in the products' dtype, without a copy. No part is dropped if a chunk is named,
    under the student's softcap, with a low-rank term and with a sharded vocabulary; nor for a total variation, where an
    entry with p near q may have either of two gradients.
    """
    student, options = pair.student, pair.options
    if options.grad_tolerance == 0.0 or options.names_chunk or options.transform.softcap is not None:
        return False
    if student.low_inputs is not None or student.shard is not None or pair.measure.kind == TV:
        return False
    return all(
        devices.applies_to(devices.MIN_TOKENS, head.hidden.shape[1], dtype, head.weight)
        for head, dtype in ((student, options.compute_dtype), (pair.teacher, pair.teacher_options.compute_dtype))
    )


def backward(pair: Pair, tile_sums: TileSums | None, tokens: PairGradients, needs: Needs) -> Gradients:
    """As `two_heads.backward`, from lists of ids; exact without `tile_sums`. Host syncs as in `sparse.certified`."""
    if tile_sums is None or tokens.grad_entropy is not None or not tokens.grad.numel():
        return exact.backward(pair, tokens, needs)
    from liger_rl.engines.pair import bounds_triton as pair_bounds
    from liger_rl.engines.sparse import bounds_triton

    head, live, vocab, measure = pair.student, pair.student.live, pair.vocab, pair.measure
    tolerance, transform, dtype = pair.options.grad_tolerance, pair.options.transform, pair.options.compute_dtype
    bounds = pair_bounds.part_bounds(tile_sums, measure, tokens, live.gather(head.targets))
    drawn = bounds_triton.draw_tokens(bounds, live.index)
    rows = PairRows(pair, TokenSelection(live.total, index=drawn.positions))
    # Ids outside of all tiles: a target's own gradient must not count towards its entry's share.
    tile = rows.whole_tile(slice(0, rows.count))._replace(targets=torch.full_like(drawn.rows, -1))
    sample = tile.student.logits
    rows.kernels.grad_pair(tile, tokens.take(drawn.rows), sample)
    tail = pair_bounds.tail_of(sample, drawn.scales)
    choice = Choice.of(
        bounds_triton.choose_parts(bounds, tail, tolerance, transform, dtype, signed=True), head.weight.shape[1]
    )
    del bounds, rows, tile, sample
    selection, finite = lists.readable(live, drawn)
    rows = PairRows(pair, selection)
    student, teacher = (side.factors(slice(None), 0, vocab) for side in (rows.student, rows.teacher))
    make = partial(pair_bounds.make_parts, student, teacher, rows.targets, measure, tokens)
    dtypes = head.hidden.dtype, head.weight.dtype
    listed = ListedHead(student._replace(weight=head.weight, bias=head.bias), finite, vocab, dtypes)
    gradients, kept = lists.list_gradients(listed, choice, tail, make, None, needs)
    if gradients is None:
        del choice, tail, rows, student, teacher, make, listed
        return exact.backward(pair, tokens, needs, count=kept.wanted)
    return gradients.of_all_tokens(live, head)
