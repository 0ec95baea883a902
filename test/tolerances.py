"""A head with a tolerance: its inputs, and the plan of each backward.

On CPU the calls run as on a GPU whose products have an epilogue, in Triton's interpreter.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from head_calls import run_triton
from liger_rl import linear_logprobs
from liger_rl.head.sparse import lists
from liger_rl.kernels.limits import LIMITS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOW = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter misreads bfloat16 descriptors
TOKENS, VOCAB = (700, 3000) if DEVICE.type == "cuda" else (32, 800)  # the interpreter takes its time


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """16-bit calls of one token or more take the lists of ids. A small vocabulary is one of which most is kept."""
    monkeypatch.setattr(LIMITS, "selected_share", 13.0)  # a share of 1 at H = 64
    if DEVICE.type == "cpu":
        from liger_rl.kernels import segment_sums as segments
        from liger_rl.kernels import segment_sums_triton

        run_triton(monkeypatch, epilogue=True)
        # The sums have tests of their own; interpreted, they take a hundred times as long as all else here.
        monkeypatch.setattr(segment_sums_triton, "segment_sums", segments.segment_sums)


def stored(parts) -> Tensor:
    """The float32 numbers of kept parts, whose last 8 bits are not stored."""
    return ((parts.high.int() << 16) | (parts.low.int() << 8)).view(torch.float32)


def recorded_plans(monkeypatch: pytest.MonkeyPatch) -> list:
    """Of each backward with a tolerance: the parts that it keeps."""
    plans, wait_for_counts = [], lists.wait_for_counts
    monkeypatch.setattr(lists, "wait_for_counts", lambda *given: plans.append(wait_for_counts(*given)) or plans[-1])
    return plans


class Heads(NamedTuple):
    """A loss of a head's log-probabilities."""

    leaves: list[Tensor]  # hidden, weight, bias
    grad: Tensor  # dL/d result of each token
    targets: Tensor

    def loss(self, leaves: list[Tensor], **options) -> Tensor:
        """An entropy has a gradient too."""
        hidden, weight, bias = leaves
        found = linear_logprobs(hidden, weight, self.targets, bias=bias, **options)
        loss = (found.logps * self.grad).sum()
        return loss if found.entropy is None else loss + 0.1 * (found.entropy * self.grad.roll(1)).sum()

    def trained(self, frozen: int | None = None) -> list[Tensor]:
        return [leaf.detach().requires_grad_(place != frozen) for place, leaf in enumerate(self.leaves)]

    def gradients(self, tolerance: float, frozen: int | None = None, **options) -> tuple[Tensor, ...]:
        leaves = self.trained(frozen)
        loss = self.loss(leaves, grad_tolerance=tolerance, **options)
        return torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad])


def one_head(tokens: int = TOKENS, kind: str = "sure", dtype: torch.dtype = LOW, device=DEVICE) -> Heads:
    """A policy that is sure of most tokens, or of none."""
    weight = torch.randn(VOCAB, 64) * 64**-0.5
    targets = (torch.rand(tokens) ** 4 * VOCAB).long()
    hidden = torch.randn(tokens, 64)
    if kind == "sure":
        hidden += 30.0 * torch.rand(tokens, 1) * weight[targets]
    leaves = [leaf.to(device, dtype) for leaf in (hidden, weight, torch.randn(VOCAB) * 0.1)]
    return Heads(leaves, torch.randn(tokens).to(device), targets.to(device))
