"""Micro-batches that change ranks: who runs which, and that they arrive as they were."""

import random

import pytest
import torch

from liger_rl.integrations.trl.even_ranks import Cost, Rows, assign, exchange, read_costs, sum_costs
from ranks import WORLD

DTYPES = (torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64)
CPU = torch.device("cpu")


def draw_costs(ranks: int, numbers: int, prompts: int, seed: int) -> list[list[Cost]]:
    """Costs [rank][number]. Micro-batches of a rank have prompts in common."""
    draw = random.Random(seed)

    def draw_cost(rank: int) -> Cost:
        chosen = draw.sample(range(prompts), draw.randint(0, prompts))
        own = int(1000 * draw.lognormvariate(0, 0.7)) * (draw.random() > 0.1)
        return Cost(own, {(rank, prompt): 50 * (prompt + 1) for prompt in chosen})

    return [[draw_cost(rank) for _ in range(numbers)] for rank in range(ranks)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("ranks", "numbers"), [(2, 1), (2, 2), (2, 4), (3, 5), (8, 4), (33, 2)])
def test_the_slowest_rank_gets_faster_or_nothing_moves(ranks, numbers, seed):
    costs = draw_costs(ranks, numbers, seed % 4, seed)
    owners = assign(costs)
    # With each number every rank runs one micro-batch.
    assert all(sorted(row[number] for row in owners) == list(range(ranks)) for number in range(numbers))
    before, after = (
        max(sum_costs([costs[owner][number] for number, owner in enumerate(row)]) for row in table)
        for table in ([[rank] * numbers for rank in range(ranks)], owners)
    )
    moves = any(owner != rank for rank, row in enumerate(owners) for owner in row)
    assert after <= 0.97 * before if moves else after == before
    assert moves or (ranks, numbers) != (8, 4)  # many random sums always differ
    assert not (moves and numbers == 1)


def test_equal_costs_stay():
    assert assign([[Cost(10, {})] * 3] * 4) == [[rank] * 3 for rank in range(4)]


def test_costs_leave_out_padding_and_equal_prompts():
    prompt, other = torch.arange(20), torch.arange(20).flip(0)
    ids, attention, counted = (torch.zeros(4, 30, dtype=torch.int64) for _ in range(3))
    for row, (start, text, length) in enumerate([(0, prompt, 5), (2, prompt, 3), (4, other, 6), (1, prompt, 4)]):
        ids[row, start : start + 20] = text
        attention[row, start : start + 20 + length] = 1
        counted[row, start + 20 : start + 20 + length] = 1
    idle = torch.tensor([False, False, False, True])
    rows = Rows(ids, attention, counted != 0, idle)
    (shared,), (apart,) = (read_costs([rows], shares_prompts) for shares_prompts in (True, False))
    assert shared.own == 3 * (5 + 3 + 6) + 4
    assert sorted(shared.prompts.values()) == [20, 60, 60]  # the idle sequence runs apart
    assert apart == Cost(3 * (5 + 3 + 6 + 3 * 20) + 4 + 20, {})
    # Two micro-batches with the same prompt run it once.
    assert sum_costs([shared, shared]) == 2 * shared.own + 140


def make_batch(rank: int, number: int) -> dict:
    """Values of all dtypes, whose shapes and numbers are of this rank and number alone."""
    tensors = [torch.arange(rank + 2 * number + 1).to(dtype).expand(2, -1) + rank for dtype in DTYPES]
    values = {(0, str(place)): tensor for place, tensor in enumerate(tensors)}
    return values | {(0, "use_cache"): False, (1, "items"): torch.tensor(10 * rank + number), (1, "none"): None}


def exchange_on_rank(rank, change: str | None) -> tuple[list[int], list[dict]]:
    """The numbers of the micro-batches that have come from other ranks, and all micro-batches that this rank runs."""
    numbers = 3 - (change == "numbers" and rank.index == 1)
    batches = [make_batch(rank.index, number) for number in range(numbers)]
    costs = [Cost(100 * (rank.index == 0) + number, {}) for number in range(numbers)]
    others = {"value": 1, "dtype": torch.tensor(1.0), "object": object(), "sparse": torch.eye(2).to_sparse()}
    if rank.index == 2 and change in others:
        batches[0][1, "none"] = others[change]
    owners, received = exchange(batches, None if change == "costs" and rank.index == 3 else costs, CPU)
    assert received.keys() == {number for number, owner in enumerate(owners) if owner != rank.index}
    return sorted(received), [] if change else [received.get(number, batches[number]) for number in range(numbers)]


def test_micro_batches_arrive_as_they_were(ranks):
    results = [batches for _, batches in ranks.run(exchange_on_rank, None, world=WORLD)]
    sources = [[int(values[1, "items"]) // 10 for values in batches] for batches in results]
    assert sorted(row.count(0) for row in sources) == [0, 1, 1, 1]  # the slow rank's are shared out
    for number in range(3):
        assert sorted(row[number] for row in sources) == [*range(WORLD)]
        for row, batches in zip(sources, results, strict=True):
            values, expected = batches[number], make_batch(row[number], number)
            assert values.keys() == expected.keys()
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    assert value.dtype == expected[name].dtype
                    assert torch.equal(value, expected[name])
                else:
                    assert value is expected[name]


@pytest.mark.parametrize("change", ["numbers", "costs", "value", "dtype", "object", "sparse"])
def test_nothing_moves_where_it_may_not(ranks, change):
    assert ranks.run(exchange_on_rank, change, world=WORLD) == [([], [])] * WORLD
