"""How a test calls the head and compares with a budget."""

from contextlib import nullcontext

import torch
from torch import Tensor

import oracle
from cases import HeadCase, LogitsCase
from liger_rl import linear_logprobs, support_logprobs
from liger_rl.head import LogitTransform
from liger_rl.support import Support


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
    """One call of linear_logprobs, or of support_logprobs: leaves, arguments."""

    def __init__(self, case: HeadCase) -> None:
        def leaf(x: Tensor | None, name: str) -> Tensor | None:
            return None if x is None else x.detach().requires_grad_(case.wants.get(name, False))

        self.case = case
        self.hidden, self.weight = leaf(case.hidden, "hidden"), leaf(case.weight, "weight")
        self.bias = leaf(case.bias, "bias")
        self.leaves = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        self.leaves = {k: x for k, x in self.leaves.items() if x is not None and x.requires_grad}
        self.support = None if case.support is None else Support(**case.support)
        self.autocast = (
            torch.autocast(self.hidden.device.type, case.autocast) if case.autocast is not None else nullcontext()
        )

    def __call__(self, rows=slice(None), **more):
        case = self.case
        targets = case.targets if case.ids is None else case.ids
        with self.autocast:
            if self.support is not None:
                return support_logprobs(
                    self.hidden, self.weight, targets, self.support, mask=case.mask, bias=self.bias,
                    transform=LogitTransform(**case.transform), compute_dtype=case.compute_dtype, **case.options,
                )  # fmt: skip
            return linear_logprobs(
                self.hidden[rows], self.weight, targets[rows], mask=None if case.mask is None else case.mask[rows],
                bias=self.bias, transform=LogitTransform(**case.transform),
                compute_dtype=case.compute_dtype, **(case.options | more),
            )  # fmt: skip

    def gradients(self, outputs: list[Tensor], upstream: list[Tensor], retain_graph: bool = True) -> dict[str, Tensor]:
        if not self.leaves or not outputs[0].requires_grad:
            return {}
        pairs = [(o, u) for o, u in zip(outputs, upstream, strict=False) if o.requires_grad]
        inputs = list(self.leaves.values())
        for x in inputs:
            x.grad = None
        torch.autograd.backward(
            [o for o, _ in pairs], [u for _, u in pairs], retain_graph=retain_graph, inputs=inputs or None
        )
        found = {k: (torch.zeros_like(x) if x.grad is None else x.grad.clone()) for k, x in self.leaves.items()}
        return found


def check_gradients(found: dict, expected: oracle.HeadResult, call: Call) -> None:
    case, budgets = call.case, expected.grad_budgets
    for name, grad in found.items():
        within(f"gradient of {name}", grad, expected.grads[name], budgets[name], case)
    if "hidden" in found:
        assert not found["hidden"][~case.live].any(), f"masked tokens have a gradient: {case!r}"


class GivenLogits:
    """The leaf, and what its gradient must be, for a call that starts from logits."""

    def __init__(self, case: LogitsCase) -> None:
        self.case = case
        self.leaf = case.logits.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        raw = case.logits[:, :-1] if case.spare_position else case.logits
        rows = raw.reshape(-1, raw.shape[-1]).masked_fill(~case.live.reshape(-1, 1), 0.0).double().requires_grad_()
        live = case.live.reshape(-1)
        self.expected = oracle.Logits(rows, rows.detach().abs(), case.targets.reshape(-1), live, case.transform)

    def check_gradient(self, grad: Tensor, budget: Tensor) -> None:
        """grad, budget: (tokens, V)."""
        case, shape = self.case, (*self.case.targets.shape, self.leaf.shape[-1])
        grad, budget = grad.reshape(shape), budget.reshape(shape)
        if case.spare_position:
            grad, budget = (torch.cat([x, torch.zeros_like(x[:, :1])], 1) for x in (grad, budget))
        found = self.leaf.grad
        slack = budget + 2 * oracle.unit(found.dtype) * (grad.abs() + budget) + oracle._least(found.dtype)
        within("gradient of logits", found, grad, slack, case)
        assert found.dtype == case.logits.dtype
        of_tokens = found[:, :-1] if case.spare_position else found
        assert not of_tokens[~case.live].any(), f"masked tokens have a gradient: {case!r}"
