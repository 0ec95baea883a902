"""The tile loop: per-token softmax statistics of hidden @ weight.T, and its gradients, one tile of logits at a time.

The forward folds tiles into a few numbers per token. The backward drops the tokens without a gradient, recomputes
the tiles of the others and turns each into its two products at once. Vocabulary tiles are the outer loop of both,
so that a tile of the weight is read, and under autocast converted, once.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.distributed import VocabShard
from liger_rl.head.low_rank import LowRankRows
from liger_rl.head.tokens import TokenSelection
from liger_rl.kernels import epilogue_for, for_device, gemm
from liger_rl.kernels.devices import BLOCKS_BYTES, compiles, realigned
from liger_rl.kernels.saved_exponentials import Kept
from liger_rl.kernels.statistics import BLOCK_VOCAB, Fold, TileBounds, TokenGradients, TokenStatistics
from liger_rl.kernels.transform import LogitTransform

# Working memory of one pass where the caller names no chunk: large enough that the products run at full speed, small
# beside what a training step holds anyway. On one H200 (bf16, N = 8192, H = 4096, V = 128256, float32 tiles) this
# choice took 54.7 ms forward and backward, other tiles of 4096 x 8192 to 8192 x 16384 up to 57.9, 4096 x 4096 60.9.
WORKSPACE_BYTES = {"cuda": 320 << 20, "cpu": 24 << 20}
MAX_CHUNK_TOKENS = {"cuda": 8192, "cpu": 512}
CHUNK_ALIGNMENT = BLOCK_VOCAB

Gather = Callable[..., AbstractContextManager]


def whole_head(gather: Gather | None, weight: Tensor, bias: Tensor | None) -> AbstractContextManager:
    """The context in which weight and bias are whole, where they are sharded outside of it."""
    if gather is None:
        return nullcontext()
    return gather(weight) if bias is None else gather(weight, bias)


@dataclass(frozen=True, kw_only=True)
class ProjectionOptions:
    """How to compute, as opposed to what: everything the autograd Function takes that is not a tensor."""

    transform: LogitTransform
    entropy: bool
    compute_dtype: torch.dtype
    chunk_tokens: int | None
    chunk_vocab: int | None
    extras: frozenset[str] = frozenset()
    gather: Gather | None = None
    tolerance: float = 0.0  # of the backward, see `block_sparse`; 0 is exact
    weight_grad: Tensor | None = None  # (V, H) float32: where the weight's gradient is added, instead of returned
    batch_invariant: bool = False
    kernels_fit: bool = False  # the chunks come from a memory budget that kernels without them fit, too
    shard: VocabShard | None = None  # where the weight is a part of the vocabulary; targets are rows of it

    @property
    def chunks_are_free(self) -> bool:
        """No chunk is named, so kernels that make no tile of logits may be used."""
        return self.kernels_fit or (self.chunk_tokens is None and self.chunk_vocab is None)

    @property
    def blocks_bytes(self) -> int:
        """Of kept blocks of a gradient at a time: with chunks from a budget, no more than a tile of it takes."""
        if self.chunk_tokens is None or self.chunk_vocab is None:
            return BLOCKS_BYTES
        return min(BLOCKS_BYTES, self.chunk_tokens * self.chunk_vocab * self.compute_dtype.itemsize)


class Tiles(NamedTuple):
    """Upper bounds of a tile's sides."""

    tokens: int
    vocab: int


def plan_tiles(
    tokens: int, vocab: int, hidden_size: int, device: torch.device, options: ProjectionOptions, *, bytes_per_logit: int
) -> Tiles:
    """Tiles whose logits, gradients and per-tile float32 copies of a weight tile fit the workspace."""
    kind = kind_of(device)
    chunk_tokens = options.chunk_tokens or MAX_CHUNK_TOKENS[kind]
    chunk_tokens = max(1, min(chunk_tokens, tokens))
    if options.chunk_vocab is not None:
        return Tiles(chunk_tokens, min(options.chunk_vocab, vocab))
    bytes_per_column = chunk_tokens * bytes_per_logit + 4 * hidden_size
    columns = WORKSPACE_BYTES[kind] // bytes_per_column // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT
    return Tiles(chunk_tokens, min(max(columns, CHUNK_ALIGNMENT), vocab))


def fold_projection(
    hidden: Tensor,  # (n, H) in the compute dtype
    weight: Tensor,  # (V, H) any dtype
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (n,)
    options: ProjectionOptions,
    low_rank: LowRankRows | None = None,
    *,
    bounded: bool = False,
    kept: Kept | None = None,  # written; chunks that are named hold whole tiles of its words
) -> tuple[TokenStatistics, TileBounds | None]:
    """Statistics of every token, in a forward's one product (2 n (H + r) V), and bounds where they are asked for.

    They include the target's own logit where exponentials are kept, from which it cannot always be made again.
    Without bounds a backward is exact: they are made in the product's epilogue alone, where it applies, no chunk is
    named and no low-rank term joins the weight.
    """
    n, vocab = hidden.shape[0], weight.shape[0]
    # The fold in an epilogue reads the whole weight, which is joined with a low-rank term only tile by tile.
    free = options.chunks_are_free and low_rank is None
    epilogue = epilogue_for(hidden, weight) if free else None
    shard = options.shard
    over_ranks = None if shard is None else lambda fold: fold.over_ranks(shard.maximum, shard.total)
    if epilogue is not None:
        return epilogue.gemm_fold(
            hidden, weight, bias, targets, options.transform, entropy=options.entropy, extras=options.extras,
            bounded=bounded, kept=kept, over_parts=over_ranks,
        )  # fmt: skip
    kernels = for_device(hidden.device)
    if low_rank is not None:
        hidden = low_rank.beside_rows(hidden)
    # Eager kernels work on float32 copies of a tile; Triton's read it once.
    bytes_per_logit = 4 if compiles(hidden.device) else 12
    tiles = plan_tiles(n, vocab, hidden.shape[1], hidden.device, options, bytes_per_logit=bytes_per_logit)
    state = Fold.start(n, hidden.device, entropy=options.entropy, extras=options.extras)
    for first, last in spans(vocab, tiles.vocab):
        weight_tile = weight[first:last].to(options.compute_dtype)
        if low_rank is not None:
            weight_tile = low_rank.beside_tile(weight_tile, first)
        bias_tile = None if bias is None else bias[first:last]
        for start, stop in spans(n, tiles.tokens):
            rows = slice(start, stop)
            logits = gemm.matmul(hidden[rows], weight_tile.T)
            kernels.fold(logits, targets[rows], first, bias_tile, options.transform, state.take(rows))
            if kept is not None:
                kernels.keep(logits, first, bias_tile, options.transform, kept.rows(rows))
            del logits  # or it would stay alive while the next tile is allocated
    state = state if over_ranks is None else over_ranks(state)
    return state.finish(with_target=kept is not None), None


class Rows(NamedTuple):
    """The tokens of a backward, and what is asked of them."""

    live: TokenSelection
    hidden: Tensor  # (n, H) in the compute dtype
    targets: Tensor  # (n,)
    tokens: TokenGradients  # (n,) each


def gathered(values: Tensor, live: TokenSelection, dtype: torch.dtype) -> Tensor:
    """The rows that count in `dtype`, where the product of our own can read them."""
    return realigned(live.gather(values).to(dtype).contiguous())


def rows_with_gradient(
    hidden: Tensor,  # (N, H)
    targets: Tensor,  # (N,)
    live: TokenSelection,
    tokens: TokenGradients,  # of the live ones
    options: ProjectionOptions,
) -> Rows:
    """The live tokens whose gradient is not exactly zero."""
    if live.mask is not None:
        live = live.restricted(has_gradient(tokens))
        assert live.mask is not None
        tokens = tokens.silenced(live.mask)
    else:
        picked = select_rows(tokens)
        if picked is not None:
            tokens, live = tokens.take(picked), live.among(picked)
    return Rows(live, gathered(hidden, live, options.compute_dtype), live.gather(targets), tokens)


def has_gradient(tokens: TokenGradients) -> Tensor:
    """(n,) bool: the gradient is not exactly zero; true for NaN, which must reach the gradients and not be dropped."""
    wanted = tokens.grad_logps != 0
    return wanted if tokens.grad_entropy is None else wanted | (tokens.grad_entropy != 0)


def select_rows(tokens: TokenGradients) -> Tensor | None:
    """Index of the tokens whose gradient is not exactly zero, None for all of them. The backward's one host sync."""
    wanted = has_gradient(tokens)
    index = wanted.nonzero().squeeze(1)
    return None if index.numel() == wanted.numel() else index


class ProjectionGradients(NamedTuple):
    """None where not asked for."""

    hidden: Tensor | None  # (n, H) float32
    weight: Tensor | None  # (V, H) like the weight; also None where it went to `options.weight_grad`
    bias: Tensor | None  # (V,) like the bias
    low_rank_inputs: Tensor | None  # (n, r) float32
    low_rank_weight: Tensor | None  # (V, r) like the low-rank weight


def grad_projection(
    hidden: Tensor,  # (n, H) in the compute dtype: the tokens with a gradient
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (n,)
    tokens: TokenGradients,  # (n,) each
    options: ProjectionOptions,
    needs: tuple[bool, ...],  # for hidden, weight, bias and the low-rank term's inputs and weight
    low_rank: LowRankRows | None = None,
) -> ProjectionGradients:
    """Gradients from recomputed tiles: 2 n H V for the tiles; as much again for each of hidden and weight.

    Those of hidden and of the low-rank inputs are summed over the ranks of a sharded vocabulary, beneath the last
    product of the weight's.
    """
    n, vocab = hidden.shape[0], weight.shape[0]
    factor = hidden  # what a tile of logits is recomputed from
    if low_rank is not None:
        factor, low_inputs = low_rank.beside_rows(hidden), low_rank.inputs.to(options.compute_dtype)
        hidden = factor[:, : hidden.shape[1]]
    grad = for_device(hidden.device).grad
    epilogue = epilogue_for(factor, weight) if options.chunks_are_free else None
    bytes_per_gradient = options.compute_dtype.itemsize
    bytes_per_logit = bytes_per_gradient + (0 if epilogue is not None else 4) if compiles(hidden.device) else 12
    tiles = plan_tiles(n, vocab, hidden.shape[1], hidden.device, options, bytes_per_logit=bytes_per_logit)
    grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if needs[0] else None
    in_place = options.weight_grad is not None
    grad_weight = options.weight_grad if needs[1] else None
    if needs[1] and not in_place:
        grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    grad_bias = torch.empty_like(bias) if bias is not None and needs[2] else None
    grad_inputs = grad_low = None
    if low_rank is not None:
        grad_inputs = torch.zeros_like(low_rank.inputs, dtype=torch.float32) if needs[3] else None
        grad_low = torch.empty_like(low_rank.weight) if needs[4] else None

    def tile_gradient(weight_tile: Tensor, first: int, start: int, stop: int) -> Tensor:
        bias_tile = None if bias is None else bias[first : first + weight_tile.shape[0]]
        rows, row_targets, row_tokens = factor[start:stop], targets[start:stop], tokens.take(slice(start, stop))
        if epilogue is not None:
            return epilogue.gemm_grad(rows, weight_tile, bias_tile, row_targets, first, options.transform, row_tokens)
        logits = gemm.matmul(rows, weight_tile.T)
        out = logits if logits.dtype == options.compute_dtype else torch.empty_like(logits, dtype=options.compute_dtype)
        grad(logits, row_targets, first, bias_tile, options.transform, row_tokens, out)
        return out

    token_spans, vocab_spans = spans(n, tiles.tokens), spans(vocab, tiles.vocab)
    pending = None
    if options.shard is not None:
        pending = options.shard.pending_sum(grad_hidden, grad_inputs)
        vocab_spans.reverse()  # the last one must be a whole tile, whose product hides the sum
    for first, last in vocab_spans:
        weight_tile = factor_tile = weight[first:last].to(options.compute_dtype)
        parts = len(token_spans)
        weight_total = _WeightTotal(
            grad_weight, first, last, parts=parts, compute_dtype=options.compute_dtype, add=in_place
        )
        low_total = _WeightTotal(grad_low, first, last, parts=parts, compute_dtype=options.compute_dtype)
        if low_rank is not None:
            low_tile = low_rank.weight[first:last].to(options.compute_dtype)
            factor_tile = low_rank.beside_tile(weight_tile, first)
        bias_total = None
        if grad_bias is not None:
            bias_total = torch.zeros(last - first, dtype=torch.float32, device=weight.device)
        for start, stop in token_spans:
            tile = tile_gradient(factor_tile, first, start, stop)
            if grad_hidden is not None:
                gemm.accumulate(grad_hidden[start:stop], tile, weight_tile)
            if low_rank is not None and grad_inputs is not None:
                gemm.accumulate(grad_inputs[start:stop], tile, low_tile)
            if pending is not None and (first, stop) == (vocab_spans[-1][0], n):
                pending.start()
            weight_total.add(tile, hidden[start:stop])
            if low_rank is not None:
                low_total.add(tile, low_inputs[start:stop])
            if bias_total is not None:
                bias_total += gemm.column_sums(tile)
            del tile
        weight_total.store()
        low_total.store()
        if grad_bias is not None and bias_total is not None:
            grad_bias[first:last] = bias_total
    if pending is not None:
        pending.wait()
    return ProjectionGradients(grad_hidden, None if in_place else grad_weight, grad_bias, grad_inputs, grad_low)


class _WeightTotal:
    """The weight gradient of one vocabulary tile: summed in float32, rounded to the weight's dtype once.

    With `add`, the sum goes on from what a float32 `grad_weight` holds.
    """

    def __init__(
        self,
        grad_weight: Tensor | None,
        first: int,
        last: int,
        *,
        parts: int,
        compute_dtype: torch.dtype,
        add: bool = False,
    ) -> None:
        self.out = None if grad_weight is None else grad_weight[first:last]
        self.total: Tensor | None = None
        if self.out is not None and self.out.dtype == torch.float32:
            self.total = self.out if add else self.out.zero_()
        elif self.out is not None and (parts != 1 or not self.out.is_cuda or self.out.dtype != compute_dtype):
            self.total = torch.zeros_like(self.out, dtype=torch.float32)

    def add(self, tile: Tensor, hidden: Tensor) -> None:
        if self.out is None:
            return
        if self.total is not None:
            gemm.accumulate(self.total, tile.T, hidden)
        else:
            # One part: the product's own float32 accumulators are the sum, so it may round on its way out.
            torch.mm(tile.T, hidden, out=self.out)

    def store(self) -> None:
        if self.out is not None and self.total is not None and self.total is not self.out:
            self.out.copy_(self.total)


def kind_of(device: torch.device) -> str:
    """Key of the constants above."""
    return device.type if device.type in WORKSPACE_BYTES else "cpu"


def spans(total: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, total)) for start in range(0, total, max(step, 1))]
