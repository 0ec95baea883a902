"""Lists of the kept blocks, by the Triton kernels and by loops."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
from liger_rl.kernels import block_lists

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def lists_of(keep, tokens):
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
        "tile": [tile for _, tile in kept],
        "by_row": [position[block] for block in sorted(kept)],
    }
    for kind, count in counts.items():
        found[f"{kind}_count"] = count
        found[f"{kind}_end"] = list(itertools.accumulate(count))
        found[f"{kind}_order"] = sorted(range(len(count)), key=lambda item, count=count: -count[item])
    return found | {"tile_count": [*counts["tile"], tokens]}


def check(keep, tokens=5, *, order_rows=True):
    """With `tokens` of three times as many that have a gradient."""
    expected, wanted = lists_of(keep, tokens), torch.zeros(3 * tokens, dtype=torch.bool, device=DEVICE)
    wanted[torch.randperm(3 * tokens)[:tokens]] = True
    torch.use_deterministic_algorithms(True)  # fills what is allocated, so that nothing unwritten is right by chance
    try:
        lists = block_lists.BlockLists.of(keep, wanted, order_rows=order_rows)
    finally:
        torch.use_deterministic_algorithms(False)
    assert lists._asdict().keys() == expected.keys()
    for name, values in lists._asdict().items():
        if name == "row_order" and not order_rows:
            assert values is None
            continue
        assert values.dtype == torch.int32, name
        assert values.numel() == (keep.numel() if name in ("row", "tile", "by_row") else len(expected[name])), name
        assert values[: len(expected[name])].tolist() == expected[name], name


SMALL = [(1, 1), (1, 70), (130, 1), (5, 4), (16, 17), (64, 33)]


@pytest.mark.parametrize(
    ("rows", "tiles", "share"), [(*shape, share) for shape in SMALL for share in (0.0, 0.2, 1.0)] + [(130, 70, 0.3)]
)
def test_lists(rows, tiles, share, monkeypatch):
    monkeypatch.setattr(block_lists, "STEP", 64)
    keep = torch.rand(rows, tiles) < share
    check(keep.to(DEVICE))
    check(keep.to(DEVICE), order_rows=False)


@pytest.mark.parametrize(("rows", "tiles"), [(257, 3), (3, 513)])
def test_more_than_a_program_reads_at_a_time(rows, tiles):
    check((torch.rand(rows, tiles) < 0.3).to(DEVICE), 300)


def test_no_rows():
    check(torch.empty(0, 5, dtype=torch.bool, device=DEVICE))
