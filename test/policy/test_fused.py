"""The kernel of token-local losses beside the losses' own formulas, whose derivatives autograd takes."""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
from liger_rl.policy import fused as policy_terms
from liger_rl.policy import fused_triton as policy_terms_triton
from liger_rl.policy.loss import PolicyTerms, PreparedLoss

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
OBJECTIVES = [
    PPOClip(),
    PPOClip(epsilon_low=0.1, epsilon_high=0.3, delta=1.5),
    PPOClip(dual_clip=1.7),
    PPOClip(epsilon_high=0.28, delta=2.0, dual_clip=3.0),
    CISPO(),
    CISPO(epsilon_high=2.0),
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
EPS = torch.finfo(torch.float32).eps
TOKENS = 2 * policy_terms_triton.BLOCK + 52  # no multiple of the block, nor of 16


def prepare(terms: PolicyTerms, columns: dict[str, Tensor], shape: torch.Size, dtype=torch.float32) -> PreparedLoss:
    return terms.prepared(terms.check(PolicyBatch(**columns), shape, DEVICE), dtype)


def by_formula(terms: PolicyTerms, columns: dict[str, Tensor], logps: Tensor, dtype: torch.dtype):
    """-> PolicyLoss and the gradient, by autograd."""
    leaf = logps.to(dtype, copy=True).requires_grad_()
    found = prepare(terms, columns, logps.shape, dtype).evaluate(leaf)
    (grad,) = torch.autograd.grad(found.loss, leaf)
    return found, grad


def some_tokens(shape: tuple[int, ...], *, importance: bool, old: bool) -> tuple[Tensor, dict[str, Tensor]]:
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


def launched(terms: PolicyTerms, columns: dict[str, Tensor], logps: Tensor):
    """-> PolicyLoss and the gradient, of the kernel."""
    prepared = prepare(terms, columns, logps.shape)
    slopes, sums = policy_terms_triton.launch(prepared, logps, slopes=True, sums=True)
    return (sums[0], policy_terms._metrics(prepared, sums, policy_terms_triton)), slopes


def assert_near(mine: Tensor, eager: Tensor, truth: Tensor, unit: float = 1.0) -> None:
    """To a few digits of float32 more than the formulas lose themselves."""
    allowed = 2 * (eager - truth).abs().max() + 8 * EPS * (truth.abs() + unit)
    assert ((mine - truth).abs() <= allowed).all(), (mine - truth).abs().max()


@pytest.mark.parametrize("objective", [CISPO(ratio_min=0.8, epsilon_high=1.2), DPPOKL(), DRO(dro_beta=0.1)], ids=str)
def test_what_the_kernel_does_not_know_runs_its_formulas(objective):
    assert not policy_terms_triton.knows(PolicyTerms(objective=objective, reduction=TokenMean()))


@pytest.mark.parametrize("kl", PENALTIES, ids=str)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_against_the_formulas(objective, kl):
    for importance, old, packed in itertools.product((False, True), repeat=3):
        logps, columns = some_tokens((TOKENS,) if packed else (4, TOKENS // 4), importance=importance, old=old)
        reduction = TokenSum() if packed else SequenceMean()
        terms = PolicyTerms(objective=objective, reduction=reduction, kl=kl)
        (loss, metrics), slopes = launched(terms, columns, logps)
        eager, eager_grad = by_formula(terms, columns, logps, torch.float32)
        truth, grad = by_formula(terms, columns, logps, torch.float64)
        assert slopes.shape == logps.shape
        assert loss.dtype == torch.float32
        assert (slopes[~columns["completion_mask"]] == 0).all()
        assert_near(slopes, eager_grad, grad, unit=grad.abs().max())
        assert_near(loss, eager.loss, truth.loss, unit=logps.numel() * grad.abs().max())
        assert list(metrics) == list(eager.metrics)
        for name, metric in metrics.items():
            other = eager.metrics[name]
            assert metric.reduction == other.reduction
            assert (metric.total.dtype, metric.total.shape) == (other.total.dtype, other.total.shape)
            assert (metric.count.dtype, metric.count) == (torch.int64, other.count)
            if name == "kl_ref":
                assert_near(metric.total, other.total, truth.metrics[name].total, unit=logps.numel())
            else:
                assert metric.total == other.total
                assert not isinstance(objective, DPPO | PPOClip) or not old or metric.total > 0


@pytest.mark.parametrize("kl", PENALTIES, ids=str)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_what_is_not_finite(objective, kl):
    """Token by token the same infinities and NaN as the formulas have, and beyond the bound of a ratio too."""
    inf, nan = math.inf, math.nan
    rows = [
        *itertools.product((nan, -inf, 50.0, -1e4, -1.0), (-1.0, -inf, nan, -45.0), (-1.5, 0.0, 2.0), (-1.5,), (1.0,)),
        *itertools.product((-1.0, -inf, nan), (-1.25,), (-1.5, 2.0), (nan, -inf, 60.0, 1e5), (1.0,)),
        *itertools.product((-1.0,), (-1.25,), (nan,), (-1.5,), (1.0,)),
        *itertools.product((-1.0, nan), (-1.25,), (-1.5, 2.0), (-1.5,), (nan, 0.0)),
    ]
    values = torch.tensor(rows, device=DEVICE).T.contiguous()
    logps, old, advantages, ref, importance = values
    columns = {"advantages": advantages, "ref_per_token_logps": ref, "importance_ratio": importance}
    terms = PolicyTerms(objective=objective, reduction=TokenSum(), kl=kl)
    for given in (columns, {**columns, "old_per_token_logps": old}):
        _, expected = by_formula(terms, given, logps, torch.float32)
        _, slopes = launched(terms, given, logps)
        torch.testing.assert_close(slopes, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
        prepared = prepare(terms, given, logps.shape)
        losses = prepared.per_token(logps).loss
        for token in range(0, len(rows), 8):
            _, sums = policy_terms_triton.launch(
                prepared, logps[token : token + 1], slice(token, token + 1), slopes=False, sums=True
            )
            torch.testing.assert_close(sums[0], losses[token], rtol=1e-5, atol=1e-6, equal_nan=True)
        assert losses.isnan().any()


@pytest.mark.parametrize(
    "objective",
    [
        PPOClip(epsilon_low=0.0, epsilon_high=0.5),
        PPOClip(epsilon_low=0.5, epsilon_high=0.0),
        PPOClip(epsilon_low=0.0, epsilon_high=0.0, delta=1.0),
        PPOClip(epsilon_low=0.0, epsilon_high=0.0, delta=0.9),
        CISPO(epsilon_high=1.0),
        DPPO(divergence_low=0.0, divergence_high=0.0, ratio_cap=1.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("distance", [0.0, 40.0])
def test_at_the_bounds(objective, distance):
    """exp(0) = 1 is exact everywhere; 40 nats are the bound of a ratio and of k3."""
    logps = torch.tensor([-1.0, -2.0, -3.0], device=DEVICE)
    advantages = torch.tensor([1.5, -0.5, 0.0], device=DEVICE)
    shift = torch.tensor(distance, device=DEVICE)
    for old, ref in ((logps - shift, logps), (logps, logps + shift)):
        columns = {"advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": ref}
        for kl in (KLPenalty(), KLPenalty(beta=1.0)):
            terms = PolicyTerms(objective=objective, reduction=TokenSum(), kl=kl)
            expected, grad = by_formula(terms, columns, logps, torch.float32)
            (loss, metrics), slopes = launched(terms, columns, logps)
            torch.testing.assert_close(slopes, grad, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(loss, expected.loss, rtol=1e-6, atol=1e-6)
            assert metrics["clip_ratio"].total == expected.metrics["clip_ratio"].total


def test_at_the_bound_of_dual_clip():
    """Where the loss is exactly what it may be at most, each takes half of the gradient."""
    log_ratio = torch.linspace(0.5, 1.5, 50, device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    halved = 0
    for log in log_ratio:
        bound = log.exp().item()
        objective = PPOClip(epsilon_high=5.0, dual_clip=bound)
        terms = PolicyTerms(objective=objective, reduction=TokenSum())
        columns = {"advantages": -one, "old_per_token_logps": torch.zeros_like(one)}
        _, slopes = launched(terms, columns, log[None])
        _, grad = by_formula(terms, columns, log[None], torch.float32)
        assert grad.item() == pytest.approx(bound / 2)
        # The two exponentials may differ in the last digit.
        assert slopes.item() == pytest.approx(bound / 2) or slopes.item() in (0.0, pytest.approx(bound))
        halved += slopes.item() == pytest.approx(bound / 2)
    assert halved > len(log_ratio) / 3


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_no_token(shape):
    logps, columns = some_tokens(shape, importance=True, old=True)
    terms = PolicyTerms(objective=PPOClip(), reduction=TokenMean(), kl=KLPenalty(beta=0.1))
    (loss, metrics), slopes = launched(terms, columns, logps)
    assert loss == 0
    assert slopes.shape == shape
    assert [metric.value.item() for metric in metrics.values()] == [0.0] * 4


@pytest.mark.parametrize("packed", [False, True])
def test_some_tokens_of_a_batch(packed):
    logps, columns = some_tokens((TOKENS,) if packed else (4, TOKENS // 4), importance=True, old=True)
    terms = PolicyTerms(objective=PPOClip(), reduction=SequenceMean() if not packed else TokenMean(), kl=PENALTIES[-1])
    prepared = prepare(terms, columns, logps.shape)
    whole, _ = policy_terms_triton.launch(prepared, logps, slopes=True, sums=False)
    for positions in (slice(3, 1500), slice(1500, TOKENS), torch.randperm(TOKENS, device=DEVICE)[5:1400]):
        part, none = policy_terms_triton.launch(
            prepared, logps.flatten()[positions], positions, slopes=True, sums=False
        )
        assert none is None
        assert torch.equal(part, whole.flatten()[positions])
        assert part.any()


def test_columns_that_are_not_contiguous():
    logps, columns = some_tokens((6, 40), importance=True, old=True)
    terms = PolicyTerms(objective=PPOClip(), reduction=SequenceMean(), kl=PENALTIES[-1])
    expected = launched(terms, columns, logps)
    turned = {name: column.T.contiguous().T for name, column in columns.items()}
    found = launched(terms, turned, logps.T.contiguous().T)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[0][0], expected[0][0])


def test_the_same_twice():
    logps, columns = some_tokens((TOKENS,), importance=True, old=True)
    terms = PolicyTerms(objective=PPOClip(), reduction=TokenMean(), kl=PENALTIES[-1])
    first, second = launched(terms, columns, logps), launched(terms, columns, logps)
    assert torch.equal(first[0][0], second[0][0])
    assert torch.equal(first[1], second[1])


def test_small_launches(monkeypatch):
    """Beside the kernel: its sums, a loss of one's own, the count of tokens, and back one product."""

    class Operators(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._schema.name.removeprefix("aten::")
            if not func.is_view and name not in ("empty", "empty_like", "new_empty"):
                self.names.append(name)
            return func(*args, **(kwargs or {}))

    class Launched:
        def __getitem__(self, grid):
            return lambda *args, **options: None

    monkeypatch.setattr(policy_terms, "DEVICES", (DEVICE.type,))
    monkeypatch.setattr(policy_terms_triton, "_policy_terms_kernel", Launched())
    logps, columns = some_tokens((TOKENS,), importance=True, old=True)
    terms = PolicyTerms(objective=PPOClip(), reduction=TokenMean(), kl=KLPenalty(beta=0.1))
    prepared = prepare(terms, columns, logps.shape)
    leaf = logps.requires_grad_()
    with Operators() as forward:
        loss, _ = policy_terms.evaluate(prepared, leaf)
    assert sorted(forward.names) == ["clone", "sum", "sum"]
    with Operators() as backward:
        loss.backward()
    assert backward.names.count("mul") == 1
    assert len(backward.names) <= 4  # the upstream gradient and the leaf's own
    with Operators() as part:
        policy_terms.slopes(prepared, slice(0, 9), logps.detach()[:9])
    assert part.names == []


class Spy:
    """Counts launches."""

    def __init__(self, monkeypatch) -> None:
        self.calls: list[dict[str, bool]] = []
        launch = policy_terms_triton.launch

        def counted(*args, **options):
            self.calls.append(options)
            return launch(*args, **options)

        monkeypatch.setattr(policy_terms_triton, "launch", counted)


def whole_step(device: torch.device, loss: FusedLinearGRPOLoss, **more):
    """-> loss, metrics and gradients of a head whose loss is divided in place, as accumulated ones are."""
    torch.manual_seed(1)
    hidden = torch.randn(6, 20, 16, device=device).requires_grad_()
    weight = torch.randn(129, 16, device=device).requires_grad_()
    ids = torch.randint(129, (6, 20), device=device)
    mask = torch.rand(6, 20, device=device) < 0.8
    ids[0, 0] = -100
    advantages = torch.randn(6, device=device)
    advantages[::3] = 0.0
    old, ref = -6 * torch.rand(2, 6, 20, device=device)
    columns = {"old_per_token_logps": old, "ref_per_token_logps": ref, **more}
    value, metrics = loss(hidden, weight, ids, advantages, mask, **columns)
    value /= 2
    value.backward()
    return value.detach(), {name: m.value for name, m in metrics.items()}, [hidden.grad, weight.grad]


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("metrics", ["none", "loss"])
@pytest.mark.parametrize(
    ("passes", "launches"),
    [({"passes": "two"}, 1), ({"passes": "one"}, 1), ({"passes": "one", "chunk_tokens": 40}, None)],
    ids=["two", "one", "one in chunks"],
)
def test_the_head_uses_it(passes, launches, metrics, beta, monkeypatch):
    loss = FusedLinearGRPOLoss("dapo", beta=beta, metrics=metrics, **passes)
    monkeypatch.setattr(policy_terms, "DEVICES", ())
    expected = whole_step(DEVICE, loss)
    monkeypatch.setattr(policy_terms, "DEVICES", (DEVICE.type,))
    spy = Spy(monkeypatch)
    found = whole_step(DEVICE, loss)
    if launches is None:
        assert len(spy.calls) > 2
        assert [options["slopes"] for options in spy.calls] == [True] * (len(spy.calls) - 1) + [False]
    else:
        assert len(spy.calls) == launches
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-7)
    assert list(found[1]) == list(expected[1])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found[2], expected[2], rtol=1e-5, atol=1e-6)


class Own(PPOClip):
    def __call__(self, logps, batch):
        return super().__call__(2 * logps, batch)


@dataclass(frozen=True, kw_only=True)
class OwnPenalty(KLPenalty):
    def __call__(self, logps, batch, ratio):
        return logps.square()


def own(logps, batch):
    return PPOClip()(logps, batch)


BASE = PolicyTerms(objective=PPOClip(), reduction=TokenMean(), kl=KLPenalty(beta=0.1))
MASK = OffPolicySequenceMask(threshold=0.5)


@pytest.mark.parametrize(
    "terms",
    [
        replace(BASE, objective=Own()),
        replace(BASE, objective=own),
        replace(BASE, objective=PPOClip(importance_sampling_level="sequence")),
        replace(BASE, objective=PPOClip(mean_advantages=True)),
        replace(BASE, objective=VESPO()),
        replace(BASE, kl=OwnPenalty(beta=0.1)),
        replace(BASE, corrections=(MASK,)),
        replace(BASE, entropy_bonus=EntropyBonus(entropy_coef=0.1)),
        replace(BASE, metrics="basic"),
        replace(BASE, reduction=None),
        replace(BASE, reduction=lambda batch: torch.ones((), device=DEVICE)),
        replace(BASE, reduction=lambda batch: batch.mask.double()),
    ],
    ids=["subclass", "callable", "gspo", "mean advantages", "vespo", "penalty", "correction", "bonus", "metrics",
         "unreduced", "one weight", "float64 weights"],
)  # fmt: skip
def test_others_run_their_formulas(terms, monkeypatch):
    logps, columns = some_tokens((5, 30), importance=False, old=True)
    if terms.corrections:
        columns["sampling_per_token_logps"] = columns["old_per_token_logps"]
    monkeypatch.setattr(policy_terms, "DEVICES", (DEVICE.type,))
    monkeypatch.setattr(policy_terms_triton, "launch", None)
    entropy = torch.rand_like(logps) if terms.needs_entropy else None
    prepared = prepare(terms, columns, logps.shape)
    assert policy_terms.evaluate_with_slopes(prepared, logps) is None
    leaves = [logps.clone().requires_grad_() for _ in range(2)]
    found = policy_terms.evaluate(prepared, leaves[0], entropy)
    expected = prepared.evaluate(leaves[1], entropy)
    assert torch.equal(found.loss, expected.loss)
    for result in (found, expected):
        result.loss.sum().backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)
    assert leaves[0].grad.any()
    assert list(found.metrics) == list(expected.metrics)


@pytest.mark.parametrize("what", ["device", "dtype"])
def test_formulas_elsewhere(what, monkeypatch):
    dtype = torch.float64 if what == "dtype" else torch.float32
    logps, columns = some_tokens((5, 30), importance=False, old=True)
    monkeypatch.setattr(policy_terms, "DEVICES", () if what == "device" else (DEVICE.type,))
    prepared = prepare(BASE, columns, logps.shape, dtype)
    leaf = logps.to(dtype).requires_grad_()
    assert policy_terms.slopes(prepared, slice(0, 3), leaf.detach().flatten()[:3]) is None
    assert torch.equal(policy_terms.evaluate(prepared, leaf).loss, prepared.evaluate(leaf).loss)


def test_metrics_of_sequences_leave_the_chunks_theirs(monkeypatch):
    """What is logged of sequences needs the formulas once; the gradients of the chunks do not."""
    loss = FusedLinearGRPOLoss("dapo", beta=0.1, metrics="basic", passes="one", chunk_tokens=40)
    monkeypatch.setattr(policy_terms, "DEVICES", ())
    expected = whole_step(DEVICE, loss)
    monkeypatch.setattr(policy_terms, "DEVICES", (DEVICE.type,))
    spy = Spy(monkeypatch)
    found = whole_step(DEVICE, loss)
    assert len(spy.calls) > 1
    assert all(options["slopes"] and not options["sums"] for options in spy.calls)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_samplers_ratio(level, monkeypatch):
    """Made of the columns before any log-probability is known, so it is a column like another; or one per sequence."""
    logps, columns = some_tokens((5, 30), importance=False, old=True)
    columns["sampling_per_token_logps"] = columns["old_per_token_logps"] - 0.1
    correction = SamplerCorrection(level=level, mode="truncate")
    terms = replace(BASE, sampler_correction=correction)
    (loss, _), slopes = launched(terms, columns, logps)
    expected, grad = by_formula(terms, columns, logps, torch.float32)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slopes, grad, rtol=1e-5, atol=1e-7)
    positions = torch.randperm(150, device=DEVICE)[:70]
    some, _ = policy_terms_triton.launch(
        prepare(terms, columns, logps.shape), logps.flatten()[positions], positions, slopes=True, sums=False
    )
    torch.testing.assert_close(some, grad.flatten()[positions], rtol=1e-5, atol=1e-7)
    monkeypatch.setattr(policy_terms, "DEVICES", (DEVICE.type,))
    spy = Spy(monkeypatch)
    policy_terms.evaluate(prepare(terms, columns, logps.shape), logps)
    assert spy.calls == [{"slopes": False, "sums": True}]


def test_a_second_derivative_is_refused(monkeypatch):
    """And not taken for that of a constant; a graph that nobody asks for it is no mistake."""
    monkeypatch.setattr(policy_terms, "DEVICES", (DEVICE.type,))
    loss_fn = FusedLinearGRPOLoss("dapo", passes="two")
    hidden, weight = torch.randn(3, 7, 8, device=DEVICE), torch.randn(33, 8, device=DEVICE)
    ids, advantages = torch.randint(33, (3, 7)).to(DEVICE), torch.randn(3).to(DEVICE)
    hidden.requires_grad_()
    loss = loss_fn(hidden, weight, ids, advantages).loss
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    (expected,) = torch.autograd.grad(loss_fn(hidden, weight, ids, advantages).loss, hidden)
    assert torch.equal(grad.detach(), expected)
    with pytest.raises(RuntimeError, match="differentiate"):
        (loss_fn(hidden, weight, ids, advantages).loss + grad.square().sum()).backward()


@pytest.mark.parametrize("number", [0.05, 2])
def test_a_reduction_to_one_number(number, monkeypatch):
    """As formulas take it, which broadcast."""
    logps, columns = some_tokens((5, 30), importance=False, old=True)
    terms = replace(BASE, reduction=lambda batch: number)
    expected = prepare(terms, columns, logps.shape).evaluate(logps).loss
    monkeypatch.setattr(policy_terms, "DEVICES", (DEVICE.type,))
    assert torch.equal(policy_terms.evaluate(prepare(terms, columns, logps.shape), logps).loss, expected)
