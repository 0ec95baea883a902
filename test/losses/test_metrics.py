"""Which metrics each level reports, and how they merge over micro-batches and ranks. Their values are the fuzzer's."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from liger_rl import (
    CISPO,
    SAPO,
    KLPenalty,
    Metric,
    PolicyBatch,
    PPOClip,
    Segments,
    TokenMean,
    ppo_loss_fn,
    reduce_metrics,
)

LOSS_NAMES = {"kl_ref", "clip_low", "clip_high", "clip_ratio"}
BASIC_NAMES = LOSS_NAMES | {
    "new_logprobs", "old_logprobs", "ratio_new_old", "kl_new_old", "clipped_ratio_fraction", "advantage",
    "ratio_new_old_sum", "ratio_new_old_squared_sum", "num_tokens", "max_advantage", "min_advantage",
    "sequence_ratio_new_old", "sequence_kl_new_old", "sequence_ratio_new_old_sum",
    "sequence_ratio_new_old_squared_sum", "num_sequences",
}  # fmt: skip
NAMES = {"none": set(), "loss": LOSS_NAMES, "basic": BASIC_NAMES, "with_entropy": BASIC_NAMES | {"entropy"}}


@dataclass(frozen=True)
class Columns:
    """(B, T) each."""

    logps: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor
    entropy: Tensor
    mask: Tensor  # bool

    def map(self, function) -> "Columns":
        return Columns(*(function(getattr(self, name)) for name in self.__dataclass_fields__))

    def rows(self, rows: slice) -> "Columns":
        return self.map(lambda column: column[rows])


def columns(shape):
    """With masked rows, float64."""
    g = torch.Generator().manual_seed(0)

    def normal():
        return torch.randn(shape, generator=g, dtype=torch.float64)

    logps, lengths = -normal().abs() - 0.1, (torch.arange(shape[0]) * 5 + 2) % (shape[1] + 1)
    mask = torch.arange(shape[1]) < lengths[:, None]
    return Columns(logps, logps + 0.3 * normal(), logps + 0.3 * normal(), normal(), normal().abs(), mask)


def ours(c, level, *, packed=False, num_sequences=None, objective=None, beta=0.1, with_old=True):
    rows, length = c.mask.shape
    c = c.map(torch.flatten) if packed else c
    batch = PolicyBatch(
        advantages=c.advantages,
        completion_mask=c.mask,
        old_per_token_logps=c.old if with_old else None,
        ref_per_token_logps=c.ref,
        segments=Segments(index=torch.arange(rows).repeat_interleave(length), count=rows) if packed else None,
        num_sequences=num_sequences,
    )
    objective = objective or PPOClip(epsilon_low=0.15, epsilon_high=0.25)
    logps = c.logps.clone().requires_grad_()
    kl = KLPenalty(beta=beta)
    return ppo_loss_fn(logps, batch, objective, TokenMean(), kl=kl, entropy=c.entropy, metrics=level).metrics


def numbers(metrics):
    assert all(metric.value.shape == () and not metric.total.requires_grad for metric in metrics.values())
    return {name: metric.item() for name, metric in metrics.items()}


def near(expected):
    return pytest.approx(numbers(expected), rel=1e-10, abs=1e-12)


def test_what_is_not_there_is_not_reported():
    c = columns((6, 5))
    for level, names in NAMES.items():
        assert set(ours(c, level)) == names
    assert set(ours(c, "basic", beta=0.0)) == BASIC_NAMES - {"kl_ref"}
    assert set(ours(c, "loss", objective=SAPO())) == {"kl_ref"}
    assert set(ours(c, "basic", objective=SAPO())) == BASIC_NAMES - LOSS_NAMES - {"clipped_ratio_fraction"} | {"kl_ref"}
    without_old = ours(c, "with_entropy", with_old=False)
    assert numbers(without_old) == near(ours(replace(c, old=c.logps), "with_entropy"))


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.1), (0.9, 1.2)])
def test_bounds_of_cispo(low, high):
    c = columns((11, 6))
    ratio, tokens = (c.logps - c.old).exp(), c.mask.sum()
    cut_low, cut_high = (ratio < low) & (c.advantages < 0) & c.mask, (ratio > high) & (c.advantages > 0) & c.mask
    outside = (((ratio < low) | (ratio > high)) & c.mask).sum(1) / c.mask.sum(1).clamp(min=1)
    names = ("clip_low", "clip_high", "clip_ratio", "clipped_ratio_fraction")
    expected = *(cut.sum() / tokens for cut in (cut_low, cut_high, cut_low | cut_high)), outside.mean()
    found = ours(c, "basic", objective=CISPO(ratio_min=low, epsilon_high=high))
    assert [found[name].item() for name in names] == pytest.approx([value.item() for value in expected], rel=1e-6)
    assert expected[1] > 0


@pytest.mark.parametrize("rows", [0, 3])
def test_a_part_without_tokens_is_neutral(rows):
    c = columns((rows, 4))
    c.mask[:] = False
    found = ours(c, "with_entropy")
    assert numbers(found) == dict.fromkeys(found, 0.0) | {"max_advantage": -math.inf, "min_advantage": math.inf}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_metric_knows_how_it_is_merged(dtype):
    c = columns((6, 5))
    found = ours(c.map(lambda x: x if x.dtype == torch.bool else x.to(dtype)), "with_entropy")
    assert {metric.total.dtype for metric in found.values()} == {dtype}
    assert {name for name, metric in found.items() if metric.reduction == "max"} == {"max_advantage"}
    assert {name for name, metric in found.items() if metric.reduction == "min"} == {"min_advantage"}
    assert {name for name, metric in found.items() if metric.count is not None} == LOSS_NAMES


# --- merging ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("level", ["loss", "basic", "with_entropy"])
def test_micro_batches_merge_to_the_whole(level, packed):
    """One with masked rows alone, and one without rows. Over ranks: test/distributed/test_sequences.py."""
    c, kinds = columns((11, 6)), []
    c.mask[6] = False
    slices = slice(0, 1), slice(1, 6), slice(6, 7), slice(7, 11), slice(11, 11)
    parts = [ours(c.rows(rows), level, packed=packed, num_sequences=11) for rows in slices]
    merged = reduce_metrics(parts, all_reduce=lambda values, kind: kinds.append((kind, values.dim())) or values)
    assert numbers(merged) == near(ours(c, level, packed=packed))
    # A collective for each kind.
    assert sorted(kinds) == ([("sum", 1)] if level == "loss" else [("max", 1), ("min", 1), ("sum", 1)])


def test_parts_may_be_an_iterator_and_names_may_be_missing():
    c = columns((11, 6))
    halves = ((slice(0, 4), "loss"), (slice(4, 11), "basic"))
    merged = reduce_metrics(ours(c.rows(rows), level, num_sequences=11) for rows, level in halves)
    assert set(merged) == NAMES["basic"]
    assert merged["kl_ref"].item() == pytest.approx(ours(c, "loss")["kl_ref"].item(), rel=1e-10)
    assert merged["num_tokens"].item() == c.mask[4:].sum()
    assert reduce_metrics([]) == {}
    assert reduce_metrics([{}], all_reduce=lambda values, kind: pytest.fail("nothing to reduce")) == {}


def test_merging_does_not_change_its_parts():
    c = columns((4, 5))
    parts = [ours(c.rows(rows), "basic", num_sequences=4) for rows in (slice(0, 1), slice(1, 4))]
    before = [numbers(part) for part in parts]
    reduce_metrics(parts, all_reduce=lambda values, kind: values.mul_(2))
    assert [numbers(part) for part in parts] == before


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
