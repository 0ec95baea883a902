"""Metrics against a float64 loop, and their merging over micro-batches and ranks."""

import math
from dataclasses import dataclass

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

EPSILON_LOW, EPSILON_HIGH, BETA = 0.15, 0.25, 0.1
LEVELS = ("none", "loss", "basic", "with_entropy")
LOSS_NAMES = {"kl_ref", "clip_low", "clip_high", "clip_ratio"}
BASIC_NAMES = {
    "new_logprobs", "old_logprobs", "ratio_new_old", "kl_new_old", "clipped_ratio_fraction", "advantage",
    "ratio_new_old_sum", "ratio_new_old_squared_sum", "num_tokens", "max_advantage", "min_advantage",
    "sequence_ratio_new_old", "sequence_kl_new_old", "sequence_ratio_new_old_sum",
    "sequence_ratio_new_old_squared_sum", "num_sequences",
}  # fmt: skip
NAMES = {
    "none": set(),
    "loss": LOSS_NAMES,
    "basic": LOSS_NAMES | BASIC_NAMES,
    "with_entropy": LOSS_NAMES | BASIC_NAMES | {"entropy"},
}


@dataclass(frozen=True)
class Columns:
    """(B, T) each, float64."""

    logps: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor
    entropy: Tensor
    mask: Tensor

    def rows(self, rows: slice) -> "Columns":
        return Columns(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


MASKS = {
    "all": lambda shape: torch.ones(shape, dtype=torch.bool),
    "lengths": lambda shape: torch.arange(shape[1]) < ((torch.arange(shape[0]) * 5 + 2) % (shape[1] + 1))[:, None],
    "holes": lambda shape: (torch.arange(shape[0] * shape[1]) * 7 % 11 < 6).view(shape),
    "one token": lambda shape: torch.arange(shape[0] * shape[1]).view(shape) == shape[1] - 1,
    "none": lambda shape: torch.zeros(shape, dtype=torch.bool),
}


def columns(shape, mask="lengths", seed=0):
    g = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(shape, generator=g, dtype=torch.float64)

    logps = -normal().abs() - 0.1
    return Columns(logps, logps + 0.3 * normal(), logps + 0.3 * normal(), normal(), normal().abs(), MASKS[mask](shape))


def ours(c, level, *, packed=False, num_sequences=None, objective=None, beta=BETA, with_old=True):
    flat = (lambda x: x.flatten()) if packed else (lambda x: x)
    rows, length = c.mask.shape
    batch = PolicyBatch(
        advantages=flat(c.advantages),
        completion_mask=flat(c.mask),
        old_per_token_logps=flat(c.old) if with_old else None,
        ref_per_token_logps=flat(c.ref),
        segments=Segments(index=torch.arange(rows).repeat_interleave(length), count=rows) if packed else None,
        num_sequences=num_sequences,
    )
    objective = objective or PPOClip(epsilon_low=EPSILON_LOW, epsilon_high=EPSILON_HIGH)
    return ppo_loss_fn(
        flat(c.logps).clone().requires_grad_(), batch, objective, TokenMean(), kl=KLPenalty(beta=beta),
        entropy=flat(c.entropy), metrics=level,
    ).metrics  # fmt: skip


def loop(c, level, *, num_sequences=None, low=1 - EPSILON_LOW, high=1 + EPSILON_HIGH):
    """-> every metric's value, by tokens one after another."""
    rows, length = c.mask.shape
    sequences = num_sequences or rows
    found = dict.fromkeys(NAMES["with_entropy"], 0.0) | {"max_advantage": -math.inf, "min_advantage": math.inf}
    tokens = int(c.mask.sum())
    for b in range(rows):
        inside = [t for t in range(length) if c.mask[b, t]]
        if inside:
            log_r = math.fsum((c.logps - c.old)[b, t].item() for t in inside) / len(inside)
            found["sequence_ratio_new_old"] += math.exp(log_r) / sequences
            found["sequence_kl_new_old"] += (math.exp(log_r) - log_r - 1) / sequences
            found["sequence_ratio_new_old_sum"] += math.exp(log_r)
            found["sequence_ratio_new_old_squared_sum"] += math.exp(2 * log_r)
            found["num_sequences"] += 1
        for t in inside:
            w = 1 / len(inside) / sequences
            logp, old, ref, a, entropy = (x[b, t].item() for x in (c.logps, c.old, c.ref, c.advantages, c.entropy))
            r = math.exp(logp - old)
            cut_low, cut_high = r < low and a < 0, r > high and a > 0
            found["kl_ref"] += (math.exp(ref - logp) - (ref - logp) - 1) / tokens
            found["clip_low"] += cut_low / tokens
            found["clip_high"] += cut_high / tokens
            found["clip_ratio"] += (cut_low or cut_high) / tokens
            found["new_logprobs"] += logp * w
            found["old_logprobs"] += old * w
            found["ratio_new_old"] += r * w
            found["kl_new_old"] += (r - math.log(r) - 1) * w
            found["clipped_ratio_fraction"] += (r < low or r > high) * w
            found["advantage"] += a * w
            found["ratio_new_old_sum"] += r
            found["ratio_new_old_squared_sum"] += r * r
            found["num_tokens"] += 1
            found["max_advantage"] = max(found["max_advantage"], a)
            found["min_advantage"] = min(found["min_advantage"], a)
            found["entropy"] += entropy * w
    return {name: found[name] for name in NAMES[level]}


def assert_equal(found, expected, rel=1e-10):
    assert set(found) == set(expected)
    for name, metric in found.items():
        assert metric.value.shape == ()
        assert not metric.total.requires_grad
        assert metric.item() == float(metric) == pytest.approx(expected[name], rel=rel, abs=1e-12), name


CASES = [
    # 40: every shape with every mask, the level and the layout in turn, both layouts of each level
    (shape, mask, LEVELS[1 + (i + j) % 3], packed)
    for i, shape in enumerate([(1, 1), (1, 9), (6, 5), (11, 3)])
    for j, mask in enumerate(MASKS)
    for packed in (False, True)
]


@pytest.mark.parametrize(("shape", "mask", "level", "packed"), CASES)
def test_against_the_loop(shape, mask, level, packed):
    c = columns(shape, mask)
    assert_equal(ours(c, level, packed=packed), loop(c, level))


def test_no_metrics():
    assert ours(columns((6, 5)), "none") == {}


def test_the_case_is_not_trivial():
    expected = loop(columns((11, 3)), "with_entropy")
    assert all(value != 0 for value in expected.values())
    assert expected["clip_low"] != expected["clip_high"]
    dense = loop(columns((11, 3), "all"), "basic")  # the two are weighted alike
    assert dense["clip_ratio"] < dense["clipped_ratio_fraction"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_sequences", [17, torch.tensor(17)])
def test_divisor(packed, num_sequences):
    c = columns((6, 5))
    found = ours(c, "with_entropy", packed=packed, num_sequences=num_sequences)
    assert_equal(found, loop(c, "with_entropy", num_sequences=17))


def test_float32():
    c = columns((6, 5))
    low = Columns(*(x if x.dtype == torch.bool else x.float() for x in (c.logps, c.old, c.ref, c.advantages, c.entropy,
                                                                         c.mask)))  # fmt: skip
    found = ours(low, "with_entropy")
    assert all(metric.total.dtype == torch.float32 for metric in found.values())
    assert_equal(found, loop(c, "with_entropy"), rel=2e-5)


def test_without_old_log_probabilities_the_ratio_is_one():
    c = columns((6, 5))
    same = Columns(c.logps, c.logps, c.ref, c.advantages, c.entropy, c.mask)
    found = ours(c, "with_entropy", with_old=False)
    assert_equal(found, loop(same, "with_entropy"))
    assert found["ratio_new_old_sum"].item() == c.mask.sum()
    assert found["kl_new_old"].item() == 0


def test_what_is_not_there_is_not_reported():
    c = columns((6, 5))
    assert "kl_ref" not in ours(c, "basic", beta=0.0)
    assert set(ours(c, "loss", objective=SAPO())) == {"kl_ref"}
    assert "clipped_ratio_fraction" not in ours(c, "basic", objective=SAPO())
    cispo = ours(c, "basic", objective=CISPO(epsilon_high=1.1))
    assert cispo["clip_low"].item() == 0
    assert cispo["clip_ratio"].item() == pytest.approx(loop(c, "loss", low=0.0, high=1.1)["clip_high"])


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_nothing_under_the_mask_is_counted(garbage):
    c = columns((6, 5), "holes")
    dirty = Columns(
        *(x.masked_fill(~c.mask, garbage) for x in (c.logps, c.old, c.ref, c.advantages, c.entropy)), c.mask
    )
    assert_equal(ours(dirty, "with_entropy"), loop(c, "with_entropy"))


def test_a_part_without_tokens_is_neutral():
    found = ours(columns((3, 4), "none"), "with_entropy")
    values = {name: metric.item() for name, metric in found.items()}
    assert values.pop("max_advantage") == -math.inf
    assert values.pop("min_advantage") == math.inf
    assert set(values.values()) == {0.0}
    nothing = Columns(*(torch.zeros(0, 4, dtype=torch.float64) for _ in range(5)), torch.zeros(0, 4, dtype=torch.bool))
    assert {name: metric.item() for name, metric in ours(nothing, "with_entropy").items()} == {
        name: metric.item() for name, metric in found.items()
    }


def test_each_metric_knows_how_it_is_merged():
    found = ours(columns((6, 5)), "with_entropy")
    assert {name for name, metric in found.items() if metric.reduction == "max"} == {"max_advantage"}
    assert {name for name, metric in found.items() if metric.reduction == "min"} == {"min_advantage"}
    assert {name for name, metric in found.items() if metric.count is not None} == LOSS_NAMES


# --- merging ----------------------------------------------------------------------------------------------------------


MERGE = {"sum": lambda x: x.sum(0), "max": lambda x: x.amax(0), "min": lambda x: x.amin(0)}


class Ranks:
    """Every rank's turn of `reduce_metrics`, with what the others would have sent."""

    def __init__(self, parts_of_ranks):
        self.parts = parts_of_ranks
        self.sent = [{} for _ in parts_of_ranks]

    def reduce(self):
        for rank, parts in enumerate(self.parts):
            reduce_metrics(parts, all_reduce=lambda values, kind, rank=rank: self._record(rank, values, kind))
        return [reduce_metrics(parts, all_reduce=self._answer) for parts in self.parts]

    def _record(self, rank, values, kind):
        assert kind not in self.sent[rank]  # one collective per kind
        assert values.dim() == 1
        self.sent[rank][kind] = values
        return values

    def _answer(self, values, kind):
        return MERGE[kind](torch.stack([sent[kind] for sent in self.sent]))


SPLITS = {
    "one rank, uneven micro-batches": [[slice(0, 1), slice(1, 7), slice(7, 11)]],
    "two ranks": [[slice(0, 5)], [slice(5, 11)]],
    "uneven ranks and micro-batches": [[slice(0, 1)], [slice(1, 3), slice(3, 4), slice(4, 9)], [slice(9, 11)]],
    "a rank with masked rows only": [[slice(0, 6)], [slice(6, 7)], [slice(7, 11)]],
    "a rank without rows": [[slice(0, 11)], [slice(11, 11)]],
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_parts_merge_to_the_whole(split, level, packed):
    c = columns((11, 6))
    mask = c.mask.clone()
    mask[6] = False
    c = Columns(c.logps, c.old, c.ref, c.advantages, c.entropy, mask)
    expected = loop(c, level)
    ranks = Ranks([[ours(c.rows(rows), level, packed=packed, num_sequences=11) for rows in parts] for parts in split])
    merged = ranks.reduce()
    for found in merged:
        assert_equal(found, expected)
    kinds = {"sum"} if level == "loss" else {"sum", "max", "min"}
    assert all(set(sent) == kinds for sent in ranks.sent)


def test_a_mean_of_means_would_be_wrong():
    """The counts of parts differ, and with them the weight of each part's mean."""
    c = columns((11, 6))
    parts = [ours(c.rows(rows), "loss", num_sequences=11) for rows in (slice(0, 1), slice(1, 11))]
    naive = (parts[0]["kl_ref"].item() + parts[1]["kl_ref"].item()) / 2
    expected = loop(c, "loss")["kl_ref"]
    assert reduce_metrics(parts)["kl_ref"].item() == pytest.approx(expected, rel=1e-10)
    assert abs(naive - expected) > 1e-3 * expected


def test_parts_may_be_an_iterator_and_names_may_be_missing():
    c = columns((11, 6))
    parts = (ours(c.rows(rows), level, num_sequences=11) for rows, level in
             ((slice(0, 4), "loss"), (slice(4, 11), "basic")))  # fmt: skip
    merged = reduce_metrics(parts)
    assert set(merged) == NAMES["basic"]
    assert merged["kl_ref"].item() == pytest.approx(loop(c, "loss")["kl_ref"], rel=1e-10)
    assert merged["num_tokens"].item() == c.mask[4:].sum()
    assert reduce_metrics([]) == {}
    assert reduce_metrics([{}], all_reduce=lambda values, kind: pytest.fail("nothing to reduce")) == {}


def test_merging_does_not_change_its_parts():
    c = columns((4, 5))
    parts = [ours(c.rows(rows), "basic", num_sequences=4) for rows in (slice(0, 1), slice(1, 4))]
    before = [{name: metric.item() for name, metric in part.items()} for part in parts]
    reduce_metrics(parts, all_reduce=lambda values, kind: values.mul_(2))
    assert [{name: metric.item() for name, metric in part.items()} for part in parts] == before


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


def test_bad_levels_and_missing_columns():
    c = columns((2, 3))
    with pytest.raises(ValueError, match="metrics"):
        ours(c, "everything")
    batch = PolicyBatch(advantages=torch.ones(6))
    logps = torch.zeros(6, requires_grad=True)
    with pytest.raises(ValueError, match="segments"):
        ppo_loss_fn(logps, batch, PPOClip(), TokenMean(), metrics="basic")
    with pytest.raises(ValueError, match="entropy"):
        ppo_loss_fn(logps.view(2, 3), PolicyBatch(advantages=torch.ones(2)), PPOClip(), TokenMean(),
                    metrics="with_entropy")  # fmt: skip
