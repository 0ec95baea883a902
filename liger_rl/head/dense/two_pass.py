"""Two passes: per-token softmax statistics of hidden @ weight.T, and its gradients, one tile of logits at a time.

The forward folds tiles into a few numbers per token. The backward drops the tokens without a gradient and recomputes
the tiles of the remaining tokens. Each tile becomes dL/dx, and its two products are added at once. Vocabulary tiles are
the outer loop of both passes, so that a tile of the weight is read once, and under autocast converted once.
"""

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from liger_rl.head.head_options import EngineOptions
from liger_rl.head.head_shape import HeadShape
from liger_rl.head.interface import Gradients, Head, Needs, has_gradient, with_gradient
from liger_rl.head.tiles import Tiles, plan_tiles, spans
from liger_rl.kernels import devices, epilogue_for, for_device, gemm
from liger_rl.kernels.devices import runs_triton
from liger_rl.kernels.reference import SavedExp
from liger_rl.kernels.statistics import Fold, TileStatistics, TokenGradients, TokenStatistics

NOWHERE = -1  # stands for a target outside of all tiles

# (logits of a tile (n, v) float32, slice of its n tokens, its first vocabulary entry, its bias (v,))
Seen = Callable[[Tensor, slice, int, Tensor | None], None]


def forward(
    head: Head,
    options: EngineOptions,
    *,
    with_tiles: bool = False,
    saved_exp: SavedExp | None = None,  # (n, V), written; chunks must hold whole tiles of it, and the rows are gathered
) -> tuple[TokenStatistics, TileStatistics | None]:
    """Statistics of every token that counts, 2 n H V operations, and with `with_tiles` the statistics of tiles.

    With `saved_exp` the statistics include the target's logit, because an exponential that underflowed does not give it
    back. Only the product's epilogue makes statistics of tiles: it must apply, and no chunk may be named. Otherwise
    they are None, and a backward with a tolerance is exact.
    """
    rows = head
    if saved_exp is None:
        rows = with_factor(head.gathered(options.compute_dtype), options)
    shard, epilogue, tiles = rows.shard, fold_epilogue(rows, options), None
    if epilogue is None:
        statistics = fold_tiles(rows, options, saved_exp=saved_exp).finish(with_target=saved_exp is not None)
    else:
        over_ranks = None if shard is None else lambda fold: fold.over_ranks(shard.maximum, shard.total)
        statistics, tiles = epilogue.gemm_fold(
            rows.hidden, rows.weight, rows.bias, rows.targets, options.transform,
            entropy=options.entropy, extras=options.extras, with_tiles=with_tiles, saved_exp=saved_exp,
            over_parts=over_ranks,
        )  # fmt: skip
    return statistics, tiles


def backward(
    head: Head,
    options: EngineOptions,
    _statistics: TokenStatistics,
    _saved: None,
    tokens: TokenGradients,  # (n,) each, of the tokens that count
    needs: Needs,
    *,
    count: int | None = None,  # number of tokens with a gradient, if the host knows it
) -> Gradients:
    wanted, tokens = has_gradient(tokens), tokens._replace(has_gradient=None).with_float32_lse()
    live, tokens = with_gradient(head.live, tokens, wanted, count)
    # We pass the copied rows without binding them, so that they are freed before dH of all N tokens is allocated.
    return gradients(
        with_factor(head.gathered(options.compute_dtype, live), options, least=devices.MIN_TOKENS), options, tokens,
        needs,
    ).of_all_tokens(live, head)  # fmt: skip


def with_factor(rows: Head, options: EngineOptions, *, least: int = 1) -> Head:
    """Gathered rows. If only the weight's dtype rules out our own product, the weight is copied in the rows' dtype.

    With fewer than `least` rows it stays as it is. Rounding a float32 weight in the registers of that product is
    slower: a fold took 24.8 ms, with a copy 11.3 ms.
    """
    if rows.weight.dtype == rows.hidden.dtype or rows.hidden.shape[0] < least:
        return rows
    # The copy does not exist yet. `rows.hidden` stands for it: its dtype, row length and alignment are the same.
    applies = fold_epilogue(rows._replace(weight=rows.hidden), options) is not None
    return rows.with_weight_in(rows.hidden.dtype) if applies else rows


def fold_epilogue(rows: Head, options: EngineOptions) -> ModuleType | None:
    """The module that folds in the product's epilogue. None if no module applies, or the call names a chunk."""
    return None if options.names_chunk else epilogue_for(rows.hidden, rows.weight, folds=True)


def fold_tiles(
    rows: Head, options: EngineOptions, *, saved_exp: SavedExp | None = None, seen: Sequence[Seen] = ()
) -> Fold:
    """The fold of gathered rows over all ranks, from tiles of logits in memory. Each tile is passed to `seen`."""
    hidden, weight, bias, targets = rows.hidden, rows.weight, rows.bias, rows.targets
    n, vocab = hidden.shape[0], weight.shape[0]
    kernels = for_device(hidden.device)
    # PyTorch's kernels make float32 copies of a tile. Triton's read the tile once.
    bytes_per_logit = 4 if runs_triton(hidden.device) else 12
    tiles = plan_tiles(n, vocab, hidden.shape[1], hidden.device, options, bytes_per_logit=bytes_per_logit)
    token_spans = [slice(start, stop) for start, stop in spans(n, tiles.tokens)] or [slice(0, 0)]
    folds: list[Fold | None] = [None] * len(token_spans)
    for first, last in spans(vocab, tiles.vocab):
        weight_tile = weight[first:last].to(options.compute_dtype)
        bias_tile = None if bias is None else bias[first:last]
        for index, token_rows in enumerate(token_spans):
            logits = gemm.matmul(hidden[token_rows], weight_tile.T)
            folds[index] = kernels.fold(
                logits, targets[token_rows], first, bias_tile, options.transform, folds[index],
                entropy=options.entropy, extras=options.extras,
            )  # fmt: skip
            if saved_exp is not None:
                kernels.save_exponentials(logits, first, bias_tile, options.transform, saved_exp.of_tokens(token_rows))
            for look in seen:
                look(logits, token_rows, first, bias_tile)
            del logits  # so that it is freed before the next tile is allocated
    state, shard = Fold.concatenate([fold for fold in folds if fold is not None]), rows.shard
    return state if shard is None else state.over_ranks(shard.maximum, shard.total)


# (tile of the weight (v, H), its first vocabulary entry, slice of the rows) -> dL/dx of a tile, in the compute dtype
TileGradient = Callable[[Tensor, int, slice], Tensor]


def gradients(
    rows: Head,
    options: EngineOptions,
    tokens: TokenGradients | None,  # None if `known` is given
    needs: Needs,
    *,
    known: TileGradient | None = None,  # gives dL/dx of each tile, which is then not recomputed
    tiles: Tiles | None = None,
    vocab: int | None = None,  # only the first `vocab` entries have a gradient; the rest get 0
) -> Gradients:
    """Gradients of gathered rows from recomputed tiles.

    The tiles take 2 n H V operations, and the gradients of hidden and of weight 2 n H V each. With K targets,
    `tokens.at_target` (n, K) is dL/dx at the targets, the same number at each repetition of an id.

    The gradient of hidden is float32. With a sharded vocabulary it is summed over the ranks while the last product for
    the weight runs.
    """
    hidden, weight, bias, targets = rows.hidden, rows.weight, rows.bias, rows.targets
    n, vocab = hidden.shape[0], weight.shape[0] if vocab is None else vocab
    several = None
    if targets.dim() == 2:
        assert tokens is not None
        several = targets if rows.shard is None else rows.shard.local(targets), tokens.at_target
        targets, tokens = targets.new_full((n,), NOWHERE), tokens._replace(at_target=tokens.grad_logps)
    kernels = for_device(hidden.device)
    epilogue = None if options.names_chunk else epilogue_for(hidden, weight)
    dtype = options.compute_dtype
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
        bias_tile, bias_total = None if bias is None else bias[first:last], None
        if grad_bias is not None:
            bias_total = torch.zeros(last - first, dtype=torch.float32, device=weight.device)
        for start, stop in token_spans:
            token_rows = slice(start, stop)
            if known is not None:
                tile = known(product.tile, first, token_rows)
            else:
                assert tokens is not None
                ids, tile_tokens = targets[token_rows], tokens.take(token_rows)
                if epilogue is not None:
                    tile = epilogue.gemm_grad(
                        hidden[token_rows], product.tile, bias_tile, ids, first, options.transform, tile_tokens
                    )
                else:
                    logits = gemm.matmul(hidden[token_rows], product.tile.T)
                    tile = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
                    kernels.grad(logits, ids, first, bias_tile, options.transform, tile_tokens, tile)
                    del logits
            if several is not None:
                kernels.write_at_ids(tile, several[0][token_rows], several[1][token_rows], first)
            product.add_to_rows(tile, token_rows)
            if pending is not None and (first, stop) == (vocab_spans[-1][0], n):
                pending.start()
            product.add_to_table(tile, token_rows)
            if bias_total is not None:
                bias_total += gemm.column_sums(tile)
            del tile
        product.store()
        if grad_bias is not None and bias_total is not None:
            grad_bias[first:last] = bias_total
    if pending is not None:
        pending.wait()
    return Gradients(product.grad_rows, grad_weight, grad_bias)


def unwritten(values: Tensor, vocab: int, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for a gradient shaped like `values`: the first `vocab` rows are uninitialized, the rest are 0."""
    out = torch.empty(values.shape, dtype=dtype or values.dtype, device=values.device)
    out[vocab:] = 0
    return out


class _Product:
    """The product rows @ table.T, and the gradients of its factors.

    The gradient of a tile of the table is summed in float32 and rounded to the table's dtype once.
    """

    def __init__(self, rows: Tensor, table: Tensor, grad_table: Tensor | None, needs_rows: bool):
        self.rows, self.table, self.grad_table = rows, table, grad_table
        self.grad_rows = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device) if needs_rows else None

    def start(self, first: int, last: int, *, parts: int) -> None:
        """Start the tile of the table's rows first to last, to whose gradient `parts` products are added."""
        self.tile = self.table[first:last].to(self.rows.dtype)
        self.out = None if self.grad_table is None else self.grad_table[first:last]
        self.total: Tensor | None = None
        if self.out is not None and self.out.dtype == torch.float32:
            self.total = self.out.zero_()
        elif self.out is not None and (parts != 1 or not self.out.is_cuda or self.out.dtype != self.rows.dtype):
            self.total = torch.zeros_like(self.out, dtype=torch.float32)

    def add_to_rows(self, grad: Tensor, tokens: slice) -> None:
        if self.grad_rows is not None:
            gemm.accumulate(self.grad_rows[tokens], grad, self.tile)

    def add_to_table(self, grad: Tensor, tokens: slice) -> None:
        if self.total is not None:
            gemm.accumulate(self.total, grad.T, self.rows[tokens])
        elif self.out is not None:
            # There is one part, so the product's float32 accumulators hold the whole sum, and `mm` rounds it once.
            torch.mm(grad.T, self.rows[tokens], out=self.out)

    def store(self) -> None:
        if self.out is not None and self.total is not None and self.total is not self.out:
            self.out.copy_(self.total)


def lacks(shape: HeadShape) -> str | None:
    """None: two passes take every call."""
    return None


def tiles_of(shape: HeadShape) -> tuple[Tiles, Tiles]:
    """The tiles of the forward, and the tiles of the backward."""
    logit, gradient, options = 12, 12, shape.options
    if runs_triton(shape.device):
        logit, gradient = 4, options.compute_dtype.itemsize + (0 if shape.two_pass_epilogue_lacks is None else 4)
    sizes = shape.tokens, shape.vocab, shape.hidden_size, shape.device, options
    return plan_tiles(*sizes, bytes_per_logit=logit), plan_tiles(*sizes, bytes_per_logit=gradient)
