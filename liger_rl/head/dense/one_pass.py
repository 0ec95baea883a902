"""Gradients computed in the forward: three products in place of four, if the caller knows dL/dlogp chunk by chunk.

A chunk of tokens keeps its exponentials over the whole vocabulary (`kernels.reference.SavedExp`). Once the chunk's
statistics are complete, the caller returns the gradients of its values. The gradients are computed at once: the
exponentials become dL/dlogits in their own memory. The backward multiplies the gradients by the factor from above.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.head.autograd import HeadGradients, HeadValues, token_inputs
from liger_rl.head.dense import two_pass
from liger_rl.head.dense.totals import Totals
from liger_rl.head.head_options import EngineOptions
from liger_rl.head.head_shape import NO_GRADIENT, HeadShape
from liger_rl.head.interface import Gradients, Head, Needs, has_gradient, picked_rows
from liger_rl.head.live_tokens import TokenSelection
from liger_rl.head.rules import lacks as rule_lacks
from liger_rl.head.tiles import free_tile_vocab, kind_of, spans
from liger_rl.kernels import epilogue_for, for_device, gemm
from liger_rl.kernels.devices import MIN_TOKENS, align_rows, runs_triton
from liger_rl.kernels.differentiable_once import differentiable_once
from liger_rl.kernels.reference import SavedExp, grad_at_targets
from liger_rl.kernels.statistics import BLOCK_VOCAB, TokenGradients

# Bytes of a chunk's exponentials and of the float32 gradient of its hidden states. On CUDA, with H = 4096 and
# V = 128256, that is room for 2075 tokens, whose products run at full speed.
CHUNK_BYTES = {"cuda": 544 << 20, "cpu": 64 << 20}
# Each chunk reads and writes a sum of the weight's size. With fewer tokens this traffic costs more than one pass saves.
MIN_CHUNK_TOKENS = {"cuda": 512, "cpu": 256}
CHUNK_TOKENS_ALIGNMENT = 128
# Up to so many chunks, the sum over chunks may be rounded to a 16-bit weight's dtype after each chunk. The relative
# error of the gradient is 2.4e-3 with one chunk, 2.6e-3 with two, 2.9e-3 with three. It is larger if the chunks'
# gradients partly cancel: 2.7e-3 to 3.4e-3 for the tokens of three models, and 2.1e-3 to 2.8e-3 with a float32 sum.
MAX_ROUNDINGS = 2

# (slice of m live tokens, their values (m,)) -> the gradients of the values (m,)
GradientsOf = Callable[[slice, HeadValues], HeadGradients]


@dataclass(frozen=True, kw_only=True)
class OnePassPlan:
    """The tokens of a chunk, and the dtype in which the weight's gradient is summed over chunks."""

    chunk_tokens: int
    sum_dtype: torch.dtype | None
    """float32, or the weight's dtype, in which the gradient is rounded after each chunk. None without a gradient."""


class OnePass(NamedTuple):
    """The results of `one_pass` for the n live tokens."""

    values: HeadValues  # (n,)
    gradients: Gradients  # of hidden, weight and bias


@torch.no_grad()
def one_pass(
    head: Head,
    options: EngineOptions,
    plan: OnePassPlan,
    chunks: Sequence[slice],  # consecutive slices of the live tokens
    gradients_of: GradientsOf,
    needs: Needs,  # of hidden, weight, bias
    *,
    select: bool,  # leave out rows without a gradient, which takes one host sync per chunk
) -> OnePass:
    """Statistics and gradients: 2 n H V operations for the logits, and 2 n' H V each for dH and dW.

    n' is the number of rows with a gradient if `select` is set, else n.
    """
    weight, device = head.weight, head.hidden.device
    values = HeadValues.unwritten(head.live.count, options, device)
    totals = Totals(head, plan.sum_dtype, needs)
    largest = max([chunk.stop - chunk.start for chunk in chunks], default=0)
    buffer = SavedExp.empty(largest, weight.shape[0], device, options.compute_dtype, BLOCK_VOCAB)
    with gemm.without_autocast(device):
        for chunk in chunks:
            index = chunk if head.live.index is None else head.live.index[chunk]
            hidden = align_rows(head.hidden[index].to(options.compute_dtype).contiguous())
            rows = head._replace(hidden=hidden, targets=head.targets[index], live=TokenSelection(hidden.shape[0]))
            saved_exp = buffer.of_tokens(slice(0, hidden.shape[0]))
            statistics, _ = two_pass.forward(rows, _fold_options(hidden, weight, options), saved_exp=saved_exp)
            chunk_values = HeadValues.of(statistics, options, head.vocab)
            for value, of_chunk in zip(values, chunk_values, strict=True):
                if value is not None and of_chunk is not None:
                    value[chunk] = of_chunk
            tokens = token_inputs(statistics, gradients_of(chunk, chunk_values), head.vocab)
            assert tokens.uniform is None or "mean_logits" in options.extras
            selected = picked_rows(has_gradient(tokens)) if select else None
            at_target = grad_at_targets(tokens, statistics, options.transform)
            tokens = tokens._replace(has_gradient=None).with_float32_lse()
            _add_chunk(totals, saved_exp, selected, index, rows, tokens, at_target, options)
    return OnePass(values, totals.finish())


def _fold_options(rows: Tensor, weight: Tensor, options: EngineOptions) -> EngineOptions:
    """The options that fold all tokens of a chunk at once: in a product's epilogue, or in tiles of the vocabulary."""
    if epilogue_for(rows, weight) is not None:
        return replace(options, chunk_tokens=None)
    return replace(options, chunk_tokens=rows.shape[0] or None, chunk_vocab=free_tile_vocab(weight.shape[0]))


def _add_chunk(
    totals: "Totals",
    saved_exp: SavedExp,
    selected: Tensor | None,  # (m',) rows of the chunk with a gradient; None: all
    index: Tensor | slice,  # places of the chunk's rows in all N tokens
    chunk: Head,  # m rows
    tokens: TokenGradients,  # (m,) each
    at_target: Tensor,  # (m,) from `grad_at_targets`
    options: EngineOptions,
) -> None:
    """Turn the chunk's exponentials into dL/dlogits, and add its gradients to `totals`."""
    rows, weight, targets = chunk.hidden, chunk.weight, chunk.targets
    if selected is not None:
        rows, targets, tokens, at_target = rows[selected], targets[selected], tokens.take(selected), at_target[selected]
        index = selected + index.start if isinstance(index, slice) else index[selected]
    if rows.shape[0] == 0:
        return
    vocab = weight.shape[0]
    # One tile of all V entries, if no step makes a temporary of the tile's width.
    one_tile = selected is None and runs_triton(rows.device) and weight.dtype == rows.dtype and gemm.ADDS_TO_FLOAT32
    width = vocab if one_tile else free_tile_vocab(vocab)

    def tile_of(first: int, last: int) -> Tensor:
        if selected is None:
            tile = saved_exp.values[:, first:last].view(options.compute_dtype)
        else:
            tile = torch.empty(rows.shape[0], last - first, dtype=options.compute_dtype, device=rows.device)
        for_device(rows.device).grad_from_saved(
            saved_exp, selected, first, targets, options.transform, tokens, at_target, tile
        )
        return tile

    totals.add(rows, index, spans(vocab, width), tile_of)


class WithGradients(torch.autograd.Function):
    """(value (), hidden, weight, bias) -> value. The gradients are already known, up to the factor from above.

    The second result is an empty tensor. Only `differentiable_once` uses it: it connects the gradients to it.
    """

    @staticmethod
    def forward(ctx, value, hidden, weight, bias, gradients):
        ctx.shape = hidden.shape
        # Gradients are no saved tensors: the backward scales them in place, which a saved-tensor hook would see.
        ctx.gradients = gradients[:3]
        anchor = value.new_empty(0)
        ctx.save_for_backward(anchor)
        return value.clone(), anchor

    @staticmethod
    @differentiable_once
    def backward(ctx, _saved, factor, _):
        factor, gradients = factor.float(), ctx.gradients
        # With retain_graph the backward may run again, so the gradients stay. Otherwise we give them away without a
        # reference: autograd's accumulation copies a gradient that anything else refers to.
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        if not keeps_graph:
            ctx.gradients = None

        def scaled(gradient: Tensor | None) -> Tensor | None:
            if gradient is None:
                return None
            # `gradient * factor` would round the factor to the gradient's dtype first.
            result = gradient.clone() if keeps_graph else gradient
            for_device(gradient.device).scale_(result, factor)
            return result

        hidden, weight, bias = map(scaled, gradients)
        return None, None if hidden is None else hidden.view(ctx.shape), weight, bias, None


class Room(NamedTuple):
    """The number of tokens that fit into a chunk of one pass."""

    tokens: int
    rounded: bool  # the weight's gradient is rounded after each chunk; a chunk gets the memory of its float32 sum
    cramped: bool  # not all tokens fit beside such a sum
    together: int  # tokens that must be in one chunk


def _room(shape: HeadShape) -> Room:
    options, tokens = shape.options, shape.tokens
    sums = 4 * shape.vocab * shape.hidden_size * (shape.needs[1] and shape.weight_dtype != torch.float32)
    together = min(shape.together, tokens)
    bytes_per_token = 4 * shape.hidden_size
    bytes_per_token += SavedExp.bytes_per_token(shape.vocab, options.compute_dtype, BLOCK_VOCAB)
    chunk_bytes = CHUNK_BYTES[kind_of(shape.device)]
    beside = options.chunk_tokens or max(1, chunk_bytes // bytes_per_token)
    instead = options.chunk_tokens or max(1, (chunk_bytes + sums) // bytes_per_token)
    # All chunks except the last may hold `together - 1` tokens less than they have room for.
    fullest = min(tokens, math.ceil((tokens + (MAX_ROUNDINGS - 1) * (together - 1)) / MAX_ROUNDINGS))
    rounded = sums > 0 and instead >= fullest
    return Room(instead if rounded else beside, rounded, sums > 0 and beside < tokens, together)


def lacks(shape: HeadShape) -> str | None:
    """The first thing that one pass needs to be possible, or to pay with passes="auto"; None if it takes the call."""
    if shape.passes == "two":
        return 'passes="auto" or "one"'
    lacking = shape.loss_lacks or _options_lack(shape)
    if lacking is not None:
        return lacking
    room = _room(shape)
    if room.tokens < room.together:
        need = f"room in one chunk for {room.together} tokens that the gradient of one of them depends on"
        return f"{need}; it holds {room.tokens}, unless chunk_tokens says more"
    if not shape.wants_gradient:
        return NO_GRADIENT
    if shape.passes == "one":
        return None
    if shape.options.names_chunk:
        return "no chunk to be named: that bounds a tile, and a chunk of one pass has the whole vocabulary"
    least_tokens = min(MIN_CHUNK_TOKENS[kind_of(shape.device)], shape.tokens)
    if room.tokens < least_tokens:
        return f"chunks of {least_tokens} tokens to pay, and has room for {room.tokens}"
    if room.cramped:
        return 'memory of the weight\'s size for the sum of its gradient, which passes="one" takes'
    return None


def _options_lack(shape: HeadShape) -> str | None:
    """The first need of one pass that an option or a dtype does not meet; None if all needs are met."""
    options, transform = shape.options, shape.options.transform
    lacking = rule_lacks(options, "in one pass", ignored="grad_tolerance" if shape.auto_tolerance else None)
    if lacking is not None:
        return lacking
    if transform.softcap is not None and transform.softcap < transform.temperature:
        return (
            f"a softcap of at least the temperature, {transform.temperature}, got {transform.softcap}: exponentials "
            "that are too much alike do not give back their logits"
        )
    if transform.softcap is not None and "mean_logits" in options.extras:
        return "no softcap beside mean_logits: an exponential that underflowed does not give back its logit's slope"
    made_dtypes = options.compute_dtype, *(shape.dtype,) * shape.needs[0], *(shape.weight_dtype,) * shape.needs[1]
    if torch.float16 in made_dtypes:
        return "bfloat16 or float32 products and gradients: what is made before the loss is scaled vanishes in float16"
    return None


def chunks_of(shape: HeadShape) -> OnePassPlan:
    """Near-equal chunks of the shape's N tokens, of a shape that `lacks` has no need of."""
    tokens, room = shape.tokens, _room(shape)
    chunks = math.ceil(tokens / room.tokens)
    even_tokens = math.ceil(tokens / max(chunks, 1) / CHUNK_TOKENS_ALIGNMENT) * CHUNK_TOKENS_ALIGNMENT
    summed = shape.weight_dtype if room.rounded else torch.float32
    return OnePassPlan(
        chunk_tokens=max(1, min(room.tokens, even_tokens + room.together - 1, tokens)),
        sum_dtype=summed if shape.needs[1] else None,
    )


def epilogue_lacks(shape: HeadShape) -> str | None:
    """The first thing that the epilogue lacks in one pass, which makes no copy of the weight; None if it applies."""
    if shape.epilogue_lacks is not None:
        return shape.epilogue_lacks
    if shape.casts_weight:
        return "a weight in the products' dtype in one pass"
    if chunks_of(shape).chunk_tokens < MIN_TOKENS:
        return f"chunks of {MIN_TOKENS} tokens or more"
    return None
