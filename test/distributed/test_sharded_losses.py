"""Losses of heads that are sharded over their vocabulary are those of the whole heads."""

import re
from functools import partial

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from liger_rl import FusedLinearCrossEntropyLoss, FusedLinearGRPOLoss, FusedLinearPreferenceLoss
from liger_rl.distributed import VocabParallel
from liger_rl.fused_linear import ReferenceHead
from liger_rl.models.tensors import localize
from oracles import relative_error
from ranks import assert_whole, message_of

HIDDEN, TEACHER_HIDDEN = 12, 14

# Loss, and how its head is sharded: rows by hand, or DTensors.
LOSSES = {
    "grpo": ("grpo", "rows"),
    "gspo": ("gspo", "rows"),
    "DTensors": ("gspo", "DTensors"),
}


def solve_loss(rank, loss_type, sharded):
    torch.manual_seed(3)
    hidden, weight = torch.randn(3, 8, HIDDEN), torch.randn(40, HIDDEN)
    ids, advantages = torch.randint(40, (3, 8)), torch.randn(3)
    mask = torch.rand(3, 8) < 0.7
    columns, place = {"old_per_token_logps": torch.randn(3, 8) - 4}, None
    teacher_hidden = hidden + 0.1
    if rank is not None and sharded == "rows":
        rows = slice(0, 17) if rank.index == 0 else slice(17, 40)
        place = VocabParallel(rank.group, rows.start)
        weight = weight[rows].clone()
    elif rank is not None:
        mesh = rank.mesh("tp")
        weight = distribute_tensor(weight, mesh, [Shard(0)])
        hidden, teacher_hidden = (distribute_tensor(part, mesh, [Replicate()]) for part in (hidden, teacher_hidden))
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    loss = FusedLinearGRPOLoss(loss_type, beta=0.05, temperature=0.9, entropy_coef=0.01, metrics="with_entropy")
    teacher = localize(teacher_hidden.detach(), weight.detach(), vocab_parallel=place)
    columns["ref_per_token_logps"] = loss.reference_logps(
        teacher.hidden, teacher.weight, ids, mask, vocab_parallel=teacher.vocab_parallel
    )
    local = localize(*leaves, vocab_parallel=place)
    result = loss(local.hidden, local.weight, ids, advantages, mask, vocab_parallel=local.vocab_parallel, **columns)
    grads = (g.full_tensor() if isinstance(g, DTensor) else g for g in torch.autograd.grad(result.loss, leaves))
    metrics = {name: metric.value for name, metric in result.metrics.items()}
    return {"loss": result.loss.detach()} | dict(zip(("grad_hidden", "grad_weight"), grads, strict=True)) | metrics


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_policy_loss(ranks, loss):
    results, expected = ranks.run(solve_loss, *loss), solve_loss(None, *loss)
    assert_whole(results, expected, 1e-5, 3e-6)
    assert relative_error(results[0]["loss"], expected["loss"]) <= 1e-6


def solve_other_loss(rank, kind, sharded):
    torch.manual_seed(3)
    hidden, weight, other = torch.randn(4, 8, HIDDEN), torch.randn(40, HIDDEN), torch.randn(40, TEACHER_HIDDEN)
    targets, other_hidden, place = torch.randint(40, (4, 8)), torch.randn(4, 8, TEACHER_HIDDEN), None
    targets[:, :2] = -100
    if rank is not None and sharded == "rows":
        rows = slice(0, 17) if rank.index == 0 else slice(17, 40)
        place = VocabParallel(rank.group, rows.start)
        weight, other = weight[rows].clone(), other[rows].clone()
    elif rank is not None:
        weight, other = (distribute_tensor(part, rank.mesh("tp"), [Shard(0)]) for part in (weight, other))
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    local = localize(*leaves, vocab_parallel=place)
    tensors, place = (local.hidden, local.weight, targets), local.vocab_parallel
    if kind == "cross entropy":
        loss = FusedLinearCrossEntropyLoss(label_smoothing=0.1, z_loss=1e-3, metrics="with_entropy")
        result = loss(*tensors, vocab_parallel=place)
    else:
        reference = ReferenceHead(hidden=other_hidden, weight=localize(other_hidden, other).weight)
        loss = FusedLinearPreferenceLoss("dpo", nll_coef=0.2)
        result = loss(*tensors, reference=reference, vocab_parallel=place)
    grads = (g.full_tensor() if isinstance(g, DTensor) else g for g in torch.autograd.grad(result.loss, leaves))
    metrics = {name: metric.value for name, metric in result.metrics.items()}
    return {"loss": result.loss.detach()} | dict(zip(("grad_hidden", "grad_weight"), grads, strict=True)) | metrics


@pytest.mark.parametrize("sharded", ["rows", "DTensors"])
@pytest.mark.parametrize("kind", ["cross entropy", "DPO"])
def test_other_losses(ranks, kind, sharded):
    results, expected = ranks.run(solve_other_loss, kind, sharded), solve_other_loss(None, kind, sharded)
    assert_whole(results, expected, 1e-5, 3e-6)
    assert relative_error(results[0]["loss"], expected["loss"]) <= 1e-6


def loss_of_trl(rank, patched):
    from trl.trainer import distillation_trainer

    from liger_rl.integrations.trl import distillation

    loss = vars(distillation if patched else distillation_trainer)[distillation.LOSS]
    hidden, teacher_hidden = torch.randn(4, 8, HIDDEN), torch.randn(4, 8, TEACHER_HIDDEN)
    whole = torch.randn(37, HIDDEN), torch.randn(37, TEACHER_HIDDEN)
    heads = [distribute_tensor(part, rank.mesh("dp"), [Shard(0)]) for part in whole]
    leaves = [hidden.requires_grad_(), heads[0].requires_grad_()]
    mask = torch.arange(8) < torch.tensor([[8], [5], [1 + rank.index], [0]])
    found = loss(hidden, teacher_hidden, *heads, mask, 0.5, 7)
    grads = torch.autograd.grad(found[0], leaves)
    return [found[0].detach(), *found[1:], grads[0], grads[1].full_tensor()]


def test_trls_loss_of_heads_that_are_dtensors(ranks):
    """Gathered as TRL gathers them."""
    pytest.importorskip("trl.kernels.chunked_divergence", reason="TRL 1.16 is not installed")
    runs = (ranks.run(loss_of_trl, patched) for patched in (True, False))
    for found, theirs in zip(*runs, strict=True):
        for mine, truth in zip(found, theirs, strict=True):
            torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-6)


# --- errors -----------------------------------------------------------------------------------------------------------

# What a policy loss is given otherwise, and the error on the rank that gives it.
LOSS_MISTAKES = {
    "H": ({"size": HIDDEN + 1}, r"ValueError: weight must be \(V, H\)"),
    "advantages": ({"advantages": torch.ones(3)}, r"ValueError: advantages must be \(B, T\) = \(2, 3\)"),
    "items": ({"columns": {"num_items_in_batch": "6"}}, "TypeError: num_items_in_batch must be a number"),
    "column": ({"columns": {"ratio": 1.0}}, "TypeError: FusedLinearGRPOLoss.forward got an unexpected argument"),
}


def provoked_in_the_loss(rank, mistake):
    """-> the error on the last rank; the others make no call, and no collective waits for them."""
    if rank.index == 0:
        return None
    given = {"size": HIDDEN, "advantages": torch.ones(2), "columns": {}} | mistake
    hidden = torch.randn(2, 3, given["size"], requires_grad=True)
    call = partial(
        FusedLinearGRPOLoss("grpo"), hidden, torch.randn(5, HIDDEN), torch.ones(2, 3).long(),
        given["advantages"], vocab_parallel=VocabParallel(rank.group, 5 * rank.index), **given["columns"],
    )  # fmt: skip
    return message_of(call)


@pytest.mark.parametrize("name", LOSS_MISTAKES)
def test_a_rank_raises_its_own_mistake_in_the_loss(ranks, name):
    mistake, expected = LOSS_MISTAKES[name]
    assert re.match(expected, ranks.run(provoked_in_the_loss, mistake)[1])
