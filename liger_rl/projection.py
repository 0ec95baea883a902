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
from torch.autograd.function import once_differentiable

from liger_rl.block_sparse import Tolerance, grad_blocks, plan_blocks
from liger_rl.kernels import bounds, eager, for_device, gemm, gemm_fold_for, gemm_grad_for
from liger_rl.kernels.statistics import (
    BLOCK_VOCAB,
    Fold,
    TileBounds,
    TileStatistics,
    TokenGradients,
    TokenStatistics,
)
from liger_rl.kernels.transform import LogitTransform

# Working memory of one pass where the caller names no chunk: large enough that the products run at full speed, small
# beside what a training step holds anyway. On one H200 (bf16, N = 8192, H = 4096, V = 128256, float32 tiles) this
# choice took 54.7 ms forward and backward, other tiles of 4096 x 8192 to 8192 x 16384 up to 57.9, 4096 x 4096 60.9.
WORKSPACE_BYTES = {"cuda": 320 << 20, "cpu": 24 << 20}
MAX_CHUNK_TOKENS = {"cuda": 8192, "cpu": 512}
CHUNK_ALIGNMENT = BLOCK_VOCAB
JOINED_COLUMNS = 8  # rows of two 16-bit factors side by side start at multiples of the 16 bytes that TMA asks for
# From this share of kept blocks on, the dense products are faster than those of the blocks.
DENSE_SHARE = {"cuda": 0.6, "cpu": 0.9}

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
    tolerance: Tolerance | None = None

    @property
    def chunks_are_free(self) -> bool:
        """No chunk is named, so kernels that make no tile of logits may be used."""
        return self.chunk_tokens is None and self.chunk_vocab is None


class Tiles(NamedTuple):
    """Upper bounds of a tile's sides."""

    tokens: int
    vocab: int


def plan_tiles(
    tokens: int, vocab: int, hidden_size: int, device: torch.device, options: ProjectionOptions, *, bytes_per_logit: int
) -> Tiles:
    """Tiles whose logits, gradients and per-tile float32 copies of a weight tile fit the workspace."""
    kind = _kind(device)
    chunk_tokens = options.chunk_tokens or MAX_CHUNK_TOKENS[kind]
    chunk_tokens = max(1, min(chunk_tokens, tokens))
    if options.chunk_vocab is not None:
        return Tiles(chunk_tokens, min(options.chunk_vocab, vocab))
    bytes_per_column = chunk_tokens * bytes_per_logit + 4 * hidden_size
    columns = WORKSPACE_BYTES[kind] // bytes_per_column // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT
    return Tiles(chunk_tokens, min(max(columns, CHUNK_ALIGNMENT), vocab))


class LowRankRows(NamedTuple):
    """A low-rank term of the logits, inputs @ weight.T, that is computed in one product with hidden @ weight.T.

    Both stand side by side: [hidden | inputs] @ [weight | low-rank weight].T. A factor wider than the compute dtype
    becomes two, its rounded part and the rest, at the price of a few more columns: the term is as exact as the head's.
    """

    inputs: Tensor  # (n, r) any float dtype
    weight: Tensor  # (V, r) any float dtype

    def beside_rows(self, hidden: Tensor) -> Tensor:
        """(n, H) in the compute dtype -> (n, H + ...)"""
        rounded, rest = _split(self.inputs, hidden.dtype)
        again = [] if _fits(self.weight, hidden.dtype) else [rounded]
        return _joined(hidden, rounded, *rest, *again)

    def beside_tile(self, weight_tile: Tensor, first: int) -> Tensor:
        """(v, H) in the compute dtype, the weight from row `first` on -> (v, H + ...)"""
        rounded, rest = _split(self.weight[first : first + weight_tile.shape[0]], weight_tile.dtype)
        again = [] if _fits(self.inputs, weight_tile.dtype) else [rounded]
        return _joined(weight_tile, rounded, *again, *rest)


def _fits(values: Tensor, dtype: torch.dtype) -> bool:
    return torch.promote_types(values.dtype, dtype) == dtype


def _split(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """-> values rounded to `dtype`, and what that leaves of those that do not fit."""
    rounded = values.to(dtype)
    return rounded, [] if _fits(values, dtype) else [(values - rounded).to(dtype)]


def _joined(*parts: Tensor) -> Tensor:
    """Side by side, with zeros up to a width that TMA can address."""
    width = sum(part.shape[1] for part in parts)
    return torch.cat([*parts, parts[0].new_zeros(parts[0].shape[0], -width % JOINED_COLUMNS)], dim=1)


def fold_projection(
    hidden: Tensor,  # (n, H) in the compute dtype
    weight: Tensor,  # (V, H) any dtype
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (n,)
    options: ProjectionOptions,
    low_rank: LowRankRows | None = None,
    *,
    bounded: bool = False,
) -> tuple[TokenStatistics, TileBounds | None]:
    """Statistics of every token, in a forward's one product (2 n (H + r) V), and bounds where they are asked for.

    Without bounds a backward is exact: they are made in the product's epilogue, and on CPU, where no chunk is named
    and no low-rank term joins the weight.
    """
    n, vocab = hidden.shape[0], weight.shape[0]
    # The fold in an epilogue reads the whole weight, which is joined with a low-rank term only tile by tile.
    free = options.chunks_are_free and low_rank is None
    whole_fold = gemm_fold_for(hidden, weight) if free else None
    known = None
    if bounded and free and (whole_fold is not None or not hidden.is_cuda):
        known = TileBounds.empty(n, vocab, hidden.device, entropy=options.entropy)
    if whole_fold is not None:
        wanted = {"entropy": options.entropy, "extras": options.extras, "bounds": known}
        return whole_fold(hidden, weight, bias, targets, options.transform, **wanted).finish(), known
    fold = for_device(hidden.device).fold
    if low_rank is not None:
        hidden = low_rank.beside_rows(hidden)
    # Eager kernels work on float32 copies of a tile; Triton's read it once.
    bytes_per_logit = 4 if hidden.is_cuda else 12
    tiles = plan_tiles(n, vocab, hidden.shape[1], hidden.device, options, bytes_per_logit=bytes_per_logit)
    state = Fold.start(n, hidden.device, entropy=options.entropy, extras=options.extras)
    by_tile = None if known is None else TileStatistics.empty(n, vocab, hidden.device)
    for first, last in _spans(vocab, tiles.vocab):
        weight_tile = weight[first:last].to(options.compute_dtype)
        if low_rank is not None:
            weight_tile = low_rank.beside_tile(weight_tile, first)
        bias_tile = None if bias is None else bias[first:last]
        for start, stop in _spans(n, tiles.tokens):
            rows = slice(start, stop)
            logits = gemm.matmul(hidden[rows], weight_tile.T)
            fold(logits, targets[rows], first, bias_tile, options.transform, state.take(rows))
            if by_tile is not None:
                eager.tile_statistics(logits, bias_tile, options.transform, by_tile.part(first, last, rows))
            del logits  # or it would stay alive while the next tile is allocated
    statistics = state.finish()
    if known is not None and by_tile is not None:
        bounds.tile_bounds(by_tile, statistics, targets, options.transform, known)
    return statistics, known


class ProjectionGradients(NamedTuple):
    """None where not asked for."""

    hidden: Tensor | None  # (n, H) float32
    weight: Tensor | None  # (V, H) like the weight
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
    """Gradients from recomputed tiles: 2 n H V for the tiles; as much again for each of hidden and weight."""
    n, vocab = hidden.shape[0], weight.shape[0]
    factor = hidden  # what a tile of logits is recomputed from
    if low_rank is not None:
        factor, low_inputs = low_rank.beside_rows(hidden), low_rank.inputs.to(options.compute_dtype)
        hidden = factor[:, : hidden.shape[1]]
    grad = for_device(hidden.device).grad
    gemm_grad = gemm_grad_for(factor, weight, options.transform, tokens) if options.chunks_are_free else None
    bytes_per_gradient = options.compute_dtype.itemsize
    bytes_per_logit = bytes_per_gradient + (0 if gemm_grad is not None else 4) if hidden.is_cuda else 12
    tiles = plan_tiles(n, vocab, hidden.shape[1], hidden.device, options, bytes_per_logit=bytes_per_logit)
    grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if needs[0] else None
    grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if needs[1] else None
    grad_bias = torch.empty_like(bias) if bias is not None and needs[2] else None
    grad_inputs = grad_low = None
    if low_rank is not None:
        grad_inputs = torch.zeros_like(low_rank.inputs, dtype=torch.float32) if needs[3] else None
        grad_low = torch.empty_like(low_rank.weight) if needs[4] else None

    def tile_gradient(weight_tile: Tensor, first: int, start: int, stop: int) -> Tensor:
        bias_tile = None if bias is None else bias[first : first + weight_tile.shape[0]]
        rows, row_targets, row_tokens = factor[start:stop], targets[start:stop], tokens.take(slice(start, stop))
        if gemm_grad is not None:
            return gemm_grad(rows, weight_tile, bias_tile, row_targets, first, options.transform, row_tokens)
        logits = gemm.matmul(rows, weight_tile.T)
        in_place = logits.dtype == options.compute_dtype
        out = logits if in_place else torch.empty_like(logits, dtype=options.compute_dtype)
        grad(logits, row_targets, first, bias_tile, options.transform, row_tokens, out)
        return out

    token_spans = _spans(n, tiles.tokens)
    for first, last in _spans(vocab, tiles.vocab):
        weight_tile = factor_tile = weight[first:last].to(options.compute_dtype)
        parts = len(token_spans)
        weight_total = _WeightTotal(grad_weight, first, last, parts=parts, compute_dtype=options.compute_dtype)
        low_total = _WeightTotal(grad_low, first, last, parts=parts, compute_dtype=options.compute_dtype)
        if low_rank is not None:
            low_tile = low_rank.weight[first:last].to(options.compute_dtype)
            factor_tile = low_rank.beside_tile(weight_tile, first)
        bias_parts = []
        for start, stop in token_spans:
            tile = tile_gradient(factor_tile, first, start, stop)
            if grad_hidden is not None:
                gemm.accumulate(grad_hidden[start:stop], tile, weight_tile)
            weight_total.add(tile, hidden[start:stop])
            if low_rank is not None:
                if grad_inputs is not None:
                    gemm.accumulate(grad_inputs[start:stop], tile, low_tile)
                low_total.add(tile, low_inputs[start:stop])
            if grad_bias is not None:
                bias_parts.append(tile.sum(0, dtype=torch.float32))
            del tile
        weight_total.store()
        low_total.store()
        if grad_bias is not None:
            grad_bias[first:last] = torch.stack(bias_parts).sum(0) if bias_parts else 0.0
    return ProjectionGradients(grad_hidden, grad_weight, grad_bias, grad_inputs, grad_low)


class _WeightTotal:
    """The weight gradient of one vocabulary tile: summed in float32, rounded to the weight's dtype once."""

    def __init__(
        self, grad_weight: Tensor | None, first: int, last: int, *, parts: int, compute_dtype: torch.dtype
    ) -> None:
        self.out = None if grad_weight is None else grad_weight[first:last]
        self.total: Tensor | None = None
        if self.out is not None and self.out.dtype == torch.float32:
            self.total = self.out.zero_()
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


class LinearLogProbs(torch.autograd.Function):
    """(hidden, weight, bias, targets, live) -> (logps, entropy, *EXTRAS) of the live tokens, None where not asked for.

    Gradients of logps and entropy, for hidden, weight and bias, and for the two factors of a low-rank term where there
    is one: the logits are hidden @ weight.T + low_inputs @ low_weight.T + bias. A sharded head must be whole around the
    forward, whose caller has read its shape before; the backward enters `options.gather` by itself, once, whatever its
    rows are.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, live, options, low_inputs, low_weight):
        # hidden (N, H), targets (N,), live (n,) flat index of the tokens that count, or None for all of them,
        # low_inputs (N, r), low_weight (V, r), or None for both
        ctx.set_materialize_grads(False)
        with torch.autocast(hidden.device.type, enabled=False):
            rows = _gather(hidden, live, options.compute_dtype)
            live_targets = targets if live is None else targets[live]
            low_rank = _low_rank_rows(low_inputs, low_weight, live)
            bounded = options.tolerance is not None and any(ctx.needs_input_grad)
            statistics, known = fold_projection(rows, weight, bias, live_targets, options, low_rank, bounded=bounded)
        ctx.options = options
        # The extras have no gradient, and a gradient does not need them.
        kept = (*statistics[:3], *(known or ()))
        ctx.save_for_backward(hidden, weight, bias, targets, live, low_inputs, low_weight, *kept)
        mean_logits = None if statistics.sum_logits is None else statistics.sum_logits / weight.shape[0]
        extras = (statistics.log_sum_sq_probs, mean_logits, statistics.is_top1)
        ctx.mark_non_differentiable(*(values for values in extras if values is not None))
        entropy = None if statistics.entropy is None else statistics.entropy.clone()
        return statistics.logps.clone(), entropy, *extras

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logps, grad_entropy, *_):
        hidden, weight, bias, targets, live, low_inputs, low_weight, *kept = ctx.saved_tensors
        statistics, known = TokenStatistics(*kept[:3]), TileBounds(*kept[3:]) if kept[3:] else None
        needs = ctx.needs_input_grad[:3] + ctx.needs_input_grad[6:]
        if grad_logps is None and grad_entropy is None:
            return None, None, None, None, None, None, None, None
        with torch.autocast(hidden.device.type, enabled=False), whole_head(ctx.options.gather, weight, bias):
            if grad_logps is None:
                grad_logps = torch.zeros_like(grad_entropy)
            tokens = TokenGradients.of(statistics, grad_logps.float(), grad_entropy)
            plan = None
            if known is None:
                wanted = select_rows(tokens)
            else:
                live_targets = targets if live is None else targets[live]
                plan = plan_blocks(
                    known, statistics, tokens, live_targets, ctx.options.transform, ctx.options.tolerance
                )
                wanted = plan.rows
            if wanted is not None:
                tokens = tokens.take(wanted)
                live = wanted if live is None else live[wanted]
            rows = _gather(hidden, live, ctx.options.compute_dtype)
            row_targets = targets if live is None else targets[live]
            if plan is None or not plan.rows.numel() or plan.share > DENSE_SHARE[_kind(hidden.device)]:
                low_rank = _low_rank_rows(low_inputs, low_weight, live)
                gradients = grad_projection(rows, weight, bias, row_targets, tokens, ctx.options, needs, low_rank)
                del low_rank
            else:
                parts = grad_blocks(rows, weight, bias, row_targets, tokens, plan, ctx.options.transform, needs[:3])
                gradients = ProjectionGradients(*parts, None, None)
            del rows
            grad_hidden = grad_inputs = None
            if gradients.hidden is not None:
                grad_hidden = _scatter(gradients.hidden, live, hidden)
            if gradients.low_rank_inputs is not None:
                grad_inputs = _scatter(gradients.low_rank_inputs, live, low_inputs)
        grads = (grad_hidden, gradients.weight, gradients.bias, None, None, None)
        return *grads, grad_inputs, gradients.low_rank_weight


def _low_rank_rows(inputs: Tensor | None, weight: Tensor | None, live: Tensor | None) -> LowRankRows | None:
    if inputs is None or weight is None:
        return None
    return LowRankRows(_gather(inputs, live, inputs.dtype), weight)


def select_rows(tokens: TokenGradients) -> Tensor | None:
    """Index of the tokens whose gradient is not exactly zero, None for all of them. The backward's one host sync."""
    wanted = tokens.grad_logps != 0  # true for NaN, which must reach the gradients and not be dropped
    if tokens.grad_entropy is not None:
        wanted = wanted | (tokens.grad_entropy != 0)
    index = wanted.nonzero().squeeze(1)
    return None if index.numel() == wanted.numel() else index


def _kind(device: torch.device) -> str:
    """Key of the constants above."""
    return device.type if device.type in WORKSPACE_BYTES else "cpu"


def _spans(total: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, total)) for start in range(0, total, max(step, 1))]


def _gather(hidden: Tensor, live: Tensor | None, dtype: torch.dtype) -> Tensor:
    rows = hidden if live is None else hidden[live]
    return rows.to(dtype).contiguous()


def _scatter(grad_rows: Tensor, live: Tensor | None, hidden: Tensor) -> Tensor:
    """(n, H) float32 -> (N, H) like `hidden`, zero where no row is live."""
    if live is None:
        return grad_rows.to(hidden.dtype)
    out = torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    # In pieces, so that the converted copy stays small beside the float32 rows.
    for start, stop in _spans(grad_rows.shape[0], MAX_CHUNK_TOKENS["cuda"]):
        out.index_copy_(0, live[start:stop], grad_rows[start:stop].to(hidden.dtype))
    return out
