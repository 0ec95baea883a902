"""The drop-in for liger-kernel's cross entropy, and liger_rl's preference losses against liger-kernel's."""

import inspect

import pytest
import torch
from torch.nn.functional import cross_entropy

pytest.importorskip("liger_kernel.chunked_loss", reason="the integration needs liger-kernel")

import liger_kernel.chunked_loss as theirs
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss as THEIR_CROSS_ENTROPY

import oracles
from liger_rl import FusedLinearPreferenceLoss, FusedLinearUnpairedLoss
from liger_rl.integrations.liger import LigerFusedLinearCrossEntropyLoss

HIDDEN, VOCAB = 12, 61

# --- preference losses: what no other test compares with code of others -----------------------------------------------

ROWS, LENGTH = 6, 9
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


# --- cross entropy ----------------------------------------------------------------------------------------------------

TOKENS = 40


def heads(softcap=None):
    """float64 leaves and the logits of them."""
    hidden, weight, bias = (
        torch.randn(TOKENS, HIDDEN).double(),
        torch.randn(VOCAB, HIDDEN).double(),
        torch.randn(VOCAB).double(),
    )
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    logits = hidden @ weight.T + bias
    return leaves, logits if softcap is None else softcap * torch.tanh(logits / softcap)


Z = {"lse_square_scale": 1e-2}
SMOOTHED = Z | {"label_smoothing": 0.1, "softcap": 9.0}


@pytest.mark.parametrize(
    ("reduction", "weighted", "options"),
    [
        ("mean", False, {}),
        ("sum", False, SMOOTHED),
        ("mean", True, Z),
        *((reduction, True, SMOOTHED) for reduction in ("mean", "sum", "none")),
        *((reduction, False, Z | {"use_token_scaling": True}) for reduction in ("mean", "none")),
    ],
)
def test_cross_entropy(reduction, weighted, options):
    leaves, logits = heads(options.get("softcap"))
    target = torch.randint(VOCAB, (TOKENS,))
    target[::5] = 42  # the ignored label
    counted, class_weights = target != 42, torch.rand(VOCAB).double() if weighted else None
    losses = oracles.cross_entropy(
        logits[None], target[None], weight=class_weights, ignore_index=42,
        label_smoothing=options.get("label_smoothing", 0.0),
    )[0]  # fmt: skip
    z = torch.where(counted, options.get("lse_square_scale", 0.0) * logits.logsumexp(-1).square(), 0.0)
    if options.get("use_token_scaling"):
        p = logits.softmax(-1).gather(-1, target[:, None])[:, 0].detach()
        losses, z = p * losses, p * z
    if reduction == "mean":
        divisor = counted.sum() if class_weights is None else class_weights[target][counted].sum()
        losses, z = losses.sum() / divisor, z.sum() / counted.sum()
    elif reduction == "sum":
        losses, z = losses.sum(), z.sum()
    slopes = torch.randn(losses.shape).double()
    expected = torch.autograd.grad(losses + z, leaves, slopes)
    module = LigerFusedLinearCrossEntropyLoss(
        ce_weight=None if class_weights is None else class_weights.float(), ignore_index=42, reduction=reduction,
        return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True, **options,
    )  # fmt: skip
    floats = [x.detach().float().requires_grad_() for x in leaves]
    found = module(floats[1], floats[0], target, floats[2])
    torch.testing.assert_close(found.loss, (losses + z).float(), rtol=1e-4, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(found.z_loss, z.float(), rtol=1e-4, atol=1e-6)
    grads = torch.autograd.grad(found.loss, floats, slopes.float())
    torch.testing.assert_close(grads, tuple(x.float() for x in expected), rtol=1e-4, atol=1e-5)
    hits = logits.argmax(-1) == target
    accuracy = (hits & counted).float() if reduction == "none" else None
    if accuracy is None:
        accuracy = hits[counted].float().mean() if reduction == "mean" else hits[counted].float().sum()
    torch.testing.assert_close(found.token_accuracy, accuracy)
    assert torch.equal(found.predicted_tokens, torch.where(counted, logits.argmax(-1), -1))


def test_cross_entropy_alone_is_a_tensor():
    leaves, logits = heads()
    target = torch.randint(VOCAB, (TOKENS,))
    loss = LigerFusedLinearCrossEntropyLoss()(leaves[1].float(), leaves[0].float(), target, leaves[2].float())
    torch.testing.assert_close(loss, cross_entropy(logits, target).float(), rtol=1e-5, atol=1e-5)


def test_cross_entropy_has_ligers_signature():
    for member in ("__init__", "forward"):
        kinds = [
            inspect.signature(getattr(c, member)).parameters.values()
            for c in (THEIR_CROSS_ENTROPY, LigerFusedLinearCrossEntropyLoss)
        ]
        defaults = [[(p.name, p.default) for p in parameters] for parameters in kinds]
        assert defaults[0] == defaults[1]


def test_cross_entropy_refuses():
    with pytest.raises(ValueError, match="use_token_scaling must be False with ce_weight"):
        LigerFusedLinearCrossEntropyLoss(ce_weight=torch.ones(VOCAB), label_smoothing=0.1, use_token_scaling=True)
    with pytest.raises(ValueError, match="reduction must be one of"):
        LigerFusedLinearCrossEntropyLoss(reduction="median")
    with pytest.raises(TypeError, match="ce_weight must be a tensor, got list"):
        LigerFusedLinearCrossEntropyLoss(ce_weight=[1.0] * VOCAB)
    with pytest.raises(TypeError, match="ignore_index must be an int, got str"):
        LigerFusedLinearCrossEntropyLoss(ignore_index="-100")
    for target in (None, torch.zeros(TOKENS)):
        with pytest.raises(TypeError, match="target must be"):
            LigerFusedLinearCrossEntropyLoss()(torch.ones(VOCAB, HIDDEN), torch.ones(TOKENS, HIDDEN), target)
