"""The engine of calls with a tolerance: its backward drops small entries of each token's gradient.

For each token it drops as many entries of dL/dlogits as possible such that the relative error of its gradient stays
below the tolerance. README.md, "Lists from bounds", has the steps. The host waits twice: for the number of selected
parts (step 4) and for the length of the lists (step 6).

The forward saves statistics of each tile if its product has an epilogue. Without them the backward is exact.
"""

from liger_rl.head.autograd import Engine, Saved, token_gradients
from liger_rl.head.dense import two_pass
from liger_rl.head.host_answer import HostAnswer
from liger_rl.head.live_tokens import take_rows
from liger_rl.head.record import Gradients, Head, LogProbs, Needs
from liger_rl.head.sparse import lists
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
        return NO_GRADIENT if True not in work.needs else work.reason_against_tolerance

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
        return _sparse_gradients(saved, head, gradients, needs)


def _sparse_gradients(saved: Saved, head: Head, gradients: TokenGradients, needs: Needs) -> Gradients:
    """Gradients from lists of ids; exact ones if lists would be long. Two host syncs."""
    from liger_rl.head.sparse import bounds_triton

    transform, dtype, live, weight_dtype = head.options.transform, head.dtype, head.live, head.weight.dtype
    exact_gradients, head = gradients, head.with_weight_in(dtype)
    weight, bias = head.weight, head.bias
    targets, gradients = take_rows(head.targets, live), gradients.with_float32_lse().contiguous()
    # The target's z is logp + lse, for the float32 lse too.
    logps = (saved.logps + (saved.lse - gradients.lse)).float()
    tiles = TileStatistics(saved.peaks, saved.sums, saved.moments)
    bounds = bounds_triton.bound_parts(tiles, logps, gradients, targets, transform)
    samples = bounds_triton.sample_tokens(bounds, live)
    sampled_hidden = head.hidden[samples.positions].to(dtype)
    shares = bounds_triton.estimate_shares(
        gemm.matmul(weight, sampled_hidden.T), bias, samples, targets, gradients, transform
    )
    signed = gradients.grad_entropy is not None
    parts, counts_on_device = bounds_triton.select_parts(
        bounds, shares, head.grad_tolerance, transform, dtype, signed=signed
    )
    part_counts, at_target = HostAnswer(counts_on_device), bounds.at_target
    del bounds, tiles
    # A token without a gradient may have NaN in its row of hidden, so products read the row of a token that has one:
    # in the copy of the live rows, or if all tokens are live, by an index.
    gathered, hidden_rows = (None, samples.hidden_rows) if live is None else (samples.hidden_rows, None)
    factors = HeadFactors(align_rows(take_rows(head.hidden, gathered).to(dtype).contiguous()), weight, bias, transform)
    result, counts = lists.sum_over_lists(
        factors, hidden_rows, (targets, at_target), gradients, parts, part_counts, shares,
        (head.hidden.dtype, weight_dtype), needs,
    )  # fmt: skip
    if result is None:
        del factors, parts, shares
        return two_pass.exact_gradients(head, exact_gradients, needs, count=counts.gradient_tokens)
    return result.of_all_tokens(live, head)
