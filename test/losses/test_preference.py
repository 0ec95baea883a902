"""Preference objectives against TRL's own code and against formulas in float64."""

import math
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from liger_rl import ppo_loss_fn
from liger_rl.losses import CPO, DPO, KTO, ORPO, PREFERENCES, Segments, SequenceMean
from liger_rl.losses.batch import PreferenceBatch
from liger_rl.losses.loss import PolicyTerms
from liger_rl.losses.preference import PAIR_LOSSES, SCORES, SORTED

trl = pytest.importorskip("trl", reason="compares with TRL's own code")

PAIRS, LENGTH, BETA = 5, 11, 0.3
OPTIONS = {name: {"label_smoothing": 0.1} for name in ("exo_pair", "robust", "aot", "aot_unpaired")}
ALPHA = {"alpha_divergence": {"f_alpha_divergence_coef": 0.7}}
SCORED = [name for name, loss in PAIR_LOSSES.items() if loss.scores]


def tokens() -> dict[str, Tensor]:
    """Log-probabilities of a policy and a reference, (2 P, T), and what counts, in float64."""
    mask = torch.arange(LENGTH) < torch.tensor([11, 4, 7, 9, 2, 6, 8, 3, 11, 5])[:, None]
    mask[:, 0] = False  # TRL's first token has no prediction
    logps = -2 * torch.rand(2 * PAIRS, LENGTH).double()
    return {
        "logps": torch.where(mask, logps, 0.0).requires_grad_(),
        "ref": torch.where(mask, logps + 0.4 * torch.randn(logps.shape), 0.0),
        "sum_sq": -torch.rand(logps.shape).double(),
        "mask": mask,
    }


def ours(objective, x: dict[str, Tensor], **columns) -> Tensor:
    """The loss by `ppo_loss_fn`'s formulas, with the head's other values."""
    side = torch.ones(2 * PAIRS)
    side[PAIRS:] = -1
    given = {"advantages": side, "ref_per_token_logps": x["ref"], "pairs": True, "num_sequences": PAIRS} | columns
    batch = PreferenceBatch(mask=x["mask"], **given)
    terms = PolicyTerms(objective=objective, reduction=SequenceMean())
    prepared = terms.prepare(terms.check(batch, x["mask"].shape, x["mask"].device), x["logps"].dtype)
    others = {"log_sum_sq_probs": x["sum_sq"]} if "log_sum_sq_probs" in terms.head_values else {}
    return prepared.evaluate(x["logps"], others=others).loss


class Accelerator:
    device = torch.device("cpu")

    def gather(self, values):
        return values

    gather_for_metrics = gather

    def unwrap_model(self, model):
        return model


def trls(x: dict[str, Tensor], **options) -> Tensor:
    """`DPOTrainer._compute_loss` on given log-probabilities."""
    from collections import defaultdict

    from trl.trainer.dpo_trainer import DPOTrainer

    def output(logps):
        zeros = torch.zeros(2 * PAIRS, LENGTH - 1)
        return SimpleNamespace(
            log_probs=logps[:, 1:], entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(),
            log_sum_sq_probs=x["sum_sq"][:, 1:], aux_loss=None,
        )  # fmt: skip

    settings = {
        "beta": BETA, "loss_types": ["sigmoid"], "loss_weights": [1.0], "ld_alpha": None, "label_smoothing": 0.0,
        "f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5, "use_weighting": False,
    } | options  # fmt: skip
    trainer = SimpleNamespace(
        model=torch.nn.Identity(), accelerator=Accelerator(), aux_loss_enabled=False, _tp_size=1,
        precompute_ref_logps=False, ref_model=lambda **_: output(x["ref"]), _total_train_tokens=0,
        _metrics=defaultdict(lambda: defaultdict(list)),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=0.05), **settings,
    )  # fmt: skip
    ids = torch.ones(2 * PAIRS, LENGTH, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": ids, "completion_mask": x["mask"].long()}
    return DPOTrainer._compute_loss(trainer, lambda **_: output(x["logps"]), inputs, False)


def assert_equal(found: Tensor, expected: Tensor, x: dict[str, Tensor], **tolerance: float) -> None:
    torch.testing.assert_close(found, expected, **tolerance)
    gradients = [torch.autograd.grad(loss, x["logps"])[0] for loss in (found, expected)]
    assert not gradients[0][~x["mask"]].any()
    torch.testing.assert_close(gradients[0][x["mask"]], gradients[1][x["mask"]], **tolerance)


@pytest.fixture(autouse=True)
def _no_checkpointing(monkeypatch):
    monkeypatch.setattr("trl.trainer.dpo_trainer.disable_gradient_checkpointing", lambda *_: nullcontext())


CASES = [
    *(((name,), OPTIONS.get(name, {})) for name in (*PAIR_LOSSES, "sft")),
    *((("sigmoid",), {"f_divergence_type": kind} | ALPHA.get(kind, {})) for kind in SCORES if kind != "reverse_kl"),
    *(((name,), {"f_divergence_type": "js_divergence"} | OPTIONS.get(name, {})) for name in SCORED[1:]),
    (("sigmoid",), {"ld_alpha": 0.4}),
    *(((name,), {"ld_alpha": 0.4}) for name in SORTED),
    (("sigmoid",), {"use_weighting": True}),
    (("sigmoid", "bco_pair", "sft"), {"loss_weights": [0.8, 0.2, 1.5]}),
    (("hinge",), {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0}),
]  # fmt: skip


@pytest.mark.parametrize(("names", "options"), CASES, ids=str)
def test_as_trl(names, options):
    x = tokens()
    if options.get("f_divergence_type") == "alpha_divergence":  # TRL has a bound for float32, and none for float64
        x |= {name: x[name].detach().float() for name in ("logps", "ref", "sum_sq")}
        x["logps"].requires_grad_()
    theirs = {"loss_weights": [1.0] * len(names)} | options
    found = ours(DPO(loss_types=names, beta=BETA, **options), x)
    assert_equal(found, trls(x, loss_types=list(names), **theirs), x)


@pytest.mark.parametrize("name", ["sigmoid", *SORTED])
@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_ld_alpha_beside_an_empty_sequence(name, alpha):
    """Every token of the other sequence is past the shared length."""
    x = tokens()
    for row in (1, PAIRS + 3):
        x["mask"][row] = False
    x |= {name: torch.where(x["mask"], x[name].detach(), 0.0) for name in ("logps", "ref")}
    x["logps"].requires_grad_()
    found = ours(DPO(loss_types=name, beta=BETA, ld_alpha=alpha), x)
    assert_equal(found, trls(x, loss_types=[name], ld_alpha=alpha), x)
    x["mask"][PAIRS + 1] = False  # a pair without a token: log 2 of TRL's, and nothing of ours
    if name == "sigmoid":
        x |= {name: torch.where(x["mask"], x[name].detach(), 0.0) for name in ("logps", "ref")}
        x["logps"].requires_grad_()
        constant = math.log(2) / PAIRS
        assert_equal(ours(DPO(beta=BETA, ld_alpha=alpha), x) + constant, trls(x, ld_alpha=alpha), x)


def test_every_loss_type_of_trl_has_a_name():
    with pytest.raises(ValueError, match="Unknown loss type") as error:
        trls(tokens(), loss_types=["none of them"])
    named = set(re.findall(r"'(\w+)'", str(error.value)))
    assert named == {*PAIR_LOSSES, "sft"}
    assert set(PAIR_LOSSES) < set(PREFERENCES)


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo", "simpo"])
@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_cpo_as_trl(kind, alpha):
    from trl.experimental.cpo import CPOTrainer

    x, smoothing = tokens(), 0.2 if kind in ("sigmoid", "simpo") else 0.0
    sums = x["logps"].sum(1)
    if kind in ("ipo", "simpo"):
        sums = sums / x["mask"].sum(1)
    gamma = 0.7 if kind == "simpo" else 0.5
    trainer = SimpleNamespace(
        alpha=alpha, beta=BETA, loss_type=kind, label_smoothing=smoothing, simpo_gamma=gamma, accelerator=Accelerator()
    )
    losses, *_ = CPOTrainer.cpo_loss(trainer, *sums.chunk(2))
    nll = -x["logps"][:PAIRS][x["mask"][:PAIRS]].mean()
    options = {"label_smoothing": smoothing, "simpo_gamma": gamma, "nll_coef": 0.6}
    objective = CPO(kind=kind, alphapo_alpha=alpha, beta=BETA, **options)
    found = ours(objective, x, ref_per_token_logps=None)
    assert_equal(found, losses.mean() + 0.6 * nll, x)


def test_orpo_as_trl():
    from trl.experimental.orpo import ORPOTrainer

    x = tokens()
    means = x["logps"].sum(1) / x["mask"].sum(1)
    trainer = SimpleNamespace(beta=BETA, accelerator=Accelerator())
    losses, *_ = ORPOTrainer.odds_ratio_loss(trainer, *means.chunk(2))  # in float32
    nll = -x["logps"][:PAIRS][x["mask"][:PAIRS]].mean()
    found = ours(ORPO(beta=BETA), x, ref_per_token_logps=None)
    assert_equal(found, nll - losses.mean(), x, rtol=1e-5, atol=1e-6)


def test_orpo_where_the_odds_are_infinite():
    x = tokens()
    x["logps"] = torch.zeros_like(x["logps"]).requires_grad_()
    loss = ours(ORPO(), x, ref_per_token_logps=None)
    assert loss.isfinite()
    assert torch.autograd.grad(loss, x["logps"])[0].isfinite().all()


@pytest.mark.parametrize(
    ("objective", "options", "message"),
    [
        (DPO, {"loss_types": "hinge", "label_smoothing": 0.1}, r"label_smoothing must be 0\.0 with loss_types"),
        (DPO, {"loss_types": "exo_pair"}, "label_smoothing must be above 0 with exo_pair"),
        (DPO, {"loss_types": ("sigmoid", "sft"), "loss_weights": [1.0]}, "one number for each of loss_types"),
        (DPO, {"loss_types": "nca_pair", "f_divergence_type": "forward_kl"}, "f_divergence_type must be 'reverse_kl'"),
        (DPO, {"loss_types": "aot", "use_weighting": True}, "use_weighting must be False"),
        (DPO, {"loss_types": "ipo", "average_log_prob": True}, "average_log_prob must be False"),
        (DPO, {"loss_types": "dpo"}, "loss_types must be one of"),
        (DPO, {"discopop_tau": 0.1}, "discopop_tau must be 0.05 with loss_types"),
        (DPO, {"f_alpha_divergence_coef": 0.7}, "f_alpha_divergence_coef must be 0.5 with loss_types"),
        (DPO, {"beta": 0.0}, r"beta must be in \(0, inf\)"),
        (DPO, {"loss_weights": 1.0}, "loss_weights must be a list, got float"),
        (DPO, {"loss_types": 1}, "loss_types must be a list, got int"),
        (CPO, {"simpo_gamma": 0.7}, r"simpo_gamma must be 0\.5 with kind"),
        (CPO, {"kind": "ipo", "label_smoothing": 0.1}, r"label_smoothing must be 0\.0 with kind"),
    ],
)
def test_refused_options(objective, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        objective(**options)


def test_ld_alpha_needs_rows():
    x = {name: value.flatten() for name, value in tokens().items()}
    segments = Segments(index=torch.arange(PAIRS).repeat_interleave(LENGTH).repeat(2), count=PAIRS)
    with pytest.raises(ValueError, match="ld_alpha and"):
        ours(DPO(ld_alpha=0.4), x, pairs=False, segments=segments, advantages=torch.ones(2 * PAIRS * LENGTH))


def test_references_are_neither_missing_nor_unread():
    x = tokens()
    with pytest.raises(ValueError, match="must be given for DPO"):
        ours(DPO(), x, ref_per_token_logps=None)
    with pytest.raises(ValueError, match="must be None for CPO"):
        ours(CPO(), x)
    with pytest.raises(ValueError, match=r"kl must be given, or be 0\.0"):
        ours(KTO(), x, pairs=False)


def test_metrics():
    x = tokens()
    margins = (x["logps"] - x["ref"]).sum(1).detach()
    batch = PreferenceBatch(
        advantages=torch.tensor([1.0] * PAIRS + [-1.0] * PAIRS), mask=x["mask"], ref_per_token_logps=x["ref"],
        pairs=True, num_sequences=PAIRS,
    )  # fmt: skip
    metrics = ppo_loss_fn(x["logps"], batch, DPO(beta=BETA), SequenceMean()).metrics
    chosen, rejected = BETA * margins[:PAIRS], BETA * margins[PAIRS:]
    expected = {
        "chosen_rewards": chosen.mean(), "rejected_rewards": rejected.mean(),
        "reward_margins": (chosen - rejected).mean(),
        "reward_accuracy": (chosen > rejected).double().mean(), "chosen_logps": x["logps"].sum(1)[:PAIRS].mean(),
        "rejected_logps": x["logps"].sum(1)[PAIRS:].mean(), "nll": -x["logps"][:PAIRS][x["mask"][:PAIRS]].mean(),
    }  # fmt: skip
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        assert math.isclose(metrics[name].item(), value.item(), rel_tol=1e-5, abs_tol=1e-6), name
