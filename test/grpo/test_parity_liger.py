"""The policy loss against liger-kernel's Triton loss of full logits, and the digits that its chunked loss loses.

The chunked loss in all its options: test/integrations/test_liger.py.
"""

import math

import pytest
import torch

import oracles
from liger_rl import FusedLinearGRPOLoss

chunked_loss = pytest.importorskip("liger_kernel.chunked_loss", reason="liger-kernel is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def head(batch=5, length=6, hidden_size=12, vocab=61, *, dtype=torch.float32):
    """-> leaves (hidden, weight, bias), ids, and columns whose ratios cross the bounds."""
    leaves = (
        torch.randn(batch, length, hidden_size).to(DEVICE, dtype),
        (torch.randn(vocab, hidden_size) / math.sqrt(hidden_size)).to(DEVICE, dtype),
        torch.randn(vocab).to(DEVICE, dtype),
    )
    ids = torch.randint(vocab, (batch, length)).to(DEVICE)
    logps = oracles.logprobs(leaves[0], leaves[1], ids, leaves[2])[0].float()
    columns = {
        "attention_mask": torch.arange(length) < (1 + (torch.arange(batch) * 5 + length - 1) % length)[:, None],
        "advantages": torch.randn(batch),
        "old_per_token_logps": logps + 0.4 * torch.randn(batch, length).to(DEVICE),
        "ref_per_token_logps": logps + 0.4 * torch.randn(batch, length).to(DEVICE),
    }
    return leaves, ids, {name: column.to(DEVICE) for name, column in columns.items()}


def our_head(leaves, ids, columns, loss_type, **options):
    """-> loss, gradients of hidden, weight, bias, metrics."""
    columns = dict(columns)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    module = FusedLinearGRPOLoss(loss_type, **options)
    found = module(leaves[0], leaves[1], ids, mask=columns.pop("attention_mask"), bias=leaves[2], **columns)
    return found.loss.detach(), torch.autograd.grad(found.loss, leaves), found.metrics


def their_triton_head(leaves, ids, columns, loss_type, *, temperature=1.0, **options):
    """Full logits and a hand-written backward. It reads one position more than there are ids."""
    liger = pytest.importorskip("liger_kernel.transformers.grpo_loss", reason="its Triton loss needs Triton")
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    logits = torch.nn.functional.pad(leaves[0] @ leaves[1].mT + leaves[2], (0, 0, 0, 1))
    loss, metrics = liger.triton_grpo_loss(
        logits.contiguous(), columns.get("old_per_token_logps"), columns["ref_per_token_logps"], ids,
        columns["advantages"], columns["attention_mask"].float(), temperature, options.pop("beta", 0.0),
        options.pop("epsilon_low", 0.2), options.pop("epsilon_high", 0.2), False, loss_type, reduce=True, **options,
        num_items_in_batch=columns.get("num_items_in_batch"),
    )  # fmt: skip
    return loss.detach(), torch.autograd.grad(loss, leaves), metrics


SEQUENCE = {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04}


@pytest.mark.parametrize(
    ("loss_type", "options", "changes"),
    [
        ("dapo", {"epsilon_high": 0.28}, {}),
        ("dapo", {"delta": 1.3}, {"num_items_in_batch": 37}),
        ("dapo", SEQUENCE, {"num_items_in_batch": 80}),
        ("grpo", {"beta": 0.1, "temperature": 0.7}, {}),
        ("grpo", {"beta": 0.1, **SEQUENCE}, {}),
        ("grpo", {"beta": 0.1}, {"old_per_token_logps": None}),
        ("bnpo", {"delta": 1.5, "temperature": 1.3}, {}),
        ("bnpo", {"delta": 1.02, **SEQUENCE}, {}),
        ("dr_grpo", {"max_completion_length": 9, "beta": 0.04}, {}),
    ],
)
def test_chunked_vs_triton_grpo_loss(loss_type, options, changes):
    leaves, ids, given = head()
    given |= changes
    loss, grads, metrics = our_head(leaves, ids, given, loss_type, chunk_tokens=5, chunk_vocab=48, **options)
    expected, expected_grads, expected_metrics = their_triton_head(leaves, ids, given, loss_type, **options)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)  # advantages of either sign and size 1 cancel
    for mine, truth in zip(grads, expected_grads, strict=True):
        assert truth.any()
        torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-5 * truth.abs().max().item())
    assert metrics["clip_ratio"].item() == pytest.approx(expected_metrics[-1].item(), rel=1e-5)
    assert (expected_metrics[-1] > 0) == (given["old_per_token_logps"] is not None)
    if "kl_ref" in metrics:
        assert metrics["kl_ref"].item() == pytest.approx(expected_metrics[0].item(), rel=1e-5)


def test_the_weights_gradient_does_not_lose_digits_per_sequence():
    """Liger's chunked loss adds a gradient per sequence in the weight's dtype."""
    leaves, ids, given = head(batch=48, length=4, hidden_size=16, vocab=64, dtype=torch.bfloat16)
    given["advantages"], ids = given["advantages"].abs() + 0.5, ids % 3  # the same rows of the weight again and again
    del given["old_per_token_logps"]
    truth = [leaf.double().requires_grad_() for leaf in leaves]
    mask = given["attention_mask"]
    logps = oracles.logprobs(*truth[:2], ids, truth[2])[0]
    loss = -(logps * given["advantages"].double()[:, None])[mask].sum() / mask.sum()
    exact = torch.autograd.grad(loss, truth)[1]
    mine = our_head(leaves, ids, given, "bnpo")[1][1]
    weight = leaves[1].detach().requires_grad_()
    theirs = chunked_loss.LigerFusedLinearGRPOLoss(loss_type="bnpo", compiled=False, beta=0.0, use_ref_model=False)
    found = theirs(
        leaves[0], weight, ids, mask.float(), given["advantages"], bias=leaves[2], old_per_token_logps=None
    )[0]  # fmt: skip
    (wrong,) = torch.autograd.grad(found, weight)
    errors = [oracles.norm_error(grad, exact) / exact.norm().item() for grad in (mine, wrong)]
    assert errors[0] < 2 * torch.finfo(torch.bfloat16).eps
    assert errors[1] > 2 * errors[0]
