"""What all objectives have in common, and formulas that the fuzzer does not draw."""

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from liger_rl import ppo_loss_fn
from liger_rl.losses import (
    CISPO,
    DPPO,
    DPPOKL,
    GMPO,
    IPO,
    PRESETS,
    SAPO,
    VESPO,
    EntropyBonus,
    FixedLengthMean,
    GlobalTokenMean,
    IcePop,
    KLPenalty,
    OffPolicySequenceMask,
    PolicyBatch,
    PPOClip,
    Reinforce,
    SamplerCorrection,
    TokenLoss,
    TokenMean,
    TokenSum,
    TopEntropyMask,
)
from liger_rl.losses.loss import PolicyTerms
from liger_rl.losses.objectives import PolicyObjective
from liger_rl.losses.presets import build_loss


class Columns(NamedTuple):
    logps: Tensor  # (B, T)
    old: Tensor
    advantages: Tensor
    mask: Tensor


def columns(rows=9, length=7, *, seed=0, noise=0.4, masked=True, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(rows, length, generator=g, dtype=torch.float64)

    logps = -normal().abs() - 0.05
    mask = torch.rand(rows, length, generator=g) < (0.75 if masked else 1.1)
    mask[0] = not masked
    found = Columns(logps, logps + noise * normal(), normal(), mask)
    return Columns(*(x.to(dtype) for x in found[:3]), found.mask)


def per_sequence(c):
    return c._replace(advantages=c.advantages[:, :1].expand_as(c.logps).contiguous())


def batch_of(c, **more):
    given = {"advantages": c.advantages, "mask": c.mask, "old_per_token_logps": c.old}
    return PolicyBatch(**given | more)


def solve(objective, c, reduction=None, *, given=None, **options):
    """-> per-token losses (or the loss), gradient of their sum."""
    leaf = c.logps.clone().requires_grad_()
    loss = ppo_loss_fn(leaf, batch_of(c, **(given or {})), objective, reduction, **options).loss
    return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]


def assert_same(found, expected, tolerance=1e-11):
    for mine, truth in zip(found, expected, strict=True):
        assert truth.any()
        torch.testing.assert_close(mine, truth, rtol=tolerance, atol=tolerance)


# --- per token --------------------------------------------------------------------------------------------------------


def test_ipo_and_icepop():
    c = columns()
    p, q, r = c.logps.exp(), c.old.exp(), (c.logps - c.old).exp()
    defaults = (IPO(), (p - q).abs() <= 0.3), (IcePop(), (r >= 0.2) & (r <= 5))
    others = (
        (IPO(ipo_threshold=0.05), (p - q).abs() <= 0.05),
        (IcePop(ratio_min=0.8, ratio_max=1.5), (r >= 0.8) & (r <= 1.5)),
    )
    for objective, kept in (*defaults, *others):
        expected = torch.where(kept & c.mask, -r * c.advantages, 0.0)
        assert_same(solve(objective, c), [expected, expected])  # dr / dlogp is r
    for name, made in (("ipo", IPO()), ("icepop", IcePop())):
        terms = build_loss(name, {})
        assert (terms.objective, terms.reduction, terms.kl.beta) == (made, GlobalTokenMean(), 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_binary_divergence_near_a_probability_of_one(dtype):
    """1 - p is 2e-6 there: as a difference of two float32 numbers it has one digit, and the loss falls on either side
    of the bound by chance."""
    old, logps = (torch.tensor([[math.log1p(-x)]], dtype=dtype) for x in (4e-6, 2e-6))
    p, q = (math.exp(x.double().item()) for x in (logps, old))
    divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    for factor, dropped in ((0.98, True), (1.02, False)):
        batch = PolicyBatch(advantages=torch.ones(1, dtype=dtype), old_per_token_logps=old)
        found = ppo_loss_fn(logps, batch, DPPOKL(divergence_high=factor * divergence), None).loss
        assert (found.item() == 0) == dropped


# --- penalties and corrections ----------------------------------------------------------------------------------------


def test_k3_keeps_its_digits_where_the_policies_agree():
    logps = torch.full((1, 1), -1.0, requires_grad=True)
    difference = 3 * 2**-12
    ref = torch.full((1, 1), -1.0 + difference)
    batch = PolicyBatch(advantages=torch.zeros(1), ref_per_token_logps=ref)
    found = ppo_loss_fn(logps, batch, PPOClip(), TokenSum(), kl=KLPenalty(beta=1.0)).loss.item()
    assert found == pytest.approx(difference**2 / 2, rel=1e-3)  # the formula as it stands is off by a tenth


@pytest.mark.parametrize("share", [0.05, 0.3, 0.77, 1.0])
def test_top_entropy_mask_over_ranks(share):
    """The threshold is that of all ranks, whose tokens may be padded with NaN."""
    c = columns()
    entropy, elsewhere = torch.rand(9, 7, dtype=torch.float64), 0.2 + 0.6 * torch.rand(40, dtype=torch.float64)

    def gather(local):
        assert local.dim() == 1
        return torch.cat([elsewhere, local, torch.full((3,), math.nan, dtype=torch.float64)])

    correction = TopEntropyMask(top_entropy_quantile=share, gather=gather)
    found = solve(Reinforce(), c, entropy=torch.where(c.mask, entropy, math.nan), corrections=[correction])
    kept = c.mask & (entropy >= torch.cat([entropy[c.mask], elsewhere]).quantile(1 - share))
    assert (kept == c.mask).all() == (share == 1.0)
    assert_same(found, [torch.where(kept, x, 0.0) for x in solve(Reinforce(), c)])


# --- what every objective says of itself ------------------------------------------------------------------------------

OBJECTIVES = [
    PPOClip(),
    PPOClip(dual_clip=2.5, delta=1.7),
    PPOClip(importance_sampling_level="sequence", epsilon_low=0.9, epsilon_high=2.0),
    PPOClip(importance_sampling_level="sequence_token", epsilon_low=0.9, epsilon_high=2.0),
    CISPO(epsilon_high=1.2),
    SAPO(),
    VESPO(),
    GMPO(),
    Reinforce(),
    DPPO(),
    CISPO(ratio_min=0.8, epsilon_high=1.2),
    GMPO(mean_importance_ratio=True),
    DPPOKL(),
    IPO(),
    IcePop(),
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_what_a_gradient_depends_on(objective):
    """On its token, or its sequence, alone: the same to the last bit whatever the others are, if and only if it says
    so. And one token's loss has gradient in another's log-probability only through a ratio per sequence."""
    c = per_sequence(columns(4, 5, masked=False, noise=0.1))
    grad = solve(objective, c)[1]
    place = torch.arange(20).view(4, 5)
    g = torch.Generator().manual_seed(1)
    seen = {"row": False, "elsewhere": False}
    for moved in range(20):
        logps = torch.where(place == moved, c.logps - 0.5 * torch.rand((), generator=g) - 0.2, c.logps)
        same = solve(objective, c._replace(logps=logps))[1] == grad
        row = (place // 5 == moved // 5) & (place != moved)
        seen["row"] |= not same[row].all()
        seen["elsewhere"] |= not same[place // 5 != moved // 5].all()
    assert not seen["elsewhere"]
    assert objective.scope == ("sequence" if seen["row"] else "token")
    jacobian = torch.autograd.functional.jacobian(
        lambda logps: ppo_loss_fn(logps, batch_of(c), objective, None).loss.flatten(), c.logps
    ).view(20, 20)
    assert jacobian.diagonal().any()
    in_row = torch.block_diag(*[torch.ones(5, 5)] * 4).bool()
    assert not jacobian[~in_row].any()
    through_the_sequence = isinstance(objective, GMPO) or (
        isinstance(objective, PPOClip) and objective.importance_sampling_level == "sequence"
    )
    assert jacobian[in_row & ~torch.eye(20, dtype=torch.bool)].any() == through_the_sequence


def test_a_formula_that_does_not_say_what_it_depends_on_keeps_the_batch():
    class OfTheBatch(PolicyObjective):
        def __call__(self, logps, batch):
            return TokenLoss(logps - logps.mean())

    assert PolicyTerms(objective=OfTheBatch(), reduction=TokenMean()).scope == "batch"


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_another_default_dtype_changes_nothing(objective):
    c = per_sequence(columns(8, 5, noise=1.0))
    expected = solve(objective, c)
    torch.set_default_dtype(torch.bfloat16)  # a fixture sets it back
    assert all(torch.equal(found, x) for found, x in zip(solve(objective, c), expected, strict=True))


# --- bad options and combinations -------------------------------------------------------------------------------------

BAD_OPTIONS = [
    # part, option, values out of range, values of a wrong type
    (PPOClip, "epsilon_low", (-0.1,), (torch.tensor(0.2),)),
    (PPOClip, "epsilon_high", (-0.1, math.nan), ()),
    (PPOClip, "delta", (0.0, -1.0, math.nan), ()),
    (PPOClip, "dual_clip", (1.0, 0.5, math.nan), ("3",)),
    (PPOClip, "importance_sampling_level", ("batch", ["token"]), ()),
    (PPOClip, "mean_advantages", (), (1,)),
    (CISPO, "epsilon_high", (0.0, -1.0, math.inf, math.nan, 10**400), ()),
    (CISPO, "ratio_min", (-0.1, 0.3, math.nan), ()),
    *((SAPO, name, (0.0, math.nan), ()) for name in ("sapo_temperature_pos", "sapo_temperature_neg")),
    *((VESPO, f"vespo_{name}", (-0.1, math.nan), ()) for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")),
    *((GMPO, name, (-0.1, math.inf), ()) for name in ("epsilon_low", "epsilon_high")),
    (GMPO, "mean_importance_ratio", (), ("yes",)),
    *((DPPO, f"divergence_{x}", (-0.1, math.nan, 2, 1.001, math.inf), ()) for x in ("low", "high")),
    *((DPPOKL, f"divergence_{x}", (-0.1, math.inf, math.nan), ()) for x in ("low", "high")),
    *((part, "ratio_cap", (0.0,), ()) for part in (DPPO, DPPOKL)),
    (IPO, "ipo_threshold", (-0.1, 1.1, math.nan), ("0.3",)),
    (IcePop, "ratio_min", (-0.1, 5.1, math.nan), ()),
    (IcePop, "ratio_max", (0.0, 0.1, math.inf, math.nan), ()),
    (KLPenalty, "beta", (-0.1, math.inf, math.nan), (True,)),
    (KLPenalty, "kl_estimator", ("k4", ["k3"]), ()),
    (KLPenalty, "importance_weighted", (), (1,)),
    (EntropyBonus, "entropy_coef", (math.nan,), ()),
    (SamplerCorrection, "level", ("batch", ["token"]), ()),
    (SamplerCorrection, "mode", ("clip",), ()),
    (SamplerCorrection, "ratio_min", (3.0, -0.1, math.nan), ("0",)),
    (SamplerCorrection, "ratio_max", (0.0, math.nan), (True,)),
    (OffPolicySequenceMask, "threshold", (math.nan,), ("0.1", None)),
    (TopEntropyMask, "top_entropy_quantile", (0.0, 1.1, math.nan), ("0.5",)),
    (GlobalTokenMean, "world_size", (0, True, 2.0), ()),
    (FixedLengthMean, "max_completion_length", (0,), ()),
]


@pytest.mark.parametrize(("part", "name", "values", "types"), BAD_OPTIONS)
def test_bad_options_are_named(part, name, values, types):
    for value, error in [*((value, ValueError) for value in values), *((value, TypeError) for value in types)]:
        with pytest.raises(error, match=rf"\b{name.replace('ratio_max', 'ratio_m(ax|in)')}\b"):
            part(**{name: value})


def test_a_gather_that_cannot_be_called_is_named():
    with pytest.raises(TypeError, match="gather"):
        TopEntropyMask(top_entropy_quantile=0.5, gather=3)


SAMPLING = {"sampling_per_token_logps": torch.zeros(2, 3)}


@pytest.mark.parametrize(
    ("reason", "given", "options"),
    [
        ("importance_ratio must be per token", {"importance_ratio": torch.ones(2)}, {"objective": VESPO()}),
        ("importance_ratio must be per token", {"importance_ratio": torch.ones(2, 1)}, {"objective": VESPO()}),
        ("importance_ratio must be per token", SAMPLING,
         {"objective": VESPO(), "sampler_correction": SamplerCorrection(level="sequence")}),
        ("entropy_coef must be 0 without a reduction", {},
         {"reduction": None, "entropy_bonus": EntropyBonus(entropy_coef=0.1)}),
        ("importance_ratio must be None", {**SAMPLING, "importance_ratio": torch.ones(2, 3)},
         {"sampler_correction": SamplerCorrection()}),
        ("sampling_per_token_logps must be given", {}, {"sampler_correction": SamplerCorrection()}),
        ("ref_per_token_logps must be given", {}, {"kl": KLPenalty(beta=0.1)}),
        ("entropy must be given", {}, {"entropy_bonus": EntropyBonus(entropy_coef=0.1)}),
        ("entropy must be given", {}, {"corrections": [TopEntropyMask(top_entropy_quantile=0.5)]}),
        ("importance_weighted", {"ref_per_token_logps": torch.zeros(2, 3)},
         {"objective": lambda logps, batch: Reinforce()(logps, batch)._replace(ratio=None),
          "kl": KLPenalty(beta=0.1, importance_weighted=True)}),
    ],
)  # fmt: skip
def test_combinations_without_a_meaning(reason, given, options):
    batch = PolicyBatch(**{"advantages": torch.ones(2), "old_per_token_logps": torch.zeros(2, 3)} | given)
    arguments = {"objective": PPOClip(), "reduction": TokenMean()} | options
    with pytest.raises(ValueError, match=reason):
        ppo_loss_fn(torch.zeros(2, 3, requires_grad=True), batch, **arguments)


@pytest.mark.parametrize("loss_type", [name for name, preset in PRESETS.items() if preset.objective is not PPOClip])
def test_a_ratio_per_sequence_where_there_is_none(loss_type):
    with pytest.raises(ValueError, match=r"importance_sampling_level.*ratio per sequence has a meaning"):
        build_loss(loss_type, {"importance_sampling_level": "sequence"})


# --- properties of all presets ----------------------------------------------------------------------------------------

OPTIONS = {
    "dr_grpo": {"max_completion_length": 9},
    "cispo": {"epsilon_high": 1.1},
    "gspo": {"epsilon_low": 0.05, "epsilon_high": 0.06},
    "gspo_token": {"epsilon_low": 0.05, "epsilon_high": 0.06},
    "gmpo": {"epsilon_low": 0.2, "epsilon_high": 0.3},
    "dppo": {"divergence_low": 0.05, "divergence_high": 0.08},
    "dppo_kl": {"divergence_low": 0.01, "divergence_high": 0.02},
    "ipo": {"ipo_threshold": 0.06},
    "icepop": {"ratio_min": 0.8, "ratio_max": 1.3},
}


def preset_of(name, **options):
    return build_loss(name, OPTIONS.get(name, {}) | options)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("seed", range(3))
def test_without_an_advantage_gradients_are_exactly_zero(name, seed):
    """0.0 without a penalty, so that such rows can be skipped. A loss that is 0 too says so, and then such tokens are
    not projected at all."""
    objective = preset_of(name).objective
    c = columns(2 + seed, 6 - seed % 5, seed=seed, noise=(0.1, 0.5, 1.5)[seed % 3], masked=seed % 2 == 0)
    idle = torch.rand(c.logps.shape, generator=torch.Generator().manual_seed(seed)) < 0.4
    if name in ("gspo", "gmpo"):  # what they say of one token is part of its whole sequence
        idle = idle[:, :1].expand_as(idle)
    loss, grad = solve(objective, c._replace(advantages=torch.where(idle, 0.0, c.advantages)))
    assert objective.zero_without_advantage
    assert (grad[idle] == 0.0).all()
    if objective.scope == "token":
        assert (loss[idle] == 0.0).all()


@pytest.mark.parametrize("name", PRESETS)
def test_sequences_without_advantages_that_need_not_run(name):
    """Nothing depends on their log-probabilities: no gradient, no loss, no clip indicator."""
    parts = preset_of(name)
    terms = PolicyTerms(objective=parts.objective, reduction=parts.reduction)
    assert terms.idle_scope == parts.objective.scope
    c = columns(6, 5, noise=0.8, masked=False)
    c.advantages[1::2] = 0.0

    def solved(logps):
        leaf = logps.clone().requires_grad_()
        found = ppo_loss_fn(leaf, batch_of(c), parts.objective, parts.reduction)
        values = {metric: value.value for metric, value in found.metrics.items()}
        return found.loss.detach(), torch.autograd.grad(found.loss, leaf)[0], values

    found = solved(c.logps)
    assert not found[1][1::2].any()
    assert found[1][::2].any()
    torch.testing.assert_close(solved(torch.where(c.advantages == 0, -3.0, c.logps)), found, rtol=0.0, atol=0.0)
    assert not PolicyTerms(objective=parts.objective, reduction=None, kl=KLPenalty(beta=0.1)).idle_scope
    bonus = EntropyBonus(entropy_coef=0.1)
    assert not replace(terms, entropy_bonus=bonus).idle_scope
    assert not replace(terms, corrections=[TopEntropyMask(top_entropy_quantile=0.5)]).idle_scope
    assert replace(terms, corrections=[OffPolicySequenceMask(threshold=0.1)]).idle_scope == "sequence"


CLIPPED = [name for name in PRESETS if PRESETS[name].objective in (PPOClip, DPPO, DPPOKL)]


@pytest.mark.parametrize("name", CLIPPED)
def test_clipped_tokens_are_exactly_zero(name):
    c = columns(20, 6, noise=0.8)
    leaf = c.logps.clone().requires_grad_()
    aligned = batch_of(c).align(leaf.shape, leaf.device).clean(leaf.dtype)
    found = preset_of(name).objective(torch.where(c.mask, leaf, 0.0), aligned)
    cut = ((found.clip_low | found.clip_high) & c.mask).expand_as(c.mask)
    assert 5 < cut.sum() < c.mask.sum()
    if name == "gspo":  # token by token, because a cut token's log-probability is in its sequence's other losses
        for b, t in cut.nonzero().tolist():
            assert not torch.autograd.grad(found.loss[b, t], leaf, retain_graph=True)[0].any()
    else:
        assert (torch.autograd.grad(found.loss.sum(), leaf)[0][cut] == 0.0).all()


FAR = [0.0, 200.0, -200.0, 90.0, -90.0, 30.0]


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("importance_weighted", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_policies_far_apart_stay_finite(name, importance_weighted, beta):
    """Log-ratios of 200 either way, to the old policy and to the reference, beside another or a calm token, float32."""
    grid = torch.meshgrid(*map(torch.tensor, (FAR, FAR, [-1.0, 0.0, 1.0], [0.0, 1.0])), indexing="ij")
    old, ref, advantage, calm = (x.flatten() for x in grid)
    drift = torch.stack([torch.stack([x, torch.where(calm == 1, 0.0, x)], -1) for x in (old, ref)])
    leaf = torch.full(drift.shape[1:], -201.0, requires_grad=True)
    parts = preset_of(name, beta=beta, importance_weighted=importance_weighted)
    batch = PolicyBatch(
        advantages=advantage,
        old_per_token_logps=leaf.detach() - drift[0],
        ref_per_token_logps=leaf.detach() - drift[1],
    )
    found = ppo_loss_fn(leaf, batch, parts.objective, None, kl=parts.kl)
    assert found.loss.isfinite().all()
    grad = torch.autograd.grad(found.loss.sum(), leaf)[0]
    assert grad.isfinite().all()
    assert grad.any()
    assert all(metric.value.isfinite() for metric in found.metrics.values())
