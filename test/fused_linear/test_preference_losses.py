"""Losses of pairs and of judged sequences from hidden states, against full logits in float64."""

import pytest
import torch
from torch import Tensor

import oracles
from liger_rl import FusedLinearPreferenceLoss, FusedLinearUnpairedLoss
from liger_rl.fused_linear import ReferenceHead
from liger_rl.losses import Segments

PAIRS, LENGTH, HIDDEN, VOCAB, BETA = 4, 9, 12, 53, 0.2


def problem() -> dict[str, Tensor]:
    targets = torch.randint(VOCAB, (2 * PAIRS, LENGTH))
    lengths = torch.tensor([9, 4, 1, 7, 3, 9, 6, 5])[:, None]
    targets = torch.where(torch.arange(LENGTH) < lengths, targets, -100)
    targets[0, 2] = -100
    return {
        "hidden": torch.randn(2 * PAIRS, LENGTH, HIDDEN), "weight": torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5,
        "bias": torch.randn(VOCAB), "targets": targets,
        "ref_logps": torch.where(targets >= 0, -4.0 * torch.rand(targets.shape), torch.nan),
    }  # fmt: skip


def logps_of(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, softcap=None) -> Tensor:
    found, _ = oracles.logprobs(hidden, weight, targets.clamp(min=0), bias, softcap=softcap)
    return torch.where(targets >= 0, found, 0.0)


def sums(ref_logps: Tensor, targets: Tensor) -> Tensor:
    return torch.where(targets >= 0, ref_logps, 0.0).double().sum(1)


def assert_as_full_logits(call, formula, softcap=None):
    """`call(hidden, weight, bias)` and `formula(log-probabilities)`, with NaN where nothing counts."""
    x = problem()
    doubles = [x[name].double().requires_grad_() for name in ("hidden", "weight", "bias")]
    expected = formula(logps_of(*doubles, x["targets"], softcap), x)
    floats = [x[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")]
    floats[0].data[x["targets"] < 0] = torch.nan
    loss = call(floats, x)
    torch.testing.assert_close(loss, expected.float(), rtol=1e-5, atol=1e-5)
    wanted = tuple(grad.float() for grad in torch.autograd.grad(expected, doubles))
    torch.testing.assert_close(torch.autograd.grad(loss, floats), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("summed", [False, True], ids=["per token", "sums"])
def test_pairs(summed):
    loss_fn = FusedLinearPreferenceLoss("dpo", beta=BETA, softcap=6.0)

    def call(leaves, x):
        ref = sums(x["ref_logps"], x["targets"]).float() if summed else x["ref_logps"]
        return loss_fn(leaves[0], leaves[1], x["targets"], ref_logps=ref, bias=leaves[2]).loss

    assert_as_full_logits(
        call, lambda logps, x: oracles.dpo(logps.sum(1) - sums(x["ref_logps"], x["targets"]), BETA), softcap=6.0
    )


def test_a_reference_with_a_head_of_its_own():
    hidden, weight = torch.randn(2 * PAIRS, LENGTH, 5), torch.randn(VOCAB, 5)
    loss_fn = FusedLinearPreferenceLoss("dpo", beta=BETA)

    def call(leaves, x):
        reference = ReferenceHead(hidden=hidden, weight=weight, bias=x["bias"])
        return loss_fn(leaves[0], leaves[1], x["targets"], reference=reference, bias=leaves[2]).loss

    def formula(logps, x):
        ref = logps_of(hidden.double(), weight.double(), x["bias"].double(), x["targets"])
        return oracles.dpo((logps - ref).sum(1), BETA)

    assert_as_full_logits(call, formula)


def test_the_prompt_in_the_nll_term():
    loss_fn = FusedLinearPreferenceLoss("cpo", beta=BETA, nll_coef=0.3)
    prompt = torch.randint(VOCAB, (PAIRS, LENGTH))

    def call(leaves, x):
        chosen = x["targets"][:PAIRS]
        nll_targets = torch.where(chosen >= 0, chosen, prompt)
        leaves[0].data.nan_to_num_(0.5)
        return loss_fn(leaves[0], leaves[1], x["targets"], nll_targets=nll_targets, bias=leaves[2]).loss

    x = problem()
    doubles = [x[name].double().requires_grad_() for name in ("hidden", "weight", "bias")]
    floats = [leaf.detach().float().requires_grad_() for leaf in doubles]
    logps = logps_of(*doubles, x["targets"])
    chosen = x["targets"][:PAIRS]
    of_nll = logps_of(doubles[0][:PAIRS], *doubles[1:], torch.where(chosen >= 0, chosen, prompt))
    expected = oracles.dpo(logps.sum(1), BETA) - 0.3 * of_nll.mean()
    loss = call(floats, x)
    torch.testing.assert_close(loss, expected.float(), rtol=1e-5, atol=1e-5)
    wanted = tuple(grad.float() for grad in torch.autograd.grad(expected, doubles))
    torch.testing.assert_close(torch.autograd.grad(loss, floats), wanted, rtol=1e-4, atol=1e-5)


def test_judged_sequences():
    labels = torch.tensor([True, False, True, True, False, False, True, False])
    loss_fn = FusedLinearUnpairedLoss("kto", beta=BETA, undesirable_weight=0.5)

    def call(leaves, x):
        columns = {"ref_logps": x["ref_logps"], "kl": 0.3, "bias": leaves[2]}
        return loss_fn(leaves[0], leaves[1], x["targets"], labels, **columns).loss

    def formula(logps, x):
        margins = logps.sum(1) - sums(x["ref_logps"], x["targets"])
        return oracles.kto(margins, labels, BETA, 0.3, undesirable_weight=0.5)

    assert_as_full_logits(call, formula)


def test_packed_pairs():
    x = problem()
    loss_fn, counted = FusedLinearPreferenceLoss("dpo", beta=BETA), x["targets"] >= 0
    row = torch.arange(2 * PAIRS)[:, None].expand_as(counted)[counted]
    packed = loss_fn(
        x["hidden"][counted], x["weight"], x["targets"][counted], ref_logps=x["ref_logps"][counted],
        segments=Segments(index=row, count=2 * PAIRS),
    )  # fmt: skip
    rows = loss_fn(x["hidden"], x["weight"], x["targets"], ref_logps=x["ref_logps"])
    torch.testing.assert_close(packed.loss, rows.loss)
    for name, metric in rows.metrics.items():
        if name not in ("reward_accuracy",):
            torch.testing.assert_close(packed.metrics[name].value, metric.value, msg=name)


@pytest.mark.parametrize("kl", [0.3, torch.linspace(0, 1, 2 * PAIRS)], ids=["a number", "one a sequence"])
def test_packed_sequences(kl):
    x, labels = problem(), torch.arange(2 * PAIRS) % 3 == 0
    loss_fn, counted = FusedLinearUnpairedLoss("kto", beta=BETA), x["targets"] >= 0
    segments = Segments(index=torch.arange(2 * PAIRS)[:, None].expand_as(counted)[counted], count=2 * PAIRS)
    hidden, targets, ref = (x[name][counted] for name in ("hidden", "targets", "ref_logps"))
    packed = loss_fn(hidden, x["weight"], targets, labels, ref_logps=ref, kl=kl, segments=segments)
    rows = loss_fn(x["hidden"], x["weight"], x["targets"], labels, ref_logps=x["ref_logps"], kl=kl)
    torch.testing.assert_close(packed.loss, rows.loss)
    with pytest.raises(ValueError, match="kl must be"):
        loss_fn(hidden, x["weight"], targets, labels, ref_logps=ref, kl=torch.ones(3), segments=segments)


def test_an_objective_of_ones_own():
    """It sees 1 and -1 as advantages, and pairs as sequences."""
    from liger_rl.losses import TokenLoss

    class Margin:
        scope = "sequence"

        def __call__(self, logps, batch):
            return TokenLoss((-batch.sequence_sum(batch.advantages * logps)).expand_as(logps))

    x = problem()
    chosen, rejected = logps_of(x["hidden"], x["weight"], torch.zeros(VOCAB), x["targets"]).sum(1).chunk(2)
    found = FusedLinearPreferenceLoss(Margin())(x["hidden"], x["weight"], x["targets"]).loss
    torch.testing.assert_close(found, (rejected - chosen).mean().float())
