"""`weight_grad` under DistributedDataParallel, which reduces `weight.grad` and nothing else."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from liger_rl import linear_logprobs

TOKENS, HIDDEN, VOCAB, STEPS = 6, 8, 50, 2
REFUSED = "weight_grad must be weight.grad within DistributedDataParallel"


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, hidden: Tensor, targets: Tensor, weight_grad: Tensor | None = None) -> Tensor:
        return linear_logprobs(self.body(hidden), self.head.weight, targets, weight_grad=weight_grad).logps


def wrapped(rank, **options):
    """The wrapper, what it is called with on this rank, and the head's weight."""
    model = Policy().to(rank.device)
    parallel = DistributedDataParallel(model, process_group=rank.group, **options)
    torch.manual_seed(1 + rank.index)
    batch = torch.randn(TOKENS, HIDDEN).to(rank.device), torch.randint(VOCAB, (TOKENS,)).to(rank.device)
    return parallel, batch, model.head.weight


def summed_into_grad(rank, in_place):
    """Gradients after steps without a zero_grad between them."""
    parallel, batch, weight = wrapped(rank)
    for _ in range(STEPS):
        if in_place and weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        parallel(*batch, weight.grad if in_place else None).sum().backward()
    return [parameter.grad.cpu() for parameter in parallel.parameters()]


def test_the_weights_own_gradient_is_reduced(ranks, two):
    found, expected = (ranks.run(summed_into_grad, in_place, **two) for in_place in (True, False))
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)
    assert all(map(torch.equal, *found))


def with_an_empty_rank(rank, live):
    """-> gradients, the mean of the ranks', and this rank's own."""
    parallel, (hidden, targets), _ = wrapped(rank)
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


def another_tensor(rank):
    """-> its sum within `no_sync`, where it is the caller's, and the gradient that it should be."""
    parallel, batch, weight = wrapped(rank)
    total = torch.zeros_like(weight)
    with parallel.no_sync():
        parallel(*batch, total).sum().backward()
    alone = torch.autograd.grad(parallel.module(*batch).sum(), weight)[0]
    with pytest.raises(ValueError, match=REFUSED):
        parallel(*batch, total)
    return total.cpu(), alone.cpu()


def test_another_tensor_is_the_callers_in_no_sync_and_refused_elsewhere(ranks, two):
    for total, alone in ranks.run(another_tensor, **two):
        torch.testing.assert_close(total, alone)


def stale_view(rank):
    """After the first step the wrapper has put a view of its bucket in the place of `weight.grad`."""
    parallel, batch, weight = wrapped(rank, gradient_as_bucket_view=True)
    weight.grad = kept = torch.zeros_like(weight)
    parallel(*batch, kept).sum().backward()
    with pytest.raises(ValueError, match=REFUSED):
        parallel(*batch, kept)


def test_a_gradient_that_was_replaced_is_refused(ranks, two):
    ranks.run(stale_view, **two)
