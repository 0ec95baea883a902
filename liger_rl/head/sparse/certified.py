"""The sparse backward: a token keeps only the entries of its gradient without which its error could pass the tolerance.

`README.md`, under "Found", has the steps. The host waits twice: for the number of kept parts (step 4) and for the
length of the lists (step 6).

The forward keeps statistics of each tile if its product has an epilogue. Without them the backward is exact.
"""

from functools import partial

from liger_rl.head.autograd import Engine, Saved, token_gradients
from liger_rl.head.dense import two_pass
from liger_rl.head.live_tokens import take_rows
from liger_rl.head.record import Gradients, Head, LogProbs, Needs
from liger_rl.head.sparse import lists
from liger_rl.head.sparse.lists import Choice, ListedHead
from liger_rl.head.workload import NO_GRADIENT, Workload
from liger_rl.kernels import gemm
from liger_rl.kernels.devices import align_rows
from liger_rl.kernels.statistics import TileStatistics, TokenGradients, TokenStatistics
from liger_rl.kernels.transform import HeadFactors


class Sparse(Engine):
    name = "sparse"

    @staticmethod
    def reason_against(work: Workload) -> str | None:
        if work.passes == "one":
            return 'passes other than "one"'
        if work.grad_tolerance == 0.0:
            auto = work.options.grad_tolerance == "auto"
            exact = "16-bit products, and no option that makes the gradient exact"
            return exact if auto else "a grad_tolerance above 0"
        return NO_GRADIENT if not work.wants_gradient else work.reason_against_tolerance

    @staticmethod
    def forward(saved: Saved, head: Head) -> TokenStatistics:
        statistics, tiles = two_pass.fold_head(head, with_tiles=True)
        saved.logps, saved.lse, saved.entropy = statistics.logps, statistics.lse, statistics.entropy
        saved.peaks, saved.sums, saved.moments = (None, None, None) if tiles is None else tiles
        return statistics

    @staticmethod
    def backward(saved: Saved, head: Head, grads: LogProbs, needs: Needs) -> Gradients:
        gradients = token_gradients(saved, grads, head.vocab)
        if saved.peaks is None or gradients.uniform is not None:
            return two_pass.exact_gradients(head, gradients, needs)
        return _list_gradients(saved, head, gradients, needs)


def _list_gradients(saved: Saved, head: Head, gradients: TokenGradients, needs: Needs) -> Gradients:
    """Gradients from lists of ids; if lists would be long, exact. Two host syncs."""
    from liger_rl.head.sparse import bounds_triton, listing_triton

    transform, dtype, live, weight_dtype = head.options.transform, head.dtype, head.live, head.weight.dtype
    exact_gradients, head = gradients, head.with_weight_in(dtype)
    weight, bias = head.weight, head.bias
    targets, gradients = take_rows(head.targets, live), gradients.with_float32_lse().contiguous()
    # The target's z is logp + lse, for the float32 lse too.
    logps = (saved.logps + (saved.lse - gradients.lse)).float()
    tiles = TileStatistics(saved.peaks, saved.sums, saved.moments)
    bounds = bounds_triton.part_bounds(tiles, logps, gradients, targets, transform)
    drawn = bounds_triton.draw_tokens(bounds, live)
    sample = head.hidden[drawn.positions].to(dtype)
    tail = bounds_triton.tail_of_logits(gemm.matmul(weight, sample.T), bias, drawn, targets, gradients, transform)
    signed = gradients.grad_entropy is not None
    choice = Choice.of(
        bounds_triton.choose_parts(bounds, tail, head.grad_tolerance, transform, dtype, signed=signed),
        weight.shape[1],
    )
    at_target = bounds.at_target
    del bounds, tiles
    # A token without a gradient may have NaN in its row of hidden, so products read the row of a token that has one:
    # in the copy of the live rows, or if all tokens are live, by an index.
    rows, finite = (None, drawn.sources) if live is None else (drawn.sources, None)
    hidden = align_rows(take_rows(head.hidden, rows).to(dtype).contiguous())
    factors = HeadFactors(hidden, weight, bias, transform)
    make = partial(listing_triton.make_parts, factors, targets, gradients)
    dtypes = head.hidden.dtype, weight_dtype
    listed = ListedHead(factors, finite, weight.shape[0], dtypes)
    result, counts = lists.list_gradients(listed, choice, tail, make, (targets, at_target), needs)
    if result is None:
        del choice, tail, hidden, factors, make, listed
        return two_pass.exact_gradients(head, exact_gradients, needs, count=counts.selected)
    return result.of_all_tokens(live, head)
