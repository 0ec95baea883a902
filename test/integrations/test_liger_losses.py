"""The drop-ins for liger-kernel's preference losses and its cross entropy, against liger-kernel and against PyTorch."""

import inspect
from itertools import product

import pytest
import torch
from torch.nn.functional import cross_entropy

pytest.importorskip("liger_kernel.chunked_loss", reason="the integration needs liger-kernel")

import liger_kernel.chunked_loss as theirs
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss as THEIR_CROSS_ENTROPY

import liger_rl.integrations.liger as ours
from liger_rl.integrations.liger import LigerFusedLinearCrossEntropyLoss

ROWS, LENGTH, HIDDEN, VOCAB = 6, 9, 12, 61
PAIRED = ("CPO", "DPO", "ORPO", "SimPO")
DPO_TYPES = ("sigmoid", "hinge", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop")
CASES = {
    **{f"DPO {kind}": ("DPO", {"loss_type": kind}) for kind in DPO_TYPES},
    **{f"DPO {kind}": ("DPO", {"loss_type": kind, "label_smoothing": 0.1}) for kind in ("exo_pair", "robust")},
    "DPO without a reference": ("DPO", {"use_ref_model": False, "compute_nll_loss": True, "alpha": 0.3}),
    "DPO of means": ("DPO", {"average_log_prob": True, "ignore_index": 42}),
    **{f"CPO {a}, {n}": ("CPO", {"average_log_prob": a, "compute_nll_loss": n, "label_smoothing": 0.1, "alpha": 0.7})
       for a, n in product((False, True), repeat=2)},
    "ORPO": ("ORPO", {"beta": 0.2}),
    "ORPO, other ids for the NLL": ("ORPO", {}),
    "ORPO, the prompt in the NLL": ("ORPO", {}),
    "SimPO": ("SimPO", {"gamma": 0.7, "label_smoothing": 0.2}),
    "KTO": ("KTO", {"use_ref_model": True}),
    "KTO of means": ("KTO", {"average_log_prob": True}),
}  # fmt: skip


def problem(name, options):
    """-> leaves, and the call with them in place."""
    ignored = options.get("ignore_index", -100)
    hidden, weight = torch.randn(ROWS, LENGTH, HIDDEN), torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5
    target = torch.randint(43, VOCAB, (ROWS, LENGTH))
    prompt = torch.arange(LENGTH) < torch.tensor([3, 1, 2, 3, 1, 2])[:, None]
    whole, target = target.clone(), torch.where(prompt | (torch.rand(ROWS, LENGTH) < 0.2), ignored, target)
    target[:, -1] = 50
    call = {"_input": hidden, "lin_weight": weight, "target": target, "bias": torch.randn(VOCAB)}
    if options.get("use_ref_model", name == "DPO"):
        call |= {
            "ref_input": torch.randn(ROWS, LENGTH, 8),
            "ref_weight": torch.randn(VOCAB, 8),
            "ref_bias": torch.randn(VOCAB),
        }
    if name == "KTO":
        call |= {"preference_labels": torch.tensor([1, 0, 0, 1, 1, 0]).bool(), "kl": torch.tensor([0.4])}
    if "other ids" in options.get("case", ""):
        call["nll_target"] = torch.randint(VOCAB, (ROWS, LENGTH))
    if "prompt" in options.get("case", ""):
        whole[:, -1] = 50
        call["nll_target"] = whole
    return call


def results(module, call):
    leaves = {name: call[name].clone().requires_grad_() for name in ("_input", "lin_weight", "bias")}
    loss, metrics = module(**(call | leaves))
    loss.backward()
    return loss.detach(), [metric.detach() for metric in metrics], {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("case", CASES)
def test_as_liger(case):
    name, options = CASES[case]
    call = problem(name, options | {"case": case})
    their_class, our_class = (getattr(m, f"LigerFusedLinear{name}Loss") for m in (theirs, ours))
    expected = results(their_class(compiled=False, **options), call)
    found = results(our_class(compiled=False, **options), call)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", [*PAIRED, "KTO"])
def test_the_same_signatures(name):
    their_class, our_class = (getattr(m, f"LigerFusedLinear{name}Loss") for m in (theirs, ours))
    for member in ("__init__", "forward"):
        kinds = [inspect.signature(getattr(c, member)).parameters.values() for c in (their_class, our_class)]
        defaults = [[(p.name, p.default) for p in parameters] for parameters in kinds]
        assert defaults[0] == defaults[1]


def test_what_is_masked_changes_nothing():
    call = problem("DPO", {})
    loss, _, grads = results(ours.LigerFusedLinearDPOLoss(), call)
    masked = call["target"] < 0
    call["_input"] = call["_input"].masked_fill(masked[..., None], torch.nan)
    call["ref_input"] = call["ref_input"].masked_fill(masked[..., None], torch.nan)
    found = results(ours.LigerFusedLinearDPOLoss(), call)
    torch.testing.assert_close(found[0], loss)
    torch.testing.assert_close(found[2]["lin_weight"], grads["lin_weight"])
    assert found[1][2].isnan()  # the mean of the logits of all positions, as Liger has it


def test_refusals():
    with pytest.raises(ValueError, match="ref_input and ref_weight must be given"):
        ours.LigerFusedLinearDPOLoss()(**{k: v for k, v in problem("DPO", {}).items() if "ref" not in k})
    with pytest.raises(ValueError, match="ref_input and ref_weight must be given"):
        ours.LigerFusedLinearKTOLoss(use_ref_model=True)(**problem("KTO", {}))
    with pytest.raises(ValueError, match=r"label_smoothing must be 0\.0 with loss_types"):
        ours.LigerFusedLinearDPOLoss(loss_type="hinge", label_smoothing=0.1)
    with pytest.raises(ValueError, match="loss_types must be one of"):
        ours.LigerFusedLinearDPOLoss(loss_type="unknown")
    with pytest.raises(ValueError, match=r"_input must be \(B, T, H\)"):
        ours.LigerFusedLinearCPOLoss()(torch.randn(5, 4), torch.randn(6, 4), torch.zeros(6, dtype=torch.long))


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


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("weighted", "options"),
    [
        (False, {}),
        (False, {"label_smoothing": 0.1, "lse_square_scale": 1e-2, "softcap": 9.0}),
        (True, {"lse_square_scale": 1e-2}),
        (True, {"label_smoothing": 0.1, "lse_square_scale": 1e-2, "softcap": 9.0}),
        (False, {"use_token_scaling": True, "lse_square_scale": 1e-2}),
    ],
    ids=["plain", "smoothing, z-loss, softcap", "class weights, z-loss", "all of them", "token scaling"],
)
def test_cross_entropy(reduction, weighted, options):
    leaves, logits = heads(options.get("softcap"))
    target = torch.randint(VOCAB, (TOKENS,))
    target[::5] = 42  # the ignored label
    counted, class_weights = target != 42, torch.rand(VOCAB).double() if weighted else None
    losses = cross_entropy(
        logits, target, weight=class_weights, ignore_index=42, reduction="none",
        label_smoothing=options.get("label_smoothing", 0.0),
    )  # fmt: skip
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
