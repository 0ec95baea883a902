"""linear_logprobs and logits_logprobs against full logits in float64, on random cases."""

from contextlib import nullcontext

import torch
from hypothesis import given
from torch import Tensor

import oracle
from cases import BF16, F32, HeadCase, LogitsCase, fuzz, head_cases, logits_cases, tolerance_cases
from liger_rl import LogitTransform, LowRank, linear_logprobs, logits_logprobs, plan_linear_logprobs


def within(name: str, found: Tensor, expected: Tensor, budget: Tensor | float, case) -> None:
    """Finite entries are within the budget, the others are the same."""
    found, expected = found.detach().double().reshape(expected.shape), expected.detach()
    budget = torch.as_tensor(budget, dtype=torch.float64, device=found.device).expand(expected.shape).reshape(-1)
    error = torch.where(found == expected, 0.0, (found - expected).abs()).reshape(-1)
    bad = ~(error <= budget)
    if bad.any():
        worst = int(torch.where(bad, error / budget, 0.0).nan_to_num(torch.inf).argmax())
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {bad.numel()} off; at {worst} got {found.reshape(-1)[worst]:.9g}, expected "
            f"{expected.reshape(-1)[worst]:.9g}, error {error[worst]:.3g}, budget {budget[worst]:.3g}; {case!r}"
        )


def same(name: str, a: Tensor, b: Tensor, case) -> None:
    assert torch.equal(a.nan_to_num(12345.0), b.nan_to_num(12345.0)), f"{name} differ: {case!r}"


class Call:
    """One call of linear_logprobs: leaves, arguments."""

    def __init__(self, case: HeadCase) -> None:
        def leaf(x: Tensor | None, name: str) -> Tensor | None:
            return None if x is None else x.detach().requires_grad_(case.wants.get(name, False))

        self.case = case
        self.hidden, self.weight = leaf(case.hidden, "hidden"), leaf(case.weight, "weight")
        self.bias = leaf(case.bias, "bias")
        self.low_rank = []
        self.leaves = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        for i, term in enumerate(case.low_rank):
            tensors = {k: leaf(term[k], f"{k}{i}") for k in ("a", "b", "hidden")}
            self.low_rank.append(LowRank(**tensors, scaling=term["scaling"]))
            self.leaves |= {f"{k}{i}": tensors[k] for k in tensors}
        self.leaves = {k: x for k, x in self.leaves.items() if x is not None and x.requires_grad}
        self.weight_grad = None if case.weight_grad is None else case.weight_grad.clone()
        self.inputs = {k: x for k, x in self.leaves.items() if k != "weight" or self.weight_grad is None}
        self.autocast = (
            torch.autocast(self.hidden.device.type, case.autocast) if case.autocast is not None else nullcontext()
        )

    def options(self) -> dict:
        options = dict(self.case.options)
        spare = options.pop("spare_bytes", None)
        if spare is not None:
            options["max_extra_bytes"] = self.least_bytes() + spare
        return options

    def least_bytes(self, **more) -> int:
        case, chosen = self.case, {k: v for k, v in self.case.options.items() if k not in ("spare_bytes",)}
        return plan_linear_logprobs(
            case.targets.numel(), *case.weight.shape, dtype=case.hidden.dtype, weight_dtype=case.weight.dtype,
            compute_dtype=case.compute, device=case.hidden.device,
            needs=(self.hidden.requires_grad, any(x.requires_grad for x in (self.weight, self.bias) if x is not None)),
            bias=case.bias is not None, rank=sum(t["a"].shape[0] for t in case.low_rank),
            weight_grad=case.weight_grad is not None, transform=LogitTransform(**case.transform), **(chosen | more),
        ).least_bytes  # fmt: skip

    def __call__(self, rows=slice(None), **more):
        case = self.case
        with self.autocast:
            return linear_logprobs(
                self.hidden[rows], self.weight, case.targets[rows], mask=None if case.mask is None else case.mask[rows],
                bias=self.bias, low_rank=self.low_rank, transform=LogitTransform(**case.transform),
                compute_dtype=case.compute_dtype, weight_grad=self.weight_grad, **(self.options() | more),
            )  # fmt: skip

    def gradients(self, outputs: list[Tensor], upstream: list[Tensor], retain_graph: bool = True) -> dict[str, Tensor]:
        if not self.leaves or not outputs[0].requires_grad:
            return {}
        pairs = [(o, u) for o, u in zip(outputs, upstream, strict=False) if o.requires_grad]
        inputs = list(self.inputs.values())
        for x in inputs:
            x.grad = None
        torch.autograd.backward(
            [o for o, _ in pairs], [u for _, u in pairs], retain_graph=retain_graph, inputs=inputs or None
        )
        found = {k: (torch.zeros_like(x) if x.grad is None else x.grad.clone()) for k, x in self.inputs.items()}
        return found


def check_gradients(found: dict, expected: dict, budgets: dict, case: HeadCase) -> None:
    for name, grad in found.items():
        within(f"gradient of {name}", grad, expected[name], budgets[name], case)
    if "hidden" in found:
        assert not found["hidden"][~case.live].any(), f"masked tokens have a gradient: {case!r}"


@fuzz(0.42)
@given(case=head_cases())
def test_linear_logprobs(case: HeadCase) -> None:
    call = Call(case)
    out = call()
    wants_entropy = case.options["entropy"]
    g, e = case.upstream[0], case.upstream[1] if wants_entropy else torch.zeros_like(case.upstream[1])
    expected = oracle.head(case, g.reshape(-1), e.reshape(-1))
    names = ["logps", *(["entropy"] if wants_entropy else []), *case.options.get("extras", ())]
    for name in oracle.HeadResult._fields and ("logps", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"):
        value = getattr(out, name)
        assert (value is not None) == (name in names), name
        if value is not None:
            assert value.shape == case.targets.shape
            within(name, value, expected.values[name], expected.budgets[name], case)
    outputs = [out.logps, out.entropy] if wants_entropy else [out.logps]
    found = call.gradients(outputs, [g, e])
    check_gradients(found, expected.grads, expected.grad_budgets, case)
    if call.weight_grad is not None:
        before = case.weight_grad.double()
        budget = expected.grad_budgets["weight"] + oracle.EPS * before.abs()
        within("weight_grad", call.weight_grad, before + expected.grads["weight"], budget, case)
    elif found:
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
    leaf = case.logits.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    buffer = None if case.grad_buffer is None else case.grad_buffer.clone()
    out = logits_logprobs(
        leaf * 1 if case.options["in_place"] else leaf, case.targets, mask=case.mask, grad_buffer=buffer,
        transform=LogitTransform(**case.transform), entropy=True, **case.options,
    )  # fmt: skip
    g, e = case.upstream
    clean = case.logits.reshape(-1, case.logits.shape[-1]).masked_fill(~case.live.reshape(-1, 1), 0.0).double()
    rows = oracle.Logits(clean.requires_grad_(), clean.detach().abs(), case.targets.reshape(-1),
                         case.live.reshape(-1), case.transform)  # fmt: skip
    for name in ("logps", "entropy"):
        within(name, getattr(out, name), rows.values[name], rows.budgets[name], case)
    nothing = torch.zeros_like(rows.values["logps"])
    grad, budget = rows.gradient(g.reshape(-1).double(), e.reshape(-1).double(), (nothing, nothing), F32)
    torch.autograd.backward([out.logps, out.entropy], [g, e])
    dtype = case.logits.dtype if buffer is None else buffer.dtype
    start = torch.zeros_like(grad) if buffer is None else case.grad_buffer.reshape(grad.shape).double()
    total = start + grad
    slack = budget + 2 * oracle.unit(dtype) * (total.abs() + budget) + oracle._least(dtype)
    within("gradient of logits", leaf.grad if buffer is None else buffer, total, slack, case)
    if buffer is None:
        assert leaf.grad.dtype == case.logits.dtype
        assert not leaf.grad[~case.live].any(), f"masked tokens have a gradient: {case!r}"
    else:
        assert leaf.grad is None or not leaf.grad.any()


__all__ = ["BF16", "Call", "check_gradients", "within"]
