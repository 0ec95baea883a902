"""The script that times a sharded head: it runs, checks what it times, and counts bytes as they are."""

import json

import pytest

tensor_parallel = pytest.importorskip("benchmark.tensor_parallel", reason="the benchmark is not part of an install")


def test_bytes_on_the_wire():
    found = tensor_parallel.wire_bytes(tensor_parallel.Shape(8192, 4096, 128256), 2)
    assert found["forward"] == 8192 * 12  # two ranks send what they hold once
    assert found["forward_with_entropy"] == 8192 * 16
    assert found["forward_verl"] == 8192 * (4 * 63 + 12)  # 64128 words are 63 splits
    assert found["backward"] == 8192 * 4096 * 4
    assert tensor_parallel.wire_bytes(tensor_parallel.Shape(8, 8, 8), 4)["backward"] == 1.5 * 8 * 8 * 4


def test_two_ranks_on_any_machine(tmp_path):
    assert tensor_parallel.spawn(2, tmp_path / "found.json") == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ranks"] == 2
    assert [row["ranks"] for row in found["rows"][:2]] == [1, 2]
    assert all(row["step_ms"] > 0 for row in found["rows"])
    assert found["errors"].keys() == tensor_parallel.TOLERANCE.keys()
