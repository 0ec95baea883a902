"""What two passes of the fused head hold in memory and move through it, from shapes alone."""

from dataclasses import dataclass

import torch

from liger_rl.head.engines.invariant import INVARIANT_TOKENS
from liger_rl.head.engines.two_pass import (
    CHUNK_ALIGNMENT,
    MAX_CHUNK_TOKENS,
    ProjectionOptions,
    Tiles,
    kind_of,
    plan_tiles,
)
from liger_rl.kernels import gemm, scatter
from liger_rl.kernels.devices import (
    BLOCKS_BYTES,
    MIN_TOKENS,
    STATISTICS_BYTES,
    call_lacks,
    compiles,
    gpu_lacks,
    gpu_of,
)
from liger_rl.kernels.statistics import BLOCK_TOKENS, BLOCK_VOCAB, SAMPLES

BYTES_PER_TOKEN = 256  # statistics, their gradients, indices, and what comes and goes while they are made
SMALLEST_TOKENS = 128  # of a tile that a budget leads to
LIBRARY_BYTES = {"cuda": 64 << 20, "cpu": 0}  # cuBLAS's own workspace, at most


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """A call without its tensors."""

    tokens: int
    vocab: int
    hidden_size: int
    dtype: torch.dtype  # of the hidden states
    weight_dtype: torch.dtype
    device: torch.device
    needs: tuple[bool, bool]  # gradients of the hidden states, and of the weight or what else the head has
    masked: bool  # some tokens may be masked, or have no gradient
    bias: bool
    rank: int  # columns of low-rank terms together
    in_place: bool  # the weight's gradient is added to a float32 tensor of the caller's
    options: ProjectionOptions
    bounded: bool = False  # the forward also makes bounds of the blocks
    contiguous: tuple[bool, bool] = (True, True)  # the hidden states, and the weight
    budgeted: bool = False  # tiles, and the memory of blocks with them, come from a budget
    aligned: bool = True  # the weight's rows start where the product of our own can read them

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def itemsize(self) -> int:
        return self.options.compute_dtype.itemsize

    @property
    def converts_rows(self) -> bool:
        return self.dtype != self.options.compute_dtype

    @property
    def copies_weight(self) -> bool:
        """Tile by tile, into another dtype or into strides that products take."""
        return self.weight_dtype != self.options.compute_dtype or not self.contiguous[1]

    @property
    def widens(self) -> bool:
        """Factors of products become float32 first."""
        return not self.cuda and self.itemsize < 4

    @property
    def compiled(self) -> bool:
        """Kernels are Triton's, which make no tensor on the way, and not PyTorch's."""
        return compiles(self.device)

    @property
    def epilogue_lacks(self) -> str | None:
        """What the product with its work in the epilogue would need; None where it applies."""
        if not self.cuda:
            return "a GPU"
        lacks = gpu_lacks(gpu_of(self.device))
        if lacks is None and self.rank:
            lacks = "a head without low_rank terms"
        if lacks is None:
            tokens = max(self.tokens, MIN_TOKENS) if self.options.batch_invariant else self.tokens
            lacks = call_lacks(tokens, self.hidden_size, self.options.compute_dtype, self.weight_dtype)
        if lacks is None and not self.aligned:
            lacks = "rows of the weight that start at multiples of 16 bytes"
        return lacks

    @property
    def epilogue_applies(self) -> bool:
        return self.epilogue_lacks is None

    @property
    def columns(self) -> int:
        """H and what a low-rank term adds to it, its factors split and aligned."""
        return self.hidden_size + (3 * self.rank + 8 if self.rank else 0)

    @property
    def kinds(self) -> int:
        """Statistics that a tile of the vocabulary leaves of a token."""
        return 2 + self.options.entropy + len(self.options.extras)

    @property
    def vectors(self) -> int:
        """Of the tokens' numbers, of contiguous hidden states where the call's are not, and of libraries."""
        rows = 0 if self.contiguous[0] else self.tokens * self.hidden_size * self.dtype.itemsize
        return BYTES_PER_TOKEN * self.tokens + rows + LIBRARY_BYTES[kind_of(self.device)]

    @property
    def relaid_bytes(self) -> int:
        """Of the weight's gradient, which autograd copies to the strides of a leaf."""
        return 0 if self.contiguous[1] or not self.needs[1] or self.in_place else self.weight_bytes

    @property
    def statistics_bytes(self) -> int:
        """Of the vocabulary tiles' statistics in the epilogue."""
        return max(STATISTICS_BYTES, 4 * self.kinds * -(-self.vocab // BLOCK_VOCAB) * SMALLEST_TOKENS)

    @property
    def copies(self) -> int:
        """Bytes of the hidden states' copies."""
        sizes = self.tokens * self.hidden_size
        selected = sizes * self.dtype.itemsize if self.masked or self.bounded else 0  # bounds put rows in order
        converted = sizes * self.itemsize if self.converts_rows else 0
        joined = self.tokens * (self.columns * self.itemsize + 16 * self.rank) if self.rank else 0
        return selected + converted + joined

    @property
    def fixed_bytes(self) -> int:
        """Of the backward, or without one of the forward: what tiles do not change."""
        if any(self.needs):
            return self.vectors + self.copies + (self.sum_bytes if self.needs[0] else 0)
        return self.vectors + self.copies + self.made_up

    @property
    def made_up(self) -> int:
        """Of rows of zeros, and of the vectors beside them, in a forward of fixed shapes."""
        if not self.options.batch_invariant:
            return 0
        rows = self.tokens + MIN_TOKENS
        return rows * self.hidden_size * self.itemsize + BYTES_PER_TOKEN * MIN_TOKENS

    @property
    def sum_bytes(self) -> int:
        """The float32 sum of the gradient of the hidden states, unless it becomes the gradient itself."""
        if self.dtype == torch.float32 and not self.masked and not self.bounded:  # bounds put rows in order
            return 0
        rounded = min(self.tokens, scatter.ROWS) * self.hidden_size * self.dtype.itemsize
        return 4 * self.tokens * (self.hidden_size + self.rank) + (rounded if self.masked and not self.compiled else 0)

    @property
    def bound_bytes(self) -> int:
        """What a backward with a tolerance knows of the blocks, and what it makes of that."""
        tiles = -(-self.vocab // BLOCK_VOCAB)
        known = 3 * (1 + self.options.entropy) * self.tokens * tiles  # codes of a byte, masses and moments of two
        blocks = 96 * (self.tokens // BLOCK_TOKENS + 1) * tiles
        # Of left-out blocks: each token's sums with what they are made of, the shares of the words, and the weight's
        # rows added up by them; or before, what the shares are made of.
        left_out = 12 * self.tokens * tiles + 16 * tiles * self.hidden_size + 8 * self.vocab
        sampled = SAMPLES * (4 * self.vocab + 2 * self.itemsize * self.hidden_size)
        return known + max(blocks + left_out, 16 * tiles * self.hidden_size + 8 * self.vocab + sampled)

    @property
    def smallest_tiles(self) -> Tiles:
        return Tiles(min(SMALLEST_TOKENS, max(self.tokens, 1)), min(CHUNK_ALIGNMENT, self.vocab))

    def default_tiles(self, *, kernel: bool) -> tuple[Tiles, Tiles]:
        """Of the forward and of the backward."""
        per_gradient = self.itemsize + (0 if kernel else 4)
        backward = self._tiles(self.tokens, per_gradient if self.compiled else 12)
        return self._forward_tiles() or self._tiles(self.tokens, 4 if self.compiled else 12), backward

    def _forward_tiles(self) -> Tiles | None:
        """Those that nothing but the head may change."""
        return self._tiles(INVARIANT_TOKENS, 4 if self.compiled else 12) if self.options.batch_invariant else None

    def _tiles(self, tokens: int, bytes_per_logit: int) -> Tiles:
        sizes = (tokens, self.vocab, self.hidden_size, self.device, self.options)
        return plan_tiles(*sizes, bytes_per_logit=bytes_per_logit)

    def budget_tiles(self, budget: int, *, kernel: bool) -> tuple[Tiles, Tiles]:
        """The widest whose memory fits, of as many tokens as leave room for CHUNK_ALIGNMENT words."""
        smallest = self.smallest_tiles
        count = max(1, min(self.tokens, MAX_CHUNK_TOKENS[kind_of(self.device)]))
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
        return self._forward_tiles() or tiles(fits), tiles(fits)

    def peak(self, tiles: Tiles, *, kernel: bool) -> int:
        forward = self.forward_bytes(self._forward_tiles() or tiles, kernel=kernel)
        return max(forward, self.backward_bytes(tiles, kernel=kernel))

    def _steps_per_logit(self) -> int:
        """Bytes of what eager kernels make on the way to z."""
        transform = self.options.transform
        plain = transform.softcap is None and transform.scale == 1.0
        return 4 * (self.bias + (not plain) + (transform.temperature != 1.0))

    def _factor_bytes(self, tiles: Tiles) -> int:
        """Copies of a tile's two factors."""
        per_column = self.itemsize * (self.copies_weight + (self.rank > 0)) + 4 * self.widens
        return self.columns * (tiles.vocab * per_column + tiles.tokens * 4 * self.widens)

    @property
    def least_bytes(self) -> int:
        """Of two passes without blocks, in the smallest tiles."""
        return self.peak(self.smallest_tiles, kernel=False)

    def forward_bytes(self, tiles: Tiles, *, kernel: bool) -> int:
        fixed = self.vectors + self.copies + self.made_up
        if kernel:
            # Or, where few tokens count, float32 tiles after all.
            return fixed + max(self.statistics_bytes, 4 * min(tiles.tokens, MIN_TOKENS) * tiles.vocab)
        per_logit = 4
        if not self.compiled:
            entropy, extras = self.options.entropy, len(self.options.extras) > 0
            per_logit = 8 + self._steps_per_logit() + 8 * entropy + 8 * extras + 4
            if self.bounded:
                per_logit = max(per_logit, 16 + self._steps_per_logit() + 4 * entropy)
        return fixed + tiles.tokens * tiles.vocab * per_logit + self._factor_bytes(tiles)

    def backward_bytes(self, tiles: Tiles, *, kernel: bool) -> int:
        if not any(self.needs):
            return 0
        per_logit = 4 + self.itemsize
        if not self.compiled:
            per_logit = 8 + 2 * self.itemsize + self._steps_per_logit() + 12 * self.options.entropy
            per_logit += 4 if self.options.transform.softcap is not None else 0
        tile = tiles.tokens * tiles.vocab * per_logit
        if kernel:
            # Or, where few tokens have a gradient, float32 tiles after all.
            few = min(tiles.tokens, MIN_TOKENS) * tiles.vocab * per_logit
            tile = max(few, tiles.tokens * tiles.vocab * self.itemsize)
        bias = 4 * tiles.vocab * (4 + tiles.tokens // gemm.SUMMED_ROWS) if self.bias else 0
        dense = tile + self._factor_bytes(tiles) + self._sums_of_weight(tiles) + bias
        return max(self.fixed_bytes + max(dense, self._blocks_bytes(tiles)), self.vectors + self.relaid_bytes)

    def _blocks_bytes(self, tiles: Tiles) -> int:
        """Of the kept blocks of a gradient at a time, one tile of the vocabulary at least."""
        if not (self.bounded and self.cuda):
            return 0
        of_tile = -(-self.tokens // BLOCK_TOKENS) * BLOCK_TOKENS * BLOCK_VOCAB * self.itemsize
        most = min(BLOCKS_BYTES, tiles.tokens * tiles.vocab * self.itemsize) if self.budgeted else BLOCKS_BYTES
        return max(of_tile, min(most, of_tile * -(-self.vocab // BLOCK_VOCAB)))

    def _sums_of_weight(self, tiles: Tiles) -> int:
        """The float32 sum of a weight tile's gradient, unless one product makes it whole."""
        sums = 0
        one_part = self.cuda and self.tokens <= tiles.tokens and self.weight_dtype == self.options.compute_dtype
        in_float32 = (self.in_place or self.weight_dtype == torch.float32) and not self.rank
        if self.needs[1] and not one_part and not in_float32:
            sums += 4 * tiles.vocab * (self.hidden_size + self.rank)
        if self.cuda and not gemm.ADDS_TO_FLOAT32:
            sums += 4 * max(tiles.vocab, tiles.tokens) * self.hidden_size
        return sums

    def forward_traffic(self, *, kernel: bool) -> int:
        blocks = -(-self.vocab // BLOCK_VOCAB)
        beside = 8 * self.kinds * self.tokens * blocks if kernel else 8 * self.tokens * self.vocab
        return self.weight_bytes + self.rows_bytes + beside

    def backward_traffic(self, tiles: Tiles, *, kernel: bool) -> int:
        products = sum(self.needs)
        logit = self.itemsize * (1 + products) + (0 if kernel else 8)
        moved = self.weight_bytes * (1 + products) + self.rows_bytes * (1 + self.needs[1])
        if self.needs[0]:
            moved += 8 * self.tokens * self.hidden_size * -(-self.vocab // tiles.vocab)
        return moved + logit * self.tokens * self.vocab

    @property
    def weight_bytes(self) -> int:
        return self.vocab * self.hidden_size * self.weight_dtype.itemsize

    @property
    def rows_bytes(self) -> int:
        return self.tokens * self.hidden_size * self.itemsize
