"""The sparse backward: a token keeps only the entries of its gradient without which its error could pass the tolerance.

`README.md`, under "Found", has the steps. The host waits twice: for the number of kept parts (step 4) and for the
length of the lists (step 6).

The forward keeps statistics of each tile if its product has an epilogue. Without them the backward is exact.
"""

from functools import partial

from liger_rl.head.dense import two_pass
from liger_rl.head.head_options import EngineOptions
from liger_rl.head.head_shape import NO_GRADIENT, HeadShape
from liger_rl.head.interface import Gradients, Head, Needs, gathered
from liger_rl.head.sparse import lists
from liger_rl.head.sparse.lists import Choice, ListedHead
from liger_rl.kernels import gemm
from liger_rl.kernels.statistics import (
    TileStatistics,
    TokenGradients,
    TokenStatistics,
)
from liger_rl.kernels.transform import HeadFactors

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
    """Gradients from lists of ids. If lists would be long, or with a gradient of mean_logits, exact. Two host syncs."""
    if known is None or tokens.uniform is not None:
        return two_pass.backward(head, options, statistics, None, tokens, needs)
    from liger_rl.head.sparse import bounds_triton, listing_triton

    transform, dtype, live = options.transform, options.compute_dtype, head.live
    weight_dtype, head = head.weight.dtype, head.with_weight_in(dtype)
    weight, bias = head.weight, head.bias
    targets, tokens = live.gather(head.targets), tokens._replace(uniform=None).with_float32_lse().contiguous()
    # The target's z is logp + lse, for the float32 lse too.
    logps = (statistics.logps + (statistics.lse - tokens.lse)).float()
    bounds = bounds_triton.part_bounds(known, logps, tokens, targets, transform)
    drawn = bounds_triton.draw_tokens(bounds, live.index)
    sample = head.hidden[drawn.positions].to(dtype)
    tail = bounds_triton.tail_of_logits(gemm.matmul(weight, sample.T), bias, drawn, targets, tokens, transform)
    signed = tokens.grad_entropy is not None
    choice = Choice.of(
        bounds_triton.choose_parts(bounds, tail, options.grad_tolerance, transform, dtype, signed=signed),
        weight.shape[1],
    )
    at_target = bounds.at_target
    del bounds
    selection, finite = lists.readable(live, drawn)
    hidden = gathered(head.hidden, selection, dtype)
    factors = HeadFactors(hidden, weight, bias, transform)
    make = partial(listing_triton.make_parts, factors, targets, tokens)
    dtypes = head.hidden.dtype, weight_dtype
    listed = ListedHead(factors, finite, weight.shape[0], dtypes)
    gradients, kept = lists.list_gradients(listed, choice, tail, make, (targets, at_target), needs)
    if gradients is None:
        del choice, tail, hidden, factors, make, listed
        return two_pass.backward(head, options, statistics, None, tokens, needs, count=kept.wanted)
    return gradients.of_all_tokens(live, head)


def lacks(shape: HeadShape) -> str | None:
    if shape.passes == "one":
        return 'passes other than "one"'
    if shape.options.grad_tolerance == 0.0:
        exact = "16-bit products, and no option that makes the gradient exact"
        return exact if shape.auto_tolerance else "a grad_tolerance above 0"
    if not shape.wants_gradient:
        return NO_GRADIENT
    return shape.two_pass_epilogue_lacks
