"""Losses of pairs and of judged sequences from hidden states: packed ones, one's own. Values are the fuzzer's."""

import pytest
import torch
from torch import Tensor

import oracles
from liger_rl import FusedLinearPreferenceLoss, FusedLinearUnpairedLoss
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


@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_sums_of_a_reference_are_weighted_already(alpha):
    """Beside an empty sequence each token has the weight ld_alpha, and the sum has 1."""
    x = problem()
    x["targets"][[1, PAIRS + 3]] = -100
    counted = x["targets"] >= 0
    shorter = counted.sum(1).view(2, PAIRS).amin(0).repeat(2)[:, None]
    weights = torch.where(counted.cumsum(1) <= shorter, 1.0, alpha)
    sums = torch.where(counted, weights * x["ref_logps"], 0.0).sum(1)
    loss_fn = FusedLinearPreferenceLoss(beta=BETA, ld_alpha=alpha)
    losses = [loss_fn(x["hidden"], x["weight"], x["targets"], ref_logps=ref).loss for ref in (x["ref_logps"], sums)]
    torch.testing.assert_close(*losses)


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


@pytest.mark.parametrize("loss_type", ["ipo", ["ipo"]])
def test_losses_have_one_name(loss_type):
    with pytest.raises(TypeError, match="loss_types must be left out, as loss_type="):
        FusedLinearPreferenceLoss(loss_type, loss_types=["hinge"])


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
