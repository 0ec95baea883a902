"""Supervised losses from hidden states against PyTorch and the frameworks' formulas on full logits in float64."""

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
from liger_rl.losses import DFT, CrossEntropy, Reinforce, Segments, SequenceMean, TokenMean, TokenSum

BATCH, LENGTH, HIDDEN, VOCAB = 4, 10, 12, 37
per_token = oracles.cross_entropy


def problem() -> tuple[list[Tensor], Tensor]:
    """-> hidden and weight, and targets with ignored ones."""
    leaves = [torch.randn(BATCH, LENGTH, HIDDEN), 2 * torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5]
    targets = torch.randint(VOCAB, (BATCH, LENGTH))
    targets[torch.rand(BATCH, LENGTH) < 0.3] = -100
    targets[:, 0], targets[2, 3:] = 5, -100
    return leaves, targets


def in_float64(leaves: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    doubles = [leaf.double().requires_grad_() for leaf in leaves]
    return doubles, doubles[0] @ doubles[1].T


def trl_dft(logits, targets):
    logps = -per_token(logits, targets)
    return -logps.exp().detach() * logps


LOSSES = {
    "nll": (("nll", {}), per_token),
    "label smoothing": (("nll", {"label_smoothing": 0.2}), lambda z, y: per_token(z, y, label_smoothing=0.2)),
    "z-loss": (("nll", {"z_loss": 0.01}), lambda z, y: per_token(z, y, 0.01)),
    "TRL's DFT": (("dft", {}), trl_dft),
    "DFT with z-loss": (("dft", {"z_loss": 0.01}), lambda z, y: trl_dft(z, y) + 0.01 * z.logsumexp(-1).square()),
    "EAFT": (("eaft", {"eaft_alpha": 1.5}), lambda z, y: oracles.eaft(z, y, 1.5)),
    "EAFT at Axolotl's scale": (("eaft", {"eaft_scale": 1.0}), lambda z, y: oracles.eaft(z, y, divisor=1.0)),
}


def assert_as_full_logits(loss_fn, formula, mean, **columns):
    leaves, targets = problem()
    doubles, logits = in_float64(leaves)
    counted = targets >= 0
    losses = torch.where(counted, formula(logits, targets.clamp(min=0)), 0.0)
    expected = mean(losses, counted)
    floats = [leaf.clone().requires_grad_() for leaf in leaves]
    floats[0].data[~counted] = torch.nan
    result = loss_fn(*floats, targets, **columns)
    torch.testing.assert_close(result.loss, expected.float(), rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad(result.loss, floats)
    wanted = torch.autograd.grad(expected, doubles)
    torch.testing.assert_close(found, tuple(grad.float() for grad in wanted), rtol=1e-4, atol=1e-6)
    return result.metrics


def token_mean(losses, counted):
    return losses.sum() / counted.sum()


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    (loss_type, options), formula = LOSSES[name]
    assert_as_full_logits(FusedLinearCrossEntropyLoss(loss_type, **options), formula, token_mean)


@pytest.mark.parametrize(
    ("reduction", "mean", "columns"),
    [
        (SequenceMean(), lambda x, m: (x.sum(1) / m.sum(1)).mean(), {}),
        (TokenSum(), lambda x, m: x.sum(), {}),
        (TokenMean(), token_mean, {}),
        (None, lambda x, m: x.sum() / 91, {"num_items_in_batch": 91}),
    ],
    ids=["sequences", "sum", "tokens", "items"],
)
def test_reductions(reduction, mean, columns):
    loss = FusedLinearCrossEntropyLoss(reduction=reduction, label_smoothing=0.1)
    assert_as_full_logits(loss, lambda z, y: per_token(z, y, label_smoothing=0.1), mean, **columns)


def test_weights_of_classes_are_weights_of_tokens():
    """torch's weighted mean divides by the sum of the weights."""
    leaves, targets = problem()
    classes = 1 + torch.rand(VOCAB)
    expected = cross_entropy((leaves[0] @ leaves[1].T).flatten(0, 1), targets.flatten(), weight=classes)
    weights = torch.where(targets >= 0, classes[targets.clamp(min=0)], 0.0)
    loss = FusedLinearCrossEntropyLoss()(*leaves, targets, token_weights=weights, num_items_in_batch=weights.sum())
    torch.testing.assert_close(loss.loss, expected)


@pytest.mark.parametrize("per_row", [False, True])
def test_token_weights(per_row):
    weights = torch.tensor([0.5, 0.0, 2.0, 1.0]) if per_row else torch.rand(BATCH, LENGTH).round(decimals=1)
    factors = weights[:, None] if per_row else weights
    formula = lambda z, y: factors * per_token(z, y)  # noqa: E731
    assert_as_full_logits(FusedLinearCrossEntropyLoss(), formula, token_mean, token_weights=weights)


def test_a_token_of_weight_0_enters_no_product():
    leaves, targets = problem()
    leaves[0][1] = torch.nan
    result = FusedLinearCrossEntropyLoss("dft")(*leaves, targets, token_weights=torch.tensor([1.0, 0.0, 1.0, 1.0]))
    assert result.loss.isfinite()


def test_metrics():
    leaves, targets = problem()
    loss = FusedLinearCrossEntropyLoss("dft", metrics="with_entropy", z_loss=0.01)
    metrics = assert_as_full_logits(loss, LOSSES["DFT with z-loss"][1], token_mean)
    assert set(metrics) == {"nll", "z_loss", "accuracy", "entropy"}
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


def test_packed_tokens():
    leaves, targets = problem()
    loss = FusedLinearCrossEntropyLoss(reduction=SequenceMean())
    segments = Segments(index=torch.arange(BATCH).repeat_interleave(LENGTH), count=BATCH)
    packed = loss(leaves[0].flatten(0, 1), leaves[1], targets.flatten(), segments=segments)
    torch.testing.assert_close(packed.loss, loss(*leaves, targets).loss)


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


def test_refused_calls():
    leaves, targets = problem()
    with pytest.raises(ValueError, match="targets must be token ids"):
        FusedLinearCrossEntropyLoss()(*leaves, targets.masked_fill(targets == 5, VOCAB))
    with pytest.raises(ValueError, match="token_weights must be"):
        FusedLinearCrossEntropyLoss()(*leaves, targets, token_weights=torch.ones(3))
    pairs = FusedLinearPreferenceLoss("dpo")
    with pytest.raises(ValueError, match="even number of rows"):
        pairs(leaves[0][:3], leaves[1], targets[:3], ref_logps=torch.zeros(3))
    with pytest.raises(ValueError, match="ref_logps must be"):
        pairs(*leaves, targets, ref_logps=torch.zeros(3))
    with pytest.raises(ValueError, match="nll_targets must be the ids of targets where both count"):
        FusedLinearPreferenceLoss("orpo")(*leaves, targets, nll_targets=torch.full((2, LENGTH), 3))
    single = FusedLinearUnpairedLoss("kto")
    with pytest.raises(TypeError, match="labels must be a bool tensor"):
        single(*leaves, targets, torch.ones(BATCH), ref_logps=torch.zeros(BATCH), kl=0.0)
    with pytest.raises(ValueError, match="delta must be None"):
        single(*leaves, targets, torch.ones(BATCH).bool(), ref_logps=torch.zeros(BATCH), kl=0.0, delta=0.1)
    with pytest.raises(TypeError, match="segments must be Segments for packed"):
        pairs(leaves[0].flatten(0, 1), leaves[1], targets.flatten(), ref_logps=torch.zeros(BATCH * LENGTH))


NLL, PAIRED, SINGLE = FusedLinearCrossEntropyLoss(), FusedLinearPreferenceLoss("orpo"), FusedLinearUnpairedLoss("kto")
DPO, IDS = FusedLinearPreferenceLoss("dpo"), torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % VOCAB
LABELS, ZEROS, HALF = torch.tensor([True, False] * 2), torch.zeros(BATCH, LENGTH), torch.full((BATCH, LENGTH), 0.5)
WANTS_GRADIENT = torch.zeros(BATCH, LENGTH, requires_grad=True)
PLAIN_HEAD = {"hidden": torch.zeros(BATCH, LENGTH, 3), "weight": torch.zeros(VOCAB, 3)}
JUDGED = {"labels": LABELS, "ref_logps": ZEROS, "kl": 0.0}
# Loss, arguments, error, message.
COLUMNS = [
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
        (torch.zeros((), device="meta"), ValueError, "kl must be on cpu from targets"),
        (torch.zeros((), requires_grad=True), ValueError, "kl must require no gradient"),
    )),
    (FusedLinearUnpairedLoss("bco"), {"labels": LABELS, "ref_logps": ZEROS, "delta": math.inf}, ValueError, "delta"),
    (SINGLE, JUDGED | {"labels": LABELS.to("meta")}, ValueError, "labels must be on cpu from targets, got meta"),
    (SINGLE, JUDGED | {"labels": LABELS.float()}, TypeError, "labels must be a bool tensor.*got torch.float32"),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "given", "error", "message"), COLUMNS)
def test_columns_are_named_before_any_product(loss, given, error, message):
    with Products() as products, pytest.raises(error, match=message):
        loss(torch.randn(BATCH, LENGTH, HIDDEN), torch.randn(VOCAB, HIDDEN), IDS, **given)
    assert products.flops == 0


def test_without_a_sequence_the_loss_is_0():
    leaves = torch.randn(0, LENGTH, HIDDEN, requires_grad=True), torch.randn(VOCAB, HIDDEN)
    for loss, given in (
        (NLL, {}),
        (PAIRED, {}),
        (SINGLE, {name: x[:0] if name != "kl" else x for name, x in JUDGED.items()}),
    ):
        assert loss(*leaves, IDS[:0], **given).loss == 0


def test_packed_nll_targets_are_those_of_the_chosen_segments():
    leaves, _ = problem()
    counted, nll_targets = torch.arange(LENGTH).expand(BATCH, LENGTH) >= 6, IDS.clone()
    rows = PAIRED(*leaves, IDS, mask=counted, nll_targets=nll_targets[:2])
    order = torch.randperm(BATCH * LENGTH)
    hidden, ids, mask = (x.flatten(0, 1)[order] for x in (leaves[0], IDS, counted))
    segments = Segments(index=torch.arange(BATCH).repeat_interleave(LENGTH)[order], count=BATCH)
    packed = PAIRED(hidden, leaves[1], ids, mask=mask, nll_targets=nll_targets.flatten()[order], segments=segments)
    torch.testing.assert_close(packed.loss, rows.loss)
    with pytest.raises(ValueError, match=r"nll_targets must be \(40,\) from targets, got \(20,\)"):
        PAIRED(hidden, leaves[1], ids, mask=mask, nll_targets=nll_targets.flatten()[:20], segments=segments)
