"""Gradients computed in the forward: three products in place of four, if the caller knows dL/dlogp chunk by chunk.

A chunk of tokens keeps its exponentials over the whole vocabulary (`kernels.reference.SavedExp`). Once the chunk's
statistics are complete, the caller returns the gradients of its values. The gradients are computed at once: the
exponentials become dL/dlogits in their own memory. The backward multiplies the gradients by the factor from above.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.head.autograd import Engine, has_gradient, index_of, token_gradients, token_values
from liger_rl.head.dense import two_pass
from liger_rl.head.dense.totals import Totals
from liger_rl.head.record import Gradients, Head, LogProbs, Needs
from liger_rl.head.tiles import Tiles, default_tile_vocab, kind_of, spans
from liger_rl.head.workload import NO_GRADIENT, Workload
from liger_rl.kernels import epilogue_for, for_device, gemm
from liger_rl.kernels.devices import runs_triton
from liger_rl.kernels.differentiable_once import differentiable_once
from liger_rl.kernels.limits import LIMITS
from liger_rl.kernels.reference import SavedExp, grad_at_targets
from liger_rl.kernels.statistics import BLOCK_VOCAB, TokenGradients

# Each chunk reads and writes a sum of the weight's size. With fewer tokens this traffic costs more than one pass saves.
MIN_CHUNK_TOKENS = {"cuda": 512, "cpu": 256}
CHUNK_TOKENS_ALIGNMENT = 128
# Up to so many chunks, the sum over chunks may be rounded to a 16-bit weight's dtype after each chunk. The relative
# error of the gradient is 2.4e-3 with one chunk, 2.6e-3 with two, 2.9e-3 with three. It is larger if the chunks'
# gradients partly cancel: 2.7e-3 to 3.4e-3 for the tokens of three models, and 2.1e-3 to 2.8e-3 with a float32 sum.
MAX_ROUNDINGS = 2

# (slice of m live tokens, their values (m,)) -> the gradients of the values (m,)
GradientsOf = Callable[[slice, LogProbs], LogProbs]


class Chunks(NamedTuple):
    """Near-equal chunks of the live tokens of one pass."""

    tokens: int  # of a chunk, at most
    # float32, or the weight's dtype, in which the gradient is rounded after each chunk. None without a gradient.
    sum_dtype: torch.dtype | None


@torch.no_grad()
def run_one_pass(
    head: Head,
    chunks: Sequence[slice],  # consecutive slices of the live tokens
    sum_dtype: torch.dtype | None,  # of `Chunks`
    gradients_of: GradientsOf,
    needs: Needs,
    *,
    select: bool,  # leave out rows without a gradient, which takes one host sync per chunk
) -> tuple[LogProbs, Gradients]:
    """The values (n,) of the live tokens, and the gradients of hidden, weight and bias.

    2 n H V operations for the logits, and 2 n' H V each for dH and dW. n' is the number of rows with a gradient if
    `select` is set, else n.
    """
    weight, device, vocab = head.weight, head.hidden.device, head.weight.shape[0]
    totals, chunk_values = Totals(head, sum_dtype, needs), list[LogProbs]()
    tile_width, buffer = min(default_tile_vocab(vocab), vocab), None
    # One tile of all V entries, if no step makes a temporary of the tile's width.
    one_tile = gemm.ADDS_TO_FLOAT32 and weight.dtype == head.dtype and runs_triton(device)
    with gemm.without_autocast(device):
        for chunk in chunks:
            index = chunk if head.live is None else head.live[chunk]
            rows = head.take(index)
            n, epilogue = rows.hidden.shape[0], epilogue_for(rows.hidden, weight)
            if buffer is None or n > buffer.values.shape[0]:
                buffer = None  # frees it before the larger one is allocated
                buffer = SavedExp.empty(n, vocab, device, head.dtype, BLOCK_VOCAB)
            saved_exp = buffer.of_tokens(slice(0, n))
            # All tokens of the chunk at once: in a product's epilogue, or in tiles of the vocabulary.
            tiles = None if epilogue is not None else Tiles(n, tile_width)
            statistics = two_pass.fold_rows(rows, epilogue, saved_exp=saved_exp, tiles=tiles)
            values = token_values(statistics, head)
            chunk_values.append(values)
            gradients = token_gradients(statistics, gradients_of(chunk, values), vocab)
            assert gradients.uniform is None or "mean_logits" in head.options.extras
            selected = index_of(has_gradient(gradients)) if select else None
            at_target = grad_at_targets(gradients, statistics, head.options.transform)
            gradients = gradients._replace(has_gradient=None).with_float32_lse()
            width = vocab if one_tile and selected is None else tile_width
            _add_chunk(totals, saved_exp, selected, index, rows, gradients, at_target, width)
    values = chunk_values[0] if len(chunk_values) == 1 else _join_values(chunk_values, head)
    return values, totals.finish()


def _join_values(chunks: Sequence[LogProbs], head: Head) -> LogProbs:
    if not chunks:  # no token counts
        rows = head._replace(hidden=head.hidden[:0], targets=head.targets[:0], live=None)
        return token_values(two_pass.fold_tiles(rows).finish(), head)
    return LogProbs._make([None if parts[0] is None else torch.cat(parts) for parts in zip(*chunks, strict=True)])


def _add_chunk(
    totals: Totals,
    saved_exp: SavedExp,
    selected: Tensor | None,  # (m',) rows of the chunk with a gradient; None: all
    index: Tensor | slice,  # places of the chunk's rows in all N tokens
    chunk: Head,  # m rows
    gradients: TokenGradients,  # (m,) each
    at_target: Tensor,  # (m,) from `grad_at_targets`
    width: int,  # of a tile
) -> None:
    """Turn the chunk's exponentials into dL/dlogits, and add its gradients to `totals`."""
    rows, targets, transform = chunk.hidden, chunk.targets, chunk.options.transform
    if selected is not None:
        rows, targets, at_target = rows[selected], targets[selected], at_target[selected]
        gradients = gradients.take(selected)
        index = selected + index.start if isinstance(index, slice) else index[selected]
    if rows.shape[0] == 0:
        return
    kernels = for_device(rows.device)

    def make_tile(first: int, last: int) -> Tensor:
        if selected is None:
            tile = saved_exp.columns(first, last)[0].view(chunk.dtype)
        else:
            tile = torch.empty(rows.shape[0], last - first, dtype=chunk.dtype, device=rows.device)
        kernels.grad_from_saved(saved_exp, selected, first, targets, transform, gradients, at_target, tile)
        return tile

    totals.add(rows, index, spans(chunk.weight.shape[0], width), make_tile)


class WithGradients(torch.autograd.Function):
    """(value (), hidden, weight, bias) -> value. The gradients are already known, up to the factor from above.

    The second result is an empty tensor. Only `differentiable_once` uses it: it connects the gradients to it.
    """

    @staticmethod
    def forward(ctx, value, hidden, weight, bias, gradients):
        ctx.set_materialize_grads(False)
        ctx.shape = hidden.shape
        # Gradients are no saved tensors: the backward scales them in place, which a saved-tensor hook would see.
        ctx.gradients = gradients
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


class ChunkRoom(NamedTuple):
    """The number of tokens that fit into a chunk of one pass."""

    tokens: int
    least_tokens: int  # with fewer, one pass does not pay
    rounded: bool  # the weight's gradient is rounded after each chunk; a chunk gets the memory of its float32 sum
    cramped: bool  # not all tokens fit beside such a sum
    tokens_per_gradient: int  # which must be in one chunk


def _measure_room(work: Workload) -> ChunkRoom:
    options, tokens, kind = work.options, work.tokens, kind_of(work.device)
    sums = 4 * work.vocab * work.hidden_size * (work.needs[1] and work.weight_dtype != torch.float32)
    per_gradient = min(work.tokens_per_gradient, tokens)
    bytes_per_token = 4 * work.hidden_size
    bytes_per_token += SavedExp.bytes_per_token(work.vocab, work.compute_dtype, BLOCK_VOCAB)
    chunk_bytes = LIMITS.chunk_bytes[kind]
    beside = options.chunk_tokens or max(1, chunk_bytes // bytes_per_token)
    instead = options.chunk_tokens or max(1, (chunk_bytes + sums) // bytes_per_token)
    # All chunks except the last may hold `per_gradient - 1` tokens less than they have room for.
    fullest = min(tokens, math.ceil((tokens + (MAX_ROUNDINGS - 1) * (per_gradient - 1)) / MAX_ROUNDINGS))
    rounded = sums > 0 and instead >= fullest
    return ChunkRoom(
        instead if rounded else beside, min(MIN_CHUNK_TOKENS[kind], tokens), rounded, sums > 0 and beside < tokens,
        per_gradient,
    )  # fmt: skip


class OnePass(Engine):
    """In a plan only: `run_one_pass` needs the loss, which hands it the chunks and its gradients."""

    name = "one pass"

    @staticmethod
    def reason_against(work: Workload) -> str | None:
        """The first need that a call does not meet for one pass to be possible, or with passes="auto" to pay."""
        if work.passes == "two":
            return 'passes="auto" or "one"'
        if work.reason_against_loss is not None:
            return work.reason_against_loss
        options, transform = work.options, work.options.transform
        conflict = options.conflict("in one pass")
        if conflict is not None:
            return "{} = {}, got {}: {}".format(*conflict)
        if transform.softcap is not None and transform.softcap < transform.temperature:
            return (
                f"a softcap of at least the temperature, {transform.temperature}, got {transform.softcap}: "
                "exponentials that are too much alike do not give back their logits"
            )
        if transform.softcap is not None and "mean_logits" in options.extras:
            return "no softcap beside mean_logits: an exponential that underflowed does not give back its logit's slope"
        made_dtypes = work.compute_dtype, *(work.dtype,) * work.needs[0], *(work.weight_dtype,) * work.needs[1]
        if torch.float16 in made_dtypes:
            return (
                "bfloat16 or float32 products and gradients: what is made before the loss is scaled vanishes in float16"
            )
        room = _measure_room(work)
        if room.tokens < room.tokens_per_gradient:
            need = (
                f"room in one chunk for {room.tokens_per_gradient} tokens that the gradient of one of them depends on"
            )
            return f"{need}; it holds {room.tokens}, unless chunk_tokens says more"
        if True not in work.needs:
            return NO_GRADIENT
        if work.passes == "one":
            return None
        if work.options.names_chunk:
            return "no chunk to be named: that bounds a tile, and a chunk of one pass has the whole vocabulary"
        if room.tokens < room.least_tokens:
            return f"chunks of {room.least_tokens} tokens to pay, and has room for {room.tokens}"
        if room.cramped:
            return 'memory of the weight\'s size for the sum of its gradient, which passes="one" takes'
        return None


def chunks_of(work: Workload) -> Chunks:
    """Near-equal chunks of N tokens, of a call that `OnePass` takes."""
    tokens, room = work.tokens, _measure_room(work)
    chunks = math.ceil(tokens / room.tokens)
    even_tokens = math.ceil(tokens / max(chunks, 1) / CHUNK_TOKENS_ALIGNMENT) * CHUNK_TOKENS_ALIGNMENT
    summed = work.weight_dtype if room.rounded else torch.float32
    return Chunks(
        tokens=max(1, min(room.tokens, even_tokens + room.tokens_per_gradient - 1, tokens)),
        sum_dtype=summed if work.needs[1] else None,
    )


def reason_against_epilogue(work: Workload) -> str | None:
    """The first need of the epilogue in one pass, which copies no weight, that a call does not meet."""
    reason = work.reason_against_product(work.tokens)
    if reason is not None:
        return reason
    if work.casts_weight:
        return "a weight in the products' dtype in one pass"
    if chunks_of(work).tokens < LIMITS.product_tokens:
        return f"chunks of {LIMITS.product_tokens} tokens or more"
    return None
