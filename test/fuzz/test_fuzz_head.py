"""linear_logprobs, support_logprobs and logits_logprobs against full logits in float64, on random cases."""

import torch
from hypothesis import given

import oracle
from cases import F32, HeadCase, LogitsCase, fuzz, head_cases, logits_cases, several_cases, support_cases
from checks import Call, GivenLogits, check_gradients, same, within
from liger_rl.head import LogitTransform, LogProbs, logits_logprobs
from liger_rl.kernels.statistics import EXTRAS

DIFFERENTIABLE = ("logps", "entropy", "lse", "mean_logits")
CONSTANT = tuple(name for name in EXTRAS if name != "mean_logits")


def check_head(case: HeadCase) -> tuple[Call, LogProbs, oracle.HeadResult, dict]:
    """Values and gradients -> the call, its results, what they must be, gradients by name."""
    call = Call(case)
    out = call()
    asked = {"logps", *case.options.get("extras", ()), *(name for name in ("entropy", "lse") if case.options.get(name))}
    names = [name for name in DIFFERENTIABLE if name in asked]
    upstream = {n: u if n in names else torch.zeros_like(u) for n, u in zip(DIFFERENTIABLE, case.upstream, strict=True)}
    flat = [u.reshape(-1, *u.shape[case.targets.dim() :]) for u in upstream.values()]
    expected = oracle.head(case, flat[0], flat[1], r=flat[2], m=flat[3])
    for name in (*DIFFERENTIABLE, *CONSTANT):
        value = getattr(out, name, None)
        assert (value is not None) == (name in asked), name
        if value is not None:
            assert value.dtype == (torch.bool if name == "is_top1" else F32)
            assert not (value.requires_grad and name in CONSTANT), name
            within(name, value, expected.values[name], expected.budgets[name], case)
    found = call.gradients([getattr(out, name) for name in names], [upstream[name] for name in names])
    check_gradients(found, expected, call)
    return call, out, expected, found


def check_again(case: HeadCase) -> tuple[Call, LogProbs]:
    """As `check_head`; also shapes, and bits of a second backward and of another call."""
    call, out, _, found = check_head(case)
    names = [name for name in (*DIFFERENTIABLE, *CONSTANT) if getattr(out, name, None) is not None]
    assert all(getattr(out, name).shape == case.targets.shape for name in names)
    if found:
        given = [(name, u) for name, u in zip(DIFFERENTIABLE, case.upstream, strict=True) if name in names]
        again = Call(case)
        for kind, (one, results) in {"second": (call, out), "repeated": (again, again())}.items():
            grads = one.gradients([getattr(results, name) for name, _ in given], [u for _, u in given])
            for name, grad in grads.items():
                same(f"{kind} gradients of {name}", grad, found[name], case)
            same(f"{kind} logps", results.logps, out.logps, case)
    return call, out


@fuzz(0.2)
@given(case=head_cases())
def test_linear_logprobs(case: HeadCase) -> None:
    check_again(case)


@fuzz(0.22)
@given(case=support_cases())
def test_support_logprobs(case: HeadCase) -> None:
    _, out = check_again(case)
    same("missing_target", out.missing_target.reshape(-1).float(), oracle.listed_of(case)[1].float(), case)


@fuzz(0.12)
@given(case=several_cases())
def test_several_targets(case: HeadCase) -> None:
    check_head(case)


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
