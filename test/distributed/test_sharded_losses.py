"""Losses of heads that are sharded over their vocabulary are those of the whole heads."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from liger_rl import FusedLinearGRPOLoss, ReferenceHead, Support, VocabParallel
from ranks import assert_whole, message_of, relative_error

HIDDEN, TEACHER_HIDDEN = 12, 14

# Loss -> its options; what is given beside the head; and how that is sharded: rows by hand, or DTensors.
LOSSES = {
    "grpo": ("grpo", {}, "rows"),
    "gspo": ("gspo", {}, "rows"),
    "a support": ("grpo", {"support": True}, "rows"),
    "an exact KL": ("grpo", {"kl_estimator": "exact"}, "rows"),
    "DTensors": ("gspo", {}, "DTensors"),
    "an exact KL of DTensors": ("grpo", {"kl_estimator": "exact"}, "DTensors"),
}


def solve_loss(rank, loss_type, options, sharded, passes="auto"):
    torch.manual_seed(3)
    hidden, weight, teacher_weight = torch.randn(3, 8, HIDDEN), torch.randn(40, HIDDEN), torch.randn(40, HIDDEN)
    ids, advantages = torch.randint(40, (3, 8)), torch.randn(3)
    mask = torch.rand(3, 8) < 0.7
    columns, place, options = {"old_per_token_logps": torch.randn(3, 8) - 4}, None, {"beta": 0.05, **options}
    teacher_hidden = hidden + 0.1
    if options.pop("support", False):
        rows = [[] if t % 5 == 0 else [t, 39 - t, int(i)] for t, i in enumerate(ids.flatten())]
        columns["support"] = Support.from_vllm(rows)
    if rank is not None and sharded == "rows":
        rows = slice(0, 17) if rank.index == 0 else slice(17, 40)
        place = VocabParallel(rank.group, rows.start)
        weight, teacher_weight = weight[rows].clone(), teacher_weight[rows].clone()
    elif rank is not None:
        mesh = rank.mesh("tp")
        weight, teacher_weight = (distribute_tensor(part, mesh, [Shard(0)]) for part in (weight, teacher_weight))
        if "kl_estimator" not in options:
            hidden, teacher_hidden = (distribute_tensor(part, mesh, [Shard(1)]) for part in (hidden, teacher_hidden))
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    loss = FusedLinearGRPOLoss(
        loss_type, temperature=0.9, entropy_coef=0.01, metrics="with_entropy", passes=passes, **options
    )
    if "kl_estimator" in options:
        columns["reference"] = ReferenceHead(hidden=teacher_hidden, weight=teacher_weight)
    else:
        given = {"support": columns["support"]} if "support" in columns else {}
        columns["ref_per_token_logps"] = loss.reference_logps(
            teacher_hidden.detach(), weight.detach(), ids, mask, vocab_parallel=place, **given
        )
    result = loss(*leaves, ids, advantages, mask, vocab_parallel=place, **columns)
    grads = (g.full_tensor() if isinstance(g, DTensor) else g for g in torch.autograd.grad(result.loss, leaves))
    metrics = {name: metric.value for name, metric in result.metrics.items()}
    return {"loss": result.loss.detach()} | dict(zip(("grad_hidden", "grad_weight"), grads, strict=True)) | metrics


def refused_in_one_pass(rank, *loss):
    return message_of(lambda: solve_loss(rank, *loss, "one"))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_policy_loss(ranks, loss):
    """The gradients of tokens with an empty row are rounded before they are added to the others'."""
    results, expected = ranks.run(solve_loss, *loss), solve_loss(None, *loss)
    assert_whole(results, expected, 1e-5, 3e-6)
    assert relative_error(results[0]["loss"], expected["loss"]) <= 1e-6
    if "support" not in loss[1]:
        for message in ranks.run(refused_in_one_pass, *loss):
            assert message.startswith('ValueError: passes="one" needs ')


def loss_of_trl(rank, patched, chunk_vocab):
    from trl.trainer import distillation_trainer

    from liger_rl.integrations import trl_divergence

    trl_divergence.chunks = {"chunk_vocab": chunk_vocab}
    loss = vars(trl_divergence if patched else distillation_trainer)[trl_divergence.LOSS]
    hidden, teacher_hidden = torch.randn(4, 8, HIDDEN), torch.randn(4, 8, TEACHER_HIDDEN)
    whole = torch.randn(37, HIDDEN), torch.randn(37, TEACHER_HIDDEN)
    heads = [distribute_tensor(part, rank.mesh("dp"), [Shard(0)]) for part in whole]
    leaves = [hidden.requires_grad_(), heads[0].requires_grad_()]
    mask = torch.arange(8) < torch.tensor([[8], [5], [1 + rank.index], [0]])
    found = loss(hidden, teacher_hidden, *heads, mask, 0.5, 7)
    grads = torch.autograd.grad(found[0], leaves)
    return [found[0].detach(), *found[1:], grads[0], grads[1].full_tensor()]


@pytest.mark.parametrize("chunk_vocab", [None, 16])
def test_trls_loss_of_heads_that_are_dtensors(chunk_vocab, ranks):
    """Gathered as TRL gathers them, in one pass and in two."""
    pytest.importorskip("trl.kernels.chunked_divergence", reason="TRL 1.16 is not installed")
    runs = (ranks.run(loss_of_trl, patched, chunk_vocab) for patched in (True, False))
    for found, theirs in zip(*runs, strict=True):
        for mine, truth in zip(found, theirs, strict=True):
            torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-6)
