"""One head and two heads with a tolerance: their inputs, and the plan of each backward.

On CPU the calls run as on a GPU whose products have an epilogue, in Triton's interpreter.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from head_calls import run_triton
from liger_rl import linear_divergence, linear_logprobs
from liger_rl.engines.pair import reference as divergence
from liger_rl.engines.pair import two_heads as engine
from liger_rl.engines.sparse import lists

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOW = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter misreads bfloat16 descriptors
TOKENS, VOCAB = (700, 3000) if DEVICE.type == "cuda" else (32, 800)  # the interpreter takes its time
TILE = 1024 if DEVICE.type == "cuda" else 256
PAIR_VOCAB = 5 * TILE + 104


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """16-bit calls of one token or more take the lists of ids. A small vocabulary is one of which most is kept."""
    monkeypatch.setattr(lists, "dense_share", lambda hidden_size: 1.0)
    if DEVICE.type == "cpu":
        from liger_rl.kernels import segments, segments_triton

        run_triton(monkeypatch, epilogue=True)
        # The sums have tests of their own; interpreted, they take a hundred times as long as all else here.
        monkeypatch.setattr(segments_triton, "segment_sums", segments.segment_sums)


def interpret_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    monkeypatch.setattr(lists, "most_ids", lambda vocab: vocab)
    if DEVICE.type == "cpu":
        from liger_rl.engines.pair import bounds_triton as sparse_pair_triton
        from liger_rl.engines.pair import epilogue as pair_epilogue
        from liger_rl.engines.pair import tiles_triton as divergence_triton
        from liger_rl.engines.sparse import bounds_triton as sparse_triton

        for module in (divergence, engine, divergence_triton, pair_epilogue, sparse_pair_triton):
            monkeypatch.setattr(module, "TILE_VOCAB", TILE)
        monkeypatch.setattr(divergence_triton, "BLOCK", TILE)
        monkeypatch.setattr(sparse_triton, "SAMPLES", 8)


def stored(parts) -> Tensor:
    """The float32 numbers of kept parts, whose last 8 bits are not stored."""
    return ((parts.high.int() << 16) | (parts.low.int() << 8)).view(torch.float32)


def recorded_plans(monkeypatch: pytest.MonkeyPatch) -> list:
    """Of each backward with a tolerance: the parts that it keeps."""
    plans, plan_parts = [], lists.plan_parts
    monkeypatch.setattr(lists, "plan_parts", lambda *given: plans.append(plan_parts(*given)) or plans[-1])
    return plans


class Heads(NamedTuple):
    """A loss of one head's log-probabilities, or of two heads' divergence."""

    leaves: list[Tensor]  # hidden, weight, bias
    grad: Tensor  # dL/d result of each token
    targets: Tensor | None = None
    teacher: tuple[Tensor, Tensor] | None = None  # hidden, weight

    def loss(self, leaves: list[Tensor], of_logps: Tensor | None = None, **options) -> Tensor:
        """With an entropy, or beside a divergence log-probabilities of targets, these have gradients too."""
        hidden, weight, bias = leaves
        if self.teacher is None:
            found = linear_logprobs(hidden, weight, self.targets, bias=bias, **options)
            loss = (found.logps * self.grad).sum()
        else:
            found = linear_divergence(hidden, weight, *self.teacher, bias=bias, targets=self.targets, **options)
            loss = (found.divergence * self.grad).sum()
            if self.targets is not None:
                loss = loss + (found.logps * (0.3 * self.grad.flip(0) if of_logps is None else of_logps)).sum()
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


def two_heads(tokens: int = 40, sizes=(48, 64), dtype: torch.dtype = LOW, device=DEVICE) -> Heads:
    """Peaked at a few entries, most of them of the first tile; the teacher is near."""
    weight = torch.randn(PAIR_VOCAB, sizes[0]) / sizes[0] ** 0.5
    targets = (torch.rand(tokens) ** 4 * PAIR_VOCAB).long()
    hidden = torch.randn(tokens, sizes[0]) + 30.0 * torch.rand(tokens, 1) * weight[targets]
    mixed = torch.nn.init.orthogonal_(torch.empty(sizes[1], sizes[0]))
    teacher_hidden = (hidden + 0.2 * torch.randn_like(hidden)) @ mixed.T
    parts = (hidden, weight, 0.1 * torch.randn(PAIR_VOCAB), teacher_hidden, weight @ mixed.T)
    *leaves, teacher_hidden, teacher_weight = (part.to(device, dtype) for part in parts)
    return Heads(leaves, torch.randn(tokens).to(device), teacher=(teacher_hidden, teacher_weight))


def distance(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()
