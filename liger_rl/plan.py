"""What a call of the fused head would do and cost, from shapes alone: path, tiles, FLOPs, bytes and memory."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from liger_rl.invariant import INVARIANT_TOKENS
from liger_rl.kernels import gemm
from liger_rl.kernels.limits import CAPABILITY, MIN_TOKENS, STATISTICS_BYTES, takes
from liger_rl.kernels.statistics import BLOCK_TOKENS, BLOCK_VOCAB
from liger_rl.kernels.transform import LogitTransform
from liger_rl.projection import CHUNK_ALIGNMENT, MAX_CHUNK_TOKENS, ProjectionOptions, Tiles, plan_tiles

BYTES_PER_TOKEN = 256  # statistics, their gradients, indices, and what comes and goes while they are made
SMALLEST_TOKENS = 128  # of a tile that a budget leads to
LIBRARY_BYTES = {"cuda": 64 << 20, "cpu": 0}  # cuBLAS's own workspace, at most
IDENTITY = LogitTransform()


class Step(NamedTuple):
    """One direction."""

    kernel: str
    """"epilogue": no float32 tile reaches memory; "tiles": float32 tiles, and kernels over them; "blocks"."""
    tiles: Tiles | None
    """None where the kernel has its own."""
    flops: int
    bytes: int
    """Least that products and kernels read and write."""
    extra_bytes: int
    """Peak of the memory beside inputs, results and gradients, at most."""


@dataclass(frozen=True, kw_only=True)
class LinearPlan:
    """What `linear_logprobs` would do; `str` of it says so in a few lines."""

    path: str
    """"two passes" or "block-sparse"."""
    reason: str
    forward: Step
    backward: Step | None
    """None where no gradient is asked for."""
    least_bytes: int
    """The smallest `max_extra_bytes` for this call."""
    tiles: Tiles
    """Upper bounds of the tiles that either direction makes."""
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
                f"extra memory up to {_mebibytes(step.extra_bytes)}"
            )
        lines.append(f"max_extra_bytes may be {self.least_bytes} ({_mebibytes(self.least_bytes)}) or more")
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
    masked: bool = True,
    bias: bool = False,
    rank: int = 0,
    transform: LogitTransform = IDENTITY,
    entropy: bool = False,
    extras: Collection[str] = (),
    grad_tolerance: float = 0.0,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
    fixed_shape: bool = False,
    batch_invariant: bool = False,
    max_extra_bytes: int | None = None,
) -> LinearPlan:
    """What `linear_logprobs` would do for these shapes, and what that costs.

    The rule. The path is "block-sparse" where a `grad_tolerance` is given and blocks can be told apart (see
    `linear_logprobs`), else "two passes". In each direction the product with its work in the epilogue is taken where it
    applies (compute capability 9.0 on, one 16-bit dtype, rows of multiples of 16 bytes, 512 tokens or more, no chunk
    named), else float32 tiles. Without a budget a tile has up to 8192 tokens (512 on CPU) and as many words as fit
    320 MiB (24 MiB). With one, both directions have the widest tiles that fit what it leaves beside the parts that no
    tile changes, halving the tokens while under 256 words fit, down to 128; and where the statistics of the forward's
    epilogue do not fit, 48 MiB or those of 128 tokens, no epilogue is taken.

    The formulas, with N tokens, c the bytes of the compute dtype, s of the hidden states', T x v a tile:

        FLOPs           2NHV forward; 2NHV (1 + hidden + weight) backward, of those that want a gradient
        extra bytes     256 N  +  copies of the hidden states (sNH where tokens may be masked, cNH in another dtype)
                        + Tv (bytes per logit) + vH (bytes per column) + TH (bytes per row)
                        + backward: 4NH for the float32 sum of the hidden states' gradient, unless that is the gradient
        bytes per logit forward 4 (12 on CPU, where each step of the formulas is a tensor of its own, and 4 for each of
                        bias, scale or softcap, temperature; 8 for the entropy; 8 for extras); backward likewise, 4 + c
                        (c in the epilogue)

    Counts of live tokens are not known beforehand: costs are those of all `tokens`.

    Args:
        tokens, vocab, hidden_size: N, V, H.
        dtype, weight_dtype, compute_dtype: of hidden, weight (None: the same) and products (None: that of hidden).
        device: "cuda" plans for the GPU there is, or without one for compute capability 9.0.
        needs: gradients wanted of hidden and of weight.
        masked: whether some tokens may be masked, or have no gradient.
        bias, rank: whether there is a bias; columns of low-rank terms together.
        transform, entropy, extras, grad_tolerance, chunk_tokens, chunk_vocab, fixed_shape, batch_invariant: as in
            `linear_logprobs`; a wanted entropy counts as one with a gradient.
        max_extra_bytes: bound of the extra memory; None takes the default workspace.

    Raises:
        TypeError, ValueError: a budget beside named chunks, or too small for any plan: it says what would be needed.
    """
    check_budget(max_extra_bytes, chunk_tokens, chunk_vocab)
    shape = _Shape(
        tokens=tokens,
        vocab=vocab,
        hidden_size=hidden_size,
        dtype=dtype,
        weight_dtype=dtype if weight_dtype is None else weight_dtype,
        compute_dtype=dtype if compute_dtype is None else compute_dtype,
        device=torch.device(device),
        needs=needs,
        masked=masked or fixed_shape,
        bias=bias,
        rank=rank,
        transform=transform,
        entropy=entropy,
        extras=bool(extras),
        kinds=2 + entropy + len(extras),
        batch_invariant=batch_invariant,
    )
    options = ProjectionOptions(
        transform=transform,
        entropy=entropy,
        compute_dtype=shape.compute_dtype,
        chunk_tokens=chunk_tokens,
        chunk_vocab=chunk_vocab,
    )
    free = options.chunks_are_free
    sparse, reason = _sparse(shape, grad_tolerance, free and not fixed_shape and not batch_invariant)
    shape = replace(shape, bounded=sparse)
    kernel = free and shape.epilogue_applies
    known_bytes = shape.bound_bytes if sparse else 0
    smallest = Tiles(min(SMALLEST_TOKENS, max(tokens, 1)), min(CHUNK_ALIGNMENT, vocab))
    if batch_invariant:
        smallest = shape.invariant_tiles(options)
    least = known_bytes + shape.peak(smallest, kernel=batch_invariant and kernel)
    forward_tiles, backward_tiles = shape.default_tiles(options, kernel=kernel)
    kernels_fit = True
    if max_extra_bytes is not None:
        if max_extra_bytes < least:
            raise ValueError(
                f"max_extra_bytes must be at least {least} ({_mebibytes(least)}) for {tokens} tokens, {vocab} words "
                f"and hidden size {hidden_size}, {_mebibytes(shape.fixed_bytes)} of which no tile changes; "
                f"got {max_extra_bytes}"
            )
        left = max_extra_bytes - known_bytes
        kernels_fit = batch_invariant or not kernel or shape.peak(smallest, kernel=True) <= left
        kernel = kernel and kernels_fit
        forward_tiles = backward_tiles = smallest if batch_invariant else shape.widest(left, smallest, kernel=kernel)
    forward = Step(
        "epilogue" if kernel else "tiles",
        None if kernel else forward_tiles,
        2 * tokens * hidden_size * vocab,
        shape.forward_traffic(kernel=kernel),
        known_bytes + shape.forward_bytes(forward_tiles, kernel=kernel),
    )
    backward = None
    if any(needs):
        backward = Step(
            "blocks" if sparse else "epilogue" if kernel else "tiles",
            None if sparse else backward_tiles,
            2 * tokens * hidden_size * vocab * (1 + sum(needs)),
            shape.backward_traffic(backward_tiles, kernel=kernel),
            known_bytes + shape.backward_bytes(backward_tiles, kernel=kernel),
        )
    path = "block-sparse" if sparse else "two passes"
    return LinearPlan(
        path=path,
        reason=reason,
        forward=forward,
        backward=backward,
        least_bytes=least,
        tiles=Tiles(*map(max, forward_tiles, backward_tiles)),
        kernels_fit=kernels_fit,
    )


def check_budget(max_extra_bytes: int | None, chunk_tokens: int | None, chunk_vocab: int | None) -> None:
    if max_extra_bytes is None:
        return
    if isinstance(max_extra_bytes, bool) or not isinstance(max_extra_bytes, int):
        raise TypeError(f"max_extra_bytes must be an int or None, got {type(max_extra_bytes).__name__}")
    if chunk_tokens is not None or chunk_vocab is not None:
        raise ValueError("max_extra_bytes chooses the chunks; give it or chunk_tokens and chunk_vocab, not both")


def _sparse(shape: "_Shape", grad_tolerance: float, possible: bool) -> tuple[bool, str]:
    if grad_tolerance == 0.0:
        return False, "the exact gradient, whatever the loss"
    wanted = f"grad_tolerance {grad_tolerance}"
    if not possible or shape.rank:
        return False, f"{wanted}, but chunks, low-rank terms, fixed_shape and batch_invariant keep the backward exact"
    if shape.cuda and not shape.epilogue_applies:
        return False, f"{wanted}, but blocks are told apart by the epilogue alone, which does not apply"
    return True, f"{wanted} lets blocks be left out; costs are those of leaving none out"


@dataclass(frozen=True, kw_only=True)
class _Shape:
    tokens: int
    vocab: int
    hidden_size: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    compute_dtype: torch.dtype
    device: torch.device
    needs: tuple[bool, bool]
    masked: bool
    bias: bool
    rank: int
    transform: LogitTransform
    entropy: bool
    extras: bool
    kinds: int  # statistics that a tile of the vocabulary leaves of a token
    batch_invariant: bool
    bounded: bool = False  # the forward also makes bounds of the blocks

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def epilogue_applies(self) -> bool:
        if not self.cuda or self.rank:
            return False
        if torch.cuda.is_available() and torch.cuda.get_device_capability(self.device) < CAPABILITY:
            return False
        tokens = max(self.tokens, MIN_TOKENS) if self.batch_invariant else self.tokens
        return takes(tokens, self.hidden_size, self.compute_dtype, self.weight_dtype)

    @property
    def columns(self) -> int:
        """H and what a low-rank term adds to it, its factors split and aligned."""
        return self.hidden_size + (3 * self.rank + 8 if self.rank else 0)

    @property
    def copies(self) -> int:
        """Bytes of the hidden states' copies."""
        sizes = self.tokens * self.hidden_size
        selected = sizes * self.dtype.itemsize if self.masked else 0
        converted = sizes * self.compute_dtype.itemsize if self.dtype != self.compute_dtype else 0
        joined = self.tokens * (self.columns * self.compute_dtype.itemsize + 16 * self.rank) if self.rank else 0
        made_up = (self.tokens + MIN_TOKENS) * self.hidden_size * self.compute_dtype.itemsize
        return selected + converted + joined + (made_up if self.batch_invariant else 0)

    @property
    def fixed_bytes(self) -> int:
        """Of the backward, or without one of the forward: what tiles do not change."""
        vectors = BYTES_PER_TOKEN * (self.tokens + (MIN_TOKENS if self.batch_invariant else 0))
        vectors += LIBRARY_BYTES["cuda" if self.cuda else "cpu"]
        return vectors + self.copies + (self.sum_bytes if self.needs[0] else 0)

    @property
    def sum_bytes(self) -> int:
        """The float32 sum of the gradient of the hidden states, unless it becomes the gradient itself."""
        if self.dtype == torch.float32 and not self.masked:
            return 0
        rounded = min(self.tokens, MAX_CHUNK_TOKENS["cuda"]) * self.hidden_size * self.dtype.itemsize
        return 4 * self.tokens * (self.hidden_size + self.rank) + (rounded if self.masked else 0)

    @property
    def bound_bytes(self) -> int:
        """What a backward with a tolerance knows of the blocks, and what it makes of that."""
        tiles = -(-self.vocab // BLOCK_VOCAB)
        known = 3 * (1 + self.entropy) * self.tokens * tiles  # codes of a byte, masses and moments of two
        blocks = 96 * (self.tokens // BLOCK_TOKENS + 1) * tiles
        # Of left-out blocks: each token's means with what they are made of, and the sums of each tile of the weight.
        means = 12 * self.tokens * tiles + 16 * tiles * self.hidden_size
        if self.cuda:
            return known + blocks + means
        # Also the sums that bounds are made of with the steps to them, words that fill up the last tile, the rows of
        # one tile, and a weight that PyTorch converts before it sums.
        sums = 64 * self.tokens * tiles + 16 * min(self.tokens, MAX_CHUNK_TOKENS["cpu"]) * (-self.vocab % BLOCK_VOCAB)
        converted = 0 if self.weight_dtype == torch.float32 else 4 * self.vocab * self.hidden_size
        return known + blocks + means + sums + 12 * self.tokens * self.hidden_size + converted

    def invariant_tiles(self, options: ProjectionOptions) -> Tiles:
        sizes = (INVARIANT_TOKENS, self.vocab, self.hidden_size, self.device, options)
        return plan_tiles(*sizes, bytes_per_logit=4 if self.cuda else 12)

    def default_tiles(self, options: ProjectionOptions, *, kernel: bool) -> tuple[Tiles, Tiles]:
        sizes = (self.tokens, self.vocab, self.hidden_size, self.device, options)
        itemsize = self.compute_dtype.itemsize
        backward = plan_tiles(*sizes, bytes_per_logit=itemsize + (0 if kernel else 4) if self.cuda else 12)
        if self.batch_invariant:
            return self.invariant_tiles(options), backward
        return plan_tiles(*sizes, bytes_per_logit=4 if self.cuda else 12), backward

    def widest(self, budget: int, smallest: Tiles, *, kernel: bool) -> Tiles:
        """The widest tile whose memory fits, of as many tokens as leave room for CHUNK_ALIGNMENT words."""
        count = max(1, min(self.tokens, MAX_CHUNK_TOKENS["cuda" if self.cuda else "cpu"]))
        while count > smallest.tokens and self.peak(Tiles(count, smallest.vocab), kernel=kernel) > budget:
            count = max(count // 2, smallest.tokens)

        def tiles(steps: int) -> Tiles:
            return Tiles(count, min(smallest.vocab + steps * CHUNK_ALIGNMENT, self.vocab))

        fits, most = 0, -(-(self.vocab - smallest.vocab) // CHUNK_ALIGNMENT)
        while fits < most:
            middle = (fits + most + 1) // 2
            if self.peak(tiles(middle), kernel=kernel) <= budget:
                fits = middle
            else:
                most = middle - 1
        return tiles(fits)

    def peak(self, tiles: Tiles, *, kernel: bool) -> int:
        return max(self.forward_bytes(tiles, kernel=kernel), self.backward_bytes(tiles, kernel=kernel))

    def _steps_per_logit(self) -> int:
        """Bytes of what eager kernels make on the way to z."""
        plain = self.transform.softcap is None and self.transform.scale == 1.0
        return 4 * (self.bias + (not plain) + (self.transform.temperature != 1.0))

    def _factor_bytes(self, tiles: Tiles) -> int:
        """Copies of a tile's two factors."""
        itemsize, halves = self.compute_dtype.itemsize, self.compute_dtype != torch.float32
        per_column = (itemsize if self.weight_dtype != self.compute_dtype else 0) + (itemsize if self.rank else 0)
        per_row = 0
        if halves and not self.cuda:
            per_column, per_row = per_column + 4, 4
        return self.columns * (tiles.vocab * per_column + tiles.tokens * per_row)

    def forward_bytes(self, tiles: Tiles, *, kernel: bool) -> int:
        fixed = BYTES_PER_TOKEN * self.tokens + self.copies + LIBRARY_BYTES["cuda" if self.cuda else "cpu"]
        if kernel:
            # Or, where few tokens count, float32 tiles after all.
            of_block = 4 * self.kinds * -(-self.vocab // BLOCK_VOCAB) * SMALLEST_TOKENS
            return fixed + max(STATISTICS_BYTES, of_block, 4 * min(tiles.tokens, MIN_TOKENS) * tiles.vocab)
        per_logit = 4
        if not self.cuda:
            per_logit = 8 + self._steps_per_logit() + 8 * self.entropy + 8 * self.extras + 4
            if self.bounded:
                per_logit = max(per_logit, 16 + self._steps_per_logit() + 4 * self.entropy)
        return fixed + tiles.tokens * tiles.vocab * per_logit + self._factor_bytes(tiles)

    def backward_bytes(self, tiles: Tiles, *, kernel: bool) -> int:
        if not any(self.needs):
            return 0
        itemsize = self.compute_dtype.itemsize
        per_logit = 4 + itemsize
        if not self.cuda:
            per_logit = 8 + 2 * itemsize + self._steps_per_logit() + 12 * self.entropy
            per_logit += 4 if self.transform.softcap is not None else 0
        tile = tiles.tokens * tiles.vocab * per_logit
        if kernel:
            # Or, where few tokens have a gradient, float32 tiles after all.
            few = min(tiles.tokens, MIN_TOKENS) * tiles.vocab * per_logit
            tile = max(few, tiles.tokens * tiles.vocab * itemsize)
        bias = 4 * tiles.vocab * (4 + tiles.tokens // gemm.SUMMED_ROWS) if self.bias else 0
        return self.fixed_bytes + tile + self._factor_bytes(tiles) + self._sums_of_weight(tiles) + bias

    def _sums_of_weight(self, tiles: Tiles) -> int:
        """The float32 sum of a weight tile's gradient, unless one product makes it whole."""
        sums = 0
        one_part = self.cuda and self.tokens <= tiles.tokens and self.weight_dtype == self.compute_dtype
        if self.needs[1] and not one_part and not (self.weight_dtype == torch.float32 and not self.rank):
            sums += 4 * tiles.vocab * (self.hidden_size + self.rank)
        if self.cuda and not gemm.ADDS_TO_FLOAT32:
            sums += 4 * max(tiles.vocab, tiles.tokens) * self.hidden_size
        return sums

    def forward_traffic(self, *, kernel: bool) -> int:
        blocks = -(-self.vocab // BLOCK_VOCAB)
        beside = 8 * self.kinds * self.tokens * blocks if kernel else 8 * self.tokens * self.vocab
        return self._weight_bytes() + self._rows_bytes() + beside

    def backward_traffic(self, tiles: Tiles, *, kernel: bool) -> int:
        products = sum(self.needs)
        logit = self.compute_dtype.itemsize * (1 + products) + (0 if kernel else 8)
        moved = self._weight_bytes() * (1 + products) + self._rows_bytes() * (1 + self.needs[1])
        if self.needs[0]:
            moved += 8 * self.tokens * self.hidden_size * -(-self.vocab // tiles.vocab)
        return moved + logit * self.tokens * self.vocab

    def _weight_bytes(self) -> int:
        return self.vocab * self.hidden_size * self.weight_dtype.itemsize

    def _rows_bytes(self) -> int:
        return self.tokens * self.hidden_size * self.compute_dtype.itemsize


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
