"""A head under DistributedDataParallel, with other numbers of tokens on each rank."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from liger_rl import linear_logprobs

TOKENS, HIDDEN, VOCAB = 6, 8, 50


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return linear_logprobs(self.body(hidden), self.head.weight, targets).logps


def wrapped(rank):
    """The wrapper, and what it is called with on this rank."""
    model = Policy().to(rank.device)
    parallel = DistributedDataParallel(model, process_group=rank.group)
    torch.manual_seed(1 + rank.index)
    batch = torch.randn(TOKENS, HIDDEN).to(rank.device), torch.randint(VOCAB, (TOKENS,)).to(rank.device)
    return parallel, batch


def with_an_empty_rank(rank, live):
    """-> gradients, the mean of the ranks', and this rank's own."""
    parallel, (hidden, targets) = wrapped(rank)
    targets[live[rank.index] :] = -100
    own = torch.autograd.grad(parallel.module(hidden, targets).sum(), list(parallel.parameters()))
    parallel(hidden, targets).sum().backward()
    return [parameter.grad.cpu() for parameter in parallel.parameters()], [grad.cpu() for grad in own]


@pytest.mark.parametrize("live", [(6, 2, 1, 4), (0, 6, 0, 1), (0, 0, 0, 0)])
def test_ranks_with_other_numbers_of_tokens(ranks, live):
    results = ranks.run(with_an_empty_rank, live, world=4)
    means = [sum(grads) / 4 for grads in zip(*(own for _, own in results), strict=True)]
    for found, _ in results:
        torch.testing.assert_close(found, means)
