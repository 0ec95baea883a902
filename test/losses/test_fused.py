"""The kernel of token-local losses where numbers are not finite or at a bound, and which losses it runs.

Other numbers are the fuzzer's. The formulas' derivatives are autograd's.
"""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from head_calls import run_pytorch, run_triton
from liger_rl import FusedLinearGRPOLoss
from liger_rl.losses import (
    CISPO,
    DPPO,
    DPPOKL,
    SAPO,
    VESPO,
    EntropyBonus,
    KLPenalty,
    OffPolicySequenceMask,
    PolicyBatch,
    PPOClip,
    Reinforce,
    TokenMean,
    TokenSum,
    fused,
    fused_triton,
)
from liger_rl.losses.loss import PolicyTerms, PreparedLoss

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
OBJECTIVES = [
    PPOClip(),
    PPOClip(epsilon_low=0.1, epsilon_high=0.3, delta=1.5),
    PPOClip(dual_clip=1.7),
    PPOClip(epsilon_high=0.28, delta=2.0, dual_clip=3.0),
    CISPO(),
    CISPO(ratio_min=0.8, epsilon_high=1.2),
    Reinforce(),
    SAPO(sapo_temperature_pos=0.9),
    DPPO(),
    DPPO(divergence_low=0.05, divergence_high=0.1, ratio_cap=1.2),
]
PENALTIES = [
    KLPenalty(),
    *(
        KLPenalty(beta=0.3, kl_estimator=name, importance_weighted=weighted)
        for name in ("k1", "k2", "k3")
        for weighted in (False, True)
    ),
]
# Every objective with and without a penalty that its ratio weighs, every penalty with one of the objectives.
PAIRS = [
    *itertools.product(OBJECTIVES, (PENALTIES[0], PENALTIES[-1])),
    *((OBJECTIVES[1], kl) for kl in PENALTIES[1:-1]),
]
BASE = PolicyTerms(objective=PPOClip(), reduction=TokenMean(), kl=KLPenalty(beta=0.1))


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """The kernel also where Triton's interpreter runs it."""
    run_triton(monkeypatch)


def prepare(terms: PolicyTerms, columns: dict[str, Tensor], shape: torch.Size, dtype=torch.float32) -> PreparedLoss:
    return terms.prepare(terms.check(PolicyBatch(**columns), shape, DEVICE), dtype)


def by_formula(terms: PolicyTerms, columns: dict[str, Tensor], logps: Tensor, dtype=torch.float32):
    """-> PolicyLoss and the gradient, by autograd."""
    leaf = logps.to(dtype, copy=True).requires_grad_()
    found = prepare(terms, columns, logps.shape, dtype).evaluate(leaf)
    return found, torch.autograd.grad(found.loss, leaf)[0]


def by_kernel(terms: PolicyTerms, columns: dict[str, Tensor], logps: Tensor):
    """-> PolicyLoss and the gradient."""
    prepared = prepare(terms, columns, logps.shape)
    assert fused.find_kernel(prepared, logps) is fused_triton
    leaf = logps.clone().requires_grad_()
    result = fused.evaluate(prepared, leaf)
    return result, torch.autograd.grad(result.loss, leaf)[0]


def some_tokens(shape: tuple[int, ...]):
    """Log-probabilities and columns, NaN where they are masked."""
    mask, logps = torch.rand(shape) < 0.8, -3 * torch.rand(shape)
    columns = {
        "old_per_token_logps": logps + 0.4 * torch.randn(shape),
        "ref_per_token_logps": logps + torch.randn(shape),
    }
    columns = {name: column.masked_fill(~mask, math.nan) for name, column in columns.items()}
    columns |= {"advantages": torch.randn(shape).masked_fill(~mask, math.nan), "mask": mask}
    logps = logps.masked_fill(~mask, math.nan)
    return logps.to(DEVICE), {name: column.to(DEVICE) for name, column in columns.items()}


@pytest.mark.parametrize(("objective", "kl"), PAIRS, ids=str)
def test_what_is_not_finite(objective, kl):
    """Token by token the same infinities and NaN as the formulas have, and beyond the bound of a ratio too."""
    inf, nan = math.inf, math.nan
    rows = [
        *itertools.product((nan, -inf, 50.0, -1e4, -1.0), (-1.0, -inf, nan, -45.0), (-1.5, 0.0, 2.0), (-1.5,), (1.0,)),
        *itertools.product((-1.0, -inf, nan), (-1.25,), (-1.5, 2.0), (nan, -inf, 60.0, 1e5), (1.0,)),
        *itertools.product((-1.0,), (-1.25,), (nan,), (-1.5,), (1.0,)),
        *itertools.product((-1.0, nan), (-1.25,), (-1.5, 2.0), (-1.5,), (nan, 0.0)),
    ]
    logps, old, advantages, ref, importance = torch.tensor(rows, device=DEVICE).T.contiguous()
    columns = {"advantages": advantages, "ref_per_token_logps": ref, "importance_ratio": importance}
    terms = PolicyTerms(objective=objective, reduction=TokenSum(), kl=kl)
    for given in (columns, {**columns, "old_per_token_logps": old}):
        _, slopes = by_kernel(terms, given, logps)
        _, expected = by_formula(terms, given, logps)
        torch.testing.assert_close(slopes, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
        prepared = prepare(terms, given, logps.shape)
        losses = prepared.per_token(logps).loss
        assert losses.isnan().any()
        found = fused_triton.launch(prepared._replace(weights=None), logps, outputs=("losses",)).losses
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6, equal_nan=True)
        # A sum is of the same numbers: one that is not finite hides the others, so these are of one token.
        for token in range(0, len(rows), 31):
            alone = {name: column[token : token + 1] for name, column in given.items()}
            loss = by_kernel(terms, alone, logps[token : token + 1])[0].loss
            torch.testing.assert_close(loss, losses[token], rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    "objective",
    [
        PPOClip(epsilon_low=0.0, epsilon_high=0.5),
        PPOClip(epsilon_low=0.5, epsilon_high=0.0),
        PPOClip(epsilon_low=0.0, epsilon_high=0.0, delta=1.0),
        PPOClip(epsilon_low=0.0, epsilon_high=0.0, delta=0.9),
        CISPO(epsilon_high=1.0),
        CISPO(ratio_min=1.0, epsilon_high=1.0),
        DPPO(divergence_low=0.0, divergence_high=0.0, ratio_cap=1.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("distance", [0.0, 40.0])
def test_at_the_bounds(objective, distance):
    """exp(0) = 1 is exact everywhere; 40 nats are the bound of a ratio and of k3."""
    logps = torch.tensor([-1.0, -2.0, -3.0], device=DEVICE)
    advantages = torch.tensor([1.5, -0.5, 0.0], device=DEVICE)
    for old, ref in ((logps - distance, logps), (logps, logps + distance)):
        columns = {"advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": ref}
        for kl in (KLPenalty(), KLPenalty(beta=1.0)):
            terms = PolicyTerms(objective=objective, reduction=TokenSum(), kl=kl)
            expected, grad = by_formula(terms, columns, logps)
            found, slopes = by_kernel(terms, columns, logps)
            torch.testing.assert_close(slopes, grad, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=1e-6)
            assert found.metrics["clip_ratio"].total == expected.metrics["clip_ratio"].total


# --- where it runs ----------------------------------------------------------------------------------------------------


def whole_step(loss: FusedLinearGRPOLoss):
    """-> loss, metrics and gradients of a head whose loss is divided in place, as accumulated ones are."""
    torch.manual_seed(1)
    hidden = torch.randn(6, 20, 16, device=DEVICE).requires_grad_()
    weight = (torch.randn(129, 16, device=DEVICE) / 4).requires_grad_()  # a ratio of 1e6 would leave a token no digits
    ids = torch.randint(129, (6, 20), device=DEVICE)
    mask = torch.rand(6, 20, device=DEVICE) < 0.8
    ids[0, 0] = -100
    advantages = torch.randn(6, device=DEVICE)
    advantages[::3] = 0.0
    old, ref = -6 * torch.rand(2, 6, 20, device=DEVICE)
    value, metrics = loss(hidden, weight, ids, advantages, mask, old_per_token_logps=old, ref_per_token_logps=ref)
    value /= 2
    value.backward()
    return [value.detach(), {name: m.value for name, m in metrics.items()}, hidden.grad, weight.grad]


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("metrics", ["none", "loss"])
def test_the_head_uses_it(metrics, beta, monkeypatch):
    loss, launch, seen = FusedLinearGRPOLoss("dapo", beta=beta, metrics=metrics), fused_triton.launch, []

    def counted(*args, outputs, **options):
        seen.append(" and ".join(sorted(outputs)))
        return launch(*args, outputs=outputs, **options)

    monkeypatch.setattr(fused_triton, "launch", counted)
    found = whole_step(loss)
    assert seen == ["slopes and sums"]
    run_pytorch(monkeypatch, DEVICE)
    torch.testing.assert_close(found, whole_step(loss), rtol=1e-5, atol=1e-6)
    assert len(seen) == 1


class Own(PPOClip):
    def __call__(self, logps, batch):
        return super().__call__(2 * logps, batch)


@dataclass(frozen=True, kw_only=True)
class OwnPenalty(KLPenalty):
    def __call__(self, logps, batch, ratio):
        return logps.square()


OTHERS = {
    "another device": {},
    "float64": {},
    "subclass": {"objective": Own()},
    "callable": {"objective": lambda logps, batch: PPOClip()(logps, batch)},
    "gspo": {"objective": PPOClip(importance_sampling_level="sequence")},
    "mean advantages": {"objective": PPOClip(mean_advantages=True)},
    "vespo": {"objective": VESPO()},
    "dppo kl": {"objective": DPPOKL()},
    "penalty": {"kl": OwnPenalty(beta=0.1)},
    "correction": {"corrections": (OffPolicySequenceMask(threshold=0.5),)},
    "bonus": {"entropy_bonus": EntropyBonus(entropy_coef=0.1)},
    "metrics": {"metrics": "basic"},
    "unreduced": {"reduction": None},
    "one weight": {"reduction": lambda batch: torch.ones((), device=DEVICE)},
    "a number": {"reduction": lambda batch: 0.05},
    "an int": {"reduction": lambda batch: 2},
    "float64 weights": {"reduction": lambda batch: batch.mask.double()},
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_run_their_formulas(name, monkeypatch):
    if name == "another device":
        run_pytorch(monkeypatch, DEVICE)
    terms = replace(BASE, **OTHERS[name])
    logps, columns = some_tokens((5, 30))
    if terms.corrections:
        columns["sampling_per_token_logps"] = columns["old_per_token_logps"]
    dtype = torch.float64 if name == "float64" else torch.float32
    logps, entropy = logps.to(dtype), torch.rand_like(logps) if terms.needs_entropy else None
    prepared = prepare(terms, columns, logps.shape, dtype)
    assert fused.find_kernel(prepared, logps) is None
    # Some tokens have no metrics, and a weight each.
    if name != "metrics" and (prepared.weights is None or prepared.weights.shape == logps.shape):
        assert fused.find_kernel(prepared.take(torch.arange(30).view(1, 30)), logps[:1]) is None
    leaves = [logps.clone().requires_grad_() for _ in range(2)]
    found, expected = fused.evaluate(prepared, leaves[0], entropy), prepared.evaluate(leaves[1], entropy)
    assert torch.equal(found.loss, expected.loss)
    for result in (found, expected):
        result.loss.sum().backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)
    assert leaves[0].grad.any()
    assert list(found.metrics) == list(expected.metrics)
