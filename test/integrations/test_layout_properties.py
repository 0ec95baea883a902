"""Layouts without a model and a device: what every layout of random sequences has."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="a step's models are its")

from host_reads import host_reads
from liger_rl.step.attention import BLOCK
from liger_rl.step.facts import Facts
from liger_rl.step.layout import Layout, MicroBatch, count_padded_groups, lay_out
from liger_rl.step.reason import Reason
from liger_rl.step.sequences import Sequences, TokenBatch, read_sequences
from liger_rl.step.step import _lay_out

REFUSED = Reason("a test")
FACTS = Facts(
    name="a model", config=None, dtype=torch.float32, device=torch.device("cpu"), sharding=None,
    has_reentrant_checkpoints=False, unknown_layers=(), code=frozenset(), obstacle=None, no_tree=None,
    causal=True, reads_types=False, rotary=True, takes_positions=True, positions_are_known=True,
    has_no_positions=False, needs_positions=True, positions=0, longest_row=float("inf"), router_is_known=True,
    drops_left_padding=True, has_activated_lora=False,
    states=None,
)  # fmt: skip
PADDED = replace(FACTS, no_tree=REFUSED)


def draw(rows: int, seed: int, *, shared: int = 0, width: int = 60) -> tuple[TokenBatch, torch.Tensor]:
    """A batch whose rows begin with one of two prompts, padded on both sides, and weights, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 99, (rows, width), generator=generator)
    start = torch.randint(0, 6, (rows, 1), generator=generator)
    length = torch.randint(shared + 4, width - 6, (rows, 1), generator=generator)
    column = torch.arange(width)
    attended = (column >= start) & (column < start + length)
    prompts = torch.randint(3, 99, (2, shared), generator=generator)
    for row in range(rows):
        ids[row, start[row, 0] : start[row, 0] + shared] = prompts[row % 2]
    mask = attended & (column > start + shared) & (torch.rand(rows, 1, generator=generator) < 0.9)
    weights = (torch.rand(rows, 1, generator=generator) < 0.7).float()
    return TokenBatch(ids, mask, {"attention_mask": attended.long()}), weights


def read(batch: TokenBatch, facts: Facts = FACTS, weights: torch.Tensor | None = None) -> Sequences:
    return read_sequences(batch, facts, weights=weights)


def pack(batch: TokenBatch) -> TokenBatch:
    """The attended tokens in one row, one sequence after the other."""
    attended = batch.inputs["attention_mask"] != 0
    positions = attended.cumsum(1) - 1
    return TokenBatch(
        batch.ids[attended][None], batch.mask[attended][None], {"position_ids": positions[attended][None]}
    )


def count_tokens(layout: Layout) -> int:
    return sum(micro.tokens for micro in (*layout.live, *layout.idle))


def list_tokens(micro: MicroBatch, shape: torch.Size) -> list[int]:
    """The tokens of the batch that a micro-batch runs; one of a tree once for each of its sequences."""
    if micro.flat_index is None:
        return list(range(shape.numel()))
    return (micro.flat_index[micro.flat_index >= 0] if micro.tree is None else micro.tree.flat_index).tolist()


# name -> facts, options of `lay_out`
KINDS = {
    "padded": (PADDED, {}),
    "padded groups": (PADDED, {"padded_groups": 3}),
    "trees": (FACTS, {}),
    "trees in place of groups": (FACTS, {"padded_groups": 2}),
    "as they are": (replace(FACTS, obstacle=REFUSED), {}),
    "a budget": (PADDED, {"max_tokens": 120}),
    "a budget, trees": (FACTS, {"max_tokens": 120}),
    "padded groups and a budget": (PADDED, {"max_tokens": 120, "padded_groups": 2}),
    "no idle rows": (FACTS, {"runs_idle": False}),
    "trees apart": (FACTS, {"enough_tokens": 60.0}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_that_a_loss_reads_runs_once(kind):
    facts, options = KINDS[kind]
    for seed in range(12):
        batch, weights = draw(1 + seed, seed, shared=20 * (seed % 2))
        layout = lay_out(read(batch, facts, weights), facts, **options)
        shape = batch.ids.shape
        parts = (layout.live, layout.idle)
        live, idle = ([token for micro in part for token in list_tokens(micro, shape)] for part in parts)
        assert len({*live, *idle}) == len([*live, *idle])
        mask = batch.mask.index_fill(0, torch.tensor(layout.left_out, dtype=torch.long), False).reshape(-1)
        assert set(mask.nonzero()[:, 0].tolist()) <= {*live, *idle}
        assert set((mask & (weights != 0).expand(shape).reshape(-1)).nonzero()[:, 0].tolist()) <= set(live)
        if facts.obstacle is None:
            assert not (mask & (weights != 0).expand(shape).reshape(-1))[idle].any()
        assert all(micro.tokens <= (options.get("max_tokens", micro.tokens)) for micro in (*layout.live, *layout.idle))
        assert sorted(row for micro in layout.live for row in micro.rows) == list(range(shape[0]))
        for micro in (*layout.live, *layout.idle):
            if micro.tree is not None:  # each place has the token of each of its sequences
                places = torch.stack([micro.tree.places, micro.tree.flat_index])[:, 1:]
                row = batch.ids.reshape(-1)[micro.flat_index[0]]
                assert torch.equal(row[places[0]], batch.ids.reshape(-1)[places[1]])


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_sequences_have_the_same_layout(kind):
    facts, options = KINDS[kind]
    batch, weights = draw(9, 3, shared=20)
    first, second = (lay_out(read(batch, facts, weights), facts, **options) for _ in range(2))
    assert first.describe() == second.describe()
    for a, b in zip([*first.live, *first.idle], [*second.live, *second.idle], strict=True):
        assert (a.rows, a.lengths, a.tree is None) == (b.rows, b.lengths, b.tree is None)
        assert a.flat_index is b.flat_index is None or torch.equal(a.flat_index, b.flat_index)


@pytest.mark.parametrize("idle", [True, False], ids=["idle rows", "every row is live"])
@pytest.mark.parametrize("number", [1, 2, 3, 6])
def test_padded_groups_run_no_more_tokens_than_micro_batches(number, idle):
    """Whatever micro-batches the rows came in, each padded to its own longest row."""
    rows = 12
    for seed in range(25):
        batch, weights = draw(rows, seed)
        weights = weights if idle else None
        layout = lay_out(read(batch, PADDED, weights), PADDED, padded_groups=number)
        alone = 0
        for part in range(number):
            part_rows = slice(part * rows // number, (part + 1) * rows // number)
            inputs = {name: column[part_rows] for name, column in batch.inputs.items()}
            micro = TokenBatch(batch.ids[part_rows], batch.mask[part_rows], inputs)
            sequences = read(micro, PADDED, None if weights is None else weights[part_rows])
            alone += count_tokens(lay_out(sequences, PADDED))
        assert count_tokens(layout) <= alone
        live = {row for row in range(rows) if bool(batch.mask[row].any()) and (weights is None or weights[row] != 0)}
        assert len(layout.live) == min(number, len(live))


def test_padded_groups_are_the_best_of_all():
    choices = torch.cartesian_prod(*[torch.arange(3)] * 6).tolist()
    for seed in range(10):
        lengths = torch.randint(2, 40, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
        column = torch.arange(40)
        mask = (column > 0) & (column < torch.tensor(lengths)[:, None])
        batch = TokenBatch(torch.ones(6, 40, dtype=torch.long), mask, {})
        layout = lay_out(read(batch, PADDED), PADDED, padded_groups=3)
        splits = [[[n for n, g in zip(lengths, choice, strict=True) if g == k] for k in range(3)] for choice in choices]
        best = min(sum(len(group) * max(group, default=0) for group in groups) for groups in splits)
        assert (len(layout.live), count_tokens(layout)) == (3, best)


@pytest.mark.parametrize("router", [False, True])
@pytest.mark.parametrize("rows", [(8,), (3, 5)], ids=["one row", "rows of two micro-batches"])
def test_packed_rows_have_the_trees_of_padded_rows(rows, router):
    facts = replace(FACTS, has_router_loss=router)
    packed_facts = replace(facts, packed=frozenset(), drops_left_padding=False)
    for seed in range(6):
        batch, _ = draw(8, seed, shared=30)
        split = zip(*(x.split(rows) for x in (batch.ids, batch.mask, batch.inputs["attention_mask"])), strict=True)
        parts = [pack(TokenBatch(ids, mask, {"attention_mask": attended})) for ids, mask, attended in split]
        width = max(part.ids.shape[1] for part in parts)
        columns = [(part.ids, part.mask, part.inputs["position_ids"]) for part in parts]
        ids, mask, positions = (
            torch.cat([torch.nn.functional.pad(x, (0, width - x.shape[1]), value=value) for x in column])
            for column, value in zip(zip(*columns, strict=True), (0, False, -1), strict=True)
        )
        packed = TokenBatch(ids, mask, {"position_ids": positions})
        expected = lay_out(read(batch, facts), facts)
        layout = lay_out(read(packed, packed_facts), packed_facts, padded_groups=len(rows))
        assert layout.has_trees
        assert count_tokens(layout) == count_tokens(expected)
        places = torch.cat([torch.stack([m.tree.places, m.tree.flat_index]) for m in (*layout.live, *layout.idle)], 1)
        assert torch.equal(ids.view(-1)[layout.live[0].flat_index[0]][places[0]], ids.view(-1)[places[1]])
        run = torch.zeros(ids.numel(), dtype=torch.bool).index_fill(0, places[1], True).view(ids.shape)
        assert torch.equal(run, positions >= 0) if router else bool((run | ~mask).all())


def change_positions(batch, labels):
    batch.inputs["position_ids"][0, 5:9] += 1


def begin_late(batch, labels):
    batch.inputs["position_ids"] += 1


def count_first_tokens(batch, labels):
    batch.mask[batch.inputs["position_ids"] == 0] = True


def change_labels(batch, labels):
    labels[0, 40] += 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (change_positions, "its position_ids jump within a sequence"),
        (begin_late, "its position_ids jump within a sequence"),
        (count_first_tokens, "its labels count the first token of a sequence, which no token of it predicts"),
        (change_labels, "its labels are not its input_ids"),
    ],
)
def test_packed_rows_that_stay_as_they_are(change, reason):
    batch, facts = pack(draw(3, 0, shared=30)[0]), replace(FACTS, packed=frozenset())
    batch.mask[0, 40] = True
    labels = batch.ids.clone()
    assert read_sequences(batch, facts, labels=labels).obstacle is None
    change(batch, labels)
    layout = lay_out(read_sequences(batch, facts, labels=labels), facts, max_tokens=None)
    assert layout.describe() == f"the batch as it is: {reason}"


def test_a_packed_row_does_not_continue_the_row_above():
    ids, positions = torch.arange(3, 43).view(2, 20), torch.arange(40).view(2, 20)
    batch = TokenBatch(ids, positions % 20 > 0, {"position_ids": positions})
    read = read_sequences(batch, replace(FACTS, packed=frozenset()))
    assert str(read.obstacle) == "its position_ids jump within a sequence"


def test_rows_that_share_a_prefix_are_one_group():
    batch, _ = draw(8, 0, shared=30)
    layout = lay_out(read(batch), FACTS, padded_groups=4)
    assert [micro.tree is not None for micro in layout.live] == [True]


@pytest.mark.parametrize("seed", range(12))
def test_the_fewest_groups_that_are_no_worse_than_micro_batches(seed):
    batch, _ = draw(8, seed)
    sequences, sizes = read(batch, PADDED), (2, 3, 1, 2)
    number = count_padded_groups(sequences, sizes)
    lengths, alone = [span.length for span in sequences.spans], 0
    for stop, size in zip(itertools.accumulate(sizes), sizes, strict=True):
        alone += size * max(lengths[stop - size : stop])

    def count(groups):
        layout = lay_out(sequences, PADDED, padded_groups=groups, runs_idle=True)
        return sum(micro.tokens for micro in (*layout.live, *layout.idle))

    assert count(number) <= alone
    assert number == 1 or all(
        sum(max(lengths[a] for a in part) * len(part) for part in groups if part) > alone
        for groups in every_split(sorted(range(8), key=lengths.__getitem__), number - 1)
    )


def every_split(rows, number):
    """Runs of rows in `number` groups."""
    for cuts in itertools.combinations(range(1, len(rows)), number - 1):
        yield [rows[a:b] for a, b in itertools.pairwise((0, *cuts, len(rows)))]


def test_more_groups_than_rows():
    batch, _ = draw(3, 1)
    layout = lay_out(read(batch, PADDED), PADDED, padded_groups=9)
    assert [len(micro.lengths) for micro in layout.live] == [1] * len(layout.live)


def test_labels_that_are_not_the_ids_keep_the_batch():
    batch, _ = draw(4, 2)
    other = batch.ids.clone()
    assert read_sequences(batch, FACTS, labels=other.masked_fill(~batch.mask, -100)).obstacle is None
    row, column = batch.mask.nonzero()[0].tolist()
    other[row, column] += 1
    layout = lay_out(read_sequences(batch, FACTS, labels=other), FACTS, padded_groups=2)
    assert layout.describe() == "the batch as it is: its labels are not its input_ids"
    assert [micro.flat_index for micro in layout.live] == [None]


def test_one_copy_to_the_host(device):
    batch, weights = draw(5, 4)
    inputs = {name: column.to(device) for name, column in batch.inputs.items()}
    batch, weights = TokenBatch(batch.ids.to(device), batch.mask.to(device), inputs), weights.to(device)
    with host_reads(device) as reads:
        read_sequences(batch, FACTS, weights=weights, labels=batch.ids)
    assert len(reads.names) == (device.type == "cuda")  # on CPU the copy is none


def test_the_page_says_what_share_of_the_tokens_remains():
    """On a GPU, where a tree may have any length."""
    page = (Path(__file__).parents[2] / "docs" / "trl.md").read_text(encoding="utf-8")
    section = page.split("## How much will I gain?")[1].split("\n## ")[0].replace(",", "")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+)% \| (\d+)% \| (\d+)% \|$", section, re.MULTILINE)
    assert len(rows) == 5
    for row in rows:
        prompt, longest, mean, *shares = map(int, row)
        for group, share in zip((4, 8, 16), shares, strict=True):
            ids = torch.randint(3, 100_000, (group, prompt + longest), generator=torch.Generator().manual_seed(group))
            ids[:, :prompt] = ids[0, :prompt]
            length = torch.full((group, 1), (group * mean - longest) // (group - 1))
            length[0] = longest
            column = torch.arange(prompt + longest)
            attended = column < prompt + length
            batch = TokenBatch(ids, attended & (column >= prompt), {"attention_mask": attended.long()})
            layout = lay_out(read(batch)._replace(device="cuda"), FACTS)
            expected, rounding = share / 100 * ids.numel(), BLOCK + 0.006 * ids.numel()
            assert count_tokens(layout) == pytest.approx(expected, abs=rounding)


@pytest.mark.parametrize(("enough", "number"), [(0.0, 4), (122.0, 4), (123.0, 2), (244.0, 2), (245.0, 1), (1e9, 1)])
def test_trees_run_in_as_many_micro_batches_as_have_enough_tokens(enough, number):
    """Four prompts of 30 tokens, three sequences each. Where three have enough, two groups fill more than a third."""
    ids = torch.randint(3, 100_000, (12, 60), generator=torch.Generator().manual_seed(0))
    ids[:, :30] = ids[:4, :30].repeat_interleave(3, 0)
    mask = (torch.arange(60) >= 30).expand(ids.shape)
    batch = TokenBatch(ids, mask, {"attention_mask": torch.ones_like(ids)})
    layout = lay_out(read(batch), FACTS, enough_tokens=enough)
    assert count_tokens(layout) == 488  # a branch begins with its prompt's last token once more
    assert len(layout.live) == number
    assert all(len({row // 3 for row in micro.rows}) * 3 == len(micro.rows) for micro in layout.live)


def test_sequences_without_a_gradient_do_not_make_a_step_too_large():
    """They run with the others where the host is slower, unless memory would be too small for all, or recomputed."""
    batch, weights = draw(12, 5)
    facts = replace(PADDED, host_tokens=1e9)
    sequences = read(batch, facts, weights)
    inputs = SimpleNamespace(
        max_tokens=None,
        runs_idle=True,
        one_micro_batch=None,
        pairs=False,
        shapes=((1, 60),) * 12,
        activation_tokens=None,
        enough_tokens=float("inf"),
        share=0.8,
    )
    joined, _ = _lay_out(inputs, facts, sequences, 3)
    apart, _ = _lay_out(inputs, replace(facts, host_tokens=0.0), sequences, 3)
    recomputed, _ = _lay_out(SimpleNamespace(**vars(inputs) | {"share": 0.0}), facts, sequences, 3)
    assert not joined.idle
    assert len(apart.idle) == len(recomputed.idle) > 0
    for activation_tokens, expected in ((joined.live_tokens, joined), (joined.live_tokens - 1, apart)):
        inputs.activation_tokens = activation_tokens
        found, in_parts = _lay_out(inputs, facts, sequences, 3)
        assert (found.live_tokens, len(found.idle), in_parts) == (expected.live_tokens, len(expected.idle), False)
