"""Which engine makes a call of the head, in which tiles or chunks, and why: from shapes alone, within one memory bound.

`plan_linear_logprobs` states the rule. `HeadShape` has one peak for each engine: an upper bound of the memory that a
call takes beside its inputs, results and gradients. The tests hold it against what is measured.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from liger_rl.head import checks
from liger_rl.head.call import HeadCall
from liger_rl.head.checks import Passes
from liger_rl.head.engines import lists
from liger_rl.head.engines.one_pass import tile_entries, tile_vocab
from liger_rl.head.engines.tiles import CHUNK_ALIGNMENT, MAX_CHUNK_TOKENS, Tiles, kind_of, plan_tiles
from liger_rl.head.engines.totals import OnePassPlan
from liger_rl.head.engines.two_pass import INVARIANT_TOKENS
from liger_rl.head.options import IDENTITY, EngineOptions, HeadKeywords, HeadOptions, options_of, resolved
from liger_rl.head.rules import lacks
from liger_rl.kernels import gemm, selection
from liger_rl.kernels.devices import (
    MIN_TOKENS,
    STATISTICS_BYTES,
    aligned,
    call_lacks,
    compiles,
    family_of,
    gpu_lacks,
    gpu_of,
)
from liger_rl.kernels.saved_exponentials import Kept
from liger_rl.kernels.statistics import BLOCK_TOKENS, BLOCK_VOCAB, SAMPLES
from liger_rl.kernels.support import PARTIAL_BYTES

if TYPE_CHECKING:
    from typing_extensions import Unpack

SMALLEST_TILE = Tiles(128, CHUNK_ALIGNMENT)  # that a budget leads to
LIBRARY_BYTES = {"cuda": 64 << 20, "cpu": 0}  # cuBLAS's own workspace, at most
BYTES_PER_TOKEN = 256  # statistics, their gradients, indices, and what comes and goes while they are made
# A chunk of one pass without a budget: its exponentials and the float32 gradient of its hidden states. On CUDA, with
# H = 4096 and V = 128256, that is 2075 tokens, whose products run at full speed.
CHUNK_BYTES = {"cuda": 544 << 20, "cpu": 64 << 20}
# Each chunk reads and writes a sum of the weight's size. With fewer tokens, that costs more than one pass saves.
MIN_CHUNK_TOKENS = {"cuda": 512, "cpu": 256}
CHUNK_TOKENS_ALIGNMENT = 128
# Chunks whose sum may be rounded to a 16-bit weight's dtype after each of them. The relative error of the gradient is
# 2.4e-3 with one, 2.6e-3 with two, 2.9e-3 with three. It is larger where gradients of chunks partly cancel: 2.7e-3 to
# 3.4e-3 for the tokens of three models, where a float32 sum has 2.1e-3 to 2.8e-3.
MAX_ROUNDINGS = 2
# The same where a budget has no room for a float32 sum: 3.2e-3 for four independent chunks, and 2.4e-3 for four chunks
# of an RL batch, in which most vocabulary entries have a gradient in one of them.
MAX_ROUNDINGS_OF_BUDGET = 4


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """A call without its tensors, and the peak of each engine for it."""

    tokens: int  # N
    vocab: int  # V
    hidden_size: int  # H
    dtype: torch.dtype  # of the hidden states
    weight_dtype: torch.dtype
    device: torch.device
    needs: tuple[bool, bool]  # gradients of the hidden states, and of the weight or what else the head has
    bias: bool
    rank: int  # columns of low-rank terms together
    in_place: bool  # the weight's gradient is added to a float32 tensor of the caller's
    options: EngineOptions
    contiguous: tuple[bool, bool] = (True, True)  # the hidden states, and the weight
    aligned: bool = True  # the weight's rows start where the product of our own can read them

    @classmethod
    def of(cls, call: HeadCall, options: EngineOptions, *, needs: tuple[bool, bool]) -> "HeadShape":
        """Of a call whose tensors are checked."""
        return cls(
            tokens=call.targets.numel(),
            vocab=call.weight.shape[0],
            hidden_size=call.weight.shape[1],
            dtype=call.hidden.dtype,
            weight_dtype=call.weight.dtype,
            device=call.hidden.device,
            needs=needs,
            bias=call.bias is not None,
            rank=call.rank,
            in_place=call.weight_grad is not None,
            contiguous=(call.hidden.is_contiguous(), call.weight.is_contiguous()),
            options=options,
            aligned=aligned(call.weight),
        )

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def epilogue_lacks(self) -> str | None:
        """What the product with its work in the epilogue would need; None where it applies."""
        tokens = max(self.tokens, MIN_TOKENS) if self.options.batch_invariant else self.tokens
        dtype = self.options.compute_dtype  # also of the weight, or of its copy
        return (
            ("a GPU" if not self.cuda else None)
            or gpu_lacks(gpu_of(self.device))
            or ("a head without low_rank terms" if self.rank else None)
            or ("no topk" if self.options.topk is not None else None)
            or ("one temperature for all tokens" if self.options.transform.per_token else None)
            or call_lacks(tokens, self.hidden_size, dtype, dtype)
            or (None if self.aligned or self.casts_weight else "rows of the weight that start at multiples of 16 bytes")
        )

    @property
    def casts_weight(self) -> bool:
        """A copy of the weight, in the dtype of products, is what two passes in an epilogue read."""
        return self.weight_dtype != self.options.compute_dtype

    @property
    def one_pass_lacks(self) -> str | None:
        """`epilogue_lacks` of one pass, which makes no copy of the weight."""
        return self.epilogue_lacks or ("a weight in the products' dtype in one pass" if self.casts_weight else None)

    @property
    def finds_ids(self) -> bool:
        """Whether a tolerance has an effect: lists of ids are found behind a product with an epilogue."""
        return self.epilogue_lacks is None and not self.options.names_chunk and not self.in_place

    def settled(self, asked: HeadOptions, *, one_pass: bool = False) -> "HeadShape":
        """With the tolerance that "auto" becomes: 0 in one pass, and where no list of ids is found or has room."""
        if asked.grad_tolerance != "auto" or not self.options.grad_tolerance:
            return self
        budget, sparse = asked.max_extra_bytes, not one_pass and self.finds_ids
        if sparse and (budget is None or budget >= self.least_bytes(epilogue=True, sparse=True)):
            return self
        return replace(self, options=replace(self.options, grad_tolerance=0.0))

    @property
    def base_bytes(self) -> int:
        """What every engine takes: libraries, numbers per token, and contiguous copies of tensors that are not."""
        hidden = 0 if self.contiguous[0] else self.tokens * self.hidden_size * self.dtype.itemsize
        relaid = not self.contiguous[1] and self.needs[1] and not self.in_place  # autograd copies to a leaf's strides
        weight = self.vocab * self.hidden_size * self.weight_dtype.itemsize * relaid
        return LIBRARY_BYTES[kind_of(self.device)] + BYTES_PER_TOKEN * self.tokens + hidden + weight

    @property
    def logit_bytes(self) -> int:
        """A float32 logit, with what eager kernels make on the way to its gradient."""
        if compiles(self.device):
            return 4
        transform = self.options.transform
        plain = not transform.per_token and transform == IDENTITY and not self.bias
        return (16 if plain else 32) + 12 * self.options.entropy + 8 * (len(self.options.extras) > 0)

    @property
    def copies_weight(self) -> bool:
        return self.weight_dtype != self.options.compute_dtype or not self.contiguous[1]

    @property
    def widened_bytes(self) -> int:
        """On CPU, the float32 copy of one element of a product's factor."""
        return 4 if not self.cuda and self.options.compute_dtype.itemsize < 4 else 0

    @property
    def sum_bytes(self) -> int:
        """A float32 sum of the weight's gradient, unless it is the gradient itself."""
        own = self.needs[1] and not self.in_place and self.weight_dtype != torch.float32
        return 4 * self.vocab * self.hidden_size * own

    @property
    def tile_statistics(self) -> int:
        """Bytes that the epilogue leaves of a token."""
        kinds = 2 + self.options.entropy + len(self.options.extras)
        return 4 * kinds * -(-self.vocab // BLOCK_VOCAB)

    def two_pass_peak(self, forward: Tiles, backward: Tiles, *, epilogue: bool) -> int:
        """Base and selected hidden states, with the larger of the two directions.

        The forward has one tile of logits, or the statistics of the epilogue. The backward has one tile of gradients,
        and float32 sums: of its tile of the weight's gradient, and of the hidden states' one.
        """
        n, c, s = self.tokens, self.options.compute_dtype.itemsize, self.dtype.itemsize
        columns = self.hidden_size + (3 * self.rank + 8 if self.rank else 0)  # low-rank factors, split and aligned
        kept = self.base_bytes + self.hidden_size * n * (s + c * (self.dtype != self.options.compute_dtype))
        kept += n * (columns * c + 16 * self.rank) if self.rank else 0

        def tile_bytes(tiles: Tiles, gradient: int) -> int:
            # In the epilogue: float32 tiles after all, where few tokens count.
            tokens = min(tiles.tokens, MIN_TOKENS) if epilogue else tiles.tokens
            logits = max(tokens * (self.logit_bytes + gradient), tiles.tokens * gradient)
            copied = self.vocab if epilogue and self.casts_weight else tiles.vocab
            factors = copied * c * (self.copies_weight + (self.rank > 0))
            return tiles.vocab * logits + columns * (factors + self.widened_bytes * sum(tiles))

        first = tile_bytes(forward, 0)
        if epilogue:
            first = max(first, STATISTICS_BYTES, self.tile_statistics * SMALLEST_TILE.tokens)
        if self.options.batch_invariant:  # rows of zeros
            first += (n + MIN_TOKENS) * self.hidden_size * c + BYTES_PER_TOKEN * MIN_TOKENS
        if not any(self.needs):
            return kept + first
        second = tile_bytes(backward, c if compiles(self.device) else 0)
        if self.needs[0]:
            rounded = 0 if compiles(self.device) else min(n, selection.ROWS) * self.hidden_size * s
            second += 4 * n * (self.hidden_size + self.rank) + rounded
        one_product = self.cuda and n <= backward.tokens and self.weight_dtype == self.options.compute_dtype
        if self.needs[1] and (self.sum_bytes or self.rank) and not one_product:
            second += 4 * backward.vocab * columns
        if self.cuda and not gemm.ADDS_TO_FLOAT32:
            second += 4 * max(backward) * self.hidden_size
        if self.bias:
            second += 4 * backward.vocab * (4 + backward.tokens // gemm.SUMMED_ROWS)
        return kept + max(first, second)

    def sparse_peak(self, forward: Tiles, backward: Tiles) -> int:
        """Two passes with the statistics of all tiles; or these, kept parts and the longest lists that are summed."""
        n, size, tiles, c = self.tokens, self.hidden_size, -(-self.vocab // BLOCK_VOCAB), self.options.compute_dtype
        kept = 4 * (2 + self.options.entropy) * n * tiles
        bounds = 8 * n * tiles + 4 * SAMPLES * self.vocab
        parts = max(lists.PARTS_BYTES, 2 * BLOCK_TOKENS * BLOCK_VOCAB * tiles) + 4 * n * tiles
        sums = lists.BYTES_PER_ID * lists.most_ids(self.vocab) * n + 2 * PARTIAL_BYTES + 4 * (n + tiles) * size
        beside = (4 + 2 * c.itemsize) * n * tiles + (c.itemsize + 4) * tiles * size + 4 * self.vocab
        exact = self.two_pass_peak(forward, backward, epilogue=True)
        rows = self.base_bytes + n * size * (c.itemsize + self.dtype.itemsize)
        copy = self.vocab * size * c.itemsize * self.casts_weight
        return kept + max(exact, rows + copy + beside + max(bounds, parts, sums))

    def one_pass_peak(self) -> tuple[int, int]:
        """(fixed, per token of a chunk), beside a float32 sum of the weight's gradient.

        A token of a chunk has its exponentials, hidden states and their gradient, and a tile's width of gradients.
        """
        options, c, size = self.options, self.options.compute_dtype.itemsize, self.hidden_size
        cuda, entries = self.cuda, tile_entries(options)
        width = min(tile_vocab(self.vocab, options), -(-self.vocab // entries) * entries)
        kept = Kept.bytes_per_token(self.vocab, options.compute_dtype, entries) + 16
        rows = size * (2 * c + 4 + self.dtype.itemsize + self.widened_bytes)
        per_column = c * self.copies_weight + self.widened_bytes
        if self.sum_bytes and (not cuda or self.copies_weight):
            per_column += 8  # products that are not added where they belong
        if cuda and not gemm.ADDS_TO_FLOAT32:
            per_column, rows = per_column + 4, rows + 4 * size
        fixed, per_token = self.base_bytes + width * size * per_column, kept + rows + c * width
        if self.bias:
            fixed, per_token = fixed + 16 * self.vocab, per_token + 4 * self.vocab // gemm.SUMMED_ROWS
        if options.chunk_vocab is None and self.one_pass_lacks is None:
            # A last chunk of few tokens has float32 tiles after all.
            return fixed + self.logit_bytes * MIN_TOKENS * width, per_token + self.tile_statistics
        log_exponentials = 0 if compiles(self.device) else 12
        return fixed, per_token + (self.logit_bytes + log_exponentials) * width

    def tiles(self, max_extra_bytes: int | None, *, epilogue: bool, sparse: bool = False) -> tuple[Tiles, Tiles, int]:
        """Tiles of the forward and of the backward, and their peak.

        With a budget both are the same, and the widest that fit: the tokens are halved while SMALLEST_TILE.vocab does
        not fit beside them. Without one they are the engines' own. A `batch_invariant` forward always has its own.
        """

        def own(tokens: int, logit_bytes: int) -> Tiles:
            logit_bytes = logit_bytes if compiles(self.device) else 12
            sizes = tokens, self.vocab, self.hidden_size, self.device, self.options
            return plan_tiles(*sizes, bytes_per_logit=logit_bytes)

        def with_peak(forward: Tiles, backward: Tiles) -> tuple[Tiles, Tiles, int]:
            forward = own(INVARIANT_TOKENS, 4) if self.options.batch_invariant else forward
            if sparse:
                return forward, backward, self.sparse_peak(forward, backward)
            return forward, backward, self.two_pass_peak(forward, backward, epilogue=epilogue)

        def of_budget(tokens: int, steps: int) -> tuple[Tiles, Tiles, int]:
            tile = Tiles(tokens, min(SMALLEST_TILE.vocab + steps * CHUNK_ALIGNMENT, self.vocab))
            return with_peak(tile, tile)

        if max_extra_bytes is None:
            gradient = self.options.compute_dtype.itemsize + (0 if epilogue else 4)
            return with_peak(own(self.tokens, 4), own(self.tokens, gradient))
        tokens = max(1, min(self.tokens, MAX_CHUNK_TOKENS[kind_of(self.device)]))
        while tokens > SMALLEST_TILE.tokens and of_budget(tokens, 0)[2] > max_extra_bytes:
            tokens = max(tokens // 2, SMALLEST_TILE.tokens)
        fits, most = 0, max(0, -(-self.vocab // CHUNK_ALIGNMENT) - 1)
        while fits < most:
            middle = (fits + most + 1) // 2
            fitting = of_budget(tokens, middle)[2] <= max_extra_bytes
            fits, most = (middle, most) if fitting else (fits, middle - 1)
        return of_budget(tokens, fits)

    def least_bytes(self, *, epilogue: bool = False, sparse: bool = False) -> int:
        """Of two passes in the smallest tiles."""
        return self.tiles(0, epilogue=epilogue, sparse=sparse)[2]


@dataclass(frozen=True, kw_only=True)
class LinearPlan:
    """What `linear_logprobs` or `FusedLinearGRPOLoss` would do; `str` of it says so in a few lines."""

    path: str
    """"two passes", "sparse" or "one pass"."""
    reason: str
    """Why this path, and on a GPU what the product's epilogue would need where it is not taken."""
    epilogue: bool
    """Whether the work is in the product's epilogue, with no float32 tile in memory."""
    family: str | None
    """How that product reads memory: "tma" or "portable" (with pointers). None without an epilogue."""
    tiles: Tiles
    """Upper bounds of a tile's sides; of one pass, its chunk. With `batch_invariant`, the forward has its own."""
    extra_bytes: int
    """Peak of the memory beside inputs, results and gradients, at most."""
    least_bytes: int
    """The smallest `max_extra_bytes` for this call."""
    one_pass_bytes: int | None = None
    """The smallest `max_extra_bytes` for one pass. None where it is not asked for or something else rules it out."""
    kernels_fit: bool = True
    """Whether kernels without float32 tiles fit the budget, and may be taken where they apply."""

    def __str__(self) -> str:
        sides = f"{self.tiles.tokens} tokens x {self.tiles.vocab} vocabulary entries"
        kind = "a chunk" if self.path == "one pass" else "a tile"
        least = f"max_extra_bytes may be {self.least_bytes} ({mebibytes(self.least_bytes)}) or more"
        if self.one_pass_bytes is not None:
            least += f", for one pass {self.one_pass_bytes} ({mebibytes(self.one_pass_bytes)})"
        work = f"work in the product's epilogue ({self.family})" if self.epilogue else "float32 tiles of logits"
        memory = f"extra memory up to {mebibytes(self.extra_bytes)}"
        return f"{self.path}: {self.reason}\n{work}, {kind} has up to {sides}\n{memory}\n{least}"


class PlanKeywords(HeadKeywords, total=False):
    """How the tensors lie, beside the fields of `HeadOptions`."""

    contiguous: tuple[bool, bool]
    aligned: bool


def plan_linear_logprobs(
    tokens: int,
    vocab: int,
    hidden_size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | None = None,
    device: torch.device | str = "cuda",
    needs: tuple[bool, bool] = (True, True),
    bias: bool = False,
    rank: int = 0,
    weight_grad: bool = False,
    passes: Passes = "two",
    together: int = 1,
    **options: "Unpack[PlanKeywords]",
) -> LinearPlan:
    """What `linear_logprobs`, or with `passes` the head of a loss, would do for these shapes, and the memory it takes.

    The rule:

    1. Sparse, where `grad_tolerance` is above 0, lists of ids can be found (see `linear_logprobs`), and `passes` is not
       "one". With grad_tolerance="auto" they also must fit the budget. A call whose lists would be long runs the exact
       backward in the end, which a plan, that knows no distribution, cannot tell.
    2. Else one pass, where `passes` allows it, a gradient is wanted, no option needs a second pass, and a chunk has
       room for all tokens that one token's gradient depends on. "auto" also wants it to pay: no chunk is named, a chunk
       has room for 512 tokens (256 on CPU), and without a budget a 16-bit weight's gradient needs no sum beside it.
    3. Else two passes.

    A chunk of one pass has the room that a budget leaves; without one, 544 MiB (64 MiB on CPU). The gradient of a
    16-bit weight is summed over chunks in 4VH bytes of float32. If one or two chunks hold all tokens with that memory,
    they get it, and the gradient is rounded after each of them; or up to four, where a budget has no room for the sum.

    The other engines run in the product's epilogue where it applies and fits the budget: an NVIDIA GPU of compute
    capability 8.0 or higher or AMD's gfx942 or gfx950, 16-bit products, aligned rows, 512 tokens or
    more, no chunk named. A weight of another dtype than the products' is copied once in each direction of two passes,
    2VH bytes, if a budget has room for it; one pass makes no copy, and takes no epilogue. Else there are float32 tiles,
    as wide as the budget or the default workspace allows, and on a GPU `reason` says what the epilogue needs.

    A plan is for all `tokens`. If a budget is too small for all of them in one pass, a call counts the tokens that are
    not masked, and "auto" takes one pass if there is room for these.

    Args:
        tokens, vocab, hidden_size: N, V, H.
        dtype, weight_dtype: of hidden and weight (None: the same).
        device: "cuda" plans for the GPU there is, or without one for compute capability 9.0 with Triton.
        needs: whether a gradient is wanted of hidden, and of weight.
        bias, rank: whether there is a bias; columns of low-rank terms together.
        weight_grad: whether the weight's gradient is added to a tensor of the caller's.
        passes: "two", "one" or "auto", as in `FusedLinearGRPOLoss`; `linear_logprobs` takes two.
        together: for one pass, the most tokens that the gradient of one of them depends on: 1 for a token-local loss, T
            for a sequence-local one of rows (B, T), N for any other.
        options: the fields of `HeadOptions`, as in `linear_logprobs`. `contiguous`, a pair like needs (True, True):
            whether rows lie densely. `aligned` (True): whether the weight's rows start at multiples of 16 bytes; those
            of a view (FSDP1) may not.

    Raises:
        TypeError, ValueError: an argument of a type or value that is not listed; a budget beside named chunks, or too
            small for any plan: it says what would be needed; passes="one" where one pass is not possible: it says what
            is missing.
    """
    counts = {"tokens": tokens, "vocab": vocab, "hidden_size": hidden_size, "rank": rank, "together": together}
    for name, count in counts.items():
        checks.check_count(name, count, least=0 if name in ("tokens", "rank") else 1)
    for name, given in (("dtype", dtype), ("weight_dtype", weight_dtype)):
        if given not in checks.FLOAT_DTYPES and (given is not None or name == "dtype"):
            raise TypeError(f"{name} must be float32, bfloat16 or float16, got {given!r}")
    lies, dense = options.pop("aligned", True), options.pop("contiguous", (True, True))
    flags = {"bias": bias, "weight_grad": weight_grad, "aligned": lies}
    for name, pair in (("needs", needs), ("contiguous", dense)):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"{name} must be a pair of bools, of hidden and of weight, got {pair!r}")
        flags |= {f"{name}[0]": pair[0], f"{name}[1]": pair[1]}
    for name, flag in flags.items():
        checks.check_flag(name, flag)
    checks.check_passes(passes)
    asked = options_of("plan_linear_logprobs", options)
    shape = HeadShape(
        tokens=tokens, vocab=vocab, hidden_size=hidden_size, dtype=dtype, weight_dtype=weight_dtype or dtype,
        device=_device(device), needs=(needs[0], needs[1]), bias=bias, rank=rank, in_place=weight_grad,
        contiguous=(dense[0], dense[1]), aligned=lies,
        options=resolved(asked, asked.compute_dtype or dtype),
    )  # fmt: skip
    shape = shape.settled(asked, one_pass=passes == "one")
    budget = asked.max_extra_bytes
    if passes == "two" or not any(needs):
        return plan_two_passes(shape, budget)
    obstacle = one_pass_obstacle(shape)
    chunks = obstacle or plan_one_pass(shape, passes, together=together, max_extra_bytes=budget)
    least = None if obstacle or asked.names_chunk else least_one_pass_bytes(shape, together=together)
    if isinstance(chunks, OnePassPlan):
        return _one_pass(shape, chunks, passes, least)
    if passes == "one":
        raise ValueError(f'passes="one" needs {chunks}')
    plan = plan_two_passes(shape, budget)
    return replace(plan, reason=f"one pass needs {chunks}; {plan.reason}", one_pass_bytes=least)


def _device(device: torch.device | str) -> torch.device:
    if not isinstance(device, (torch.device, str)):
        raise TypeError(f"device must be a torch.device or the name of one, got {type(device).__name__}")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be a torch.device or the name of one, got {device!r}") from error


def plan_two_passes(shape: HeadShape, max_extra_bytes: int | None) -> LinearPlan:
    """In tiles that fit the budget, sparse where a tolerance lets it.

    Raises:
        ValueError: a budget that is too small, which says what would be needed.
    """
    grad_tolerance = shape.options.grad_tolerance
    lacks = shape.epilogue_lacks or ("no chunk to be named" if shape.options.names_chunk else None)
    epilogue, sparse, kernels_fit, reason = lacks is None, False, True, "the exact gradient, whatever the loss"
    if grad_tolerance != 0.0:
        sparse = epilogue and not shape.rank
        why = "lets ids be left out" if sparse else "has no effect: lists of ids need the product with an epilogue"
        if shape.options.names_chunk or shape.rank:
            why = "has no effect: named chunks and low-rank terms keep the backward exact"
        reason = f"grad_tolerance {grad_tolerance} {why}"
    least = shape.least_bytes(epilogue=epilogue, sparse=sparse)
    if epilogue and not shape.options.batch_invariant:  # whose bits must not depend on the budget
        kernels_fit, least = max_extra_bytes is None or max_extra_bytes >= least, min(least, shape.least_bytes())
        if not kernels_fit:
            reason += "; lists of ids do not fit max_extra_bytes" if sparse else ""
            epilogue, sparse, lacks = False, False, "a larger max_extra_bytes"
    if epilogue and shape.casts_weight:
        reason += f"; products read a copy of the weight in {str(shape.options.compute_dtype).split('.')[1]}"
    if max_extra_bytes is not None and max_extra_bytes < least:
        raise ValueError(
            f"max_extra_bytes must be at least {least} ({mebibytes(least)}) for {shape.tokens} tokens, {shape.vocab} "
            f"vocabulary entries and hidden size {shape.hidden_size}; got {max_extra_bytes}"
        )
    forward, backward, peak = shape.tiles(max_extra_bytes, epilogue=epilogue, sparse=sparse)
    return LinearPlan(
        path="sparse" if sparse else "two passes",
        reason=reason + (f"; no epilogue, which needs {lacks}" if shape.cuda and not epilogue else ""),
        epilogue=epilogue,
        family=family_of(shape.device).name if epilogue else None,
        tiles=backward if shape.options.batch_invariant else Tiles(*map(max, forward, backward)),
        extra_bytes=peak,
        least_bytes=least,
        kernels_fit=kernels_fit,
    )


def _one_pass(shape: HeadShape, chunks: OnePassPlan, passes: str, least: int | None) -> LinearPlan:
    lacks = shape.one_pass_lacks
    if chunks.chunk_tokens < MIN_TOKENS or shape.options.chunk_vocab is not None:
        lacks = lacks or f"chunks of {MIN_TOKENS} tokens or more, and no chunk_vocab"
    reason = "gradients are made in the forward, chunk by chunk"
    if chunks.sum_dtype is not None:
        reason += f", the weight's summed in {str(chunks.sum_dtype).split('.')[1]}"
    of_one = chunks.extra_bytes if least is None else least
    return LinearPlan(
        path="one pass",
        reason=reason + (f"; no epilogue, which needs {lacks}" if shape.cuda and lacks else ""),
        epilogue=lacks is None,
        family=family_of(shape.device).name if lacks is None else None,
        tiles=Tiles(chunks.chunk_tokens, shape.vocab),
        extra_bytes=chunks.extra_bytes,
        least_bytes=of_one if passes == "one" else min(of_one, shape.least_bytes()),
        one_pass_bytes=least,
    )


def one_pass_obstacle(shape: HeadShape) -> str | None:
    """What one pass would need, if an option or a dtype rules it out; None if nothing does."""
    options = shape.options
    transform, dtypes = shape.options.transform, zip((shape.dtype, shape.weight_dtype), shape.needs, strict=True)
    made = [shape.options.compute_dtype, *(dtype for dtype, need in dtypes if need)]  # autocast leaves a weight its own
    lacking = lacks(options, "in one pass")
    if lacking is not None:
        return lacking
    if isinstance(transform.temperature, torch.Tensor):
        return "one temperature for all tokens"
    if transform.softcap is not None and transform.softcap < transform.temperature:
        return (
            f"a softcap of at least the temperature, {transform.temperature}, got {transform.softcap}: exponentials "
            "that are too much alike do not give back their logits"
        )
    if torch.float16 in made:
        return "bfloat16 or float32 products and gradients: what is made before the loss is scaled vanishes in float16"
    return "a head without low_rank terms" if shape.rank else None


def plan_one_pass(
    shape: HeadShape, passes: str, *, tokens: int | None = None, together: int = 1, max_extra_bytes: int | None = None
) -> OnePassPlan | str:
    """The chunks of one pass; or what it would need to be possible, and for "auto" to pay.

    `tokens` is how many count (None: all), `together` how many of them must share a chunk.
    """
    tokens = shape.tokens if tokens is None else tokens
    together = tokens if shape.in_place else min(together, tokens)
    fixed, per_token = shape.one_pass_peak()
    sums, kind, named = shape.sum_bytes, kind_of(shape.device), shape.options.chunk_tokens
    enough = min(MIN_CHUNK_TOKENS[kind], tokens)
    fewest = together if max_extra_bytes is None else max(together, enough)
    # Room for tokens beside a float32 sum of the weight's gradient, and in its place.
    if named is not None:
        beside = instead = named
    elif max_extra_bytes is not None:
        beside, instead = ((max_extra_bytes - fixed - held) // per_token for held in (sums, 0))
    else:
        kept = Kept.bytes_per_token(shape.vocab, shape.options.compute_dtype, tile_entries(shape.options))
        kept += 4 * shape.hidden_size
        beside, instead = (max(1, (CHUNK_BYTES[kind] + freed) // kept) for freed in (0, sums))
    roundings = MAX_ROUNDINGS if max_extra_bytes is None or beside >= fewest else MAX_ROUNDINGS_OF_BUDGET
    rounded = sums > 0 and instead >= _fullest_chunk(tokens, together, roundings)
    room = instead if rounded else beside
    if room < fewest and max_extra_bytes is None:
        why = "with weight_grad" if shape.in_place else "that the gradient of one of them depends on"
        return f"room in one chunk for {together} tokens {why}; it holds {room}, unless chunk_tokens says more"
    least = least_one_pass_bytes(shape, together=together)
    allowed = f"max_extra_bytes of at least {least} ({mebibytes(least)})"
    if room < fewest:
        sizes = f"{shape.tokens} tokens, {shape.vocab} vocabulary entries and hidden size {shape.hidden_size}"
        return f"{allowed} for {sizes}, got {max_extra_bytes}"
    if passes == "auto" and shape.options.names_chunk:
        return "no chunk to be named: that bounds a tile, and a chunk of one pass has the whole vocabulary"
    if passes == "auto" and room < enough:
        return f"chunks of {enough} tokens to pay, and has room for {room}"
    if passes == "auto" and max_extra_bytes is None and sums and beside < tokens:
        return f"memory of the weight's size for the sum of its gradient, which {allowed} would allow"
    chunks = math.ceil(tokens / max(room, 1))
    even = math.ceil(tokens / max(chunks, 1) / CHUNK_TOKENS_ALIGNMENT) * CHUNK_TOKENS_ALIGNMENT
    # Where fewer tokens count, chunks may be fewer and fuller, and do without a sum.
    extra = max((0 if rounded else sums) + per_token * min(room, tokens), per_token * min(instead, tokens))
    return OnePassPlan(
        chunk_tokens=max(1, min(room, even + together - 1, tokens)),
        sum_dtype=None if not shape.needs[1] else shape.weight_dtype if rounded else torch.float32,
        extra_bytes=fixed + extra,
    )


def least_one_pass_bytes(shape: HeadShape, *, together: int = 1) -> int:
    """The smallest budget for one pass of all tokens."""
    together = shape.tokens if shape.in_place else min(together, shape.tokens)
    fixed, per_token = shape.one_pass_peak()
    fewest = max(together, min(MIN_CHUNK_TOKENS[kind_of(shape.device)], shape.tokens))
    rounded = max(fewest, _fullest_chunk(shape.tokens, together, MAX_ROUNDINGS_OF_BUDGET))
    return fixed + min(shape.sum_bytes + per_token * fewest, per_token * rounded)


def _fullest_chunk(tokens: int, together: int, chunks: int) -> int:
    """Tokens of the fullest of so many chunks. Each but the last may stay `together - 1` short of being full."""
    return min(tokens, math.ceil((tokens + (chunks - 1) * (together - 1)) / chunks))


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
