"""Losses, gradients and metrics against liger-kernel's two GRPO losses, and the places where they are wrong."""

import math
from functools import partial

import pytest
import torch
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction, LigerFusedLinearGRPOLoss

import oracles
from liger_rl import FusedLinearGRPOLoss
from parity_cases import (
    BATCH,
    CLIPPING,
    ITEMS,
    LENGTH,
    LENGTHS,
    assert_each_option_has_a_part,
    assert_same,
    columns,
    gradients,
    leaves,
    ours,
    pairwise,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMMON = {
    "kl": ["none", "plain", "importance_weighted"],
    "old": [True, False],
    "ratio": ["none", "(B, T)", "(B, 1)"],
}
FAMILIES = [
    {"loss_type": list(CLIPPING), "level": ["token", "sequence"], "delta": [False, True], **COMMON},
    {"loss_type": ["cispo", "sapo"], **COMMON},
    {"loss_type": ["vespo"], **COMMON, "ratio": ["none", "(B, T)"]},
]
CASES = [case for options in FAMILIES for case in pairwise(options)]


def theirs(case, data):
    """-> loss, gradients with respect to log-probabilities and entropies, metrics."""
    logps, entropies = leaves(data)
    mask = data.mask.float()
    loss, metrics = LigerFusedLinearGRPOFunction.ppo_loss_fn(
        logps, mask, data.advantages["(B,)"], mask, ref_per_token_logps=data.ref,
        old_per_token_logps=data.old if case.old else None, loss_type=case.loss_type, beta=case.beta,
        use_bias_correction_kl=case.kl == "importance_weighted", vllm_is_ratio=data.ratio[case.ratio],
        num_items_in_batch=ITEMS, **case.options,
    )  # fmt: skip
    return loss.detach(), *gradients(loss, logps, entropies), metrics


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ppo_loss_fn(case):
    full = torch.full((BATCH,), LENGTH)
    data = columns(lengths=full if case.loss_type == "luspo" else LENGTHS)  # Liger weighs padding: test_liger.py
    found, expected = ours(case, data), theirs(case, data)
    assert expected[1].any()
    assert_same(found, expected)
    assert_each_option_has_a_part(case, data, found)
    mine = {name: metric.item() for name, metric in found[3].items()}
    *divergence, clipped = (metric.item() for metric in expected[3])
    assert divergence == pytest.approx([mine["kl_ref"]] if case.kl != "none" else [], rel=1e-5)
    assert clipped == pytest.approx(mine.get("clip_ratio", 0.0), rel=1e-5)


# --- the whole head ---------------------------------------------------------------------------------------------------


def head(batch=5, length=6, hidden_size=12, vocab=61, *, dtype=torch.float32):
    """-> leaves (hidden, weight, bias), ids, and columns whose ratios cross the bounds."""
    leaves = (
        torch.randn(batch, length, hidden_size).to(dtype),
        (torch.randn(vocab, hidden_size) / math.sqrt(hidden_size)).to(dtype),
        torch.randn(vocab).to(dtype),
    )
    ids = torch.randint(vocab, (batch, length))
    logps = oracles.logprobs(leaves[0], leaves[1], ids, leaves[2])[0].float()
    return leaves, ids, {
        "attention_mask": torch.arange(length) < (1 + (torch.arange(batch) * 5 + length - 1) % length)[:, None],
        "advantages": torch.randn(batch),
        "old_per_token_logps": logps + 0.4 * torch.randn(batch, length),
        "ref_per_token_logps": logps + 0.4 * torch.randn(batch, length),
    }  # fmt: skip


def our_head(leaves, ids, columns, loss_type, **options):
    """-> loss, gradients of hidden, weight, bias, metrics."""
    columns = dict(columns)
    mask = columns.pop("attention_mask")
    chunks = {name: options.pop(name) for name in ("chunk_tokens", "chunk_vocab") if name in options}
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    module = FusedLinearGRPOLoss(loss_type, **options, **chunks)
    found = module(leaves[0], leaves[1], ids, mask=mask, bias=leaves[2], **columns)
    return found.loss.detach(), torch.autograd.grad(found.loss, leaves), found.metrics


def their_head(leaves, ids, columns, loss_type, *, chunk_size=1, importance_weighted=False, **options):
    columns = {"vllm_is_ratio" if name == "importance_ratio" else name: value for name, value in columns.items()}
    columns["attention_mask"] = columns["attention_mask"].float()
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    module = LigerFusedLinearGRPOLoss(
        loss_type=loss_type, compiled=False, chunk_size=chunk_size, use_ref_model=options.get("beta", 0.0) != 0.0,
        use_bias_correction_kl=importance_weighted, **{"beta": 0.0, **options},
    )  # fmt: skip
    loss, metrics = module(leaves[0], leaves[1], ids, bias=leaves[2], **columns)
    return loss.detach(), torch.autograd.grad(loss, leaves), metrics


def their_triton_head(leaves, ids, columns, loss_type, *, temperature=1.0, **options):
    """Full logits and a hand-written backward. It reads one position more than there are ids."""
    liger = pytest.importorskip("liger_kernel.transformers.grpo_loss", reason="its Triton loss needs Triton")
    leaves = [leaf.detach().to(DEVICE).requires_grad_() for leaf in leaves]
    given = {name: column.to(DEVICE) for name, column in columns.items()}
    logits = torch.nn.functional.pad(leaves[0] @ leaves[1].mT + leaves[2], (0, 0, 0, 1))
    loss, metrics = liger.triton_grpo_loss(
        logits.contiguous(), given.get("old_per_token_logps"), given["ref_per_token_logps"], ids.to(DEVICE),
        given["advantages"], given["attention_mask"].float(), temperature, options.pop("beta", 0.0),
        options.pop("epsilon_low", 0.2), options.pop("epsilon_high", 0.2), False, loss_type, reduce=True, **options,
    )  # fmt: skip
    return loss.detach().cpu(), [grad.cpu() for grad in torch.autograd.grad(loss, leaves)], metrics


SEQUENCE = {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04}
CHUNKED, TRITON = ("chunks of 1", "chunks of 3"), "Triton"
HEADS = [  # preset, options, columns of the importance ratio, which of Liger's losses
    ("dapo", {"epsilon_high": 0.28}, 0, (*CHUNKED, TRITON)),
    ("dapo", {"beta": 0.1, "importance_weighted": True, "temperature": 0.7}, 6, CHUNKED),
    ("dapo", {"delta": 1.3}, 0, (TRITON,)),
    ("grpo", {"beta": 0.1, **SEQUENCE}, 0, (TRITON,)),
    ("grpo", {"beta": 0.1, **SEQUENCE}, 1, CHUNKED),
    ("grpo", {"beta": 0.1, "temperature": 0.7}, 0, (TRITON,)),
    ("bnpo", {"delta": 1.5, "temperature": 1.3}, 0, (*CHUNKED, TRITON)),
    ("bnpo", {"delta": 1.02, **SEQUENCE}, 0, (TRITON,)),
    ("dr_grpo", {"max_completion_length": 9, "beta": 0.04}, 0, (*CHUNKED, TRITON)),
    ("cispo", {"epsilon_high": 1.2}, 6, CHUNKED),
    ("sapo", {"beta": 0.1}, 1, CHUNKED),
    ("vespo", {"temperature": 0.9}, 6, CHUNKED),
]


@pytest.mark.parametrize(
    ("loss_type", "options", "ratio_columns", "peer"), [(*case[:3], peer) for case in HEADS for peer in case[3]]
)
def test_whole_head(loss_type, options, ratio_columns, peer):
    leaves, ids, given = head()
    if ratio_columns:
        ratio = 0.3 + 1.7 * torch.rand(5, ratio_columns)
        keep = given["attention_mask"] if ratio_columns > 1 else torch.tensor(True)
        given["importance_ratio"] = torch.where(keep, ratio, 1.0)
    loss, grads, metrics = our_head(leaves, ids, given, loss_type, chunk_tokens=5, chunk_vocab=48, **options)
    theirs = their_triton_head if peer == TRITON else partial(their_head, chunk_size=int(peer[-1]))
    expected, expected_grads, expected_metrics = theirs(leaves, ids, given, loss_type, **options)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)  # advantages of either sign and size 1 cancel
    for mine, truth in zip(grads, expected_grads, strict=True):
        assert truth.any()
        torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-5 * truth.abs().max().item())
    if "clip_ratio" in metrics:
        assert metrics["clip_ratio"].item() == pytest.approx(expected_metrics[-1].item(), rel=1e-5)
        assert expected_metrics[-1] > 0
    if "kl_ref" in metrics:
        assert metrics["kl_ref"].item() == pytest.approx(expected_metrics[0].item(), rel=1e-5)


# --- where it is wrong ------------------------------------------------------------------------------------------------


def test_the_weights_gradient_does_not_lose_digits_per_sequence():
    """Liger adds a gradient per sequence in the weight's dtype."""
    leaves, ids, given = head(batch=48, length=4, hidden_size=16, vocab=64, dtype=torch.bfloat16)
    given["advantages"] = given["advantages"].abs() + 0.5
    del given["old_per_token_logps"]
    ids = ids % 3  # the same rows of the weight again and again
    truth = [leaf.double().requires_grad_() for leaf in leaves]
    logps = oracles.logprobs(*truth[:2], ids, truth[2])[0]
    mask = given["attention_mask"]
    loss = -(logps * given["advantages"].double()[:, None])[mask].sum() / mask.sum()
    exact = torch.autograd.grad(loss, truth)[1]

    def error(grad):
        return ((grad.double() - exact).norm() / exact.norm()).item()

    mine, wrong = (error(f(leaves, ids, given, "bnpo")[1][1]) for f in (our_head, their_head))
    assert mine < 2 * torch.finfo(torch.bfloat16).eps
    assert wrong > 2 * mine
