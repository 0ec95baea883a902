"""Compile every Triton kernel for a Hopper GPU, on a machine that need not have one: `python test/compile_kernels.py`.

The interpreter accepts what the compiler refuses (a variable that changes its type in a loop, say). So the functions
that launch kernels are called as they are, on CPU tensors, with a driver that only knows its target and launches that
compile and run nothing. What the kernels would have written stays as it was, which matters to none of these calls.
"""

import itertools
from dataclasses import replace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from liger_rl import KLPenalty, LogitTransform, PolicyBatch, PPOClip, TokenSum, policy_terms_triton
from liger_rl.kernels import (
    blocks_triton,
    choice_triton,
    epilogue,
    kept_triton,
    rows_triton,
    scatter_triton,
    selection_triton,
    tiles,
)
from liger_rl.kernels import triton as tile_kernels
from liger_rl.kernels.block_plan import BlockPlan
from liger_rl.kernels.kept import Kept
from liger_rl.kernels.statistics import (
    BLOCK_TOKENS,
    BLOCK_VOCAB,
    EXTRAS,
    Fold,
    TileBounds,
    TileStatistics,
    TokenGradients,
    TokenStatistics,
)
from liger_rl.policy.loss import PolicyTerms

CPU = torch.device("cpu")
TRANSFORMS = (LogitTransform(), LogitTransform(softcap=30.0, scale=0.5, temperature=0.7))
SHARED_BYTES = 227 << 10  # of a block, at most
N, H, V = 600, 64, 1000
TILES = -(-V // BLOCK_VOCAB)


class Hopper:
    """A driver without a device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def token_gradients(entropy: bool) -> TokenGradients:
    return TokenGradients(*(ones(N) for _ in range(3)), *((ones(N), ones(N)) if entropy else (None, None)))


def statistics(entropy: bool) -> TokenStatistics:
    return TokenStatistics(-ones(N), ones(N), ones(N) if entropy else None)


def tile_by_tile(transform: LogitTransform, entropy: bool) -> None:
    logits, targets = ones(N, V), torch.zeros(N, dtype=torch.long)
    extras = EXTRAS if entropy else ()
    state = Fold.start(N, CPU, entropy=entropy, extras=extras)
    tile_kernels.fold(logits, targets, 0, ones(V) if entropy else None, transform, state)
    tile_kernels.grad(logits, targets, 0, None, transform, token_gradients(entropy), logits.bfloat16())
    parts = Fold._make(None if part is None else ones(TILES, N) for part in state)
    tiles.merge(parts, state)


def whole_rows(transform: LogitTransform, entropy: bool) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        logits, targets = ones(3, 5, V, dtype=dtype), torch.zeros(3, 4, dtype=torch.long)
        mask = None if entropy else torch.ones(3, 4, dtype=torch.bool)
        found = rows_triton.fold_rows(logits, targets, mask, transform, entropy=entropy)
        upstream = (ones(12), ones(12) if entropy else None)
        rows_triton.grad_rows(logits, targets, mask, transform, found, *upstream, torch.empty_like(logits), add=entropy)
        selection_triton.select(targets, mask, V, None if mask is None else ones(3, 1))


def in_the_epilogue(transform: LogitTransform, entropy: bool) -> None:
    hidden, weight = ones(N, H, dtype=torch.bfloat16), ones(V, H, dtype=torch.bfloat16)
    targets = torch.zeros(N, dtype=torch.long)
    bias = ones(V, dtype=torch.bfloat16) if entropy else None
    extras = EXTRAS if entropy else ()
    epilogue.gemm_fold(hidden, weight, bias, targets, transform, entropy=entropy, extras=extras, bounded=True)
    epilogue.gemm_grad(hidden, weight, bias, targets, 0, transform, token_gradients(entropy))
    kept = Kept.empty(N, V, CPU, torch.bfloat16, BLOCK_VOCAB)
    epilogue.gemm_fold(hidden, weight, bias, targets, transform, entropy=entropy, kept=kept)
    kept_triton.keep(ones(N, V), 0, None, transform, kept)
    out = kept.values.view(torch.bfloat16)
    for rows in (None, torch.arange(N)):
        kept_triton.grad_kept(kept, rows, 0, targets, transform, token_gradients(entropy), ones(N), out)
    kept_triton.scale_(ones(N, H, dtype=torch.bfloat16), ones())


def scattered_rows(_transform: LogitTransform, entropy: bool) -> None:
    dtype = torch.bfloat16 if entropy else torch.float32
    scatter_triton.scatter_rows(ones(N, H), torch.arange(N), ones(N, H, dtype=dtype))


def chosen_blocks(transform: LogitTransform, entropy: bool) -> None:
    hidden, weight = ones(N, H, dtype=torch.bfloat16), ones(V, H, dtype=torch.bfloat16)
    bias = ones(V, dtype=torch.bfloat16) if entropy else None
    targets, tokens = torch.zeros(N, dtype=torch.long), token_gradients(entropy)
    known = TileBounds.empty(N, V, CPU, entropy=entropy)
    sums = TileStatistics(*(ones(TILES, N) for _ in range(2)), ones(TILES, N) if entropy else None)
    tiles.tile_bounds(sums, statistics(entropy), targets, transform, known)
    index = torch.arange(N) if entropy else None
    drawn = choice_triton.draw(index, targets, statistics(entropy), tokens)
    drawn = drawn._replace(rows=torch.zeros_like(drawn.rows))
    shares = choice_triton.shares_by(drawn, hidden, weight, bias, transform, torch.bfloat16)
    known = known._replace(share_squares=shares.squares)
    ranking = tiles.rank_tokens(known, statistics(entropy), tokens, targets, transform, 1e-3)
    order, row_blocks = torch.arange(N), -(-N // BLOCK_TOKENS)
    tiles.block_bounds(known, tokens, ranking.own, targets, order)
    keep = choice_triton.choose(ones(row_blocks, TILES), ones(dtype=torch.float64))
    choice_triton.count(keep, order.int())
    given = (known, statistics(entropy), tokens, targets, order, keep, transform)
    choice_triton.left_out_sums(*given, V, torch.bfloat16)
    keep, counts, kept = (
        torch.ones(row_blocks, TILES, dtype=torch.bool),
        torch.full((TILES,), row_blocks),
        row_blocks * TILES,
    )
    counted = torch.cat([torch.tensor([N]), counts, counts])
    given = (hidden, weight, bias, targets, tokens)
    begun = blocks_triton.begin(*given, keep, counted, transform, 1 << 20, TILES)
    plan = BlockPlan(keep, counted, counts, kept, N)
    left_out, needs = ones(N, TILES, dtype=torch.bfloat16), (True, entropy)
    blocks_triton.grad_blocks(begun, *given, plan, left_out, shares.words, ones(N, H), transform, needs)


def policy_terms(_transform: LogitTransform, entropy: bool) -> None:
    index = torch.arange(N) if entropy else slice(3, N)
    batch = PolicyBatch(
        advantages=ones(N),
        old_per_token_logps=ones(N) if entropy else None,
        ref_per_token_logps=ones(N),
        importance_ratio=ones(N) if entropy else None,
    )
    penalties = itertools.cycle((KLPenalty(), *(KLPenalty(beta=0.1, kl_estimator=name) for name in ("k1", "k2", "k3"))))
    for objective, kl in zip((*policy_terms_triton.FORMULAS, PPOClip), penalties, strict=False):
        kl = replace(kl, importance_weighted=entropy)
        terms = PolicyTerms(objective=objective(), reduction=TokenSum(), kl=kl)
        prepared = terms.prepared(terms.check(batch, torch.Size([N]), CPU), torch.float32)
        policy_terms_triton.launch(prepared, ones(N), slopes=entropy, sums=True)
        policy_terms_triton.launch(prepared, ones(N - 3), index, slopes=True, sums=False)


def main() -> None:
    compiled = set()
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> object:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        name, shared = self.fn.__qualname__, kernel.metadata.shared
        if shared > SHARED_BYTES:
            raise SystemExit(f"{name} asks for {shared} bytes of shared memory, of which there are {SHARED_BYTES}")
        compiled.add(f"{self.fn.__module__}.{name}")
        return kernel

    triton.runtime.driver.set_active(Hopper())
    JITFunction.run = compile_only
    parts = (tile_by_tile, whole_rows, in_the_epilogue, chosen_blocks, scattered_rows, policy_terms)
    for part, transform, entropy in itertools.product(parts, TRANSFORMS, (False, True)):
        part(transform, entropy)
    if epilogue.gluon_is_known():
        from liger_rl.kernels import overlapped

        epilogue.overlapped_for = lambda device: overlapped
        # All off or all on: they take twice as long to compile as the others.
        for transform, entropy in zip(TRANSFORMS, (False, True), strict=True):
            in_the_epilogue(transform, entropy)
    print(*sorted(compiled), sep="\n")


if __name__ == "__main__":
    main()
