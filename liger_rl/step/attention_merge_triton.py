"""Attention over two sets of keys as that over both, by the log-sum-exps of the scores: a Triton kernel."""

import triton
import triton.language as tl
from torch import Tensor

MERGED_TOKENS, MERGE_WARPS = 16, 4


@triton.jit(do_not_specialize=["tokens", "lse_stride"])
def _merge_kernel(
    output,  # (tokens, heads, width); what is joined comes back
    lse,  # (heads, tokens) float32 of rows of `lse_stride`; so does it here
    other_output,
    other_lse,  # contiguous
    tokens,
    lse_stride,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    inside = token < tokens
    ours = tl.load(lse + head * lse_stride + token, mask=inside, other=0.0)
    theirs = tl.load(other_lse + head * tokens + token, mask=inside, other=float("-inf"))
    has_keys = theirs > float("-inf")
    high = tl.maximum(ours, theirs)
    joint = high + tl.log(tl.exp(ours - high) + tl.exp(theirs - high))
    column = tl.arange(0, COLUMNS)
    at = (token[:, None] * HEADS + head) * WIDTH + column[None, :]
    chosen = has_keys[:, None] & (column < WIDTH)[None, :]
    mixed = tl.load(output + at, mask=chosen, other=0.0).to(tl.float32) * tl.exp(ours - joint)[:, None]
    mixed += tl.load(other_output + at, mask=chosen, other=0.0).to(tl.float32) * tl.exp(theirs - joint)[:, None]
    tl.store(output + at, mixed.to(output.dtype.element_ty), mask=chosen)
    tl.store(lse + head * lse_stride + token, joint, mask=has_keys)


def merge_attention(output: Tensor, lse: Tensor, other_output: Tensor, other_lse: Tensor) -> None:
    """Join another part's outputs (n, heads, width) and log-sum-exps (heads, n) to the first one's, in place.

    The log-sum-exp of a query without keys in the other part is -inf there.
    """
    tokens, heads, width = output.shape
    sizes = {"HEADS": heads, "WIDTH": width, "COLUMNS": triton.next_power_of_2(width), "TOKENS": MERGED_TOKENS}
    grid = triton.cdiv(tokens, MERGED_TOKENS), heads
    _merge_kernel[grid](output, lse, other_output, other_lse, tokens, lse.stride(0), **sizes, num_warps=MERGE_WARPS)
