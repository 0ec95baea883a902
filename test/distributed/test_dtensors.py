"""DTensor weights and hidden states on meshes of several dimensions. On one: cases of test_vocab_parallel.py."""

import math

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from liger_rl import FusedLinearGRPOLoss, linear_logprobs
from liger_rl.models.tensors import localize
from ranks import message_of, sent

BATCH, TIME, HIDDEN, VOCAB = 4, 8, 6, 37


def problem(device="cpu"):
    torch.manual_seed(4)
    hidden, weight, bias = torch.randn(BATCH, TIME, HIDDEN), torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB)
    targets = torch.randint(VOCAB, (BATCH, TIME))
    targets[0, :3] = -100
    return [values.to(device) for values in (hidden, weight, bias, targets, torch.randn(BATCH, TIME))]


def local_logprobs(hidden, weight, targets, bias=None, **options):
    local = localize(hidden, weight, bias=bias)
    return linear_logprobs(
        local.hidden, local.weight, targets, bias=local.bias, vocab_parallel=local.vocab_parallel, **options
    )


def solve(hidden, weight, bias, targets, upstream):
    """Results, and gradients as whole tensors."""
    leaves = [leaf.requires_grad_() for leaf in (hidden, weight, bias)]
    found = local_logprobs(hidden, weight, targets, bias=bias, entropy=True)
    grads = torch.autograd.grad((found.logps * upstream).sum() + (found.entropy * upstream).sum(), leaves)
    whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
    return [values.detach().cpu() for values in (*found[:2], *whole)]


def assert_same(results, expected):
    for result in results:
        for found, truth in zip(result, expected, strict=True):
            torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5)
            assert truth.any()


def replicated(rank):
    mesh = rank.mesh("tp")
    hidden, weight, bias, targets, upstream = problem(rank.device)
    with sent() as calls:
        values = (distribute_tensor(value, mesh, [Replicate()]) for value in (weight, bias))
        results = solve(hidden, *values, targets, upstream)
    assert not calls
    return results


def test_a_replicated_weight_needs_no_collective(ranks):
    assert_same(ranks.run(replicated), solve(*problem()))


def fully_sharded(rank, shape, names):
    """Other tokens on each rank of data's dimensions; gradients are means over them, as FSDP's."""
    mesh = rank.mesh(*names, shape=shape if len(shape) > 1 else None)
    hidden, weight, bias, targets, upstream = problem(rank.device)
    ours, parts = 0, math.prod(shape)
    for d, size in enumerate(shape):
        ours = ours * size + mesh.get_local_rank(d)
    tokens = slice(ours * BATCH // parts, (ours + 1) * BATCH // parts)
    placements = [Replicate() if name == "replicate" else Shard(0) for name in names]
    weight, bias = (distribute_tensor(value, mesh, placements) for value in (weight, bias))
    results = solve(hidden[tokens].clone(), weight, bias, targets[tokens], upstream[tokens])
    return ours, results


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((2,), ("dp",)),
        ((2, 2), ("replicate", "fsdp_shard")),
    ],
    ids=["fsdp", "hsdp"],
)
def test_shards_of_data_parallelism_are_gathered(ranks, shape, names):
    results = ranks.run(fully_sharded, shape, names, world=math.prod(shape))
    expected = solve(*problem())
    replicas = {}
    for ours, result in results:
        replicas.setdefault(ours, result)
    parts = [replicas[ours] for ours in sorted(replicas)]
    for place in range(3):  # logps, entropy and the gradient of hidden are those of the rank's own tokens
        torch.testing.assert_close(torch.cat([part[place] for part in parts]), expected[place], rtol=1e-5, atol=1e-5)
    for place in (3, 4):
        torch.testing.assert_close(parts[0][place] * len(parts), expected[place], rtol=1e-5, atol=1e-5)
        for part in parts:
            assert torch.equal(part[place], parts[0][place])


def loss_of_gathered_rows(rank):
    """Loss and gradients of FSDP's shards, with the same tokens on both ranks."""
    hidden, weight, _, targets, upstream = problem()
    mesh = rank.mesh("dp")
    leaves = hidden.requires_grad_(), distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    local = localize(*leaves)
    loss = FusedLinearGRPOLoss("grpo")(local.hidden, local.weight, targets, upstream).loss
    grads = torch.autograd.grad(loss, leaves)
    return loss.detach(), grads[0], grads[1].full_tensor()


def test_a_loss_with_gathered_rows(ranks):
    hidden, weight, _, targets, upstream = problem()
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    loss = FusedLinearGRPOLoss("grpo")(*leaves, targets, upstream).loss
    expected = loss.detach(), *torch.autograd.grad(loss, leaves)
    assert_same(ranks.run(loss_of_gathered_rows), expected)


def refused(rank):
    mesh = rank.mesh("tp")
    hidden, weight, _, targets, _ = problem()
    columns = distribute_tensor(weight, mesh, [Shard(1)])
    rows = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    unnamed = distribute_tensor(weight, rank.mesh(), [Shard(0)])
    cut = distribute_tensor(hidden, mesh, [Shard(1)])
    strided = DTensor.from_local(weight[:19], mesh, [_StridedShard(0, split_factor=2)])
    loss = FusedLinearGRPOLoss("grpo")
    return [
        message_of(lambda: localize(hidden, columns)),
        message_of(lambda: localize(hidden, strided)),
        message_of(lambda: localize(cut, weight)),
        message_of(lambda: localize(DTensor.from_local(hidden, mesh, [Partial()]), rows)),
        message_of(lambda: localize(hidden, weight, bias=columns)),
        message_of(lambda: localize(hidden, unnamed)),
        message_of(lambda: linear_logprobs(hidden, rows, targets)),
        message_of(lambda: loss(hidden, rows, targets, torch.ones(BATCH))),
        message_of(lambda: linear_logprobs(hidden, weight, distribute_tensor(targets, mesh, [Replicate()]))),
        localize(hidden, unnamed, in_forward=True).vocab_parallel.vocab_start,
    ]


def test_what_cannot_be_is_named(ranks):
    results = ranks.run(refused)
    assert results[0][:-1] == results[1][:-1]
    assert [result[-1] for result in results] == [0, 19]
    columns, strided, cut, partial, bias, names, *heads, targets = results[0][:-1]
    for message, name in ((columns, "weight"), (strided, "weight"), (bias, "bias")):
        assert message.startswith(f"ValueError: {name} must be Shard(0) or Replicate on a mesh for data")
    assert "got (Shard(dim=1),) on" in columns
    assert "got (_StridedShard(dim=0, sf=2),) on" in strided
    for message in (cut, partial):
        assert message.startswith("ValueError: hidden must be a plain tensor or Replicate on its mesh, got (")
    assert names.startswith("ValueError: weight must be sharded on a mesh whose dimensions have names")
    for head in heads:
        assert head.startswith("TypeError: weight must be a plain tensor, got a DTensor")
    assert targets.startswith("TypeError: targets must be a plain tensor, got a DTensor")


def repeated(rank):
    """The rows that ranks tell each other are known of a DTensor, whose local tensor is another in each call."""
    _, whole, _, targets, _ = problem()
    weight = distribute_tensor(whole, rank.mesh("tp"), [Shard(0)]).requires_grad_()
    hidden, counts = torch.randn(BATCH, TIME, HIDDEN), []
    with sent() as calls:
        for _ in range(3):
            local_logprobs(hidden, weight, targets)
            counts.append(sum(name == "all_gather_object" for name, _ in calls))
    return counts


def test_a_dtensors_rows_are_told_once(ranks):
    assert ranks.run(repeated) == [[1, 1, 1]] * 2
