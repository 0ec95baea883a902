"""Token-local policy losses with their derivative as one Triton kernel.

`liger_rl.policy` states these losses readably. Here each has its derivative beside it, which is autograd's of that
formula. A clamp passes the gradient at its bounds if PyTorch's does. The smaller of two equal numbers takes half of the
gradient from each. What is NaN there is NaN here.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from liger_rl.kernels.devices import on
from liger_rl.kernels.softmax import INTERPRETED
from liger_rl.policy import penalties
from liger_rl.policy.batch import MAX_LOG_RATIO
from liger_rl.policy.loss import PolicyTerms, PreparedLoss
from liger_rl.policy.objectives import CISPO, DPPO, SAPO, PPOClip, Reinforce

BLOCK, WARPS = 1024, 4
NUMBERS = 4  # of an objective, at most
LARGEST = tl.constexpr(MAX_LOG_RATIO)
# From 2.14 on, a clamp's gradient is 0 at its bounds: pytorch#195931.
PASSES_AT_BOUNDS = tl.constexpr(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14))


@triton.jit
def _exp(x):
    """To float32's last digit, where tl.exp loses one more with each doubling of x."""
    if INTERPRETED:
        return tl.exp(x)
    return libdevice.exp(x)


@triton.jit
def _at_most(x, bound):
    """NaN stays, which tl.minimum drops."""
    return tl.where(x > bound, bound, x)


@triton.jit
def _within(x, bound):
    """Whether a clamp to at most `bound` passes the gradient of x."""
    if PASSES_AT_BOUNDS:
        return x <= bound
    return x < bound


@triton.jit
def _smaller(a, b):
    return tl.where((a < b) | (a != a), a, b)


@triton.jit
def _share_of_smaller(a, b, grad):
    """-> the gradient of `_smaller(a, b)` for a."""
    return tl.where(a > b, 0.0, tl.where(a == b, 0.5 * grad, grad))


# An objective: -> loss, its gradient for logp other than through the ratio, for the ratio, and whether the token is
# below or above its bounds; `grad` is what the loss is multiplied by afterwards, and p to s are its numbers.


@triton.jit
def _ppo_clip(logp, log_ratio, ratio, advantage, grad, p, q, r, s):
    low, high, delta, dual_clip = p, q, r, s
    unclipped = _at_most(ratio, delta) * advantage
    clipped = tl.where(ratio < low, low, _at_most(ratio, high)) * advantage
    single = -_smaller(unclipped, clipped)
    most = -dual_clip * advantage
    dual = advantage < 0.0
    loss = tl.where(dual, _smaller(single, most), single)
    grad = -tl.where(dual, _share_of_smaller(single, most, grad), grad)
    to_unclipped = _share_of_smaller(unclipped, clipped, grad) * advantage
    to_clipped = _share_of_smaller(clipped, unclipped, grad) * advantage
    to_ratio = tl.where(_within(ratio, delta), to_unclipped, 0.0)
    to_ratio += tl.where(_within(low, ratio) & _within(ratio, high), to_clipped, 0.0)
    return loss, tl.zeros_like(logp), to_ratio, ratio < low, ratio > high


@triton.jit
def _cispo(logp, log_ratio, ratio, advantage, grad, p, q, r, s):
    factor = -_at_most(ratio, p) * advantage
    nothing = tl.zeros_like(logp)
    return factor * logp, grad * factor, nothing, nothing > 0.0, ratio > p


@triton.jit
def _reinforce(logp, log_ratio, ratio, advantage, grad, p, q, r, s):
    nothing = tl.zeros_like(logp)
    return -advantage * logp, -advantage * grad, nothing, nothing > 0.0, nothing > 0.0


@triton.jit
def _sapo(logp, log_ratio, ratio, advantage, grad, p, q, r, s):
    steepness = tl.where(advantage > 0.0, p, q)
    gate = 1.0 / (1.0 + _exp(-(steepness * (ratio - 1.0))))
    height = 4.0 / steepness
    to_gate = -(grad * advantage * height)
    nothing = tl.zeros_like(logp)
    to_ratio = to_gate * ((1.0 - gate) * gate) * steepness
    return -gate * height * advantage, nothing, to_ratio, nothing > 0.0, nothing > 0.0


@triton.jit
def _dppo(logp, log_ratio, ratio, advantage, grad, p, q, r, s):
    lowest, highest, ratio_cap = p, q, r
    change = _exp(logp) - _exp(logp - log_ratio)
    too_high, too_low = change > highest, change < lowest
    dropped = tl.where(advantage > 0.0, too_high, too_low)
    factor = -_at_most(ratio, ratio_cap) * advantage
    loss, to_logp = tl.where(dropped, 0.0, factor * logp), tl.where(dropped, 0.0, grad) * factor
    return loss, to_logp, tl.zeros_like(logp), too_low, too_high


# An estimator: -> KL and its gradient for logp, times `grad`.


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
    # (exp(d) - d - 1) / d^2 to float32's last digit for |d| < 1, where differences would lose theirs.
    tail = d * (1.0 / 3628800.0 + d * (1.0 / 39916800.0)) + 1.0 / 362880.0
    tail = 1.0 / 24.0 + d * (1.0 / 120.0 + d * (1.0 / 720.0 + d * (1.0 / 5040.0 + d * (1.0 / 40320.0 + d * tail))))
    tail = 0.5 + d * (1.0 / 6.0 + d * tail)
    near, exp = tl.abs(d) < 1.0, _exp(d)
    kl = tl.where(near, d * d * tail, (exp - 1.0) - d)
    slope = -tl.where(near, d + d * d * tail, exp - 1.0)
    return kl, tl.where(_within(difference, LARGEST), grad * slope, 0.0)


# How many tokens there are and which is the first differs from call to call, and where in an index it starts too.
@triton.jit(do_not_specialize=["first", "tokens"], do_not_specialize_on_alignment=["index"])
def _policy_terms_kernel(
    logps,  # (tokens,)
    index,  # (tokens,) into the columns, None for a span from `first` on
    first,
    tokens,
    mask,  # the columns of the whole batch
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
    INDICATOR: tl.constexpr,
    METRICS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    place = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < tokens
    token = first + place
    if index is not None:
        token = tl.load(index + place, mask=inside, other=0)
    counts = tl.load(mask + token, mask=inside, other=0) != 0
    logp = tl.load(logps + place, mask=counts, other=0.0)
    advantage = tl.load(advantages + token, mask=counts, other=0.0)
    weight = tl.full([BLOCK], 1.0, tl.float32)
    if weights is not None:
        weight = tl.load(weights + token, mask=counts, other=0.0)
    before = logp  # what is infinite then has no ratio, as in the formulas
    if old is not None:
        before = tl.load(old + token, mask=counts, other=0.0)
    log_ratio = logp - before
    ratio = _exp(_at_most(log_ratio, LARGEST))
    grad = weight
    if importance_ratio is not None:
        importance = tl.load(importance_ratio + token, mask=counts, other=0.0)
        grad = weight * importance
    loss, slope, to_ratio, below, above = OBJECTIVE(logp, log_ratio, ratio, advantage, grad, p, q, r, s)
    low, high = below & (advantage < 0.0), above & (advantage > 0.0)
    if importance_ratio is not None:
        loss *= importance
    if ESTIMATOR is not None:
        grad = weight * beta
        factor = ratio if IMPORTANCE_WEIGHTED else 1.0
        kl, to_logp = ESTIMATOR(logp, tl.load(ref + token, mask=counts, other=0.0), grad * factor)
        if IMPORTANCE_WEIGHTED:
            to_ratio += grad * kl
        kl *= factor
        slope += to_logp
        loss += beta * kl
    if out.slopes is not None:
        slope += tl.where(_within(log_ratio, LARGEST), to_ratio * ratio, 0.0)
        tl.store(out.slopes + place, tl.where(counts, slope, 0.0), mask=inside)
    if out.losses is not None:
        tl.store(out.losses + place, tl.where(counts, loss, 0.0), mask=inside)
    if out.kls is not None:
        tl.store(out.kls + place, tl.where(counts, kl, 0.0), mask=inside)
    if out.clipped is not None:
        clipped = low | high
        if INDICATOR == "range":
            clipped = below | above
        elif INDICATOR == "helion":
            clipped = (below | above) & ~clipped & (advantage != 0.0)
        tl.store(out.clipped + place, clipped & counts, mask=inside)
    if out.sums is not None:
        programs = tl.num_programs(0)
        sums = out.sums + program
        tl.store(sums, tl.sum(tl.where(counts, loss * weight, 0.0)))
        if METRICS:
            if ESTIMATOR is not None:
                tl.store(sums + programs, tl.sum(tl.where(counts, kl, 0.0)))
            else:
                tl.store(sums + programs, 0.0)
            tl.store(sums + 2 * programs, tl.sum((low & counts).to(tl.float32)))
            tl.store(sums + 3 * programs, tl.sum((high & counts).to(tl.float32)))
            tl.store(sums + 4 * programs, tl.sum(((low | high) & counts).to(tl.float32)))


class Outputs(NamedTuple):
    """What the kernel writes; None is not wanted."""

    slopes: Tensor | None = None  # d loss / d logp, like the log-probabilities, as the next three
    losses: Tensor | None = None  # before the weights
    kls: Tensor | None = None
    clipped: Tensor | None = None  # bool, by the clip indicator
    sums: Tensor | None = None  # (1 or 5, programs)


class Formula(NamedTuple):
    """An objective's part of the kernel."""

    function: Any
    numbers: Callable[[Any], tuple[float, ...]]
    clips: bool  # has clip indicators


def _ppo_clip_numbers(objective: PPOClip) -> tuple[float, ...]:
    bounds = (math.inf if bound is None else bound for bound in (objective.delta, objective.dual_clip))
    return 1 - objective.epsilon_low, 1 + objective.epsilon_high, *bounds


FORMULAS: dict[type, Formula] = {
    PPOClip: Formula(_ppo_clip, _ppo_clip_numbers, clips=True),
    CISPO: Formula(_cispo, lambda objective: (objective.epsilon_high,), clips=True),
    Reinforce: Formula(_reinforce, lambda objective: (), clips=False),
    SAPO: Formula(_sapo, lambda it: (it.sapo_temperature_pos, it.sapo_temperature_neg), clips=False),
    DPPO: Formula(_dppo, lambda it: (-it.divergence_low, it.divergence_high, it.ratio_cap), clips=True),
}
ESTIMATORS: dict[Callable[[Tensor, Tensor], Tensor], Any] = {penalties.k1: _k1, penalties.k2: _k2, penalties.k3: _k3}


def knows(terms: PolicyTerms) -> bool:
    """Whether the objective and the penalty are of those above; a subclass may have a formula of its own."""
    if isinstance(terms.objective, CISPO) and terms.objective.ratio_min != 0.0:
        return False
    return (
        type(terms.objective) in FORMULAS
        and type(terms.kl) is penalties.KLPenalty
        and penalties.ESTIMATORS.get(terms.kl.kl_estimator) in ESTIMATORS
    )


def clips(terms: PolicyTerms) -> bool:
    """Whether the objective has clip indicators."""
    return FORMULAS[type(terms.objective)].clips


def penalises(prepared: PreparedLoss) -> bool:
    """Whether there is a KL penalty."""
    return prepared.terms.kl.beta != 0.0 and prepared.batch.ref_per_token_logps is not None


def launch(
    prepared: PreparedLoss,
    logps: Tensor,  # (B, T) or (N,) of the whole batch, or (n,) of some tokens
    positions: Tensor | slice | None = None,  # (n,) flat, of these tokens; None for all
    *,
    slopes: bool,
    sums: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """d loss / d logp, shaped like the log-probabilities, and the sums over tokens of weighted loss, KL, clip_low,
    clip_high and either of these, (5,); of the loss alone, (1,), with the metrics "none"."""
    numbers = 1 if prepared.terms.metrics == "none" else 5
    out = Outputs(
        slopes=torch.empty_like(logps, memory_format=torch.contiguous_format) if slopes else None,
        sums=logps.new_empty(numbers, triton.cdiv(logps.numel(), BLOCK)) if sums else None,
    )
    _run(prepared, logps, positions, out, "active")
    return out.slopes, None if out.sums is None else out.sums.sum(1)


def launch_per_token(prepared: PreparedLoss, logps: Tensor, indicator: str) -> Outputs:
    """Unreduced loss, its derivative, KL and clip indicator, shaped like the batch's mask; without the KL or the
    indicator where the loss has none. The batch's columns need not be clean nor float32."""
    shape, terms = prepared.batch.mask.shape, prepared.terms
    out = Outputs(
        slopes=logps.new_empty(shape),
        losses=logps.new_empty(shape),
        kls=logps.new_empty(shape) if penalises(prepared) else None,
        clipped=logps.new_empty(shape, dtype=torch.bool) if clips(terms) else None,
    )
    _run(prepared, logps, None, out, indicator)
    return out


def _run(prepared: PreparedLoss, logps: Tensor, positions: Tensor | slice | None, out: Outputs, indicator: str) -> None:
    terms, batch, tokens = prepared.terms, prepared.batch, logps.numel()
    if not tokens:
        return
    formula, penalised = FORMULAS[type(terms.objective)], penalises(prepared)
    numbers = [float(number) for number in formula.numbers(terms.objective)]

    def whole(column: Tensor | None) -> Tensor | None:
        # One advantage, or one ratio of a sampler's correction, may stand for a sequence.
        return None if column is None else column.expand(batch.mask.shape).float().contiguous()

    with on(logps.device):
        _policy_terms_kernel[(triton.cdiv(tokens, BLOCK),)](
            logps.contiguous(),
            positions.contiguous() if isinstance(positions, Tensor) else None,
            positions.start if isinstance(positions, slice) else 0,
            tokens,
            batch.mask.contiguous(),
            whole(batch.advantages),
            whole(batch.old_per_token_logps),
            whole(batch.ref_per_token_logps) if penalised else None,
            whole(batch.importance_ratio),
            whole(prepared.weights),
            out,
            float(terms.kl.beta),
            *numbers,
            *[0.0] * (NUMBERS - len(numbers)),
            OBJECTIVE=formula.function,
            ESTIMATOR=ESTIMATORS[penalties.ESTIMATORS[terms.kl.kl_estimator]] if penalised else None,
            IMPORTANCE_WEIGHTED=terms.kl.importance_weighted,
            INDICATOR=indicator,
            METRICS=terms.metrics != "none",
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
