"""`select_tokens` as one Triton kernel. The first product waits for it, and in PyTorch it takes a dozen launches."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.kernels.devices import launch_context
from liger_rl.kernels.limits import LIMITS

WARPS = 8


# Lengths differ from batch to batch. Specializing on their divisors makes nothing faster here.
@triton.jit(do_not_specialize=["tokens", "row_length"])
def _select_kernel(targets, mask, needed, positions, numbers, tokens, row_length, vocab, BLOCK: tl.constexpr):
    # There is one program, because a token's position depends on all tokens before it. 2^18 tokens take 64 steps.
    count = tl.zeros((), tl.int64)
    outside_count = tl.zeros((), tl.int64)
    improper = tl.zeros((), tl.int64)
    largest = tl.zeros((), tl.int64)
    for first in range(0, tokens, BLOCK):
        token = first + tl.arange(0, BLOCK)
        inside = token < tokens
        target = tl.load(targets + token, mask=inside, other=0).to(tl.int64)
        counted = inside & (target >= 0)
        if mask is not None:
            value = tl.load(mask + token, mask=inside, other=0)
            counted = counted & (value != 0)
            if mask.dtype.element_ty != tl.int1:
                improper += tl.sum(((value != 0) & (value != 1)).to(tl.int32))
        live = counted
        if needed is not None:
            live = live & (tl.load(needed + token // row_length, mask=inside, other=0) != 0)
        outside = counted & (target >= vocab)
        ones = live.to(tl.int32)
        tl.store(positions + count + tl.cumsum(ones, 0) - 1, token.to(tl.int64), mask=live)
        count += tl.sum(ones)
        outside_count += tl.sum(outside.to(tl.int32))
        largest = tl.maximum(largest, tl.max(tl.where(outside, target, 0)))
    tl.store(numbers, count)
    tl.store(numbers + 1, outside_count)
    tl.store(numbers + 2, largest)
    tl.store(numbers + 3, improper)


def select_tokens(
    targets: Tensor, mask: Tensor | None, vocab: int, needed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `reference.select_tokens`."""
    tokens = targets.numel()
    positions = torch.empty(tokens, dtype=torch.int64, device=targets.device)
    numbers = torch.empty(4, dtype=torch.int64, device=targets.device)
    with launch_context(targets.device):
        _select_kernel[(1,)](
            targets.contiguous(),
            None if mask is None else mask.contiguous(),
            None if needed is None else needed.contiguous(),
            positions,
            numbers,
            tokens,
            1 if needed is None else tokens // max(needed.numel(), 1),
            vocab,
            BLOCK=LIMITS.select_tokens,
            num_warps=WARPS,
        )
    return positions, numbers
