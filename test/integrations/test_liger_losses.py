"""liger_rl's preference losses against liger-kernel's: what no other test compares with code of others."""

import pytest
import torch

pytest.importorskip("liger_kernel.chunked_loss", reason="the integration needs liger-kernel")

import liger_kernel.chunked_loss as theirs

from liger_rl import FusedLinearPreferenceLoss, FusedLinearUnpairedLoss

HIDDEN, VOCAB, ROWS, LENGTH = 12, 61, 6, 9
LABELS = torch.tensor([1, 0, 0, 1, 1, 0]).bool()
MEANS = {"average_log_prob": True}
# Name of Liger's class, its options, our loss.
CASES = {
    "DPO of means, without a reference": (
        "DPO",
        MEANS | {"use_ref_model": False, "compute_nll_loss": True, "alpha": 0.3},
        FusedLinearPreferenceLoss("sigmoid", reference_free=True, nll_coef=0.3, **MEANS),
    ),
    "CPO of means": (
        "CPO",
        MEANS | {"alpha": 0.7, "label_smoothing": 0.1},
        FusedLinearPreferenceLoss("cpo", nll_coef=0.7, label_smoothing=0.1, **MEANS),
    ),
    "KTO without a reference": ("KTO", {}, FusedLinearUnpairedLoss("kto", reference_free=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_preferences(case):
    name, options, loss_fn = CASES[case]
    hidden, weight, bias = torch.randn(ROWS, LENGTH, HIDDEN), torch.randn(VOCAB, HIDDEN) / 4, torch.randn(VOCAB)
    target = torch.randint(VOCAB, (ROWS, LENGTH))
    target[torch.arange(LENGTH) < torch.tensor([3, 1, 2, 3, 1, 2])[:, None]] = -100
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    their_loss = getattr(theirs, f"LigerFusedLinear{name}Loss")(compiled=False, **options)
    if name == "KTO":
        expected = their_loss(hidden, weight, target, bias, preference_labels=LABELS, kl=torch.tensor([0.4]))[0]
        found = loss_fn(hidden, weight, target, LABELS, bias=bias, kl=0.4).loss
    else:
        expected, found = their_loss(weight, hidden, target, bias)[0], loss_fn(hidden, weight, target, bias=bias).loss
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    grads = (torch.autograd.grad(loss, leaves) for loss in (found, expected))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=2e-5)
