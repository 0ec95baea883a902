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

from liger_rl.head.autograd import Engine, Saved, has_gradient, index_of, token_gradients
from liger_rl.head.live_tokens import select_live
from liger_rl.head.record import Gradients, Head, LogProbs, Needs
from liger_rl.head.tiles import Tiles, plan_tiles, spans, take_span
from liger_rl.kernels import for_device, gemm
from liger_rl.kernels.devices import log_way, reason_against_product, runs_triton
from liger_rl.kernels.statistics import Fold, TokenGradients, TokenStatistics

OUT_OF_VOCAB = -1  # stands for a target outside of all tiles

# (logits of a tile (n, v) float32, slice of its n tokens, its first vocabulary entry)
TileReader = Callable[[Tensor, slice, int], None]


class TwoPasses(Engine):
    @staticmethod
    def forward(saved: Saved, head: Head) -> TokenStatistics:
        statistics = fold_head(head)
        saved.logps, saved.lse, saved.entropy = statistics.logps, statistics.lse, statistics.entropy
        return statistics

    @staticmethod
    def backward(saved: Saved, head: Head, grads: LogProbs, needs: Needs) -> Gradients:
        return head_gradients(head, token_gradients(saved, grads, head.vocab), needs)


def fold_head(head: Head) -> TokenStatistics:
    """Statistics of every token that counts, in 2 n H V operations."""
    rows = _convert_weight(head.take(head.live), folds=True)
    epilogue = _find_epilogue(rows, folds=True)
    if epilogue is None:
        return fold_tiles(rows).finish()
    shard, options = rows.shard, rows.options
    return epilogue.gemm_fold(
        rows.hidden, rows.weight, rows.bias, rows.target_rows, options.transform, entropy=options.entropy,
        extras=options.extras,
        over_shards=None if shard is None else lambda fold: fold.over_ranks(shard.maximum, shard.total),
    )  # fmt: skip


def head_gradients(
    head: Head,
    gradients: TokenGradients,  # (n,) each, of the tokens that count
    needs: Needs,
) -> Gradients:
    """Gradients of a head's tensors, from recomputed tiles of the tokens that have one."""
    selected = index_of(has_gradient(gradients))
    gradients, live = gradients._replace(has_gradient=None).with_float32_lse(), head.live
    if selected is not None:
        live, gradients = select_live(live, selected), gradients.take(selected)
    # We pass the copied rows without binding them, so that they are freed before dH of all N tokens is allocated.
    return tile_gradients(
        _convert_weight(head.take(live), folds=False), gradients, needs
    ).of_all_tokens(live, head)  # fmt: skip


def _convert_weight(rows: Head, *, folds: bool) -> Head:
    """`rows`; if only the weight's dtype rules out our own product, with a copy of the weight in the rows' dtype.

    Rounding a float32 weight in the registers of that product is slower: a fold took 24.8 ms, with a copy 11.3 ms.
    """
    if rows.weight.dtype == rows.dtype:
        return rows
    # The copy does not exist yet. `rows.hidden` stands for it: its dtype, row length and alignment are the same.
    reason = _reason_against_epilogue(rows._replace(weight=rows.hidden), folds=folds)
    return rows if reason is not None else rows.with_weight_in(rows.dtype)


def _reason_against_epilogue(rows: Head, *, folds: bool) -> str | None:
    """The first thing that a product with an epilogue, which `folds` or makes gradients, needs and `rows` lack."""
    if rows.options.names_chunk:
        return "no chunk to be named"
    return reason_against_product(rows.hidden, rows.weight, folds=folds)


def _find_epilogue(rows: Head, *, folds: bool) -> ModuleType | None:
    """The module of the product with an epilogue; None if it does not apply, so that tiles of logits are in memory."""
    reason = _reason_against_epilogue(rows, folds=folds)
    log_way("forward" if folds else "backward", rows.hidden.device, reason)
    if reason is not None:
        return None
    from liger_rl.kernels import epilogue

    return epilogue


def fold_tiles(rows: Head, *, read_tile: TileReader | None = None) -> Fold:
    """The fold of rows over all ranks, from tiles of logits in memory. Each tile is passed to `read_tile`."""
    hidden, weight, bias, options = rows.hidden, rows.weight, rows.bias, rows.options
    targets, transform, (n, hidden_size), vocab = rows.target_rows, options.transform, hidden.shape, weight.shape[0]
    kernels = for_device(hidden.device)
    # PyTorch's kernels make float32 copies of a tile. Triton's read the tile once.
    bytes_per_logit = 4 if runs_triton(hidden.device) else 12
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


# (tile of the weight (v, H), its first vocabulary entry, slice of the rows) -> dL/dx of a tile, in the compute dtype
TileGradient = Callable[[Tensor, int, slice], Tensor]


def tile_gradients(
    rows: Head,  # of `Head.take`
    gradients: TokenGradients | None,  # None if `tile_gradient` is given
    needs: Needs,
    *,
    tile_gradient: TileGradient | None = None,  # gives dL/dx of each tile, which is then not recomputed
    tiles: Tiles | None = None,
    vocab: int | None = None,  # only the first `vocab` entries have a gradient; the rest get 0
) -> Gradients:
    """Gradients of rows from recomputed tiles.

    The tiles take 2 n H V operations, and the gradients of hidden and of weight 2 n H V each. With K targets,
    `gradients.at_target` (n, K) is dL/dx at the targets, the same number at each repetition of an id.

    The gradient of hidden is float32. With a sharded vocabulary it is summed over the ranks while the last product for
    the weight runs.
    """
    hidden, weight, bias, targets, options = rows.hidden, rows.weight, rows.bias, rows.target_rows, rows.options
    n, vocab = hidden.shape[0], weight.shape[0] if vocab is None else vocab
    several = None
    if targets.dim() == 2:
        assert gradients is not None
        several = targets, gradients.at_target
        targets, gradients = targets.new_full((n,), OUT_OF_VOCAB), gradients._replace(at_target=gradients.grad_logps)
    kernels = for_device(hidden.device)
    epilogue = _find_epilogue(rows, folds=False) if tile_gradient is None else None
    dtype = rows.dtype
    bytes_per_logit = dtype.itemsize + (0 if epilogue is not None else 4) if runs_triton(hidden.device) else 12
    tiles = tiles or plan_tiles(n, vocab, hidden.shape[1], hidden.device, options, bytes_per_logit=bytes_per_logit)
    grad_weight = unwritten(weight, vocab, rows.weight_dtype) if needs[1] else None
    grad_bias = unwritten(bias, vocab) if bias is not None and needs[2] else None
    product = _Product(hidden, weight, grad_weight, needs[0])

    token_spans, vocab_spans = spans(n, tiles.tokens), spans(vocab, tiles.vocab)
    pending = None
    if rows.shard is not None:
        pending = rows.shard.pending_sum(product.grad_rows)
        vocab_spans.reverse()  # so that the last tile is a whole one, whose product hides the sum over ranks
    for first, last in vocab_spans:
        product.start(first, last, parts=len(token_spans))
        bias_tile, bias_total = None if bias is None else take_span(bias, first, last), None
        if grad_bias is not None:
            bias_total = torch.zeros(last - first, dtype=torch.float32, device=weight.device)
        for start, stop in token_spans:
            tokens = slice(start, stop)
            if tile_gradient is not None:
                tile = tile_gradient(product.tile, first, tokens)
            else:
                assert gradients is not None
                ids, tile_tokens = take_span(targets, start, stop), gradients.take(tokens)
                tile_hidden = take_span(hidden, start, stop)
                if epilogue is not None:
                    tile = epilogue.gemm_grad(
                        tile_hidden, product.tile, bias_tile, ids, first, options.transform, tile_tokens
                    )
                else:
                    logits = gemm.matmul(tile_hidden, product.tile.T)
                    tile = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
                    kernels.grad(logits, ids, first, bias_tile, options.transform, tile_tokens, tile)
                    del logits
            if several is not None:
                kernels.write_at_ids(tile, several[0][tokens], several[1][tokens], first)
            product.add_to_rows(tile, start, stop)
            if pending is not None and (first, stop) == (vocab_spans[-1][0], n):
                pending.start()
            product.add_to_table(tile, start, stop)
            if bias_total is not None:
                bias_total += gemm.column_sums(tile)
            del tile
        product.store()
        if grad_bias is not None and bias_total is not None:
            grad_bias[first:last] = bias_total
    grad_rows = product.finish()
    if pending is not None:
        pending.wait()
    return Gradients(grad_rows, grad_weight, grad_bias)


def unwritten(values: Tensor, vocab: int, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for a gradient shaped like `values`: the first `vocab` rows are uninitialized, the rest are 0."""
    out = torch.empty(values.shape, dtype=dtype or values.dtype, device=values.device)
    if vocab < len(out):
        out[vocab:] = 0
    return out


class _Product:
    """The product rows @ table.T, and the gradients of its factors.

    The gradient of a tile of the table is summed in float32 and rounded to the table's dtype once.
    """

    def __init__(self, rows: Tensor, table: Tensor, grad_table: Tensor | None, needs_rows: bool):
        self.rows, self.table, self.grad_table, self.first_tile = rows, table, grad_table, True
        self.grad_rows = torch.empty(rows.shape, dtype=torch.float32, device=rows.device) if needs_rows else None

    def start(self, first: int, last: int, *, parts: int) -> None:
        """Start the tile of the table's rows first to last, to whose gradient `parts` products are added."""
        self.tile = take_span(self.table, first, last).to(self.rows.dtype)
        self.out = None if self.grad_table is None else take_span(self.grad_table, first, last)
        self.total: Tensor | None = None
        # Several products are added in float32. CPUs, and tables of another dtype, have no product that rounds once.
        if self.out is not None and self.out.dtype == torch.float32:
            self.total = self.out
        elif self.out is not None and (parts != 1 or not self.out.is_cuda or self.out.dtype != self.rows.dtype):
            self.total = torch.empty_like(self.out, dtype=torch.float32)
        self.first_part = True

    def add_to_rows(self, grad: Tensor, start: int, stop: int) -> None:
        if self.grad_rows is not None:
            product = gemm.write if self.first_tile else gemm.accumulate
            product(take_span(self.grad_rows, start, stop), grad, self.tile)

    def add_to_table(self, grad: Tensor, start: int, stop: int) -> None:
        rows = take_span(self.rows, start, stop)
        if self.total is not None:
            (gemm.write if self.first_part else gemm.accumulate)(self.total, grad.T, rows)
        elif self.out is not None:
            # There is one part, so the product's float32 accumulators hold the whole sum, and `mm` rounds it once.
            torch.mm(grad.T, rows, out=self.out)
        self.first_part = False

    def store(self) -> None:
        self.first_tile = False
        if self.out is None or self.total is None:
            return
        if self.first_part:  # no token has a gradient
            self.total.zero_()
        if self.total is not self.out:
            self.out.copy_(self.total)

    def finish(self) -> Tensor | None:
        """The gradient of the rows."""
        if self.first_tile and self.grad_rows is not None:  # the table has no row
            self.grad_rows.zero_()
        return self.grad_rows
