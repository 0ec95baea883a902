"""Supervised losses from hidden states: metrics, corners, refusals. Values in float64 are the fuzzer's."""

import copy
import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import oracles
from head_calls import Products
from liger_rl import FusedLinearCrossEntropyLoss, FusedLinearPreferenceLoss, FusedLinearUnpairedLoss
from liger_rl.fused_linear import ReferenceHead
from liger_rl.losses import DFT, CrossEntropy, Reinforce, Segments, TokenMean

BATCH, LENGTH, HIDDEN, VOCAB = 4, 10, 12, 37


def problem() -> tuple[list[Tensor], Tensor]:
    """-> hidden and weight, and targets with ignored ones."""
    leaves = [torch.randn(BATCH, LENGTH, HIDDEN), 2 * torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5]
    targets = torch.randint(VOCAB, (BATCH, LENGTH))
    targets[torch.rand(BATCH, LENGTH) < 0.3] = -100
    targets[:, 0], targets[2, 3:] = 5, -100
    return leaves, targets


def test_weights_of_classes_are_weights_of_tokens():
    """torch's weighted mean divides by the sum of the weights."""
    leaves, targets = problem()
    classes = 1 + torch.rand(VOCAB)
    expected = cross_entropy((leaves[0] @ leaves[1].T).flatten(0, 1), targets.flatten(), weight=classes)
    weights = torch.where(targets >= 0, classes[targets.clamp(min=0)], 0.0)
    loss = FusedLinearCrossEntropyLoss()(*leaves, targets, token_weights=weights, num_items_in_batch=weights.sum())
    torch.testing.assert_close(loss.loss, expected)


def test_a_token_of_weight_0_enters_no_product():
    leaves, targets = problem()
    leaves[0][1] = torch.nan
    result = FusedLinearCrossEntropyLoss("dft")(*leaves, targets, token_weights=torch.tensor([1.0, 0.0, 1.0, 1.0]))
    assert result.loss.isfinite()


def test_metrics():
    leaves, targets = problem()
    of_dft = FusedLinearCrossEntropyLoss("dft", metrics="with_entropy", z_loss=0.01)(*leaves, targets).metrics
    assert set(of_dft) == {"nll", "z_loss", "accuracy", "entropy"}
    logits, counted = (leaves[0] @ leaves[1].T).double(), targets >= 0
    found = FusedLinearCrossEntropyLoss(metrics="with_entropy", z_loss=0.01)(*leaves, targets).metrics
    truth = oracles.values(logits, targets.clamp(min=0))
    expected = {
        "nll": -truth.logps[counted].mean(),
        "z_loss": 0.01 * truth.lse.square()[counted].mean(),
        "accuracy": truth.is_top1[counted].double().mean(),
        "entropy": truth.entropy[counted].mean(),
    }
    for name, value in expected.items():
        torch.testing.assert_close(found[name].value, value.float(), rtol=1e-4, atol=1e-5)
    assert FusedLinearCrossEntropyLoss(metrics="none")(*leaves, targets).metrics == {}


def test_modules_are_copied():
    leaves, targets = problem()
    loss = FusedLinearCrossEntropyLoss(label_smoothing=0.1)
    assert torch.equal(copy.deepcopy(loss)(*leaves, targets).loss, loss(*leaves, targets).loss)
    assert "CrossEntropy" in repr(loss)


def test_an_objective_of_ones_own():
    leaves, targets = problem()
    loss = FusedLinearCrossEntropyLoss(Reinforce())(*leaves, targets).loss
    torch.testing.assert_close(loss, FusedLinearCrossEntropyLoss()(*leaves, targets).loss)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FusedLinearCrossEntropyLoss("mse"), "loss_type must be one of"),
        (lambda: FusedLinearCrossEntropyLoss(gamma=1.0), "has no option gamma"),
        (lambda: FusedLinearCrossEntropyLoss(label_smooth=0.1), "did you mean label_smoothing"),
        (lambda: FusedLinearPreferenceLoss(chunk_vocab=64), "chunk_vocab: tiles fit a budget; linear_logprobs and"),
        (lambda: FusedLinearCrossEntropyLoss(label_smoothing=1.5), r"label_smoothing must be in \[0, 1\]"),
        (lambda: FusedLinearCrossEntropyLoss("eaft", eaft_k=20), "no option eaft_k: the entropy is that of all ids"),
        (lambda: FusedLinearCrossEntropyLoss(class_weights=torch.ones(3)), "class_weights: give .* as token_weights"),
        (lambda: FusedLinearPreferenceLoss("grpo"), "loss_type must be one of"),
        (lambda: FusedLinearPreferenceLoss("orpo", ld_alpha=0.1), "has no option ld_alpha"),
        (lambda: FusedLinearUnpairedLoss("kto", delta=0.1), "has no option delta"),
        (lambda: FusedLinearPreferenceLoss("dpo", metrics="with_entropy"), "metrics must be one of"),
        (lambda: FusedLinearUnpairedLoss("kto", metrics="basic"), "metrics must be one of"),
        (lambda: DFT(z_loss=-1.0), r"z_loss must be in \[0, inf\)"),
        (lambda: CrossEntropy(label_smoothing=True), "label_smoothing must be a number"),
    ],
)
def test_refused_options(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


NLL, PAIRED, SINGLE = FusedLinearCrossEntropyLoss(), FusedLinearPreferenceLoss("orpo"), FusedLinearUnpairedLoss("kto")
DPO, IDS = FusedLinearPreferenceLoss("dpo"), torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % VOCAB
LABELS, ZEROS, HALF = torch.tensor([True, False] * 2), torch.zeros(BATCH, LENGTH), torch.full((BATCH, LENGTH), 0.5)
WANTS_GRADIENT = torch.zeros(BATCH, LENGTH, requires_grad=True)
PLAIN_HEAD = {"hidden": torch.zeros(BATCH, LENGTH, 3), "weight": torch.zeros(VOCAB, 3)}
JUDGED = {"labels": LABELS, "ref_logps": ZEROS, "kl": 0.0}
FLAT = {"hidden": torch.zeros(BATCH * LENGTH, HIDDEN), "targets": IDS.flatten()}
SEGMENTS = {"segments": Segments(index=torch.arange(BATCH).repeat_interleave(LENGTH), count=BATCH)}
# Loss, arguments, error, message.
COLUMNS = [
    (NLL, {"targets": IDS + VOCAB}, ValueError, "targets must be token ids"),
    (NLL, {"token_weights": torch.ones(3)}, ValueError, "token_weights must be"),
    (DPO, {"hidden": torch.zeros(3, LENGTH, HIDDEN), "targets": IDS[:3], "ref_logps": torch.zeros(3)}, ValueError,
     "even number of rows"),
    (DPO, {"ref_logps": torch.zeros(3)}, ValueError, "ref_logps must be"),
    (DPO, FLAT | {"ref_logps": ZEROS.flatten()}, TypeError, "segments must be Segments for packed"),
    (PAIRED, {"nll_targets": IDS[:2] + 1}, ValueError, "nll_targets must be the ids of targets where both count"),
    (PAIRED, FLAT | SEGMENTS | {"nll_targets": IDS.flatten()[:20]}, ValueError,
     r"nll_targets must be \(40,\) from targets, got \(20,\)"),
    (SINGLE, JUDGED | {"delta": 0.1}, ValueError, "delta must be None"),
    *((loss, given | {"mask": mask}, ValueError, "mask must be 0 or 1 at each token; 40 of")
      for loss, given in ((NLL, {}), (PAIRED, {}), (PAIRED, {"nll_targets": IDS[:2]}), (SINGLE, JUDGED))
      for mask in (HALF, HALF * math.nan)),
    (NLL, {"token_weights": WANTS_GRADIENT}, ValueError, "token_weights must require no gradient"),
    (FusedLinearCrossEntropyLoss(reduction=TokenMean()), {"num_items_in_batch": 9}, ValueError, "num_items_in_batch"),
    (NLL, {"num_sequences": 9}, ValueError, "num_sequences must be None with the reduction GlobalTokenMean"),
    (FusedLinearPreferenceLoss("cpo", reduction=TokenMean()), {"num_sequences": 9}, ValueError, "num_sequences must"),
    (PAIRED, {"nll_targets": IDS[:2] * 1.0}, TypeError, "nll_targets must be integers"),
    (PAIRED, {"nll_targets": IDS}, ValueError, r"nll_targets must be \(B / 2, T\)"),
    (DPO, {"ref_logps": ZEROS[:, 1:]}, ValueError, r"ref_logps must be \(4,\) or \(4, 10\) from targets, got \(4, 9\)"),
    (DPO, {"ref_logps": ZEROS.to("meta")}, ValueError, "ref_logps must be on cpu from targets, got meta"),
    (DPO, {"ref_logps": WANTS_GRADIENT}, ValueError, "ref_logps must require no gradient"),
    (DPO, {"reference": (1, 2)}, TypeError, "reference must be a ReferenceHead or None, got tuple"),
    *((DPO, {"reference": ReferenceHead(**PLAIN_HEAD | changed)}, ValueError, message) for changed, message in (
        ({"hidden": torch.zeros(BATCH, LENGTH - 1, 3)}, r"reference.hidden must be \(4, 10, H\) from hidden"),
        ({"weight": torch.zeros(VOCAB, 2)}, r"reference.weight must be \(V, H\)"),
        ({"weight": torch.zeros(VOCAB, 3, requires_grad=True)}, "reference.weight must require no gradient"),
        ({"hidden": torch.zeros(BATCH, LENGTH, 3, requires_grad=True)}, "reference.hidden must require no gradient"),
        ({"bias": torch.zeros(VOCAB, requires_grad=True)}, "reference.bias must require no gradient"),
    )),
    *((SINGLE, JUDGED | {"kl": kl}, error, message) for kl, error, message in (
        ("0", TypeError, "kl must be a number, got str"),
        (-1.0, ValueError, r"kl must be in \[0, inf\), got -1"),
        (torch.tensor([0.0, 1.0, -0.5, math.nan]), ValueError, r"kl must be in \[0, inf\)"),
        (torch.zeros((), device="meta"), ValueError, "kl must have values, got a tensor on the meta device"),
        (torch.zeros((), requires_grad=True), ValueError, "kl must require no gradient"),
    )),
    (FusedLinearUnpairedLoss("bco"), {"labels": LABELS, "ref_logps": ZEROS, "delta": math.inf}, ValueError, "delta"),
    (PAIRED, {"targets": -IDS - 1, "nll_targets": IDS[:2] + VOCAB}, ValueError,
     "targets and nll_targets must be token ids"),
    (DPO, {"reference": ReferenceHead(hidden=torch.zeros(BATCH, LENGTH, 3), weight=torch.zeros(VOCAB - 1, 3)),
           "targets": torch.full_like(IDS, VOCAB - 1)}, ValueError, "with reference.weight, targets must be token ids"),
    *((loss, given | {name: torch.ones(BATCH, dtype=dtype)}, TypeError, f"{name} must be a real tensor")
      for loss, given, name in ((NLL, {}, "token_weights"), (DPO, {}, "ref_logps"), (SINGLE, JUDGED, "kl"))
      for dtype in (torch.complex64, torch.uint16, torch.bool)),
    (SINGLE, JUDGED | {"labels": LABELS.to("meta")}, ValueError, "labels must be on cpu from targets, got meta"),
    (SINGLE, JUDGED | {"labels": LABELS.float()}, TypeError, "labels must be a bool tensor.*got torch.float32"),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "given", "error", "message"), COLUMNS)
def test_columns_are_named_before_any_product(loss, given, error, message):
    head = {"hidden": torch.randn(BATCH, LENGTH, HIDDEN), "weight": torch.randn(VOCAB, HIDDEN), "targets": IDS}
    with Products() as products, pytest.raises(error, match=message):
        loss(**head | given)
    assert products.flops == 0


def test_without_a_sequence_the_loss_is_0():
    leaves = torch.randn(0, LENGTH, HIDDEN, requires_grad=True), torch.randn(VOCAB, HIDDEN)
    for loss, given in (
        (NLL, {}),
        (PAIRED, {}),
        (SINGLE, {name: x[:0] if name != "kl" else x for name, x in JUDGED.items()}),
    ):
        assert loss(*leaves, IDS[:0], **given).loss == 0
