"""ppo_loss_fn against plain loops in float64, and its invariants."""

import math

import pytest
import torch

import oracles
from liger_rl import (
    EntropyBonus,
    FixedLengthMean,
    GlobalTokenMean,
    KLPenalty,
    OffPolicySequenceMask,
    PolicyBatch,
    PPOClip,
    SamplerCorrection,
    SequenceMean,
    TokenLoss,
    TokenMean,
    TopEntropyMask,
    ppo_loss_fn,
)
from liger_rl.policy.presets import PRESETS, build_preset

LENGTHS = [6, 1, 4, 0, 5]  # one full sequence, one fully masked
COLUMNS = ("old_per_token_logps", "ref_per_token_logps", "importance_ratio")


def columns(batch=5, length=6, *, noise=0.3, seed=0):
    """-> logps with gradient, and a PolicyBatch's columns, float64; ratios cross the usual bounds."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    logps = -normal(batch, length).abs() - 0.1
    mask = torch.arange(length) < torch.tensor((LENGTHS * batch)[:batch])[:, None]
    return logps.requires_grad_(), {
        "advantages": normal(batch),
        "completion_mask": mask,
        "old_per_token_logps": logps.detach() + noise * normal(batch, length),
        "ref_per_token_logps": logps.detach() + noise * normal(batch, length),
        "importance_ratio": torch.exp(0.2 * normal(batch, length)),
    }


def oracle(logps, parts, reduction, *, num_items_in_batch=None, world_size=1, max_completion_length=None, **options):
    losses = oracles.token_losses(
        logps,
        parts["advantages"],
        parts["completion_mask"],
        old=parts.get("old_per_token_logps"),
        ref=parts.get("ref_per_token_logps"),
        importance_ratio=parts.get("importance_ratio"),
        **options,
    )
    counts = {"num_items_in_batch": num_items_in_batch, "world_size": world_size}
    return oracles.reduce(losses, reduction, **counts, max_completion_length=max_completion_length)


def gradient(loss, logps):
    return torch.autograd.grad(loss, logps, retain_graph=True)[0]


def assert_equals_oracle(found, expected, logps, tolerance=1e-10):
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    mine, truth = gradient(found, logps), gradient(expected, logps)
    assert truth.any()
    torch.testing.assert_close(mine, truth, rtol=tolerance, atol=tolerance)


PRESET_CASES = [
    # preset, its options, num_items_in_batch, what the loop is told
    ("grpo", {}, None, {}),
    ("grpo", {"beta": 0.1}, None, {"beta": 0.1}),
    ("bnpo", {"epsilon_low": 0.1, "epsilon_high": 0.3}, None, {"eps_low": 0.1, "eps_high": 0.3}),
    ("dapo", {}, None, {}),
    ("dapo", {"delta": 1.4}, 37, {"delta": 1.4, "num_items_in_batch": 37}),
    ("dapo", {"world_size": 4, "beta": 0.04}, torch.tensor(65),
     {"beta": 0.04, "num_items_in_batch": 65, "world_size": 4}),
    ("dapo", {"world_size": 2}, torch.tensor(50.0), {"num_items_in_batch": 50, "world_size": 2}),
    ("dr_grpo", {"max_completion_length": 9}, None, {"max_completion_length": 9}),
    ("gspo", {}, None, {"level": "sequence"}),
    ("gspo", {"epsilon_low": 0.02, "epsilon_high": 0.03, "beta": 0.1}, None,
     {"level": "sequence", "eps_low": 0.02, "eps_high": 0.03, "beta": 0.1}),
    ("dapo", {"importance_sampling_level": "sequence", "delta": 1.1, "epsilon_high": 0.05}, 37,
     {"level": "sequence", "delta": 1.1, "eps_high": 0.05, "num_items_in_batch": 37}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "count", "told"), PRESET_CASES)
@pytest.mark.parametrize("seed", range(3))
def test_presets(name, options, count, told, seed):
    logps, parts = columns(seed=seed)
    objective, reduction, kl, _ = build_preset(name, **options)
    found = ppo_loss_fn(logps, PolicyBatch(**parts, num_items_in_batch=count), objective, reduction, kl=kl)
    assert_equals_oracle(found.loss, oracle(logps, parts, name, **told), logps)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("delta", [None, 0.9, 1.1, 1.25, 4.0])
def test_delta_on_either_side_of_the_upper_bound(level, delta):
    logps, parts = columns(40, 6, noise=0.5)
    found = ppo_loss_fn(logps, PolicyBatch(**parts), PPOClip(delta=delta, importance_sampling_level=level), TokenMean())
    assert_equals_oracle(found.loss, oracle(logps, parts, "bnpo", delta=delta, level=level), logps)


@pytest.mark.parametrize("missing", [("old_per_token_logps",), ("importance_ratio",), COLUMNS, ("completion_mask",)])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_columns_left_out(missing, level):
    logps, parts = columns()
    given = {name: value for name, value in parts.items() if name not in missing}
    told = {**given, "completion_mask": given.get("completion_mask", torch.ones(5, 6))}
    found = ppo_loss_fn(logps, PolicyBatch(**given), PPOClip(importance_sampling_level=level), SequenceMean())
    assert_equals_oracle(found.loss, oracle(logps, told, "grpo", level=level), logps)


def test_without_old_the_gradient_is_minus_the_advantage():
    logps, parts = columns()
    batch = PolicyBatch(advantages=parts["advantages"])
    found = ppo_loss_fn(logps, batch, PPOClip(), None)
    expected = -parts["advantages"][:, None].expand(5, 6)
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(gradient(found.loss.sum(), logps), expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_mask_dtypes(dtype):
    logps, parts = columns()
    expected = oracle(logps, parts, "grpo")
    found = ppo_loss_fn(logps, PolicyBatch(**{**parts, "completion_mask": parts["completion_mask"].to(dtype)}),
                        PPOClip(), SequenceMean())  # fmt: skip
    assert_equals_oracle(found.loss, expected, logps)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("shape", ["(B,)", "(B, 1)", "(B, T)"])
def test_importance_ratio_shapes(level, shape):
    logps, parts = columns()
    ratio = parts["importance_ratio"]
    parts["importance_ratio"] = {"(B,)": ratio[:, 0], "(B, 1)": ratio[:, :1], "(B, T)": ratio}[shape]
    found = ppo_loss_fn(
        logps, PolicyBatch(**parts), PPOClip(importance_sampling_level=level), SequenceMean(), kl=KLPenalty(beta=0.1)
    )
    assert_equals_oracle(found.loss, oracle(logps, parts, "grpo", level=level, beta=0.1), logps)


def test_shapes_where_batch_equals_length():
    """(B,) columns are per sequence even where B == T."""
    logps, parts = columns(6, 6)
    parts["importance_ratio"] = parts["importance_ratio"][:, 0]
    found = ppo_loss_fn(logps, PolicyBatch(**parts), PPOClip(), SequenceMean())
    assert_equals_oracle(found.loss, oracle(logps, parts, "grpo"), logps)


def test_importance_ratio_carries_no_gradient():
    logps, parts = columns()
    parts["importance_ratio"].requires_grad_()
    ppo_loss_fn(logps, PolicyBatch(**parts), PPOClip(), TokenMean()).loss.backward()
    assert parts["importance_ratio"].grad is None


def test_other_policies_get_no_gradient():
    logps, parts = columns()
    del parts["importance_ratio"]
    parts["sampling_per_token_logps"] = parts["old_per_token_logps"] - 0.1
    parts["num_items_in_batch"] = torch.tensor(16.0)
    names = [name for name in parts if name != "completion_mask"]
    for name in names:
        parts[name].requires_grad_()
    found = ppo_loss_fn(
        logps, PolicyBatch(**parts), PPOClip(), GlobalTokenMean(), kl=KLPenalty(beta=0.1),
        sampler_correction=SamplerCorrection(), corrections=[OffPolicySequenceMask(threshold=9.0)], metrics="basic",
    )  # fmt: skip
    found.loss.backward()
    assert logps.grad.any()
    for name in names:
        assert parts[name].grad is None, name
    assert not any(metric.total.requires_grad for metric in found.metrics.values())


def test_advantages_per_token():
    logps, parts = columns()
    parts["advantages"] = torch.randn(5, 6, dtype=torch.float64)
    found = ppo_loss_fn(logps, PolicyBatch(**parts), PPOClip(), SequenceMean())
    assert_equals_oracle(found.loss, oracle(logps, parts, "grpo"), logps)


def test_advantages_per_token_of_one_value_equal_per_sequence():
    logps, parts = columns()
    objective = PPOClip(importance_sampling_level="sequence")
    per_sequence = ppo_loss_fn(logps, PolicyBatch(**parts), objective, SequenceMean()).loss
    parts["advantages"] = parts["advantages"][:, None].expand(5, 6).contiguous()
    per_token = ppo_loss_fn(logps, PolicyBatch(**parts), objective, SequenceMean()).loss
    torch.testing.assert_close(per_token, per_sequence, rtol=1e-12, atol=0.0)


# --- clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("bound", ["low", "high"])
def test_tie_on_a_bound_passes_gradient(advantage, bound):
    """At ratio 1 with both epsilons 0, and where the ratio is a bound to the last bit."""
    logps = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    ratio = 0.75 if bound == "low" else 1.25
    old = -torch.tensor([[math.log(ratio)]], dtype=torch.float64)
    exact = torch.exp(logps.detach() - old).item()
    objective = PPOClip(epsilon_low=0.0, epsilon_high=exact - 1) if exact > 1 else PPOClip(epsilon_low=1 - exact)
    batch = PolicyBatch(advantages=torch.tensor([advantage], dtype=torch.float64), old_per_token_logps=old)
    assert (1 + objective.epsilon_high if exact > 1 else 1 - objective.epsilon_low) == exact
    loss = ppo_loss_fn(logps, batch, objective, TokenMean())
    assert gradient(loss.loss, logps).item() == pytest.approx(-advantage * ratio, rel=1e-12)
    assert loss.metrics["clip_ratio"].value == 0

    batch = PolicyBatch(advantages=torch.tensor([advantage], dtype=torch.float64))
    loss = ppo_loss_fn(logps, batch, PPOClip(epsilon_low=0.0, epsilon_high=0.0), TokenMean()).loss
    assert gradient(loss, logps).item() == pytest.approx(-advantage, rel=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_clipped_tokens_get_exactly_zero_gradient(level):
    logps, parts = columns(40, 6, noise=0.5)
    objective = PPOClip(importance_sampling_level=level, epsilon_low=0.1, epsilon_high=0.15)
    grad = gradient(ppo_loss_fn(logps, PolicyBatch(**parts), objective, SequenceMean()).loss, logps)
    cut = 0
    for b, row in enumerate(oracles.ratios(logps, parts["old_per_token_logps"], parts["completion_mask"], level)):
        for t, r in enumerate(row):
            clipped = r is None or any(oracles.clip_bounds(r.item(), parts["advantages"][b].item(), 0.1, 0.15))
            assert (grad[b, t] == 0) == clipped
            cut += clipped and r is not None
    assert cut > 10


def test_zero_advantage_gives_zero_gradient():
    logps, parts = columns()
    parts["advantages"].zero_()
    loss = ppo_loss_fn(logps, PolicyBatch(**parts), PPOClip(), SequenceMean()).loss
    assert not gradient(loss, logps).any()


# --- masks, micro-batches, layout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e300])
def test_nothing_under_the_mask_matters(level, garbage):
    logps, parts = columns()
    parts["advantages"] = parts["advantages"][:, None].expand(5, 6).contiguous()
    hole = ~parts["completion_mask"]
    objective, kl = PPOClip(importance_sampling_level=level), KLPenalty(beta=0.1)
    clean = ppo_loss_fn(logps, PolicyBatch(**parts), objective, SequenceMean(), kl=kl)
    expected = gradient(clean.loss, logps)
    assert (expected[hole] == 0).all()
    for dirty in ("per_token_logps", "advantages", *COLUMNS, "all"):
        names = ("per_token_logps", "advantages", *COLUMNS) if dirty == "all" else (dirty,)
        values = {name: v.masked_fill(hole, garbage) if name in names else v for name, v in parts.items()}
        leaf = logps.detach().masked_fill(hole, garbage) if "per_token_logps" in names else logps.detach()
        leaf.requires_grad_()
        found = ppo_loss_fn(leaf, PolicyBatch(**values), objective, SequenceMean(), kl=kl)
        assert torch.equal(found.loss, clean.loss), dirty
        assert torch.equal(gradient(found.loss, leaf), expected), dirty
        for name, value in clean.metrics.items():
            assert torch.equal(found.metrics[name].value, value.value), dirty


@pytest.mark.parametrize(
    "reduction", [SequenceMean(), TokenMean(), GlobalTokenMean(), FixedLengthMean(max_completion_length=6)]
)
def test_everything_masked(reduction):
    logps, parts = columns()
    parts["completion_mask"] = torch.zeros(5, 6)
    found = ppo_loss_fn(logps, PolicyBatch(**parts), PPOClip(), reduction, kl=KLPenalty(beta=0.1))
    assert found.loss == 0
    assert not gradient(found.loss, logps).any()  # any() is true for NaN
    assert all(metric.value == 0 for metric in found.metrics.values())


def test_micro_batches_with_a_shared_count_sum_to_the_whole():
    logps, parts = columns(8, 6)
    count = int(parts["completion_mask"].sum())
    whole = ppo_loss_fn(logps, PolicyBatch(**parts), PPOClip(), TokenMean(), kl=KLPenalty(beta=0.1)).loss
    total = 0.0
    for rows in (slice(0, 1), slice(1, 4), slice(4, 8)):
        part = PolicyBatch(**{name: value[rows] for name, value in parts.items()}, num_items_in_batch=count)
        total = total + ppo_loss_fn(logps[rows], part, PPOClip(), GlobalTokenMean(), kl=KLPenalty(beta=0.1)).loss
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(total, logps), gradient(whole, logps), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduction", [TokenMean(), GlobalTokenMean(), GlobalTokenMean(world_size=2), None])
def test_packed_equals_padded(reduction):
    logps, parts = columns()
    count = 40 if isinstance(reduction, GlobalTokenMean) else None
    padded = ppo_loss_fn(
        logps, PolicyBatch(**parts, num_items_in_batch=count), PPOClip(), reduction, kl=KLPenalty(beta=0.1)
    )
    keep = parts["completion_mask"]
    parts["advantages"] = parts["advantages"][:, None].expand(5, 6)
    packed_parts = {name: value[keep] for name, value in parts.items() if name != "completion_mask"}
    packed_logps = logps[keep]
    packed = ppo_loss_fn(
        packed_logps, PolicyBatch(**packed_parts, num_items_in_batch=count), PPOClip(), reduction,
        kl=KLPenalty(beta=0.1),
    )  # fmt: skip
    expected = padded.loss[keep] if reduction is None else padded.loss
    torch.testing.assert_close(packed.loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        gradient(packed.loss.sum(), logps), gradient(padded.loss.sum(), logps), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(
    ("objective", "reduction"),
    [(PPOClip(), SequenceMean()), (PPOClip(importance_sampling_level="sequence"), TokenMean())],
)
def test_packed_tokens_have_no_sequences(objective, reduction):
    logps = torch.zeros(7, requires_grad=True)
    with pytest.raises(ValueError, match=r"\(B, T\)"):
        ppo_loss_fn(logps, PolicyBatch(advantages=torch.zeros(7)), objective, reduction)


def test_unreduced_losses():
    logps, parts = columns()
    found = ppo_loss_fn(logps, PolicyBatch(**parts), PPOClip(), None, kl=KLPenalty(beta=0.1)).loss
    expected = oracles.token_losses(
        logps, parts["advantages"], parts["completion_mask"], old=parts["old_per_token_logps"],
        ref=parts["ref_per_token_logps"], importance_ratio=parts["importance_ratio"], beta=0.1,
    )  # fmt: skip
    assert found.shape == (5, 6)
    for b in range(5):
        for t in range(6):
            value = 0.0 if expected[b][t] is None else expected[b][t].item()
            assert found[b, t].item() == pytest.approx(value, rel=1e-12)


# --- metrics, dtypes, own losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("delta", [None, 1.1])
def test_metrics(level, delta):
    logps, parts = columns(40, 6, noise=0.5)
    objective = PPOClip(epsilon_low=0.1, epsilon_high=0.15, delta=delta, importance_sampling_level=level)
    found = ppo_loss_fn(logps, PolicyBatch(**parts), objective, SequenceMean(), kl=KLPenalty(beta=0.1)).metrics
    expected = oracles.policy_metrics(
        logps, parts["advantages"], parts["completion_mask"], old=parts["old_per_token_logps"],
        ref=parts["ref_per_token_logps"], eps_low=0.1, eps_high=0.15, level=level,
    )  # fmt: skip
    assert set(found) == set(expected)
    assert 0 < expected["clip_low"] != expected["clip_high"] > 0
    for name, metric in found.items():
        value = metric.value
        assert value.shape == ()
        assert not value.requires_grad
        assert value.item() == pytest.approx(expected[name], rel=1e-6), name


def test_no_kl_metric_without_a_penalty():
    logps, parts = columns()
    assert "kl_ref" not in ppo_loss_fn(logps, PolicyBatch(**parts), PPOClip(), TokenMean()).metrics


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_losses_are_at_least_float32(dtype):
    logps, parts = columns()
    low = {name: v.to(dtype) if v.is_floating_point() else v for name, v in parts.items()}
    leaf = logps.detach().to(dtype).requires_grad_()
    found = ppo_loss_fn(leaf, PolicyBatch(**low), PPOClip(), SequenceMean()).loss
    rounded = {name: v.double() if v.is_floating_point() else v for name, v in low.items()}
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(oracle(leaf.detach().double(), rounded, "grpo").item(), rel=1e-5)


def test_an_objective_of_your_own_sees_clean_columns():
    logps, parts = columns()
    hole = ~parts["completion_mask"]
    parts["old_per_token_logps"] = parts["old_per_token_logps"].masked_fill(hole, math.nan)
    seen = {}

    def reinforce(logps, batch):
        seen.update(logps=logps, old=batch.old_per_token_logps, advantages=batch.advantages, mask=batch.mask)
        return TokenLoss(-batch.advantages * logps)

    found = ppo_loss_fn(logps, PolicyBatch(**parts), reinforce, TokenMean())
    weights = parts["importance_ratio"] * parts["completion_mask"] / parts["completion_mask"].sum()
    torch.testing.assert_close(found.loss, -(weights * parts["advantages"][:, None] * logps).sum())
    assert found.metrics == {}
    for name in ("logps", "old", "advantages"):
        assert seen[name].shape == (5, 6)
        assert (seen[name][hole] == 0).all()
    assert torch.equal(seen["mask"], parts["completion_mask"])


def test_a_reduction_of_your_own():
    logps, parts = columns()
    weights = torch.rand(5, 6, dtype=torch.float64)
    per_token = ppo_loss_fn(logps, PolicyBatch(**parts), PPOClip(), None).loss
    found = ppo_loss_fn(logps, PolicyBatch(**parts), PPOClip(), lambda batch: weights).loss
    torch.testing.assert_close(found, (per_token * weights).sum())


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "error", "arguments"),
    [
        ("advantages", ValueError, {"advantages": torch.zeros(4)}),
        ("advantages", ValueError, {"advantages": torch.zeros(5, 5)}),
        ("advantages", TypeError, {"advantages": 1.0}),
        ("advantages", TypeError, {"advantages": None}),
        ("advantages", ValueError, {"advantages": torch.zeros(5, device="meta")}),
        ("completion_mask", ValueError, {"completion_mask": torch.ones(5)}),
        ("completion_mask", TypeError, {"completion_mask": [1]}),
        ("old_per_token_logps", ValueError, {"old_per_token_logps": torch.zeros(5, 7)}),
        ("old_per_token_logps", TypeError, {"old_per_token_logps": torch.zeros(5, 6, dtype=torch.complex64)}),
        ("ref_per_token_logps", ValueError, {"ref_per_token_logps": torch.zeros(5)}),
        ("ref_per_token_logps", ValueError, {"ref_per_token_logps": None}),
        ("importance_ratio", ValueError, {"importance_ratio": torch.zeros(6)}),
        ("importance_ratio", ValueError, {"importance_ratio": torch.zeros(1, 6)}),
    ],
)
def test_bad_columns_are_named(name, error, arguments):
    logps, parts = columns()
    with pytest.raises(error, match=rf"\b{name}\b"):
        ppo_loss_fn(logps, PolicyBatch(**{**parts, **arguments}), PPOClip(), TokenMean(), kl=KLPenalty(beta=0.1))


@pytest.mark.parametrize(
    ("logps", "error"),
    [(torch.zeros(5, 6, 2), ValueError), (torch.zeros(()), ValueError), (torch.zeros(5, 6).long(), TypeError)],
)
def test_bad_log_probabilities_are_named(logps, error):
    with pytest.raises(error, match="per_token_logps"):
        ppo_loss_fn(logps, PolicyBatch(advantages=torch.zeros(5)), PPOClip(), TokenMean())


@pytest.mark.parametrize(
    ("part", "options"),
    [
        (PPOClip, {"epsilon_low": -0.1}),
        (PPOClip, {"epsilon_high": -0.1}),
        (PPOClip, {"epsilon_high": math.nan}),
        (PPOClip, {"delta": 0.0}),
        (PPOClip, {"delta": -1.0}),
        (PPOClip, {"importance_sampling_level": "word"}),
        (KLPenalty, {"beta": -0.1}),
        (KLPenalty, {"beta": math.nan}),
        (GlobalTokenMean, {"world_size": 0}),
        (FixedLengthMean, {"max_completion_length": 0}),
    ],
)
def test_bad_options_are_named(part, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        part(**options)


@pytest.mark.parametrize("name", ["num_sequences", "num_items_in_batch"])
@pytest.mark.parametrize("value", [0, -3, 0.5, math.nan, math.inf, -math.inf, 10**400])
def test_divisors_are_finite_and_at_least_1(name, value):
    logps, parts = columns()
    with pytest.raises(ValueError, match=name):
        ppo_loss_fn(logps, PolicyBatch(**parts, **{name: value}), PPOClip(), TokenMean())


@pytest.mark.parametrize("name", ["num_sequences", "num_items_in_batch"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (True, TypeError),
        ("7", TypeError),
        (torch.tensor(True), TypeError),
        (torch.tensor(1j), TypeError),
        (torch.tensor([7, 7]), ValueError),
        (torch.tensor(7, device="meta"), ValueError),
    ],
)
def test_bad_divisors_are_named(name, value, error):
    logps, parts = columns()
    with pytest.raises(error, match=name):
        ppo_loss_fn(logps, PolicyBatch(**parts, **{name: value}), PPOClip(), TokenMean())


def test_a_tensor_divisor_under_1_counts_as_1():
    logps, parts = columns()
    zero, one = (
        ppo_loss_fn(logps, PolicyBatch(**parts, num_items_in_batch=count), PPOClip(), GlobalTokenMean()).loss
        for count in (torch.tensor(0), 1)
    )
    assert torch.equal(zero, one)


@pytest.mark.parametrize("value", [0.5, -1.0, 2.0, math.nan, math.inf, -1])
def test_mask_values_other_than_0_and_1_are_refused(value):
    logps, parts = columns()
    dtype = torch.float32 if isinstance(value, float) else torch.int64
    mask = parts["completion_mask"].to(dtype)
    mask[2, 1] = value
    with pytest.raises(ValueError, match="completion_mask must be 0 or 1"):
        ppo_loss_fn(logps, PolicyBatch(**{**parts, "completion_mask": mask}), PPOClip(), TokenMean())


def from_generator(*corrections):
    return (correction for correction in corrections)


@pytest.mark.parametrize("iterable", [list, iter, lambda corrections: from_generator(*corrections)])
def test_corrections_from_any_iterable_count(iterable):
    logps, parts = columns()
    entropy = torch.rand(5, 6, dtype=torch.float64)
    corrections = (TopEntropyMask(top_entropy_quantile=0.5), OffPolicySequenceMask(threshold=0.0))

    def found(corrections):
        return ppo_loss_fn(
            logps, PolicyBatch(**parts), PPOClip(), TokenMean(), entropy=entropy, corrections=corrections
        ).loss  # fmt: skip

    expected = found(corrections)
    assert torch.equal(found(iterable(corrections)), expected)
    assert found(()) != expected
    with pytest.raises(ValueError, match="entropy must be given"):
        ppo_loss_fn(logps, PolicyBatch(**parts), PPOClip(), TokenMean(), corrections=iterable(corrections))


def plain_tensor(logps, batch):
    return -logps


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("batch", {"batch": {"advantages": torch.zeros(5)}}),
        ("batch", {"batch": None}),
        ("objective", {"objective": PPOClip}),
        ("objective", {"objective": "grpo"}),
        ("objective", {"objective": plain_tensor}),
        ("objective", {"objective": lambda logps, batch: None}),
        ("reduction", {"reduction": TokenMean}),
        ("reduction", {"reduction": 1.0}),
        ("reduction", {"reduction": lambda batch: None}),
        ("kl", {"kl": None}),
        ("kl", {"kl": KLPenalty}),
        ("kl", {"kl": 0.1}),
        ("entropy_bonus", {"entropy_bonus": None}),
        ("entropy_bonus", {"entropy_bonus": EntropyBonus}),
        ("sampler_correction", {"sampler_correction": SamplerCorrection}),
        ("sampler_correction", {"sampler_correction": lambda logps, batch: 1.0}),
        ("corrections", {"corrections": None}),
        ("corrections", {"corrections": OffPolicySequenceMask(threshold=0.1)}),
        (r"corrections\[1\]", {"corrections": [OffPolicySequenceMask(threshold=0.1), 1]}),
        (r"corrections\[0\]", {"corrections": [OffPolicySequenceMask]}),
        (r"corrections\[0\]", {"corrections": [lambda logps, batch: None]}),
        ("entropy", {"entropy": torch.zeros(5, 6).to_sparse()}),
        ("per_token_logps", {"per_token_logps": torch.zeros(5, 6).to_sparse()}),
        ("per_token_logps", {"per_token_logps": None}),
    ],
)
def test_what_is_of_another_kind_is_named(name, options):
    logps, parts = columns()
    arguments = {"per_token_logps": logps, "batch": PolicyBatch(**parts), "objective": PPOClip(),
                 "reduction": TokenMean()}  # fmt: skip
    with pytest.raises(TypeError, match=rf"\b{name}"):
        ppo_loss_fn(**arguments | options)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("name", ["completion_mask", *COLUMNS])
def test_sparse_columns_are_refused(name, layout):
    logps, parts = columns()
    sparse = parts[name].double().to_sparse(layout=layout)
    with pytest.raises(TypeError, match=rf"{name} must be a dense tensor"):
        ppo_loss_fn(logps, PolicyBatch(**{**parts, name: sparse}), PPOClip(), TokenMean())


def test_a_sampler_correction_per_sequence_needs_sequences_before_anything_is_computed():
    logps = torch.zeros(7, requires_grad=True)
    batch = PolicyBatch(
        advantages=torch.zeros(7), old_per_token_logps=torch.zeros(7), sampling_per_token_logps=torch.zeros(7)
    )

    def untouched(logps, batch):
        pytest.fail("the objective was called")

    with pytest.raises(ValueError, match="segments"):
        ppo_loss_fn(logps, batch, untouched, TokenMean(), sampler_correction=SamplerCorrection(level="sequence"))
    ppo_loss_fn(logps, batch, PPOClip(), TokenMean(), sampler_correction=SamplerCorrection(level="token"))


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="loss_type") as unknown_preset:
        build_preset("ppo2")
    assert all(name in str(unknown_preset.value) for name in PRESETS)
    with pytest.raises(ValueError, match="epsilon_hihg") as unknown_option:
        build_preset("dapo", epsilon_hihg=0.3)
    for known in ("epsilon_low", "epsilon_high", "delta", "importance_sampling_level", "world_size", "beta"):
        assert known in str(unknown_option.value)
    with pytest.raises(ValueError, match="max_completion_length"):
        build_preset("grpo", max_completion_length=8)  # an option of another preset's reduction


@pytest.mark.parametrize(("name", "option"), [("dr_grpo", "max_completion_length"), ("dro", "dro_beta")])
def test_options_without_a_default_are_asked_for(name, option):
    with pytest.raises(ValueError, match=option):
        build_preset(name)


@pytest.mark.parametrize("loss_type", ["ppo2", ["grpo"], PPOClip])
def test_an_unknown_preset_is_named(loss_type):
    with pytest.raises(ValueError, match="loss_type"):
        build_preset(loss_type)
