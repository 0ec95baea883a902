"""Lists of the kept blocks, by the Triton kernels and by loops."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
from liger_rl.kernels import block_lists

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def lists_of(keep, first):
    """As BlockLists names them."""
    (rows, tiles), keep = keep.shape, keep.tolist()
    kept = [(row, tile) for tile in range(tiles) for row in range(rows) if keep[row][tile]]
    position = {block: place for place, block in enumerate(kept)}
    counts = {
        "row": [sum(block[0] == row for block in kept) for row in range(rows)],
        "tile": [sum(block[1] == tile for block in kept) for tile in range(tiles)],
    }
    found = {
        "row": [row for row, _ in kept],
        "tile": [first + tile for _, tile in kept],
        "by_row": [position[block] for block in sorted(kept)],
    }
    for kind, count in counts.items():
        found[f"{kind}_count"] = count
        found[f"{kind}_end"] = list(itertools.accumulate(count))
        found[f"{kind}_order"] = sorted(range(len(count)), key=lambda item, count=count: -count[item])
    return found


def check(keep, first):
    expected = lists_of(keep, first)
    torch.use_deterministic_algorithms(True)  # fills what is allocated, so that nothing unwritten is right by chance
    try:
        exact = block_lists.BlockLists.of(keep, first, len(expected["row"]))
        roomy = block_lists.BlockLists.of(keep, first, keep.numel())
    finally:
        torch.use_deterministic_algorithms(False)
    for found in (exact._asdict(), roomy._asdict()):
        assert found.keys() == expected.keys()
        for name, values in found.items():
            assert values.dtype == torch.int32, name
            assert values[: len(expected[name])].tolist() == expected[name], name
    assert all(part.numel() == len(expected[name]) for name, part in exact._asdict().items())


SMALL = [(1, 1), (1, 70), (130, 1), (5, 4), (16, 17), (64, 33)]


@pytest.mark.parametrize(
    ("rows", "tiles", "share"), [(*shape, share) for shape in SMALL for share in (0.0, 0.2, 1.0)] + [(130, 70, 0.3)]
)
def test_lists(rows, tiles, share, monkeypatch):
    monkeypatch.setattr(block_lists, "STEP", 64)
    keep = torch.rand(rows, tiles) < share
    check(keep.to(DEVICE), 0)


@pytest.mark.parametrize(("rows", "tiles"), [(257, 3), (3, 513)])
def test_more_than_a_program_reads_at_a_time(rows, tiles):
    check((torch.rand(rows, tiles) < 0.3).to(DEVICE), 7)


@pytest.mark.parametrize("first", [0, 1, 16, 21])
def test_tiles_of_a_wider_matrix(first):
    wide = torch.rand(20, 41, device=DEVICE) < 0.4
    check(wide[:, first : first + 20], first)
    check(wide.T.contiguous().T[:, first : first + 20], first)


def test_no_rows():
    check(torch.empty(0, 5, dtype=torch.bool, device=DEVICE), 0)
