"""Which metrics each level reports, and how they merge over micro-batches and ranks. Their values are the fuzzer's."""

import pytest
import torch

from liger_rl import ppo_loss_fn
from liger_rl.losses import SAPO, KLPenalty, Metric, PolicyBatch, PPOClip, TokenMean, reduce_metrics

LOSS_NAMES = {"kl_ref", "clip_low", "clip_high", "clip_ratio"}
BASIC_NAMES = LOSS_NAMES | {
    "new_logprobs", "old_logprobs", "ratio_new_old", "kl_new_old", "clipped_ratio_fraction", "advantage",
    "ratio_new_old_sum", "ratio_new_old_squared_sum", "num_tokens", "max_advantage", "min_advantage",
    "sequence_ratio_new_old", "sequence_kl_new_old", "sequence_ratio_new_old_sum",
    "sequence_ratio_new_old_squared_sum", "num_sequences",
}  # fmt: skip
NAMES = {"none": set(), "loss": LOSS_NAMES, "basic": BASIC_NAMES, "with_entropy": BASIC_NAMES | {"entropy"}}


def metrics(level, rows=slice(None), *, objective=None, beta=0.1, with_old=True, dtype=torch.float64):
    """Of a loss of some of 11 sequences, the seventh of which is masked."""
    g = torch.Generator().manual_seed(0)
    logps, old, ref, advantages, entropy = torch.randn(5, 11, 6, generator=g, dtype=torch.float64).to(dtype)[:, rows]
    mask = torch.arange(6) < ((torch.arange(11) * 5 + 2) % 7 * (torch.arange(11) != 6))[rows, None]
    batch = PolicyBatch(
        advantages=advantages, mask=mask, old_per_token_logps=logps + 0.3 * old if with_old else None,
        ref_per_token_logps=logps + 0.3 * ref, num_sequences=11,
    )  # fmt: skip
    objective = objective or PPOClip(epsilon_low=0.15, epsilon_high=0.25)
    kl, leaf = KLPenalty(beta=beta), logps.clone().requires_grad_()
    return ppo_loss_fn(leaf, batch, objective, TokenMean(), kl=kl, entropy=entropy, metrics=level).metrics


def numbers(found):
    assert all(metric.value.shape == () and not metric.total.requires_grad for metric in found.values())
    return {name: metric.item() for name, metric in found.items()}


def near(expected):
    return pytest.approx(numbers(expected), rel=1e-10, abs=1e-12)


def test_what_is_not_there_is_not_reported():
    for level, names in NAMES.items():
        assert set(metrics(level)) == names
    assert set(metrics("basic", beta=0.0)) == BASIC_NAMES - {"kl_ref"}
    assert set(metrics("loss", objective=SAPO())) == {"kl_ref"}
    without_clip = BASIC_NAMES - LOSS_NAMES - {"clipped_ratio_fraction"} | {"kl_ref"}
    assert set(metrics("basic", objective=SAPO())) == without_clip
    assert set(metrics("with_entropy", with_old=False)) == NAMES["with_entropy"]


def test_a_metric_prints_its_value():
    mean = Metric(torch.tensor(3.0), count=torch.tensor(4))
    assert (repr(mean), str(mean), f"{mean}", f"{mean:.3f}") == ("Metric(0.75)", "Metric(0.75)", "0.75", "0.750")
    assert str({"clip_ratio": mean}) == "{'clip_ratio': Metric(0.75)}"
    assert "meta" in repr(Metric(torch.tensor(3.0, device="meta")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_metric_knows_how_it_is_merged(dtype):
    found = metrics("with_entropy", dtype=dtype)
    assert {metric.total.dtype for metric in found.values()} == {dtype}
    assert {name for name, metric in found.items() if metric.reduction == "max"} == {"max_advantage"}
    assert {name for name, metric in found.items() if metric.reduction == "min"} == {"min_advantage"}
    assert {name for name, metric in found.items() if metric.count is not None} == LOSS_NAMES


# --- merging ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["loss", "basic", "with_entropy"])
def test_micro_batches_merge_in_a_collective_for_each_kind(level):
    """One with masked rows alone, and one without rows. Over ranks: test/distributed/test_sequences.py."""
    kinds = []
    slices = slice(0, 1), slice(1, 6), slice(6, 7), slice(7, 11), slice(11, 11)
    parts = [metrics(level, rows) for rows in slices]
    before = [numbers(part) for part in parts]
    merged = reduce_metrics(parts, all_reduce=lambda values, kind: kinds.append((kind, values.dim())) or values)
    assert numbers(merged) == near(metrics(level))
    assert sorted(kinds) == ([("sum", 1)] if level == "loss" else [("max", 1), ("min", 1), ("sum", 1)])
    reduce_metrics(parts, all_reduce=lambda values, kind: values.mul_(2))
    assert [numbers(part) for part in parts] == before  # merging does not change its parts


def test_parts_may_be_an_iterator_and_names_may_be_missing():
    halves = ((slice(0, 4), "loss"), (slice(4, 11), "basic"))
    merged = reduce_metrics(metrics(level, rows) for rows, level in halves)
    assert set(merged) == NAMES["basic"]
    assert merged["kl_ref"].item() == pytest.approx(metrics("loss")["kl_ref"].item(), rel=1e-10)
    assert merged["num_tokens"].item() == metrics("basic", slice(4, 11))["num_tokens"].item()
    assert reduce_metrics([]) == {}
    assert reduce_metrics([{}], all_reduce=lambda values, kind: pytest.fail("nothing to reduce")) == {}


ONE = torch.tensor(1.0)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Metric(ONE, "sum"), Metric(ONE, "max")),
        (Metric(ONE, "min"), Metric(ONE, "max")),
        (Metric(ONE, "sum", count=ONE), Metric(ONE, "sum")),
        (Metric(ONE, "max"), Metric(ONE, "sum", count=ONE)),
    ],
)
def test_a_name_is_merged_in_one_way(a, b):
    for parts in ((a, b), (b, a)):
        with pytest.raises(ValueError, match="speed"):
            reduce_metrics([{"speed": part} for part in parts])


@pytest.mark.parametrize(
    ("name", "shape", "level"), [("metrics", (2, 3), "everything"), ("segments", (6,), "basic"),
                                 ("entropy", (2, 3), "with_entropy")]
)  # fmt: skip
def test_bad_levels_and_missing_columns(name, shape, level):
    batch = PolicyBatch(advantages=torch.ones(shape))
    with pytest.raises(ValueError, match=name):
        ppo_loss_fn(torch.zeros(shape, requires_grad=True), batch, PPOClip(), TokenMean(), metrics=level)
