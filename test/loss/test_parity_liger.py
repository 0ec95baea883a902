"""Losses, gradients and metrics against liger-kernel's chunked GRPO loss, and the places where it is wrong."""

import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction, LigerFusedLinearGRPOLoss

import oracles
from liger_rl import FusedLinearGRPOLoss, PolicyBatch, ppo_loss_fn
from liger_rl.kernels import gemm
from liger_rl.policy.presets import build_preset

BATCH, LENGTH = 10, 8
LENGTHS = torch.tensor([8, 3, 6, 1, 8, 5, 0, 7, 2, 8])
CLIPPING = ("grpo", "bnpo", "dapo", "dr_grpo", "luspo")
SAPO_OPTIONS = {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.6}
VESPO_OPTIONS = {"vespo_k_pos": 1.7, "vespo_lambda_pos": 2.2, "vespo_k_neg": 2.6, "vespo_lambda_neg": 1.4}
# epsilon_low, epsilon_high, delta: a mean over a sequence moves less
BOUNDS = {"token": (0.2, 0.28, 1.5), "sequence": (0.04, 0.06, 1.1)}
CISPO_HIGH, BETA, ITEMS, MAX_LENGTH = 1.3, 0.13, 83.0, 11
FAMILIES = [*product(CLIPPING, ["token", "sequence"]), *product(["cispo", "sapo", "vespo"], ["token"])]


def columns(seed=0, *, full=False):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    logps = -normal(BATCH, LENGTH).abs() - 0.1
    mask = torch.arange(LENGTH) < (torch.full_like(LENGTHS, LENGTH) if full else LENGTHS)[:, None]
    ratio = 0.3 + 1.7 * torch.rand(BATCH, LENGTH, generator=g)
    return SimpleNamespace(
        logps=logps,
        mask=mask,
        advantages=normal(BATCH),
        old=logps + 0.4 * normal(BATCH, LENGTH),
        ref=logps + 0.4 * normal(BATCH, LENGTH),
        # 1 under the mask, as TRL makes them: VESPO of Liger sums over padding too
        ratio={"none": None, "(B, T)": torch.where(mask, ratio, 1.0), "(B, 1)": ratio[:, :1]},
    )


def options_of(loss_type, level, kl, delta):
    """-> the keywords that both understand."""
    options = {}
    if loss_type in CLIPPING:
        options = {"epsilon_low": BOUNDS[level][0], "epsilon_high": BOUNDS[level][1],
                   "importance_sampling_level": level, "delta": BOUNDS[level][2] if delta else None}  # fmt: skip
    options |= {"cispo": {"epsilon_high": CISPO_HIGH}, "sapo": SAPO_OPTIONS, "vespo": VESPO_OPTIONS,
                "dr_grpo": {"max_completion_length": MAX_LENGTH}}.get(loss_type, {})  # fmt: skip
    return options | {"beta": 0.0 if kl == "none" else BETA}


def ours(loss_type, data, options, *, weighted, ratio=None, old=True):
    """-> loss, its gradient, metrics."""
    parts = build_preset(loss_type, **options, importance_weighted=weighted)
    leaf = data.logps.clone().requires_grad_()
    batch = PolicyBatch(
        advantages=data.advantages,
        completion_mask=data.mask,
        old_per_token_logps=data.old if old else None,
        ref_per_token_logps=data.ref,
        importance_ratio=ratio,
        num_items_in_batch=ITEMS,
    )
    found = ppo_loss_fn(leaf, batch, parts.objective, parts.reduction, kl=parts.kl)
    return found.loss.detach(), torch.autograd.grad(found.loss, leaf)[0], found.metrics


def theirs(loss_type, data, options, *, weighted, ratio=None, old=True):
    leaf = data.logps.clone().requires_grad_()
    mask = data.mask.float()
    loss, metrics = LigerFusedLinearGRPOFunction.ppo_loss_fn(
        leaf, mask, data.advantages, mask, ref_per_token_logps=data.ref, old_per_token_logps=data.old if old else None,
        loss_type=loss_type, use_bias_correction_kl=weighted, vllm_is_ratio=ratio, num_items_in_batch=ITEMS, **options,
    )  # fmt: skip
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], metrics


def assert_same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    floor = 1e-6 * expected[1].abs().max().item()
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=floor)


def differ(mine, other):
    return (mine - other).abs().max() > 1e-3 * mine.abs().max()


@pytest.mark.parametrize("ratio", ["none", "(B, T)", "(B, 1)"])
@pytest.mark.parametrize("kl", ["none", "plain", "importance_weighted"])
@pytest.mark.parametrize(("loss_type", "level"), FAMILIES)
def test_ppo_loss_fn(loss_type, level, kl, ratio):
    per_token = level == "token" or kl != "none" or ratio == "(B, T)"
    data = columns(full=loss_type == "luspo" and per_token)  # see test_padding_has_no_part_in_luspo
    weighted = kl == "importance_weighted"
    arguments = {"weighted": weighted, "ratio": data.ratio[ratio]}
    if loss_type == "vespo" and ratio == "(B, 1)":
        with pytest.raises(ValueError, match="importance_ratio"):
            ours(loss_type, data, options_of(loss_type, level, kl, False), **arguments)
        return
    results = {}
    for old, delta in [(True, False), (False, False), *([(True, True)] if loss_type in CLIPPING else [])]:
        options = options_of(loss_type, level, kl, delta)
        found, expected = (f(loss_type, data, options, old=old, **arguments) for f in (ours, theirs))
        assert_same(found, expected)
        assert expected[1].any()
        results[old, delta] = found[1]
        metrics, (*divergence, clipped) = found[2], expected[2]
        assert len(divergence) == ("kl_ref" in metrics)
        if divergence:
            assert metrics["kl_ref"].item() == pytest.approx(divergence[0].item(), rel=1e-5)
            assert divergence[0] > 0.01
        if "clip_ratio" in metrics:
            assert metrics["clip_ratio"].item() == pytest.approx(clipped.item(), rel=1e-5)
            assert 0.05 < clipped < 0.8 or not old
        else:
            assert clipped == 0
    plain = results.pop((True, False))
    assert all(differ(plain, other) for other in results.values())
    if ratio != "none":
        assert differ(plain, ours(loss_type, data, options_of(loss_type, level, kl, False), weighted=weighted)[1])


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


@pytest.mark.parametrize(
    ("loss_type", "options", "ratio_columns"),
    [
        ("dapo", {"epsilon_high": 0.28}, 0),
        ("dapo", {"beta": 0.1, "importance_weighted": True, "temperature": 0.7}, 6),
        ("grpo", {"beta": 0.1, "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04}, 1),
        ("bnpo", {"delta": 1.5, "temperature": 1.3}, 0),
        ("dr_grpo", {"max_completion_length": 9, "beta": 0.04}, 0),
        ("cispo", {"epsilon_high": 1.2}, 6),
        ("sapo", {"beta": 0.1}, 1),
        ("vespo", {"temperature": 0.9}, 6),
    ],
)
@pytest.mark.parametrize("chunk_size", [1, 3])
def test_whole_head(loss_type, options, ratio_columns, chunk_size):
    leaves, ids, given = head()
    if ratio_columns:
        ratio = 0.3 + 1.7 * torch.rand(5, ratio_columns)
        keep = given["attention_mask"] if ratio_columns > 1 else torch.tensor(True)
        given["importance_ratio"] = torch.where(keep, ratio, 1.0)
    loss, grads, metrics = our_head(leaves, ids, given, loss_type, **options)
    expected, expected_grads, expected_metrics = their_head(
        leaves, ids, given, loss_type, chunk_size=chunk_size, **options
    )
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


def test_padding_has_no_part_in_luspo():
    """Liger weighs every column of a row by the row's length and then takes the mean, padding included."""
    data, options = columns(), options_of("luspo", "token", "none", False)
    mine, wrong = (f("luspo", data, options, weighted=False) for f in (ours, theirs))
    assert wrong[1][~data.mask].any()
    assert not mine[1][~data.mask].any()
    full = columns(full=True)  # without padding the two agree
    assert_same(*(f("luspo", full, options, weighted=False) for f in (ours, theirs)))
    # A value under the mask is part of their loss and not of ours.
    data.logps = data.logps + torch.where(data.mask, 0.0, 1.0)
    moved, theirs_moved = (f("luspo", data, options, weighted=False) for f in (ours, theirs))
    assert moved[0] == mine[0]
    assert abs(theirs_moved[0] - wrong[0]) > 1e-2 * abs(wrong[0])


@pytest.mark.parametrize("column", ["logps", "old", "ref"])
def test_infinity_under_the_mask_is_not_multiplied(column):
    data, options = columns(), options_of("grpo", "token", "plain", False)
    clean = ours("grpo", data, options, weighted=False)
    getattr(data, column)[~data.mask] = -math.inf
    mine, wrong = (f("grpo", data, options, weighted=False) for f in (ours, theirs))
    assert not (wrong[0].isfinite() and wrong[1].isfinite().all())
    assert mine[0] == clean[0]
    assert torch.equal(mine[1], clean[1])


def test_advantages_per_token_in_chunks():
    """Liger broadcasts (C, 1, T) with (C, T) where a chunk has C > 1 sequences: every advantage meets every row."""
    leaves, ids, given = head()
    given["advantages"] = torch.randn(5, 6)
    options = {"epsilon_high": 0.28, "delta": 1.5}
    right, wrong = (their_head(leaves, ids, given, "bnpo", chunk_size=n, **options) for n in (1, 5))
    assert abs(wrong[0] - right[0]) > 0.1 * abs(right[0])
    for chunk_tokens in (None, 7):
        mine = our_head(leaves, ids, given, "bnpo", chunk_tokens=chunk_tokens, **options)
        torch.testing.assert_close(mine[0], right[0], rtol=1e-5, atol=0)
        for found, truth in zip(mine[1], right[1], strict=True):
            torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5 * truth.abs().max().item())


def test_no_reference_is_not_a_kl_of_zero():
    leaves, ids, given = head()
    with_reference = their_head(leaves, ids, given, "dapo", beta=0.5)
    del given["ref_per_token_logps"]
    module = LigerFusedLinearGRPOLoss(beta=0.5, compiled=False, use_ref_model=False)
    mask = given.pop("attention_mask")
    loss, (divergence, _) = module(*leaves[:2], ids, mask.float(), bias=leaves[2], **given)
    assert divergence == 0
    assert loss != with_reference[0]
    with pytest.raises(ValueError, match="ref_per_token_logps"):
        FusedLinearGRPOLoss("dapo", beta=0.5)(*leaves[:2], ids, mask=mask, bias=leaves[2], **given)


def test_chunk_sizes_are_bounds(monkeypatch):
    """Liger takes batch // chunk_size chunks, which are then larger than chunk_size."""
    leaves, ids, given = head(batch=7)
    seen = []
    plain = LigerFusedLinearPPOBase.chunk_forward
    monkeypatch.setattr(
        LigerFusedLinearPPOBase, "chunk_forward",
        staticmethod(lambda hidden, *args, **kwargs: seen.append(len(hidden)) or plain(hidden, *args, **kwargs)),
    )  # fmt: skip
    their_head(leaves, ids, given, "dapo", chunk_size=4)
    assert max(seen) > 4
    products = []
    monkeypatch.setattr(
        gemm, "matmul", lambda a, b, matmul=gemm.matmul: products.append((a.shape, b.shape)) or matmul(a, b)
    )
    our_head(leaves, ids, given, "dapo", chunk_tokens=8, chunk_vocab=20)
    tiles = [(a[0], b[1]) for a, b in products]
    assert max(rows for rows, _ in tiles) == 8
    assert max(columns for _, columns in tiles) <= 20


def test_no_gradient_no_backward(monkeypatch):
    """Liger computes every gradient in its forward, wanted or not."""
    leaves, ids, given = head()
    calls = []
    plain = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **kwargs: calls.append(1) or plain(*args, **kwargs))
    given["attention_mask"] = given["attention_mask"].float()
    with torch.no_grad():
        LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, compiled=False)(
            *leaves[:2], ids, bias=leaves[2], **given
        )
    assert len(calls) == 5  # one per sequence
    accumulated = []
    monkeypatch.setattr(gemm, "accumulate", lambda *args, **kwargs: accumulated.append(1))
    calls.clear()
    columns = {name: value for name, value in given.items() if name != "attention_mask"}
    module = FusedLinearGRPOLoss("dapo", passes="two")
    with torch.no_grad():
        module(*leaves[:2], ids, mask=given["attention_mask"], bias=leaves[2], **columns)
    assert not calls
    assert not accumulated
    monkeypatch.undo()
    seen = []
    monkeypatch.setattr(gemm, "accumulate", lambda *a, plain=gemm.accumulate: seen.append(1) or plain(*a))
    our_head(leaves, ids, given, "dapo", passes="two")
    assert seen  # so the watch is on the right function


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
