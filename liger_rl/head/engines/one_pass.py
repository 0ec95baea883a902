"""Gradients made in the forward: three products in place of four, if the caller knows dL/dlogp chunk by chunk.

A chunk of tokens keeps its exponentials over the whole vocabulary (`kernels.saved_exponentials`). Once its statistics
are complete the caller says what dL/dlogp and dL/dentropy are. The gradients are made at once: the exponentials turn
into dL/dlogits in their own memory. A later factor on the loss multiplies these gradients in the backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.head.engines import two_pass
from liger_rl.head.engines.interface import Gradients, Head, Needs, has_gradient, picked_rows
from liger_rl.head.engines.tiles import free_tile_vocab, spans
from liger_rl.head.engines.totals import OnePassPlan, Totals
from liger_rl.head.options import EngineOptions
from liger_rl.head.tokens import TokenSelection
from liger_rl.kernels import epilogue_for, for_device, gemm
from liger_rl.kernels.devices import compiles, realigned
from liger_rl.kernels.saved_exponentials import Kept, grad_at_targets
from liger_rl.kernels.statistics import BLOCK_VOCAB, TokenGradients
from liger_rl.once import differentiable_once

# (places in the live tokens (m,), logps (m,), entropy (m,) or None) -> dL/dlogp (m,), dL/dentropy (m,) or None
GradientsOf = Callable[[slice, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


def tile_entries(options: EngineOptions) -> int:
    """Vocabulary entries that share a peak: those of the epilogue's tiles, fewer where a named chunk holds fewer."""
    if options.chunk_vocab is None:
        return BLOCK_VOCAB
    return min(BLOCK_VOCAB, 1 << (options.chunk_vocab.bit_length() - 1))


def tile_vocab(vocab: int, options: EngineOptions) -> int:
    """Columns of a tile of logits: whole tiles of `tile_entries`."""
    if options.chunk_vocab is None:
        return free_tile_vocab(vocab)
    entries = tile_entries(options)
    return options.chunk_vocab // entries * entries


class OnePass(NamedTuple):
    logps: Tensor  # (n,) of the live tokens
    entropy: Tensor | None  # (n,)
    gradients: Gradients  # for hidden, weight and bias
    # Of a weight whose gradient is added in place in the backward: dL/dlogits (n, V) and the hidden states (n, H).
    deferred: tuple[Tensor, Tensor] | None


@torch.no_grad()
def one_pass(
    head: Head,
    options: EngineOptions,
    plan: OnePassPlan,
    chunks: Sequence[slice],  # of the live tokens, one after the other
    gradients_of: GradientsOf,
    needs: Needs,  # for hidden, weight, bias
    *,
    select: bool,  # leave out rows without a gradient, at the price of one host sync a chunk
) -> OnePass:
    """Statistics and gradients: 2 n H V for the logits, as much for each gradient of the n' rows that have one."""
    weight, device = head.weight, head.hidden.device
    logps = torch.empty(head.live.count, dtype=torch.float32, device=device)
    entropy = torch.empty_like(logps) if options.entropy else None
    in_place = head.weight_grad is not None and needs[1]
    assert not in_place or len(chunks) <= 1
    totals = Totals(head, plan, needs, in_place=in_place)
    largest = max((chunk.stop - chunk.start for chunk in chunks), default=0)
    buffer = Kept.empty(largest, weight.shape[0], device, options.compute_dtype, tile_entries(options))
    with gemm.without_autocast(device):
        for chunk in chunks:
            index = chunk if head.live.index is None else head.live.index[chunk]
            hidden = realigned(head.hidden[index].to(options.compute_dtype).contiguous())
            rows = head._replace(hidden=hidden, targets=head.targets[index], live=TokenSelection(hidden.shape[0]))
            kept = buffer.rows(slice(0, hidden.shape[0]))
            statistics, _ = two_pass.forward(rows, _fold_options(hidden, weight, options), kept=kept)
            logps[chunk] = statistics.logps
            if entropy is not None:
                assert statistics.entropy is not None
                entropy[chunk] = statistics.entropy
            tokens = TokenGradients.of(statistics, *gradients_of(chunk, statistics.logps, statistics.entropy))
            wanted = picked_rows(has_gradient(tokens)) if select and not in_place else None
            at_target = grad_at_targets(tokens, statistics, options.transform)
            _add_chunk(totals, kept, wanted, index, rows, tokens, at_target, options)
    deferred = (buffer.values.view(options.compute_dtype), hidden) if in_place and chunks else None
    return OnePass(logps, entropy, totals.finish(), deferred)


def _fold_options(rows: Tensor, weight: Tensor, options: EngineOptions) -> EngineOptions:
    """A chunk is folded whole: in a product's epilogue where there is one, else tile by tile of the vocabulary."""
    if options.chunk_vocab is None and epilogue_for(rows, weight) is not None:
        return replace(options, chunk_tokens=None)
    return replace(options, chunk_tokens=rows.shape[0] or None, chunk_vocab=tile_vocab(weight.shape[0], options))


def _add_chunk(
    totals: "Totals",
    kept: Kept,
    wanted: Tensor | None,  # rows of the chunk that have a gradient, None for all
    index: Tensor | slice,  # of the chunk's rows in hidden
    chunk: Head,  # m rows
    tokens: TokenGradients,  # (m,) each
    at_target: Tensor,  # (m,) as `grad_at_targets` gives it
    options: EngineOptions,
) -> None:
    rows, weight, targets = chunk.hidden, chunk.weight, chunk.targets
    if wanted is not None:
        rows, targets, tokens, at_target = rows[wanted], targets[wanted], tokens.take(wanted), at_target[wanted]
        index = wanted + index.start if isinstance(index, slice) else index[wanted]
    if rows.shape[0] == 0:
        return
    vocab = weight.shape[0]
    # One tile where nothing of the vocabulary's width is made on the way.
    whole = wanted is None and compiles(rows.device) and weight.dtype == rows.dtype and gemm.ADDS_TO_FLOAT32
    width = vocab if whole else tile_vocab(vocab, options)
    grad_rows = torch.empty_like(rows, dtype=torch.float32) if totals.hidden is not None else None
    for first, last in spans(vocab, width):
        if wanted is None:
            tile = kept.values[:, first:last].view(options.compute_dtype)
        else:
            tile = torch.empty(rows.shape[0], last - first, dtype=options.compute_dtype, device=rows.device)
        for_device(rows.device).grad_kept(kept, wanted, first, targets, options.transform, tokens, at_target, tile)
        if grad_rows is not None:
            product = gemm.write if first == 0 else gemm.accumulate
            product(grad_rows, tile, weight[first:last].to(options.compute_dtype))
        totals.add_weight(first, last, tile, rows)
        totals.add_bias(first, last, tile)
    totals.empty = False
    if grad_rows is not None:
        assert totals.hidden is not None
        if isinstance(index, slice):
            totals.hidden[index] = grad_rows
        else:
            for_device(rows.device).scatter_rows(grad_rows, index, totals.hidden)


class WithGradients(torch.autograd.Function):
    """(value (), hidden, weight, bias) -> value, whose gradients are known already, up to the factor from above.

    The second result is there for `differentiable_once` alone, which connects gradients to it.
    """

    @staticmethod
    def forward(ctx, value, hidden, weight, bias, gradients, deferred, weight_grad):
        ctx.shape, ctx.weight_grad = hidden.shape, weight_grad
        # Not among the saved tensors: the backward scales them where they lie, which a saved-tensor hook would see.
        ctx.gradients = gradients[:3]
        anchor = value.new_empty(0)
        ctx.save_for_backward(*(deferred or (None, None)), anchor)
        return value.clone(), anchor

    @staticmethod
    @differentiable_once
    def backward(ctx, saved, factor, _):
        logits, rows, _anchor = saved
        factor = factor.float()
        if logits is not None and rows is not None:
            rows = (rows * factor).contiguous()
            vocab = logits.shape[1]
            for first, last in spans(vocab, free_tile_vocab(vocab)):
                gemm.accumulate(ctx.weight_grad[first:last], logits[:, first:last].T, rows)
        gradients = ctx.gradients
        # A graph that is kept may be walked again. One that is not gives its tensors away, and accumulation copies a
        # gradient that anything else refers to.
        again = torch._C._autograd._get_current_graph_task_keep_graph()
        if not again:
            ctx.gradients = None

        def scaled(gradient: Tensor | None) -> Tensor | None:
            if gradient is None:
                return None
            if again:
                return gradient * factor
            for_device(gradient.device).scale_(gradient, factor)
            return gradient

        hidden, weight, bias = map(scaled, gradients)
        return None, None if hidden is None else hidden.view(ctx.shape), weight, bias, None, None, None
