"""linear_logprobs and logits_logprobs against full logits in float64, on random cases."""

from dataclasses import replace

import torch
from hypothesis import given

import oracle
from cases import F32, HeadCase, LogitsCase, fuzz, head_cases, logits_cases, several_cases, tolerance_cases
from checks import Call, GivenLogits, check_gradients, same, within
from liger_rl import LogitTransform, logits_logprobs

EXTRAS = ("log_sum_sq_probs", "mean_logits", "is_top1")


@fuzz(0.42)
@given(case=head_cases())
def test_linear_logprobs(case: HeadCase) -> None:
    call = Call(case)
    out = call()
    wants_entropy = case.options["entropy"]
    g, e = case.upstream[0], case.upstream[1] if wants_entropy else torch.zeros_like(case.upstream[1])
    expected = oracle.head(case, g.reshape(-1), e.reshape(-1))
    names = ["logps", *(["entropy"] if wants_entropy else []), *case.options.get("extras", ())]
    for name in ("logps", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"):
        value = getattr(out, name)
        assert (value is not None) == (name in names), name
        if value is not None:
            assert value.shape == case.targets.shape
            assert value.dtype == (torch.bool if name == "is_top1" else F32)
            assert not (value.requires_grad and name in EXTRAS), name
            within(name, value, expected.values[name], expected.budgets[name], case)
    assert (out.missing_target is None) == (case.support is None)
    if case.support is not None:
        same("missing_target", out.missing_target.reshape(-1).float(), oracle.listed_of(case)[1].float(), case)
    outputs = [out.logps, out.entropy] if wants_entropy else [out.logps]
    found = call.gradients(outputs, [g, e])
    check_gradients(found, expected, call)
    if found and call.weight_grad is None:
        for name, grad in call.gradients(outputs, [g, e]).items():
            same(f"second backward's gradients of {name}", grad, found[name], case)
        again = Call(case)
        repeated = again()
        outputs = [repeated.logps, repeated.entropy] if wants_entropy else [repeated.logps]
        for name, grad in again.gradients(outputs, [g, e], retain_graph=False).items():
            same(f"repeated gradients of {name}", grad, found[name], case)
        same("repeated logps", out.logps, repeated.logps, case)
    if case.options.get("batch_invariant") and case.targets.numel():
        for rows in (slice(None, None, 2), slice(-1, None)):
            part = call(rows)
            for name in names:
                same(f"{name} beside other neighbours", getattr(part, name), getattr(out, name)[rows], case)


@fuzz(0.12)
@given(case=several_cases())
def test_several_targets(case: HeadCase) -> None:
    call, upstream = Call(case), list(case.upstream)
    out = call()
    names = ["logps", *(name for name in ("entropy", "lse") if case.options[name])]
    given = [part if name in names else torch.zeros_like(part) for name, part in zip(NAMES, upstream, strict=True)]
    expected = oracle.several(case, *(part.reshape(-1, *part.shape[case.targets.dim() :]) for part in given))
    for name in (*names, "topk_logps"):
        within(name, getattr(out, name), expected.values[name], expected.budgets[name], case)
    assert all(getattr(out, name) is None for name in ("entropy", "lse") if name not in names)
    assert ((out.topk_ids >= 0) == case.live[..., None]).all()
    assert not out.topk_logps.requires_grad
    outputs = [getattr(out, name) for name in names]
    check_gradients(
        call.gradients(outputs, [g for n, g in zip(NAMES, given, strict=True) if n in names]), expected, call
    )
    again = call_again(case, out.topk_ids).logps
    if oracle.TRITON:  # where listed logits are sums in another order than those of tiles
        within("the largest as targets", again, expected.values["topk_logps"], expected.budgets["topk_logps"], case)
    else:
        same("the largest as targets", again, out.topk_logps, case)


NAMES = ("logps", "entropy", "lse")


def call_again(case: HeadCase, ids: torch.Tensor):
    """With the ids that a call gave as its largest."""
    return Call(replace(case, ids=ids))()


@fuzz(0.06)
@given(case=tolerance_cases())
def test_grad_tolerance(case: HeadCase) -> None:
    call = Call(case)
    out = call()
    g, e = case.upstream[0], case.upstream[1] if case.options["entropy"] else torch.zeros_like(case.upstream[1])
    expected = oracle.head(case, g, e)
    within("logps", out.logps, expected.values["logps"], expected.budgets["logps"], case)
    found = call.gradients([out.logps, out.entropy] if case.options["entropy"] else [out.logps], [g, e])
    # Hidden states are one-hot: the weight's gradient is dL/dlogits.
    error = found["weight"].double() - expected.grads["weight"]
    allowed = case.options["grad_tolerance"] * expected.dlogits.norm() + expected.grad_budgets["weight"].norm()
    assert error.norm() <= allowed, f"dL/dlogits is off by {error.norm():.4g}, may be by {allowed:.4g}: {case!r}"
    for name, grad in found.items():
        assert grad.isfinite().all() or name == "hidden", f"gradient of {name} is not finite: {case!r}"


@fuzz(0.14)
@given(case=logits_cases())
def test_logits_logprobs(case: LogitsCase) -> None:
    call = GivenLogits(case)
    out = logits_logprobs(
        call.leaf, case.targets, mask=case.mask, transform=LogitTransform(**case.transform), entropy=True,
        **case.options,
    )  # fmt: skip
    g, e = case.upstream
    rows = call.expected
    for name in ("logps", "entropy"):
        within(name, getattr(out, name), rows.values[name], rows.budgets[name], case)
    nothing = torch.zeros_like(rows.values["logps"])
    torch.autograd.backward([out.logps, out.entropy], [g, e])
    call.check_gradient(*rows.gradient(g.reshape(-1).double(), e.reshape(-1).double(), (nothing, nothing), F32))
