"""DTensor weights on meshes for data, and what cannot be. Of a sharded vocabulary: cases of test_vocab_parallel.py."""

import math

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from head_calls import batch
from liger_rl import FusedLinearGRPOLoss, linear_logprobs
from liger_rl.models.tensors import localize
from ranks import assert_whole, message_of, sent

HIDDEN, VOCAB, TEACHER_HIDDEN = 6, 37, 14


def solve(x, local, ranks=1):
    """Results and gradients by name, those of the head times the number of ranks whose mean they are."""
    found = linear_logprobs(*local[:2], x.targets, bias=local[2], mask=x.mask, entropy=True)
    total = ((found.logps + found.entropy) * x.advantages).sum()
    grads = torch.autograd.grad(total, (x.hidden, x.weight, x.bias))
    whole = (ranks * grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads)
    results = found.logps.detach(), found.entropy.detach(), *whole
    names = ("logps", "entropy", "grad_hidden", "grad_weight", "grad_bias")
    return {name: part.cpu() for name, part in zip(names, results, strict=True)}


def make_batch(device="cpu"):
    return batch((4, 8), HIDDEN, VOCAB, device=device)


def distributed(rank, shape, names):
    """Other tokens on each rank of data's dimensions, the same elsewhere."""
    mesh = rank.mesh(*names, shape=shape if len(shape) > 1 else None)
    parts = math.prod(shape) if names != ("tp",) else 1
    tokens = slice(rank.index * 4 // parts, (rank.index + 1) * 4 // parts) if parts > 1 else slice(None)
    x = make_batch(rank.device).tokens(tokens)
    placements = [Replicate() if name in ("replicate", "tp") else Shard(0) for name in names]
    heads = {name: distribute_tensor(getattr(x, name), mesh, placements) for name in ("weight", "bias")}
    x = x._replace(**heads).leaves(("hidden", "weight", "bias"))
    with sent() as calls:
        results = solve(x, localize(x.hidden, x.weight, bias=x.bias), parts)
    assert not calls
    return results


MESHES = {"replicated": ((2,), ("tp",)), "fsdp": ((2,), ("dp",)), "hsdp": ((2, 2), ("replicate", "fsdp_shard"))}


@pytest.mark.parametrize(("shape", "names"), MESHES.values(), ids=MESHES)
def test_whole_weights_and_shards_of_data_parallelism(ranks, shape, names):
    """Without a collective of ours. Shards are gathered, and their gradients are means, as FSDP's."""
    x = make_batch().leaves(("hidden", "weight", "bias"))
    results = ranks.run(distributed, shape, names, world=math.prod(shape))
    assert_whole(results, solve(x, (x.hidden, x.weight, x.bias)), grad_tolerance=1e-5)


def refused(rank):
    mesh, x = rank.mesh("tp"), make_batch()
    columns, rows = (distribute_tensor(x.weight, mesh, [Shard(dim)]) for dim in (1, 0))
    unnamed = distribute_tensor(x.weight, rank.mesh(), [Shard(0)])
    strided = DTensor.from_local(x.weight[:19], mesh, [_StridedShard(0, split_factor=2)])
    cut, partial = distribute_tensor(x.hidden, mesh, [Shard(1)]), DTensor.from_local(x.hidden, mesh, [Partial()])
    targets = distribute_tensor(x.targets, mesh, [Replicate()])
    loss = FusedLinearGRPOLoss("grpo")
    return [
        message_of(lambda: localize(x.hidden, columns)),
        message_of(lambda: localize(x.hidden, strided)),
        message_of(lambda: localize(x.hidden, x.weight, bias=columns)),
        message_of(lambda: localize(cut, x.weight)),
        message_of(lambda: localize(partial, rows)),
        message_of(lambda: localize(x.hidden, unnamed)),
        message_of(lambda: linear_logprobs(x.hidden, rows, x.targets)),
        message_of(lambda: loss(x.hidden, rows, x.targets, torch.ones(4))),
        message_of(lambda: linear_logprobs(x.hidden, x.weight, targets)),
        localize(x.hidden, unnamed, in_forward=True).vocab_parallel.vocab_start,
    ]


MESH = " must be Shard(0) or Replicate on a mesh for data, as of fully_shard, or on one of one dimension, as of a "
MESH += "tensor-parallel plan; got "
REFUSED = (
    f"ValueError: weight{MESH}(Shard(dim=1),) on", f"ValueError: weight{MESH}(_StridedShard(dim=0, sf=2),) on",
    f"ValueError: bias{MESH}", *["ValueError: hidden must be a plain tensor or Replicate on its mesh, got ("] * 2,
    "ValueError: weight must be sharded on a mesh whose dimensions have names",
    *["TypeError: weight must be a plain tensor, got a DTensor"] * 2,
    "TypeError: targets must be a plain tensor, got a DTensor",
)  # fmt: skip


def test_what_cannot_be_is_named(ranks):
    for (*messages, start), first in zip(ranks.run(refused), (0, 19), strict=True):
        assert [found[: len(text)] for found, text in zip(messages, REFUSED, strict=True)] == list(REFUSED)
        assert start == first


def loss_of_trl(rank, patched):
    from trl.trainer import distillation_trainer

    from liger_rl.integrations.trl import distillation

    loss = vars(distillation if patched else distillation_trainer)[distillation.LOSS]
    hidden, teacher_hidden = torch.randn(4, 8, HIDDEN), torch.randn(4, 8, TEACHER_HIDDEN)
    whole = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, TEACHER_HIDDEN)
    heads = [distribute_tensor(part, rank.mesh("dp"), [Shard(0)]) for part in whole]
    leaves = [hidden.requires_grad_(), heads[0].requires_grad_()]
    mask = torch.arange(8) < torch.tensor([[8], [5], [1 + rank.index], [0]])
    found = loss(hidden, teacher_hidden, *heads, mask, 0.5, 7)
    grads = torch.autograd.grad(found[0], leaves)
    return [found[0].detach(), *found[1:], grads[0], grads[1].full_tensor()]


def test_trls_loss_of_heads_that_are_dtensors(ranks):
    """Gathered as TRL gathers them."""
    pytest.importorskip("trl", "1.16", reason="TRL 1.16 is not installed")
    runs = (ranks.run(loss_of_trl, patched) for patched in (True, False))
    for found, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-6)
