"""Two passes: per-token softmax statistics of hidden @ weight.T, and its gradients, one tile of logits at a time.

The forward folds tiles into a few numbers per token. The backward drops the tokens without a gradient and recomputes
the tiles of the remaining tokens. Each tile becomes dL/dx, and its two products are added at once. Vocabulary tiles are
the outer loop of both passes, so that a tile of the weight is read once, and under autocast converted once.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from liger_rl.distributed import BEYOND
from liger_rl.head import several
from liger_rl.head.live_tokens import index_of, select_live
from liger_rl.head.record import Gradients, Head, LogProbs, Needs
from liger_rl.head.several import SeveralTargets
from liger_rl.head.tiles import Tiles, plan_tiles, spans, take_span
from liger_rl.kernels import for_device, gemm, reference
from liger_rl.kernels.devices import log_way, reason_against_product
from liger_rl.kernels.statistics import Fold, TokenGradients, TokenStatistics

# (logits of a tile (n, v) float32, slice of its n tokens, its first vocabulary entry)
TileReader = Callable[[Tensor, slice, int], None]


def fold_head(head: Head) -> TokenStatistics:
    """Statistics of every token that counts, in 2 n H V operations."""
    rows = head.take(head.live)
    if rows.targets.dim() == 2:
        log_way("forward", rows.hidden.device, "one target for each token")
        targets = SeveralTargets(rows)
        return targets.finish(fold_tiles(targets.rows, read_tile=targets.read_tile))
    rows, epilogue = _pick_epilogue(rows, folds=True)
    if epilogue is None:
        return fold_tiles(rows).finish()
    shard, options = rows.shard, rows.options
    return epilogue.gemm_fold(
        rows.hidden, rows.weight, rows.bias, rows.target_rows, options.transform, entropy=options.entropy,
        extras=options.extras,
        over_shards=None if shard is None else lambda fold: fold.over_ranks(shard.maximum, shard.total),
    )  # fmt: skip


def token_gradients(statistics: TokenStatistics, head: Head, grads: LogProbs) -> TokenGradients:
    """dL/dlogits of each token that counts as numbers, from the gradients of its values, None where there is none.

    `statistics` has logps, lse and entropy.
    """
    if head.targets.dim() == 2:
        return several.token_gradients(statistics, head, grads)
    logps = statistics.logps
    grad_logps = torch.zeros_like(logps) if grads.logps is None else grads.logps.float()
    gradients = TokenGradients.of(statistics, grad_logps, grads.entropy)
    if grads.lse is not None:
        gradients = gradients.with_lse(grads.lse.float(), logps)
    return gradients if grads.mean_logits is None else gradients.with_mean_logits(grads.mean_logits, head.vocab)


def head_gradients(
    head: Head,
    gradients: TokenGradients,  # (n,) each, of the tokens that count
    needs: Needs,
) -> Gradients:
    """Gradients of a head's tensors, from recomputed tiles of the tokens that have one."""
    selected = index_of(gradients.nonzero())
    gradients, live = gradients._replace(has_gradient=None).with_float32_lse(), head.live
    if selected is not None:
        live, gradients = select_live(live, selected), gradients.take(selected)
    return _gradients_of_rows(head.take(live), gradients, needs).of_all_tokens(live, head)


def _gradients_of_rows(rows: Head, gradients: TokenGradients, needs: Needs) -> Gradients:
    """A function of its own, so that copied rows are freed before dH of all N tokens is allocated."""
    tiles = TileGradients(rows, gradients)
    return sum_tiles(tiles.rows, tiles.make, tiles.plan_tiles(), needs)


def _pick_epilogue(rows: Head, *, folds: bool) -> tuple[Head, ModuleType | None]:
    """-> `rows`, and the module whose product folds them, or makes their gradients, in its epilogue.

    Without such a product (None) float32 tiles of logits are in memory. If the weight's dtype alone rules it out,
    `rows` get a copy of the weight in their dtype: rounding a float32 weight in the registers of that product is
    slower. A fold took 24.8 ms, with a copy 11.3 ms.
    """
    converts = rows.weight.dtype != rows.dtype
    # The copy does not exist yet. `rows.hidden` stands for it: its dtype, row length and alignment are the same.
    weight = rows.hidden if converts else rows.weight
    named = rows.options.names_chunk
    reason = "no chunk to be named" if named else reason_against_product(rows.hidden, weight, folds=folds)
    log_way("forward" if folds else "backward", rows.hidden.device, reason)
    if reason is not None:
        return rows, None
    from liger_rl.kernels import epilogue

    return rows.with_weight_in(rows.dtype) if converts else rows, epilogue


def fold_tiles(rows: Head, *, read_tile: TileReader | None = None) -> Fold:
    """The fold of rows over all ranks, from tiles of logits in memory. Each tile is passed to `read_tile`."""
    hidden, weight, bias, options = rows.hidden, rows.weight, rows.bias, rows.options
    targets, transform, (n, hidden_size), vocab = rows.target_rows, options.transform, hidden.shape, weight.shape[0]
    kernels = for_device(hidden.device)
    # PyTorch's kernels make float32 copies of a tile. Triton's read the tile once.
    bytes_per_logit = 12 if kernels is reference else 4
    tiles = plan_tiles(n, vocab, hidden_size, hidden.device, options, bytes_per_logit=bytes_per_logit)
    token_spans = spans(n, tiles.tokens) or [(0, 0)]
    folds: list[Any] = [None] * len(token_spans)
    for first, last in spans(vocab, tiles.vocab):
        weight_tile = take_span(weight, first, last).to(rows.dtype)
        bias_tile = None if bias is None else take_span(bias, first, last)
        for index, span in enumerate(token_spans):
            tokens = slice(*span)
            logits = gemm.matmul(take_span(hidden, *span), weight_tile.T)
            folds[index] = kernels.fold(
                logits, take_span(targets, *span), first, bias_tile, transform, folds[index], entropy=options.entropy,
                extras=options.extras,
            )  # fmt: skip
            if read_tile is not None:
                read_tile(logits, tokens, first)
            del logits  # so that it is freed before the next tile is allocated
    state, shard = folds[0] if len(folds) == 1 else Fold.concatenate(folds), rows.shard
    return state if shard is None else state.over_ranks(shard.maximum, shard.total)


class TileGradients:
    """dL/dx of tiles of logits, which are computed again for it. They take 2 n H V operations."""

    def __init__(self, rows: Head, gradients: TokenGradients) -> None:
        """`rows` is of `Head.take`. With K targets, `at_target` has the same number at each repetition of an id."""
        self.rows, self.epilogue = _pick_epilogue(rows, folds=False)
        self.gradients, self.targets = gradients, rows.target_rows
        self.ids: Tensor | None = None
        self.at_ids: Tensor | None = None
        if self.targets.dim() == 2:
            self.ids, self.at_ids = self.targets, gradients.at_target
            self.targets = self.ids.new_full(self.ids.shape[:1], BEYOND)
            self.gradients = gradients._replace(at_target=None)

    def plan_tiles(self) -> Tiles:
        rows, (n, hidden_size), device = self.rows, self.rows.hidden.shape, self.rows.hidden.device
        bytes_per_logit = rows.dtype.itemsize
        if self.epilogue is None:
            bytes_per_logit = 12 if for_device(device) is reference else 4 + bytes_per_logit
        return plan_tiles(n, rows.weight.shape[0], hidden_size, device, rows.options, bytes_per_logit=bytes_per_logit)

    def make(self, weight: Tensor, first: int, tokens: slice) -> Tensor:
        """-> (m, v) in the dtype of products, for the weight (v, H) of vocabulary entries from `first` on."""
        rows, transform = self.rows, self.rows.options.transform
        span = tokens.start, tokens.stop
        hidden, targets = take_span(rows.hidden, *span), take_span(self.targets, *span)
        gradients = self.gradients.take(tokens)
        bias = None if rows.bias is None else take_span(rows.bias, first, first + weight.shape[0])
        if self.epilogue is not None:
            tile = self.epilogue.gemm_grad(hidden, weight, bias, targets, first, transform, gradients)
        else:
            logits = gemm.matmul(hidden, weight.T)
            tile = logits if logits.dtype == rows.dtype else torch.empty_like(logits, dtype=rows.dtype)
            for_device(hidden.device).grad(logits, targets, first, bias, transform, gradients, tile)
        if self.ids is not None and self.at_ids is not None:
            reference.write_at_ids(tile, self.ids[tokens], self.at_ids[tokens], first)
        return tile


# (tile of the weight (v, H), its first vocabulary entry, slice of the rows) -> dL/dx of a tile, in the compute dtype
MakeTile = Callable[[Tensor, int, slice], Tensor]


def sum_tiles(
    rows: Head,  # of `Head.take`
    make_tile: MakeTile,
    tiles: Tiles,
    needs: Needs,
) -> Gradients:
    """Gradients of rows from dL/dx of their tiles: products of 2 n H V operations for hidden, and as many for weight.

    The gradient of hidden is float32. With a sharded vocabulary it is summed over the ranks while the last product for
    the weight runs.
    """
    n, vocab = rows.hidden.shape[0], rows.weight.shape[0]
    sums = _Sums(rows, needs)
    token_spans, vocab_spans = spans(n, tiles.tokens), spans(vocab, tiles.vocab)
    pending = None
    if rows.shard is not None:
        pending = rows.shard.pending_sum(sums.grad_hidden)
        vocab_spans.reverse()  # so that the last tile is a whole one, whose product hides the sum over ranks
    for first, last in vocab_spans:
        sums.start(first, last, parts=len(token_spans))
        for start, stop in token_spans:
            tile = make_tile(sums.weight_tile, first, slice(start, stop))
            sums.add_to_hidden(tile, start, stop)
            if pending is not None and (first, stop) == (vocab_spans[-1][0], n):
                pending.start()
            sums.add_to_weight(tile, start, stop)
            del tile  # so that it is freed before the next tile is allocated
        sums.store()
    gradients = sums.finish()
    if pending is not None:
        pending.wait()
    return gradients


class _Sums:
    """The gradients of hidden, weight and bias, to which those of tiles are added.

    The gradient of a tile of the weight is summed in float32 and rounded to the weight's dtype once.
    """

    def __init__(self, rows: Head, needs: Needs) -> None:
        hidden, weight, bias = rows.hidden, rows.weight, rows.bias
        self.hidden, self.weight, self.first_tile = hidden, weight, True
        self.grad_hidden = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device) if needs[0] else None
        self.grad_weight = self.grad_bias = None
        if needs[1]:
            dtype = rows.weight_dtype or weight.dtype
            self.grad_weight = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        if bias is not None and needs[2]:
            self.grad_bias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)

    def start(self, first: int, last: int, *, parts: int) -> None:
        """Start the tile of vocabulary entries first to last, to whose gradients `parts` products are added."""
        self.first, self.last, self.first_part = first, last, True
        self.weight_tile = take_span(self.weight, first, last).to(self.hidden.dtype)
        self.out = None if self.grad_weight is None else take_span(self.grad_weight, first, last)
        self.total: Tensor | None = None
        # Several products are added in float32. CPUs, and weights of another dtype, have no product that rounds once.
        if self.out is not None and self.out.dtype == torch.float32:
            self.total = self.out
        elif self.out is not None and (parts != 1 or not self.out.is_cuda or self.out.dtype != self.hidden.dtype):
            self.total = torch.empty_like(self.out, dtype=torch.float32)
        self.bias_total: Tensor | None = None
        if self.grad_bias is not None:
            self.bias_total = torch.zeros(last - first, dtype=torch.float32, device=self.hidden.device)

    def add_to_hidden(self, tile: Tensor, start: int, stop: int) -> None:
        if self.grad_hidden is not None:
            product = gemm.write if self.first_tile else gemm.accumulate
            product(take_span(self.grad_hidden, start, stop), tile, self.weight_tile)

    def add_to_weight(self, tile: Tensor, start: int, stop: int) -> None:
        hidden = take_span(self.hidden, start, stop)
        if self.total is not None:
            (gemm.write if self.first_part else gemm.accumulate)(self.total, tile.T, hidden)
        elif self.out is not None:
            # There is one part, so the product's float32 accumulators hold the whole sum, and `mm` rounds it once.
            torch.mm(tile.T, hidden, out=self.out)
        if self.bias_total is not None:
            self.bias_total += gemm.column_sums(tile)
        self.first_part = False

    def store(self) -> None:
        """Write the gradients of the tile of the weight and of the bias."""
        self.first_tile = False
        if self.grad_bias is not None and self.bias_total is not None:
            self.grad_bias[self.first : self.last] = self.bias_total
        if self.out is None or self.total is None:
            return
        if self.first_part:  # no token has a gradient
            self.total.zero_()
        if self.total is not self.out:
            self.out.copy_(self.total)

    def finish(self) -> Gradients:
        if self.first_tile and self.grad_hidden is not None:  # there is no vocabulary entry
            self.grad_hidden.zero_()
        return Gradients(self.grad_hidden, self.grad_weight, self.grad_bias)
