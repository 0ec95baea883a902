"""The script that times a sharded head: it runs, checks what it times, and counts bytes as they are."""

import json

import pytest
import torch

scaling = pytest.importorskip("benchmark.scaling", reason="the benchmark is not part of an install")
tensor_parallel = pytest.importorskip("benchmark.tensor_parallel", reason="the benchmark is not part of an install")


def test_bytes_on_the_wire():
    found = tensor_parallel.wire_bytes(tensor_parallel.Shape(8192, 4096, 128256), 2)
    assert found["forward"] == 8192 * 12  # two ranks send what they hold once
    assert found["forward_with_entropy"] == 8192 * 16
    assert found["forward_verl"] == 8192 * (4 * 63 + 12)  # 64128 vocabulary entries are 63 splits
    assert found["backward"] == 8192 * 4096 * 4


def test_two_ranks_on_any_machine(tmp_path, monkeypatch):
    if torch.cuda.device_count() == 1:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # two ranks need two GPUs, or none
    assert tensor_parallel.spawn(2, tmp_path / "found.json") == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ranks"] == 2
    assert [row["ranks"] for row in found["rows"][:2]] == [1, 2]
    assert all(row["step_ms"] > 0 for row in found["rows"])
    assert found["errors"].keys() == tensor_parallel.TOLERANCE.keys()


# --- predictions ------------------------------------------------------------------------------------------------------


def test_the_page_has_the_predictions_of_the_results():
    text = scaling.PAGE.read_text(encoding="utf-8")
    assert scaling.filled(text) == text, "run python -m benchmark.scaling"
