"""`keep_largest` of `reference` as a Triton kernel."""

import triton
import triton.language as tl
from torch import Tensor

from liger_rl.kernels.devices import on
from liger_rl.kernels.reference import ID_BITS, LARGEST_ID, LEAST_KEY
from liger_rl.kernels.softmax import transformed
from liger_rl.kernels.tile_triton import loaded
from liger_rl.kernels.transform import LogitSteps, LogitTransform

BLOCK, WARPS = 1024, 1  # one warp, because maxima within a warp need no barrier
LEAST, MOST = tl.constexpr(LEAST_KEY), tl.constexpr(-1 - LEAST_KEY)
BITS, LAST_ID = tl.constexpr(ID_BITS), tl.constexpr(LARGEST_ID)


@triton.jit(do_not_specialize=["first", "columns"])
def _largest_kernel(
    logits,
    row_stride,
    bias,
    keys,  # (n, COUNT) int64, updated
    first,
    columns,
    steps,  # LogitSteps
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,  # a power of two
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    logits += token * row_stride
    place = tl.arange(0, SIZE)
    kept_keys = tl.load(keys + token * COUNT + place, mask=place < COUNT, other=MOST)
    least_key = tl.min(kept_keys)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        z, _square = transformed(loaded(logits, bias, column, inside), steps)
        if steps.temperatures is not None:
            z /= tl.load(steps.temperatures + token)
        bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        block_keys = (ordered.to(tl.int64) << BITS) | (LAST_ID - (column.to(tl.int64) + first))
        block_keys = tl.where(inside, block_keys, LEAST)
        largest_key = tl.max(block_keys)
        # Few blocks enter this loop, because the least kept key soon is large.
        while largest_key > least_key:
            kept_keys = tl.where(kept_keys == least_key, largest_key, kept_keys)
            least_key = tl.min(kept_keys)
            block_keys = tl.where(block_keys == largest_key, LEAST, block_keys)
            largest_key = tl.max(block_keys)
    tl.store(keys + token * COUNT + place, kept_keys, mask=place < COUNT)


def keep_largest(logits: Tensor, first: int, bias: Tensor | None, transform: LogitTransform, keys: Tensor) -> None:
    """As `reference.keep_largest`; the last dimensions must be contiguous."""
    assert logits.stride(-1) == 1
    assert keys.is_contiguous()
    n, count = keys.shape
    if n == 0:
        return
    with on(logits.device):
        _largest_kernel[(n,)](
            logits,
            logits.stride(0),
            None if bias is None else bias.contiguous(),
            keys,
            first,
            logits.shape[1],
            LogitSteps.of(transform),
            COUNT=count,
            SIZE=triton.next_power_of_2(count),
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
