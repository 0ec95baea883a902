"""Ranks with different amounts of free memory keep the same layers, as many as the rank with the least."""

from unittest import mock

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the models are transformers'")

import streams  # noqa: E402
from test_layout_ranks import gradients  # noqa: E402
from test_models import VOCAB, tiny_llama, wrap  # noqa: E402

from liger_rl.step import memory  # noqa: E402
from liger_rl.step.memory import DeviceMemory, run_with_kept_layers  # noqa: E402
from liger_rl.step.ranks import Agreement, agree  # noqa: E402

TOKENS = 24


def steps_of(rank, wrapper):
    """-> (clause, loss, gradients) of a run with share 0, a measured run, and one with kept layers."""
    model = tiny_llama().to(rank.device).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model = wrap(model, rank, wrapper)
    ids = torch.randint(VOCAB, (2, TOKENS // 2), generator=torch.Generator().manual_seed(rank.index)).to(rank.device)
    layers = memory.find_layers(model)
    allocated, results = 0, []

    def read(device, *, restart_peak=False):
        # Memory grows with every reading. Rank 1 has room for one layer.
        nonlocal allocated
        allocated += 1 << 20
        return DeviceMemory(room[rank.index], allocated, allocated)

    room = [1 << 40, 1 << 40]
    with streams.on_device(rank.device), mock.patch.object(memory, "read_memory", read):
        for share in (0, 0.8, 0.8):
            model.zero_grad()
            wanted = Agreement(kept_layers=memory.count_kept_layers(model, TOKENS, share) or 0)
            agreed = agree([rank.group], wanted, rank.device).kept_layers
            loss, clause = run_with_kept_layers(
                model, lambda: model(input_ids=ids, labels=ids).loss, TOKENS, share=share, agreed=agreed
            )
            loss.backward()
            results.append((clause, loss.item(), gradients(model)))
            measurement = memory._measurements.get(layers[-1])
            if measurement is not None:
                gradient_bytes = sum(p.nbytes for p in model.parameters())
                needed = TOKENS * (measurement.peak_bytes + 1.5 * measurement.layer_bytes)
                room[1] = round(needed / 0.8) + gradient_bytes
    return len(layers), results


@pytest.mark.parametrize("wrapper", ["ddp", "root", "fsdp1"])
def test_the_rank_with_the_least_memory_decides(ranks, wrapper, two):
    for number, results in ranks.run(steps_of, wrapper, **two):
        (plain, loss, expected), *others = results
        assert plain == f"{number} layers recomputed, their inputs in CPU memory"
        assert [clause for clause, *_ in others] == [
            f"0 of {number} layers kept: this run is measured",
            f"1 of {number} layers kept",
        ]
        for _, other, grads in others:
            assert other == loss
            assert grads.keys() == expected.keys()
            assert all(torch.equal(grads[name], expected[name]) for name in grads)


def test_without_groups_ranks_agree_on_what_they_want():
    wanted = Agreement(live_forwards=3, kept_layers=2, refuses=True)
    assert agree([], wanted, torch.device("cpu")) is wanted


def agreed_on(rank):
    """Each rank wants other numbers."""
    number = rank.index + 1
    return agree(
        [rank.group],
        Agreement(live_forwards=number, padded_groups=number, capacity=number, kept_layers=number),
        rank.device,
    )


def test_ranks_agree_on_the_largest_numbers_and_on_the_least_room(ranks):
    for agreed in ranks.run(agreed_on):
        assert (agreed.live_forwards, agreed.padded_groups, agreed.capacity, agreed.kept_layers) == (2, 2, 1, 1)
        assert not agreed.refuses
