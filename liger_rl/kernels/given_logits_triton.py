"""Statistics and gradients of whole rows of given logits as Triton kernels: one launch each, the logits read once.

The signatures and rules are those of `liger_rl.kernels.given_logits`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.kernels.statistics import TokenStatistics
from liger_rl.kernels.tile_triton import LOWEST_LOG_PROBABILITY, on, transform_constants, transformed
from liger_rl.kernels.transform import LogitTransform

# Of 256 to 16384 words and 1 to 32 warps on an H200 at V = 12800 in bfloat16, 63 and 103 us where reading and writing
# alone are 39 and 88: few warps make sums over a block cheap, and many rows are in flight.
BLOCK, WARPS = 1024, 2
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _counts(targets, mask, token, inside, columns):
    """-> the token's target, and whether it counts."""
    target = tl.load(targets + token, mask=inside, other=-1).to(tl.int64)
    counts = (target >= 0) & (target < columns)
    if mask is not None:
        counts = counts & (tl.load(mask + token, mask=inside, other=0) != 0)
    return target, counts


@triton.jit
def _folded(z, peak, total, moment, WITH_MOMENT: tl.constexpr):
    """-> the running peak, sum of exponentials and moment with one block more; see `Fold`."""
    new_peak = tl.maximum(peak, tl.max(z))
    kept = tl.exp(peak - new_peak)
    shifted = z - new_peak
    exp = tl.exp(shifted)
    if WITH_MOMENT:
        moment = kept * (moment + (peak - new_peak) * total)
        moment += tl.sum(exp * tl.maximum(shifted, LOWEST_LOG_PROBABILITY))
    return new_peak, total * kept + tl.sum(exp), moment


@triton.jit
def _fold_kernel(
    logits,
    batch_stride,  # elements between logits[b] and logits[b + 1], and between two positions of one b
    row_stride,
    targets,  # (batch, length)
    mask,
    logps,  # (batch * length,) each
    lses,
    entropies,
    length,
    columns,
    gain,
    cap,
    inverse,
    inverse_rest,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    HEATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    target, counts = _counts(targets, mask, token, True, columns)
    if not counts:
        tl.store(logps + token, 0.0)
        tl.store(lses + token, float("inf"))
        if entropies is not None:
            tl.store(entropies + token, 0.0)
    else:
        logits += token // length * batch_stride + token % length * row_stride
        selected = tl.load(logits + target).to(tl.float32)
        at_target, _selected_square = transformed(selected, gain, cap, inverse, inverse_rest, SCALED, CAPPED, HEATED)
        peak = LOWEST
        total = 0.0
        moment = 0.0
        whole = columns // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            x = tl.load(logits + start + tl.arange(0, BLOCK)).to(tl.float32)
            z, _ = transformed(x, gain, cap, inverse, inverse_rest, SCALED, CAPPED, HEATED)
            peak, total, moment = _folded(z, peak, total, moment, entropies is not None)
        # What is left of the row apart, so that the loop needs no mask.
        for start in range(whole, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(logits + column, mask=column < columns, other=0.0).to(tl.float32)
            z, _ = transformed(x, gain, cap, inverse, inverse_rest, SCALED, CAPPED, HEATED)
            # Only now, so that a softcap cannot make the lanes past the end finite again.
            z = tl.where(column < columns, z, float("-inf"))
            peak, total, moment = _folded(z, peak, total, moment, entropies is not None)
        log_sum = tl.log(total)
        # Around the peak, not around lse: see `Fold.finish`.
        logp = (at_target - peak) - log_sum
        tl.store(logps + token, tl.where(logp > 0.0, 0.0, logp))
        tl.store(lses + token, peak + log_sum)
        if entropies is not None:
            entropy = log_sum - moment / total
            tl.store(entropies + token, tl.where(entropy < 0.0, 0.0, entropy))


@triton.jit
def _grad_kernel(
    logits,
    batch_stride,
    row_stride,
    out,
    out_batch_stride,
    out_row_stride,
    targets,  # (batch, length)
    mask,
    logps,  # (batch * length,) each
    lses,
    entropies,
    grad_logps,
    grad_entropies,
    positions,  # of a batch, `length` of which have tokens
    length,
    columns,
    gain,
    cap,
    inverse,
    inverse_rest,
    slope,  # scale / temperature
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    HEATED: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    batch, position = row // positions, row % positions
    token = batch * length + position
    here = position < length
    target, counts = _counts(targets, mask, token, here, columns)
    counts = counts & here
    g = tl.load(grad_logps + token, mask=here, other=0.0)
    wanted = g != 0.0
    e = 0.0
    if grad_entropies is not None:
        e = tl.load(grad_entropies + token, mask=here, other=0.0)
        wanted = wanted | (e != 0.0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    out += batch * out_batch_stride + position * out_row_stride
    if counts & wanted:
        logits += batch * batch_stride + position * row_stride
        x = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
        z, square = transformed(x, gain, cap, inverse, inverse_rest, SCALED, CAPPED, HEATED)
        log_p = z - tl.load(lses + token)
        p = tl.exp(log_p)
        # 1 - p from the forward's logp, as in `TokenGradients.of`.
        logp = tl.load(logps + token)
        grad = tl.where(column == target, g * _one_minus_exp(logp), -g * p)
        if grad_entropies is not None:
            log_p = tl.maximum(log_p, LOWEST_LOG_PROBABILITY)
            grad -= e * p * (log_p + tl.load(entropies + token))
        grad *= slope
        if CAPPED:
            grad *= 1.0 - square
        if ADD:
            grad += tl.load(out + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + column, grad.to(out.dtype.element_ty), mask=inside)
    elif not ADD:
        tl.store(out + column, tl.zeros((BLOCK,), out.dtype.element_ty), mask=inside)


@triton.jit
def _one_minus_exp(x):
    """1 - exp(x) for x <= 0, to float32's precision also near 0."""
    # The series' next term is under 2^-30 of the sum for |x| < 1/4; beyond, the difference loses two bits at most.
    tail = 0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * (1.0 / 120.0 + x * (1.0 / 720.0 + x * (1.0 / 5040.0)))))
    return tl.where(x > -0.25, -x * (1.0 + x * tail), 1.0 - tl.exp(x))


def fold_rows(
    logits: Tensor, targets: Tensor, mask: Tensor | None, transform: LogitTransform, *, entropy: bool
) -> TokenStatistics:
    """As `rows.fold_rows`; the last dimension of `logits` must be contiguous."""
    assert logits.stride(-1) == 1
    n, columns = targets.numel(), logits.shape[-1]
    logps, lses, *entropies = torch.empty(2 + entropy, n, dtype=torch.float32, device=logits.device)
    out = TokenStatistics(logps, lses, entropies[0] if entropies else None)
    if n == 0:
        return out
    _, length, strides = _layout(logits, targets)
    block = min(BLOCK, triton.next_power_of_2(columns))
    with on(logits.device):
        _fold_kernel[(n,)](
            logits,
            *strides,
            targets.contiguous(),
            None if mask is None else mask.contiguous(),
            *out[:3],
            length,
            columns,
            **transform_constants(transform),
            BLOCK=block,
            num_warps=WARPS,
        )
    return out


def grad_rows(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: LogitTransform,
    statistics: TokenStatistics,
    grad_logps: Tensor,
    grad_entropy: Tensor | None,
    out: Tensor,
    *,
    add: bool,
) -> None:
    """As `rows.grad_rows`; the last dimensions of `logits` and `out` must be contiguous."""
    assert logits.stride(-1) == 1
    assert out.stride(-1) == 1
    rows, columns = logits.shape[:-1].numel(), logits.shape[-1]
    if targets.numel() == 0:
        if not add:
            out.zero_()
        return
    positions, length, strides = _layout(logits, targets)
    block = min(BLOCK, triton.next_power_of_2(columns))
    with on(logits.device):
        _grad_kernel[(rows, triton.cdiv(columns, block))](
            logits,
            *strides,
            out,
            *_layout(out, targets)[2],
            targets.contiguous(),
            None if mask is None else mask.contiguous(),
            statistics.logps,
            statistics.lse,
            None if grad_entropy is None else statistics.entropy,
            grad_logps.contiguous(),
            None if grad_entropy is None else grad_entropy.contiguous(),
            positions,
            length,
            columns,
            slope=transform.scale / transform.temperature,
            **transform_constants(transform),
            ADD=add,
            BLOCK=block,
            num_warps=WARPS,
        )


def _layout(logits: Tensor, targets: Tensor) -> tuple[int, int, tuple[int, int]]:
    """-> positions and tokens of each batch, and the strides of (batch, position); N rows are one batch."""
    if logits.dim() == 2:
        return logits.shape[0], logits.shape[0], (0, logits.stride(0))
    return logits.shape[1], targets.shape[1], (logits.stride(0), logits.stride(1))
