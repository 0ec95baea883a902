"""Metrics against a float64 loop, and their merging over micro-batches and ranks."""

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

EPSILON_LOW, EPSILON_HIGH, BETA = 0.15, 0.25, 0.1
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


MASKS = {
    "all": lambda shape: torch.ones(shape, dtype=torch.bool),
    "lengths": lambda shape: torch.arange(shape[1]) < ((torch.arange(shape[0]) * 5 + 2) % (shape[1] + 1))[:, None],
    "holes": lambda shape: (torch.arange(shape[0] * shape[1]) * 7 % 11 < 6).view(shape),
    "one token": lambda shape: torch.arange(shape[0] * shape[1]).view(shape) == shape[1] - 1,
    "none": lambda shape: torch.zeros(shape, dtype=torch.bool),
}


def columns(shape, mask="lengths"):
    g = torch.Generator().manual_seed(0)

    def normal():
        return torch.randn(shape, generator=g, dtype=torch.float64)

    logps = -normal().abs() - 0.1
    return Columns(logps, logps + 0.3 * normal(), logps + 0.3 * normal(), normal(), normal().abs(), MASKS[mask](shape))


def ours(c, level, *, packed=False, num_sequences=None, objective=None, beta=BETA, with_old=True):
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
    objective = objective or PPOClip(epsilon_low=EPSILON_LOW, epsilon_high=EPSILON_HIGH)
    logps = c.logps.clone().requires_grad_()
    kl = KLPenalty(beta=beta)
    return ppo_loss_fn(logps, batch, objective, TokenMean(), kl=kl, entropy=c.entropy, metrics=level).metrics


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
    assert all(metric.value.shape == () and not metric.total.requires_grad for metric in found.values())
    assert {name: float(metric) for name, metric in found.items()} == pytest.approx(expected, rel=rel, abs=1e-12)


CASES = [
    # every shape with every mask, the level, the layout and the divisor in turn
    (shape, mask, ("loss", "basic", "with_entropy")[(i + j) % 3], packed, divisor)
    for i, shape in enumerate([(1, 1), (1, 9), (6, 5), (11, 3)])
    for j, mask in enumerate(MASKS)
    for packed, divisor in ((False, (None, 17)[j % 2]), (True, (None, torch.tensor(17), None)[j % 3]))
]


@pytest.mark.parametrize(("shape", "mask", "level", "packed", "divisor"), CASES)
def test_against_the_loop(shape, mask, level, packed, divisor):
    c = columns(shape, mask)
    expected = loop(c, level, num_sequences=None if divisor is None else int(divisor))
    assert_equal(ours(c, level, packed=packed, num_sequences=divisor), expected)


def test_the_cases_are_not_trivial():
    expected = loop(columns((11, 3)), "with_entropy")
    assert all(value != 0 for value in expected.values())
    assert expected["clip_low"] != expected["clip_high"]
    dense = loop(columns((11, 3), "all"), "basic")  # the two are weighted alike
    assert dense["clip_ratio"] < dense["clipped_ratio_fraction"]


def test_float32():
    c = columns((6, 5))
    found = ours(c.map(lambda x: x if x.dtype == torch.bool else x.float()), "with_entropy")
    assert all(metric.total.dtype == torch.float32 for metric in found.values())
    assert_equal(found, loop(c, "with_entropy"), rel=2e-5)


def test_what_is_not_there_is_not_reported():
    c = columns((6, 5))
    assert ours(c, "none") == {}
    assert set(ours(c, "basic", beta=0.0)) == BASIC_NAMES - {"kl_ref"}
    assert set(ours(c, "loss", objective=SAPO())) == {"kl_ref"}
    assert set(ours(c, "basic", objective=SAPO())) == BASIC_NAMES - LOSS_NAMES - {"clipped_ratio_fraction"} | {"kl_ref"}
    for low, high in ((0.0, 1.1), (0.9, 1.2)):
        cispo = ours(c, "basic", objective=CISPO(ratio_min=low, epsilon_high=high))
        assert_equal(cispo, loop(c, "basic", low=low, high=high))
    without_old = ours(c, "with_entropy", with_old=False)
    assert_equal(without_old, loop(replace(c, old=c.logps), "with_entropy"))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_nothing_under_the_mask_is_counted(garbage):
    c = columns((6, 5), "holes")
    dirty = c.map(lambda x: x if x.dtype == torch.bool else x.masked_fill(~c.mask, garbage))
    assert_equal(ours(dirty, "with_entropy"), loop(c, "with_entropy"))


@pytest.mark.parametrize("rows", [0, 3])
def test_a_part_without_tokens_is_neutral(rows):
    found = ours(columns((rows, 4), "none"), "with_entropy")
    values = {name: metric.item() for name, metric in found.items()}
    assert values == dict.fromkeys(found, 0.0) | {"max_advantage": -math.inf, "min_advantage": math.inf}


def test_each_metric_knows_how_it_is_merged():
    found = ours(columns((6, 5)), "with_entropy")
    assert {name for name, metric in found.items() if metric.reduction == "max"} == {"max_advantage"}
    assert {name for name, metric in found.items() if metric.reduction == "min"} == {"min_advantage"}
    assert {name for name, metric in found.items() if metric.count is not None} == LOSS_NAMES


# --- merging ----------------------------------------------------------------------------------------------------------


MERGE = {"sum": lambda x: x.sum(0), "max": lambda x: x.amax(0), "min": lambda x: x.amin(0)}


def reduced(parts_of_ranks):
    """-> what every rank gets of `reduce_metrics`, and the kinds of which each was sent once."""
    sent = [{} for _ in parts_of_ranks]

    def record(rank):
        def all_reduce(values, kind):
            assert kind not in sent[rank]  # one collective per kind
            assert values.dim() == 1
            sent[rank][kind] = values
            return values

        return all_reduce

    for rank, parts in enumerate(parts_of_ranks):
        reduce_metrics(parts, all_reduce=record(rank))

    def answer(values, kind):
        return MERGE[kind](torch.stack([of_rank[kind] for of_rank in sent]))

    return [reduce_metrics(parts, all_reduce=answer) for parts in parts_of_ranks], [set(of_rank) for of_rank in sent]


SPLITS = {
    "one rank, uneven micro-batches": [[slice(0, 1), slice(1, 7), slice(7, 11)]],
    "uneven ranks and micro-batches": [[slice(0, 1)], [slice(1, 3), slice(3, 4), slice(4, 9)], [slice(9, 11)]],
    "a rank with masked rows only": [[slice(0, 6)], [slice(6, 7)], [slice(7, 11)]],
    "a rank without rows": [[slice(0, 11)], [slice(11, 11)]],
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("level", ["loss", "basic", "with_entropy"])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_parts_merge_to_the_whole(split, level, packed):
    c = columns((11, 6))
    c.mask[6] = False
    expected = loop(c, level)
    merged, kinds = reduced(
        [[ours(c.rows(rows), level, packed=packed, num_sequences=11) for rows in parts] for parts in split]
    )
    for found in merged:
        assert_equal(found, expected)
    assert kinds == [{"sum"} if level == "loss" else {"sum", "max", "min"}] * len(split)


def test_parts_may_be_an_iterator_and_names_may_be_missing():
    c = columns((11, 6))
    halves = ((slice(0, 4), "loss"), (slice(4, 11), "basic"))
    merged = reduce_metrics(ours(c.rows(rows), level, num_sequences=11) for rows, level in halves)
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


@pytest.mark.parametrize(
    ("name", "shape", "level"), [("metrics", (2, 3), "everything"), ("segments", (6,), "basic"),
                                 ("entropy", (2, 3), "with_entropy")]
)  # fmt: skip
def test_bad_levels_and_missing_columns(name, shape, level):
    batch = PolicyBatch(advantages=torch.ones(shape))
    with pytest.raises(ValueError, match=name):
        ppo_loss_fn(torch.zeros(shape, requires_grad=True), batch, PPOClip(), TokenMean(), metrics=level)
