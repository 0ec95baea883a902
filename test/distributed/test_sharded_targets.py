"""Several targets, the largest log-probabilities and lse of a head that is sharded over its vocabulary."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from liger_rl import LogitTransform, VocabParallel, linear_logprobs, topk_divergence
from ranks import sent

HIDDEN, VOCAB = 12, 61
SHARDS = {2: (31, 30), 4: (2, 40, 1, 18)}  # some have fewer rows than K


def inputs(rank=None):
    """A whole head, or this rank's rows of it; ids of every shard, negative ones, repeats and ties."""
    torch.manual_seed(2)
    hidden, weight, bias = torch.randn(9, HIDDEN), torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB)
    weight[[3, 33, 50]], bias[[3, 33, 50]] = weight[40].clone(), 6.0  # ties between shards
    ids = torch.randint(VOCAB, (9, 7))
    ids[:, 3], ids[2, 5], ids[4] = ids[:, 1], -100, -1
    place = None
    if rank is not None:
        start = sum(SHARDS[rank.world][: rank.index])
        rows = slice(start, start + SHARDS[rank.world][rank.index])
        weight, bias, place = weight[rows].clone(), bias[rows].clone(), VocabParallel(rank.group, start)
    leaves = [part.requires_grad_() for part in (hidden, weight, bias)]
    return leaves, ids, torch.arange(9) != 6, place


def solve(rank, several, options):
    """Values; gradients of hidden, weight and bias."""
    (hidden, weight, bias), ids, mask, place = inputs(rank)
    transform = LogitTransform(softcap=9.0, temperature=0.8)
    found = linear_logprobs(
        hidden, weight, ids if several else ids[:, 0].clamp(min=0), mask=mask, bias=bias, vocab_parallel=place,
        transform=transform, entropy=True, lse=True, topk=6, **options,
    )  # fmt: skip
    loss = sum((part * torch.arange(part.numel()).view(part.shape)).sum() for part in (found[0], found[1], found.lse))
    grads = torch.autograd.grad(loss, (hidden, weight, bias))
    names = ("logps", "entropy", "lse", "topk_logps", "topk_ids")
    return {name: getattr(found, name).detach() for name in names}, grads


@pytest.mark.parametrize(("world", "several", "options"), [
    (2, True, {}), (4, True, {"chunk_tokens": 4, "chunk_vocab": 8}), (2, True, {"fixed_shape": True}), (4, False, {}),
])  # fmt: skip
def test_equals_the_whole_head(ranks, world, several, options):
    results, (expected, grads) = ranks.run(solve, several, options, world=world), solve(None, several, options)
    for values, (hidden, *_) in results:
        for name, truth in expected.items():
            torch.testing.assert_close(values[name], truth, rtol=1e-5, atol=1e-5)
            assert torch.equal(values[name], results[0][0][name]), f"{name} differs between ranks"
        torch.testing.assert_close(hidden, grads[0], rtol=1e-4, atol=1e-3)
    for place in (1, 2):
        whole = torch.cat([parts[place] for _, parts in results])
        torch.testing.assert_close(whole, grads[place], rtol=1e-4, atol=1e-3)


def distilled(rank):
    (hidden, weight, bias), ids, mask, place = inputs(rank)
    teacher = torch.randn(9, 7).log_softmax(-1)
    found = topk_divergence(hidden, weight, ids, teacher, tail="none", mask=mask, bias=bias, vocab_parallel=place)
    (grad,) = torch.autograd.grad(found.divergence.sum(), hidden)
    return found.divergence.detach(), grad


def test_distillation_from_lists(ranks):
    expected = distilled(None)
    for found in ranks.run(distilled, world=2):
        for mine, truth in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, truth, rtol=1e-4, atol=1e-4)


def on_a_mesh(rank):
    """DTensors in, but for what is of tokens."""
    (hidden, weight, bias), ids, mask, _ = inputs()
    mesh = rank.mesh("tp")
    hidden, weight, bias = (
        distribute_tensor(part.detach(), mesh, [placement]).requires_grad_()
        for part, placement in ((hidden, Replicate()), (weight, Shard(0)), (bias, Shard(0)))
    )
    found = linear_logprobs(hidden, weight, ids, mask=mask, bias=bias, lse=True, topk=6)
    grads = torch.autograd.grad(found.logps.sum() + found.lse.sum(), (hidden, weight, bias))
    return [part.detach() for part in (found.logps, found.lse, found.topk_ids)] + [part.full_tensor() for part in grads]


def test_a_dtensor_weight(ranks):
    (hidden, weight, bias), ids, mask, _ = inputs()
    found = linear_logprobs(hidden, weight, ids, mask=mask, bias=bias, lse=True, topk=6)
    grads = torch.autograd.grad(found.logps.sum() + found.lse.sum(), (hidden, weight, bias))
    for result in ranks.run(on_a_mesh, world=2):
        for mine, truth in zip(result, (found.logps, found.lse, found.topk_ids, *grads), strict=True):
            torch.testing.assert_close(mine, truth.detach(), rtol=1e-4, atol=1e-4)


def collectives(rank, topk):
    """Shapes that a forward and a backward send, once the ranks have compared notes."""
    (hidden, weight, bias), ids, mask, place = inputs(rank)
    given = {"mask": mask, "bias": bias, "vocab_parallel": place, "topk": topk}
    linear_logprobs(hidden, weight, ids, **given)
    with sent() as calls:
        linear_logprobs(hidden, weight, ids, **given).logps.sum().backward()
    return [shape for _, shape in calls]


@pytest.mark.parametrize("topk", [None, 6])
def test_what_is_sent(ranks, topk):
    """One collective more of (n, K) for the targets, and one for the largest; none of them in a loop over tiles."""
    n = 7  # of 9: one is masked, one has negative ids alone
    for shapes in ranks.run(collectives, topk, world=2):
        assert shapes == [(1, n), (2, n), (n, 7), *([(n, 6)] if topk else []), (n, HIDDEN)]
