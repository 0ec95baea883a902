"""Token-local policy losses with their derivative as one Triton kernel.

`objectives.py` and `penalties.py` have the same formulas in PyTorch, and are the specification. The derivatives here
are those of autograd: a clamp passes the gradient at its bounds if PyTorch's does, the smaller of two equal numbers
passes half to each, and NaN stays NaN.
"""

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from liger_rl.kernels.devices import launch_context
from liger_rl.kernels.softmax_triton import INTERPRETED
from liger_rl.losses.batch import MAX_LOG_RATIO
from liger_rl.losses.loss import PolicyTerms, PreparedLoss
from liger_rl.losses.objectives import CISPO, DPPO, SAPO, PPOClip, Reinforce
from liger_rl.losses.penalties import KLPenalty

BLOCK, WARPS = 1024, 4
MAX_OPTIONS = 4  # of an objective
LARGEST = tl.constexpr(MAX_LOG_RATIO)
# Since PyTorch 2.14, a clamp's gradient is 0 at its bounds: pytorch#195931.
PASSES_AT_BOUNDS = tl.constexpr(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14))


@triton.jit
def _exp(x):
    """exp(x) to float32's last digit; tl.exp loses a digit each time that x doubles."""
    if INTERPRETED:
        return tl.exp(x)
    return libdevice.exp(x)


@triton.jit
def _at_most(x, bound):
    """min(x, bound). A NaN stays NaN, unlike with tl.minimum."""
    return tl.where(x > bound, bound, x)


@triton.jit
def _within(x, bound):
    """Whether the gradient passes a clamp of x to at most `bound`."""
    if PASSES_AT_BOUNDS:
        return x <= bound
    return x < bound


@triton.jit
def _smaller(a, b):
    return tl.where((a < b) | (a != a), a, b)


@triton.jit
def _grad_of_smaller(a, b, grad):
    """The gradient of `_smaller(a, b)` for a."""
    return tl.where(a > b, 0.0, tl.where(a == b, 0.5 * grad, grad))


# An objective returns (loss, to_logp, to_ratio, below, above): gradients of grad * loss for logp, with the ratio held
# constant, and for the ratio; and whether the token is below or above the bounds. p to s are the objective's options.


@triton.jit
def _ppo_clip(logp, log_ratio, ratio, advantage, grad, p, q, r, s):
    low, high, delta, dual_clip = p, q, r, s
    unclipped = _at_most(ratio, delta) * advantage
    clipped = tl.where(ratio < low, low, _at_most(ratio, high)) * advantage
    single = -_smaller(unclipped, clipped)
    most = -dual_clip * advantage
    dual = advantage < 0.0
    loss = tl.where(dual, _smaller(single, most), single)
    grad = -tl.where(dual, _grad_of_smaller(single, most, grad), grad)
    to_unclipped = _grad_of_smaller(unclipped, clipped, grad) * advantage
    to_clipped = _grad_of_smaller(clipped, unclipped, grad) * advantage
    to_ratio = tl.where(ratio <= delta, to_unclipped, 0.0)
    to_ratio += tl.where((ratio >= low) & (ratio <= high), to_clipped, 0.0)
    return loss, tl.zeros_like(logp), to_ratio, ratio < low, ratio > high


@triton.jit
def _cispo(logp, log_ratio, ratio, advantage, grad, p, q, r, s):
    low, high = p, q
    factor = -tl.where(ratio < low, low, _at_most(ratio, high)) * advantage
    return factor * logp, grad * factor, tl.zeros_like(logp), ratio < low, ratio > high


@triton.jit
def _reinforce(logp, log_ratio, ratio, advantage, grad, p, q, r, s):
    zero = tl.zeros_like(logp)
    return -advantage * logp, -advantage * grad, zero, zero > 0.0, zero > 0.0


@triton.jit
def _sapo(logp, log_ratio, ratio, advantage, grad, p, q, r, s):
    steepness = tl.where(advantage > 0.0, p, q)
    gate = 1.0 / (1.0 + _exp(-(steepness * (ratio - 1.0))))
    height = 4.0 / steepness
    to_gate = -(grad * advantage * height)
    zero = tl.zeros_like(logp)
    to_ratio = to_gate * ((1.0 - gate) * gate) * steepness
    return -gate * height * advantage, zero, to_ratio, zero > 0.0, zero > 0.0


@triton.jit
def _dppo(logp, log_ratio, ratio, advantage, grad, p, q, r, s):
    lowest, highest, ratio_cap = p, q, r
    change = _exp(logp) - _exp(logp - log_ratio)
    too_high, too_low = change > highest, change < lowest
    dropped = tl.where(advantage > 0.0, too_high, too_low)
    factor = -_at_most(ratio, ratio_cap) * advantage
    loss, to_logp = tl.where(dropped, 0.0, factor * logp), tl.where(dropped, 0.0, grad) * factor
    return loss, to_logp, tl.zeros_like(logp), too_low, too_high


# An estimator returns the KL, and the gradient of grad * KL for logp.


@triton.jit
def _k1(logp, ref, grad):
    return logp - ref, grad


@triton.jit
def _k2(logp, ref, grad):
    difference = logp - ref
    return difference * difference * 0.5, grad * difference


@triton.jit
def _k3(logp, ref, grad):
    difference = ref - logp
    d = _at_most(difference, LARGEST)
    # (exp(d) - d - 1) / d^2 as a series for |d| < 1, where the difference would lose its digits.
    tail = d * (1.0 / 3628800.0 + d * (1.0 / 39916800.0)) + 1.0 / 362880.0
    tail = 1.0 / 24.0 + d * (1.0 / 120.0 + d * (1.0 / 720.0 + d * (1.0 / 5040.0 + d * (1.0 / 40320.0 + d * tail))))
    tail = 0.5 + d * (1.0 / 6.0 + d * tail)
    near, exp = tl.abs(d) < 1.0, _exp(d)
    kl = tl.where(near, d * d * tail, (exp - 1.0) - d)
    slope = -tl.where(near, d + d * d * tail, exp - 1.0)
    return kl, tl.where(_within(difference, LARGEST), grad * slope, 0.0)


# The number differs from call to call; specialising on it would compile the kernel again.
@triton.jit(do_not_specialize=["tokens"])
def _policy_terms_kernel(
    logps,  # (tokens,), as the columns from `mask` to `weights`
    tokens,
    mask,
    advantages,
    old,
    ref,
    importance_ratio,
    weights,  # None for 1
    out,  # Outputs
    beta,
    p,
    q,
    r,
    s,
    OBJECTIVE: tl.constexpr,
    ESTIMATOR: tl.constexpr,
    IMPORTANCE_WEIGHTED: tl.constexpr,
    METRICS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    position = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < tokens
    counts = tl.load(mask + position, mask=inside, other=0) != 0
    logp = tl.load(logps + position, mask=counts, other=0.0)
    advantage = tl.load(advantages + position, mask=counts, other=0.0)
    weight = tl.full([BLOCK], 1.0, tl.float32)
    if weights is not None:
        weight = tl.load(weights + position, mask=counts, other=0.0)
    before = logp  # inf - inf is NaN, as in the formulas
    if old is not None:
        before = tl.load(old + position, mask=counts, other=0.0)
    log_ratio = logp - before
    ratio = _exp(_at_most(log_ratio, LARGEST))
    grad = weight
    if importance_ratio is not None:
        importance = tl.load(importance_ratio + position, mask=counts, other=0.0)
        grad = weight * importance
    loss, slope, to_ratio, below, above = OBJECTIVE(logp, log_ratio, ratio, advantage, grad, p, q, r, s)
    low, high = below & (advantage < 0.0), above & (advantage > 0.0)
    if importance_ratio is not None:
        loss *= importance
    if ESTIMATOR is not None:
        grad = weight * beta
        factor = ratio if IMPORTANCE_WEIGHTED else 1.0
        kl, to_logp = ESTIMATOR(logp, tl.load(ref + position, mask=counts, other=0.0), grad * factor)
        if IMPORTANCE_WEIGHTED:
            to_ratio += grad * kl
        kl *= factor
        slope += to_logp
        loss += beta * kl
    if out.slopes is not None:
        slope += tl.where(_within(log_ratio, LARGEST), to_ratio * ratio, 0.0)
        tl.store(out.slopes + position, tl.where(counts, slope, 0.0), mask=inside)
    if out.losses is not None:
        tl.store(out.losses + position, tl.where(counts, loss, 0.0), mask=inside)
    if out.kls is not None:
        tl.store(out.kls + position, tl.where(counts, kl, 0.0), mask=inside)
    if out.clipped is not None:
        tl.store(out.clipped + position, (low | high) & counts, mask=inside)
    if out.sums is not None:
        programs = tl.num_programs(0)
        sums = out.sums + program
        tl.store(sums, tl.sum(tl.where(counts, loss * weight, 0.0)))
        if METRICS:
            tl.store(sums + programs, 0.0 if ESTIMATOR is None else tl.sum(tl.where(counts, kl, 0.0)))
            tl.store(sums + 2 * programs, tl.sum((low & counts).to(tl.float32)))
            tl.store(sums + 3 * programs, tl.sum((high & counts).to(tl.float32)))
            tl.store(sums + 4 * programs, tl.sum(((low | high) & counts).to(tl.float32)))


class Outputs(NamedTuple):
    """The tensors that the kernel writes, unless they are None. All but the sums have the log-probabilities' shape."""

    slopes: Tensor | None = None  # d loss / d logp
    losses: Tensor | None = None  # before the weights
    kls: Tensor | None = None
    clipped: Tensor | None = None  # bool: the gradient is cut
    # (5, programs): weighted loss, KL, clip_low, clip_high and either of these. (1, programs) without metrics: the loss
    sums: Tensor | None = None


class Formula(NamedTuple):
    """An objective in the kernel."""

    function: Any
    options: Callable[[Any], tuple[float, ...]]
    clips: bool  # has clip indicators


def _ppo_clip_options(objective: PPOClip) -> tuple[float, ...]:
    bounds = (math.inf if bound is None else bound for bound in (objective.delta, objective.dual_clip))
    return 1 - objective.epsilon_low, 1 + objective.epsilon_high, *bounds


FORMULAS: dict[type, Formula] = {
    PPOClip: Formula(_ppo_clip, _ppo_clip_options, clips=True),
    CISPO: Formula(_cispo, lambda cispo: (cispo.ratio_min, cispo.epsilon_high), clips=True),
    Reinforce: Formula(_reinforce, lambda reinforce: (), clips=False),
    SAPO: Formula(_sapo, lambda sapo: (sapo.sapo_temperature_pos, sapo.sapo_temperature_neg), clips=False),
    DPPO: Formula(_dppo, lambda dppo: (-dppo.divergence_low, dppo.divergence_high, dppo.ratio_cap), clips=True),
}
ESTIMATORS = {"k1": _k1, "k2": _k2, "k3": _k3}


def has_formulas(terms: PolicyTerms) -> bool:
    """Whether the kernel has the formulas of the objective and the penalty. A subclass may have another formula."""
    return type(terms.objective) in FORMULAS and type(terms.kl) is KLPenalty


def has_penalty(prepared: PreparedLoss) -> bool:
    return prepared.terms.kl.beta != 0.0 and prepared.batch.ref_per_token_logps is not None


def launch(
    prepared: PreparedLoss,
    logps: Tensor,  # (B, T) or (N,)
    *,
    outputs: Collection[str],  # names of `Outputs`
) -> Outputs:
    """The outputs by name, None for a KL or clip indicator that the loss does not have. `sums` is (5,) or (1,).

    Columns may have any dtype, and any value where they are masked.
    """
    terms, batch, tokens = prepared.terms, prepared.batch, logps.numel()
    formula, penalised, with_metrics = (
        FORMULAS[type(terms.objective)],
        has_penalty(prepared),
        prepared.metrics != "none",
    )
    programs = triton.cdiv(tokens, BLOCK)
    shapes = dict.fromkeys(outputs, logps.shape) | {"sums": (5 if with_metrics else 1, programs)}
    missing = {"kls": not penalised, "clipped": not formula.clips}
    out = Outputs(**{
        name: logps.new_empty(shapes[name], dtype=torch.bool if name == "clipped" else None)
        for name in outputs if not missing.get(name)
    })  # fmt: skip
    options = [float(option) for option in formula.options(terms.objective)]

    def expand_column(column: Tensor | None) -> Tensor | None:
        # An advantage or a sampler's ratio may be one number for a sequence.
        return None if column is None else column.expand(batch.mask.shape).float().contiguous()

    if tokens:
        with launch_context(logps.device):
            _policy_terms_kernel[(programs,)](
                logps.contiguous(),
                tokens,
                batch.mask.contiguous(),
                expand_column(batch.advantages),
                expand_column(batch.old_per_token_logps),
                expand_column(batch.ref_per_token_logps) if penalised else None,
                expand_column(batch.importance_ratio),
                expand_column(prepared.weights),
                out,
                float(terms.kl.beta),
                *options,
                *[0.0] * (MAX_OPTIONS - len(options)),
                OBJECTIVE=formula.function,
                ESTIMATOR=ESTIMATORS[terms.kl.kl_estimator] if penalised else None,
                IMPORTANCE_WEIGHTED=terms.kl.importance_weighted,
                METRICS=with_metrics,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
    return out if out.sums is None else out._replace(sums=out.sums.sum(1))
