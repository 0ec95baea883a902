"""What a call of the fused head would do and cost, from shapes alone: path, tiles, FLOPs, bytes and memory."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from liger_rl.head.checks import (
    FLOAT_DTYPES,
    check_chunk,
    check_count,
    check_extras,
    check_flag,
    check_invariant,
)
from liger_rl.head.engines.one_pass_plan import (
    PASSES,
    OnePassPlan,
    Passes,
    drawback,
    lack_of_room,
    least_one_pass_bytes,
    mebibytes,
    one_pass_obstacle,
    one_pass_traffic,
    plan_one_pass,
    takes_epilogue,
    takes_one_pass,
)
from liger_rl.head.engines.two_pass import ProjectionOptions, Tiles
from liger_rl.head.memory import HeadShape
from liger_rl.kernels.devices import MIN_TOKENS
from liger_rl.kernels.transform import LogitTransform

IDENTITY = LogitTransform()


class Step(NamedTuple):
    """One direction."""

    kernel: str
    """"epilogue": no float32 tile reaches memory; "tiles": float32 tiles, and kernels over them; "blocks"."""
    tiles: Tiles | None
    """None where the kernel has its own; of one pass, its chunk."""
    flops: int
    bytes: int
    """Least that products and kernels read and write."""
    extra_bytes: int
    """Peak of the memory beside inputs, results and gradients, at most."""


@dataclass(frozen=True, kw_only=True)
class LinearPlan:
    """What `linear_logprobs` or `FusedLinearGRPOLoss` would do; `str` of it says so in a few lines."""

    path: str
    """"two passes", "block-sparse" or "one pass"."""
    reason: str
    """Why this path, and on a GPU what the epilogue would need where it is not taken."""
    forward: Step
    backward: Step | None
    """None where no gradient is asked for, or the forward makes them all."""
    least_bytes: int
    """The smallest `max_extra_bytes` for this call."""
    one_pass_bytes: int | None
    """The smallest `max_extra_bytes` for one pass, None where it is not asked for or has something else against it."""
    tiles: Tiles
    """Upper bounds of the tiles that the directions make; with `batch_invariant`, the forward has its own."""
    kernels_fit: bool
    """Whether kernels without float32 tiles may be taken where they apply."""

    @property
    def extra_bytes(self) -> int:
        """Peak of the memory beside inputs, results and gradients, at most."""
        return max(step.extra_bytes for step in self.steps.values())

    @property
    def steps(self) -> dict[str, Step]:
        backward = {} if self.backward is None else {"backward": self.backward}
        return {"forward": self.forward, **backward}

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.reason}"]
        for name, step in self.steps.items():
            tiles = "" if step.tiles is None else f" of {step.tiles.tokens} tokens x {step.tiles.vocab} words"
            lines.append(
                f"{name}: {step.kernel}{tiles}, {step.flops / 1e12:.3g} TFLOP, {step.bytes / 1e9:.3g} GB, "
                f"extra memory up to {mebibytes(step.extra_bytes)}"
            )
        lines.append(f"max_extra_bytes may be {self.least_bytes} ({mebibytes(self.least_bytes)}) or more")
        if self.one_pass_bytes is not None:
            lines[-1] += f", for one pass {self.one_pass_bytes} ({mebibytes(self.one_pass_bytes)})"
        return "\n".join(lines)


def plan_linear_logprobs(
    tokens: int,
    vocab: int,
    hidden_size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype | None = None,
    device: torch.device | str = "cuda",
    needs: tuple[bool, bool] = (True, True),
    contiguous: tuple[bool, bool] = (True, True),
    masked: bool = True,
    bias: bool = False,
    rank: int = 0,
    weight_grad: bool = False,
    transform: LogitTransform = IDENTITY,
    entropy: bool = False,
    extras: Collection[str] = (),
    grad_tolerance: float = 0.0,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
    fixed_shape: bool = False,
    batch_invariant: bool = False,
    passes: Passes = "two",
    together: int = 1,
    aligned: bool = True,
    max_extra_bytes: int | None = None,
) -> LinearPlan:
    """What `linear_logprobs`, or with `passes` the head of a loss, would do for these shapes, and what that costs.

    The rule. With passes "auto", the path is "one pass" where

    - a gradient is wanted, and nothing that needs a second pass (see `FusedLinearGRPOLoss`) is asked for;
    - no chunk is named: a named one bounds a tile, where a chunk of one pass holds the whole vocabulary;
    - a chunk has room for 512 tokens (256 on CPU), or all, and for all that one token's gradient depends on;
    - without a budget, the gradient of the weight needs no sum (4VH bytes, below): the weight has no gradient, or one
      of float32, or a chunk holds every token.

    "one" insists on it, but with a budget not under that room. A chunk has room for as many tokens as fit the budget
    beside the parts that no chunk changes; without one, as fit 544 MiB (64 MiB on CPU) with what is kept of them and
    the float32 gradient of their hidden states. The gradient of a 16-bit weight is summed in 4VH bytes of float32;
    where one or two chunks would hold all tokens if they had that memory, they get it (without a budget beside the
    544 MiB), and the gradient is rounded after each of them; after each of up to four where a budget has no room for
    the sum and a chunk of 512 tokens.

    Else the path is "block-sparse" where a `grad_tolerance` is given and blocks can be told apart (see
    `linear_logprobs`), else "two passes". In each direction the product with its work in the epilogue is taken where it
    applies: an NVIDIA GPU of compute capability 9.0 or 10.x (with 227 KiB of shared memory per block; from 10.0 on with
    Triton 3.5), one 16-bit dtype, rows that start at multiples of 16 bytes, 512 tokens or more, no chunk named. Else
    there are float32 tiles, and on a GPU `reason` says what the epilogue needs. Without a budget a tile has up to 8192
    tokens (512 on CPU) and as many words as fit 320 MiB (24 MiB). With one, both directions have the widest tiles that
    fit what it leaves beside the parts that no tile changes, halving the tokens while under 256 words fit, down to 128;
    and where the statistics of the forward's epilogue do not fit, 48 MiB or those of 128 tokens, no epilogue is taken.
    The forward of `batch_invariant` has tiles of its own, whatever the budget is.

    The formulas, with N tokens, c the bytes of the compute dtype, s of the hidden states', T x v a tile, m the tokens
    of a chunk:

        FLOPs           2NHV forward; 2NHV (1 + hidden + weight) backward, of those that want a gradient;
                        one pass 2NHV (1 + hidden + weight)
        extra bytes     64 MiB of cuBLAS's on CUDA  +  256 N
                        + copies of the hidden states (sNH where tokens may be masked or blocks left out, cNH in another
                        dtype)
                        + Tv (bytes per logit) + vH (bytes per column) + TH (bytes per row)
                        + backward: 4NH for the float32 sum of the hidden states' gradient, unless that is the gradient
        bytes per logit forward 4 (12 on CPU, where each step of the formulas is a tensor of its own, and 4 for each of
                        bias, scale or softcap, temperature; 8 for the entropy; 8 for extras); backward likewise, 4 + c
                        (c in the epilogue)
        block-sparse    also 3 bytes (6 with the entropy) of each token and 256 words, and in place of Tv (bytes per
                        logit) cTv of kept blocks, at most 152 MiB, at least those of 256 words
        one pass        64 MiB, 256 N  +  m (cV + V / 64 + H (2c + 4 + s))  +  m cV / 16 where tokens may have no
                        gradient  +  the sum, 4VH or none  +  mV / 16 (bytes per logit; 28 on CPU, 4 more for a softcap,
                        8 for the entropy), or with the epilogue its statistics, mV / 32, half as much more with the
                        entropy, and 128 V for few tokens

    Counts of live tokens are not known beforehand: costs are those of all `tokens`, and where some may be masked, m is
    all that a chunk has room for. A call with a budget that has no room for all tokens in one pass, but has it for two,
    counts them first if it has a mask or leaves out advantages of 0, and "auto" takes one pass where there is room for
    those that count: a plan of that many `tokens` says so, but for the 256 bytes of each other. That one pass may take
    more of the budget than the two passes that the plan of all tokens shows.

    Args:
        tokens, vocab, hidden_size: N, V, H.
        dtype, weight_dtype, compute_dtype: of hidden, weight (None: the same) and products (None: that of hidden).
        device: "cuda" plans for the GPU there is, or without one for compute capability 9.0 with Triton.
        needs: gradients wanted of hidden and of weight.
        contiguous: whether hidden and weight are; otherwise copies of them are counted.
        masked: whether some tokens may be masked, or have no gradient.
        bias, rank: whether there is a bias; columns of low-rank terms together.
        weight_grad: whether the weight's gradient is added to a tensor of the caller's.
        transform, entropy, extras, grad_tolerance, chunk_tokens, chunk_vocab, fixed_shape, batch_invariant: as in
            `linear_logprobs`; a wanted entropy counts as one with a gradient.
        passes: "two", "one" or "auto", as in `FusedLinearGRPOLoss`; `linear_logprobs` takes two.
        together: for one pass, the most tokens that the gradient of one of them depends on: 1 for a token-local loss, T
            for a sequence-local one of rows (B, T), N for any other.
        aligned: whether the rows of the weight are contiguous and start at multiples of 16 bytes. Those of a tensor
            of its own do where H is a multiple of 8; a view into a flat parameter (FSDP1) may start anywhere:
            `weight.data_ptr() % 16 == 0` says whether it does. Calls look for themselves.
        max_extra_bytes: bound of the extra memory; None takes the default workspace.

    Raises:
        TypeError, ValueError: an argument of a type or value that is not listed; a budget beside named chunks, or too
            small for any plan: it says what would be needed; passes="one" where one pass is not possible: it says what
            is missing.
    """
    for name, count, least in (
        ("tokens", tokens, 0),
        ("vocab", vocab, 1),
        ("hidden_size", hidden_size, 1),
        ("rank", rank, 0),
        ("together", together, 1),
    ):
        check_count(name, count, least=least)
    for name, given in (("dtype", dtype), ("weight_dtype", weight_dtype), ("compute_dtype", compute_dtype)):
        if given not in FLOAT_DTYPES and (given is not None or name == "dtype"):
            raise TypeError(f"{name} must be float32, bfloat16 or float16, got {given!r}")
    for name, pair in (("needs", needs), ("contiguous", contiguous)):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"{name} must be a pair of bools, of hidden and of weight, got {pair!r}")
    for name, flag in (
        ("needs[0]", needs[0]),
        ("needs[1]", needs[1]),
        ("contiguous[0]", contiguous[0]),
        ("contiguous[1]", contiguous[1]),
        ("masked", masked),
        ("bias", bias),
        ("weight_grad", weight_grad),
        ("entropy", entropy),
        ("fixed_shape", fixed_shape),
    ):
        check_flag(name, flag)
    if not isinstance(transform, LogitTransform):
        raise TypeError(f"transform must be a LogitTransform, got {type(transform).__name__}")
    if isinstance(grad_tolerance, bool) or not isinstance(grad_tolerance, (int, float)):
        raise TypeError(f"grad_tolerance must be a number, got {type(grad_tolerance).__name__}")
    if not 0.0 <= grad_tolerance < 1.0:
        raise ValueError(f"grad_tolerance must be in [0, 1), got {grad_tolerance}")
    for name, chunk in (("chunk_tokens", chunk_tokens), ("chunk_vocab", chunk_vocab)):
        check_chunk(name, chunk)
    check_invariant(batch_invariant, chunk_tokens, chunk_vocab, grad_tolerance)
    check_budget(max_extra_bytes, chunk_tokens, chunk_vocab)
    check_passes(passes)
    options = ProjectionOptions(
        transform=transform,
        entropy=entropy,
        extras=check_extras(extras),
        compute_dtype=dtype if compute_dtype is None else compute_dtype,
        chunk_tokens=chunk_tokens,
        chunk_vocab=chunk_vocab,
        batch_invariant=batch_invariant,
    )
    shape = HeadShape(
        tokens=tokens,
        vocab=vocab,
        hidden_size=hidden_size,
        dtype=dtype,
        weight_dtype=dtype if weight_dtype is None else weight_dtype,
        device=_device(device),
        needs=(needs[0], needs[1]),
        contiguous=(contiguous[0], contiguous[1]),
        masked=masked or fixed_shape,
        bias=bias,
        rank=rank,
        in_place=weight_grad,
        options=options,
        budgeted=max_extra_bytes is not None,
        aligned=aligned,
    )
    if passes == "two" or not any(needs):
        return _two_passes(shape, grad_tolerance, fixed_shape, max_extra_bytes)
    obstacle = one_pass_obstacle(shape, grad_tolerance=grad_tolerance, fixed_shape=fixed_shape)
    least = least_one_pass_bytes(shape, together=together)
    lacking = obstacle or lack_of_room(shape, together=together, max_extra_bytes=max_extra_bytes)
    possible = obstacle is None and lack_of_room(shape, together=together, max_extra_bytes=least) is None
    if takes_one_pass(passes, shape, lacking, together=together, max_extra_bytes=max_extra_bytes):
        chunks = plan_one_pass(shape, together=together, max_extra_bytes=max_extra_bytes)
        assert chunks is not None
        plan = _one_pass(shape, chunks, least if passes == "one" else min(least, shape.least_bytes))
    else:
        why = f"one pass needs {lacking}"
        if lacking is None:
            why = drawback(shape, together=together, max_extra_bytes=max_extra_bytes) or ""
        plan = _two_passes(shape, grad_tolerance, fixed_shape, max_extra_bytes)
        plan = replace(plan, reason=f"{why}; {plan.reason}")
    return replace(plan, one_pass_bytes=least if possible else None)


def _device(device: torch.device | str) -> torch.device:
    if not isinstance(device, (torch.device, str)):
        raise TypeError(f"device must be a torch.device or the name of one, got {type(device).__name__}")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be a torch.device or the name of one, got {device!r}") from error


def check_budget(max_extra_bytes: int | None, chunk_tokens: int | None, chunk_vocab: int | None) -> None:
    if max_extra_bytes is None:
        return
    if isinstance(max_extra_bytes, bool) or not isinstance(max_extra_bytes, int):
        raise TypeError(f"max_extra_bytes must be an int or None, got {type(max_extra_bytes).__name__}")
    if chunk_tokens is not None or chunk_vocab is not None:
        raise ValueError("max_extra_bytes chooses the chunks; give it or chunk_tokens and chunk_vocab, not both")


def check_passes(passes: str) -> None:
    if not isinstance(passes, str) or passes not in PASSES:
        raise ValueError(f"passes must be one of {list(PASSES)}, got {passes!r}")


def _two_passes(shape: HeadShape, grad_tolerance: float, fixed_shape: bool, max_extra_bytes: int | None) -> LinearPlan:
    tokens, vocab, hidden_size = shape.tokens, shape.vocab, shape.hidden_size
    free, invariant = shape.options.chunks_are_free, shape.options.batch_invariant
    kernel, kernels_fit = free and shape.epilogue_applies, True
    sparse, reason = _sparse(shape, grad_tolerance, free and not fixed_shape and not invariant)
    exact, shape = shape, replace(shape, bounded=sparse)
    known_bytes, smallest = shape.bound_bytes if sparse else 0, shape.smallest_tiles
    # Under what the epilogue takes there are tiles, and no blocks; but for bits that are promised.
    optional = kernel and not invariant
    epilogue_least = known_bytes + shape.peak(smallest, kernel=kernel)
    least = exact.least_bytes if optional else epilogue_least
    forward_tiles, backward_tiles = shape.default_tiles(kernel=kernel)
    if max_extra_bytes is not None:
        if max_extra_bytes < least:
            raise ValueError(
                f"max_extra_bytes must be at least {least} ({mebibytes(least)}) for {tokens} tokens, {vocab} words "
                f"and hidden size {hidden_size}, {mebibytes(shape.fixed_bytes)} of which no tile changes; "
                f"got {max_extra_bytes}"
            )
        kernels_fit = not optional or epilogue_least <= max_extra_bytes
        if not kernels_fit:
            if sparse:
                reason = f"grad_tolerance {grad_tolerance}, but what tells blocks apart does not fit max_extra_bytes"
            kernel, sparse, known_bytes, shape = False, False, 0, exact
        forward_tiles, backward_tiles = shape.budget_tiles(max_extra_bytes - known_bytes, kernel=kernel)
    forward = Step(
        "epilogue" if kernel else "tiles",
        None if kernel else forward_tiles,
        2 * tokens * hidden_size * vocab,
        shape.forward_traffic(kernel=kernel),
        known_bytes + shape.forward_bytes(forward_tiles, kernel=kernel),
    )
    backward = None
    if any(shape.needs):
        backward = Step(
            "blocks" if sparse else "epilogue" if kernel else "tiles",
            None if sparse else backward_tiles,
            2 * tokens * hidden_size * vocab * (1 + sum(shape.needs)),
            shape.backward_traffic(backward_tiles, kernel=kernel),
            known_bytes + shape.backward_bytes(backward_tiles, kernel=kernel),
        )
    if shape.cuda and not kernel:
        lacks = shape.epilogue_lacks or ("a larger max_extra_bytes" if free else "no chunk to be named")
        reason += f"; no epilogue, which needs {lacks}"
    return LinearPlan(
        path="block-sparse" if sparse else "two passes",
        reason=reason,
        forward=forward,
        backward=backward,
        least_bytes=least,
        one_pass_bytes=None,
        tiles=backward_tiles if invariant else Tiles(*map(max, forward_tiles, backward_tiles)),
        kernels_fit=kernels_fit,
    )


def _sparse(shape: HeadShape, grad_tolerance: float, possible: bool) -> tuple[bool, str]:
    if grad_tolerance == 0.0:
        return False, "the exact gradient, whatever the loss"
    wanted = f"grad_tolerance {grad_tolerance}"
    if not possible or shape.rank:
        return False, f"{wanted}, but chunks, low-rank terms, fixed_shape and batch_invariant keep the backward exact"
    if not shape.epilogue_applies:
        return False, f"{wanted}, but blocks need the product with an epilogue, so the backward is exact"
    return True, f"{wanted} lets blocks be left out; costs are those of leaving none out"


def _one_pass(shape: HeadShape, chunks: OnePassPlan, least_bytes: int) -> LinearPlan:
    product = 2 * shape.tokens * shape.hidden_size * shape.vocab
    hidden, weight = shape.needs
    tiles, kernel = Tiles(chunks.chunk_tokens, shape.vocab), takes_epilogue(shape, chunks)
    deferred = weight and shape.in_place
    backward = None
    if deferred:
        moved = shape.rows_bytes + shape.itemsize * shape.tokens * shape.vocab + 8 * shape.vocab * shape.hidden_size
        backward = Step("tiles", tiles, product, moved, chunks.extra_bytes)
    reason = "gradients are made in the forward, chunk by chunk"
    if chunks.sum_dtype is not None:
        reason += f", the weight's summed in {str(chunks.sum_dtype).split('.')[1]}"
    if shape.cuda and not kernel:
        lacks = shape.epilogue_lacks or f"chunks of {MIN_TOKENS} tokens or more, and no chunk_vocab"
        reason += f"; no epilogue, which needs {lacks}"
    return LinearPlan(
        path="one pass",
        reason=reason,
        forward=Step(
            "epilogue" if kernel else "tiles",
            tiles,
            product * (1 + hidden + (weight and not deferred)),
            one_pass_traffic(shape, chunks),
            chunks.extra_bytes,
        ),
        backward=backward,
        least_bytes=least_bytes,
        one_pass_bytes=None,
        tiles=tiles,
        kernels_fit=True,
    )
