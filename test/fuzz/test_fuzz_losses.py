"""ppo_loss_fn, FusedLinearGRPOLoss and grpo_loss_from_logits against the formulas in float64, on random cases."""

from dataclasses import replace

import torch
from hypothesis import assume, given
from torch import Tensor

import oracle
from cases import F32, OBJECTIVES, PolicyCase, fused_cases, fuzz, given_logits_cases, policy_cases
from checks import Call, GivenLogits, check_gradients, same, within
from liger_rl import FusedLinearGRPOLoss, losses, ppo_loss_fn
from liger_rl.fused_linear import grpo_loss_from_logits
from liger_rl.losses import (
    PRESETS,
    EntropyBonus,
    KLPenalty,
    PolicyBatch,
    PolicyLoss,
    SamplerCorrection,
    Segments,
    reduce_metrics,
)


def part_named(name: str, value: float):
    key = "threshold" if name == "OffPolicySequenceMask" else "top_entropy_quantile"
    return getattr(losses, name)(**{key: value})


def reduction_of(case: PolicyCase):
    return None if case.reduction is None else getattr(losses, case.reduction)(**case.reduction_options)


def parts(case: PolicyCase) -> dict:
    """What ppo_loss_fn and the module have in common."""
    return {
        "sampler_correction": None if case.sampler is None else SamplerCorrection(**case.sampler),
        "corrections": [part_named(*c) for c in case.corrections],
        "metrics": case.metrics,
    }


def columns(case: PolicyCase) -> dict:
    """As they are given; the index of a masked token may be of no segment."""
    packed, index = case.live.dim() == 1, case.row.masked_fill(~case.live, case.rows + 7)
    return {
        "old_per_token_logps": case.old, "ref_per_token_logps": case.ref, "sampling_per_token_logps": case.sampling,
        "importance_ratio": case.importance, "num_sequences": case.num_sequences, "num_items_in_batch": case.items,
        "segments": Segments(index=index, count=case.rows) if packed else None,
    }  # fmt: skip


def check_loss(found: PolicyLoss, expected: oracle.PolicyResult, case: PolicyCase) -> None:
    name = "per_token" if case.reduction is None else "loss"
    assert found.loss.dtype == F32
    within(name, found.loss, expected.values[name], expected.budgets[name], case)
    named = {k.removeprefix("metric "): k for k in expected.values if k.startswith("metric ")}
    assert set(found.metrics) == set(named), f"metrics {sorted(found.metrics)}, expected {sorted(named)}: {case!r}"
    for metric, key in named.items():
        within(metric, found.metrics[metric].value, expected.values[key], expected.budgets[key], case)


def direct(case: PolicyCase, logps: Tensor, entropy: Tensor) -> PolicyLoss:
    kl = KLPenalty(beta=case.beta, kl_estimator=case.estimator, importance_weighted=case.weighted)
    made = PRESETS[case.loss_type].objective(**case.objective_options)
    batch = PolicyBatch(advantages=case.advantages, mask=case.mask, **columns(case))
    return ppo_loss_fn(
        logps, batch, made, reduction_of(case), entropy=entropy, kl=kl,
        entropy_bonus=EntropyBonus(entropy_coef=case.entropy_coef), **parts(case),
    )  # fmt: skip


def clean(x: Tensor, case: PolicyCase) -> Tensor:
    return x.masked_fill(~case.live, 0.0).double().reshape(-1)


def test_every_preset_is_drawn():
    presets = {name: (preset.objective.__name__, preset.reduction.__name__) for name, preset in PRESETS.items()}
    assert presets == OBJECTIVES


@fuzz(0.17)
@given(case=policy_cases())
def test_ppo_loss_fn(case: PolicyCase) -> None:
    logps, entropy = case.logps.clone().requires_grad_(), case.entropy.clone().requires_grad_()
    upstream = None
    if case.reduction is None:
        upstream = torch.linspace(-1.0, 2.0, logps.numel(), device=logps.device)
    torch.set_default_dtype(case.default_dtype)
    try:
        found = direct(case, logps, entropy)
        found.loss.backward(upstream.reshape(logps.shape) if upstream is not None else None)
    finally:
        torch.set_default_dtype(F32)
    moves = tuple(oracle.EPS * (1 + clean(x, case).abs()) for x in (case.logps, case.entropy))
    expected = oracle.policy_result(case, clean(case.logps, case), clean(case.entropy, case), moves, upstream)
    check_loss(found, expected, case)
    for name, leaf in (("dlogps", logps), ("dentropy", entropy)):
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        within(name, grad, expected.values[name], expected.budgets[name], case)
        assert not grad[~case.live].any(), f"masked tokens have a gradient in {name}: {case!r}"
    if case.rows > 1:
        check_micro_batches(case, expected)


def check_micro_batches(case: PolicyCase, expected: oracle.PolicyResult) -> None:
    """Sequences in two calls that share the divisors of the whole; a packed part counts the segments of all."""
    divided = case.reduction in ("SequenceMean", "SequenceSum", "FixedLengthMean", "TokenSum")
    divided = divided or (case.reduction == "GlobalTokenMean" and case.items is not None)
    of_batch = any(name == "TopEntropyMask" for name, _ in case.corrections)
    if not divided or of_batch or case.entropy_coef:
        return
    sequences = case.rows if case.num_sequences is None else case.num_sequences
    halves = (slice(0, 1), slice(1, None)) if case.live.dim() == 2 else (case.row == 0, case.row != 0)
    given_by_row = ("mask", "advantages", "old", "ref", "sampling", "importance", "row", "live", "logps", "entropy")
    found = []
    for rows in halves:
        columns = {k: None if getattr(case, k) is None else getattr(case, k)[rows] for k in given_by_row}
        part = replace(case, num_sequences=sequences, **columns)
        found.append(direct(part, part.logps, part.entropy))
    total = found[0].loss + found[1].loss
    within("sum of micro-batches", total, expected.values["loss"], expected.budgets["loss"], case)
    for name, metric in reduce_metrics([f.metrics for f in found]).items():
        key = f"metric {name}"
        within(f"merged {name}", metric.value, expected.values[key], expected.budgets[key], case)


@fuzz(0.14)
@given(case=fused_cases())
def test_fused_loss(case: PolicyCase) -> None:
    head, call = case.head, Call(case.head)
    options = {k: v for k, v in head.options.items() if k != "entropy"}
    module = FusedLinearGRPOLoss(
        case.loss_type, reduction=reduction_of(case), **parts(case), **options, **head.transform,
        **case.objective_options, beta=case.beta, kl_estimator=case.estimator, importance_weighted=case.weighted,
        entropy_coef=case.entropy_coef,
    )  # fmt: skip

    def run(call: Call) -> tuple[PolicyLoss, dict]:
        with call.autocast:
            found = module(
                call.hidden, call.weight, head.targets, case.advantages, head.mask, bias=call.bias,
                **columns(case),
            )  # fmt: skip
        return found, call.gradients([found.loss], [torch.tensor(0.5, device=found.loss.device)])

    logits = oracle.Head(head).logits
    logps, entropy = (logits.values[k].detach() for k in ("logps", "entropy"))
    moves = tuple(logits.budgets[k] for k in ("logps", "entropy"))
    assume(not oracle.ranks_undecided(case, entropy, moves[1]))
    found, grads = run(call)
    expected = oracle.policy_result(case, logps, entropy, moves)
    check_loss(found, expected, case)
    g, e, dg, de = (0.5 * x[k] for x in (expected.values, expected.budgets) for k in ("dlogps", "dentropy"))
    check_gradients(grads, oracle.head(head, g, e, (dg, de)), call)
    again, repeated = run(Call(head))
    same("repeated loss", again.loss.detach(), found.loss.detach(), case)
    for name, grad in repeated.items():
        same(f"repeated gradients of {name}", grad, grads[name], case)
    with call.autocast:
        reference = module.reference_logps(
            call.hidden, call.weight, head.targets, head.mask, bias=call.bias,
        )  # fmt: skip
    assert not reference.requires_grad
    within("reference_logps", reference, logits.values["logps"], logits.budgets["logps"], case)


@fuzz(0.07)
@given(case=given_logits_cases())
def test_grpo_loss_from_logits(case: PolicyCase) -> None:
    at, call = case.logits, GivenLogits(case.logits)
    found = grpo_loss_from_logits(
        call.leaf, at.targets, case.advantages, at.mask,
        loss_type=case.loss_type, temperature=at.transform["temperature"],
        **{k: v for k, v in columns(case).items() if k in ("old_per_token_logps", "ref_per_token_logps",
           "importance_ratio", "segments")},
        **at.options, **case.objective_options, beta=case.beta, kl_estimator=case.estimator,
        importance_weighted=case.weighted,
    )  # fmt: skip
    g, logits = at.upstream[0], call.expected
    logps, entropy = (logits.values[k].detach() for k in ("logps", "entropy"))
    moves = tuple(logits.budgets[k] for k in ("logps", "entropy"))
    expected = oracle.policy_result(case, logps, entropy, moves, g.reshape(-1))
    within("loss", found.loss, expected.values["per_token"], expected.budgets["per_token"], case)
    assert (found.kl is not None) == (case.beta != 0)
    if found.kl is not None:
        within("kl", found.kl, expected.values["kl"], expected.budgets["kl"], case)
    found.loss.backward(g)
    nothing = torch.zeros_like(logps)
    upstream = (expected.budgets["dlogps"], nothing)
    call.check_gradient(*logits.gradient(expected.values["dlogps"], nothing, upstream, F32))
