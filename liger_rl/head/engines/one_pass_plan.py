"""One pass from shapes alone: how many tokens a chunk holds, what that takes, what stands against it, when it pays."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

from liger_rl.head.engines.two_pass import CHUNK_ALIGNMENT, ProjectionOptions, kind_of
from liger_rl.head.memory import HeadShape
from liger_rl.kernels import gemm
from liger_rl.kernels.devices import MIN_TOKENS
from liger_rl.kernels.saved_exponentials import Kept
from liger_rl.kernels.statistics import BLOCK_VOCAB

Passes = Literal["auto", "one", "two"]
PASSES: tuple[str, ...] = get_args(Passes)

# Of a chunk without a budget: its exponentials and the float32 gradient of its hidden states, of which a frozen head
# adds up a few. On CUDA, with H = 4096 and V = 128256, that is 2075 tokens, whose products run at full speed.
CHUNK_BYTES = {"cuda": 544 << 20, "cpu": 64 << 20}
# Each chunk reads and writes a sum of the weight's size: under so many tokens that costs more than the product saved.
MIN_CHUNK_TOKENS = {"cuda": 512, "cpu": 256}
# Where gradients cannot have the memory of the exponentials, the vocabulary is cut into about so many tiles.
VOCAB_TILES = 16
# Chunks whose sum may be rounded to a 16-bit weight's dtype after each of them. One rounding to bfloat16 has a relative
# error of u = 1.7e-3, the gradient of a logit too; K independent chunks give sqrt(1 + sum_k k / K) u: 2.4e-3
# for one, 2.6e-3 for two, 2.9e-3 for three. Chunks whose gradients partly cancel have sums larger than the whole: two
# of three models' own tokens gave 3.4e-3, 2.7e-3 and 3.2e-3, a sum in float32 2.8e-3, 2.1e-3 and 2.8e-3
# (`ours-one-pass-2048`).
MAX_ROUNDINGS = 2
# The same where a budget has no room for a float32 sum: 3.2e-3 for four independent chunks, and 2.4e-3 for four of a
# batch as RL makes it, in which most words have a gradient in one of them.
MAX_ROUNDINGS_OF_BUDGET = 4
CHUNK_TOKENS_ALIGNMENT = 128


@dataclass(frozen=True, kw_only=True)
class OnePassPlan:
    """How many tokens a chunk holds, and how the weight's gradient is summed over chunks."""

    chunk_tokens: int
    room: int
    """The most that it could hold."""
    sum_dtype: torch.dtype | None
    """float32, or the weight's own: the gradient is then rounded once a chunk. None where none is wanted."""
    extra_bytes: int
    """Peak of the memory beside inputs, results and gradients, at most."""


def plan_one_pass(
    shape: HeadShape, *, tokens: int | None = None, together: int = 1, max_extra_bytes: int | None = None
) -> OnePassPlan | None:
    """One or two chunks if the memory of a float32 sum makes that possible, which then is not needed; else many, or
    with a budget that has no room for that sum up to MAX_ROUNDINGS_OF_BUDGET.

    Args:
        tokens: those that count, as far as is known; None is all of the shape.
        together: the most tokens that may not be parted; chunks are then filled in order, each as far as it goes.

    Returns:
        None where no chunk has room for those, or with a budget for MIN_CHUNK_TOKENS.
    """
    tokens = shape.tokens if tokens is None else tokens
    together = tokens if shape.in_place else min(together, tokens)
    sum_dtype = torch.float32 if shape.needs[1] else None
    fewest = max(together, 0 if max_extra_bytes is None else _enough(shape, tokens))
    room, large = (_room(shape, beside_sum=beside, max_extra_bytes=max_extra_bytes) for beside in (True, False))
    roundings = MAX_ROUNDINGS if max_extra_bytes is None or room >= fewest else MAX_ROUNDINGS_OF_BUDGET
    if _sum_bytes(shape) and large >= _tokens_of_rounded_chunks(tokens, together, roundings):
        sum_dtype, room = shape.weight_dtype, large
    if room < fewest:
        return None
    even = math.ceil(tokens / max(1, math.ceil(tokens / max(room, 1))))
    even = math.ceil(even / CHUNK_TOKENS_ALIGNMENT) * CHUNK_TOKENS_ALIGNMENT
    chunk_tokens = max(1, min(room, even + together - 1, tokens))
    # Where fewer tokens count than these, chunks may be fewer and fuller, and do without a sum.
    memory, sums = _Memory.of(shape), _sum_bytes(shape) if sum_dtype == torch.float32 else 0
    extra = sums + memory.per_token * min(room if shape.masked else chunk_tokens, tokens)
    if shape.masked and sums:
        extra = max(extra, memory.per_token * min(large, tokens))
    return OnePassPlan(chunk_tokens=chunk_tokens, room=room, sum_dtype=sum_dtype, extra_bytes=memory.fixed + extra)


def least_one_pass_bytes(shape: HeadShape, *, together: int = 1) -> int:
    """The smallest budget with which `plan_one_pass` gives a plan."""
    together = shape.tokens if shape.in_place else min(together, shape.tokens)
    memory, fewest = _Memory.of(shape), max(together, _enough(shape, shape.tokens))
    least = memory.fixed + _sum_bytes(shape) + memory.per_token * fewest
    if _sum_bytes(shape):
        of_rounded = max(fewest, _tokens_of_rounded_chunks(shape.tokens, together, MAX_ROUNDINGS_OF_BUDGET))
        least = min(least, memory.fixed + memory.per_token * of_rounded)
    return least


def one_pass_obstacle(shape: HeadShape, *, grad_tolerance: float = 0.0, fixed_shape: bool = False) -> str | None:
    """What one pass would need and does not have, but for room (`lack_of_room`); None where nothing is missing."""
    if grad_tolerance != 0.0:
        return f"grad_tolerance = 0.0, got {grad_tolerance}: blocks are left out of a second pass"
    if fixed_shape:
        return "fixed_shape = False: the host has to know which rows make a chunk"
    if shape.options.batch_invariant:
        return "batch_invariant = False: the tiles of a chunk depend on how many tokens it holds"
    transform = shape.options.transform
    if transform.softcap is not None and transform.softcap < transform.temperature:
        return (
            f"a softcap of at least the temperature, {transform.temperature}, got {transform.softcap}: the logits are "
            "made again from their exponentials, which are too much alike"
        )
    # Of what has a gradient and what it is made in. Autocast to bfloat16 leaves a float16 weight its own.
    wanted = [dtype for dtype, need in zip((shape.dtype, shape.weight_dtype), shape.needs, strict=True) if need]
    if torch.float16 in (shape.options.compute_dtype, *wanted):
        return "bfloat16 or float32 products and gradients: what is made before the loss is scaled vanishes in float16"
    if shape.rank:
        return "a head without low_rank terms"
    return None


def lack_of_room(shape: HeadShape, *, together: int, max_extra_bytes: int | None) -> str | None:
    """What chunks would need to hold all of the shape's tokens, None where they have it."""
    if plan_one_pass(shape, together=together, max_extra_bytes=max_extra_bytes) is not None:
        return None
    if max_extra_bytes is not None:
        least = least_one_pass_bytes(shape, together=together)
        return (
            f"max_extra_bytes of at least {least} ({mebibytes(least)}) for {shape.tokens} tokens, {shape.vocab} words "
            f"and hidden size {shape.hidden_size}, got {max_extra_bytes}"
        )
    why = "with weight_grad" if shape.in_place else "that the gradient of one of them depends on"
    together, room = shape.tokens if shape.in_place else together, _room(shape, beside_sum=False, max_extra_bytes=None)
    return f"room in one chunk for {together} tokens {why}; it holds {room}, unless chunk_tokens says more"


def takes_one_pass(
    passes: Passes, shape: HeadShape, obstacle: str | None, *, together: int, max_extra_bytes: int | None
) -> bool:
    """Whether a call that wants a gradient is made in one pass, `obstacle` being what stands against it.

    Raises:
        ValueError: "one", and there is an obstacle.
    """
    if passes == "one" and obstacle is not None:
        raise ValueError(f'passes="one" needs {obstacle}')
    if passes != "auto" or obstacle is not None:
        return passes == "one"
    return drawback(shape, together=together, max_extra_bytes=max_extra_bytes) is None


def drawback(shape: HeadShape, *, tokens: int | None = None, together: int, max_extra_bytes: int | None) -> str | None:
    """Why "auto" does not take one pass of so many tokens, None being all, where nothing stands against it; or None."""
    tokens = shape.tokens if tokens is None else tokens
    if shape.options.chunk_tokens is not None or shape.options.chunk_vocab is not None:
        return "a chunk is named, which bounds a tile, where one pass holds the whole vocabulary"
    plan = plan_one_pass(shape, tokens=tokens, together=together, max_extra_bytes=max_extra_bytes)
    if plan is None or plan.room < _enough(shape, tokens):
        return "chunks are too small for one pass to pay"
    beside = max_extra_bytes is None and _sum_bytes(shape) > 0
    if beside and _room(shape, beside_sum=True, max_extra_bytes=None) < tokens:
        least = least_one_pass_bytes(shape, together=together)
        return (
            "one pass needs memory of the weight's size for the sum of its gradient, which max_extra_bytes of at least "
            f"{least} ({mebibytes(least)}) would allow"
        )
    return None


def tile_words(options: ProjectionOptions) -> int:
    """Words that share a peak: those of the epilogue's tiles, fewer where a named chunk holds fewer."""
    if options.chunk_vocab is None:
        return BLOCK_VOCAB
    return min(BLOCK_VOCAB, 1 << (options.chunk_vocab.bit_length() - 1))


def tile_vocab(vocab: int, options: ProjectionOptions) -> int:
    """Columns of a tile of logits, whole tiles of `tile_words`."""
    if options.chunk_vocab is None:
        return free_tile_vocab(vocab)
    words = tile_words(options)
    return options.chunk_vocab // words * words


def free_tile_vocab(vocab: int) -> int:
    return math.ceil(vocab / VOCAB_TILES / CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT


def one_pass_traffic(shape: HeadShape, plan: OnePassPlan) -> int:
    """Least bytes that products and kernels of one pass read and write."""
    hidden, weight = shape.needs[0], shape.needs[1] and not shape.in_place
    chunks = math.ceil(shape.tokens / plan.chunk_tokens)
    logits = shape.tokens * shape.vocab
    # Kept, then read and written over as a gradient, which each product reads.
    epilogue = takes_epilogue(shape, plan)
    moved = logits * shape.itemsize * (3 + hidden + weight) + (0 if epilogue else 8 * logits)
    moved += chunks * shape.weight_bytes * (1 + hidden) + shape.rows_bytes * (1 + weight)
    moved += 4 * shape.tokens * shape.hidden_size * hidden
    if weight:
        sums = shape.vocab * shape.hidden_size * (plan.sum_dtype or torch.float32).itemsize
        moved += sums * (2 * chunks - 1) + (shape.weight_bytes + sums if plan.sum_dtype != shape.weight_dtype else 0)
    return moved


def takes_epilogue(shape: HeadShape, plan: OnePassPlan) -> bool:
    return shape.options.chunk_vocab is None and shape.epilogue_applies and plan.chunk_tokens >= MIN_TOKENS


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def _enough(shape: HeadShape, tokens: int) -> int:
    return min(MIN_CHUNK_TOKENS[kind_of(shape.device)], tokens)


def _tokens_of_rounded_chunks(tokens: int, together: int, chunks: int) -> int:
    """Of a chunk, if so many are to hold them all.

    All chunks but the last may stay short of being full by all but one of the tokens that are not parted.
    """
    return min(tokens, math.ceil((tokens + (chunks - 1) * (together - 1)) / chunks))


def _sum_bytes(shape: HeadShape) -> int:
    """Of a float32 sum of the weight's gradient that is not that gradient."""
    if not shape.needs[1] or shape.weight_dtype == torch.float32 or shape.in_place:
        return 0
    return 4 * shape.vocab * shape.hidden_size


def _room(shape: HeadShape, *, beside_sum: bool, max_extra_bytes: int | None) -> int:
    """Tokens that a chunk may hold, beside a float32 sum of the weight's gradient or in its place."""
    options, sums = shape.options, _sum_bytes(shape)
    if options.chunk_tokens is not None:
        return options.chunk_tokens
    if max_extra_bytes is not None:
        memory = _Memory.of(shape)
        return (max_extra_bytes - memory.fixed - (sums if beside_sum else 0)) // memory.per_token
    per_token = Kept.bytes_per_token(shape.vocab, options.compute_dtype, tile_words(options)) + 4 * shape.hidden_size
    return max(1, (CHUNK_BYTES[kind_of(shape.device)] + (0 if beside_sum else sums)) // per_token)


class _Memory(NamedTuple):
    """What one pass takes beside inputs, results and gradients, but for a float32 sum of the weight's."""

    fixed: int
    per_token: int  # of a chunk

    @classmethod
    def of(cls, shape: HeadShape) -> "_Memory":
        options, itemsize, size = shape.options, shape.itemsize, shape.hidden_size
        words = tile_words(options)
        width = min(tile_vocab(shape.vocab, options), -(-shape.vocab // words) * words)
        kept = Kept.bytes_per_token(shape.vocab, options.compute_dtype, words) + 16
        # The chunk's hidden states, those of them with a gradient, and the gradient, which is rounded at the end.
        rounds, copied = shape.dtype != torch.float32, shape.masked or shape.converts_rows
        rows = size * (itemsize * (copied + shape.masked) + 4 + rounds * shape.dtype.itemsize + 4 * shape.widens)
        # Of one tile: float32 logits, or what eager kernels make on the way to gradients; those of some of the tokens.
        capped = options.transform.softcap is not None
        logits = 4 if shape.compiled else 28 + 8 * options.entropy + 4 * capped
        selected = itemsize * shape.masked
        # Copies of the weight's tile, and products that are not added where they belong.
        rounded = shape.needs[1] and not shape.in_place and shape.weight_dtype != torch.float32
        per_column = itemsize * shape.copies_weight + 4 * shape.widens
        per_column += 8 if rounded and (not shape.cuda or shape.copies_weight) else 0
        if shape.cuda and not gemm.ADDS_TO_FLOAT32:
            per_column, rows = per_column + 4, rows + 4 * size
        fixed = shape.vectors + shape.relaid_bytes + width * size * per_column
        if shape.bias:
            fixed, kept = fixed + 16 * shape.vocab, kept + 4 * shape.vocab // gemm.SUMMED_ROWS
        if shape.cuda and options.chunk_vocab is None and shape.epilogue_applies:
            statistics = 4 * shape.kinds * -(-shape.vocab // BLOCK_VOCAB)
            # Or, where a chunk has few tokens, float32 tiles after all.
            return cls(fixed + logits * MIN_TOKENS * width, kept + rows + selected * width + statistics)
        return cls(fixed, kept + rows + (logits + selected) * width)
