"""verl's function with its vocabulary over ranks: its outputs, and gradients that the caller adds up."""

import pytest
import torch

from liger_rl.integrations.verl import linear_cross_entropy
from ranks import assert_whole

TOKENS, HIDDEN, VOCAB = 23, 12, 136


def solve(rank, reduction):
    torch.manual_seed(2)
    hidden, weight, labels = 2 * torch.randn(TOKENS, HIDDEN), torch.randn(VOCAB, HIDDEN), torch.arange(TOKENS) * 5
    upstream = torch.randn(TOKENS)
    group = None
    if rank is not None:
        rows = VOCAB // rank.world
        weight, group = weight[rank.index * rows : (rank.index + 1) * rows].clone(), rank.group
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    logprobs, entropy = linear_cross_entropy(*leaves, labels, 0.8, reduction, group)
    grads = torch.autograd.grad((logprobs * upstream).sum() + (entropy * upstream).sum(), leaves)
    return {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "parts": grads[0], "grad_weight": grads[1]}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_equals_one_rank(ranks, world, reduction):
    results, expected = ranks.run(solve, reduction, world=world), solve(None, reduction)
    parts = torch.stack([result.pop("parts") for result in results])
    whole = expected.pop("parts")
    torch.testing.assert_close(parts.sum(0), whole, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(parts[0], whole, rtol=0.1)  # verl's callers sum it
    assert_whole(results, expected, 1e-6, 1e-5)


def uneven(rank):
    with pytest.raises(ValueError, match="shards of weight must cover"):
        linear_cross_entropy(
            torch.ones(3, 4), torch.ones(5 + rank.index, 4), torch.zeros(3).long(), 1.0, "none", rank.group
        )


def test_parts_of_different_size_raise_everywhere(ranks):
    ranks.run(uneven)
