"""The script that times a sharded head: it runs, checks what it times, and counts bytes as they are."""

import pytest

tensor_parallel = pytest.importorskip("benchmark.tensor_parallel", reason="the benchmark is not part of an install")


def test_bytes_on_the_wire():
    found = tensor_parallel.wire_bytes(tensor_parallel.Shape(8192, 4096, 128256), 2)
    assert found["forward"] == 8192 * 12  # two ranks send what they hold once
    assert found["forward_with_entropy"] == 8192 * 16
    assert found["forward_verl"] == 8192 * (4 * 63 + 12)  # 64128 vocabulary entries are 63 splits
    assert found["backward"] == 8192 * 4096 * 4


def checked_and_timed(rank):
    """-> the errors, and the rows of a shape."""
    place = tensor_parallel.Place(rank.index, rank.world, rank.device)
    shapes = tensor_parallel.CHECKED["cpu"], tensor_parallel.TIMED["cpu"][0]
    return tensor_parallel.check(shapes[0], place), tensor_parallel.measure(shapes[1], place)


def test_ranks_are_checked_and_timed(ranks):
    for errors, rows in ranks.run(checked_and_timed, world=4):
        assert errors.keys() == tensor_parallel.TOLERANCE.keys()
        assert [row["ranks"] for row in rows] == [1, 4]
        assert all(row["step_ms"] > 0 for row in rows)
