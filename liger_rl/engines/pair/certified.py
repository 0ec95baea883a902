"""Two heads with a tolerance: the steps of `sparse/README.md`, from the forward's sums over tiles.

A part is one token's dL/dlogits in a tile of 1,024 entries. The sums give its norm (`bounds_triton`). The kept parts
take both heads' products again. A part includes the target's entry.

Parts are dropped if both heads' products have an epilogue. Otherwise the backward is exact. It is also exact if an
entropy has a gradient, and if the lists would be long.
"""

from functools import partial

import torch

from liger_rl.call.tokens import TokenSelection
from liger_rl.engines.interface import Gradients, Needs
from liger_rl.engines.pair import kernels as kernels_of_pairs
from liger_rl.engines.pair import two_heads as exact
from liger_rl.engines.pair.reference import PairGradients, TileSums
from liger_rl.engines.pair.two_heads import Pair, PairOptions
from liger_rl.engines.sparse import lists
from liger_rl.engines.sparse.lists import ListedHead
from liger_rl.kernels import devices


def applies(pair: Pair, options: PairOptions) -> bool:
    """Whether parts can be dropped: if our own products run for both heads, with any number of tokens."""
    return all(
        devices.applies_to(devices.MIN_TOKENS, head.hidden.shape[1], head_options.compute_dtype, head.weight)
        for head, head_options in ((pair.student, options.student), (pair.teacher, options.teacher))
    )


def backward(
    pair: Pair, options: PairOptions, tile_sums: TileSums | None, tokens: PairGradients, needs: Needs
) -> Gradients:
    """As `two_heads.backward`, from lists of ids; exact without `tile_sums`. Host syncs as in `sparse.certified`."""
    if tile_sums is None or tokens.grad_entropy is not None or not tokens.grad.numel():
        return exact.backward(pair, options, tokens, needs)
    from liger_rl.engines.pair import bounds_triton as pair_bounds
    from liger_rl.engines.pair.epilogue import Factors, Student
    from liger_rl.engines.sparse import bounds_triton

    head, live, vocab = pair.student, pair.student.live, pair.vocab
    student_options, measure = options.student, options.measure
    bounds = pair_bounds.part_bounds(tile_sums, measure, tokens, live.gather(head.targets))
    drawn = bounds_triton.draw_tokens(bounds, live.index)
    sides = exact.sides(pair, options, TokenSelection(live.total, index=drawn.positions))
    student, teacher = (side.whole_tile(slice(0, drawn.rows.numel()), vocab) for side in sides)
    # Ids outside of all tiles: a target's own gradient must not count towards its entry's share.
    nowhere, sample = torch.full_like(drawn.rows, -1), student.logits
    kernels_of_pairs.for_device(sample.device).grad_pair(
        student, teacher, nowhere, 0, measure, tokens.take(drawn.rows), sample
    )
    tail = pair_bounds.tail_of(sample, drawn.scales)
    tolerance, transform = student_options.grad_tolerance, student_options.transform
    dtype = student_options.compute_dtype
    choice = lists.choose_parts(bounds, tail, tolerance, transform, dtype, head.weight.shape[1], signed=True)
    del bounds, sides, student, teacher, sample
    selection, finite = lists.readable(live, drawn)
    sides = exact.sides(pair, options, selection)
    student_factors, teacher_factors = (
        Factors(
            side.factor,
            side.rows.weight[:vocab],
            None if side.rows.bias is None else side.rows.bias[:vocab],
            side.options.transform,
        )
        for side in sides
    )
    with_targets = Student(student_factors, sides[0].rows.targets, 0)
    make = partial(pair_bounds.make_parts, with_targets, teacher_factors, measure, tokens)
    dtypes = head.hidden.dtype, head.weight.dtype
    listed = ListedHead(student_factors.hidden, finite, head.weight, head.bias, vocab, transform, dtypes)
    gradients, kept = lists.list_gradients(listed, choice, tail, make, None, needs)
    if gradients is None:
        del choice, tail, sides, student_factors, teacher_factors, with_targets, make, listed
        return exact.backward(pair, options, tokens, needs, count=kept.wanted)
    return gradients.of_all_tokens(live, head)
