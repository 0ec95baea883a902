"""The bare products nobody can do without: logits = h W^T, dH = G W, dW = G^T h, over the tokens that count.

dW is left out where the head is frozen, both gradients where none is asked for."""

import torch

from benchmark.cases import ITEM_BYTES, Case
from benchmark.inputs import Inputs

# One tile of logits: all of them if they fit, else a part of the vocabulary, and of the tokens too if that part would
# have fewer entries than MIN_ENTRIES. Each part of the vocabulary reads and writes dH once more, each part of the
# tokens dW; at these sizes that is at most a hundredth of the products' work.
TILE_BYTES = {"cpu": 512 << 20, "cuda": 2 << 30}
MIN_ENTRIES = 16384
# Entries of a tile that is not the whole vocabulary are a multiple of this. Matrices whose rows start elsewhere have
# slow products (136 ms in place of 24 on an H200).
ALIGNMENT = 128


class Products:
    """The products of a step, or the logits alone: call it to run them. Its buffers live as long as it does."""

    def __init__(self, case: Case, inputs: Inputs, device: str, *, gradients: bool) -> None:
        self.hidden, self.weight = inputs.hidden.detach()[inputs.mask], inputs.weight.detach()
        size = TILE_BYTES[device] // ITEM_BYTES[case.dtype]
        entries = size // len(self.hidden) // ALIGNMENT * ALIGNMENT
        self.entries = min(case.vocab, max(MIN_ENTRIES, entries))
        self.tokens = min(len(self.hidden), max(1, size // self.entries))
        # Filled here, so that a run does not wait for the system to find pages of host memory.
        self.tile = self.hidden.new_ones(self.tokens * self.entries)
        self.grad_hidden = torch.zeros_like(self.hidden) if gradients else None
        self.grad_weight = torch.zeros_like(self.weight) if gradients and not case.frozen else None

    def __call__(self) -> None:
        for i in range(0, len(self.hidden), self.tokens):
            for j in range(0, len(self.weight), self.entries):
                tokens, entries = slice(i, i + self.tokens), slice(j, j + self.entries)
                hidden, weight = self.hidden[tokens], self.weight[entries]
                logits = self.tile[: len(hidden) * len(weight)].view(len(hidden), len(weight))
                torch.mm(hidden, weight.T, out=logits)
                # The logits stand in for their gradient: a product takes as long whatever the values are.
                if self.grad_hidden is not None:
                    self.grad_hidden[tokens].addmm_(logits, weight, beta=int(j > 0))
                if self.grad_weight is not None:
                    self.grad_weight[entries].addmm_(logits.T, hidden, beta=int(i > 0))
