"""DTensor weights and hidden states: what the whole tensors give, whatever the meshes."""

import math

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from liger_rl import FusedLinearGRPOLoss, LowRank, Support, linear_logprobs
from ranks import message_of, sent

BATCH, TIME, HIDDEN, VOCAB = 4, 8, 6, 37


def problem(device="cpu"):
    torch.manual_seed(4)
    hidden, weight, bias = torch.randn(BATCH, TIME, HIDDEN), torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB)
    targets = torch.randint(VOCAB, (BATCH, TIME))
    targets[0, :3] = -100
    return [values.to(device) for values in (hidden, weight, bias, targets, torch.randn(BATCH, TIME))]


def solve(hidden, weight, bias, targets, upstream, **options):
    """Results, and gradients as whole tensors."""
    leaves = [leaf.requires_grad_() for leaf in (hidden, weight, bias)]
    found = linear_logprobs(hidden, weight, targets, bias=bias, entropy=True, **options)
    logps = found.logps if found.logps.dim() == 2 else found.logps.sum(-1) + found.lse
    grads = torch.autograd.grad((logps * upstream).sum() + (found.entropy * upstream).sum(), leaves)
    whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
    placements = [grad.placements if isinstance(grad, DTensor) else None for grad in grads]
    results = [part for part in (*found[:2], found.topk_ids) if part is not None]
    return [values.detach().cpu() for values in (*results, *whole)], placements


def tensor_parallel(rank, hidden_placement, feature=None):
    """A `feature` of the call: low-rank terms, a support with a few ids for most tokens, or several targets."""
    hidden, weight, bias, targets, upstream = problem("cpu" if rank is None else rank.device)
    options, a, b = {}, torch.ones(2, HIDDEN).to(hidden), torch.ones(VOCAB, 2).to(hidden)
    ids = torch.arange(BATCH * TIME * 3, device=hidden.device).view(BATCH, TIME, 3) * 5 % VOCAB
    if rank is not None:
        mesh = rank.mesh("tp")
        weight, bias, b = (distribute_tensor(values, mesh, [Shard(0)]) for values in (weight, bias, b))
        a = distribute_tensor(a, mesh, [Replicate()])
        if hidden_placement is not None:
            hidden = distribute_tensor(hidden, mesh, [hidden_placement])
    if feature == "low rank":
        options["low_rank"] = [LowRank(a=a, b=b)]
    elif feature == "support":
        ids[:, ::3] = -1
        options["support"] = Support.from_padded(ids)
    elif feature == "several targets":
        targets, options = torch.where(targets[..., None] >= 0, ids, -100), {"lse": True, "topk": 6}
    results, placements = solve(hidden, weight, bias, targets, upstream, **options)
    if rank is not None:
        assert placements[1] == placements[2] == (Shard(0),)
        assert placements[0] == (None if hidden_placement is None else (hidden_placement,))
    return results


def assert_same(results, expected):
    for result in results:
        for found, truth in zip(result, expected, strict=True):
            torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5)
            assert truth.any()


@pytest.mark.parametrize("placement", [None, Replicate(), Shard(1), Shard(0)], ids=str)
def test_a_sharded_weight_is_a_vocabulary_over_ranks(ranks, world, placement):
    assert_same(ranks.run(tensor_parallel, placement, **world), tensor_parallel(None, None))


@pytest.mark.parametrize(
    ("placement", "feature"),
    [(None, "support"), (Shard(1), "support"), (Shard(1), "low rank"), (Replicate(), "several targets")],
)
def test_features_of_a_sharded_weight(ranks, two, placement, feature):
    assert_same(ranks.run(tensor_parallel, placement, feature, **two), tensor_parallel(None, None, feature))


def replicated(rank):
    mesh = rank.mesh("tp")
    hidden, weight, bias, targets, upstream = problem(rank.device)
    with sent() as calls:
        values = (distribute_tensor(value, mesh, [Replicate()]) for value in (weight, bias))
        results, _ = solve(hidden, *values, targets, upstream)
    assert not calls
    return results


def test_a_replicated_weight_needs_no_collective(ranks):
    assert_same(ranks.run(replicated), solve(*problem())[0])


def fully_sharded(rank, shape, names):
    """Other tokens on each rank of data's dimensions; gradients are means over them, as FSDP's."""
    mesh = rank.mesh(*names, shape=shape if len(shape) > 1 else None)
    hidden, weight, bias, targets, upstream = problem(rank.device)
    data = [d for d, name in enumerate(names) if name != "tp"]
    ours, parts = 0, 1
    for d in data:
        ours, parts = ours * shape[d] + mesh.get_local_rank(d), parts * shape[d]
    tokens = slice(ours * BATCH // parts, (ours + 1) * BATCH // parts)
    placements = [Replicate() if name == "replicate" else Shard(0) for name in names]
    if "tp" in names:
        # As parameters of a tensor-parallel model lie after fully_shard: cut over tp first.
        tp = mesh["tp"]
        cut = [distribute_tensor(value, tp, [Shard(0)]).to_local() for value in (weight, bias)]
        from torch.distributed.tensor.placement_types import _StridedShard

        placements[-2] = _StridedShard(0, split_factor=shape[-1])
        locals_ = [distribute_tensor(value, mesh[names[-2]], [Shard(0)]).to_local() for value in cut]
        weight, bias = (
            DTensor.from_local(value, mesh, placements, shape=whole.shape, stride=whole.stride())
            for value, whole in zip(locals_, (weight, bias), strict=True)
        )
    else:
        weight, bias = (distribute_tensor(value, mesh, placements) for value in (weight, bias))
    results, _ = solve(hidden[tokens].clone(), weight, bias, targets[tokens], upstream[tokens])
    return ours, results


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((2,), ("dp",)),
        ((2, 2), ("replicate", "fsdp_shard")),
        ((2, 2), ("dp", "tp")),
        ((2, 1, 2), ("replicate", "dp_shard", "tp")),
    ],
    ids=["fsdp", "hsdp", "fsdp and tp", "hsdp and tp"],
)
def test_shards_of_data_parallelism_are_gathered(ranks, shape, names):
    results = ranks.run(fully_sharded, shape, names, world=math.prod(shape))
    expected = solve(*problem())[0]
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


def refused(rank):
    mesh, unnamed = rank.mesh("tp"), rank.mesh()
    hidden, weight, bias, targets, advantages = problem()
    sharded, columns = (distribute_tensor(weight, unnamed, [Shard(d)]) for d in (0, 1))
    in_place, advantage = torch.zeros(VOCAB, HIDDEN), advantages[:, 0]
    rows, bias = (distribute_tensor(values, mesh, [Shard(0)]) for values in (weight, bias))
    rows.requires_grad_()

    def loss(passes="auto", advantages=advantage, **options):
        return FusedLinearGRPOLoss("grpo", passes=passes)(hidden, rows, targets, advantages, **options)

    on_one_rank = torch.ones(BATCH + rank.index)
    return [
        message_of(lambda: linear_logprobs(hidden + rank.index, columns, targets)),
        # A data-parallel batch.
        message_of(lambda: linear_logprobs(hidden, sharded, targets.clamp(min=0) + rank.index)),
        message_of(lambda: loss("two", weight_grad=in_place)),
        message_of(lambda: loss(advantages=on_one_rank)),
        message_of(lambda: loss(advantages=on_one_rank, bias=bias)),
        message_of(lambda: loss("one")),
    ]


def test_what_cannot_be_is_named_on_every_rank(ranks):
    results = ranks.run(refused)
    assert results[0] == results[1]
    placement, batch, in_place, *mistakes, one_pass = results[0]
    assert placement.startswith("ValueError: weight must be Shard(0) or Replicate")
    assert "the sum of targets must be the same on every rank" in batch
    assert in_place.startswith("ValueError: weight_grad must be None with a DTensor weight")
    assert one_pass.startswith('ValueError: passes="one" needs tensors that are whole on this rank, got a DTensor')
    assert one_pass.endswith("(rank 0 of vocab_parallel.group)")
    for message in mistakes:
        assert message.startswith("ValueError: advantages must be (B, T) = (4, 8)")
        assert message.endswith("(rank 1 of vocab_parallel.group)")


def solve_loss(rank):
    hidden, weight, _, targets, advantages = problem("cpu" if rank is None else rank.device)
    if rank is not None:
        mesh = rank.mesh("tp")
        hidden, weight = distribute_tensor(hidden, mesh, [Shard(1)]), distribute_tensor(weight, mesh, [Shard(0)])
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    loss = FusedLinearGRPOLoss("gspo", entropy_coef=0.01)(*leaves, targets, advantages[:, 0]).loss
    grads = torch.autograd.grad(loss, leaves)
    return [loss.detach().cpu(), *(grad.full_tensor().cpu() if isinstance(grad, DTensor) else grad for grad in grads)]


def test_the_policy_loss(ranks, world):
    assert_same(ranks.run(solve_loss, **world), solve_loss(None))
