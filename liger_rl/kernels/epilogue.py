"""Fold and gradient in the epilogue of a persistent Triton product, so that no logit reaches memory.

Each program takes (token, vocabulary) tiles in turn and multiplies them in the steps of its GPU's `Family`. An epilogue
is a function of one tile of logits. `tile_epilogues` has the epilogues.
"""

from collections.abc import Callable, Collection
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from liger_rl.kernels.devices import WARPS, empty_rows, family_of, launch_context
from liger_rl.kernels.limits import LIMITS
from liger_rl.kernels.matrix_triton import matrix, product
from liger_rl.kernels.merge_folds_triton import merge
from liger_rl.kernels.statistics import BLOCK_TOKENS, BLOCK_VOCAB, Fold, TokenGradients, TokenStatistics
from liger_rl.kernels.tile_epilogues import (
    CAP_BIT,
    REGISTERS_BIT,
    fold_tile,
    grad_tile,
    target_column,
    tile_coordinates,
    token_group_size,
)
from liger_rl.kernels.transform import HeadFactors, LogitSteps, LogitTransform

# docs/notes/kernels.md has the times. Flattening the loops is what pays: the next tile's loads run under this tile's
# epilogue.
TILE_TOKENS, TILE_VOCAB = BLOCK_TOKENS, BLOCK_VOCAB
# Where softcap / temperature is at most so many nats, the fold works with cap - z, which is good to 2.4e-7 of the cap.
# Under a higher cap its digits would differ from those of the gradient's tiles, which have a tanh; 2^29 nats would
# overflow.
MAX_EPILOGUE_CAP = 1024.0


@triton.jit
def _with_bias(logits, bias, start, vocab):
    if bias is not None:
        column = start + tl.arange(0, logits.shape[1])
        logits += tl.load(bias + column, mask=column < vocab, other=0.0).to(tl.float32)[None, :]
    return logits


@triton.jit(do_not_specialize=["first"])
def _product_kernel(
    hidden,  # a `matrix` (tokens, H)
    weight,  # a `matrix` (vocab, H)
    out,  # a `matrix` (tokens, vocab) that the epilogue writes, or None
    bias,
    targets,
    arguments,  # of the epilogue
    tokens,
    vocab,
    first,  # id of the weight's first row
    hidden_size,
    steps,
    EPILOGUE: tl.constexpr,  # a function of one tile of logits
    VARIANT: tl.constexpr,  # of the epilogue
    WHOLE: tl.constexpr,  # the last vocabulary tile is a whole one; False if the epilogue does not ask
    SLICES: tl.constexpr,  # of a tile's columns, one after the other in registers
    TILE_TOKENS: tl.constexpr,
    TILE_VOCAB: tl.constexpr,
    TILE_HIDDEN: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    token_tiles, vocab_tiles = tl.cdiv(tokens, TILE_TOKENS), tl.cdiv(vocab, TILE_VOCAB)
    group_size = token_group_size(token_tiles, TILE_TOKENS * hidden_size)
    for tile in tl.range(tl.program_id(0), token_tiles * vocab_tiles, PROGRAMS, flatten=True):
        token_tile, vocab_tile = tile_coordinates(tile, token_tiles, vocab_tiles, group_size)
        first_token, start = token_tile * TILE_TOKENS, vocab_tile * TILE_VOCAB
        token = first_token + tl.arange(0, TILE_TOKENS)
        logits = product(hidden, weight, first_token, start, hidden_size, TILE_TOKENS, TILE_VOCAB, TILE_HIDDEN)
        logits = _with_bias(logits, bias, start, vocab)
        target = target_column(targets, token, token < tokens, first + start)
        EPILOGUE(
            logits, token, target, first_token, vocab_tile, tokens, vocab, arguments, out, steps, VARIANT, WHOLE, SLICES
        )


def run_product(
    epilogue: JITFunction,  # called as `tile_epilogues.fold_tile`
    head: HeadFactors,
    targets: Tensor,  # (n,) ids of the whole vocabulary
    arguments: tuple,  # of the epilogue, for its kernel
    *,
    out: Tensor | None = None,  # (n, v), whose tiles the epilogue stores
    first: int = 0,  # id of the weight's first row
    variant: int = 0,
    whole: bool = False,
    slices: int,
    warps: int = WARPS,
) -> None:
    """Call `epilogue` for every tile of the head's hidden @ weight.T + bias.

    The product applies where `devices.reason_against_product` is None.
    """
    device = head.hidden.device
    family, programs = family_of(device), device_programs(device)
    with launch_context(device):
        _product_kernel[(programs,)](
            matrix(head.hidden, TILE_TOKENS, family.step, tma=family.tma),
            matrix(head.weight, TILE_VOCAB, family.step, tma=family.tma),
            None if out is None else matrix(out, TILE_TOKENS, TILE_VOCAB, tma=family.tma, slices=slices),
            None if head.bias is None else head.bias.contiguous(),
            targets.contiguous(),
            arguments,
            head.hidden.shape[0],
            head.weight.shape[0],
            first,
            head.hidden.shape[1],
            LogitSteps.of(head.transform),
            EPILOGUE=epilogue,
            VARIANT=variant,
            WHOLE=whole,
            SLICES=slices,
            TILE_TOKENS=TILE_TOKENS,
            TILE_VOCAB=TILE_VOCAB,
            TILE_HIDDEN=family.step,
            PROGRAMS=programs,
            num_stages=family.stages if out is None else family.storing_stages,
            num_warps=warps,
        )


def gemm_fold(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (N,) in [0, V), unless the vocabulary goes on elsewhere
    transform: LogitTransform,
    *,
    entropy: bool,
    extras: Collection[str] = (),
    over_shards: Callable[[Fold], Fold] | None = None,  # to the fold of a vocabulary of which the weight is a part
) -> TokenStatistics:
    """The statistics of hidden @ weight.T, where `devices.reason_against_product(..., folds=True)` is None."""
    n, vocab, family = hidden.shape[0], weight.shape[0], family_of(hidden.device)
    vocab_tiles = triton.cdiv(vocab, TILE_VOCAB)
    tokens_at_once = LIMITS.statistics_bytes // (4 * (2 + entropy + len(extras)) * vocab_tiles)
    step = max(tokens_at_once // TILE_TOKENS, 1) * TILE_TOKENS
    capped = transform.softcap is not None and transform.softcap / transform.temperature <= MAX_EPILOGUE_CAP
    # The tile that holds the target writes its logit. A shard of the vocabulary may hold no such tile.
    target = (torch.empty if over_shards is None else torch.zeros)(n, dtype=torch.float32, device=hidden.device)
    variant = CAP_BIT.value * capped + REGISTERS_BIT.value * (family.slices > 1)
    state, tiles = Fold.unwritten((n,), target, entropy=entropy, extras=extras), None
    for start in range(0, n, step):
        rows = slice(start, start + step)
        part, tiles = state.take(rows), None  # so that the last rows' tiles are freed before the next are allocated
        shape = vocab_tiles, part.peak.shape[0]
        tiles = Fold.unwritten(shape, part.target, entropy=entropy, extras=extras)
        run_product(
            fold_tile, HeadFactors(hidden[rows], weight, bias, transform), targets[rows], tiles,
            variant=variant, whole=vocab % TILE_VOCAB == 0, slices=2 if family.halves else 1, warps=family.fold_warps,
        )  # fmt: skip
        merge(tiles, part)
    state = state if over_shards is None else over_shards(state)
    return state.finish()


def gemm_grad(
    hidden: Tensor,  # (n, H)
    weight: Tensor,  # (v, H), a vocabulary tile's rows
    bias: Tensor | None,  # (v,)
    targets: Tensor,  # (n,) ids of the whole vocabulary
    first: int,  # id of the tile's first row
    transform: LogitTransform,
    tokens: TokenGradients,  # (n,) each
) -> Tensor:
    """-> (n, v) dL/d(hidden @ weight.T) in the dtype of `hidden`, where `devices.reason_against_product` is None."""
    out = empty_rows(hidden.shape[0], weight.shape[0], hidden.dtype, hidden.device)
    # A softcap or an entropy makes a whole tile spill registers. Without either, halves are no faster.
    halved = transform.softcap is not None or tokens.grad_entropy is not None
    run_product(
        grad_tile, HeadFactors(hidden, weight, bias, transform), targets, tokens.contiguous(),
        out=out, first=first, slices=max(family_of(hidden.device).slices, 2 if halved else 1),
    )  # fmt: skip
    return out


@cache
def device_programs(device: torch.device) -> int:
    """One program for each multiprocessor; two on CPU, where the interpreter runs them in turn."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
