"""Batches for a policy loss of a head, steps of it, and how many tokens and passes a step took."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

import oracles
from head_calls import Problem, Products
from liger_rl import FusedLinearGRPOLoss

VOCAB, HIDDEN = 129, 16


class Batch(NamedTuple):
    head: Problem
    columns: dict[str, Tensor]

    def changed(self, **columns: Tensor | None) -> "Batch":
        """With other columns, and without those that are None."""
        merged = {**self.columns, **columns}
        return self._replace(columns={name: column for name, column in merged.items() if column is not None})


def batch(
    rows=6, length=9, dtype=torch.float32, device="cpu", *, vocab=VOCAB, hidden_size=HIDDEN, idle=True, **transform
) -> Batch:
    """Ratios cross the usual bounds, lengths differ; with `idle` every third sequence has no advantage."""
    head = Problem(
        torch.randn(rows, length, hidden_size).to(device, dtype),
        (torch.randn(vocab, hidden_size) / math.sqrt(hidden_size)).to(device, dtype),
        torch.randint(vocab, (rows, length)).to(device),
        torch.randn(vocab).to(device, dtype),
    )
    current = oracles.logprobs(head.hidden, head.weight, head.targets, head.bias, **transform)[0].float()

    def near() -> Tensor:
        return current + 0.3 * torch.randn(rows, length).to(device)

    advantages = torch.randn(rows).to(device)
    if idle:
        advantages[::3] = 0.0
    lengths = 1 + (torch.arange(rows, device=device) * 5 + length - 1) % length
    columns = {
        "advantages": advantages,
        "mask": torch.arange(length, device=device) < lengths[:, None],
        "old_per_token_logps": near(),
        "ref_per_token_logps": near(),
    }
    return Batch(head, columns)


def loss_of(module: FusedLinearGRPOLoss, leaves: Problem, data: Batch, **more):
    given = {"bias": leaves.bias, **data.columns, **more}
    return module(leaves.hidden, leaves.weight, leaves.targets, **given)


class Step(NamedTuple):
    loss: Tensor
    metrics: dict[str, Tensor]
    grads: dict[str, Tensor | None]


def step(module: FusedLinearGRPOLoss, data: Batch, factor: float = 1.0, frozen=(), **more) -> Step:
    leaves = data.head.leaves(frozen)
    loss, metrics = loss_of(module, leaves, data, **more)
    (loss * factor).backward()
    return Step(loss.detach(), {name: metric.value for name, metric in metrics.items()}, leaves.grads())


def assert_same(found: Step, expected: Step, tolerance: float = 1e-6, loss_tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found.loss, expected.loss, rtol=loss_tolerance, atol=1e-7)
    torch.testing.assert_close(found.metrics, expected.metrics, rtol=1e-6, atol=1e-6)
    for name, mine in found.grads.items():
        other = expected.grads[name]
        assert (mine is None) == (other is None)
        if mine is not None:
            assert mine.dtype == other.dtype
            assert oracles.relative_error(mine, other) <= tolerance, name


def projected(module, data: Batch) -> int:
    """The number of tokens whose logits the forward computed."""
    with Products() as products:
        loss_of(module, data.head.leaves(), data)
    vocab, hidden_size = data.head.weight.shape
    return sum(m * v for m, v in products.logits(hidden_size)) // vocab
