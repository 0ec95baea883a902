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


def batch(kind, tokens=TOKENS, hidden_size=64, vocab=VOCAB, dtype=LOW):
    """Leaves and the gradient of a loss: a policy that is sure of most tokens, or of none."""
    weight = torch.randn(vocab, hidden_size) * hidden_size**-0.5
    targets = (torch.rand(tokens) ** 4 * vocab).long()
    hidden = torch.randn(tokens, hidden_size)
    if kind == "sure":
        hidden += 30.0 * torch.rand(tokens, 1) * weight[targets]
    leaves = [leaf.to(DEVICE, dtype).requires_grad_() for leaf in (hidden, weight, torch.randn(vocab) * 0.1)]
    return leaves, targets.to(DEVICE), torch.randn(tokens, device=DEVICE)


def gradients(leaves, targets, grad, *, grad_tolerance=0.0, **kwargs):
    hidden, weight, bias = leaves
    found = linear_logprobs(hidden, weight, targets, bias=bias, grad_tolerance=grad_tolerance, **kwargs)
    loss = (found.logps * grad).sum()
    if found.entropy is not None:
        loss = loss + 0.1 * (found.entropy * grad.roll(1)).sum()
    return torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad])


def distance(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


class Pair(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    grad: Tensor  # dL/d divergence

    def gradients(self, of_logps: Tensor | None = None, **options) -> tuple[Tensor, ...]:
        """With `of_logps` (N,) targets have log-probabilities with that gradient."""
        leaves = [part.detach().requires_grad_() for part in self[:3]]
        found = linear_divergence(*leaves[:2], *self[3:5], bias=leaves[2], **options)
        loss = (found.divergence * self.grad).sum()
        return torch.autograd.grad(loss if of_logps is None else loss + (found.logps * of_logps).sum(), leaves)


def pair(dtype=LOW, tokens=40, sizes=(48, 64), device=DEVICE) -> Pair:
    """Peaked at a few entries, most of them of the first tile; the teacher is near."""
    weight = torch.randn(PAIR_VOCAB, sizes[0]) / sizes[0] ** 0.5
    targets = (torch.rand(tokens) ** 4 * PAIR_VOCAB).long()
    hidden = torch.randn(tokens, sizes[0]) + 30.0 * torch.rand(tokens, 1) * weight[targets]
    mixed = torch.nn.init.orthogonal_(torch.empty(sizes[1], sizes[0]))
    teacher_hidden = (hidden + 0.2 * torch.randn_like(hidden)) @ mixed.T
    parts = (hidden, weight, 0.1 * torch.randn(PAIR_VOCAB), teacher_hidden, weight @ mixed.T)
    return Pair(*(part.to(device, dtype) for part in parts), torch.randn(tokens).to(device))
