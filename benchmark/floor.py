"""The bare products nobody can do without: logits = h W^T, dH = G W, dW = G^T h, over the tokens that count.

dW is left out where the head is frozen, both gradients where none is asked for."""

from typing import NamedTuple

import torch

from benchmark.cases import ITEM_BYTES, STEP, Case
from benchmark.inputs import Inputs
from benchmark.timing import median_ms

# One tile of logits: all of them where they fit, else slices of the vocabulary.
TILE_BYTES = {"cpu": 512 << 20, "cuda": 12 << 30}


class Floor(NamedTuple):
    """Median milliseconds."""

    forward: float  # the logits alone
    step: float | None  # all the products of a step, None where there is none


def measure_floor(case: Case, inputs: Inputs, device: str) -> Floor:
    with torch.no_grad():
        hidden, weight = inputs.hidden[inputs.mask], inputs.weight
        rows, vocab = hidden.shape[0], case.vocab
        columns = min(vocab, max(1, TILE_BYTES[device] // (rows * ITEM_BYTES[case.dtype])))
        spans = [(first, min(first + columns, vocab)) for first in range(0, vocab, columns)]
        tile = torch.ones(rows * columns, dtype=hidden.dtype, device=hidden.device)
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)

        def logits(first: int, last: int) -> torch.Tensor:
            out = tile[: rows * (last - first)].view(rows, last - first)
            return torch.mm(hidden, weight[first:last].T, out=out)

        def forward() -> None:
            for first, last in spans:
                logits(first, last)

        def step() -> None:
            for first, last in spans:
                # The logits stand in for their gradient: a product takes as long whatever the values are.
                gradient = logits(first, last)
                if first == 0:
                    torch.mm(gradient, weight[first:last], out=grad_hidden)
                else:
                    grad_hidden.addmm_(gradient, weight[first:last])
                if not case.frozen:
                    torch.mm(gradient.T, hidden, out=grad_weight[first:last])

        return Floor(median_ms(forward, device), median_ms(step, device) if case.task == STEP else None)
