"""The kernel of token-local losses beside the losses' own formulas, whose derivatives autograd takes."""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from liger_rl import (
    CISPO,
    DPPO,
    DPPOKL,
    DRO,
    SAPO,
    VESPO,
    EntropyBonus,
    FusedLinearGRPOLoss,
    KLPenalty,
    OffPolicySequenceMask,
    PolicyBatch,
    PPOClip,
    Reinforce,
    SamplerCorrection,
    SequenceMean,
    TokenMean,
    TokenSum,
)
from liger_rl.losses import fused, fused_triton
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
EPS = torch.finfo(torch.float32).eps
TOKENS = fused_triton.BLOCK + 52  # no multiple of the block, nor of 16


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """The kernel also where Triton's interpreter runs it."""
    monkeypatch.setattr(fused, "DEVICES", (DEVICE.type,))


def prepare(terms: PolicyTerms, columns: dict[str, Tensor], shape: torch.Size, dtype=torch.float32) -> PreparedLoss:
    return terms.prepared(terms.check(PolicyBatch(**columns), shape, DEVICE), dtype)


def by_formula(terms: PolicyTerms, columns: dict[str, Tensor], logps: Tensor, dtype=torch.float32):
    """-> PolicyLoss and the gradient, by autograd."""
    leaf = logps.to(dtype, copy=True).requires_grad_()
    found = prepare(terms, columns, logps.shape, dtype).evaluate(leaf)
    return found, torch.autograd.grad(found.loss, leaf)[0]


def by_kernel(terms: PolicyTerms, columns: dict[str, Tensor], logps: Tensor):
    """-> PolicyLoss and the gradient."""
    prepared = prepare(terms, columns, logps.shape)
    assert fused.kernel_for(prepared, logps) is fused_triton
    return fused.with_gradients(prepared, logps, None)[:2]


def some_tokens(shape: tuple[int, ...], *, importance: bool = True, old: bool = True):
    """Log-probabilities, some of them the reference's or the old ones, and columns; noise where they are masked."""
    n = math.prod(shape)
    logps = -3 * torch.rand(n)
    near = logps + 0.4 * torch.randn(n)
    near[::7] = logps[::7]
    ref = logps + torch.randn(n)
    ref[::5] = logps[::5]
    advantages = torch.randn(n)
    advantages[::11] = 0.0
    mask = torch.rand(n) < 0.8
    columns = {"advantages": advantages, "completion_mask": mask, "ref_per_token_logps": ref}
    columns |= {"old_per_token_logps": near} if old else {}
    columns |= {"importance_ratio": torch.rand(n) + 0.5} if importance else {}
    for column in (logps, *columns.values()):
        column[~mask] = False if column.dtype == torch.bool else math.nan
    return logps.view(shape).to(DEVICE), {name: column.view(shape).to(DEVICE) for name, column in columns.items()}


def assert_near(mine: Tensor, eager: Tensor, truth: Tensor, unit: float = 1.0) -> None:
    """To a few digits of float32 more than the formulas lose themselves."""
    allowed = 2 * (eager - truth).abs().max() + 8 * EPS * (truth.abs() + unit)
    assert ((mine - truth).abs() <= allowed).all(), (mine - truth).abs().max()


@pytest.mark.parametrize(("objective", "kl"), PAIRS, ids=str)
def test_against_the_formulas(objective, kl):
    """The derivative is the objective's, as autograd takes it in float64."""
    for importance, old in itertools.product((False, True), repeat=2):
        packed = importance != old
        logps, columns = some_tokens((TOKENS,) if packed else (4, TOKENS // 4), importance=importance, old=old)
        terms = PolicyTerms(objective=objective, reduction=TokenSum() if packed else SequenceMean(), kl=kl)
        found, slopes = by_kernel(terms, columns, logps)
        eager, eager_grad = by_formula(terms, columns, logps)
        truth, grad = by_formula(terms, columns, logps, torch.float64)
        assert slopes.shape == logps.shape
        assert found.loss.dtype == torch.float32
        assert (slopes[~columns["completion_mask"]] == 0).all()
        assert_near(slopes, eager_grad, grad, unit=grad.abs().max())
        assert_near(found.loss, eager.loss, truth.loss, unit=logps.numel() * grad.abs().max())
        assert list(found.metrics) == list(eager.metrics)
        for name, metric in found.metrics.items():
            other = eager.metrics[name]
            assert metric.reduction == other.reduction
            assert (metric.total.dtype, metric.total.shape) == (other.total.dtype, other.total.shape)
            assert (metric.count.dtype, metric.count) == (torch.int64, other.count)
            if name == "kl_ref":
                assert_near(metric.total, other.total, truth.metrics[name].total, unit=logps.numel())
            else:
                assert metric.total == other.total
                assert not isinstance(objective, DPPO | PPOClip) or not old or metric.total > 0


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


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_no_token(shape):
    logps, columns = some_tokens(shape)
    found, slopes = by_kernel(BASE, columns, logps)
    assert found.loss == 0
    assert slopes.shape == shape
    assert [metric.value.item() for metric in found.metrics.values()] == [0.0] * 4


@pytest.mark.parametrize("packed", [False, True])
def test_some_tokens_of_a_batch(packed):
    tokens = TOKENS + fused_triton.BLOCK
    logps, columns = some_tokens((tokens,) if packed else (4, tokens // 4))
    terms = replace(BASE, reduction=TokenMean() if packed else SequenceMean(), kl=PENALTIES[-1])
    prepared, (_, whole) = prepare(terms, columns, logps.shape), by_kernel(terms, columns, logps)
    for positions in (slice(3, 1500), slice(1500, tokens), torch.randperm(tokens, device=DEVICE)[5:1400]):
        _, part, _ = fused.with_gradients(prepared.take(positions), logps.flatten()[positions], None)
        assert torch.equal(part, whole.flatten()[positions])
        assert part.any()


def test_layouts_and_runs_agree_to_the_last_bit():
    logps, columns = some_tokens((6, 40))
    terms = replace(BASE, reduction=SequenceMean(), kl=PENALTIES[-1])
    turned = {name: column.T.contiguous().T for name, column in columns.items()}
    expected = by_kernel(terms, columns, logps)
    for found in (by_kernel(terms, columns, logps), by_kernel(terms, turned, logps.T.contiguous().T)):
        assert torch.equal(found[0].loss, expected[0].loss)
        assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_samplers_ratio(level):
    """Made of the columns before any log-probability is known, so it is a column like another; or one per sequence."""
    logps, columns = some_tokens((5, 30), importance=False)
    columns["sampling_per_token_logps"] = columns["old_per_token_logps"] - 0.1
    terms = replace(BASE, sampler_correction=SamplerCorrection(level=level, mode="truncate"))
    found, slopes = by_kernel(terms, columns, logps)
    expected, grad = by_formula(terms, columns, logps)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slopes, grad, rtol=1e-5, atol=1e-7)
    positions = torch.randperm(150, device=DEVICE)[:70]
    prepared = prepare(terms, columns, logps.shape)
    _, some, _ = fused.with_gradients(prepared.take(positions), logps.flatten()[positions], None)
    assert torch.equal(some, slopes.flatten()[positions])


# --- where it runs ----------------------------------------------------------------------------------------------------


def whole_step(loss: FusedLinearGRPOLoss):
    """-> loss, metrics and gradients of a head whose loss is divided in place, as accumulated ones are."""
    torch.manual_seed(1)
    hidden = torch.randn(6, 20, 16, device=DEVICE).requires_grad_()
    weight = torch.randn(129, 16, device=DEVICE).requires_grad_()
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
@pytest.mark.parametrize(
    ("options", "launches"),
    [
        ({"passes": "two"}, {"slopes and sums"}),
        ({"passes": "two", "metrics": "none"}, {"slopes and sums"}),
        ({"passes": "one"}, {"slopes and sums"}),
        ({"passes": "one", "chunk_tokens": 40}, {"slopes and sums", "sums"}),
        ({"passes": "one", "chunk_tokens": 40, "metrics": "none"}, {"slopes and sums", "sums"}),
        # What is logged of sequences needs the formulas once; the gradients of the chunks do not.
        ({"passes": "one", "chunk_tokens": 40, "metrics": "basic"}, {"slopes and sums"}),
    ],
    ids=["two", "two, no metrics", "one", "chunks", "chunks, no metrics", "chunks, of sequences"],
)
def test_the_head_uses_it(options, launches, beta, monkeypatch):
    loss, launch, seen = FusedLinearGRPOLoss("dapo", beta=beta, **options), fused_triton.launch, []

    def counted(*args, outputs, **options):
        seen.append(" and ".join(sorted(outputs)))
        return launch(*args, outputs=outputs, **options)

    monkeypatch.setattr(fused_triton, "launch", counted)
    found = whole_step(loss)
    assert set(seen) == launches
    assert (len(seen) > 1) == ("chunk_tokens" in options)
    number = len(seen)
    monkeypatch.setattr(fused, "DEVICES", ())
    torch.testing.assert_close(found, whole_step(loss), rtol=1e-5, atol=1e-6)
    assert len(seen) == number


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
    "dro": {"objective": DRO(dro_beta=0.1)},
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
        monkeypatch.setattr(fused, "DEVICES", ())
    terms = replace(BASE, **OTHERS[name])
    logps, columns = some_tokens((5, 30), importance=False)
    if terms.corrections:
        columns["sampling_per_token_logps"] = columns["old_per_token_logps"]
    dtype = torch.float64 if name == "float64" else torch.float32
    logps, entropy = logps.to(dtype), torch.rand_like(logps) if terms.needs_entropy else None
    prepared = prepare(terms, columns, logps.shape, dtype)
    assert fused.kernel_for(prepared, logps) is None
    # Some tokens have no metrics, and a weight each.
    if name != "metrics" and (prepared.weights is None or prepared.weights.shape == logps.shape):
        assert fused.kernel_for(prepared.take(slice(0, 3)), logps.flatten()[:3]) is None
    leaves = [logps.clone().requires_grad_() for _ in range(2)]
    found, expected = fused.evaluate(prepared, leaves[0], entropy), prepared.evaluate(leaves[1], entropy)
    assert torch.equal(found.loss, expected.loss)
    for result in (found, expected):
        result.loss.sum().backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)
    assert leaves[0].grad.any()
    assert list(found.metrics) == list(expected.metrics)


def test_a_second_derivative_is_refused():
    """And not taken for that of a constant; a graph that nobody asks for it is no mistake."""
    loss_fn = FusedLinearGRPOLoss("dapo", passes="two")
    hidden, weight = torch.randn(3, 7, 8, device=DEVICE).requires_grad_(), torch.randn(33, 8, device=DEVICE)
    ids, advantages = torch.randint(33, (3, 7)).to(DEVICE), torch.randn(3).to(DEVICE)

    def loss():
        return loss_fn(hidden, weight, ids, advantages).loss

    (grad,) = torch.autograd.grad(loss(), hidden, create_graph=True)
    assert torch.equal(grad.detach(), torch.autograd.grad(loss(), hidden)[0])
    with pytest.raises(RuntimeError, match="differentiate"):
        (loss() + grad.square().sum()).backward()
