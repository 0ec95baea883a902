"""Fold, gradient and largest of rows of logits as Triton kernels: one read of the logits, any number of columns.

The rows are those of a float32 tile, a part of the vocabulary, or whole rows of given logits. The signatures and
formulas are those of `liger_rl.kernels.reference`. Rows go on grid axis 0, which is not limited to 65535 as the others
are, and row offsets are int64, because rows times columns passes 2^31.
"""

from collections.abc import Collection

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_rl.kernels.devices import launch_context
from liger_rl.kernels.softmax_triton import (
    LOWEST,
    fold_block,
    gradient,
    log_probabilities,
    one_minus_exp,
    times_derivative,
    token_terms,
    transform_logits,
    with_uniform,
)
from liger_rl.kernels.statistics import Fold, TokenGradients, TokenStatistics, map_fields
from liger_rl.kernels.transform import LogitSteps, LogitTransform

# Of 256 to 16384 vocabulary entries and 1 to 32 warps on an H200, with whole rows of V = 12800 in bfloat16: 63 and 103
# us where reading and writing alone are 39 and 88. Few warps make sums over a block cheap, and many rows are in flight.
BLOCK, WARPS = 1024, 2
# A product that is fused into a difference is not rounded: exp(z - peak) of the peak itself would not be 1.
EXACT = {"enable_fp_fusion": False}


@triton.jit
def _target(targets, mask, token, inside, first, columns):
    """-> column of the token's target, and whether it counts: it is in the tile, and the mask is nonzero."""
    column = tl.load(targets + token, mask=inside, other=-1).to(tl.int64) - first
    counts = (column >= 0) & (column < columns)
    if mask is not None:
        counts = counts & (tl.load(mask + token, mask=inside, other=0) != 0)
    return column, counts


@triton.jit
def load_logits(logits, bias, column, inside):
    """-> x = logits + bias in float32, 0 where `inside` is false; `inside` may be None."""
    x = tl.load(logits + column, mask=inside, other=None if inside is None else 0.0).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + column, mask=inside, other=None if inside is None else 0.0).to(tl.float32)
    return x


@triton.jit
def _fold_columns(
    logits, bias, column, inside, target, steps, peak, total, moment, sum_sq, sum_logits, peak_before,
    MOMENT: tl.constexpr, SUM_SQ: tl.constexpr, SUM_LOGITS: tl.constexpr, PEAK_BEFORE: tl.constexpr,
):  # fmt: skip
    """-> the running numbers of a `Fold`, without the target, after one more block."""
    z, _ = transform_logits(load_logits(logits, bias, column, inside), steps)
    if SUM_LOGITS:
        sum_logits += tl.sum(z if inside is None else tl.where(inside, z, 0.0))
    if inside is not None:
        # Only now, so that a softcap cannot make the lanes past the end finite again.
        z = tl.where(inside, z, float("-inf"))
    if PEAK_BEFORE:
        peak_before = tl.maximum(peak_before, tl.max(tl.where(column < target, z, float("-inf"))))
    peak, total, moment, sum_sq = fold_block(z, peak, total, moment, sum_sq, MOMENT, SUM_SQ)
    return peak, total, moment, sum_sq, sum_logits, peak_before


@triton.jit(do_not_specialize=["first", "length"])
def _fold_kernel(
    logits,
    batch_stride,  # elements between logits[b] and logits[b + 1], and between two positions of one b
    row_stride,
    targets,  # (batch, length)
    mask,
    bias,
    state,  # `Fold` of a part of the vocabulary, (batch * length,) each, updated; None for whole rows
    out,  # `TokenStatistics` of whole rows, (batch * length,) each, written; None for a part
    length,
    columns,
    first,
    steps,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    MOMENT: tl.constexpr = state.moment is not None if PART else out.entropy is not None
    SUM_SQ: tl.constexpr = state.sum_sq_exp is not None if PART else False
    SUM_LOGITS: tl.constexpr = state.sum_logits is not None if PART else False
    PEAK_BEFORE: tl.constexpr = state.peak_before is not None if PART else False
    token = tl.program_id(0).to(tl.int64)
    target, counts = _target(targets, mask, token, True, first, columns)
    if counts | PART:
        logits += token // length * batch_stride + token % length * row_stride
        target_z, _square = transform_logits(load_logits(logits, bias, target, counts), steps)
        peak = LOWEST
        total = 0.0
        moment = 0.0
        sum_sq = 0.0
        sum_logits = 0.0
        peak_before = float("-inf")
        if PART:
            peak = tl.load(state.peak + token)
            total = tl.load(state.sum_exp + token)
            target_z = tl.where(counts, target_z, tl.load(state.target + token))
            if MOMENT:
                moment = tl.load(state.moment + token)
        if SUM_SQ:
            sum_sq = tl.load(state.sum_sq_exp + token)
        if SUM_LOGITS:
            sum_logits = tl.load(state.sum_logits + token)
        if PEAK_BEFORE:
            peak_before = tl.load(state.peak_before + token)
        whole = columns // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            peak, total, moment, sum_sq, sum_logits, peak_before = _fold_columns(
                logits, bias, start + tl.arange(0, BLOCK), None, target, steps,
                peak, total, moment, sum_sq, sum_logits, peak_before, MOMENT, SUM_SQ, SUM_LOGITS, PEAK_BEFORE,
            )  # fmt: skip
        # What is left of the row apart, so that the loop needs no mask.
        for start in range(whole, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            peak, total, moment, sum_sq, sum_logits, peak_before = _fold_columns(
                logits, bias, column, column < columns, target, steps,
                peak, total, moment, sum_sq, sum_logits, peak_before, MOMENT, SUM_SQ, SUM_LOGITS, PEAK_BEFORE,
            )  # fmt: skip
        if PART:
            tl.store(state.peak + token, peak)
            tl.store(state.sum_exp + token, total)
            tl.store(state.target + token, target_z)
            if MOMENT:
                tl.store(state.moment + token, moment)
            if SUM_SQ:
                tl.store(state.sum_sq_exp + token, sum_sq)
            if SUM_LOGITS:
                tl.store(state.sum_logits + token, sum_logits)
            if PEAK_BEFORE:
                tl.store(state.peak_before + token, peak_before)
        else:
            log_sum = tl.log(total)
            # Around the peak, not around lse: see `Fold.finish`.
            logp = (target_z - peak) - log_sum
            tl.store(out.logps + token, tl.where(logp > 0.0, 0.0, logp))
            tl.store(out.lse + token, peak.to(tl.float64) + log_sum)
            if MOMENT:
                entropy = log_sum - moment / total
                tl.store(out.entropy + token, tl.where(entropy < 0.0, 0.0, entropy))
    else:
        if not PART:
            tl.store(out.logps + token, 0.0)
            tl.store(out.lse + token, float("inf"))
            if MOMENT:
                tl.store(out.entropy + token, 0.0)


@triton.jit(do_not_specialize=["first", "length", "positions"])
def _grad_kernel(
    logits,
    batch_stride,
    row_stride,
    out,
    out_batch_stride,
    out_row_stride,
    targets,  # (batch, length)
    mask,
    bias,
    logps,  # (batch * length,) of whole rows; None for a part of the vocabulary
    tokens,  # `TokenGradients`, (batch * length,) each
    positions,  # of a batch, `length` of which have tokens
    length,
    columns,
    first,
    steps,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    batch, position = row // positions, row % positions
    token = batch * length + position
    has_token = position < length
    target, counts = _target(targets, mask, token, has_token, first, columns)
    g, e, entropy = token_terms(tokens, token, has_token)
    nonzero = g != 0.0
    if tokens.grad_entropy is not None:
        nonzero = nonzero | (e != 0.0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    out += batch * out_batch_stride + position * out_row_stride
    if (counts & has_token & nonzero) | (logps is None):
        x = load_logits(logits + batch * batch_stride + position * row_stride, bias, column, inside)
        z, square = transform_logits(x, steps)
        log_p = log_probabilities(z, tl.load(tokens.lse + token))
        hit = column == target
        if logps is not None:  # 1 - p from the forward's logp, as in `TokenGradients.of`
            at_target = g * one_minus_exp(tl.load(logps + token))
        elif tokens.at_target is not None:
            at_target = tl.load(tokens.at_target + token)
        else:
            hit = None
            at_target = None
        ENTROPY: tl.constexpr = tokens.grad_entropy is not None
        grad = gradient(tl.exp(log_p), log_p, hit, at_target, g, e, entropy, ENTROPY)
        grad = times_derivative(with_uniform(grad, tokens, token, has_token), square, steps)
        tl.store(out + column, grad.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + column, tl.zeros((BLOCK,), out.dtype.element_ty), mask=inside)


def fold(
    logits: Tensor,
    targets: Tensor,
    first: int,
    bias: Tensor | None,
    transform: LogitTransform,
    state: Fold | None,
    *,
    entropy: bool = False,
    extras: Collection[str] = (),
) -> Fold:
    """As `reference.fold`; the last dimension of `logits` must be contiguous."""
    if state is None:
        state = Fold.start(targets.numel(), logits.device, entropy=entropy, extras=extras)
    _launch_fold(logits, targets, first, bias, transform, state, None, None)
    return state


def _launch_fold(
    logits: Tensor,
    targets: Tensor,
    first: int,
    bias: Tensor | None,
    transform: LogitTransform,
    state: Fold | None,  # updated; None for whole rows
    mask: Tensor | None,
    out: TokenStatistics | None,  # of whole rows, in place of `state`
) -> None:
    assert logits.stride(-1) == 1
    n, columns = targets.numel(), logits.shape[-1]
    if n == 0:
        return
    _, length, strides = _layout(logits, targets)
    with launch_context(logits.device):
        _fold_kernel[(n,)](
            logits,
            *strides,
            targets.contiguous(),
            None if mask is None else mask.contiguous(),
            None if bias is None else bias.contiguous(),
            state,
            out,
            length,
            columns,
            first,
            LogitSteps.of(transform),
            PART=state is not None,
            BLOCK=min(BLOCK, triton.next_power_of_2(columns)),
            num_warps=WARPS,
            **EXACT,
        )


def fold_rows(
    logits: Tensor, targets: Tensor, mask: Tensor | None, transform: LogitTransform, *, entropy: bool
) -> TokenStatistics:
    """As `reference.fold_rows`; the last dimension of `logits` must be contiguous."""
    logps, *entropies = torch.empty(1 + entropy, targets.numel(), dtype=torch.float32, device=logits.device)
    lse = torch.empty(targets.numel(), dtype=torch.float64, device=logits.device)
    out = TokenStatistics(logps, lse, entropies[0] if entropies else None)
    _launch_fold(logits, targets, 0, None, transform, None, mask, out)
    return out


def grad(
    logits: Tensor,
    targets: Tensor,
    first: int,
    bias: Tensor | None,
    transform: LogitTransform,
    tokens: TokenGradients,
    out: Tensor,
    mask: Tensor | None = None,
    logps: Tensor | None = None,  # of whole rows, in place of `tokens.at_target`
) -> None:
    """As `reference.grad`; the last dimensions of `logits` and `out` must be contiguous."""
    assert logits.stride(-1) == 1
    assert out.stride(-1) == 1
    count, columns = logits.shape[:-1].numel(), logits.shape[-1]
    if count == 0:
        return
    positions, length, strides = _layout(logits, targets)
    block = min(BLOCK, triton.next_power_of_2(columns))
    with launch_context(logits.device):
        _grad_kernel[(count, triton.cdiv(columns, block))](
            logits,
            *strides,
            out,
            *_layout(out, targets)[2],
            targets.contiguous(),
            None if mask is None else mask.contiguous(),
            None if bias is None else bias.contiguous(),
            logps,
            map_fields(tokens, torch.Tensor.contiguous),
            positions,
            length,
            columns,
            first,
            LogitSteps.of(transform),
            BLOCK=block,
            num_warps=WARPS,
            **EXACT,
        )


def grad_rows(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: LogitTransform,
    statistics: TokenStatistics,
    grads: tuple[Tensor, Tensor | None],
    out: Tensor,
) -> None:
    """As `reference.grad_rows`; the last dimensions of `logits` and `out` must be contiguous."""
    if targets.numel() == 0:
        out.zero_()
        return
    grad_logps, grad_entropy = grads
    entropy = None if grad_entropy is None else statistics.entropy
    # The kernel makes `at_target` of the log-probabilities.
    tokens = TokenGradients(statistics.lse, grad_logps, None, entropy, grad_entropy)
    grad(logits, targets, 0, None, transform, tokens, out, mask, statistics.logps)


def _layout(logits: Tensor, targets: Tensor) -> tuple[int, int, tuple[int, int]]:
    """-> positions and tokens of each batch, and the strides of (batch, position); N rows are one batch."""
    if logits.dim() == 2:
        return logits.shape[0], logits.shape[0], (0, logits.stride(0))
    return logits.shape[1], targets.shape[1], (logits.stride(0), logits.stride(1))
