"""The gradient of hidden alone from what a forward keeps, without a pass over it; Triton kernels around one product.

With x the logits, z their transform, d_v = dz_v/dx_v over its constant factor (1, with a softcap 1 - tanh^2), `slope`
that factor and g = dL/dlogp, an entropy without a gradient leaves

    dL/dx_v = slope g d_v (1[v = y] - p_v),

which but for the target y is a factor of the token times exp(z_v) d_v. So the epilogue of the product that makes the
logits stores, in the dtype of the products,

    E_v = exp(z_v - r) d_v,

and once lse and g are known, E_y is set to 0 and with H the hidden states and W the weight

    dL/dH = slope (-g exp(r - lse) E @ W + g (1 - p_y) d_y W_y).

The reference r must be known before the product: it is z_y of a float32 product of its own. How it is rounded does not
matter, because it cancels. As lse - r = -logp >= 0, the exponent of bfloat16 has room for E unless the token is next to
impossible, or banned, with r = -inf. What is stored has therefore the factor exp(min(peak - r, limit)) in place of
exp(peak - r), with the finite `peak` of a word's tile; where lse - r is above the limit this is undone with the peaks,
and r replaced by lse. Rounding can put r above lse, by more than the limit only with logits of 1e7 or more: E is then
as good as 0, and its factor 1, because exp(r - lse) may be inf.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.kernels import gemm
from liger_rl.kernels.kept import Kept
from liger_rl.kernels.statistics import TokenGradients
from liger_rl.kernels.transform import LogitTransform
from liger_rl.kernels.triton import heat_of, on, transform_constants, transformed

BLOCK, WARPS = 1024, 4  # of hidden
# Of the vocabulary, and how many programs share a row. Nearly all rows are within the limit and have next to nothing to
# be done, so programs are small.
SETTLED_WORDS, SETTLE_PROGRAMS, SETTLE_WARPS = 1024, 8, 1


@triton.jit
def _references_kernel(
    hidden,
    hidden_stride,
    weight,
    weight_stride,
    bias,
    targets,
    references,
    size,
    gain,
    cap,
    inverse,
    inverse_rest,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    HEATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row).to(tl.int64)
    terms = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, size, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < size
        h = tl.load(hidden + row * hidden_stride + column, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + target * weight_stride + column, mask=inside, other=0.0).to(tl.float32)
        terms += h * w
    logit = tl.sum(terms)
    if bias is not None:
        logit += tl.load(bias + target).to(tl.float32)
    z, _ = transformed(logit, gain, cap, inverse, inverse_rest, SCALED, CAPPED, HEATED)
    tl.store(references + row, z)


@triton.jit
def _settle_kernel(
    values,
    value_stride,
    peaks,
    peak_stride,
    targets,
    references,
    lse_of,
    columns,
    limit,
    PROGRAMS: tl.constexpr,
    TILES: tl.constexpr,
    WORDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    values += row * value_stride
    target = tl.load(targets + row)
    reference, lse = tl.load(references + row), tl.load(lse_of + row)
    # No peak is above lse, so every row with a tile at the limit is among these.
    if lse - reference > limit:
        for first in range(tl.program_id(1) * TILES, tl.cdiv(columns, WORDS), PROGRAMS * TILES):
            tile = first + tl.arange(0, TILES)
            column = tile[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
            inside = column < columns
            known = tile * WORDS < columns
            peak = tl.load(peaks + tile.to(tl.int64) * peak_stride + row, mask=known, other=0.0)
            stored = tl.load(values + column, mask=inside, other=0.0).to(tl.float32)
            factor = tl.exp(peak - lse - tl.minimum(peak - reference, limit))
            settled = tl.where(column == target, 0.0, stored * factor[:, None])
            tl.store(values + column, settled.to(values.dtype.element_ty), mask=inside)
    elif tl.program_id(1) == 0:
        tl.store(values + target, 0.0)


@triton.jit(do_not_specialize=["rows"])
def _rows_kernel(
    products,  # (PARTS, rows, size), contiguous
    rows,
    weight,
    weight_stride,
    index,
    out,
    out_stride,
    targets,
    references,
    lse_of,
    grad_logps,
    at_target,
    size,
    limit,
    slope,  # scale / temperature
    heat,  # temperature / softcap
    CAPPED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    reference = tl.load(references + row)
    below = tl.load(lse_of + row) - reference
    scale = -tl.load(grad_logps + row) * tl.where(tl.abs(below) > limit, 1.0, tl.exp(-below))
    scale_of_target = tl.load(at_target + row)
    if CAPPED:
        tanh = reference * heat
        scale_of_target *= 1.0 - tanh * tanh
    product = tl.load(products + row * size + column, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        product += tl.load(products + (part * rows + row) * size + column, mask=inside, other=0.0)
    target = tl.load(targets + row).to(tl.int64)
    w = tl.load(weight + target * weight_stride + column, mask=inside, other=0.0).to(tl.float32)
    grad = slope * (scale * product + scale_of_target * w)
    place = row
    if index is not None:
        place = tl.load(index + row)
    tl.store(out + place * out_stride + column, grad.to(out.dtype.element_ty), mask=inside)


def relative(
    kept: Kept,  # (n, V)
    hidden: Tensor,  # (n, H)
    weight: Tensor,  # (V, H) of the same dtype
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (n,)
    transform: LogitTransform,
) -> Kept:
    """The same memory for values in the dtype of `hidden`, relative to each token's reference, which is made here."""
    n, size = hidden.shape
    kept = kept.relative_to(torch.empty(n, dtype=torch.float32, device=hidden.device), hidden.dtype)
    if n > 0:
        with on(hidden.device):
            _references_kernel[(n,)](
                hidden,
                hidden.stride(0),
                weight,
                weight.stride(0),
                None if bias is None else bias.contiguous(),
                targets.contiguous(),
                kept.references,
                size,
                **transform_constants(transform),
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
    return kept


def grad_hidden(
    kept: Kept,  # (n, V) relative to references, as `epilogue.gemm_fold` leaves it; changed where the formula says so
    weight: Tensor,  # (V, H) of the values' dtype
    targets: Tensor,  # (n,)
    transform: LogitTransform,
    tokens: TokenGradients,  # (n,) each, without a gradient of the entropy
    index: Tensor | None,  # (n,) rows of `out`, without repeats; None is the first n
    out: Tensor,  # (N, H) any float dtype, its last dimension contiguous; written
) -> None:
    """2 n H V, and up to gemm.MAX_PARTS times n float32 rows of H."""
    assert kept.references is not None
    assert tokens.grad_entropy is None
    n, vocab = kept.values.shape
    size = weight.shape[1]
    if n == 0 or size == 0:
        return
    parts = gemm.parts_for(n, size, out.device)
    with on(out.device):
        _settle_kernel[(n, SETTLE_PROGRAMS)](
            kept.values,
            kept.values.stride(0),
            kept.peaks,
            kept.peaks.stride(0),
            targets.contiguous(),
            kept.references,
            tokens.lse,
            vocab,
            kept.limit,
            PROGRAMS=SETTLE_PROGRAMS,
            TILES=max(1, SETTLED_WORDS // kept.words),
            WORDS=kept.words,
            num_warps=SETTLE_WARPS,
        )
        _rows_kernel[(n, triton.cdiv(size, BLOCK))](
            gemm.write_parts(kept.values, weight, parts),
            n,
            weight,
            weight.stride(0),
            index,
            out,
            out.stride(0),
            targets.contiguous(),
            kept.references,
            tokens.lse,
            tokens.grad_logps.contiguous(),
            tokens.at_target.contiguous(),
            size,
            kept.limit,
            slope=float(transform.scale / transform.temperature),
            heat=heat_of(transform),
            CAPPED=transform.softcap is not None,
            PARTS=parts,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
